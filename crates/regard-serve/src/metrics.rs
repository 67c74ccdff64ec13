//! Counters and histograms for Prometheus. Labels are routes, status codes and names of models: none grows with what clients send.

use crate::options::ServeError;
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use std::fmt;

/// Of one server: no recorder of the process, so that several can be in one.
pub(crate) struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// From a token of a small model to the longest request.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// Name, and what it says.
const COUNTERS: &[(&str, &str)] = &[
    ("regard_requests_total", "Requests, by route and status code"),
    ("regard_rejected_total", "Requests that were refused, by reason"),
    ("regard_cancelled_total", "Requests whose client went away"),
    ("regard_tokens_total", "Tokens, by kind: prompt, cached (of prompts), generated"),
    ("regard_prefix_hits_total", "Requests that began with a cached prefix"),
    ("regard_faults_total", "Panics and errors of engines"),
];
const GAUGES: &[(&str, &str)] = &[
    ("regard_in_flight", "Requests that are being answered"),
    ("regard_queued_requests", "Requests that wait for an engine"),
    ("regard_queued_tokens", "Prompt tokens of requests that wait"),
    ("regard_kv_pages", "Pages of KV caches, by state: reserved, cached, all"),
];
const HISTOGRAMS: &[(&str, &str)] = &[
    ("regard_request_seconds", "Time of a request until its answer begins to be sent"),
    ("regard_queue_seconds", "Time that a request waited for an engine"),
    ("regard_ttft_seconds", "Time to the first token"),
    ("regard_token_seconds", "Time between tokens"),
    ("regard_batch_rows", "Requests that a step computed together"),
];

impl Metrics {
    pub(crate) fn new() -> Result<Self, ServeError> {
        let wrong = |e: &dyn fmt::Display| ServeError::Option(format!("metrics: {e}"));
        let recorder = PrometheusBuilder::new()
            .set_buckets(SECONDS)
            .and_then(|one| {
                one.set_buckets_for_metric(Matcher::Full("regard_batch_rows".into()), ROWS)
            })
            .map_err(|e| wrong(&e))?
            .build_recorder();
        let metrics = Self { handle: recorder.handle(), recorder };
        metrics.with(|| {
            COUNTERS.iter().for_each(|(name, about)| metrics::describe_counter!(*name, *about));
            GAUGES.iter().for_each(|(name, about)| metrics::describe_gauge!(*name, *about));
            HISTOGRAMS.iter().for_each(|(name, about)| metrics::describe_histogram!(*name, *about));
        });
        Ok(metrics)
    }

    fn with<T>(&self, act: impl FnOnce() -> T) -> T {
        metrics::with_local_recorder(&self.recorder, act)
    }

    /// A counter with a label.
    pub(crate) fn count(&self, name: &'static str, label: (&'static str, String), by: u64) {
        self.with(|| metrics::counter!(name, label.0 => label.1).increment(by));
    }

    pub(crate) fn answered(&self, route: &str, code: u16, seconds: f64) {
        let (route, code) = (route.to_owned(), code.to_string());
        self.with(|| {
            metrics::counter!("regard_requests_total", "route" => route.clone(), "code" => code)
                .increment(1);
            metrics::histogram!("regard_request_seconds", "route" => route).record(seconds);
        });
    }

    /// Pages of an engine's cache in a state.
    pub(crate) fn pages(&self, (model, engine): (&str, usize), state: &'static str, to: f64) {
        let (model, engine) = (model.to_owned(), engine.to_string());
        self.with(|| {
            metrics::gauge!("regard_kv_pages", "model" => model, "state" => state, "engine" => engine).set(to);
        });
    }

    /// Requests that are being answered.
    pub(crate) fn in_flight(&self, by: f64) {
        self.with(|| metrics::gauge!("regard_in_flight").increment(by));
    }

    /// Changes a gauge of a model.
    pub(crate) fn add(&self, name: &'static str, model: &str, by: f64) {
        self.with(|| metrics::gauge!(name, "model" => model.to_owned()).increment(by));
    }

    pub(crate) fn observe(&self, name: &'static str, model: &str, value: f64) {
        self.with(|| metrics::histogram!(name, "model" => model.to_owned()).record(value));
    }

    pub(crate) fn render(&self) -> String {
        self.handle.render()
    }

    /// Puts samples into their buckets. They pile up until then.
    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}
