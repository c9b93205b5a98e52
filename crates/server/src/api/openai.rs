//! The interface of OpenAI's embeddings.
//!
//! Source: <https://platform.openai.com/docs/api-reference/embeddings>.

use std::sync::Arc;

use axum::{
    extract::{Path, State, rejection::PathRejection},
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    embedding::{self, Options, TextsOrIds},
    fields::optional_choice,
    replies::{object_response, with_truncated},
};
use crate::{
    app::App,
    failure::{Failure, Kind, OpenAiFailures, json_response},
    input::Input,
    model::Model,
    responses::RequestStats,
    sending::elements,
};

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingsRequest {
    /// Name of the model [default: the first embedding model]
    #[serde(default)]
    #[schema(example = "all-MiniLM-L6-v2")]
    model: Option<String>,
    input: TextsOrIds,
    #[serde(default, deserialize_with = "optional_choice")]
    encoding_format: Option<EncodingFormat>,
    /// Truncate the vectors to this many values, and normalise the truncated vectors if the model
    /// normalises
    #[serde(default)]
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    /// Lists of numbers (default)
    Float,
    /// f32 values in little-endian order
    Base64,
}

#[derive(Serialize, ToSchema)]
struct EmbeddingsResponse {
    /// `list`
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: Usage,
}

#[derive(Serialize, ToSchema)]
struct Embedding {
    /// `embedding`
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize, ToSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
}

/// Compute the embeddings of texts
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    tag = "OpenAI",
    request_body(
        content = EmbeddingsRequest,
        example = json!({"model": "all-MiniLM-L6-v2", "input": ["A man is eating food."]}),
    ),
    responses(
        (status = 200, description = "the response", body = EmbeddingsResponse),
        OpenAiFailures,
    )
)]
pub async fn embeddings(
    State(app): State<Arc<App>>,
    request: Input<EmbeddingsRequest>,
) -> Result<Response, Failure> {
    let EmbeddingsRequest { model, input, encoding_format, dimensions } = request.value;
    let found = embedding::find(&app.registry, app.registry.name_unless_single(model.as_deref())?)?;
    let truncate = app.limits.auto_truncate;
    let options = Options { dimensions, truncate, ..Options::new("input") };
    let embedded = embedding::vectors(&app, &found, input, options).await?;
    let tokens = embedded.tokens;
    let vector = move |values: Vec<f32>| match encoding_format {
        Some(EncodingFormat::Base64) => {
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
            Vector::Base64(STANDARD.encode(bytes))
        }
        Some(EncodingFormat::Float) | None => Vector::Float(values),
    };
    let texts = embedded.values.len();
    let data = embedded.values.into_iter().enumerate().map(move |(index, values)| Embedding {
        object: "embedding",
        index,
        embedding: vector(values),
    });
    let usage = Usage { prompt_tokens: tokens, total_tokens: tokens };
    let stats = RequestStats { model: found.name.clone(), texts, tokens };
    let body = EmbeddingsResponse { object: "list", data: vec![], model: found.name, usage };
    let response =
        object_response(&app.metrics, &body, "data", elements(data), embedded.memory, stats);
    Ok(with_truncated(response, embedded.truncated))
}

#[derive(Serialize, ToSchema)]
struct ModelList {
    /// `list`
    object: &'static str,
    data: Vec<ModelObject>,
}

#[derive(Serialize, ToSchema)]
struct ModelObject {
    id: String,
    /// `model`
    object: &'static str,
    /// When the model was loaded, in seconds since 1970
    created: u64,
    owned_by: &'static str,
}

impl ModelObject {
    fn new(name: &str, model: &Model) -> Self {
        let id = name.to_string();
        Self { id, object: "model", created: model.created(), owned_by: "encodle" }
    }
}

/// List the models
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "OpenAI",
    responses((status = 200, description = "the response", body = ModelList), OpenAiFailures)
)]
pub async fn models(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let all = app.registry.all()?;
    let data = all.iter().map(|(name, model)| ModelObject::new(name, model)).collect();
    Ok(json_response(&ModelList { object: "list", data }))
}

/// Describe a model
#[utoipa::path(
    get,
    path = "/v1/models/{model}",
    tag = "OpenAI",
    params(("model" = String, Path, description = "Name of the model")),
    responses((status = 200, description = "the response", body = ModelObject), OpenAiFailures)
)]
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Failure> {
    let Path(name) = name.map_err(|error| Failure::new(Kind::Invalid, error.body_text()))?;
    let (name, model) = app.registry.get(Some(&name))?;
    Ok(json_response(&ModelObject::new(&name, &model)).into_response())
}
