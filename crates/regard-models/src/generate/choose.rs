//! From the scores of one state to tokens. The scores are checked before: none is NaN or +inf, one at least is finite.

use super::Sampling;
use pulp::NullaryFnOnce;
use regard_matmul::math::vectorized;
use std::cmp::Ordering;

/// ln Σ exp(score), in `f64`: a score less this is a log-probability. The same bits with all instructions: nothing is fused.
pub(super) fn log_sum(scores: &[f32]) -> f64 {
    vectorized(LogSum(scores))
}

struct LogSum<'a>(&'a [f32]);

impl NullaryFnOnce for LogSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn call(self) -> f64 {
        let largest = f64::from(top(self.0));
        // Sums side by side, so that a vector has one each.
        let mut sums = [0.0; 8];
        let (blocks, rest) = self.0.as_chunks::<8>();
        for block in blocks {
            for (sum, score) in sums.iter_mut().zip(block) {
                *sum += exp(f64::from(*score) - largest);
            }
        }
        let mut last = 0.0;
        for score in rest {
            last += exp(f64::from(*score) - largest);
        }
        largest + (sums.iter().sum::<f64>() + last).ln()
    }
}

/// The largest score.
#[inline(always)]
fn top(scores: &[f32]) -> f32 {
    scores.iter().fold(f32::NEG_INFINITY, |top, score| if *score > top { *score } else { top })
}

/// `e^x` of a number that is not above 0, to 1e-15, without a branch or a call: a vocabulary of them is most of what a step of a
/// search costs.
#[inline(always)]
fn exp(x: f64) -> f64 {
    /// Adding it leaves the nearest whole number in the lowest bits.
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    const LN_2: [f64; 2] = [0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10];
    // Beyond it nothing is left of a sum that begins with 1.
    let x = if x > -700.0 { x } else { -700.0 };
    let rounded = x * std::f64::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let x = (x - n * LN_2[0]) - n * LN_2[1];
    // 1 / k!, from the highest power on.
    let terms = [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let e = terms.iter().fold(0.0, |sum, term| sum * x + term);
    // The whole number goes into the exponent.
    f64::from_bits(e.to_bits().wrapping_add(rounded.to_bits() << 52))
}

/// The token of the largest score; of equal ones, the first.
pub(super) fn largest(scores: &[f32]) -> u32 {
    let start = (0, f32::NEG_INFINITY);
    (0..).zip(scores).fold(start, |best, (id, s)| if *s > best.1 { (id, *s) } else { best }).0
}

/// The `n` likeliest tokens with their scores, best first; of equal ones, the lowest id. Those of -inf are left out.
pub(super) fn best(scores: &[f32], n: usize) -> Vec<(u32, f32)> {
    if n == 0 {
        return Vec::new();
    }
    if n <= FEW {
        return best_few(scores, n);
    }
    let order =
        |a: &(u32, f32), b: &(u32, f32)| descending(a.1.into(), b.1.into()).then(a.0.cmp(&b.0));
    let mut all: Vec<_> = (0..).zip(scores.iter().copied()).collect();
    all.retain(|(_, score)| *score > f32::NEG_INFINITY);
    if n < all.len() {
        all.select_nth_unstable_by(n, order); // so that only the n best are sorted
        all.truncate(n);
    }
    all.sort_unstable_by(order);
    all
}

/// So few that a list of them is kept in order while scores pass by.
const FEW: usize = 32;

fn best_few(scores: &[f32], n: usize) -> Vec<(u32, f32)> {
    let (mut best, mut worst) = (Vec::with_capacity(n + 1), f32::NEG_INFINITY);
    for (first, block) in (0..).step_by(FEW).zip(scores.chunks(FEW)) {
        // Few blocks have one that is good enough, and a block is told by one number.
        if top(block) <= worst {
            continue;
        }
        for (id, score) in (first..).zip(block).filter(|(_, score)| **score > f32::NEG_INFINITY) {
            if best.len() < n || *score > worst {
                let at = best.partition_point(|(_, other)| other >= score);
                best.insert(at, (id, *score));
                best.truncate(n);
                worst = if best.len() < n { f32::NEG_INFINITY } else { best[n - 1].1 };
            }
        }
    }
    best
}

/// Larger ones first; for numbers that are not NaN. Zeros are equal whatever their sign.
pub(super) fn descending(a: f64, b: f64) -> Ordering {
    b.partial_cmp(&a).unwrap_or(Ordering::Equal)
}

/// What may be drawn, with weights that need not add up to 1, in the order of ids: so an option that leaves nothing out changes no
/// draw.
pub(super) fn kept(scores: &[f32], sampling: &Sampling) -> Vec<(u32, f64)> {
    let Sampling { temperature, top_k, top_p, min_p, seed: _ } = *sampling;
    let top_p = top_p.filter(|p| *p < 1.0);
    let kept = match (top_k, top_p) {
        (None, None) => (0..).zip(scores.iter().copied()).collect(),
        _ => best(scores, top_k.unwrap_or(usize::MAX)),
    };
    let largest = f64::from(kept.iter().map(|(_, score)| *score).fold(f32::NEG_INFINITY, f32::max));
    let weight = |score: f32| ((f64::from(score) - largest) / f64::from(temperature)).exp();
    let mut kept: Vec<_> = kept.into_iter().map(|(id, score)| (id, weight(score))).collect();
    if let Some(p) = top_p {
        let enough = f64::from(p) * kept.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut before = 0.0;
        kept.retain(|(_, weight)| {
            let stays = before < enough;
            before += weight;
            stays
        });
    }
    if let Some(p) = min_p {
        kept.retain(|(_, weight)| *weight >= f64::from(p)); // the likeliest has weight 1
    }
    kept.sort_unstable_by_key(|(id, _)| *id);
    kept
}

/// The token at a place in `0.0..1.0` of all weights laid end to end.
pub(super) fn draw(kept: &[(u32, f64)], place: f64) -> u32 {
    let mut left = place * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut drawn = 0;
    for (id, weight) in kept.iter().filter(|(_, weight)| *weight > 0.0) {
        drawn = *id; // stays if rounding leads past the last
        if left < *weight {
            break;
        }
        left -= weight;
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kept(
        scores: &[f32],
        temperature: f32,
        top_k: Option<usize>,
        top_p: Option<f32>,
    ) -> Vec<(u32, f64)> {
        super::kept(scores, &Sampling { temperature, top_k, top_p, ..Sampling::default() })
    }

    /// Few different scores, so that many are equal, and some of -inf.
    fn scores() -> impl Strategy<Value = Vec<f32>> {
        let score =
            prop_oneof![4 => (-6..6i32).prop_map(|s| s as f32 / 2.0), 1 => Just(f32::NEG_INFINITY)];
        prop::collection::vec(score, 1..40).prop_map(|mut scores| {
            scores[0] = 0.5;
            scores
        })
    }

    /// The definition: a token stays if fewer than k are before it, and if those before it have less than p of what top-k left.
    fn stays(scores: &[f32], temperature: f32, k: usize, p: f32) -> Vec<u32> {
        let before =
            |a: usize, b: usize| scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
        let weight = |a: usize| (f64::from(scores[a]) / f64::from(temperature)).exp();
        let all = || (0..scores.len()).filter(|a| scores[*a] > f32::NEG_INFINITY);
        let left: Vec<_> = all().filter(|b| all().filter(|a| before(*a, *b)).count() < k).collect();
        let total: f64 = left.iter().map(|a| weight(*a)).sum();
        let mass = |b| left.iter().filter(|a| before(**a, b)).map(|a| weight(*a)).sum::<f64>();
        let stays = left.iter().filter(|b| p == 1.0 || mass(**b) / total < f64::from(p) - 1e-12);
        stays.map(|b| u32::try_from(*b).unwrap()).collect()
    }

    #[test]
    fn the_best_none_are_none() {
        assert_eq!(best(&[1.0, 2.0], 0), []);
    }

    proptest! {
        #[test]
        fn top_k_and_top_p_keep_exactly_the_tokens_of_the_definition(
            scores in scores(), k in 1..45usize, p in 0.01..1.0f32, whole in any::<bool>(), t in 0.3..3.0f32,
        ) {
            let p = if whole { 1.0 } else { p };
            let ids: Vec<u32> = kept(&scores, t, Some(k), Some(p)).iter().map(|(id, _)| *id).collect();
            prop_assert_eq!(ids, stays(&scores, t, k, p));
        }

        #[test]
        fn options_that_leave_nothing_out_change_no_draw(scores in scores(), place in 0.0..1.0f64) {
            let plain = draw(&kept(&scores, 0.7, None, None), place);
            prop_assert!(scores[plain as usize] > f32::NEG_INFINITY);
            prop_assert_eq!(plain, draw(&kept(&scores, 0.7, Some(scores.len()), Some(1.0)), place));
            prop_assert_eq!(largest(&scores), draw(&kept(&scores, 0.7, Some(1), None), place));
            prop_assert_eq!(largest(&scores), best(&scores, 1)[0].0);
        }
    }

    #[test]
    fn of_equal_scores_the_lowest_ids_stay() {
        let ids = |kept: Vec<(u32, f64)>| kept.into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(ids(kept(&[1.0, 2.0, 1.0, 1.0], 1.0, Some(3), None)), [0, 1, 2]);
        assert_eq!(ids(kept(&[0.0; 4], 1.0, None, Some(0.5))), [0, 1]);
        assert_eq!(largest(&[-0.0, 0.0]), 0);
    }

    #[test]
    fn min_p_keeps_tokens_by_their_share_of_the_likeliest() {
        let scores = [0.5_f32, 0.3, 0.125, 0.075].map(f32::ln);
        let ids = |temperature, min_p| {
            let sampling = Sampling { temperature, min_p: Some(min_p), ..Sampling::default() };
            super::kept(&scores, &sampling).iter().map(|(id, _)| *id).collect::<Vec<_>>()
        };
        assert_eq!(ids(1.0, 0.2), [0, 1, 2]);
        assert_eq!(ids(1.0, 0.3), [0, 1]);
        assert_eq!(ids(2.0, 0.3), [0, 1, 2, 3]); // temperature works first
        assert_eq!(ids(1.0, 1.0), [0]);
        assert_eq!(ids(1.0, 0.0), [0, 1, 2, 3]);
    }

    proptest! {
        #[test]
        fn few_are_the_first_of_all_in_order(scores in scores(), n in 1..40usize) {
            let mut all: Vec<_> = (0..).zip(scores.clone()).filter(|(_, s)| *s > f32::NEG_INFINITY).collect();
            all.sort_by(|a: &(u32, f32), b| descending(a.1.into(), b.1.into()).then(a.0.cmp(&b.0)));
            all.truncate(n);
            prop_assert_eq!(best(&scores, n), all.clone());
            prop_assert_eq!(best_few(&scores, n), all);
        }

        #[test]
        fn powers_are_those_of_the_library(x in -750.0..0.0f64) {
            let right = x.exp();
            prop_assert!((exp(x) - right).abs() <= right * 1e-14 + 1e-300, "{} {}", exp(x), right);
        }
    }

    #[test]
    fn large_scores_and_a_small_temperature_do_no_harm() {
        assert!((log_sum(&[1e30, 1e30, f32::NEG_INFINITY]) - 1e30_f32 as f64).abs() < 1e15);
        assert_eq!(log_sum(&[-3e38]), f64::from(-3e38_f32));
        assert_eq!(kept(&[0.0, -60.0, -60.0], 1.0, None, Some(1.0)).len(), 3);
        let cold = kept(&[3e38, -3e38, 3e38], 1e-38, None, None);
        assert_eq!(cold, [(0, 1.0), (1, 0.0), (2, 1.0)]);
        assert_eq!([0.0, 0.49, 0.5, 0.999_999].map(|place| draw(&cold, place)), [0, 0, 2, 2]);
    }
}
