//! Runs tasks on threads.
//!
//! The result of a task does not depend on the thread that runs it, and no two tasks write the same row, so outputs are bitwise
//! identical for any number of threads.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Threads of the host program: calls `work` on up to so many of them at once, the calling thread among them, and returns when each call
/// has returned. May call it fewer times, but at least once. Returns false, without having called it, to leave the work to rayon.
pub type Executor = fn(threads: usize, work: &(dyn Fn() + Sync)) -> bool;

static EXECUTOR: OnceLock<Executor> = OnceLock::new();

/// Runs the tasks of all calls in this process on threads of the host program instead of rayon's. A program that keeps a pool of its own
/// (OpenMP's threads spin for milliseconds after each parallel region) would otherwise have twice as many threads as cores. Results are
/// the same. Returns false if another executor has been set before, which then stays.
pub fn set_executor(executor: Executor) -> bool {
    EXECUTOR.set(executor).is_ok()
}

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
    let threads = threads.min(tasks.div_ceil(grain));
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
    // One copy of it, wherever it is called.
    let work: &(dyn Fn() + Sync) = &work;
    if threads > 1 && !EXECUTOR.get().is_some_and(|run| run(threads, work)) {
        #[cfg(feature = "rayon")]
        return rayon::in_place_scope(|scope| {
            (1..threads).for_each(|_| scope.spawn(|_| work()));
            work();
        });
    }
    // On one thread, and what an executor has left.
    work();
}
