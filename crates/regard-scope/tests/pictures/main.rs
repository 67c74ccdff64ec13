//! Pictures as users get them.

mod common;
mod laws;
mod snapshots;
