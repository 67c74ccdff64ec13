//! Several processes that work on one thing: [`Ranks`] is what they can do together, and does not know MPI.
//!
//! Every algorithm is written against the trait, so that it runs, and is tested, with [`Alone`] (one process) and [`Threads`] (ranks
//! that are threads of one process); the crate `regard-mpi` has the ranks of an MPI job. Nothing here adds floating-point numbers in an
//! order that the number of ranks could change: sums are those of a [`Tree`] whose shape follows from the number of parts alone.

#![forbid(unsafe_code)]

/// The code of the README runs as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

// The map.
//
// Ground
//   ranks      the trait, one process, what is built from its calls
//   threads    ranks that are threads
//   tree       sums whose order does not depend on who computes the parts
//
// Attention
//   context    one sequence whose rows are spread over ranks: forward, backward, ring, decode
//   microscope statistics and maps of a sequence whose rows are dealt to ranks, and whose keys pass them in blocks
//   cost       seconds, bytes and memory of a rank, by formulas

pub mod context;
mod cost;
pub mod microscope;
mod ranks;
mod threads;
mod tree;

pub use cost::{Call, Cluster, Cost};
pub use ranks::{
    Alone, Ranks, RanksError, agree, any, broadcast, gather, gather_varied, share, shares,
};
pub use threads::Threads;
pub use tree::{Node, Tree, nodes};
