//! A text as it is generated, by a thread of its own.

use crate::refused;
use pyo3::prelude::*;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

/// What the thread sends: pieces of text, or why there are no more.
pub(crate) type Item = Result<String, String>;

/// Pieces that may wait to be read.
const WAITING: usize = 64;

/// Text in the order in which it is generated. Dropping it ends generation at the next token.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct TextIterator(Mutex<Receiver<Item>>);

impl TextIterator {
    pub(crate) fn new() -> (SyncSender<Item>, Self) {
        let (sender, receiver) = sync_channel(WAITING);
        (sender, Self(Mutex::new(receiver)))
    }
}

#[pymethods]
impl TextIterator {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let next = py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).recv());
        // The thread has ended: so has the text.
        next.ok().transpose().map_err(refused)
    }
}
