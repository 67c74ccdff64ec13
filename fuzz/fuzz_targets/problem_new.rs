//! Whatever a description says, checking, planning and printing it never panics, and a mask that passed the check
//! answers for its rows as its definition does.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::problem::{Additive, Local, Similarity};
use regard::score::RelativeBias;
use regard::{Machine, Plan, Problem, Score, Shape, View};
use regard_fuzz::{Sizes, align, mask, normalizer, size};

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn shape(u: &mut Unstructured<'_>) -> Result<Shape> {
    let mut next = || size(u, true);
    Ok(Shape { batch: next()?, heads: next()?, len: next()?, dim: next()? })
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let q = shape(u)?;
    // Half of the time the three fit each other, so that the checks behind the first ones are reached.
    let (k, v) = if bool::arbitrary(u)? {
        let k = Shape { len: size(u, true)?, ..q };
        (k, Shape { dim: size(u, true)?, ..k })
    } else {
        (shape(u)?, shape(u)?)
    };
    let at = Sizes { batch: q.batch, heads: q.heads, q_len: q.len, k_len: k.len };
    let mask = mask(u, at, true, 3)?;
    let table = vec![0.5f32; usize::from(u16::arbitrary(u)? % 2048)];
    let mut score = Score::new();
    if bool::arbitrary(u)? {
        score = score.scale(f64::arbitrary(u)?);
    }
    if bool::arbitrary(u)? {
        score = score.temperature(f64::arbitrary(u)?);
    }
    if bool::arbitrary(u)? {
        score = score.softcap(f64::arbitrary(u)?);
    }
    if bool::arbitrary(u)? {
        score = score.alibi(&table[..usize::from(u8::arbitrary(u)?).min(table.len())]);
    }
    if bool::arbitrary(u)? {
        score = score.sinks(&table[..usize::from(u8::arbitrary(u)?).min(table.len())]);
    }
    if bool::arbitrary(u)? {
        let (a, b) = (usize::from(u8::arbitrary(u)?), usize::from(u16::arbitrary(u)?));
        let relative = if bool::arbitrary(u)? {
            RelativeBias::clipped(&table, b)
        } else {
            RelativeBias::t5(&table, a, b, bool::arbitrary(u)?)
        };
        score = score.relative(relative);
    }
    let small = |u: &mut Unstructured<'_>| -> Result<[usize; 4]> {
        let mut next = || Ok(usize::from(u8::arbitrary(u)?) % 6);
        Ok([next()?, next()?, next()?, next()?])
    };
    if bool::arbitrary(u)?
        && let Ok(bias) = View::bhsd(&table, small(u)?)
    {
        score = score.bias(bias);
    }
    let similarity = match u.int_in_range(0..=3u8)? {
        0 => Similarity::Dot,
        1 => Similarity::Distance,
        2 => {
            let mut view =
                || View::bhsd(&table, small(u)?).map_err(|_| arbitrary::Error::IncorrectFormat);
            Similarity::Additive(Additive { w_q: view()?, w_k: Some(view()?), v: view()? })
        }
        _ => View::bhsd(&table, small(u)?).map_or(Similarity::Dot, Similarity::General),
    };
    let centers = usize::from(u8::arbitrary(u)?).min(table.len());
    let mut problem = Problem::<f32>::of_shapes(q, k, v);
    if u.ratio(1, 4)? {
        problem = problem.local(Local::new(&table[..centers], size(u, true)?));
    }
    if u.ratio(1, 3)? {
        problem = problem.normalizer(normalizer(u)?);
    }
    let problem =
        problem.mask(mask.clone()).score(score).similarity(similarity).align(align(u, true)?);
    let _ = problem.to_string();
    match Plan::new(problem.clone(), Machine::detect()) {
        Err(error) => drop(error.to_string()),
        Ok(plan) => {
            let _ = plan.to_string();
            // Counting the work walks the mask for every head, row and tile of keys.
            let heads = q.batch.saturating_mul(q.heads);
            let pairs = q.len.max(1).saturating_mul(k.len.max(1));
            if heads.max(1).saturating_mul(pairs) > 1 << 16 {
                return Ok(());
            }
            let _ = format!("{plan:#}");
            if q.batch == 0 || q.heads == 0 || q.len == 0 {
                return Ok(());
            }
            let scope = problem.scope(q.batch - 1, q.heads - 1);
            for row in [0, q.len / 2, q.len - 1] {
                let ranges = mask.visible(&scope, row);
                assert!(ranges.windows(2).all(|w| w[0].end < w[1].start), "{ranges:?}");
                for key in 0..k.len {
                    let seen = ranges.iter().any(|r| r.contains(&key));
                    assert_eq!(seen, mask.is_visible(&scope, row, key), "{mask} row {row} key {key}");
                }
            }
        }
    }
    Ok(())
}
