//! Products of 8-bit integers on AMX tiles: registers of 16 rows of 64 bytes.
//!
//! The intrinsics are not stable yet. The compiler never uses tile registers, so assembly can be mixed with vector code.

use crate::memory::{Block, Line};
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// If this processor has AMX-INT8 and the operating system lets this process use tiles, which is requested once.
pub(crate) fn is_allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        const TILE: u32 = 1 << 24;
        const INT8: u32 = 1 << 25;
        let edx = __cpuid_count(7, 0).edx;
        edx & TILE != 0 && edx & INT8 != 0 && ask_permission()
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

/// The tiles of this thread, configured; released on drop.
pub(crate) struct Configured(());

impl Configured {
    /// Two sets of sums, activations and codes, for 32 inputs: tiles 0 to 2 and 3 to 5. Tiles 6 and 7: activations and codes of
    /// 16 inputs.
    pub(crate) fn new() -> Option<Self> {
        if !is_allowed() {
            return None;
        }
        let mut config = Config { palette: 1, ..Config::default() };
        let [sums, x, codes] = [(16, 64), (16, 32), (8, 64)];
        let shapes = [sums, x, codes, sums, x, codes, (16, 16), (4, 64)];
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
        // SAFETY: `new` found the instruction; only `products` reads tiles, while this value lives.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Products of 16 rows with signed codes, 4 inputs of 16 outputs in a line: a line for each row. Of the blocks of activations, part
/// `i`, counted over all blocks, is taken, of as many inputs as there are codes: 16 or 32.
///
/// # Safety
///
/// A [`Configured`] of this thread must live.
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
