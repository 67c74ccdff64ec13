//! Runs tasks on threads.
//!
//! The result of a task does not depend on the thread that runs it, and no two tasks write the same row, so outputs are bitwise
//! identical for any number of threads.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// As [`run`], for tasks that return a value. The values are returned in task order.
pub(crate) fn collect<M, T: Send>(
    threads: usize,
    tasks: usize,
    memory: impl Fn() -> M + Sync,
    task: impl Fn(&mut M, usize) -> T + Sync,
) -> Vec<T> {
    let made: Vec<_> = (0..tasks).map(|_| Mutex::new(None)).collect();
    run(threads, tasks, memory, |memory, i| {
        let new = task(memory, i);
        *made[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(new);
    });
    made.into_iter()
        .filter_map(|x| x.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect()
}

/// Runs `task(memory, i)` for each `i` in `0..tasks` on up to `threads` threads, the calling thread included. `memory` is
/// called once for each thread that runs a task.
///
/// The calling thread starts immediately, so the wake-up latency of the others matters only if there is work left for them.
pub(crate) fn run<M>(
    threads: usize,
    tasks: usize,
    memory: impl Fn() -> M + Sync,
    task: impl Fn(&mut M, usize) + Sync,
) {
    run_then(threads, tasks, memory, task, drop);
}

/// Tasks that a thread claims at a time: several small ones, to reduce contention on the counter.
fn grain(threads: usize, tasks: usize) -> usize {
    (tasks / threads.saturating_mul(16)).clamp(1, 16)
}

/// When the last of so many workers is done with tasks of these costs, which it claims as the threads of [`run`] do.
pub(crate) fn finish_time(workers: usize, costs: &[u128]) -> u128 {
    let workers = workers.clamp(1, costs.len().max(1));
    let mut free_at = BinaryHeap::from(vec![Reverse(0u128); workers]);
    for claimed in costs.chunks(grain(workers, costs.len())) {
        if let Some(mut next) = free_at.peek_mut() {
            next.0 += claimed.iter().sum::<u128>();
        }
    }
    free_at.into_iter().map(|Reverse(time)| time).max().unwrap_or(0)
}

/// As [`run`]; at the end, `done` is given the memory of each thread.
pub(crate) fn run_then<M>(
    threads: usize,
    tasks: usize,
    memory: impl Fn() -> M + Sync,
    task: impl Fn(&mut M, usize) + Sync,
    done: impl Fn(M) + Sync,
) {
    let threads = threads.max(1);
    let grain = grain(threads, tasks);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut mine = None;
        loop {
            let first = next.fetch_add(grain, Ordering::Relaxed);
            if first >= tasks {
                break;
            }
            let memory = mine.get_or_insert_with(&memory);
            (first..(first + grain).min(tasks)).for_each(|i| task(memory, i));
        }
        mine.map(&done);
    };
    #[cfg(feature = "rayon")]
    rayon::in_place_scope(|scope| {
        for _ in 1..threads.min(tasks.div_ceil(grain)) {
            scope.spawn(|_| work());
        }
        work();
    });
    #[cfg(not(feature = "rayon"))]
    work();
}
