//! A server on a real socket, with real models that are part of the workspace and one of random weights.

#[path = "../common/mod.rs"]
mod common;

mod access;
mod batches;
mod errors;
mod generation;
mod life;
mod load;
mod look;
