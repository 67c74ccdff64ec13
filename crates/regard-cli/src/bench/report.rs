//! One row a case: JSON for programs, an aligned table for people.

use super::case::Bound;
use super::spread::Spread;
use crate::args::Format;
use anyhow::Result;
use serde::Serialize;
use std::io::Write;

/// What was measured of a case. Ratios come from neighbouring slices, so they need not equal those of the medians.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) isa: &'static str,
    pub(crate) threads: usize,
    pub(crate) median_ms: f64,
    /// Nanoseconds for each query of each head.
    pub(crate) row_ns: f64,
    pub(crate) gflops: f64,
    /// What the limit is made of.
    pub(crate) limit: Bound,
    /// Flops the case could do if only that bounded it.
    pub(crate) limit_gflops: f64,
    pub(crate) of_limit: f64,
    pub(crate) of_limit_p10: f64,
    pub(crate) of_limit_p90: f64,
    pub(crate) rival: Option<String>,
    /// Why there is no comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rival_error: Option<String>,
    pub(crate) rival_ms: Option<f64>,
    /// Above 1, we are faster.
    pub(crate) vs_rival: Option<f64>,
    pub(crate) vs_rival_p10: Option<f64>,
    pub(crate) vs_rival_p90: Option<f64>,
    /// What hashing kept of the mass of full attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recall_mass: Option<f64>,
    /// The same of the mass of the 32 largest weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recall_top: Option<f64>,
    /// Visible pairs as a share of all; flops count these alone.
    pub(crate) visible: f64,
    pub(crate) slices: usize,
    /// MiB of the whole process during the first call.
    pub(crate) peak_rss_mb: Option<f64>,
    /// MiB of that beyond what the process held before and the output.
    pub(crate) extra_rss_mb: Option<f64>,
    /// MiB that the rival takes beyond what it held before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rival_extra_rss_mb: Option<f64>,
}

/// Prints rows as they come.
pub(crate) struct Report {
    format: Format,
    /// Of the longest name.
    width: usize,
    rival: bool,
    rows: usize,
}

impl Report {
    pub(crate) fn new<'a>(
        format: Format,
        names: impl Iterator<Item = &'a str>,
        rival: bool,
    ) -> Self {
        Self { format, width: names.map(str::len).max().unwrap_or(0).max(4), rival, rows: 0 }
    }

    pub(crate) fn row(&mut self, row: &Row) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if self.format == Format::Json {
            writeln!(out, "{}", serde_json::to_string(&row.rounded())?)?;
            return Ok(());
        }
        if self.rows == 0 {
            writeln!(out, "{}", self.header())?;
        }
        self.rows += 1;
        writeln!(out, "{}", self.line(row))?;
        Ok(())
    }

    fn header(&self) -> String {
        let last = if self.rival { "rival ms  times faster" } else { "extra MiB" };
        format!("{:w$}  t        ms   GF/s  share of limit    {last:>9}", "case", w = self.width)
    }

    fn line(&self, row: &Row) -> String {
        let ratio = |m: f64, low: f64, high: f64| format!("{m:.2} ({low:.2}-{high:.2})");
        let of_limit = ratio(row.of_limit, row.of_limit_p10, row.of_limit_p90);
        let last = if self.rival {
            let ms = row.rival_ms.map_or("-".into(), |ms| format!("{ms:.3}"));
            let why = row.rival_error.as_deref().unwrap_or("-");
            let spread = row.vs_rival.zip(row.vs_rival_p10).zip(row.vs_rival_p90);
            let times = spread.map_or(why.into(), |((m, low), high)| ratio(m, low, high));
            format!("{ms:>8}  {times}")
        } else {
            row.extra_rss_mb.map_or("-".into(), |mb| format!("{mb:.1}"))
        };
        let kept = row.recall_mass.zip(row.recall_top).map_or(String::new(), |(mass, top)| {
            format!("  keeps {mass:.3} of the mass, {top:.3} of that of the top 32")
        });
        format!(
            "{:w$} {:>2} {:>9.3} {:>6.1}  {of_limit:<16} {last:>10}{kept}",
            row.case,
            row.threads,
            row.median_ms,
            row.gflops,
            w = self.width
        )
    }

    /// How it was measured, for people.
    pub(crate) fn finish(self, seconds: f64) -> Result<()> {
        if self.format == Format::Text {
            writeln!(
                std::io::stdout().lock(),
                "Medians (10th to 90th percentile), {seconds} s a case, in alternating slices of 2 ms or more; ratios are of\n\
                 neighbouring slices. One thread is timed by its CPU time, several by the wall. Flops are those of\n\
                 visible pairs. The limit is pure multiply-adds (for decode, pure reads) on as many threads."
            )?;
        }
        Ok(())
    }
}

impl Row {
    /// With digits that mean something.
    fn rounded(&self) -> Self {
        let mut row = self.clone();
        let always = [&mut row.median_ms, &mut row.row_ns, &mut row.visible];
        let speeds = [&mut row.gflops, &mut row.limit_gflops];
        let ratios = [&mut row.of_limit, &mut row.of_limit_p10, &mut row.of_limit_p90];
        let rival = [&mut row.vs_rival, &mut row.vs_rival_p10, &mut row.vs_rival_p90];
        let memory = [&mut row.peak_rss_mb, &mut row.extra_rss_mb, &mut row.rival_extra_rss_mb];
        let maybe = memory.into_iter().chain([&mut row.rival_ms]);
        let kept = [&mut row.recall_mass, &mut row.recall_top];
        let some = rival.into_iter().chain(maybe).chain(kept).flatten();
        always
            .into_iter()
            .chain(speeds)
            .chain(ratios)
            .chain(some)
            .for_each(|x| *x = five_digits(*x));
        row
    }

    /// Sets what was measured of the rival.
    pub(crate) fn against(&mut self, seconds: &[f64], ratios: &[f64]) {
        let (Some(seconds), Some(ratio)) = (Spread::of(seconds), Spread::of(ratios)) else {
            return;
        };
        self.rival_ms = Some(seconds.median * 1e3);
        self.vs_rival = Some(ratio.median);
        (self.vs_rival_p10, self.vs_rival_p90) = (Some(ratio.p10), Some(ratio.p90));
    }
}

fn five_digits(x: f64) -> f64 {
    format!("{x:.4e}").parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            case: "prefill-f32-n16384-d64-h1-longformer512".into(),
            isa: "avx512",
            threads: 2,
            median_ms: 12_345.678_9,
            row_ns: 94_190.0,
            gflops: 351.23,
            limit: Bound::Fma,
            limit_gflops: 352.0,
            of_limit: 0.934_567_8,
            of_limit_p10: 0.9,
            of_limit_p90: 0.95,
            rival: Some("torch 2.15.0".into()),
            rival_error: None,
            rival_ms: None,
            vs_rival: None,
            vs_rival_p10: None,
            vs_rival_p90: None,
            recall_mass: None,
            recall_top: None,
            visible: 1.0,
            slices: 10,
            peak_rss_mb: Some(12.0),
            extra_rss_mb: None,
            rival_extra_rss_mb: None,
        }
    }

    #[test]
    fn rows_stand_below_their_headers() {
        let mut row = row();
        row.against(&[14.0], &[1.25]);
        assert_eq!((row.rival_ms, row.vs_rival_p90), (Some(14_000.0), Some(1.25)));
        for (rival, width) in [(false, 100), (true, 105)] {
            let report = Report::new(Format::Text, [row.case.as_str()].into_iter(), rival);
            let (header, line) = (report.header(), report.line(&row));
            assert!(line.len() <= width, "{line}");
            let end = |text: &str, word: &str| text.find(word).map(|at| at + word.len());
            assert_eq!(end(&header, " ms"), end(&line, "12345.679"), "{header}\n{line}");
            assert_eq!(end(&header, "GF/s"), end(&line, "351.2"), "{header}\n{line}");
            assert_eq!(header.find("share"), line.find("0.93"), "{header}\n{line}");
            if rival {
                assert_eq!(end(&header, "rival ms"), end(&line, "14000.000"), "{header}\n{line}");
                assert_eq!(header.find("times"), line.find("1.25"), "{header}\n{line}");
            }
        }
    }

    #[test]
    fn json_has_every_field_and_few_digits() {
        let line = serde_json::to_value(row().rounded()).unwrap();
        assert_eq!(line["of_limit"], 0.93457);
        assert_eq!(line["median_ms"], 12346.0);
        assert_eq!(line["limit"], "fma");
        assert!(line["extra_rss_mb"].is_null() && line["vs_rival_p10"].is_null());
    }
}
