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
//! and between the second and the third one pass of the vectors, over blocks of 32 keys and 32 rows. While that goes on, the
//! tiles make the first two products of the next block, and the last three of the cell before. All groups of a tile of rows
//! are added to a key at once: tile loads are what limits this, and the sums of keys are the most of them.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the vectors in registers"
)]

use super::product::{Operand, Product, Sums};
use super::woven::{BackCells, BackPiece, BackRows, BackSizes, PackPiece, read, sees};
use super::{CHUNKS, ROWS, WIDTH};
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
use crate::walk::{Hide, Piece, TILE_ROWS, Visit};

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
        for (g, group) in undoing.groups.iter().enumerate() {
            let rows = group.rows;
            turn(*s, |i| q.row(rows.row(i)), rows.count, 1.0, &mut room.turned);
            let lanes = [&room.turned[..], &group.d_out];
            let as_rows = [&group.q_rows, &group.d_out_rows];
            room.rows.fill::<PARTS>(*s, g, lanes, as_rows, rows.count);
        }
        let inputs = call.keys_and_values(scope);
        let s = *s;
        let weighed = None;
        let mut visitor =
            Passing::<E, PARTS> { s, t, inputs, scope, rows, undoing, room, factor, weighed };
        walk.lead(s, &call, (scope, rows), &way, &mut visitor);
        visitor.flush();
    }
}

/// Memory of one thread for the products of the way back.
#[derive(Debug)]
pub(crate) struct BackRoom {
    sizes: BackSizes,
    cells: BackCells,
    rows: BackRows,
    /// Of two cells: one is being made while the other goes into the sums.
    pieces: [BackPiece; 2],
    /// Of two blocks: one is being made while the other becomes operands.
    blocks: [Block; 2],
    /// Queries on their way, `[features][rows]`.
    turned: Vec<Lanes<f32>>,
    /// Gradients of picked keys and values, before they go to their places.
    picked: [Packed<f32>; 2],
}

/// Scores, before they are times the scale, and gradients of weights of 32 keys and 32 rows: small enough to stay in the
/// nearest cache until they are used.
#[derive(Debug)]
struct Block {
    scores: Box<Square>,
    d_weights: Box<Square>,
}

/// `[keys][rows]`
#[derive(Debug)]
#[repr(C, align(64))]
struct Square([[f32; WIDTH]; WIDTH]);

impl Square {
    fn sums(&mut self) -> (Sums<'_>, bool) {
        (Sums::rows((self.0.as_flattened_mut(), WIDTH)), false)
    }
}

impl BackRoom {
    /// For tiles of `groups` groups of rows, and tasks of up to `keys` keys.
    pub(crate) fn new(parts: usize, dims: Dims, groups: usize, keys: usize) -> Self {
        let sizes = BackSizes::new(parts, dims);
        let square = || Box::new(Square([[0.0; WIDTH]; WIDTH]));
        Self {
            sizes,
            cells: BackCells::new(sizes, keys, dims.qk_dim),
            rows: BackRows::new(sizes, groups),
            pieces: [0, 1].map(|_| BackPiece::new(parts, groups)),
            blocks: [0, 1].map(|_| Block { scores: square(), d_weights: square() }),
            turned: vec![Lanes([0.0; GROUP]); dims.qk_dim],
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
    /// A cell whose weights, and gradients of scores, are there.
    weighed: Option<Waiting>,
}

/// A cell on its way.
#[derive(Clone, Copy)]
struct Waiting {
    /// The place among the packed cells.
    cell: usize,
    /// Where the keys stand among those of the task; nowhere for picked ones.
    place: Option<usize>,
    keys: usize,
    /// The first group that sees any of them, and the one after the last.
    groups: (usize, usize),
    /// Which of the two rooms it has.
    buffer: usize,
}

/// Groups of a tile of rows.
const GROUPS: usize = TILE_ROWS / GROUP;
/// Which rows of each group see each key; none where there is no key.
type Sight = [[Seen; CELL]; GROUPS];

impl<E: Element<Num = f32>, const PARTS: usize> Visit<f32> for Passing<'_, '_, E, PARTS> {
    #[inline(always)]
    fn take<S: Simd<f32>>(&mut self, _: S, cell: &Cell) -> bool {
        let mut seen = [[0; CELL]; GROUPS];
        let groups = look(cell, self.rows, &mut seen);
        if groups.0 >= groups.1 {
            return true;
        }
        let (first, keys) = (self.undoing.first, cell.len);
        let place = match cell.keys() {
            Keys::From(key) => Some(key - first),
            Keys::Picked(_) => None,
        };
        let packed = self.room.cells.find::<E, PARTS>(self.s, self.inputs, cell, first);
        let buffer = self.weighed.map_or(0, |weighed| 1 - weighed.buffer);
        let next = Waiting { cell: packed, place, keys, groups, buffer };
        let problem = self.undoing.problem;
        let plain = problem.is_plain_dot() && problem.dropout.is_none();
        if plain && self.undoing.groups[0].entropy.is_none() {
            self.weave(Some((next, &seen)));
        } else {
            self.flush();
            for group in groups.0..groups.1 {
                self.step(cell, (next, group), &mut seen[group]);
            }
        }
        self.weighed = Some(next);
        let (cells, odd) = (&self.room.cells, &self.room.rows.odd[groups.0..groups.1]);
        let odd = cells.at(packed).odd != 0 || odd.iter().any(|odd| *odd != [0; 2]);
        if odd || cells.is_spare(packed) {
            self.flush();
            self.put_in_place(cell.keys());
            for group in (groups.0..groups.1).filter(|_| odd) {
                self.add_odd(cell, (next, group), &seen[group]);
            }
        }
        true
    }

    #[inline(always)]
    fn visit<S: Simd<f32>>(&mut self, _: S, _: Piece<'_, f32>) {}
}

/// Writes what each group sees of a cell; tells the first group that sees any key, and the one after the last.
fn look(cell: &Cell, rows: RowTile, seen: &mut Sight) -> (usize, usize) {
    let (mut first, mut end) = (usize::MAX, 0);
    for (g, seen) in seen.iter_mut().enumerate().take(rows.groups()) {
        let everyone = lanes_of(Span { start: 0, end: rows.group(g).count });
        let mut any = everyone;
        if cell.full {
            seen[..cell.len].fill(everyone);
        } else {
            any = 0;
            #[expect(clippy::cast_possible_truncation, reason = "the bits of the group")]
            for (seen, lanes) in seen.iter_mut().zip(&cell.lanes[..cell.len]) {
                *seen = (lanes >> (g * GROUP)) as Seen & everyone;
                any |= *seen;
            }
        }
        if any != 0 {
            (first, end) = (first.min(g), g + 1);
        }
    }
    (first, end)
}

impl<E: Element<Num = f32>, const PARTS: usize> Passing<'_, '_, E, PARTS> {
    /// Finishes what is on its way.
    #[inline(always)]
    fn flush(&mut self) {
        if self.weighed.is_some() {
            self.weave(None);
            self.weighed = None;
        }
    }

    /// Makes the operands of `next` while the cell that is weighed goes into the sums.
    #[inline(always)]
    fn weave(&mut self, next: Option<(Waiting, &Sight)>) {
        let (s, t, weighed) = (self.s, self.t, self.weighed);
        let BackRoom { sizes, cells, rows: own, pieces: [first, second], blocks, picked, .. } =
            &mut *self.room;
        let to_first = next.map_or(weighed.is_none_or(|w| w.buffer == 1), |(n, _)| n.buffer == 0);
        let (to, from) = if to_first { (first, second) } else { (second, first) };
        let Undoing { groups, d_k, d_v, .. } = &mut self.undoing;
        let count = |g: usize| self.rows.group(g).count;
        let mut products = [const { None }; 2 + GROUPS];
        if let Some(weighed) = weighed {
            let [picked_k, picked_v] = picked;
            let (to_k, to_v) = match weighed.place {
                Some(place) => (d_k.from_row(place), d_v.from_row(place)),
                None => (picked_k.from_row(0), picked_v.from_row(0)),
            };
            let add = weighed.place.is_some();
            let (start, end) = weighed.groups;
            let chunk = start * CHUNKS;
            let chunks = (end - 1) * CHUNKS + count(end - 1).div_ceil(WIDTH) - chunk;
            let keys = weighed.keys.div_ceil(ROWS);
            let operands = (from.weights().skip(chunk, 0), own.d_out_rows().skip(chunk, 0));
            let (tiles, to) = ((keys, sizes.v.tiles), (Sums::rows(to_v), add));
            products[0] = Some(Product::into_sums(operands, chunks, tiles, to));
            let operands = (from.d_scores().skip(chunk, 0), own.query_rows().skip(chunk, 0));
            let (tiles, to) = ((keys, sizes.qk.tiles), (Sums::rows(to_k), add));
            products[1] = Some(Product::into_sums(operands, chunks, tiles, to));
        }
        let mut sides = [const { None }; GROUPS];
        for (g, group) in groups.iter_mut().enumerate() {
            let Group { d_q, lse, delta, rows, .. } = group;
            if let Some(weighed) = weighed
                && (weighed.groups.0..weighed.groups.1).contains(&g)
            {
                let operands = (cells.at(weighed.cell).turned, from.turned(g));
                let tiles = (sizes.qk.tiles, rows.count.div_ceil(ROWS));
                let chunks = weighed.keys.div_ceil(WIDTH);
                products[2 + g] = Some(Product::new(operands, chunks, tiles, (d_q, true)));
            }
            if let Some((next, seen)) = next
                && (next.groups.0..next.groups.1).contains(&g)
            {
                sides[g] = Some(Side {
                    queries: own.queries(g),
                    d_out: own.d_out(g),
                    seen: &seen[g],
                    lse,
                    delta,
                    count: rows.count,
                });
            }
        }
        let cell = next.map(|(next, _)| (cells.at(next.cell), next.keys));
        let make = cell.map(|(cell, n)| {
            let (keys, values) = ((cell.keys, sizes.qk.chunks), (cell.values, sizes.v.chunks));
            let from = Source { s, keys, values, n, sides, factor: self.factor };
            Make { from, blocks, to }
        });
        s.call(Weave::<PARTS> { steps: Steps { t, products, at: 0 }, make });
    }

    /// A cell and a group of a problem that is not plain: all in a row, but for the last products.
    #[inline(always)]
    fn step(&mut self, cell: &Cell, (next, g): (Waiting, usize), seen: &mut [Seen; CELL]) {
        let Self { s, t, scope, undoing, room, factor, .. } = self;
        let (s, problem, n) = (*s, undoing.problem, next.keys);
        let rows = undoing.groups[g].rows;
        let span = Span { start: 0, end: rows.count };
        let BackRoom { sizes, cells, rows: own, pieces, .. } = &mut **room;
        let packed = cells.at(next.cell);
        let tiles = (n.div_ceil(ROWS), rows.count.div_ceil(ROWS));
        let (keys, values) = ((packed.keys, own.queries(g)), (packed.values, own.d_out(g)));
        let to = (&mut *undoing.tiles.weights, false);
        let scores = Product::<PARTS>::new(keys, sizes.qk.chunks, tiles, to);
        let to = (&mut *undoing.tiles.d_scores, false);
        let d_weights = Product::new(values, sizes.v.chunks, tiles, to);
        let products = [Some(scores), Some(d_weights), None, None];
        s.call(Weave::<PARTS> { steps: Steps { t, products, at: 0 }, make: None });
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
            group: g,
            count: rows.count,
            to: &mut pieces[next.buffer],
        });
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

    /// Adds what was left out of the operands of a cell that is done, for those that see it.
    #[inline(always)]
    fn add_odd(&mut self, cell: &Cell, (piece, g): (Waiting, usize), seen: &[Seen; CELL]) {
        let (odd, n) = (self.room.cells.at(piece.cell).odd, piece.keys);
        let from = &self.room.pieces[piece.buffer];
        let weights = from.weights().skip(g * CHUNKS, 0);
        let d_scores = from.d_scores().skip(g * CHUNKS, 0);
        let Undoing { groups, first, d_k, d_v, .. } = &mut self.undoing;
        let (group, k) = (&mut groups[g], self.inputs.0);
        let row = |i| k.row(cell.keys().get(i));
        add_odd_keys::<E, PARTS>((odd, seen, n), row, d_scores, &mut group.d_q);
        let [odd_q, odd_d_out] = self.room.rows.odd[g];
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
    d_scores: Operand<'_>,
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
    from: Operand<'_>,
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

/// One group of rows on its way to the operands of a cell.
struct Side<'t> {
    queries: Operand<'t>,
    d_out: Operand<'t>,
    seen: &'t [Seen; CELL],
    lse: &'t Lanes<f32>,
    delta: &'t Lanes<f32>,
    /// Its rows.
    count: usize,
}

/// From keys, values and rows to operands, in blocks of 32 keys and 32 rows.
struct Make<'t> {
    from: Source<'t>,
    blocks: &'t mut [Block; 2],
    to: &'t mut BackPiece,
}

/// What operands are made from.
struct Source<'t> {
    s: Avx512,
    /// Keys and values, and the chunks of their features.
    keys: (Operand<'t>, usize),
    values: (Operand<'t>, usize),
    /// Keys of the cell.
    n: usize,
    sides: [Option<Side<'t>>; GROUPS],
    factor: f32,
}

/// Products on the tiles, step by step.
struct Steps<'t, const PARTS: usize> {
    t: &'t Tiles,
    products: [Option<Product<'t, PARTS>>; 2 + GROUPS],
    /// The product that is on.
    at: usize,
}

impl<'t, const PARTS: usize> Steps<'t, PARTS> {
    fn count(&self) -> usize {
        self.products.iter().flatten().map(Product::steps).sum()
    }

    /// The product that the next step belongs to; there must be one.
    #[inline(always)]
    fn current(&mut self) -> Option<&mut Product<'t, PARTS>> {
        while self.products[self.at].as_ref().is_none_or(Product::is_done) {
            self.at += 1;
        }
        self.products[self.at].as_mut()
    }

    /// The first number of steps, from `n` on, after which all sums that were begun are stored.
    fn whole(&self, n: usize) -> usize {
        let mut before = 0;
        for product in self.products.iter().flatten() {
            if n <= before + product.steps() {
                return before + (n - before).next_multiple_of(product.chunks());
            }
            before += product.steps();
        }
        before
    }

    /// Takes some steps, with nothing between them.
    #[inline(never)]
    fn run(&mut self, n: usize) {
        for _ in 0..n {
            let t = self.t;
            if let Some(product) = self.current() {
                product.step(t);
            }
        }
    }
}

/// Steps of the products of one cell, then those of the first products of the next block.
struct Mixed<'m, 't, const PARTS: usize> {
    steps: &'m mut Steps<'t, PARTS>,
    left: usize,
    coming: [Option<Product<'m, PARTS>>; 2],
}

impl<const PARTS: usize> Mixed<'_, '_, PARTS> {
    fn count(&self) -> usize {
        self.left + self.coming.iter().flatten().map(Product::steps).sum::<usize>()
    }

    /// The next step; there must be one.
    #[inline(always)]
    fn take(&mut self) {
        let t = self.steps.t;
        if self.left > 0 {
            self.left -= 1;
            if let Some(product) = self.steps.current() {
                product.step(t);
            }
        } else {
            let [first, second] = &mut self.coming;
            let done = first.as_ref().is_none_or(Product::is_done);
            if let Some(product) = if done { second } else { first } {
                product.step(t);
            }
        }
    }
}

/// Products on the tiles while the vectors make the operands of the next cell.
struct Weave<'t, const PARTS: usize> {
    steps: Steps<'t, PARTS>,
    make: Option<Make<'t>>,
}

impl<const PARTS: usize> Task<f32> for Weave<'_, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { mut steps, make } = self;
        let (count, mut taken) = (steps.count(), 0);
        if let Some(make) = make {
            taken = make.run(&mut steps, count);
        }
        steps.run(count - taken);
    }
}

/// A block: group, chunk of its rows, chunk of the keys.
type BlockAt = (usize, usize, usize);

impl Make<'_> {
    /// All blocks, with steps of other products on the way; tells how many.
    #[inline(always)]
    fn run<const PARTS: usize>(self, steps: &mut Steps<'_, PARTS>, count: usize) -> usize {
        let Self { from, blocks: [first, second], to } = self;
        let mut order: [BlockAt; GROUPS * CHUNKS * CHUNKS] = [(0, 0, 0); _];
        let mut len = 0;
        for (g, side) in from.sides.iter().enumerate() {
            let rows = side.as_ref().map_or(0, |side| side.count.div_ceil(WIDTH));
            for at in 0..rows * from.n.div_ceil(WIDTH) {
                order[len] = (g, at % rows, at / rows);
                len += 1;
            }
        }
        let (mut now, mut next) = (first, second);
        let products = from.products::<PARTS>(order[0], now);
        let [scores, d_weights] = products;
        let products = [scores, d_weights, None, None];
        let mut early = Steps { t: steps.t, products, at: 0 };
        early.run(early.count());
        let mut taken = 0;
        for b in 0..len {
            let until = steps.whole(count * (b + 1) / len).max(taken);
            let coming = if b + 1 < len { from.products(order[b + 1], next) } else { [None, None] };
            let mixed = Mixed { steps: &mut *steps, left: until - taken, coming };
            from.differentiate(mixed, order[b], now, to);
            taken = until;
            (now, next) = (next, now);
        }
        taken
    }
}

impl Source<'_> {
    /// The first products of a block.
    #[inline(always)]
    fn products<'p, const PARTS: usize>(
        &'p self,
        (g, lanes, chunk): BlockAt,
        to: &'p mut Block,
    ) -> [Option<Product<'p, PARTS>>; 2] {
        let Some(side) = &self.sides[g] else { return [None, None] };
        let (key, lane) = (2 * chunk, 2 * lanes);
        let tiles =
            ((self.n.div_ceil(ROWS) - key).min(2), (side.count.div_ceil(ROWS) - lane).min(2));
        let ((keys, qk_chunks), (values, v_chunks)) = (self.keys, self.values);
        let scores = (keys.skip(0, key), side.queries.skip(0, lane));
        let d_weights = (values.skip(0, key), side.d_out.skip(0, lane));
        [
            Some(Product::into_sums(scores, qk_chunks, tiles, to.scores.sums())),
            Some(Product::into_sums(d_weights, v_chunks, tiles, to.d_weights.sums())),
        ]
    }

    /// `a = 2^(score factor - lse)`, `d_score = a (d_a - delta)` of a block, and steps of products on the way.
    #[inline(always)]
    fn differentiate<const PARTS: usize>(
        &self,
        mut mixed: Mixed<'_, '_, PARTS>,
        (g, lanes, chunk): BlockAt,
        block: &Block,
        to: &mut BackPiece,
    ) {
        let Some(side) = &self.sides[g] else { return };
        let (s, count, mut taken) = (self.s, mixed.count(), 0);
        let (factor, zero) = (s.splat(self.factor), s.splat(0.0));
        let (mut less_lse, mut delta) = ([zero; 2], [zero; 2]);
        for j in 0..2 {
            let lane = lanes * WIDTH + j * ROWS;
            less_lse[j] = s.sub(zero, s.load(&side.lse.0[lane..]));
            delta[j] = s.load(&side.delta.0[lane..]);
        }
        for i in 0..ROWS {
            while taken * ROWS < (i + 1) * count {
                mixed.take();
                taken += 1;
            }
            let (mut weights, mut d_scores) = ([[zero; 2]; 2], [[zero; 2]; 2]);
            for half in 0..2 {
                let key = half * ROWS + i;
                let seen = low(side.seen[chunk * WIDTH + key] >> (lanes * WIDTH));
                for j in 0..2 {
                    let seen = s.lanes(seen >> (j * ROWS));
                    let x = s.load(&block.scores.0[key][j * ROWS..]);
                    let x = s.fma(x, factor, less_lse[j]);
                    let a = if PARTS < 3 { math::exp2_coarse(s, x) } else { math::exp2(s, x) };
                    let d_a = s.sub(s.load(&block.d_weights.0[key][j * ROWS..]), delta[j]);
                    weights[half][j] = s.select(seen, a, zero);
                    d_scores[half][j] = s.select(seen, s.mul(a, d_a), zero);
                }
            }
            to.write::<PARTS>(s, (g, lanes, chunk, i), weights, d_scores);
        }
    }
}
