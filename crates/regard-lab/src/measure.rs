//! How long calls take, how much memory, and how far numbers are from each other.

use std::fs;
use std::time::Instant;

/// What a call gives, and the seconds it took.
pub(crate) fn timed<T>(call: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    (call(), start.elapsed().as_secs_f64())
}

/// What a call gives, and by how many bytes the memory of this process grew until its worst moment: NaN where nobody tells.
///
/// What other threads take meanwhile is counted too; what is worth measuring is larger than that.
pub(crate) fn peak<T>(call: impl FnOnce() -> T) -> (T, f64) {
    // An allocator keeps some of what was given back, and whoever gets that does not make the process grow. So it is taken before: pieces
    // until some MiB of them were new.
    let (mut holes, grown) = (Vec::new(), status("VmRSS:").map(|now| now + f64::from(16 << 20)));
    while holes.len() < 16384 && status("VmRSS:") < grown {
        holes.extend((0..64).map(|_| vec![1u8; 32 << 10]));
    }
    // 5 sets the peak to what is held now: see proc_pid_clear_refs(5).
    let before = fs::write("/proc/self/clear_refs", "5").ok().and_then(|()| status("VmRSS:"));
    let made = call();
    let most = status("VmHWM:");
    drop(holes);
    (made, before.zip(most).map_or(f64::NAN, |(before, most)| (most - before).max(0.0)))
}

/// A line of what Linux tells about this process, in bytes.
fn status(name: &str) -> Option<f64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<f64>().ok()? * 1024.0)
}

/// The slope of ln y over ln x: 2 where y grows as the square of x.
pub(crate) fn exponent(x: &[f64], y: &[f64]) -> f64 {
    let mean = |x: &[f64]| x.iter().map(|x| x.ln()).sum::<f64>() / x.len() as f64;
    let (x_mean, y_mean) = (mean(x), mean(y));
    let along_x = |y: &[f64], y_mean: f64| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x.ln() - x_mean) * (y.ln() - y_mean)).sum()
    };
    along_x(y, y_mean) / along_x(x, x_mean)
}

/// How far numbers are from the truth, relative to it: roots of sums of squares.
pub(crate) fn distance(found: &[f32], truth: &[f64]) -> f64 {
    let off = found.iter().zip(truth).map(|(x, truth)| f64::from(*x) - truth);
    (off.map(|x| x * x).sum::<f64>() / truth.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

/// Steps from one number of f32 to the next between two of them.
pub(crate) fn ulps(a: f32, b: f32) -> f64 {
    // The bits of numbers above 0, as integers, are in the order of the numbers.
    let place = |x: f32| {
        let bits = i64::from(x.abs().to_bits());
        if x.is_sign_negative() { -bits } else { bits }
    };
    (place(a) - place(b)).unsigned_abs() as f64
}

/// The same numbers, with room for more digits.
pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// The nearest number of f32.
#[expect(clippy::cast_possible_truncation, reason = "this is where it is rounded")]
pub(crate) fn single(x: f64) -> f32 {
    x as f32
}
