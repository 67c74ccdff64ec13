//! Attention rollout (Abnar and Zuidema 2020) in linear memory: attention matrices are never stored.

use super::AttentionView;
use super::measure::Measure;
use crate::error::Error;
use crate::machine::simd::Number;

/// Attention rollout (Abnar and Zuidema 2020): attributes the outputs at some positions to the positions of each layer's
/// input. Computes `r <- own r + (1 - own) r A` from the last layer to the first, where `A` is the attention matrix
/// averaged over the heads of the layer and `own` is the fraction that the residual connection carries (usually 0.5).
///
/// `layers` are views of one item each, with as many queries as keys. `from` weights the output positions: one-hot for a
/// single position, or a distribution over several. Returns one row per layer, first layer first: the share of each
/// position at the input of that layer. `from` itself is the row after the last layer. Costs one pass over the weights per
/// layer, and memory for a row.
pub fn rollout<N: Number>(
    layers: &[AttentionView<'_, N>],
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

impl<N: Number> AttentionView<'_, N> {
    /// `r A`, averaged over the heads.
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
        let counts: Vec<_> = r.iter().map(|r| N::from_f64(*r)).collect();
        let stats = whole.measure_counting(&Measure::new().col_sum(), Some(&counts))?;
        let mut sum = vec![0.0; len];
        for head in stats.col_sum.unwrap_or_default().chunks(len.max(1)) {
            sum.iter_mut()
                .zip(head)
                .for_each(|(sum, x)| *sum += Number::to_f64(*x) / heads.len() as f64);
        }
        Ok(sum)
    }
}
