//! The middle of some samples and how far they spread.

/// The median and the 10th and 90th percentile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) p10: f64,
    pub(crate) p90: f64,
}

impl Spread {
    /// `None` without samples.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |p| percentile(&sorted, p);
        Some(Self { median: at(0.5)?, p10: at(0.1)?, p90: at(0.9)? })
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
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[3.0]), Some(Spread { median: 3.0, p10: 3.0, p90: 3.0 }));
        let ten: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        assert_eq!(Spread::of(&ten), Some(Spread { median: 5.0, p10: 1.0, p90: 9.0 }));
        let two = Spread::of(&[1.0, 2.0]).unwrap();
        assert_eq!(two.median, 1.5);
        assert!((two.p10 - 1.1).abs() < 1e-12 && (two.p90 - 1.9).abs() < 1e-12);
    }
}
