//! How fast to learn, and at which temperature to attend, as functions of the step.

use serde::{Deserialize, Serialize};

/// How the rate goes down after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Not at all.
    Constant,
    /// By `sqrt(warm-up / step)` (Vaswani et al. 2017).
    InverseSqrt,
    /// By half a cosine, to `min_lr` at the last step (Loshchilov and Hutter 2017).
    Cosine,
    /// By a straight line, to `min_lr` at the last step.
    Linear,
}

/// The learning rate over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The highest rate, which the warm-up ends with.
    pub lr: f64,
    /// The rate that a cosine or a line ends with.
    pub min_lr: f64,
    /// Steps until the highest rate.
    pub warmup: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// What comes after the warm-up.
    pub decay: Decay,
}

impl Schedule {
    // ANCHOR: rate
    /// The rate of a step, counted from 1.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        let (step, warmup) = (step.max(1) as f64, self.warmup as f64);
        if step < warmup {
            return self.lr * step / warmup;
        }
        let left = (self.steps as f64 - warmup).max(1.0);
        let gone = ((step - warmup) / left).clamp(0.0, 1.0);
        match self.decay {
            Decay::Constant => self.lr,
            Decay::InverseSqrt => self.lr * (warmup.max(1.0) / step).sqrt(),
            Decay::Cosine => {
                let height = 0.5 * (1.0 + (std::f64::consts::PI * gone).cos());
                self.min_lr + (self.lr - self.min_lr) * height
            }
            Decay::Linear => self.min_lr + (self.lr - self.min_lr) * (1.0 - gone),
        }
    }
    // ANCHOR_END: rate
}

/// A number that goes from one value to another in so many steps, and stays there; in 0 steps it goes nowhere.
#[must_use]
pub fn ramp(from: f64, to: f64, steps: u64, step: u64) -> f64 {
    let gone = if steps == 0 { 0.0 } else { (step as f64 / steps as f64).min(1.0) };
    from + (to - from) * gone
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(decay: Decay, step: u64) -> f64 {
        Schedule { lr: 2.0, min_lr: 0.5, warmup: 10, steps: 110, decay }.lr(step)
    }

    #[test]
    fn the_rate_rises_in_a_line_and_falls_as_it_is_told() {
        for decay in [Decay::Constant, Decay::InverseSqrt, Decay::Cosine, Decay::Linear] {
            assert_eq!(at(decay, 5), 1.0);
            assert_eq!(at(decay, 10), 2.0);
        }
        assert_eq!(at(Decay::Constant, 1000), 2.0);
        assert_eq!(at(Decay::InverseSqrt, 40), 1.0);
        assert!((at(Decay::Cosine, 60) - 1.25).abs() < 1e-12);
        assert_eq!(at(Decay::Cosine, 110), 0.5);
        assert_eq!(at(Decay::Linear, 60), 1.25);
        assert_eq!(at(Decay::Linear, 500), 0.5);
    }

    #[test]
    fn a_ramp_ends_where_it_should() {
        assert_eq!([0, 5, 10, 99].map(|step| ramp(2.0, 1.0, 10, step)), [2.0, 1.5, 1.0, 1.0]);
        assert_eq!(ramp(2.0, 1.0, 0, 7), 2.0);
    }
}
