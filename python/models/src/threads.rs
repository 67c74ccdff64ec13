//! A thread pool for each process: threads of a process stay behind when it forks, and a child that waited for them would wait forever.

use crate::refused;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Arc, Mutex, PoisonError};

/// So many threads, started at the first call in each process.
#[derive(Debug)]
pub(crate) struct Threads {
    count: usize,
    pool: Mutex<Option<(u32, Arc<ThreadPool>)>>,
}

impl Threads {
    /// All of the machine, unless a number is given.
    pub(crate) fn new(count: Option<usize>) -> PyResult<Self> {
        let count = match count {
            Some(0) => return Err(refused("threads: 0 is out of range; give 1 or more, or None")),
            Some(count) => count,
            None => std::thread::available_parallelism().map_or(1, Into::into),
        };
        Ok(Self { count, pool: Mutex::new(None) })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn pool(&self) -> PyResult<Arc<ThreadPool>> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some((_, own)) = pool.as_ref().filter(|(of, _)| *of == process) {
            return Ok(own.clone());
        }
        let new = ThreadPoolBuilder::new().num_threads(self.count).build().map_err(refused)?;
        let new = Arc::new(new);
        // That of the parent is never dropped: to drop it is to wait for its threads.
        std::mem::forget(pool.replace((process, new.clone())));
        Ok(new)
    }

    /// Works on these threads, without the interpreter.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> T + Send,
    ) -> PyResult<T> {
        let pool = self.pool()?;
        Ok(py.detach(|| pool.install(work)))
    }
}
