//! The ranks of an MPI job behind [`regard_ranks::Ranks`](https://docs.rs/regard-ranks), by [rsmpi](https://docs.rs/mpi).
//!
//! With the feature `mpi` there is `World`: one communicator whose calls are non-blocking, have their return codes checked, and end at
//! a deadline with an error that names the call, so that a rank that is stopped, or a network that is gone, never leaves a job
//! hanging. That feature needs `mpicc` and libclang; without it there is only [`ranks_of_launcher`], and nothing is linked.
//!
//! ```no_run
//! # #[cfg(feature = "mpi")]
//! # fn main() -> Result<(), regard_ranks::RanksError> {
//! use regard_mpi::World;
//! use regard_ranks::{Ranks, gather};
//! use std::time::Duration;
//!
//! let world = World::join(Duration::from_secs(300))?;
//! let squares = gather(&world, &[world.rank() * world.rank()], &vec![1; world.count()])?;
//! if let Some(warning) = world.binding_warning() {
//!     eprintln!("{warning}");
//! }
//! # drop(squares);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "mpi"))]
//! # fn main() {}
//! ```
//!
//! Started with `mpirun -n 4 --bind-to none program`; other launchers are in the README.

#![deny(unsafe_code)]

// The map: a module imports only modules that are listed before it.
//
//   launcher   what the environment and the system tell of a launcher
//   request    memory that MPI uses until a request ends
//   world      the ranks

mod launcher;
#[cfg(feature = "mpi")]
#[expect(unsafe_code, reason = "calls of MPI")]
mod request;
#[cfg(feature = "mpi")]
#[expect(unsafe_code, reason = "calls of MPI")]
mod world;

pub use launcher::ranks_of_launcher;
#[cfg(feature = "mpi")]
pub use world::World;
