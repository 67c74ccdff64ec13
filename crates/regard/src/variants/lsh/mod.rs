//! LSH attention (Reformer, Kitaev et al. 2020): softmax attention over the keys that hashing places near each query.

mod buckets;
mod candidates;
mod hash;
mod recall;
mod rows;

use crate::description::mask::Mask;
use crate::description::problem::{Dims, Problem};
use crate::description::score::Score;
use crate::error::Error;
use crate::machine::Machine;
use crate::machine::simd::Element;
use crate::plan::Plan;
use crate::plan::grads::{Grads, OutputGrads};
use crate::plan::output::{Output, OutputView};
use crate::tensor::view::{Inputs, View};
pub use buckets::Buckets;
pub use recall::{Recall, Share};
use rows::{Sorted, Sums, copied, numbers, reordered};

/// LSH attention (Reformer, Kitaev et al. 2020): softmax attention of each query over the keys that hashing places near it.
/// Its cost is linear in the length, and its result differs from that of full attention.
///
/// In each round, every query and key is hashed to a bucket number. A digit of that number is the index of the largest of
/// 16 dot products, with 8 random directions and their negatives. The keys are sorted by bucket, then by position, and cut
/// into blocks of `bucket_size`. A query has the rank that a key of its bucket and position would have. Its candidates are
/// the keys of the block at that rank and of both adjacent blocks, or of that block and the preceding one if
/// [causal](Self::causal). With `P_i` the candidates of query `i` in all rounds together:
///
/// ```text
/// out_i = sum over j in P_i of softmax(q_i . k_j / sqrt(d))_j v_j        lse_i = ln( sum over j in P_i of e^score_ij )
/// ```
///
/// This is exact: a pair that is a candidate in several rounds counts once. `P_i` depends on query `i`, the keys and the
/// seed, not on other queries. The output of a query without candidates is 0. Gradients are those of this function with
/// `P_i` held constant, which it is almost everywhere. Queries may equal the keys (the shared projection of the paper,
/// without its rule that a position avoids itself) or differ from them, in any number; the last query is aligned with the
/// last key.
///
/// Cost: `rounds x q_len x 3 bucket_size` pairs (causal: 2 instead of 3); for hashing, 8 dot products of `d` features per
/// query or key, round and digit, with `log16(k_len / bucket_size)` digits; memory for `rounds` outputs.
///
/// Limitations: hashing considers only the direction, so a key of large norm at a wide angle may be missed. Attention that
/// spreads over many keys loses most of its mass. [`LshOutput::recall`] measures the loss.
///
/// ```
/// use regard::{LshAttention, Machine, View};
/// let data: Vec<f32> = (0..256 * 16).map(|i| (i as f32 * 0.7).sin()).collect();
/// let x = View::bhsd(&data, [1, 1, 256, 16])?;
/// let lsh = LshAttention::new().rounds(4).bucket_size(32).causal();
/// let found = lsh.forward(Machine::detect(), x, x, x)?;
/// assert_eq!(found.output.out.shape(), x.shape());
/// assert!(found.buckets.is_visible(0, 0, 9, 9) && !found.buckets.is_visible(0, 0, 9, 10));
/// let recall = found.recall(Machine::detect(), x, x, 8, 16)?;
/// assert!(recall.mass.worst <= recall.mass.mean && recall.mass.mean <= 1.0);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LshAttention {
    rounds: usize,
    bucket_size: usize,
    pub(crate) causal: bool,
    seed: u64,
    pub(crate) scale: Option<f64>,
}

/// Upper limit of the rounds. No other check bounds the memory, which grows with their number.
const MAX_ROUNDS: usize = 256;
/// Upper limit of the features. Bounds the size of the random directions.
const MAX_FEATURES: usize = 1 << 24;

/// The result of [`LshAttention::forward`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LshOutput<E: Element> {
    /// Output of attention over the candidate keys.
    pub output: Output<E>,
    /// The candidate keys of each query.
    pub buckets: Buckets,
    /// Factor applied to the scores.
    scale: f64,
}

impl Default for LshAttention {
    fn default() -> Self {
        Self::new()
    }
}

impl LshAttention {
    /// Default: 8 rounds, blocks of 64 keys, no causal mask, scale `1 / sqrt(d)`.
    #[must_use]
    pub fn new() -> Self {
        Self { rounds: 8, bucket_size: 64, causal: false, seed: 0, scale: None }
    }

    /// Sets the number of hash rounds. Pairs that one round separates may become candidates in another.
    #[must_use]
    pub fn rounds(self, rounds: usize) -> Self {
        Self { rounds, ..self }
    }

    /// Sets the number of keys per block. A bucket holds at most as many keys on average.
    #[must_use]
    pub fn bucket_size(self, keys: usize) -> Self {
        Self { bucket_size: keys, ..self }
    }

    /// Applies a causal mask: no later value affects a query. All keys are sorted together, so later keys can still change
    /// which earlier keys are candidates. Use this on whole sequences, as in training; step-by-step decoding gives other
    /// results.
    #[must_use]
    pub fn causal(self) -> Self {
        Self { causal: true, ..self }
    }

    /// Sets the seed of the random directions. The same seed gives bit-identical results.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Sets the factor applied to the scores, instead of `1 / sqrt(d)`.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Computes attention of `q [batch, heads.q, q_len, d]` over `k [batch, heads.kv, k_len, d]` and
    /// `v [batch, heads.kv, k_len, v_dim]`.
    #[inline(never)]
    pub fn forward<E: Element>(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<LshOutput<E>, Error> {
        let problem = self.check((q, k, v))?;
        let buckets = Buckets::new(self, machine, problem.dims(), (q, k))?;
        let (mut found, mut rounds) = (Vec::new(), Vec::new());
        let mut scratch = Sorted::new([q, k, v].map(|x| x.shape()))?;
        for i in 0..self.rounds {
            let round = buckets.round(machine, i)?;
            let (q, k, v) = scratch.put(machine, &round.order, (q, k, v));
            let plan = self.plan(machine, round.mask, (q, k, v))?;
            found.push(plan.forward(q, k, v)?);
            rounds.push(round.order);
        }
        let place = |round: usize, row| rounds[round].place(row);
        let output = Output::merge_on(machine, &found, q.layout(), &place)?;
        Ok(LshOutput { output, buckets, scale: problem.scale() })
    }

    /// Gradients of q, k and v, from the inputs and the output of [`forward`](Self::forward) and the gradient of a loss
    /// with respect to that output: a [`View`] of the gradient of `out`, or an [`OutputGrads`] that also has the gradient
    /// of `lse`.
    #[inline(never)]
    pub fn backward<'b, E: Element>(
        &self,
        machine: Machine,
        q: View<'b, E>,
        k: View<'b, E>,
        v: View<'b, E>,
        found: &'b LshOutput<E>,
        output_grads: impl Into<OutputGrads<'b, E>>,
    ) -> Result<Grads<E>, Error> {
        let (output_grads, LshOutput { output, buckets, .. }) = (output_grads.into(), found);
        let dims = self.check((q, k, v))?.dims();
        found.check(dims)?;
        let Dims { batch, heads, q_len, .. } = dims;
        let shape = dims.out_shape();
        shape.unless_same("the call", "the gradient of the output", output_grads.out.shape())?;
        unless_packed([output_grads.out.offsets(), output.out.offsets()])?;
        let rows = batch * heads.q * q_len;
        Error::unless_one_each_row(
            "the gradient of lse",
            rows,
            output_grads.lse.map_or(rows, <[_]>::len),
        )?;
        if output_grads.entropy.is_some() {
            return Err(Error::NoEntropy);
        }
        output_grads.without_selection("softmax")?;
        let shapes = [q, k, v].map(|x| x.shape());
        let (mut sums, mut scratch) = (Sums::new(shapes)?, Sorted::new(shapes)?);
        for i in 0..buckets.rounds() {
            let round = buckets.round(machine, i)?;
            let (q, k, v) = scratch.put(machine, &round.order, (q, k, v));
            let order = |b, head| round.order.rows(b, head);
            let merged = reordered(machine, output, order)?;
            let d_out = copied(machine, output_grads.out, order)?;
            let d_lse = |x| numbers(machine, shape, x, order);
            let d_lse = output_grads.lse.map(d_lse).transpose()?;
            let output_grads = OutputGrads::new(d_out.view());
            let output_grads =
                d_lse.iter().fold(output_grads, |output_grads, d_lse| output_grads.lse(d_lse));
            let plan = self.plan(machine, round.mask, (q, k, v))?;
            let grads = plan.backward(q, k, v, &merged, output_grads)?;
            sums.add(machine, &grads, &round.order, |b, head| buckets.places(i, b, head));
        }
        sums.into_grads(machine, (q, k, v))
    }

    fn plan<E: Element>(
        &self,
        machine: Machine,
        mask: Mask,
        (q, k, v): Inputs<'_, E>,
    ) -> Result<Plan<'static, E>, Error> {
        Plan::new(self.problem((q, k, v)).mask(mask), machine)
    }

    /// The same attention over all keys.
    fn problem<E: Element>(&self, (q, k, v): Inputs<'_, E>) -> Problem<'static, E> {
        let score = self.scale.map_or(Score::new(), |scale| Score::new().scale(scale));
        Problem::new(&q, &k, &v).score(score)
    }

    /// Checks the options and the shapes of the tensors.
    fn check<E: Element>(&self, (q, k, v): Inputs<'_, E>) -> Result<Problem<'static, E>, Error> {
        let below = |option, found, limit| {
            if found < limit { Ok(()) } else { Err(Error::OutOfRange { option, found, limit }) }
        };
        for (option, found) in [("lsh rounds", self.rounds), ("lsh bucket_size", self.bucket_size)]
        {
            if found == 0 {
                return Err(Error::Zero { option });
            }
        }
        below("lsh rounds", self.rounds, MAX_ROUNDS + 1)?;
        let problem = self.problem((q, k, v));
        problem.check()?;
        if problem.packed().contains(&true) {
            return Err(Error::Packed { option: "lsh" });
        }
        let Dims { batch, heads, q_len, k_len, qk_dim, .. } = problem.dims();
        below("queries", q_len, u32::MAX as usize)?;
        below("keys", k_len, u32::MAX as usize)?;
        below("features", qk_dim, MAX_FEATURES + 1)?;
        // Every head of every item is visited, even in tensors without elements.
        let heads = batch.saturating_mul(heads.q.max(heads.kv));
        below("heads of all items", heads, u32::MAX as usize)?;
        Ok(problem)
    }
}

/// Rejects packed sequences.
fn unless_packed(offsets: [Option<&[usize]>; 2]) -> Result<(), Error> {
    match offsets {
        [None, None] => Ok(()),
        _ => Err(Error::Packed { option: "lsh" }),
    }
}

impl<E: Element> LshOutput<E> {
    /// Rejects tensors whose sizes differ from those of the call that produced this output.
    fn check(&self, dims: Dims) -> Result<(), Error> {
        let Dims { batch, heads, q_len, k_len, qk_dim, v_dim, .. } = dims;
        let own = self.buckets.dims();
        let (q, k) = (own.heads.q, own.heads.kv);
        let own = [own.batch, q, k, own.q_len, own.k_len, own.qk_dim, own.v_dim];
        let axes =
            ["batch", "query heads", "key heads", "queries", "keys", "features", "features of v"];
        let found = [batch, heads.q, heads.kv, q_len, k_len, qk_dim, v_dim];
        for ((axis, own), found) in axes.into_iter().zip(own).zip(found) {
            Error::unless_same(axis, ("the output", own), ("the tensors", found))?;
        }
        let shape = dims.out_shape();
        shape.unless_same("the call", "the output", self.output.out.shape())?;
        OutputView::from(&self.output).check_rows(batch * heads.q * q_len)
    }
}
