//! Few queries over keys that are spread over ranks.

use super::ContextError;
use super::shards::share;
use crate::ranks::{Ranks, gather};
use bytemuck::Pod;
use regard::problem::Dims;
use regard::{Element, Error, Output, Plan, View};

/// Attention of few rows, which every rank has, over keys and values of which every rank has a run: those of rank 0 first, then those
/// of rank 1, and so on. The plan is that of all keys. Every rank returns the whole output.
///
/// With at most 128 rows and at least 2048 keys, the engine splits keys into parts of 1024 ([`Plan::key_step`]). Runs must then begin at
/// multiples of that, and the bits are those of `plan.forward` in one process, for any number of ranks: the states of all parts are
/// gathered and merged in order. With fewer keys or more rows, runs may begin anywhere, and results are those of one process up to rounding.
///
/// Cost: `rows heads.q (v_dim + 4)` numbers for each part, however long the sequence is.
pub fn decode<E: Element<Num: Pod>>(
    ranks: &dyn Ranks,
    plan: &Plan<'_, E>,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
) -> Result<Output<E>, ContextError> {
    let Dims { batch, heads, q_len, k_len, q_dim, qk_dim, v_dim } = plan.problem().dims();
    let len = k.shape().len;
    share("q", [batch, heads.q, q_len, q_dim], &q)?;
    share("k", [batch, heads.kv, len, qk_dim], &k)?;
    share("v", [batch, heads.kv, len, v_dim], &v)?;
    let lens = gather(ranks, &[len], &vec![1; ranks.count()])?;
    let total = lens.iter().sum();
    Error::unless_same("keys", ("the plan", k_len), ("all ranks together", total))?;
    // All ranks look at the runs of all: either every one of them goes on, or none.
    let mut first = 0;
    let mut runs = Vec::new();
    for len in lens {
        runs.push(plan.part(0..q_len, first..first + len)?);
        first += len;
    }
    let partial = runs[ranks.rank()].forward_partial(q, k, v)?;
    let counts: Vec<usize> = runs.iter().map(Plan::partial_len).collect();
    let states = plan.partial(gather(ranks, partial.data(), &counts)?)?;
    Ok(plan.finish(q, &states)?)
}
