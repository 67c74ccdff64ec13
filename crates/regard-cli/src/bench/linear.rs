//! Linear attention, with exact attention over the same tensors as its rival: from which length on is it faster?

use super::case::{Case, Pass};
use super::clock::Clock;
use super::input::Input;
use super::limit::{Limit, Units};
use super::report::Row;
use super::{Facts, SLICE, Turns, first_call, visible};
use anyhow::Result;
use regard::{Element, Error, FeatureMap, LinearAttention, Plan};
use std::hint::black_box;

pub(crate) fn measure<E: Element>(
    (case, input): (&Case, &Input<E>),
    plan: &Plan<'_, E>,
    map: FeatureMap,
    seconds: f64,
) -> Result<Row> {
    let (machine, (q, k, v)) = (plan.machine(), input.views());
    let attention = LinearAttention::new(map);
    let attention = if case.rules.is_empty() { attention } else { attention.causal() };
    let back = case.pass != Pass::Forward;
    let ours = || -> Result<(), Error> {
        let output = attention.forward(machine, q, k, v)?;
        if back {
            drop(black_box(attention.backward(machine, q, k, v, &output, input.d_out())?));
        }
        drop(black_box(output));
        Ok(())
    };
    let exact = || -> Result<(), Error> {
        let output = plan.forward(q, k, v)?;
        if back {
            drop(black_box(plan.backward(q, k, v, &output, input.d_out())?));
        }
        drop(black_box(output));
        Ok(())
    };
    let seen = first_call(case, ours)?;
    let flops = case.flops(0.0);
    let (units, nothing) = (Units::of_vectors::<E>(), [&[] as &[E]; 2]);
    let limit = Limit::new(case.bound, machine, units, nothing);
    let clock = Clock::of(machine);
    let mut turns = Turns { clock, limit, units: flops, seconds };
    exact()?;
    // For as long as a slice, as ours.
    let rival = || -> Result<f64> {
        let (mut calls, mut total) = (0.0, 0.0);
        while total < SLICE {
            total += clock.time(|| drop(exact()));
            calls += 1.0;
        }
        Ok(total / calls)
    };
    let samples = turns.take(|| drop(ours()), Some(rival))?;
    let facts = Facts { flops, units: flops, visible: visible(case, plan), seen };
    let row = Row::new(case, machine, &samples, facts)?;
    Ok(Row { rival: Some("regard exact".into()), ..row })
}
