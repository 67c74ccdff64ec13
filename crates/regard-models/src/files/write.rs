//! Files that are there whole or not at all, with the error of this crate.

use crate::error::Error;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

/// A name beside a path that no other writer has, in this process or another.
pub(crate) fn beside(path: &Path) -> Result<PathBuf, Error> {
    regard_scope::temporary(path).map_err(|e| Error::file(path, &e))
}

/// Writes a file beside its place and moves it there, so that nobody ever sees half of it.
pub(crate) fn atomically(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<(), Error> {
    regard_scope::write_atomically_with(path, write).map_err(|e| Error::file(path, &e))
}
