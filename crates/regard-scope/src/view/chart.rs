//! Numbers over numbers: what was measured as points, what was predicted as lines.

use super::Style;
use super::number::{round_step, short};
use super::sheet::Sheet;
use crate::color::Emphasis;
use crate::scene::{Anchor, Area, Line, Scene};

/// What a chart shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// What it is, as a heading.
    pub title: String,
    /// What runs to the right.
    pub x: ChartAxis,
    /// What runs upward.
    pub y: ChartAxis,
    /// What is told apart.
    pub series: Vec<Series>,
}

/// One side of a chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChartAxis {
    /// What its numbers are.
    pub title: String,
    /// Whether equal distances are equal factors; then only numbers above 0 are drawn.
    pub log: bool,
}

/// Numbers that belong together.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Series {
    /// What they are.
    pub name: String,
    /// `(x, y)`, drawn as points.
    pub measured: Vec<(f64, f64)>,
    /// `(x, y)`, drawn as a line; without any, the points are joined.
    pub predicted: Vec<(f64, f64)>,
}

/// One for each series, and again from the start.
const POINTS: [&str; 8] = ["●", "○", "▲", "△", "■", "□", "◆", "◇"];

impl ChartAxis {
    /// Equal distances are equal differences.
    #[must_use]
    pub fn linear(title: impl Into<String>) -> Self {
        Self { title: title.into(), log: false }
    }

    /// Equal distances are equal factors.
    #[must_use]
    pub fn log(title: impl Into<String>) -> Self {
        Self { title: title.into(), log: true }
    }

    /// A number as a distance, if it has a place at all.
    fn at(&self, x: f64) -> Option<f64> {
        let at = if self.log { x.log10() } else { x };
        at.is_finite().then_some(at)
    }

    /// The ends of the side: all numbers, and round ones around them.
    fn ends(&self, numbers: impl Iterator<Item = f64>) -> (f64, f64) {
        let all = numbers.filter_map(|x| self.at(x));
        let (low, high) =
            all.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), x| (l.min(x), h.max(x)));
        if low > high {
            return (0.0, 1.0);
        }
        if low == high {
            return (low - 0.5, high + 0.5);
        }
        if self.log {
            let space = 0.04 * (high - low);
            return (low - space, high + space);
        }
        // Zero is part of the side if it is not far away.
        let low = if low > 0.0 && low < 0.5 * high { 0.0 } else { low };
        let step = round_step((high - low) / 8.0);
        ((low / step).floor() * step, (high / step).ceil() * step)
    }

    /// Round numbers between the ends: where they stand, and what is written there.
    fn ticks(&self, (low, high): (f64, f64), most: usize) -> Vec<(f64, String)> {
        let most = most.max(2) as f64;
        let inside = |at: f64| at >= low - 1e-9 && at <= high + 1e-9;
        if self.log && high - low >= 1.0 {
            let step = ((high - low) / most).ceil().max(1.0);
            let first = (low / step).ceil() * step;
            let all = (0..100).map(|i| first + f64::from(i) * step);
            let power = |at: f64| {
                if (-3.0..6.0).contains(&at) { label(10f64.powf(at)) } else { format!("1e{at:.0}") }
            };
            return all.filter(|&at| inside(at)).map(|at| (at, power(at))).collect();
        }
        let (from, to) = if self.log { (10f64.powf(low), 10f64.powf(high)) } else { (low, high) };
        let step = round_step((to - from) / most);
        let first = (from / step).ceil() * step;
        let all = (0..100).map(|i| first + f64::from(i) * step);
        let placed = all.filter_map(|x| Some((self.at(x)?, label(x))));
        placed.filter(|(at, _)| inside(*at)).collect()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "few digits are written")]
fn label(x: f64) -> String {
    let x = x as f32;
    if x.abs() < 1e-12 { "0".into() } else { short(x) }
}

/// Where numbers stand on the page.
struct Frame<'c> {
    chart: &'c Chart,
    area: Area,
    x: (f64, f64),
    y: (f64, f64),
}

#[expect(clippy::cast_possible_truncation, reason = "places of a page")]
impl Frame<'_> {
    fn right(&self, at: f64) -> f32 {
        self.area.x + self.area.w * ((at - self.x.0) / (self.x.1 - self.x.0)) as f32
    }

    fn up(&self, at: f64) -> f32 {
        self.area.y + self.area.h * (1.0 - ((at - self.y.0) / (self.y.1 - self.y.0)) as f32)
    }

    fn place(&self, (x, y): (f64, f64)) -> Option<(f32, f32)> {
        Some((self.right(self.chart.x.at(x)?), self.up(self.chart.y.at(y)?)))
    }
}

/// Points and lines over two axes, with a legend below.
#[must_use]
pub fn chart(chart: &Chart, style: &Style) -> Scene {
    let mut sheet = Sheet::new(&chart.title, style);
    let m = sheet.metrics();
    let all = || chart.series.iter().flat_map(|s| s.measured.iter().chain(&s.predicted));
    let (x, y) = (chart.x.ends(all().map(|p| p.0)), chart.y.ends(all().map(|p| p.1)));
    let (most, high) = if m.is_terminal() { (76.0, 16.0) } else { (760.0, 340.0) };
    let ticks = chart.y.ticks(y, if m.is_terminal() { 4 } else { 6 });
    let widest = ticks.iter().map(|t| m.text_width(&t.1)).fold(0.0, f32::max);
    sheet.text(
        (sheet.margin.0, sheet.y + m.line / 2.0),
        m.fit(&format!("↑ {}", chart.y.title), sheet.room()),
        Anchor::Start,
        Emphasis::Quiet,
    );
    let left = sheet.margin.0 + widest + m.gap.0;
    // The last label of the other side is centered at the edge and needs room beyond it.
    let beyond = 2.0 * m.gap.0;
    let w = (sheet.room() - (left - sheet.margin.0) - beyond).min(most).max(m.line);
    let area = Area { x: left, y: sheet.y + 1.5 * m.line, w, h: high };
    let frame = Frame { chart, area, x, y };
    sheet.reach(left + w + beyond);
    axes(&frame, &ticks, &mut sheet);
    for (i, series) in chart.series.iter().enumerate() {
        draw(&frame, series, i, &mut sheet);
    }
    legend(chart, &mut sheet);
    sheet.finish(&chart.title, describe(chart))
}

fn axes(frame: &Frame<'_>, ticks: &[(f64, String)], sheet: &mut Sheet<'_>) {
    let (m, area) = (sheet.metrics(), frame.area);
    let edge = |from, to| Line { from, to, strength: 0.0, curved: false, color: QUIET };
    let (bottom, right) = (area.y + area.h, area.x + area.w);
    if !m.is_terminal() {
        for (at, _) in ticks {
            let y = frame.up(*at);
            sheet.line(Line { color: FAINT, ..edge((area.x, y), (right, y)) });
        }
    }
    sheet.line(edge((area.x, area.y), (area.x, bottom)));
    sheet.line(edge((area.x, bottom), (right, bottom)));
    for (at, label) in ticks {
        let y = frame.up(*at);
        sheet.text((area.x - m.gap.0, y), label.clone(), Anchor::End, Emphasis::Plain);
    }
    let mut free = f32::NEG_INFINITY;
    let below = bottom + m.line;
    for (at, label) in frame.chart.x.ticks(frame.x, if m.is_terminal() { 6 } else { 8 }) {
        let (x, half) = (frame.right(at), m.text_width(&label) / 2.0);
        let x = if m.is_terminal() { x.round() } else { x };
        if x - half >= free {
            free = x + half + m.gap.0;
            sheet.text((x, below), label, Anchor::Middle, Emphasis::Plain);
        }
    }
    sheet.y = below + m.line;
    let title = m.fit(&format!("{} →", frame.chart.x.title), area.w);
    sheet.text((right, sheet.y), title, Anchor::End, Emphasis::Quiet);
    sheet.y += m.line;
}

/// Places in the palette: the frame, its grid, and the first and the last series.
const QUIET: u8 = 120;
const FAINT: u8 = 30;
const SERIES: (u8, u8) = (255, 110);

fn color(i: usize, of: usize) -> u8 {
    let (first, last) = (usize::from(SERIES.0), usize::from(SERIES.1));
    let down = (first - last) * (i % of.max(1)) / of.saturating_sub(1).max(1);
    u8::try_from(first - down).unwrap_or(SERIES.0)
}

fn draw(frame: &Frame<'_>, series: &Series, i: usize, sheet: &mut Sheet<'_>) {
    let color = color(i, frame.chart.series.len());
    let joined = if series.predicted.is_empty() { &series.measured } else { &series.predicted };
    for pair in joined.windows(2) {
        let (Some(from), Some(to)) = (frame.place(pair[0]), frame.place(pair[1])) else { continue };
        let strength = if series.predicted.is_empty() { 0.05 } else { 0.2 };
        sheet.line(Line { from, to, strength, curved: false, color });
    }
    for at in series.measured.iter().filter_map(|&point| frame.place(point)) {
        let point = POINTS[i % POINTS.len()].to_string();
        sheet.text(at, point, Anchor::Middle, Emphasis::Plain);
    }
}

fn legend(chart: &Chart, sheet: &mut Sheet<'_>) {
    for (i, series) in chart.series.iter().enumerate() {
        let point = POINTS[i % POINTS.len()];
        let line = match (series.measured.is_empty(), series.predicted.is_empty()) {
            (false, false) => " (the line is predicted)",
            (true, false) => " (predicted)",
            _ => "",
        };
        sheet.caption(&format!("{point} {}{line}", series.name));
    }
}

/// The chart for those who cannot see it: each series with its ends.
fn describe(chart: &Chart) -> String {
    let series = chart.series.iter().map(|s| {
        let ends = |of: &[(f64, f64)]| match (of.first(), of.last()) {
            (Some(a), Some(b)) => {
                format!("{} at {} to {} at {}", label(a.1), label(a.0), label(b.1), label(b.0))
            }
            _ => "none".into(),
        };
        format!("{}: measured {}, predicted {}", s.name, ends(&s.measured), ends(&s.predicted))
    });
    let all: Vec<String> = series.collect();
    format!("{} over {}. {}.", chart.y.title, chart.x.title, all.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Depth, svg, term};
    use crate::scene::Metrics;

    fn squares() -> Chart {
        let predicted: Vec<(f64, f64)> =
            (1..=10).map(|x| (f64::from(x), f64::from(x * x))).collect();
        let measured = predicted.iter().step_by(3).map(|(x, y)| (*x, y * 1.02)).collect();
        let series = vec![Series { name: "squares".into(), measured, predicted }];
        let (x, y) = (ChartAxis::linear("number"), ChartAxis::linear("its square"));
        Chart { title: "Squares".into(), x, y, series }
    }

    #[test]
    fn every_point_and_every_name_is_drawn() {
        let words =
            term(&chart(&squares(), &Style::new(Metrics::terminal(80, false))), Depth::Ascii);
        let drawn = words.split("number").next().map(|above| above.matches('o').count());
        assert_eq!(drawn, Some(4), "{words}");
        for word in ["Squares", "number >", "its square", "squares", "100"] {
            assert!(words.contains(word), "{word} is missing: {words}");
        }
        assert!(words.lines().all(|line| line.chars().count() <= 80), "{words}");
        let drawn = svg(&chart(&squares(), &Style::new(Metrics::pixels(600.0))));
        assert_eq!(drawn.matches('●').count(), 4 + 1);
    }

    #[test]
    fn numbers_without_a_place_are_left_out() {
        let mut odd = squares();
        odd.y.log = true;
        odd.series[0].measured =
            vec![(1.0, 0.0), (2.0, -1.0), (3.0, f64::NAN), (f64::INFINITY, 1.0), (4.0, 16.0)];
        let drawn = svg(&chart(&odd, &Style::new(Metrics::pixels(600.0))));
        assert_eq!(drawn.matches('●').count(), 1 + 1, "a point and its legend");
        for series in [Vec::new(), vec![Series::default()]] {
            let _ = chart(&Chart { series, ..odd.clone() }, &Style::new(Metrics::pixels(200.0)));
        }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let words = |side: &ChartAxis, ends| {
            let all = side.ticks(ends, 4).into_iter().map(|tick| tick.1);
            all.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(words(&ChartAxis::linear(""), (0.0, 100.0)), "0 50 100");
        assert_eq!(words(&ChartAxis::log(""), (0.0, 3.0)), "1 10 100 1000");
        assert_eq!(words(&ChartAxis::log(""), (0.0, 0.7)), "2 4");
    }
}
