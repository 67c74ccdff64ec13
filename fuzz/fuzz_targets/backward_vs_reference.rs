//! The kernel's gradients against the definition's on small problems, of everything a call depends on; NaN in keys that
//! nobody sees; the same bits from another machine.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::reference::Outcome;
use regard::plan::OutputGrads;
use regard::problem::Normalizer;
use regard::{Number, Plan, View};
use regard_fuzz::{Case, ROOM, Sizes, machines, numbers};
use regard_testkit::GradCheck;
use regard_testkit::run::same_grad_bits;

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let case = Case::arbitrary(u)?;
    let (problem, (q, k, v)) = (case.problem(), case.inputs());
    let plans = machines(u)?.map(|machine| Plan::new(problem.clone(), machine).unwrap());
    let [plan, _] = &plans;

    let Sizes { batch, heads, q_len, .. } = case.sizes;
    let rows = batch * heads * q_len;
    let sparse = case.normalizer == Normalizer::Sparsemax;
    let with_lse = bool::arbitrary(u)? && !sparse;
    let given = |i: u32, n: usize, used: bool| {
        if used { numbers(case.seed ^ i, n, 1.0) } else { vec![0.0; n] }
    };
    let d = Outcome {
        out: given(9, rows * case.v_dim, true),
        lse: given(10, rows, with_lse),
        entropy: given(11, rows, case.entropy),
        max_score: Vec::new(),
    };
    let d_out = View::bhsd(&d.out, [batch, heads, q_len, case.v_dim]).unwrap();
    let mut upstream = OutputGrads::new(d_out).with_bias();
    if with_lse {
        upstream = upstream.lse(&d.lse);
    }
    if case.entropy {
        upstream = upstream.entropy(&d.entropy);
    }
    let [(output, ours), (_, again)] = plans.each_ref().map(|plan| {
        let output = plan.forward(q, k, v).unwrap();
        let grads = plan.backward(q, k, v, &output, upstream).unwrap();
        (output, grads)
    });

    let [out, lse, entropy] =
        [&d.out, &d.lse, &d.entropy].map(|d| d.iter().map(|x| Number::to_f64(*x)).collect());
    let judged = output.selection.as_ref().map_or(problem.clone(), |c| problem.with_selection(c));
    let exact = Outcome { out, lse, entropy, max_score: Vec::new() };
    let judge = GradCheck::new(&judged, (q, k, v), (&exact, &d));
    let (ratio, which) = judge.ratio(&ours).unwrap();
    // The gradient of a sparsemax jumps where a score is at the threshold, which rounding decides.
    assert!(ratio <= ROOM || sparse, "{plan:#}\n{ratio} of the bound by {which}");
    assert!(same_grad_bits(&ours, &again), "{plan:#}");
    Ok(())
}
