//! The forward walk on tiles: while the vectors weigh one piece, the tiles score the next and add up the one before.

use super::pack::{PackPairs, Packed, PackedCell, Prepared, split};
use super::product::{Operand, Product};
use super::{CHUNKS, LANE_TILES, ROWS, Room, TileRow};
use crate::cells::{CELL, Cell};
use crate::element::Element;
use crate::forward::{Forward, Group, Scratch};
use crate::lanes::multiply;
use crate::mask::{RowTile, Scope};
use crate::micro::Seen;
use crate::score::{At, Keys};
use crate::simd::{Amx, Avx512, GROUP, Lanes, Simd, Span, Task, Tiles, math};
use crate::softmax::{States, TileSums};
use crate::view::Rows;
use crate::walk::{Call, Hide, Piece, Visit};

/// One tile of rows of one head.
pub(crate) fn forward<E: Element<Num = f32>, const PARTS: usize>(
    amx: Amx,
    task: Forward<'_, '_, E>,
) {
    amx.run(OnTiles::<E, PARTS> { amx, task });
}

struct OnTiles<'t, 'c, E: Element, const PARTS: usize> {
    amx: Amx,
    task: Forward<'t, 'c, E>,
}

impl<E: Element<Num = f32>, const PARTS: usize> Task<f32> for OnTiles<'_, '_, E, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { amx, mut task } = self;
        let (s, t) = (amx.vectors(), amx.configure());
        let used = task.rows.groups();
        for g in 0..used {
            task.start(s, g);
        }
        if let Some(way) = &task.stage.walk {
            let (call, scope, rows, prepared) = (task.call, task.scope, task.rows, task.prepared);
            let Scratch { groups, factors, walk, room: Some(room), .. } = &mut *task.scratch else {
                return; // a plan that goes by tiles has made room for them
            };
            let mut visitor = Adding::<E, PARTS> {
                s,
                t: &t,
                call,
                scope,
                rows,
                groups,
                room,
                factors,
                prepared,
                scored: None,
                weighed: None,
            };
            visitor.turn_queries();
            walk.lead(s, &call, (scope, rows), way, &mut visitor);
            visitor.flush();
        }
        drop(t);
        for g in 0..used {
            match task.stage.into {
                Some(part) => task.save(s, g, part),
                None => task.finish(s, g),
            }
        }
    }
}

/// Adds each cell to the sums of the groups.
struct Adding<'t, 'c, E: Element, const PARTS: usize> {
    s: Avx512,
    t: &'t Tiles,
    call: Call<'c, E>,
    scope: Scope,
    rows: RowTile,
    groups: &'t mut [Group<f32>],
    room: &'t mut Room,
    factors: &'t mut [Lanes<f32>],
    prepared: Option<&'c Prepared>,
    /// A piece whose scores are there.
    scored: Option<Waiting>,
    /// A piece whose weights are there.
    weighed: Option<Waiting>,
}

/// A whole prepared cell and a group, half done.
#[derive(Clone, Copy)]
struct Waiting {
    group: usize,
    /// The first key.
    first: usize,
    /// Which of the two rooms for scores and for weights it has.
    buffer: usize,
}

impl<E: Element<Num = f32>, const PARTS: usize> Visit<f32> for Adding<'_, '_, E, PARTS> {
    #[inline(always)]
    fn take<S: Simd<f32>>(&mut self, _: S, cell: &Cell) -> bool {
        let kv_head = self.call.problem.kv_head(self.scope.head);
        let problem = self.call.problem;
        let plain = problem.is_plain_dot() && problem.dropout.is_none() && !problem.entropy;
        let mut own = std::mem::replace(&mut self.room.cell, Packed::none(self.room.sizes));
        let ready = match (self.prepared, cell.keys()) {
            (Some(prepared), Keys::From(first)) if first.is_multiple_of(CELL) => {
                Some(prepared.cell((self.scope.batch, kv_head), first))
            }
            _ => None,
        };
        let packed = ready.unwrap_or_else(|| {
            let rows = self.call.keys_and_values(self.scope);
            own.fill::<E, PARTS>(self.s, rows, cell, &mut self.room.turned);
            own.get()
        });
        for group in 0..self.rows.groups() {
            let whole = cell.full && cell.len == CELL && packed.odd == 0;
            match cell.keys() {
                Keys::From(first) if whole && plain && ready.is_some() => self.pipe(group, first),
                _ => {
                    self.flush();
                    self.step(packed, cell, group);
                }
            }
        }
        self.room.cell = own;
        true
    }

    #[inline(always)]
    fn visit<S: Simd<f32>>(&mut self, _: S, _: Piece<'_, f32>) {}
}

impl<E: Element<Num = f32>, const PARTS: usize> Adding<'_, '_, E, PARTS> {
    /// Queries into pairs. They stay as they are: the scale comes after the product.
    #[inline(always)]
    fn turn_queries(&mut self) {
        let q = self.call.q.head(self.scope.batch, self.scope.head);
        for (group, pairs) in
            self.groups[..self.rows.groups()].iter_mut().zip(&mut self.room.queries)
        {
            let rows = group.rows;
            crate::lanes::turn(self.s, |i| q.row(rows.row(i)), rows.count, 1.0, &mut group.q);
            let chunks = self.room.sizes.chunks;
            self.s.call(PackPairs::<PARTS> { s: self.s, lanes: &group.q, chunks, to: pairs });
        }
    }

    fn lane_tiles(&self, group: usize) -> usize {
        self.groups[group].rows.count.div_ceil(ROWS)
    }

    fn factor(&self) -> f32 {
        #[expect(clippy::cast_possible_truncation, reason = "a factor of numbers in f32")]
        let factor = self.call.problem.query_factor() as f32;
        factor
    }

    /// A whole cell that all rows see, kept on its way.
    #[inline(always)]
    fn pipe(&mut self, group: usize, first: usize) {
        let buffer = self.scored.map_or(0, |scored| 1 - scored.buffer);
        let next = Waiting { group, first, buffer };
        self.weave(Some(next));
        self.weighed = self.scored.take();
        self.scored = Some(next);
    }

    /// Finishes what is on its way.
    #[inline(always)]
    fn flush(&mut self) {
        for _ in 0..2 {
            if self.scored.is_some() || self.weighed.is_some() {
                self.weave(None);
                self.weighed = self.scored.take();
            }
        }
        self.weighed = None;
    }

    /// Scores `next`, weighs what is scored, adds up what is weighed: all at once where that can be.
    #[inline(always)]
    fn weave(&mut self, next: Option<Waiting>) {
        let (s, t, factor) = (self.s, self.t, self.factor());
        let Some(prepared) = self.prepared else { return };
        let head = (self.scope.batch, self.call.problem.kv_head(self.scope.head));
        let span = |group: &Group<f32>| Span { start: 0, end: group.rows.count };
        // The first piece of a group, and one with scores far above those before, must be looked through first.
        let early = self.scored.filter(|scored| {
            let group = &self.groups[scored.group];
            group.grows || !States::suffice(s, &group.states.unset(s, span(group)), span(group))
        });
        if let Some(scored) = early {
            self.add_up(prepared, head);
            self.weigh_slowly(scored);
        }
        let scored = self.scored.filter(|_| early.is_none());
        let weighed = self.weighed.filter(|_| early.is_none());
        let next_lanes = next.map_or(0, |next| self.lane_tiles(next.group));
        let m = scored.map_or(Lanes([0.0; GROUP]), |scored| self.groups[scored.group].states.m);
        let vectors = scored.map_or(0, |scored| self.lane_tiles(scored.group));
        let Room { sizes, queries, scores, weights, .. } = &mut *self.room;
        let [scores_0, scores_1] = scores;
        let [weights_0, weights_1] = weights;
        // Scores of the next piece go where those of the weighed one were; what is scored has the other room.
        let free = scored.map(|scored| 1 - scored.buffer);
        let free = free.or(next.or(weighed).map(|piece| piece.buffer)).unwrap_or(0);
        let (to_score, to_weigh) =
            if free == 0 { (scores_0, scores_1) } else { (scores_1, scores_0) };
        let (done, to) = if free == 0 { (weights_0, weights_1) } else { (weights_1, weights_0) };
        let score = next.map(|next| {
            let keys = prepared.cell(head, next.first).keys;
            let queries =
                Operand { data: &queries[next.group], chunks: sizes.chunks, tiles: LANE_TILES };
            let tiles = (CELL / ROWS, next_lanes);
            Product::<PARTS>::new((keys, queries), sizes.chunks, tiles, (to_score, false))
        });
        let add = weighed.map(|weighed| {
            let group = &mut self.groups[weighed.group];
            let values = prepared.cell(head, weighed.first).values;
            let weights = Operand { data: done, chunks: CHUNKS, tiles: LANE_TILES };
            let tiles = (sizes.features, group.rows.count.div_ceil(ROWS));
            Product::<PARTS>::new((values, weights), CHUNKS, tiles, (&mut group.sums, true))
        });
        let mut sums = Lanes([0.0; GROUP]);
        s.call(Weave::<PARTS> {
            s,
            t,
            products: [add, score],
            scores: to_weigh,
            m: &m,
            factor,
            vectors,
            sums: &mut sums,
            weights: to,
        });
        if let Some(scored) = scored {
            let group = &mut self.groups[scored.group];
            if States::suffice(s, &sums, span(group)) {
                group.states.add(s, &TileSums { l: sums, t: None }, span(group));
            } else {
                self.weigh_slowly(scored);
            }
        }
    }

    /// Adds up what is weighed, now.
    #[inline(always)]
    fn add_up(&mut self, prepared: &Prepared, head: (usize, usize)) {
        let Some(weighed) = self.weighed.take() else { return };
        let group = &mut self.groups[weighed.group];
        let values = prepared.cell(head, weighed.first).values;
        add_values::<PARTS>(
            self.s,
            self.t,
            values,
            &self.room.weights[weighed.buffer],
            group,
            self.room.sizes.features,
        );
    }

    /// Weighs a piece whose scores are there with a look for the largest of them.
    #[inline(always)]
    fn weigh_slowly(&mut self, scored: Waiting) {
        let (s, factor) = (self.s, self.factor());
        let group = &mut self.groups[scored.group];
        let span = Span { start: 0, end: group.rows.count };
        let tile = &mut self.room.scores[scored.buffer][..];
        s.call(Scale { tile, factor, span });
        let never = Lanes([f32::INFINITY; GROUP]);
        group.raise(s, tile, (&never, span));
        let mut sums = TileSums::zero(false);
        group.states.weigh(s, tile, span, &mut sums);
        group.states.add(s, &sums, span);
        let to = &mut self.room.weights[scored.buffer][..];
        s.call(PackPairs::<PARTS> { s, lanes: tile, chunks: CHUNKS, to });
    }

    /// Any cell, one group: all in a row.
    #[inline(always)]
    fn step(&mut self, packed: PackedCell<'_>, cell: &Cell, g: usize) {
        let (s, t, factor, problem) = (self.s, self.t, self.factor(), self.call.problem);
        let group = &mut self.groups[g];
        let (n, rows) = (cell.len, group.rows);
        let span = Span { start: 0, end: rows.count };
        let everyone = crate::cells::lanes_of(span);
        let mut seen: [Seen; CELL] = [everyone; CELL];
        if !cell.full {
            #[expect(clippy::cast_possible_truncation, reason = "the bits of the group")]
            for (seen, lanes) in seen.iter_mut().zip(&cell.lanes[..n]) {
                *seen = (lanes >> (g * GROUP)) as Seen & everyone;
            }
            if seen[..n].iter().all(|seen| *seen == 0) {
                return;
            }
        }
        let at = At { scope: self.scope, rows, span, keys: cell.keys() };
        let hides = !cell.full || problem.score.may_hide();
        let Room { sizes, queries, scores: [tile, _], weights: [weights, _], .. } = &mut *self.room;
        let queries = Operand { data: &queries[g], chunks: sizes.chunks, tiles: LANE_TILES };
        let mut sums =
            TileSums { l: group.states.unset(s, span), ..TileSums::zero(problem.entropy) };
        for round in 0..2 {
            let suffices = States::suffice(s, &sums.l, span) && (round > 0 || !group.grows);
            if suffices && round > 0 {
                break;
            }
            let tiles = (n.div_ceil(ROWS), rows.count.div_ceil(ROWS));
            s.call(Alone::<PARTS> {
                t,
                product: Product::new((packed.keys, queries), sizes.chunks, tiles, (tile, false)),
            });
            let tile = &mut tile[..n];
            s.call(Scale { tile, factor, span });
            problem.apply(s, at, tile, None);
            if hides {
                s.call(Hide { tile, seen: &mut seen[..n], span });
            }
            if !suffices {
                group.raise(s, tile, (&sums.l, span));
            }
            sums = TileSums::zero(problem.entropy);
            group.states.weigh(s, tile, span, &mut sums);
        }
        group.states.add(s, &sums, span);
        let tile = &mut tile[..n];
        if let Some(dropout) = problem.dropout {
            let factors = &mut self.factors[..n];
            dropout.factors(s, at, factors);
            multiply(s, (tile, factors), span);
        }
        s.call(PackPairs::<PARTS> { s, lanes: tile, chunks: CHUNKS, to: weights });
        add_values::<PARTS>(s, t, packed.values, weights, group, sizes.features);
        if packed.odd != 0 {
            let (_, v) = self.call.keys_and_values(self.scope);
            add_odd(v, at.keys, (packed.odd, &seen), tile, &mut group.sums);
        }
    }
}

/// Adds the values of a cell, weighed, to the sums of a group.
#[inline(always)]
fn add_values<const PARTS: usize>(
    s: Avx512,
    t: &Tiles,
    values: Operand<'_>,
    weights: &[TileRow],
    group: &mut Group<f32>,
    features: usize,
) {
    let weights = Operand { data: weights, chunks: CHUNKS, tiles: LANE_TILES };
    let tiles = (features, group.rows.count.div_ceil(ROWS));
    let to = (&mut group.sums[..], true);
    s.call(Alone::<PARTS> { t, product: Product::new((values, weights), CHUNKS, tiles, to) });
}

/// The numbers that were left out of the values because they are not finite, for the rows that see them.
#[inline(never)]
fn add_odd<E: Element<Num = f32>>(
    v: Rows<'_, E>,
    keys: Keys<'_>,
    (odd, seen): (u64, &[Seen; CELL]),
    weights: &[Lanes<f32>],
    sums: &mut [Lanes<f32>],
) {
    for (i, weights) in weights.iter().enumerate().filter(|(i, _)| odd >> i & 1 == 1) {
        let row = v.row(keys.get(i)).iter().map(|x| x.widen());
        for (x, sum) in row.zip(&mut *sums).filter(|(x, _)| !x.is_finite()) {
            for lane in (0..GROUP).filter(|lane| seen[i] >> lane & 1 == 1) {
                sum.0[lane] += weights.0[lane] * x;
            }
        }
    }
}

/// A product and nothing else.
struct Alone<'t, const PARTS: usize> {
    t: &'t Tiles,
    product: Product<'t, PARTS>,
}

impl<const PARTS: usize> Task<f32> for Alone<'_, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        self.product.run(self.t);
    }
}

/// Multiplies a tile.
pub(super) struct Scale<'t> {
    pub(super) tile: &'t mut [Lanes<f32>],
    pub(super) factor: f32,
    pub(super) span: Span,
}

impl Task<f32> for Scale<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, s: S) {
        for row in self.tile {
            for lane in self.span.vectors::<f32, S>() {
                let x = s.mul(s.load(&row.0[lane..]), s.splat(self.factor));
                s.store(x, &mut row.0[lane..]);
            }
        }
    }
}

/// Products on the tiles while the vectors turn scores into weights: `2^(score factor - m)`, in pairs of keys.
struct Weave<'t, const PARTS: usize> {
    s: Avx512,
    t: &'t Tiles,
    products: [Option<Product<'t, PARTS>>; 2],
    scores: &'t [Lanes<f32>],
    m: &'t Lanes<f32>,
    factor: f32,
    /// Vectors of lanes; 0 if there is nothing to weigh.
    vectors: usize,
    sums: &'t mut Lanes<f32>,
    weights: &'t mut [TileRow],
}

impl<const PARTS: usize> Task<f32> for Weave<'_, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(mut self, _: S) {
        let steps = self.products.iter().flatten().map(Product::steps).sum();
        match self.vectors {
            0 => (0..steps).for_each(|_| self.step()),
            1 => self.weigh::<1>(steps),
            2 => self.weigh::<2>(steps),
            _ => self.weigh::<4>(steps),
        }
    }
}

impl<const PARTS: usize> Weave<'_, PARTS> {
    /// The next step of the products.
    #[inline(always)]
    fn step(&mut self) {
        let [first, second] = &mut self.products;
        match first {
            Some(product) if !product.is_done() => product.step(self.t),
            _ => {
                if let Some(product) = second {
                    product.step(self.t);
                }
            }
        }
    }

    #[expect(
        clippy::needless_range_loop,
        reason = "indices over constants keep the vectors in registers"
    )]
    #[inline(always)]
    fn weigh<const VECTORS: usize>(&mut self, steps: usize) {
        let s = self.s;
        let factor = s.splat(self.factor);
        let (mut less_m, mut sums) = ([s.splat(0.0); VECTORS], [s.splat(0.0); VECTORS]);
        for j in 0..VECTORS {
            less_m[j] = s.sub(s.splat(0.0), s.load(&self.m.0[j * 16..]));
        }
        const PAIRS: usize = CELL / 2;
        let mut taken = 0;
        for pair in 0..PAIRS {
            while taken * PAIRS < pair * steps {
                self.step();
                taken += 1;
            }
            let rows = [&self.scores[2 * pair], &self.scores[2 * pair + 1]];
            for j in 0..VECTORS {
                let weights = rows.map(|row| {
                    let x = s.fma(s.load(&row.0[j * 16..]), factor, less_m[j]);
                    if PARTS < 3 { math::exp2_coarse(s, x) } else { math::exp2(s, x) }
                });
                sums[j] = s.add(sums[j], s.add(weights[0], weights[1]));
                let [first, second] = weights.map(|x| split::<PARTS>(s, x));
                for part in 0..PARTS {
                    let at = (part * CHUNKS + pair / ROWS) * LANE_TILES + j;
                    let to = &mut self.weights[at * ROWS + pair % ROWS].0;
                    s.write_pairs(first[part], second[part], to);
                }
            }
        }
        (taken..steps).for_each(|_| self.step());
        for j in 0..VECTORS {
            s.store(sums[j], &mut self.sums.0[j * 16..]);
        }
    }
}
