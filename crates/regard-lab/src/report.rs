//! What an experiment found.

use regard_scope::{Chart, Map, Scale, Scene, Style, beside, chart};

/// Results, and one picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Number by number.
    pub results: Vec<ExperimentResult>,
    /// What it looks like.
    pub picture: Picture,
    /// What the picture shows, in a sentence or two.
    pub caption: String,
}

/// One number: the prediction of theory and the measured value.
#[derive(Clone, Debug, PartialEq)]
pub struct ExperimentResult {
    /// What the number is.
    pub what: String,
    /// What it should be, or its bound.
    pub predicted: f64,
    /// What it is.
    pub measured: f64,
    /// How far apart they may be.
    pub tolerance: Tolerance,
}

/// The tolerance of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// `|measured - predicted| <= x`.
    Within(f64),
    /// `|measured - predicted| <= x |predicted|`.
    Part(f64),
    /// `measured <= predicted`.
    AtMost,
    /// `measured >= predicted`.
    AtLeast,
    /// Not checked, for example times on a shared machine.
    Any,
}

/// What is drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Picture {
    /// Numbers over numbers.
    Chart(Chart),
    /// Weights, one map beside the other, each with what it is called.
    Maps(String, Vec<(String, Map)>),
}

impl ExperimentResult {
    /// Whether it is as predicted. NaN never is.
    #[must_use]
    pub fn holds(&self) -> bool {
        let off = (self.measured - self.predicted).abs();
        match self.tolerance {
            Tolerance::Within(x) => off <= x,
            Tolerance::Part(x) => off <= x * self.predicted.abs(),
            Tolerance::AtMost => self.measured <= self.predicted,
            Tolerance::AtLeast => self.measured >= self.predicted,
            Tolerance::Any => true,
        }
    }

    /// Whether it could have failed.
    #[must_use]
    pub fn is_checked(&self) -> bool {
        self.tolerance != Tolerance::Any
    }
}

impl Report {
    /// Nothing found yet, and what will be drawn.
    #[must_use]
    pub fn new(picture: Picture, caption: impl Into<String>) -> Self {
        Self { results: Vec::new(), picture, caption: caption.into() }
    }

    fn add(
        &mut self,
        what: impl Into<String>,
        (predicted, measured): (f64, f64),
        tolerance: Tolerance,
    ) {
        self.results.push(ExperimentResult { what: what.into(), predicted, measured, tolerance });
    }

    /// MeasureOutput must be predicted to a part of it: `part` 0.05 is 5 %.
    pub fn near(&mut self, what: impl Into<String>, predicted: f64, measured: f64, part: f64) {
        self.add(what, (predicted, measured), Tolerance::Part(part));
    }

    /// MeasureOutput must be predicted, give or take `off`.
    pub fn within(&mut self, what: impl Into<String>, predicted: f64, measured: f64, off: f64) {
        self.add(what, (predicted, measured), Tolerance::Within(off));
    }

    /// MeasureOutput must not be above the bound.
    pub fn at_most(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.add(what, (bound, measured), Tolerance::AtMost);
    }

    /// MeasureOutput must not be below the bound.
    pub fn at_least(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.add(what, (bound, measured), Tolerance::AtLeast);
    }

    /// Records a number without checking it.
    pub fn record(&mut self, what: impl Into<String>, predicted: f64, measured: f64) {
        self.add(what, (predicted, measured), Tolerance::Any);
    }

    /// Does not check the last number unless `checked`: times and memory in a quick run on a shared machine.
    pub fn check_if(&mut self, checked: bool) {
        if let Some(last) = self.results.last_mut().filter(|_| !checked) {
            last.tolerance = Tolerance::Any;
        }
    }

    /// Whether the claim holds: something was checked, and all of it is as predicted.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.results.iter().any(ExperimentResult::is_checked)
            && self.results.iter().all(ExperimentResult::holds)
    }
}

impl Picture {
    /// The picture on a page or in a terminal.
    #[must_use]
    pub fn scene(&self, style: &Style) -> Scene {
        match self {
            Self::Chart(lines) => chart(lines, style),
            Self::Maps(title, maps) => {
                let most = maps.iter().map(|(_, map)| map.most()).fold(0.0, f32::max);
                let style = Style { scale: Scale::Linear { most }, ..style.clone() };
                beside(title, maps, &style)
            }
        }
    }
}
