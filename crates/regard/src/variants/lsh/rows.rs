//! Reorders rows of tensors into the bucket order of a round and back.

use super::buckets::Order;
use crate::error::Error;
use crate::kernel::lanes::prefetch_l1;
use crate::machine::Machine;
use crate::machine::simd::{Element, Number};
use crate::plan::grads::Grads;
use crate::plan::output::Output;
use crate::tensor::view::{Inputs, Layout, Shape, Tensor, View};

/// Rows per task.
const ROWS: usize = 64;

/// Gathers rows: row `i` of each head of the result is row `order(batch, head)[i]` of `x`.
pub(super) fn copied<'o, E: Element>(
    machine: Machine,
    x: View<'_, E>,
    order: impl Fn(usize, usize) -> &'o [u32] + Sync,
) -> Result<Tensor<E>, Error> {
    let mut to = zeros(x.shape())?;
    copy(machine, x, &mut to, order);
    Ok(to)
}

fn copy<'o, E: Element>(
    machine: Machine,
    x: View<'_, E>,
    to: &mut Tensor<E>,
    order: impl Fn(usize, usize) -> &'o [u32] + Sync,
) {
    let heads = to.shape().heads;
    let nothing = || ();
    to.view_mut().change(machine.threads, ROWS, nothing, |(), b, mut tile| {
        for head in 0..heads {
            let (x, order, rows) = (x.head(b, head), order(b, head), tile.rows());
            for lane in 0..rows.count {
                if let Some(later) = order.get(rows.row(lane) + PREFETCH_ROWS) {
                    prefetch_l1(x.row(*later as usize));
                }
                let from = x.row(order[rows.row(lane)] as usize);
                tile.update(head, lane).copy_from_slice(from);
            }
        }
    });
}

/// Rows to prefetch ahead. Gathered rows are scattered in memory, and the page table lookup of one takes as long as copying
/// several.
const PREFETCH_ROWS: usize = 8;

/// [`copied`] for an array with entries per row, `[batch, heads, len, any]`.
pub(super) fn numbers<'o, N: Number>(
    machine: Machine,
    Shape { batch, heads, len, .. }: Shape,
    x: &[N],
    order: impl Fn(usize, usize) -> &'o [u32] + Sync,
) -> Result<Vec<N>, Error> {
    let each = x.len() / (batch * heads * len).max(1);
    let x = View::bhsd(x, [batch, heads, len, each])?;
    Ok(copied(machine, x, order)?.into_data())
}

/// [`copied`] for `out`, `lse` and `states` of an output.
pub(super) fn reordered<'o, E: Element>(
    machine: Machine,
    output: &Output<E>,
    order: impl Fn(usize, usize) -> &'o [u32] + Copy + Sync,
) -> Result<Output<E>, Error> {
    let out = copied(machine, output.out.view(), order)?;
    let of_rows = |x| numbers(machine, out.shape(), x, order);
    let (lse, states) = (of_rows(&output.lse)?, of_rows(output.states.as_flattened())?);
    Ok(Output { states: states.as_chunks().0.to_vec(), ..Output::new(out, lse) })
}

/// q, k and v in the bucket order of a round. The buffers are reused in every round.
pub(super) struct Sorted<E>([Tensor<E>; 3]);

impl<E: Element> Sorted<E> {
    /// Allocates buffers of these shapes.
    pub(super) fn new(shapes: [Shape; 3]) -> Result<Self, Error> {
        let [q, k, v] = shapes.map(zeros);
        Ok(Self([q?, k?, v?]))
    }

    /// Gathers the tensors into the bucket order of a round.
    pub(super) fn put(
        &mut self,
        machine: Machine,
        order: &Order,
        (q, k, v): Inputs<'_, E>,
    ) -> Inputs<'_, E> {
        for (to, x) in self.0.iter_mut().zip([q, k, v]).skip(1) {
            copy(machine, x, to, |b, head| order.keys(b, head));
        }
        copy(machine, q, &mut self.0[0], |b, head| order.rows(b, head));
        let [q, k, v] = self.0.each_ref().map(Tensor::view);
        (q, k, v)
    }
}

fn zeros<E: Element>(shape: Shape) -> Result<Tensor<E>, Error> {
    let zeros = vec![E::narrow(E::Num::default()); shape.to_array().iter().product()];
    Tensor::new(zeros, shape, Layout::Bhsd)
}

/// Calls `task(batch, head, i, row)` for each row of each head, in parallel.
fn change<E: Send>(
    machine: Machine,
    x: &mut Tensor<E>,
    task: impl Fn(usize, usize, usize, &mut [E]) + Sync,
) {
    let heads = x.shape().heads;
    x.view_mut().change(
        machine.threads,
        ROWS,
        || (),
        |(), b, mut tile| {
            let rows = tile.rows();
            for (head, lane) in (0..heads).flat_map(|h| (0..rows.count).map(move |i| (h, i))) {
                task(b, head, rows.row(lane), tile.update(head, lane));
            }
        },
    );
}

/// Sums of the gradients of all rounds, added in the order of the rounds.
pub(super) struct Sums<N> {
    q: Tensor<N>,
    k: Tensor<N>,
    v: Tensor<N>,
    scale: f64,
    temperature: f64,
}

impl<N: Number> Sums<N> {
    pub(super) fn new(shapes: [Shape; 3]) -> Result<Self, Error> {
        let [q, k, v] = shapes.map(zeros);
        Ok(Self { q: q?, k: k?, v: v?, scale: 0.0, temperature: 0.0 })
    }

    /// Adds the gradients of a round, which are in its bucket order.
    pub(super) fn add<'o, E: Element<Num = N>>(
        &mut self,
        machine: Machine,
        grads: &Grads<E>,
        order: &'o Order,
        key_places: impl Fn(usize, usize) -> &'o [u32] + Sync,
    ) {
        self.scale += grads.scale;
        self.temperature += grads.temperature;
        let add = |to: &mut Tensor<N>, from: View<'_, E>, of_keys: bool| {
            change(machine, to, |b, head, i, row| {
                let places = if of_keys { key_places(b, head) } else { order.row_places(b, head) };
                let from = from.row(b, head, places[i] as usize);
                row.iter_mut().zip(from).for_each(|(sum, x)| *sum = *sum + x.widen());
            });
        };
        add(&mut self.q, grads.q.view(), false);
        add(&mut self.k, grads.k.view(), true);
        add(&mut self.v, grads.v.view(), true);
    }

    /// Converts the sums to the dtype and layout of the inputs.
    pub(super) fn into_grads<E: Element<Num = N>>(
        self,
        machine: Machine,
        (q, k, v): Inputs<'_, E>,
    ) -> Result<Grads<E>, Error> {
        let narrowed = |like: View<'_, E>, sums: &Tensor<N>| {
            let mut to = Tensor::zeros_like(&like)?;
            let sums = sums.view();
            change(machine, &mut to, |b, head, i, row| {
                let sums = sums.row(b, head, i);
                row.iter_mut().zip(sums).for_each(|(x, sum)| *x = E::narrow(*sum));
            });
            Ok::<_, Error>(to)
        };
        Ok(Grads {
            centres: Vec::new(),
            additive: None,
            q: narrowed(q, &self.q)?,
            k: narrowed(k, &self.k)?,
            v: narrowed(v, &self.v)?,
            scale: self.scale,
            temperature: self.temperature,
            bias: None,
            alibi: Vec::new(),
            relative: Vec::new(),
            sinks: Vec::new(),
            w: None,
        })
    }
}
