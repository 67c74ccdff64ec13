//! Seeded random inputs, reproducible on every machine.

use regard::{Element, Number};

/// SplitMix64 (Steele, Lea and Flood 2014): one addition and three mixing steps per number.
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The sequence seeded by a hash (FNV-1a) of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Self {
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, mix))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// An integer below `n`; 0 for `n = 0`.
    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.bits() >> 1).unwrap_or(0) % n.max(1)
    }

    /// A random element of a slice.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    /// A standard normal number (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * (1.0 - self.unit()).ln()).sqrt(), self.unit());
        radius * (std::f64::consts::TAU * angle).cos()
    }

    /// `n` standard normal numbers.
    pub fn normals<E: Element>(&mut self, n: usize) -> Vec<E> {
        (0..n).map(|_| E::narrow(E::Num::from_f64(self.normal()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_of_a_seed_never_change() {
        let mut noise = Noise::new(1_234_567);
        let first: [u64; 3] = std::array::from_fn(|_| noise.bits());
        // The published sequence of SplitMix64 for this seed.
        let published =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(first, published);
    }

    #[test]
    fn normal_numbers_have_mean_0_and_variance_1() {
        let xs: Vec<f64> = Noise::new(1).normals(100_000);
        let mean = xs.iter().sum::<f64>() / 1e5;
        let variance = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
