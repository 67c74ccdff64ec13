//! Memory grows with the sequence, never with its square. Linux only: the numbers come from `/proc/self/status`.
#![cfg(target_os = "linux")]

use regard::cache::CacheShape;
use regard::plan::{OutputMut, ScratchPool};
use regard::problem::Scope;
use regard::tensor::{Element, ViewMut};
use regard::{AttentionView, Error, Isa, KvCache, Machine, Mask, Plan, Problem, Score, View, bf16};
use regard_scope::{Measure, Pool};
use regard_testkit::run::both_ways;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The system's allocator, counting the allocations of each thread.
struct Counting;

thread_local!(static ALLOCATIONS: Cell<usize> = const { Cell::new(0) });

// SAFETY: `System` does the work, with the arguments as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations of this thread while `work` runs.
fn allocations(work: impl FnOnce() -> Result<(), Error>) -> Result<usize, Error> {
    let before = ALLOCATIONS.with(Cell::get);
    work()?;
    Ok(ALLOCATIONS.with(Cell::get) - before)
}

fn a_repeated_call_allocates_nothing<E: Element>(q_len: usize, one: E) -> Result<(), Error> {
    let (heads, k_len, dim) = (4, 200, 64);
    let q = vec![one; heads * q_len * dim];
    let kv = vec![one; 2 * k_len * dim];
    let q = View::bhsd(&q, [1, heads, q_len, dim])?;
    let kv = View::bhsd(&kv, [1, 2, k_len, dim])?;
    let mut cache =
        KvCache::new(CacheShape { heads: 2, qk_dim: dim, v_dim: dim, page: 64 }, 1 << 20)?;
    let sequences = [cache.start()?];
    cache.append(sequences[0], kv, kv)?;
    let mut out = vec![one; q.shape().to_array().iter().product()];
    let mut lse = vec![E::Num::default(); heads * q_len];
    let machine = Machine::detect().threads(1);
    let pool = ScratchPool::new();
    let score = || Score::new().softcap(30.0);
    let of_tensors = Problem::new(&q, &kv, &kv).mask(Mask::causal()).score(score());
    let of_tensors = Plan::new(of_tensors, machine)?.with_scratch(&pool);
    let of_cache = Problem::cached(&q, &cache, &sequences)?.score(score());
    let of_cache = Plan::new(of_cache, machine)?.with_scratch(&pool);
    for repeated in [false, true] {
        let found = allocations(|| {
            let to = OutputMut {
                out: ViewMut::bhsd(&mut out, [1, heads, q_len, dim])?,
                lse: &mut lse,
                entropy: None,
            };
            of_tensors.forward_into(q, (kv, kv), to)
        })?;
        assert!(!repeated || found == 0, "{q_len} queries over tensors: {found} allocations");
        let found = allocations(|| {
            let to = OutputMut {
                out: ViewMut::bhsd(&mut out, [1, heads, q_len, dim])?,
                lse: &mut lse,
                entropy: None,
            };
            of_cache.forward_into(q, (&cache, &sequences[..]), to)
        })?;
        assert!(!repeated || found == 0, "{q_len} queries over a cache: {found} allocations");
    }
    Ok(())
}

#[test]
fn repeated_calls_on_one_thread_allocate_nothing() {
    for q_len in [1, 3, 16, 130] {
        a_repeated_call_allocates_nothing(q_len, 0.5f32).unwrap();
    }
    // More queries than are decoded together: keys and values are packed for AMX.
    for q_len in [1, 3] {
        a_repeated_call_allocates_nothing(q_len, bf16::from_f32(0.5)).unwrap();
    }
}

/// A line of `/proc/self/status`, in bytes.
fn status(name: &str) -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<usize>().ok()? << 10)
}

const MIB: usize = 1 << 20;

/// Whoever measures is alone, and begins without the peaks of others.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    std::fs::write("/proc/self/clear_refs", "5").expect("the peak can be forgotten");
    guard
}

#[test]
fn a_head_of_131072_tokens_needs_less_than_64_mib_beyond_its_tensors() {
    let _alone = alone();
    let n = 131_072;
    let data = vec![0.5f32; n * 64];
    let x = View::matrix(&data, [n, 64]).unwrap();
    let problem = Problem::new(&x, &x, &x).mask(Mask::causal().window(64));
    let plan = Plan::new(problem, Machine::detect()).unwrap();
    let before = status("VmRSS").unwrap();
    let output = plan.forward(x, x, x).unwrap();
    let tensors = (output.out.data().len() + output.lse.len()) * size_of::<f32>();
    let extra = status("VmHWM").unwrap().saturating_sub(before + tensors);
    println!("extra: {:.1} MiB", extra as f64 / MIB as f64);
    assert!(extra < 64 * MIB, "{extra} bytes");
}

#[test]
fn both_ways_of_65536_tokens_need_less_than_200_mib_beyond_their_tensors() {
    let _alone = alone();
    let n = 65_536;
    let data = vec![0.5f32; n * 64];
    let x = View::matrix(&data, [n, 64]).unwrap();
    let problem = Problem::new(&x, &x, &x).mask(Mask::causal().window(64));
    let before = status("VmRSS").unwrap();
    let (output, grads) = both_ways(&problem, (x, x, x), x.into(), Isa::best(), 2);
    let tensors = [&output.out, &grads.q, &grads.k, &grads.v].map(|t| t.data().len());
    let numbers = tensors.iter().sum::<usize>() + output.lse.len() + output.states.len();
    let extra = status("VmHWM").unwrap().saturating_sub(before + numbers * size_of::<f32>());
    println!("extra: {:.1} MiB", extra as f64 / MIB as f64);
    assert!(extra < 200 * MIB, "{extra} bytes");
}

#[test]
fn statistics_of_131072_tokens_need_less_than_100_mib_with_their_results() {
    let _alone = alone();
    let n = 131_072;
    let data = vec![0.5f32; n * 64];
    let x = View::matrix(&data, [n, 64]).unwrap();
    let problem = Problem::new(&x, &x, &x).mask(Mask::causal().window(64));
    let plan = Plan::new(problem, Machine::detect()).unwrap();
    let output = plan.forward(x, x, x).unwrap();
    let view = AttentionView::new(&plan, x, x, &output).unwrap();
    let before = status("VmRSS").unwrap();
    let all = Measure::new().entropy().top_k(8).col_sum().pooled(1024, 1024, Pool::Max);
    let found = all.of(&view).unwrap();
    let extra = status("VmHWM").unwrap().saturating_sub(before);
    println!("extra: {:.1} MiB", extra as f64 / MIB as f64);
    assert_eq!(found.pooled[0].values.len(), 1 << 20);
    assert!(extra < 100 * MIB, "{extra} bytes");
}

#[test]
fn masks_of_ten_million_tokens_need_less_than_400_mib() {
    let _alone = alone();
    let n = 10_000_000;
    let scope = Scope { batch: 0, head: 0, q_len: n, k_len: n, offset: 0 };
    let documents: Vec<u32> = (0..n).map(|i| u32::try_from(i / 1000 % 5000).unwrap()).collect();
    let globals: Vec<usize> = (0..n).step_by(10_000).collect();
    let before = status("VmRSS").unwrap();
    let masks = [
        Mask::causal().window(4096),
        Mask::lengths(&[n / 2]).and(Mask::causal()),
        Mask::causal().or(Mask::prefix(1000)),
        Mask::causal().and(Mask::segments(&documents)),
        Mask::blocks(1024).or(Mask::global(&globals)),
        Mask::causal().and(Mask::strided(3162)),
        Mask::causal().and(Mask::fixed(3162, 32)),
        Mask::longformer(512, &globals),
    ];
    for mask in &masks {
        for row in [0, 1, n / 2, n - 1] {
            let ranges = mask.visible(&scope, row);
            let sees = |key| ranges.iter().any(|r| r.contains(&key));
            for key in [0, 1, n / 2, row, n - 1] {
                assert_eq!(
                    sees(key),
                    mask.is_visible(&scope, row, key),
                    "{mask}: row {row}, key {key}"
                );
            }
        }
    }
    let extra = status("VmHWM").unwrap().saturating_sub(before);
    println!("extra: {:.1} MiB for {} masks", extra as f64 / MIB as f64, masks.len());
    assert!(extra < 400 * MIB, "{extra} bytes");
}
