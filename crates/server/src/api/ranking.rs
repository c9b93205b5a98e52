//! Computes the scores of documents for a query, for all routes that rank, and the logits of texts
//! and pairs.

use std::sync::Arc;

use encoder::{MultiVectorEmbedder, Pipeline, Prompt, TextClassifier, TextRole, Tokens};
use tokio::task::spawn_blocking;

use super::{
    checks::{check_count, check_size},
    embedding::{
        MultiVectorTexts, Options, Outputs, TextsOrIds, compute, sequence_bytes, sequences,
    },
};
use crate::{
    app::App,
    engine::token_count,
    failure::{Failure, Kind},
    memory::MemoryReservation,
    registry::{Registry, TaskModel},
    tokenizer_pool::Text,
};

/// The score of each document, in the order of the request, the number of tokens, and the number of
/// documents that were truncated, or whose query was.
pub struct DocumentScores {
    pub scores: Vec<f32>,
    pub tokens: usize,
    pub truncated: usize,
    pub memory: MemoryReservation,
}

/// The sequence classifier called `name`, or the first one if `name` is `None`.
pub fn find(registry: &Registry, name: Option<&str>) -> Result<TaskModel<TextClassifier>, Failure> {
    registry.find(name, TextClassifier::TASK, |_| true)
}

/// A model that ranks documents.
pub enum Ranker {
    CrossEncoder(TaskModel<TextClassifier>),
    MultiVector(TaskModel<MultiVectorEmbedder>),
}

impl Ranker {
    pub fn name(&self) -> &str {
        match self {
            Self::CrossEncoder(found) => &found.name,
            Self::MultiVector(found) => &found.name,
        }
    }

    pub fn into_name(self) -> String {
        match self {
            Self::CrossEncoder(found) => found.name,
            Self::MultiVector(found) => found.name,
        }
    }

    /// The truncated texts, as the subject of a sentence, and their maximum number of tokens.
    pub fn truncation(&self) -> (&'static str, usize) {
        match self {
            Self::CrossEncoder(found) => {
                ("the query and a document together are", found.model.max_input_length())
            }
            Self::MultiVector(found) => {
                ("documents are", found.pipeline.max_seq_length(TextRole::Document))
            }
        }
    }
}

/// The model called `name`, which must be a sequence classifier with exactly one label or a
/// multi-vector model; if `name` is `None`, the first such classifier, otherwise the first
/// multi-vector model.
pub fn find_ranker(registry: &Registry, name: Option<&str>) -> Result<Ranker, Failure> {
    let task = "ranking (sequence classification with one label, or a vector per token)";
    let has_one_label = |classifier: &TextClassifier| classifier.label_names().len() == 1;
    match registry.find(name, task, has_one_label) {
        Ok(found) => Ok(Ranker::CrossEncoder(found)),
        Err(failure) => {
            let found = registry.find(name, task, |_| true).map_err(|_| failure)?;
            Ok(Ranker::MultiVector(found))
        }
    }
}

/// The relevance of each document to the query: scores, or logits if `raw` is true and the model
/// has logits.
pub async fn score_documents(
    app: &App,
    ranker: &Ranker,
    query: String,
    documents: Arc<Vec<String>>,
    options: Options,
    raw: bool,
) -> Result<DocumentScores, Failure> {
    check_count(&app.limits, documents.len(), options.field)?;
    check_size("query", &query).map_err(|failure| failure.with_field("query"))?;
    let found = match ranker {
        Ranker::CrossEncoder(found) => found,
        Ranker::MultiVector(found) => {
            return max_sims(app, found, query, documents, options).await;
        }
    };
    let options = Options { name_of: |i| format!("query with text {i}"), ..options };
    let query_length = query.len(); // the tokens of the query are copied for each document
    let tokenize = move |classifier: &TextClassifier, documents: &[String]| {
        Ok(classifier.tokenize_pairs(&query, documents, Prompt::Default)?)
    };
    let Outputs { values, tokens, truncated, memory } =
        logits(app, found, documents, query_length, options, tokenize).await?;
    let scores = if raw { values } else { found.pipeline.pair_scores(values)? };
    Ok(DocumentScores { scores: scores.concat(), tokens, truncated, memory })
}

/// The scores of a multi-vector model.
async fn max_sims(
    app: &App,
    found: &TaskModel<MultiVectorEmbedder>,
    query: String,
    documents: Arc<Vec<String>>,
    options: Options,
) -> Result<DocumentScores, Failure> {
    let of_query = Options {
        field: "query",
        name_of: |_| "query".to_string(),
        prompt_name: Some("query".to_string()),
        ..options.clone()
    };
    let options = Options { prompt_name: Some("document".to_string()), ..options };
    let (query, field) = (TextsOrIds::Text(query), options.field);
    let query = MultiVectorTexts::new(app, &found.pipeline, query, of_query).await?;
    let documents = TextsOrIds::Texts(Arc::unwrap_or_clone(documents));
    let documents = MultiVectorTexts::new(app, &found.pipeline, documents, options).await?;
    // Memory for both at once: a request that holds some does not wait for more.
    let values = query.values + documents.values;
    let memory = app.memory.reserve(size_of::<f32>() * values, field).await?;
    let query_tokens = token_count(&query.sequences);
    let query_truncated = usize::from(query.sequences[0].tokens.truncated > 0);
    let query = app.engine.compute(query.target(found), query.sequences).await?;
    let target = documents.target(found);
    let documents = compute(&app.engine, target, documents.sequences, memory).await?;
    let (similarity, vectors) = (found.pipeline.similarity(), documents.values);
    let scores = move || similarity.scores(&query[0], &vectors);
    let scores = spawn_blocking(scores).await.map_err(|_| {
        let message = "the computation of the scores panicked: this is a defect of the server";
        Failure::new(Kind::Internal, message)
    })??;
    Ok(DocumentScores {
        scores,
        tokens: query_tokens + documents.tokens,
        truncated: query_truncated + documents.truncated,
        memory: documents.memory,
    })
}

/// The logits of texts or pairs. `extra_bytes` more bytes are tokenized with each.
pub async fn logits<I: Text>(
    app: &App,
    found: &TaskModel<TextClassifier>,
    texts: Arc<Vec<I>>,
    extra_bytes: usize,
    options: Options,
    tokenize: impl Fn(&TextClassifier, &[I]) -> Result<Vec<Tokens>, Failure> + Send + Sync + 'static,
) -> Result<Outputs<Vec<f32>>, Failure> {
    let Options { truncate, truncation_direction, name_of, field, .. } = options;
    let classifier = match truncation_direction {
        None => found.pipeline.clone(),
        Some(side) => {
            let classifier = TextClassifier::clone(&found.pipeline);
            Arc::new(classifier.with_truncation_side(side.into()))
        }
    };
    let tokenize = move |texts: &[I]| tokenize(&classifier, texts);
    let tokenizer = found.pipeline.tokenizer();
    let values = texts.len() * found.pipeline.labels().names().len();
    let lengths = texts.iter().map(|text| text.bytes() + extra_bytes);
    let bytes = sequence_bytes(tokenizer, lengths) + 4 * values;
    let memory = app.memory.reserve(bytes, field).await?;
    let tokens =
        app.tokenizer_pool.tokenize(tokenizer, texts, extra_bytes, name_of, tokenize).await?;
    let without_prompt = tokens.into_iter().map(|tokens| (tokens, 0)).collect();
    let sequences = sequences(without_prompt, truncate, name_of)?;
    compute(
        &app.engine,
        found.model.values(found.pipeline.clone(), Arc::default()),
        sequences,
        memory,
    )
    .await
}

/// The indices of `scores`, by descending score. The indices of equal scores keep their order.
pub fn descending(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order
}
