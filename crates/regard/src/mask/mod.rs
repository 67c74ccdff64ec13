//! Who may see whom: a value, built by naming rules and joining them with `and` and `or`.
//!
//! Each rule answers twice. [`Mask::is_visible`] is the definition, one pair at a time. [`Mask::runs`] is the same
//! answer for a whole tile of rows: a short sorted list of key ranges, each with the set of rows that see it. Joining
//! two lists is one sweep, whatever the rules, so any combination costs O(ranges), and no rule but `bits` holds more
//! than O(n) memory.
//!
//! Positions: row `i` stands at `i + offset` among the keys (see [`Align`](crate::Align)); causal, windows, blocks and
//! strides speak of that position, so they mean the same when there are fewer queries than keys.

mod bits;
mod runs;

use crate::error::Error;
use crate::index::{LaneSet, RowTile, Scope, lane_range, signed};
use crate::simd::call_user;
pub use bits::Bits;
pub(crate) use bits::NearBits;
pub(crate) use runs::Run;
use runs::{combine, from_ranges, monotone, push};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A mask rule of your own. See [`Mask::custom`].
pub trait MaskRule: fmt::Debug + Send + Sync {
    /// Pushes the ranges of keys that `row` sees, in ascending order; what lies outside the keys is cut off.
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>);
}

/// Who may see whom. Cheap to clone.
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
    /// Keys from `position - back` to `position + ahead`, both included; `None` is without bound.
    Band {
        back: Option<usize>,
        ahead: Option<usize>,
    },
    /// One range of keys for each item of the batch, or one for all.
    Spans(Arc<[Range<usize>]>),
    Segments(Arc<Segments>),
    /// Sorted positions that see everything and are seen by all.
    Global(Arc<[usize]>),
    Blocks(usize),
    Dilated(usize),
    /// The last `width` keys of each block of `block`.
    Columns {
        block: usize,
        width: usize,
    },
    Bits(Bits),
    NearBits(NearBits),
    Custom(Arc<dyn MaskRule>),
    And(Arc<(Mask, Mask)>),
    Or(Arc<(Mask, Mask)>),
}

/// Which document each position belongs to.
#[derive(Debug)]
struct Segments {
    /// Document of each row, `[batch or 1, q_len]`; `None`: the row's position tells.
    q: Option<Vec<u32>>,
    /// Document of each key, `[batch or 1, k_len]`.
    k: Vec<u32>,
    /// The runs of equal entries in `k`, sorted by document, then by place.
    runs: Vec<(u32, Range<usize>)>,
}

/// Where what rows see begins and ends: at fixed keys, and at keys that move along with the position of the row.
#[derive(Debug)]
pub(crate) struct Edges {
    pub(crate) fixed: Vec<i64>,
    pub(crate) moving: Vec<i64>,
}

impl Mask {
    /// Everything sees everything.
    #[must_use]
    pub fn full() -> Self {
        Self(Rule::All)
    }

    /// A row sees the keys up to its own position.
    #[must_use]
    pub fn causal() -> Self {
        Self::band(None, Some(0))
    }

    /// A row sees keys from `back` before its position to `ahead` after it; `None` is without bound.
    #[must_use]
    pub fn band(back: Option<usize>, ahead: Option<usize>) -> Self {
        Self(Rule::Band { back, ahead })
    }

    /// Narrows to keys less than `keys` away from the row's position, which counts as the first:
    /// `Mask::causal().window(4096)` sees 4096 keys, the own one included.
    #[must_use]
    pub fn window(self, keys: usize) -> Self {
        match keys.checked_sub(1) {
            Some(reach) => self.and(Self::band(Some(reach), Some(reach))),
            None => Self(Rule::Nothing),
        }
    }

    /// Keys before `lengths[b]` are real, the rest is padding.
    #[must_use]
    pub fn lengths(lengths: &[usize]) -> Self {
        Self(Rule::Spans(lengths.iter().map(|n| 0..*n).collect()))
    }

    /// Keys in `spans[b]` are real, the rest is padding, on either side.
    #[must_use]
    pub fn spans(spans: &[Range<usize>]) -> Self {
        Self(Rule::Spans(spans.into()))
    }

    /// The first `keys` keys, seen by every row. A prefix language model is `Mask::causal().or(Mask::prefix(n))`.
    #[must_use]
    pub fn prefix(keys: usize) -> Self {
        Self(Rule::Spans(std::iter::once(0..keys).collect()))
    }

    /// Rows see the keys of their own document. `documents` names the document of each key, `[k_len]` or
    /// `[batch, k_len]`; a row belongs to the document at its position.
    #[must_use]
    pub fn segments(documents: &[u32]) -> Self {
        Self(Rule::Segments(Arc::new(Segments::new(None, documents))))
    }

    /// As [`segments`](Self::segments), with rows `[q_len]` or `[batch, q_len]` named separately: for cross-attention.
    #[must_use]
    pub fn segments_between(q: &[u32], k: &[u32]) -> Self {
        Self(Rule::Segments(Arc::new(Segments::new(Some(q), k))))
    }

    /// Positions that see every key and that every row sees.
    #[must_use]
    pub fn global(positions: &[usize]) -> Self {
        let mut sorted = positions.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        Self(Rule::Global(sorted.into()))
    }

    /// Rows see the keys of their own block of `size` positions.
    #[must_use]
    pub fn blocks(size: usize) -> Self {
        Self(Rule::Blocks(size))
    }

    /// Keys at a distance that is a multiple of `stride`.
    #[must_use]
    pub fn dilated(stride: usize) -> Self {
        Self(Rule::Dilated(stride))
    }

    /// The last `width` keys of each block of `block`.
    #[must_use]
    pub fn columns(block: usize, width: usize) -> Self {
        Self(Rule::Columns { block, width })
    }

    /// The strided pattern of Child et al. 2019: the last `stride` positions and every `stride`-th before.
    /// Usually joined with [`causal`](Self::causal).
    #[must_use]
    pub fn strided(stride: usize) -> Self {
        Self::full().window(stride).or(Self::dilated(stride))
    }

    /// The fixed pattern of Child et al. 2019: the own block, and the last `summary` keys of each block.
    /// Usually joined with [`causal`](Self::causal).
    #[must_use]
    pub fn fixed(block: usize, summary: usize) -> Self {
        Self::blocks(block).or(Self::columns(block, summary))
    }

    /// Longformer (Beltagy et al. 2020): keys less than `window` away, and global positions.
    #[must_use]
    pub fn longformer(window: usize, global: &[usize]) -> Self {
        Self::full().window(window).or(Self::global(global))
    }

    /// Any pairs at all, one bit each: the only rule that holds queries x keys memory.
    #[must_use]
    pub fn bits(bits: Bits) -> Self {
        Self(Rule::Bits(bits))
    }

    /// Any pairs whose keys lie near each other, for each row.
    pub(crate) fn near_bits(bits: NearBits) -> Self {
        Self(Rule::NearBits(bits))
    }

    /// A rule of your own.
    #[must_use]
    pub fn custom(rule: impl MaskRule + 'static) -> Self {
        Self(Rule::Custom(Arc::new(rule)))
    }

    /// What both let through.
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

    /// What either lets through.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Rule::All, _) | (_, Rule::All) => Self(Rule::All),
            (Rule::Nothing, rule) | (rule, Rule::Nothing) => Self(rule),
            (a, b) => Self(Rule::Or(Arc::new((Self(a), Self(b))))),
        }
    }

    /// The definition: may `row` see `key`?
    ///
    /// # Panics
    /// If the mask does not fit the scope, or there is no such row or key: masks are checked by [`Plan::new`](crate::Plan::new).
    #[must_use]
    pub fn is_visible(&self, scope: &Scope, row: usize, key: usize) -> bool {
        let position = scope.position(row);
        let distance = position - signed(key); // positive: the key lies before the row
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
            Rule::Bits(bits) => bits.get(scope.batch, scope.head, row, key),
            Rule::NearBits(bits) => bits.get(scope, row, key),
            Rule::Custom(rule) => {
                let mut ranges = Vec::new();
                rule.visible(scope, row, &mut ranges);
                ranges.iter().any(|r| r.contains(&key))
            }
            Rule::And(pair) => {
                pair.0.is_visible(scope, row, key) && pair.1.is_visible(scope, row, key)
            }
            Rule::Or(pair) => {
                pair.0.is_visible(scope, row, key) || pair.1.is_visible(scope, row, key)
            }
        }
    }

    /// The keys that `row` sees, as ascending ranges that do not touch.
    ///
    /// # Panics
    /// As [`is_visible`](Self::is_visible).
    #[must_use]
    pub fn visible(&self, scope: &Scope, row: usize) -> Vec<Range<usize>> {
        let mut segments = Vec::new();
        self.runs(scope, RowTile { first: row, step: 1, count: 1 }, &mut segments);
        segments.iter().map(|s| s.keys.clone()).collect()
    }

    /// Adds the edges of what rows see, if there are no others than `Edges` knows.
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

    /// Whether heads may see different keys.
    pub(crate) fn tells_heads_apart(&self) -> bool {
        match &self.0 {
            Rule::Bits(_) | Rule::NearBits(_) | Rule::Custom(_) => true,
            Rule::And(pair) | Rule::Or(pair) => {
                pair.0.tells_heads_apart() || pair.1.tells_heads_apart()
            }
            _ => false,
        }
    }

    /// Whether heads or items may see different keys.
    pub(crate) fn tells_apart(&self) -> bool {
        match &self.0 {
            Rule::Spans(spans) => spans.len() > 1,
            Rule::Segments(_) => true,
            Rule::And(pair) | Rule::Or(pair) => pair.0.tells_apart() || pair.1.tells_apart(),
            _ => self.tells_heads_apart(),
        }
    }

    /// Replaces `out` by the ranges of keys that any row of the tile sees, ascending and disjoint, each with its rows.
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
            Rule::NearBits(bits) => bits.runs(scope, rows, out),
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

    /// The rule that has entries for single queries or keys, if there is one.
    pub(crate) fn by_position(&self) -> Option<&'static str> {
        match &self.0 {
            Rule::Segments(_) => Some("segments"),
            Rule::Bits(_) | Rule::NearBits(_) => Some("bits"),
            Rule::And(pair) | Rule::Or(pair) => pair.0.by_position().or(pair.1.by_position()),
            _ => None,
        }
    }

    /// Whether all rows see all keys.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self.0, Rule::All)
    }

    /// Whether it hides what comes later, and nothing else.
    pub(crate) fn is_causal(&self) -> bool {
        matches!(self.0, Rule::Band { back: None, ahead: Some(0) })
    }

    /// As [`runs`](Self::runs), without what `part` lets through, if there is one.
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

    /// The stride of the first `dilated` rule and the mask without such rules: those pairs lie on diagonals, so rows
    /// that are `stride` apart share their keys and neighbours share none.
    pub(crate) fn diagonal(&self) -> Option<(usize, Self)> {
        match &self.0 {
            Rule::Dilated(stride) => Some((*stride, Self(Rule::Nothing))),
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

    /// Everything that can be wrong with this mask for scores `[batch, heads.q, q_len, k_len]`.
    pub(crate) fn check(&self, scores: [usize; 4]) -> Result<(), Error> {
        let [batch, _, q_len, k_len] = scores;
        let counted = |option, found: usize, n: usize, what| {
            if found == n || Some(found) == n.checked_mul(batch) {
                return Ok(());
            }
            Err(Error::Count { option, expected: (n, what), found })
        };
        let below = |option, found, limit| {
            if found < limit { Ok(()) } else { Err(Error::OutOfRange { option, found, limit }) }
        };
        match &self.0 {
            Rule::All | Rule::Nothing | Rule::Band { .. } | Rule::Custom(_) => Ok(()),
            Rule::NearBits(_) => Ok(()), // made for the sizes of its call
            Rule::Spans(spans) => {
                if spans.len() != 1 && spans.len() != batch {
                    let expected = (batch, "one for each item of the batch");
                    return Err(Error::Count { option: "lengths", expected, found: spans.len() });
                }
                spans.iter().try_for_each(|s| below("lengths", s.end, k_len.saturating_add(1)))
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
                set.iter().try_for_each(|at| below("global", *at, k_len.max(q_len)))
            }
            Rule::Blocks(0) => Err(Error::Zero { option: "blocks" }),
            Rule::Dilated(0) => Err(Error::Zero { option: "dilated" }),
            Rule::Columns { block: 0, .. } => Err(Error::Zero { option: "columns" }),
            Rule::Blocks(_) | Rule::Dilated(_) | Rule::Columns { .. } => Ok(()),
            Rule::Bits(bits) => bits.check(scores),
            Rule::And(pair) | Rule::Or(pair) => {
                pair.0.check(scores)?;
                pair.1.check(scores)
            }
        }
    }
}

/// `at` as a key index, bounded to the keys there are.
#[inline(always)]
fn clip(scope: &Scope, at: i64) -> usize {
    usize::try_from(at).unwrap_or(0).min(scope.k_len)
}

/// The entry of an item, where one entry may serve all.
fn of_batch<T>(entries: &[T], batch: usize) -> &T {
    if entries.len() == 1 { &entries[0] } else { &entries[batch] }
}

/// Keys at multiples of `stride` from each row: rows with the same remainder share theirs.
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
    // Ascending remainders, equal ones joined: then the keys of one period come out in order.
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

    /// The document of a row; `None` where its position is no key.
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
        // Few documents meet a tile: find each one's rows, then its runs of keys.
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
            Rule::Bits(_) | Rule::NearBits(_) => write!(f, "bits"),
            Rule::Custom(rule) => write!(f, "custom {rule:?}"),
            Rule::And(pair) => write!(f, "{} & {}", Nested(&pair.0), Nested(&pair.1)),
            Rule::Or(pair) => write!(f, "{} | {}", Nested(&pair.0), Nested(&pair.1)),
        }
    }
}

/// Brackets around an `or` inside another rule.
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
