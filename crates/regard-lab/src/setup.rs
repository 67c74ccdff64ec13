//! What an experiment is run with.

use crate::Experiment;
use crate::error::Error;
use regard_testkit::Noise;
use std::collections::BTreeMap;

/// A parameter of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// What it is called by: `dim`, `heads`, `length`, `samples` or `steps`.
    pub name: &'static str,
    /// What it means here.
    pub what: &'static str,
    /// What it is if nobody says.
    pub full: usize,
    /// What it is in a quick run.
    pub quick: usize,
    /// The least and the most that it may be.
    pub range: (usize, usize),
}

/// A fault that can be injected; with it the claim must not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What it is called by: `wrong-scale`.
    pub name: &'static str,
    /// What is wrong then.
    pub what: &'static str,
}

/// Configuration of a run.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Setup {
    /// Random seed.
    pub seed: u64,
    /// Small sizes, and no checks of times: seconds, for tests.
    pub quick: bool,
    /// Parameters by name; those that are missing are as they come.
    pub parameters: BTreeMap<String, usize>,
    /// Name of the fault to inject; the claim must fail.
    pub fault: Option<String>,
}

impl Setup {
    /// As it comes, and quick.
    #[must_use]
    pub fn quick() -> Self {
        Self { quick: true, ..Self::default() }
    }
}

/// A run of an experiment with a valid setup.
#[derive(Clone, Copy)]
pub struct ExperimentRun<'s> {
    experiment: &'s Experiment,
    setup: &'s Setup,
    progress: &'s dyn Fn(usize, usize),
}

impl std::fmt::Debug for ExperimentRun<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExperimentRun")
            .field("of", &self.experiment.name)
            .field("setup", self.setup)
            .finish()
    }
}

impl<'s> ExperimentRun<'s> {
    pub(crate) fn new(
        experiment: &'s Experiment,
        setup: &'s Setup,
        progress: &'s dyn Fn(usize, usize),
    ) -> Result<Self, Error> {
        let names = |of: &[&'static str]| of.iter().map(ToString::to_string).collect();
        for (name, &value) in &setup.parameters {
            let parameters = experiment.parameters;
            let Some(parameter) = parameters.iter().find(|parameter| parameter.name == name) else {
                let known =
                    names(&parameters.iter().map(|parameter| parameter.name).collect::<Vec<_>>());
                return Err(Error::Unknown { what: "parameter", found: name.clone(), known });
            };
            let (least, most) = parameter.range;
            if !(least..=most).contains(&value) {
                return Err(Error::Range { parameter: parameter.name, found: value, least, most });
            }
        }
        if let Some(found) = &setup.fault
            && !experiment.faults.iter().any(|known| known.name == found)
        {
            let known = names(&experiment.faults.iter().map(|b| b.name).collect::<Vec<_>>());
            return Err(Error::Unknown { what: "fault", found: found.clone(), known });
        }
        Ok(Self { experiment, setup, progress })
    }

    /// The value of a parameter of this experiment.
    ///
    /// # Panics
    /// If the experiment has no such parameter: a mistake in its file.
    #[must_use]
    pub fn parameter(&self, name: &str) -> usize {
        let parameter = self.experiment.parameters.iter().find(|parameter| parameter.name == name);
        let parameter =
            parameter.unwrap_or_else(|| panic!("{} has no parameter {name}", self.experiment.name));
        let own = if self.setup.quick { parameter.quick } else { parameter.full };
        self.setup.parameters.get(name).copied().unwrap_or(own)
    }

    /// Whether this fault is in place.
    ///
    /// # Panics
    /// If the experiment has no such fault: a mistake in its file.
    #[must_use]
    pub fn has_fault(&self, name: &str) -> bool {
        let known = self.experiment.faults.iter().any(|b| b.name == name);
        assert!(known, "{} has no fault {name}", self.experiment.name);
        self.setup.fault.as_deref() == Some(name)
    }

    /// Whether it runs at full size. Only then are times checked: a quick run shares its machine with others.
    #[must_use]
    pub fn full(&self) -> bool {
        !self.setup.quick
    }

    /// Chance for one part of the experiment; parts do not disturb one another.
    #[must_use]
    pub fn noise(&self, part: &str) -> Noise {
        Noise::of_name(&format!("{} {} {part}", self.experiment.name, self.setup.seed))
    }

    /// Says that so many parts of all are done.
    pub fn done(&self, parts: usize, all: usize) {
        (self.progress)(parts, all);
    }
}
