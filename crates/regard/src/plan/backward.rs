//! The backward pass: how it is cut into tasks, who writes what, and how the parts become one.
//!
//! Cost: five products for each pair where forward has two, for the weights are made again; memory for `d_k` and `d_v` of the keys
//! that each thread works on and, where a head's keys are cut into several parts, one `d_q` for each.

use super::sums::{OptionGrads, OptionSums, add_tables};
use super::{Core, Plan};
use crate::description::problem::{Dims, Heads};
use crate::description::score::RelativeBias;
use crate::error::Error;
use crate::kernel::backward::{
    BackwardCall, ByKeys, ByProjection, Join, OPTIONS, Parts, QueryGrads, Scratch, Target,
};
use crate::kernel::block_loop::{Call, KeyRange, Tiling};
use crate::kernel::project::project_backward;
use crate::machine::memory::filled;
use crate::machine::run::run;
use crate::machine::simd::{Element, Number};
use crate::plan::grads::{Grads, OutputGrads};
use crate::plan::output::OutputView;
use crate::tensor::index::{BLOCK_KEYS, RowTile};
use crate::tensor::view::{self, Inputs, OutView, Shape, Tensor, Unwritten, View, ViewMut};
use std::ops::Range;
use std::sync::OnceLock;

/// Tasks that the keys of an item make, where there are enough of them: what a few heads need to fill many threads.
const TASKS_PER_ITEM: usize = 8;
/// Pairs of a packed sequence's queries and keys, in all heads, for which all threads work on it: some milliseconds.
const LONG_ITEM_PAIRS: usize = 1 << 22;
/// Keys of a task, at least: the cost of a part of `d_q` is that of about 20 keys.
const TASK_KEYS: usize = 512;

impl<E: Element> Plan<'_, E> {
    /// The gradients of everything, from the inputs and output of [`forward`](Self::forward) and the gradient of a loss
    /// by that output: a [`View`] of the gradient by `out`, or an [`OutputGrads`] that says more. An [`OutputView`] serves where
    /// the output lies in memory of the caller.
    ///
    /// The weights are computed again, tile by tile, so memory stays linear in the length. The same bits for any number
    /// of threads; rows that see nothing get 0.
    ///
    /// Of packed sequences, the gradients of q, k and v are packed like them and have the bits of calls for each sequence
    /// alone; those of the options are the sums over the sequences, in their order. Short sequences are worked on side by
    /// side, each by one thread; long ones one after another, by all of them.
    pub fn backward<'b>(
        &self,
        q: View<'b, E>,
        k: View<'b, E>,
        v: View<'b, E>,
        output: impl Into<OutputView<'b, E>>,
        output_grads: impl Into<OutputGrads<'b, E>>,
    ) -> Result<Grads<E>, Error> {
        self.backward_from((q, k, v), output.into(), output_grads.into())
    }

    #[inline(never)]
    fn backward_from<'b>(
        &self,
        inputs: Inputs<'b, E>,
        output: OutputView<'b, E>,
        output_grads: OutputGrads<'b, E>,
    ) -> Result<Grads<E>, Error> {
        let (q, k, v) = inputs;
        let core = self.core();
        core.check_inputs(&q.erase(), &k.erase(), &v.erase())?;
        if self.problem().selects() {
            return self.backward_chosen(inputs, output, output_grads);
        }
        output_grads.without_selection("softmax")?;
        let shape = self.problem().dims().out_shape();
        shape.unless_same("the plan", "the output", output.out.shape())?;
        shape.unless_same("the plan", "the gradient of the output", output_grads.out.shape())?;
        self.problem().same_packing("the output", 0, output.out.offsets())?;
        self.problem().same_packing("the gradient of the output", 0, output_grads.out.offsets())?;
        let rows = self.problem().rows();
        output.check_rows(rows)?;
        let d_lse = output_grads.lse.map_or(rows, <[_]>::len);
        Error::unless_one_each_row("the gradient of lse", rows, d_lse)?;
        let entropy = match (output.entropy, output_grads.entropy) {
            (Some(entropy), Some(d_entropy)) => {
                Error::unless_one_each_row("entropy", rows, entropy.len())?;
                Error::unless_one_each_row("the gradient of entropy", rows, d_entropy.len())?;
                Some([entropy, d_entropy])
            }
            (None, Some(_)) => return Err(Error::NoEntropy),
            (_, None) => None,
        };
        if rows == 0 {
            let mut options = OptionSums::new(core, output_grads.bias).into_options(core)?;
            if let Some(w_k) = self.problem().similarity.of_keys() {
                let zeros = Tensor::zeros(&w_k, w_k.shape().dim)?;
                options.additive.iter_mut().for_each(|g| g.w_k = Some(zeros.clone()));
            }
            let [q, k, v] = [&q, &k, &v].map(Tensor::zeros_like);
            return Ok(options.into_grads([q?, k?, v?]));
        }
        let new = |view: &View<'_, E>| Unwritten::<E>::like(view, view.shape().dim);
        let (mut d_q, mut d_k, mut d_v) = (new(&q)?, new(&k)?, new(&v)?);
        let OutputView { out, lse, states, .. } = output;
        let saved = Saved {
            out: out.erase(),
            d_out: output_grads.out.erase(),
            lse,
            states,
            d_lse: output_grads.lse,
            entropy,
            bias: output_grads.bias,
        };
        let options = {
            let grads = (d_q.view()?, d_k.view()?, d_v.view()?);
            let grads = [&grads.0, &grads.1, &grads.2].map(|grad| E::erase(grad).into());
            core.backward_into(core.call(q.erase(), k.erase(), v.erase()), saved, grads)?
        };
        // SAFETY: `backward_into` writes every row of every gradient.
        let [q, k, v] = unsafe { [d_q.written(), d_k.written(), d_v.written()] };
        Ok(options.into_grads([q, k, v]))
    }
}

/// What a forward pass left, and what the loss says of it: see [`BackwardCall`].
#[derive(Clone, Copy)]
struct Saved<'b, N: Number> {
    out: View<'b, N>,
    d_out: View<'b, N>,
    lse: &'b [N],
    states: &'b [[N; 2]],
    d_lse: Option<&'b [N]>,
    entropy: Option<[&'b [N]; 2]>,
    /// Whether the gradient of the dense bias is asked for.
    bias: bool,
}

impl<N: Number> Core<'_, N> {
    /// Writes the gradients by q, k and v, every row of each; returns those of the options. There must be rows.
    #[inline(never)]
    fn backward_into(
        &self,
        call: Call<'_, N>,
        saved: Saved<'_, N>,
        grads: [OutView<'_, N>; 3],
    ) -> Result<OptionGrads<N>, Error> {
        let (Some(k), Some(v)) = (call.k.tensor(), call.v.tensor()) else {
            return Err(Error::OnlyCached);
        };
        if let Some((core, keys)) = self.with_projected_keys(&k)? {
            let mut d_keys = Unwritten::<N>::like(&keys.view(), keys.shape().dim)?;
            let [d_q, d_k, d_v] = grads;
            let mut options = {
                let d_keys = d_keys.view()?;
                let grads = [d_q, N::erase(&d_keys).into(), d_v];
                core.backward_into(core.call(call.q, keys.view(), v), saved, grads)?
            };
            // SAFETY: `backward_into` writes every row.
            let d_keys = unsafe { d_keys.written() };
            if let Some(w_k) = self.problem.similarity.of_keys() {
                let d_w_k = project_backward(self.machine, &k, w_k, &d_keys.view(), d_k)?;
                options.additive.iter_mut().for_each(|g| g.w_k = Some(d_w_k.clone()));
            }
            return Ok(options);
        }
        let mut sums = OptionSums::new(self, saved.bias);
        let Saved { out, d_out, lse, states, d_lse, entropy, bias } = saved;
        let back = BackwardCall { call, out, d_out, lse, states, d_lse, entropy };
        // `compute_grads` writes every row of every item it is given, and it is given all of them, or, by
        // `compute_packed_grads`, each one that has queries; of the others `clear` makes k and v 0.
        if self.problem.packed().contains(&true) {
            self.compute_packed_grads(back, grads, &mut sums, bias)?;
        } else {
            self.compute_grads(back, grads, 0..self.problem.dims().batch, &mut sums)?;
        }
        sums.into_options(self)
    }

    /// The shape of the dense bias; nothing where there is none.
    pub(super) fn bias_shape(&self) -> Shape {
        let none = Shape { batch: 0, heads: 0, len: 0, dim: 0 };
        self.problem().score.bias.map_or(none, |bias| bias.shape())
    }

    /// The shape of what queries are multiplied by.
    pub(super) fn w_shape(&self) -> Option<Shape> {
        self.problem().similarity.of_queries().map(|w| w.shape())
    }

    /// How the backward pass is cut into tasks. Of one item's sizes and the bias to be learned alone, like all that the order of
    /// sums depends on; only the number of items at a time is free.
    fn cut(&self, batch: usize, bias: Option<Shape>) -> Cut<'_> {
        let Dims { heads, k_len, .. } = self.problem().dims();
        // Who shares a bias that is learned meets in one task.
        let share = |n: usize| bias.is_some() && n == 1;
        let together = [share(bias.map_or(0, |b| b.batch)), share(bias.map_or(0, |b| b.heads))];
        let apart = if together[1] { 1 } else { heads.kv.max(1) };
        // Two for a shared bias however short it is: nothing else would be parallel.
        let parts =
            (k_len / TASK_KEYS).max(if together[1] { (k_len / BLOCK_KEYS).min(2) } else { 1 });
        let parts = parts.clamp(1, TASKS_PER_ITEM.div_ceil(apart));
        let each = k_len.div_ceil(parts).next_multiple_of(BLOCK_KEYS).max(1);
        let firsts = (0..k_len.max(1)).step_by(each);
        let keys: Vec<_> = firsts.map(|first| first..(first + each).min(k_len)).collect();
        let key_ranges = self.key_ranges();
        let slots = keys.len() * key_ranges.len();
        let parted = slots > 1 || self.w_shape().is_some();
        // Parts are kept of as many items at a time as fill the threads: at least one.
        let threads = self.machine().threads.max(1);
        let wave = threads.saturating_mul(4).div_ceil(apart * keys.len()).min(batch);
        let kept = parted || self.problem().score.relative.is_some(); // additive similarities are parted
        Cut { keys, key_ranges, together, parted, wave: if kept { wave } else { batch } }
    }

    /// The gradients of packed sequences: those of each as if it were the only one, and the sums over all of them.
    fn compute_packed_grads(
        &self,
        back: BackwardCall<'_, N>,
        grads: [OutView<'_, N>; 3],
        sums: &mut OptionSums<N>,
        bias: bool,
    ) -> Result<(), Error> {
        let (problem, threads) = (self.problem(), self.machine().threads);
        let Dims { batch, heads, .. } = problem.dims();
        let pairs = |item| problem.q_len(item).saturating_mul(problem.k_len(item));
        let long = |item: &usize| pairs(*item).saturating_mul(heads.q) >= LONG_ITEM_PAIRS;
        // By `move`: captured field by field, the types of `back` confuse the compiler (1.95).
        let back = &back;
        let of_item = move |item: usize, threads: usize| {
            let plan = self.of_item(item, threads);
            let mut sums = OptionSums::new(&plan, bias);
            if problem.q_len(item) == 0 {
                // SAFETY: `found[item]` is made once (`get_or_init`), so no other task has this item.
                grads[1..].iter().for_each(|grad| unsafe { grad.clear(item) });
                return Ok(sums);
            }
            let call = Call { problem: plan.problem(), ..back.call };
            plan.compute_grads(BackwardCall { call, ..*back }, grads, item..item + 1, &mut sums)?;
            Ok(sums)
        };
        let found: Vec<OnceLock<Result<_, Error>>> = (0..batch).map(|_| OnceLock::new()).collect();
        for item in (0..batch).filter(long) {
            found[item].get_or_init(|| of_item(item, threads));
        }
        let short: Vec<_> = (0..batch).filter(|item| !long(item)).collect();
        run(
            threads,
            short.len(),
            || (),
            |(), i| {
                found[short[i]].get_or_init(|| of_item(short[i], 1));
            },
        );
        found.into_iter().filter_map(OnceLock::into_inner).try_for_each(|found| {
            sums.add(&found?);
            Ok(())
        })
    }

    /// The gradients of some items, all as long as the longest.
    fn compute_grads(
        &self,
        back: BackwardCall<'_, N>,
        [d_q, d_k, d_v]: [OutView<'_, N>; 3],
        all: Range<usize>,
        sums: &mut OptionSums<N>,
    ) -> Result<(), Error> {
        let problem = self.problem();
        let Dims { heads, q_len, qk_dim, .. } = problem.dims();
        let cut = self.cut(all.len(), sums.bias.as_ref().map(|_| self.bias_shape()));
        let (parts, slots) = (cut.keys.len(), cut.keys.len() * cut.key_ranges.len());
        let buckets = problem.score.relative.as_ref().map_or(0, RelativeBias::buckets);
        let entries = buckets + problem.similarity.hidden();
        let saved = [cut.wave, heads.q * slots, q_len, qk_dim + OPTIONS];
        let zero = N::zero();
        let mut saved_room = filled(zero, if cut.parted { &saved[..] } else { &[0] })?;
        let tables = [cut.wave, heads.q * parts, 1, entries];
        let mut table_room = filled(0.0, &tables)?;
        let mut bias_room = sums.take_bias(self.bias_shape(), parts);
        let bias = match &mut bias_room {
            Some((data, shape)) => Some(ViewMut::bhsd(data, shape.to_array())?),
            None => None,
        };
        let rows = all.len() * heads.q * q_len;
        let mut option_room = filled(zero, &[rows, OPTIONS])?;
        let options = ViewMut::bhsd(&mut option_room, [all.len(), heads.q, q_len, OPTIONS])?;
        let with_sinks = problem.score.sinks.is_some();
        let mut sink_room = filled(zero, &[if with_sinks { rows } else { 0 }])?;
        let sinks = match with_sinks {
            true => Some(ViewMut::bhsd(&mut sink_room, [all.len(), heads.q, q_len, 1])?),
            false => None,
        };
        let queries = QueryTargets { d_q, options: &options, begin: all.start };
        for first in all.clone().step_by(cut.wave.max(1)) {
            let items = first..(first + cut.wave).min(all.end);
            table_room.fill(0.0);
            let kept = if cut.parted { Some(ViewMut::bhsd(&mut saved_room, saved)?) } else { None };
            let room = GradTargets {
                cut: &cut,
                heads,
                q_len,
                first,
                queries,
                d_k,
                d_v,
                sinks: sinks.as_ref(),
                bias: bias.as_ref(),
                bias_by_part: self.bias_shape().dim == 1,
                parts: kept,
                tables: ViewMut::bhsd(&mut table_room, tables)?,
            };
            self.run_by_keys(back, &items, &room);
            if cut.parted {
                let parts = Parts { view: View::bhsd(&saved_room, saved)?, count: slots, first };
                self.join(back.call, items.clone(), parts, queries);
                if let (Some(shape), Some(d_w)) = (self.w_shape(), &mut sums.w) {
                    let d_w = ViewMut::bhsd(d_w, shape.to_array())?;
                    self.add_projection_grads(back.call, items.clone(), parts, &d_w);
                }
            }
            let sizes = [heads.q, parts, entries];
            let used = items.len() * sizes.iter().product::<usize>();
            add_tables(&mut sums.tables, &table_room[..used], sizes);
        }
        if let Some((data, _)) = bias_room {
            sums.put_bias(data, self.bias_shape(), parts);
        }
        sums.add_rows(&option_room, &sink_room, q_len);
        Ok(())
    }

    /// Runs the tasks of some items, each with some keys of a head.
    fn run_by_keys(
        &self,
        back: BackwardCall<'_, N>,
        items: &Range<usize>,
        room: &GradTargets<'_, N>,
    ) {
        let (problem, machine, cut) = (self.problem(), self.machine(), room.cut);
        let (heads, parts) = (problem.dims().heads, cut.keys.len());
        let groups = [(cut.together[0], items.len()), (cut.together[1], heads.kv)];
        let [item_groups, head_groups] =
            groups.map(|(together, n)| if together { n.min(1) } else { n });
        run(
            machine.threads,
            item_groups * head_groups * parts,
            || Scratch::new(problem, self.rows, cut.keys[0].len(), self.backward_terms()),
            |scratch, i| {
                // Early keys first: a causal mask shows them to the most rows.
                let (rest, part) = (i / parts, i % parts);
                let (item, kv_head) = (rest / head_groups, rest % head_groups);
                let of = |together: bool, i: usize, all: Range<usize>| {
                    if together { all } else { all.start + i..all.start + i + 1 }
                };
                for b in of(cut.together[0], item, items.clone()) {
                    for kv_head in of(cut.together[1], kv_head, 0..heads.kv) {
                        // SAFETY: `rest` and `part` give each part of each head of each item to one task, and items and heads that
                        // share a bias to the same one (`together`); tables and bias were made of zeros.
                        let target = unsafe { room.target(b, kv_head, part) };
                        let (keys, key_ranges) = (cut.keys[part].clone(), &cut.key_ranges[..]);
                        let scratch = &mut *scratch;
                        let task =
                            ByKeys { back, batch: b, kv_head, keys, key_ranges, target, scratch };
                        task.run(machine.isa);
                    }
                }
            },
        );
    }

    /// Adds the parts of `d_q` of some items.
    fn join(
        &self,
        call: Call<'_, N>,
        items: Range<usize>,
        parts: Parts<'_, N>,
        queries: QueryTargets<'_, N>,
    ) {
        let (machine, heads, tiling) =
            (self.machine(), call.problem.dims().heads.q, self.tiling(1));
        run(
            machine.threads,
            items.len() * heads * tiling.count(),
            || Scratch::new(call.problem, self.rows, 0, None),
            |scratch, i| {
                let (rest, rows) = (i / tiling.count(), tiling.tile(i % tiling.count()));
                let (b, head) = (items.start + rest / heads, rest % heads);
                // SAFETY: `Tiling::tile` gives each row of a head to one tile, and `i` counts the tiles of each head of each item
                // once, so nobody else holds these rows.
                let target = unsafe { queries.tile(b, view::TileHeads::one(head), rows) };
                let scope = call.problem.scope(b, head);
                let task = Join { call, scope, rows, parts, target, scratch };
                task.run(machine.isa);
            },
        );
    }

    /// Adds what some items say of `W`.
    fn add_projection_grads(
        &self,
        call: Call<'_, N>,
        items: Range<usize>,
        parts: Parts<'_, N>,
        d_w: &ViewMut<'_, N>,
    ) {
        let (machine, shape) = (self.machine(), d_w.shape());
        let blocks = shape.len.div_ceil(BLOCK_KEYS);
        run(
            machine.threads,
            shape.heads * blocks,
            || Scratch::new(call.problem, self.rows, BLOCK_KEYS, None),
            |scratch, i| {
                let (head, first) = (i / blocks, i % blocks * BLOCK_KEYS);
                let features = first..(first + BLOCK_KEYS).min(shape.len);
                let heads =
                    if shape.heads == 1 { 0..call.problem.dims().heads.q } else { head..head + 1 };
                let rows = RowTile { first, step: 1, count: features.len() };
                // SAFETY: `i / blocks` and `i % blocks` give each block of each head to one task, so nobody else holds these
                // rows; `OptionSums::new` made them of zeros.
                let target = unsafe { d_w.tile(0, view::TileHeads::one(head), rows) };
                let (items, tiling) = (items.clone(), self.tiling(1));
                let task =
                    ByProjection { call, items, heads, tiling, parts, features, target, scratch };
                task.run(machine.isa);
            },
        );
    }
}

/// How the backward pass is cut into tasks.
struct Cut<'p> {
    /// The keys of each part, the first one the longest.
    keys: Vec<Range<usize>>,
    key_ranges: Vec<(Tiling, KeyRange<'p>)>,
    /// Whether a task goes through all items, and through all heads, with its keys.
    together: [bool; 2],
    /// Whether tasks leave parts of `d_q` to be added.
    parted: bool,
    /// Items that are done at a time.
    wave: usize,
}

/// Where the gradients of queries go.
#[derive(Clone, Copy)]
struct QueryTargets<'r, N: Number> {
    d_q: OutView<'r, N>,
    /// See [`QueryGrads::options`].
    options: &'r ViewMut<'r, N>,
    /// The first item of the call, from which the rows of `options`, and of sinks, begin.
    begin: usize,
}

impl<'r, N: Number> QueryTargets<'r, N> {
    /// Some rows of some heads of an item.
    ///
    /// # Safety
    /// While it lives, nobody else may hold these rows of these heads of this item.
    unsafe fn tile(self, b: usize, heads: view::TileHeads, rows: RowTile) -> QueryGrads<'r, N> {
        // SAFETY: `d_q` and `options` have the same rows, and the caller answers for these.
        unsafe {
            let options = self.options.tile(b - self.begin, heads.clone(), rows);
            QueryGrads { d_q: self.d_q.tile(b, heads, rows), options }
        }
    }
}

/// What the tasks of some items write.
struct GradTargets<'r, N: Number> {
    cut: &'r Cut<'r>,
    heads: Heads,
    q_len: usize,
    /// The first item.
    first: usize,
    queries: QueryTargets<'r, N>,
    d_k: OutView<'r, N>,
    d_v: OutView<'r, N>,
    sinks: Option<&'r ViewMut<'r, N>>,
    bias: Option<&'r ViewMut<'r, N>>,
    /// Whether the columns of the bias are those of parts, not keys.
    bias_by_part: bool,
    /// See [`Target::parts`] and [`Target::tables`].
    parts: Option<ViewMut<'r, N>>,
    tables: ViewMut<'r, f64>,
}

impl<N: Number> GradTargets<'_, N> {
    /// What one part of the keys of one head writes.
    ///
    /// # Safety
    /// While it lives, nobody else may have the target of this part of this head of this item, or of one that shares its
    /// bias. Tables and bias must have been written.
    unsafe fn target(&self, b: usize, kv_head: usize, part: usize) -> Target<'_, N> {
        let (cut, item, row_item) = (self.cut, b - self.first, b - self.queries.begin);
        let served = self.heads.q / self.heads.kv;
        let head = kv_head * served;
        let rows = RowTile { first: 0, step: 1, count: self.q_len };
        let keys = cut.keys[part].clone();
        let of_keys = RowTile { first: keys.start, step: 1, count: keys.len() };
        let one = || view::TileHeads::one(kv_head);
        let all = || view::TileHeads { head, apart: 1, parts: 0..served };
        // Each head has several slots.
        let slot = |slots: usize, slot: usize| view::TileHeads {
            head: head * slots + slot,
            apart: slots,
            parts: 0..served,
        };
        let key_ranges = cut.key_ranges.len();
        let slots = key_ranges * cut.keys.len();
        // SAFETY: keys and slots belong to this part alone (`Cut::keys` do not overlap); only the first part touches the
        // sinks; rows are written only if this is the only part (`Cut::parted`); of the bias, keys or a column belong to this
        // part, and the caller answers for those who share them.
        unsafe {
            let parts = self.parts.iter().flat_map(|parts| {
                let own = part * key_ranges..(part + 1) * key_ranges;
                own.map(|i| parts.tile(item, slot(slots, i), rows))
            });
            let rows_of = || self.queries.tile(b, all(), rows);
            let table = || {
                let one = RowTile { count: 1, ..rows };
                self.tables.tile(item, slot(cut.keys.len(), part), one)
            };
            let bias = |bias: &'_ ViewMut<'_, N>| {
                let Shape { batch, heads, len, .. } = bias.shape();
                let features = if self.bias_by_part { part..part + 1 } else { keys.clone() };
                let heads = if heads == 1 {
                    view::TileHeads { head: 0, apart: 0, parts: 0..served }
                } else {
                    all()
                };
                (if batch == 1 { 0 } else { b }, heads, RowTile { count: len, ..rows }, features)
            };
            Target {
                d_k: self.d_k.tile(b, one(), of_keys),
                d_v: self.d_v.tile(b, one(), of_keys),
                rows: (!cut.parted).then(rows_of),
                parts: parts.collect(),
                sinks: self
                    .sinks
                    .filter(|_| part == 0)
                    .map(|sinks| sinks.tile(row_item, all(), rows)),
                tables: (self.tables.shape().dim > 0).then(table),
                bias: self.bias.map(|view| {
                    let (b, heads, rows, features) = bias(view);
                    view.block(b, heads, rows, features)
                }),
            }
        }
    }
}
