//! Moves rows of tensors into the bucket order of a round and back.

use super::round::Permutation;
use regard::{Element, Error, Layout, Machine, Output, Shape, Tensor, View};
use std::sync::{Mutex, PoisonError};

/// Rows per task.
pub(super) const ROWS: usize = 64;

/// Calls `task([batch, head, row], features)` for each row of a dense tensor, in parallel.
pub(super) fn each_row<T: Send>(
    machine: Machine,
    data: &mut [T],
    (shape, layout): (Shape, Layout),
    task: impl Fn([usize; 3], &mut [T]) + Sync,
) {
    let Shape { heads, len, dim, .. } = shape;
    // Each block is locked once, by its task. There is none if rows have no features.
    let blocks: Vec<_> = data.chunks_mut((ROWS * dim).max(1)).map(Mutex::new).collect();
    machine.run(blocks.len(), nothing, |(), block| {
        let mut rows = blocks[block].lock().unwrap_or_else(PoisonError::into_inner);
        for (i, row) in (block * ROWS..).zip(rows.chunks_exact_mut(dim)) {
            let at = match layout {
                Layout::Bhsd => [i / len / heads, i / len % heads, i % len],
                Layout::Bshd => [i / heads / len, i % heads, i / heads % len],
            };
            task(at, row);
        }
    });
}

/// The scratch of tasks that need none.
pub(super) fn nothing() {}

/// Memory for the elements of a tensor, all 0.
pub(super) fn zeros<E: Element>(shape: Shape) -> Vec<E> {
    vec![E::narrow(E::Num::default()); shape.to_array().iter().product()]
}

/// Gathers rows into `to`: row `i` of each head of the result is row `orders[head].order[i]` of `x`, with heads numbered over
/// all items.
pub(super) fn gather<'t, E: Element>(
    machine: Machine,
    x: View<'_, E>,
    orders: &[Permutation],
    to: &'t mut [E],
) -> Result<View<'t, E>, Error> {
    let shape = x.shape();
    each_row(machine, to, (shape, Layout::Bhsd), |[b, head, i], to| {
        let row = orders[b * shape.heads + head].order[i];
        to.copy_from_slice(x.row(b, head, row as usize));
    });
    View::bhsd(to, shape.to_array())
}

/// [`gather`] for an array with one entry per row; an array without entries stays one.
pub(super) fn gather_entries<T: Copy>(x: &[T], orders: &[Permutation]) -> Vec<T> {
    let len = x.len() / orders.len().max(1);
    let heads = x.chunks_exact(len.max(1)).zip(orders);
    heads.flat_map(|(x, head)| head.order.iter().map(|i| x[*i as usize])).collect()
}

/// Adds rows that [`gather`] has moved to where they came from.
pub(super) fn scatter_add<E: Element>(
    machine: Machine,
    sums: &mut [E::Num],
    x: View<'_, E>,
    orders: &[Permutation],
) {
    let shape = x.shape();
    each_row(machine, sums, (shape, Layout::Bhsd), |[b, head, i], sums| {
        let place = orders[b * shape.heads + head].ranks[i];
        let from = x.row(b, head, place as usize);
        sums.iter_mut().zip(from).for_each(|(sum, x)| *sum = *sum + x.widen());
    });
}

/// Sums `[batch, heads, len, dim]` in the dtype and layout of a tensor.
pub(super) fn narrowed<E: Element>(
    machine: Machine,
    sums: &[E::Num],
    like: View<'_, E>,
) -> Result<Tensor<E>, Error> {
    let (shape, layout) = (like.shape(), like.layout());
    let mut data = zeros(shape);
    each_row(machine, &mut data, (shape, layout), |[b, head, i], row| {
        let at = ((b * shape.heads + head) * shape.len + i) * shape.dim;
        row.iter_mut().zip(&sums[at..]).for_each(|(x, sum)| *x = E::narrow(*sum));
    });
    Tensor::new(data, shape, layout)
}

/// Merges the outputs of rounds, each in the row order given with it.
pub(super) fn merged<E: Element>(
    machine: Machine,
    rounds: &[(Output<E>, Vec<Permutation>)],
    layout: Layout,
) -> Result<Output<E>, Error> {
    let Some((first, _)) = rounds.first() else { return Err(Error::NothingToMerge) };
    let shape = first.out.shape();
    let Shape { heads, len, dim, .. } = shape;
    let rows = first.lse.len();
    // Some rows at a time, so that merging is parallel and no output is reordered as a whole.
    let parts = machine.collect(rows.div_ceil(ROWS), nothing, |(), block| {
        let own = block * ROWS..rows.min((block + 1) * ROWS);
        let shape = Shape { batch: 1, heads: 1, len: own.len(), dim };
        let part = |(output, orders): &(Output<E>, Vec<Permutation>)| {
            let place = |row: usize| row / len * len + orders[row / len].ranks[row % len] as usize;
            let places = own.clone().map(place);
            let mut out = Vec::with_capacity(ROWS * dim);
            places.clone().for_each(|at| out.extend(&output.out.data()[at * dim..][..dim]));
            let lse = places.clone().map(|at| output.lse[at]).collect();
            let mut part = Output::new(Tensor::new(out, shape, Layout::Bhsd)?, lse);
            part.states = places.filter_map(|at| output.states.get(at).copied()).collect();
            Ok(part)
        };
        let parts = rounds.iter().map(part).collect::<Result<Vec<_>, Error>>()?;
        Output::merge(machine.threads(1), &parts)
    });
    let parts = parts.into_iter().collect::<Result<Vec<_>, Error>>()?;
    let mut data = zeros(shape);
    each_row(machine, &mut data, (shape, layout), |[b, head, i], to| {
        let row = (b * heads + head) * len + i;
        to.copy_from_slice(&parts[row / ROWS].out.data()[row % ROWS * dim..][..dim]);
    });
    let lse = parts.iter().flat_map(|part| &part.lse).copied().collect();
    let mut merged = Output::new(Tensor::new(data, shape, layout)?, lse);
    merged.states = parts.iter().flat_map(|part| &part.states).copied().collect();
    Ok(merged)
}
