//! Attention with every option of the engine, and gradients for everything that it depends on.

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, try_run};
use crate::tensors::{Number, by_type, dense, from_engine, numbers, sizes, tensor, view, viewable};
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{DispatchTensor, Flex};
use burn::tensor::{DType, Element as BurnElement, Tensor};
use regard::machine::Precision;
use regard::plan::OutputGrads;
use regard::problem::{Additive, Align, Dropout, Local, Normalizer};
use regard::score::RelativeBias;
use regard::{Element, Grads, Layout, Machine, Mask, Output, Plan, Problem, Score, Shape, View};
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// The options of an attention call, those of [`Problem`] with Burn's tensors in the place of views. A tensor that takes part in
/// autodiff receives its gradient.
///
/// Numbers of `alibi`, `relative`, `sinks` and `centers` are f32, and f64 where q is f64.
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
    /// Where the normalizer chooses keys: whether the gradient by the scores is that of the softmax, see
    /// [`OutputGrads::straight_through`]. Without it such a call takes no part in autodiff.
    pub straight_through: bool,
    /// How exact the products are.
    pub precision: Option<Precision>,
    /// Whether the entropy of each row's weights is asked for.
    pub entropy: bool,
    /// How a query and a key make a number.
    pub similarity: Similarity,
    /// Is added to scores: `[batch or 1, heads or 1, q_len or 1, k_len or 1]`.
    pub bias: Option<Tensor<4>>,
    /// Slopes by distance, `[heads]`.
    pub alibi: Option<Tensor<1>>,
    /// A bias looked up by distance.
    pub relative: Option<Relative>,
    /// A score without a key, `[heads]`.
    pub sinks: Option<Tensor<1>>,
    /// Each row looks around its own center only, as far as the number says: `[batch, heads, q_len]`.
    pub centers: Option<(Tensor<3>, usize)>,
}

/// How a query and a key make a number: see [`regard::problem::Similarity`].
#[derive(Clone, Debug, Default)]
#[expect(clippy::large_enum_variant, reason = "one for a call, and its tensors are handles")]
pub enum Similarity {
    /// `q . k`
    #[default]
    Dot,
    /// `-|q - k|^2`
    Distance,
    /// `q^T W k`, `W [1, heads or 1, q_dim, k_dim]`
    General(Tensor<4>),
    /// `v^T tanh(W_q^T q + W_k^T k)`
    Additive {
        /// `[1, heads or 1, q_dim, hidden]`
        w_q: Tensor<4>,
        /// `[1, heads or 1, k_dim, hidden]`; `None` where keys are projected already.
        w_k: Option<Tensor<4>>,
        /// `[1, heads or 1, 1, hidden]`
        v: Tensor<4>,
    },
}

/// A bias learned for each distance between a key and a row: see [`RelativeBias`].
#[derive(Clone, Debug)]
pub struct Relative {
    /// `[buckets, heads]`
    pub table: Tensor<2>,
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

impl Buckets {
    /// The bias of a table that has so many rows, for the engine.
    #[must_use]
    pub fn bias<N: regard::Number>(self, table: &[N], rows: usize) -> RelativeBias<'_, N> {
        match self {
            Self::Clipped { reach } => RelativeBias::clipped(table, reach),
            Self::T5 { max_distance, bidirectional } => {
                RelativeBias::t5(table, rows, max_distance, bidirectional)
            }
        }
    }
}

/// What attention returns.
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// `[batch, heads, q_len, v_dim]`; in memory in the order that q has.
    pub out: Tensor<4>,
    /// The entropy of each row's weights before any are dropped, `[batch, heads, q_len]`, with a gradient of its own, if it was asked
    /// for.
    pub entropy: Option<Tensor<3>>,
    op: Arc<Call>,
}

impl AttentionOutput {
    /// `ln(sum of e^score)` of each row, `[batch, heads, q_len]`: with q and k all that the microscope needs.
    #[must_use]
    pub fn lse(&self) -> Vec<f32> {
        self.of_rows(OfRow::Lse)
    }

    /// The largest score of each row, `[batch, heads, q_len]`, if the entropy was asked for; else nothing.
    #[must_use]
    pub fn max_score(&self) -> Vec<f32> {
        self.of_rows(OfRow::MaxScore)
    }

    fn of_rows(&self, which: OfRow) -> Vec<f32> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "what is looked at, is looked at in f32"
        )]
        fn narrow<E: Element>(kept: &dyn Any, which: OfRow) -> Option<Vec<f32>> {
            let kept = kept.downcast_ref::<Output<E>>()?;
            let numbers = match which {
                OfRow::Lse => &kept.lse[..],
                OfRow::MaxScore => kept.max_score.as_deref().unwrap_or_default(),
            };
            Some(numbers.iter().map(|x| regard::Number::to_f64(*x) as f32).collect())
        }
        let kept = self.op.kept.get().map(AsRef::as_ref);
        let found = kept.and_then(|kept: &(dyn Any + Send + Sync)| {
            let kept: &dyn Any = kept;
            narrow::<f32>(kept, which)
                .or_else(|| narrow::<f64>(kept, which))
                .or_else(|| narrow::<regard::f16>(kept, which))
                .or_else(|| narrow::<regard::bf16>(kept, which))
        });
        found.unwrap_or_default()
    }
}

/// A number that the engine keeps of each row.
#[derive(Clone, Copy, Debug)]
enum OfRow {
    Lse,
    MaxScore,
}

/// Attention of `q [batch, heads.q, q_len, qk_dim]` over `k [batch, heads.kv, k_len, qk_dim]` and
/// `v [batch, heads.kv, k_len, v_dim]`, each read where it lies: what `swap_dims` makes of `[batch, length, heads, features]` is as
/// good as any. Memory is linear in the length, forward and backward.
pub fn attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: &Attention,
) -> Result<AttentionOutput, Error> {
    options.check(&q, [k.dtype(), v.dtype()])?;
    let mut inputs = vec![q.into_dispatch(), k.into_dispatch(), v.into_dispatch()];
    let (slots, learned): (Vec<_>, Vec<_>) = options.learned().into_iter().unzip();
    inputs.extend(learned);
    let (kept, form) = (OnceLock::new(), OnceLock::new());
    let op = Arc::new(Call { options: options.without_tensors(), slots, kept, form });
    if !options.entropy {
        return Ok(AttentionOutput { out: try_run(op.clone(), inputs)?, entropy: None, op });
    }
    let both: Tensor<1> = try_run(op.clone(), inputs)?;
    let (Shape { batch, heads, len, dim }, layout) =
        *op.form.get().expect("forward has been before this");
    let (rows, all) = (batch * heads * len, batch * heads * len * dim);
    let out = both.clone().narrow(0, 0, all);
    let out = match layout {
        Layout::Bhsd => out.reshape([batch, heads, len, dim]),
        Layout::Bshd => out.reshape([batch, len, heads, dim]).swap_dims(1, 2),
    };
    let entropy = both.narrow(0, all, rows).reshape([batch, heads, len]);
    Ok(AttentionOutput { out, entropy: Some(entropy), op })
}

/// Which option a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Bias,
    Alibi,
    Relative(Buckets),
    Sinks,
    Centers(usize),
    General,
    AdditiveQ,
    AdditiveK,
    AdditiveV,
}

impl Attention {
    /// What the engine cannot see: lists reach it without their axes.
    fn check(&self, q: &Tensor<4>, [k, v]: [DType; 2]) -> Result<(), Error> {
        let [batch, heads, q_len, _] = q.dims();
        let known = [DType::F32, DType::F64, DType::F16, DType::BF16].contains(&q.dtype());
        if !known || k != q.dtype() || v != q.dtype() {
            return Err(Error::Types {
                found: [q.dtype(), k, v].map(|dtype| format!("{dtype:?}")),
            });
        }
        let same = |option, found: &[usize], expected: &[usize]| {
            let (found, expected) = (found.to_vec(), expected.to_vec());
            if found == expected { Ok(()) } else { Err(Error::Sizes { option, found, expected }) }
        };
        if let Some(Relative { table, .. }) = &self.relative {
            let [buckets, _] = table.dims();
            same("relative", &table.dims(), &[buckets, heads])?;
        }
        match &self.centers {
            Some((centers, _)) => same("centers", &centers.dims(), &[batch, heads, q_len]),
            None => Ok(()),
        }
    }

    /// Whether keys are chosen, so that scores have no gradient.
    fn chooses(&self) -> bool {
        matches!(self.normalizer, Normalizer::Hard | Normalizer::Sampled { .. })
    }

    fn learned(&self) -> Vec<(Slot, DispatchTensor)> {
        fn put<const D: usize>(
            slot: Slot,
            tensor: &Option<Tensor<D>>,
        ) -> Option<(Slot, DispatchTensor)> {
            tensor.clone().map(|tensor| (slot, tensor.into_dispatch()))
        }
        let relative = self.relative.as_ref().map(|relative| {
            (Slot::Relative(relative.buckets), relative.table.clone().into_dispatch())
        });
        let centers = self
            .centers
            .clone()
            .map(|(centers, reach)| (Slot::Centers(reach), centers.into_dispatch()));
        let of_similarity = match &self.similarity {
            Similarity::Dot | Similarity::Distance => vec![],
            Similarity::General(w) => vec![put(Slot::General, &Some(w.clone()))],
            Similarity::Additive { w_q, w_k, v } => vec![
                put(Slot::AdditiveQ, &Some(w_q.clone())),
                put(Slot::AdditiveK, w_k),
                put(Slot::AdditiveV, &Some(v.clone())),
            ],
        };
        let plain = [
            put(Slot::Bias, &self.bias),
            put(Slot::Alibi, &self.alibi),
            put(Slot::Sinks, &self.sinks),
        ];
        plain.into_iter().chain([relative, centers]).chain(of_similarity).flatten().collect()
    }

    /// What is left for the call itself: its tensors are among the inputs.
    fn without_tensors(&self) -> Self {
        let similarity = match &self.similarity {
            Similarity::Distance => Similarity::Distance,
            _ => Similarity::Dot,
        };
        let (bias, alibi, relative, sinks, centers) = (None, None, None, None, None);
        Self { similarity, bias, alibi, relative, sinks, centers, ..self.clone() }
    }
}

#[derive(Debug)]
struct Call {
    options: Attention,
    /// What the inputs after q, k and v are.
    slots: Vec<Slot>,
    /// The engine's output, without `out` itself.
    kept: OnceLock<Box<dyn Any + Send + Sync>>,
    /// The sizes and the order of `out`.
    form: OnceLock<(Shape, Layout)>,
}

/// Inputs in the form that views are taken of.
fn laid_out(slots: &[Slot], inputs: &[FlexTensor]) -> Vec<FlexTensor> {
    let list = |i: usize| {
        let slot = i.checked_sub(3).map(|i| slots[i]);
        matches!(slot, Some(Slot::Alibi | Slot::Relative(_) | Slot::Sinks | Slot::Centers(_)))
    };
    inputs.iter().enumerate().map(|(i, t)| if list(i) { dense(t) } else { viewable(t) }).collect()
}

impl Call {
    fn problem<'a, E: Number>(&self, inputs: &'a [FlexTensor]) -> Result<Problem<'a, E>, Error>
    where
        E::Num: Number,
    {
        let find = |is_slot: fn(&Slot) -> bool| {
            self.slots.iter().position(is_slot).map(|i| (self.slots[i], &inputs[3 + i]))
        };
        let matrix = |is_slot| find(is_slot).map(|(_, t)| view::<E>(t)).transpose();
        let list = |is_slot| find(is_slot).map(|(slot, t)| (slot, numbers::<E::Num>(t), sizes(t)));
        let mut score = Score::new();
        if let Some(scale) = self.options.scale {
            score = score.scale(scale);
        }
        if let Some(cap) = self.options.softcap {
            score = score.softcap(cap);
        }
        if let Some(bias) = matrix(|s| *s == Slot::Bias)? {
            score = score.bias(bias);
        }
        if let Some((_, slopes, _)) = list(|s| *s == Slot::Alibi) {
            score = score.alibi(slopes);
        }
        if let Some((_, sinks, _)) = list(|s| *s == Slot::Sinks) {
            score = score.sinks(sinks);
        }
        if let Some((Slot::Relative(buckets), table, sizes)) =
            list(|s| matches!(s, Slot::Relative(_)))
        {
            score = score.relative(buckets.bias(table, sizes[0]));
        }
        let [q, k, v] = [view::<E>(&inputs[0])?, view::<E>(&inputs[1])?, view::<E>(&inputs[2])?];
        let mut problem = Problem::new(&q, &k, &v).mask(self.options.mask.clone()).score(score);
        problem = problem.align(self.options.align).normalizer(self.options.normalizer);
        problem.dropout = self.options.dropout;
        problem.entropy = self.options.entropy;
        problem.precision = self.options.precision.unwrap_or(problem.precision);
        if let Some((Slot::Centers(reach), centers, _)) = list(|s| matches!(s, Slot::Centers(_))) {
            problem = problem.local(Local::new(centers, reach));
        }
        problem.similarity = if let Some(w) = matrix(|s| *s == Slot::General)? {
            regard::problem::Similarity::General(w)
        } else if let (Some(w_q), w_k, Some(v)) = (
            matrix(|s| *s == Slot::AdditiveQ)?,
            matrix(|s| *s == Slot::AdditiveK)?,
            matrix(|s| *s == Slot::AdditiveV)?,
        ) {
            regard::problem::Similarity::Additive(Additive { w_q, w_k, v })
        } else if let Similarity::Distance = self.options.similarity {
            regard::problem::Similarity::Distance
        } else {
            regard::problem::Similarity::Dot
        };
        Ok(problem)
    }

    fn ahead<E: Number>(&self, inputs: &[FlexTensor]) -> Result<FlexTensor, Error>
    where
        E::Num: Number,
    {
        let [q, k, v] = qkv::<E>(inputs)?;
        let plan = Plan::new(self.problem::<E>(inputs)?, Machine::detect())?;
        let mut output = plan.forward(q, k, v)?;
        let empty = regard::Tensor::new(
            vec![],
            Shape { batch: 0, heads: 0, len: 0, dim: 0 },
            Layout::Bhsd,
        )?;
        let out = std::mem::replace(&mut output.out, empty);
        let _ = self.form.set((out.shape(), out.layout()));
        // An operation of Burn has one output: where there are two, they lie one after the other.
        let result = match &output.entropy {
            None => from_engine(out),
            Some(entropy) => {
                let mut both = out.into_data();
                both.extend(entropy.iter().map(|x| E::narrow(*x)));
                let n = both.len();
                tensor(both, &[n])
            }
        };
        let _ = self.kept.set(Box::new(output));
        Ok(result)
    }

    fn back<E: Number>(&self, back: &BackwardArgs<'_>) -> Result<Grads<E>, Error>
    where
        E::Num: Number,
    {
        let inputs = laid_out(&self.slots, back.inputs);
        let [q, k, v] = qkv::<E>(&inputs)?;
        let plan = Plan::new(self.problem::<E>(&inputs)?, Machine::detect())?;
        let kept = self.kept.get().and_then(|kept| kept.downcast_ref::<Output<E>>());
        let mut output = kept.expect("forward has been before backward").clone();
        let (shape, layout) = *self.form.get().expect("forward has been before backward");
        let n = shape.batch * shape.heads * shape.len * shape.dim;
        output.out = regard::Tensor::new(back.output.storage::<E>()[..n].to_vec(), shape, layout)?;
        let by_bias = |slot: &Slot| *slot == Slot::Bias;
        let bias = self.slots.iter().position(by_bias).is_some_and(|i| back.needs_grad[3 + i]);
        let run = |d: OutputGrads<'_, E>| {
            let d = if self.options.chooses() { d.straight_through() } else { d };
            plan.backward(q, k, v, &output, if bias { d.with_bias() } else { d })
        };
        if !self.options.entropy {
            let output_grad = viewable(&back.output_grad);
            return Ok(run(OutputGrads::new(view::<E>(&output_grad)?))?);
        }
        let output_grad = dense(&back.output_grad);
        let (d_out, d_entropy) = numbers::<E>(&output_grad).split_at(n);
        let d_out = regard::Tensor::new(d_out.to_vec(), shape, layout)?;
        let d_entropy: Vec<E::Num> = d_entropy.iter().map(|x| x.widen()).collect();
        Ok(run(OutputGrads::new(d_out.view()).entropy(&d_entropy))?)
    }

    /// The gradients in the order of the inputs.
    fn in_order<E: Number>(
        &self,
        back: &BackwardArgs<'_>,
        grads: Grads<E>,
    ) -> Vec<Option<FlexTensor>>
    where
        E::Num: Number,
    {
        // The engine sums gradients of parameters in f32 where they are of a half type.
        let narrow = |grad: FlexTensor| Flex::float_cast(grad, <E as BurnElement>::dtype().into());
        let matrix =
            |grad: Option<regard::Tensor<E::Num>>| grad.map(|grad| narrow(from_engine(grad)));
        let additive = grads.additive.map(|a| (a.w_q, a.w_k, a.v));
        let (w_q, w_k, w_v) =
            additive.map_or((None, None, None), |(q, k, v)| (Some(q), k, Some(v)));
        let (mut bias, mut w, mut w_q, mut w_k, mut w_v) =
            (matrix(grads.bias), matrix(grads.w), matrix(w_q), matrix(w_k), matrix(w_v));
        let lists = [grads.alibi, grads.relative, grads.sinks, grads.centers];
        let [mut alibi, mut relative, mut sinks, mut centers] = lists.map(Some);
        let mut all: Vec<_> =
            [grads.q, grads.k, grads.v].into_iter().map(|grad| Some(from_engine(grad))).collect();
        for (i, slot) in self.slots.iter().enumerate() {
            let shape = sizes(&back.inputs[3 + i]);
            let list =
                |grad: &mut Option<Vec<E::Num>>| grad.take().map(|grad| tensor(grad, &shape));
            all.push(match slot {
                Slot::Bias => bias.take(),
                Slot::General => w.take(),
                Slot::AdditiveQ => w_q.take(),
                Slot::AdditiveK => w_k.take(),
                Slot::AdditiveV => w_v.take(),
                Slot::Alibi => list(&mut alibi),
                Slot::Relative(_) => list(&mut relative),
                Slot::Sinks => list(&mut sinks),
                Slot::Centers(_) => list(&mut centers),
            });
        }
        all.into_iter()
            .zip(back.needs_grad)
            .map(|(grad, needs_grad)| grad.filter(|_| *needs_grad))
            .collect()
    }
}

fn qkv<E: Number>(inputs: &[FlexTensor]) -> Result<[View<'_, E>; 3], Error> {
    Ok([view::<E>(&inputs[0])?, view::<E>(&inputs[1])?, view::<E>(&inputs[2])?])
}

impl Operation for Call {
    fn forward(&self, inputs: &[FlexTensor], keep: bool) -> Result<FlexTensor, Error> {
        if keep && self.options.chooses() && !self.options.straight_through {
            return Err(Error::NothingLearned);
        }
        let inputs = laid_out(&self.slots, inputs);
        by_type!(inputs[0], E => self.ahead::<E>(&inputs))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        by_type!(back.inputs[0], E => {
            let grads = self.back::<E>(&back).expect("forward has checked the call");
            self.in_order(&back, grads)
        })
    }
}
