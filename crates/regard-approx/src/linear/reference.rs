//! Reference implementation of linear attention (Katharopoulos et al. 2020), evaluated pair by pair in quadratic time.
//!
//! For query `i` and its visible keys `j` (all keys, or the keys up to its own position if causal):
//!
//! ```text
//! w_ij  = phi(q_i) . phi(k_j)
//! a_ij  = w_ij / sum_j w_ij                           the weights; 0 where the sum is 0
//! out_i = sum_j a_ij v_j
//! ```
//! where `phi` is the [`FeatureMap`]. Exponentials are relative to the largest argument of the query and to the largest
//! argument of all keys of the head. Both are common factors of a row, which the normalization cancels.

use super::{FeatureMap, LinearAttention};
use regard::problem::Dims;
use regard::reference::{Grads, Inputs};
use regard::{Element, Number, Problem, View};

fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}

fn widened<N: Number, E: Element>(row: &[E]) -> Vec<N> {
    row.iter().map(|x| N::from_f64(Number::to_f64(x.widen()))).collect()
}

/// The key head that serves a query head.
fn kv_head(dims: Dims, head: usize) -> usize {
    head / (dims.heads.q / dims.heads.kv)
}

/// Rows of a head: scaled inputs and their features.
struct Rows<N> {
    x: Vec<Vec<N>>,
    phi: Vec<Vec<N>>,
}

/// Feature map with its random directions.
struct Map<N> {
    map: FeatureMap,
    /// `[features][dim]`; empty unless the map is random.
    directions: Vec<Vec<N>>,
    /// Factor applied to the inputs: `dim^(-1/4)` for a random map, otherwise 1.
    size: N,
}

impl<N: Number> Map<N> {
    fn new(map: FeatureMap, dim: usize) -> Self {
        let directions = map.directions(dim);
        let directions =
            directions.chunks(dim.max(1)).map(|w| w.iter().map(|x| N::from_f64(*x)).collect());
        let size = match map {
            FeatureMap::PositiveRandom { .. } => (dim as f64).powf(-0.25),
            FeatureMap::EluPlusOne | FeatureMap::Relu => 1.0,
        };
        Self { map, directions: directions.collect(), size: N::from_f64(size) }
    }

    /// Arguments of the features of one row.
    fn arguments(&self, x: &[N]) -> Vec<N> {
        match self.map {
            FeatureMap::EluPlusOne | FeatureMap::Relu => x.to_vec(),
            FeatureMap::PositiveRandom { .. } => {
                let half = dot(x, x) / N::from_f64(2.0);
                self.directions.iter().map(|w| dot(w, x) - half).collect()
            }
        }
    }

    fn feature(&self, x: N, top: N) -> N {
        match self.map {
            FeatureMap::EluPlusOne if x > N::zero() => x + N::one(),
            FeatureMap::EluPlusOne => x.exp(),
            FeatureMap::Relu if x < N::zero() => N::zero(),
            FeatureMap::Relu => x,
            FeatureMap::PositiveRandom { .. } => (x - top).exp(),
        }
    }

    /// Derivative of a feature with respect to its argument, as a function of the feature.
    fn derivative(&self, phi: N) -> N {
        match self.map {
            FeatureMap::EluPlusOne => phi.min(N::one()),
            FeatureMap::Relu if phi > N::zero() => N::one(),
            FeatureMap::Relu => N::zero(),
            FeatureMap::PositiveRandom { .. } => phi,
        }
    }

    /// Largest feature or feature derivative of a row, which bounds the factors in its gradient terms.
    fn gain(&self, phi: &[N]) -> N {
        phi.iter().fold(N::zero(), |gain, phi| gain.max(*phi).max(self.derivative(*phi)))
    }

    /// Features of some rows. Exponentials are relative to the row's largest argument if `each`, otherwise to the largest
    /// argument of all rows.
    fn rows<'a, E: Element>(
        &self,
        given: impl Iterator<Item = &'a [E]>,
        each: bool,
        round: fn(N) -> N,
    ) -> Rows<N> {
        let scaled = |row: &[E]| widened(row).iter().map(|x: &N| *x * self.size).collect();
        let x: Vec<Vec<N>> = given.map(scaled).collect();
        let arguments: Vec<Vec<N>> = x.iter().map(|x| self.arguments(x)).collect();
        let largest = |xs: &[N]| xs.iter().copied().fold(N::neg_infinity(), N::max);
        let all = largest(&arguments.iter().map(|row| largest(row)).collect::<Vec<N>>());
        let phi = |row: &Vec<N>| {
            let top = if each { largest(row) } else { all };
            row.iter().map(|x| round(self.feature(*x, top))).collect()
        };
        let phi = arguments.iter().map(phi).collect();
        Rows { x, phi }
    }

    /// Backward pass of the feature map: gradient of row `row` from the gradient of its features.
    fn back(&self, rows: &Rows<N>, row: usize, d_phi: &[N]) -> Vec<N> {
        let (x, phi) = (&rows.x[row], &rows.phi[row]);
        let d: Vec<N> = d_phi.iter().zip(phi).map(|(d, phi)| *d * self.derivative(*phi)).collect();
        let FeatureMap::PositiveRandom { .. } = self.map else { return d };
        let sum: N = d.iter().copied().sum();
        let by = |i: usize| {
            let along: N = d.iter().zip(&self.directions).map(|(d, w)| *d * w[i]).sum();
            (along - sum * x[i]) * self.size
        };
        (0..x.len()).map(by).collect()
    }
}

/// Features of all queries and keys of a head.
struct Head<N> {
    q: Rows<N>,
    k: Rows<N>,
}

impl<N: Number> Head<N> {
    fn new<E: Element>(
        map: &Map<N>,
        problem: &Problem<'_, E>,
        (q, k): (View<'_, E>, View<'_, E>),
        (batch, head): (usize, usize),
        round: fn(N) -> N,
    ) -> Self {
        let (scope, kv_head) = (problem.scope(batch, head), kv_head(problem.dims(), head));
        let q = map.rows((0..scope.q_len).map(|i| q.row(batch, head, i)), true, round);
        let k = map.rows((0..scope.k_len).map(|j| k.row(batch, kv_head, j)), false, round);
        Self { q, k }
    }

    /// Visible keys with their normalized weights, and the sum of the unnormalized weights.
    fn weights(&self, row: usize, visible: &[usize], round: fn(N) -> N) -> (Vec<(usize, N)>, N) {
        let of = |key: &usize| (*key, dot(&self.q.phi[row], &self.k.phi[*key]));
        let mut weights: Vec<(usize, N)> = visible.iter().map(of).collect();
        let sum: N = weights.iter().map(|(_, w)| *w).sum();
        let share = |w: N| if sum == N::zero() { sum } else { round(w / sum) };
        weights.iter_mut().for_each(|(_, w)| *w = share(*w));
        (weights, sum)
    }
}

/// Keys visible to the row at `(batch, head, row)`.
fn visible<E: Element>(
    attention: &LinearAttention,
    problem: &Problem<'_, E>,
    (batch, head, row): (usize, usize, usize),
) -> Vec<usize> {
    let scope = problem.scope(batch, head);
    let seen = scope.position(row);
    let is_visible =
        |key: &usize| !attention.is_causal() || i64::try_from(*key).is_ok_and(|key| key <= seen);
    (0..scope.k_len).filter(is_visible).collect()
}

/// Reference forward pass: dense `out [batch, heads.q, q_len, v_dim]`.
pub fn forward<N: Number, E: Element>(
    attention: &LinearAttention,
    inputs: Inputs<'_, E>,
) -> Vec<N> {
    forward_in_steps(attention, inputs, |x| x)
}

/// [`forward`] with features, weights and outputs rounded by `round`, as separate tensor operations in a narrower dtype
/// round them.
#[inline(never)]
pub fn forward_in_steps<N: Number, E: Element>(
    attention: &LinearAttention,
    (q, k, v): Inputs<'_, E>,
    round: fn(N) -> N,
) -> Vec<N> {
    let problem = attention.problem((q, k, v));
    let map = Map::new(attention.map(), k.shape().dim);
    let (dims, mut result) = (problem.dims(), Vec::new());
    for (batch, h) in (0..dims.batch).flat_map(|b| (0..dims.heads.q).map(move |h| (b, h))) {
        let head = Head::new(&map, &problem, (q, k), (batch, h), round);
        for row in 0..problem.scope(batch, h).q_len {
            let visible = visible(attention, &problem, (batch, h, row));
            let mut out = vec![N::zero(); v.shape().dim];
            for (key, a) in head.weights(row, &visible, round).0 {
                let v: Vec<N> = widened(v.row(batch, kv_head(dims, h), key));
                out.iter_mut().zip(v).for_each(|(out, v)| *out = *out + a * v);
            }
            result.extend(out.into_iter().map(round));
        }
    }
    result
}

/// Gradients of `sum(out * d_out)` with respect to q, k and v, computed from the definition.
///
/// `out_i = sum_j a_ij v_j` gives `d_v` and `d_a`. The normalization gives
/// `d_w_ij = (d_a_ij - sum_j a_ij d_a_ij) / sum_j w_ij`. The dot product gives `d_phi(q_i) = sum_j d_w_ij phi(k_j)` and
/// `d_phi(k_j) = sum_i d_w_ij phi(q_i)`. The derivative of the feature map gives the rest.
///
/// `size` of the result is the largest sum of the magnitudes of these terms for a query or key, before cancellation.
pub fn backward<N: Number, E: Element>(
    attention: &LinearAttention,
    inputs: Inputs<'_, E>,
    d_out: &[N],
) -> Grads<N> {
    backward_in_steps(attention, inputs, d_out, |x| x)
}

/// [`backward`] with intermediate results rounded: see [`forward_in_steps`].
#[inline(never)]
pub fn backward_in_steps<N: Number, E: Element>(
    attention: &LinearAttention,
    (q, k, v): Inputs<'_, E>,
    d_out: &[N],
    round: fn(N) -> N,
) -> Grads<N> {
    let problem = attention.problem((q, k, v));
    let (dims, map) = (problem.dims(), Map::new(attention.map(), k.shape().dim));
    let (kv, dim, v_dim) = (dims.batch * dims.heads.kv * dims.k_len, dims.qk_dim, dims.v_dim);
    let zeros = |n: usize| vec![N::zero(); n];
    let mut g = Grads { k: zeros(kv * dim), v: zeros(kv * v_dim), ..Grads::<N>::default() };
    for (batch, h) in (0..dims.batch).flat_map(|b| (0..dims.heads.q).map(move |h| (b, h))) {
        let head = Head::new(&map, &problem, (q, k), (batch, h), round);
        let (mut d_phi, kv_head) = (FeatureGrads::new(&head), kv_head(dims, h));
        let kv_row = |key: usize| (batch * dims.heads.kv + kv_head) * dims.k_len + key;
        for row in 0..dims.q_len {
            let r = (batch * dims.heads.q + h) * dims.q_len + row;
            let d_out = &d_out[r * v_dim..][..v_dim];
            let (weights, sum) =
                head.weights(row, &visible(attention, &problem, (batch, h, row)), round);
            let d_a = |key: &usize| round(dot(d_out, &widened(v.row(batch, kv_head, *key))));
            let d_a: Vec<N> = weights.iter().map(|(key, _)| d_a(key)).collect();
            let mean: N = weights.iter().zip(&d_a).map(|((_, a), d_a)| *a * *d_a).sum();
            for ((key, a), d_a) in weights.into_iter().zip(d_a).filter(|_| sum != N::zero()) {
                let d_v = &mut g.v[kv_row(key) * v_dim..][..v_dim];
                d_v.iter_mut().zip(d_out).for_each(|(d_v, d)| *d_v = *d_v + a * *d);
                let size = (d_a.abs() + mean.abs()) / sum;
                d_phi.add(&map, &head, (row, key), ((d_a - mean) / sum, size));
            }
            g.q.extend(map.back(&head.q, row, &d_phi.q[row]));
        }
        for (key, d_phi) in d_phi.k.iter().enumerate() {
            let d_k = &mut g.k[kv_row(key) * dim..][..dim];
            let by = map.back(&head.k, key, d_phi);
            d_k.iter_mut().zip(by).for_each(|(d_k, by)| *d_k = *d_k + by);
        }
        g.size = d_phi.sizes.iter().flatten().fold(g.size, |a, b| a.max(*b));
    }
    for grad in [&mut g.q, &mut g.k, &mut g.v] {
        grad.iter_mut().for_each(|x| *x = round(*x));
    }
    g
}

/// Gradients of the features of a head.
struct FeatureGrads<N> {
    q: Vec<Vec<N>>,
    k: Vec<Vec<N>>,
    /// Sum of the magnitudes of all added terms, for each query and for each key.
    sizes: [Vec<N>; 2],
}

impl<N: Number> FeatureGrads<N> {
    fn new(head: &Head<N>) -> Self {
        let zeros =
            |rows: &Rows<N>| rows.phi.iter().map(|phi| vec![N::zero(); phi.len()]).collect();
        let sizes = [&head.q, &head.k].map(|rows| vec![N::zero(); rows.phi.len()]);
        Self { q: zeros(&head.q), k: zeros(&head.k), sizes }
    }

    /// Backward pass of `w_ij = phi(q_i) . phi(k_j)`.
    fn add(&mut self, map: &Map<N>, head: &Head<N>, (row, key): (usize, usize), (d, size): (N, N)) {
        let (q, k) = (&head.q.phi[row], &head.k.phi[key]);
        self.q[row].iter_mut().zip(k).for_each(|(d_phi, phi)| *d_phi = *d_phi + d * *phi);
        self.k[key].iter_mut().zip(q).for_each(|(d_phi, phi)| *d_phi = *d_phi + d * *phi);
        let size = size * map.gain(q) * map.gain(k);
        let [of_rows, of_keys] = &mut self.sizes;
        of_rows[row] = of_rows[row] + size;
        of_keys[key] = of_keys[key] + size;
    }
}
