//! What stands beside exact attention: positions, and functions of their own whose cost grows with the length alone.

pub(crate) mod lsh;
pub(crate) mod rope;
