//! A report as a page that needs nothing but itself.

use crate::report::{ExperimentResult, Report, Tolerance};
use crate::{Experiment, Setup};
use regard_scope::render::svg;
use regard_scope::{Metrics, Style, escaped};
use std::fmt::Write;

const STYLE: &str = "body{font:16px/1.5 'DejaVu Sans',sans-serif;color:#2a2d34;background:#fdfcf9;max-width:52rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;width:100%;margin:1rem 0;font-size:.9rem}th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}code{background:#f0eee8;padding:.1rem .3rem}\
.no{color:#a03000;font-weight:bold}figure{margin:1.5rem 0}figcaption{color:#5f646d}";

/// The page: claim, verdict, picture, numbers, what to try next.
#[must_use]
pub fn page(experiment: &Experiment, setup: &Setup, report: &Report) -> String {
    let mut rows = String::new();
    for result in &report.results {
        let ExperimentResult { what, predicted, measured, tolerance } = result;
        let (class, verdict) = match (result.is_checked(), result.holds()) {
            (false, _) => ("", "not checked"),
            (true, true) => ("", "holds"),
            (true, false) => (" class=\"no\"", "does not hold"),
        };
        let (predicted, measured) = (number(*predicted), number(*measured));
        let _ = writeln!(
            rows,
            "<tr><td>{}</td><td>{predicted}</td><td>{measured}</td><td>{}</td><td{class}>{verdict}</td></tr>",
            escaped(what),
            tolerance.words(),
        );
    }
    let broken = experiment.faults.iter().map(|b| {
        format!(
            "<li><code>regard lab run {} --inject {}</code>: {}</li>",
            experiment.name,
            b.name,
            escaped(b.what)
        )
    });
    let next = experiment.next.iter().map(|c| format!("<li><code>{}</code></li>", escaped(c)));
    let scene = report.picture.scene(&Style::new(Metrics::pixels(800.0)));
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{id} {name}</title><style>{STYLE}</style></head>\n\
<body><main><h1>{id} {name}</h1>\n<p>{claim}.</p>\n<p><strong>{verdict}</strong> Seed {seed}{broken}.</p>\n\
<figure>{picture}<figcaption>{caption}</figcaption></figure>\n\
<table><thead><tr><th>number</th><th>predicted</th><th>measured</th><th>tolerance</th><th></th></tr></thead>\n<tbody>\n{rows}</tbody></table>\n\
<h2>To try next</h2><ul>{next}</ul>\n</main></body></html>\n",
        id = experiment.id,
        name = experiment.name,
        claim = escaped(experiment.claim),
        verdict = if report.holds() { "It holds." } else { "It does not hold." },
        seed = setup.seed,
        broken =
            setup.fault.as_ref().map_or_else(String::new, |b| format!(", fault {}", escaped(b))),
        picture = svg(&scene),
        caption = escaped(&report.caption),
        next = next.chain(broken).collect::<String>(),
    )
}

/// A number with four digits that count.
#[must_use]
pub fn number(x: f64) -> String {
    let size = x.abs();
    if x == 0.0 {
        "0".into()
    } else if !(1e-3..1e6).contains(&size) {
        format!("{x:.3e}")
    } else if size >= 1000.0 {
        format!("{x:.0}")
    } else if size >= 100.0 {
        format!("{x:.1}")
    } else if size >= 10.0 {
        format!("{x:.2}")
    } else if size >= 1.0 {
        format!("{x:.3}")
    } else {
        format!("{x:.4}")
    }
}

impl Tolerance {
    /// In words: `within 5 %`.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Within(x) if *x == 0.0 => "the same".into(),
            Self::Within(x) => format!("+- {}", number(*x)),
            Self::Part(x) => format!("+- {} %", number(100.0 * x)),
            Self::AtMost => "at most".into(),
            Self::AtLeast => "at least".into(),
            Self::Any => "not checked".into(),
        }
    }
}
