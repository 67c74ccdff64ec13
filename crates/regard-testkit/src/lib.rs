//! The case table of Regard: which calls are made, on which inputs, and how close the result must be.
//!
//! [`cases()`] lists the rows, [`check`] runs them on every instruction set and several thread counts against the
//! definition ([`regard::reference`]), and the [`Report`] says what was covered and how near to its bound each option
//! came. The tests of `regard` and the command `regard check` run the same table.
//!
//! ```
//! let cases = regard_testkit::cases();
//! let report = regard_testkit::check(&cases[..20], &mut |_, _| {});
//! assert!(report.failures.is_empty(), "{report}");
//! ```
//!
//! To add an option, add its line to [`masks::MASKS`] or [`scores::SCORES`]: every shape, instruction set and thread
//! count follows.
//!
//! | file | holds |
//! |---|---|
//! | `noise` | seeded inputs |
//! | `masks`, `scores` | the options, one line each |
//! | `data` | the tensors of a case, in any layout, and its `Problem` |
//! | `cases` | the table |
//! | `close` | the tolerance |
//! | `run` | the runner and its report |
//! | `looks` | what the microscope sees: every statistic of every row |
//! | `linear` | linear attention: its rows, its tolerance |
//! | `lsh` | attention by hashing: data, rows, judge |
//! | `cache` | what a key/value cache should do, from random bytes |

#![forbid(unsafe_code)]

pub mod cache;
pub mod cases;
pub mod close;
pub mod data;
pub mod linear;
pub mod looks;
pub mod lsh;
pub mod masks;
pub mod noise;
pub mod run;
pub mod scores;

pub use cache::CacheModel;
pub use cases::{Case, Dtype, NAN_BITS, NanCase, NanIn, Way, cases};
pub use close::{GradJudge, Judge};
pub use data::{Arrangement, Data, Stored};
pub use looks::check_looks;
pub use noise::Noise;
pub use run::{Report, THREADS, check};
