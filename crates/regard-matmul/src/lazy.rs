//! What is computed of activations when it is first needed.

use std::mem::take;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A list that is computed at most once until it is cleared. Keeps its memory then.
#[derive(Debug)]
pub(crate) struct Lazy<T> {
    list: OnceLock<Vec<T>>,
    /// Memory for the list.
    spare: Mutex<Vec<T>>,
}

impl<T> Default for Lazy<T> {
    fn default() -> Self {
        Self { list: OnceLock::new(), spare: Mutex::default() }
    }
}

impl<T: Clone> Clone for Lazy<T> {
    fn clone(&self) -> Self {
        Self { list: self.list.clone(), spare: Mutex::default() }
    }
}

impl<T> Lazy<T> {
    pub(crate) fn clear(&mut self) {
        if let Some(list) = self.list.take() {
            *self.spare.get_mut().unwrap_or_else(PoisonError::into_inner) = list;
        }
    }

    /// Fills the list if it is not filled, given a list of any length and content.
    ///
    /// Threads that do so at the same time all compute it: one that waited for another could wait for itself, as `fill` may run
    /// other jobs of the thread pool meanwhile.
    pub(crate) fn fill(&self, fill: impl FnOnce(&mut Vec<T>)) {
        if self.list.get().is_none() {
            let mut list = take(&mut *self.spare.lock().unwrap_or_else(PoisonError::into_inner));
            fill(&mut list);
            _ = self.list.set(list);
        }
    }

    /// The list; nothing if it is not filled.
    pub(crate) fn get(&self) -> &[T] {
        self.list.get().map_or(&[], Vec::as_slice)
    }
}
