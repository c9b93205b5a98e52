//! The routes: one file per interface.

mod attention;
mod checks;
mod cohere;
mod embedding;
pub(crate) mod fields;
mod jina;
mod nested;
mod openai;
mod ranking;
pub(crate) mod replies;
mod service;
mod tasks;
mod tei;

use std::sync::{Arc, LazyLock};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderValue, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{Html, IntoResponse, Response},
    routing::get,
};
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
    app::App,
    failure::{CohereError, Failure, Kind, OpenAiError, TeiError},
    input::{discard_body, with_body_discarded},
    responses,
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
        (name = "Jina", description = "The interface of Jina's multi-vector embeddings"),
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
    build(models.0, ApiKeys::default())
}

/// [`router`] with API keys.
pub(crate) fn build(app: Arc<App>, api_keys: ApiKeys) -> Router {
    let routes = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(openai::embeddings))
        .routes(routes!(openai::models))
        .routes(routes!(openai::model))
        .routes(routes!(tei::any))
        .routes(routes!(tei::embed))
        .routes(routes!(tei::embed_sparse))
        .routes(routes!(tei::embed_all))
        .routes(routes!(tei::predict))
        .routes(routes!(tei::rerank))
        .routes(routes!(tei::similarity))
        .routes(routes!(tei::tokenize))
        .routes(routes!(tei::decode))
        .routes(routes!(jina::multi_vector))
        .routes(routes!(cohere::rerank_v1))
        .routes(routes!(cohere::rerank_v2))
        .routes(routes!(attention::attention))
        .routes(routes!(service::info))
        .routes(routes!(service::live))
        .routes(routes!(service::health))
        .routes(routes!(service::ping))
        .routes(routes!(service::invocations))
        .routes(routes!(service::metrics));
    let (router, mut document) = tasks::add_routes(routes).split_for_parts();
    if !api_keys.is_empty() {
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document.components.get_or_insert_default().add_security_scheme("api_key", bearer);
        document.security = Some(vec![SecurityRequirement::new("api_key", [""; 0])]);
    }
    for (name, schema) in document.components.iter_mut().flat_map(|all| &mut all.schemas) {
        set_min_items(name, schema);
    }
    let document_json = document.to_json().expect("all keys of the document's maps are strings");
    let document_route = move || {
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let response = (json, document_json.clone());
        async { response }
    };
    // If a body were not read, hyper would close the connection, and a client could lose a part of
    // a long response.
    let read_body = from_fn(async |request: Request, next: Next| {
        let (parts, body) = request.into_parts();
        discard_body(body).await;
        next.run(Request::from_parts(parts, Body::empty())).await
    });
    let pages = Router::new()
        .route("/", get(async || page(&INDEX)))
        .route("/docs", get(async || page(&DOCS)))
        .route("/openapi.json", get(document_route))
        .route_layer(read_body);
    let failing = |kind, message| {
        async move |request: Request| {
            with_body_discarded(Failure::new(kind, message), request).await
        }
    };
    let no_method = failing(Kind::Method, "the route has no such method: see /docs");
    let no_route = failing(Kind::NoRoute, "the route does not exist: see /docs");
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
        .layer(from_fn_with_state(app.clone(), responses::middleware))
        .with_state(app)
}

/// Sets `minItems` of the lists in the variants of an enum, for which utoipa has no attribute.
/// These lists have at least one element, except the lists of token ids that `/decode` takes.
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
