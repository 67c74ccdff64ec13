//! Rows of tensors in the order of a round, and back.

use super::buckets::Order;
use crate::element::{Element, Number};
use crate::error::Error;
use crate::grads::Grads;
use crate::machine::Machine;
use crate::output::Output;
use crate::reference::Inputs;
use crate::view::{Layout, Shape, Tensor, View};

/// Rows that a task takes at a time.
const ROWS: usize = 64;

/// Row `i` of each head is row `order(batch, head)[i]` of the given one.
pub(super) fn copied<'o, E: Element>(
    machine: Machine,
    x: View<'_, E>,
    order: impl Fn(usize, usize) -> &'o [u32] + Sync,
) -> Result<Tensor<E>, Error> {
    let shape = x.shape();
    let zeros = vec![E::narrow(E::Num::default()); shape.to_array().iter().product()];
    let mut to = Tensor::new(zeros, shape, Layout::Bhsd)?;
    change(machine, &mut to, |b, head, i, row| {
        row.copy_from_slice(x.row(b, head, order(b, head)[i] as usize));
    });
    Ok(to)
}

/// The same for numbers of each row, `[batch, heads, len, any]`.
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

/// The same for all that is known of the rows.
pub(super) fn reordered<'o, E: Element>(
    machine: Machine,
    output: &Output<E>,
    order: impl Fn(usize, usize) -> &'o [u32] + Copy + Sync,
) -> Result<Output<E>, Error> {
    let out = copied(machine, output.out.view(), order)?;
    let of_rows = |x| numbers(machine, out.shape(), x, order);
    let (lse, states) = (of_rows(&output.lse)?, of_rows(output.states.as_flattened())?);
    Ok(Output { lse, states: states.as_chunks().0.to_vec(), out, entropy: None })
}

/// q, k and v in the order of a order.
pub(super) fn sorted<E: Element>(
    machine: Machine,
    order: &Order,
    (q, k, v): Inputs<'_, E>,
) -> Result<(Tensor<E>, Tensor<E>, Tensor<E>), Error> {
    let keys = |x| copied(machine, x, |b, head| order.keys(b, head));
    let q = copied(machine, q, |b, head| order.rows(b, head))?;
    Ok((q, keys(k)?, keys(v)?))
}

/// Hands each row of each head to a task: `task(batch, head, i, row)`.
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

/// The gradients of all rounds so far, added in their order.
pub(super) struct Sums<N> {
    q: Tensor<N>,
    k: Tensor<N>,
    v: Tensor<N>,
    scale: f64,
    temperature: f64,
}

impl<N: Number> Sums<N> {
    /// Of tensors of these shapes.
    pub(super) fn new(shapes: [Shape; 3]) -> Result<Self, Error> {
        let zeros = |shape: Shape| {
            let data = vec![N::default(); shape.to_array().iter().product()];
            Tensor::new(data, shape, Layout::Bhsd)
        };
        let [q, k, v] = shapes.map(zeros);
        Ok(Self { q: q?, k: k?, v: v?, scale: 0.0, temperature: 0.0 })
    }

    /// Adds those of a round, which are in its order.
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

    /// In the type and layout of the tensors.
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
