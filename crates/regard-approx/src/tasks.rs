//! Tasks with a result of their own each.

use regard::Machine;
use std::sync::{Mutex, PoisonError};

/// Runs `task` on each of `own`, and returns them.
pub(crate) fn run_each<T: Send, M>(
    machine: Machine,
    own: Vec<T>,
    scratch: impl Fn() -> M + Sync,
    task: impl Fn(&mut M, usize, &mut T) + Sync,
) -> Vec<T> {
    let own: Vec<_> = own.into_iter().map(Mutex::new).collect();
    machine.run(own.len(), scratch, |scratch, i| {
        let mut own = own[i].lock().unwrap_or_else(PoisonError::into_inner);
        task(scratch, i, &mut own);
    });
    own.into_iter().map(|x| x.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
}
