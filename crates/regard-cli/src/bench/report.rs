//! One row a case: JSON for programs and records, an aligned table for people.

use super::baseline::{Against, Ratio};
use super::case::Bound;
use super::context::Context;
use super::summary::{FEWEST_OF_A_PERCENTILE, SampleSummary};
use crate::args::Format;
use anyhow::{Context as _, Result};
use regard::Machine;
use serde::Serialize;
use std::io::Write;

/// What was measured of a case. Ratios come from neighbouring samples, so they need not equal those of the medians.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    #[serde(flatten)]
    pub(crate) context: Context,
    pub(crate) isa: &'static str,
    pub(crate) threads: usize,
    /// Why nothing was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    pub(crate) median_ms: Option<f64>,
    pub(crate) samples: usize,
    /// What `low` and `high` of a ratio are.
    pub(crate) range: &'static str,
    /// Of a call of the engine.
    #[serde(flatten)]
    pub(crate) kernel: Option<Kernel>,
    /// What hashing kept of the mass of full attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recall_mass: Option<f64>,
    /// The same of the mass of the 32 largest weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) recall_top: Option<f64>,
    pub(crate) baselines: Vec<Against>,
}

/// What is known of a call of the engine beside its time.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Kernel {
    /// Nanoseconds for each query of each head.
    pub(crate) row_ns: f64,
    pub(crate) gflops: f64,
    /// What the roofline is made of.
    pub(crate) roofline: Bound,
    /// Flops the case could do if only that bounded it.
    pub(crate) roofline_gflops: f64,
    pub(crate) of_roofline: f64,
    pub(crate) of_roofline_low: f64,
    pub(crate) of_roofline_high: f64,
    /// Visible pairs as a fraction of all; flops count these alone.
    pub(crate) visible: f64,
    /// MiB of the whole process during the first call.
    pub(crate) peak_rss_mb: Option<f64>,
    /// MiB of that beyond what the process held before and what the call returns.
    pub(crate) extra_rss_mb: Option<f64>,
}

impl Row {
    /// Seconds of calls, and nothing else yet.
    pub(crate) fn timed(case: &str, machine: Machine, seconds: &[f64]) -> Result<Self> {
        let median = SampleSummary::of(seconds).context("nothing was measured")?.median;
        let row = Self::empty(case, machine, seconds.len());
        Ok(Self { median_ms: Some(five_digits(median * 1e3)), ..row })
    }

    /// A case that could not be measured, and why.
    pub(crate) fn failed(case: &str, machine: Machine, why: String) -> Self {
        Self { error: Some(why), ..Self::empty(case, machine, 0) }
    }

    fn empty(case: &str, machine: Machine, samples: usize) -> Self {
        Self {
            case: case.into(),
            context: Context::now(),
            isa: machine.isa.name(),
            threads: machine.threads,
            error: None,
            median_ms: None,
            samples,
            range: if samples < FEWEST_OF_A_PERCENTILE { "min-max" } else { "p10-p90" },
            kernel: None,
            recall_mass: None,
            recall_top: None,
            baselines: Vec::new(),
        }
    }
}

impl Kernel {
    /// With digits that mean something.
    pub(crate) fn rounded(mut self) -> Self {
        let Self { row_ns, gflops, roofline_gflops, of_roofline, visible, .. } = &mut self;
        let always = [row_ns, gflops, roofline_gflops, of_roofline, visible];
        always.into_iter().for_each(|x| *x = five_digits(*x));
        let (low, high) = (&mut self.of_roofline_low, &mut self.of_roofline_high);
        let memory = [&mut self.peak_rss_mb, &mut self.extra_rss_mb].into_iter().flatten();
        [low, high].into_iter().chain(memory).for_each(|x| *x = five_digits(*x));
        self
    }
}

impl Against {
    /// Sets what was measured: seconds of calls, and their ratios to ours.
    pub(crate) fn measured(&mut self, seconds: &[f64], ratios: &[f64]) {
        let (Some(seconds), Some(ratio)) = (SampleSummary::of(seconds), SampleSummary::of(ratios))
        else {
            return;
        };
        self.median_ms = Some(five_digits(seconds.median * 1e3));
        let [ratio, ratio_low, ratio_high] = [ratio.median, ratio.low, ratio.high].map(five_digits);
        self.ratio = Some(Ratio { ratio, ratio_low, ratio_high });
    }
}

/// Prints rows as they come.
pub(crate) struct Report {
    format: Format,
    /// Of the longest name.
    width: usize,
    compared: bool,
    rows: usize,
}

impl Report {
    pub(crate) fn new<'a>(
        format: Format,
        names: impl Iterator<Item = &'a str>,
        compared: bool,
    ) -> Self {
        Self { format, width: names.map(str::len).max().unwrap_or(0).max(4), compared, rows: 0 }
    }

    pub(crate) fn row(&mut self, row: &Row) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if self.format == Format::Json {
            writeln!(out, "{}", serde_json::to_string(row)?)?;
            return Ok(());
        }
        if self.rows == 0 {
            writeln!(out, "{}", self.header())?;
        }
        self.rows += 1;
        for line in self.lines(row) {
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    fn header(&self) -> String {
        let last = if self.compared { "baseline ms  ratio" } else { "extra MiB" };
        format!("{:w$}  t        ms   GF/s  of the roofline   {last:>9}", "case", w = self.width)
    }

    /// Our own line, the first baseline at its end, and one for each other.
    fn lines(&self, row: &Row) -> Vec<String> {
        let number =
            |x: Option<f64>, digits: usize| x.map_or("-".into(), |x| format!("{x:.digits$}"));
        let kernel = row.kernel.as_ref();
        let of_roofline = kernel
            .map_or("-".into(), |k| range(k.of_roofline, k.of_roofline_low, k.of_roofline_high));
        let gflops = number(kernel.map(|k| k.gflops), 1);
        let kept = row.recall_mass.zip(row.recall_top).map_or(String::new(), |(mass, top)| {
            format!("  keeps {mass:.3} of the mass, {top:.3} of that of the top 32")
        });
        let mut others: Vec<String> = row.baselines.iter().map(beside).collect();
        if let Some(why) = &row.error {
            others.push(why.clone());
        }
        if !self.compared {
            others.push(format!("{:>10}", number(kernel.and_then(|k| k.extra_rss_mb), 1)));
        }
        let (width, ms) = (self.width, number(row.median_ms, 3));
        let head = format!(
            "{:width$} {:>2} {ms:>9} {gflops:>6}  {of_roofline:<16}",
            row.case, row.threads
        );
        let mut lines = vec![head + &others.first().cloned().unwrap_or_default() + &kept];
        lines
            .extend(others.iter().skip(1).map(|other| format!("{:w$}{other}", "", w = width + 38)));
        lines
    }

    /// How it was measured, for people.
    pub(crate) fn finish(self, seconds: f64) -> Result<()> {
        if self.format == Format::Text {
            writeln!(
                std::io::stdout().lock(),
                "Medians (10th to 90th percentile; of fewer than 9 samples, least and largest), {seconds} s a case, in alternating\n\
                 samples of 2 ms or more; ratios are of neighbouring samples, above 1 we are faster. One thread without a baseline\n\
                 is timed by its CPU time, else by the wall. Flops are those of visible pairs. The roofline is pure\n\
                 multiply-adds (for decode, pure reads) on as many threads."
            )?;
        }
        Ok(())
    }
}

fn range(middle: f64, low: f64, high: f64) -> String {
    format!("{middle:.2} ({low:.2}-{high:.2})")
}

/// A baseline at the end of a line.
fn beside(one: &Against) -> String {
    let ms = one.median_ms.map_or("-".into(), |ms| format!("{ms:.3}"));
    let why = one.error.as_deref().unwrap_or("-");
    let ratio = one.ratio.map_or(why.into(), |r| range(r.ratio, r.ratio_low, r.ratio_high));
    let form = one.ready.as_ref().map_or(String::new(), |ready| format!(", {}", ready.form));
    format!(" {ms:>12}  {ratio}  {}{form}", one.engine)
}

pub(crate) fn five_digits(x: f64) -> f64 {
    format!("{x:.4e}").parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::super::baseline::Ready;
    use super::*;

    fn row() -> Row {
        let kernel = Kernel {
            row_ns: 94_190.0,
            gflops: 351.23,
            roofline: Bound::Fma,
            roofline_gflops: 352.0,
            of_roofline: 0.934_567_8,
            of_roofline_low: 0.9,
            of_roofline_high: 0.95,
            visible: 1.0,
            peak_rss_mb: Some(12.0),
            extra_rss_mb: None,
        };
        let row = Row::timed(
            "prefill-f32-n16384-d64-h1-longformer512",
            Machine::detect().threads(2),
            &[12.345_678_9; 9],
        );
        Row { kernel: Some(kernel.rounded()), ..row.unwrap() }
    }

    #[test]
    fn rows_stand_below_their_headers() {
        for (compared, baselines) in [(false, Vec::new()), (true, baselines())] {
            let row = Row { baselines, ..row() };
            let report = Report::new(Format::Text, [row.case.as_str()].into_iter(), compared);
            let (header, lines) = (report.header(), report.lines(&row));
            let end = |text: &str, word: &str| text.find(word).map(|at| at + word.len());
            assert_eq!(end(&header, " ms"), end(&lines[0], "12346.000"), "{header}\n{}", lines[0]);
            assert_eq!(end(&header, "GF/s"), end(&lines[0], "351.2"), "{header}\n{}", lines[0]);
            assert_eq!(header.find("of the"), lines[0].find("0.93"), "{header}\n{}", lines[0]);
            if compared {
                assert_eq!(
                    end(&header, "baseline ms"),
                    end(&lines[0], "14000.000"),
                    "{header}\n{}",
                    lines[0]
                );
                assert_eq!(header.find("ratio"), lines[0].find("1.25"), "{header}\n{}", lines[0]);
                assert!(
                    lines[0].ends_with("torch, flex")
                        && lines[1].ends_with("it has no gradients  vllm")
                );
            }
        }
    }

    fn baselines() -> Vec<Against> {
        let ready = Some(Ready { form: "flex".into(), ..Ready::default() });
        let mut one = Against { engine: "torch".into(), ready, ..Against::default() };
        one.measured(&[14.0], &[1.25]);
        let error = Some("it has no gradients".into());
        vec![one, Against { engine: "vllm".into(), error, ..Against::default() }]
    }

    #[test]
    fn json_has_every_field_and_few_digits() {
        let mut row = row();
        row.baselines = baselines();
        let line = serde_json::to_value(&row).unwrap();
        assert_eq!(line["of_roofline"], 0.93457);
        assert_eq!((&line["median_ms"], &line["samples"]), (&12346.0.into(), &9.into()));
        assert_eq!((&line["range"], &line["roofline"]), (&"p10-p90".into(), &"fma".into()));
        assert!(line["extra_rss_mb"].is_null() && line["date"].as_str().unwrap().starts_with("20"));
        let [torch, vllm] = [0, 1].map(|i| &line["baselines"][i]);
        assert_eq!((&torch["ratio"], &torch["form"]), (&1.25.into(), &"flex".into()));
        assert!(vllm.get("ratio").is_none() && vllm["error"] == "it has no gradients");
    }
}
