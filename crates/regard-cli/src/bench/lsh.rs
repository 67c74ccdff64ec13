//! Attention by hashing, with exact attention over the same tensors as its rival: how much faster is it, and what does it lose?

use super::case::{Case, Pass};
use super::clock::Clock;
use super::input::Input;
use super::limit::{Limit, Units};
use super::report::Row;
use super::{Facts, SLICE, Turns, first_call};
use anyhow::Result;
use regard::{Dims, Element, Error, LshAttention, Plan};
use std::hint::black_box;

/// As [`LshAttention::new`] has them.
const ROUNDS: usize = 8;
const BUCKET_SIZE: usize = 64;
/// Keys of a row whose mass should be found, and rows of a head that are asked.
pub(crate) const RECALL: (usize, usize) = (32, 256);

pub(crate) fn measure<E: Element>(
    (case, input): (&Case, &Input<E>),
    plan: &Plan<'_, E>,
    seconds: f64,
) -> Result<Row> {
    let (machine, (q, k, v)) = (plan.machine(), input.views());
    let lsh = LshAttention::new().rounds(ROUNDS).bucket_size(BUCKET_SIZE);
    let causal = !case.rules.is_empty();
    let lsh = if causal { lsh.causal() } else { lsh };
    let back = case.pass != Pass::Forward;
    let ours = || -> Result<(), Error> {
        let found = lsh.forward(machine, q, k, v)?;
        if back {
            drop(black_box(lsh.backward(machine, (q, k, v), &found, input.d_out())?));
        }
        drop(black_box(found));
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
    let recall = lsh.forward(machine, q, k, v)?.recall(machine, q, k, RECALL)?;
    // Pairs that the rounds look at: the keys of three blocks, or of two.
    let Dims { batch, heads, q_len, k_len, .. } = case.dims;
    let window = (BUCKET_SIZE * if causal { 2 } else { 3 }).min(k_len) as f64;
    let rows = batch as f64 * heads.q as f64 * q_len as f64;
    let flops = case.flops(ROUNDS as f64 * rows * window);
    let clock = Clock::of(machine);
    let limit = Limit::<E>::new(case.bound, machine, Units::of(plan), [&[]; 2]);
    let mut turns = Turns { clock, limit, units: flops, seconds };
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
    let visible = ROUNDS as f64 * window / k_len as f64;
    let row = Row::new(case, machine, &samples, Facts { flops, units: flops, visible, seen })?;
    let (recall_mass, recall_top) = (Some(recall.mass.mean), Some(recall.top.mean));
    Ok(Row { rival: Some("regard exact".into()), recall_mass, recall_top, ..row })
}
