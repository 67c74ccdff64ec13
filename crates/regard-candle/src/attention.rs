//! Attention with gradients for q, k and v.

use crate::error::Error;
use crate::tensors::{
    OpResult, StorageGuard, TensorElement, TensorSpec, from_engine, in_order, no_type, viewable,
};
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor};
use regard::machine::Precision;
use regard::problem::{Align, Dropout, Local, Normalizer};
use regard::score::RelativeBias;
use regard::{Grads, Machine, Mask, Number, Output, Plan, Problem, Score, bf16, f16};

/// The options of an attention call, those of [`Problem`] with Candle's tensors in the place of views.
///
/// No gradient reaches the tensors among them, so one that a variable stands behind is refused: see [`Error::Tracked`].
/// Numbers of `bias` have the type of q; those of `alibi`, `relative`, `sinks` and `centers` are f32, and f64 where q is f64.
#[derive(Clone, Debug, Default)]
pub struct Attention {
    /// Who may see whom.
    pub mask: Mask,
    /// Where row 0 stands among the keys.
    pub align: Align,
    /// Multiplies similarities; `1 / sqrt(qk_dim)` unless given.
    pub scale: Option<f64>,
    /// Bounds scores smoothly.
    pub softcap: Option<f64>,
    /// Which weights are dropped.
    pub dropout: Option<Dropout>,
    /// How scores become weights.
    pub normalizer: Normalizer,
    /// How exact the products are.
    pub precision: Option<Precision>,
    /// How a query and a key make a number.
    pub similarity: Similarity,
    /// Is added to scores: `[batch or 1, heads or 1, q_len or 1, k_len or 1]`.
    pub bias: Option<Tensor>,
    /// Slopes by distance, `[heads]`.
    pub alibi: Option<Tensor>,
    /// A bias looked up by distance.
    pub relative: Option<Relative>,
    /// A score without a key, `[heads]`.
    pub sinks: Option<Tensor>,
    /// Each row looks around its own center only, as far as the number says: `[batch, heads, q_len]`.
    pub centers: Option<(Tensor, usize)>,
}

/// How a query and a key make a number. `q^T W k` is the dot product of `q W`, whose gradients Candle has itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Similarity {
    /// `q . k`
    #[default]
    Dot,
    /// `-|q - k|^2`
    Distance,
}

/// A bias for each distance between a key and a row: see [`RelativeBias`].
#[derive(Clone, Debug)]
pub struct Relative {
    /// `[buckets, heads]`
    pub table: Tensor,
    /// Which distances share an entry.
    pub buckets: Buckets,
}

/// Which distances share an entry of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buckets {
    /// One for each distance from `-reach` to `reach`.
    Clipped {
        /// The farthest distance with an entry of its own.
        reach: usize,
    },
    /// Those of T5.
    T5 {
        /// From here on all distances share the last one.
        max_distance: usize,
        /// Whether keys ahead have entries of their own.
        bidirectional: bool,
    },
}

/// What attention returns.
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// `[batch, heads, q_len, v_dim]`; in memory in the order that q has.
    pub out: Tensor,
    lse: Vec<f32>,
}

impl AttentionOutput {
    /// `ln(sum of e^score)` of each row, `[batch, heads, q_len]`: with q and k all that the microscope needs. Numbers, no
    /// tensor, for a gradient by them would be lost.
    #[must_use]
    pub fn lse(&self) -> &[f32] {
        &self.lse
    }
}

/// Attention of `q [batch, heads.q, q_len, qk_dim]` over `k [batch, heads.kv, k_len, qk_dim]` and
/// `v [batch, heads.kv, k_len, v_dim]`, each read where it lies: what `transpose(1, 2)` makes of `[batch, length, heads, features]`
/// is as good as any. Memory is linear in the length, forward and backward.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &Attention,
) -> Result<AttentionOutput, Error> {
    match q.dtype() {
        DType::F32 => attend::<f32>([q, k, v], options),
        DType::F64 => attend::<f64>([q, k, v], options),
        DType::F16 => attend::<f16>([q, k, v], options),
        DType::BF16 => attend::<bf16>([q, k, v], options),
        other => Err(no_type("q", other)),
    }
}

fn attend<E: TensorElement>(
    qkv: [&Tensor; 3],
    options: &Attention,
) -> Result<AttentionOutput, Error> {
    for (name, tensor) in ["q", "k", "v"].into_iter().zip(qkv) {
        TensorSpec { name, axes: (4, "[batch, heads, length, features]"), types: E::ONLY }
            .check(tensor)?;
    }
    let learned = qkv[0].track_op() || qkv[1].track_op();
    if learned && matches!(options.normalizer, Normalizer::Hard | Normalizer::Sampled { .. }) {
        return Err(Error::NothingLearned { normalizer: options.normalizer.name() });
    }
    let options = options.checked::<E>(qkv[0])?;
    let [q, k, v] = [viewable(qkv[0])?, viewable(qkv[1])?, viewable(qkv[2])?];
    let mut output = {
        let held = Inputs::new([&q, &k, &v], &options);
        let plan = Plan::new(held.problem::<E>(&options)?, Machine::detect())?;
        plan.forward(held.q.view()?, held.k.view()?, held.v.view()?)?
    };
    #[expect(clippy::cast_possible_truncation, reason = "what is looked at, is looked at in f32")]
    let lse = output.lse.iter().map(|x| Number::to_f64(*x) as f32).collect();
    let none = regard::Shape { batch: 0, heads: 0, len: 0, dim: 0 };
    let without = regard::Tensor::new(vec![], none, regard::Layout::Bhsd)?;
    let made = OpResult::new(std::mem::replace(&mut output.out, without));
    let layout = made.layout;
    let out = q.apply_op3(&k, &v, Call { options, made, kept: output })?;
    Ok(AttentionOutput { out: in_order(&out, layout)?, lse })
}

impl Attention {
    /// The same with tensors that can be read, if they are what they must be.
    fn checked<E: TensorElement>(&self, q: &Tensor) -> Result<Self, Error> {
        let check = |name, axes, types, tensor: &Tensor| {
            TensorSpec { name, axes, types }.check(tensor)?;
            if tensor.track_op() { Err(Error::Tracked { option: name }) } else { Ok(()) }
        };
        let list = |name, axes, tensor: &Tensor| {
            check(name, axes, E::NUMBER, tensor)?;
            Ok::<_, Error>(tensor.contiguous()?)
        };
        let by_head = |name, tensor: &Option<Tensor>| {
            tensor.as_ref().map(|tensor| list(name, (1, "[heads]"), tensor)).transpose()
        };
        let bias = |bias: &Tensor| {
            let axes = "[batch or 1, heads or 1, q_len or 1, k_len or 1]";
            check("bias", (4, axes), E::ONLY, bias)?;
            viewable(bias)
        };
        let relative = |relative: &Relative| {
            let name = "relative table";
            let axes = (2, "[buckets, heads]");
            let table = list(name, axes, &relative.table)?;
            let (heads, found) = (q.dims()[1], table.dims()[1]);
            same("heads", ("q", heads), (name, found))?;
            Ok::<_, Error>(Relative { table, buckets: relative.buckets })
        };
        let centers = |(centers, reach): &(Tensor, usize)| {
            let centers = list("centers", (3, "[batch, heads, q_len]"), centers)?;
            for (i, axis) in ["batch", "heads", "queries"].into_iter().enumerate() {
                same(axis, ("q", q.dims()[i]), ("centers", centers.dims()[i]))?;
            }
            Ok::<_, Error>((centers, *reach))
        };
        Ok(Self {
            bias: self.bias.as_ref().map(bias).transpose()?,
            alibi: by_head("alibi", &self.alibi)?,
            relative: self.relative.as_ref().map(relative).transpose()?,
            sinks: by_head("sinks", &self.sinks)?,
            centers: self.centers.as_ref().map(centers).transpose()?,
            ..self.clone()
        })
    }
}

/// Refuses two tensors that disagree about an axis. The engine counts entries, and would not see axes in another order.
fn same(
    axis: &'static str,
    left: (&'static str, usize),
    right: (&'static str, usize),
) -> Result<(), regard::Error> {
    if left.1 == right.1 { Ok(()) } else { Err(regard::Error::Axis { axis, left, right }) }
}

/// All tensors of a call while they are read.
struct Inputs<'a> {
    q: StorageGuard<'a>,
    k: StorageGuard<'a>,
    v: StorageGuard<'a>,
    bias: Option<StorageGuard<'a>>,
    alibi: Option<StorageGuard<'a>>,
    relative: Option<StorageGuard<'a>>,
    sinks: Option<StorageGuard<'a>>,
    centers: Option<StorageGuard<'a>>,
}

impl<'a> Inputs<'a> {
    fn new([q, k, v]: [&'a Tensor; 3], options: &'a Attention) -> Self {
        Self {
            q: StorageGuard::new(q),
            k: StorageGuard::new(k),
            v: StorageGuard::new(v),
            bias: options.bias.as_ref().map(StorageGuard::new),
            alibi: options.alibi.as_ref().map(StorageGuard::new),
            relative: options.relative.as_ref().map(|relative| StorageGuard::new(&relative.table)),
            sinks: options.sinks.as_ref().map(StorageGuard::new),
            centers: options.centers.as_ref().map(|(centers, _)| StorageGuard::new(centers)),
        }
    }

    fn problem<E: TensorElement>(&self, options: &Attention) -> Result<Problem<'_, E>, Error> {
        let mut score = Score::new();
        if let Some(scale) = options.scale {
            score = score.scale(scale);
        }
        if let Some(cap) = options.softcap {
            score = score.softcap(cap);
        }
        if let Some(bias) = &self.bias {
            score = score.bias(bias.view()?);
        }
        if let Some(slopes) = &self.alibi {
            score = score.alibi(slopes.numbers()?);
        }
        if let Some(sinks) = &self.sinks {
            score = score.sinks(sinks.numbers()?);
        }
        if let (Some(table), Some(relative)) = (&self.relative, &options.relative) {
            let (table, entries) = (table.numbers()?, relative.table.dims()[0]);
            score = score.relative(match relative.buckets {
                Buckets::Clipped { reach } => RelativeBias::clipped(table, reach),
                Buckets::T5 { max_distance, bidirectional } => {
                    RelativeBias::t5(table, entries, max_distance, bidirectional)
                }
            });
        }
        let (q, k, v) = (self.q.view()?, self.k.view()?, self.v.view()?);
        let mut problem = Problem::new(&q, &k, &v).mask(options.mask.clone()).score(score);
        problem = problem.align(options.align).normalizer(options.normalizer);
        problem.dropout = options.dropout;
        problem.precision = options.precision.unwrap_or(problem.precision);
        problem.similarity = match options.similarity {
            Similarity::Dot => regard::problem::Similarity::Dot,
            Similarity::Distance => regard::problem::Similarity::Distance,
        };
        if let (Some(centers), Some((_, reach))) = (&self.centers, &options.centers) {
            problem = problem.local(Local::new(centers.numbers()?, *reach));
        }
        Ok(problem)
    }
}

/// A call in Candle's graph.
#[derive(Debug)]
struct Call<E: TensorElement> {
    options: Attention,
    made: OpResult,
    /// What the way back needs of the way forward. `out` is in the graph.
    kept: Output<E>,
}

impl<E: TensorElement> Call<E> {
    fn back(&self, qkv: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> Result<Grads<E>, Error> {
        if grad.track_op() {
            return Err(Error::SecondOrder);
        }
        let layout = self.made.layout;
        let grad = viewable(&in_order(grad, layout)?)?;
        let mut output = self.kept.clone();
        output.out = {
            let shape = StorageGuard::new(&in_order(&out.detach(), layout)?).view::<E>()?.shape();
            regard::Tensor::new(StorageGuard::new(out).numbers()?.to_vec(), shape, layout)?
        };
        let (held, grad) = (Inputs::new(qkv, &self.options), StorageGuard::new(&grad));
        let plan = Plan::new(held.problem::<E>(&self.options)?, Machine::detect())?;
        let (q, k, v) = (held.q.view()?, held.k.view()?, held.v.view()?);
        Ok(plan.backward(q, k, v, &output, grad.view()?)?)
    }
}

impl<E: TensorElement> CustomOp3 for Call<E> {
    fn name(&self) -> &'static str {
        "regard attention"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.made.take()
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grads = self.back([q, k, v], out, grad)?;
        // Candle would keep the gradients of constants too.
        let by = |input: &Tensor, grad| input.track_op().then(|| from_engine(grad)).transpose();
        Ok((by(q, grads.q)?, by(k, grads.k)?, by(v, grads.v)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn a_gradient_of_a_gradient_is_refused() {
        let x = Var::ones((1, 1, 2, 2), DType::F32, &Device::Cpu).unwrap();
        let (options, x) = (Attention::default(), x.as_tensor());
        let out = regard::Tensor::new(
            vec![1f32; 4],
            regard::Shape { batch: 1, heads: 1, len: 2, dim: 2 },
            regard::Layout::Bhsd,
        );
        let kept = Output::new(out.unwrap(), vec![0.0; 2]);
        let call = Call { options, made: OpResult::new(kept.out.clone()), kept };
        assert_eq!(call.back([x, x, x], x, x).unwrap_err(), Error::SecondOrder);
        assert!(call.back([x, x, x], x, &x.detach()).is_ok());
    }
}
