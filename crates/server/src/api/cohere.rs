//! The interface of Cohere's and Jina's rerankers.
//!
//! Source: <https://docs.cohere.com/reference/rerank>, <https://jina.ai/reranker>.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use serde::{Deserialize, Serialize, de::IgnoredAny};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{
    checks::{check_absent, check_top},
    embedding::Options,
    fields::{optional_choice, optional_object},
    nested::{TextOrObject, list},
    ranking::{self, DocumentScores, descending},
    replies::{object_response, with_truncated},
};
use crate::{
    app::App,
    failure::{CohereFailures, Failure},
    input::Input,
    responses::RequestStats,
    sending::elements,
};

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RerankRequest {
    /// Name of the model [default: the first model that ranks]
    #[serde(default)]
    model: Option<String>,
    #[schema(example = "something to eat")]
    query: String,
    #[schema(min_items = 1)]
    #[serde(deserialize_with = "list")]
    documents: Vec<Document>,
    /// Number of results [default: all]
    #[serde(default)]
    #[schema(minimum = 1)]
    top_n: Option<usize>,
    /// Whether the results contain the documents
    #[serde(default)]
    return_documents: Option<bool>,
    /// Must be at least the model's maximum length, to which the query and a document together are
    /// truncated
    #[serde(default)]
    #[schema(minimum = 1)]
    max_tokens_per_doc: Option<usize>,
    /// Only 1 is accepted: documents are truncated and not split
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1)]
    max_chunks_per_doc: Option<usize>,
    /// Not supported: documents have one field, `text`
    #[serde(default)]
    #[schema(value_type = Option<Vec<String>>)]
    rank_fields: Option<IgnoredAny>,
    /// Not supported: the mode must be `disabled`
    #[serde(default, rename = "relevant_spans", deserialize_with = "optional_object")]
    _relevant_spans: Option<RelevantSpans>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RelevantSpans {
    #[serde(default, rename = "mode", deserialize_with = "optional_choice")]
    _mode: Option<SpansMode>,
    #[serde(default, rename = "threshold")]
    _threshold: Option<f64>,
    #[serde(default, rename = "max_spans")]
    _max_spans: Option<usize>,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum SpansMode {
    Disabled,
}

#[derive(Deserialize, ToSchema)]
#[serde(untagged, try_from = "TextOrObject<DocumentText>")]
enum Document {
    Text(String),
    Object(DocumentText),
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct DocumentText {
    text: String,
}

impl From<TextOrObject<DocumentText>> for Document {
    fn from(value: TextOrObject<DocumentText>) -> Self {
        match value {
            TextOrObject::Text(text) => Self::Text(text),
            TextOrObject::Object(object) => Self::Object(object),
        }
    }
}

impl Document {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object(DocumentText { text }) => text,
        }
    }
}

#[derive(Serialize, ToSchema)]
struct RerankResponse {
    id: String,
    model: String,
    /// In descending order of relevance
    results: Vec<RankedDocument>,
    usage: RerankUsage,
    meta: Meta,
}

#[derive(Serialize, ToSchema)]
struct RankedDocument {
    /// The document's index in the request
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<TextObject>,
}

#[derive(Serialize, ToSchema)]
struct TextObject {
    text: String,
}

#[derive(Serialize, ToSchema)]
struct RerankUsage {
    total_tokens: usize,
}

#[derive(Serialize, ToSchema)]
struct Meta {
    api_version: ApiVersion,
    billed_units: BilledUnits,
}

#[derive(Serialize, ToSchema)]
struct ApiVersion {
    version: &'static str,
}

#[derive(Serialize, ToSchema)]
struct BilledUnits {
    search_units: usize,
}

/// Rank documents by relevance to a query
#[utoipa::path(
    post,
    path = "/v1/rerank",
    tag = "Rerank",
    request_body(
        content = RerankRequest,
        example = json!({"query": "something to eat", "documents": ["A man eats.", "It snows."]}),
    ),
    responses((status = 200, description = "the response", body = RerankResponse), CohereFailures)
)]
pub async fn rerank_v1(
    State(app): State<Arc<App>>,
    request: Input<RerankRequest>,
) -> Result<Response, Failure> {
    rerank(&app, request, "1").await
}

/// Rank documents by relevance to a query
#[utoipa::path(
    post,
    path = "/v2/rerank",
    tag = "Rerank",
    request_body(
        content = RerankRequest,
        example = json!({"query": "something to eat", "documents": ["A man eats.", "It snows."]}),
    ),
    responses((status = 200, description = "the response", body = RerankResponse), CohereFailures)
)]
pub async fn rerank_v2(
    State(app): State<Arc<App>>,
    request: Input<RerankRequest>,
) -> Result<Response, Failure> {
    rerank(&app, request, "2").await
}

async fn rerank(
    app: &App,
    request: Input<RerankRequest>,
    version: &'static str,
) -> Result<Response, Failure> {
    let RerankRequest {
        model,
        query,
        documents,
        top_n,
        return_documents,
        max_tokens_per_doc,
        max_chunks_per_doc,
        rank_fields,
        ..
    } = request.value;
    let found =
        ranking::find_ranker(&app.registry, app.registry.name_unless_single(model.as_deref())?)?;
    let (truncated, max) = found.truncation();
    if let Some(got) = max_tokens_per_doc.filter(|&tokens| tokens < max) {
        let message = format!(
            "max_tokens_per_doc is {got}: expected at least {max}, because {truncated} truncated \
             to {max} tokens"
        );
        return Err(Failure::invalid("max_tokens_per_doc", message));
    }
    if let Some(got) = max_chunks_per_doc.filter(|&chunks| chunks != 1) {
        let message =
            format!("max_chunks_per_doc is {got}: expected 1, because documents are not split");
        return Err(Failure::invalid("max_chunks_per_doc", message));
    }
    check_absent("rank_fields", rank_fields, "expected documents with one field, text")?;
    check_top("top_n", top_n)?;
    let documents: Vec<String> = documents.into_iter().map(Document::into_text).collect();
    let documents = Arc::new(documents);
    let returned = (return_documents == Some(true)).then(|| documents.clone());
    let texts = documents.len();
    let options = Options::new("documents");
    let scored = ranking::score_documents(app, &found, query, documents, options, false).await?;
    let DocumentScores { scores, tokens, truncated, memory } = scored;
    let best = descending(&scores).into_iter().take(top_n.unwrap_or(texts));
    let results = best.map(move |index| RankedDocument {
        index,
        relevance_score: scores[index],
        document: returned.as_ref().map(|all| TextObject { text: all[index].clone() }),
    });
    let body = RerankResponse {
        id: Uuid::new_v4().to_string(),
        model: found.name().to_string(),
        results: vec![],
        usage: RerankUsage { total_tokens: tokens },
        meta: Meta {
            api_version: ApiVersion { version },
            billed_units: BilledUnits { search_units: 1 },
        },
    };
    let stats = RequestStats { model: found.into_name(), texts, tokens };
    let results = elements(results);
    let memory = memory.with_body(request.bytes); // the response may contain the documents
    let response = object_response(&app.metrics, &body, "results", results, memory, stats);
    Ok(with_truncated(response, truncated))
}
