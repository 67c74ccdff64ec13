//! The gradients of a call: what is asked for, and which tasks make it.

use crate::backward::{
    Back, Backward, ByBias, ByKeys, ByProjection, Join, OPTIONS, Parts, Rows, Scratch, Target,
};
use crate::cells::CELL;
use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::RowTile;
use crate::output::Output;
use crate::plan::{Plan, same_shape};
use crate::problem::Dims;
use crate::relative::RelativeBias;
use crate::run::run;
use crate::score::Similarity;
use crate::view::{self, Layout, Shape, Tensor, Unwritten, View, ViewMut};
use crate::walk::Call;
use std::ops::Range;

/// What a loss says of the outputs: its gradients by them.
#[derive(Clone, Copy, Debug)]
pub struct Upstream<'a, E: Element> {
    out: View<'a, E>,
    lse: Option<&'a [E::Num]>,
    entropy: Option<&'a [E::Num]>,
    bias: bool,
}

impl<'a, E: Element> Upstream<'a, E> {
    /// The gradient by `out`, `[batch, heads.q, q_len, v_dim]`.
    #[must_use]
    pub fn new(d_out: View<'a, E>) -> Self {
        Self { out: d_out, lse: None, entropy: None, bias: false }
    }

    /// The gradient by `lse` too, `[batch, heads.q, q_len]`. Rows that see nothing have none.
    #[must_use]
    pub fn lse(self, d_lse: &'a [E::Num]) -> Self {
        Self { lse: Some(d_lse), ..self }
    }

    /// The gradient by `entropy` too, `[batch, heads.q, q_len]`: to reward or punish spread attention. The output must
    /// have the entropies, so the problem must have asked for them.
    #[must_use]
    pub fn entropy(self, d_entropy: &'a [E::Num]) -> Self {
        Self { entropy: Some(d_entropy), ..self }
    }

    /// Asks for the gradient of the dense bias, which costs two more products for each pair; a bias that is not learned
    /// needs none.
    #[must_use]
    pub fn with_bias(self) -> Self {
        Self { bias: true, ..self }
    }
}

impl<'a, E: Element> From<View<'a, E>> for Upstream<'a, E> {
    fn from(d_out: View<'a, E>) -> Self {
        Self::new(d_out)
    }
}

/// The gradients of a loss by everything that attention depends on; empty where an option is not in use.
#[derive(Clone, Debug, PartialEq)]
pub struct Grads<E: Element> {
    /// By q, in its shape and layout.
    pub q: Tensor<E>,
    /// By k, in its shape and layout.
    pub k: Tensor<E>,
    /// By v, in its shape and layout.
    pub v: Tensor<E>,
    /// By the scale after the temperature, the number that [`Problem::scale`](crate::Problem::scale) tells.
    pub scale: f64,
    /// By the temperature.
    pub temperature: f64,
    /// By the dense bias, in its own shape, if it was asked for: summed over the axes it is broadcast along.
    pub bias: Option<Tensor<E::Num>>,
    /// By the ALiBi slopes, `[heads.q]`.
    pub alibi: Vec<E::Num>,
    /// By the table of the relative bias, `[buckets, heads.q]`.
    pub relative: Vec<E::Num>,
    /// By the sinks, `[heads.q]`.
    pub sinks: Vec<E::Num>,
    /// By `W` of `Similarity::General`, in its own shape.
    pub w: Option<Tensor<E::Num>>,
}

/// Tasks that the keys of an item make, where there are enough of them: what a few heads need to fill many threads.
const TASKS: usize = 8;
/// Keys of a task, at least: the cost of a part of `d_q` is that of about 20 keys.
const TASK_KEYS: usize = 512;

impl<E: Element> Plan<'_, E> {
    /// The gradients of everything, from the inputs and output of [`forward`](Self::forward) and the gradient of a loss
    /// by that output: a [`View`] of the gradient by `out`, or an [`Upstream`] that says more.
    ///
    /// The weights are computed again, tile by tile, so memory stays linear in the length. The same bits for any number
    /// of threads; rows that see nothing get 0.
    pub fn backward<'b>(
        &self,
        q: View<'b, E>,
        k: View<'b, E>,
        v: View<'b, E>,
        output: &'b Output<E>,
        upstream: impl Into<Upstream<'b, E>>,
    ) -> Result<Grads<E>, Error> {
        let upstream = upstream.into();
        self.check_inputs(&q, &k, &v)?;
        let shape = self.out_shape();
        same_shape("the output", shape, output.out.shape())?;
        same_shape("the gradient of the output", shape, upstream.out.shape())?;
        let rows = shape.batch * shape.heads * shape.len;
        Error::unless_one_each_row("lse", rows, output.lse.len())?;
        let rest = output.lse_rest.len();
        Error::unless_one_each_row("lse_rest", if rest == 0 { 0 } else { rows }, rest)?;
        let d_lse = upstream.lse.map_or(rows, <[_]>::len);
        Error::unless_one_each_row("the gradient of lse", rows, d_lse)?;
        let entropy = match (&output.entropy, upstream.entropy) {
            (Some(entropy), Some(d_entropy)) => {
                Error::unless_one_each_row("entropy", rows, entropy.len())?;
                Error::unless_one_each_row("the gradient of entropy", rows, d_entropy.len())?;
                Some([&entropy[..], d_entropy])
            }
            (None, Some(_)) => return Err(Error::NoEntropy),
            (_, None) => None,
        };
        let new = |view: &View<'_, E>| Unwritten::new(view.shape(), view.layout());
        let (mut d_q, mut d_k, mut d_v) = (new(&q)?, new(&k)?, new(&v)?);
        let mut sums = Sums::new(self);
        let call = Call { problem: self.problem(), q, k, v };
        let (out, d_out, d_lse) = (output.out.view(), upstream.out, upstream.lse);
        let (lse, lse_rest) = (&output.lse[..], &output.lse_rest[..]);
        let back = Back { call, out, d_out, lse, lse_rest, d_lse, entropy };
        self.compute_grads(back, [&d_q.view()?, &d_k.view()?, &d_v.view()?], &mut sums)?;
        if let Some(bias) = self.problem().score.bias.filter(|_| upstream.bias) {
            sums.bias = Some(self.compute_bias_grads(back, bias.shape())?);
        }
        // SAFETY: `compute_grads` writes every row of every head and item of all three.
        let [q, k, v] = unsafe { [d_q.written(), d_k.written(), d_v.written()] };
        Ok(sums.into_grads(self, [q, k, v]))
    }

    fn w_shape(&self) -> Option<Shape> {
        match self.problem().similarity {
            Similarity::General(w) => Some(w.shape()),
            _ => None,
        }
    }

    /// Keys that are one task's.
    fn key_parts(&self) -> Vec<Range<usize>> {
        let Dims { heads, k_len, .. } = self.problem().dims();
        // Of one item's sizes alone, like all that the order of sums depends on.
        let parts = (k_len / TASK_KEYS).clamp(1, TASKS.div_ceil(heads.kv.max(1)));
        let each = k_len.div_ceil(parts).next_multiple_of(CELL).max(1);
        (0..k_len.max(1)).step_by(each).map(|first| first..(first + each).min(k_len)).collect()
    }

    fn compute_grads(
        &self,
        back: Back<'_, E>,
        [d_q, d_k, d_v]: [&ViewMut<'_, E>; 3],
        sums: &mut Sums<E::Num>,
    ) -> Result<(), Error> {
        let (problem, machine) = (self.problem(), self.machine());
        let Dims { batch, heads, q_len, qk_dim, .. } = problem.dims();
        let (key_parts, ways) = (self.key_parts(), self.ways());
        let slots = key_parts.len() * ways.len();
        let buckets = problem.score.relative.as_ref().map_or(0, RelativeBias::buckets);
        // Parts are kept of as many items at a time as fill the threads.
        let w = self.w_shape();
        let parted = slots > 1 || w.is_some();
        let tasks = heads.kv * key_parts.len();
        let wave = (4 * machine.threads).div_ceil(tasks.max(1));
        let wave = if parted || buckets > 0 { wave.min(batch) } else { batch };
        let saved = [wave, heads.q * slots, q_len, qk_dim + OPTIONS];
        let mut room = vec![E::Num::default(); if parted { saved.iter().product() } else { 0 }];
        let tables = [wave, heads.q * key_parts.len(), 1, buckets];
        let mut table_room = vec![0.0; tables.iter().product()];
        let options = ViewMut::bhsd(&mut sums.options, [batch, heads.q, q_len, OPTIONS])?;
        let sinks = ViewMut::bhsd(&mut sums.sinks, [batch, heads.q, q_len, 1]).ok();
        let served = heads.q.checked_div(heads.kv).unwrap_or(0);
        let all_rows = RowTile { first: 0, step: 1, count: q_len };
        for first in (0..batch).step_by(wave.max(1)) {
            let items = wave.min(batch - first);
            table_room.fill(0.0);
            let partial = if parted { Some(ViewMut::bhsd(&mut room, saved)?) } else { None };
            let by_table = ViewMut::bhsd(&mut table_room, tables)?;
            let longest = key_parts.iter().map(Range::len).max().unwrap_or(0);
            run(
                machine.threads,
                items * tasks,
                || Scratch::new(problem, self.rows, longest),
                |scratch, i| {
                    // Early keys first: a causal mask shows them to the most rows.
                    let (item, kv_head) = (i / tasks, i / key_parts.len() % heads.kv);
                    let part = i % key_parts.len();
                    let (b, head) = (first + item, kv_head * served);
                    let keys = key_parts[part].clone();
                    let of_keys = RowTile { first: keys.start, step: 1, count: keys.len() };
                    let one = || view::Heads { head: kv_head, apart: 0, parts: 0..1 };
                    let all = || view::Heads { head, apart: 1, parts: 0..served };
                    // Of slots that lie `slots` apart for neighbouring heads.
                    let slot = |slots: usize, slot: usize| view::Heads {
                        head: head * slots + slot,
                        apart: slots,
                        parts: 0..served,
                    };
                    // SAFETY: no other task has these keys of this head, or these slots; only the task of the first
                    // keys touches the sinks, and rows of `d_q` are a task's where it is the only one of its head. All
                    // tables were set to 0 above.
                    let target = unsafe {
                        let rows = || Rows {
                            d_q: d_q.tile(b, all(), all_rows),
                            options: options.tile(b, all(), all_rows),
                        };
                        let first = part * ways.len();
                        let own = (first..first + ways.len()).map(|i| slot(slots, i));
                        let parts = partial.iter().flat_map(|partial| {
                            own.clone().map(|heads| partial.tile(item, heads, all_rows))
                        });
                        Target {
                            d_k: d_k.tile(b, one(), of_keys),
                            d_v: d_v.tile(b, one(), of_keys),
                            rows: (!parted).then(rows),
                            parts: parts.collect(),
                            sinks: sinks
                                .as_ref()
                                .filter(|_| part == 0)
                                .map(|s| s.tile(b, all(), all_rows)),
                            relative: (buckets > 0).then(|| {
                                by_table.tile(
                                    item,
                                    slot(key_parts.len(), part),
                                    RowTile { count: 1, ..all_rows },
                                )
                            }),
                        }
                    };
                    let task =
                        ByKeys { back, batch: b, kv_head, keys, ways: &ways, target, scratch };
                    E::backward(machine.isa, Backward::Keys(task));
                },
            );
            if parted {
                let parts = Parts { view: View::bhsd(&room, saved)?, count: slots, first };
                self.join(back.call, first..first + items, parts, (d_q, &options));
                if let (Some(shape), Some(d_w)) = (w, &mut sums.w) {
                    let d_w = ViewMut::bhsd(d_w, shape.to_array())?;
                    self.add_projection_grads(back.call, first..first + items, parts, &d_w);
                }
            }
            let sizes = [heads.q, key_parts.len(), buckets];
            add_tables(
                &mut sums.tables,
                &table_room[..items * sizes.iter().product::<usize>()],
                sizes,
            );
        }
        Ok(())
    }

    /// Adds the parts of `d_q` of some items.
    fn join(
        &self,
        call: Call<'_, E>,
        items: Range<usize>,
        parts: Parts<'_, E::Num>,
        (d_q, options): (&ViewMut<'_, E>, &ViewMut<'_, E::Num>),
    ) {
        let (machine, heads, tiling) =
            (self.machine(), call.problem.dims().heads.q, self.tiling(1));
        run(
            machine.threads,
            items.len() * heads * tiling.count(),
            || Scratch::new(call.problem, self.rows, 0),
            |scratch, i| {
                let (rest, rows) = (i / tiling.count(), tiling.tile(i % tiling.count()));
                let (b, head) = (items.start + rest / heads, rest % heads);
                let one = || view::Heads { head, apart: 0, parts: 0..1 };
                // SAFETY: no other task has these rows of this head.
                let target = unsafe {
                    Rows { d_q: d_q.tile(b, one(), rows), options: options.tile(b, one(), rows) }
                };
                let scope = call.problem.scope(b, head);
                let task = Join { call, scope, rows, parts, target, scratch };
                E::backward(machine.isa, Backward::Join(task));
            },
        );
    }

    /// Adds what some items say of `W`.
    fn add_projection_grads(
        &self,
        call: Call<'_, E>,
        items: Range<usize>,
        parts: Parts<'_, E::Num>,
        d_w: &ViewMut<'_, E::Num>,
    ) {
        let (machine, shape) = (self.machine(), d_w.shape());
        if call.problem.dims().q_len == 0 {
            return;
        }
        let blocks = shape.len.div_ceil(CELL);
        run(
            machine.threads,
            shape.heads * blocks,
            || Scratch::new(call.problem, self.rows, CELL),
            |scratch, i| {
                let (head, first) = (i / blocks, i % blocks * CELL);
                let features = first..(first + CELL).min(shape.len);
                let heads =
                    if shape.heads == 1 { 0..call.problem.dims().heads.q } else { head..head + 1 };
                let rows = RowTile { first, step: 1, count: features.len() };
                // SAFETY: no other task has these rows of this head, which began as zeros.
                let target =
                    unsafe { d_w.tile(0, view::Heads { head, apart: 0, parts: 0..1 }, rows) };
                let (items, tiling) = (items.clone(), self.tiling(1));
                let task =
                    ByProjection { call, items, heads, tiling, parts, features, target, scratch };
                E::backward(machine.isa, Backward::Projection(task));
            },
        );
    }

    /// The gradient of a dense bias. Who shares an entry of it meets in one task.
    fn compute_bias_grads(&self, back: Back<'_, E>, shape: Shape) -> Result<Tensor<E::Num>, Error> {
        let Dims { batch, heads, k_len, .. } = self.problem().dims();
        let machine = self.machine();
        let tiles: Vec<RowTile> = self.tiling(1).tiles().collect();
        // A task has some rows of the bias, or some keys if its rows are all one.
        let (by_rows, by_keys) = (shape.len > 1, shape.len == 1 && shape.dim > 1);
        let each = if by_keys { TASK_KEYS } else { k_len.max(1) };
        let pieces = if by_rows { tiles.len() } else { k_len.div_ceil(each) };
        // Keys of different tasks are rows of their own until the end.
        let room = if by_keys { Shape { len: pieces, dim: each, ..shape } } else { shape };
        let mut grads = vec![E::Num::default(); room.to_array().iter().product()];
        let view = ViewMut::bhsd(&mut grads, room.to_array())?;
        let who = |n: usize, i: usize, all: usize| if n == 1 { 0..all } else { i..i + 1 };
        run(
            machine.threads,
            shape.batch * shape.heads * pieces,
            || Scratch::new(self.problem(), self.rows, 0),
            |scratch, i| {
                let (rest, piece) = (i / pieces, i % pieces);
                let (b, head) = (rest / shape.heads, rest % shape.heads);
                let one = view::Heads { head, apart: 0, parts: 0..1 };
                let (tiles, rows, keys) = if by_rows {
                    (&tiles[piece..=piece], tiles[piece], 0..k_len)
                } else {
                    let keys = piece * each..((piece + 1) * each).min(k_len);
                    (&tiles[..], RowTile { first: piece, step: 1, count: 1 }, keys)
                };
                // SAFETY: no other task has these rows of this head; all began as zeros.
                let target = unsafe { view.tile(b, one, rows) };
                let task = ByBias {
                    back,
                    items: who(shape.batch, b, batch),
                    heads: who(shape.heads, head, heads.q),
                    tiles,
                    keys,
                    target,
                    scratch,
                };
                E::backward(machine.isa, Backward::Bias(task));
            },
        );
        if by_keys {
            let keys = grads.chunks_exact(pieces * each).flat_map(|row| &row[..k_len]);
            grads = keys.copied().collect();
        }
        Tensor::new(grads, shape, Layout::Bhsd)
    }
}

/// Adds tables `[items, heads.q, parts, buckets]` to one `[buckets, heads.q]`, in order.
fn add_tables(sum: &mut [f64], tables: &[f64], [heads, parts, buckets]: [usize; 3]) {
    for (i, table) in tables.chunks_exact(buckets.max(1)).enumerate() {
        let head = i / parts % heads;
        for (bucket, x) in table.iter().enumerate() {
            sum[bucket * heads + head] += x;
        }
    }
}

/// What the rows and tasks of a call add to the gradients of the options.
struct Sums<N> {
    /// `[batch, heads.q, q_len, OPTIONS]`
    options: Vec<N>,
    /// `[batch, heads.q, q_len]`
    sinks: Vec<N>,
    /// `[buckets, heads.q]`
    tables: Vec<f64>,
    /// `[1, heads.q or 1, q_dim, qk_dim]`
    w: Option<Vec<N>>,
    /// In the shape of the bias.
    bias: Option<Tensor<N>>,
}

impl<N: Number> Sums<N> {
    fn new<E: Element<Num = N>>(plan: &Plan<'_, E>) -> Self {
        let Dims { batch, heads, q_len, .. } = plan.problem().dims();
        let (score, rows) = (&plan.problem().score, batch * heads.q * q_len);
        Self {
            options: vec![N::zero(); rows * OPTIONS],
            sinks: vec![N::zero(); if score.sinks.is_some() { rows } else { 0 }],
            tables: vec![0.0; score.relative.as_ref().map_or(0, |r| r.table().len())],
            w: plan.w_shape().map(|w| vec![N::zero(); w.to_array().iter().product()]),
            bias: None,
        }
    }

    fn into_grads<E: Element<Num = N>>(
        self,
        plan: &Plan<'_, E>,
        [q, k, v]: [Tensor<E>; 3],
    ) -> Grads<E> {
        let problem = plan.problem();
        let Dims { heads, q_len, .. } = problem.dims();
        let mut by_head = vec![[0.0; OPTIONS + 1]; heads.q];
        for (row, options) in self.options.chunks_exact(OPTIONS).enumerate() {
            let sums = &mut by_head[row / q_len % heads.q];
            options.iter().zip(sums).for_each(|(x, sum)| *sum += (*x).to_f64());
        }
        for (row, sink) in self.sinks.iter().enumerate() {
            by_head[row / q_len % heads.q][OPTIONS] += (*sink).to_f64();
        }
        let column = |used: bool, i: usize| -> Vec<N> {
            by_head.iter().filter(|_| used).map(|sums| N::from_f64(sums[i])).collect()
        };
        let scale: f64 = by_head.iter().map(|sums| sums[0]).sum();
        let score = &problem.score;
        Grads {
            q,
            k,
            v,
            scale,
            // scale = given / temperature
            temperature: -scale * problem.scale() / score.temperature,
            alibi: column(score.alibi.is_some(), 1),
            sinks: column(score.sinks.is_some(), OPTIONS),
            relative: self.tables.iter().map(|x| N::from_f64(*x)).collect(),
            bias: self.bias,
            w: plan
                .w_shape()
                .zip(self.w)
                .and_then(|(shape, w)| Tensor::new(w, shape, Layout::Bhsd).ok()),
        }
    }
}
