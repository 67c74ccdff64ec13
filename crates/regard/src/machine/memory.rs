//! Memory for results: an error where there is none, large pages where they pay.

use crate::error::Error;

/// Allocates a buffer of the product of `sizes`, filled with `x`. The sizes come from the user, so a failed allocation is an
/// error and does not abort the process.
pub(crate) fn filled<T: Copy>(x: T, sizes: &[usize]) -> Result<Vec<T>, Error> {
    let count = sizes.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
    let bytes = count.unwrap_or(usize::MAX).saturating_mul(size_of::<T>());
    let refused = || Error::OutOfMemory { bytes };
    let (count, mut room) = (count.ok_or_else(refused)?, Vec::new());
    room.try_reserve_exact(count).map_err(|_| refused())?;
    use_large_pages(room.spare_capacity_mut());
    room.resize(count, x);
    Ok(room)
}

/// Bytes of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Asks the system for large pages under memory that is about to be written for the first time. Each page of 4 KiB costs a fault, which
/// takes longer than to write it: the backward pass of a dense bias of 134 MB, to which the engine writes its gradient, took
/// 1.8 times as long. A hint: nothing is different but the time. Linux alone has it; less than two large pages keep small ones.
pub(crate) fn use_large_pages<T>(memory: &mut [T]) {
    let (first, bytes) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
    let skipped = first.align_offset(LARGE_PAGE);
    let whole = bytes.saturating_sub(skipped) / LARGE_PAGE * LARGE_PAGE;
    if bytes < 2 * LARGE_PAGE || whole == 0 {
        return;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: `whole` bytes from `skipped` on are inside of `memory`, and this advice leaves what they hold as it is. If the system
    // refuses, nothing has happened.
    unsafe {
        libc::madvise(first.wrapping_add(skipped).cast(), whole, libc::MADV_HUGEPAGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_keeps_what_it_holds() {
        for n in [0, 1, LARGE_PAGE, 5 * LARGE_PAGE + 3] {
            let mut memory: Vec<u8> = (0..n).map(|i| i.to_le_bytes()[0]).collect();
            use_large_pages(&mut memory);
            assert!(memory.iter().enumerate().all(|(i, x)| *x == i.to_le_bytes()[0]));
        }
    }
}
