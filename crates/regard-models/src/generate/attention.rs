//! What a decoder looked at when a token was chosen, as numbers.

use super::GenerateError;
use super::search::{MAX_TOP, field};
use std::ops::Range;

/// What is told of attention with each token that is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionProbe {
    /// Layers from 0 on.
    pub layers: Vec<usize>,
    /// Heads of the queries, of each of these layers.
    pub heads: Vec<usize>,
    /// So many positions with the largest weights.
    pub top: usize,
    /// Spans of positions whose attention mass is told; they may overlap and reach beyond the last one.
    pub spans: Vec<Range<usize>>,
}

impl AttentionProbe {
    /// Whether a model with so many layers and heads can be asked so.
    pub fn check(&self, [layers, heads]: [usize; 2]) -> Result<(), GenerateError> {
        let asked =
            [("attention.layers", &self.layers, layers), ("attention.heads", &self.heads, heads)];
        for (name, numbers, limit) in asked {
            if let Some(number) = numbers.iter().find(|number| **number >= limit) {
                field(false, name, number, format!("below {limit}, as all of this model"))?;
            }
        }
        field(self.top <= MAX_TOP, "attention.top", self.top, format!("at most {MAX_TOP}"))
    }
}

/// What one head looked at: the softmax over all positions before the token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionRow {
    /// From 0 on.
    pub layer: usize,
    /// Of the queries.
    pub head: usize,
    /// Entropy of the weights in nats: 0 if it looks at one position alone, `ln n` if it looks at `n` alike.
    pub entropy: f64,
    /// How far back it looks: the mean number of positions between the query and what it looks at.
    pub distance: f64,
    /// Positions with the largest weights, and these; of equal ones the first.
    pub top: Vec<(usize, f32)>,
    /// The sum of the weights of each span.
    pub spans: Vec<f64>,
}

impl AttentionRow {
    /// Of the weights of the last position for all positions.
    pub(crate) fn new([layer, head]: [usize; 2], weights: &[f32], probe: &AttentionProbe) -> Self {
        let last = weights.len().saturating_sub(1);
        let (mut entropy, mut distance) = (0.0, 0.0);
        for (position, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            let weight = f64::from(*weight);
            entropy -= weight * weight.ln();
            distance += weight * (last - position) as f64;
        }
        let top = super::choose::best(weights, probe.top).into_iter();
        let top = top.map(|(position, weight)| (position as usize, weight)).collect();
        let mass = |span: &Range<usize>| {
            let own = weights.iter().take(span.end).skip(span.start);
            own.map(|weight| f64::from(*weight)).sum::<f64>()
        };
        let spans = probe.spans.iter().map(mass).collect();
        Self { layer, head, entropy, distance, top, spans }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_told_by_its_entropy_its_distance_its_largest_weights_and_its_spans() {
        let probe =
            |top| AttentionProbe { top, spans: vec![1..3, 2..9, 4..5], ..Default::default() };
        let row = AttentionRow::new([3, 1], &[0.25, 0.0, 0.25, 0.5], &probe(2));
        assert_eq!((row.layer, row.head), (3, 1));
        assert!((row.entropy - 1.5 * 2.0_f64.ln()).abs() < 1e-12);
        assert!((row.distance - (0.25 * 3.0 + 0.25)).abs() < 1e-12);
        assert_eq!(row.top, [(3, 0.5), (0, 0.25)]);
        assert_eq!(row.spans, [0.25, 0.75, 0.0]);
        assert_eq!(AttentionRow::new([0, 0], &[1.0], &probe(5)).top, [(0, 1.0)]);
    }
}
