//! The decay of a chunk, as products of `exp(g)`.
//!
//! A pair of a reader `i` and a key `j <= i` is weighted with the decays of `j + 1..=i`. All factors are products of these
//! `e_t = exp(g_t)` and never quotients or differences of sums, so that none overflows, and `g = -inf`, which clears the
//! state, is as good as any.
//!
//! One decay per head scales the tile of all pairs. With one per key feature (GLA, Yang et al. 2024; Kimi Delta Attention) it
//! does not factor out of dot products: the positions are halved, down to [`LEAF`] of them. Readers of the second half are
//! scaled by the decays from the middle on, keys of the first half by those up to it, and their pairs are one product.

use crate::matrix::{rows, rows_mut};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, Slice, Zip};
use regard::Number;
use std::ops::Range;

/// Positions whose pairs are computed one by one.
const LEAF: usize = 8;
/// Rows per product of [`causal_product`]: a quarter of the pairs of a chunk of 64 is skipped.
const TARGETS: usize = 32;

/// `to += tile what`, where row `r` of the tile, which is 0 there, does not see rows of `what` after `r % c`.
///
/// A hidden row contributes nothing, whatever it holds: where `what` is not finite, rows are computed one by one, because
/// the product of 0 with infinity or NaN is NaN.
pub(super) fn causal_product<N: Number>(
    tile: ArrayView2<'_, N>,
    what: ArrayView2<'_, N>,
    mut to: ArrayViewMut2<'_, N>,
) {
    let c = what.nrows();
    // Without an early exit, which would keep the compiler from using vectors.
    let finite = what.fold(true, |finite, x| finite & x.is_finite());
    let step = if finite { TARGETS } else { 1 };
    for block in (0..tile.nrows()).step_by(c.max(1)) {
        for first in (0..c).step_by(step) {
            let end = (first + step).min(c);
            let targets = block + first..block + end;
            let tile = columns(rows(&tile, targets.clone()), 0..end);
            let mut to = rows_mut(&mut to, targets);
            general_mat_mul(N::one(), &tile, &rows(&what, 0..end), N::one(), &mut to);
        }
    }
}

pub(super) fn columns<N>(x: ArrayView2<'_, N>, range: Range<usize>) -> ArrayView2<'_, N> {
    x.split_at(Axis(1), range.end).0.split_at(Axis(1), range.start).1
}

/// Multiplies a row by its factors, one or one for each feature.
fn scale_row<N: Number>(mut x: ArrayViewMut1<'_, N>, by: ArrayView1<'_, N>) {
    match by.len() {
        1 => x.mapv_inplace(|x| x * by[0]),
        _ => x.zip_mut_with(&by, |x, by| *x = *x * *by),
    }
}

/// Multiplies row `r` by row `r % c` of `by [c, 1 or features]`.
pub(super) fn scale_rows<N: Number>(mut x: ArrayViewMut2<'_, N>, by: ArrayView2<'_, N>) {
    for mut block in x.axis_chunks_iter_mut(Axis(0), by.nrows().max(1)) {
        block.rows_mut().into_iter().zip(by.rows()).for_each(|(x, by)| scale_row(x, by));
    }
}

/// `to += a b` by element; their sum if `to` is one number.
pub(super) fn add_products<N: Number>(
    mut to: ArrayViewMut1<'_, N>,
    a: ArrayView1<'_, N>,
    b: ArrayView1<'_, N>,
) {
    match to.len() {
        1 => to[0] = to[0] + a.dot(&b),
        _ => Zip::from(to).and(a).and(b).for_each(|to, a, b| *to = *to + *a * *b),
    }
}

/// The readers and keys of a chunk: `c` rows of each query head, whose pairs include their own position, then, where keys
/// read the state as well, `c` rows of keys, whose pairs do not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Readers<'t, N> {
    pub(super) x: ArrayView2<'t, N>,
    pub(super) keys: ArrayView2<'t, N>,
    /// Rows of queries.
    pub(super) queries: usize,
}

impl<N> Readers<'_, N> {
    /// Keys visible to a row.
    fn visible(&self, row: usize) -> usize {
        row % self.keys.nrows() + usize::from(row < self.queries)
    }

    fn blocks(&self) -> usize {
        self.x.nrows() / self.keys.nrows().max(1)
    }
}

/// The gradients of [`Decay::pairs_back`], which adds to each.
#[derive(Debug)]
pub(super) struct PairGrads<'t, N> {
    pub(super) x: ArrayViewMut2<'t, N>,
    pub(super) keys: ArrayViewMut2<'t, N>,
    /// `[c, 1 or features]`
    pub(super) g: ArrayViewMut2<'t, N>,
}

#[derive(Debug)]
pub(super) struct Decay<N> {
    /// `exp(g)`, `[chunk, 1 or features]`
    e: Array2<N>,
    /// Products from the first position up to each, and from each, without its own, up to the last.
    start: Array2<N>,
    end: Array2<N>,
    /// Weights of all pairs, of one decay per head.
    pairs: Array2<N>,
    /// Scaled readers and keys, and a tile of their pairs, of a decay per feature.
    scaled: [Array2<N>; 2],
    /// Positions in the chunk.
    c: usize,
}

impl<N: Number> Decay<N> {
    pub(super) fn new(chunk: usize, width: usize) -> Self {
        let by_position = || Array2::ones([chunk, width]);
        let [pairs, scaled] = if width == 1 { [chunk, 0] } else { [0, chunk] };
        let of_features = || Array2::zeros([scaled, width]);
        Self {
            e: by_position(),
            start: by_position(),
            end: by_position(),
            pairs: Array2::zeros([pairs, pairs]),
            scaled: [of_features(), of_features()],
            c: 0,
        }
    }

    /// Takes `exp(g)` of `c` positions, written by `load`.
    pub(super) fn load(&mut self, c: usize, load: impl FnOnce(ArrayViewMut2<'_, N>)) {
        self.c = c;
        load(rows_mut(&mut self.e, 0..c));
        let Self { e, start, end, pairs, .. } = self;
        products_up(e.view(), 0..c, start.view_mut());
        products_down(e.view(), 0..c, end.view_mut());
        for i in 0..c.min(pairs.nrows()) {
            let by = e[[i, 0]];
            let (before, mut own) = pairs.view_mut().split_at(Axis(0), i);
            let mut own = own.index_axis_mut(Axis(0), 0);
            if let Some(before) = before.rows().into_iter().last() {
                own.zip_mut_with(&before, |own, before| *own = *before * by);
            }
            own[i] = N::one();
        }
    }

    pub(super) fn up_to_each(&self) -> ArrayView2<'_, N> {
        rows(&self.start, 0..self.c)
    }

    pub(super) fn to_end(&self) -> ArrayView2<'_, N> {
        rows(&self.end, 0..self.c)
    }

    /// The decay of the whole chunk.
    pub(super) fn whole(&self) -> ArrayView1<'_, N> {
        self.start.index_axis(Axis(0), self.c - 1)
    }

    /// Multiplies each row of a state by the decay of the whole chunk.
    pub(super) fn scale_state(&self, mut state: ArrayViewMut2<'_, N>) {
        let whole = self.whole();
        for (i, mut row) in state.rows_mut().into_iter().enumerate() {
            let by = whole[i % whole.len()];
            row.mapv_inplace(|s| s * by);
        }
    }

    fn is_of_features(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Weighted dot products of all readers with the keys that are visible to them, and 0.
    pub(super) fn pairs(&mut self, readers: Readers<'_, N>, mut tile: ArrayViewMut2<'_, N>) {
        if self.is_of_features() {
            tile.fill(N::zero());
            return self.halves(readers, 0..self.c, &mut tile);
        }
        general_mat_mul(N::one(), &readers.x, &readers.keys.t(), N::zero(), &mut tile);
        self.weigh(&readers, tile);
    }

    /// Multiplies a tile by the weights of its pairs; what is hidden becomes 0.
    fn weigh(&self, readers: &Readers<'_, N>, mut tile: ArrayViewMut2<'_, N>) {
        for (r, tile) in tile.rows_mut().into_iter().enumerate() {
            let visible = readers.visible(r);
            let (tile, mut hidden) = tile.split_at(Axis(0), visible);
            hidden.fill(N::zero());
            let weights = self.pairs.index_axis(Axis(0), r % self.c);
            scale_row_by(tile, weights.split_at(Axis(0), visible).0);
        }
    }

    fn halves(
        &mut self,
        readers: Readers<'_, N>,
        range: Range<usize>,
        tile: &mut ArrayViewMut2<'_, N>,
    ) {
        let (c, Range { start, end }) = (self.c, range.clone());
        if range.len() <= LEAF {
            for j in range {
                let [mut key, _] = self.scaled_rows();
                key.assign(&readers.keys.index_axis(Axis(0), j));
                for i in j..end {
                    if i > j {
                        let e = self.e.index_axis(Axis(0), i);
                        scale_row(self.scaled[0].index_axis_mut(Axis(0), 0), e);
                    }
                    let key = self.scaled[0].index_axis(Axis(0), 0);
                    for r in (0..readers.blocks()).map(|block| block * c + i) {
                        if j < readers.visible(r) {
                            tile[[r, j]] = readers.x.index_axis(Axis(0), r).dot(&key);
                        }
                    }
                }
            }
            return;
        }
        let middle = start + (range.len() / 2).next_multiple_of(LEAF);
        self.scale_keys(readers, start..middle);
        for block in 0..readers.blocks() {
            let own = block * c + middle..block * c + end;
            self.scale_readers(readers, own.clone(), middle..end);
            let [x, keys] = [&self.scaled[0], &self.scaled[1]];
            let (x, keys) = (rows(x, middle..end), rows(keys, start..middle));
            let mut tile = rows_mut(tile, own);
            let mut tile = tile.slice_axis_mut(Axis(1), Slice::from(start..middle));
            general_mat_mul(N::one(), &x, &keys.t(), N::zero(), &mut tile);
        }
        self.halves(readers, start..middle, tile);
        self.halves(readers, middle..end, tile);
    }

    /// Row 0 of both scratch matrices.
    fn scaled_rows(&mut self) -> [ArrayViewMut1<'_, N>; 2] {
        self.scaled.each_mut().map(|scaled| scaled.index_axis_mut(Axis(0), 0))
    }

    /// Keys of the first half, times the decays after them up to its end.
    fn scale_keys(&mut self, readers: Readers<'_, N>, half: Range<usize>) {
        let Self { e, scaled: [_, keys], .. } = self;
        products_down(e.view(), half.clone(), keys.view_mut());
        let (mut keys, by) = (rows_mut(keys, half.clone()), rows(&readers.keys, half));
        keys.zip_mut_with(&by, |key, by| *key = *key * *by);
    }

    /// Readers of the second half, times the decays from its start up to theirs.
    fn scale_readers(&mut self, readers: Readers<'_, N>, own: Range<usize>, half: Range<usize>) {
        let Self { e, scaled: [x, _], .. } = self;
        products_up(e.view(), half.clone(), x.view_mut());
        let (mut x, by) = (rows_mut(x, half), rows(&readers.x, own));
        x.zip_mut_with(&by, |x, by| *x = *x * *by);
    }

    /// The gradients of [`pairs`](Self::pairs), from those of the tile, `d`, which is overwritten, and the tile.
    pub(super) fn pairs_back(
        &mut self,
        readers: Readers<'_, N>,
        tile: ArrayView2<'_, N>,
        mut d: ArrayViewMut2<'_, N>,
        mut grads: PairGrads<'_, N>,
    ) {
        if self.is_of_features() {
            return self.halves_back(readers, 0..self.c, d.view(), &mut grads);
        }
        for (r, (tile, d)) in tile.rows().into_iter().zip(d.rows()).enumerate() {
            // The decay of position t weights the pairs of keys before t with readers from t on.
            let mut sum = N::zero();
            for t in 1..=r % self.c {
                sum = sum + tile[t - 1] * d[t - 1];
                grads.g[[t, 0]] = grads.g[[t, 0]] + sum;
            }
        }
        self.weigh(&readers, d.view_mut());
        causal_product(d.view(), readers.keys, grads.x);
        general_mat_mul(N::one(), &d.t(), &readers.x, N::one(), &mut grads.keys);
    }

    fn halves_back(
        &mut self,
        readers: Readers<'_, N>,
        range: Range<usize>,
        d: ArrayView2<'_, N>,
        grads: &mut PairGrads<'_, N>,
    ) {
        let (c, Range { start, end }) = (self.c, range.clone());
        if range.len() <= LEAF {
            return range.for_each(|j| self.key_back(readers, j..end, d, grads));
        }
        let middle = start + (range.len() / 2).next_multiple_of(LEAF);
        let features = self.e.ncols();
        let (mut up, mut down) = (Array2::ones([c, features]), Array2::ones([c, features]));
        products_up(self.e.view(), middle..end, up.view_mut());
        products_down(self.e.view(), start..middle, down.view_mut());
        self.scale_keys(readers, start..middle);
        let mut d_keys = Array2::zeros([middle - start, features]);
        let mut reads = Array2::zeros([end - middle, features]);
        for block in 0..readers.blocks() {
            let own = block * c + middle..block * c + end;
            self.scale_readers(readers, own.clone(), middle..end);
            let d = columns(rows(&d, own.clone()), start..middle);
            let (x, keys) =
                (rows(&self.scaled[0], middle..end), rows(&self.scaled[1], start..middle));
            general_mat_mul(N::one(), &d.t(), &x, N::one(), &mut d_keys);
            let mut d_x = d.dot(&keys);
            d_x.zip_mut_with(&rows(&up, middle..end), |d, by| *d = *d * *by);
            Zip::from(&mut reads)
                .and(&d_x)
                .and(rows(&readers.x, own.clone()))
                .for_each(|r, d, x| *r = *r + *d * *x);
            rows_mut(&mut grads.x, own).zip_mut_with(&d_x, |to, d| *to = *to + *d);
        }
        d_keys.zip_mut_with(&rows(&down, start..middle), |d, by| *d = *d * *by);
        rows_mut(&mut grads.keys, start..middle).zip_mut_with(&d_keys, |to, d| *to = *to + *d);
        d_keys.zip_mut_with(&rows(&readers.keys, start..middle), |d, key| *d = *d * *key);
        add_suffix_sums(reads.view(), rows_mut(&mut grads.g, middle..end));
        add_prefix_sums(d_keys.view(), rows_mut(&mut grads.g, start..middle));
        self.halves_back(readers, start..middle, d, grads);
        self.halves_back(readers, middle..end, d, grads);
    }

    /// The gradients of the pairs of key `range.start` with the readers of a range.
    fn key_back(
        &mut self,
        readers: Readers<'_, N>,
        range: Range<usize>,
        d: ArrayView2<'_, N>,
        grads: &mut PairGrads<'_, N>,
    ) {
        let (c, j) = (self.c, range.start);
        let mut by = Array2::ones([1, self.e.ncols()]);
        let mut terms = Array2::zeros([range.len(), self.e.ncols()]);
        let key = readers.keys.index_axis(Axis(0), j);
        for i in range.clone() {
            if i > j {
                scale_row(by.index_axis_mut(Axis(0), 0), self.e.index_axis(Axis(0), i));
            }
            let by = by.index_axis(Axis(0), 0);
            for r in (0..readers.blocks()).map(|block| block * c + i) {
                let d = if j < readers.visible(r) { d[[r, j]] } else { N::zero() };
                let x = readers.x.index_axis(Axis(0), r);
                Zip::from(grads.x.index_axis_mut(Axis(0), r))
                    .and(by)
                    .and(key)
                    .for_each(|to, by, key| *to = *to + d * *by * *key);
                Zip::from(grads.keys.index_axis_mut(Axis(0), j))
                    .and(by)
                    .and(x)
                    .for_each(|to, by, x| *to = *to + d * *by * *x);
                let term = terms.index_axis_mut(Axis(0), i - j);
                Zip::from(term)
                    .and(by)
                    .and(x)
                    .and(key)
                    .for_each(|to, by, x, key| *to = *to + d * *by * *x * *key);
            }
        }
        // Not of the pair with itself, which has no decay.
        add_suffix_sums(rows(&terms, 1..range.len()), rows_mut(&mut grads.g, j + 1..range.end));
    }
}

/// Multiplies by element.
fn scale_row_by<N: Number>(mut x: ArrayViewMut1<'_, N>, by: ArrayView1<'_, N>) {
    x.zip_mut_with(&by, |x, by| *x = *x * *by);
}

/// Products of a range of rows of `e`, from its first up to each.
fn products_up<N: Number>(e: ArrayView2<'_, N>, range: Range<usize>, mut to: ArrayViewMut2<'_, N>) {
    for i in range.clone() {
        let (before, mut own) = to.view_mut().split_at(Axis(0), i);
        let mut own = own.index_axis_mut(Axis(0), 0);
        own.assign(&e.index_axis(Axis(0), i));
        if i > range.start {
            scale_row_by(own, before.index_axis(Axis(0), i - 1));
        }
    }
}

/// Products of a range of rows of `e`, from each, without its own, up to its last.
fn products_down<N: Number>(
    e: ArrayView2<'_, N>,
    range: Range<usize>,
    mut to: ArrayViewMut2<'_, N>,
) {
    for i in range.clone().rev() {
        let (mut before, after) = to.view_mut().split_at(Axis(0), i + 1);
        let mut own = before.index_axis_mut(Axis(0), i);
        if i + 1 < range.end {
            own.assign(&e.index_axis(Axis(0), i + 1));
            scale_row_by(own, after.index_axis(Axis(0), 0));
        } else {
            own.fill(N::one());
        }
    }
}

/// `to_t += sum of the rows from t on`
pub(super) fn add_suffix_sums<N: Number>(x: ArrayView2<'_, N>, mut to: ArrayViewMut2<'_, N>) {
    let mut sum = Array2::zeros([1, x.ncols()]);
    for (x, mut to) in x.rows().into_iter().zip(to.rows_mut()).rev() {
        let mut sum = sum.index_axis_mut(Axis(0), 0);
        sum.zip_mut_with(&x, |sum, x| *sum = *sum + *x);
        to.zip_mut_with(&sum, |to, sum| *to = *to + *sum);
    }
}

/// `to_t += sum of the rows before t`
pub(super) fn add_prefix_sums<N: Number>(x: ArrayView2<'_, N>, mut to: ArrayViewMut2<'_, N>) {
    let mut sum = Array2::zeros([1, x.ncols()]);
    for (x, mut to) in x.rows().into_iter().zip(to.rows_mut()) {
        let mut sum = sum.index_axis_mut(Axis(0), 0);
        to.zip_mut_with(&sum, |to, sum| *to = *to + *sum);
        sum.zip_mut_with(&x, |sum, x| *sum = *sum + *x);
    }
}
