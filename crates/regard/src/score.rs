//! What happens to the similarity of a query and a key before the softmax.
//!
//! The order is fixed (ADR 0001): similarity, scale, softcap, biases (dense, ALiBi, relative, your own), mask; a sink
//! joins the denominator. Each option stands here side by side: its definition (`Problem::define`, one pair at a time) with
//! its derivative (`Problem::slope`), its pass over a tile (`Problem::apply`), and the way back through a tile.
//!
//! Tiles hold scores times `log2 e`, so that the softmax needs `2^x` alone; every pass works in that unit.

use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::{RowTile, Scope};
use crate::micro::{Seen, low};
use crate::problem::Problem;
use crate::relative::RelativeBias;
use crate::simd::{GROUP, Lanes, MAX_LANES, Simd, Span, Task, math};
use crate::similarity::Similarity;
use crate::view::{Shape, TileMut, View, serving};
use std::fmt;

/// A query and a key of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The item of the batch.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// The query.
    pub row: usize,
    /// The key.
    pub key: usize,
}

/// A score function of your own, applied after every other option. See [`Score::custom`].
pub trait ScoreRule: fmt::Debug + Sync {
    /// The new score of a pair.
    fn apply(&self, at: Pair, score: f64) -> f64;
    /// The derivative of [`apply`](Self::apply) by `score`.
    fn slope(&self, at: Pair, score: f64) -> f64;
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
        self.bias.is_some() || self.relative.is_some() || self.custom.is_some()
    }

    pub(crate) fn check(
        &self,
        batch: usize,
        heads: usize,
        q_len: usize,
        k_len: usize,
    ) -> Result<(), Error> {
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
        if let Some(bias) = &self.bias {
            if bias.offsets().is_some() {
                return Err(Error::Packed { option: "bias" });
            }
            let (found, scores) = (bias.shape().to_array(), [batch, heads, q_len, k_len]);
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
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let whole = if heads == 0 { 1 } else { 1 << heads.ilog2() };
    let slope = |i: usize, n: usize| (-8.0 * i as f32 / n as f32).exp2();
    let rest = (0..heads - whole.min(heads)).map(|i| slope(2 * i + 1, 2 * whole));
    (1..=whole.min(heads)).map(|i| slope(i, whole)).chain(rest).collect()
}

// The definition.

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

impl<E: Element> Problem<'_, E> {
    /// The definition: from the similarity of a pair to its score, in any number type.
    pub(crate) fn define<N: Number>(&self, at: Pair, similarity: N) -> Scored<N> {
        let Score { softcap, bias, alibi, relative, custom, .. } = &self.score;
        let widen = |x: E::Num| N::from_f64(x.to_f64());
        let scaled = similarity * N::from_f64(self.scale());
        let mut s = scaled;
        if let Some(cap) = softcap.map(N::from_f64) {
            s = cap * (s / cap).tanh();
        }
        let distance = self.distance(at);
        if let Some(bias) = bias.map(|bias| widen(bias_at(&bias, at).widen())) {
            // `-inf` hides the pair whatever its key holds.
            s = if bias == N::neg_infinity() { bias } else { s + bias };
        }
        if let Some(slopes) = alibi {
            s = s - widen(slopes[at.head]) * N::from_f64(distance.unsigned_abs() as f64);
        }
        if let Some(r) = relative {
            s = s + widen(r.table()[r.entry(distance, at.head)]);
        }
        let score = custom.map_or(s, |rule| N::from_f64(rule.apply(at, s.to_f64())));
        Scored { scaled, biased: s, score }
    }

    /// The derivative of the score by `scaled`, and by what the biases add.
    pub(crate) fn slope<N: Number>(&self, at: Pair, steps: Scored<N>) -> (N, N) {
        let custom = self.score.custom;
        let by_bias = custom.map_or(N::one(), |r| N::from_f64(r.slope(at, steps.biased.to_f64())));
        let cap = self.score.softcap.map(N::from_f64);
        let by_cap = cap.map_or(N::one(), |cap| {
            let t = (steps.scaled / cap).tanh();
            N::one() - t * t
        });
        (by_bias * by_cap, by_bias)
    }

    /// `key - position`
    pub(crate) fn distance(&self, at: Pair) -> i64 {
        at.key.cast_signed() as i64 - self.scope(at.batch, at.head).position(at.row)
    }
}

/// The bias of a pair, where axes of size 1 serve all.
pub(crate) fn bias_at<E: Copy>(bias: &View<'_, E>, at: Pair) -> E {
    let shape = bias.shape();
    let head = bias.serving_head(at.batch, at.head);
    head.row(serving(at.row, shape.len))[serving(at.key, shape.dim)]
}

// The passes over a tile.

/// One group of rows against some keys: what the passes need to know of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At<'t> {
    pub(crate) scope: Scope,
    /// The rows of the group, at most `GROUP`.
    pub(crate) rows: RowTile,
    /// Those of them that are computed.
    pub(crate) span: Span,
    /// The key of each row of the tile.
    pub(crate) keys: Keys<'t>,
}

/// Which keys a tile holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keys<'t> {
    /// Neighbours, from this one on.
    From(usize),
    /// Picked ones.
    Picked(&'t [usize]),
}

impl Keys<'_> {
    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> usize {
        match self {
            Self::From(first) => first + i,
            Self::Picked(keys) => keys[i],
        }
    }

    /// The keys from the `n`-th on.
    pub(crate) fn skip(self, n: usize) -> Self {
        match self {
            Self::From(first) => Self::From(first + n),
            Self::Picked(keys) => Self::Picked(&keys[n..]),
        }
    }
}

/// What the options of a tile multiply a gradient by on the way back, `[keys][rows]`; empty for options not in use.
#[derive(Debug)]
pub(crate) struct Slopes<N> {
    /// What the scale multiplies, where that is not linear in the queries.
    pub(crate) similarities: Vec<Lanes<N>>,
    pub(crate) softcap: Vec<Lanes<N>>,
    /// Of a rule of the user's own, and of a sparsemax.
    pub(crate) custom: Vec<Lanes<N>>,
}

impl<N: Number> Slopes<N> {
    /// Room for tiles of up to `keys` keys.
    pub(crate) fn new<E: Element<Num = N>>(problem: &Problem<'_, E>, keys: usize) -> Self {
        let room = |used: bool| vec![Lanes([N::one(); GROUP]); if used { keys } else { 0 }];
        Self {
            similarities: room(!problem.similarity.is_linear()),
            softcap: room(problem.score.softcap.is_some()),
            custom: room(problem.score.custom.is_some() || problem.is_sparse()),
        }
    }
}

pub(crate) const LOG2_E: f64 = std::f64::consts::LOG2_E;

/// A score times `log2 e`; a finite one stays finite.
pub(crate) fn in_log2<N: Number>(score: N) -> N {
    let most = N::max_value();
    let x = N::from_f64(score.to_f64() * LOG2_E);
    if score.is_finite() { x.max(-most).min(most) } else { x }
}

impl<E: Element> Problem<'_, E> {
    /// The factor that goes into the queries of a dot product; other similarities are scaled in [`Problem::apply`].
    pub(crate) fn query_factor(&self) -> f64 {
        if self.similarity.is_linear() { self.scale() * LOG2_E } else { 1.0 }
    }

    /// Whether a dot product with the scaled query is the score already.
    #[inline(always)]
    pub(crate) fn is_plain_dot(&self) -> bool {
        let Score { softcap, bias, alibi, relative, custom, .. } = &self.score;
        let untouched = softcap.is_none()
            && bias.is_none()
            && alibi.is_none()
            && relative.is_none()
            && custom.is_none();
        untouched && self.similarity.is_linear() && self.kept.is_none()
    }

    /// Turns a tile of similarities `[keys][rows]` into scores times `log2 e`: one pass for each option in use.
    ///
    /// `slopes` gets what each one multiplies a gradient by on the way back.
    #[inline(always)]
    pub(crate) fn apply<S: Simd<E::Num>>(
        &self,
        s: S,
        at: At<'_>,
        tile: &mut [Lanes<E::Num>],
        slopes: Option<&mut Slopes<E::Num>>,
    ) {
        s.call(Apply { problem: self, at, tile, slopes });
    }

    #[inline(always)]
    fn apply_here<S: Simd<E::Num>>(
        &self,
        s: S,
        at: At<'_>,
        tile: &mut [Lanes<E::Num>],
        mut slopes: Option<&mut Slopes<E::Num>>,
    ) {
        let Score { softcap, bias, alibi, relative, custom, .. } = &self.score;
        let number = <E::Num as Number>::from_f64;
        if !self.similarity.is_linear() {
            // Of distances the tile holds the squares, without their sign.
            let sign = if matches!(self.similarity, Similarity::Distance) { -1.0 } else { 1.0 };
            if let Some(slopes) = &mut slopes {
                let kept = &mut slopes.similarities[..tile.len()];
                kept.copy_from_slice(tile);
                pass(s, at, kept, &Factor(number(sign)));
            }
            pass(s, at, tile, &Factor(number(sign * self.scale() * LOG2_E)));
        }
        if let Some(cap) = softcap {
            let (cap, inverse) = (number(cap * LOG2_E), number(1.0 / (cap * LOG2_E)));
            pass(s, at, tile, &Softcap { cap, inverse });
            if let Some(slopes) = &mut slopes {
                slopes.softcap[..tile.len()].copy_from_slice(tile);
                pass(s, at, &mut slopes.softcap[..tile.len()], &SoftcapSlope { inverse });
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
            let Scope { batch, head, .. } = at.scope;
            for (i, scores) in tile.iter_mut().enumerate() {
                for lane in at.span.start..at.span.end {
                    let pair = Pair { batch, head, row: at.rows.row(lane), key: at.keys.get(i) };
                    let score = scores.0[lane].to_f64() / LOG2_E;
                    if let Some(slopes) = &mut slopes {
                        slopes.custom[i].0[lane] = number(rule.slope(pair, score));
                    }
                    scores.0[lane] = number(rule.apply(pair, score) * LOG2_E);
                }
            }
        } else if let Some(slopes) = &mut slopes {
            slopes.custom.fill(Lanes([number(1.0); GROUP]));
        }
        if let Some(kept) = &self.kept {
            kept.apply(s, self, at, tile, slopes);
        }
    }
}

/// [`Problem::apply`], a function of its own.
struct Apply<'t, E: Element> {
    problem: &'t Problem<'t, E>,
    at: At<'t>,
    tile: &'t mut [Lanes<E::Num>],
    slopes: Option<&'t mut Slopes<E::Num>>,
}

impl<E: Element> Task<E::Num> for Apply<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        self.problem.apply_here(s, self.at, self.tile, self.slopes);
    }
}

// The way back.

/// What the gradients of a piece's scores, `[keys][rows]`, say of the options: see [`Problem::undo`].
pub(crate) struct Undo<'t, E: Element> {
    pub(crate) at: At<'t>,
    /// Which rows see each key, if not all do.
    pub(crate) seen: Option<&'t [Seen]>,
    pub(crate) d_scores: &'t mut [Lanes<E::Num>],
    pub(crate) slopes: &'t Slopes<E::Num>,
    /// What each row adds to the gradients of the ALiBi slope and of the scale.
    pub(crate) by_slope: &'t mut Lanes<E::Num>,
    pub(crate) by_scale: &'t mut Lanes<E::Num>,
    /// The gradient of the relative bias, and what follows it.
    pub(crate) by_table: &'t mut [f64],
    /// The gradient of the dense bias, from this key on.
    pub(crate) bias: Option<(TileMut<'t, E::Num>, usize)>,
}

/// [`Problem::undo`], a function of its own.
struct UndoTask<'t, E: Element>(&'t Problem<'t, E>, Undo<'t, E>);

impl<E: Element> Task<E::Num> for UndoTask<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self(problem, Undo { at, seen, d_scores, slopes, by_slope, by_scale, by_table, bias }) =
            self;
        problem.add_bias_grads(s, at, d_scores, by_slope, by_table);
        if let Some((mut bias, first_key)) = bias {
            problem.add_dense_bias_grads(s, (at, first_key), d_scores, &mut bias);
        }
        problem.undo_softcap(s, (at, seen), d_scores, slopes, by_scale);
    }
}

impl<E: Element> Problem<'_, E> {
    /// Adds to the gradients of the options, and carries those of the scores back to the similarities.
    #[inline(always)]
    pub(crate) fn undo<S: Simd<E::Num>>(&self, s: S, undo: Undo<'_, E>) {
        s.call(UndoTask(self, undo));
    }

    /// What the sum of `d_score k` (of `d_score (k - q)`, for distances) is multiplied by to be the gradient of a query.
    pub(crate) fn query_grad_factor(&self) -> f64 {
        match self.similarity {
            Similarity::Distance => 2.0 * self.scale(),
            _ => self.scale(),
        }
    }

    /// The same for a key, from the sum of `d_score q`; a projected query carries its scale already.
    pub(crate) fn key_grad_factor(&self) -> f64 {
        match self.similarity {
            Similarity::General(_) => 1.0,
            _ => self.query_grad_factor(),
        }
    }

    /// score = ... + bias - slope |distance| + table[bucket]: adds to the gradients of the slope, row by row, and of the
    /// table. The dense bias has a pass of its own.
    #[inline(always)]
    fn add_bias_grads<S: Simd<E::Num>>(
        &self,
        s: S,
        at: At<'_>,
        d_scores: &[Lanes<E::Num>],
        by_slope: &mut Lanes<E::Num>,
        by_table: &mut [f64],
    ) {
        if self.score.alibi.is_some() {
            let rows = positions(at);
            for (i, d) in d_scores.iter().enumerate() {
                let key = s.splat(E::Num::of_len(at.keys.get(i)));
                for lane in at.span.vectors::<E::Num, S>() {
                    let row = s.load(&rows.0[lane..]);
                    // -|distance|
                    let nearness =
                        s.sub(s.splat(E::Num::default()), s.max(s.sub(row, key), s.sub(key, row)));
                    let sum = &mut by_slope.0[lane..];
                    s.store(s.fma(s.load(&d.0[lane..]), nearness, s.load(sum)), sum);
                }
            }
        }
        if let Some(relative) = &self.score.relative {
            relative.add_grads(s, at, d_scores, by_table);
        }
    }

    /// score = ... + bias: adds to the gradient of the dense bias, whose rows `to` are, from key `first_key` on.
    #[inline(always)]
    fn add_dense_bias_grads<S: Simd<E::Num>>(
        &self,
        s: S,
        (at, first_key): (At<'_>, usize),
        d_scores: &[Lanes<E::Num>],
        to: &mut TileMut<'_, E::Num>,
    ) {
        let Some(shape) = self.score.bias.map(|bias| bias.shape()) else { return };
        let add = |to: &mut E::Num, x: E::Num| *to = *to + x;
        let (lanes, zero) = (at.span.start..at.span.end, E::Num::default());
        // Sums of the piece first where an entry serves many pairs.
        if shape.len == 1 {
            let mut all = zero;
            for (i, d) in d_scores.iter().enumerate() {
                let sum = d.0[lanes.clone()].iter().fold(zero, |sum, x| sum + *x);
                if shape.dim == 1 {
                    all = all + sum;
                } else {
                    add(&mut to.update(0, 0)[at.keys.get(i) - first_key], sum);
                }
            }
            if shape.dim == 1 {
                add(&mut to.update(0, 0)[0], all);
            }
            return;
        }
        if shape.dim == 1 {
            for lane in lanes {
                let sum = d_scores.iter().fold(zero, |sum, d| sum + d.0[lane]);
                add(&mut to.update(0, at.rows.row(lane))[0], sum);
            }
            return;
        }
        for lane in at.span.vectors::<E::Num, S>() {
            let lanes = lane..(lane + S::LANES).min(at.span.end);
            let mut done = 0;
            while let Keys::From(key) = at.keys
                && lanes.len() == S::LANES
                && done + S::LANES <= d_scores.len()
            {
                // Neighbours in memory: turned by vectors.
                let mut block = s.block();
                for (v, d) in block.as_mut().iter_mut().zip(&d_scores[done..]) {
                    *v = s.load(&d.0[lane..]);
                }
                s.transpose(&mut block);
                for (i, v) in block.as_mut().iter().enumerate() {
                    let row = &mut to.update(0, at.rows.row(lane + i))[key - first_key + done..];
                    s.store(s.add(s.load(row), *v), row);
                }
                done += S::LANES;
            }
            for (i, d) in d_scores.iter().enumerate().skip(done) {
                for lane in lanes.clone() {
                    let row = to.update(0, at.rows.row(lane));
                    add(&mut row[at.keys.get(i) - first_key], d.0[lane]);
                }
            }
        }
    }

    /// capped = cap tanh(scaled / cap), scaled = scale * similarity: carries gradients back to what was scaled; where that
    /// is not linear in the queries, adds to the gradient of the scale, row by row.
    #[inline(always)]
    fn undo_softcap<S: Simd<E::Num>>(
        &self,
        s: S,
        (at, seen): (At<'_>, Option<&[Seen]>),
        d_scores: &mut [Lanes<E::Num>],
        slopes: &Slopes<E::Num>,
        by_scale: &mut Lanes<E::Num>,
    ) {
        if slopes.softcap.is_empty() && slopes.similarities.is_empty() {
            return;
        }
        let zero = s.splat(E::Num::default());
        for (i, d_scores) in d_scores.iter_mut().enumerate() {
            for lane in at.span.vectors::<E::Num, S>() {
                // The slope of a hidden pair may be NaN.
                let seen = s.lanes(low(seen.map_or(Seen::MAX, |seen| seen[i]) >> lane));
                let mut d = s.load(&d_scores.0[lane..]);
                if let Some(slope) = slopes.softcap.get(i) {
                    d = s.select(seen, s.mul(d, s.load(&slope.0[lane..])), zero);
                    s.store(d, &mut d_scores.0[lane..]);
                }
                if let Some(x) = slopes.similarities.get(i) {
                    let (x, sum) = (s.load(&x.0[lane..]), &mut by_scale.0[lane..]);
                    s.store(s.fma_where(seen, d, x, s.load(sum)), sum);
                }
            }
        }
    }
}

/// What an option makes of a vector of scores.
pub(crate) trait Pass<N: Number> {
    /// Of key `i` of the tile and the rows from `lane` on.
    fn turn<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V;
}

#[inline(always)]
pub(crate) fn pass<N: Number, S: Simd<N>>(
    s: S,
    at: At<'_>,
    tile: &mut [Lanes<N>],
    option: &impl Pass<N>,
) {
    for (i, scores) in tile.iter_mut().enumerate() {
        for lane in at.span.vectors::<N, S>() {
            let x = s.load(&scores.0[lane..]);
            s.store(option.turn(s, i, lane, x), &mut scores.0[lane..]);
        }
    }
}

struct Factor<N>(N);

impl<N: Number> Pass<N> for Factor<N> {
    #[inline(always)]
    fn turn<S: Simd<N>>(&self, s: S, _: usize, _: usize, x: S::V) -> S::V {
        s.mul(x, s.splat(self.0))
    }
}

struct Softcap<N> {
    cap: N,
    inverse: N,
}

impl<N: Number> Pass<N> for Softcap<N> {
    #[inline(always)]
    fn turn<S: Simd<N>>(&self, s: S, _: usize, _: usize, x: S::V) -> S::V {
        s.mul(s.splat(self.cap), math::tanh(s, s.mul(x, s.splat(self.inverse))))
    }
}

/// From a capped score `cap tanh x` to `1 - tanh^2 x`.
struct SoftcapSlope<N> {
    inverse: N,
}

impl<N: Number> Pass<N> for SoftcapSlope<N> {
    #[inline(always)]
    fn turn<S: Simd<N>>(&self, s: S, _: usize, _: usize, x: S::V) -> S::V {
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
    fn turn<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        let (row, key) = (s.load(&self.rows.0[lane..]), s.splat(N::of_len(self.keys.get(i))));
        s.fma(s.splat(self.slope), s.max(s.sub(row, key), s.sub(key, row)), x)
    }
}

/// Biases of each key and row, in their natural unit.
pub(crate) struct Bias<'t, N>(pub(crate) &'t [Lanes<N>]);

impl<N: Number> Pass<N> for Bias<'_, N> {
    /// A finite bias of a finite score stays finite in the new unit, and `-inf` stays `-inf`: it hides the pair.
    #[inline(always)]
    fn turn<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        let (bias, lowest) = (s.load(&self.0[i].0[lane..]), s.splat(-N::max_value()));
        let sum = s.max(lowest, s.fma(bias, s.splat(N::from_f64(LOG2_E)), x));
        let lower = s.select(s.less(x, bias), x, bias);
        s.select(s.less(lower, lowest), s.splat(N::neg_infinity()), sum)
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

#[inline(always)]
fn add_bias<E: Element, S: Simd<E::Num>>(
    s: S,
    bias: &View<'_, E>,
    at: At<'_>,
    tile: &mut [Lanes<E::Num>],
) {
    let shape = bias.shape();
    let Scope { batch, head, .. } = at.scope;
    let head = bias.serving_head(batch, head);
    let line = |lane: usize| head.row(serving(at.rows.row(lane), shape.len));
    if let Keys::From(key) = at.keys {
        // The lines lie a whole row apart, where no hardware prefetcher follows: ask for those of the next keys.
        for lane in at.span.start..at.span.end {
            for next in (key + tile.len()..key + 2 * tile.len()).step_by(MAX_LANES) {
                line(lane).get(next).into_iter().for_each(|x| s.prefetch(x));
            }
        }
    }
    let mut turned = [Lanes([E::Num::default(); GROUP]); MAX_LANES];
    for (block, scores) in tile.chunks_mut(S::LANES).enumerate() {
        let first = block * S::LANES;
        let turned = &mut turned[..scores.len()];
        for lane in (0..at.rows.count).step_by(S::LANES) {
            let whole =
                scores.len() == S::LANES && lane + S::LANES <= at.rows.count && shape.dim != 1;
            let lines = lane..(lane + S::LANES).min(at.span.end);
            if let (true, Keys::From(key)) = (whole, at.keys) {
                // Neighbours in memory: turned by vectors.
                let mut vectors = s.block();
                for (v, l) in vectors.as_mut().iter_mut().zip(lines) {
                    *v = E::load(s, &line(l)[key + first..]);
                }
                s.transpose(&mut vectors);
                for (v, row) in vectors.as_mut().iter().zip(turned.iter_mut()) {
                    s.store(*v, &mut row.0[lane..]);
                }
                continue;
            }
            for (i, row) in turned.iter_mut().enumerate() {
                let key = serving(at.keys.get(first + i), shape.dim);
                for l in lines.clone() {
                    row.0[l] = line(l)[key].widen();
                }
            }
        }
        pass(s, at, scores, &Bias(turned));
    }
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
        ];
        named.iter().filter(|(_, on)| *on).try_for_each(|(name, _)| write!(f, " + {name}"))
    }
}
