//! Integration tests of the public API, compiled and linked as one program. (`memory.rs` is a separate program because it
//! measures its own process.)

mod backward;
mod cache;
mod cached;
mod coverage;
mod dropout;
mod edges;
mod errors;
mod gradients;
mod hidden;
mod house;
mod laws;
mod normalizers;
mod packed;
mod parallelism;
mod parts;
mod rope;
mod shapes;
mod sparse;
mod steps;
mod strategies;
mod table;
