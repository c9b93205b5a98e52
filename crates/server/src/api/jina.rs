//! The interface of Jina's multi-vector embeddings.
//!
//! Source: <https://jina.ai/news/jina-colbert-v2-multilingual-late-interaction-retriever-for-embedding-and-reranking>.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use encoder::{Embed, MultiVector, MultiVectorEmbedder};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    embedding::{self, Options, Texts, TextsOrIds},
    fields::optional_choice,
    openai::Usage,
    replies::{object_response, with_truncated},
};
use crate::{
    app::App,
    failure::{Failure, OpenAiFailures},
    input::Input,
    responses::RequestStats,
    sending::elements,
};

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MultiVectorRequest {
    /// Name of the model [default: the first multi-vector model]
    #[serde(default)]
    model: Option<String>,
    input: Texts,
    /// Whether the texts are queries or documents [default: document]
    #[serde(default, deserialize_with = "optional_choice")]
    input_type: Option<InputType>,
    #[serde(default, rename = "embedding_type", deserialize_with = "optional_choice")]
    _embedding_type: Option<EmbeddingType>,
    /// Must be the length of the model's vectors
    #[serde(default)]
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
enum InputType {
    Query,
    Document,
}

#[derive(Clone, Copy, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
enum EmbeddingType {
    /// Lists of numbers
    Float,
}

#[derive(Serialize, ToSchema)]
struct MultiVectorResponse {
    /// `list`
    object: &'static str,
    data: Vec<TextVectors>,
    model: String,
    usage: Usage,
}

#[derive(Serialize, ToSchema)]
struct TextVectors {
    /// `embeddings`
    object: &'static str,
    index: usize,
    /// A vector per token
    #[schema(value_type = Vec<Vec<f32>>)]
    embeddings: MultiVector,
}

/// Compute a vector per token of texts
#[utoipa::path(
    post,
    path = "/v1/multi-vector",
    tag = "Jina",
    request_body(
        content = MultiVectorRequest,
        example = json!({"input": ["A man is eating food."], "input_type": "document"}),
    ),
    responses(
        (status = 200, description = "the response", body = MultiVectorResponse),
        OpenAiFailures,
    )
)]
pub async fn multi_vector(
    State(app): State<Arc<App>>,
    request: Input<MultiVectorRequest>,
) -> Result<Response, Failure> {
    let MultiVectorRequest { model, input, input_type, dimensions, .. } = request.value;
    let name = app.registry.name_unless_single(model.as_deref())?;
    let found = embedding::find::<MultiVectorEmbedder>(&app.registry, name)?;
    let expected = found.pipeline.dimension();
    if let Some(got) = dimensions.filter(|&got| got != expected) {
        let message = format!(
            "dimensions is {got}: expected {expected}, the length of the model's vectors, which are \
             not truncated"
        );
        return Err(Failure::invalid("dimensions", message));
    }
    let input = match input {
        Texts::Text(text) => TextsOrIds::Text(text),
        Texts::Texts(texts) => TextsOrIds::Texts(texts),
    };
    let role = match input_type {
        Some(InputType::Query) => "query",
        Some(InputType::Document) | None => "document",
    };
    let options = Options { prompt_name: Some(role.to_string()), ..Options::new("input") };
    let embedded = embedding::multi_vectors(&app, &found, input, options).await?;
    let (texts, tokens) = (embedded.values.len(), embedded.tokens);
    let data = embedded.values.into_iter().enumerate();
    let data =
        data.map(|(index, embeddings)| TextVectors { object: "embeddings", index, embeddings });
    let usage = Usage { prompt_tokens: tokens, total_tokens: tokens };
    let stats = RequestStats { model: found.name.clone(), texts, tokens };
    let body = MultiVectorResponse { object: "list", data: vec![], model: found.name, usage };
    let response =
        object_response(&app.metrics, &body, "data", elements(data), embedded.memory, stats);
    Ok(with_truncated(response, embedded.truncated))
}
