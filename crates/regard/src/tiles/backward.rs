//! The way back on tiles: five products for each cell of keys and group of rows,
//!
//! ```text
//! scores  [keys][rows]     = keys     [keys][features]  x queries  [features][rows]
//! d_a     [keys][rows]     = values   [keys][features]  x d_out    [features][rows]
//! d_v     [keys][features] += weights  [keys][rows]     x d_out    [rows][features]
//! d_k     [keys][features] += d_scores [keys][rows]     x queries  [rows][features]
//! d_q     [features][rows] += keys    [features][keys]  x d_scores [keys][rows]
//! ```
//!
//! and between the second and the third one pass of the vectors. While that goes over one piece, the tiles make the first two
//! products of the next one, and the last three of the one before.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the vectors in registers"
)]

use super::product::{Operand, Product, Sums};
use super::woven::{BackCells, BackGroup, BackPiece, BackSizes, PackPiece, read, sees};
use super::{CHUNKS, LANE_TILES, ROWS, TileRow, WIDTH};
use crate::backward::{Backward, ByKeys, Group, Path, Products, Undoing};
use crate::cells::{CELL, Cell, lanes_of};
use crate::element::Element;
use crate::lanes::turn;
use crate::mask::{RowTile, Scope};
use crate::micro::{Packed, Seen, low};
use crate::problem::Dims;
use crate::score::{At, Keys};
use crate::simd::{Amx, Avx512, GROUP, Lanes, Simd, Span, Task, Tiles, math};
use crate::tiles::forward::Scale;
use crate::view::Rows;
use crate::walk::{Hide, Piece, Visit};

/// Some keys of one head, and all rows that see them.
pub(crate) fn backward<E: Element<Num = f32>, const PARTS: usize>(
    amx: Amx,
    task: Backward<'_, '_, E>,
) {
    if let Backward::Keys(task) = task {
        amx.run(OnTiles::<E, PARTS> { amx, task });
    }
}

struct OnTiles<'t, 'c, E: Element, const PARTS: usize> {
    amx: Amx,
    task: ByKeys<'t, 'c, E>,
}

impl<E: Element<Num = f32>, const PARTS: usize> Task<f32> for OnTiles<'_, '_, E, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let (s, t) = (self.amx.vectors(), self.amx.configure());
        self.task.run(s, &ByTiles::<PARTS> { s, t });
    }
}

struct ByTiles<const PARTS: usize> {
    s: Avx512,
    t: Tiles,
}

impl<E: Element<Num = f32>, const PARTS: usize> Products<E> for ByTiles<PARTS> {
    #[inline(always)]
    fn walk<S: Simd<f32>>(
        &self,
        _: S,
        path: Path<'_, '_, E>,
        undoing: Undoing<'_, '_, E>,
        room: Option<&mut BackRoom>,
    ) {
        let Self { s, t } = self;
        let Path { walk, call, scope, rows, way } = path;
        let Some(room) = room else { return }; // a plan that goes by tiles has made room for them
        #[expect(clippy::cast_possible_truncation, reason = "a factor of numbers in f32")]
        let factor = call.problem.query_factor() as f32;
        let q = call.q.head(scope.batch, scope.head);
        for (group, to) in undoing.groups.iter().zip(&mut room.groups) {
            let rows = group.rows;
            turn(*s, |i| q.row(rows.row(i)), rows.count, 1.0, &mut room.turned);
            let lanes = [&room.turned[..], &group.d_out];
            to.fill::<PARTS>(*s, lanes, [&group.q_rows, &group.d_out_rows], rows.count);
        }
        let inputs = call.keys_and_values(scope);
        let (scored, weighed) = (None, None);
        let s = *s;
        let mut visitor = Passing::<E, PARTS> {
            s,
            t,
            inputs,
            scope,
            rows,
            undoing,
            room,
            factor,
            scored,
            weighed,
        };
        walk.lead(s, &call, (scope, rows), &way, &mut visitor);
        visitor.flush();
    }
}

/// Memory of one thread for the products of the way back.
#[derive(Debug)]
pub(crate) struct BackRoom {
    sizes: BackSizes,
    cells: BackCells,
    groups: Vec<BackGroup>,
    /// Of two pieces on their way.
    pieces: [PieceRoom; 2],
    /// Queries on their way, `[features][rows]`.
    turned: Vec<Lanes<f32>>,
    /// Gradients of picked keys and values, before they go to their places.
    picked: [Packed<f32>; 2],
}

/// What is made of a piece.
#[derive(Debug)]
struct PieceRoom {
    /// `[keys][rows]`, before they are times the scale.
    scores: Vec<Lanes<f32>>,
    /// `[keys][rows]`
    d_weights: Vec<Lanes<f32>>,
    /// Which rows see each key; none where there is no key.
    seen: [Seen; CELL],
    operands: BackPiece,
}

impl BackRoom {
    /// For tiles of `groups` groups of rows, and tasks of up to `keys` keys.
    pub(crate) fn new(parts: usize, dims: Dims, groups: usize, keys: usize) -> Self {
        let sizes = BackSizes::new(parts, dims);
        let lanes = |n| vec![Lanes([0.0; GROUP]); n];
        let piece = || PieceRoom {
            scores: lanes(CELL),
            d_weights: lanes(CELL),
            seen: [0; CELL],
            operands: BackPiece::new(parts),
        };
        Self {
            sizes,
            cells: BackCells::new(sizes, keys, dims.qk_dim),
            groups: (0..groups).map(|_| BackGroup::new(sizes)).collect(),
            pieces: [piece(), piece()],
            turned: lanes(dims.qk_dim),
            picked: [dims.qk_dim, dims.v_dim].map(|dim| Packed::new(CELL, dim)),
        }
    }

    /// Parts that each number is split into.
    pub(crate) fn parts(&self) -> usize {
        self.sizes.parts
    }

    /// Features of a query up to whole tiles, and `keys` up to where the last tile of a cell may end.
    pub(crate) fn padded(&self, keys: usize) -> (usize, usize) {
        (self.sizes.qk.tiles * ROWS, keys + ROWS)
    }

    /// For another task.
    pub(crate) fn clear(&mut self) {
        self.cells.clear();
    }
}

/// Takes the gradients of each cell.
struct Passing<'t, 'c, E: Element, const PARTS: usize> {
    s: Avx512,
    t: &'t Tiles,
    inputs: (Rows<'c, E>, Rows<'c, E>),
    scope: Scope,
    rows: RowTile,
    undoing: Undoing<'t, 'c, E>,
    room: &'t mut BackRoom,
    /// What makes a score of a product.
    factor: f32,
    /// A piece whose scores, and gradients of weights, are there.
    scored: Option<Waiting>,
    /// A piece whose weights, and gradients of scores, are there.
    weighed: Option<Waiting>,
}

/// A cell and a group, half done.
#[derive(Clone, Copy)]
struct Waiting {
    group: usize,
    /// The place among the packed cells.
    cell: usize,
    /// Where the keys stand among those of the task; nowhere for picked ones.
    place: Option<usize>,
    keys: usize,
    /// Whether some rows do not see some keys.
    hides: bool,
    /// Which of the two rooms it has.
    buffer: usize,
}

impl<E: Element<Num = f32>, const PARTS: usize> Visit<f32> for Passing<'_, '_, E, PARTS> {
    #[inline(always)]
    fn take<S: Simd<f32>>(&mut self, _: S, cell: &Cell) -> bool {
        let place = match cell.keys() {
            Keys::From(key) => Some(key - self.undoing.first),
            Keys::Picked(_) => None,
        };
        if !matches!(cell.keys(), Keys::From(key) if key.is_multiple_of(CELL)) {
            self.flush(); // before another cell takes the place of one that is on its way
        }
        let packed =
            self.room.cells.find::<E, PARTS>(self.s, self.inputs, cell, self.undoing.first);
        for group in 0..self.rows.groups() {
            self.pass(cell, (group, packed, place));
        }
        true
    }

    #[inline(always)]
    fn visit<S: Simd<f32>>(&mut self, _: S, _: Piece<'_, f32>) {}
}

impl<E: Element<Num = f32>, const PARTS: usize> Passing<'_, '_, E, PARTS> {
    /// One cell and one group.
    #[inline(always)]
    fn pass(&mut self, cell: &Cell, (group, packed, place): (usize, usize, Option<usize>)) {
        let (keys, count) = (cell.len, self.undoing.groups[group].rows.count);
        let everyone = lanes_of(Span { start: 0, end: count });
        let mut seen: [Seen; CELL] = [0; CELL];
        seen[..keys].fill(everyone);
        if !cell.full {
            #[expect(clippy::cast_possible_truncation, reason = "the bits of the group")]
            for (seen, lanes) in seen.iter_mut().zip(&cell.lanes[..keys]) {
                *seen = (lanes >> (group * GROUP)) as Seen & everyone;
            }
            if seen[..keys].iter().all(|seen| *seen == 0) {
                return;
            }
        }
        let hides = seen.iter().any(|seen| *seen != Seen::MAX);
        let buffer = self.scored.map_or(0, |scored| 1 - scored.buffer);
        let next = Waiting { group, cell: packed, place, keys, hides, buffer };
        let problem = self.undoing.problem;
        let plain = problem.is_plain_dot() && problem.dropout.is_none();
        if plain && self.undoing.groups[group].entropy.is_none() {
            self.room.pieces[buffer].seen = seen;
            self.weave(Some(next));
            self.weighed = self.scored.take();
            self.scored = Some(next);
        } else {
            self.flush();
            self.step(cell, next, &mut seen);
        }
        let cells = &self.room.cells;
        let odd = cells.at(packed).odd != 0 || self.room.groups[group].odd != [0; 2];
        if odd || cells.is_spare(packed) {
            self.flush();
            self.put_in_place(cell.keys());
            if odd {
                self.add_odd(cell, next, &seen);
            }
        }
    }

    /// Finishes what is on its way.
    #[inline(always)]
    fn flush(&mut self) {
        while self.scored.is_some() || self.weighed.is_some() {
            self.weave(None);
            self.weighed = self.scored.take();
        }
    }

    /// The first products of `next`, what lies between for the one that is scored, and the last products of the one that is
    /// weighed: all at once.
    #[inline(always)]
    fn weave(&mut self, next: Option<Waiting>) {
        let (s, t, scored, weighed) = (self.s, self.t, self.scored, self.weighed);
        let BackRoom { sizes, cells, groups: own, pieces: [first, second], picked, .. } =
            &mut *self.room;
        let free = match (scored, weighed) {
            (Some(scored), _) => 1 - scored.buffer,
            (None, Some(weighed)) => weighed.buffer,
            (None, None) => next.map_or(0, |next| next.buffer),
        };
        let (free, held) = if free == 0 { (first, second) } else { (second, first) };
        let Undoing { groups, d_k, d_v, .. } = &mut self.undoing;
        let mut products = [const { None }; 5];
        let mut pass = None;
        if let Some(Waiting { group, keys, hides, .. }) = scored {
            let Group { lse, delta, rows, .. } = &groups[group];
            pass = Some(Differentiate {
                s,
                scores: &held.scores,
                d_weights: &held.d_weights,
                seen: &held.seen,
                lse: lse.clone(),
                delta: delta.clone(),
                factor: self.factor,
                hides,
                sizes: (keys, rows.count),
                to: &mut held.operands,
            });
        }
        if let Some(next) = next {
            let (cell, own) = (cells.at(next.cell), &own[next.group]);
            let count = groups[next.group].rows.count;
            let tiles = (next.keys.div_ceil(ROWS), count.div_ceil(ROWS));
            let (keys, values) = ((cell.keys, own.queries()), (cell.values, own.d_out()));
            let to = (&mut free.scores[..], false);
            products[3] = Some(Product::new(keys, sizes.qk.chunks, tiles, to));
            let to = (&mut free.d_weights[..], false);
            products[4] = Some(Product::new(values, sizes.v.chunks, tiles, to));
        }
        if let Some(weighed) = weighed {
            let (cell, own, piece) = (cells.at(weighed.cell), &own[weighed.group], &free.operands);
            let (count, keys) = (groups[weighed.group].rows.count, weighed.keys);
            let (chunks, tiles) = (count.div_ceil(WIDTH), keys.div_ceil(ROWS));
            let [picked_k, picked_v] = picked;
            let (to_k, to_v) = match weighed.place {
                Some(place) => (d_k.from_row(place), d_v.from_row(place)),
                None => (picked_k.from_row(0), picked_v.from_row(0)),
            };
            let add = weighed.place.is_some();
            let left = |data| Operand { data, chunks: CHUNKS, tiles: CELL / ROWS };
            let operands = (left(&piece.weights), own.d_out_rows());
            let to = (Sums::rows(to_v), add);
            products[0] = Some(Product::into_sums(operands, chunks, (tiles, sizes.v.tiles), to));
            let operands = (left(&piece.d_scores), own.query_rows());
            let to = (Sums::rows(to_k), add);
            products[1] = Some(Product::into_sums(operands, chunks, (tiles, sizes.qk.tiles), to));
            let turned = Operand { data: &piece.turned, chunks: CHUNKS, tiles: LANE_TILES };
            let tiles = (sizes.qk.tiles, count.div_ceil(ROWS));
            let to = (&mut groups[weighed.group].d_q[..], true);
            let operands = (cell.turned, turned);
            products[2] = Some(Product::new(operands, keys.div_ceil(WIDTH), tiles, to));
        }
        s.call(Weave::<PARTS> { steps: Steps { t, products, at: 0 }, pass });
    }

    /// A piece of a problem that is not plain: all in a row, but for the last products.
    #[inline(always)]
    fn step(&mut self, cell: &Cell, next: Waiting, seen: &mut [Seen; CELL]) {
        let Self { s, t, scope, undoing, room, factor, .. } = self;
        let (s, problem, n, g) = (*s, undoing.problem, next.keys, next.group);
        let rows = undoing.groups[g].rows;
        let span = Span { start: 0, end: rows.count };
        let BackRoom { sizes, cells, groups, pieces, .. } = &mut **room;
        let (packed, own) = (cells.at(next.cell), &groups[g]);
        let tiles = (n.div_ceil(ROWS), rows.count.div_ceil(ROWS));
        let (keys, values) = ((packed.keys, own.queries()), (packed.values, own.d_out()));
        let to = (&mut *undoing.tiles.weights, false);
        let scores = Product::<PARTS>::new(keys, sizes.qk.chunks, tiles, to);
        let to = (&mut *undoing.tiles.d_scores, false);
        let d_weights = Product::new(values, sizes.v.chunks, tiles, to);
        let products = [Some(scores), Some(d_weights), None, None, None];
        s.call(Weave::<PARTS> { steps: Steps { t, products, at: 0 }, pass: None });
        let at = At { scope: *scope, rows, span, keys: cell.keys() };
        let scores = &mut undoing.tiles.weights[..n];
        s.call(Scale { tile: scores, factor: *factor, span });
        problem.apply(s, at, scores, Some(&mut *undoing.tiles.slopes));
        if !cell.full || problem.score.may_hide() {
            s.call(Hide { tile: scores, seen: &mut seen[..n], span });
        }
        undoing.groups[g].weigh(s, problem, (at, Some(&seen[..n])), n, &mut undoing.tiles);
        undoing.undo(s, g, (at, Some(&seen[..n])), n);
        s.call(PackPiece::<PARTS> {
            s,
            weights: &undoing.tiles.weights[..n],
            d_scores: &undoing.tiles.d_scores[..n],
            count: rows.count,
            to: &mut pieces[next.buffer].operands,
        });
        self.weighed = Some(next);
    }

    /// Adds the gradients of picked keys to those of the task.
    #[inline(always)]
    fn put_in_place(&mut self, keys: Keys<'_>) {
        let Keys::Picked(keys) = keys else { return };
        let ([k, v], Undoing { first, d_k, d_v, .. }) = (&self.room.picked, &mut self.undoing);
        for (i, key) in keys.iter().enumerate() {
            self.s.call(AddRow { row: k.row(i), to: d_k.row_mut(key - *first) });
            self.s.call(AddRow { row: v.row(i), to: d_v.row_mut(key - *first) });
        }
    }

    /// Adds what was left out of the operands of a piece that is done, for those that see it.
    #[inline(always)]
    fn add_odd(&mut self, cell: &Cell, piece: Waiting, seen: &[Seen; CELL]) {
        let (odd, n) = (self.room.cells.at(piece.cell).odd, piece.keys);
        let BackPiece { weights, d_scores, .. } = &self.room.pieces[piece.buffer].operands;
        let Undoing { groups, first, d_k, d_v, .. } = &mut self.undoing;
        let (group, k) = (&mut groups[piece.group], self.inputs.0);
        let row = |i| k.row(cell.keys().get(i));
        add_odd_keys::<E, PARTS>((odd, seen, n), row, d_scores, &mut group.d_q);
        let [odd_q, odd_d_out] = self.room.groups[piece.group].odd;
        let at = |i| cell.keys().get(i) - *first;
        add_odd_rows::<PARTS>((odd_q, seen, n), &group.q_rows, d_scores, &at, d_k);
        add_odd_rows::<PARTS>((odd_d_out, seen, n), &group.d_out_rows, weights, &at, d_v);
    }
}

/// The numbers that were left out of the keys because they are not finite, for the rows that see them.
#[inline(never)]
fn add_odd_keys<'k, E: Element<Num = f32>, const PARTS: usize>(
    (odd, seen, n): (u64, &[Seen; CELL], usize),
    key: impl Fn(usize) -> &'k [E],
    d_scores: &[TileRow],
    d_q: &mut [Lanes<f32>],
) {
    for i in (0..n).filter(|i| odd >> i & 1 == 1) {
        let features = key(i).iter().map(|x| x.widen());
        for (x, d_q) in features.zip(&mut *d_q).filter(|(x, _)| !x.is_finite()) {
            for row in (0..GROUP).filter(|row| sees(seen, i, *row)) {
                d_q.0[row] += read::<PARTS>(d_scores, i, row) * x;
            }
        }
    }
}

/// The numbers that were left out of some rows because they are not finite, for the keys that they see.
#[inline(never)]
fn add_odd_rows<const PARTS: usize>(
    (odd, seen, n): (u64, &[Seen; CELL], usize),
    rows: &Packed<f32>,
    from: &[TileRow],
    at: &dyn Fn(usize) -> usize,
    to: &mut Packed<f32>,
) {
    for row in (0..GROUP).filter(|row| odd >> row & 1 == 1) {
        for i in (0..n).filter(|i| sees(seen, *i, row)) {
            let by = read::<PARTS>(from, i, row);
            let both = rows.row(row).iter().zip(to.row_mut(at(i)));
            both.filter(|(x, _)| !x.is_finite()).for_each(|(x, to)| *to += by * x);
        }
    }
}

/// Adds a row to another; both are whole vectors.
struct AddRow<'t> {
    row: &'t [f32],
    to: &'t mut [f32],
}

impl Task<f32> for AddRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, s: S) {
        for (x, to) in self.row.chunks_exact(S::LANES).zip(self.to.chunks_exact_mut(S::LANES)) {
            s.store(s.add(s.load(to), s.load(x)), to);
        }
    }
}

/// From products to operands: `a = 2^(score factor - lse)`, `d_score = a (d_a - delta)`.
struct Differentiate<'t> {
    s: Avx512,
    scores: &'t [Lanes<f32>],
    d_weights: &'t [Lanes<f32>],
    seen: &'t [Seen; CELL],
    lse: Lanes<f32>,
    delta: Lanes<f32>,
    factor: f32,
    /// Whether some rows do not see some keys.
    hides: bool,
    /// Keys and rows.
    sizes: (usize, usize),
    to: &'t mut BackPiece,
}

/// Products on the tiles, step by step.
struct Steps<'t, const PARTS: usize> {
    t: &'t Tiles,
    products: [Option<Product<'t, PARTS>>; 5],
    /// The product that is on.
    at: usize,
}

impl<const PARTS: usize> Steps<'_, PARTS> {
    fn count(&self) -> usize {
        self.products.iter().flatten().map(Product::steps).sum()
    }

    /// The next one; there must be one.
    #[inline(always)]
    fn take(&mut self) {
        while self.products[self.at].as_ref().is_none_or(Product::is_done) {
            self.at += 1;
        }
        if let Some(product) = &mut self.products[self.at] {
            product.step(self.t);
        }
    }
}

/// Products on the tiles while the vectors go over a piece.
struct Weave<'t, const PARTS: usize> {
    steps: Steps<'t, PARTS>,
    pass: Option<Differentiate<'t>>,
}

impl<const PARTS: usize> Task<f32> for Weave<'_, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { mut steps, pass } = self;
        let mut left = steps.count();
        match pass {
            None => {}
            Some(pass) if pass.hides => left -= pass.run::<PARTS, true>(&mut steps, left),
            Some(pass) => left -= pass.run::<PARTS, false>(&mut steps, left),
        }
        (0..left).for_each(|_| steps.take());
    }
}

impl Differentiate<'_> {
    /// All of it, with steps of the products on the way; tells how many.
    #[inline(always)]
    fn run<const PARTS: usize, const HIDES: bool>(
        self,
        steps: &mut Steps<'_, PARTS>,
        count: usize,
    ) -> usize {
        let Self { s, scores, d_weights, seen, sizes: (n, rows), to, .. } = self;
        let (factor, zero) = (s.splat(self.factor), s.splat(0.0));
        let (lane_chunks, pairs) = (rows.div_ceil(WIDTH), n.div_ceil(WIDTH) * ROWS);
        let (rounds, mut taken) = (lane_chunks * pairs, 0);
        for lanes in 0..lane_chunks {
            let (mut less_lse, mut delta) = ([zero; 2], [zero; 2]);
            for j in 0..2 {
                let lane = lanes * WIDTH + j * ROWS;
                less_lse[j] = s.sub(zero, s.load(&self.lse.0[lane..]));
                delta[j] = s.load(&self.delta.0[lane..]);
            }
            for pair in 0..pairs {
                while taken * rounds < (lanes * pairs + pair) * count {
                    steps.take();
                    taken += 1;
                }
                let (chunk, i) = (pair / ROWS, pair % ROWS);
                let (mut weights, mut d_scores) = ([[zero; 2]; 2], [[zero; 2]; 2]);
                for half in 0..2 {
                    let key = chunk * WIDTH + half * ROWS + i;
                    for j in 0..2 {
                        let lane = lanes * WIDTH + j * ROWS;
                        let x = s.fma(s.load(&scores[key].0[lane..]), factor, less_lse[j]);
                        let mut a =
                            if PARTS < 3 { math::exp2_coarse(s, x) } else { math::exp2(s, x) };
                        let mut d = s.mul(a, s.sub(s.load(&d_weights[key].0[lane..]), delta[j]));
                        if HIDES {
                            let seen = s.lanes(low(seen[key] >> lane));
                            (a, d) = (s.select(seen, a, zero), s.select(seen, d, zero));
                        }
                        (weights[half][j], d_scores[half][j]) = (a, d);
                    }
                }
                to.write::<PARTS>(s, (chunk, i, lanes), weights, d_scores);
            }
        }
        taken
    }
}
