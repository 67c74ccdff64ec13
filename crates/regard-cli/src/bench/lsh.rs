//! Attention by hashing: how much faster than exact attention is it, and what does it lose?

use super::compared::BaselineComparison;
use super::report::Row;
use super::roofline_loop::Units;
use super::{Facts, first_call};
use anyhow::Result;
use regard::problem::Dims;
use regard::{Element, Error};
use regard_approx::LshAttention;
use std::hint::black_box;

/// As few rounds as keep nine tenths of the mass that is asked for, at 65,536 keys; 8 rounds of 64 keep more and take a third
/// longer.
const ROUNDS: usize = 6;
const BUCKET_SIZE: usize = 80;
/// Keys of a row whose mass should be found.
const TOP: usize = 32;
/// Rows of a head that are asked.
const ASKED: usize = 256;

pub(crate) fn measure<E: Element>(compared: &BaselineComparison<'_, E>) -> Result<Row> {
    let BaselineComparison { case, input, plan, .. } = *compared;
    let (machine, (q, k, v)) = (plan.machine(), input.views());
    let lsh = LshAttention::new().rounds(ROUNDS).bucket_size(BUCKET_SIZE);
    let causal = !case.rules.is_empty();
    let lsh = if causal { lsh.causal() } else { lsh };
    let ours = || -> Result<(), Error> {
        let found = lsh.forward(machine, q, k, v)?;
        if compared.goes_back() {
            drop(black_box(lsh.backward(machine, q, k, v, &found, input.d_out())?));
        }
        drop(black_box(found));
        Ok(())
    };
    let seen = first_call(case, ours)?;
    let recall = lsh.forward(machine, q, k, v)?.recall(machine, q, k, TOP, ASKED)?;
    // Pairs that the rounds look at: the keys of three blocks, or of two.
    let Dims { batch, heads, q_len, k_len, .. } = case.dims;
    let window = (BUCKET_SIZE * if causal { 2 } else { 3 }).min(k_len) as f64;
    let rows = batch as f64 * heads.q as f64 * q_len as f64;
    let flops = case.flops(ROUNDS as f64 * rows * window);
    let visible = ROUNDS as f64 * window / k_len as f64;
    let facts = Facts { flops, units: flops, visible, seen };
    let row = compared.row(|| drop(ours()), Units::of(plan), facts)?;
    Ok(Row { recall_mass: Some(recall.mass.mean), recall_top: Some(recall.top.mean), ..row })
}
