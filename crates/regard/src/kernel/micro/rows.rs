//! Sums over the rows of a tile: gradients of keys, values and W. Features are in the vector lanes here.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use super::UNROLL;
use crate::machine::simd::{GROUP, Isa, Lanes, MAX_LANES, Number, Simd, Task};
use crate::tensor::index::{RowMask, Span};

/// A matrix whose rows are padded with zeros to whole vectors. No vector load crosses a cache line.
#[derive(Debug)]
pub(crate) struct RowBuffer<N> {
    data: Vec<N>,
    /// Index of the first element that is aligned to a cache line.
    first: usize,
    /// Row stride in elements, a multiple of the widest vector.
    width: usize,
}

impl<N: Number> RowBuffer<N> {
    pub(crate) fn new(rows: usize, features: usize) -> Self {
        let width = features.next_multiple_of(MAX_LANES);
        let data = vec![N::zero(); rows * width + MAX_LANES];
        let first = data.as_ptr().align_offset(64).min(MAX_LANES);
        Self { data, first, width }
    }

    pub(crate) fn rows(&self) -> usize {
        (self.data.len() - MAX_LANES).checked_div(self.width).unwrap_or(0)
    }

    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &[N] {
        &self.data[self.first + i * self.width..][..self.width]
    }

    #[inline(always)]
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [N] {
        &mut self.data[self.first + i * self.width..][..self.width]
    }

    /// The data from row `i` on, and the row stride.
    pub(crate) fn rows_from(&mut self, i: usize) -> (&mut [N], usize) {
        (&mut self.data[self.first + i * self.width..], self.width)
    }

    pub(crate) fn clear(&mut self) {
        self.data.fill(N::zero());
    }
}

/// Product over rows: `sums[at[key]] += sum over rows of tile[key][row] * rows[row]`, for the rows of `span`. If `visible` is not
/// empty, rows for which a key is masked are left out of its sum. With `keys`, `rows[row] - keys[key]` replaces `rows[row]`.
pub(crate) fn add_rows<N: Number>(
    isa: Isa,
    (tile, visible): (&[Lanes<N>], &[RowMask]),
    (rows, span): (&RowBuffer<N>, Span),
    keys: Option<&RowBuffer<N>>,
    (at, sums): (&[usize], &mut RowBuffer<N>),
) {
    let work = Sums { tile, visible, rows, span, keys: keys.unwrap_or(rows), at };
    match (visible.is_empty(), keys) {
        (true, None) => N::enter(isa, AddRows::<N, false, false> { work, sums }),
        (true, Some(_)) => N::enter(isa, AddRows::<N, false, true> { work, sums }),
        (false, None) => N::enter(isa, AddRows::<N, true, false> { work, sums }),
        (false, Some(_)) => N::enter(isa, AddRows::<N, true, true> { work, sums }),
    }
}

/// The operands of [`add_rows`].
struct Sums<'t, N> {
    tile: &'t [Lanes<N>],
    visible: &'t [RowMask],
    rows: &'t RowBuffer<N>,
    span: Span,
    keys: &'t RowBuffer<N>,
    at: &'t [usize],
}

/// `HIDDEN`: some keys are masked; `AWAY`: differences from the keys are added.
struct AddRows<'t, N, const HIDDEN: bool, const AWAY: bool> {
    work: Sums<'t, N>,
    sums: &'t mut RowBuffer<N>,
}

impl<N: Number, const HIDDEN: bool, const AWAY: bool> Task<N> for AddRows<'_, N, HIDDEN, AWAY> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { work, sums } = self;
        let width = work.rows.width;
        assert!(work.span.end <= GROUP && width == sums.width);
        assert!(width == 0 || work.span.end <= work.rows.rows());
        assert!(!HIDDEN || work.tile.len() <= work.visible.len());
        let mut f = 0;
        while f < width {
            let vectors = (width - f) / S::LANES;
            if !S::WIDE {
                work.add_keys::<S, HIDDEN, AWAY, 6, 2>(s, f, sums);
                f += 2 * S::LANES;
            } else if vectors >= 4 {
                work.add_keys::<S, HIDDEN, AWAY, 4, 4>(s, f, sums);
                f += 4 * S::LANES;
            } else if vectors >= 2 {
                work.add_keys::<S, HIDDEN, AWAY, 8, 2>(s, f, sums);
                f += 2 * S::LANES;
            } else {
                work.add_keys::<S, HIDDEN, AWAY, 8, 1>(s, f, sums);
                f += S::LANES;
            }
        }
    }
}

impl<N: Number> Sums<'_, N> {
    #[inline(always)]
    fn add_keys<
        S: Simd<N>,
        const HIDDEN: bool,
        const AWAY: bool,
        const KEYS: usize,
        const VECTORS: usize,
    >(
        &self,
        s: S,
        f: usize,
        sums: &mut RowBuffer<N>,
    ) {
        let mut key = 0;
        while key + KEYS <= self.tile.len() {
            self.add_block::<S, HIDDEN, AWAY, KEYS, VECTORS>(s, key, f, sums);
            key += KEYS;
        }
        if KEYS > 4 && key + 4 <= self.tile.len() {
            self.add_block::<S, HIDDEN, AWAY, 4, VECTORS>(s, key, f, sums);
            key += 4;
        }
        while key < self.tile.len() {
            self.add_block::<S, HIDDEN, AWAY, 1, VECTORS>(s, key, f, sums);
            key += 1;
        }
    }

    #[inline(always)]
    fn add_block<
        S: Simd<N>,
        const HIDDEN: bool,
        const AWAY: bool,
        const KEYS: usize,
        const VECTORS: usize,
    >(
        &self,
        s: S,
        key: usize,
        f: usize,
        to: &mut RowBuffer<N>,
    ) {
        let zero = s.splat(N::zero());
        let (mut sums, mut away) = ([[zero; VECTORS]; KEYS], [[zero; VECTORS]; KEYS]);
        let tile = &self.tile[key..key + KEYS];
        let (mut any, mut all, mut visible) = (0, RowMask::MAX, [0; KEYS]);
        for r in 0..KEYS {
            if HIDDEN {
                visible[r] = self.visible[key + r];
                (any, all) = (any | visible[r], all & visible[r]);
            }
            for j in 0..VECTORS {
                if AWAY {
                    away[r][j] = s.load(&self.keys.row(key + r)[f + j * S::LANES..]);
                }
            }
        }
        if HIDDEN {
            for row in self.span.start..self.span.end {
                if any >> row & 1 == 1 {
                    let some = all >> row & 1 == 0;
                    let away = (&away, some, &visible);
                    self.add_round::<S, HIDDEN, AWAY, KEYS, VECTORS>(
                        s,
                        tile,
                        (row, f),
                        away,
                        &mut sums,
                    );
                }
            }
        } else {
            let away = (&away, false, &visible);
            let mut row = self.span.start;
            while row + UNROLL <= self.span.end {
                for u in 0..UNROLL {
                    let at = (row + u, f);
                    self.add_round::<S, HIDDEN, AWAY, KEYS, VECTORS>(s, tile, at, away, &mut sums);
                }
                row += UNROLL;
            }
            for row in row..self.span.end {
                self.add_round::<S, HIDDEN, AWAY, KEYS, VECTORS>(
                    s,
                    tile,
                    (row, f),
                    away,
                    &mut sums,
                );
            }
        }
        for r in 0..KEYS {
            let to = &mut to.row_mut(self.at[key + r])[f..f + VECTORS * S::LANES];
            for j in 0..VECTORS {
                let to = &mut to[j * S::LANES..];
                s.store(s.add(s.load(to), sums[r][j]), to);
            }
        }
    }
    /// Accumulates one row: its weights for `KEYS` keys times `VECTORS` vectors of its features.
    #[inline(always)]
    fn add_round<
        S: Simd<N>,
        const HIDDEN: bool,
        const AWAY: bool,
        const KEYS: usize,
        const VECTORS: usize,
    >(
        &self,
        s: S,
        tile: &[Lanes<N>],
        (row, f): (usize, usize),
        (away, some, visible): (&[[S::V; VECTORS]; KEYS], bool, &[RowMask; KEYS]),
        sums: &mut [[S::V; VECTORS]; KEYS],
    ) {
        let first = self.rows.first + row * self.rows.width + f;
        // SAFETY: `AddRows::run` asserts that the span ends within the rows, and `f` and the vectors after it stay within
        // the width.
        let features = unsafe { self.rows.data.get_unchecked(first..first + VECTORS * S::LANES) };
        let mut y = [s.splat(N::zero()); VECTORS];
        for j in 0..VECTORS {
            y[j] = s.load(&features[j * S::LANES..]);
        }
        for r in 0..KEYS {
            if HIDDEN && some && visible[r] >> row & 1 == 0 {
                continue;
            }
            // SAFETY: the row is below `span.end`, which `AddRows::run` asserts to be at most the lanes of a group.
            let x = s.splat(unsafe { *tile[r].0.get_unchecked(row) });
            for j in 0..VECTORS {
                let y = if AWAY { s.sub(y[j], away[r][j]) } else { y[j] };
                sums[r][j] = s.fma(x, y, sums[r][j]);
            }
        }
    }
}
