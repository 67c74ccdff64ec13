//! Colors as numbers that agree with eyes: OKLab, contrast, and the two themes.

/// A color as a screen takes it: red, green, blue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rgb(pub u8, pub u8, pub u8);

/// A color as an eye compares it (Ottosson 2020): `l` is lightness, and equal distances look equally different.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Lab {
    pub(crate) l: f64,
    pub(crate) a: f64,
    pub(crate) b: f64,
}

/// What the picture stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Theme {
    /// Near black; what is large is bright.
    Dark,
    /// Near white, as paper is; what is large is deep. It prints well.
    #[default]
    Light,
}

/// How loud a text speaks. Labels are many, so they are not the loudest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Emphasis {
    /// What is read once: captions, names of axes.
    Quiet,
    /// Labels and numbers.
    #[default]
    Plain,
    /// Headings.
    Strong,
}

impl Theme {
    /// The color of the page, and of what is hidden.
    #[must_use]
    pub fn page(self) -> Rgb {
        match self {
            Self::Dark => Rgb(0x0b, 0x0d, 0x12),
            Self::Light => Rgb(0xfd, 0xfc, 0xf9),
        }
    }

    /// The color of text on the page. Each reaches a contrast of 4.5 (WCAG 2.2, 1.4.3).
    #[must_use]
    pub fn text(self, emphasis: Emphasis) -> Rgb {
        match (self, emphasis) {
            (Self::Dark, Emphasis::Quiet) => Rgb(0x9a, 0xa1, 0xae),
            (Self::Dark, Emphasis::Plain) => Rgb(0xd5, 0xd9, 0xe0),
            (Self::Dark, Emphasis::Strong) => Rgb(0xff, 0xff, 0xff),
            (Self::Light, Emphasis::Quiet) => Rgb(0x5f, 0x64, 0x6d),
            (Self::Light, Emphasis::Plain) => Rgb(0x2a, 0x2d, 0x34),
            (Self::Light, Emphasis::Strong) => Rgb(0x00, 0x00, 0x00),
        }
    }

    /// The color of outlines: orange, which neither palette of amounts contains.
    #[must_use]
    pub fn accent(self) -> Rgb {
        match self {
            Self::Dark => Rgb(0xff, 0x8a, 0x3d),
            Self::Light => Rgb(0xd9, 0x5f, 0x02),
        }
    }
}

impl Rgb {
    /// As `#rrggbb`.
    #[must_use]
    pub fn css(self) -> String {
        format!("#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }

    /// Light in linear units, 0 to 1.
    pub(crate) fn linear(self) -> [f64; 3] {
        [self.0, self.1, self.2].map(|c| {
            let c = f64::from(c) / 255.0;
            if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
        })
    }

    /// The nearest color of a screen; light outside its range is cut off.
    pub(crate) fn from_linear(light: [f64; 3]) -> Self {
        let [r, g, b] = light.map(|c| {
            let c = c.clamp(0.0, 1.0);
            let c = if c <= 0.003_130_8 { c * 12.92 } else { 1.055 * c.powf(1.0 / 2.4) - 0.055 };
            byte(c * 255.0)
        });
        Self(r, g, b)
    }

    /// How far two colors stand apart for a reader: 1 to 21 (WCAG 2.2).
    #[must_use]
    pub fn contrast(self, other: Self) -> f64 {
        let luminance = |c: Self| {
            let [r, g, b] = c.linear();
            0.2126 * r + 0.7152 * g + 0.0722 * b
        };
        let (x, y) = (luminance(self), luminance(other));
        (x.max(y) + 0.05) / (x.min(y) + 0.05)
    }

    /// Black or white, whichever is easier to read on this color: at least 4.5 on any.
    #[must_use]
    pub fn ink(self) -> Self {
        let (black, white) = (Self(0, 0, 0), Self(255, 255, 255));
        if self.contrast(black) >= self.contrast(white) { black } else { white }
    }
}

/// The nearest byte; NaN is 0.
#[expect(clippy::cast_possible_truncation, reason = "clamped to what a byte holds")]
pub(crate) fn byte(x: f64) -> u8 {
    x.round().clamp(0.0, 255.0) as u8
}

impl Lab {
    /// From lightness, chroma, and hue in degrees.
    pub(crate) fn from_lch(l: f64, c: f64, h: f64) -> Self {
        let h = h.to_radians();
        Self { l, a: c * h.cos(), b: c * h.sin() }
    }

    pub(crate) fn from_linear([r, g, b]: [f64; 3]) -> Self {
        let l = (0.412_221_470_8 * r + 0.536_332_536_3 * g + 0.051_445_992_9 * b).cbrt();
        let m = (0.211_903_498_2 * r + 0.680_699_545_1 * g + 0.107_396_956_6 * b).cbrt();
        let s = (0.088_302_461_9 * r + 0.281_718_837_6 * g + 0.629_978_700_5 * b).cbrt();
        Self {
            l: 0.210_454_255_3 * l + 0.793_617_785_0 * m - 0.004_072_046_8 * s,
            a: 1.977_998_495_1 * l - 2.428_592_205_0 * m + 0.450_593_709_9 * s,
            b: 0.025_904_037_1 * l + 0.782_771_766_2 * m - 0.808_675_766_0 * s,
        }
    }

    pub(crate) fn linear(self) -> [f64; 3] {
        let Self { l, a, b } = self;
        let x = (l + 0.396_337_777_4 * a + 0.215_803_757_3 * b).powi(3);
        let y = (l - 0.105_561_345_8 * a - 0.063_854_172_8 * b).powi(3);
        let z = (l - 0.089_484_177_5 * a - 1.291_485_548_0 * b).powi(3);
        [
            4.076_741_662_1 * x - 3.307_711_591_3 * y + 0.230_969_929_2 * z,
            -1.268_438_004_6 * x + 2.609_757_401_1 * y - 0.341_319_396_5 * z,
            -0.004_196_086_3 * x - 0.703_418_614_7 * y + 1.707_614_701_0 * z,
        ]
    }

    pub(crate) fn distance(self, other: Self) -> f64 {
        let (l, a, b) = (self.l - other.l, self.a - other.a, self.b - other.b);
        (l * l + a * a + b * b).sqrt()
    }

    /// The color a part of the way to another.
    pub(crate) fn towards(self, other: Self, part: f64) -> Self {
        let mix = |x: f64, y: f64| x + (y - x) * part;
        Self { l: mix(self.l, other.l), a: mix(self.a, other.a), b: mix(self.b, other.b) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_well_on_the_page() {
        for theme in [Theme::Dark, Theme::Light] {
            for emphasis in [Emphasis::Quiet, Emphasis::Plain, Emphasis::Strong] {
                let contrast = theme.text(emphasis).contrast(theme.page());
                assert!(contrast >= 4.5, "{theme:?} {emphasis:?}: {contrast:.2}");
            }
            // WCAG 2.2, 1.4.11: lines need 3.
            assert!(theme.accent().contrast(theme.page()) >= 3.0);
        }
    }

    #[test]
    fn ink_reads_well_on_any_grey_and_any_pure_color() {
        for x in 0..=255 {
            for c in [Rgb(x, x, x), Rgb(x, 0, 0), Rgb(0, x, 0), Rgb(0, 0, x), Rgb(x, 255, 0)] {
                assert!(c.contrast(c.ink()) >= 4.5, "{c:?}");
            }
        }
    }

    #[test]
    fn oklab_and_back_is_the_same_color() {
        for c in [Rgb(0, 0, 0), Rgb(255, 255, 255), Rgb(12, 200, 90), Rgb(255, 0, 128)] {
            assert_eq!(Rgb::from_linear(Lab::from_linear(c.linear()).linear()), c);
        }
        let white = Lab::from_linear([1.0; 3]);
        assert!((white.l - 1.0).abs() < 1e-6 && white.a.abs() < 1e-6 && white.b.abs() < 1e-6);
    }
}
