//! The routes: one file per interface.

mod cohere;
mod embedding;
pub(crate) mod fields;
mod nested;
mod openai;
mod ranking;
mod service;
mod tasks;
mod tei;

use std::{sync::LazyLock, time::Instant};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderName, HeaderValue, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::{
    OpenApi,
    openapi::{
        RefOr, Schema,
        schema::ArrayItems,
        security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme},
    },
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    ApiKeys, Models, api_keys,
    failure::{CohereError, Failure, Kind, OpenAiError, TeiError},
    input::{discard, refuse},
    memory::Share,
    metrics::Stage,
    models::MAX_UNBATCHED_BYTES,
    responses::{self, Computed},
    sending::{Elements, json_list, json_object},
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "encodle serve",
        description = "Sentence embeddings, reranking, classification and attention weights, with \
                       the interfaces of OpenAI, text-embeddings-inference, Cohere and Jina."
    ),
    components(schemas(OpenAiError, TeiError, CohereError)),
    tags(
        (name = "OpenAI", description = "The interface of OpenAI's embeddings"),
        (name = "TEI", description = "The interface of text-embeddings-inference"),
        (name = "Rerank", description = "The interface of Cohere's and Jina's rerankers"),
        (name = "Tasks", description = "The tasks of the command `encodle`"),
        (name = "Service", description = "Health, metrics and models"),
    )
)]
struct Document;

/// The routes of `docs/server.md`, for an axum server. [`crate::serve()`] adds API keys, CORS and
/// limits on connections.
///
/// # Examples
/// ```
/// use encoder::{LoadOptions, ModelFiles};
/// use server::{Limits, Model, Models};
///
/// let files = ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?;
/// let model = Model::from_files(&files, None, &LoadOptions::default())?;
/// let models = Models::new(Limits::default())?;
/// models.replace(vec![("minilm".to_string(), model)])?;
/// let app: axum::Router = server::router(models);
/// // tokio: axum::serve(listener, app).await
/// # drop(app);
/// # Ok::<(), server::Error>(())
/// ```
pub fn router(models: Models) -> Router {
    build(models, ApiKeys::default())
}

/// [`router`] with API keys.
pub(crate) fn build(models: Models, api_keys: ApiKeys) -> Router {
    let routes = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(openai::embeddings))
        .routes(routes!(openai::models))
        .routes(routes!(openai::model))
        .routes(routes!(tei::any))
        .routes(routes!(tei::embed))
        .routes(routes!(tei::embed_all))
        .routes(routes!(tei::predict))
        .routes(routes!(tei::rerank))
        .routes(routes!(tei::similarity))
        .routes(routes!(tei::tokenize))
        .routes(routes!(tei::decode))
        .routes(routes!(cohere::rerank_v1))
        .routes(routes!(cohere::rerank_v2))
        .routes(routes!(tasks::classify))
        .routes(routes!(tasks::tag))
        .routes(routes!(tasks::answer_question))
        .routes(routes!(tasks::fill_mask))
        .routes(routes!(tasks::attention))
        .routes(routes!(service::info))
        .routes(routes!(service::live))
        .routes(routes!(service::health))
        .routes(routes!(service::ping))
        .routes(routes!(service::invocations))
        .routes(routes!(service::metrics));
    let (router, mut document) = routes.split_for_parts();
    if !api_keys.is_empty() {
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document.components.get_or_insert_default().add_security_scheme("api_key", bearer);
        document.security = Some(vec![SecurityRequirement::new("api_key", [""; 0])]);
    }
    for (name, schema) in document.components.iter_mut().flat_map(|all| &mut all.schemas) {
        set_min_items(name, schema);
    }
    let document = document.to_json().expect("all keys of the document's maps are strings");
    let document = move || {
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let response = (json, document.clone());
        async { response }
    };
    // If a body were not read, hyper would close the connection, and a client could lose a part of a
    // long response.
    let read_body = from_fn(async |request: Request, next: Next| {
        let (parts, body) = request.into_parts();
        discard(body).await;
        next.run(Request::from_parts(parts, Body::empty())).await
    });
    let pages = Router::new()
        .route("/", get(async || page(&INDEX)))
        .route("/docs", get(async || page(&DOCS)))
        .route("/openapi.json", get(document))
        .route_layer(read_body);
    let refused = |kind, message| {
        async move |request: Request| refuse(Failure::new(kind, message), request).await
    };
    let no_method = refused(Kind::Method, "the route has no such method: see /docs");
    let no_route = refused(Kind::NoRoute, "the route does not exist: see /docs");
    let panicked = |_: Box<dyn std::any::Any + Send>| {
        Failure::new(Kind::Internal, "the request panicked: this is a defect of the server")
            .into_response()
    };
    router
        .merge(pages)
        .method_not_allowed_fallback(no_method)
        .fallback(no_route)
        .layer(from_fn_with_state(api_keys, api_keys::middleware))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(models.clone(), responses::middleware))
        .with_state(models)
}

/// Sets `minItems` of the lists in the variants of an enum, for which utoipa has no attribute. These
/// lists have at least one element, except the lists of token ids that `/decode` takes.
fn set_min_items(name: &str, schema: &mut RefOr<Schema>) {
    let RefOr::T(Schema::OneOf(one_of)) = schema else { return };
    for variant in &mut one_of.items {
        let RefOr::T(Schema::Array(list)) = variant else { continue };
        list.min_items = Some(1);
        if let ArrayItems::RefOrSchema(items) = &mut list.items
            && let RefOr::T(Schema::Array(inner)) = &mut **items
            && name != "Ids"
        {
            inner.min_items = Some(1);
        }
    }
}

static INDEX: LazyLock<String> =
    LazyLock::new(|| with_common_files(include_str!("../pages/index.html")));
static DOCS: LazyLock<String> =
    LazyLock::new(|| with_common_files(include_str!("../pages/docs.html")));

/// Inserts the style and the script that both pages share.
fn with_common_files(html: &str) -> String {
    html.replacen("/* common.css */", include_str!("../pages/common.css"), 1).replacen(
        "/* common.js */",
        include_str!("../pages/common.js"),
        1,
    )
}

/// A page. It may use its own script and style, and the routes of this server.
fn page(html: &'static str) -> Response {
    let policy = HeaderValue::from_static(
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'",
    );
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(html)).into_response()
}

/// A response that is a list. If the list is long, its elements are serialised while they are sent;
/// `memory` is returned when the last is sent.
fn list_response(
    models: &Models,
    elements: Elements,
    memory: Share,
    computed: Computed,
) -> Response {
    let start = Instant::now();
    serialized(models, json_list(elements, memory), computed, start)
}

/// [`list_response`] for a list that is the field `field` of `object`, where it is empty.
fn object_response(
    models: &Models,
    object: &impl Serialize,
    field: &str,
    elements: Elements,
    memory: Share,
    computed: Computed,
) -> Response {
    let start = Instant::now();
    serialized(models, json_object(object, field, elements, memory), computed, start)
}

/// Observes the time since `start`, and counts the response.
fn serialized(models: &Models, json: Response, computed: Computed, start: Instant) -> Response {
    models.metrics().stage(Stage::Serialize).observe(start.elapsed().as_secs_f64());
    counted(models, json, computed)
}

/// The header of responses with the number of texts that were truncated.
pub(crate) const TRUNCATED_TEXTS: HeaderName = HeaderName::from_static("x-truncated-texts");

/// Adds the number of texts to the metrics, and `computed` to the response, for the log.
fn counted(models: &Models, mut response: Response, computed: Computed) -> Response {
    models.metrics().texts(&computed.model).inc_by(computed.texts as u64);
    response.extensions_mut().insert(computed);
    response
}

/// # Errors
/// [`Kind::Empty`] for no texts; [`Kind::TooLarge`] for more than [`crate::Limits::max_texts`].
fn check_count(models: &Models, count: usize, field: &str) -> Result<(), Failure> {
    let max = models.limits().max_texts;
    if count == 0 {
        let message = format!("{field} is empty: expected at least one element");
        return Err(Failure::new(Kind::Empty, message).with_field(field));
    }
    if count > max {
        let message =
            format!("{field} has {count} elements: expected at most {max}; send several requests");
        return Err(Failure::new(Kind::TooLarge, message).with_field(field));
    }
    Ok(())
}

/// # Errors
/// [`Kind::Invalid`] if the field, a number of results, is 0.
fn check_top(field: &str, top: Option<usize>) -> Result<(), Failure> {
    match top {
        Some(0) => Err(Failure::invalid(field, format!("{field} is 0: expected at least 1"))),
        _ => Ok(()),
    }
}

/// Maximum number of values of a response.
const MAX_VALUES: usize = 1 << 24;

/// # Errors
/// [`Kind::TooLarge`] for a response of more than [`MAX_VALUES`] values.
fn check_response(values: usize, field: &str) -> Result<(), Failure> {
    if values > MAX_VALUES {
        let message = format!(
            "the response would have {values} values: expected at most {MAX_VALUES}; send fewer \
             or shorter texts, or lower top if the request has it"
        );
        return Err(Failure::new(Kind::TooLarge, message).with_field(field));
    }
    Ok(())
}

/// # Errors
/// [`Kind::TooLarge`] for a text of more than [`MAX_UNBATCHED_BYTES`]; the message calls it `name`.
fn check_size(name: &str, text: &str) -> Result<(), Failure> {
    match text.len() {
        0..=MAX_UNBATCHED_BYTES => Ok(()),
        got => {
            let message = format!("{name} has {got} bytes: expected at most {MAX_UNBATCHED_BYTES}");
            Err(Failure::new(Kind::TooLarge, message))
        }
    }
}

/// Adds the header with the number of texts, or of pairs, that were truncated.
fn with_truncated(mut response: Response, count: usize) -> Response {
    response.headers_mut().insert(TRUNCATED_TEXTS, HeaderValue::from(count));
    response
}

/// The error for a text that is too long and may not be truncated.
fn too_long(name: &str, got: usize, max: usize) -> Failure {
    let message = format!(
        "{name} has {got} tokens: expected at most {max}; shorten it, leave out truncate: false \
         (routes of text-embeddings-inference), or start the server with --auto-truncate \
         (/v1/embeddings)"
    );
    Failure::new(Kind::TooLarge, message)
}
