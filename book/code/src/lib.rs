//! The code of the book: attention written several times, from the definition to the engine.
//!
//! Every rung of the ladder is a function of the same form, `attend(&Head) -> AttentionOutput`, for one head of `f32` numbers. All of
//! them are held against `regard::reference` in `tests/all.rs`, and timed beside each other by `examples/ladder.rs`.
//!
//! | rung | what it adds |
//! |---|---|
//! | [`definition`] | nothing: four steps, a matrix of weights |
//! | [`online`] | one pass over the keys, no row of weights; partial results that merge |
//! | [`tiles`] | many rows use a tile of keys while it is in the cache |
//! | [`lanes`] | sixteen queries side by side in vectors, an `exp` made of arithmetic |
//! | [`threads`] | groups of rows go to threads |
//! | [`engine`] | a call of `regard` |
//! | [`backward`] | the gradients: with the matrix, and without it |

#![forbid(unsafe_code)]

pub mod backward;
pub mod definition;
pub mod engine;
pub mod lanes;
pub mod online;
pub mod threads;
pub mod tiles;

// The Rust code of the repository's front pages, as doc tests. Here, because this crate is not published: a package cannot contain them.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod front_page {}
#[cfg(doctest)]
#[doc = include_str!("../../../README.zh.md")]
mod front_page_in_chinese {}

// ANCHOR: head
/// One head of attention: `q [q_len, dim]`, `k [k_len, dim]`, `v [k_len, v_dim]`, row after row.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Queries, `[q_len, dim]`
    pub q: &'a [f32],
    /// Keys, `[k_len, dim]`
    pub k: &'a [f32],
    /// Values, `[k_len, v_dim]`
    pub v: &'a [f32],
    /// Features of a query and of a key.
    pub dim: usize,
    /// Features of a value.
    pub v_dim: usize,
    /// Whether a query sees only the keys up to its own position; the last query stands at the last key.
    pub causal: bool,
}

/// The result of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput {
    /// `[q_len, v_dim]`; 0 for a row that sees nothing.
    pub out: Vec<f32>,
    /// `ln(sum of e^score)` of each row, `[q_len]`; `-inf` for a row that sees nothing.
    pub lse: Vec<f32>,
}
// ANCHOR_END: head

// ANCHOR: rows
impl Head<'_> {
    /// How many queries there are.
    #[must_use]
    pub fn q_len(&self) -> usize {
        self.q.len() / self.dim
    }

    /// How many keys there are.
    #[must_use]
    pub fn k_len(&self) -> usize {
        self.k.len() / self.dim
    }

    /// The features of query `i`.
    #[must_use]
    pub fn query(&self, i: usize) -> &[f32] {
        &self.q[i * self.dim..][..self.dim]
    }

    /// The features of key `j`.
    #[must_use]
    pub fn key(&self, j: usize) -> &[f32] {
        &self.k[j * self.dim..][..self.dim]
    }

    /// The features of value `j`.
    #[must_use]
    pub fn value(&self, j: usize) -> &[f32] {
        &self.v[j * self.v_dim..][..self.v_dim]
    }

    /// How many keys query `i` sees: always the first ones.
    #[must_use]
    pub fn visible(&self, i: usize) -> usize {
        if self.causal { (self.k_len() + i + 1).saturating_sub(self.q_len()) } else { self.k_len() }
    }

    /// What dot products are multiplied by: `1 / sqrt(dim)`.
    #[must_use]
    pub fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

/// The sum of the products of two rows, in order.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor` times one row to another.
pub fn add_times(to: &mut [f32], factor: f32, row: &[f32]) {
    for (to, x) in to.iter_mut().zip(row) {
        *to += factor * x;
    }
}
// ANCHOR_END: rows
