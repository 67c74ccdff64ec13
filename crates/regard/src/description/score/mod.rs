//! What happens to the similarity of a query and a key before the softmax.
//!
//! The order is fixed (ADR 0001): similarity, scale, softcap, biases (dense, ALiBi, relative, your own), interventions, mask;
//! a sink joins the denominator. Each option stands here side by side: its definition ([`Score::define`], one pair at a time) with
//! its derivative ([`Score::derivative`]), its pass over a tile ([`Score::apply`]), and the backward pass through a tile
//! ([`Derivatives::backward`], [`Score::add_grads`]).
//!
//! Tiles hold scores times `log2 e`, so that the softmax needs `2^x` alone; every pass works in that unit.

mod bias;
mod intervention;
mod pass;
mod relative;

use crate::error::Error;
use crate::machine::simd::{Element, GROUP, Lanes, Number, Simd, call_user, math};
use crate::tensor::index::{At, Keys, Pair, RowMask, RowTile, Scope, low};
use crate::tensor::view::{Shape, TileMut, View};
use bias::{add_bias, bias_at};
pub use intervention::Intervention;
use pass::Times;
pub(crate) use pass::{Factor, Pass, pass};
pub use relative::RelativeBias;
use std::fmt;
use std::sync::Arc;

/// A score function of your own, applied after every other option. See [`Score::custom`].
pub trait ScoreRule: fmt::Debug + Sync {
    /// The new score of a pair.
    fn apply(&self, at: Pair, score: f64) -> f64;
    /// The derivative of [`apply`](Self::apply) by `score`.
    fn derivative(&self, at: Pair, score: f64) -> f64;
}

/// What happens to a similarity before the softmax.
#[derive(Clone, Debug)]
pub struct Score<'a, E: Element> {
    pub(crate) scale: Option<f64>,
    pub(crate) temperature: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) bias: Option<View<'a, E>>,
    pub(crate) alibi: Option<&'a [E::Num]>,
    pub(crate) relative: Option<RelativeBias<'a, E::Num>>,
    pub(crate) custom: Option<&'a dyn ScoreRule>,
    pub(crate) sinks: Option<&'a [E::Num]>,
    pub(crate) interventions: Arc<[Intervention]>,
}

impl<E: Element> Default for Score<'_, E> {
    fn default() -> Self {
        Self {
            scale: None,
            temperature: 1.0,
            softcap: None,
            bias: None,
            alibi: None,
            relative: None,
            custom: None,
            sinks: None,
            interventions: Arc::default(),
        }
    }
}

impl<'a, E: Element> Score<'a, E> {
    /// Scale `1 / sqrt(qk_dim)` and nothing else.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Multiplies the similarity; 1 for plain dot products.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Divides the scale: above 1 the weights spread, below 1 they sharpen.
    #[must_use]
    pub fn temperature(self, temperature: f64) -> Self {
        Self { temperature, ..self }
    }

    /// `cap tanh(score / cap)`: bounds scores smoothly, before any bias.
    #[must_use]
    pub fn softcap(self, cap: f64) -> Self {
        Self { softcap: Some(cap), ..self }
    }

    /// Adds `bias [batch or 1, heads.q or 1, q_len or 1, k_len or 1]`; `-inf` hides a pair.
    #[must_use]
    pub fn bias(self, bias: View<'a, E>) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// Subtracts `slope * |position - key|` (Press et al. 2022), `slopes [heads.q]`; see [`alibi_slopes`].
    #[must_use]
    pub fn alibi(self, slopes: &'a [E::Num]) -> Self {
        Self { alibi: Some(slopes), ..self }
    }

    /// Adds a bias looked up by distance.
    #[must_use]
    pub fn relative(self, relative: RelativeBias<'a, E::Num>) -> Self {
        Self { relative: Some(relative), ..self }
    }

    /// A function of your own, after all of the above.
    #[must_use]
    pub fn custom(self, rule: &'a dyn ScoreRule) -> Self {
        Self { custom: Some(rule), ..self }
    }

    /// A score without a key, `sinks [heads.q]`, that joins the denominator of every row.
    #[must_use]
    pub fn sinks(self, sinks: &'a [E::Num]) -> Self {
        Self { sinks: Some(sinks), ..self }
    }

    /// Changes the scores of some edges, after all other options; where several reach a pair, their biases add up. Scores that none
    /// reaches keep their bits, forward and backward, except in calls of few queries over many keys.
    #[must_use]
    pub fn interventions(self, interventions: impl Into<Arc<[Intervention]>>) -> Self {
        Self { interventions: interventions.into(), ..self }
    }

    /// That of some rows and keys, see [`Plan::part`](crate::Plan::part).
    pub(crate) fn part(self, first_row: usize, first_key: usize) -> Self {
        let moved = |one: &Intervention| one.clone().part(first_row, first_key);
        let interventions = self.interventions.iter().map(moved).collect();
        Self { interventions, ..self }
    }

    /// The same for kernels: see [`View::erase`].
    pub(crate) fn erase(&self) -> Score<'a, E::Num> {
        let Self {
            scale,
            temperature,
            softcap,
            bias,
            alibi,
            relative,
            custom,
            sinks,
            interventions,
        } = self.clone();
        let bias = bias.map(View::erase);
        Score { scale, temperature, softcap, bias, alibi, relative, custom, sinks, interventions }
    }

    /// The option that has entries for single queries or keys, if there is one.
    pub(crate) fn by_position(&self) -> Option<&'static str> {
        let told_apart = |bias: &View<'_, E>| {
            let Shape { len, dim, .. } = bias.shape();
            (len, dim) != (1, 1)
        };
        self.bias.as_ref().filter(|bias| told_apart(bias)).map(|_| "bias")
    }

    /// Whether a score may become `-inf`, which hides its pair.
    #[inline(always)]
    pub(crate) fn may_hide(&self) -> bool {
        self.bias.is_some()
            || self.relative.is_some()
            || self.custom.is_some()
            || !self.interventions.is_empty()
    }

    /// Everything that can be wrong with it for scores `[batch, heads.q, q_len, k_len]`.
    pub(crate) fn check(&self, scores: [usize; 4]) -> Result<(), Error> {
        let heads = scores[1];
        let value = |option, found: f64, ok: bool, accepted| {
            if ok { Ok(()) } else { Err(Error::Value { option, found, accepted }) }
        };
        let scale = self.scale.unwrap_or(1.0);
        value("scale", scale, scale.is_finite(), "a finite number")?;
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let t = self.temperature;
        value("temperature", t, positive(t), "a finite number above 0")?;
        let cap = self.softcap.unwrap_or(1.0);
        value("softcap", cap, positive(cap), "a finite number above 0, or leave it out")?;
        let counted = |option, n: usize, found: usize, what| {
            if found == n {
                Ok(())
            } else {
                Err(Error::Count { option, expected: (n, what), found })
            }
        };
        for (option, entries) in [("alibi", self.alibi), ("sinks", self.sinks)] {
            counted(option, heads, entries.map_or(heads, <[_]>::len), "one for each query head")?;
        }
        if let Some(r) = &self.relative {
            r.check(heads)?;
        }
        self.interventions.iter().try_for_each(Intervention::check)?;
        if let Some(bias) = &self.bias {
            if bias.offsets().is_some() {
                return Err(Error::Packed { option: "bias" });
            }
            let found = bias.shape().to_array();
            if (0..4).any(|i| found[i] != scores[i] && found[i] != 1) {
                return Err(Error::Broadcast { option: "bias", found, scores });
            }
        }
        Ok(())
    }
}

/// The slopes of Press et al. 2022 for `heads` heads: powers of `2^(-8/n)`, `n` the next lower power of two, then the
/// odd ones between for the rest.
#[must_use]
pub fn alibi_slopes<N: Number>(heads: usize) -> Vec<N> {
    let whole = if heads == 0 { 1 } else { 1 << heads.ilog2() };
    let slope = |i: usize, n: usize| N::from_f64((-8.0 * i as f64 / n as f64).exp2());
    let rest = (0..heads - whole.min(heads)).map(|i| slope(2 * i + 1, 2 * whole));
    (1..=whole.min(heads)).map(|i| slope(i, whole)).chain(rest).collect()
}

/// The score of one pair on its way through the options, kept for the derivative.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scored<N> {
    /// `similarity * scale`
    pub(crate) scaled: N,
    /// After softcap and biases, before the custom rule.
    pub(crate) biased: N,
    /// What the softmax sees.
    pub(crate) score: N,
}

/// What the options of a tile multiply a gradient by in the backward pass, `[keys][rows]`; empty for options not in use.
#[derive(Debug)]
pub(crate) struct Derivatives<N> {
    /// What the scale multiplies, where that is not linear in the queries.
    pub(crate) similarities: Vec<Lanes<N>>,
    /// Of the options before the biases, multiplied.
    before: Vec<Lanes<N>>,
    /// Of a rule of the user's own, and of a sparsemax.
    pub(crate) custom: Vec<Lanes<N>>,
}

pub(crate) const LOG2_E: f64 = std::f64::consts::LOG2_E;

/// A score times `log2 e`; a finite one stays finite.
pub(crate) fn in_log2<N: Number>(score: N) -> N {
    let most = N::max_value();
    let x = N::from_f64(score.to_f64() * LOG2_E);
    if score.is_finite() { x.max(-most).min(most) } else { x }
}

impl<E: Element> Score<'_, E> {
    /// Whether a scaled similarity is the score already.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        self.softcap.is_none() && self.treats_pairs_alike()
    }

    /// The same for the scores between these rows and a block of keys, which may be out of the reach of all interventions.
    pub(crate) fn is_plain_at(
        &self,
        scope: &Scope,
        rows: RowTile,
        keys: (Keys<'_>, usize),
    ) -> bool {
        let is_plain = self.softcap.is_none() && self.treats_pairs_alike_but_for_interventions();
        is_plain && !self.interventions.iter().any(|one| one.reaches(scope, rows, keys))
    }

    /// Whether scores are functions of the similarity alone, whatever the pair.
    #[inline(always)]
    pub(crate) fn treats_pairs_alike(&self) -> bool {
        self.interventions.is_empty() && self.treats_pairs_alike_but_for_interventions()
    }

    #[inline(always)]
    fn treats_pairs_alike_but_for_interventions(&self) -> bool {
        // Without `..`: the compiler asks where an option that is new belongs.
        let Self {
            scale: _,
            temperature: _,
            softcap: _,
            bias,
            alibi,
            relative,
            custom,
            sinks: _,
            interventions: _,
        } = self;
        bias.is_none() && alibi.is_none() && relative.is_none() && custom.is_none()
    }

    /// Room for the derivatives of tiles of up to `keys` keys, and for the similarities, if those are asked for; `bent`: whether
    /// something after the score has derivatives too.
    pub(crate) fn derivatives(
        &self,
        keys: usize,
        similarities: bool,
        bent: bool,
    ) -> Derivatives<E::Num> {
        let one = Lanes([E::Num::from_f64(1.0); GROUP]);
        let room = |used: bool| vec![one; if used { keys } else { 0 }];
        Derivatives {
            similarities: room(similarities),
            before: room(self.softcap.is_some()),
            custom: room(self.custom.is_some() || bent),
        }
    }

    /// The definition: from the scaled similarity of a pair, and its `key - position`, to its score, in any number type.
    pub(crate) fn define<N: Number>(&self, at: Pair, distance: i64, scaled: N) -> Scored<N> {
        let Self { softcap, bias, alibi, relative, custom, interventions, .. } = self;
        let widen = |x: E::Num| N::from_f64(x.to_f64());
        let mut s = scaled;
        if let Some(cap) = softcap.map(N::from_f64) {
            s = cap * (s / cap).tanh();
        }
        if let Some(bias) = bias.map(|bias| widen(bias_at(&bias, at))) {
            // `-inf` hides the pair whatever its key holds.
            s = if bias == N::neg_infinity() { bias } else { s + bias };
        }
        if let Some(slopes) = alibi {
            s = s - widen(slopes[at.head]) * N::from_f64(distance.unsigned_abs() as f64);
        }
        if let Some(r) = relative {
            s = s + widen(r.table()[r.entry(distance, at.head)]);
        }
        let mut score = custom.map_or(s, |rule| N::from_f64(rule.apply(at, s.to_f64())));
        for bias in interventions.iter().map(|one| N::from_f64(one.bias_at(at))) {
            score = if bias == N::neg_infinity() { bias } else { score + bias };
        }
        Scored { scaled, biased: s, score }
    }

    /// The derivative of the score by `scaled`, and by what the biases add.
    pub(crate) fn derivative<N: Number>(&self, at: Pair, steps: Scored<N>) -> (N, N) {
        let by_bias =
            self.custom.map_or(N::one(), |r| N::from_f64(r.derivative(at, steps.biased.to_f64())));
        let cap = self.softcap.map(N::from_f64);
        let by_cap = cap.map_or(N::one(), |cap| {
            let t = (steps.scaled / cap).tanh();
            N::one() - t * t
        });
        (by_bias * by_cap, by_bias)
    }

    /// Turns a tile of scaled similarities `[keys][rows]` into scores, both times `log2 e`: one pass for each option in use.
    /// `derivatives` gets what each one multiplies a gradient by in the backward pass.
    #[inline(always)]
    pub(crate) fn apply<S: Simd<E::Num>>(
        &self,
        s: S,
        at: At<'_>,
        tile: &mut [Lanes<E::Num>],
        mut derivatives: Option<&mut Derivatives<E::Num>>,
    ) {
        let Self { softcap, bias, alibi, relative, custom, interventions, .. } = self;
        let number = <E::Num as Number>::from_f64;
        if let Some(derivatives) = &mut derivatives {
            derivatives.before.fill(Lanes([number(1.0); GROUP]));
        }
        if let Some(cap) = softcap {
            let (cap, inverse) = (number(cap * LOG2_E), number(1.0 / (cap * LOG2_E)));
            pass(s, at, tile, &Softcap { cap, inverse });
            if let Some(derivatives) = &mut derivatives {
                let by_cap = Times(tile, SoftcapDerivative { inverse });
                pass(s, at, &mut derivatives.before[..tile.len()], &by_cap);
            }
        }
        if let Some(bias) = bias {
            add_bias(s, bias, at, tile);
        }
        if let Some(slopes) = alibi {
            let slope = number(-slopes[at.scope.head].to_f64() * LOG2_E);
            pass(s, at, tile, &Alibi { slope, rows: positions(at), keys: at.keys });
        }
        if let Some(relative) = relative {
            relative.add(s, at, tile);
        }
        if let Some(rule) = custom {
            call_user(|| {
                for (i, scores) in tile.iter_mut().enumerate() {
                    for lane in at.span.start..at.span.end {
                        let (pair, score) = (at.pair(i, lane), scores.0[lane].to_f64() / LOG2_E);
                        if let Some(derivatives) = &mut derivatives {
                            derivatives.custom[i].0[lane] = number(rule.derivative(pair, score));
                        }
                        scores.0[lane] = number(rule.apply(pair, score) * LOG2_E);
                    }
                }
            });
        } else if let Some(derivatives) = &mut derivatives {
            derivatives.custom.fill(Lanes([number(1.0); GROUP]));
        }
        interventions.iter().for_each(|one| one.add_to(s, at, tile));
    }

    /// score = ... + bias - slope |distance| + table[bucket]: adds the gradients of a tile of scores to those of the biases.
    #[inline(always)]
    pub(crate) fn add_grads<S: Simd<E::Num>>(
        &self,
        s: S,
        at: At<'_>,
        d_scores: &[Lanes<E::Num>],
        to: BiasGrads<'_, E::Num>,
    ) {
        if self.alibi.is_some() {
            let rows = positions(at);
            for (i, d) in d_scores.iter().enumerate() {
                let key = s.splat(E::Num::of_len(at.keys.get(i)));
                for lane in at.span.vectors::<E::Num, S>() {
                    let row = s.load(&rows.0[lane..]);
                    // -|distance|
                    let nearness =
                        s.sub(s.splat(E::Num::default()), s.max(s.sub(row, key), s.sub(key, row)));
                    let sum = &mut to.slope.0[lane..];
                    s.store(s.fma(s.load(&d.0[lane..]), nearness, s.load(sum)), sum);
                }
            }
        }
        if let Some(relative) = &self.relative {
            relative.add_grads(s, at, d_scores, to.table);
        }
        if let (Some(bias), Some((mut rows, first_key))) = (&self.bias, to.dense) {
            bias::add_grads(s, bias.shape(), (at, first_key), d_scores, &mut rows);
        }
    }
}

/// Where the gradients of the biases go.
pub(crate) struct BiasGrads<'t, N> {
    /// What each row adds to that of the ALiBi slope.
    pub(crate) slope: &'t mut Lanes<N>,
    /// That of the relative bias, and what follows it.
    pub(crate) table: &'t mut [f64],
    /// That of the dense bias, if it is asked for: its rows, from this key on.
    pub(crate) dense: Option<(TileMut<'t, N>, usize)>,
}

impl<N: Number> Derivatives<N> {
    /// capped = cap tanh(scaled / cap), scaled = scale * similarity: carries the gradients of a tile of scores back to what was
    /// scaled; where that is not linear in the queries, adds to the gradient of the scale, row by row. `seen`: which rows see each
    /// key, if not all do.
    #[inline(always)]
    pub(crate) fn backward<S: Simd<N>>(
        &self,
        s: S,
        (at, visible): (At<'_>, Option<&[RowMask]>),
        d_scores: &mut [Lanes<N>],
        by_scale: &mut Lanes<N>,
    ) {
        if self.before.is_empty() && self.similarities.is_empty() {
            return;
        }
        let zero = s.splat(N::zero());
        for (i, d_scores) in d_scores.iter_mut().enumerate() {
            for lane in at.span.vectors::<N, S>() {
                // The derivative of a hidden pair may be NaN.
                let visible =
                    s.lanes(low(visible.map_or(RowMask::MAX, |visible| visible[i]) >> lane));
                let mut d = s.load(&d_scores.0[lane..]);
                if let Some(derivative) = self.before.get(i) {
                    d = s.select(visible, s.mul(d, s.load(&derivative.0[lane..])), zero);
                    s.store(d, &mut d_scores.0[lane..]);
                }
                if let Some(x) = self.similarities.get(i) {
                    let (x, sum) = (s.load(&x.0[lane..]), &mut by_scale.0[lane..]);
                    s.store(s.fma_where(visible, d, x, s.load(sum)), sum);
                }
            }
        }
    }
}

struct Softcap<N> {
    cap: N,
    inverse: N,
}

impl<N: Number> Pass<N> for Softcap<N> {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, _: usize, _: usize, x: S::V) -> S::V {
        s.mul(s.splat(self.cap), math::tanh(s, s.mul(x, s.splat(self.inverse))))
    }
}

/// From a capped score `cap tanh x` to `1 - tanh^2 x`.
struct SoftcapDerivative<N> {
    inverse: N,
}

impl<N: Number> Pass<N> for SoftcapDerivative<N> {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, _: usize, _: usize, x: S::V) -> S::V {
        let t = s.mul(x, s.splat(self.inverse));
        s.sub(s.splat(N::one()), s.mul(t, t))
    }
}

struct Alibi<'t, N> {
    slope: N,
    rows: Lanes<N>,
    keys: Keys<'t>,
}

impl<N: Number> Pass<N> for Alibi<'_, N> {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        let (row, key) = (s.load(&self.rows.0[lane..]), s.splat(N::of_len(self.keys.get(i))));
        s.fma(s.splat(self.slope), s.max(s.sub(row, key), s.sub(key, row)), x)
    }
}

/// Where each row stands among the keys. Not inlined: the compiler would work it out ahead of every tile.
#[inline(never)]
fn positions<N: Number>(at: At<'_>) -> Lanes<N> {
    Lanes(std::array::from_fn(|lane| {
        // Lanes without a row repeat the last: any finite number will do there.
        let lane = lane.min(at.rows.count - 1);
        N::from_f64(at.scope.position(at.rows.row(lane)) as f64)
    }))
}

impl<E: Element> fmt::Display for Score<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(scale) = self.scale {
            write!(f, " scale {scale}")?;
        }
        if self.temperature != 1.0 {
            write!(f, " temperature {}", self.temperature)?;
        }
        if let Some(cap) = self.softcap {
            write!(f, " softcap {cap}")?;
        }
        let named = [
            ("bias", self.bias.is_some()),
            ("alibi", self.alibi.is_some()),
            ("relative bias", self.relative.is_some()),
            ("custom", self.custom.is_some()),
            ("sinks", self.sinks.is_some()),
            ("interventions", !self.interventions.is_empty()),
        ];
        named.iter().filter(|(_, on)| *on).try_for_each(|(name, _)| write!(f, " + {name}"))
    }
}
