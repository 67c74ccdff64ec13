//! Positions that are added to embeddings.

use burn::tensor::{Device, Tensor, TensorData};

/// Sines and cosines of positions (Vaswani et al. 2017, section 3.5), in the forms that models were trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sinusoid {
    /// Pair `i` of `n` turns by `base^(-i / n)` from one position to the next.
    pub base: f64,
    /// Whether all sines stand before all cosines; as published they take turns.
    pub half_split: bool,
    /// The number of the first position.
    pub first: usize,
    /// Whether the slowest pair turns by `1 / base`, as tensor2tensor has it: `base^(-i / (n - 1))`.
    pub inclusive: bool,
}

impl Default for Sinusoid {
    fn default() -> Self {
        Self { base: 10_000.0, half_split: false, first: 0, inclusive: false }
    }
}

impl Sinusoid {
    /// Positions `start..start + length`, `[length, features]`.
    #[must_use]
    pub fn at(&self, start: usize, [length, features]: [usize; 2], device: &Device) -> Tensor<2> {
        let pairs = (features / 2).max(1);
        let last = if self.inclusive { pairs.saturating_sub(1).max(1) } else { pairs };
        let number = |at: usize| {
            let (position, i) = (self.first + start + at / features, at % features);
            let (pair, cosine) =
                if self.half_split { (i % pairs, i >= pairs) } else { (i / 2, i % 2 == 1) };
            let angle = position as f64 * self.base.powf(-(pair as f64) / last as f64);
            if cosine { angle.cos() } else { angle.sin() }
        };
        #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
        let numbers: Vec<f32> = (0..length * features).map(|at| number(at) as f32).collect();
        Tensor::from_data(TensorData::new(numbers, [length, features]), device)
    }
}
