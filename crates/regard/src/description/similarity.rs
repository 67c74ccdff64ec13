//! How a query and a key make a number, before anything else happens to it.

use crate::error::Error;
use crate::machine::simd::Element;
use crate::tensor::view::{Shape, View};
use std::fmt;

/// How a query and a key make a number.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::large_enum_variant, reason = "one for each call")]
#[non_exhaustive]
pub enum Similarity<'a, E: Element> {
    /// `q . k`
    #[default]
    Dot,
    /// `q^T W k` (Luong's general form), with `W [1, heads.q or 1, q_dim, qk_dim]`.
    General(View<'a, E>),
    /// `-|q - k|^2`
    Distance,
    /// `v^T tanh(W_q^T q + W_k^T k)`: see [`Additive`].
    Additive(Additive<'a, E>),
}

/// Additive attention, also called concat attention (Bahdanau et al. 2015): `v^T tanh(W_q^T q + W_k^T k)`, the output of a
/// small network with one hidden layer that sees the query and the key side by side.
///
/// Cost for `n` queries, `m` keys and `hidden` units: `n m hidden` hyperbolic tangents forward, twice as many backward (they
/// are computed again rather than kept), and the projections of n queries and m keys. Memory beside inputs and outputs:
/// the projected keys, `m hidden` numbers; nothing of size `n m`. Such scores stay within `sum |v|`, so they are not divided by
/// the root of anything: the scale is 1 unless one is given.
///
/// ```
/// use regard::problem::{Additive, Similarity};
/// use regard::{Machine, Plan, Problem, View};
/// let numbers: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
/// // 3 queries of 5 features, 4 keys of 6, a hidden layer of 7 units.
/// let q = View::matrix(&numbers[..15], [3, 5])?;
/// let k = View::matrix(&numbers[..24], [4, 6])?;
/// let weights = Additive {
///     w_q: View::matrix(&numbers[..35], [5, 7])?,
///     w_k: Some(View::matrix(&numbers[..42], [6, 7])?),
///     v: View::matrix(&numbers[..7], [1, 7])?,
/// };
/// let problem = Problem::new(&q, &k, &k).similarity(Similarity::Additive(weights));
/// let output = Plan::new(problem, Machine::detect())?.forward(q, k, k)?;
/// assert_eq!(output.out.shape().to_array(), [1, 1, 3, 6]);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Additive<'a, E: Element> {
    /// `[1, heads.q or 1, q_dim, hidden]`
    pub w_q: View<'a, E>,
    /// `[1, heads.kv or 1, k_dim, hidden]`; `None` where the keys are projected already, as a decoder has them that meets
    /// the same keys step after step.
    pub w_k: Option<View<'a, E>>,
    /// `[1, heads.q or 1, 1, hidden]`
    pub v: View<'a, E>,
}

impl<'a, E: Element> Similarity<'a, E> {
    /// The same for kernels: see [`View::erase`].
    pub(crate) fn erase(self) -> Similarity<'a, E::Num> {
        match self {
            Self::Dot => Similarity::Dot,
            Self::Distance => Similarity::Distance,
            Self::General(w) => Similarity::General(w.erase()),
            Self::Additive(Additive { w_q, w_k, v }) => Similarity::Additive(Additive {
                w_q: w_q.erase(),
                w_k: w_k.map(View::erase),
                v: v.erase(),
            }),
        }
    }

    pub(crate) fn check(&self, q: Shape, k: Shape) -> Result<(), Error> {
        let same = Error::unless_same;
        let shared = |name, found: usize, of: (&'static str, usize)| match found {
            1 => Ok(()),
            _ => same("heads", of, (name, found)),
        };
        match self {
            Self::Dot | Self::Distance => same("features", ("q", q.dim), ("k", k.dim)),
            Self::General(w) => {
                let w = w.shape();
                same("features", ("q", q.dim), ("rows of W", w.len))?;
                same("features", ("k", k.dim), ("columns of W", w.dim))?;
                same("batch", ("W", w.batch), ("a shared W", 1))?;
                shared("W", w.heads, ("q", q.heads))
            }
            Self::Additive(Additive { w_q, w_k, v }) => {
                let (w_q, v) = (w_q.shape(), v.shape());
                same("features", ("q", q.dim), ("rows of w_q", w_q.len))?;
                same("hidden units", ("w_q", w_q.dim), ("v", v.dim))?;
                same("rows", ("v", v.len), ("a vector", 1))?;
                if v.dim == 0 {
                    return Err(Error::Zero { option: "hidden units" });
                }
                shared("w_q", w_q.heads, ("q", q.heads))?;
                shared("v", v.heads, ("q", q.heads))?;
                let mut batches = vec![("w_q", w_q.batch), ("v", v.batch)];
                if let Some(w_k) = w_k.map(|w| w.shape()) {
                    same("features", ("k", k.dim), ("rows of w_k", w_k.len))?;
                    same("hidden units", ("w_k", w_k.dim), ("v", v.dim))?;
                    shared("w_k", w_k.heads, ("k", k.heads))?;
                    batches.push(("w_k", w_k.batch));
                } else {
                    same("hidden units", ("projected k", k.dim), ("v", v.dim))?;
                }
                batches
                    .into_iter()
                    .try_for_each(|found| same("batch", found, ("shared weights", 1)))
            }
        }
    }

    /// What queries are multiplied by before they meet the keys, if anything: `W`, or `W_q`.
    pub(crate) fn of_queries(&self) -> Option<View<'a, E>> {
        match self {
            Self::General(w) => Some(*w),
            Self::Additive(weights) => Some(weights.w_q),
            Self::Dot | Self::Distance => None,
        }
    }

    /// What keys are multiplied by before they meet the queries, if anything.
    pub(crate) fn of_keys(&self) -> Option<View<'a, E>> {
        match self {
            Self::Additive(weights) => weights.w_k,
            _ => None,
        }
    }

    /// The same for keys that have been multiplied.
    pub(crate) fn with_projected_keys(self) -> Self {
        match self {
            Self::Additive(weights) => Self::Additive(Additive { w_k: None, ..weights }),
            other => other,
        }
    }

    /// Whether a query goes into it in no other way than multiplied by something that does not depend on it, so that a
    /// factor can be put into the query.
    pub(crate) fn is_linear(&self) -> bool {
        matches!(self, Self::Dot | Self::General(_))
    }

    /// What a similarity is multiplied by to be scored, unless a scale is given.
    pub(crate) fn usual_scale(&self, qk_dim: usize) -> f64 {
        match self {
            Self::Additive(_) => 1.0,
            _ => 1.0 / (qk_dim as f64).sqrt(),
        }
    }

    /// Units of the hidden layer; 0 where there is none.
    pub(crate) fn hidden(&self) -> usize {
        match self {
            Self::Additive(weights) => weights.v.shape().dim,
            _ => 0,
        }
    }
}

impl<E: Element> fmt::Display for Similarity<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dot => "dot",
            Self::General(_) => "general",
            Self::Distance => "distance",
            Self::Additive(_) => "additive",
        })
    }
}
