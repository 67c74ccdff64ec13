//! How close is close: no closer than the definition itself comes when it is evaluated in the same number type.
//!
//! The judge is the definition in `f64`. A kernel in `f32` may be off by twice the error of the definition evaluated in
//! `f32`, plus a floor of a few rounding steps: the plain evaluation is sometimes exact by luck (one key, equal scores),
//! and a kernel that rounds once more is no worse for it.
//!
//! All errors are the largest of a tensor: single elements of the plain evaluation are exact by luck all the time.

use regard::reference::{self, Inputs, Outcome};
use regard::{Number, Output, Problem};

/// Rounding steps of the floor.
///
/// A kernel holds scores times `log2 e`, so each is rounded once more than in the plain evaluation (by half a step of its own size), and
/// the weights come from a `2^x` within 3 ulp where the library's `e^x` is within 1; dividing the sums at the end adds
/// another half. That is 4 steps of the largest score at most, if all of them fall on the same side.
pub const FLOOR_F32: f64 = 4.0;

/// Rounding steps for `f64`, where the judge has the same precision as the judged: a row of n keys and d features makes
/// both err by up to about `sqrt(n) + sqrt(d)` steps, and no row of the `f64` table has more than 12,300 keys.
pub const FLOOR_F64: f64 = 32.0;

/// The right result of a case, and how far from it a kernel may be.
#[derive(Clone, Debug)]
pub struct Judge {
    exact: Outcome<f64>,
    /// The largest error allowed in `out`.
    pub out: f64,
    /// The largest error allowed in `lse`.
    pub lse: f64,
}

/// How near to its bound a result came: 1 is the bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ratio {
    /// Of `out`.
    pub out: f64,
    /// Of `lse`.
    pub lse: f64,
}

impl Judge {
    /// Evaluates the definition twice.
    #[must_use]
    pub fn new<N: Number>(problem: &Problem<'_, N>, inputs: Inputs<'_, N>) -> Self {
        let exact = reference::forward::<f64, N>(problem, inputs);
        let plain = reference::forward::<N, N>(problem, inputs);
        let steps = if N::NAME == "f32" { FLOOR_F32 } else { FLOOR_F64 };
        // The sizes that rounding is relative to. A score is rounded in proportion to itself, and `lse` is as large as
        // the largest score; its error goes into the weights and so into `out`.
        let score = largest(exact.lse.iter().copied()).max(1.0);
        let v = inputs.2;
        let value = largest(elements(v).map(wide));
        let floor = steps * wide(N::epsilon()) * score;
        let error = |a: &[f64], b: &[N]| {
            largest(a.iter().zip(b).filter(|(a, _)| a.is_finite()).map(|(a, b)| a - wide(*b)))
        };
        let (out, lse) = (error(&exact.out, &plain.out), error(&exact.lse, &plain.lse));
        Self { out: 2.0 * out + floor * value, lse: 2.0 * lse + floor, exact }
    }

    /// How near to the bounds a result is, or why it is wrong whatever the bounds are.
    pub fn ratio<N: Number>(&self, output: &Output<N>) -> Result<Ratio, String> {
        let shape = output.out.shape();
        let mut ratio = Ratio::default();
        let expected = shape.batch * shape.heads * shape.len;
        if output.lse.len() != expected || self.exact.lse.len() != expected {
            return Err(format!("lse has {} entries instead of {expected}", output.lse.len()));
        }
        for (row, (lse, exact)) in output.lse.iter().zip(&self.exact.lse).enumerate() {
            let (item, i) = (row / shape.len, row % shape.len);
            let out = output.out.view().row(item / shape.heads, item % shape.heads, i);
            let lse = wide(*lse);
            if *exact == f64::NEG_INFINITY {
                if lse != *exact || out.iter().any(|x| wide(*x) != 0.0) {
                    return Err(format!("row {row} sees nothing, yet has lse {lse}, out {out:?}"));
                }
                continue;
            }
            ratio.lse = ratio.lse.max(share(lse - exact, self.lse));
            for (x, exact) in out.iter().zip(&self.exact.out[row * shape.dim..]) {
                ratio.out = ratio.out.max(share(wide(*x) - exact, self.out));
            }
        }
        Ok(ratio)
    }
}

impl Ratio {
    /// Whether both bounds are kept.
    #[must_use]
    pub fn is_close(self) -> bool {
        self.out <= 1.0 && self.lse <= 1.0
    }
}

/// The part of a bound that an error takes; infinite for NaN.
fn share(error: f64, bound: f64) -> f64 {
    if error == 0.0 {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        error.abs() / bound
    }
}

/// `Number::to_f64`, which exists twice for a generic number.
pub(crate) fn wide<N: Number>(x: N) -> f64 {
    Number::to_f64(x)
}

fn elements<N: Number>(v: regard::View<'_, N>) -> impl Iterator<Item = N> + '_ {
    let regard::Shape { batch, heads, len, .. } = v.shape();
    let rows = move |b| (0..heads).flat_map(move |h| (0..len).map(move |i| (b, h, i)));
    (0..batch).flat_map(rows).flat_map(move |(b, h, i)| v.row(b, h, i).iter().copied())
}

/// The largest size of finite numbers.
fn largest(xs: impl Iterator<Item = f64>) -> f64 {
    xs.filter(|x| x.is_finite()).fold(0.0, |a, x| a.max(x.abs()))
}
