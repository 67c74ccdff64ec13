//! What an experiment found.

use regard_scope::{Chart, Map, Scale, Scene, Style, beside, chart};

/// Findings, and one picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Number by number.
    pub findings: Vec<Finding>,
    /// What it looks like.
    pub picture: Picture,
    /// What the picture shows, in a sentence or two.
    pub caption: String,
}

/// One number: what theory says, and what was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What the number is.
    pub what: String,
    /// What it should be, or its bound.
    pub predicted: f64,
    /// What it is.
    pub measured: f64,
    /// How far apart they may be.
    pub allowed: Allowed,
}

/// When a finding is as predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Allowed {
    /// `|measured - predicted| <= x`.
    Within(f64),
    /// `|measured - predicted| <= x |predicted|`.
    Part(f64),
    /// `measured <= predicted`.
    AtMost,
    /// `measured >= predicted`.
    AtLeast,
    /// Always: told, not judged, as times are on a machine that others use.
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

impl Finding {
    /// Whether it is as predicted. NaN never is.
    #[must_use]
    pub fn holds(&self) -> bool {
        let off = (self.measured - self.predicted).abs();
        match self.allowed {
            Allowed::Within(x) => off <= x,
            Allowed::Part(x) => off <= x * self.predicted.abs(),
            Allowed::AtMost => self.measured <= self.predicted,
            Allowed::AtLeast => self.measured >= self.predicted,
            Allowed::Any => true,
        }
    }

    /// Whether it could have failed.
    #[must_use]
    pub fn judged(&self) -> bool {
        self.allowed != Allowed::Any
    }
}

impl Report {
    /// Nothing found yet, and what will be drawn.
    #[must_use]
    pub fn new(picture: Picture, caption: impl Into<String>) -> Self {
        Self { findings: Vec::new(), picture, caption: caption.into() }
    }

    fn add(
        &mut self,
        what: impl Into<String>,
        (predicted, measured): (f64, f64),
        allowed: Allowed,
    ) {
        self.findings.push(Finding { what: what.into(), predicted, measured, allowed });
    }

    /// Measured must be predicted to a part of it: `part` 0.05 is 5 %.
    pub fn near(&mut self, what: impl Into<String>, predicted: f64, measured: f64, part: f64) {
        self.add(what, (predicted, measured), Allowed::Part(part));
    }

    /// Measured must be predicted, give or take `off`.
    pub fn within(&mut self, what: impl Into<String>, predicted: f64, measured: f64, off: f64) {
        self.add(what, (predicted, measured), Allowed::Within(off));
    }

    /// Measured must not be above the bound.
    pub fn at_most(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.add(what, (bound, measured), Allowed::AtMost);
    }

    /// Measured must not be below the bound.
    pub fn at_least(&mut self, what: impl Into<String>, bound: f64, measured: f64) {
        self.add(what, (bound, measured), Allowed::AtLeast);
    }

    /// A number that is told and not judged.
    pub fn told(&mut self, what: impl Into<String>, predicted: f64, measured: f64) {
        self.add(what, (predicted, measured), Allowed::Any);
    }

    /// The number that was added last is told only, unless `judged`: times and memory in a quick run, where others share the machine.
    pub fn judged_if(&mut self, judged: bool) {
        if let Some(last) = self.findings.last_mut().filter(|_| !judged) {
            last.allowed = Allowed::Any;
        }
    }

    /// Whether the claim holds: something was judged, and all of it is as predicted.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.findings.iter().any(Finding::judged) && self.findings.iter().all(Finding::holds)
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
