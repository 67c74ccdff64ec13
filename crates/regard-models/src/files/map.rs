//! The bytes of a file, in memory or mapped.

#![expect(unsafe_code, reason = "mapping a file is")]

use crate::error::Error;
use memmap2::Mmap;
use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

/// Bytes that many share.
#[derive(Clone, Debug)]
pub(crate) enum Bytes {
    Owned(Arc<Vec<u8>>),
    Mapped(Arc<Mmap>),
}

impl Bytes {
    /// Maps a file: it is read page by page when it is used. It must not be changed in place meanwhile; a new file of the same name is
    /// another file.
    pub(crate) fn map(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|e| Error::file(path, &e))?;
        // SAFETY: the mapping is read-only and private to this type, which hands out plain bytes: any value of them is valid, and all
        // that is made of them is checked. What remains is a file that is changed in place by another program, which every reader of
        // mapped files takes as excluded; programs that replace it (this one, `huggingface_hub`) write a new file and rename it.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::file(path, &e))?;
        Ok(Self::Mapped(Arc::new(map)))
    }

    /// Some of these bytes will hardly be read again: their memory is given back. They stay in the page cache of the system.
    pub(crate) fn release(&self, part: &[u8]) {
        #[cfg(unix)]
        if let Self::Mapped(map) = self
            && let Some(at) = part.as_ptr().addr().checked_sub(map.as_ptr().addr())
            && at.checked_add(part.len()).is_some_and(|end| end <= map.len())
        {
            // SAFETY: of a read-only mapping of a file, pages that are given back are read from the file again when they are used.
            // Without success nothing is lost but memory.
            let _ = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, at, part.len())
            };
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Owned(Arc::new(bytes))
    }
}
