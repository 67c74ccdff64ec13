//! A look at all weights: how much longer than the forward pass that they come from, and in how much memory?

use super::compared::BaselineComparison;
use super::report::Row;
use super::roofline_loop::Units;
use super::{Facts, first_call, visible};
use anyhow::Result;
use regard::{AttentionView, Element, Error};
use regard_scope::{Measure, Pool};
use std::hint::black_box;

/// Cells of the overview, each way.
const CELLS: usize = 1024;
/// Keys of each query that are named.
const TOP: usize = 8;

pub(crate) fn measure<E: Element>(compared: &BaselineComparison<'_, E>) -> Result<Row> {
    let BaselineComparison { case, input, plan, .. } = *compared;
    let (q, k, v) = input.views();
    let output = plan.forward(q, k, v)?;
    let view = AttentionView::new(plan, q, k, &output)?;
    let all = Measure::new().entropy().top_k(TOP).col_sum().pooled(CELLS, CELLS, Pool::Max);
    let ours = || -> Result<(), Error> {
        drop(black_box(all.of(&view)?));
        Ok(())
    };
    let seen = first_call(case, ours)?;
    let flops = case.flops(plan.work().pairs as f64);
    let facts = Facts { flops, units: flops, visible: visible(case, plan), seen };
    compared.row(|| drop(ours()), Units::of_vectors::<E>(), facts)
}
