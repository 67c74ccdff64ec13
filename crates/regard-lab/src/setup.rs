//! What an experiment is run with.

use crate::Experiment;
use crate::error::Error;
use regard_testkit::Noise;
use std::collections::BTreeMap;

/// A number of an experiment that may be turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knob {
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

/// A fault that may be put in the place of the mechanism, with which the claim must not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Break {
    /// What it is called by: `wrong-scale`.
    pub name: &'static str,
    /// What is wrong then.
    pub what: &'static str,
}

/// What somebody wants to be run.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Setup {
    /// Seeds all chance.
    pub seed: u64,
    /// Small sizes, and no judging of times: seconds, for tests.
    pub quick: bool,
    /// Knobs by name; those that are missing are as they come.
    pub knobs: BTreeMap<String, usize>,
    /// A fault by name, to see the claim fail.
    pub broken: Option<String>,
}

impl Setup {
    /// As it comes, and quick.
    #[must_use]
    pub fn quick() -> Self {
        Self { quick: true, ..Self::default() }
    }
}

/// A setup that fits its experiment, as the experiment sees it.
#[derive(Clone, Copy)]
pub struct Trial<'s> {
    experiment: &'s Experiment,
    setup: &'s Setup,
    progress: &'s dyn Fn(usize, usize),
}

impl std::fmt::Debug for Trial<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trial")
            .field("of", &self.experiment.name)
            .field("setup", self.setup)
            .finish()
    }
}

impl<'s> Trial<'s> {
    pub(crate) fn new(
        experiment: &'s Experiment,
        setup: &'s Setup,
        progress: &'s dyn Fn(usize, usize),
    ) -> Result<Self, Error> {
        let names = |of: &[&'static str]| of.iter().map(ToString::to_string).collect();
        for (name, &value) in &setup.knobs {
            let knobs = experiment.knobs;
            let Some(knob) = knobs.iter().find(|knob| knob.name == name) else {
                let known = names(&knobs.iter().map(|knob| knob.name).collect::<Vec<_>>());
                return Err(Error::Unknown { what: "knob", found: name.clone(), known });
            };
            let (least, most) = knob.range;
            if !(least..=most).contains(&value) {
                return Err(Error::Range { knob: knob.name, found: value, least, most });
            }
        }
        if let Some(found) = &setup.broken
            && !experiment.breaks.iter().any(|known| known.name == found)
        {
            let known = names(&experiment.breaks.iter().map(|b| b.name).collect::<Vec<_>>());
            return Err(Error::Unknown { what: "break", found: found.clone(), known });
        }
        Ok(Self { experiment, setup, progress })
    }

    /// The value of a knob of this experiment.
    ///
    /// # Panics
    /// If the experiment has no such knob: a mistake in its file.
    #[must_use]
    pub fn knob(&self, name: &str) -> usize {
        let knob = self.experiment.knobs.iter().find(|knob| knob.name == name);
        let knob = knob.unwrap_or_else(|| panic!("{} has no knob {name}", self.experiment.name));
        let own = if self.setup.quick { knob.quick } else { knob.full };
        self.setup.knobs.get(name).copied().unwrap_or(own)
    }

    /// Whether this fault is in place.
    ///
    /// # Panics
    /// If the experiment has no such break: a mistake in its file.
    #[must_use]
    pub fn broken(&self, name: &str) -> bool {
        let known = self.experiment.breaks.iter().any(|b| b.name == name);
        assert!(known, "{} has no break {name}", self.experiment.name);
        self.setup.broken.as_deref() == Some(name)
    }

    /// Whether it runs at full size. Only then are times judged: a quick run shares its machine with others.
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
