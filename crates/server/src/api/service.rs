//! Health, metrics and the description of the server.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::State,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use encoder::{SparseEmbedder, TextClassifier};
use serde::Serialize;
use utoipa::ToSchema;

use super::{embedding::hidden_size, tei};
use crate::{
    app::App,
    embedding_model::EmbeddingModel,
    failure::{Failure, Kind, TeiFailures, json_response},
    input::PartialInput,
    model::Model,
};

#[derive(Serialize, ToSchema)]
struct Info {
    /// Name of the first model
    model_id: String,
    model_dtype: &'static str,
    model_type: ModelType,
    max_concurrent_requests: usize,
    max_input_length: usize,
    max_batch_tokens: usize,
    /// Always null: the number of requests per batch is not limited
    max_batch_requests: Option<usize>,
    max_client_batch_size: usize,
    auto_truncate: bool,
    version: &'static str,
    /// All models
    models: Vec<ModelInfo>,
}

/// The task of a model in the form of text-embeddings-inference.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ModelType {
    Embedding {
        dimension: usize,
        /// `splade` for a model of `/embed_sparse`, whatever computes its vectors; otherwise absent
        #[serde(skip_serializing_if = "Option::is_none")]
        pooling: Option<&'static str>,
    },
    Classifier(LabelMaps),
    Reranker(LabelMaps),
    Other {
        task: &'static str,
    },
}

#[derive(Serialize, ToSchema)]
struct LabelMaps {
    id2label: BTreeMap<usize, String>,
    label2id: BTreeMap<String, usize>,
}

impl LabelMaps {
    fn new(labels: &[String]) -> Self {
        let names = labels.iter().cloned().enumerate();
        Self {
            id2label: names.clone().collect(),
            label2id: names.map(|(id, name)| (name, id)).collect(),
        }
    }
}

#[derive(Serialize, ToSchema)]
struct ModelInfo {
    name: String,
    /// `embedding`, `sparse_embedding`, `multi_vector_embedding`, `sequence_classification`,
    /// `token_classification`, `question_answering` or `fill_mask`
    task: &'static str,
    dtype: &'static str,
    /// Width of the hidden states
    hidden_size: usize,
    /// Length of the vectors, for an embedding model
    dimension: Option<usize>,
    max_input_length: usize,
    /// The labels, for a classifier
    labels: Option<Vec<String>>,
    /// Names of the prompts
    prompts: Vec<String>,
    /// When the model was loaded, in seconds since 1970
    created: u64,
}

impl ModelType {
    fn new(model: &Model) -> Self {
        if let Some(dimension) = model.dimension() {
            let is_sparse = model.task_name() == SparseEmbedder::TASK;
            return Self::Embedding { dimension, pooling: is_sparse.then_some("splade") };
        }
        match (model.task().pipeline::<TextClassifier>(), &model.task().labels[..]) {
            (Some(_), [label]) => Self::Reranker(LabelMaps::new(std::slice::from_ref(label))),
            (Some(_), labels) => Self::Classifier(LabelMaps::new(labels)),
            (None, _) => Self::Other { task: model.task_name() },
        }
    }
}

impl ModelInfo {
    fn new(name: &str, model: &Model) -> Self {
        let task = model.task();
        Self {
            name: name.to_string(),
            task: model.task_name(),
            dtype: model.dtype(),
            hidden_size: hidden_size(model),
            dimension: model.dimension(),
            max_input_length: model.max_input_length(),
            labels: (!task.labels.is_empty()).then(|| task.labels.clone()),
            prompts: task.prompts.as_ref().map_or(vec![], |prompts| prompts.names()),
            created: model.created(),
        }
    }
}

/// Describe the server and its models
#[utoipa::path(
    get,
    path = "/info",
    tag = "TEI",
    responses((status = 200, description = "the response", body = Info), TeiFailures)
)]
pub async fn info(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    let all = app.registry.all()?;
    let limits = &app.limits;
    let (name, first) = all[0].clone();
    Ok(json_response(&Info {
        model_id: name,
        model_dtype: first.dtype(),
        model_type: ModelType::new(&first),
        max_concurrent_requests: limits.max_requests,
        max_input_length: first.max_input_length(),
        max_batch_tokens: limits.max_batch_tokens,
        max_batch_requests: None,
        max_client_batch_size: limits.max_texts,
        auto_truncate: true, // the routes of text-embeddings-inference truncate by default
        version: env!("CARGO_PKG_VERSION"),
        models: all.iter().map(|(name, model)| ModelInfo::new(name, model)).collect(),
    }))
}

/// Whether the process runs
#[utoipa::path(
    get,
    path = "/live",
    tag = "Service",
    security(()),
    responses((status = 200, description = "the process runs"), TeiFailures)
)]
pub async fn live() {}

/// Whether the models are loaded and the server answers requests
#[utoipa::path(
    get,
    path = "/health",
    tag = "Service",
    security(()),
    responses((status = 200, description = "the server answers requests"), TeiFailures)
)]
pub async fn health(State(app): State<Arc<App>>) -> Result<(), Failure> {
    app.health()
}

/// Health for Amazon SageMaker: the same as `/health`
#[utoipa::path(
    get,
    path = "/ping",
    tag = "Service",
    security(()),
    responses((status = 200, description = "the server answers requests"), TeiFailures)
)]
pub async fn ping(State(app): State<Arc<App>>) -> Result<(), Failure> {
    app.health()
}

/// Requests of Amazon SageMaker: the same as `POST /`
#[utoipa::path(
    post,
    path = "/invocations",
    tag = "TEI",
    request_body(content = Object, example = json!({"inputs": "A man is eating food."})),
    responses(
        (status = 200, description = "the response", body = Vec<serde_json::Value>),
        TeiFailures,
    )
)]
pub async fn invocations(
    app: State<Arc<App>>,
    request: PartialInput<tei::RouteFields>,
) -> Result<Response, Failure> {
    tei::any(app, request).await
}

/// Metrics in the text format of Prometheus
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "Service",
    security(()),
    responses(
        (status = 200, description = "the response", body = String, content_type = "text/plain"),
        TeiFailures,
    )
)]
pub async fn metrics(State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.metrics.queue_oldest.set(app.engine.oldest_wait().as_secs_f64());
    let text = app.metrics.text().map_err(|error| Failure::new(Kind::Internal, error))?;
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, content_type)], text).into_response())
}
