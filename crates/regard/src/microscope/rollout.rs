//! The route of information through layers (Abnar and Zuidema 2020), without a matrix.

use super::AttentionView;
use super::measure::Measure;
use crate::error::Error;
use crate::simd::{Element, Number};

/// Where what ends up in some positions came from: `r <- own r + (1 - own) r A`, from the last layer to the first, with `A` the
/// mean of the layer's heads and `own` what the residual connection carries past it (usually 0.5).
///
/// `layers` are views of one item each, as many queries as keys. `from` says how much of the end each position stands for: 1 at
/// one of them, or shares of several. The answer has one row for each layer, the first layer first: how much each position holds
/// at its start; `from` itself belongs after the last. Costs one look a layer, memory for a row.
pub fn rollout<E: Element>(
    layers: &[AttentionView<'_, E>],
    from: &[f64],
    own: f64,
) -> Result<Vec<Vec<f64>>, Error> {
    if !(0.0..=1.0).contains(&own) {
        let accepted = "a share from 0 to 1";
        return Err(Error::Value { option: "own", found: own, accepted });
    }
    let mut rows = Vec::with_capacity(layers.len());
    let mut r = from.to_vec();
    for layer in layers.iter().rev() {
        let passed = layer.pass_on(&r)?;
        r.iter_mut().zip(passed).for_each(|(r, passed)| *r = own * *r + (1.0 - own) * passed);
        rows.push(r.clone());
    }
    rows.reverse();
    Ok(rows)
}

impl<E: Element> AttentionView<'_, E> {
    /// `r A`, the mean over the heads.
    fn pass_on(&self, r: &[f64]) -> Result<Vec<f64>, Error> {
        let dims = self.problem.dims();
        let heads: Vec<_> = self.each_head().collect();
        let batch = heads.first().map_or(0, |(batch, _)| *batch);
        let items = heads.iter().filter(|(b, _)| *b != batch).count();
        Error::unless_same("items", ("rollout", 1), ("the layer", usize::from(items > 0) + 1))?;
        let len = if dims.batch == 0 { 0 } else { self.problem.q_len(batch) };
        let keys = if dims.batch == 0 { 0 } else { self.problem.k_len(batch) };
        Error::unless_same("positions", ("the layer's queries", len), ("its keys", keys))?;
        Error::unless_same("positions", ("from", r.len()), ("the layer", len))?;
        let whole = Self { rows: None, step: 1, ..self.clone() };
        let counts: Vec<_> = r.iter().map(|r| E::Num::from_f64(*r)).collect();
        let stats = whole.measure_counting(&Measure::new().col_sum(), Some(&counts))?;
        let mut sum = vec![0.0; len];
        for head in stats.col_sum.unwrap_or_default().chunks(len.max(1)) {
            sum.iter_mut().zip(head).for_each(|(sum, x)| *sum += x.to_f64() / heads.len() as f64);
        }
        Ok(sum)
    }
}
