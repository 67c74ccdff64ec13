//! Linear attention: a function of its own, whose cost grows with the length and not with its square.

mod grid;
mod kernel;
mod map;
mod state;
mod sums;

use crate::description::mask::Mask;
use crate::description::problem::{Dims, Problem};
use crate::error::Error;
use crate::machine::Machine;
use crate::machine::run::run;
use crate::machine::simd::Element;
use crate::tensor::view::{Shape, Tensor, View};
use grid::Grid;
pub(crate) use kernel::Linear;
use kernel::{BackwardInputs, Call, LinearScratch, Part, Work};
pub use map::FeatureMap;
use map::Map;
pub use state::LinearState;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};
pub(crate) use sums::Sums;

/// Linear attention (Katharopoulos et al. 2020): the weight of a pair is a product of features,
///
/// ```text
/// out_i = sum_j (phi(q_i) . phi(k_j)) v_j  /  sum_j phi(q_i) . phi(k_j)
/// ```
/// over all keys, or, [`causal`](Self::causal), over those up to the row's own position, where the last query stands at the last
/// key. The [`FeatureMap`] is `phi`. A row whose weights are all 0, or that sees nothing, has `out = 0` and no gradient.
///
/// Sums over keys can be taken before any query is known, so `n` positions cost `O(n features v_dim)`, and memory beyond inputs
/// and outputs does not grow with `n`; [`LinearState`] continues a sequence at the same cost for every position. Results are
/// the same bits for any number of threads.
///
/// It is not softmax attention made faster, and not exact anything: [`FeatureMap::PositiveRandom`] estimates the weights of a
/// softmax, the other maps do not even try. A model must have been trained with it. Where it was not, use
/// [`attend`](crate::attend).
///
/// ```
/// use regard::{FeatureMap, LinearAttention, LinearState, Machine, View};
/// let data: Vec<f32> = (0..2 * 4 * 10 * 8).map(|i| (i as f32).sin()).collect();
/// let x = View::bhsd(&data, [2, 4, 10, 8])?; // batch, heads, len, dim
/// let attention = LinearAttention::new(FeatureMap::EluPlusOne).causal();
/// let output = attention.forward(Machine::detect(), x, x, x)?;
/// assert_eq!(output.out.shape(), x.shape());
///
/// let d_out = x; // of some loss
/// let grads = attention.backward(Machine::detect(), x, x, x, &output, d_out)?;
/// assert_eq!(grads.k.shape(), x.shape());
///
/// let mut state = LinearState::new(FeatureMap::EluPlusOne, [2, 4, 8, 8])?;
/// let out = state.step(Machine::detect(), x, x, x)?; // a prompt; then one position after another
/// assert_eq!(out, output.out);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearAttention {
    map: FeatureMap,
    causal: bool,
}

/// What [`LinearAttention::forward`] returns.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LinearOutput<E: Element> {
    /// `[batch, heads.q, q_len, v_dim]`, in the layout of q, packed if q is.
    pub out: Tensor<E>,
    /// `[batch, heads.q, q_len, 2]`, in the same layout: `l` and `m` of each row. The sum of its weights is `l 2^m` times a factor
    /// of the row; `m` is 0 unless features are powers.
    pub sums: Tensor<E::Num>,
}

/// The gradients of a loss.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LinearGrads<E: Element> {
    /// By q, in its shape and layout.
    pub q: Tensor<E>,
    /// By k, in its shape and layout.
    pub k: Tensor<E>,
    /// By v, in its shape and layout.
    pub v: Tensor<E>,
}

impl LinearAttention {
    /// Every row sees all keys.
    #[must_use]
    pub fn new(map: FeatureMap) -> Self {
        Self { map, causal: false }
    }

    /// Rows see the keys up to their own position; the last query stands at the last key.
    #[must_use]
    pub fn causal(self) -> Self {
        Self { causal: true, ..self }
    }

    /// What queries and keys become.
    #[must_use]
    pub fn map(&self) -> FeatureMap {
        self.map
    }

    /// Whether rows see only the keys up to their own position.
    #[must_use]
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The sizes of a call, and who sees whom.
    pub(crate) fn problem<E: Element>(
        &self,
        q: &View<'_, E>,
        k: &View<'_, E>,
        v: &View<'_, E>,
    ) -> Problem<'static, E> {
        Problem::new(q, k, v).mask(if self.causal { Mask::causal() } else { Mask::full() })
    }

    fn check<E: Element>(
        &self,
        q: &View<'_, E>,
        k: &View<'_, E>,
        v: &View<'_, E>,
    ) -> Result<Problem<'static, E>, Error> {
        let problem = self.problem(q, k, v);
        problem.check()?;
        Error::unless_same("features", ("q", q.shape().dim), ("k", k.shape().dim))?;
        self.map.check(q.shape().dim)?;
        Ok(problem)
    }

    /// `q [batch, heads.q, q_len, dim]` over `k [batch, heads.kv, k_len, dim]` and `v [batch, heads.kv, k_len, v_dim]`, where
    /// `heads.q` is a multiple of `heads.kv`. Items may be [packed](View::packed).
    #[inline(never)]
    pub fn forward<E: Element>(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<LinearOutput<E>, Error> {
        let problem = self.check(&q, &k, &v)?;
        let map = Map::new(self.map, k.shape().dim);
        let tasks = Tasks::new(&problem, machine, Call { q, k, v, map: &map, backward: None });
        tasks.forward(None)
    }

    /// The gradients, from the inputs and output of [`forward`](Self::forward) and the gradient of a loss by `out`. The random
    /// directions of a map are constants.
    #[inline(never)]
    pub fn backward<E: Element>(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
        output: &LinearOutput<E>,
        d_out: View<'_, E>,
    ) -> Result<LinearGrads<E>, Error> {
        let problem = self.check(&q, &k, &v)?;
        let shape = Shape { dim: v.shape().dim, ..q.shape() };
        let (out, sums) = (output.out.view(), output.sums.view());
        shape.unless_same("the call", "the output", out.shape())?;
        Shape { dim: 2, ..shape }.unless_same("the call", "the sums", sums.shape())?;
        shape.unless_same("the call", "the gradient of the output", d_out.shape())?;
        problem.same_packing("the output", 0, out.offsets())?;
        problem.same_packing("the sums", 0, sums.offsets())?;
        problem.same_packing("the gradient of the output", 0, d_out.offsets())?;
        let map = Map::new(self.map, k.shape().dim);
        let call = Call { q, k, v, map: &map, backward: Some(BackwardInputs { out, sums, d_out }) };
        Tasks::new(&problem, machine, call).backward()
    }
}

/// A call, cut into parts.
struct Tasks<'c, E: Element> {
    call: Call<'c, E>,
    machine: Machine,
    causal: bool,
    parts: Vec<Part>,
}

/// Sums of parts, where they are needed.
type Found<N> = Vec<Option<Sums<N>>>;

impl<'c, E: Element> Tasks<'c, E> {
    fn new(problem: &Problem<'_, E>, machine: Machine, call: Call<'c, E>) -> Self {
        let Dims { batch, heads, .. } = problem.dims();
        let causal = !problem.mask.is_full();
        let grid = |b| Grid { q_len: problem.q_len(b), k_len: problem.k_len(b), causal };
        let heads_of = |item| (0..heads.kv).map(move |head| (item, head));
        // Without keys nobody sees anything, however many heads there are.
        let keys = problem.sum_over_items(|_, k_len| k_len as u128);
        let parts =
            (0..if keys == 0 { 0 } else { batch }).flat_map(heads_of).flat_map(|(item, head)| {
                let grid = grid(item);
                let cut = grid.parts(heads.kv).into_iter();
                cut.map(move |chunks| Part { item, head, grid, chunks })
            });
        Self { parts: parts.collect(), call, machine, causal }
    }

    /// Computes rows; `state`, if there is one, holds the sums that each head starts from, and gets those that it ends with.
    fn forward(self, state: Option<&mut [Sums<E::Num>]>) -> Result<LinearOutput<E>, Error> {
        let mut out = Tensor::zeros(&self.call.q, self.call.v.shape().dim)?;
        let mut sums = Tensor::zeros(&self.call.q, 2)?;
        if self.parts.is_empty() {
            return Ok(LinearOutput { out, sums });
        }
        let before = self.sums_before(state.as_deref());
        let found = {
            let (mut out, mut sums) = (out.view_mut(), sums.view_mut());
            let tiles = TaskInputs::new(out.divide(self.call.k.shape().heads, |b| self.rows(b)));
            let sums = TaskInputs::new(sums.divide(self.call.k.shape().heads, |b| self.rows(b)));
            let before = TaskInputs::new(before);
            let work = |i| {
                let before = before.take(i)?.unwrap_or_else(|| self.nothing());
                Some(Work::Rows { before, out: tiles.take(i)?, sums: sums.take(i)? })
            };
            self.run(work, |i| state.is_some() && self.is_last(i))
        };
        for (state, end) in state.into_iter().flatten().zip(found.into_iter().flatten()) {
            *state = end;
        }
        Ok(LinearOutput { out, sums })
    }

    fn backward(self) -> Result<LinearGrads<E>, Error> {
        let Call { q, k, v, .. } = self.call;
        let heads = k.shape().heads;
        let (mut d_q, mut d_k, mut d_v) =
            (Tensor::zeros_like(&q)?, Tensor::zeros_like(&k)?, Tensor::zeros_like(&v)?);
        if self.parts.is_empty() {
            return Ok(LinearGrads { q: d_q, k: d_k, v: d_v });
        }
        let own = {
            let mut d_q = d_q.view_mut();
            let d_q = TaskInputs::new(d_q.divide(heads, |b| self.rows(b)));
            let before = TaskInputs::new(self.sums_before(None));
            let work = |i| {
                let before = before.take(i)?.unwrap_or_else(|| self.nothing());
                Some(Work::Queries { before, d_q: d_q.take(i)? })
            };
            self.run(work, |i| !self.causal || !self.is_first(i))
        };
        {
            let (mut d_k, mut d_v) = (d_k.view_mut(), d_v.view_mut());
            let d_k = TaskInputs::new(d_k.divide(heads, |b| self.keys(b)));
            let d_v = TaskInputs::new(d_v.divide(heads, |b| self.keys(b)));
            let behind = TaskInputs::new(self.gather(&own, None, true));
            let work = |i| {
                let behind = behind.take(i)?.unwrap_or_else(|| self.nothing());
                Some(Work::Keys { behind, d_k: d_k.take(i)?, d_v: d_v.take(i)? })
            };
            self.run(work, |_| false);
        }
        Ok(LinearGrads { q: d_q, k: d_k, v: d_v })
    }

    /// The sums of keys that each part starts from.
    fn sums_before(&self, state: Option<&[Sums<E::Num>]>) -> Found<E::Num> {
        let query = |i: usize| !self.causal || !self.is_last(i);
        let own = self.run(|i| query(i).then_some(Work::Sum), query);
        self.gather(&own, state, false)
    }

    /// Runs all parts that have work, and keeps those sums that are wanted.
    fn run<'t>(
        &'t self,
        work: impl Fn(usize) -> Option<Work<'t, E>> + Sync,
        query: impl Fn(usize) -> bool + Sync,
    ) -> Found<E::Num> {
        let found: Vec<_> = self.parts.iter().map(|_| OnceLock::new()).collect();
        run(
            self.machine.threads,
            self.parts.len(),
            || LinearScratch::new(&self.call),
            |scratch, i| {
                let Some(work) = work(i) else { return };
                let (call, part) = (&self.call, &self.parts[i]);
                let sums = Linear { call, part, work, scratch }.run(self.machine.isa);
                if query(i) {
                    found[i].get_or_init(|| sums);
                }
            },
        );
        found.into_iter().map(OnceLock::into_inner).collect()
    }

    /// What each part starts from: the sums of those before it (or behind it), of its own head, in their order; of all of them
    /// where nothing is hidden.
    fn gather(
        &self,
        own: &[Option<Sums<E::Num>>],
        state: Option<&[Sums<E::Num>]>,
        back: bool,
    ) -> Found<E::Num> {
        let mut starts: Found<E::Num> = own.iter().map(|_| None).collect();
        let mut first = 0;
        for (head, parts) in self.parts.chunk_by(Part::is_beside).enumerate() {
            let mut order: Vec<usize> = (first..first + parts.len()).collect();
            first += parts.len();
            if back {
                order.reverse();
            }
            let mut sums = state.map(|state| state[head].clone());
            for i in &order {
                if self.causal {
                    starts[*i].clone_from(&sums);
                }
                if let Some(own) = &own[*i] {
                    sums.get_or_insert_with(|| self.nothing()).add(own);
                }
            }
            if !self.causal {
                order.iter().for_each(|i| starts[*i].clone_from(&sums));
            }
        }
        starts
    }

    fn nothing(&self) -> Sums<E::Num> {
        Sums::new(self.call.size())
    }

    fn is_first(&self, i: usize) -> bool {
        i == 0 || !self.parts[i - 1].is_beside(&self.parts[i])
    }

    fn is_last(&self, i: usize) -> bool {
        i + 1 == self.parts.len() || !self.parts[i + 1].is_beside(&self.parts[i])
    }

    /// The rows of an item, cut as its parts are.
    fn rows(&self, item: usize) -> Vec<Range<usize>> {
        self.cut(item, |part| part.grid.rows(&part.chunks))
    }

    /// The keys of an item.
    fn keys(&self, item: usize) -> Vec<Range<usize>> {
        self.cut(item, |part| part.grid.keys(&part.chunks))
    }

    fn cut(&self, item: usize, range: impl Fn(&Part) -> Range<usize>) -> Vec<Range<usize>> {
        // In the order of items, then of heads.
        let first = self.parts.partition_point(|part| part.item < item);
        let parts = self.parts[first..].iter();
        parts.take_while(|part| (part.item, part.head) == (item, 0)).map(range).collect()
    }
}

/// Things for tasks, each to be taken once.
struct TaskInputs<T>(Vec<Mutex<Option<T>>>);

impl<T> TaskInputs<T> {
    fn new(all: Vec<T>) -> Self {
        Self(all.into_iter().map(|x| Mutex::new(Some(x))).collect())
    }

    fn take(&self, i: usize) -> Option<T> {
        self.0[i].lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
