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
//! and between the second and the third one pass of the vectors.

use super::product::{Operand, Product, Sums};
use super::woven::{BackCell, BackCells, BackGroup, BackPiece, BackSizes, PackPiece, read, sees};
use super::{CHUNKS, LANE_TILES, ROWS, TileRow, WIDTH};
use crate::backward::{Backward, ByKeys, Path, Products, Undoing};
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
        let mut visitor =
            Passing::<E, PARTS> { s: *s, t, inputs, scope, rows, undoing, room, factor };
        walk.lead(*s, &call, (scope, rows), &way, &mut visitor);
    }
}

/// Memory of one thread for the products of the way back.
#[derive(Debug)]
pub(crate) struct BackRoom {
    sizes: BackSizes,
    cells: BackCells,
    groups: Vec<BackGroup>,
    piece: BackPiece,
    /// Queries on their way, `[features][rows]`.
    turned: Vec<Lanes<f32>>,
    /// Gradients of picked keys and values, before they go to their places.
    picked: [Packed<f32>; 2],
}

impl BackRoom {
    /// For tiles of `groups` groups of rows, and tasks of up to `keys` keys.
    pub(crate) fn new(parts: usize, dims: Dims, groups: usize, keys: usize) -> Self {
        let sizes = BackSizes::new(parts, dims);
        Self {
            sizes,
            cells: BackCells::new(sizes, keys, dims.qk_dim),
            groups: (0..groups).map(|_| BackGroup::new(sizes)).collect(),
            piece: BackPiece::new(parts),
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
}

impl<E: Element<Num = f32>, const PARTS: usize> Visit<f32> for Passing<'_, '_, E, PARTS> {
    #[inline(always)]
    fn take<S: Simd<f32>>(&mut self, _: S, cell: &Cell) -> bool {
        for group in 0..self.rows.groups() {
            self.step(cell, group);
        }
        true
    }

    #[inline(always)]
    fn visit<S: Simd<f32>>(&mut self, _: S, _: Piece<'_, f32>) {}
}

impl<E: Element<Num = f32>, const PARTS: usize> Passing<'_, '_, E, PARTS> {
    /// One cell and one group.
    #[inline(always)]
    fn step(&mut self, cell: &Cell, g: usize) {
        let Self { s, t, inputs, scope, undoing, room, factor, .. } = self;
        let (s, problem, n) = (*s, undoing.problem, cell.len);
        let rows = undoing.groups[g].rows;
        let span = Span { start: 0, end: rows.count };
        let everyone = lanes_of(span);
        let mut seen: [Seen; CELL] = [0; CELL];
        seen[..n].fill(everyone);
        if !cell.full {
            #[expect(clippy::cast_possible_truncation, reason = "the bits of the group")]
            for (seen, lanes) in seen.iter_mut().zip(&cell.lanes[..n]) {
                *seen = (lanes >> (g * GROUP)) as Seen & everyone;
            }
            if seen[..n].iter().all(|seen| *seen == 0) {
                return;
            }
        }
        let BackRoom { sizes, cells, groups, piece, picked, .. } = &mut **room;
        let (packed, own) = (cells.get::<E, PARTS>(s, *inputs, cell, undoing.first), &groups[g]);
        let tiles = (n.div_ceil(ROWS), rows.count.div_ceil(ROWS));
        s.call(Alone::<PARTS, 2> {
            t,
            products: [
                Product::new(
                    (packed.keys, own.queries()),
                    sizes.qk.chunks,
                    tiles,
                    (undoing.tiles.weights, false),
                ),
                Product::new(
                    (packed.values, own.d_out()),
                    sizes.v.chunks,
                    tiles,
                    (undoing.tiles.d_scores, false),
                ),
            ],
        });
        let group = &undoing.groups[g];
        if problem.is_plain_dot() && problem.dropout.is_none() && group.entropy.is_none() {
            s.call(Differentiate::<PARTS> {
                s,
                scores: undoing.tiles.weights,
                d_weights: undoing.tiles.d_scores,
                lse: &group.lse,
                delta: &group.delta,
                factor: *factor,
                seen: &seen,
                hides: !cell.full || !n.is_multiple_of(WIDTH) || !rows.count.is_multiple_of(WIDTH),
                sizes: (n, rows.count),
                to: piece,
            });
        } else {
            let at = At { scope: *scope, rows, span, keys: cell.keys() };
            let scores = &mut undoing.tiles.weights[..n];
            s.call(Scale { tile: scores, factor: *factor, span });
            problem.apply(s, at, scores, Some(&mut *undoing.tiles.slopes));
            if !cell.full || problem.score.may_hide() {
                s.call(Hide { tile: scores, seen: &mut seen[..n], span });
            }
            group.weigh(s, problem, (at, Some(&seen[..n])), n, &mut undoing.tiles);
            undoing.undo(s, g, (at, Some(&seen[..n])), n);
            s.call(PackPiece::<PARTS> {
                s,
                weights: &undoing.tiles.weights[..n],
                d_scores: &undoing.tiles.d_scores[..n],
                count: rows.count,
                to: piece,
            });
        }
        let sums = Adding { packed, own, piece, sizes: *sizes, cell, picked, seen: &seen };
        sums.add::<E, PARTS>((s, t), undoing, g, *inputs);
    }
}

/// A piece with its weights and gradients, on its way into the sums.
struct Adding<'t> {
    packed: BackCell<'t>,
    own: &'t BackGroup,
    piece: &'t BackPiece,
    sizes: BackSizes,
    cell: &'t Cell,
    picked: &'t mut [Packed<f32>; 2],
    seen: &'t [Seen; CELL],
}

impl Adding<'_> {
    #[inline(always)]
    fn add<E: Element<Num = f32>, const PARTS: usize>(
        self,
        (s, t): (Avx512, &Tiles),
        undoing: &mut Undoing<'_, '_, E>,
        g: usize,
        (k, _): (Rows<'_, E>, Rows<'_, E>),
    ) {
        let Self { packed, own, piece, sizes, cell, picked, seen } = self;
        let (n, first) = (cell.len, undoing.first);
        let group = &mut undoing.groups[g];
        let (keys, rows) = (n.div_ceil(ROWS), group.rows.count);
        let left = |data| Operand { data, chunks: CHUNKS, tiles: CELL / ROWS };
        let turned = Operand { data: &piece.turned, chunks: CHUNKS, tiles: LANE_TILES };
        let [picked_k, picked_v] = picked;
        let (to_k, to_v, add) = match cell.keys() {
            Keys::From(key) => {
                (undoing.d_k.from_row(key - first), undoing.d_v.from_row(key - first), true)
            }
            Keys::Picked(_) => (picked_k.from_row(0), picked_v.from_row(0), false),
        };
        let chunks = rows.div_ceil(WIDTH);
        s.call(Alone::<PARTS, 3> {
            t,
            products: [
                Product::into_sums(
                    (left(&piece.weights), own.d_out_rows()),
                    chunks,
                    (keys, sizes.v.tiles),
                    (Sums::rows(to_v), add),
                ),
                Product::into_sums(
                    (left(&piece.d_scores), own.query_rows()),
                    chunks,
                    (keys, sizes.qk.tiles),
                    (Sums::rows(to_k), add),
                ),
                Product::new(
                    (packed.turned, turned),
                    n.div_ceil(WIDTH),
                    (sizes.qk.tiles, rows.div_ceil(ROWS)),
                    (&mut group.d_q, true),
                ),
            ],
        });
        if let Keys::Picked(keys) = cell.keys() {
            for (i, key) in keys.iter().enumerate() {
                s.call(AddRow { row: picked_k.row(i), to: undoing.d_k.row_mut(key - first) });
                s.call(AddRow { row: picked_v.row(i), to: undoing.d_v.row_mut(key - first) });
            }
        }
        if packed.odd != 0 {
            let row = |i| k.row(cell.keys().get(i));
            add_odd_keys::<E, PARTS>((packed.odd, seen, n), row, &piece.d_scores, &mut group.d_q);
        }
        let [odd_q, odd_d_out] = own.odd;
        let at = |i| cell.keys().get(i) - first;
        if odd_q != 0 {
            let (from, to) = (&piece.d_scores, &mut *undoing.d_k);
            add_odd_rows::<PARTS>((odd_q, seen, n), &group.q_rows, from, &at, to);
        }
        if odd_d_out != 0 {
            let (from, to) = (&piece.weights, &mut *undoing.d_v);
            add_odd_rows::<PARTS>((odd_d_out, seen, n), &group.d_out_rows, from, &at, to);
        }
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

/// Products and nothing else.
struct Alone<'t, const PARTS: usize, const N: usize> {
    t: &'t Tiles,
    products: [Product<'t, PARTS>; N],
}

impl<const PARTS: usize, const N: usize> Task<f32> for Alone<'_, PARTS, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        for product in self.products {
            product.run(self.t);
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
struct Differentiate<'t, const PARTS: usize> {
    s: Avx512,
    scores: &'t [Lanes<f32>],
    d_weights: &'t [Lanes<f32>],
    lse: &'t Lanes<f32>,
    delta: &'t Lanes<f32>,
    factor: f32,
    /// Which rows see each key; none where there is no key.
    seen: &'t [Seen; CELL],
    /// Whether some do not.
    hides: bool,
    /// Keys and rows.
    sizes: (usize, usize),
    to: &'t mut BackPiece,
}

impl<const PARTS: usize> Task<f32> for Differentiate<'_, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        if self.hides { self.all::<true>() } else { self.all::<false>() }
    }
}

impl<const PARTS: usize> Differentiate<'_, PARTS> {
    #[inline(always)]
    fn all<const HIDES: bool>(self) {
        let Self { s, scores, d_weights, factor, seen, sizes: (n, rows), to, .. } = self;
        let (factor, zero) = (s.splat(factor), s.splat(0.0));
        for lanes in 0..rows.div_ceil(WIDTH) {
            let at = [0, 1].map(|vector| lanes * WIDTH + vector * ROWS);
            let less_lse = at.map(|lane| s.sub(zero, s.load(&self.lse.0[lane..])));
            let delta = at.map(|lane| s.load(&self.delta.0[lane..]));
            for (chunk, i) in (0..n.div_ceil(WIDTH)).flat_map(|c| (0..ROWS).map(move |i| (c, i))) {
                let (mut weights, mut d_scores) = ([[zero; 2]; 2], [[zero; 2]; 2]);
                for half in 0..2 {
                    let key = chunk * WIDTH + half * ROWS + i;
                    for j in 0..2 {
                        let x = s.load(&scores[key].0[at[j]..]);
                        let x = s.fma(x, factor, less_lse[j]);
                        let mut a =
                            if PARTS < 3 { math::exp2_coarse(s, x) } else { math::exp2(s, x) };
                        let d_a = s.sub(s.load(&d_weights[key].0[at[j]..]), delta[j]);
                        let mut d = s.mul(a, d_a);
                        if HIDES {
                            let seen = s.lanes(low(seen[key] >> at[j]));
                            (a, d) = (s.select(seen, a, zero), s.select(seen, d, zero));
                        }
                        (weights[half][j], d_scores[half][j]) = (a, d);
                    }
                }
                to.write::<PARTS>(s, (chunk, i, lanes), weights, d_scores);
            }
        }
    }
}
