//! Attention dropout with a counter-based random generator.
//!
//! Whether a weight is kept is a function of (seed, offset, batch, head, row, key) only. The forward and the backward pass
//! therefore agree for any tiling and any number of threads, and no dropout mask is stored. The generator is Philox-4x32-10
//! (Salmon et al. 2011), applied twice: with the seed as key and (offset, batch, head) as counter it yields the key of a
//! head; with that key and (row, key / 4) as counter it yields four 32-bit words, one for each of four consecutive keys.

use crate::error::Error;
use crate::machine::simd::{Isa, Lanes, MAX_LANES, Number, leaf};
use crate::tensor::index::{At, Pair};

/// Dropout of attention weights. A dropped weight becomes 0; kept weights are multiplied by `1 / (1 - rate)`, so that the
/// expected output is unchanged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    rate: f64,
    seed: u64,
    offset: u64,
}

impl Dropout {
    /// Drops weights with probability `rate`, in `[0, 1)`. Each `offset` under the same `seed` gives an independent draw:
    /// increment it from one training step to the next.
    #[must_use]
    pub fn new(rate: f64, seed: u64, offset: u64) -> Self {
        Self { rate, seed, offset }
    }

    /// The probability of dropping a weight.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Whether the weight of a pair is kept.
    #[must_use]
    pub fn keeps(&self, at: Pair) -> bool {
        let (key, block) = (self.head_key(at.batch, at.head), halves(at.key as u64 / 4));
        let row = halves(at.row as u64);
        let words = philox([row[0], row[1], block[0], block[1]].map(|x| [x]), key);
        words[at.key % 4][0] >= self.threshold()
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let (found, accepted) = (self.rate, "a number from 0 to below 1");
        if (0.0..1.0).contains(&found) {
            return Ok(());
        }
        Err(Error::Value { option: "dropout", found, accepted })
    }

    /// The factor of a kept weight: `1 / (1 - rate)`.
    #[must_use]
    pub fn growth(&self) -> f64 {
        1.0 / (1.0 - self.rate)
    }

    /// A weight is dropped if its random word is below this.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of 2^32")]
    fn threshold(&self) -> u32 {
        (self.rate * 2f64.powi(32)) as u32
    }

    #[expect(clippy::cast_possible_truncation, reason = "a head's number fits in 32 bits")]
    fn head_key(&self, batch: usize, head: usize) -> [u32; 2] {
        let offset = halves(self.offset);
        let words =
            philox([[offset[0]], [offset[1]], [batch as u32], [head as u32]], halves(self.seed));
        [words[0][0], words[1][0]]
    }

    /// Writes the factors of the weights of a tile, `[keys][rows]`: 0 or `growth()`.
    pub(crate) fn factors<N: Number>(&self, isa: Isa, at: At<'_>, to: &mut [Lanes<N>]) {
        dropout_factors(isa, self, at, to);
    }
}

leaf! {
    fn dropout_factors<'t, N>(_s: S, dropout: &'t Dropout, at: At<'t>, to: &'t mut [Lanes<N>]) {
        let (growth, threshold) = (N::from_f64(dropout.growth()), dropout.threshold());
        let head = dropout.head_key(at.scope.batch, at.scope.head);
        for lane in (at.span.start..at.span.end).step_by(MAX_LANES) {
            let rows: [[u32; 2]; MAX_LANES] =
                std::array::from_fn(|i| halves(at.rows.row(lane + i) as u64));
            let rows = [0, 1].map(|half| rows.map(|row| row[half]));
            let (mut block, mut words) = (u64::MAX, [[0; MAX_LANES]; 4]);
            for (i, to) in to.iter_mut().enumerate() {
                let key = at.keys.get(i);
                if block != key as u64 / 4 {
                    block = key as u64 / 4;
                    let [low, high] = halves(block).map(|x| [x; MAX_LANES]);
                    words = philox([rows[0], rows[1], low, high], head);
                }
                let to = &mut to.0[lane..lane + MAX_LANES];
                for (to, word) in to.iter_mut().zip(words[key % 4]) {
                    *to = if word >= threshold { growth } else { N::zero() };
                }
            }
        }
    }
}

/// A uniform random number in `[0, 1)` for a pair. Uses the offset `u64::MAX`, so that the seed may equal that of dropout.
pub(crate) fn uniform(seed: u64, at: Pair) -> f64 {
    let key = Dropout { rate: 0.0, seed, offset: u64::MAX }.head_key(at.batch, at.head);
    let (row, at) = (halves(at.row as u64), halves(at.key as u64));
    let words = philox([row[0], row[1], at[0], at[1]].map(|x| [x]), key);
    let wide = u64::from(words[0][0]) << 32 | u64::from(words[1][0]);
    (wide >> 11) as f64 * 0.5f64.powi(53)
}

#[expect(clippy::cast_possible_truncation, reason = "both halves are kept")]
#[inline(always)]
pub(crate) fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Philox-4x32-10 of `N` counters at once; plain loops that the compiler vectorizes.
#[inline(always)]
pub(crate) fn philox<const N: usize>(
    mut counter: [[u32; N]; 4],
    mut key: [u32; 2],
) -> [[u32; N]; 4] {
    for _ in 0..10 {
        let [c0, c1, c2, c3] = counter;
        for i in 0..N {
            let [low0, high0] = halves(u64::from(c0[i]) * 0xD251_1F53);
            let [low1, high1] = halves(u64::from(c2[i]) * 0xCD9E_8D57);
            counter[0][i] = high1 ^ c1[i] ^ key[0];
            counter[1][i] = low1;
            counter[2][i] = high0 ^ c3[i] ^ key[1];
            counter[3][i] = low0;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        let one = |counter: [u32; 4], key| philox(counter.map(|x| [x]), key).map(|x| x[0]);
        let zeros = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(one([0; 4], [0; 2]), zeros);
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(one([u32::MAX; 4], [u32::MAX; 2]), ones);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let pi = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(one(counter, [0xa409_3822, 0x299f_31d0]), pi);
    }

    #[test]
    fn as_many_are_kept_as_asked_for() {
        for rate in [0.0, 0.1, 0.5, 0.9] {
            let dropout = Dropout::new(rate, 7, 3);
            let pairs = (0..200).flat_map(|row| (0..500).map(move |key| (row, key)));
            let kept = pairs
                .filter(|(row, key)| {
                    dropout.keeps(Pair { batch: 1, head: 2, row: *row, key: *key })
                })
                .count();
            let share = kept as f64 / 1e5;
            assert!(
                (share - (1.0 - rate)).abs() < 5.0 * (rate * (1.0 - rate) / 1e5).sqrt() + 1e-12,
                "{rate}: {share}"
            );
        }
    }

    #[test]
    fn every_part_of_the_place_matters() {
        let at = Pair { batch: 0, head: 0, row: 0, key: 0 };
        let draw = |dropout: Dropout, at: Pair| -> Vec<bool> {
            (0..64).map(|key| dropout.keeps(Pair { key: at.key + key, ..at })).collect()
        };
        let dropout = Dropout::new(0.5, 1, 0);
        let draws = [
            draw(dropout, at),
            draw(Dropout::new(0.5, 2, 0), at),
            draw(Dropout::new(0.5, 1, 1), at),
            draw(Dropout::new(0.5, 1, 1 << 32), at),
            draw(dropout, Pair { batch: 1, ..at }),
            draw(dropout, Pair { head: 1, ..at }),
            draw(dropout, Pair { row: 1, ..at }),
            draw(dropout, Pair { key: 64, ..at }),
        ];
        for (i, a) in draws.iter().enumerate() {
            assert!(draws[..i].iter().all(|b| a != b), "{i}");
        }
    }
}
