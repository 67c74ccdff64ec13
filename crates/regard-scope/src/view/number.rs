//! Numbers as people read them.

use crate::palette::{PaletteKind, Scale};

/// A number with as many digits as a tooltip or a caption needs: three that count.
pub(crate) fn short(x: f32) -> String {
    let size = x.abs();
    if x.is_nan() {
        "hidden".into()
    } else if size != 0.0 && !(1e-3..1e5).contains(&size) {
        format!("{x:.2e}")
    } else {
        let digits = if size >= 100.0 {
            0
        } else if size >= 10.0 {
            1
        } else if size >= 1.0 {
            2
        } else {
            3
        };
        trim(format!("{x:.digits$}"))
    }
}

/// How many digits after the point the numbers of a table share, so that their points stand below each other.
pub(crate) fn digits(most: f32) -> usize {
    if most >= 100.0 {
        0
    } else if most >= 10.0 {
        1
    } else {
        2
    }
}

/// A count with its thousands apart: `1,048,576`.
pub(crate) fn count(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

fn trim(s: String) -> String {
    let s = if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').into() } else { s };
    if s == "-0" { "0".into() } else { s }
}

/// Round steps: the least of 1, 2, 5, 10, 20, .. that is at least `least`.
pub(crate) fn round_step(least: f64) -> f64 {
    if !(least.is_finite() && least > 0.0) {
        return 1.0;
    }
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .map(|x| x * power)
        .into_iter()
        .find(|&x| x >= least * 0.999)
        .unwrap_or(10.0 * power)
}

/// The numbers beside a legend, and where each stands on it, 0 to 1.
pub(crate) fn legend(scale: Scale, kind: PaletteKind) -> Vec<(f32, String)> {
    let side: Vec<(f32, f32)> = match scale {
        Scale::Log { decades } => {
            let n = if decades.is_finite() { decades.clamp(0.1, 12.0) } else { 1.0 };
            let each = (n / 4.0).ceil().max(1.0);
            let marks = (0..5u8).map(|i| f32::from(i) * each).filter(|&d| d <= n);
            marks.map(|d| (1.0 - d / n, 10f32.powf(-d))).collect()
        }
        Scale::Linear { most } if most.is_finite() && most > 0.0 => {
            [0.0, 0.5, 1.0].map(|part| (part, part * most)).to_vec()
        }
        Scale::Linear { .. } => vec![(0.0, 0.0)],
    };
    let mut out: Vec<(f32, f32)> = match kind {
        PaletteKind::Amount => side,
        PaletteKind::Difference => {
            let below = side.iter().map(|&(at, x)| (0.5 - at / 2.0, -x));
            let above = side.iter().filter(|s| s.0 > 0.0).map(|&(at, x)| (0.5 + at / 2.0, x));
            // On a logarithmic scale the two sides start at different numbers, and what lies between is 0.
            below.map(|(at, x)| if at == 0.5 { (at, 0.0) } else { (at, x) }).chain(above).collect()
        }
    };
    out.sort_by(|a, b| a.0.total_cmp(&b.0));
    out.into_iter().map(|(at, x)| (at, tick(x))).collect()
}

/// A number of a legend: powers of ten below a thousandth get short.
fn tick(x: f32) -> String {
    if x != 0.0 && x.abs() < 0.9e-4 { format!("{x:.0e}") } else { trim(format!("{x:.4}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let got = [0.0, 1.0, 0.1234, 12.34, 1234.5, 1e-5, f32::NAN, -0.0001].map(short);
        assert_eq!(got, ["0", "1", "0.123", "12.3", "1234", "1.00e-5", "hidden", "-1.00e-4"]);
        assert_eq!([1, 999, 1000, 1_048_576].map(count), ["1", "999", "1,000", "1,048,576"]);
        assert_eq!([0.3, 1.0, 3.0, 11.0, 70.0].map(round_step), [0.5, 1.0, 5.0, 20.0, 100.0]);
    }

    #[test]
    fn legends_name_round_numbers() {
        let words = |s, k| legend(s, k).into_iter().map(|x| x.1).collect::<Vec<_>>().join(" ");
        assert_eq!(words(Scale::Log { decades: 3.0 }, PaletteKind::Amount), "0.001 0.01 0.1 1");
        assert_eq!(words(Scale::Log { decades: 6.0 }, PaletteKind::Amount), "1e-6 0.0001 0.01 1");
        assert_eq!(words(Scale::Linear { most: 0.5 }, PaletteKind::Amount), "0 0.25 0.5");
        assert_eq!(words(Scale::Linear { most: 1.0 }, PaletteKind::Difference), "-1 -0.5 0 0.5 1");
        for odd in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let _ = legend(Scale::Log { decades: odd }, PaletteKind::Difference);
            let _ = legend(Scale::Linear { most: odd }, PaletteKind::Amount);
        }
    }
}
