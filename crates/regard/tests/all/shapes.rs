//! No call panics: unusual sizes are computed or rejected.

use proptest::prelude::*;
use regard::problem::{Align, Scope, Similarity};
use regard::{Isa, Machine, Mask, Plan, Problem, View};
use regard_testkit::cases::{SimilarityCase, dims};
use regard_testkit::run::forward;
use regard_testkit::scores::SCORES;
use regard_testkit::{Arrangement, Case, Data, Noise};

fn cases() -> impl Strategy<Value = Case> {
    let sizes = [0..3usize, 0..4, 0..3, 0..7, 0..9, 0..4, 0..4];
    let arrangements = [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice];
    let aligns = prop_oneof![
        Just(Align::End),
        Just(Align::Start),
        (-9i64..9).prop_map(Align::Offset),
        any::<i64>().prop_map(Align::Offset)
    ];
    let options = (0..SCORES.len(), 0..4usize, 0..3usize, aligns, any::<u64>());
    (sizes, options).prop_map(move |(sizes, (scores, similarity, arrangement, align, seed))| Case {
        seed: seed >> 1,
        ..Case::new(dims(sizes))
            .scores(SCORES[scores])
            .similarity(SimilarityCase::ALL[similarity])
            .arrangement(arrangements[arrangement])
            .align(align)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn exotic_shapes_are_computed_or_refused(case in cases(), tree in crate::strategies::masks()) {
        let mut data = Data::<f32>::new(&case);
        data.mask = tree.build(&case.dims, &mut Noise::new(case.seed));
        let problem = data.problem(&case);
        if problem.check().is_err() {
            return Ok(());
        }
        for isa in Isa::available() {
            let output = forward(&problem, data.inputs(), isa, 2);
            prop_assert!(output.out.data().iter().all(|x| x.is_finite()), "{}", case);
            let is_lse = |x: &f32| x.is_finite() || *x == f32::NEG_INFINITY;
            prop_assert!(output.lse.iter().all(is_lse), "{}", case);
        }
    }
}

fn scope(len: usize) -> Scope {
    Scope { batch: 0, head: 0, q_len: len, k_len: len, offset: 0 }
}

#[test]
fn a_window_wider_than_the_sequence_sees_everything() {
    for width in [10, 1 << 40, 1 << 62, usize::MAX / 2, usize::MAX] {
        let mask = Mask::full().window(width);
        assert!(mask.is_visible(&scope(10), 5, 0), "window {width}");
        assert_eq!(mask.visible(&scope(10), 5), vec![0..10], "window {width}");
    }
}

#[test]
fn a_block_wider_than_the_sequence_sees_everything() {
    for width in [10, 1 << 40, 1 << 62, usize::MAX / 2, usize::MAX] {
        for mask in [Mask::blocks(width), Mask::columns(width, width)] {
            assert!(mask.is_visible(&scope(10), 5, 0), "{mask}");
            assert_eq!(mask.visible(&scope(10), 5), vec![0..10], "{mask}");
        }
    }
}

#[test]
fn a_stride_wider_than_the_sequence_sees_the_own_key() {
    for stride in [10, 1 << 40, usize::MAX / 2, usize::MAX] {
        let mask = Mask::dilated(stride);
        assert!(!mask.is_visible(&scope(10), 5, 0), "dilated {stride}");
        assert_eq!(mask.visible(&scope(10), 5), vec![5..6], "dilated {stride}");
    }
}

#[test]
fn a_machine_without_threads_uses_the_callers() {
    let data = [0.5f32; 4 * 8];
    let x = View::matrix(&data, [4, 8]).unwrap();
    let mut machine = Machine::detect();
    machine.threads = 0;
    let plan = Plan::new(Problem::new(&x, &x, &x), machine).unwrap();
    assert_eq!(plan.forward(x, x, x).unwrap().out.data(), data);
    // Keys split into parts, and a projection: both hold partial sums of `d_q` of a few items at a time.
    let data: Vec<f32> = (0..1100 * 4).map(|i| (i as f32).sin()).collect();
    let (x, w) = (View::matrix(&data, [1100, 4]).unwrap(), View::matrix(&data, [4, 4]).unwrap());
    for similarity in [Similarity::Dot, Similarity::General(w)] {
        let problem = Problem::new(&x, &x, &x).similarity(similarity);
        let grads = [0, 1, usize::MAX].map(|threads| {
            let mut machine = Machine::detect();
            machine.threads = threads;
            let plan = Plan::new(problem.clone(), machine).unwrap();
            plan.backward(x, x, x, &plan.forward(x, x, x).unwrap(), x).unwrap()
        });
        assert!(grads[0] == grads[1] && grads[1] == grads[2], "{similarity}");
    }
}

#[test]
fn gradients_of_nothing_are_zero_whatever_the_other_sizes() {
    let huge = usize::MAX / 8;
    for (q, k) in [
        ([0, 1, huge, 1], [0, 1, huge, 1]),
        ([0, huge, 1, 1], [0, huge, 1, 1]),
        ([0, huge, 2, 1], [0, 1, huge, 1]),
        ([1, 2, 0, 3], [1, 2, 5, 3]),
        ([1, 0, 4, 3], [1, 2, 5, 3]),
        ([huge, 1, 0, 1], [huge, 1, 0, 1]),
    ] {
        let data = [1f32; 40];
        let (q, k) = (View::bhsd(&data, q).unwrap(), View::bhsd(&data, k).unwrap());
        let plan = Plan::new(Problem::new(&q, &k, &k), Machine::detect()).unwrap();
        let grads = plan.backward(q, k, k, &plan.forward(q, k, k).unwrap(), q).unwrap();
        assert_eq!((grads.k.shape(), grads.v.shape()), (k.shape(), k.shape()));
        assert!(grads.k.data().iter().chain(grads.v.data()).all(|x| *x == 0.0));
    }
}

#[test]
fn a_plan_for_a_batch_beyond_memory_takes_none() {
    let huge = usize::MAX;
    for (heads, len) in [(1, 7), (huge, huge), (1, 0), (0, huge)] {
        let shape = regard::Shape { batch: huge, heads, len, dim: 4 };
        let problem = Problem::<f32>::of_shapes(shape, shape, shape);
        let plan = Plan::new(problem, Machine::detect()).unwrap();
        assert!(plan.to_string().starts_with("forward"));
        if heads == 0 || len == 0 {
            assert_eq!(plan.work().pairs, 0);
            assert!(format!("{plan:#}").contains("0 visible of 0"));
        }
    }
}

#[test]
fn what_a_call_is_made_of_can_go_to_other_threads() {
    fn goes<T: Send + Sync>() {}
    goes::<regard::View<'_, f32>>();
    goes::<regard::Problem<'_, f32>>();
    goes::<regard::Plan<'_, regard::bf16>>();
    goes::<regard::Output<f64>>();
    goes::<regard::Grads<regard::f16>>();
    goes::<regard::KvCache<f32>>();
    goes::<regard::Error>();
}
