//! What a user can do, and what must hold then: one program, so that it is compiled and linked once. (`memory.rs` is a program of
//! its own: it measures itself.)

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
mod linear;
mod looks;
mod lsh;
mod normalizers;
mod packed;
mod rope;
mod shapes;
mod steps;
mod strategies;
mod table;
