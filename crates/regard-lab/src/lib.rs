//! The lab: claims about attention, each predicted by theory, measured here, and checked.
//!
//! An [`Experiment`] is one file (or one with a folder beside it) that uses of Regard only what every user can call. It states a claim, and its [`Report`] says of each
//! number what theory predicts, what was measured, how far apart they may be, and whether the claim holds. Each experiment has
//! faults to inject ([`Fault`]): with one of them the same claim must fail, or the experiment proves nothing.
//!
//! ```
//! use regard_lab::{Setup, find};
//!
//! # fn main() -> Result<(), regard_lab::Error> {
//! let scaling = find("scaling")?;
//! let report = scaling.run(&Setup::quick())?;
//! assert!(report.holds());
//! let broken = scaling.run(&Setup { fault: Some("wrong-scale".into()), ..Setup::quick() })?;
//! assert!(!broken.holds());
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod error;
mod experiments;
mod learn;
mod measure;
mod page;
mod report;
mod setup;

pub use error::Error;
pub use experiments::EXPERIMENTS;
pub use page::{number, page};
pub use report::{ExperimentResult, Picture, Report, Tolerance};
pub use setup::{ExperimentRun, Fault, Parameter, Setup};

/// A claim that can be run.
#[derive(Debug)]
pub struct Experiment {
    /// The requirement that it answers: `E1`.
    pub id: &'static str,
    /// What it is called by: `scaling`.
    pub name: &'static str,
    /// What is claimed, in a sentence.
    pub claim: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Faults that can be injected; at least one.
    pub faults: &'static [Fault],
    /// Commands worth trying after the first.
    pub next: &'static [&'static str],
    pub(crate) body: fn(&ExperimentRun<'_>) -> Result<Report, Error>,
}

impl Experiment {
    /// Runs it. A setup that does not fit is refused before any work.
    pub fn run(&self, setup: &Setup) -> Result<Report, Error> {
        self.run_with_progress(setup, &|_, _| {})
    }

    /// Runs it, telling how far it is: so many parts of all.
    pub fn run_with_progress(
        &self,
        setup: &Setup,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Report, Error> {
        (self.body)(&ExperimentRun::new(self, setup, progress)?)
    }
}

/// The experiment of this name or id.
pub fn find(name: &str) -> Result<&'static Experiment, Error> {
    let own = |e: &&Experiment| e.name == name || e.id.eq_ignore_ascii_case(name);
    EXPERIMENTS.iter().find(own).ok_or_else(|| Error::Unknown {
        what: "experiment",
        found: name.into(),
        known: EXPERIMENTS.iter().map(|e| e.name.to_string()).collect(),
    })
}
