//! A block: attention, cross-attention, feed-forward net, and the norms around them.

use super::layers::{Linear, Norm, project};
use super::ops::{self, Rotations, each_row};
use super::record::Recorder;
use crate::error::Error;
use crate::files::{NormOrder, QkNorm, StackConfig, Weights};
use regard::plan::{OutputMut, ScratchPool};
use regard::score::RelativeBias;
use regard::{
    AttentionView, KvCache, Machine, Mask, Plan, Problem, Score, Sequence, View, ViewMut,
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
    Append(&'a mut KvCache<f32>, &'a [Sequence]),
    /// What sequences have in a cache: the source.
    Read(&'a KvCache<f32>, &'a [Sequence]),
}

/// Memory of a pass, kept from one to the next.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// Input of the layer that runs, quantised.
    rows: Rows,
    /// Input of the layer that runs.
    pub(super) input: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    lse: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// What the layer adds to the residual stream.
    output: Vec<f32>,
    /// What attention adds, where the feed-forward net reads the same input.
    parallel: Vec<f32>,
    scratch: ScratchPool<f32>,
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
        let [q, kv] = [config.heads.q, config.heads.kv].map(|heads| heads * dim);
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
        memory: &[f32],
        step: &Step<'_>,
        cache: &mut KvCache<f32>,
        sequences: &[Sequence],
        work: &mut Workspace,
    ) -> Result<(), Error> {
        let Workspace { rows, k, v, .. } = work;
        rows.set(memory, step.config.d_model)?;
        project(rows, &mut [(&self.k, &mut *k), (&self.v, &mut *v)])?;
        append(step, cache, sequences, [k, v])
    }

    /// From `work.input` to `work.output`.
    fn forward(
        &self,
        step: &Step<'_>,
        layer: Layer<'_>,
        keys: Keys<'_>,
        work: &mut Workspace,
        recorder: &mut Recorder,
    ) -> Result<(), Error> {
        let StackConfig { d_model, head_dim: dim, heads, .. } = *step.config;
        let Workspace { rows, input, q, k, v, attended, lse, output, scratch, .. } = work;
        rows.set(input, d_model)?;
        let own = !matches!(keys, Keys::Read(..));
        if own {
            project(rows, &mut [(&self.q, &mut *q), (&self.k, &mut *k), (&self.v, &mut *v)])?;
        } else {
            project(rows, &mut [(&self.q, &mut *q)])?;
        }
        let [q_width, kv_width] = [heads.q * dim, heads.kv * dim];
        if let Some([q_norm, k_norm]) = &self.norms {
            q_norm.apply(q, q_width);
            k_norm.apply(k, kv_width);
        }
        if let Some(rotations) = layer.rotations.filter(|_| own) {
            let rotate = ops::Rotate { rotations, head_dim: dim };
            each_row(q, q_width, &rotate);
            each_row(k, kv_width, &rotate);
        }
        let n = q.len() / q_width;
        attended.resize(n * q_width, 0.0);
        lse.resize(n * heads.q, 0.0);
        let sequences = match keys {
            Keys::Rows => None,
            Keys::Append(cache, sequences) => {
                append(step, cache, sequences, [k, v])?;
                Some((&*cache, sequences))
            }
            Keys::Read(cache, sequences) => Some((cache, sequences)),
        };
        let queries = view(q, step.offsets, [heads.q, dim])?;
        let to = OutputMut {
            out: view_mut(attended, step.offsets, [heads.q, dim])?,
            lse,
            entropy: None,
        };
        let own_rows = || -> Result<_, Error> {
            let view = |rows| view(rows, step.offsets, [heads.kv, dim]);
            Ok((view(k)?, view(v)?))
        };
        let problem = match sequences {
            Some((cache, sequences)) => Problem::cached(&queries, cache, sequences)?,
            None => {
                let (keys, values) = own_rows()?;
                Problem::new(&queries, &keys, &values)
            }
        };
        let problem = problem.mask(layer.mask.clone()).score(step.score(own, layer.is_causal));
        let plan = Plan::new(problem, step.machine)?.with_scratch(scratch);
        match sequences {
            Some(cached) => plan.forward_into(queries, cached, to)?,
            None => plan.forward_into(queries, own_rows()?, to)?,
        }
        if let Some(cached) = sequences.filter(|_| recorder.is_probed()) {
            recorder.probe(&AttentionView::cached_from_lse(&plan, queries, cached, lse)?)?;
        }
        if recorder.is_on() {
            let problem = |q: &View<'_, f32>, k: &View<'_, f32>| {
                let problem = Problem::new(q, k, k).mask(layer.mask.clone());
                problem.score(step.score(own, layer.is_causal))
            };
            let source = sequences.map(|(cache, sequences)| (cache, sequences[0]));
            recorder.record([q, k, lse], source, step.config, layer.is_causal, problem)?;
        }
        rows.set(attended, q_width)?;
        project(rows, &mut [(&self.out, output)])?;
        Ok(())
    }
}

/// What differs between the layers of a stack.
#[derive(Clone, Copy, Debug)]
struct Layer<'a> {
    mask: &'a Mask,
    is_causal: bool,
    rotations: Option<&'a Rotations>,
}

impl Step<'_> {
    /// Options of scores. Over a source there are no positions.
    fn score(&self, over_itself: bool, is_causal: bool) -> Score<'_, f32> {
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
fn view<'a>(
    data: &'a [f32],
    offsets: &'a [usize],
    [heads, dim]: [usize; 2],
) -> Result<View<'a, f32>, Error> {
    Ok(match equal_length(offsets) {
        Some(len) => View::bshd(data, [offsets.len() - 1, len, heads, dim])?,
        None => View::packed(data, offsets, [heads, dim])?,
    })
}

fn view_mut<'a>(
    data: &'a mut [f32],
    offsets: &'a [usize],
    [heads, dim]: [usize; 2],
) -> Result<ViewMut<'a, f32>, Error> {
    Ok(match equal_length(offsets) {
        Some(len) => ViewMut::bshd(data, [offsets.len() - 1, len, heads, dim])?,
        None => ViewMut::packed(data, offsets, [heads, dim])?,
    })
}

/// Appends the rows of each sequence to a cache.
fn append(
    step: &Step<'_>,
    cache: &mut KvCache<f32>,
    sequences: &[Sequence],
    rows: [&[f32]; 2],
) -> Result<(), Error> {
    let (heads, dim) = (step.config.heads.kv, step.config.head_dim);
    let width = heads * dim;
    for (sequence, [from, to]) in sequences.iter().zip(step.offsets.array_windows()) {
        let [k, v] = rows
            .map(|rows| View::bshd(&rows[from * width..to * width], [1, to - from, heads, dim]));
        cache.append(*sequence, k?, v?)?;
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

    fn before(&self, x: &[f32], width: usize, input: &mut Vec<f32>) {
        input.clear();
        input.extend_from_slice(x);
        if let Some(norm) = &self.input {
            norm.apply(input, width);
        }
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
        let layer = Layer { mask: &self.mask, is_causal: self.is_causal, rotations };
        self.attention_norms.before(x, width, &mut work.input);
        self.attention.forward(step, layer, keys.unwrap_or(Keys::Rows), work, recorder)?;
        if matches!(config.order, NormOrder::Parallel | NormOrder::ParallelShared) {
            std::mem::swap(&mut work.output, &mut work.parallel);
            if config.order == NormOrder::Parallel {
                self.feed_forward_norms.before(x, width, &mut work.input);
            }
            self.feed_forward(config, work)?;
            each_row(x, width, &ops::Add { other: &work.parallel, factor: factor(config) });
            self.feed_forward_norms.after(x, config, &mut work.output);
            return Ok(());
        }
        self.attention_norms.after(x, config, &mut work.output);
        if let (Some((cross, norms)), Some(source)) = (&self.cross, source) {
            norms.before(x, width, &mut work.input);
            let layer = Layer { mask: &Mask::full(), is_causal: false, rotations: None };
            recorder.over_source(|recorder| cross.forward(step, layer, source, work, recorder))?;
            norms.after(x, config, &mut work.output);
        }
        self.feed_forward_norms.before(x, width, &mut work.input);
        self.feed_forward(config, work)?;
        self.feed_forward_norms.after(x, config, &mut work.output);
        Ok(())
    }

    /// From `work.input` to `work.output`.
    fn feed_forward(&self, config: &StackConfig, work: &mut Workspace) -> Result<(), Error> {
        let Workspace { rows, input, gate, up, output, .. } = work;
        rows.set(input, config.d_model)?;
        let hidden = match &self.gate {
            Some(linear) => {
                project(rows, &mut [(linear, &mut *gate), (&self.up, &mut *up)])?;
                let work = ops::Activate { activation: config.activation, other: Some(up) };
                each_row(gate, config.d_ff, &work);
                gate
            }
            None => {
                project(rows, &mut [(&self.up, &mut *up)])?;
                each_row(
                    up,
                    config.d_ff,
                    &ops::Activate { activation: config.activation, other: None },
                );
                up
            }
        };
        rows.set(hidden, config.d_ff)?;
        project(rows, &mut [(&self.down, output)])
    }
}
