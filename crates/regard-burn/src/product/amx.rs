//! Products on AMX: numbers are rounded to bf16, and their products are summed in f32.
//!
//! `a` becomes tiles of 16 rows with 32 numbers of the depth each, `b` tiles of 16 columns in which the depth goes by pairs: line `p`
//! holds depths `2p` and `2p + 1` of each column. Seen as 16 x 16 pairs one is the other turned, so one packing does both. Two tiles
//! side by side are a panel, and the product of two panels keeps four tiles of sums in registers.
//!
//! `b` is packed as a whole, and so is `a` if its depth does not lie in one piece; else its panels are packed one by one, when they are
//! needed, and never leave the caches. Sums go through the depth in one order, however the work is cut: threads change no bit.
//!
//! Cost: `m n k / 512` cycles of the tiles. From 256 columns on, reading `a` and writing the result cost as much.

#![expect(unsafe_code, reason = "tiles are instructions, and packing is intrinsics")]

mod pack;
mod tiles;

use self::pack::{CHUNK, Cut, Order, PackedMatrix, STEP, pack};
use self::tiles::{Sums, Tiles};
use super::Matrix;
use rayon::prelude::*;
use regard::Isa;
use std::arch::x86_64::__m512i;
use std::ops::Range;
use std::sync::OnceLock;

/// Lines of a tile, and numbers of f32 in a line.
const TILE: usize = 16;
/// Rows of `a` or columns of `b` in a panel.
const PANEL: usize = 2 * TILE;
/// Panels of `a` in a task, at most.
const HIGH: usize = 8;
/// Bytes of `b` in a task, which meet all of its panels of `a`: half of a second cache.
const WIDE: usize = 1 << 20;

/// `a [m, k] x b [k, n]`, rows one after another; nothing if the machine has no AMX.
pub(crate) fn multiply_bf16(a: Matrix<'_>, b: Matrix<'_>) -> Option<Vec<f32>> {
    Amx::detect().map(|amx| amx.multiply(a, b))
}

/// Proof of AMX with bf16, of the system's permission to use it, and of AVX-512 with bf16.
#[derive(Clone, Copy, Debug)]
struct Amx(());

impl Amx {
    fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        let found = || {
            Isa::available().iter().any(|isa| matches!(isa, Isa::Amx(_)))
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512bf16")
        };
        FOUND.get_or_init(found).then_some(Self(()))
    }

    fn multiply(self, a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
        let ([m, k], n) = (a.sizes, b.sizes[1]);
        assert!(
            k == b.sizes[0],
            "columns of a: {k}, rows of b: {}; they must be equal",
            b.sizes[0]
        );
        if k == 0 {
            return vec![0.0; m * n];
        }
        let cut = Cut::new(k);
        let mut to = Vec::with_capacity(m * n);
        let place = Place { to: to.as_mut_ptr(), rows: m, columns: n };
        // One way into the pool, not one for each of the steps.
        rayon::scope(|_| {
            let rows = || {
                let in_one_piece = a.strides[1] == 1;
                let packed = (!in_one_piece).then(|| PackedMatrix::new(self, a, cut, Order::Items));
                packed.map_or(Rows::Plain(a), Rows::PackedMatrix)
            };
            let columns = || PackedMatrix::new(self, b.turned(), cut, Order::Pairs);
            let (a, b) = rayon::join(rows, columns);
            let [down, across] = [m, n].map(|size| size.div_ceil(PANEL));
            let wide = (WIDE / (cut.step_lines() * size_of::<__m512i>())).max(1);
            let groups = across.div_ceil(wide);
            let mut high = HIGH;
            while high > 1 && down.div_ceil(high) * groups < 3 * rayon::current_num_threads() {
                high /= 2;
            }
            (0..down.div_ceil(high) * groups).into_par_iter().for_each(|task| {
                let part = |i: usize, size: usize, all: usize| i * size..((i + 1) * size).min(all);
                let rows = part(task / groups, high, down);
                let columns = part(task % groups, wide, across);
                // SAFETY: `place` has room for m n numbers, of which nobody else knows until `set_len`. `part` cuts the panels that
                // there are into disjoint ranges, so no two tasks have one of rows and one of columns in common.
                unsafe { self.task(&a, &b, [rows, columns], place) };
            });
        });
        // SAFETY: `with_capacity` made room, and tasks have written all: `part` leaves out no panel, and `k == 0` has returned.
        unsafe { to.set_len(m * n) };
        to
    }

    /// Sums of some panels of `a` with some of `b`.
    ///
    /// # Safety
    /// There must be such panels in `place`, whose rows and columns, as far as there are so many, must be the caller's to write.
    unsafe fn task(self, a: &Rows<'_>, b: &PackedMatrix, panels: [Range<usize>; 2], place: Place) {
        let (tiles, cut, [rows, columns]) = (Tiles::new(self), b.cut, panels);
        let steps = cut.blocks.div_ceil(STEP);
        // Where there is but one step, sums wait only to be copied.
        let waiting = if steps > 1 { rows.len() * columns.len() } else { 1 };
        let mut sums = vec![Sums([0.0; PANEL * PANEL]); waiting];
        let mut own = Vec::new();
        for step in 0..steps {
            let blocks = step * STEP..((step + 1) * STEP).min(cut.blocks);
            for (i, row) in rows.clone().enumerate() {
                if let Rows::Plain(a) = *a {
                    let first = [row * PANEL, blocks.start * cut.chunks * CHUNK];
                    self.pack_panel(a, first, blocks.len() * cut.chunks, &mut own);
                }
                for (j, column) in columns.clone().enumerate() {
                    let sums = &mut sums[(i * columns.len() + j) % waiting];
                    if step == 0 {
                        tiles.clear();
                    } else {
                        tiles.load(sums);
                    }
                    for (own_block, block) in blocks.clone().enumerate() {
                        let a = match a {
                            Rows::Plain(_) => &own[own_block * cut.lines()..][..cut.lines()],
                            Rows::PackedMatrix(a) => a.panel(block, row),
                        };
                        tiles.multiply(a, b.panel(block, column));
                    }
                    if step + 1 < steps {
                        tiles.keep(sums);
                    } else {
                        // SAFETY: as the caller promises.
                        unsafe { place.put(&tiles, [row, column], sums) };
                    }
                }
            }
        }
    }

    /// One panel of `a`.
    fn pack_panel(self, a: Matrix<'_>, first: [usize; 2], chunks: usize, to: &mut Vec<__m512i>) {
        to.clear();
        to.reserve(chunks * PANEL);
        let room = &mut to.spare_capacity_mut()[..chunks * PANEL];
        // SAFETY: `self` proves the instructions (`detect`).
        unsafe { pack(a, first, Order::Items, chunks, room) };
        // SAFETY: `reserve` made room, and `pack` writes all that it gets.
        unsafe { to.set_len(chunks * PANEL) };
    }
}

/// `a`: where it lies, if the depth lies in one piece.
#[derive(Debug)]
enum Rows<'a> {
    Plain(Matrix<'a>),
    PackedMatrix(PackedMatrix),
}

/// Where the result goes, rows one after another.
#[derive(Clone, Copy, Debug)]
struct Place {
    to: *mut f32,
    rows: usize,
    columns: usize,
}

// SAFETY: threads get the pointer from `multiply` alone, and write through it in `Place::put`, whose callers promise to own the place.
unsafe impl Send for Place {}
// SAFETY: the same.
unsafe impl Sync for Place {}

impl Place {
    /// Writes the sums of a panel of rows and a panel of columns; those at an edge go by way of `sums`.
    ///
    /// # Safety
    /// There must be such panels, whose rows and columns, as far as there are so many, must be the caller's to write.
    #[inline(always)]
    unsafe fn put(self, tiles: &Tiles, panels: [usize; 2], sums: &mut Sums) {
        let [row, column] = panels.map(|panel| panel * PANEL);
        let [rows, columns] = [self.rows - row, self.columns - column].map(|n| n.min(PANEL));
        // SAFETY: the caller promises that there are such panels: their first number lies in the room of `multiply`.
        let first = unsafe { self.to.add(row * self.columns + column) };
        if rows == PANEL && columns == PANEL {
            // SAFETY: the caller promises these rows and columns, and there are all of them, as the `if` above has found.
            unsafe { tiles.store(first, self.columns) };
            return;
        }
        tiles.keep(sums);
        for (i, sums) in sums.0.chunks(PANEL).take(rows).enumerate() {
            // SAFETY: `rows` and `columns` are what there is of the panel, which the caller promises.
            unsafe {
                first.add(i * self.columns).copy_from_nonoverlapping(sums.as_ptr(), columns);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    /// Both operands in rows or in columns, as `turned` says.
    fn product([a, b]: [&[f32]; 2], [m, k, n]: [usize; 3], turned: [bool; 2]) -> Option<Vec<f32>> {
        let matrix = |data, [rows, columns]: [usize; 2], turned| {
            if turned {
                Matrix::rows(data, [columns, rows]).turned()
            } else {
                Matrix::rows(data, [rows, columns])
            }
        };
        let found = multiply_bf16(matrix(a, [m, k], turned[0]), matrix(b, [k, n], turned[1]));
        let required = std::env::var("REGARD_REQUIRE_ISAS").is_ok_and(|isas| isas.contains("amx"));
        assert!(found.is_some() || !required, "AMX is required, and not here");
        if found.is_none() {
            eprintln!("skipped: this machine has no AMX");
        }
        found
    }

    const LAYOUTS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

    /// Largest error of a product, relative to the sum of sizes.
    fn worst(sizes: [usize; 3], turned: [bool; 2]) -> Option<f64> {
        let [m, k, n] = sizes;
        let (a, b) = (noise(m * k, 1), noise(k * n, 2));
        let found = product([&a, &b], sizes, turned)?;
        assert_eq!(found.len(), m * n);
        let round = |list: &[f32]| -> Vec<f64> {
            list.iter().map(|x| f64::from(super::super::nearest_bf16(*x))).collect()
        };
        let (a, b) = (round(&a), round(&b));
        let mut worst = 0.0f64;
        for i in 0..m {
            for j in 0..n {
                let (mut sum, mut size) = (0.0, 1e-30);
                for l in 0..k {
                    let a = a[if turned[0] { l * m + i } else { i * k + l }];
                    let b = b[if turned[1] { j * k + l } else { l * n + j }];
                    sum += a * b;
                    size += (a * b).abs();
                }
                worst = worst.max((f64::from(found[i * n + j]) - sum).abs() / size);
            }
        }
        Some(worst)
    }

    #[test]
    fn products_are_those_of_rounded_numbers() {
        let some = [1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 70];
        let small = some.iter().flat_map(|m| some.map(|n| (*m, n)));
        let small = small.flat_map(|(m, n)| some.map(|k| [m, k, n]));
        let large =
            [[0, 5, 5], [5, 0, 5], [5, 5, 0], [40, 513, 37], [33, 2100, 290], [300, 4500, 40]];
        for sizes in small.chain(large) {
            for turned in LAYOUTS {
                let Some(worst) = worst(sizes, turned) else { return };
                assert!(worst <= 1e-6, "{sizes:?} {turned:?}: {worst}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_in_its_row() {
        for turned in LAYOUTS {
            let (m, k, n) = (35, 37, 39);
            for (odd, is) in [
                (f32::NAN, f32::is_nan as fn(f32) -> bool),
                (f32::INFINITY, f32::is_infinite),
                (f32::NEG_INFINITY, f32::is_infinite),
            ] {
                let (mut a, b) = (vec![1.0; m * k], vec![0.5; k * n]);
                a[if turned[0] { 36 * m + 34 } else { 34 * k + 36 }] = odd;
                let Some(found) = product([&a, &b], [m, k, n], turned) else { return };
                for (i, x) in found.into_iter().enumerate() {
                    assert_eq!(is(x), i / n == 34, "{turned:?} {i}: {x}");
                    assert!(i / n == 34 || x == 18.5, "{turned:?} {i}: {x}");
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let (m, k, n) = (300, 2300, 200);
        let (a, b) = (noise(m * k, 3), noise(k * n, 4));
        for turned in LAYOUTS {
            let with = |threads| {
                let pool =
                    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                let found = pool.install(|| product([&a, &b], [m, k, n], turned));
                found.map(|found| found.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
            };
            let one = with(1);
            assert!(one == with(2) && one == with(7));
        }
    }
}
