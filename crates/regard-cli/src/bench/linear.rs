//! Linear attention: from which length on is it faster than exact attention?

use super::compared::BaselineComparison;
use super::report::Row;
use super::roofline_loop::Units;
use super::{Facts, first_call, visible};
use anyhow::Result;
use regard::{Element, Error};
use regard_approx::{FeatureMap, LinearAttention};
use std::hint::black_box;

pub(crate) fn measure<E: Element>(
    compared: &BaselineComparison<'_, E>,
    map: FeatureMap,
) -> Result<Row> {
    let BaselineComparison { case, input, plan, .. } = *compared;
    let (machine, (q, k, v)) = (plan.machine(), input.views());
    let attention = LinearAttention::new(map);
    let attention = if case.rules.is_empty() { attention } else { attention.causal() };
    let ours = || -> Result<(), Error> {
        let output = attention.forward(machine, q, k, v)?;
        if compared.goes_back() {
            drop(black_box(attention.backward(machine, q, k, v, &output, input.d_out())?));
        }
        drop(black_box(output));
        Ok(())
    };
    let (seen, flops) = (first_call(case, ours)?, case.flops(0.0));
    let facts = Facts { flops, units: flops, visible: visible(case, plan), seen };
    compared.row(|| drop(ours()), Units::of_vectors::<E>(), facts)
}
