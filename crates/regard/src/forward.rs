//! The forward walk: many rows against the keys they see, without ever holding their scores.
//!
//! Cost for `n` rows and `m` visible keys each: `2 n m (qk_dim + v_dim)` flops, keys and values read `n / 128` times,
//! scratch of `128 (qk_dim + v_dim)` numbers. Two groups of 64 rows pass over each cell of 64 keys, so a cell is
//! brought from memory once and read from the cache the second time.

use crate::cells::{CELL, Cell, Cells, Seeing, lanes_of};
use crate::element::{Element, Number};
use crate::mask::{Mask, RowTile, Run, Scope};
use crate::micro::{Distances, Dots, Seen, Weights, add_values, dot_tile, lanes_used, low};
use crate::problem::Problem;
use crate::score::{At, Keys, Similarity, in_log2};
use crate::simd::{GROUP, Lanes, MAX_LANES, Simd, Span, Task};
use crate::softmax::{State, States};
use crate::view::{Rows, TileMut, View};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Groups of rows that walk together.
const GROUPS: usize = 2;
/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = GROUPS * GROUP;

/// One call: what is computed, from what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'c, E: Element> {
    pub(crate) problem: &'c Problem<'c, E>,
    pub(crate) q: View<'c, E>,
    pub(crate) k: View<'c, E>,
    pub(crate) v: View<'c, E>,
}

/// The rows that one task owns.
#[derive(Debug)]
pub(crate) struct Target<'t, E: Element> {
    /// `[batch, heads.q, q_len, v_dim]` and lse `[batch, heads.q, q_len, 1]`, for a task that finishes its rows.
    pub(crate) finished: Option<(TileMut<'t, E>, TileMut<'t, E::Num>)>,
    /// `[batch, parts x heads.q, q_len, v_dim + 2]`: sums, m and l of rows that are not finished in one go.
    pub(crate) partial: Option<TileMut<'t, E::Num>>,
}

/// What one task does with its rows.
#[derive(Clone, Debug)]
pub(crate) struct Stage<'c> {
    /// Takes over these parts, merged in order; an empty range starts anew.
    pub(crate) from: Range<usize>,
    /// Walks these keys as far as the first mask lets it see them and the second does not.
    pub(crate) walk: Option<(&'c Mask, Option<&'c Mask>, Range<usize>)>,
    /// Leaves the result as this part; `None` finishes the rows.
    pub(crate) into: Option<usize>,
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    /// Queries as given, `[features][lanes]`, when they are projected.
    raw: Vec<Lanes<N>>,
    /// Sums of another part, `[features][lanes]`.
    other: Vec<Lanes<N>>,
    groups: Vec<Group<N>>,
    tile: Vec<Lanes<N>>,
    keys: Vec<N>,
    values: Vec<N>,
    runs: Vec<Run>,
    cell: Cell,
}

/// A group of rows on its way: queries, states and sums, `[features][lanes]`.
#[derive(Debug)]
struct Group<N> {
    q: Vec<Lanes<N>>,
    states: States<N>,
    sums: Vec<Lanes<N>>,
    rows: RowTile,
    /// Whether the last tile had scores far above those before.
    grows: bool,
}

impl<N: Number> Scratch<N> {
    pub(crate) fn new<E: Element<Num = N>>(problem: &Problem<'_, E>, rows: usize) -> Self {
        let dims = problem.dims();
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let group = || Group {
            q: zeros(dims.qk_dim),
            states: States::nothing_seen(),
            sums: zeros(dims.v_dim),
            rows: RowTile { first: 0, step: 1, count: 0 },
            grows: false,
        };
        let projects = matches!(problem.similarity, Similarity::General(_));
        Self {
            raw: zeros(if projects { dims.q_dim } else { 0 }),
            other: zeros(dims.v_dim),
            groups: (0..rows.min(dims.q_len).div_ceil(GROUP)).map(|_| group()).collect(),
            tile: zeros(CELL),
            keys: Vec::new(),
            values: Vec::new(),
            runs: Vec::new(),
            cell: Cell::new(),
        }
    }
}

/// One tile of rows of one head.
#[derive(Debug)]
pub struct Forward<'t, 'c, E: Element> {
    pub(crate) call: Call<'c, E>,
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
    pub(crate) stage: Stage<'t>,
    pub(crate) target: Target<'t, E>,
    pub(crate) scratch: &'t mut Scratch<E::Num>,
}

impl<E: Element> Task<E::Num> for Forward<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, s: S) {
        let used = self.rows.count.div_ceil(GROUP);
        self.ask_ahead(s);
        for g in 0..used {
            self.start(s, g);
        }
        if let Some((mask, without, keys)) = self.stage.walk.clone() {
            for g in 0..used {
                self.take_queries(s, g);
            }
            self.walk(s, (mask, without), keys);
        }
        for g in 0..used {
            match self.stage.into {
                Some(part) => self.save(s, g, part),
                None => self.finish(s, g),
            }
        }
    }
}

impl<E: Element> Forward<'_, '_, E> {
    #[inline(always)]
    fn walk<S: Simd<E::Num>>(
        &mut self,
        s: S,
        (mask, without): (&Mask, Option<&Mask>),
        keys: Range<usize>,
    ) {
        let Self { call, scope, rows, .. } = *self;
        let Scratch { groups, tile, keys: packed_keys, values, runs, cell, .. } =
            &mut *self.scratch;
        mask.runs_beyond(without, &scope, rows, runs);
        let kv_head = call.problem.kv_head(scope.head);
        let (k, v) = (call.k.head(scope.batch, kv_head), call.v.head(scope.batch, kv_head));
        let groups = &mut groups[..rows.count.div_ceil(GROUP)];
        let mut cells = Cells::new(runs, keys, rows.lanes());
        while cells.next(cell) {
            if let Keys::Picked(picked) = cell.keys() {
                // Rows far apart: no hardware prefetcher follows them.
                picked.iter().for_each(|key| {
                    soon(s, k.row(*key));
                    soon(s, v.row(*key));
                });
            }
            let k = fetch(k, cell, packed_keys);
            let v = fetch(v, cell, values);
            for (g, group) in groups.iter_mut().enumerate() {
                let (mut seen, mut all) = ([0; CELL], [Seen::MAX; CELL]);
                let parts = cell.see(g, group.rows.count, &mut seen);
                for Seeing { keys, span, hidden } in parts.into_iter().flatten() {
                    let (k, v) = (k.slice(keys.start, keys.len()), v.slice(keys.start, keys.len()));
                    let at =
                        At { scope, rows: group.rows, span, keys: cell.keys().skip(keys.start) };
                    // A bias may hide pairs that the mask lets through.
                    let biased = call.problem.score.bias.is_some();
                    let seen =
                        if hidden { &mut seen[keys.clone()] } else { &mut all[keys.clone()] };
                    let seen = (hidden || biased).then_some(seen);
                    group.step(s, call.problem, (k, v), (at, seen), &mut tile[..keys.len()]);
                }
            }
        }
    }

    /// Of a short head, asks for all that is read and written, so that memory works while the queries are turned: such
    /// calls wait for memory more than they compute. Longer ones are followed by the hardware.
    #[inline(always)]
    fn ask_ahead<S: Simd<E::Num>>(&mut self, s: S) {
        let Self { call, scope, .. } = *self;
        if scope.k_len > SHORT {
            return;
        }
        let kv_head = call.problem.kv_head(scope.head);
        let (k, v) = (call.k.head(scope.batch, kv_head), call.v.head(scope.batch, kv_head));
        for key in 0..scope.k_len {
            soon(s, k.row(key));
            soon(s, v.row(key));
        }
        if let Some((out, _)) = &mut self.target.finished {
            (0..self.rows.count).for_each(|lane| soon(s, out.row(0, lane)));
        }
    }

    /// Sets the states of a group: what earlier parts left, or nothing seen.
    #[inline(always)]
    fn start<S: Simd<E::Num>>(&mut self, s: S, g: usize) {
        let group = &mut self.scratch.groups[g];
        let RowTile { first, step, count } = self.rows;
        let skipped = g * GROUP;
        group.rows =
            RowTile { first: first + skipped * step, step, count: (count - skipped).min(GROUP) };
        group.states = States::nothing_seen();
        group.grows = false;
        group.sums.fill(Lanes([E::Num::default(); GROUP]));
        let Some(partial) = &self.target.partial else { return };
        let v_dim = group.sums.len();
        let span = Span { start: 0, end: group.rows.count };
        for part in self.stage.from.clone() {
            let row = |lane| partial.written(part, skipped + lane);
            if step > 1 {
                (0..span.len()).for_each(|lane| soon(s, row(lane)));
            }
            turn(s, row, span.len(), E::Num::from_f64(1.0), &mut self.scratch.other);
            let mut factors = [Lanes([E::Num::default(); GROUP]); 2];
            for lane in 0..span.len() {
                let other = State { m: row(lane)[v_dim], l: row(lane)[v_dim + 1] };
                let (state, mine, theirs) = group.states.get(lane).merge(other);
                (group.states.m.0[lane], group.states.l.0[lane]) = (state.m, state.l);
                (factors[0].0[lane], factors[1].0[lane]) = (mine, theirs);
            }
            for (sum, other) in group.sums.iter_mut().zip(&self.scratch.other) {
                for lane in span.vectors::<E::Num, S>() {
                    let theirs = s.mul(s.load(&other.0[lane..]), s.load(&factors[1].0[lane..]));
                    let sum = &mut sum.0[lane..];
                    s.store(s.fma(s.load(sum), s.load(&factors[0].0[lane..]), theirs), sum);
                }
            }
        }
    }

    /// Leaves the states of a group for a later stage.
    #[inline(always)]
    fn save<S: Simd<E::Num>>(&mut self, s: S, g: usize, part: usize) {
        let Some(partial) = &mut self.target.partial else { return };
        let group = &self.scratch.groups[g];
        for lane in (0..group.rows.count).step_by(S::LANES) {
            let rows = lane..(lane + S::LANES).min(group.rows.count);
            turn_back(s, &group.sums, rows, g * GROUP, (partial, part));
        }
        for lane in 0..group.rows.count {
            let State { m, l } = group.states.get(lane);
            let row = partial.row(part, g * GROUP + lane);
            row[group.sums.len()].write(m);
            row[group.sums.len() + 1].write(l);
        }
    }

    /// Queries into lanes: turned, projected if the similarity asks for it, and scaled.
    #[inline(always)]
    fn take_queries<S: Simd<E::Num>>(&mut self, s: S, g: usize) {
        let Self { call, scope, .. } = *self;
        let q = call.q.head(scope.batch, scope.head);
        let Scratch { groups, raw, .. } = &mut *self.scratch;
        let Group { q: lanes, rows, .. } = &mut groups[g];
        if rows.step > 1 {
            (0..rows.count).for_each(|i| soon(s, q.row(rows.row(i))));
        }
        let factor = E::Num::from_f64(call.problem.query_factor());
        let Similarity::General(w) = call.problem.similarity else {
            return turn(s, |i| q.row(rows.row(i)), rows.count, factor, lanes);
        };
        turn(s, |i| q.row(rows.row(i)), rows.count, factor, raw);
        let w = w.head(0, if w.shape().heads == 1 { 0 } else { scope.head });
        lanes.fill(Lanes([E::Num::default(); GROUP]));
        let one = Lanes([E::Num::from_f64(1.0); GROUP]);
        let span = Span { start: 0, end: rows.count };
        let (mut packed, mut cell) = (Vec::new(), Cell::new());
        for first in (0..w.len).step_by(CELL) {
            let n = (w.len - first).min(CELL);
            cell.set(first, n);
            let w = fetch(w, &cell, &mut packed);
            add_values::<_, S, false>(s, w, &raw[first..first + n], &[], span, (&one, lanes));
        }
    }

    /// Divides the sums, turns them back into rows and writes them with their lse.
    #[inline(always)]
    fn finish<S: Simd<E::Num>>(&mut self, s: S, g: usize) {
        let Self { call, scope, .. } = *self;
        let Some((out, lse_rows)) = &mut self.target.finished else { return };
        let group = &mut self.scratch.groups[g];
        if let Some(sinks) = call.problem.score.sinks {
            group.add_sink(s, in_log2(sinks[scope.head]));
        }
        let mut lse = [E::Num::default(); GROUP];
        for (lane, lse) in lse[..group.rows.count].iter_mut().enumerate() {
            *lse = group.states.get(lane).lse();
        }
        for lane in (0..group.rows.count).step_by(S::LANES) {
            let l = s.load(&group.states.l.0[lane..]);
            // Rows that have seen nothing hold zeros, and keep them.
            let nothing = s.less(l, s.splat(<E::Num as num_traits::Float>::min_positive_value()));
            let one = s.splat(E::Num::from_f64(1.0));
            let share = s.select(nothing, one, s.div(one, l));
            for sum in &mut group.sums {
                s.store(s.mul(s.load(&sum.0[lane..]), share), &mut sum.0[lane..]);
            }
        }
        for lane in (0..group.rows.count).step_by(S::LANES) {
            let rows = lane..(lane + S::LANES).min(group.rows.count);
            for i in rows.clone() {
                lse_rows.row(0, g * GROUP + i)[0].write(lse[i]);
            }
            turn_back(s, &group.sums, rows, g * GROUP, (out, 0));
        }
    }
}

impl<N: Number> Group<N> {
    /// One group against one part of a cell: the heart of it all. `seen` tells which rows see each key, if not all do.
    #[inline(always)]
    fn step<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        problem: &Problem<'_, E>,
        (k, v): (Rows<'_, N>, Rows<'_, N>),
        (at, mut seen): (At<'_>, Option<&mut [Seen]>),
        tile: &mut [Lanes<N>],
    ) {
        let span = at.span;
        let fused = seen.is_none() && problem.is_plain_dot();
        let mut shrink = Lanes([N::one(); GROUP]);
        let mut sums = self.states.unset(s, span);
        // One round where every row has its `m` and no score has outgrown it, one more where some have; then the next
        // tile looks for maxima before it needs them. Sums with a NaN never suffice.
        for round in 0..2 {
            let suffices = States::suffice(s, &sums, span) && (round > 0 || !self.grows);
            if suffices && round > 0 {
                break;
            }
            if suffices && fused {
                let mut weights = Weights { m: &self.states.m, sums };
                dot_tile(s, (k, &self.q), span, tile, &mut weights);
                sums = weights.sums;
                continue;
            }
            self.scores(s, problem, k, (at, seen.as_deref_mut()), tile);
            if !suffices {
                self.grows = self.states.raise(s, tile, (&sums, span), &mut shrink);
            }
            sums = self.states.weigh(s, tile, span);
        }
        self.states.add(s, &sums, span);
        let everyone = lanes_of(span);
        match seen {
            Some(seen) if seen.iter().any(|s| s & everyone != everyone) => {
                add_values::<N, S, true>(s, v, tile, seen, span, (&shrink, &mut self.sums));
            }
            _ => add_values::<N, S, false>(s, v, tile, &[], span, (&shrink, &mut self.sums)),
        }
    }

    /// The scores of a tile; `-inf` where a row does not see the key.
    #[inline(always)]
    fn scores<E: Element<Num = N>, S: Simd<N>>(
        &self,
        s: S,
        problem: &Problem<'_, E>,
        k: Rows<'_, N>,
        (at, seen): (At<'_>, Option<&mut [Seen]>),
        tile: &mut [Lanes<N>],
    ) {
        if matches!(problem.similarity, Similarity::Distance) {
            dot_tile(s, (k, &self.q), at.span, tile, &mut Distances);
        } else {
            dot_tile(s, (k, &self.q), at.span, tile, &mut Dots);
        }
        problem.apply(s, at, tile);
        let Some(seen) = seen else { return };
        let (hidden, lowest) = (s.splat(N::neg_infinity()), s.splat(-N::max_value()));
        for (scores, seen) in tile.iter_mut().zip(seen) {
            for lane in at.span.vectors::<N, S>() {
                let x = s.load(&scores.0[lane..]);
                // A bias of -inf hides a pair too: then not even a NaN in its value may reach the row.
                let by_bias = Seen::from(s.bits(s.less(x, lowest))) << lane;
                *seen &= !by_bias;
                s.store(s.select(s.lanes(low(*seen >> lane)), x, hidden), &mut scores.0[lane..]);
            }
        }
    }

    /// Lets a score without a value join every row.
    #[inline(always)]
    fn add_sink<S: Simd<N>>(&mut self, s: S, sink: N) {
        let span = Span { start: 0, end: self.rows.count };
        let mut tile = [Lanes([sink; GROUP])];
        // Sums that never suffice: `m` becomes the larger of itself and the sink.
        let mut shrink = Lanes([N::one(); GROUP]);
        self.states.raise(s, &tile, (&Lanes([N::infinity(); GROUP]), span), &mut shrink);
        let sums = self.states.weigh(s, &mut tile, span);
        self.states.add(s, &sums, span);
        for sum in &mut self.sums {
            for lane in span.vectors::<N, S>() {
                let x = s.mul(s.load(&sum.0[lane..]), s.load(&shrink.0[lane..]));
                s.store(x, &mut sum.0[lane..]);
            }
        }
    }
}

/// Asks for the cache lines of a row.
#[inline(always)]
fn soon<N: Number, S: Simd<N>, T>(s: S, row: &[T]) {
    for x in row.iter().step_by(LINE / std::mem::size_of::<T>().clamp(1, LINE)) {
        s.prefetch(x);
    }
}

/// Keys of a short head.
const SHORT: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The rows of a cell: where they lie if they are neighbours and need no widening, else copied into `room`.
#[inline(always)]
fn fetch<'r, E: Element>(
    rows: Rows<'r, E>,
    cell: &Cell,
    room: &'r mut Vec<E::Num>,
) -> Rows<'r, E::Num> {
    let Rows { stride, dim, .. } = rows;
    let len = cell.len;
    if let Keys::From(first) = cell.keys()
        && let Some(data) = E::as_numbers(rows.slice(first, len).data)
    {
        return Rows { data, stride, len, dim };
    }
    room.clear();
    for i in 0..len {
        room.extend(rows.row(cell.keys().get(i)).iter().map(|x| x.widen()));
    }
    Rows { data: room, stride: dim, len, dim }
}

/// Rows into lanes: `lanes[d][i] = row(i)[d] * factor` for `count` rows, 0 where there is no row.
#[expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the block in registers"
)]
#[inline(always)]
fn turn<'r, E: Element, S: Simd<E::Num>>(
    s: S,
    row: impl Fn(usize) -> &'r [E],
    count: usize,
    factor: E::Num,
    lanes: &mut [Lanes<E::Num>],
) {
    let scale = s.splat(factor);
    for lane in (0..lanes_used::<E::Num, S>(count)).step_by(S::LANES) {
        let mut rows: [&[E]; MAX_LANES] = [&[]; MAX_LANES];
        for (i, r) in rows[..S::LANES].iter_mut().enumerate().take(count.saturating_sub(lane)) {
            *r = &row(lane + i)[..lanes.len()];
        }
        let mut d = 0;
        let whole = lane + S::LANES <= count && E::as_numbers(&[]).is_some();
        while whole && d + S::LANES <= lanes.len() {
            let mut block = s.block();
            for i in 0..S::LANES {
                let row = E::as_numbers(&rows[i][d..]).unwrap_or(&[]);
                block.as_mut()[i] = s.mul(s.load(row), scale);
            }
            s.transpose(&mut block);
            for i in 0..S::LANES {
                s.store(block.as_mut()[i], &mut lanes[d + i].0[lane..]);
            }
            d += S::LANES;
        }
        for (i, row) in rows[..S::LANES].iter().enumerate() {
            for (d, lanes) in lanes.iter_mut().enumerate().skip(d) {
                lanes.0[lane + i] = row.get(d).map_or(E::Num::default(), |x| x.widen() * factor);
            }
        }
    }
}

/// Lanes back into rows: row `skipped + i` of a part starts with `lanes[..][i]`, for at most a vector of rows.
#[expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the block in registers"
)]
#[inline(always)]
fn turn_back<E: Element, S: Simd<E::Num>>(
    s: S,
    lanes: &[Lanes<E::Num>],
    rows: Range<usize>,
    skipped: usize,
    (out, part): (&mut TileMut<'_, E>, usize),
) {
    let mut d = 0;
    let mut to: [&mut [MaybeUninit<E>]; MAX_LANES] =
        out.rows(part, skipped + rows.start, rows.len());
    while rows.len() == S::LANES && d + S::LANES <= lanes.len() && E::as_numbers(&[]).is_some() {
        let mut block = s.block();
        for i in 0..S::LANES {
            block.as_mut()[i] = s.load(&lanes[d + i].0[rows.start..]);
        }
        s.transpose(&mut block);
        for i in 0..S::LANES {
            if let Some(row) = E::as_numbers_mut(&mut to[i][d..]) {
                s.write(block.as_mut()[i], row);
            }
        }
        d += S::LANES;
    }
    for (i, row) in rows.zip(&mut to) {
        for (x, lanes) in row[d..].iter_mut().zip(&lanes[d..]) {
            x.write(E::narrow(lanes.0[i]));
        }
    }
}
