//! Functions other than attention, and looks at its weights, with exact attention over the same tensors as their baseline.

use super::baseline::{Against, Ready};
use super::case::{Case, Pass};
use super::clock::Clock;
use super::input::Input;
use super::report::Row;
use super::roofline_loop::{Roofline, Units};
use super::{Facts, SAMPLE, Turns};
use anyhow::Result;
use regard::{Element, Error, Plan};
use std::hint::black_box;

/// What both are measured on.
pub(crate) struct BaselineComparison<'c, E: Element> {
    pub(crate) case: &'c Case,
    pub(crate) input: &'c Input<E>,
    /// Of exact attention.
    pub(crate) plan: &'c Plan<'c, E>,
    pub(crate) seconds: f64,
}

impl<E: Element> BaselineComparison<'_, E> {
    /// Whether the way back is part of a call.
    pub(crate) fn goes_back(&self) -> bool {
        matches!(self.case.pass, Pass::Both | Pass::Backward)
    }

    fn exact(&self) -> Result<(), Error> {
        let (q, k, v) = self.input.views();
        let output = self.plan.forward(q, k, v)?;
        if self.goes_back() {
            drop(black_box(self.plan.backward(q, k, v, &output, self.input.d_out())?));
        }
        drop(black_box(output));
        Ok(())
    }

    /// Measures calls of ours, which have gone well before.
    pub(crate) fn row(&self, ours: impl Fn(), units: Units, facts: Facts) -> Result<Row> {
        let Self { case, plan, seconds, .. } = *self;
        let (machine, clock) = (plan.machine(), Clock::of(plan.machine()));
        let roofline = Roofline::new(case.bound, machine, units, 0);
        let mut turns = Turns { clock, roofline, units: facts.units, seconds };
        self.exact()?;
        // For as long as a sample, as ours.
        let exact = || -> Result<f64> {
            let (mut calls, mut total) = (0.0, 0.0);
            while total < SAMPLE {
                total += clock.time(|| drop(self.exact()));
                calls += 1.0;
            }
            Ok(total / calls)
        };
        let samples = turns.take(ours, &mut [Box::new(exact)])?;
        let mut row = Row::new(case, machine, &samples, facts)?;
        let form = if self.goes_back() { "forward and backward" } else { "forward" };
        let ready = Some(Ready { form: form.into(), ..Ready::default() });
        let mut against = Against { engine: "regard exact".into(), ready, ..Against::default() };
        against.measured(&samples.theirs[0], &samples.ratios[0]);
        row.baselines.push(against);
        Ok(row)
    }
}
