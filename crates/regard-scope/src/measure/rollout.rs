//! Attention rollout (Abnar and Zuidema 2020) in linear memory: no attention matrix is stored.

use super::Measure;
use regard::{AttentionView, Error, Number};

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
        let mixed = mix(layer, &r)?;
        r.iter_mut().zip(mixed).for_each(|(r, mixed)| *r = own * *r + (1.0 - own) * mixed);
        rows.push(r.clone());
    }
    rows.reverse();
    Ok(rows)
}

/// `r A`, averaged over the heads.
fn mix<N: Number>(layer: &AttentionView<'_, N>, r: &[f64]) -> Result<Vec<f64>, Error> {
    let heads: Vec<_> = layer.heads().collect();
    let batch = heads.first().map(|(batch, _)| *batch);
    let items = heads.chunk_by(|a, b| a.0 == b.0).count().max(1);
    Error::unless_same("items", ("rollout", 1), ("the layer", items))?;
    let size = |batch| {
        let scope = layer.problem().scope(batch, 0);
        [scope.q_len, scope.k_len]
    };
    let [len, keys] = batch.map_or([0; 2], size);
    Error::unless_same("positions", ("the layer's queries", len), ("its keys", keys))?;
    Error::unless_same("positions", ("from", r.len()), ("the layer", len))?;
    let whole = layer.rows(0..len).every(1)?.keys(0..len);
    let counts: Vec<_> = r.iter().map(|r| N::from_f64(*r)).collect();
    let stats = Measure::new().col_sum().weighted(&whole, Some(&counts))?;
    let mut sum = vec![0.0; len];
    for head in stats.col_sum.chunks(len.max(1)) {
        let each = sum.iter_mut().zip(head);
        each.for_each(|(sum, x)| *sum += Number::to_f64(*x) / heads.len() as f64);
    }
    Ok(sum)
}
