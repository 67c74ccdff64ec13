//! The delta rule with decay: linear attention whose state forgets, and replaces what it predicts for a key.

mod call;
mod chunk;
mod decay;
pub mod reference;
mod solve;
mod state;

use chunk::Call;
use regard::{Element, Error, Layout, Machine, Number, Shape, Tensor, View};
pub use state::DeltaState;
use std::ops::Range;

/// Added to the square of a norm, as FLA and Transformers do.
const L2_EPSILON: f64 = 1e-6;

/// The gated delta rule (Yang et al. 2025), the delta rule (Schlag et al. 2021, Yang et al. 2024), and linear attention with
/// decay and without. Each head of v has a state `S [dim, v_dim]`:
///
/// ```text
/// S_t   = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
/// out_t = scale S_t^T q_t
/// ```
/// Without `g` nothing decays. Without `beta` the state predicts nothing: `S_t = exp(g_t) S_{t-1} + k_t v_t^T`. These are the
/// four update rules of ONNX LinearAttention. `g` has one number per head and position, or one for each feature of `k` (Gated
/// Linear Attention, Kimi Delta Attention).
///
/// Computed in chunks of 64 positions, forward and backward: `n` positions cost `O(n dim v_dim)`. The forward pass needs no
/// memory that grows with `n` beyond its output. The backward pass computes the states at the beginnings of chunks once more,
/// which costs about half a forward pass, and keeps those of one head for each thread: `n / 64 dim v_dim` numbers. One task
/// is one head of v of one item; results are the same bits for any number of threads and any batch.
///
/// ```
/// use regard::{Machine, View};
/// use regard_approx::{DeltaInputs, DeltaRule, DeltaState};
/// let data: Vec<f32> = (0..2 * 4 * 10 * 8).map(|i| (i as f32).sin()).collect();
/// let (decay, beta) = (vec![-0.1; 2 * 4 * 10], vec![0.5; 2 * 4 * 10]);
/// let x = View::bhsd(&data, [2, 4, 10, 8])?; // batch, heads, len, dim
/// let (g, beta) = (View::bhsd(&decay, [2, 4, 10, 1])?, View::bhsd(&beta, [2, 4, 10, 1])?);
/// let rule = DeltaRule::new().qk_l2norm();
/// let inputs = DeltaInputs::new(x, x, x).g(g).beta(beta);
/// let output = rule.forward(Machine::detect(), inputs)?;
/// assert_eq!(output.out.shape(), x.shape());
///
/// let d_out = x; // of some loss
/// let grads = rule.backward(Machine::detect(), inputs, d_out, None)?;
/// assert_eq!(grads.k.shape(), x.shape());
///
/// let mut state = DeltaState::new(rule, [2, 4, 8, 8])?;
/// let out = state.step(Machine::detect(), inputs)?; // a prompt; then one position after another
/// assert_eq!(out, output.out);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeltaRule {
    scale: Option<f64>,
    normalized: bool,
}

/// The tensors of a call. Items may be [packed](View::packed), all tensors with the same offsets.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a, E: Element> {
    q: View<'a, E>,
    k: View<'a, E>,
    v: View<'a, E>,
    g: Option<View<'a, E::Num>>,
    beta: Option<View<'a, E::Num>>,
    state: Option<View<'a, E::Num>>,
}

impl<'a, E: Element> DeltaInputs<'a, E> {
    /// `q [batch, heads.q, len, dim]`, `k [batch, heads.k, len, dim]` and `v [batch, heads.v, len, v_dim]`. `heads.k` divides
    /// `heads.v`. `heads.q` divides it too, or is a multiple of it: then several queries read each state, and the output has
    /// the heads of q.
    #[must_use]
    pub fn new(q: View<'a, E>, k: View<'a, E>, v: View<'a, E>) -> Self {
        Self { q, k, v, g: None, beta: None, state: None }
    }

    /// The logarithm of the decay, usually negative: `[batch, heads.v, len, 1]`, or `dim` instead of 1.
    #[must_use]
    pub fn g(self, g: View<'a, E::Num>) -> Self {
        Self { g: Some(g), ..self }
    }

    /// How much of the error of a prediction is corrected: `[batch, heads.v, len, 1]`.
    #[must_use]
    pub fn beta(self, beta: View<'a, E::Num>) -> Self {
        Self { beta: Some(beta), ..self }
    }

    /// The states before the first position: `[batch, heads.v, dim, v_dim]`.
    #[must_use]
    pub fn state(self, state: View<'a, E::Num>) -> Self {
        Self { state: Some(state), ..self }
    }
}

/// What [`DeltaRule::forward`] returns.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeltaOutput<E: Element> {
    /// `[batch, heads, len, v_dim]`, in the layout of v, or of q if that has more heads.
    pub out: Tensor<E>,
    /// The states after the last position: `[batch, heads.v, dim, v_dim]`.
    pub state: Tensor<E::Num>,
}

/// The gradients of a loss, each in the shape and layout of its tensor.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeltaGrads<E: Element> {
    /// By q.
    pub q: Tensor<E>,
    /// By k.
    pub k: Tensor<E>,
    /// By v.
    pub v: Tensor<E>,
    /// By g, if there is one.
    pub g: Option<Tensor<E::Num>>,
    /// By beta, if there is one.
    pub beta: Option<Tensor<E::Num>>,
    /// By the states before the first position, given or not.
    pub state: Tensor<E::Num>,
}

/// The sizes of a call that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    batch: usize,
    q_heads: usize,
    k_heads: usize,
    /// Heads of v, each with its state.
    states: usize,
    len: usize,
    dim: usize,
    v_dim: usize,
    /// Features of g; 1 without it.
    g_dim: usize,
}

impl Sizes {
    fn new<E: Element>(inputs: &DeltaInputs<'_, E>) -> Self {
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|x| x.shape());
        Self {
            batch: v.batch,
            q_heads: q.heads,
            k_heads: k.heads,
            states: v.heads,
            len: v.len,
            dim: k.dim,
            v_dim: v.dim,
            g_dim: inputs.g.map_or(1, |g| g.shape().dim),
        }
    }

    /// Query heads of each state.
    fn readers(&self) -> usize {
        self.q_heads.checked_div(self.states).unwrap_or(0).max(1)
    }

    /// Query heads of a state.
    fn queries(&self, state: usize) -> Range<usize> {
        let first = state * self.q_heads / self.states;
        first..first + self.readers()
    }

    /// The key head of a state.
    fn key(&self, state: usize) -> usize {
        state * self.k_heads / self.states
    }

    fn state(&self) -> [usize; 4] {
        [self.batch, self.states, self.dim, self.v_dim]
    }
}

/// States of 0.
fn state_of_zeros<N: Number>(sizes: [usize; 4]) -> Result<Tensor<N>, Error> {
    let [batch, heads, len, dim] = sizes;
    let count = sizes[1..].iter().try_fold(batch, |n, x| n.checked_mul(*x));
    let count = count.ok_or(Error::ShapeOverflow { shape: sizes })?;
    let mut data = Vec::new();
    let bytes = count.saturating_mul(size_of::<N>());
    data.try_reserve_exact(count).map_err(|_| Error::OutOfMemory { bytes })?;
    data.resize(count, N::zero());
    Tensor::new(data, Shape { batch, heads, len, dim }, Layout::Bhsd)
}

/// A copy of states.
fn state_from<N: Number>(from: &View<'_, N>) -> Result<Tensor<N>, Error> {
    let shape = from.shape();
    let mut state = state_of_zeros(shape.to_array())?;
    let rows = (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h)));
    let rows = rows.flat_map(|(b, h)| (0..shape.len).map(move |i| (b, h, i)));
    for (to, (b, h, i)) in state.data_mut().chunks_exact_mut(shape.dim.max(1)).zip(rows) {
        to.copy_from_slice(from.row(b, h, i));
    }
    Ok(state)
}

impl DeltaRule {
    /// Queries times `1 / sqrt(dim)`, queries and keys as they are.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the factor of the queries.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Divides each query and key by its norm, `sqrt(x . x + 1e-6)`, as `use_qk_l2norm_in_kernel` of Transformers. The delta
    /// rule needs keys of norm 1 or less, without which its states grow beyond all bounds.
    #[must_use]
    pub fn qk_l2norm(self) -> Self {
        Self { normalized: true, ..self }
    }

    /// Whether queries and keys are divided by their norms.
    #[must_use]
    pub fn is_normalized(&self) -> bool {
        self.normalized
    }

    fn scale_of(&self, dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| (dim as f64).sqrt().recip())
    }

    /// Refuses tensors that do not fit each other.
    fn call<'c, E: Element>(
        &self,
        machine: Machine,
        inputs: DeltaInputs<'c, E>,
    ) -> Result<Call<'c, E>, Error> {
        let (DeltaInputs { q, k, v, g, beta, state }, sizes) = (inputs, Sizes::new(&inputs));
        same_positions(&v, "q", &q)?;
        same_positions(&v, "k", &k)?;
        Error::unless_same("features", ("q", q.shape().dim), ("k", sizes.dim))?;
        if sizes.dim == 0 {
            return Err(Error::NoFeatures { tensor: "k" });
        }
        let fits = |a: usize, b: usize| a == b || (a > 0 && b > 0 && b.is_multiple_of(a));
        let of_v = |meaning| (sizes.states, meaning);
        if !fits(sizes.k_heads, sizes.states) {
            let expected = of_v("as many as v, or a divisor of that");
            return Err(Error::Count { option: "heads of k", expected, found: sizes.k_heads });
        }
        if !fits(sizes.q_heads, sizes.states) && !fits(sizes.states, sizes.q_heads) {
            let expected = of_v("as many as v, or a divisor or a multiple of that");
            return Err(Error::Count { option: "heads of q", expected, found: sizes.q_heads });
        }
        if let Some(g) = g {
            same_positions(&v, "g", &g)?;
            Error::unless_same("heads", ("v", sizes.states), ("g", g.shape().heads))?;
            if ![1, sizes.dim].contains(&sizes.g_dim) {
                let expected = (1, "one for each head, or one for each feature of k");
                return Err(Error::Count { option: "features of g", expected, found: sizes.g_dim });
            }
        }
        if let Some(beta) = beta {
            crate::linear::same_rows(&v, 1, "beta", &beta)?;
        }
        if let Some(state) = state {
            check_state(sizes, "the initial state", &state)?;
        }
        let scale = self.scale_of(sizes.dim);
        if !scale.is_finite() {
            let accepted = "a finite number, or leave it out";
            return Err(Error::Value { option: "scale", found: scale, accepted });
        }
        let (scale, normalized) = (Number::from_f64(scale), self.normalized);
        Ok(Call { inputs, sizes, scale, normalized, machine })
    }

    /// The outputs and the final states.
    ///
    /// Of `machine`, the number of threads counts, and for a decay of each feature the instructions of exponentials; products
    /// choose their instructions themselves.
    pub fn forward<E: Element>(
        &self,
        machine: Machine,
        inputs: DeltaInputs<'_, E>,
    ) -> Result<DeltaOutput<E>, Error> {
        let call = self.call(machine, inputs)?;
        let state = inputs.state.map(|state| state_from(&state));
        let mut state = state.unwrap_or_else(|| state_of_zeros(call.sizes.state()))?;
        let out = call.forward(&mut state)?;
        Ok(DeltaOutput { out, state })
    }

    /// The gradients, from the inputs of [`forward`](Self::forward) and the gradients of a loss by `out` and by the final
    /// states (0 if there is none).
    pub fn backward<E: Element>(
        &self,
        machine: Machine,
        inputs: DeltaInputs<'_, E>,
        d_out: View<'_, E>,
        d_state: Option<View<'_, E::Num>>,
    ) -> Result<DeltaGrads<E>, Error> {
        let call = self.call(machine, inputs)?;
        let sizes = call.sizes;
        let like = if sizes.readers() > 1 { inputs.q } else { inputs.v };
        crate::linear::same_rows(&like, sizes.v_dim, "the gradient of the output", &d_out)?;
        let d_state = match d_state {
            Some(d_state) => {
                check_state(sizes, "the gradient of the final state", &d_state)?;
                state_from(&d_state)
            }
            None => state_of_zeros(sizes.state()),
        };
        call.backward(d_out, d_state?)
    }
}

fn check_state<N: Number>(
    sizes: Sizes,
    name: &'static str,
    state: &View<'_, N>,
) -> Result<(), Error> {
    let (own, found) = (sizes.state(), state.shape().to_array());
    for (i, axis) in ["batch", "heads", "features of k", "features of v"].into_iter().enumerate() {
        Error::unless_same(axis, ("the call", own[i]), (name, found[i]))?;
    }
    Ok(())
}

/// Refuses a tensor of other items or positions than v.
fn same_positions<E: Element, F: Element>(
    v: &View<'_, E>,
    name: &'static str,
    found: &View<'_, F>,
) -> Result<(), Error> {
    let (a, b) = (v.shape(), found.shape());
    Error::unless_same("batch", ("v", a.batch), (name, b.batch))?;
    Error::unless_same("length", ("v", a.len), (name, b.len))?;
    let [a, b] = [v.offsets(), found.offsets()].map(|offsets| offsets.unwrap_or(&[]));
    let same = |a, b| Error::unless_same("offsets of packed sequences", ("v", a), (name, b));
    same(a.len(), b.len())?;
    a.iter().zip(b).try_for_each(|(a, b)| same(*a, *b))
}
