//! The instruction sets of x86-64, one file each.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;

/// Asks for the cache line at an address, into the cache that `HINT` names.
#[inline(always)]
pub(super) fn prefetch<T, const HINT: i32>(x: *const T) {
    // SAFETY: `target_arch` of this module is x86-64, of which SSE is a part; a prefetch of any address reads nothing that the
    // program sees.
    unsafe { std::arch::x86_64::_mm_prefetch::<HINT>(x.cast()) };
}
