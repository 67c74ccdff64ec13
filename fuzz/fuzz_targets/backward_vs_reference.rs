//! The kernel's gradients against the definition's on small problems, of everything a call depends on; NaN in keys that
//! nobody sees; the same bits from another machine.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::reference::{self, Outcome};
use regard::{Grads, Plan, Tensor, Upstream, View};
use regard_fuzz::{Case, FARTHEST, Sizes, bits, machines, numbers};

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let case = Case::arbitrary(u)?;
    let (problem, (q, k, v)) = (case.problem(), case.inputs());
    let machines = machines(u)?;
    let plans = machines.map(|machine| Plan::new(problem.clone(), machine).unwrap());
    let [plan, _] = &plans;

    let Sizes { batch, heads, q_len, .. } = case.sizes;
    let rows = batch * heads * q_len;
    let with_lse = bool::arbitrary(u)?;
    let given = |i: u32, n: usize, used: bool| {
        if used { numbers(case.seed ^ i, n, 1.0) } else { vec![0.0; n] }
    };
    let d_out = given(9, rows * case.v_dim, true);
    let (d_lse, d_entropy) = (given(10, rows, with_lse), given(11, rows, case.entropy));
    let d_view = View::bhsd(&d_out, [batch, heads, q_len, case.v_dim]).unwrap();
    let mut upstream = Upstream::new(d_view).with_bias();
    if with_lse {
        upstream = upstream.lse(&d_lse);
    }
    if case.entropy {
        upstream = upstream.entropy(&d_entropy);
    }
    let [ours, again] = plans.each_ref().map(|plan| {
        let output = plan.forward(q, k, v).unwrap();
        lists(plan.backward(q, k, v, &output, upstream).unwrap())
    });
    let [out, lse, entropy] =
        [d_out, d_lse, d_entropy].map(|d| d.into_iter().map(f64::from).collect());
    let exact =
        reference::backward::<f64, f32>(&problem, (q, k, v), &Outcome { out, lse, entropy });
    let exact = [
        exact.q,
        exact.k,
        exact.v,
        exact.w,
        exact.bias,
        exact.alibi,
        exact.relative,
        exact.sinks,
        vec![exact.scale, exact.temperature],
    ];
    for (((what, ours), exact), most) in NAMES.iter().zip(&ours).zip(&exact).zip(bounds(&case)) {
        assert_eq!(ours.len(), exact.len(), "{plan:#}\nby {what}");
        for (i, (ours, exact)) in ours.iter().zip(exact).enumerate() {
            let (error, allowed) = ((f64::from(*ours) - exact).abs(), case.tolerance() * most);
            assert!(
                error <= allowed,
                "{plan:#}\nby {what}[{i}]: {ours}, not {exact}, where {allowed:e} is allowed"
            );
        }
    }
    for ((what, ours), again) in NAMES.iter().zip(&ours).zip(&again) {
        assert_eq!(bits(ours), bits(again), "{plan:#}\nby {what}");
    }
    Ok(())
}

const NAMES: [&str; 9] =
    ["q", "k", "v", "w", "bias", "alibi", "relative", "sinks", "scale and temperature"];

fn lists(g: Grads<f32>) -> [Vec<f32>; 9] {
    let optional = |t: Option<Tensor<f32>>| t.map_or_else(Vec::new, Tensor::into_data);
    #[expect(clippy::cast_possible_truncation, reason = "compared with a tolerance of f32")]
    let numbers = vec![g.scale as f32, g.temperature as f32];
    let [q, k, v] = [g.q, g.k, g.v].map(Tensor::into_data);
    [q, k, v, optional(g.w), optional(g.bias), g.alibi, g.relative, g.sinks, numbers]
}

/// How large each gradient can be, the errors of its terms taken as independent: what a tolerance is relative to.
fn bounds(case: &Case) -> [f64; 9] {
    let problem = case.problem();
    let Sizes { batch, heads, q_len, k_len } = case.sizes;
    // The gradients of a row's scores by size, summed: from d_a and its mean, from d_lse, from d_entropy (ln a + H).
    let row = 2.0 * problem.growth() * case.v_dim as f64 + 1.0 + 2.0 * (k_len as f64 + 2.0).ln();
    let amplitude = f64::from(case.amplitude);
    let (scale, similarity) = (problem.scale().abs(), case.largest_similarity());
    // A query meets the keys, or four times as much of a difference, or W times the key; the same for a key.
    let [by_query, by_key] = [case.dim, case.q_dim].map(|n| scale * amplitude * n.max(4) as f64);
    let all = ((batch * heads * q_len) as f64).sqrt() * row;
    let served = (((heads / case.kv_heads) * q_len) as f64).sqrt();
    let by_scale = similarity * all;
    [
        by_query * row,
        by_key * served * row,
        served * problem.growth(),
        scale * amplitude * amplitude * all,
        all,
        FARTHEST * all,
        all,
        all,
        by_scale * (1.0 + problem.scale().abs() * 2.0),
    ]
}
