//! Computes the scores of documents for a query, for all routes that rank, and the logits of texts
//! and pairs.

use std::sync::Arc;

use encoder::{Pipeline, Prompt, TextClassifier, Tokens};

use super::{
    checks::{check_count, check_size},
    embedding::{Options, Outputs, compute, sequence_bytes, sequences},
};
use crate::{
    app::App,
    failure::Failure,
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

/// The model called `name`, which must be a sequence classifier with exactly one label; if `name`
/// is `None`, the first such model.
pub fn find_ranker(
    registry: &Registry,
    name: Option<&str>,
) -> Result<TaskModel<TextClassifier>, Failure> {
    let task = "ranking (sequence classification with one label)";
    registry.find(name, task, |classifier: &TextClassifier| classifier.label_names().len() == 1)
}

/// The relevance of each document to the query: scores, or logits if `raw` is true.
pub async fn score_documents(
    app: &App,
    found: &TaskModel<TextClassifier>,
    query: String,
    documents: Arc<Vec<String>>,
    options: Options,
    raw: bool,
) -> Result<DocumentScores, Failure> {
    check_count(&app.limits, documents.len(), options.field)?;
    let options = Options { name_of: |i| format!("query with text {i}"), ..options };
    check_size("query", &query).map_err(|failure| failure.with_field("query"))?;
    let query_length = query.len(); // the tokens of the query are copied for each document
    let tokenize = move |classifier: &TextClassifier, documents: &[String]| {
        Ok(classifier.tokenize_pairs(&query, documents, Prompt::Default)?)
    };
    let Outputs { values, tokens, truncated, memory } =
        logits(app, found, documents, query_length, options, tokenize).await?;
    let scores = if raw { values } else { found.pipeline.pair_scores(values)? };
    Ok(DocumentScores { scores: scores.concat(), tokens, truncated, memory })
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
