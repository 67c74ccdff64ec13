//! A block: attention, cross-attention, feed-forward net, and the norms around them.

use super::cache::{LayerCache, narrow_into, widen_into};
use super::layers::{Linear, Norm, project};
use super::ops::{self, Rotations, each_row};
use super::record::{Recorder, by_head};
use super::work::{Panel, Part, Workspace, room};
use crate::error::Error;
use crate::files::{NormOrder, QkNorm, StackConfig, Weights};
use half::bf16;
use rayon::prelude::*;
use regard::plan::{OutputMut, ScratchPool};
use regard::score::RelativeBias;
use regard::{
    AttentionView, Element, KvCache, Machine, Mask, Number, Plan, Problem, Score, Sequence, View,
    ViewMut,
};
use regard_matmul::Rows;

/// What all layers of a pass have in common.
#[derive(Debug)]
pub(super) struct Step<'a> {
    pub(super) config: &'a StackConfig,
    /// Where the rows of each sequence begin, and the end of all.
    pub(super) offsets: &'a [usize],
    /// One for each kind of rotation in the stack.
    pub(super) rotations: Vec<Rotations>,
    /// `[buckets, heads]` of T5.
    pub(super) relative: Option<&'a [f32]>,
    pub(super) machine: Machine,
}

/// Where keys and values come from.
#[derive(Debug)]
pub(super) enum Keys<'a> {
    /// The rows themselves.
    Rows,
    /// What sequences have in a cache, to which the rows are appended first.
    Append(&'a mut LayerCache, &'a [Sequence]),
    /// What sequences have in a cache: the source.
    Read(&'a LayerCache, &'a [Sequence]),
}

/// Multi-head attention.
#[derive(Debug)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    /// Of queries and of keys.
    norms: Option<[Norm; 2]>,
}

impl Attention {
    fn take(
        weights: &mut Weights,
        name: &str,
        config: &StackConfig,
        is_cross: bool,
    ) -> Result<Self, Error> {
        let (d, dim) = (config.d_model, config.head_dim);
        let [q, kv] = config.widths();
        let mut linear =
            |part: &str, sizes, bias| Linear::take(weights, &format!("{name}.{part}"), sizes, bias);
        let (q_map, k_map) =
            (linear("q", [q, d], config.qkv_bias)?, linear("k", [kv, d], config.qkv_bias)?);
        let (v_map, out) =
            (linear("v", [kv, d], config.qkv_bias)?, linear("out", [d, q], config.out_bias)?);
        let sizes = match config.qk_norm {
            Some(QkNorm::Head) if !is_cross => Some([dim, dim]),
            Some(QkNorm::Token) if !is_cross => Some([q, kv]),
            _ => None,
        };
        let mut norm =
            |part: &str, n| Norm::take(weights, &format!("{name}.{part}"), n, config.norm);
        let norms = sizes.map(|[q, k]| Ok::<_, Error>([norm("q_norm", q)?, norm("k_norm", k)?]));
        Ok(Self { q: q_map, k: k_map, v: v_map, out, norms: norms.transpose()? })
    }

    /// Keys and values of the source, appended for each sequence.
    pub(super) fn append_source(
        &self,
        memory: &mut [f32],
        step: &Step<'_>,
        cache: &mut LayerCache,
        sequences: &[Sequence],
        work: &mut Workspace,
    ) -> Result<(), Error> {
        work.each_part(memory, step.config, |Part { x, k, v, .. }, panel| {
            panel.rows.set(x, step.config.d_model)?;
            project(&panel.rows, &mut [(&self.k, k), (&self.v, v)])
        })?;
        append(step, cache, sequences, [&work.k, &work.v])
    }

    /// From the rows of a panel to queries, and to keys and values if they are `own`.
    fn project(
        &self,
        step: &Step<'_>,
        rotations: Option<&Rotations>,
        own: bool,
        (part, rows): (&mut Part<'_>, &Rows),
    ) -> Result<(), Error> {
        let ([q_width, kv_width], head_dim) = (step.config.widths(), step.config.head_dim);
        let Part { first, q, k, v, .. } = part;
        if !own {
            return project(rows, &mut [(&self.q, q)]);
        }
        project(rows, &mut [(&self.q, &mut *q), (&self.k, &mut *k), (&self.v, v)])?;
        if let Some([q_norm, k_norm]) = &self.norms {
            q_norm.apply(q, q_width);
            k_norm.apply(k, kv_width);
        }
        if let Some(rotations) = rotations {
            let rotate = ops::Rotate { rotations, first: *first, head_dim };
            each_row(q, q_width, &rotate);
            each_row(k, kv_width, &rotate);
        }
        Ok(())
    }

    /// `||v_j W_O||` of each head and key, `[heads, keys]`, of values `[heads.kv, keys, dim]`: by the products of the rows of W_O with each
    /// other, `dim` numbers for each instead of `d_model`.
    fn value_norms(&self, values: &[f32], config: &StackConfig) -> Result<Vec<f32>, Error> {
        let (dim, width) = (config.head_dim, self.out.outputs());
        let output = self.out.transposed()?;
        let by_head = values.chunks_exact((values.len() / config.heads.kv).max(1));
        let values: Vec<_> = by_head.collect();
        let of_head = |(head, output): (usize, &[f32])| {
            let rows: Vec<_> = output.chunks_exact(width).collect();
            let dot = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
            };
            let gram: Vec<Vec<f64>> =
                rows.iter().map(|a| rows.iter().map(|b| dot(a, b)).collect()).collect();
            let square = |v: &[f32]| {
                let terms = v.iter().zip(&gram).map(|(x, row)| {
                    let sum: f64 = row.iter().zip(v).map(|(g, y)| g * f64::from(*y)).sum();
                    f64::from(*x) * sum
                });
                // Rounding can give a value below 0.
                terms.sum::<f64>().max(0.0)
            };
            let own = values[head * config.heads.kv / config.heads.q];
            own.chunks_exact(dim).map(|v| f32::from_f64(square(v).sqrt())).collect::<Vec<f32>>()
        };
        let heads: Vec<_> = output.chunks_exact(dim * width).enumerate().collect();
        Ok(heads.into_par_iter().flat_map_iter(of_head).collect())
    }

    /// Keeps the norms of the values that attention was over, if the recorder takes them: those in a cache, or `[rows, heads.kv, dim]`.
    fn record_value_norms(
        &self,
        cached: Cached<'_>,
        rows: &[f32],
        config: &StackConfig,
        recorder: &mut Recorder,
    ) -> Result<(), Error> {
        if !recorder.takes_value_norms() {
            return Ok(());
        }
        let values = match cached {
            Some((cache, sequences)) => cache.values(sequences[0])?,
            None => by_head(rows, [config.heads.kv, config.head_dim]),
        };
        recorder.record_value_norms(self.value_norms(&values, config)?);
        Ok(())
    }

    /// From what attention gives for some rows to the output of a panel.
    fn finish(&self, attended: &[f32], panel: &mut Panel) -> Result<(), Error> {
        let Panel { rows, output, .. } = panel;
        rows.set(attended, self.out.inputs())?;
        project(rows, &mut [(&self.out, room(output, rows.rows() * self.out.outputs()))])
    }
}

/// What sequences have in a cache; nothing if attention is over the rows themselves.
type Cached<'a> = Option<(&'a LayerCache, &'a [Sequence])>;

/// From `work.q`, `work.k` and `work.v` to `work.attended`. Returns what it was over.
fn attend<'k>(
    step: &Step<'_>,
    layer: Layer<'_>,
    keys: Keys<'k>,
    work: &mut Workspace,
    recorder: &mut Recorder,
) -> Result<Cached<'k>, Error> {
    let StackConfig { head_dim: dim, heads, .. } = *step.config;
    let Workspace { q, k, v, attended, lse, scratch, narrow, .. } = work;
    lse.resize(q.len() / dim, 0.0);
    let sequences = match keys {
        Keys::Rows => None,
        Keys::Append(cache, sequences) => {
            append(step, cache, sequences, [k, v])?;
            Some((&*cache, sequences))
        }
        Keys::Read(cache, sequences) => Some((cache, sequences)),
    };
    match sequences {
        None => {
            let view = |rows, heads| view(rows, step.offsets, [heads, dim]);
            let (queries, own) = (view(q, heads.q)?, (view(k, heads.kv)?, view(v, heads.kv)?));
            let to = output(attended, lse, step)?;
            let problem = layer.problem(step, Problem::new(&queries, &own.0, &own.1));
            let plan = Plan::new(problem, step.machine)?.with_scratch(scratch);
            plan.forward_into(queries, own, to)?;
        }
        Some((LayerCache::F32(cache), sequences)) => {
            let work = (&mut attended[..], &mut lse[..], &*scratch);
            over_cache(step, layer, q, (cache, sequences), work, recorder)?;
        }
        Some((LayerCache::Bf16(cache), sequences)) => {
            let [queries, out] = narrow;
            narrow_into(q, queries);
            out.resize(q.len(), bf16::ZERO);
            let work = (&mut out[..], &mut lse[..], &*scratch);
            over_cache(step, layer, queries, (cache, sequences), work, recorder)?;
            widen_into(out, attended);
            if recorder.is_on() {
                // As attention has read them.
                widen_into(queries, q);
            }
        }
    }
    if recorder.is_on() {
        let problem =
            |q: &View<'_, f32>, k: &View<'_, f32>| layer.problem(step, Problem::new(q, k, k));
        let cached = sequences.map(|(cache, sequences)| (cache, sequences[0]));
        recorder.record([q, k, lse], cached, step.config, layer.is_causal, problem)?;
    }
    Ok(sequences)
}

/// Attention of queries over what their sequences have in a cache.
fn over_cache<E: Element<Num = f32>>(
    step: &Step<'_>,
    layer: Layer<'_>,
    q: &[E],
    cached: (&KvCache<E>, &[Sequence]),
    (out, lse, scratch): (&mut [E], &mut [f32], &ScratchPool<f32>),
    recorder: &mut Recorder,
) -> Result<(), Error> {
    let queries = view(q, step.offsets, [step.config.heads.q, step.config.head_dim])?;
    let problem = layer.problem(step, Problem::cached(&queries, cached.0, cached.1)?);
    let plan = Plan::new(problem, step.machine)?.with_scratch(scratch);
    plan.forward_into(queries, cached, output(out, lse, step)?)?;
    if recorder.is_probed() {
        recorder.probe(&AttentionView::cached_from_lse(&plan, queries, cached, lse)?)?;
    }
    Ok(())
}

/// Where attention writes to.
fn output<'a, E: Element<Num = f32>>(
    out: &'a mut [E],
    lse: &'a mut [f32],
    step: &'a Step<'_>,
) -> Result<OutputMut<'a, E>, Error> {
    let sizes = [step.config.heads.q, step.config.head_dim];
    Ok(OutputMut { out: view_mut(out, step.offsets, sizes)?, lse, entropy: None })
}

/// What differs between the layers of a stack.
#[derive(Clone, Copy, Debug)]
struct Layer<'a> {
    mask: &'a Mask,
    is_causal: bool,
    /// Whether keys are those of the rows themselves, not of a source.
    own: bool,
}

impl Layer<'_> {
    /// The mask and the scores of this layer.
    fn problem<'p, E: Element<Num = f32>>(
        self,
        step: &'p Step<'_>,
        problem: Problem<'p, E>,
    ) -> Problem<'p, E> {
        problem.mask(self.mask.clone()).score(step.score(self.own, self.is_causal))
    }
}

impl Step<'_> {
    /// Options of scores. Over a source there are no positions.
    fn score<E: Element<Num = f32>>(&self, over_itself: bool, is_causal: bool) -> Score<'_, E> {
        let mut score = Score::new();
        if let Some(scale) = self.config.scale {
            score = score.scale(scale);
        }
        if let Some(cap) = self.config.softcap {
            score = score.softcap(cap);
        }
        if !over_itself {
            return score;
        }
        if let (Some(table), Some(sizes)) = (self.relative, self.config.relative) {
            let (buckets, max) = (sizes.buckets, sizes.max_distance);
            score = score.relative(RelativeBias::t5(table, buckets, max, !is_causal));
        }
        score
    }
}

/// Whether all sequences have as many rows; if so, how many.
fn equal_length(offsets: &[usize]) -> Option<usize> {
    let first = offsets.get(1)? - offsets[0];
    offsets.array_windows().all(|[a, b]| b - a == first).then_some(first)
}

/// Rows of sequences; as a plain batch if their lengths are equal, for which kernels are better prepared.
fn view<'a, E: Element>(
    data: &'a [E],
    offsets: &'a [usize],
    [heads, dim]: [usize; 2],
) -> Result<View<'a, E>, Error> {
    Ok(match equal_length(offsets) {
        Some(len) => View::bshd(data, [offsets.len() - 1, len, heads, dim])?,
        None => View::packed(data, offsets, [heads, dim])?,
    })
}

fn view_mut<'a, E: Element>(
    data: &'a mut [E],
    offsets: &'a [usize],
    [heads, dim]: [usize; 2],
) -> Result<ViewMut<'a, E>, Error> {
    Ok(match equal_length(offsets) {
        Some(len) => ViewMut::bshd(data, [offsets.len() - 1, len, heads, dim])?,
        None => ViewMut::packed(data, offsets, [heads, dim])?,
    })
}

/// Appends the rows of each sequence to a cache.
fn append(
    step: &Step<'_>,
    cache: &mut LayerCache,
    sequences: &[Sequence],
    rows: [&[f32]; 2],
) -> Result<(), Error> {
    let (heads, dim) = (step.config.heads.kv, step.config.head_dim);
    let width = heads * dim;
    for (sequence, [from, to]) in sequences.iter().zip(step.offsets.array_windows()) {
        cache.append(*sequence, rows.map(|rows| &rows[from * width..to * width]), [heads, dim])?;
    }
    Ok(())
}

/// Multiplies what a layer adds.
#[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
fn factor(config: &StackConfig) -> f32 {
    config.residual_scale.unwrap_or(1.0) as f32
}

/// Norms around a layer: of its input, of its output, of the sum.
#[derive(Debug)]
pub(super) struct Norms {
    input: Option<Norm>,
    output: Option<Norm>,
    sum: Option<Norm>,
}

impl Norms {
    /// `name_norm` and `name_post_norm`, as the order says; `has_norm`: whether there is one of the input, if the order has it.
    fn take(
        weights: &mut Weights,
        name: &str,
        config: &StackConfig,
        has_norm: bool,
    ) -> Result<Self, Error> {
        let mut take = |ending: &str, is_there: bool| {
            let norm =
                |_| Norm::take(weights, &format!("{name}{ending}"), config.d_model, config.norm);
            is_there.then_some(()).map(norm).transpose()
        };
        let order = config.order;
        let shared = order == NormOrder::ParallelShared && name.ends_with("feed_forward");
        let input = match order {
            NormOrder::Pre | NormOrder::PreAndPost | NormOrder::Parallel => true,
            NormOrder::ParallelShared => !shared,
            NormOrder::Post | NormOrder::OutputOnly => false,
        };
        let output = matches!(order, NormOrder::PreAndPost | NormOrder::OutputOnly);
        Ok(Self {
            input: take("_norm", input && has_norm)?,
            output: take("_post_norm", output)?,
            sum: take("_norm", order == NormOrder::Post)?,
        })
    }

    fn before(&self, x: &[f32], width: usize, input: &mut Rows) -> Result<(), Error> {
        let (copy, input) = (ops::Copy(x), input.reset(x.len() / width, width)?);
        match &self.input {
            Some(norm) => each_row(input, width, &ops::Then(copy, norm.work())),
            None => each_row(input, width, &copy),
        }
        Ok(())
    }

    fn after(&self, x: &mut [f32], config: &StackConfig, output: &mut [f32]) {
        let width = config.d_model;
        if let Some(norm) = &self.output {
            norm.apply(output, width);
        }
        let add = ops::Add { other: output, factor: factor(config) };
        match &self.sum {
            Some(norm) => each_row(x, width, &ops::Then(add, norm.work())),
            None => each_row(x, width, &add),
        }
    }
}

/// One layer of a stack.
#[derive(Debug)]
pub(super) struct Block {
    attention: Attention,
    attention_norms: Norms,
    pub(super) cross: Option<(Attention, Norms)>,
    feed_forward_norms: Norms,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    mask: Mask,
    is_causal: bool,
    /// Which of the rotations of the stack.
    rope: Option<usize>,
}

/// What kind of stack a block is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Role {
    pub(super) is_causal: bool,
    pub(super) has_cross: bool,
}

impl Block {
    /// The layer of this number, with `rope` among the rotations of the stack.
    pub(super) fn take(
        weights: &mut Weights,
        (prefix, layer): (&str, usize),
        config: &StackConfig,
        role: Role,
        rope: Option<usize>,
    ) -> Result<Self, Error> {
        let name = |part: &str| format!("{prefix}.{layer}.{part}");
        let (d, ff) = (config.d_model, config.d_ff);
        let attention = Attention::take(weights, &name("attention"), config, false)?;
        let has_norm = !config.layers[layer].no_attention_norm;
        let attention_norms = Norms::take(weights, &name("attention"), config, has_norm)?;
        let cross = role.has_cross.then(|| {
            let cross = Attention::take(weights, &name("cross"), config, true)?;
            Ok::<_, Error>((cross, Norms::take(weights, &name("cross"), config, true)?))
        });
        let cross = cross.transpose()?;
        let mut linear = |part: &str, sizes| {
            Linear::take(
                weights,
                &name(&format!("feed_forward.{part}")),
                sizes,
                config.feed_forward_bias,
            )
        };
        let gate = config.gated.then(|| linear("gate", [ff, d])).transpose()?;
        let (up, down) = (linear("up", [ff, d])?, linear("down", [d, ff])?);
        let feed_forward_norms = Norms::take(weights, &name("feed_forward"), config, true)?;
        let window = config.layers[layer].window;
        let mask = match (role.is_causal, window) {
            (true, None) => Mask::causal(),
            (true, Some(window)) => Mask::causal().window(window),
            (false, None) => Mask::full(),
            (false, Some(window)) => Mask::band(Some(window), Some(window)),
        };
        let is_causal = role.is_causal;
        Ok(Self {
            attention,
            attention_norms,
            cross,
            feed_forward_norms,
            gate,
            up,
            down,
            mask,
            is_causal,
            rope,
        })
    }

    /// Changes the residual stream `x [rows, d_model]`. `source`: what a decoder with an encoder reads.
    pub(super) fn forward(
        &self,
        x: &mut [f32],
        step: &Step<'_>,
        [keys, source]: [Option<Keys<'_>>; 2],
        work: &mut Workspace,
        recorder: &mut Recorder,
    ) -> Result<(), Error> {
        let (config, width) = (step.config, step.config.d_model);
        let rotations = self.rope.map(|i| &step.rotations[i]);
        work.each_part(x, config, |mut part, panel| {
            self.attention_norms.before(part.x, width, &mut panel.rows)?;
            self.attention.project(step, rotations, true, (&mut part, &panel.rows))
        })?;
        let layer = Layer { mask: &self.mask, is_causal: self.is_causal, own: true };
        let cached = attend(step, layer, keys.unwrap_or(Keys::Rows), work, recorder)?;
        self.attention.record_value_norms(cached, &work.v, config, recorder)?;
        let cross = self.cross.as_ref().zip(source);
        let read = cross.as_ref().map(|(cross, _)| *cross);
        work.each_part(x, config, |mut part, panel| {
            self.attention.finish(part.attended, panel)?;
            if matches!(config.order, NormOrder::Parallel | NormOrder::ParallelShared) {
                return self.feed_forward_beside(config, part.x, panel);
            }
            self.attention_norms.after(part.x, config, &mut panel.output);
            let Some((cross, norms)) = read else {
                return self.feed_forward(config, part.x, panel);
            };
            norms.before(part.x, width, &mut panel.rows)?;
            cross.project(step, None, false, (&mut part, &panel.rows))
        })?;
        let Some(((cross, norms), source)) = cross else { return Ok(()) };
        let layer = Layer { mask: &Mask::full(), is_causal: false, own: false };
        let cached =
            recorder.over_source(|recorder| attend(step, layer, source, work, recorder))?;
        cross.record_value_norms(cached, &work.v, config, recorder)?;
        work.each_part(x, config, |Part { x, attended, .. }, panel| {
            cross.finish(attended, panel)?;
            norms.after(x, config, &mut panel.output);
            self.feed_forward(config, x, panel)
        })
    }

    /// The feed-forward net of what attention has changed.
    fn feed_forward(
        &self,
        config: &StackConfig,
        x: &mut [f32],
        panel: &mut Panel,
    ) -> Result<(), Error> {
        self.feed_forward_norms.before(x, config.d_model, &mut panel.rows)?;
        self.net(config, panel)?;
        self.feed_forward_norms.after(x, config, &mut panel.output);
        Ok(())
    }

    /// The feed-forward net of what attention has read, and then the sum of both.
    fn feed_forward_beside(
        &self,
        config: &StackConfig,
        x: &mut [f32],
        panel: &mut Panel,
    ) -> Result<(), Error> {
        let width = config.d_model;
        std::mem::swap(&mut panel.output, &mut panel.parallel);
        let norms = match config.order {
            NormOrder::ParallelShared => &self.attention_norms,
            _ => &self.feed_forward_norms,
        };
        norms.before(x, width, &mut panel.rows)?;
        self.net(config, panel)?;
        each_row(x, width, &ops::Add { other: &panel.parallel, factor: factor(config) });
        self.feed_forward_norms.after(x, config, &mut panel.output);
        Ok(())
    }

    /// From `panel.rows` to `panel.output`.
    fn net(&self, config: &StackConfig, panel: &mut Panel) -> Result<(), Error> {
        let Panel { rows, gate, up, output, .. } = panel;
        let (n, width) = (rows.rows(), config.d_ff);
        let up = room(up, n * width);
        let (hidden, other) = match &self.gate {
            Some(linear) => {
                let gate = room(gate, n * width);
                project(rows, &mut [(linear, &mut *gate), (&self.up, &mut *up)])?;
                (gate, Some(&*up))
            }
            None => {
                project(rows, &mut [(&self.up, &mut *up)])?;
                (up, None)
            }
        };
        let activate = ops::Activate { activation: config.activation, other };
        each_row(rows.reset(n, width)?, width, &ops::Then(ops::Copy(hidden), activate));
        project(rows, &mut [(&self.down, room(output, n * config.d_model))])
    }
}
