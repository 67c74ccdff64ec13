//! AMX: tiles of 16 rows of 64 bytes, and one instruction that multiplies two of them.
//!
//! The intrinsics are not stable yet, so each instruction is one line of assembly here. The compiler never touches tile
//! registers, so these lines stand freely between vector code.

use super::super::{Enter, Task};
use super::avx512::Avx512;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Proof that this machine has AVX-512 and AMX with bf16, and that the system lets this process use its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Amx(Avx512);

impl Amx {
    /// The proof, if there is one. Asks the system for permission, once.
    #[must_use]
    pub fn detect() -> Option<Self> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        let vectors = Avx512::detect()?;
        ALLOWED.get_or_init(|| has_amx() && ask_permission()).then_some(Self(vectors))
    }

    /// The vectors beside the tiles.
    pub(crate) fn vectors(self) -> Avx512 {
        self.0
    }

    /// Runs a task inside a function that is compiled for the vectors.
    #[inline(always)]
    pub(crate) fn run<T: Task<f32>>(self, task: T) -> T::Out {
        self.0.enter(task, self.0)
    }

    /// Sets up the tiles of this thread. Other code on this thread may do the same in its own way, so this is done anew for
    /// each task, and undone at its end.
    pub(crate) fn configure(self, shapes: [TileShape; COUNT]) -> Tiles {
        let mut config = Config { palette: 1, ..Config::default() };
        for (i, TileShape { rows, row_bytes }) in shapes.into_iter().enumerate() {
            assert!(
                (1..=16).contains(&rows) && (4..=64).contains(&row_bytes) && row_bytes % 4 == 0
            );
            (config.rows[i], config.row_bytes[i]) = (rows, row_bytes);
        }
        // SAFETY: `self` proves the instruction and the permission (`detect`); the 64 bytes are a valid configuration, as the
        // `assert!` above holds for each shape.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Tiles(self, PhantomData)
    }
}

/// What the processor reads and writes as the configuration of its tiles.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tile registers.
const COUNT: usize = 8;

/// The part of a tile that is in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileShape {
    pub(crate) rows: u8,
    pub(crate) row_bytes: u16,
}

impl TileShape {
    /// All of it.
    pub(crate) const WHOLE: Self = Self { rows: 16, row_bytes: 64 };
}

fn has_amx() -> bool {
    const TILE: u32 = 1 << 24;
    const BF16: u32 = 1 << 22;
    let edx = __cpuid_count(7, 0).edx;
    edx & TILE != 0 && edx & BF16 != 0
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`: Linux saves the 8 KiB of tiles only for those who ask.
#[cfg(target_os = "linux")]
fn ask_permission() -> bool {
    let answer: i64;
    // SAFETY: `arch_prctl` takes two numbers here and touches no memory of the process; the registers that a system call
    // changes are named.
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

/// The tiles of this thread, set up; released when it goes. Not `Send`: another thread has tiles of its own.
#[derive(Debug)]
pub(crate) struct Tiles(Amx, PhantomData<*const ()>);

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `Amx` proves the instruction (`detect`). Only methods of `Tiles` read tiles, and this one is gone.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The configuration of this thread's tiles as it was; in force again when this goes. What the tiles held is lost.
#[derive(Debug)]
pub(crate) struct SavedTiles(Option<Config>);

impl SavedTiles {
    /// Nothing to save where there are no tiles.
    pub(crate) fn new() -> Self {
        Self(Amx::detect().map(|_| {
            let mut config = Config::default();
            // SAFETY: `detect` has seen the instruction, which writes the 64 bytes of `config`.
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
            // SAFETY: `new` has detected the instruction; the 64 bytes are what its `sttilecfg` wrote, which is a valid
            // configuration, or all 0: tiles that are not set up.
            unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly)) };
        }
    }
}

impl Tiles {
    /// Sets a tile to 0.
    #[inline(always)]
    pub(crate) fn zero<const T: usize>(&self) {
        // SAFETY: `self` proves that the tiles are set up (`configure`); no memory is touched.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) };
    }

    /// Loads the rows of a tile, 16 of 64 bytes if it is whole, `stride` bytes apart.
    ///
    /// # Safety
    /// All of these bytes must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load<const T: usize>(&self, from: *const u8, stride: usize) {
        // SAFETY: the caller promises the memory, `self` proves that the tiles are set up (`configure`).
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{p} + {s}*1]",
                t = const T, p = in(reg) from, s = in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    /// Stores the rows of a tile, 16 of 64 bytes if it is whole, `stride` bytes apart.
    ///
    /// # Safety
    /// All of these bytes must be the caller's to write.
    #[inline(always)]
    pub(crate) unsafe fn store<const T: usize>(&self, to: *mut u8, stride: usize) {
        // SAFETY: the caller promises the memory, `self` proves that the tiles are set up (`configure`).
        unsafe {
            asm!(
                "tilestored [{p} + {s}*1], tmm{t}",
                t = const T, p = in(reg) to, s = in(reg) stride,
                options(nostack, preserves_flags),
            );
        }
    }

    /// `C += A B`: 16 x 16 sums in `f32`, over 32 products each, of the rows of A and the pairs of rows of B. The shapes of
    /// the three must fit each other: C has the rows of A and the row bytes of B, and A has 4 row bytes for each row of B.
    #[inline(always)]
    pub(crate) fn multiply<const C: usize, const A: usize, const B: usize>(&self) {
        // SAFETY: `self` proves that the tiles are set up (`configure`); no memory is touched. Shapes that do not fit would be a
        // fault of the processor, which those who call `configure` rule out: all whole, or those of `decode_tiles.rs`, which fit each other.
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}
