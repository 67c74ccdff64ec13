//! How scores become weights: the softmax, and what may stand in its place.
//!
//! All of them are a softmax over fewer keys, or over other scores, once something is known of each row: which keys are its
//! best, which one was drawn, above which score weights begin. A first pass finds that, a [`Choice`] (see `select.rs`); then it
//! is one more rule of the scores ([`Kept`]), and the passes forward and backward are the usual ones.

use crate::error::Error;
use crate::index::{At, BLOCK_KEYS, Keys, RowMask, low};
use crate::score::{Derivatives, Pass, pass};
use crate::simd::{GROUP, Lanes, Number, Simd};
use std::f64::consts::LN_2;
use std::fmt;

/// How the scores of a row become its weights.
///
/// All but the softmax find out something about each row first, so they cost one pass over the scores more (sparsemax some
/// more). Their results cannot be merged, and they do not use AMX.
///
/// ```
/// use regard::{Machine, Normalizer, Plan, Problem, View};
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
    /// The softmax over the so many highest scores of a row (Gupta et al. 2021); the earlier key first where scores are equal.
    /// Gradients take the choice of keys as given: it is constant almost everywhere.
    TopK(usize),
    /// Weight 1 for the highest score. No gradient by the scores; for one that pretends, see
    /// [`OutputGrads::straight_through`](crate::OutputGrads::straight_through).
    Hard,
    /// Weight 1 for one key, drawn with the probabilities that the softmax gives (hard attention of Xu et al. 2015). Which
    /// one is a function of the seed, the place of the row (item, head, number) and the call alone, whatever the threads: another
    /// seed is another draw. The definition, and so [`steps`](crate::steps), draws from the same probabilities, but not the same key. Gradients by the scores are
    /// estimates, of the score function or straight-through: see [`OutputGrads::advantage`](crate::OutputGrads::advantage).
    Sampled {
        /// Of the draw.
        seed: u64,
    },
    /// `a_j = max(score_j - t, 0)`, with `t` such that weights sum to 1 (Martins and Astudillo 2016): the point nearest to the
    /// scores among all that sum to 1; far keys get exactly 0. `t` is found by Newton's method, a pass over the scores for
    /// each step, of which a handful do.
    Sparsemax,
}

impl Normalizer {
    /// Its name: `softmax`, `top k`, `hard`, `sampled`, `sparsemax`.
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

    /// Refuses options that it has no meaning for.
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

    /// What its choice means to the scores.
    pub(crate) fn rule(self) -> Rule {
        match self {
            Self::Sampled { .. } => Rule::One,
            Self::Sparsemax => Rule::Sparsemax,
            _ => Rule::TopK,
        }
    }

    /// Keys that a row may choose, where it chooses some.
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
            Self::TopK(k) => write!(f, "top {k}"),
            Self::Hard => write!(f, "hard"),
            Self::Sampled { seed } => write!(f, "sampled {seed}"),
            Self::Sparsemax => write!(f, "sparsemax"),
        }
    }
}

/// What each row has chosen, `[batch, heads.q, q_len]` (`[total, heads.q]` where queries are packed).
#[derive(Clone, Debug, PartialEq)]
pub struct Selection<N> {
    /// Keys a row, at most.
    pub(crate) most: usize,
    /// `[rows, most]`, the best first; [`NONE`] where a row sees no more.
    pub(crate) keys: Vec<usize>,
    /// The lowest score that was chosen; of a sparsemax, the highest; times `log2 e`. `[rows]`
    pub(crate) thresholds: Vec<N>,
    /// Of a sparsemax, how far below the highest score weights begin: small where many are alike, however large they are. In the
    /// same unit; `[rows]`, or nothing.
    pub(crate) supports: Vec<N>,
}

/// No key.
pub(crate) const NONE: usize = usize::MAX;

impl<N: Number> Selection<N> {
    /// The keys that a row has chosen, the best first: fewer than asked for if it sees fewer; none of a sparsemax.
    ///
    /// # Panics
    /// For a row that is not there.
    #[must_use]
    pub fn keys(&self, row: usize) -> &[usize] {
        let keys = &self.keys[row * self.most..][..self.most];
        &keys[..keys.iter().position(|key| *key == NONE).unwrap_or(self.most)]
    }

    /// The lowest score that a row has chosen, or the one above which its weights begin; `-inf` if it keeps all it sees.
    ///
    /// # Panics
    /// For a row that is not there.
    #[must_use]
    pub fn threshold(&self, row: usize) -> f64 {
        let support = self.supports.get(row).map_or(0.0, |support| Number::to_f64(*support));
        (self.thresholds[row].to_f64() - support) * LN_2
    }
}

/// A choice as a rule of the scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelectionMask<'a, N> {
    pub(crate) selection: &'a Selection<N>,
    pub(crate) rule: Rule,
}

/// Which scores stay, and as what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Those at the bound or above; of those at the bound, keys up to the last that was chosen.
    TopK,
    /// That of the key.
    One,
    /// Those within reach of the bound, as the logarithm of what is left of it: the softmax of that is the sparsemax.
    Sparsemax,
    /// Those within reach of the bound, all alike: the mean over what sparsemax keeps.
    Uniform,
}

impl<N: Number> SelectionMask<'_, N> {
    /// Whether scores are bent by a sparsemax.
    pub(crate) fn is_sparse(&self) -> bool {
        self.rule == Rule::Sparsemax
    }

    /// Whether a pair counts; `row` is counted over all heads and items.
    pub(crate) fn keeps(&self, row: usize, key: usize) -> bool {
        !matches!(self.rule, Rule::TopK | Rule::One) || self.selection.keys(row).contains(&key)
    }

    /// Makes the scores of a tile that do not stay `-inf`; `rows` are counted over all heads and items.
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

    /// score = ln(score - bound + reach), or 0, where that is above 0.
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

/// See [`Rule::Best`]. A NaN stays: what depends on it must not look like a number.
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
        // Of a NaN both comparisons fail too.
        let number = s.lanes(later & s.bits(s.less(x, s.splat(N::infinity()))));
        s.select(number, s.splat(N::neg_infinity()), hidden)
    }
}

/// See [`Rule::Only`].
struct KeepOne([RowMask; BLOCK_KEYS]);

impl KeepOne {
    /// Which of `n` keys is the one of each row.
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
