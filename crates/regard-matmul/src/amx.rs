//! Products of 8-bit integers and of bf16 numbers on AMX tiles: registers of 16 rows of 64 bytes.
//!
//! The intrinsics are not stable yet. The compiler never uses tile registers, so assembly can be mixed with vector code.

use crate::memory::{Block, Line, TERMS, TILE};
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// If this processor has AMX-INT8 and AMX-BF16, and the operating system lets this process use tiles, which is requested once.
pub(crate) fn is_allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        const INT8: u32 = 1 << 25;
        const ALL: u32 = BF16 | TILES | INT8;
        __cpuid_count(7, 0).edx & ALL == ALL && ask_permission()
    })
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`: Linux saves the 8 KiB of tile data only for processes that request it.
#[cfg(target_os = "linux")]
fn ask_permission() -> bool {
    let answer: i64;
    // SAFETY: `arch_prctl` takes two integers here and accesses no memory of the process; the registers that a system call
    // clobbers are declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") 158i64 => answer,
            in("rdi") 0x1023u64,
            in("rsi") 18u64,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_permission() -> bool {
    false
}

/// The tile configuration in the memory layout of `ldtilecfg`.
#[derive(Default)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The shapes of tiles that a task needs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shapes {
    /// For [`products`]. Two sets of sums, activations and codes, for 32 inputs: tiles 0 to 2 and 3 to 5. Tiles 6 and 7:
    /// activations and codes of 16 inputs.
    Integers,
    /// For [`term_products`] of so many rows, 1 to 16. Tiles 0 to 3: sums; 4 and 5: activations; 6 and 7: weights.
    Terms(u8),
}

/// The tiles of this thread, configured; released on drop.
pub(crate) struct Configured(());

impl Configured {
    pub(crate) fn new(shapes: Shapes) -> Option<Self> {
        if !is_allowed() {
            return None;
        }
        let mut config = Config { palette: 1, ..Config::default() };
        let shapes = match shapes {
            Shapes::Integers => {
                let [sums, x, codes] = [(16, 64), (16, 32), (8, 64)];
                [sums, x, codes, sums, x, codes, (16, 16), (4, 64)]
            }
            Shapes::Terms(rows) => {
                let [rows, weights] = [(rows.clamp(1, 16), 64), (16, 64)];
                [rows, rows, rows, rows, rows, rows, weights, weights]
            }
        };
        for (i, (rows, row_bytes)) in shapes.into_iter().enumerate() {
            (config.rows[i], config.row_bytes[i]) = (rows, row_bytes);
        }
        // SAFETY: the instruction is there and allowed; the 64 bytes are a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Some(Self(()))
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: `new` found the instruction; only the functions below read tiles, while this value lives.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Products of 16 rows with signed codes, 4 inputs of 16 outputs in a line: a line for each row. Of the blocks of activations, part
/// `i`, counted over all blocks, is taken, of as many inputs as there are codes: 16 or 32.
///
/// # Safety
///
/// A [`Configured`] of this thread must live, of [`Shapes::Integers`].
#[inline(always)]
pub(crate) unsafe fn products(x: &[Block; 16], codes: &[Line], i: usize, to: &mut [Line; 16]) {
    let sub = 4 * codes.len();
    assert!(sub == 16 || sub == 32);
    let first = i * sub % 32;
    // SAFETY: the caller guarantees the tiles. Of each of the 16 blocks, 64 bytes apart, `sub` bytes from `first` on are
    // read, which lie in the 32 bytes of `quads`; of `codes`, all lines; all lines of `to` are written.
    unsafe {
        let x = x.as_ptr().cast::<u8>().add(first);
        macro_rules! multiply {
            ($sums:literal, $x:literal, $codes:literal) => {
                asm!(
                    concat!("tilezero tmm", $sums),
                    concat!("tileloadd tmm", $codes, ", [{codes} + {stride}*1]"),
                    concat!("tileloadd tmm", $x, ", [{x} + {stride}*1]"),
                    concat!("tdpbssd tmm", $sums, ", tmm", $x, ", tmm", $codes),
                    concat!("tilestored [{to} + {stride}*1], tmm", $sums),
                    x = in(reg) x,
                    codes = in(reg) codes.as_ptr(),
                    to = in(reg) to.as_mut_ptr(),
                    stride = in(reg) 64_usize,
                    options(nostack, preserves_flags),
                )
            };
        }
        if sub == 16 {
            multiply!(0, 6, 7);
        } else if i.is_multiple_of(2) {
            multiply!(0, 1, 2);
        } else {
            multiply!(3, 4, 5);
        }
    }
}

/// Which term of activations is multiplied with which of the weights, in order, if weights have `count` terms. All of which the
/// numbers add up to 2 at most: the others are below the rounding of `f32`. Each differs from the one before in one tile.
const fn pairs(count: usize) -> &'static [(usize, usize)] {
    match count {
        1 => &[(2, 0), (1, 0), (0, 0)],
        2 => &[(2, 0), (1, 0), (1, 1), (0, 1), (0, 0)],
        _ => &[(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)],
    }
}

/// Zeros a tile.
///
/// # Safety
///
/// A [`Configured`] of this thread must live; here and below.
#[inline(always)]
unsafe fn zero<const T: usize>() {
    // SAFETY: no memory is accessed.
    unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) };
}

/// Loads a tile.
///
/// # Safety
///
/// As many lines as the tile has rows must be valid for reads.
#[inline(always)]
unsafe fn load<const T: usize>(from: *const Line) {
    // SAFETY: the caller guarantees the memory.
    unsafe {
        asm!(
            "tileloadd tmm{t}, [{from} + {stride}*1]",
            t = const T, from = in(reg) from, stride = in(reg) size_of::<Line>(),
            options(nostack, readonly, preserves_flags),
        );
    }
}

/// Stores a tile.
///
/// # Safety
///
/// As many lines as the tile has rows must be valid for writes.
#[inline(always)]
unsafe fn store<const T: usize>(to: *mut Line) {
    // SAFETY: the caller guarantees the memory.
    unsafe {
        asm!(
            "tilestored [{to} + {stride}*1], tmm{t}",
            t = const T, to = in(reg) to, stride = in(reg) size_of::<Line>(),
            options(nostack, preserves_flags),
        );
    }
}

/// Adds to tile `C` the products of bf16 numbers of tiles `A` and `B`.
///
/// # Safety
///
/// The shapes must match.
#[inline(always)]
unsafe fn multiply<const C: usize, const A: usize, const B: usize>() {
    // SAFETY: no memory is accessed; the caller guarantees the shapes.
    unsafe {
        asm!(
            "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
            c = const C, a = const A, b = const B,
            options(nostack, nomem, preserves_flags),
        );
    }
}

/// Adds to `sums` the products of `R` tiles of rows with `C` groups of 16 outputs; starts at 0 if `first`. `R` and `C` are 1 or 2.
///
/// Of each 32 inputs, `x` has [`TERMS`] terms of `rows` lines, and `w` has `T` of 16 lines, each of which is 2 inputs of 16 outputs.
/// `sums` are 2 for each tile of rows, for both groups.
///
/// # Safety
///
/// A [`Configured`] of this thread must live, of [`Shapes::Terms`] with the same `rows`.
#[inline(always)]
pub(crate) unsafe fn term_products<const R: usize, const C: usize, const T: usize>(
    rows: usize,
    x: [&[Line]; R],
    w: [&[Line]; C],
    sums: &mut [[Line; TILE]],
    first: bool,
) {
    macro_rules! each {
        (|$tile:ident| $body:expr) => {{
            const $tile: usize = 0;
            $body
        };
        if C == 2 {
            const $tile: usize = 1;
            $body
        };
        if R == 2 {
            const $tile: usize = 2;
            $body
        };
        if R == 2 && C == 2 {
            const $tile: usize = 3;
            $body
        };};
    }
    let blocks = w[0].len() / (TILE * T);
    assert!(matches!((R, C), (1 | 2, 1 | 2)) && rows <= TILE && sums.len() >= 2 * R);
    assert!(x.iter().all(|x| x.len() >= blocks * TERMS * rows));
    assert!(w.iter().all(|w| w.len() >= blocks * T * TILE));
    // SAFETY: the caller guarantees the tiles. All pointers are within the slices, by the checks above: `rows` lines are read of
    // a term of `x`, 16 of a term of `w`, and of the 16 lines of a sum, `rows` are read and written.
    unsafe {
        each!(|SUM| if first { zero::<SUM>() } else { load::<SUM>(sums[SUM].as_ptr()) });
        for block in 0..blocks {
            let mut loaded = (TERMS, T);
            for &(i, j) in pairs(T) {
                let (at_x, at_w) = ((block * TERMS + i) * rows, (block * T + j) * TILE);
                let (new_x, new_w) = (i != loaded.0, j != loaded.1);
                if new_w {
                    load::<6>(w[0].as_ptr().add(at_w));
                }
                if new_x {
                    load::<4>(x[0].as_ptr().add(at_x));
                }
                multiply::<0, 4, 6>();
                if C == 2 {
                    if new_w {
                        load::<7>(w[C - 1].as_ptr().add(at_w));
                    }
                    multiply::<1, 4, 7>();
                }
                if R == 2 {
                    if new_x {
                        load::<5>(x[R - 1].as_ptr().add(at_x));
                    }
                    multiply::<2, 5, 6>();
                    if C == 2 {
                        multiply::<3, 5, 7>();
                    }
                }
                loaded = (i, j);
            }
        }
        each!(|SUM| store::<SUM>(sums[SUM].as_mut_ptr()));
    }
}
