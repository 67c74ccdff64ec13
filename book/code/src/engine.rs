//! The engine, behind the same door as the other rungs.

use crate::backward::Grads;
use crate::{AttentionOutput, Head};
use regard::plan::OutputView;
use regard::{Error, Machine, Mask, Plan, Problem, View};

// ANCHOR: attend
/// Attention by `regard`, on as many threads as the machine that is given has.
pub fn attend(head: &Head<'_>, machine: Machine) -> Result<AttentionOutput, Error> {
    let (q, k, v) = views(head)?;
    let output = plan(head, machine)?.forward(q, k, v)?;
    Ok(AttentionOutput { out: output.out.into_data(), lse: output.lse })
}

/// The gradients by `regard`.
pub fn backward(
    head: &Head<'_>,
    attended: &AttentionOutput,
    d_out: &[f32],
    machine: Machine,
) -> Result<Grads, Error> {
    let (q, k, v) = views(head)?;
    let rows = |x| View::matrix(x, [head.q_len(), head.v_dim]);
    let out = rows(&attended.out)?;
    let output =
        OutputView { out, lse: &attended.lse, states: &[], entropy: None, selection: None };
    let grads = plan(head, machine)?.backward(q, k, v, output, rows(d_out)?)?;
    Ok(Grads { q: grads.q.into_data(), k: grads.k.into_data(), v: grads.v.into_data() })
}

type Views<'a> = (View<'a, f32>, View<'a, f32>, View<'a, f32>);

/// Borrows of what there is; nothing is copied.
fn views<'a>(head: &Head<'a>) -> Result<Views<'a>, Error> {
    let q = View::matrix(head.q, [head.q_len(), head.dim])?;
    let k = View::matrix(head.k, [head.k_len(), head.dim])?;
    Ok((q, k, View::matrix(head.v, [head.k_len(), head.v_dim])?))
}

fn plan<'a>(head: &Head<'a>, machine: Machine) -> Result<Plan<'a, f32>, Error> {
    let (q, k, v) = views(head)?;
    let mask = if head.causal { Mask::causal() } else { Mask::full() };
    Plan::new(Problem::new(&q, &k, &v).mask(mask), machine)
}
// ANCHOR_END: attend
