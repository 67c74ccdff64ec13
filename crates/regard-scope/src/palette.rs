//! 256 colors in an order that eyes agree with, and which number gets which.
//!
//! A ramp is a path through OKLab along which lightness only rises or only falls, walked in equal steps: twice the
//! difference in number looks twice as different, in gray and to color-blind readers too. The tests hold it to that.

use crate::color::{Lab, Rgb, Theme, byte};
use crate::map::Map;
use std::sync::LazyLock;

/// What the colors stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum PaletteKind {
    /// Amounts from zero: from the page to the other end of lightness.
    #[default]
    Amount,
    /// Differences: zero is in the middle, close to the page; blue is below, orange above.
    Difference,
}

/// How a number becomes a place in the palette.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// From 0 to `most`, evenly.
    Linear {
        /// The number that gets the last color.
        most: f32,
    },
    /// By powers of ten, from `10^-decades` to 1: weights are spread over many of them.
    Log {
        /// How many powers of ten are told apart.
        decades: f32,
    },
}

/// Color 0 is the page: what is hidden. The others run from little to much.
#[derive(Clone, Debug, PartialEq)]
pub struct Palette {
    kind: PaletteKind,
    colors: [Rgb; 256],
    /// Before rounding to bytes, for the tests.
    #[cfg(test)]
    exact: Vec<Lab>,
}

/// Lightness, chroma, hue in degrees.
type Lch = (f64, f64, f64);

/// Indigo, blue, teal, green, warm yellow, nearly white.
const DARK: [Lch; 6] = [
    (0.225, 0.045, 285.0),
    (0.36, 0.115, 270.0),
    (0.52, 0.10, 238.0),
    (0.67, 0.105, 188.0),
    (0.84, 0.13, 125.0),
    (0.97, 0.075, 102.0),
];
/// Paper, mint, teal, blue, deep indigo.
const LIGHT: [Lch; 5] = [
    (0.955, 0.016, 165.0),
    (0.82, 0.08, 172.0),
    (0.64, 0.105, 205.0),
    (0.45, 0.125, 258.0),
    (0.24, 0.115, 283.0),
];
const DARK_BELOW: [Lch; 3] = [(0.24, 0.012, 260.0), (0.53, 0.12, 245.0), (0.90, 0.06, 215.0)];
const DARK_ABOVE: [Lch; 3] = [(0.24, 0.012, 60.0), (0.53, 0.12, 50.0), (0.90, 0.06, 80.0)];
const LIGHT_BELOW: [Lch; 3] = [(0.955, 0.006, 240.0), (0.66, 0.12, 240.0), (0.33, 0.11, 262.0)];
const LIGHT_ABOVE: [Lch; 3] = [(0.955, 0.006, 60.0), (0.66, 0.13, 55.0), (0.33, 0.10, 42.0)];

static PALETTES: LazyLock<[Palette; 4]> = LazyLock::new(|| {
    [
        Palette::amounts(Theme::Dark, &DARK),
        Palette::amounts(Theme::Light, &LIGHT),
        Palette::differences(Theme::Dark, &DARK_BELOW, &DARK_ABOVE),
        Palette::differences(Theme::Light, &LIGHT_BELOW, &LIGHT_ABOVE),
    ]
});

impl Palette {
    /// The palette for a theme.
    #[must_use]
    pub fn of(theme: Theme, kind: PaletteKind) -> &'static Self {
        let (dark, light) = match kind {
            PaletteKind::Amount => (0, 1),
            PaletteKind::Difference => (2, 3),
        };
        &PALETTES[if theme == Theme::Dark { dark } else { light }]
    }

    /// The color at a place.
    #[must_use]
    pub fn color(&self, index: u8) -> Rgb {
        self.colors[usize::from(index)]
    }

    /// The place of a number: 0 if it is NaN, which means hidden; otherwise 1 to 255, or for differences 1 to 255
    /// with zero at 128. What lies outside the scale gets the color of its end.
    #[must_use]
    pub fn index(&self, value: f32, scale: Scale) -> u8 {
        if value.is_nan() {
            return 0;
        }
        let part = scale.part(value.abs());
        let place = match self.kind {
            PaletteKind::Amount if value <= 0.0 => 0.0,
            PaletteKind::Amount => (254.0 * part).round(),
            PaletteKind::Difference => 127.0 + (127.0 * part).round().copysign(f64::from(value)),
        };
        1 + byte(place.min(254.0))
    }

    /// All colors as `rrggbb`, one after another: 1,536 hexadecimal digits, for a page that draws by itself.
    #[must_use]
    pub fn hex(&self) -> String {
        self.colors.iter().map(|c| c.css()[1..].to_string()).collect()
    }

    /// What the colors stand for.
    #[must_use]
    pub fn kind(&self) -> PaletteKind {
        self.kind
    }

    fn amounts(theme: Theme, path: &[Lch]) -> Self {
        Self::new(theme, PaletteKind::Amount, even(path, 255))
    }

    fn differences(theme: Theme, below: &[Lch], above: &[Lch]) -> Self {
        let mut exact = even(below, 128);
        exact.reverse();
        // Both sides end in the same zero, so that it belongs to neither.
        let zero = exact[127].towards(even(above, 128)[0], 0.5);
        exact[127] = zero;
        exact.extend(even(above, 128).into_iter().skip(1));
        Self::new(theme, PaletteKind::Difference, exact)
    }

    fn new(theme: Theme, kind: PaletteKind, exact: Vec<Lab>) -> Self {
        let mut colors = [theme.page(); 256];
        for (i, color) in exact.iter().enumerate().take(255) {
            colors[i + 1] = Rgb::from_linear(color.linear());
        }
        Self {
            kind,
            colors,
            #[cfg(test)]
            exact,
        }
    }
}

impl Scale {
    /// Evenly, up to the number of a map that is farthest from 0.
    #[must_use]
    pub fn up_to(map: &Map) -> Self {
        let finite = map.values.iter().map(|v| v.abs()).filter(|v| v.is_finite());
        Self::Linear { most: finite.fold(0.0, f32::max) }
    }

    /// Where an amount lies between the ends of the scale, 0 to 1.
    pub(crate) fn part(self, amount: f32) -> f64 {
        let amount = f64::from(amount);
        let part = match self {
            Self::Linear { most } => amount / f64::from(most),
            Self::Log { decades } => 1.0 + amount.log10() / f64::from(decades),
        };
        // 0/0: nothing on a scale without length.
        if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) }
    }
}

/// `count` colors along a path, equally far apart.
fn even(path: &[Lch], count: usize) -> Vec<Lab> {
    const FINE: u32 = 2048;
    let fine: Vec<Lab> = (0..=FINE).map(|i| along(path, f64::from(i) / f64::from(FINE))).collect();
    // Distances between neighbours are equal when each is the whole length / (count - 1): walk the fine path and
    // put a color down whenever so much has been walked.
    let steps: Vec<f64> = fine.windows(2).map(|w| w[0].distance(w[1])).collect();
    let stride = steps.iter().sum::<f64>() / (count - 1) as f64;
    let mut out = vec![fine[0]];
    let mut walked = 0.0;
    for (w, step) in fine.windows(2).zip(&steps) {
        while out.len() + 1 < count && walked + step >= stride * out.len() as f64 {
            out.push(w[0].towards(w[1], (stride * out.len() as f64 - walked) / step));
        }
        walked += step;
    }
    out.push(fine[FINE as usize]);
    out
}

/// A point of a path, without corners: chroma and hue follow a cubic through the points (Catmull-Rom), lightness goes
/// straight from the first to the last, so that it cannot turn back.
fn along(path: &[Lch], part: f64) -> Lab {
    let labs: Vec<Lab> = path.iter().map(|&(l, c, h)| Lab::from_lch(l, c, h)).collect();
    let (first, last) = (path[0].0, path[path.len() - 1].0);
    let l = first + (last - first) * part;
    // The stretch of the path in which this lightness lies.
    let after = |i: usize| (l - path[i].0) * (last - first).signum() >= 0.0;
    let i = (1..path.len() - 1).rev().find(|&i| after(i)).unwrap_or(0);
    let t = (l - path[i].0) / (path[i + 1].0 - path[i].0);
    let at = |k: usize| labs[k.min(labs.len() - 1)];
    let (p, q, r, s) = (at(i.saturating_sub(1)), at(i), at(i + 1), at(i + 2));
    let cubic = |p: f64, q: f64, r: f64, s: f64| {
        q + 0.5 * t * (r - p + t * (2.0 * p - 5.0 * q + 4.0 * r - s + t * (3.0 * (q - r) + s - p)))
    };
    Lab { l, a: cubic(p.a, q.a, r.a, s.a), b: cubic(p.b, q.b, r.b, s.b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Machado, Oliveira and Fernandes 2009, severity 1; on linear light.
    const BLIND: [(&str, [[f64; 3]; 3]); 3] = [
        (
            "protanopia",
            [
                [0.152286, 1.052583, -0.204868],
                [0.114503, 0.786281, 0.099216],
                [-0.003882, -0.048116, 1.051998],
            ],
        ),
        (
            "deuteranopia",
            [
                [0.367322, 0.860646, -0.227968],
                [0.280085, 0.672501, 0.047413],
                [-0.011820, 0.042940, 0.968881],
            ],
        ),
        (
            "tritanopia",
            [
                [1.255528, -0.076749, -0.178779],
                [-0.078411, 0.930809, 0.147602],
                [0.004733, 0.691367, 0.303900],
            ],
        ),
    ];

    fn seen(m: &[[f64; 3]; 3], light: [f64; 3]) -> Lab {
        let light = [0, 1, 2].map(|i| (0..3).map(|j| m[i][j] * light[j]).sum::<f64>());
        Lab::from_linear(light.map(|x| x.clamp(0.0, 1.0)))
    }

    fn themes() -> [(Theme, f64); 2] {
        [(Theme::Dark, 1.0), (Theme::Light, -1.0)]
    }

    #[test]
    fn steps_look_equal() {
        for (theme, _) in themes() {
            for kind in [PaletteKind::Amount, PaletteKind::Difference] {
                let p = Palette::of(theme, kind);
                let steps: Vec<f64> = p.exact.windows(2).map(|w| w[0].distance(w[1])).collect();
                let half = if kind == PaletteKind::Amount { steps.len() } else { 126 };
                for side in [&steps[..half], &steps[steps.len() - half..]] {
                    let mean = side.iter().sum::<f64>() / side.len() as f64;
                    let worst = side.iter().map(|d| (d / mean - 1.0).abs()).fold(0.0, f64::max);
                    assert!(worst < 0.02, "{theme:?} {kind:?}: {worst:.4}");
                }
            }
        }
    }

    #[test]
    fn every_color_is_one_that_a_screen_has() {
        for (theme, _) in themes() {
            for kind in [PaletteKind::Amount, PaletteKind::Difference] {
                for (i, c) in Palette::of(theme, kind).exact.iter().enumerate() {
                    let light = c.linear();
                    let inside = light.iter().all(|x| (-0.002..=1.002).contains(x));
                    assert!(inside, "{theme:?} {kind:?} {i}: {light:.3?}");
                }
            }
        }
    }

    #[test]
    fn lightness_never_turns_back_even_in_bytes() {
        for (theme, sign) in themes() {
            let p = Palette::of(theme, PaletteKind::Amount);
            assert!(p.exact.windows(2).all(|w| (w[1].l - w[0].l) * sign > 0.0));
            let l = |i: u8| Lab::from_linear(p.color(i).linear()).l;
            for i in 1..255 {
                assert!((l(i + 1) - l(i)) * sign > 0.0, "{theme:?} {i}");
            }
        }
    }

    #[test]
    fn lightness_never_turns_back_for_color_blind_readers() {
        for (theme, sign) in themes() {
            let p = Palette::of(theme, PaletteKind::Amount);
            for (name, m) in &BLIND {
                let l: Vec<f64> = p.exact.iter().map(|c| seen(m, c.linear()).l).collect();
                let least = l.windows(2).map(|w| (w[1] - w[0]) * sign).fold(1.0, f64::min);
                assert!(least > 0.0, "{theme:?} {name}: {least:.6}");
            }
        }
    }

    #[test]
    fn differences_keep_their_sign_for_color_blind_readers() {
        for (theme, _) in themes() {
            let p = Palette::of(theme, PaletteKind::Difference);
            for (name, m) in &BLIND {
                for far in [40, 80, 120] {
                    let below = seen(m, p.color(128 - far).linear());
                    let above = seen(m, p.color(128 + far).linear());
                    let apart = below.distance(above);
                    assert!(apart > 0.06, "{theme:?} {name} {far}: {apart:.3}");
                }
            }
        }
    }

    #[test]
    fn numbers_get_their_places() {
        let p = Palette::of(Theme::Dark, PaletteKind::Amount);
        let log = Scale::Log { decades: 4.0 };
        assert_eq!(p.index(f32::NAN, log), 0);
        assert_eq!([1.0, 1e-2, 1e-4, 0.0, 7.0].map(|w| p.index(w, log)), [255, 128, 1, 1, 255]);
        let linear = Scale::Linear { most: 2.0 };
        assert_eq!([0.0, 1.0, 2.0, 9.0, -1.0].map(|w| p.index(w, linear)), [1, 128, 255, 255, 1]);
        let d = Palette::of(Theme::Dark, PaletteKind::Difference);
        assert_eq!([-9.0, -2.0, 0.0, 2.0].map(|w| d.index(w, linear)), [1, 1, 128, 255]);
        for odd in [f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MIN_POSITIVE, f32::NAN] {
            for scale in [Scale::Linear { most: odd }, Scale::Log { decades: odd }] {
                let _ = (p.index(odd, scale), p.index(0.5, scale), d.index(odd, scale));
            }
        }
    }

    #[test]
    fn all_colors_are_written_in_hexadecimal() {
        let hex = Palette::of(Theme::Light, PaletteKind::Amount).hex();
        assert_eq!(hex.len(), 1536);
        assert!(hex.starts_with("fdfcf9") && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    }
}
