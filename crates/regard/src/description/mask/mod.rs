//! Attention masks: sets of visible (query, key) pairs, built from rules that are combined with `and` and `or`.
//!
//! Each rule has two implementations. [`Mask::is_visible`] is the definition and tests a single pair. [`Mask::runs`] computes
//! the same result for a tile of rows: a short sorted list of key ranges, each with the set of rows for which it is visible.
//! Two lists are combined in one sweep, so any combination of rules costs O(ranges). Only `bits` stores more than
//! O(n) memory.
//!
//! Positions: row `i` has position `i + offset` on the key axis (see [`Align`](crate::problem::Align)). The causal, window, block and
//! stride rules use this position, so they keep their meaning when there are fewer queries than keys.

mod bits;
mod lists;
mod part;
mod runs;
mod tree;

use crate::error::Error;
use crate::machine::simd::call_user;
use crate::tensor::index::{LaneSet, RowTile, Scope, lane_range, signed};
pub use bits::Bits;
pub use lists::KeyLists;
use part::Part;
pub(crate) use runs::Run;
use runs::{combine, from_ranges, monotone, push};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use tree::Tree;

/// A user-defined mask rule. See [`Mask::custom`].
pub trait MaskRule: fmt::Debug + Send + Sync {
    /// Pushes the ranges of keys visible to `row`, in ascending order. Ranges are clipped to the number of keys.
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>);
}

/// An attention mask: the set of visible (query, key) pairs. Cheap to clone.
///
/// ```
/// use regard::Mask;
/// let sliding = Mask::causal().window(4096);
/// let prefix_lm = Mask::causal().or(Mask::prefix(10));
/// let padded = Mask::causal().and(Mask::lengths(&[7, 5]));
/// assert_eq!(sliding.to_string(), "causal window 4096");
/// assert_eq!(padded.to_string(), "causal & lengths");
/// # let _ = prefix_lm;
/// ```
#[derive(Clone, Debug, Default)]
pub struct Mask(Rule);

#[derive(Clone, Debug, Default)]
enum Rule {
    #[default]
    All,
    Nothing,
    /// Keys from `position - back` to `position + ahead`, both inclusive; `None` means unbounded.
    Band {
        back: Option<usize>,
        ahead: Option<usize>,
    },
    /// One key range for each batch item, or a single one for all items.
    Spans(Arc<[Range<usize>]>),
    Segments(Arc<Segments>),
    /// Sorted positions that attend to every key and are visible to every row.
    Global(Arc<[usize]>),
    Blocks(usize),
    Dilated(usize),
    /// The last `width` keys of each block of `block` keys.
    Columns {
        block: usize,
        width: usize,
    },
    Bits(Bits),
    /// One tree for each batch item, or a single one for all items.
    Trees(Arc<[Tree]>),
    Lists(KeyLists),
    Custom(Arc<dyn MaskRule>),
    Part(Arc<Part>),
    And(Arc<(Mask, Mask)>),
    Or(Arc<(Mask, Mask)>),
}

/// Document ids of rows and keys.
#[derive(Debug)]
struct Segments {
    /// Document of each row, `[batch or 1, q_len]`. `None`: a row takes the document of the key at its position.
    q: Option<Vec<u32>>,
    /// Document of each key, `[batch or 1, k_len]`.
    k: Vec<u32>,
    /// The runs of equal entries in `k`, sorted by document, then by first key.
    runs: Vec<(u32, Range<usize>)>,
}

/// Boundaries of the visible key ranges: `fixed` as key indices, `moving` as distances from the position of the row.
#[derive(Debug)]
pub(crate) struct Edges {
    pub(crate) fixed: Vec<i64>,
    pub(crate) moving: Vec<i64>,
}

impl Mask {
    /// Every key is visible to every row.
    #[must_use]
    pub fn full() -> Self {
        Self(Rule::All)
    }

    /// Causal mask: a row attends to the keys up to and including its own position.
    #[must_use]
    pub fn causal() -> Self {
        Self::band(None, Some(0))
    }

    /// A row attends to the keys from `back` before its position to `ahead` after it, both inclusive; `None` means unbounded.
    #[must_use]
    pub fn band(back: Option<usize>, ahead: Option<usize>) -> Self {
        Self(Rule::Band { back, ahead })
    }

    /// Sliding window: restricts the mask to keys less than `keys` away from the row's position.
    /// `Mask::causal().window(4096)` leaves 4096 visible keys, including the one at the row's own position.
    #[must_use]
    pub fn window(self, keys: usize) -> Self {
        match keys.checked_sub(1) {
            Some(reach) => self.and(Self::band(Some(reach), Some(reach))),
            None => Self(Rule::Nothing),
        }
    }

    /// Padding mask: keys from index `lengths[b]` on are padding. A single length applies to every batch item.
    #[must_use]
    pub fn lengths(lengths: &[usize]) -> Self {
        Self(Rule::Spans(lengths.iter().map(|n| 0..*n).collect()))
    }

    /// Padding mask for padding on both sides: only keys in `spans[b]` are visible. A single span applies to every batch item.
    #[must_use]
    pub fn spans(spans: &[Range<usize>]) -> Self {
        Self(Rule::Spans(spans.into()))
    }

    /// The first `keys` keys are visible to every row. A prefix language model (Raffel et al. 2020) is
    /// `Mask::causal().or(Mask::prefix(n))`.
    #[must_use]
    pub fn prefix(keys: usize) -> Self {
        Self(Rule::Spans(std::iter::once(0..keys).collect()))
    }

    /// Document mask for packed documents: a row attends to the keys of its own document. `documents` holds the document id of
    /// each key, `[k_len]` or `[batch, k_len]`; a row belongs to the document of the key at its position.
    #[must_use]
    pub fn segments(documents: &[u32]) -> Self {
        Self(Rule::Segments(Arc::new(Segments::new(None, documents))))
    }

    /// As [`segments`](Self::segments), with separate document ids for the rows, `[q_len]` or `[batch, q_len]`. For
    /// cross-attention.
    #[must_use]
    pub fn segments_between(q: &[u32], k: &[u32]) -> Self {
        Self(Rule::Segments(Arc::new(Segments::new(Some(q), k))))
    }

    /// Global positions: each attends to every key and is visible to every row.
    #[must_use]
    pub fn global(positions: &[usize]) -> Self {
        let mut sorted = positions.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        Self(Rule::Global(sorted.into()))
    }

    /// Block-diagonal mask: a row attends to the keys of its own block of `size` positions.
    #[must_use]
    pub fn blocks(size: usize) -> Self {
        Self(Rule::Blocks(size))
    }

    /// Keys whose distance from the row's position is a multiple of `stride`.
    #[must_use]
    pub fn dilated(stride: usize) -> Self {
        Self(Rule::Dilated(stride))
    }

    /// The last `width` keys of each block of `block` keys, visible to every row.
    #[must_use]
    pub fn columns(block: usize, width: usize) -> Self {
        Self(Rule::Columns { block, width })
    }

    /// The strided pattern of the sparse Transformer (Child et al. 2019): keys less than `stride` away, and keys at multiples of
    /// `stride`. Usually combined with [`causal`](Self::causal).
    #[must_use]
    pub fn strided(stride: usize) -> Self {
        Self::full().window(stride).or(Self::dilated(stride))
    }

    /// The fixed pattern of the sparse Transformer (Child et al. 2019): the row's own block, and the last `summary` keys of each
    /// block. Usually combined with [`causal`](Self::causal).
    #[must_use]
    pub fn fixed(block: usize, summary: usize) -> Self {
        Self::blocks(block).or(Self::columns(block, summary))
    }

    /// Longformer (Beltagy et al. 2020): keys less than `window` away, and [`global`](Self::global) positions.
    #[must_use]
    pub fn longformer(window: usize, global: &[usize]) -> Self {
        Self::full().window(window).or(Self::global(global))
    }

    /// An arbitrary mask, one bit for each (query, key) pair, or for each pair of a query and a key in its
    /// [window](Bits::windowed). The only rule with more than O(queries + keys) memory.
    #[must_use]
    pub fn bits(bits: Bits) -> Self {
        Self(Rule::Bits(bits))
    }

    /// Speculative decoding: the last `parents.len()` rows are draft tokens of a tree. `parents[i]` is the index of the parent of
    /// token `i`, which comes before it; a token without a parent follows the context. A token attends to the keys before the first
    /// draft token, to its ancestors and to itself; rows before the draft tokens are causal. So a chain is [`causal`](Self::causal).
    ///
    /// The key of a draft token is the one at its row's position: with [`Align::End`](crate::problem::Align::End), the last keys are
    /// those of the draft tokens.
    ///
    /// ```
    /// use regard::{Mask, Problem, View};
    /// let data = vec![0.5f32; 10 * 8];
    /// let (q, k) = (View::matrix(&data[..3 * 8], [3, 8])?, View::matrix(&data, [10, 8])?);
    /// // Two continuations of token 0.
    /// let mask = Mask::tree(&[None, Some(0), Some(0)]);
    /// let scope = Problem::new(&q, &k, &k).scope(0, 0);
    /// assert_eq!(mask.visible(&scope, 1), [0..9]);
    /// assert_eq!(mask.visible(&scope, 2), [0..8, 9..10]);
    /// # Ok::<(), regard::Error>(())
    /// ```
    #[must_use]
    pub fn tree(parents: &[Option<usize>]) -> Self {
        Self::trees(&[parents])
    }

    /// As [`tree`](Self::tree), with one tree for each batch item, or a single one for all items.
    #[must_use]
    pub fn trees<P: AsRef<[Option<usize>]>>(parents: &[P]) -> Self {
        Self(Rule::Trees(parents.iter().map(|parents| Tree::new(parents.as_ref())).collect()))
    }

    /// The listed keys only: attention over retrieved keys. The cost of a call is proportional to the lists.
    ///
    /// ```
    /// use regard::mask::KeyLists;
    /// use regard::{Mask, Problem, View};
    /// let data = vec![0.5f32; 10 * 8];
    /// let (q, k) = (View::matrix(&data[..2 * 8], [2, 8])?, View::matrix(&data, [10, 8])?);
    /// let mask = Mask::keys(KeyLists::new(&[vec![0, 7], vec![3, 4, 5]], [1, 1, 2])?);
    /// let scope = Problem::new(&q, &k, &k).scope(0, 0);
    /// assert_eq!(mask.visible(&scope, 0), [0..1, 7..8]);
    /// assert_eq!(mask.visible(&scope, 1), [3..6]);
    /// # Ok::<(), regard::Error>(())
    /// ```
    #[must_use]
    pub fn keys(lists: KeyLists) -> Self {
        Self(Rule::Lists(lists))
    }

    /// A user-defined rule.
    #[must_use]
    pub fn custom(rule: impl MaskRule + 'static) -> Self {
        Self(Rule::Custom(Arc::new(rule)))
    }

    /// Intersection: the pairs that are visible in both masks.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Rule::All, rule) | (rule, Rule::All) => Self(rule),
            (Rule::Nothing, _) | (_, Rule::Nothing) => Self(Rule::Nothing),
            (Rule::Band { back: a, ahead: b }, Rule::Band { back: c, ahead: d }) => {
                let nearer = |x: Option<usize>, y: Option<usize>| match (x, y) {
                    (Some(x), Some(y)) => Some(x.min(y)),
                    (x, y) => x.or(y),
                };
                Self::band(nearer(a, c), nearer(b, d))
            }
            (a, b) => Self(Rule::And(Arc::new((Self(a), Self(b))))),
        }
    }

    /// Union: the pairs that are visible in at least one of the masks.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Rule::All, _) | (_, Rule::All) => Self(Rule::All),
            (Rule::Nothing, rule) | (rule, Rule::Nothing) => Self(rule),
            (a, b) => Self(Rule::Or(Arc::new((Self(a), Self(b))))),
        }
    }

    /// The mask of some rows and keys: those from `first_row` on, and `keys`, of scores with the sizes of `scope`.
    pub(crate) fn part(&self, scope: Scope, first_row: usize, keys: Range<usize>) -> Self {
        let whole = self.clone();
        match &self.0 {
            Rule::All | Rule::Nothing => whole,
            _ => Self(Rule::Part(Arc::new(Part { whole, scope, first_row, keys }))),
        }
    }

    /// The definition: whether `key` is visible to `row`.
    ///
    /// # Panics
    /// If the mask does not match the scope, or `row` or `key` is out of range. [`Plan::new`](crate::Plan::new) checks the mask.
    #[must_use]
    pub fn is_visible(&self, scope: &Scope, row: usize, key: usize) -> bool {
        let position = scope.position(row);
        let distance = position - signed(key); // positive: the key precedes the row
        let within = |bound: Option<usize>, d: i64| bound.is_none_or(|n| d <= signed(n));
        match &self.0 {
            Rule::All => true,
            Rule::Nothing => false,
            Rule::Band { back, ahead } => within(*back, distance) && within(*ahead, -distance),
            Rule::Spans(spans) => of_batch(spans, scope.batch).contains(&key),
            Rule::Segments(s) => s.row(scope, row).is_some_and(|id| id == s.key(scope, key)),
            Rule::Global(set) => {
                let holds =
                    |at: i64| usize::try_from(at).is_ok_and(|at| set.binary_search(&at).is_ok());
                holds(position) || holds(signed(key))
            }
            Rule::Blocks(size) => {
                let size = signed(*size);
                position.div_euclid(size) == signed(key) / size
            }
            Rule::Dilated(stride) => distance.rem_euclid(signed(*stride)) == 0,
            Rule::Columns { block, width } => key % block >= block.saturating_sub(*width),
            Rule::Bits(bits) => bits.get(scope, row, key),
            Rule::Trees(trees) => of_batch(trees, scope.batch).is_visible(scope, row, key),
            Rule::Lists(lists) => lists.get(scope, row, key),
            Rule::Custom(rule) => {
                let mut ranges = Vec::new();
                rule.visible(scope, row, &mut ranges);
                ranges.iter().any(|r| r.contains(&key))
            }
            Rule::Part(part) => part.is_visible(scope, row, key),
            Rule::And(pair) => {
                pair.0.is_visible(scope, row, key) && pair.1.is_visible(scope, row, key)
            }
            Rule::Or(pair) => {
                pair.0.is_visible(scope, row, key) || pair.1.is_visible(scope, row, key)
            }
        }
    }

    /// The keys visible to `row`, as ascending ranges that do not touch.
    ///
    /// # Panics
    /// As [`is_visible`](Self::is_visible).
    #[must_use]
    pub fn visible(&self, scope: &Scope, row: usize) -> Vec<Range<usize>> {
        let mut segments = Vec::new();
        self.runs(scope, RowTile { first: row, step: 1, count: 1 }, &mut segments);
        segments.iter().map(|s| s.keys.clone()).collect()
    }

    /// Adds the boundaries of the visible ranges to `to`. Returns `false` if the mask has boundaries of another kind.
    pub(crate) fn edges(&self, scope: &Scope, to: &mut Edges) -> bool {
        match &self.0 {
            Rule::All | Rule::Nothing => true,
            Rule::Band { back, ahead } => {
                to.moving.extend(back.map(|n| signed(n).saturating_neg()));
                to.moving.extend(ahead.map(|n| signed(n).saturating_add(1)));
                true
            }
            Rule::Spans(spans) => {
                let span = of_batch(spans, scope.batch);
                to.fixed.extend([signed(span.start), signed(span.end)]);
                true
            }
            Rule::And(pair) | Rule::Or(pair) => pair.0.edges(scope, to) && pair.1.edges(scope, to),
            _ => false,
        }
    }

    /// Whether visibility may differ between the heads of a group of consecutive ones.
    pub(crate) fn tells_heads_apart(&self, group: usize) -> bool {
        match &self.0 {
            Rule::Bits(bits) => group > 1 && bits.heads() > 1,
            Rule::Custom(_) => group > 1,
            Rule::Lists(lists) => lists.tells_heads_apart(group),
            Rule::Part(part) => part.whole.tells_heads_apart(group),
            Rule::And(pair) | Rule::Or(pair) => {
                pair.0.tells_heads_apart(group) || pair.1.tells_heads_apart(group)
            }
            Rule::All
            | Rule::Nothing
            | Rule::Band { .. }
            | Rule::Spans(_)
            | Rule::Segments(_)
            | Rule::Global(_)
            | Rule::Blocks(_)
            | Rule::Dilated(_)
            | Rule::Columns { .. }
            | Rule::Trees(_) => false,
        }
    }

    /// Whether visibility may differ between heads or batch items.
    pub(crate) fn tells_apart(&self) -> bool {
        match &self.0 {
            Rule::Spans(spans) => spans.len() > 1,
            Rule::Trees(trees) => trees.len() > 1,
            Rule::Lists(lists) => lists.tells_apart().contains(&true),
            Rule::Segments(_) | Rule::Bits(_) => true,
            Rule::Part(part) => part.whole.tells_apart(),
            Rule::And(pair) | Rule::Or(pair) => pair.0.tells_apart() || pair.1.tells_apart(),
            _ => self.tells_heads_apart(usize::MAX),
        }
    }

    /// Replaces `out` by the key ranges visible to any row of the tile, ascending and disjoint, each with its set of rows.
    pub(crate) fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        out.clear();
        let all = rows.lanes();
        let k_len = scope.k_len;
        match &self.0 {
            Rule::All => push(out, 0..k_len, all),
            Rule::Nothing => {}
            Rule::Band { back, ahead } => {
                let reach = |bound: &Option<usize>| bound.map(signed);
                let (back, ahead) = (reach(back), reach(ahead));
                monotone(rows, out, |row| {
                    let at = scope.position(row);
                    let start = back.map_or(0, |n| clip(scope, at.saturating_sub(n)));
                    let end = ahead
                        .map_or(k_len, |n| clip(scope, at.saturating_add(n).saturating_add(1)));
                    start..end.max(start)
                });
            }
            Rule::Spans(spans) => {
                let span = of_batch(spans, scope.batch);
                push(out, span.start.min(k_len)..span.end.min(k_len), all);
            }
            Rule::Segments(s) => s.runs(scope, rows, out),
            Rule::Global(set) => {
                let holds = |row| {
                    usize::try_from(scope.position(row))
                        .is_ok_and(|at| set.binary_search(&at).is_ok())
                };
                let seeing_all = rows.lanes_where(holds);
                let mut next = 0;
                for at in set.iter().copied().filter(|at| *at < k_len) {
                    push(out, next..at, seeing_all);
                    push(out, at..at + 1, all);
                    next = at + 1;
                }
                push(out, next..k_len, seeing_all);
            }
            Rule::Blocks(size) => {
                let size = signed(*size);
                monotone(rows, out, |row| {
                    let start = scope.position(row).div_euclid(size) * size;
                    clip(scope, start)..clip(scope, start.saturating_add(size))
                });
            }
            Rule::Dilated(stride) => dilated(*stride, scope, rows, out),
            Rule::Columns { block, width } => {
                for start in (0..k_len).step_by(*block) {
                    let first = start.saturating_add(block - width.min(block));
                    push(out, first.min(k_len)..start.saturating_add(*block).min(k_len), all);
                }
            }
            Rule::Bits(bits) => bits.runs(scope, rows, out),
            Rule::Trees(trees) => of_batch(trees, scope.batch).runs(scope, rows, out),
            Rule::Lists(lists) => lists.runs(scope, rows, out),
            Rule::Custom(rule) => {
                let mut ranges = Vec::new();
                let mut all = Vec::new();
                for lane in 0..rows.count {
                    call_user(|| rule.visible(scope, rows.row(lane), &mut ranges));
                    all.extend(
                        ranges.drain(..).map(|r| (r.start.min(k_len)..r.end.min(k_len), lane)),
                    );
                }
                from_ranges(&mut all, out);
            }
            Rule::Part(part) => part.runs(scope, rows, out),
            Rule::And(pair) => pair.0.joined(&pair.1, scope, rows, out, |a, b| a & b),
            Rule::Or(pair) => pair.0.joined(&pair.1, scope, rows, out, |a, b| a | b),
        }
    }

    fn joined(
        &self,
        other: &Self,
        scope: &Scope,
        rows: RowTile,
        out: &mut Vec<Run>,
        join: fn(LaneSet, LaneSet) -> LaneSet,
    ) {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        self.runs(scope, rows, &mut a);
        other.runs(scope, rows, &mut b);
        combine(&a, &b, out, join);
    }

    /// The name of a rule that stores one entry per query or key, if the mask has one. Packed sequences cannot use such a rule.
    pub(crate) fn by_position(&self) -> Option<&'static str> {
        match &self.0 {
            Rule::Segments(_) => Some("segments"),
            Rule::Bits(_) => Some("bits"),
            Rule::Part(_) => Some("a part"),
            Rule::And(pair) | Rule::Or(pair) => pair.0.by_position().or(pair.1.by_position()),
            Rule::All
            | Rule::Nothing
            | Rule::Band { .. }
            | Rule::Spans(_)
            | Rule::Global(_)
            | Rule::Blocks(_)
            | Rule::Dilated(_)
            | Rule::Columns { .. }
            | Rule::Trees(_)
            | Rule::Lists(_)
            | Rule::Custom(_) => None,
        }
    }

    /// Rows that have their keys in common with their neighbours, if other rows have other keys, anywhere.
    pub(crate) fn row_block(&self) -> Option<usize> {
        match &self.0 {
            Rule::Lists(lists) => Some(lists.rows()),
            Rule::Part(part) => part.whole.row_block(),
            Rule::And(pair) | Rule::Or(pair) => {
                let (a, b) = (pair.0.row_block(), pair.1.row_block());
                a.zip(b).map(|(a, b)| a.min(b)).or(a).or(b)
            }
            _ => None,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        matches!(self.0, Rule::All)
    }

    /// Whether this is exactly [`Mask::causal`].
    pub(crate) fn is_causal(&self) -> bool {
        matches!(self.0, Rule::Band { back: None, ahead: Some(0) })
    }

    /// As [`runs`](Self::runs), without the pairs that are visible in `part`.
    pub(crate) fn runs_beyond(
        &self,
        part: Option<&Self>,
        scope: &Scope,
        rows: RowTile,
        out: &mut Vec<Run>,
    ) {
        let Some(part) = part else { return self.runs(scope, rows, out) };
        out.clear();
        self.joined(part, scope, rows, out, |a, b| a & !b);
    }

    /// The stride of the first `dilated` rule, and the mask without `dilated` rules. The pairs of a `dilated` rule lie on
    /// diagonals: rows that are `stride` apart share their keys, adjacent rows share none.
    pub(crate) fn diagonal(&self) -> Option<(usize, Self)> {
        match &self.0 {
            Rule::Dilated(stride) => Some((*stride, Self(Rule::Nothing))),
            Rule::Part(part) => {
                let (stride, rest) = part.whole.diagonal()?;
                Some((stride, rest.part(part.scope, part.first_row, part.keys.clone())))
            }
            Rule::And(pair) | Rule::Or(pair) => {
                let (a, b) = (pair.0.diagonal(), pair.1.diagonal());
                let stride = a.as_ref().or(b.as_ref())?.0;
                let rest = |found: Option<(usize, Self)>, whole: &Self| {
                    found.map_or(whole.clone(), |f| f.1)
                };
                let (a, b) = (rest(a, &pair.0), rest(b, &pair.1));
                Some((stride, if matches!(self.0, Rule::And(_)) { a.and(b) } else { a.or(b) }))
            }
            _ => None,
        }
    }

    /// Validates the mask for scores of shape `[batch, heads.q, q_len, k_len]`; `len` has the numbers of queries and keys of an item,
    /// and the first `items` have all that there are.
    pub(crate) fn check(
        &self,
        scores: [usize; 4],
        items: usize,
        len: &dyn Fn(usize) -> [usize; 2],
    ) -> Result<(), Error> {
        let [batch, heads, q_len, k_len] = scores;
        let counted = |option, found: usize, n: usize, what| {
            if found == n || Some(found) == n.checked_mul(batch) {
                return Ok(());
            }
            Err(Error::Count { option, expected: (n, what), found })
        };
        match &self.0 {
            Rule::All | Rule::Nothing | Rule::Band { .. } | Rule::Custom(_) => Ok(()),
            // Checked as the mask of the whole.
            Rule::Part(_) => Ok(()),
            Rule::Spans(spans) => {
                if spans.len() != 1 && spans.len() != batch {
                    let expected = (batch, "one for each item of the batch");
                    return Err(Error::Count { option: "lengths", expected, found: spans.len() });
                }
                spans.iter().try_for_each(|s| {
                    Error::unless_below("lengths", s.end, k_len.saturating_add(1))
                })
            }
            Rule::Segments(s) => {
                if let Some(q) = &s.q {
                    counted(
                        "segments",
                        q.len(),
                        q_len,
                        "one for each query, or for each query of each item",
                    )?;
                }
                counted(
                    "segments",
                    s.k.len(),
                    k_len,
                    "one for each key, or for each key of each item",
                )
            }
            Rule::Global(set) => {
                set.iter().try_for_each(|at| Error::unless_below("global", *at, k_len.max(q_len)))
            }
            Rule::Blocks(0) => Err(Error::Zero { option: "blocks" }),
            Rule::Dilated(0) => Err(Error::Zero { option: "dilated" }),
            Rule::Columns { block: 0, .. } => Err(Error::Zero { option: "columns" }),
            Rule::Blocks(_) | Rule::Dilated(_) | Rule::Columns { .. } => Ok(()),
            Rule::Bits(bits) => bits.check(scores),
            Rule::Trees(trees) => {
                if trees.len() != 1 && trees.len() != batch {
                    let expected = (batch, "one for each item of the batch");
                    return Err(Error::Count { option: "tree", expected, found: trees.len() });
                }
                let items = if trees.len() == 1 { items } else { batch };
                (0..items).try_for_each(|item| of_batch(trees, item).check(len(item)))
            }
            Rule::Lists(lists) => lists.check([batch, heads], items, len),
            Rule::And(pair) | Rule::Or(pair) => {
                pair.0.check(scores, items, len)?;
                pair.1.check(scores, items, len)
            }
        }
    }
}

/// `at` as a key index, clamped to `0..=k_len`.
#[inline(always)]
fn clip(scope: &Scope, at: i64) -> usize {
    usize::try_from(at).unwrap_or(0).min(scope.k_len)
}

/// The entry of a batch item; a single entry applies to all items.
fn of_batch<T>(entries: &[T], batch: usize) -> &T {
    if entries.len() == 1 { &entries[0] } else { &entries[batch] }
}

/// Keys at multiples of `stride` from each row. Rows with equal `position mod stride` share their keys.
fn dilated(stride: usize, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
    let step = signed(stride);
    let remainder = |lane| scope.position(rows.row(lane)).rem_euclid(step);
    let mut classes: Vec<(i64, LaneSet)> = Vec::new();
    for lane in 0..rows.count {
        let r = remainder(lane);
        match classes.last_mut() {
            Some((last, lanes)) if *last == r => *lanes |= lane_range(lane, lane + 1),
            _ => classes.push((r, lane_range(lane, lane + 1))),
        }
    }
    // Sort by remainder and merge equal ones, so that the keys of one period come out in ascending order.
    classes.sort_unstable_by_key(|(r, _)| *r);
    classes.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 |= next.1;
        }
        same
    });
    for start in (0..scope.k_len).step_by(stride) {
        for (r, lanes) in &classes {
            let key = start + usize::try_from(*r).unwrap_or(0);
            if key < scope.k_len {
                push(out, key..key + 1, *lanes);
            }
        }
    }
}

impl Segments {
    fn new(q: Option<&[u32]>, k: &[u32]) -> Self {
        let mut start = 0;
        let runs = k.chunk_by(|a, b| a == b).map(|run| {
            start += run.len();
            (run[0], start - run.len()..start)
        });
        let mut runs: Vec<_> = runs.collect();
        runs.sort_unstable_by_key(|(id, run)| (*id, run.start));
        Self { q: q.map(Into::into), k: k.into(), runs }
    }

    fn ids(ids: &[u32], n: usize, batch: usize) -> &[u32] {
        if ids.len() == n { ids } else { &ids[batch * n..][..n] }
    }

    fn key(&self, scope: &Scope, key: usize) -> u32 {
        Self::ids(&self.k, scope.k_len, scope.batch)[key]
    }

    /// The document of a row; `None` if its position is outside the keys.
    fn row(&self, scope: &Scope, row: usize) -> Option<u32> {
        match &self.q {
            Some(q) => Some(Self::ids(q, scope.q_len, scope.batch)[row]),
            None => {
                let at = usize::try_from(scope.position(row)).ok()?;
                Self::ids(&self.k, scope.k_len, scope.batch).get(at).copied()
            }
        }
    }

    fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        // A tile of rows covers few documents: find the rows of each document, then its runs of keys.
        let mut query: Vec<(u32, LaneSet)> = Vec::new();
        for lane in 0..rows.count {
            let Some(id) = self.row(scope, rows.row(lane)) else { continue };
            let lane = lane_range(lane, lane + 1);
            match query.iter_mut().find(|(visible, _)| *visible == id) {
                Some((_, lanes)) => *lanes |= lane,
                None => query.push((id, lane)),
            }
        }
        let first = if self.k.len() == scope.k_len { 0 } else { scope.batch * scope.k_len };
        let mut found = Vec::new();
        for (id, lanes) in query {
            let from = self.runs.partition_point(|(i, run)| (*i, run.end) <= (id, first));
            let runs = self.runs[from..].iter();
            for (_, run) in runs.take_while(|(i, run)| *i == id && run.start < first + scope.k_len)
            {
                let keys = run.start.max(first) - first..(run.end - first).min(scope.k_len);
                found.push(Run { keys, lanes });
            }
        }
        found.sort_unstable_by_key(|s| s.keys.start);
        found.into_iter().for_each(|s| push(out, s.keys, s.lanes));
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Rule::All => write!(f, "full"),
            Rule::Nothing => write!(f, "nothing"),
            Rule::Band { back: None, ahead: Some(0) } => write!(f, "causal"),
            Rule::Band { back: Some(n), ahead: Some(0) } => {
                write!(f, "causal window {}", n.saturating_add(1))
            }
            Rule::Band { back: Some(n), ahead: Some(m) } if n == m => {
                write!(f, "window {}", n.saturating_add(1))
            }
            Rule::Band { back, ahead } => {
                let bound = |n: &Option<usize>| n.map_or("all".into(), |n| n.to_string());
                write!(f, "band {} back {} ahead", bound(back), bound(ahead))
            }
            Rule::Spans(spans) if spans.len() == 1 => {
                write!(f, "keys {}..{}", spans[0].start, spans[0].end)
            }
            Rule::Spans(_) => write!(f, "lengths"),
            Rule::Segments(_) => write!(f, "segments"),
            Rule::Global(set) => write!(f, "global {}", set.len()),
            Rule::Blocks(size) => write!(f, "blocks {size}"),
            Rule::Dilated(stride) => write!(f, "dilated {stride}"),
            Rule::Columns { block, width } => write!(f, "columns {width} of {block}"),
            Rule::Bits(_) => write!(f, "bits"),
            Rule::Trees(_) => write!(f, "tree"),
            Rule::Lists(_) => write!(f, "key lists"),
            Rule::Custom(rule) => write!(f, "custom {rule:?}"),
            Rule::Part(part) => {
                let Part { whole, first_row, keys, .. } = &**part;
                write!(f, "{} of rows from {first_row} and keys from {}", Nested(whole), keys.start)
            }
            Rule::And(pair) => write!(f, "{} & {}", Nested(&pair.0), Nested(&pair.1)),
            Rule::Or(pair) => write!(f, "{} | {}", Nested(&pair.0), Nested(&pair.1)),
        }
    }
}

/// Puts parentheses around an `or` inside another rule.
struct Nested<'a>(&'a Mask);

impl fmt::Display for Nested<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(self.0.0, Rule::Or(_)) {
            write!(f, "({})", self.0)
        } else {
            write!(f, "{}", self.0)
        }
    }
}
