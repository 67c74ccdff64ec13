//! What is asked for: sizes, mask, score. No data of q, k and v; printable; checked as a whole before any work.

use crate::description::dropout::Dropout;
use crate::description::local::Local;
use crate::description::mask::Mask;
use crate::description::normalizer::{Normalizer, Rule, Selection, SelectionMask};
use crate::description::score::Score;
use crate::description::similarity::Similarity;
use crate::error::Error;
use crate::machine::simd::{Element, Precision};
use crate::tensor::cache::{KvCache, Quantization, Sequence};
use crate::tensor::index::{Scope, signed};
use crate::tensor::view::{Shape, View};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Where row 0 stands among the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Align {
    /// The last query stands at the last key, as when earlier keys come from a cache. The usual choice.
    #[default]
    End,
    /// The first query stands at the first key, as `scaled_dot_product_attention` of PyTorch has it.
    Start,
    /// Row 0 stands at this key.
    Offset(i64),
}

/// Heads of the queries and of the keys and values: `q` is a multiple of `kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key and value heads; each serves `q / kv` query heads without being repeated in memory.
    pub kv: usize,
}

/// The sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Independent items.
    pub batch: usize,
    /// Heads.
    pub heads: Heads,
    /// Queries; of the item with the most of them, where items are packed.
    pub q_len: usize,
    /// Keys; of the item with the most of them.
    pub k_len: usize,
    /// Features of a query as given; equals `qk_dim` unless the similarity projects it.
    pub q_dim: usize,
    /// Features of a key.
    pub qk_dim: usize,
    /// Features of a value.
    pub v_dim: usize,
}

impl Dims {
    /// The shape of the output.
    pub(crate) fn out_shape(self) -> Shape {
        Shape { batch: self.batch, heads: self.heads.q, len: self.q_len, dim: self.v_dim }
    }
}

/// One attention call, described: the shapes of its tensors, and every option as data.
///
/// Options are fields, to be read or set, and methods of the same names set them one after another. Nothing is checked before
/// [`Plan::new`](crate::Plan::new) asks for it.
///
/// ```
/// use regard::{Machine, Mask, Plan, Problem, Score, View};
/// let data = vec![0.5f32; 2 * 4 * 10 * 8];
/// let x = View::bhsd(&data, [2, 4, 10, 8])?;
/// let problem = Problem::new(&x, &x, &x)
///     .mask(Mask::causal().window(4))
///     .score(Score::new().softcap(50.0));
/// let plan = Plan::new(problem, Machine::detect())?;
/// let output = plan.forward(x, x, x)?;
/// assert_eq!(output.out.shape(), x.shape());
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Problem<'a, E: Element> {
    q: Shape,
    k: Shape,
    v: Shape,
    /// Where the queries of each item begin, and the end, if they are packed.
    q_offsets: Option<Arc<[usize]>>,
    /// Keys of each item, where they are not equally many.
    k_lens: Option<Arc<[usize]>>,
    /// Values of each item, where they are not equally many.
    v_lens: Option<Arc<[usize]>>,
    /// Whether keys and values are those of a cache.
    cached: bool,
    /// How the cache stores them, if in 8 bits.
    quantization: Option<Quantization>,
    /// Who may see whom.
    pub mask: Mask,
    /// What happens to the number that a query and a key make.
    pub score: Score<'a, E>,
    /// How a query and a key make a number.
    pub similarity: Similarity<'a, E>,
    /// Where row 0 stands among the keys.
    pub align: Align,
    /// Which weights are dropped, after the softmax.
    pub dropout: Option<Dropout>,
    /// Whether the entropy of each row's weights is asked for, with the largest score beside it.
    pub entropy: bool,
    /// How exact the products are.
    pub precision: Precision,
    /// How scores become weights.
    pub normalizer: Normalizer,
    /// Around which positions rows look, if not everywhere.
    pub local: Option<Local<'a, E::Num>>,
    /// What a normalizer has chosen before.
    pub(crate) selection: Option<SelectionMask<'a, E::Num>>,
    /// What the tensors hold, which `E` does not say once the problem is [erased](Self::erase).
    stored: Stored,
}

/// A type of element, as data.
#[derive(Clone, Copy, Debug)]
struct Stored {
    name: &'static str,
    bytes: usize,
    terms: fn(Precision) -> Option<usize>,
}

impl<'a, E: Element> Problem<'a, E> {
    /// Attention of `q [batch, heads.q, q_len, qk_dim]` over `k [batch, heads.kv, k_len, qk_dim]` and
    /// `v [batch, heads.kv, k_len, v_dim]`: scaled dot products, no mask.
    ///
    /// Of [packed](View::packed) views, each sequence is an item of its own length, and its result is that of a call for it
    /// alone, to the bit: it has its own [`Align`], and its number is what masks for each item, and dropout, go by. Queries
    /// and keys may be packed by different offsets, or only one of them packed.
    #[must_use]
    pub fn new(q: &View<'_, E>, k: &View<'_, E>, v: &View<'_, E>) -> Self {
        Self {
            q_offsets: q.offsets().map(Into::into),
            k_lens: k.lens(),
            v_lens: v.lens(),
            ..Self::of_shapes(q.shape(), k.shape(), v.shape())
        }
    }

    /// As [`new`](Self::new), from sizes alone: to plan before there is data.
    #[must_use]
    pub fn of_shapes(q: Shape, k: Shape, v: Shape) -> Self {
        Self {
            q,
            k,
            v,
            q_offsets: None,
            k_lens: None,
            v_lens: None,
            cached: false,
            quantization: None,
            mask: Mask::full(),
            score: Score::new(),
            similarity: Similarity::Dot,
            align: Align::End,
            dropout: None,
            entropy: false,
            precision: E::PRECISION,
            normalizer: Normalizer::Softmax,
            local: None,
            selection: None,
            stored: Stored { name: E::NAME, bytes: size_of::<E>(), terms: E::terms },
        }
    }

    /// The same for kernels, which are compiled for what they compute in: see [`View::erase`].
    pub(crate) fn erase(&self) -> Problem<'a, E::Num> {
        let one = self.clone();
        Problem {
            q: one.q,
            k: one.k,
            v: one.v,
            q_offsets: one.q_offsets,
            k_lens: one.k_lens,
            v_lens: one.v_lens,
            cached: one.cached,
            quantization: one.quantization,
            mask: one.mask,
            score: one.score.erase(),
            similarity: one.similarity.erase(),
            align: one.align,
            dropout: one.dropout,
            entropy: one.entropy,
            precision: one.precision,
            normalizer: one.normalizer,
            local: one.local,
            selection: one.selection,
            stored: one.stored,
        }
    }

    /// Bytes of an element of the tensors.
    pub(crate) fn element_bytes(&self) -> usize {
        self.stored.bytes
    }

    /// The name of the type that the tensors hold.
    pub(crate) fn dtype(&self) -> &'static str {
        self.stored.name
    }

    /// Attention of `q [sequences, heads.q, q_len, qk_dim]` over what each sequence has in a cache: its keys and values are
    /// read where they are. With several queries, and [`Align::End`], the last ones appended are those of the queries: a
    /// prompt can come in chunks. Those of different sequences may be [packed](View::packed).
    pub fn cached(
        q: &View<'_, E>,
        cache: &KvCache<E>,
        sequences: &[Sequence],
    ) -> Result<Self, Error> {
        let held = |s: &Sequence| cache.held(*s);
        let k_lens = sequences.iter().map(held).collect::<Result<Arc<[_]>, Error>>()?;
        let [k, v] = cache.shapes(sequences)?;
        let of_shapes = Self::of_shapes(q.shape(), k, v).quantized(cache.quantization());
        let q_offsets = q.offsets().map(Into::into);
        let v_lens = Some(k_lens.clone());
        Ok(Self { q_offsets, k_lens: Some(k_lens), v_lens, cached: true, ..of_shapes })
    }

    /// The same over keys and values that are stored in this way.
    pub(crate) fn quantized(self, quantization: Option<Quantization>) -> Self {
        Self { quantization, ..self }
    }

    /// How the cache stores keys and values, if in 8 bits.
    pub(crate) fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Queries of an item.
    pub(crate) fn q_len(&self, batch: usize) -> usize {
        let own = |offsets: &[usize]| offsets[batch + 1] - offsets[batch];
        self.q_offsets.as_deref().map_or(self.q.len, own)
    }

    /// Keys of an item.
    pub(crate) fn k_len(&self, batch: usize) -> usize {
        self.k_lens.as_ref().map_or(self.k.len, |lens| lens[batch])
    }

    fn v_len(&self, batch: usize) -> usize {
        self.v_lens.as_ref().map_or(self.v.len, |lens| lens[batch])
    }

    /// Whether keys and values are those of a cache.
    pub(crate) fn is_cached(&self) -> bool {
        self.cached
    }

    /// Where the queries of each item begin, and the end, if they are packed.
    pub(crate) fn q_offsets(&self) -> Option<&[usize]> {
        self.q_offsets.as_deref()
    }

    /// Whether q, k and v are packed.
    pub(crate) fn packed(&self) -> [bool; 3] {
        let lens = [&self.k_lens, &self.v_lens].map(|lens| lens.is_some() && !self.cached);
        [self.q_offsets.is_some(), lens[0], lens[1]]
    }

    /// Rows of all heads and items.
    pub(crate) fn rows(&self) -> usize {
        let each = || self.q.batch.saturating_mul(self.q.len);
        let rows = self.q_offsets().map_or_else(each, |o| o.last().copied().unwrap_or(0));
        rows.saturating_mul(self.q.heads)
    }

    /// Whether all items have the same numbers of queries and of keys.
    pub(crate) fn has_items_alike(&self) -> bool {
        self.q_offsets.is_none() && self.k_lens.is_none()
    }

    /// The sum over all items of what their numbers of queries and keys make.
    pub(crate) fn sum_over_items(&self, of: impl Fn(usize, usize) -> u128) -> u128 {
        if self.has_items_alike() {
            return (self.q.batch as u128).saturating_mul(of(self.q.len, self.k.len));
        }
        (0..self.q.batch)
            .fold(0, |sum: u128, b| sum.saturating_add(of(self.q_len(b), self.k_len(b))))
    }

    /// The same where each item is as long as this one.
    pub(crate) fn as_long_as(&self, item: usize) -> Self {
        let mut one = self.clone();
        (one.q.len, one.k.len, one.v.len) = (self.q_len(item), self.k_len(item), self.v_len(item));
        one
    }

    /// Refuses what cannot be computed in parts, such as options that are given for each row or key by its number, which is another
    /// one in a part.
    pub(crate) fn check_parts(&self) -> Result<(), Error> {
        if self.cached {
            return Err(Error::OnlyCached);
        }
        if self.packed().contains(&true) {
            return Err(Error::Packed { option: "a part of a plan" });
        }
        if !self.is_softmax() {
            let (option, normalizer) = ("a part of a plan", self.normalizer.name());
            return Err(Error::OnlySoftmax { option, normalizer });
        }
        let by_number = [
            ("dropout", self.dropout.is_some()),
            ("local", self.local.is_some()),
            ("custom score", self.score.custom.is_some()),
            ("bias", self.score.by_position().is_some()),
        ];
        match by_number.into_iter().find(|(_, is_used)| *is_used) {
            Some((option, _)) => Err(Error::NotInPart { option }),
            None => Ok(()),
        }
    }

    /// The same for some of its rows and keys, which keep their positions.
    pub(crate) fn part(&self, rows: &Range<usize>, keys: &Range<usize>) -> Result<Self, Error> {
        self.check_parts()?;
        let scope = self.scope(0, 0);
        let offset = scope.position(rows.start).saturating_sub(signed(keys.start));
        Ok(Self {
            q: Shape { len: rows.len(), ..self.q },
            k: Shape { len: keys.len(), ..self.k },
            v: Shape { len: keys.len(), ..self.v },
            mask: self.mask.part(scope, rows.start, keys.clone()),
            score: self.score.clone().part(rows.start, keys.start),
            align: Align::Offset(offset),
            ..self.clone()
        })
    }

    /// The same for keys that have been multiplied by what the similarity multiplies them by.
    pub(crate) fn with_projected_keys(&self) -> Self {
        let k = Shape { dim: self.similarity.hidden(), ..self.k };
        Self { k, similarity: self.similarity.with_projected_keys(), ..self.clone() }
    }

    /// Who may see whom.
    #[must_use]
    pub fn mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// What happens to the number that a query and a key make.
    #[must_use]
    pub fn score(self, score: Score<'a, E>) -> Self {
        Self { score, ..self }
    }

    /// How a query and a key make a number.
    #[must_use]
    pub fn similarity(self, similarity: Similarity<'a, E>) -> Self {
        Self { similarity, ..self }
    }

    /// Where row 0 stands among the keys.
    #[must_use]
    pub fn align(self, align: Align) -> Self {
        Self { align, ..self }
    }

    /// Drops some of the weights, after the softmax: for training.
    #[must_use]
    pub fn dropout(self, dropout: Dropout) -> Self {
        Self { dropout: Some(dropout), ..self }
    }

    /// How scores become weights.
    #[must_use]
    pub fn normalizer(self, normalizer: Normalizer) -> Self {
        Self { normalizer, ..self }
    }

    /// Each row looks around a position of its own only.
    #[must_use]
    pub fn local(self, local: Local<'a, E::Num>) -> Self {
        Self { local: Some(local), ..self }
    }

    /// The same with all that a row sees in its mask.
    pub(crate) fn with_local_mask(self) -> Self {
        let local = self.local.map(|local| local.mask(self.q.heads));
        local.into_iter().fold(self, |problem, local| {
            let mask = problem.mask.clone().and(local);
            problem.mask(mask)
        })
    }

    /// The same with the softmax in the place of a normalizer.
    pub(crate) fn soft(&self) -> Self {
        Self { normalizer: Normalizer::Softmax, selection: None, ..self.clone() }
    }

    /// Whether rows have something to find out before they have weights.
    pub(crate) fn selects(&self) -> bool {
        !self.normalizer.is_softmax() && self.selection.is_none()
    }

    /// Whether scores become weights by the softmax over all that a row sees.
    pub(crate) fn is_softmax(&self) -> bool {
        self.normalizer.is_softmax() && self.selection.is_none()
    }

    /// The same for a choice that was made before.
    pub(crate) fn selecting<'b>(
        &self,
        selection: &'b Selection<E::Num>,
        rule: Rule,
    ) -> Problem<'b, E>
    where
        'a: 'b,
    {
        Problem { selection: Some(SelectionMask { selection, rule }), ..self.clone() }
    }

    /// The definition's own choice is replaced by one that a call of the same sizes has made: its
    /// [`Output::selection`](crate::Output::selection). For the definition only; plans refuse it.
    #[doc(hidden)]
    #[must_use]
    pub fn with_selection<'b>(&self, selection: &'b Selection<E::Num>) -> Problem<'b, E>
    where
        'a: 'b,
    {
        self.selecting(selection, self.normalizer.rule())
    }

    /// Asks for the entropy of each row's weights beside the output, and for its largest score.
    #[must_use]
    pub fn entropy(self) -> Self {
        Self { entropy: true, ..self }
    }

    /// How exact the products are.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// Whether a single query sees all keys and neither its item nor any position makes a difference.
    pub(crate) fn treats_all_keys_alike(&self) -> bool {
        let all = self.mask.is_full() || (self.mask.is_causal() && self.align == Align::End);
        self.score.treats_pairs_alike()
            && self.score.sinks.is_none()
            && all
            && self.is_dot()
            && self.is_softmax()
            && !self.has_factors()
            && !self.entropy
    }

    /// Whether no option tells the rows and keys of a decoding task apart.
    pub(crate) fn treats_rows_alike(&self) -> bool {
        self.is_plain_dot() && !self.has_factors() && !self.entropy
    }

    /// Whether similarities are plain dot products.
    pub(crate) fn is_dot(&self) -> bool {
        matches!(self.similarity, Similarity::Dot)
    }

    /// The bf16 terms that numbers are split into for products on tiles, if the precision, the similarity and the cache allow that: numbers
    /// in 8 bits are computed in `f32`.
    pub(crate) fn terms(&self) -> Option<usize> {
        let allowed = self.is_dot() && self.is_softmax() && self.quantization.is_none();
        (self.stored.terms)(self.precision).filter(|_| allowed)
    }

    /// The shapes of q, k and v.
    pub(crate) fn shapes(&self) -> [Shape; 3] {
        [self.q, self.k, self.v]
    }

    /// The sizes.
    #[must_use]
    pub fn dims(&self) -> Dims {
        Dims {
            batch: self.q.batch,
            heads: Heads { q: self.q.heads, kv: self.k.heads },
            q_len: self.q.len,
            k_len: self.k.len,
            q_dim: self.q.dim,
            qk_dim: self.k.dim,
            v_dim: self.v.dim,
        }
    }

    /// Which head is asked about, and the sizes around it.
    #[must_use]
    pub fn scope(&self, batch: usize, head: usize) -> Scope {
        let (q_len, k_len) = (self.q_len(batch), self.k_len(batch));
        let offset = match self.align {
            Align::End => k_len.cast_signed() as i64 - q_len.cast_signed() as i64,
            Align::Start => 0,
            Align::Offset(offset) => offset,
        };
        Scope { batch, head, q_len, k_len, offset }
    }

    /// Where a row of a head stands in `[batch, heads.q, q_len]`, or, if queries are packed, in `[total, heads.q]`.
    #[inline(always)]
    pub(crate) fn row_index(&self, scope: Scope, row: usize) -> usize {
        match self.q_offsets() {
            Some(offsets) => (offsets[scope.batch] + row) * self.q.heads + scope.head,
            None => (scope.batch * self.q.heads + scope.head) * scope.q_len + row,
        }
    }

    /// The key head that serves a query head.
    pub(crate) fn kv_head(&self, head: usize) -> usize {
        head / (self.q.heads / self.k.heads)
    }

    /// The number that scores are multiplied by: the one given or `1 / sqrt(qk_dim)` (1 for [`Similarity::Additive`]), over
    /// the temperature.
    #[must_use]
    pub fn scale(&self) -> f64 {
        let usual = self.similarity.usual_scale(self.k.dim);
        self.score.scale.unwrap_or(usual) / self.score.temperature
    }

    /// Refuses offsets that are not those planned for q, k or v.
    pub(crate) fn same_packing(
        &self,
        name: &'static str,
        tensor: usize,
        offsets: Option<&[usize]>,
    ) -> Result<(), Error> {
        let batch = self.q.batch;
        let packed = |packed: bool| if packed { batch } else { 0 };
        let planned = packed(self.packed()[tensor]);
        let found = packed(offsets.is_some());
        Error::unless_same("packed sequences", ("the plan", planned), (name, found))?;
        for (item, pair) in offsets.unwrap_or(&[]).windows(2).enumerate() {
            let own = pair[1] - pair[0];
            let planned = if tensor == 0 { self.q_len(item) } else { self.k_len(item) };
            Error::unless_same("length", ("the plan", planned), (name, own))?;
        }
        Ok(())
    }

    /// All that can be wrong with this description.
    pub fn check(&self) -> Result<(), Error> {
        let Self { q, k, v, .. } = self;
        let same = Error::unless_same;
        same("batch", ("q", q.batch), ("k", k.batch))?;
        same("batch", ("k", k.batch), ("v", v.batch))?;
        same("heads", ("k", k.heads), ("v", v.heads))?;
        if self.k_lens.is_some() || self.v_lens.is_some() {
            for item in 0..q.batch {
                same("keys", ("k", self.k_len(item)), ("v", self.v_len(item)))?;
            }
        }
        same("keys", ("k", k.len), ("v", v.len))?;
        if (k.heads == 0 && q.heads != 0) || (k.heads != 0 && !q.heads.is_multiple_of(k.heads)) {
            return Err(Error::HeadGroups { q: q.heads, kv: k.heads });
        }
        for (tensor, shape) in [("q", q), ("k", k)] {
            if shape.dim == 0 {
                return Err(Error::NoFeatures { tensor });
            }
        }
        if let Align::Offset(at) = self.align
            && at.unsigned_abs() > 1 << 62
        {
            let accepted = "a position that fits in 62 bits";
            return Err(Error::Value { option: "align", found: at as f64, accepted });
        }
        self.dropout.map_or(Ok(()), |dropout| dropout.check())?;
        let uneven = self.k_lens.iter().flat_map(|lens| lens.iter()).any(|len| *len != k.len);
        if (self.packed().contains(&true) || uneven)
            && let Some(option) = self.score.by_position().or(self.mask.by_position())
        {
            return Err(Error::Packed { option });
        }
        if let Some(local) = &self.local {
            local.check(self.rows(), self.packed().contains(&true))?;
        }
        if self.selection.is_some() {
            // For the definition only; a plan makes its own choice.
            let (option, normalizer) = ("a selection made before", self.normalizer.name());
            return Err(Error::OnlySoftmax { option, normalizer });
        }
        self.normalizer.check(self.score.sinks.is_some(), self.entropy)?;
        self.similarity.check(*q, *k)?;
        if self.cached && self.similarity.of_keys().is_some() {
            return Err(Error::NotInCache { option: "Additive::w_k" });
        }
        let scores = [q.batch, q.heads, q.len, k.len];
        self.score.check(scores)?;
        self.check_mask(&self.mask)
    }

    /// Whether a mask fits the scores. What is the same for all items is looked at once: a batch of empty tensors may be of any size.
    pub(crate) fn check_mask(&self, mask: &Mask) -> Result<(), Error> {
        let Dims { batch, heads, q_len, k_len, .. } = self.dims();
        let items = if self.has_items_alike() { batch.min(1) } else { batch };
        let len = |item| [self.q_len(item), self.k_len(item)];
        mask.check([batch, heads.q, q_len, k_len], items, &len)
    }
}

impl<E: Element> fmt::Display for Problem<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Dims { batch, heads, q_len, k_len, q_dim, v_dim, .. } = self.dims();
        write!(f, "{} batch {batch} heads {}/{} ", self.dtype(), heads.q, heads.kv)?;
        let [q_most, k_most] = [self.q_offsets.is_some(), self.k_lens.is_some()]
            .map(|own| if own { "<=" } else { "" });
        write!(f, "queries {q_most}{q_len}x{q_dim} keys {k_most}{k_len} values x{v_dim}, ")?;
        if let Some(quantization) = self.quantization {
            write!(f, "in {}, ", quantization.name())?;
        }
        write!(f, "mask {}, score {}{}", self.mask, self.similarity, self.score)?;
        if let Some(local) = self.local {
            write!(f, ", within {} of centers", local.reach())?;
        }
        if !self.normalizer.is_softmax() {
            write!(f, ", weights {}", self.normalizer)?;
        }
        if let Some(dropout) = self.dropout {
            write!(f, ", dropout {}", dropout.rate())?;
        }
        if self.entropy { write!(f, ", with entropy") } else { Ok(()) }
    }
}
