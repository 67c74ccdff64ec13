//! The case table of Regard: test calls, their inputs, and the tolerance of their results.
//!
//! [`cases()`] lists the rows. [`check`] runs them on every instruction set with several thread counts and compares them
//! with the reference ([`regard::reference`]). The [`Report`] lists what was covered and the largest error of each option
//! relative to its tolerance. The tests of `regard` and the command `regard check` run the same table.
//!
//! ```
//! let cases = regard_testkit::cases();
//! let report = regard_testkit::check(&cases[..20], &mut |_, _| {});
//! assert!(report.failures.is_empty(), "{report}");
//! ```
//!
//! To add an option, add a line to [`masks::MASKS`] or [`scores::SCORES`]. It is then tested with every shape, instruction
//! set and thread count.
//!
//! | file | content |
//! |---|---|
//! | `noise` | seeded inputs |
//! | `masks`, `scores` | the options, one line each |
//! | `data` | the tensors of a case, in any layout, and its `Problem` |
//! | `cases` | the table |
//! | `close` | the tolerance |
//! | `run` | the runner and its report |
//! | `statistics` | attention statistics of every row |
//! | `delta` | the delta rule with decay: its rows, its tolerance |
//! | `linear` | linear attention: its rows, its tolerance |
//! | `lsh` | LSH attention: inputs, rows, tolerance |
//! | `cache` | model of a KV cache, driven by random bytes |
//! | `cached` | attention over a KV cache in the case table |

#![forbid(unsafe_code)]

pub mod cache;
mod cached;
pub mod cases;
pub mod close;
pub mod data;
pub mod delta;
pub mod linear;
pub mod lsh;
pub mod masks;
pub mod noise;
pub mod run;
pub mod scores;
pub mod statistics;

pub use cache::CacheModel;
pub use cases::{AttentionKind, Case, DecayCase, Dtype, NAN_BITS, NanCase, NanIn, cases};
pub use close::{GradCheck, OutputCheck};
pub use data::{Arrangement, Data, TestTensor};
pub use noise::Noise;
pub use run::{Report, THREADS, check};
pub use statistics::check_statistics;
