//! Tasks on threads of the host program. A process has one executor, so this is a program of its own.

#![expect(clippy::unwrap_used, reason = "a call that fails has failed the test")]

use regard::machine::set_executor;
use regard::{Machine, Mask, Plan, Problem, View};
use std::sync::atomic::{AtomicUsize, Ordering};

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Three threads of its own, and one for two; more it leaves to rayon.
fn on_own_threads(threads: usize, work: &(dyn Fn() + Sync)) -> bool {
    if threads > 3 {
        return false;
    }
    CALLS.fetch_add(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        (1..threads.max(2) - 1).for_each(|_| drop(scope.spawn(work)));
        work();
    });
    true
}

/// Output, lse and gradient of the keys.
fn results(threads: usize) -> [Vec<f32>; 3] {
    let numbers = |n: u16| (0..n).map(|i| f32::from(i % 1013) / 1013.0).collect::<Vec<_>>();
    let (shape, data) = ([2, 3, 300, 16], numbers(28_800));
    let x = View::bhsd(&data, shape).unwrap();
    let problem = Problem::new(&x, &x, &x).mask(Mask::causal());
    let plan = Plan::new(problem, Machine::detect().threads(threads)).unwrap();
    let output = plan.forward(x, x, x).unwrap();
    let grads = plan.backward(x, x, x, &output, regard::plan::OutputGrads::new(x)).unwrap();
    [output.out.data().to_vec(), output.lse.clone(), grads.k.data().to_vec()]
}

#[test]
fn tasks_run_on_threads_of_the_host_program_with_the_same_results() {
    let expected = results(1);
    assert_eq!(results(3), expected);
    assert!(set_executor(on_own_threads));
    assert!(!set_executor(|_, _| true), "the first one stays");
    assert_eq!(CALLS.load(Ordering::Relaxed), 0);
    assert_eq!(results(1), expected);
    assert_eq!(CALLS.load(Ordering::Relaxed), 0, "one thread is that of the caller");
    for threads in [2, 3] {
        let before = CALLS.load(Ordering::Relaxed);
        assert_eq!(results(threads), expected);
        assert!(CALLS.load(Ordering::Relaxed) > before);
    }
    let before = CALLS.load(Ordering::Relaxed);
    assert_eq!(results(8), expected, "left to rayon");
    assert_eq!(CALLS.load(Ordering::Relaxed), before);
}
