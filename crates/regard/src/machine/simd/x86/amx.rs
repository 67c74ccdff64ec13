//! Intel AMX: tile registers of 16 rows of 64 bytes, and an instruction that multiplies two tiles of bf16 numbers.
//!
//! The intrinsics are not stable yet, so each instruction is one line of inline assembly. The compiler never uses tile
//! registers, so these lines can be mixed with vector code.

use super::avx512::Avx512;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Proof that this machine has AVX-512 and AMX with bf16, and that the operating system lets this process use tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Amx(Avx512);

impl Amx {
    /// The proof, if the features are available. Requests permission from the operating system, once per process.
    #[must_use]
    pub fn detect() -> Option<Self> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        let vectors = Avx512::detect()?;
        ALLOWED.get_or_init(|| has_amx() && ask_permission()).then_some(Self(vectors))
    }

    pub(crate) fn vectors(self) -> Avx512 {
        self.0
    }

    /// Configures the tiles of this thread. Other code on the thread may use another configuration, so each task configures the
    /// tiles and releases them at its end.
    pub(crate) fn configure(self, shapes: [TileShape; COUNT]) -> Tiles {
        let mut config = Config { palette: 1, ..Config::default() };
        for (i, TileShape { rows, row_bytes }) in shapes.into_iter().enumerate() {
            assert!(
                (1..=16).contains(&rows) && (4..=64).contains(&row_bytes) && row_bytes % 4 == 0
            );
            (config.rows[i], config.row_bytes[i]) = (rows, row_bytes);
        }
        // SAFETY: `self` proves the instruction and the permission (`detect`); the 64 bytes are a valid configuration, because
        // the `assert!` above checks each shape.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Tiles(self, PhantomData)
    }
}

/// The tile configuration in the memory layout of `ldtilecfg` and `sttilecfg`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Number of tile registers.
const COUNT: usize = 8;

/// The part of a tile that is in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileShape {
    pub(crate) rows: u8,
    pub(crate) row_bytes: u16,
}

impl TileShape {
    pub(crate) const WHOLE: Self = Self { rows: 16, row_bytes: 64 };
}

fn has_amx() -> bool {
    const TILE: u32 = 1 << 24;
    const BF16: u32 = 1 << 22;
    let edx = __cpuid_count(7, 0).edx;
    edx & TILE != 0 && edx & BF16 != 0
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

/// The configured tiles of this thread, released on drop. Not `Send`: each thread has its own tiles.
#[derive(Debug)]
pub(crate) struct Tiles(Amx, PhantomData<*const ()>);

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `Amx` proves the instruction (`detect`). Only methods of `Tiles` read tiles, and this value is being dropped.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Saves the tile configuration of this thread and restores it on drop. The contents of the tiles are lost.
#[derive(Debug)]
pub(crate) struct SavedTiles(Option<Config>);

impl SavedTiles {
    /// Saves nothing if AMX is not available.
    pub(crate) fn new() -> Self {
        Self(Amx::detect().map(|_| {
            let mut config = Config::default();
            // SAFETY: `detect` has found the instruction, which writes the 64 bytes of `config`.
            unsafe {
                asm!("sttilecfg [{}]", in(reg) &mut config, options(nostack, preserves_flags));
            };
            config
        }))
    }
}

impl Drop for SavedTiles {
    fn drop(&mut self) {
        if let Some(config) = &self.0 {
            // SAFETY: `new` has detected the instruction; the 64 bytes were written by its `sttilecfg`, so they are a valid
            // configuration, or all 0 if the tiles were not configured.
            unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly)) };
        }
    }
}

impl Tiles {
    #[inline(always)]
    pub(crate) fn zero<const T: usize>(&self) {
        // SAFETY: `self` proves that the tiles are configured (`configure`); no memory is accessed.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) };
    }

    /// Loads the rows of a tile (16 rows of 64 bytes for `TileShape::WHOLE`), `stride` bytes apart.
    ///
    /// # Safety
    /// All of these bytes must be valid for reads.
    #[inline(always)]
    pub(crate) unsafe fn load<const T: usize>(&self, from: *const u8, stride: usize) {
        // SAFETY: the caller guarantees the memory; `self` proves that the tiles are configured (`configure`).
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{p} + {s}*1]",
                t = const T, p = in(reg) from, s = in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    /// Stores the rows of a tile (16 rows of 64 bytes for `TileShape::WHOLE`), `stride` bytes apart.
    ///
    /// # Safety
    /// All of these bytes must be valid for writes.
    #[inline(always)]
    pub(crate) unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize) {
        // SAFETY: the caller guarantees the memory; `self` proves that the tiles are configured (`configure`).
        unsafe {
            asm!(
                "tilestored [{p} + {s}*1], tmm{t}",
                t = const T, p = in(reg) to, s = in(reg) stride,
                options(nostack, preserves_flags),
            );
        }
    }

    /// `C += A B` for bf16 A and B: 16 x 16 sums in `f32` of 32 products each for whole tiles. A row of B holds an interleaved
    /// pair of matrix rows. The shapes must match: C has the rows of A and the row bytes of B, and A has 4 row bytes for each row
    /// of B.
    #[inline(always)]
    pub(crate) fn multiply<const C: usize, const A: usize, const B: usize>(&self) {
        // SAFETY: `self` proves that the tiles are configured (`configure`); no memory is accessed. Shapes that do not match
        // would raise a processor fault, which the callers of `configure` rule out: their tiles are all whole, or have the
        // matching shapes of `decode_amx.rs`.
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}
