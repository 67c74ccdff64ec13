//! Normalizers, which turn the scores of a row into weights: the softmax and its alternatives.
//!
//! Each alternative is a softmax over fewer keys or over transformed scores, given a quantity of each row: the top-k keys, the
//! sampled key or the sparsemax threshold. A first pass computes it, a [`Selection`] (see `select.rs`). [`SelectionMask`] then
//! applies it to the scores, and the forward and backward passes are those of the softmax.

use crate::description::score::{Derivatives, Pass, pass};
use crate::error::Error;
use crate::machine::simd::{GROUP, Lanes, Number, Simd};
use crate::tensor::index::{At, BLOCK_KEYS, Keys, RowMask, low};
use std::f64::consts::LN_2;
use std::fmt;

/// The function that turns the scores of a row into its weights.
///
/// All but the softmax compute a selection for each row first, which costs one more pass over the scores (sparsemax: several).
/// Their outputs cannot be merged, and they do not use AMX.
///
/// ```
/// use regard::problem::Normalizer;
/// use regard::{Machine, Plan, Problem, View};
/// let (q, k) = ([1f32, 0.0], [0f32, 0.0, 9.0, 0.0, 8.0, 0.0]); // one query, three keys
/// let (q, k) = (View::matrix(&q, [1, 2])?, View::matrix(&k, [3, 2])?);
/// let problem = Problem::new(&q, &k, &k).normalizer(Normalizer::Hard);
/// let output = Plan::new(problem, Machine::detect())?.forward(q, k, k)?;
/// assert_eq!(output.out.data(), [9.0, 0.0]);
/// assert_eq!(output.selection.unwrap().keys(0), [1]);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Normalizer {
    /// `a_j = e^score_j / sum of e^score`
    #[default]
    Softmax,
    /// Softmax over the `k` highest scores of a row (Gupta et al. 2021). Of equal scores, the earlier key is preferred. Gradients
    /// treat the selection as constant, which it is almost everywhere.
    TopK(usize),
    /// Weight 1 for the highest score (argmax). The gradient of the scores is 0; for the straight-through estimate see
    /// [`OutputGrads::straight_through`](crate::plan::OutputGrads::straight_through).
    Hard,
    /// Weight 1 for one key, sampled with the softmax probabilities (hard attention, Xu et al. 2015). The sample depends only on
    /// the seed, the row (batch item, head, row index) and the call, not on the number of threads. The reference implementation,
    /// and therefore [`steps`](crate::reference::steps()), samples with the same probabilities but may return another key. Gradients of the
    /// scores are estimates, by the score function or straight-through: see
    /// [`OutputGrads::advantage`](crate::plan::OutputGrads::advantage).
    Sampled {
        /// Random seed.
        seed: u64,
    },
    /// `a_j = max(score_j - t, 0)`, with `t` such that the weights sum to 1 (Martins and Astudillo 2016): the Euclidean
    /// projection of the scores onto the probability simplex. Low scores get weight exactly 0. Newton's method finds `t` in a
    /// handful of steps, each of which is one pass over the scores.
    Sparsemax,
}

impl Normalizer {
    /// The name: `softmax`, `top k`, `hard`, `sampled` or `sparsemax`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::TopK(_) => "top k",
            Self::Hard => "hard",
            Self::Sampled { .. } => "sampled",
            Self::Sparsemax => "sparsemax",
        }
    }

    /// Rejects options that the normalizer does not support.
    pub(crate) fn check(self, sinks: bool, entropy: bool) -> Result<(), Error> {
        let alone = matches!(self, Self::Hard | Self::Sampled { .. } | Self::Sparsemax);
        let refused = |option| Err(Error::OnlySoftmax { option, normalizer: self.name() });
        match self {
            Self::TopK(0) => Err(Error::Zero { option: "top k" }),
            _ if alone && sinks => refused("sinks"),
            Self::Sparsemax if entropy => refused("entropy"),
            _ => Ok(()),
        }
    }

    pub(crate) fn is_softmax(self) -> bool {
        self == Self::Softmax
    }

    /// The rule that applies the selection to the scores.
    pub(crate) fn rule(self) -> Rule {
        match self {
            Self::Sampled { .. } => Rule::One,
            Self::Sparsemax => Rule::Sparsemax,
            _ => Rule::TopK,
        }
    }

    /// Largest number of keys that a row selects; 0 if the normalizer does not select individual keys.
    pub(crate) fn most(self, k_len: usize) -> usize {
        match self {
            Self::Softmax | Self::Sparsemax => 0,
            Self::Hard | Self::Sampled { .. } => 1,
            Self::TopK(k) => k.min(k_len),
        }
    }
}

impl fmt::Display for Normalizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Softmax => write!(f, "softmax"),
            Self::TopK(k) => write!(f, "top-{k}"),
            Self::Hard => write!(f, "hard"),
            Self::Sampled { seed } => write!(f, "sampled-{seed}"),
            Self::Sparsemax => write!(f, "sparsemax"),
        }
    }
}

/// The selection of each row by a normalizer, `[batch, heads.q, q_len]` (`[total, heads.q]` for packed queries).
#[derive(Clone, Debug, PartialEq)]
pub struct Selection<N> {
    /// Largest number of keys per row.
    pub(crate) most: usize,
    /// `[rows, most]`, best first; [`NONE`] where a row has fewer visible keys.
    pub(crate) keys: Vec<usize>,
    /// `[rows]`, times `log2 e`: the lowest selected score; for sparsemax, the highest score of the row.
    pub(crate) thresholds: Vec<N>,
    /// Sparsemax: distance of the threshold `t` below the highest score, times `log2 e`; `[rows]`, otherwise empty. A distance,
    /// because it is small when many scores are equal, whatever their magnitude.
    pub(crate) supports: Vec<N>,
}

/// Marks an unused entry of the keys of a [`Selection`].
pub(crate) const NONE: usize = usize::MAX;

impl<N: Number> Selection<N> {
    /// The selected keys of a row, best first: fewer than `k` if fewer are visible, none for sparsemax.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[must_use]
    pub fn keys(&self, row: usize) -> &[usize] {
        let keys = &self.keys[row * self.most..][..self.most];
        &keys[..keys.iter().position(|key| *key == NONE).unwrap_or(self.most)]
    }

    /// The lowest selected score of a row, or the threshold `t` of sparsemax; `-inf` if the row has no score threshold.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[must_use]
    pub fn threshold(&self, row: usize) -> f64 {
        let support = self.supports.get(row).map_or(0.0, |support| Number::to_f64(*support));
        (self.thresholds[row].to_f64() - support) * LN_2
    }
}

/// Applies a selection to scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelectionMask<'a, N> {
    pub(crate) selection: &'a Selection<N>,
    pub(crate) rule: Rule,
}

/// Which scores are kept, and how they are transformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Scores above the threshold; of scores equal to it, keys up to the last selected one.
    TopK,
    /// The score of the selected key.
    One,
    /// Scores above `t`, replaced by `ln(score - t)`: the softmax of these is the sparsemax.
    Sparsemax,
    /// Scores above `t`, replaced by 0: uniform weights over the support of the sparsemax.
    Uniform,
}

impl<N: Number> SelectionMask<'_, N> {
    /// Whether scores are replaced by `ln(score - t)`.
    pub(crate) fn is_sparse(&self) -> bool {
        self.rule == Rule::Sparsemax
    }

    /// Whether the selection contains a pair; always `true` for rules that decide by the score. `row` is the flat index over
    /// batch, heads and queries.
    pub(crate) fn keeps(&self, row: usize, key: usize) -> bool {
        !matches!(self.rule, Rule::TopK | Rule::One) || self.selection.keys(row).contains(&key)
    }

    /// Sets the scores of a tile that are not kept to `-inf` and transforms the others. `rows` are flat indices over batch, heads
    /// and queries.
    #[inline(always)]
    pub(crate) fn apply<S: Simd<N>>(
        &self,
        s: S,
        (at, rows): (At<'_>, &[usize; GROUP]),
        tile: &mut [Lanes<N>],
        derivatives: Option<&mut Derivatives<N>>,
    ) {
        let (mut thresholds, mut keys) = (Lanes([N::infinity(); GROUP]), [NONE; GROUP]);
        for lane in at.span.start..at.span.end {
            thresholds.0[lane] = self.selection.thresholds[rows[lane]];
            keys[lane] = self.selection.keys(rows[lane]).last().copied().unwrap_or(NONE);
        }
        match self.rule {
            Rule::TopK => pass(s, at, tile, &KeepTopK { thresholds, last: keys, keys: at.keys }),
            Rule::One => pass(s, at, tile, &KeepOne::new(at, tile.len(), &keys)),
            Rule::Sparsemax | Rule::Uniform => {
                let mut supports = Lanes([N::zero(); GROUP]);
                let lanes = supports.0.iter_mut().zip(rows).take(at.span.end).skip(at.span.start);
                lanes.for_each(|(support, row)| *support = self.selection.supports[*row]);
                let derivatives = derivatives.map(|derivatives| &mut derivatives.custom[..]);
                self.take_logarithms((&thresholds, &supports), at, tile, derivatives);
            }
        }
    }

    /// `score = ln(score - t)`, or 0 for [`Rule::Uniform`], if `score > t`; otherwise `-inf`. `t` is threshold minus support.
    #[inline(always)]
    fn take_logarithms(
        &self,
        (thresholds, supports): (&Lanes<N>, &Lanes<N>),
        at: At<'_>,
        tile: &mut [Lanes<N>],
        mut derivatives: Option<&mut [Lanes<N>]>,
    ) {
        let ln_2 = N::from_f64(LN_2);
        for (i, scores) in tile.iter_mut().enumerate() {
            for lane in at.span.start..at.span.end {
                let score = &mut scores.0[lane];
                if *score == N::neg_infinity() {
                    continue;
                }
                let above = (*score - thresholds.0[lane] + supports.0[lane]) * ln_2;
                if let Some(derivatives) = &mut derivatives {
                    let derivative = &mut derivatives[i].0[lane];
                    *derivative = if above > N::zero() { *derivative / above } else { N::zero() };
                }
                *score = match above {
                    _ if above.is_nan() => above,
                    _ if above <= N::zero() => N::neg_infinity(),
                    _ if self.rule == Rule::Uniform => N::zero(),
                    _ => above.log2_of_sum(),
                };
            }
        }
    }
}

/// See [`Rule::TopK`]. A NaN score is kept, so that it propagates to the output.
struct KeepTopK<'t, N> {
    thresholds: Lanes<N>,
    last: [usize; GROUP],
    keys: Keys<'t>,
}

impl<N: Number> Pass<N> for KeepTopK<'_, N> {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        let threshold = s.load(&self.thresholds.0[lane..]);
        let (below, above) = (s.less(x, threshold), s.less(threshold, x));
        let hidden = s.select(below, s.splat(N::neg_infinity()), x);
        let all = u32::MAX >> (32 - S::LANES);
        let mut equal = all & !(s.bits(below) | s.bits(above));
        let mut later = 0;
        while equal != 0 {
            let at = equal.trailing_zeros();
            later |= u32::from(self.keys.get(i) > self.last[lane + at as usize]) << at;
            equal &= equal - 1;
        }
        if later == 0 {
            return hidden;
        }
        // Both comparisons are false for NaN too; `x < inf` excludes it.
        let number = s.lanes(later & s.bits(s.less(x, s.splat(N::infinity()))));
        s.select(number, s.splat(N::neg_infinity()), hidden)
    }
}

/// See [`Rule::One`]. For each key of the tile, the rows that selected it.
struct KeepOne([RowMask; BLOCK_KEYS]);

impl KeepOne {
    /// Locates the selected key of each row among the `n` keys of a tile.
    fn new(at: At<'_>, n: usize, keys: &[usize; GROUP]) -> Self {
        let mut only = [0; BLOCK_KEYS];
        for (lane, key) in keys.iter().enumerate().take(at.span.end).skip(at.span.start) {
            let place = match at.keys {
                Keys::From(first) => key.checked_sub(first).filter(|i| *i < n),
                Keys::Gathered(gathered) => {
                    gathered[..n].iter().position(|gathered| gathered == key)
                }
            };
            place.into_iter().for_each(|i| only[i] |= 1 << lane);
        }
        Self(only)
    }
}

impl<N: Number> Pass<N> for KeepOne {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        s.select(s.lanes(low(self.0[i] >> lane)), x, s.splat(N::neg_infinity()))
    }
}
