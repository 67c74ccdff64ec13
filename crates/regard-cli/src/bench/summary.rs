//! The middle of some samples and how far they spread.

/// So many samples make a percentile.
pub(crate) const FEWEST_OF_A_PERCENTILE: usize = 9;

/// The median, and the 10th and 90th percentile or, of fewer than nine samples, the least and the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SampleSummary {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl SampleSummary {
    /// `None` without samples.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |p| percentile(&sorted, p);
        let edge = if sorted.len() < FEWEST_OF_A_PERCENTILE { 0.0 } else { 0.1 };
        Some(Self { median: at(0.5)?, low: at(edge)?, high: at(1.0 - edge)? })
    }
}

/// Between the two nearest samples, in proportion.
fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let at = p * sorted.len().checked_sub(1)? as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index below the length"
    )]
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    Some(sorted[low] + (sorted[high] - sorted[low]) * at.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_the_samples() {
        assert_eq!(SampleSummary::of(&[]), None);
        assert_eq!(
            SampleSummary::of(&[3.0]),
            Some(SampleSummary { median: 3.0, low: 3.0, high: 3.0 })
        );
        let ten: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        assert_eq!(
            SampleSummary::of(&ten),
            Some(SampleSummary { median: 5.0, low: 1.0, high: 9.0 })
        );
        let two = SampleSummary::of(&[1.0, 2.0]).unwrap();
        assert_eq!((two.median, two.low, two.high), (1.5, 1.0, 2.0));
    }
}
