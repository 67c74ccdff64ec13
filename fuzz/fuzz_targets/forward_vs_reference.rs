//! The kernel against the definition on small problems: every mask, score and similarity, any instruction set and
//! thread count; NaN in keys that nobody sees; the same bits from another machine.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::{Isa, Machine, Plan, Problem, RelativeBias, Score, Similarity, View, reference};
use regard_fuzz::{Sizes, align, mask, numbers};

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    // Mostly a few rows and keys, sometimes more than two groups of rows and three cells of keys.
    let long = u.ratio(1, 8)?;
    let mut up_to = |n: usize| u.int_in_range(0..=n);
    let (q_len, k_len) = if long { (up_to(140)?, up_to(200)?) } else { (up_to(20)?, up_to(70)?) };
    let (batch, kv, group) = (1 + up_to(1)?, 1 + up_to(1)?, 1 + up_to(1)?);
    let (dim, v_dim) = (1 + up_to(19)?, up_to(20)?);
    let heads = kv * group;
    let at = Sizes { batch, heads, q_len, k_len };
    let mask = mask(u, at, false, 2)?;
    let align = align(u, false)?;
    let amplitude = *u.choose(&[1.0, 1e-3, 30.0])?;
    let seed = u32::arbitrary(u)?;

    let project = bool::arbitrary(u)? && u.ratio(1, 3)?;
    let q_dim = if project { 1 + u.int_in_range(0..=9usize)? } else { dim };
    let w = numbers(seed ^ 1, q_dim * dim, 1.0);
    let similarity = match (project, u.ratio(1, 4)?) {
        (true, _) => Similarity::General(View::matrix(&w, [q_dim, dim]).unwrap()),
        (_, true) => Similarity::Distance,
        _ => Similarity::Dot,
    };

    let mut score = Score::new();
    let mut added = 0.0; // a bound on what the options add to a score
    if u.ratio(1, 4)? {
        score = score.scale(*u.choose(&[0.0, 1.0, -0.5, 0.01])?);
    }
    if u.ratio(1, 4)? {
        score = score.temperature(*u.choose(&[0.5, 2.0, 10.0])?);
    }
    if u.ratio(1, 4)? {
        score = score.softcap(*u.choose(&[1.0, 30.0])?);
    }
    let one = |u: &mut Unstructured<'_>, n: usize| Ok(if bool::arbitrary(u)? { n } else { 1 });
    let shape = [one(u, batch)?, one(u, heads)?, one(u, q_len)?, one(u, k_len)?];
    let mut bias = numbers(seed ^ 2, shape.iter().product(), 3.0);
    let (has_bias, hides) = (u.ratio(1, 3)?, u.ratio(1, 3)?);
    if hides {
        bias.iter_mut().filter(|x| **x < -2.0).for_each(|x| *x = f32::NEG_INFINITY);
    }
    if has_bias {
        score = score.bias(View::bhsd(&bias, shape).unwrap());
        added += 3.0;
    }
    let slopes = numbers(seed ^ 3, heads, 1.0);
    if u.ratio(1, 4)? {
        score = score.alibi(&slopes);
        added += 640.0;
    }
    let reach = u.int_in_range(0..=20usize)?;
    let table = numbers(seed ^ 4, (2 * reach + 1) * heads, 3.0);
    if u.ratio(1, 4)? {
        score = score.relative(RelativeBias::clipped(&table, reach));
        added += 3.0;
    }
    let sinks = numbers(seed ^ 5, heads, 5.0);
    if u.ratio(1, 4)? {
        score = score.sinks(&sinks);
        added += 5.0;
    }

    let q = numbers(seed ^ 6, batch * heads * q_len * q_dim, amplitude);
    let mut k = numbers(seed ^ 7, batch * kv * k_len * dim, amplitude);
    let mut v = numbers(seed ^ 8, batch * kv * k_len * v_dim, 1.0);
    let problem = Problem::of_shapes(
        View::bhsd(&q, [batch, heads, q_len, q_dim]).unwrap().shape(),
        View::bhsd(&k, [batch, kv, k_len, dim]).unwrap().shape(),
        View::bhsd(&v, [batch, kv, k_len, v_dim]).unwrap().shape(),
    )
    .mask(mask.clone())
    .score(score)
    .similarity(similarity)
    .align(align);

    // NaN where no row of any head looks.
    if bool::arbitrary(u)? {
        for (b, key) in (0..batch).flat_map(|b| (0..k_len).map(move |key| (b, key))) {
            let seen = (0..heads).any(|h| {
                let scope = problem.scope(b, h);
                (0..q_len).any(|row| mask.sees(&scope, row, key))
            });
            for head in (0..kv).filter(|_| !seen) {
                let at = (b * kv + head) * k_len + key;
                k[at * dim..][..dim].fill(f32::NAN);
                v[at * v_dim..][..v_dim].fill(f32::INFINITY);
            }
        }
    }
    let q = View::bhsd(&q, [batch, heads, q_len, q_dim]).unwrap();
    let k = View::bhsd(&k, [batch, kv, k_len, dim]).unwrap();
    let v = View::bhsd(&v, [batch, kv, k_len, v_dim]).unwrap();

    let isas = Isa::available();
    let isa = *u.choose(&isas)?;
    let machine = Machine::here().isa(isa).threads(u.int_in_range(1..=3)?);
    let plan = Plan::new(problem.clone(), machine).unwrap();
    let ours = plan.forward(q, k, v).unwrap();
    let exact = reference::forward::<f64, f32>(&problem, (q, k, v));

    // The largest score there can be, and what rounding it in f32 may do to a weight.
    let per_pair = match similarity {
        Similarity::Distance => 4.0,
        Similarity::Dot => 1.0,
        _ => q_dim as f64,
    };
    let largest =
        problem.scale().abs() * per_pair * f64::from(amplitude).powi(2) * dim as f64 + added;
    let tolerance = 1e-5 * (1.0 + largest);
    for (i, (ours, exact)) in ours.out.data().iter().zip(&exact.out).enumerate() {
        let error = (f64::from(*ours) - exact).abs();
        assert!(error <= tolerance, "{plan:#}\nout[{i}] is {ours}, not {exact}");
    }
    for (i, (ours, exact)) in ours.lse.iter().zip(&exact.lse).enumerate() {
        let same = f64::from(*ours) == *exact; // -inf
        let error = (f64::from(*ours) - exact).abs();
        assert!(same || error <= tolerance, "{plan:#}\nlse[{i}] is {ours}, not {exact}");
    }

    // Another machine, the same bits; `portable` has no fused multiply-add and agrees with itself only.
    let other = isas.iter().copied().find(|i| *i != isa && i.name() != "portable");
    let other = if isa.name() == "portable" { isa } else { other.unwrap_or(isa) };
    let again = Plan::new(problem, Machine::here().isa(other).threads(1)).unwrap();
    let again = again.forward(q, k, v).unwrap();
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(ours.out.data()), bits(again.out.data()), "{plan:#}\non {}", other.name());
    assert_eq!(bits(&ours.lse), bits(&again.lse), "{plan:#}\non {}", other.name());
    Ok(())
}
