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

/// Product over rows: `sums[at[key]] += sum over rows of tile[key][row] * rows[row]`, for the rows of `span`.
pub(crate) struct RowSums<'t, N> {
    pub(crate) tile: &'t [Lanes<N>],
    /// If not empty, rows for which a key is masked are left out of its sum.
    pub(crate) visible: &'t [RowMask],
    pub(crate) rows: &'t RowBuffer<N>,
    pub(crate) span: Span,
    /// With keys, `rows[row] - keys[key]` replaces `rows[row]`; then `visible` must be given.
    pub(crate) keys: Option<&'t RowBuffer<N>>,
    pub(crate) at: &'t [usize],
    pub(crate) sums: &'t mut RowBuffer<N>,
}

impl<N: Number> RowSums<'_, N> {
    pub(crate) fn add(self, isa: Isa) {
        match (self.visible.is_empty(), self.keys) {
            (true, _) => N::enter(isa, AddRows::<N, false, false>(self)),
            (false, None) => N::enter(isa, AddRows::<N, true, false>(self)),
            (false, Some(_)) => N::enter(isa, AddRows::<N, true, true>(self)),
        }
    }
}

/// `HIDDEN`: some keys are masked; `AWAY`: differences from the keys are added.
struct AddRows<'t, N, const HIDDEN: bool, const AWAY: bool>(RowSums<'t, N>);

impl<N: Number, const HIDDEN: bool, const AWAY: bool> Task<N> for AddRows<'_, N, HIDDEN, AWAY> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        let work = &self.0;
        let width = work.rows.width;
        assert!(work.span.end <= GROUP && width == work.sums.width);
        assert!(width == 0 || work.span.end <= work.rows.rows());
        assert!(!HIDDEN || work.tile.len() <= work.visible.len());
        let mut f = 0;
        while f < width {
            let vectors = (width - f) / S::LANES;
            if !S::WIDE {
                self.add_keys::<S, 6, 2>(s, f);
                f += 2 * S::LANES;
            } else if vectors >= 4 {
                self.add_keys::<S, 4, 4>(s, f);
                f += 4 * S::LANES;
            } else if vectors >= 2 {
                self.add_keys::<S, 8, 2>(s, f);
                f += 2 * S::LANES;
            } else {
                self.add_keys::<S, 8, 1>(s, f);
                f += S::LANES;
            }
        }
    }
}

/// Operands of a register tile: sums of `VECTORS` vectors of features for `KEYS` keys.
struct RegisterTile<'t, N, V, const KEYS: usize, const VECTORS: usize> {
    /// The first feature.
    f: usize,
    /// The weights of the keys.
    tile: &'t [Lanes<N>],
    /// The rows that see each key.
    visible: [RowMask; KEYS],
    /// What is subtracted from the features of a row.
    away: [[V; VECTORS]; KEYS],
}

impl<N: Number, const HIDDEN: bool, const AWAY: bool> AddRows<'_, N, HIDDEN, AWAY> {
    #[inline(always)]
    fn add_keys<S: Simd<N>, const KEYS: usize, const VECTORS: usize>(&mut self, s: S, f: usize) {
        let (mut key, keys) = (0, self.0.tile.len());
        while key + KEYS <= keys {
            self.add_block::<S, KEYS, VECTORS>(s, key, f);
            key += KEYS;
        }
        if KEYS > 4 && key + 4 <= keys {
            self.add_block::<S, 4, VECTORS>(s, key, f);
            key += 4;
        }
        while key < keys {
            self.add_block::<S, 1, VECTORS>(s, key, f);
            key += 1;
        }
    }

    #[inline(always)]
    fn add_block<S: Simd<N>, const KEYS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        key: usize,
        f: usize,
    ) {
        let zero = s.splat(N::zero());
        let mut sums = [[zero; VECTORS]; KEYS];
        let (tile, away) = (&self.0.tile[key..key + KEYS], [[zero; VECTORS]; KEYS]);
        let mut block = RegisterTile { f, tile, visible: [0; KEYS], away };
        let (mut any, mut all) = (0, RowMask::MAX);
        for r in 0..KEYS {
            if HIDDEN {
                block.visible[r] = self.0.visible[key + r];
                (any, all) = (any | block.visible[r], all & block.visible[r]);
            }
            if let Some(keys) = self.0.keys.filter(|_| AWAY) {
                for j in 0..VECTORS {
                    block.away[r][j] = s.load(&keys.row(key + r)[f + j * S::LANES..]);
                }
            }
        }
        let span = self.0.span;
        if HIDDEN {
            for row in span.start..span.end {
                if any >> row & 1 == 1 {
                    let some = all >> row & 1 == 0;
                    self.add_round(s, &block, row, some, &mut sums);
                }
            }
        } else {
            let mut row = span.start;
            while row + UNROLL <= span.end {
                for u in 0..UNROLL {
                    self.add_round(s, &block, row + u, false, &mut sums);
                }
                row += UNROLL;
            }
            for row in row..span.end {
                self.add_round(s, &block, row, false, &mut sums);
            }
        }
        for r in 0..KEYS {
            let at = self.0.at[key + r];
            let to = &mut self.0.sums.row_mut(at)[f..f + VECTORS * S::LANES];
            for j in 0..VECTORS {
                let to = &mut to[j * S::LANES..];
                s.store(s.add(s.load(to), sums[r][j]), to);
            }
        }
    }

    /// Accumulates one row: its weights for `KEYS` keys times `VECTORS` vectors of its features. `some`: it does not see all of them.
    #[inline(always)]
    fn add_round<S: Simd<N>, const KEYS: usize, const VECTORS: usize>(
        &self,
        s: S,
        block: &RegisterTile<'_, N, S::V, KEYS, VECTORS>,
        row: usize,
        some: bool,
        sums: &mut [[S::V; VECTORS]; KEYS],
    ) {
        let rows = self.0.rows;
        let first = rows.first + row * rows.width + block.f;
        // SAFETY: `run` asserts that the span ends within the rows, and `block.f` and the vectors after it stay within the width.
        let features = unsafe { rows.data.get_unchecked(first..first + VECTORS * S::LANES) };
        let mut y = [s.splat(N::zero()); VECTORS];
        for j in 0..VECTORS {
            y[j] = s.load(&features[j * S::LANES..]);
        }
        for r in 0..KEYS {
            if HIDDEN && some && block.visible[r] >> row & 1 == 0 {
                continue;
            }
            // SAFETY: the row is below `span.end`, which `run` asserts to be at most the lanes of a group.
            let x = s.splat(unsafe { *block.tile[r].0.get_unchecked(row) });
            for j in 0..VECTORS {
                let y = if AWAY { s.sub(y[j], block.away[r][j]) } else { y[j] };
                sums[r][j] = s.fma(x, y, sums[r][j]);
            }
        }
    }
}
