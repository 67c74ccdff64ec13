//! Pillow's `Image.resize`: along rows and along columns, each rounded to 8 bits.
//!
//! The same integers as in `Resample.c` of Pillow 13, so that pixels are the same and not merely alike. Before 13 rows were always first:
//! up to a level apart by the bilinear filter.

use super::{CHANNELS, Image};
use crate::files::Resample;

/// Bits of a weight behind the point: 8 are of the pixel, 2 for sums beyond it.
const BITS: u32 = 32 - 8 - 2;
/// A half, with which a sum begins that is cut off after the point.
const HALF: i32 = 1 << (BITS - 1);

/// Pixels that an output is a sum of: the first, and the weights of it and those that follow.
struct Window {
    first: usize,
    weights: Vec<i32>,
}

impl Resample {
    /// Pixels on each side of the center, without reduction.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let x = x.abs();
        match self {
            Self::Bilinear if x < 1.0 => 1.0 - x,
            Self::Bicubic if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        }
    }

    /// The windows of `outputs` pixels over `inputs`.
    #[expect(clippy::cast_possible_truncation, reason = "whole parts of numbers within the image")]
    #[expect(clippy::cast_sign_loss, reason = "what is below 0 becomes 0")]
    fn windows(self, inputs: usize, outputs: usize) -> Vec<Window> {
        let step = inputs as f64 / outputs as f64;
        let reduction = step.max(1.0);
        let reach = self.support() * reduction;
        let window = |output: usize| {
            let center = (output as f64 + 0.5) * step;
            let first = (center - reach + 0.5) as usize;
            let end = ((center + reach + 0.5) as usize).min(inputs);
            let weight = |x: usize| self.weight((x as f64 - center + 0.5) * (1.0 / reduction));
            let weights: Vec<f64> = (first..end).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            let fixed = |weight: f64| {
                let weight = if sum == 0.0 { weight } else { weight / sum };
                (weight * f64::from(1 << BITS) + 0.5f64.copysign(weight)) as i32
            };
            Window { first, weights: weights.into_iter().map(fixed).collect() }
        };
        (0..outputs).map(window).collect()
    }
}

/// The whole part of a sum, within 8 bits.
#[expect(clippy::cast_sign_loss, reason = "it is clamped before")]
fn level(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

impl Image {
    pub(super) fn resized(&self, [height, width]: [usize; 2], filter: Resample) -> Self {
        // Columns are first where they are reduced by more than twice as many pixels as rows.
        let reduced = self.height.saturating_sub(height);
        match reduced > 2 * self.width.saturating_sub(width) {
            true => self.of_height(height, filter).of_width(width, filter),
            false => self.of_width(width, filter).of_height(height, filter),
        }
    }

    fn of_width(&self, width: usize, filter: Resample) -> Self {
        if width == self.width {
            return self.clone();
        }
        let windows = filter.windows(self.width, width);
        let mut rgb = Vec::with_capacity(self.height * width * CHANNELS);
        for row in self.rgb.chunks_exact(self.width * CHANNELS) {
            for Window { first, weights } in &windows {
                let mut sums = [HALF; CHANNELS];
                let pixels = row[first * CHANNELS..].chunks_exact(CHANNELS);
                for (pixel, weight) in pixels.zip(weights) {
                    for (sum, x) in sums.iter_mut().zip(pixel) {
                        *sum += weight * i32::from(*x);
                    }
                }
                rgb.extend(sums.map(level));
            }
        }
        Self { height: self.height, width, rgb }
    }

    fn of_height(&self, height: usize, filter: Resample) -> Self {
        if height == self.height {
            return self.clone();
        }
        let row = self.width * CHANNELS;
        let mut rgb = Vec::with_capacity(height * row);
        let mut sums = vec![HALF; row];
        for Window { first, weights } in filter.windows(self.height, height) {
            sums.fill(HALF);
            for (pixels, weight) in self.rgb[first * row..].chunks_exact(row).zip(weights) {
                for (sum, x) in sums.iter_mut().zip(pixels) {
                    *sum += weight * i32::from(*x);
                }
            }
            rgb.extend(sums.iter().map(|sum| level(*sum)));
        }
        Self { height, width: self.width, rgb }
    }
}
