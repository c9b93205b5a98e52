//! Metrics in the text format of Prometheus.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};

use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    Opts, Registry, TextEncoder, core::Collector,
};

use crate::failure::Kind;

/// Upper bounds of the buckets in the histograms of times, in seconds.
const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
];
/// Upper bounds of the buckets in the histograms of tokens and sequences.
const COUNTS: [f64; 14] =
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];

/// The stage that a time of `encodle_stage_duration_seconds` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Texts to tokens.
    Tokenize,
    /// From the tokens to the values: waiting in the queue, and the batches.
    Engine,
    /// One batch, which may serve several requests, or one text of a route that is not batched.
    /// `Engine` includes this time.
    Compute,
    /// Values to the body of the response.
    Serialize,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Tokenize => "tokenize",
            Self::Engine => "engine",
            Self::Compute => "compute",
            Self::Serialize => "serialize",
        }
    }
}

pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    request_seconds: HistogramVec,
    failures: IntCounterVec,
    stage_seconds: HistogramVec,
    pub in_progress: IntGauge,
    pub connections: IntGauge,
    pub queue_requests: IntGauge,
    pub queue_tokens: IntGauge,
    /// Set when the metrics are read.
    pub queue_oldest: Gauge,
    pub batch_tokens: Histogram,
    pub batch_sequences: Histogram,
    tokens: IntCounterVec,
    texts: IntCounterVec,
    repeated: IntCounterVec,
    pub loaded: IntGauge,
    /// The names of the loaded models by number; see [`crate::Model`]. They are the only values of
    /// the label `model`, besides the empty string.
    names: RwLock<HashMap<u64, String>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let registry = Registry::new();
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
            registered(&registry, Histogram::with_opts(options))
        };
        let gauge = |name: &str, help: &str| registered(&registry, IntGauge::new(name, help));
        let counters = |name: &str, help: &str, labels: &[&str]| {
            registered(&registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let histograms = |name: &str, help: &str, labels: &[&str]| {
            let options = HistogramOpts::new(name, help).buckets(SECONDS.to_vec());
            registered(&registry, HistogramVec::new(options, labels))
        };
        Self {
            requests: counters(
                "encodle_requests_total",
                "Requests by route, model and status; 499 if the client left or the server ended \
                 first",
                &["route", "model", "status"],
            ),
            request_seconds: histograms(
                "encodle_request_duration_seconds",
                "Time from a request's header to its response, or to its end with status 499",
                &["route", "model"],
            ),
            failures: counters("encodle_failures_total", "Failed requests by kind", &["kind"]),
            stage_seconds: histograms(
                "encodle_stage_duration_seconds",
                "Time per request in a stage; for compute, time per batch, or per text of a route \
                 without batches",
                &["stage"],
            ),
            in_progress: gauge(
                "encodle_requests_in_progress",
                "Requests in progress, from the end of the header to the response",
            ),
            connections: gauge("encodle_connections", "Open connections"),
            queue_requests: gauge("encodle_queue_requests", "Requests that wait for a batch"),
            queue_tokens: gauge("encodle_queue_tokens", "Tokens that wait for a batch"),
            queue_oldest: registered(
                &registry,
                Gauge::new(
                    "encodle_queue_oldest_seconds",
                    "Age of the oldest request that waits for a batch; 0 if none waits",
                ),
            ),
            batch_tokens: histogram("encodle_batch_tokens", "Tokens per batch", &COUNTS),
            batch_sequences: histogram("encodle_batch_sequences", "Sequences per batch", &COUNTS),
            tokens: counters("encodle_tokens_total", "Tokens of the computed batches", &["model"]),
            texts: counters("encodle_texts_total", "Texts of answered requests", &["model"]),
            repeated: counters(
                "encodle_repeated_sequences_total",
                "Sequences that equal another one of their request, and are computed with it",
                &["model"],
            ),
            loaded: gauge(
                "encodle_models_loaded_timestamp_seconds",
                "When the models were loaded, in seconds since 1970",
            ),
            names: RwLock::default(),
            registry,
        }
    }
}

/// Registers a metric.
fn registered<M: Collector + Clone + 'static>(
    registry: &Registry,
    created: prometheus::Result<M>,
) -> M {
    let metric = created.expect("the names above are valid");
    registry.register(Box::new(metric.clone())).expect("the names above are distinct");
    metric
}

impl Metrics {
    /// Counts a request that was answered or abandoned. `model` is the name of its model, or empty
    /// if the request has none.
    pub fn ended(
        &self,
        route: &str,
        model: &str,
        status: u16,
        seconds: f64,
        failure: Option<Kind>,
    ) {
        self.requests.with_label_values(&[route, model, &status.to_string()]).inc();
        self.request_seconds.with_label_values(&[route, model]).observe(seconds);
        if let Some(kind) = failure {
            self.failures.with_label_values(&[kind.name()]).inc();
        }
    }

    /// The times of a stage.
    pub fn stage(&self, stage: Stage) -> Histogram {
        self.stage_seconds.with_label_values(&[stage.name()])
    }

    /// The number of tokens that a model computed; see [`crate::Model`] for its number.
    pub fn tokens(&self, model: u64) -> IntCounter {
        self.of_model(&self.tokens, model)
    }

    /// The number of sequences that equal another one of their request; see [`crate::Model`] for the
    /// number of the model.
    pub fn repeated(&self, model: u64) -> IntCounter {
        self.of_model(&self.repeated, model)
    }

    fn of_model(&self, counters: &IntCounterVec, model: u64) -> IntCounter {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        counters.with_label_values(&[names.get(&model).map_or("", String::as_str)])
    }

    /// The number of texts of a model.
    pub fn texts(&self, model: &str) -> IntCounter {
        self.texts.with_label_values(&[model])
    }

    /// Sets the names of new models. The names of the models in `replaced`, which requests in
    /// progress may still use, are kept; other names are removed. The counters of the new models
    /// begin with 0.
    pub fn set_names(&self, new: HashMap<u64, String>, replaced: &[u64]) {
        for name in new.values() {
            self.tokens.with_label_values(&[name]);
            self.texts.with_label_values(&[name]);
            self.repeated.with_label_values(&[name]);
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        names.retain(|number, _| replaced.contains(number));
        names.extend(new);
    }

    /// All metrics in the text format of Prometheus.
    ///
    /// # Errors
    /// If a metric cannot be written, which is a defect.
    pub fn text(&self) -> prometheus::Result<Vec<u8>> {
        let mut text = vec![];
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_counted_requests() {
        let metrics = Metrics::default();
        metrics.ended("/embed", "minilm", 200, 0.002, None);
        metrics.ended("/embed", "minilm", 429, 0.001, Some(Kind::Overloaded));
        metrics.ended("/embed", "", 404, 0.001, Some(Kind::UnknownModel));
        metrics.stage(Stage::Tokenize).observe(0.02);
        let text = String::from_utf8(metrics.text().unwrap()).unwrap();
        for line in [
            r#"encodle_requests_total{model="minilm",route="/embed",status="429"} 1"#,
            r#"encodle_requests_total{model="",route="/embed",status="404"} 1"#,
            r#"encodle_failures_total{kind="overloaded"} 1"#,
            r#"encodle_request_duration_seconds_bucket{model="minilm",route="/embed",le="0.0025"} 2"#,
            r#"encodle_stage_duration_seconds_bucket{stage="tokenize",le="0.025"} 1"#,
            "encodle_queue_tokens 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn tokens_are_counted_by_the_names_of_the_models() {
        let metrics = Metrics::default();
        let names = |number: u64, name: &str| HashMap::from([(number, name.to_string())]);
        metrics.set_names(names(1, "a"), &[]);
        let text = String::from_utf8(metrics.text().unwrap()).unwrap();
        assert!(text.contains("encodle_tokens_total{model=\"a\"} 0\n"), "{text}");
        metrics.set_names(names(2, "b"), &[1]);
        metrics.tokens(1).inc_by(3);
        metrics.set_names(names(3, "b"), &[2]);
        metrics.tokens(2).inc_by(5);
        metrics.tokens(3).inc_by(7);
        metrics.tokens(1).inc_by(11); // no request can use this model any more
        for (name, count) in [("a", 3), ("b", 12), ("", 11)] {
            assert_eq!(metrics.tokens.with_label_values(&[name]).get(), count, "{name:?}");
        }
    }
}
