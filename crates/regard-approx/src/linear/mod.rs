//! Linear attention: a function of its own, whose cost grows with the length and not with its square.

mod call;
mod chunk;
mod grid;
mod map;
pub mod reference;
mod state;
mod sums;

use chunk::{Call, OutputGrads};
use grid::Part;
pub use map::FeatureMap;
use map::Map;
use regard::reference::Inputs;
use regard::{Element, Error, Machine, Mask, Problem, Tensor, View};
pub use state::LinearState;

/// Linear attention (Katharopoulos et al. 2020): the weight of a pair is a product of features,
///
/// ```text
/// out_i = sum_j (phi(q_i) . phi(k_j)) v_j  /  sum_j phi(q_i) . phi(k_j)
/// ```
/// over all keys, or, [`causal`](Self::causal), over those up to the row's own position, where the last query stands at the last
/// key. The [`FeatureMap`] is `phi`. A row whose weights are all 0, or that sees nothing, has `out = 0` and no gradient.
///
/// Sums over keys can be taken before any query is known, so `n` positions cost `O(n features v_dim)`, and memory beyond inputs
/// and outputs grows by 2 bytes per position and head only; [`LinearState`] continues a sequence at the same cost for every position. Results are
/// the same bits for any number of threads.
///
/// It is not softmax attention made faster, and not exact anything: [`FeatureMap::PositiveRandom`] estimates the weights of a
/// softmax, the other maps do not even try. A model must have been trained with it. Where it was not, use
/// [`regard::attend`].
///
/// ```
/// use regard::{Machine, View};
/// use regard_approx::{FeatureMap, LinearAttention, LinearState};
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
    fn problem<E: Element>(&self, (q, k, v): Inputs<'_, E>) -> Problem<'static, E> {
        Problem::new(&q, &k, &v).mask(if self.causal { Mask::causal() } else { Mask::full() })
    }

    /// Refuses tensors that do not fit each other.
    fn check<E: Element>(&self, inputs: Inputs<'_, E>) -> Result<(), Error> {
        self.problem(inputs).check()?;
        Error::unless_same("features", ("q", inputs.0.shape().dim), ("k", inputs.1.shape().dim))
    }

    fn call<'c, E: Element>(
        &self,
        map: &'c Map<E::Num>,
        machine: Machine,
        inputs: Inputs<'c, E>,
    ) -> Call<'c, E> {
        let ((q, k, v), causal) = (inputs, self.causal);
        let parts = Part::all(&self.problem(inputs), causal);
        Call { q, k, v, map, causal, machine, parts }
    }

    /// `q [batch, heads.q, q_len, dim]` over `k [batch, heads.kv, k_len, dim]` and `v [batch, heads.kv, k_len, v_dim]`, where
    /// `heads.q` is a multiple of `heads.kv`. Items may be [packed](View::packed).
    ///
    /// Of `machine`, the number of threads and the instructions of exponentials count; products choose their instructions
    /// themselves.
    pub fn forward<E: Element>(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<LinearOutput<E>, Error> {
        self.check((q, k, v))?;
        let map = Map::new(self.map, k.shape().dim)?;
        self.call(&map, machine, (q, k, v)).forward(None)
    }

    /// The gradients, from the inputs and output of [`forward`](Self::forward) and the gradient of a loss by `out`. The random
    /// directions of a map are constants.
    pub fn backward<E: Element>(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
        output: &LinearOutput<E>,
        d_out: View<'_, E>,
    ) -> Result<LinearGrads<E>, Error> {
        self.check((q, k, v))?;
        let (out, sums, dim) = (output.out.view(), output.sums.view(), v.shape().dim);
        same_rows(&q, dim, "the output", &out)?;
        same_rows(&q, 2, "the sums", &sums)?;
        same_rows(&q, dim, "the gradient of the output", &d_out)?;
        let map = Map::new(self.map, k.shape().dim)?;
        self.call(&map, machine, (q, k, v)).backward(&OutputGrads { out, sums, d_out })
    }
}

/// Refuses a tensor without a row of `dim` features for each row of q, packed as q is.
pub(crate) fn same_rows<E: Element, F: Element>(
    q: &View<'_, E>,
    dim: usize,
    name: &'static str,
    found: &View<'_, F>,
) -> Result<(), Error> {
    let same = |axis, a: usize, b: usize| Error::unless_same(axis, ("the call", a), (name, b));
    let (a, b) = (q.shape(), found.shape());
    same("batch", a.batch, b.batch)?;
    same("heads", a.heads, b.heads)?;
    same("length", a.len, b.len)?;
    same("features", dim, b.dim)?;
    let [a, b] = [q.offsets(), found.offsets()].map(|offsets| offsets.unwrap_or(&[]));
    same("offsets of packed sequences", a.len(), b.len())?;
    a.iter().zip(b).try_for_each(|(a, b)| same("offsets of packed sequences", *a, *b))
}
