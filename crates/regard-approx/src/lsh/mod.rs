//! LSH attention (Reformer, Kitaev et al. 2020): softmax attention over the keys that hashing places near each query.
//!
//! A call hashes queries and keys and sorts the keys of each round by bucket (`hash`, `buckets`). Each round gathers rows and
//! keys in bucket order and runs a plan of the engine over the pairs that are candidates for the first time (`round`, `rows`).
//! The outputs of the rounds are merged; their gradients are summed.

mod buckets;
mod hash;
mod recall;
mod round;
mod rows;

pub use buckets::Buckets;
pub use recall::{Recall, RowFraction};
use regard::plan::{OutputGrads, OutputView};
use regard::problem::Dims;
use regard::{Element, Error, Grads, Machine, Output, Plan, Problem, Score, View};
use round::Round;
use rows::{gather, gather_entries, merged, narrowed, scatter_add, zeros};

/// LSH attention (Reformer, Kitaev et al. 2020): softmax attention of each query over the keys that hashing places near it.
/// Its cost is linear in the length, and its result differs from that of full attention.
///
/// In each round, every query and key is hashed to a bucket number. A digit of that number is the index of the largest of
/// 16 dot products, with 8 random directions and their negatives. The keys are sorted by bucket, then by position, and cut
/// into blocks of `bucket_size`. A query has the rank that a key of its bucket and position would have. Its candidates are
/// the keys of the block at that rank and of both adjacent blocks, or of that block and the preceding one if
/// [causal](Self::causal()). With `P_i` the candidates of query `i` in all rounds together:
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
/// Options are fields, to be read or set, and methods of the same names set them one after another. Nothing is checked before
/// a call.
///
/// ```
/// use regard::{Machine, View};
/// use regard_approx::LshAttention;
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
#[non_exhaustive]
pub struct LshAttention {
    /// Number of hash rounds.
    pub rounds: usize,
    /// Number of keys per block.
    pub bucket_size: usize,
    /// Whether no later value affects a query.
    pub causal: bool,
    /// Seed of the random directions.
    pub seed: u64,
    /// Factor applied to the scores; `None`: `1 / sqrt(d)`.
    pub scale: Option<f64>,
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

    /// The candidate keys of each query, without attention over them.
    pub fn candidates<E: Element>(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
    ) -> Result<Buckets, Error> {
        let dims = self.problem([q, k, k])?.dims();
        Ok(Buckets::new(self, machine, dims, [q, k]))
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
        let problem = self.problem([q, k, v])?;
        let (dims, scale) = (problem.dims(), problem.scale());
        let buckets = Buckets::new(self, machine, dims, [q, k]);
        if buckets.is_empty() {
            let output = Plan::new(problem, machine)?.forward(q, k, v)?;
            return Ok(LshOutput { output, buckets, scale });
        }
        let (mut found, [mut of_q, mut of_k, mut of_v]) =
            (Vec::new(), [q, k, v].map(|x| zeros(x.shape())));
        for i in 0..self.rounds {
            let Round { keys, rows, mask } = Round::new(&buckets, machine, i)?;
            let q = gather(machine, q, &rows, &mut of_q)?;
            let k = gather(machine, k, &keys, &mut of_k)?;
            let v = gather(machine, v, &keys, &mut of_v)?;
            let plan = Plan::new(problem.clone().mask(mask), machine)?;
            found.push((plan.forward(q, k, v)?, rows));
        }
        let output = merged(machine, &found, q.layout())?;
        Ok(LshOutput { output, buckets, scale })
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
        let problem = self.problem([q, k, v])?;
        found.check(problem.dims())?;
        found.check_grads(output_grads)?;
        if buckets.is_empty() {
            return Plan::new(problem, machine)?.backward(q, k, v, output, output_grads);
        }
        let mut sums = [q, k, v].map(|x| zeros::<E::Num>(x.shape()));
        let mut sorted = [q, k, v, output.out.view(), output_grads.out].map(|x| zeros(x.shape()));
        let mut round = |i| -> Result<Grads<E>, Error> {
            let Round { keys, rows, mask } = Round::new(buckets, machine, i)?;
            let [of_q, of_k, of_v, of_out, of_d_out] = &mut sorted;
            let q = gather(machine, q, &rows, of_q)?;
            let k = gather(machine, k, &keys, of_k)?;
            let v = gather(machine, v, &keys, of_v)?;
            let out = gather(machine, output.out.view(), &rows, of_out)?;
            let lse = gather_entries(&output.lse, &rows);
            let states = gather_entries(&output.states, &rows);
            let (entropy, selection) = (None, None);
            let output = OutputView { out, lse: &lse, states: &states, entropy, selection };
            let d_lse = output_grads.lse.map(|d_lse| gather_entries(d_lse, &rows));
            let mut output_grads = output_grads;
            output_grads.out = gather(machine, output_grads.out, &rows, of_d_out)?;
            output_grads.lse = d_lse.as_deref();
            let plan = Plan::new(problem.clone().mask(mask), machine)?;
            let grads = plan.backward(q, k, v, output, output_grads)?;
            let by = [(&grads.q, &rows), (&grads.k, &keys), (&grads.v, &keys)];
            for (sums, (x, order)) in sums.iter_mut().zip(by) {
                scatter_add(machine, sums, x.view(), order);
            }
            Ok(grads)
        };
        let mut grads = round(0)?;
        for i in 1..buckets.rounds() {
            let Grads { scale, temperature, .. } = round(i)?;
            grads.scale += scale;
            grads.temperature += temperature;
        }
        let [d_q, d_k, d_v] = sums;
        grads.q = narrowed(machine, &d_q, q)?;
        grads.k = narrowed(machine, &d_k, k)?;
        grads.v = narrowed(machine, &d_v, v)?;
        Ok(grads)
    }

    /// The same attention over all keys. Checks the options and the shapes of the tensors.
    fn problem<E: Element>(&self, inputs: [View<'_, E>; 3]) -> Result<Problem<'static, E>, Error> {
        unless_zero([("lsh rounds", self.rounds), ("lsh bucket_size", self.bucket_size)])?;
        Error::unless_below("lsh rounds", self.rounds, MAX_ROUNDS + 1)?;
        let score = self.scale.map_or(Score::new(), |scale| Score::new().scale(scale));
        let [q, k, v] = inputs;
        let problem = Problem::new(&q, &k, &v).score(score);
        problem.check()?;
        unless_packed(inputs.map(|x| x.offsets()))?;
        let Dims { batch, heads, q_len, k_len, qk_dim, .. } = problem.dims();
        Error::unless_below("queries", q_len, u32::MAX as usize)?;
        Error::unless_below("keys", k_len, u32::MAX as usize)?;
        Error::unless_below("features", qk_dim, MAX_FEATURES + 1)?;
        // Every head of every item is visited, even if all of them share their memory.
        let heads = batch.saturating_mul(heads.q.max(heads.kv));
        Error::unless_below("heads of all items", heads, u32::MAX as usize)?;
        Ok(problem)
    }
}

impl<E: Element> LshOutput<E> {
    /// Rejects tensors whose sizes differ from those of the call that produced this output.
    fn check(&self, dims: Dims) -> Result<(), Error> {
        let sizes = |Dims { batch, heads, q_len, k_len, qk_dim, v_dim, .. }| {
            [batch, heads.q, heads.kv, q_len, k_len, qk_dim, v_dim]
        };
        let axes =
            ["batch", "query heads", "key heads", "queries", "keys", "features", "features of v"];
        let own = sizes(self.buckets.dims());
        unless_same(axes, ("the output", own), ("the tensors", sizes(dims)))?;
        self.check_shape("the output", self.output.out.view())?;
        self.unless_one_each_row("lse", self.output.lse.len())?;
        match self.output.states.len() {
            0 => Ok(()),
            states => self.unless_one_each_row("states", states),
        }
    }

    /// Rejects gradients whose sizes differ from those of this output.
    fn check_grads(&self, output_grads: OutputGrads<'_, E>) -> Result<(), Error> {
        self.check_shape("the gradient of the output", output_grads.out)?;
        let Some(d_lse) = output_grads.lse else { return Ok(()) };
        self.unless_one_each_row("the gradient of lse", d_lse.len())
    }

    fn check_shape(&self, name: &'static str, x: View<'_, E>) -> Result<(), Error> {
        let Dims { batch, heads, q_len, v_dim, .. } = self.buckets.dims();
        let axes = ["batch", "heads", "length", "features"];
        let own = [batch, heads.q, q_len, v_dim];
        unless_same(axes, ("the call", own), (name, x.shape().to_array()))?;
        unless_packed([x.offsets()])
    }

    fn unless_one_each_row(&self, option: &'static str, found: usize) -> Result<(), Error> {
        let rows = self.buckets.heads() * self.buckets.dims().q_len;
        let expected = (rows, "batch x query heads x queries");
        if found == rows { Ok(()) } else { Err(Error::Count { option, expected, found }) }
    }
}

/// Rejects sizes that differ along an axis.
fn unless_same<const N: usize>(
    axes: [&'static str; N],
    (left, own): (&'static str, [usize; N]),
    (right, found): (&'static str, [usize; N]),
) -> Result<(), Error> {
    let Some(i) = (0..N).find(|i| own[*i] != found[*i]) else { return Ok(()) };
    Err(Error::Axis { axis: axes[i], left: (left, own[i]), right: (right, found[i]) })
}

/// Rejects packed sequences.
fn unless_packed<const N: usize>(offsets: [Option<&[usize]>; N]) -> Result<(), Error> {
    if offsets.iter().all(Option::is_none) { Ok(()) } else { Err(Error::Packed { option: "lsh" }) }
}

fn unless_zero(options: [(&'static str, usize); 2]) -> Result<(), Error> {
    let zero = options.into_iter().find(|(_, found)| *found == 0);
    zero.map_or(Ok(()), |(option, _)| Err(Error::Zero { option }))
}

/// A rank or a key as it is stored: `LshAttention::problem` limits the number of keys.
fn index(i: usize) -> u32 {
    u32::try_from(i).unwrap_or(u32::MAX)
}
