//! The backward pass over ranks.

use super::shards::share;
use super::{ContextError, Shards, entries, interleaved, rows};
use crate::ranks::Ranks;
use crate::tree::{Node, Tree};
use bytemuck::Pod;
use regard::plan::OutputView;
use regard::problem::Dims;
use regard::{Element, Layout, Output, Plan, Shape, Tensor, View};

/// The gradients of a loss by this rank's rows of q, k and v.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ContextGrads<E: Element> {
    /// By q.
    pub q: Tensor<E>,
    /// By k.
    pub k: Tensor<E>,
    /// By v.
    pub v: Tensor<E>,
}

/// The gradients by this rank's rows of q, k and v, from what [`attend`](super::attend) returned for them and the gradient by its `out`.
///
/// Each rank computes what its rows say of all keys and values. These sums over rows go to the ranks that have the keys, and are added
/// there in `f32`, in the order of ranks as a [`Tree`]. With `f16` and `bf16` each rank's sums are rounded to that type before. Gradients of options
/// (scale, sinks, ..) are not returned.
///
/// Cost: keys and values are gathered again, and gradients of all of them, `2 n heads.kv dim` numbers in `f32`, are sent.
pub fn attend_backward<E: Element<Num = f32> + Pod>(
    ranks: &dyn Ranks,
    plan: &Plan<'_, E>,
    (q, k, v): (View<'_, E>, View<'_, E>, View<'_, E>),
    output: &Output<E>,
    d_out: View<'_, E>,
) -> Result<ContextGrads<E>, ContextError> {
    let (shards, rank) = (Shards::new(plan, ranks.count())?, ranks.rank());
    shards.check(plan, rank, [&q, &k, &v])?;
    let Dims { batch, heads, k_len, v_dim, .. } = plan.problem().dims();
    let expected = [batch, heads.q, shards.len(rank), v_dim];
    share("the output", expected, &output.out.view())?;
    share("the gradient of the output", expected, &d_out)?;
    let (k, v) = (shards.gather(ranks, &k)?, shards.gather(ranks, &v)?);
    let mut d_q = Vec::new();
    let mut sums = [&k, &v].map(|x| vec![0f32; x.data().len()]);
    for (chunk, own) in shards.chunks(rank).into_iter().zip(shards.own_rows(rank)) {
        let [q, out, d_out] = [&q, &output.out.view(), &d_out].map(|x| rows(x, own.clone()));
        let (q, out, d_out) = (q?, out?, d_out?);
        let lse = entries(&output.lse, expected[2], &own);
        let states = entries(&output.states, expected[2], &own);
        let saved = OutputView {
            out: out.view(),
            lse: &lse,
            states: &states,
            entropy: None,
            selection: None,
        };
        let part = plan.part(chunk, 0..k_len)?;
        let grads = part.backward(q.view(), k.view(), v.view(), saved, d_out.view())?;
        for (sum, grad) in sums.iter_mut().zip([&grads.k, &grads.v]) {
            sum.iter_mut().zip(grad.data()).for_each(|(sum, x)| *sum += x.widen());
        }
        d_q.push(grads.q.into_data());
    }
    let d_q = interleaved(batch * heads.q, [&d_q[0], &d_q[1]]);
    let q = Tensor::new(d_q, q.shape(), Layout::Bhsd)?;
    let [k, v] = [k.shape(), v.shape()].map(|whole| Shape { len: shards.len(rank), ..whole });
    let [d_k, d_v] = to_owners(ranks, &shards, sums, [k, v])?;
    Ok(ContextGrads { q, k: d_k, v: d_v })
}

/// The sums over all ranks of what each says of all rows of two tensors: those of the rows of this rank.
fn to_owners<E: Element<Num = f32>>(
    ranks: &dyn Ranks,
    shards: &Shards,
    sums: [Vec<f32>; 2],
    own: [Shape; 2],
) -> Result<[Tensor<E>; 2], ContextError> {
    let (mut send, mut to) = (Vec::new(), Vec::new());
    for rank in 0..shards.count() {
        let before = send.len();
        for (sum, Shape { batch, heads, dim, .. }) in sums.iter().zip(own) {
            let whole =
                View::bhsd(sum, [batch, heads, sum.len() / (batch * heads * dim).max(1), dim])?;
            send.extend_from_slice(shards.take(rank, &whole)?.data());
        }
        to.push((send.len() - before) * size_of::<f32>());
    }
    drop(sums);
    let lens = own.map(|Shape { batch, heads, len, dim }| batch * heads * len * dim);
    let each = lens[0] + lens[1];
    let mut received = vec![0f32; each * shards.count()];
    let from = vec![each * size_of::<f32>(); shards.count()];
    ranks.exchange(
        bytemuck::cast_slice(&send),
        &to,
        bytemuck::cast_slice_mut(&mut received),
        &from,
    )?;
    let mut tree = Tree::default();
    for rank in 0..shards.count() {
        tree.push(Node { start: rank, size: 1 }, received[rank * each..(rank + 1) * each].to_vec());
    }
    let total = tree.sum().unwrap_or_default();
    let (k, v) = total.split_at(lens[0]);
    let tensor = |x: &[f32], shape| {
        Tensor::new(x.iter().map(|x| E::narrow(*x)).collect(), shape, Layout::Bhsd)
    };
    Ok([tensor(k, own[0])?, tensor(v, own[1])?])
}
