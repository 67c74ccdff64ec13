//! Attention among rows and keys that random directions sort near each other (Reformer, Kitaev et al. 2020).

mod buckets;
mod candidates;
mod hash;
mod recall;
mod rows;

use crate::error::Error;
use crate::grads::{Grads, OutputGrads};
use crate::machine::Machine;
use crate::mask::Mask;
use crate::output::{Output, OutputView};
use crate::plan::Plan;
use crate::problem::{Dims, Problem};
use crate::score::Score;
use crate::simd::Element;
use crate::view::{Inputs, View};
pub use buckets::Buckets;
pub use recall::{Recall, Share};
use rows::{Sorted, Sums, copied, numbers, reordered};

/// Softmax attention of each row over the keys that hashing puts near it (Reformer, Kitaev et al. 2020): linear in the length,
/// and another function than full attention.
///
/// In each round every row and key gets a number, its bucket: each digit names the one of 8 random directions and their
/// opposites that it points along most. The keys are sorted by bucket, then by position, and cut into blocks of `bucket_size`. A
/// row stands among them where a key of its bucket and position would stand, and meets the keys of that block and of both
/// blocks beside it; of that block and the one before, if it is [causal](Self::causal). With `P_i` all keys that row `i` meets in
/// any round,
///
/// ```text
/// out_i = sum over j in P_i of softmax(q_i . k_j / sqrt(d))_j v_j        lse_i = ln( sum over j in P_i of e^score_ij )
/// ```
///
/// exactly: however often a pair meets, it counts once. `P_i` depends on row `i`, the keys and the seed, on no other row.
/// Rows that meet nothing are 0. Gradients are those of this function with `P_i` held constant, which it is almost everywhere.
/// Works for queries that are the keys (the shared projection of the paper, without its rule that a row avoids itself) as well
/// as for others, as many or more or fewer; the last row stands at the last key.
///
/// Costs `rounds x q_len x 3 bucket_size` pairs (causal: 2), hashing with 8 products of `d` features for each row, key, round and
/// digit, of which there are `log16(k_len / bucket_size)`, and memory for `rounds` outputs.
///
/// What it is not: near is near in direction, so that a long key at a wide angle may be missed, and attention that spreads over
/// many keys loses most of its mass. [`LshOutput::recall`] measures what was lost.
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

/// More rounds than anybody can want: the memory of each is checked by nobody else.
const MAX_ROUNDS: usize = 256;
/// More features than anybody has: there are directions with as many.
const MAX_FEATURES: usize = 1 << 24;

/// The result of [`LshAttention::forward`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LshOutput<E: Element> {
    /// Of attention over the keys that each row met.
    pub output: Output<E>,
    /// Which ones these are.
    pub buckets: Buckets,
    /// What scores were multiplied by.
    scale: f64,
}

impl Default for LshAttention {
    fn default() -> Self {
        Self::new()
    }
}

impl LshAttention {
    /// 8 rounds, buckets of 64 keys, everything before and after, scores times `1 / sqrt(d)`.
    #[must_use]
    pub fn new() -> Self {
        Self { rounds: 8, bucket_size: 64, causal: false, seed: 0, scale: None }
    }

    /// How often everything is hashed anew: pairs that one round parts may meet in another.
    #[must_use]
    pub fn rounds(self, rounds: usize) -> Self {
        Self { rounds, ..self }
    }

    /// Keys of a block, and of a bucket on average.
    #[must_use]
    pub fn bucket_size(self, keys: usize) -> Self {
        Self { bucket_size: keys, ..self }
    }

    /// No value that comes later reaches a row. Which of the earlier keys it meets may still depend on later ones, for all keys
    /// are sorted together: this is for whole sequences, as in training, and not the same as adding one position after another.
    #[must_use]
    pub fn causal(self) -> Self {
        Self { causal: true, ..self }
    }

    /// Of the random directions: the same seed gives the same bits.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// What scores are multiplied by, instead of `1 / sqrt(d)`.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// `q [batch, heads.q, q_len, d]`, `k [batch, heads.kv, k_len, d]`, `v [batch, heads.kv, k_len, v_dim]`.
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

    /// The gradients by q, k and v, from the inputs and output of [`forward`](Self::forward) and the gradient of a loss by that
    /// output: a [`View`] of the gradient by `out`, or an [`OutputGrads`] with that by `lse` too.
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

    /// The same among all keys.
    fn problem<E: Element>(&self, (q, k, v): Inputs<'_, E>) -> Problem<'static, E> {
        let score = self.scale.map_or(Score::new(), |scale| Score::new().scale(scale));
        Problem::new(&q, &k, &v).score(score)
    }

    /// All that can be wrong.
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
        // Of tensors without elements too, all heads of all items are gone through.
        let heads = batch.saturating_mul(heads.q.max(heads.kv));
        below("heads of all items", heads, u32::MAX as usize)?;
        Ok(problem)
    }
}

/// Refuses tensors of sequences that lie one after another.
fn unless_packed(offsets: [Option<&[usize]>; 2]) -> Result<(), Error> {
    match offsets {
        [None, None] => Ok(()),
        _ => Err(Error::Packed { option: "lsh" }),
    }
}

impl<E: Element> LshOutput<E> {
    /// Refuses another call's tensors.
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
