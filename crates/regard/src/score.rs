//! What a query and a key make of each other: the similarity, and what happens to it before the softmax.
//!
//! The order is fixed (ADR 0001): similarity, scale, softcap, biases (dense, ALiBi, relative, your own), mask; a sink
//! joins the denominator. Each option stands here three times, side by side: its definition ([`Score::define`], one
//! pair at a time), its pass over a tile ([`Score::apply`]), and its derivative ([`Score::slope`]).
//!
//! Tiles hold scores times `log2 e`, so that the softmax needs `2^x` alone; every pass works in that unit.

use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::{RowTile, Scope};
use crate::problem::Problem;
use crate::simd::{GROUP, Lanes, MAX_LANES, Simd, Span, math};
use crate::view::{Shape, View};
use std::fmt;
use std::sync::Arc;

/// How a query and a key make a number.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Similarity<'a, E> {
    /// `q . k`
    #[default]
    Dot,
    /// `q^T W k` (Luong's general form), with `W [1, heads.q or 1, q_dim, qk_dim]`.
    General(View<'a, E>),
    /// `-|q - k|^2`
    Distance,
}

impl<E> Similarity<'_, E> {
    pub(crate) fn check(&self, q: Shape, k: Shape) -> Result<(), Error> {
        let same = Error::unless_same;
        let Self::General(w) = self else {
            return same("features", ("q", q.dim), ("k", k.dim));
        };
        let w = w.shape();
        same("features", ("q", q.dim), ("rows of W", w.len))?;
        same("features", ("k", k.dim), ("columns of W", w.dim))?;
        same("batch", ("W", w.batch), ("a shared W", 1))?;
        if w.heads == 1 { Ok(()) } else { same("heads", ("q", q.heads), ("W", w.heads)) }
    }
}

impl<E> fmt::Display for Similarity<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dot => "dot",
            Self::General(_) => "general",
            Self::Distance => "distance",
        })
    }
}

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

/// A bias looked up by the distance of key and row: `table [buckets, heads.q]`.
#[derive(Clone, Debug)]
pub struct RelativeBias<'a, N> {
    pub(crate) table: &'a [N],
    /// The bucket of each distance `key - position` from `-reach` to `reach`; beyond, the nearest end.
    buckets: Arc<[usize]>,
    /// Buckets in the table.
    count: usize,
    /// The reach as given; no buckets are made beyond [`MAX_REACH`].
    reach: usize,
}

/// Farther than any published table reaches, and short enough to be kept as one bucket for each distance.
const MAX_REACH: usize = 1 << 20;

impl<'a, N: Number> RelativeBias<'a, N> {
    /// One bucket for each distance `key - position` from `-reach` to `reach`, the ends for all beyond:
    /// `table [2 reach + 1, heads.q]`.
    #[must_use]
    pub fn clipped(table: &'a [N], reach: usize) -> Self {
        let buckets = if reach <= MAX_REACH { (0..=2 * reach).collect() } else { Arc::default() };
        Self { table, buckets, count: reach.saturating_mul(2).saturating_add(1), reach }
    }

    /// The buckets of T5 (Raffel et al. 2020): near distances one each, far ones by their logarithm up to
    /// `max_distance`. `table [buckets, heads.q]`.
    #[must_use]
    pub fn t5(table: &'a [N], buckets: usize, max_distance: usize, bidirectional: bool) -> Self {
        let reach = max_distance.min(MAX_REACH).cast_signed();
        let bucket = |distance: isize| {
            let n = if bidirectional { buckets / 2 } else { buckets };
            let first = if bidirectional && distance > 0 { n } else { 0 };
            let size = if bidirectional {
                distance.unsigned_abs()
            } else {
                (-distance).max(0).unsigned_abs()
            };
            let exact = n / 2;
            if size < exact || exact == 0 {
                return first + size.min(n.saturating_sub(1));
            }
            // In f32 and in this order, as the published models were trained.
            let far = (size as f32 / exact as f32).ln() / (max_distance as f32 / exact as f32).ln();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a floor, at most n"
            )]
            let step = (far * (n - exact) as f32) as usize;
            first + (exact + step).min(n - 1)
        };
        let all = (-reach..=reach).map(bucket);
        let map = if max_distance <= MAX_REACH { all.collect() } else { Arc::default() };
        Self { table, buckets: map, count: buckets, reach: max_distance }
    }

    /// Where in the table the bias of a distance stands, for one head of `heads`.
    pub(crate) fn entry(&self, distance: i64, head: usize, heads: usize) -> usize {
        let reach = self.reach.cast_signed() as i64;
        let at = usize::try_from(distance.clamp(-reach, reach) + reach).unwrap_or(0);
        self.buckets[at] * heads + head
    }
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
            if r.reach > MAX_REACH {
                let (found, limit) = (r.reach, MAX_REACH + 1);
                return Err(Error::OutOfRange { option: "relative bias", found, limit });
            }
            if r.count == 0 {
                return Err(Error::Zero { option: "relative bias" });
            }
            let entries = r.count.saturating_mul(heads);
            counted("relative bias", entries, r.table.len(), "buckets x query heads")?;
        }
        if let Some(bias) = &self.bias {
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
pub(crate) struct Steps<N> {
    /// `similarity * scale`
    pub(crate) scaled: N,
    /// After softcap and biases, before the custom rule.
    pub(crate) biased: N,
    /// What the softmax sees.
    pub(crate) score: N,
}

impl<E: Element> Problem<'_, E> {
    /// The definition: from the similarity of a pair to its score, in any number type.
    pub(crate) fn define<N: Number>(&self, at: Pair, similarity: N) -> Steps<N> {
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
            s = s + widen(r.table[r.entry(distance, at.head, self.dims().heads.q)]);
        }
        let score = custom.map_or(s, |rule| N::from_f64(rule.apply(at, s.to_f64())));
        Steps { scaled, biased: s, score }
    }

    /// The derivative of the score by `scaled`, and by what the biases add.
    pub(crate) fn slope<N: Number>(&self, at: Pair, steps: Steps<N>) -> (N, N) {
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
    let on = |i: usize, n: usize| if n == 1 { 0 } else { i };
    let row = bias.row(on(at.batch, shape.batch), on(at.head, shape.heads), on(at.row, shape.len));
    row[on(at.key, shape.dim)]
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
        match self.similarity {
            Similarity::Distance => 1.0,
            _ => self.scale() * LOG2_E,
        }
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
        untouched && !matches!(self.similarity, Similarity::Distance)
    }

    /// Turns a tile of similarities `[keys][rows]` into scores times `log2 e`: one pass for each option in use.
    #[inline(always)]
    pub(crate) fn apply<S: Simd<E::Num>>(&self, s: S, at: At<'_>, tile: &mut [Lanes<E::Num>]) {
        let Score { softcap, bias, alibi, relative, custom, .. } = &self.score;
        let number = <E::Num as Number>::from_f64;
        if matches!(self.similarity, Similarity::Distance) {
            pass(s, at, tile, &Factor(number(-self.scale() * LOG2_E)));
        }
        if let Some(cap) = softcap {
            let (cap, inverse) = (number(cap * LOG2_E), number(1.0 / (cap * LOG2_E)));
            pass(s, at, tile, &Softcap { cap, inverse });
        }
        if let Some(bias) = bias {
            add_bias(s, bias, at, tile);
        }
        if let Some(slopes) = alibi {
            let slope = number(-slopes[at.scope.head].to_f64() * LOG2_E);
            pass(s, at, tile, &Alibi { slope, rows: positions(at), keys: at.keys });
        }
        if let Some(relative) = relative {
            add_relative(s, relative, self.dims().heads.q, at, tile);
        }
        if let Some(rule) = custom {
            let Scope { batch, head, .. } = at.scope;
            for (i, scores) in tile.iter_mut().enumerate() {
                for lane in at.span.start..at.span.end {
                    let pair = Pair { batch, head, row: at.rows.row(lane), key: at.keys.get(i) };
                    scores.0[lane] =
                        number(rule.apply(pair, scores.0[lane].to_f64() / LOG2_E) * LOG2_E);
                }
            }
        }
    }
}

/// What an option makes of a vector of scores.
trait Pass<N: Number> {
    /// Of key `i` of the tile and the rows from `lane` on.
    fn turn<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V;
}

#[inline(always)]
fn pass<N: Number, S: Simd<N>>(s: S, at: At<'_>, tile: &mut [Lanes<N>], option: &impl Pass<N>) {
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
struct Bias<'t, N>(&'t [Lanes<N>]);

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
    let head = bias
        .head(if shape.batch == 1 { 0 } else { batch }, if shape.heads == 1 { 0 } else { head });
    let line = |lane: usize| head.row(if shape.len == 1 { 0 } else { at.rows.row(lane) });
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
            if let (true, Keys::From(key), Some(_)) = (whole, at.keys, E::as_numbers(&[])) {
                // Neighbours in memory: turned by vectors.
                let mut vectors = s.block();
                for (v, l) in vectors.as_mut().iter_mut().zip(lines) {
                    *v = s.load(E::as_numbers(&line(l)[key + first..]).unwrap_or(&[]));
                }
                s.transpose(&mut vectors);
                for (v, row) in vectors.as_mut().iter().zip(turned.iter_mut()) {
                    s.store(*v, &mut row.0[lane..]);
                }
                continue;
            }
            for (i, row) in turned.iter_mut().enumerate() {
                let key = if shape.dim == 1 { 0 } else { at.keys.get(first + i) };
                for l in lines.clone() {
                    row.0[l] = line(l)[key].widen();
                }
            }
        }
        pass(s, at, scores, &Bias(turned));
    }
}

#[inline(always)]
fn add_relative<N: Number, S: Simd<N>>(
    s: S,
    relative: &RelativeBias<'_, N>,
    heads: usize,
    at: At<'_>,
    tile: &mut [Lanes<N>],
) {
    for (i, scores) in tile.iter_mut().enumerate() {
        let key = at.keys.get(i).cast_signed() as i64;
        let mut line = [Lanes([N::zero(); GROUP])];
        for lane in at.span.start..at.span.end {
            let distance = key - at.scope.position(at.rows.row(lane));
            line[0].0[lane] = relative.table[relative.entry(distance, at.scope.head, heads)];
        }
        pass(s, at, std::slice::from_mut(scores), &Bias(&line));
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
