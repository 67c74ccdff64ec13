//! Files that are there whole or not at all.

use crate::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A name beside a path that no other writer has, in this process or another.
pub(crate) fn beside(path: &Path) -> Result<PathBuf, Error> {
    static WRITERS: AtomicUsize = AtomicUsize::new(0);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.ok_or_else(|| Error::file(path, &"not the name of a file"))?;
    let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
    Ok(path.with_file_name(format!(".{name}.{}.{writer}", std::process::id())))
}

/// Writes a file beside its place and moves it there, so that nobody ever sees half of it.
pub(crate) fn atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), Error> {
    let beside = beside(path)?;
    // What a crash has left there is ours; anything else that comes between is not followed.
    let _ = std::fs::remove_file(&beside);
    let written = File::create_new(&beside)
        .and_then(|file| {
            let mut file = BufWriter::new(file);
            write(&mut file)?;
            file.flush()?;
            file.get_ref().sync_all()
        })
        .and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|e| {
        // Nothing is left behind; that it may not be there is no second error.
        let _ = std::fs::remove_file(&beside);
        Error::file(path, &e)
    })
}
