//! Online softmax (Milakov and Gimelshein 2018): the softmax of a row, one key block at a time, as in FlashAttention (Dao et
//! al. 2022).
//!
//! A [`State`] summarizes the keys processed so far: a reference `max` near the largest score, and the sum of
//! `2^(score - max)`. States over disjoint keys can be merged. The merge is associative and commutative with the empty state
//! as identity, so the keys can be split among tiles, threads and machines in any order.

use crate::machine::simd::{GROUP, Isa, Lanes, Number, Simd, leaf, math};
use crate::tensor::index::{Span, low};

/// Softmax state over a subset of a row's keys. Scores are multiplied by `log2 e`, so that weights are powers of 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct State<N> {
    /// A number near the largest score. An empty state holds the lowest finite number, so that `max - max` is 0, not NaN.
    pub(crate) max: N,
    /// The sum of `2^(score - max)`; 0 for an empty state.
    pub(crate) sum: N,
    /// The sum of `2^(score - max) (score - max)`; computed only if the entropy is requested.
    pub(crate) sum_x_log: N,
    /// The exact largest score; computed only if the entropy is requested.
    pub(crate) true_max: N,
}

impl<N: Number> State<N> {
    pub(crate) fn empty() -> Self {
        Self {
            max: -N::max_value(),
            sum: N::zero(),
            sum_x_log: N::zero(),
            true_max: N::neg_infinity(),
        }
    }

    /// The state over the keys of both, and the rescale factors for the weighted sums of `self` and `other`.
    pub(crate) fn merge(self, other: Self) -> (Self, N, N) {
        let max = self.max.max(other.max);
        let (a, b) = ((self.max - max).exp2(), (other.max - max).exp2());
        let sum_x_log = |of: Self, factor: N| (of.sum_x_log + far(of.max - max) * of.sum) * factor;
        let true_max = self.true_max.max(other.true_max);
        (
            Self {
                max,
                sum: self.sum * a + other.sum * b,
                sum_x_log: sum_x_log(self, a) + sum_x_log(other, b),
                true_max,
            },
            a,
            b,
        )
    }

    /// What the weighted sums of values are multiplied by in the end.
    pub(crate) fn share(self) -> N {
        share_of(self.sum)
    }

    /// The entropy of the weights in nats, `lse - E[score]`; 0 for an empty state.
    pub(crate) fn entropy(self) -> N {
        if self.sum == N::zero() {
            return N::zero();
        }
        let bits = self.sum.log2_of_sum() - self.sum_x_log / self.sum;
        // Rounding may give a value below 0. The comparison is false for NaN, which is returned.
        if bits < N::zero() { N::zero() } else { bits * N::from_f64(std::f64::consts::LN_2) }
    }

    /// The largest score, without the factor `log2 e`; `-inf` for an empty state, NaN if any score is NaN.
    pub(crate) fn max_score(self) -> N {
        if self.sum.is_nan() {
            self.sum
        } else {
            self.true_max * N::from_f64(std::f64::consts::LN_2)
        }
    }

    /// `ln(sum of e^score)`; `-inf` for an empty state. If all scores overflow when multiplied by `log2 e`, as with the lowest
    /// finite number as bias, the result is the lowest finite number.
    #[inline(always)]
    pub(crate) fn lse(self) -> N {
        let lse = (self.max + self.sum.log2_of_sum()) * N::from_f64(std::f64::consts::LN_2);
        if self.max == -N::max_value() && lse > N::neg_infinity() { self.max } else { lse }
    }
}

/// 1 / sum; 1 for a row that has seen nothing: its sums are zeros, and stay so.
#[inline(always)]
pub(crate) fn share_of<N: Number>(sum: N) -> N {
    if sum < N::min_positive_value() { N::one() } else { N::one() / sum }
}

/// If `|lse|` is above this, the backward pass uses `max` and `sum` instead of the lse: the absolute rounding error of the lse
/// is the relative error of all weights of its row.
pub(crate) const LSE_LOSES_BITS: f64 = 1024.0;

/// Lower bound of `score - max` in `sum_x_log`, far below the logarithm of any nonzero weight. With it a weight of 0 times its
/// logarithm is 0, not NaN.
pub(crate) const MIN_LOG2_WEIGHT: f64 = -16384.0;

fn far<N: Number>(x: N) -> N {
    x.max(N::from_f64(MIN_LOG2_WEIGHT))
}

/// The states of a group of rows, one per lane.
#[derive(Clone, Debug)]
pub(crate) struct States<N> {
    pub(crate) max: Lanes<N>,
    pub(crate) sum: Lanes<N>,
    pub(crate) sum_x_log: Lanes<N>,
    pub(crate) true_max: Lanes<N>,
    /// Whether the scores of the last tile were far above the earlier ones.
    pub(crate) max_is_stale: bool,
}

/// The contribution of one tile to the states of its rows: the sums of its weights and, if the entropy is requested, the sums
/// of `weight log2(weight)` and the largest `log2(weight)`.
#[derive(Clone, Debug)]
pub(crate) struct TileSums<N> {
    pub(crate) sum: Lanes<N>,
    pub(crate) log_sums: Option<[Lanes<N>; 2]>,
}

impl<N: Number> TileSums<N> {
    pub(crate) fn new(entropy: bool) -> Self {
        let zero = Lanes([N::zero(); GROUP]);
        Self { sum: zero, log_sums: entropy.then_some([zero; 2]) }
    }
}

/// Memory of a tile `[keys][lanes]` that [`States::weigh`] turns from scores to weights.
pub(crate) struct SoftmaxTile<'t, N> {
    /// At least `keys`: products on AMX write whole tiles, which may reach beyond the keys.
    pub(crate) lanes: &'t mut [Lanes<N>],
    /// How many keys there are.
    pub(crate) keys: usize,
    /// The lanes that are computed.
    pub(crate) span: Span,
}

impl<N: Number> States<N> {
    pub(crate) fn empty() -> Self {
        let State { max, sum, sum_x_log, true_max } = State::empty();
        let [max, sum, sum_x_log, true_max] =
            [max, sum, sum_x_log, true_max].map(|x| Lanes([x; GROUP]));
        Self { max, sum, sum_x_log, true_max, max_is_stale: false }
    }

    /// As [`Self::empty`], in place.
    pub(crate) fn clear(&mut self) {
        let State { max, sum, sum_x_log, true_max } = State::empty();
        self.max.0.fill(max);
        self.sum.0.fill(sum);
        self.sum_x_log.0.fill(sum_x_log);
        self.true_max.0.fill(true_max);
        self.max_is_stale = false;
    }

    pub(crate) fn get(&self, lane: usize) -> State<N> {
        State {
            max: self.max.0[lane],
            sum: self.sum.0[lane],
            sum_x_log: self.sum_x_log.0[lane],
            true_max: self.true_max.0[lane],
        }
    }

    pub(crate) fn set(&mut self, lane: usize, State { max, sum, sum_x_log, true_max }: State<N>) {
        (self.max.0[lane], self.sum.0[lane], self.sum_x_log.0[lane], self.true_max.0[lane]) =
            (max, sum, sum_x_log, true_max);
    }

    /// The softmax of the keys of a tile: `scores` writes their scores, which become weights, and the sums of those are
    /// added. Returns the factor of the weighted sums so far, if that is not 1.
    ///
    /// One pass suffices if `max` is set and current in every row. If the sums of the first pass show that some scores exceed `max` by
    /// too much, a second pass follows after [`update_max`], and the next tile updates `max` in its first pass. A NaN sum counts as not
    /// current.
    pub(crate) fn weigh(
        &mut self,
        isa: Isa,
        SoftmaxTile { lanes, keys, span }: SoftmaxTile<'_, N>,
        entropy: bool,
        mut scores: impl FnMut(&mut [Lanes<N>]),
    ) -> Option<Lanes<N>> {
        let mut sums = TileSums::new(entropy);
        let mut rescale = None;
        let mut max_is_current = !self.max_is_stale && self.max_is_set(span);
        if !max_is_current {
            sums.sum = self.infinite_where_empty();
        }
        for last in [false, true] {
            scores(lanes);
            let tile = &mut lanes[..keys];
            if !max_is_current {
                let rescale = rescale.get_or_insert(Lanes([N::one(); GROUP]));
                update_max(isa, self, tile, &sums.sum, span, rescale);
            }
            max_is_current = exp_and_sum(isa, self, tile, span, &mut sums, last);
            if max_is_current {
                break;
            }
        }
        rescale
    }

    /// Whether `max` is set in all lanes of the span.
    #[inline(always)]
    pub(crate) fn max_is_set(&self, span: Span) -> bool {
        // No early exit, so that the loop vectorizes.
        let set = |all: bool, max: &N| all & (*max > -N::max_value());
        self.max.0[span.start..span.end].iter().fold(true, set)
    }

    /// Initial sums for [`Self::weigh`]: infinite in lanes whose `max` is not set yet, 0 in the others.
    pub(crate) fn infinite_where_empty(&self) -> Lanes<N> {
        let empty = |max: N| if max > -N::max_value() { N::zero() } else { N::infinity() };
        Lanes(self.max.0.map(empty))
    }
}

leaf! {
    /// Replaces a tile of scores `[keys][lanes]` by `2^(score - max)`, for the lanes of `span`, and sets `sums` to the sums over keys.
    /// They are added to the states if `max` is current, that is if all are below `MAX_TILE_SUM`, or if `always`. Tells whether it is:
    /// `max` need not be the largest score, only near enough that nothing overflows. It rarely changes after the first tile, so most
    /// tiles need no search for their maximum.
    pub(crate) fn exp_and_sum<'t, N>(
        s: S,
        states: &'t mut States<N>,
        tile: &'t mut [Lanes<N>],
        span: Span,
        sums: &'t mut TileSums<N>,
        always: bool,
    ) -> bool {
        let zero = s.splat(N::zero());
        for lane in span.vectors::<N, S>() {
            let (max, mut sum) = (s.load(&states.max.0[lane..]), zero);
            if let Some([sum_x_log, true_max]) = &mut sums.log_sums {
                let (mut log_sum, mut most) = (zero, s.splat(N::neg_infinity()));
                for row in tile.iter_mut() {
                    let (log, weight) = exp_and_sum_row(s, &mut row.0[lane..], max, &mut sum);
                    log_sum =
                        s.fma(weight, s.max(log, s.splat(N::from_f64(MIN_LOG2_WEIGHT))), log_sum);
                    most = s.max(log, most);
                }
                s.store(log_sum, &mut sum_x_log.0[lane..]);
                s.store(most, &mut true_max.0[lane..]);
            } else {
                for row in tile.iter_mut() {
                    exp_and_sum_row(s, &mut row.0[lane..], max, &mut sum);
                }
            }
            s.store(sum, &mut sums.sum.0[lane..]);
        }
        let current = states.add_sums(s, &sums.sum, span, always);
        if let Some([sum_x_log, true_max]) = sums.log_sums.as_ref().filter(|_| current || always) {
            for lane in span.vectors::<N, S>() {
                let to = &mut states.sum_x_log.0[lane..];
                s.store(s.add(s.load(to), s.load(&sum_x_log.0[lane..])), to);
                let most = s.add(s.load(&true_max.0[lane..]), s.load(&states.max.0[lane..]));
                let to = &mut states.true_max.0[lane..];
                s.store(s.max(most, s.load(to)), to);
            }
        }
        current
    }
}

impl<N: Number> States<N> {
    /// Adds the sums of a tile's weights, if all are below `MAX_TILE_SUM`, that is if `max` is current, or if `always`; within a leaf.
    /// Tells whether it is.
    #[inline(always)]
    pub(crate) fn add_sums<S: Simd<N>>(
        &mut self,
        s: S,
        sums: &Lanes<N>,
        span: Span,
        always: bool,
    ) -> bool {
        let (limit, full) = (s.splat(N::from_f64(MAX_TILE_SUM)), u32::MAX >> (32 - S::LANES));
        let mut all = full;
        for lane in span.vectors::<N, S>() {
            // Lanes outside of the span have no rows.
            all &= s.bits(s.less(s.load(&sums.0[lane..]), limit)) | !low(span.set() >> lane);
        }
        if all == full || always {
            for lane in span.vectors::<N, S>() {
                let sum = s.add(s.load(&self.sum.0[lane..]), s.load(&sums.0[lane..]));
                s.store(sum, &mut self.sum.0[lane..]);
            }
        }
        all == full
    }
}

leaf! {
    /// Raises `max` to the largest score of the tile in lanes whose sum is not below `MAX_TILE_SUM`, or whose largest score
    /// exceeds `max` by more than `log2(MAX_TILE_SUM)`. Rescales the states and multiplies `rescale`, the pending factor of the
    /// weighted sums, by the same factor. `max` was stale if one that was already set has been exceeded by that much.
    pub(crate) fn update_max<'t, N>(
        s: S,
        states: &'t mut States<N>,
        tile: &'t [Lanes<N>],
        sums: &'t Lanes<N>,
        span: Span,
        rescale: &'t mut Lanes<N>,
    ) {
        let (limit, reach) =
            (s.splat(N::from_f64(MAX_TILE_SUM)), s.splat(N::from_f64(MAX_TILE_SUM.log2())));
        let lowest = s.splat(-N::max_value());
        let mut grown = 0;
        for lane in span.vectors::<N, S>() {
            let before = s.load(&states.max.0[lane..]);
            let mut max = before;
            for row in tile {
                max = s.max(max, s.load(&row.0[lane..]));
            }
            let outgrown = s.less(s.add(before, reach), max);
            let stays = s.select(outgrown, s.splat(N::infinity()), s.load(&sums.0[lane..]));
            let max = s.select(s.less(stays, limit), before, max);
            grown |= s.bits(outgrown) & s.bits(s.less(lowest, before));
            let (lower, sum_before) = (s.sub(before, max), s.load(&states.sum.0[lane..]));
            let factor = math::weight(s, lower);
            let sum = s.mul(sum_before, factor);
            // sum_x_log = sum of weight (score - max)
            let lower = s.max(lower, s.splat(N::from_f64(MIN_LOG2_WEIGHT)));
            let sum_x_log = s.fma(lower, sum_before, s.load(&states.sum_x_log.0[lane..]));
            s.store(s.mul(sum_x_log, factor), &mut states.sum_x_log.0[lane..]);
            s.store(max, &mut states.max.0[lane..]);
            s.store(sum, &mut states.sum.0[lane..]);
            s.store(s.mul(s.load(&rescale.0[lane..]), factor), &mut rescale.0[lane..]);
        }
        states.max_is_stale = grown != 0;
    }
}

/// Replaces scores by weights and adds them to `sum`; returns `log2(weight)` and the weights. A function because a closure
/// would not be inlined, and every intrinsic in it would become a call.
#[inline(always)]
pub(crate) fn exp_and_sum_row<N: Number, S: Simd<N>>(
    s: S,
    row: &mut [N],
    max: S::V,
    sum: &mut S::V,
) -> (S::V, S::V) {
    let log = s.sub(s.load(row), max);
    let weight = math::weight(s, log);
    *sum = s.add(*sum, weight);
    s.store(weight, row);
    (log, weight)
}

/// The sum of a tile's weights at which `max` must be updated: for 64 keys, weights of 16 each. Low enough that weighted sums of
/// huge values overflow hardly earlier than with the exact maximum; high enough that random scores do not reach it.
pub(crate) const MAX_TILE_SUM: f64 = 1024.0;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> impl Strategy<Value = State<f64>> {
        let some = (-1e3..1e3f64, 1.0..1e4f64).prop_map(|(max, sum)| State {
            max,
            sum,
            sum_x_log: -0.3 * sum,
            true_max: max,
        });
        prop_oneof![1 => Just(State::empty()), 5 => some]
    }

    fn close(a: State<f64>, b: State<f64>) -> bool {
        let near = |x: f64, y: f64| (x - y).abs() <= 1e-12 * x.abs().max(1.0);
        a == b || (near(a.lse(), b.lse()) && (a.entropy() - b.entropy()).abs() < 1e-9)
    }

    proptest! {
        #[test]
        fn merging_is_associative_and_commutative(a in state(), b in state(), c in state()) {
            prop_assert!(close(a.merge(b).0.merge(c).0, a.merge(b.merge(c).0).0));
            prop_assert!(close(a.merge(b).0, b.merge(a).0));
        }

        #[test]
        fn nothing_seen_is_the_identity(a in state()) {
            let (merged, kept, _) = a.merge(State::empty());
            prop_assert_eq!(merged, a);
            prop_assert_eq!(kept, 1.0);
        }
    }

    #[test]
    fn nothing_seen_has_no_lse() {
        assert_eq!(State::<f32>::empty().lse(), f32::NEG_INFINITY);
    }
}
