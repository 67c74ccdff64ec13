//! A call of the delta rule: one task for each state head of each item, which goes through its chunks in order.

use super::chunk::{BackScratch, CHUNK, Call, GradRows, Place, Scratch};
use super::{DeltaGrads, DeltaInputs};
use crate::matrix::rows_mut;
use crate::tasks::run_each;
use ndarray::{ArrayViewMut2, ArrayViewMut3, Axis};
use regard::{Element, Error, Layout, Machine, Number, Shape, Tensor, View};
use std::ops::Range;

/// The rows `[len, dim]` of each head of each item.
fn heads<T>(tensor: &mut Tensor<T>) -> Result<Vec<ArrayViewMut2<'_, T>>, Error> {
    let (shape, layout) = (tensor.shape(), tensor.layout());
    let Shape { batch, heads, len, dim } = shape;
    let offsets = tensor.offsets().map(<[usize]>::to_vec);
    let mut data = tensor.data_mut();
    let mut all = Vec::new();
    for item in 0..batch {
        let len = offsets.as_ref().map_or(len, |offsets| offsets[item + 1] - offsets[item]);
        let (own, others) = data.split_at_mut(heads * len * dim);
        data = others;
        let own = match layout {
            Layout::Bshd => ArrayViewMut3::from_shape([len, heads, dim], own)
                .map(|own| own.permuted_axes([1, 0, 2])),
            Layout::Bhsd => ArrayViewMut3::from_shape([heads, len, dim], own),
        };
        let mut own = own.map_err(|_| Error::ShapeOverflow { shape: shape.to_array() })?;
        for _ in 0..heads {
            let (head, others) = own.split_at(Axis(0), 1);
            own = others;
            all.push(head.index_axis_move(Axis(0), 0));
        }
    }
    Ok(all)
}

/// The rows of the query heads of each state head.
fn grouped<T>(heads: Vec<T>, count: usize) -> Vec<Vec<T>> {
    let mut heads = heads.into_iter();
    let groups = heads.len() / count.max(1);
    (0..groups).map(|_| heads.by_ref().take(count).collect()).collect()
}

/// Sums over the state heads that share a head of `like`.
fn sum_of_shared<N: Number, E: Element<Num = N>>(
    machine: Machine,
    from: &Tensor<N>,
    like: &View<'_, E>,
) -> Result<Tensor<E>, Error> {
    let count = like.shape().heads;
    let group = from.shape().heads.checked_div(count).unwrap_or(0);
    let mut sums = Tensor::zeros(like, like.shape().dim)?;
    let from = from.view();
    run_each(
        machine,
        heads(&mut sums)?,
        || Vec::new(),
        |sum, task, to| {
            let (item, first) = (task / count, task % count * group);
            for (i, mut to) in to.rows_mut().into_iter().enumerate() {
                sum.clear();
                sum.extend(from.row(item, first, i));
                for head in first + 1..first + group {
                    sum.iter_mut()
                        .zip(from.row(item, head, i))
                        .for_each(|(sum, x)| *sum = *sum + *x);
                }
                to.iter_mut().zip(&*sum).for_each(|(to, sum)| *to = E::narrow(*sum));
            }
        },
    );
    Ok(sums)
}

/// Gradients with those by q and k in a type of their own.
struct Grads<E: Element, F> {
    q: Tensor<F>,
    k: Tensor<F>,
    v: Tensor<E>,
    g: Option<Tensor<E::Num>>,
    beta: Option<Tensor<E::Num>>,
    state: Tensor<E::Num>,
}

/// The gradients of a state head, of all its positions.
struct HeadGrads<'t, E: Element, F> {
    rows: GradRows<'t, E, F>,
    state: ArrayViewMut2<'t, E::Num>,
}

impl<N: Number, E: Element<Num = N>, F> Grads<E, F> {
    fn heads(&mut self, readers: usize) -> Result<Vec<HeadGrads<'_, E, F>>, Error> {
        let q = grouped(heads(&mut self.q)?, readers);
        let (k, v, state) = (heads(&mut self.k)?, heads(&mut self.v)?, heads(&mut self.state)?);
        let mut g = self.g.as_mut().map(heads).transpose()?.map(Vec::into_iter);
        let mut beta = self.beta.as_mut().map(heads).transpose()?.map(Vec::into_iter);
        let of_head = |(((q, k), v), state)| {
            let g = g.as_mut().and_then(Iterator::next);
            let beta = beta.as_mut().and_then(Iterator::next);
            HeadGrads { rows: GradRows { q, k, v, g, beta }, state }
        };
        Ok(q.into_iter().zip(k).zip(v).zip(state).map(of_head).collect())
    }
}

impl<N: Number, E: Element<Num = N>> Call<'_, E> {
    fn place(&self, task: usize) -> Place {
        let states = self.sizes.states;
        Place { item: task / states, head: task % states }
    }

    fn len(&self, item: usize) -> usize {
        let offsets = self.inputs.v.offsets();
        offsets.map_or(self.sizes.len, |offsets| offsets[item + 1] - offsets[item])
    }

    fn chunks(
        &self,
        item: usize,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
        let len = self.len(item);
        (0..len.div_ceil(CHUNK)).map(move |i| i * CHUNK..((i + 1) * CHUNK).min(len))
    }

    /// Whether there is nothing to compute, whatever the number of heads.
    fn is_empty(&self) -> bool {
        self.sizes.batch == 0 || self.sizes.len == 0 || self.sizes.states == 0
    }

    /// Computes rows. `state` holds the states that heads start from, and gets those that they end with.
    pub(super) fn forward(&self, state: &mut Tensor<N>) -> Result<Tensor<E>, Error> {
        let DeltaInputs { q, v, .. } = &self.inputs;
        let like = if self.sizes.readers() > 1 { q } else { v };
        let mut out = Tensor::zeros(like, self.sizes.v_dim)?;
        if self.is_empty() {
            return Ok(out);
        }
        let outs = grouped(heads(&mut out)?, self.sizes.readers());
        let own: Vec<_> = heads(state)?.into_iter().zip(outs).collect();
        run_each(
            self.machine,
            own,
            || Scratch::new(self),
            |scratch, task, (state, outs)| {
                let at = self.place(task);
                if self.len(at.item) == 1 {
                    return scratch.step(self, at, state.view_mut(), outs);
                }
                for positions in self.chunks(at.item) {
                    scratch.solve(self, (at, positions.clone()), state.view());
                    let mut outs: Vec<_> =
                        outs.iter_mut().map(|out| rows_mut(out, positions.clone())).collect();
                    scratch.store_outputs(&mut outs);
                    scratch.advance(state.view_mut());
                }
            },
        );
        Ok(out)
    }

    /// The gradients; `d_state` is that by the final state.
    pub(super) fn backward(
        &self,
        d_out: View<'_, E>,
        d_state: Tensor<N>,
    ) -> Result<DeltaGrads<E>, Error> {
        let (sizes, DeltaInputs { q, k, v, .. }) = (self.sizes, &self.inputs);
        if sizes.q_heads >= sizes.states && sizes.k_heads == sizes.states {
            let own = [Tensor::<E>::zeros(q, sizes.dim)?, Tensor::zeros(k, sizes.dim)?];
            let Grads { q, k, v, g, beta, state } = self.backward_into(d_out, d_state, own)?;
            return Ok(DeltaGrads { q, k, v, g, beta, state });
        }
        let each = || Tensor::<N>::zeros(v, sizes.dim);
        let own =
            [if sizes.readers() > 1 { Tensor::zeros(q, sizes.dim) } else { each() }?, each()?];
        let Grads { q: d_q, k: d_k, v, g, beta, state } =
            self.backward_into(d_out, d_state, own)?;
        let (q, k) = (sum_of_shared(self.machine, &d_q, q)?, sum_of_shared(self.machine, &d_k, k)?);
        Ok(DeltaGrads { q, k, v, g, beta, state })
    }

    /// The gradients, those by q and k for each head that reads or writes a state.
    fn backward_into<F: Element<Num = N>>(
        &self,
        d_out: View<'_, E>,
        state: Tensor<N>,
        [q, k]: [Tensor<F>; 2],
    ) -> Result<Grads<E, F>, Error> {
        let DeltaInputs { v, g, beta, .. } = &self.inputs;
        let like =
            |x: &Option<View<'_, N>>| x.map(|x| Tensor::zeros(&x, x.shape().dim)).transpose();
        let v = Tensor::zeros(v, self.sizes.v_dim)?;
        let mut grads = Grads { q, k, v, g: like(g)?, beta: like(beta)?, state };
        if self.is_empty() {
            return Ok(grads);
        }
        let own = grads.heads(self.sizes.readers())?;
        run_each(
            self.machine,
            own,
            || BackScratch::new(self),
            |scratch, task, head| {
                self.backward_head(scratch, self.place(task), &d_out, head);
            },
        );
        Ok(grads)
    }

    fn backward_head<F: Element<Num = N>>(
        &self,
        scratch: &mut BackScratch<N>,
        at: Place,
        d_out: &View<'_, E>,
        head: &mut HeadGrads<'_, E, F>,
    ) {
        scratch.load_states(self, at, self.chunks(at.item));
        scratch.state.assign(&head.state);
        for (i, positions) in self.chunks(at.item).enumerate().rev() {
            let GradRows { q, k, v, g, beta } = &mut head.rows;
            let rows = GradRows {
                q: q.iter_mut().map(|q| rows_mut(q, positions.clone())).collect(),
                k: rows_mut(k, positions.clone()),
                v: rows_mut(v, positions.clone()),
                g: g.as_mut().map(|g| rows_mut(g, positions.clone())),
                beta: beta.as_mut().map(|beta| rows_mut(beta, positions.clone())),
            };
            scratch.chunk(self, (at, positions), (i, d_out), rows);
        }
        head.state.assign(&scratch.state);
    }
}
