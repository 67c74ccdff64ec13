//! Files that are there whole or not at all.

use crate::error::Error;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// What the name of a temporary file ends with.
const ENDING: &str = ".regard";
/// Letters of a file's own name in that of its temporary file, at most: file systems end names at 255 bytes.
const OWN: usize = 40;
/// Links that are followed, one to the next, as Linux does.
const LINKS: usize = 40;

/// Writes a file beside its place and moves it there, so that nobody ever sees half of it; see [`write_atomically_with`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_atomically_with(path, |file| file.write_all(bytes)).map_err(|e| Error::file(path, &e))
}

/// Writes a file beside its place, flushes it to the disk and moves it there: after a crash there is the old file or the new one. A link
/// is followed, and a file that is there keeps its mode and, if the system allows, its owner. A device or a pipe is written into, and
/// stays; a directory is refused.
pub fn write_atomically_with(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    match std::fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "this is a directory; name a file in it",
        )),
        Ok(there) if there.is_file() => replace(&std::fs::canonicalize(path)?, Some(&there), write),
        Ok(_) => {
            let mut file = BufWriter::new(OpenOptions::new().write(true).open(path)?);
            write(&mut file)?;
            file.flush()
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => replace(&end_of_links(path)?, None, write),
        Err(e) => Err(e),
    }
}

/// A name beside a path that no other writer has, in this process or another, here or on another machine.
pub fn temporary(path: &Path) -> io::Result<PathBuf> {
    static WRITERS: AtomicUsize = AtomicUsize::new(0);
    let name = path.file_name().ok_or_else(|| io::Error::other("not the name of a file"))?;
    let name: String = name.to_string_lossy().chars().take(OWN).collect();
    let (process, writer) = (std::process::id(), WRITERS.fetch_add(1, Ordering::Relaxed));
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    Ok(path.with_file_name(format!(".{name}.{process}.{time}.{writer}{ENDING}")))
}

/// Removes what writers that were killed have left in a folder. Only for whoever knows that nobody writes there now. What cannot be
/// removed stays: it is in nobody's way.
pub fn remove_temporaries(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if file && entry.file_name().to_str().is_some_and(is_temporary) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Whether a name is one of [`temporary`]'s: a dot, a name, three numbers, the ending.
#[must_use]
pub fn is_temporary(name: &str) -> bool {
    let inner = name.strip_prefix('.').and_then(|name| name.strip_suffix(ENDING));
    let Some(inner) = inner else { return false };
    let mut fields = inner.rsplitn(4, '.');
    let number = |field: &str| !field.is_empty() && field.bytes().all(|b| b.is_ascii_digit());
    fields.by_ref().take(3).filter(|field| number(field)).count() == 3 && fields.next().is_some()
}

/// Where a link to nothing leads.
fn end_of_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..LINKS {
        match std::fs::read_link(&path) {
            Ok(to) => path = path.parent().unwrap_or(Path::new("")).join(to),
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other(format!("more than {LINKS} links, one to the next; name the file itself")))
}

fn replace(
    path: &Path,
    there: Option<&Metadata>,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> io::Result<()> {
    let beside = temporary(path)?;
    let written = File::create_new(&beside).and_then(|file| {
        // Before anything is in it: what only its owner may read is never open to others.
        there.map_or(Ok(()), |there| keep_mode(&file, there))?;
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        std::fs::rename(&beside, path)
    });
    if written.is_err() {
        // That it may not be there is no second error.
        let _ = std::fs::remove_file(&beside);
        return written;
    }
    sync_folder(path)
}

fn keep_mode(file: &File, there: &Metadata) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt, fchown};
        // Only root may give files away; others write files of their own.
        let _ = fchown(file, Some(there.uid()), Some(there.gid()));
    }
    file.set_permissions(there.permissions())
}

/// Flushes the name of a file to the disk: without it a lost machine may forget the move.
fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()) {
        // Folders that may be written and not read, and file systems that do not know how.
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::PermissionDenied
                    | io::ErrorKind::InvalidInput
                    | io::ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs::{create_dir, metadata, read, read_dir, read_link, set_permissions, write};
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("regard-write-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        create_dir(&path).expect("a folder");
        path
    }

    fn mode(path: &Path) -> u32 {
        metadata(path).expect("a file").permissions().mode() & 0o777
    }

    #[test]
    fn a_file_keeps_its_mode() {
        let folder = scratch("mode");
        for bits in [0o600, 0o640, 0o755] {
            let file = folder.join(format!("{bits:o}"));
            write(&file, "old").unwrap();
            set_permissions(&file, PermissionsExt::from_mode(bits)).unwrap();
            write_atomically(&file, b"new").unwrap();
            assert_eq!((read(&file).unwrap(), mode(&file)), (b"new".to_vec(), bits));
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_link_stays_and_the_file_that_it_leads_to_is_written() {
        let folder = scratch("link");
        create_dir(folder.join("far")).unwrap();
        write(folder.join("far/real"), "old").unwrap();
        symlink("far/real", folder.join("link")).unwrap();
        symlink("link", folder.join("second")).unwrap();
        symlink("far/later", folder.join("to-nothing")).unwrap();
        symlink("round", folder.join("round")).unwrap();
        for (link, to, real) in [
            ("link", "far/real", "far/real"),
            ("second", "link", "far/real"),
            ("to-nothing", "far/later", "far/later"),
        ] {
            write_atomically(&folder.join(link), link.as_bytes()).unwrap();
            assert_eq!(read_link(folder.join(link)).unwrap(), Path::new(to));
            assert_eq!(read(folder.join(real)).unwrap(), link.as_bytes());
        }
        assert!(write_atomically(&folder.join("round"), b"").is_err());
        assert_eq!(read_dir(folder.join("far")).unwrap().count(), 2);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_pipe_is_written_into_and_stays() {
        let folder = scratch("pipe");
        let pipe = folder.join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || read(pipe).unwrap()
        });
        write_atomically(&pipe, b"through").unwrap();
        assert!(metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(reader.join().unwrap(), b"through");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_directory_is_refused() {
        let folder = scratch("directory");
        let told = write_atomically(&folder, b"new").unwrap_err().to_string();
        assert!(told.contains("regard-write-directory") && told.contains("name a file"), "{told}");
        assert_eq!(read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_write_that_fails_leaves_what_was_there_and_nothing_else() {
        let folder = scratch("fails");
        let file = folder.join("file");
        write(&file, "old").unwrap();
        let full = |file: &mut BufWriter<File>| {
            file.write_all(b"half")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        };
        let told = write_atomically_with(&file, full).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::StorageFull);
        assert_eq!(read(&file).unwrap(), b"old");
        assert_eq!(read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn only_temporary_files_of_our_own_are_removed() {
        let folder = scratch("temporary");
        let long = folder.join("x".repeat(250));
        let ours =
            [temporary(&folder.join("last.safetensors")).unwrap(), temporary(&long).unwrap()];
        ours.iter().for_each(|path| write(path, "half").unwrap());
        let others = [".bashrc", ".a.1.2.regard", ".a.1.b.2.regard", "a.1.2.3.regard", ".a.1.2.3"];
        others.iter().for_each(|name| write(folder.join(name), "whole").unwrap());
        create_dir(folder.join(".a.1.2.3.regard")).unwrap();
        remove_temporaries(&folder);
        assert!(ours.iter().all(|path| !path.exists()));
        assert_eq!(read_dir(&folder).unwrap().count(), others.len() + 1);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
