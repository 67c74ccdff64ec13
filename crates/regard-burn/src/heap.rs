//! Memory that is kept for the next step.

/// Tells the allocator of glibc to keep what is given back, instead of returning it to the system and having every page of the next
/// step cleared anew: a training step asks for the same hundreds of megabytes again and again, and a quarter of its time goes
/// there. For programs, once, at their start; other allocators are left as they are.
pub fn keep_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // As much as an `int` holds: blocks up to here come from the heap, and so much of it may lie idle.
        const MOST: libc::c_int = libc::c_int::MAX;
        #[expect(unsafe_code, reason = "the allocator is told by a call of C")]
        // SAFETY: `mallopt` takes two numbers and may be called at any time; a value that it does not accept changes nothing.
        unsafe {
            libc::mallopt(libc::M_MMAP_MAX, 0);
            libc::mallopt(libc::M_TRIM_THRESHOLD, MOST);
            libc::mallopt(libc::M_TOP_PAD, 64 << 20);
        }
    }
}
