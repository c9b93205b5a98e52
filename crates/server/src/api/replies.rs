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
    responses::RequestStats,
    sending::{Elements, json_list, json_object},
};

/// A response that is a list. If the list is long, its elements are serialised while they are sent;
/// `memory` is returned when the last is sent.
pub fn list_response(
    metrics: &Metrics,
    elements: Elements,
    memory: MemoryReservation,
    stats: RequestStats,
) -> Response {
    with_stats(metrics, timed(metrics, || json_list(elements, memory)), stats)
}

/// [`list_response`] for a list that is the field `field` of `object`, where it is empty.
pub fn object_response(
    metrics: &Metrics,
    object: &impl Serialize,
    field: &str,
    elements: Elements,
    memory: MemoryReservation,
    stats: RequestStats,
) -> Response {
    let serialize = || json_object(object, field, elements, memory);
    with_stats(metrics, timed(metrics, serialize), stats)
}

/// Calls `serialize`, and observes how long it takes.
fn timed(metrics: &Metrics, serialize: impl FnOnce() -> Response) -> Response {
    let start = Instant::now();
    let response = serialize();
    metrics.stage(Stage::Serialize).observe(start.elapsed().as_secs_f64());
    response
}

/// The header of responses with the number of texts that were truncated.
pub const TRUNCATED_TEXTS: HeaderName = HeaderName::from_static("x-truncated-texts");

/// Adds the number of texts to the metrics, and `stats` to the response, for the log.
pub fn with_stats(metrics: &Metrics, mut response: Response, stats: RequestStats) -> Response {
    metrics.texts(&stats.model).inc_by(stats.texts as u64);
    response.extensions_mut().insert(stats);
    response
}

/// Adds the header with the number of texts, or of pairs, that were truncated.
pub fn with_truncated(mut response: Response, count: usize) -> Response {
    response.headers_mut().insert(TRUNCATED_TEXTS, HeaderValue::from(count));
    response
}
