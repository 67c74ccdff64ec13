//! Few rows, many keys: decoding. Features stand in the vectors here, and all query heads that one key head serves are done
//! together, so that every key and value comes from memory once, is widened in registers, and is used for all of them.
//!
//! Cost: the time to read keys and values. What a mask or a score makes of a piece is the same code as for many rows; only
//! the two products differ. Sums over features are kept in 16 parts, whatever the vector width, and added up in a fixed
//! tree: so AVX2 and AVX-512 agree to the bit here too.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use crate::cells::{CELL, lanes_of};
use crate::element::{Element, Number};
use crate::forward::Forward;
use crate::lanes::{later, multiply};
use crate::mask::{RowTile, Run, Scope};
use crate::micro::{Packed, Seen};
use crate::problem::Problem;
use crate::score::{At, Keys};
use crate::simd::{GROUP, Lanes, MAX_LANES, Simd, Span, Task};
use crate::softmax::{States, TileSums};
use crate::source::Head;
use crate::view::Rows;
use crate::walk::{Call, Hide, Way};
use std::ops::Range;

/// Rows of one key head that go this way: all its query heads together.
pub(crate) const FEW: usize = 16;

/// Memory of one thread.
#[derive(Debug)]
pub(crate) struct FewRoom<N> {
    /// All rows, head by head, scaled.
    q: Packed<N>,
    /// Sums of all rows.
    sums: Packed<N>,
    /// What the mask lets each head see.
    runs: Vec<Vec<Run>>,
    /// Rows that are weighed together: those of one head, or all, if no option tells heads apart.
    bundles: Vec<Bundle<N>>,
    /// Dot products of a cell, then weights, `[keys][rows]`.
    dots: Vec<[N; FEW]>,
    factors: Vec<Lanes<N>>,
}

/// Rows that are weighed together.
#[derive(Debug)]
struct Bundle<N> {
    /// Its query heads, counted from the first of the task.
    heads: Range<usize>,
    states: States<N>,
    grows: bool,
    /// Scores, then weights, of a cell, `[keys][lanes]`.
    tile: Vec<Lanes<N>>,
    seen: [Seen; CELL],
    /// Whether some rows do not see some keys of the cell.
    hidden: bool,
    /// Whether any row sees any.
    any: bool,
    /// What the sums so far are multiplied by.
    shrink: Lanes<N>,
}

impl<N: Number> FewRoom<N> {
    pub(crate) fn new<E: Element<Num = N>>(problem: &Problem<'_, E>) -> Self {
        let dims = problem.dims();
        let served = dims.heads.q / dims.heads.kv.max(1);
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let bundle = |heads| Bundle {
            heads,
            states: States::nothing_seen(),
            grows: false,
            tile: zeros(CELL),
            seen: [0; CELL],
            hidden: false,
            any: false,
            shrink: Lanes([N::one(); GROUP]),
        };
        let alike = problem.is_plain_dot() && problem.dropout.is_none();
        let each = if alike { served } else { 1 };
        let bundles = (0..served).step_by(each.max(1)).map(|h| bundle(h..h + each));
        Self {
            q: Packed::new(FEW, dims.qk_dim),
            sums: Packed::new(FEW, dims.v_dim),
            runs: vec![Vec::new(); served],
            bundles: bundles.collect(),
            dots: vec![[N::zero(); FEW]; CELL],
            factors: zeros(if problem.dropout.is_some() { CELL } else { 0 }),
        }
    }
}

impl<E: Element> Forward<'_, '_, E> {
    /// The rows of all heads that one key head serves, over the keys of the way.
    #[inline(always)]
    pub(crate) fn few<S: Simd<E::Num>>(&mut self, s: S) {
        let Self { call, scope, rows, .. } = *self;
        let Some(mut room) = self.scratch.few.take() else { return };
        if let Some(way) = &self.stage.walk {
            room.start(&call, (scope, rows), way);
            room.walk(s, self, way);
        }
        for bundle in &room.bundles {
            for (at, h) in bundle.heads.clone().enumerate() {
                self.part = h;
                self.scope.head = scope.head + h;
                let group = &mut self.scratch.groups[0];
                group.rows = rows;
                for i in 0..rows.count {
                    group.states.set(i, bundle.states.get(at * rows.count + i));
                    let sums = room.sums.row(h * rows.count + i);
                    group.sums.iter_mut().zip(sums).for_each(|(to, x)| to.0[i] = *x);
                }
                match self.stage.into {
                    Some(part) => self.save(s, 0, part),
                    None => self.finish(s, 0),
                }
            }
        }
        self.scratch.few = Some(room);
    }
}

impl<N: Number> FewRoom<N> {
    fn start<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        (scope, rows): (Scope, RowTile),
        way: &Way<'_>,
    ) {
        let factor = N::from_f64(call.problem.query_factor());
        self.sums.clear();
        for bundle in &mut self.bundles {
            (bundle.states, bundle.grows) = (States::nothing_seen(), false);
        }
        for (h, runs) in self.runs.iter_mut().enumerate() {
            let scope = Scope { head: scope.head + h, ..scope };
            way.mask.runs_beyond(way.without, &scope, rows, runs);
            let q = call.q.head(scope.batch, scope.head);
            for i in 0..rows.count {
                let to = self.q.row_mut(h * rows.count + i);
                let row = q.row(rows.row(i)).iter().map(|x| x.widen() * factor);
                row.zip(to).for_each(|(x, to)| *to = x);
            }
        }
    }

    /// All cells that any head sees, keys ascending.
    #[inline(always)]
    fn walk<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        task: &Forward<'_, '_, E>,
        way: &Way<'_>,
    ) {
        let Forward { call, scope, rows, .. } = *task;
        let (k, v) = call.keys_and_values(scope);
        let all = self.runs.len() * rows.count;
        let way_end = way.keys.end.min(scope.k_len);
        let mut first = way.keys.start;
        let (mut key_copies, mut value_copies) = (Vec::new(), Vec::new());
        while first < way_end {
            let n = (way_end - first).min(CELL - first % CELL);
            let mut any = false;
            for bundle in &mut self.bundles {
                bundle.look(&mut self.runs, rows, (first, n));
                any |= bundle.any;
            }
            let after = first + n;
            if any {
                let keys = rows_of(k, (first, n), &mut key_copies);
                let values = rows_of(v, (first, n), &mut value_copies);
                // What is needed next: memory must not rest while the vectors are busy.
                let left = n.min(way_end - after);
                let next = k.run(after, left).unwrap_or(keys.slice(0, 0));
                let (q, to) = (&self.q, &mut self.dots[..]);
                s.call(DotRows { keys, soon: values, q, rows: all, to });
                for b in 0..self.bundles.len() {
                    self.weigh(s, call.problem, (scope, rows), b, (first, n));
                }
                let Self { sums, bundles, dots, .. } = self;
                // Weights, and which rows see each key, of all bundles side by side.
                let mut seen = [Seen::MAX; CELL];
                let (mut shrink, mut hidden) = ([N::one(); FEW], false);
                for bundle in &*bundles {
                    let first = bundle.heads.start * rows.count;
                    let count = bundle.heads.len() * rows.count;
                    shrink[first..first + count].copy_from_slice(&bundle.shrink.0[..count]);
                    for key in 0..n {
                        let weights = &mut dots[key][first..first + count];
                        if bundle.any {
                            weights.copy_from_slice(&bundle.tile[key].0[..count]);
                        } else {
                            weights.fill(N::zero());
                        }
                    }
                    if !bundle.any || bundle.hidden {
                        hidden = true;
                        let lanes = lanes_of(Span { start: 0, end: count });
                        for key in 0..n {
                            let sees = if bundle.any { bundle.seen[key] } else { 0 };
                            seen[key] &= !((!sees & lanes) << first);
                        }
                    }
                }
                let (weights, seen, soon, shrink) = (&dots[..n], &seen[..n], next, &shrink);
                let rows = all;
                let work = Weighted { values, soon, weights, seen, rows, shrink, sums };
                if hidden {
                    s.call(AddRows::<E, true>(work));
                } else {
                    s.call(AddRows::<E, false>(work));
                }
            }
            first = after;
        }
    }

    /// From dot products to the weights of a bundle.
    #[inline(always)]
    fn weigh<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        problem: &Problem<'_, E>,
        (scope, rows): (Scope, RowTile),
        b: usize,
        (first, n): (usize, usize),
    ) {
        let Self { bundles, dots, factors, .. } = self;
        let Bundle { heads, states, grows, tile, seen, hidden, any, shrink } = &mut bundles[b];
        *shrink = Lanes([N::one(); GROUP]);
        if !*any {
            return;
        }
        let (from, count) = (heads.start * rows.count, heads.len() * rows.count);
        let (span, tile) = (Span { start: 0, end: count }, &mut tile[..n]);
        let scope = Scope { head: scope.head + heads.start, ..scope };
        let at = At { scope, rows, span, keys: Keys::From(first) };
        let mut sums = TileSums { l: states.unset(s, span), ..TileSums::zero(problem.entropy) };
        for round in 0..2 {
            let suffices = States::suffice(s, &sums.l, span) && (round > 0 || !*grows);
            if suffices && round > 0 {
                break;
            }
            for (to, dots) in tile.iter_mut().zip(&*dots) {
                to.0[..count].copy_from_slice(&dots[from..from + count]);
            }
            if !problem.is_plain_dot() {
                problem.apply(s, at, tile, None);
            }
            if *hidden || problem.score.may_hide() {
                *hidden = true;
                s.call(Hide { tile, seen: &mut seen[..n], span });
            }
            if !suffices {
                *grows = states.raise(s, tile, (&sums.l, span), shrink);
            }
            sums = TileSums::zero(problem.entropy);
            states.weigh(s, tile, span, &mut sums);
        }
        states.add(s, &sums, span);
        if let Some(dropout) = problem.dropout {
            dropout.factors(s, at, &mut factors[..n]);
            multiply(s, (tile, factors), span);
        }
    }
}

impl<N: Number> Bundle<N> {
    /// What its rows see of the keys `first..first + n`. Keys come in ascending order.
    fn look(&mut self, runs: &mut [Vec<Run>], rows: RowTile, (first, n): (usize, usize)) {
        let (end, one) = (first + n, lanes_of(Span { start: 0, end: rows.count }));
        let everyone = lanes_of(Span { start: 0, end: self.heads.len() * rows.count });
        self.seen[..n].fill(0);
        for (at, runs) in runs[self.heads.clone()].iter_mut().enumerate() {
            let done = runs.iter().take_while(|run| run.keys.end <= first).count();
            runs.drain(..done);
            for run in runs.iter().take_while(|run| run.keys.start < end) {
                let keys = run.keys.start.max(first) - first..run.keys.end.min(end) - first;
                #[expect(clippy::cast_possible_truncation, reason = "few rows")]
                let lanes = (run.lanes as Seen & one) << (at * rows.count);
                self.seen[keys].iter_mut().for_each(|seen| *seen |= lanes);
            }
        }
        self.any = self.seen[..n].iter().any(|seen| *seen != 0);
        self.hidden = self.seen[..n].iter().any(|seen| *seen != everyone);
    }
}

/// Rows of a cell: where they lie, or copied where they lie in two pages.
#[inline(always)]
fn rows_of<'r, E: Element>(
    head: Head<'r, E>,
    (first, n): (usize, usize),
    copy: &'r mut Vec<E>,
) -> Rows<'r, E> {
    if let Some(rows) = head.run(first, n) {
        return rows;
    }
    copy.clear();
    (first..first + n).for_each(|i| copy.extend_from_slice(head.row(i)));
    Rows { data: copy, stride: head.dim(), len: n, dim: head.dim() }
}

/// Parts that a sum over features is kept in.
const PARTIAL: usize = 16;
/// Rows of a register tile.
const ROWS: usize = 4;

/// `to[key][row] = keys[key] . q[row]`
struct DotRows<'t, E: Element> {
    keys: Rows<'t, E>,
    /// Rows that are needed next.
    soon: Rows<'t, E>,
    q: &'t Packed<E::Num>,
    rows: usize,
    to: &'t mut [[E::Num; FEW]],
}

impl<E: Element> Task<E::Num> for DotRows<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, s: S) {
        let mut row = 0;
        while row + ROWS <= self.rows {
            let mut key = 0;
            // As many results as a vector has lanes, so that they are added up together.
            if S::LANES == 16 {
                while key + 4 <= self.keys.len {
                    self.block::<S, 4, ROWS>(s, key, row);
                    key += 4;
                }
            } else if S::LANES == 8 {
                while key + 2 <= self.keys.len {
                    self.block::<S, 2, ROWS>(s, key, row);
                    key += 2;
                }
            }
            while key < self.keys.len {
                self.block::<S, 1, ROWS>(s, key, row);
                key += 1;
            }
            row += ROWS;
        }
        while row < self.rows {
            let mut key = 0;
            while S::LANES >= 8 && key + 8 <= self.keys.len {
                self.block::<S, 8, 1>(s, key, row);
                key += 8;
            }
            while key < self.keys.len {
                self.block::<S, 1, 1>(s, key, row);
                key += 1;
            }
            row += 1;
        }
    }
}

impl<E: Element> DotRows<'_, E> {
    #[inline(always)]
    fn block<S: Simd<E::Num>, const KEYS: usize, const ROWS: usize>(
        &mut self,
        s: S,
        key: usize,
        row: usize,
    ) {
        let zero = s.splat(E::Num::default());
        // One vector for each of the parts' slices; the lower ones first.
        let mut sums = [[[zero; ROWS]; KEYS]; 4];
        let vectors = PARTIAL / S::LANES;
        let mut keys: [&[E]; KEYS] = [&[]; KEYS];
        let mut q: [&[E::Num]; ROWS] = [&[]; ROWS];
        for i in 0..KEYS {
            keys[i] = self.keys.row(key + i);
            if row == 0 && key + i < self.soon.len {
                later(s, self.soon.row(key + i));
            }
        }
        let dim = keys[0].len();
        let padded = dim.next_multiple_of(PARTIAL);
        for r in 0..ROWS {
            q[r] = &self.q.row(row + r)[..padded];
        }
        let whole = dim / PARTIAL * PARTIAL;
        for d in (0..whole).step_by(PARTIAL) {
            for j in 0..vectors {
                let at = d + j * S::LANES;
                let mut y = [zero; ROWS];
                for r in 0..ROWS {
                    y[r] = s.load(&q[r][at..]);
                }
                for i in 0..KEYS {
                    let x = E::load(s, &keys[i][at..]);
                    for r in 0..ROWS {
                        sums[j][i][r] = s.fma(x, y[r], sums[j][i][r]);
                    }
                }
            }
        }
        if whole < dim {
            for i in 0..KEYS {
                let mut tail = [E::Num::default(); PARTIAL];
                keys[i][whole..].iter().zip(&mut tail).for_each(|(x, to)| *to = x.widen());
                for j in 0..vectors {
                    let x = s.load(&tail[j * S::LANES..]);
                    for r in 0..ROWS {
                        let y = s.load(&q[r][whole + j * S::LANES..]);
                        sums[j][i][r] = s.fma(x, y, sums[j][i][r]);
                    }
                }
            }
        }
        // The tree: part i and i + 8, i and i + 4, i and i + 2, i and i + 1.
        let mut half = vectors / 2;
        while half > 0 {
            for j in 0..half {
                for i in 0..KEYS {
                    for r in 0..ROWS {
                        sums[j][i][r] = s.add(sums[j][i][r], sums[j + half][i][r]);
                    }
                }
            }
            half /= 2;
        }
        let mut block = s.block();
        for (to, from) in block.as_mut().iter_mut().zip(sums[0].as_flattened()) {
            *to = *from;
        }
        s.transpose(&mut block);
        let mut half = S::LANES / 2;
        while half > 0 {
            for i in 0..half {
                let sum = s.add(block.as_mut()[i], block.as_mut()[i + half]);
                block.as_mut()[i] = sum;
            }
            half /= 2;
        }
        let mut results = [E::Num::default(); MAX_LANES];
        s.store(block.as_mut()[0], &mut results);
        for i in 0..KEYS {
            for r in 0..ROWS {
                self.to[key + i][row + r] = results[i * ROWS + r];
            }
        }
    }
}

/// `sums[row] = sums[row] * shrink[row] + sum over keys of weights[key][row] * values[key]`. With `HIDDEN`, a key that a row
/// does not see is left out of its sum.
struct AddRows<'t, E: Element, const HIDDEN: bool>(Weighted<'t, E>);

/// Values and their weights, and the sums they go into.
struct Weighted<'t, E: Element> {
    values: Rows<'t, E>,
    /// Rows that are needed next.
    soon: Rows<'t, E>,
    weights: &'t [[E::Num; FEW]],
    seen: &'t [Seen],
    rows: usize,
    shrink: &'t [E::Num; FEW],
    sums: &'t mut Packed<E::Num>,
}

impl<E: Element, const HIDDEN: bool> Task<E::Num> for AddRows<'_, E, HIDDEN> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        self.0.add::<S, HIDDEN>(s);
    }
}

impl<E: Element> Weighted<'_, E> {
    #[inline(always)]
    fn add<S: Simd<E::Num>, const HIDDEN: bool>(mut self, s: S) {
        let dim = self.values.dim;
        let mut row = 0;
        while row < self.rows {
            let rows = if row + ROWS <= self.rows { ROWS } else { 1 };
            let mut d = 0;
            while d + S::LANES <= dim {
                let vectors = (dim - d) / S::LANES;
                match (rows, S::WIDE && vectors >= 4, vectors >= 2) {
                    (ROWS, true, _) => self.block::<S, HIDDEN, ROWS, 4>(s, row, d),
                    (ROWS, _, true) => self.block::<S, HIDDEN, ROWS, 2>(s, row, d),
                    (ROWS, ..) => self.block::<S, HIDDEN, ROWS, 1>(s, row, d),
                    (_, true, _) => self.block::<S, HIDDEN, 1, 4>(s, row, d),
                    (_, _, true) => self.block::<S, HIDDEN, 1, 2>(s, row, d),
                    _ => self.block::<S, HIDDEN, 1, 1>(s, row, d),
                }
                d += S::LANES * if S::WIDE && vectors >= 4 { 4 } else { vectors.min(2) };
            }
            for d in d..dim {
                for r in row..row + rows {
                    let mut sum = E::Num::default();
                    for (i, weights) in self.weights.iter().enumerate() {
                        if !HIDDEN || self.seen[i] >> r & 1 == 1 {
                            let x = self.values.row(i)[d].widen();
                            sum = fused::<E::Num, S>(s, x, weights[r], sum);
                        }
                    }
                    let to = &mut self.sums.row_mut(r)[d];
                    *to = fused::<E::Num, S>(s, *to, self.shrink[r], sum);
                }
            }
            row += rows;
        }
    }
}

/// `a * b + c` as the vectors have it.
#[inline(always)]
fn fused<N: Number, S: Simd<N>>(s: S, a: N, b: N, c: N) -> N {
    let mut out = [N::zero(); MAX_LANES];
    s.store(s.fma(s.splat(a), s.splat(b), s.splat(c)), &mut out);
    out[0]
}

impl<E: Element> Weighted<'_, E> {
    #[inline(always)]
    fn block<S: Simd<E::Num>, const HIDDEN: bool, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        row: usize,
        d: usize,
    ) {
        let mut sums = [[s.splat(E::Num::default()); VECTORS]; ROWS];
        for (i, weights) in self.weights.iter().enumerate() {
            if row == 0 && d == 0 && i < self.soon.len {
                later(s, self.soon.row(i));
            }
            let value = &self.values.row(i)[d..d + VECTORS * S::LANES];
            let mut x = [s.splat(E::Num::default()); VECTORS];
            for j in 0..VECTORS {
                x[j] = E::load(s, &value[j * S::LANES..]);
            }
            for r in 0..ROWS {
                if HIDDEN && self.seen[i] >> (row + r) & 1 == 0 {
                    continue;
                }
                let weight = s.splat(weights[row + r]);
                for j in 0..VECTORS {
                    sums[r][j] = s.fma(x[j], weight, sums[r][j]);
                }
            }
        }
        for r in 0..ROWS {
            let (shrink, to) = (s.splat(self.shrink[row + r]), self.sums.row_mut(row + r));
            for j in 0..VECTORS {
                let to = &mut to[d + j * S::LANES..];
                s.store(s.fma(s.load(to), shrink, sums[r][j]), to);
            }
        }
    }
}
