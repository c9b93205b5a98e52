//! Trace contexts of OpenTelemetry.

use axum::http::{HeaderMap, HeaderName};
use opentelemetry::{global, propagation::Extractor, trace::TraceContextExt};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

/// Makes the span of a request a child of the client's span, if the headers have a trace context.
/// The program must first set the propagator, which reads the headers, with
/// [`set_text_map_propagator`](global::set_text_map_propagator).
pub fn continue_trace(span: &Span, headers: &HeaderMap) {
    let parent = global::get_text_map_propagator(|format| format.extract(&Headers(headers)));
    if parent.span().span_context().is_valid()
        && let Err(error) = span.set_parent(parent)
    {
        tracing::debug!(%error, "the trace of the client is not continued");
    }
}
