//! The instruction sets of x86-64, one file each.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;

use std::arch::asm;

/// While it lives, denormal inputs and results count as 0 on this thread.
///
/// A softmax over widely spread scores makes weights just above the smallest normal number, and their products with
/// the values fall below it. Each such operation costs a microcode assist: the same call was 51 times slower.
#[derive(Debug)]
pub(super) struct FlushDenormals(u32);

const FLUSH_TO_ZERO: u32 = 1 << 15;
const DENORMALS_ARE_ZERO: u32 = 1 << 6;

impl FlushDenormals {
    #[inline(always)]
    pub(super) fn new() -> Self {
        let mut old = 0u32;
        // SAFETY: stores the 4 bytes of MXCSR into `old`, which has 4; every x86-64 has SSE.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut old, options(nostack, preserves_flags)) };
        set_mxcsr(old | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
        Self(old)
    }
}

impl Drop for FlushDenormals {
    #[inline(always)]
    fn drop(&mut self) {
        set_mxcsr(self.0);
    }
}

#[inline(always)]
fn set_mxcsr(bits: u32) {
    // SAFETY: `bits` is a value read from MXCSR with at most two defined bits added, so loading it cannot fault. Rust
    // assumes the default environment; the two bits change nothing but results smaller than 2^-126, which the kernels
    // under this guard define as 0, and the guard puts the old value back before anything else runs.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &bits, options(nostack, readonly, preserves_flags)) };
}
