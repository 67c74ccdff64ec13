//! The tiles of a thread, one line of assembly for each instruction: the intrinsics are not stable yet. The compiler never touches tile
//! registers, so what one block leaves in them is there for the next.

use super::{Amx, PANEL, TILE};
use std::arch::asm;
use std::arch::x86_64::__m512i;
use std::marker::PhantomData;

/// Sums of a panel of rows with a panel of columns, row by row.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Sums(pub(super) [f32; PANEL * PANEL]);

/// The tiles of this thread, set up; released when it goes. 0 to 3 hold sums, 4 and 5 a panel of `a`, 6 and 7 one of `b`.
#[derive(Debug)]
pub(super) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// Other code of this thread may set them up in its own way, so this is done for each task.
    pub(super) fn new(Amx(()): Amx) -> Self {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(64);
        rows[..8].fill(16);
        let config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: `Amx` proves the instruction and the permission (`detect`); `config` is valid: eight whole tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Self(PhantomData)
    }

    /// All sums to 0.
    #[inline(always)]
    pub(super) fn clear(&self) {
        // SAFETY: `self` proves that the tiles are set up (`new`); no memory is touched.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem, preserves_flags),
            );
        }
    }

    /// Sums that have waited.
    #[inline(always)]
    pub(super) fn load(&self, sums: &Sums) {
        let (top, low) = sums.0.split_at(TILE * PANEL);
        // SAFETY: `self` proves that the tiles are set up (`new`); 16 lines of 64 bytes, 128 bytes apart, from 0 and from 64 on lie in
        // each half, which `split_at` made of 16 x 32 numbers.
        unsafe {
            asm!(
                "tileloadd tmm0, [{top} + {stride}]",
                "tileloadd tmm1, [{top} + {stride} + 64]",
                "tileloadd tmm2, [{low} + {stride}]",
                "tileloadd tmm3, [{low} + {stride} + 64]",
                top = in(reg) top.as_ptr(),
                low = in(reg) low.as_ptr(),
                stride = in(reg) size_of::<[f32; PANEL]>(),
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    /// Lets sums wait.
    #[inline(always)]
    pub(super) fn keep(&self, sums: &mut Sums) {
        // SAFETY: `Sums` has 32 rows of 32 numbers.
        unsafe { self.store(sums.0.as_mut_ptr(), PANEL) };
    }

    /// Writes sums: 32 rows of 32 numbers, `width` numbers apart.
    ///
    /// # Safety
    /// All of these must be the caller's to write.
    #[inline(always)]
    pub(super) unsafe fn store(&self, to: *mut f32, width: usize) {
        // SAFETY: the caller promises the memory, `self` proves that the tiles are set up (`new`).
        unsafe {
            asm!(
                "tilestored [{top} + {stride}], tmm0",
                "tilestored [{top} + {stride} + 64], tmm1",
                "tilestored [{low} + {stride}], tmm2",
                "tilestored [{low} + {stride} + 64], tmm3",
                top = in(reg) to,
                low = in(reg) to.add(TILE * width),
                stride = in(reg) width * size_of::<f32>(),
                options(nostack, preserves_flags),
            );
        }
    }

    /// Adds the products of two panels of equal depth to the sums.
    #[inline(always)]
    pub(super) fn multiply(&self, a: &[__m512i], b: &[__m512i]) {
        let (a, b) = (a.as_chunks::<PANEL>().0, b.as_chunks::<PANEL>().0);
        for (a, b) in a.iter().zip(b) {
            // SAFETY: `self` proves that the tiles are set up (`new`); each chunk is two tiles of 16 lines of 64 bytes, as
            // `as_chunks` has cut them.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{a} + {stride}]",
                    "tileloadd tmm6, [{b} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {stride} + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{a} + {stride} + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    a = in(reg) a.as_ptr(),
                    b = in(reg) b.as_ptr(),
                    stride = in(reg) size_of::<__m512i>(),
                    options(nostack, readonly, preserves_flags),
                );
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `new` needed a proof of the instruction. Only methods of `Tiles` read tiles, and this one is gone.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
