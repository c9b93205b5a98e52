//! Responses that many routes share.

use std::time::Instant;

use axum::{
    http::{HeaderName, HeaderValue},
    response::Response,
};
use serde::Serialize;

use crate::{
    memory::MemoryReservation,
    metrics::{Metrics, Stage},
    responses::Computed,
    sending::{Elements, json_list, json_object},
};

/// A response that is a list. If the list is long, its elements are serialised while they are sent;
/// `memory` is returned when the last is sent.
pub fn list_response(
    metrics: &Metrics,
    elements: Elements,
    memory: MemoryReservation,
    computed: Computed,
) -> Response {
    let start = Instant::now();
    serialized(metrics, json_list(elements, memory), computed, start)
}

/// [`list_response`] for a list that is the field `field` of `object`, where it is empty.
pub fn object_response(
    metrics: &Metrics,
    object: &impl Serialize,
    field: &str,
    elements: Elements,
    memory: MemoryReservation,
    computed: Computed,
) -> Response {
    let start = Instant::now();
    serialized(metrics, json_object(object, field, elements, memory), computed, start)
}

/// Observes the time since `start`, and counts the response.
fn serialized(metrics: &Metrics, json: Response, computed: Computed, start: Instant) -> Response {
    metrics.stage(Stage::Serialize).observe(start.elapsed().as_secs_f64());
    counted(metrics, json, computed)
}

/// The header of responses with the number of texts that were truncated.
pub const TRUNCATED_TEXTS: HeaderName = HeaderName::from_static("x-truncated-texts");

/// Adds the number of texts to the metrics, and `computed` to the response, for the log.
pub fn counted(metrics: &Metrics, mut response: Response, computed: Computed) -> Response {
    metrics.texts(&computed.model).inc_by(computed.texts as u64);
    response.extensions_mut().insert(computed);
    response
}

/// Adds the header with the number of texts, or of pairs, that were truncated.
pub fn with_truncated(mut response: Response, count: usize) -> Response {
    response.headers_mut().insert(TRUNCATED_TEXTS, HeaderValue::from(count));
    response
}
