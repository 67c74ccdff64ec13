//! The tensors of a case, in any layout, and its [`Problem`].

use crate::cases::{Case, NAN_BITS, NanCase, NanIn, SimilarityCase};
use crate::close::{elements, lowest, narrow, wide};
use crate::noise::Noise;
use crate::scores::{Entries, ScoreOption, T5_BUCKETS};
use regard::plan::OutputGrads;
use regard::problem::{Additive, Dims, Dropout, Local, Normalizer, Similarity};
use regard::reference::{Inputs, Outcome};
use regard::score::alibi_slopes;
use regard::tensor::Strides;
use regard::{Element, Number, Problem, Score, Shape, View, ViewMut, bf16, f16};
use std::any::Any;
use std::fmt;

/// Memory layout of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// `[batch, heads, len, dim]`, dense.
    Bhsd,
    /// `[batch, len, heads, dim]`, dense.
    Bshd,
    /// A slice of `[batch, len, heads + 1, dim + 3]`, with NaN around it.
    Slice,
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bhsd => "bhsd",
            Self::Bshd => "bshd",
            Self::Slice => "slice",
        })
    }
}

/// A tensor in memory.
#[derive(Clone, Debug)]
pub struct TestTensor<E> {
    /// The memory, including elements outside the tensor.
    pub data: Vec<E>,
    /// Batch, heads, length, features.
    pub shape: Shape,
    arrangement: Arrangement,
}

impl<E: Element> TestTensor<E> {
    /// Stores `values [batch, heads, len, dim]` in the given layout.
    #[must_use]
    pub fn new(values: &[E], shape: Shape, arrangement: Arrangement) -> Self {
        let Shape { batch, heads, len, dim } = shape;
        let (strides, reach) = (arrangement.strides(shape), arrangement.reach(shape));
        let mut data = vec![narrow(f64::NAN); reach];
        for (row, values) in values.chunks_exact(dim.max(1)).enumerate() {
            let (item, i) = (row / len, row % len);
            let (b, h) = (item / heads, item % heads);
            let at = b * strides.batch + h * strides.heads + i * strides.len;
            data[at..at + dim].copy_from_slice(values);
        }
        debug_assert_eq!(values.len(), batch * heads * len * dim);
        Self { data, shape, arrangement }
    }

    /// Borrows the tensor.
    ///
    /// # Panics
    /// Never: the memory fits the shape.
    #[must_use]
    pub fn view(&self) -> View<'_, E> {
        let Shape { batch, heads, len, dim } = self.shape;
        match self.arrangement {
            Arrangement::Bhsd => View::bhsd(&self.data, [batch, heads, len, dim]),
            Arrangement::Bshd => View::bshd(&self.data, [batch, len, heads, dim]),
            Arrangement::Slice => {
                View::strided(&self.data, self.shape, self.arrangement.strides(self.shape))
            }
        }
        .expect("the memory was made for the shape")
    }

    /// Borrows the tensor mutably.
    ///
    /// # Panics
    /// Never: the memory fits the shape.
    pub fn view_mut(&mut self) -> ViewMut<'_, E> {
        let strides = self.arrangement.strides(self.shape);
        ViewMut::strided(&mut self.data, self.shape, strides)
            .expect("the memory was made for the shape")
    }

    /// Features of one position, mutably.
    pub fn row_mut(&mut self, batch: usize, head: usize, row: usize) -> &mut [E] {
        let strides = self.arrangement.strides(self.shape);
        let at = batch * strides.batch + head * strides.heads + row * strides.len;
        &mut self.data[at..at + self.shape.dim]
    }
}

impl Arrangement {
    fn strides(self, Shape { heads, len, dim, .. }: Shape) -> Strides {
        match self {
            Self::Bhsd => Strides { batch: heads * len * dim, heads: len * dim, len: dim },
            Self::Bshd => Strides { batch: heads * len * dim, heads: dim, len: heads * dim },
            Self::Slice => {
                let (heads, dim) = (heads + 1, dim + 3);
                Strides { batch: heads * len * dim, heads: dim, len: heads * dim }
            }
        }
    }

    /// Number of elements in memory.
    fn reach(self, shape: Shape) -> usize {
        shape.batch * self.strides(shape).batch
    }
}

/// All inputs of a case.
#[derive(Clone, Debug)]
pub struct Data<E: Element> {
    /// Queries.
    pub q: TestTensor<E>,
    /// Keys.
    pub k: TestTensor<E>,
    /// Values.
    pub v: TestTensor<E>,
    /// `W` of a general similarity or `w_q` of an additive one; without features if there is none.
    pub w: TestTensor<E>,
    /// `w_k` and `v` of an additive similarity.
    pub hidden: [TestTensor<E>; 2],
    /// The dense bias; without features if there is none.
    pub bias: TestTensor<E>,
    /// ALiBi slopes.
    pub slopes: Vec<E::Num>,
    /// Entries of the relative bias.
    pub table: Vec<E::Num>,
    /// Sinks.
    pub sinks: Vec<E::Num>,
    /// Window center of each row if attention is local, within the keys or slightly outside; otherwise empty.
    pub centers: Vec<E::Num>,
    /// Attention mask.
    pub mask: regard::Mask,
    /// Gradient of the loss with respect to the output.
    pub d_out: TestTensor<E>,
    /// Gradients of the loss with respect to lse and to the entropy.
    pub d_rows: [Vec<E::Num>; 2],
}

impl<E: Element> Data<E> {
    /// Generates the inputs of a case: the same numbers for every layout and dtype, up to rounding.
    #[must_use]
    pub fn new(case: &Case) -> Self {
        let Dims { batch, heads, q_len, k_len, q_dim, qk_dim, v_dim } = case.dims;
        let units = qk_dim / 2 + 3;
        let mut noise = Noise::new(case.seed);
        let mut tensor = |batch, heads, len, dim| {
            let shape = Shape { batch, heads, len, dim };
            TestTensor::new(&noise.normals(batch * heads * len * dim), shape, case.arrangement)
        };
        let (q, k) = (tensor(batch, heads.q, q_len, q_dim), tensor(batch, heads.kv, k_len, qk_dim));
        let v = tensor(batch, heads.kv, k_len, v_dim);
        let mut w = match case.similarity {
            SimilarityCase::General => tensor(1, 1, q_dim, qk_dim),
            SimilarityCase::GeneralPerHead => tensor(1, heads.q, q_dim, qk_dim),
            SimilarityCase::Additive => tensor(1, 1, q_dim, units),
            SimilarityCase::AdditivePerHead => tensor(1, heads.q, q_dim, units),
            SimilarityCase::AdditiveProjected => tensor(1, 1, q_dim, qk_dim),
            _ => tensor(1, 1, 1, 0),
        };
        let mut hidden = match case.similarity {
            SimilarityCase::Additive => [tensor(1, 1, qk_dim, units), tensor(1, 1, 1, units)],
            SimilarityCase::AdditivePerHead => {
                [tensor(1, heads.kv, qk_dim, units), tensor(1, heads.q, 1, units)]
            }
            SimilarityCase::AdditiveProjected => [tensor(1, 1, 1, 0), tensor(1, 1, 1, qk_dim)],
            _ => [tensor(1, 1, 1, 0), tensor(1, 1, 1, 0)],
        };
        // Makes q^T W k about as large as q . k, and the sums of a hidden layer about 1.
        let size = |w: &mut TestTensor<E>, from: usize| {
            let size = 1.0 / (from as f64).sqrt();
            w.data.iter_mut().for_each(|w| *w = narrow(wide(*w) * size));
        };
        size(&mut w, q_dim);
        size(&mut hidden[0], qk_dim);
        let bias = case.scores.iter().find_map(|option| match option {
            ScoreOption::Bias { axes, entries } => {
                let whole = [batch, heads.q, q_len, k_len];
                let [b, h, q, k] = std::array::from_fn(|i| if axes[i] { whole[i] } else { 1 });
                let mut bias = tensor(b, h, q, k);
                entries.put_into(&mut bias, &mut Noise::new(case.seed + 1));
                Some(bias)
            }
            _ => None,
        });
        let bias = bias.unwrap_or_else(|| tensor(1, 1, 1, 0));
        let buckets = case.scores.iter().find_map(|option| match option {
            ScoreOption::Clipped(reach) => Some(2 * reach + 1),
            ScoreOption::T5 { .. } => Some(T5_BUCKETS.0),
            _ => None,
        });
        let d_out = tensor(batch, heads.q, q_len, v_dim);
        let mut data = Self {
            d_out,
            d_rows: [
                noise.normals(batch * heads.q * q_len),
                noise.normals(batch * heads.q * q_len),
            ],
            table: noise.normals(buckets.unwrap_or(0) * heads.q),
            sinks: noise.normals(heads.q),
            slopes: alibi_slopes(heads.q),
            centers: match case.reach {
                Some(_) => {
                    let center = |x: E::Num| (wide(x) * 0.3 + 0.5) * k_len as f64;
                    let normals = noise.normals::<E::Num>(batch * heads.q * q_len);
                    normals.into_iter().map(|x| E::Num::from_f64(center(x))).collect()
                }
                None => Vec::new(),
            },
            mask: (case.mask.build)(&case.dims, &mut noise),
            q,
            k,
            v,
            w,
            hidden,
            bias,
        };
        data.put_nan(case.nan);
        data
    }

    /// Puts a NaN into the middle of a tensor.
    fn put_nan(&mut self, nan: Option<NanCase>) {
        let Some(NanCase { tensor, bits }) = nan else { return };
        let tensor = match tensor {
            NanIn::Q => &mut self.q,
            NanIn::K => &mut self.k,
            NanIn::V => &mut self.v,
            NanIn::Bias => &mut self.bias,
            NanIn::DOut => &mut self.d_out,
        };
        let row = tensor.shape.len / 2;
        let dim = tensor.shape.dim / 2;
        tensor.row_mut(0, 0, row)[dim] = nan_of(NAN_BITS[bits]);
    }

    /// q, k and v.
    #[must_use]
    pub fn inputs(&self) -> Inputs<'_, E> {
        (self.q.view(), self.k.view(), self.v.view())
    }

    /// The call that a case describes.
    #[must_use]
    pub fn problem(&self, case: &Case) -> Problem<'_, E> {
        let score = case.scores.iter().fold(Score::new(), |score, option| option.join(score, self));
        let similarity = match case.similarity {
            SimilarityCase::Dot => Similarity::Dot,
            SimilarityCase::Distance => Similarity::Distance,
            SimilarityCase::General | SimilarityCase::GeneralPerHead => {
                Similarity::General(self.w.view())
            }
            SimilarityCase::Additive | SimilarityCase::AdditivePerHead => {
                let [w_k, v] = self.hidden.each_ref().map(TestTensor::view);
                Similarity::Additive(Additive { w_q: self.w.view(), w_k: Some(w_k), v })
            }
            SimilarityCase::AdditiveProjected => Similarity::Additive(Additive {
                w_q: self.w.view(),
                w_k: None,
                v: self.hidden[1].view(),
            }),
        };
        let (q, k, v) = self.inputs();
        let problem = Problem::new(&q, &k, &v).mask(self.mask.clone()).score(score);
        let problem = problem.similarity(similarity).align(case.align);
        let problem = problem.normalizer(case.normalizer);
        let local = case.reach.map(|reach| Local::new(&self.centers, reach));
        let problem = local.into_iter().fold(problem, Problem::local);
        let problem = if case.entropy { problem.entropy() } else { problem };
        let problem = case.precision.into_iter().fold(problem, Problem::precision);
        let dropout = case.dropout.map(|rate| Dropout::new(rate, case.seed, 3));
        dropout.into_iter().fold(problem, Problem::dropout)
    }

    /// Gradients of the loss with respect to the output of a case.
    #[must_use]
    pub fn output_grads(&self, case: &Case) -> OutputGrads<'_, E> {
        let [d_lse, d_entropy] = &self.d_rows;
        let output_grads = OutputGrads::new(self.d_out.view()).with_bias();
        let output_grads = if has_lse(case) { output_grads.lse(d_lse) } else { output_grads };
        if case.entropy { output_grads.entropy(d_entropy) } else { output_grads }
    }

    /// The same for the reference, in any number type.
    #[must_use]
    pub fn output_grads_by_definition<M: Number>(&self, case: &Case) -> Outcome<M> {
        let out = elements(self.d_out.view()).map(|x| M::from_f64(wide(x))).collect();
        let [mut lse, mut entropy] = self
            .d_rows
            .each_ref()
            .map(|d| d.iter().map(|x| M::from_f64(wide(*x))).collect::<Vec<M>>());
        if !has_lse(case) {
            lse.fill(M::zero());
        }
        if !case.entropy {
            entropy.fill(M::zero());
        }
        Outcome { out, lse, entropy, max_score: Vec::new() }
    }
}

/// Whether a loss may depend on lse.
fn has_lse(case: &Case) -> bool {
    case.normalizer != Normalizer::Sparsemax
}

/// A NaN with the sign and the first and last mantissa bits of the `f16` NaN `bits`.
fn nan_of<E: Element>(bits: u16) -> E {
    let (sign, quiet) = (u64::from(bits >> 15), u64::from(bits >> 9 & 1));
    // Sets all mantissa bits after the first if all are set in `bits`; otherwise keeps the last bits.
    let rest = |digits: u32| match bits & 0x1ff {
        0x1ff => (1u64 << (digits - 1)) - 1,
        last => u64::from(last),
    };
    let of = |exponent: u32, digits: u32| {
        let all = sign << exponent | ((1 << exponent) - 1);
        all << digits | quiet << (digits - 1) | rest(digits)
    };
    #[expect(clippy::cast_possible_truncation, reason = "as many bits as the type has")]
    let x: Box<dyn Any> = match E::NAME {
        "f32" => Box::new(f32::from_bits(of(8, 23) as u32)),
        "f64" => Box::new(f64::from_bits(of(11, 52))),
        "f16" => Box::new(f16::from_bits(of(5, 10) as u16)),
        _ => Box::new(bf16::from_bits(of(8, 7) as u16)),
    };
    *x.downcast().expect("an element of this name")
}

impl Entries {
    fn put_into<E: Element>(self, bias: &mut TestTensor<E>, noise: &mut Noise) {
        let lowest = narrow(lowest::<E>());
        let Shape { batch, heads, len, dim } = bias.shape;
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for i in 0..len {
                let kept = noise.below(dim);
                for (key, x) in bias.row_mut(b, h, i).iter_mut().enumerate() {
                    match self {
                        Self::Hiding if noise.chance(0.3) => *x = narrow(f64::NEG_INFINITY),
                        Self::Lowest if key != kept && noise.chance(0.3) => *x = lowest,
                        Self::OnlyLowest => *x = lowest,
                        _ => {}
                    }
                }
            }
        }
    }
}
