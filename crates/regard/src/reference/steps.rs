//! Intermediate results of attention, materialized for inspection rather than for computation.

use super::rows;
use crate::description::problem::{Dims, Problem};
use crate::error::Error;
use crate::machine::simd::{Element, Number};
use crate::tensor::index::Pair;
use crate::tensor::view::{Layout, Shape, Tensor, View};

/// All intermediate results of a small attention call.
///
/// The four steps: a query and a key give a similarity; scale, softcap and biases turn it into a score; the normalizer
/// turns the scores of a row into weights; the output is the weighted sum of the values.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Steps<N> {
    /// `similarity(q_i, k_j)`, `[batch, heads.q, q_len, k_len]`, including masked pairs.
    pub similarities: Tensor<N>,
    /// Input of the normalizer, `[batch, heads.q, q_len, k_len]`; `-inf` for masked pairs.
    pub scores: Tensor<N>,
    /// Attention weights, including the factors of dropout and local attention, `[batch, heads.q, q_len, k_len]`; 0 for
    /// masked pairs.
    pub weights: Tensor<N>,
    /// `[batch, heads.q, q_len, v_dim]`
    pub out: Tensor<N>,
}

/// Largest number of pairs that [`steps`] accepts.
const PAIRS: usize = 1 << 24;

/// Returns the intermediate results of a call, for inputs small enough to read or to test by hand. It stores three matrices
/// of `q_len x k_len` numbers per head, which the attention kernels never do.
///
/// ```
/// use regard::reference::steps;
/// use regard::{Problem, View};
/// let x = View::matrix(&[1f32, 0.0, 0.0, 1.0, 1.0, 1.0], [3, 2])?; // three positions of two features
/// let seen = steps(&Problem::new(&x, &x, &x), x, x, x)?;
/// assert_eq!(seen.similarities.data()[..3], [1.0, 0.0, 1.0]); // the first query with each key
/// assert!((seen.scores.data()[0] - 0.70710677).abs() < 1e-6); // over the root of 2
/// assert!((seen.weights.data()[..3].iter().sum::<f32>() - 1.0).abs() < 1e-6);
/// assert_eq!(seen.out.shape().to_array(), [1, 1, 3, 2]);
/// # Ok::<(), regard::Error>(())
/// ```
#[inline(never)]
pub fn steps<E: Element>(
    problem: &Problem<'_, E>,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
) -> Result<Steps<E::Num>, Error> {
    problem.check()?;
    let shapes = [q.shape(), k.shape(), v.shape()];
    for (name, (planned, found)) in
        ["q", "k", "v"].into_iter().zip(problem.shapes().into_iter().zip(shapes))
    {
        planned.unless_same("the call", name, found)?;
    }
    let packed = [q.offsets(), k.offsets(), v.offsets()].iter().any(Option::is_some);
    if packed || problem.is_cached() {
        return Err(Error::Packed { option: "steps" });
    }
    let Dims { batch, heads, q_len, k_len, v_dim, .. } = problem.dims();
    let pairs = problem.rows().saturating_mul(k_len).max(batch.saturating_mul(heads.kv));
    if pairs > PAIRS {
        let accepted = "at most 16777216 of them, or call forward, which holds none";
        return Err(Error::Value { option: "pairs", found: pairs as f64, accepted });
    }
    let problem = &problem.clone().with_local_mask();
    let soft = problem.soft();
    let (mut similarities, mut scores, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let keys = problem.keys(&k, |x| x);
    for (batch, head, row) in rows(problem) {
        let at = Pair { batch, head, row, key: 0 };
        let query = problem.query::<E::Num>(&q, at, |x| x);
        let of_head = problem.keys_of(&keys, at);
        similarities.extend(of_head.iter().map(|key| problem.similarity_of(head, &query, key)));
        let visible = soft.scores(&keys, &query, at, |x| x);
        let (first, hidden) = (scores.len(), E::Num::from_f64(f64::NEG_INFINITY));
        scores.resize(first + k_len, hidden);
        weights.resize(first + k_len, E::Num::default());
        visible.iter().for_each(|(key, steps)| scores[first + key] = steps.score);
        let kept = problem.scores(&keys, &query, at, |x| x);
        let softmax = problem.softmax(head, &kept);
        for (key, steps) in kept {
            let factor: E::Num = problem.factor(Pair { key, ..at });
            weights[first + key] = softmax.weight(steps.score) * factor;
        }
    }
    let out = super::forward::<E::Num, E>(problem, (q, k, v)).out;
    let shape = Shape { batch, heads: heads.q, len: q_len, dim: k_len };
    let tensor = |data, dim| Tensor::new(data, Shape { dim, ..shape }, Layout::Bhsd);
    Ok(Steps {
        similarities: tensor(similarities, k_len)?,
        scores: tensor(scores, k_len)?,
        weights: tensor(weights, k_len)?,
        out: tensor(out, v_dim)?,
    })
}
