//! The instruction sets of x86-64, one file each.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;
