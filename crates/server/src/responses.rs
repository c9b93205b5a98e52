//! Middleware of all routes: the request id, the time limit, the format of errors, metrics and the
//! log.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tracing::{Instrument, Span};
use uuid::Uuid;

use crate::{
    admission::PermitSlot,
    app::App,
    failure::{Failure, Interface, Kind},
    input::with_body_discarded,
    request_model::MODEL,
    sending::in_parts,
};

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Maximum length of a request id that a client chooses.
const MAX_REQUEST_ID: usize = 128;
/// The status of a request whose client has left, in the log and the metrics, as in nginx.
const CLIENT_CLOSED: u16 = 499;
/// Value of the label `route` for paths that match no route.
const OTHER: &str = "other";

/// The model of a request, and the numbers of its texts and tokens. The handler adds this value to
/// the response as an extension, and the middleware logs it.
#[derive(Clone, Debug)]
pub struct RequestStats {
    pub model: String,
    pub texts: usize,
    pub tokens: usize,
}

fn model_of(model: &OnceLock<String>) -> &str {
    model.get().map_or("", String::as_str)
}

/// A request in progress. Dropping the guard decrements the metric of requests in progress. If the
/// request has no response by then, because the client has left or the server ends, the guard
/// counts and logs the request with status [`CLIENT_CLOSED`].
struct RequestInProgress<'a> {
    app: &'a App,
    route: &'a str,
    model: &'a OnceLock<String>,
    span: &'a Span,
    start: Instant,
    has_response: bool,
}

impl Drop for RequestInProgress<'_> {
    fn drop(&mut self) {
        self.app.metrics.in_progress.dec();
        if !self.has_response {
            let seconds = self.start.elapsed().as_secs_f64();
            self.app.metrics.ended(self.route, model_of(self.model), CLIENT_CLOSED, seconds, None);
            let _entered = self.span.enter();
            let reason = if self.app.is_stopping() {
                "the server ended before the response"
            } else {
                "the client closed the connection"
            };
            tracing::warn!(status = CLIENT_CLOSED, seconds, reason, "no response");
        }
    }
}

/// The middleware around all routes.
pub async fn middleware(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let metrics = &app.metrics;
    let interface = Interface::from_path(request.uri().path());
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or(OTHER, MatchedPath::as_str).to_string();
    let id = request_id(&request);
    let span = request_span(&id, request.method(), request.uri());
    #[cfg(feature = "otel")]
    crate::traces::continue_trace(&span, request.headers());
    metrics.in_progress.inc();
    let model = Arc::new(OnceLock::new());
    let mut in_progress = RequestInProgress {
        app: &app,
        route: &route,
        model: &model,
        span: &span,
        start,
        has_response: false,
    };
    let permit = PermitSlot::default();
    request.extensions_mut().insert(permit.clone());
    let timeout = app.limits.timeout;
    let answer = MODEL.scope(model.clone(), async {
        // `serve` has checked the header.
        match request.extensions_mut().remove::<Failure>() {
            None => next.run(request).await,
            Some(failure) => with_body_discarded(failure, request).await.into_response(),
        }
    });
    let result = tokio::time::timeout(timeout, answer).instrument(span.clone()).await;
    let mut response = result.unwrap_or_else(|_| {
        let seconds = timeout.as_secs_f64();
        let message = format!("the request was not received or answered within {seconds} s");
        Failure::new(Kind::Timeout, message).with_body_read(false).into_response()
    });
    in_progress.has_response = true;
    let failure = response.extensions_mut().remove::<Failure>();
    response = match &failure {
        Some(failure) => failure.response(interface),
        None => in_parts(response, permit, timeout, &span),
    };
    response.headers_mut().insert(REQUEST_ID, id);
    if app.is_stopping() || failure.as_ref().is_some_and(Failure::closes) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let seconds = start.elapsed().as_secs_f64();
    let status = response.status().as_u16();
    let kind = failure.as_ref().map(Failure::kind);
    metrics.ended(&route, model_of(&model), status, seconds, kind);
    let stats = response.extensions_mut().remove::<RequestStats>();
    let _entered = span.enter();
    match (failure, stats) {
        // Health probes are frequent and fail with this kind until the models are loaded.
        (Some(failure), _) if failure.kind() == Kind::Unavailable => {
            tracing::debug!(status, seconds, reason = failure.message(), "unavailable");
        }
        (Some(failure), _) => {
            let hides = failure.may_have_text() && !app.limits.log_texts;
            let reason = (!hides).then(|| failure.message());
            tracing::warn!(status, seconds, kind = failure.kind().name(), reason, "failed");
        }
        (None, Some(RequestStats { model, texts, tokens })) => {
            tracing::info!(status, seconds, model, texts, tokens, "answered");
        }
        (None, None) => tracing::debug!(status, seconds, "answered"),
    }
    response
}

/// The span of a request, for the log. No level of `RUST_LOG` filters out an error-level span.
pub fn request_span(id: &HeaderValue, method: &Method, uri: &Uri) -> Span {
    tracing::error_span!(
        "request",
        id = id.to_str().unwrap_or_default(),
        %method,
        path = uri.path()
    )
}

/// The value of the request's header `x-request-id`, or a new id.
fn request_id(request: &Request) -> HeaderValue {
    let is_valid =
        |id: &&HeaderValue| (1..=MAX_REQUEST_ID).contains(&id.len()) && id.to_str().is_ok();
    request.headers().get(&REQUEST_ID).filter(is_valid).cloned().unwrap_or_else(|| {
        let id = Uuid::new_v4().to_string();
        HeaderValue::from_str(&id).expect("hexadecimal digits and hyphens")
    })
}
