//! The interface of text-embeddings-inference.
//!
//! Source: <https://huggingface.github.io/text-embeddings-inference/>.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{extract::State, response::Response};
use encoder::{
    Embedder, LogitActivation, MultiVector, MultiVectorEmbedder, Piece, Pipeline, Prompt,
    SparseEmbedder, SparseVector, TextClassifier, TextTokenizer, Tokens,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    checks::{check_count, check_response, check_top, text_name},
    embedding::{self, Direction, Options, Outputs, Texts, TextsOrIds},
    fields::{object, optional_choice, optional_object},
    nested::{Nested, list},
    ranking::{self, DocumentScores, descending},
    replies::{list_response, with_truncated},
};
use crate::{
    app::App,
    embedding_model::EmbeddingModel,
    failure::{Failure, Kind, TeiFailures},
    input::{FieldType, Input, PartialInput},
    model::Task,
    registry::TaskModel,
    responses::RequestStats,
    sending::{elements, nested_elements},
};

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbedRequest {
    /// Name of the model [default: the first embedding model]
    #[serde(default)]
    model: Option<String>,
    inputs: TextsOrIds,
    /// Truncate texts that are longer than the model's maximum length, instead of refusing them
    /// [default: true]
    #[serde(default)]
    truncate: Option<bool>,
    /// Side on which long texts are truncated [default: that of the model's files]
    #[serde(default, deserialize_with = "optional_choice")]
    truncation_direction: Option<Direction>,
    /// Name of the model's prompt to put before each text
    #[serde(default)]
    prompt_name: Option<String>,
    /// Scale the vectors to length 1 [default: true]
    #[serde(default)]
    normalize: Option<bool>,
    /// Truncate the vectors to their first values
    #[serde(default)]
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
    /// Format of the vectors: lists of numbers
    #[serde(default, rename = "encoding_format", deserialize_with = "optional_choice")]
    _encoding_format: Option<OnlyFloat>,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum OnlyFloat {
    Float,
}

/// Compute the embeddings of texts
#[utoipa::path(
    post,
    path = "/embed",
    tag = "TEI",
    request_body(content = EmbedRequest, example = json!({"inputs": ["A man is eating food."]})),
    responses((status = 200, description = "the response", body = Vec<Vec<f32>>), TeiFailures)
)]
pub async fn embed(
    State(app): State<Arc<App>>,
    request: Input<EmbedRequest>,
) -> Result<Response, Failure> {
    let EmbedRequest {
        model,
        inputs,
        truncate,
        truncation_direction,
        prompt_name,
        normalize,
        dimensions,
        ..
    } = request.value;
    let found = embedding::find(&app.registry, model.as_deref())?;
    let normalize = Some(normalize.unwrap_or(true));
    let options = Options {
        truncate: truncate.unwrap_or(true),
        truncation_direction,
        prompt_name,
        normalize,
        dimensions,
        ..Options::new("inputs")
    };
    let embedded = embedding::vectors(&app, &found, inputs, options).await?;
    let texts = embedded.values.len();
    let stats = RequestStats { model: found.name, texts, tokens: embedded.tokens };
    let vectors = elements(embedded.values.into_iter());
    let response = list_response(&app.metrics, vectors, embedded.memory, stats);
    Ok(with_truncated(response, embedded.truncated))
}

/// The request of a route that returns the rows of texts without changes.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbedRowsRequest {
    /// Name of the model [default: the first model for the route]
    #[serde(default)]
    model: Option<String>,
    inputs: TextsOrIds,
    /// Truncate texts that are longer than the model's maximum length, instead of refusing them
    /// [default: true]
    #[serde(default)]
    truncate: Option<bool>,
    /// Side on which long texts are truncated [default: that of the model's files]
    #[serde(default, deserialize_with = "optional_choice")]
    truncation_direction: Option<Direction>,
    /// Name of the model's prompt to put before each text
    #[serde(default)]
    prompt_name: Option<String>,
}

impl EmbedRowsRequest {
    /// The name of the model, the texts, and how to treat them.
    fn into_parts(self) -> (Option<String>, TextsOrIds, Options) {
        let Self { model, inputs, truncate, truncation_direction, prompt_name } = self;
        let truncate = truncate.unwrap_or(true);
        let options =
            Options { truncate, truncation_direction, prompt_name, ..Options::new("inputs") };
        (model, inputs, options)
    }
}

/// A value of a sparse vector that is not 0.
#[derive(Serialize, ToSchema)]
struct SparseValue {
    /// The dimension, which is a token id in most models
    index: u32,
    value: f32,
}

/// Compute the sparse embeddings of texts
#[utoipa::path(
    post,
    path = "/embed_sparse",
    tag = "TEI",
    request_body(content = EmbedRowsRequest, example = json!({"inputs": ["A man is eating food."]})),
    responses(
        (status = 200, description = "the response", body = Vec<Vec<SparseValue>>),
        TeiFailures,
    )
)]
pub async fn embed_sparse(
    State(app): State<Arc<App>>,
    request: Input<EmbedRowsRequest>,
) -> Result<Response, Failure> {
    let (model, inputs, options) = request.value.into_parts();
    let found = embedding::find(&app.registry, model.as_deref())?;
    let embedded = embedding::sparse_vectors(&app, &found, inputs, options).await?;
    let texts = embedded.values.len();
    let stats = RequestStats { model: found.name, texts, tokens: embedded.tokens };
    let lists = embedded.values.into_iter().map(|SparseVector { indices, values, .. }| {
        let pairs = indices.into_iter().zip(values);
        pairs.map(|(index, value)| SparseValue { index, value })
    });
    let response = list_response(&app.metrics, nested_elements(lists), embedded.memory, stats);
    Ok(with_truncated(response, embedded.truncated))
}

/// Compute the vectors of the tokens of texts, texts × tokens × width: the last hidden states of an
/// embedding model, the vectors of a multi-vector model
#[utoipa::path(
    post,
    path = "/embed_all",
    tag = "TEI",
    request_body(content = EmbedRowsRequest, example = json!({"inputs": "I love AI"})),
    responses((status = 200, description = "the response", body = Vec<Vec<Vec<f32>>>), TeiFailures)
)]
pub async fn embed_all(
    State(app): State<Arc<App>>,
    request: Input<EmbedRowsRequest>,
) -> Result<Response, Failure> {
    let (model, inputs, options) = request.value.into_parts();
    let name = model.as_deref();
    let dense = embedding::find::<Embedder>(&app.registry, name);
    let has_vectors = |found: &TaskModel<Embedder>| {
        found.model.task().pipeline::<MultiVectorEmbedder>().is_some()
    };
    let (name, embedded) = match dense {
        Ok(found) if !has_vectors(&found) => {
            let Outputs { values, tokens, truncated, memory } =
                embedding::states(&app, &found, inputs, options).await?;
            let width = embedding::hidden_size(&found.model);
            let of_text = |states| MultiVector::new(states, width);
            let values = values.into_iter().map(of_text).collect();
            (found.name, Outputs { values, tokens, truncated, memory })
        }
        dense => {
            let name = dense.as_ref().map_or(name, |found| Some(found.name.as_str()));
            let found = embedding::find(&app.registry, name);
            let found = found.map_err(|failure| dense.err().unwrap_or(failure))?;
            let embedded = embedding::multi_vectors(&app, &found, inputs, options).await?;
            (found.name, embedded)
        }
    };
    let texts = embedded.values.len();
    let stats = RequestStats { model: name, texts, tokens: embedded.tokens };
    let lists = embedded.values.into_iter().map(|text| {
        let rows = 0..text.len();
        rows.map(move |i| text.row(i).to_vec())
    });
    let response = list_response(&app.metrics, nested_elements(lists), embedded.memory, stats);
    Ok(with_truncated(response, embedded.truncated))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PredictRequest {
    /// Name of the model [default: the first sequence classifier]
    #[serde(default)]
    model: Option<String>,
    inputs: PredictInputs,
    /// Truncate texts that are longer than the model's maximum length, instead of refusing them
    /// [default: true]
    #[serde(default)]
    truncate: Option<bool>,
    /// Side on which long texts are truncated [default: that of the model's files]
    #[serde(default, deserialize_with = "optional_choice")]
    truncation_direction: Option<Direction>,
    /// Return logits instead of scores [default: false]
    #[serde(default)]
    raw_scores: Option<bool>,
    #[serde(default, deserialize_with = "optional_object")]
    parameters: Option<PredictParameters>,
}

/// The parameters of Hugging Face's task text-classification.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct PredictParameters {
    /// Number of labels per text or pair, those with the highest scores [default: all]
    #[serde(default)]
    #[schema(minimum = 1)]
    top_k: Option<usize>,
    /// Function from logits to scores [default: that of the model's files]
    #[serde(default, deserialize_with = "optional_choice")]
    function_to_apply: Option<Function>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Function {
    Sigmoid,
    Softmax,
    /// The scores are the logits, as with `raw_scores`
    None,
}

impl From<Function> for LogitActivation {
    fn from(function: Function) -> Self {
        match function {
            Function::Sigmoid => Self::Sigmoid,
            Function::Softmax => Self::Softmax,
            Function::None => Self::Identity,
        }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(untagged, try_from = "Nested")]
enum PredictInputs {
    /// A text
    Text(String),
    /// A text, or a pair of texts
    One(Vec<String>),
    /// Texts and pairs of texts
    Many(Vec<Vec<String>>),
}

impl TryFrom<Nested> for PredictInputs {
    type Error = &'static str;

    fn try_from(value: Nested) -> Result<Self, Self::Error> {
        let expected = "expected a string, a pair of strings, or a list of [text] and [text, text]";
        match value {
            Nested::Text(text) => Ok(Self::Text(text)),
            Nested::Empty => Ok(Self::One(vec![])),
            Nested::Texts(texts) => Ok(Self::One(texts)),
            Nested::Lists(lists) => Nested::text_lists(lists).map(Self::Many).ok_or(expected),
            Nested::Ids(_) => Err(expected),
        }
    }
}

/// A text, and the second text of a pair.
type Pair = (String, Option<String>);

/// # Errors
/// [`Kind::Field`] for a list that has neither one nor two texts.
fn pair(list: Vec<String>) -> Result<Pair, Failure> {
    let got = list.len();
    let mut texts = list.into_iter();
    match (texts.next(), texts.next(), got) {
        (Some(first), second, 1 | 2) => Ok((first, second)),
        _ => {
            let message = format!(
                "inputs has a list of {got} texts: expected 1, or 2 for a pair; to classify several \
                 texts, send [[text], [text]]"
            );
            Err(Failure::new(Kind::Field, message).with_field("inputs"))
        }
    }
}

#[derive(Serialize, ToSchema)]
struct Prediction {
    score: f32,
    label: String,
}

/// The predictions of one text, or of a list.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "the schema of the response of /predict")]
enum Predictions {
    One(Vec<Prediction>),
    Many(Vec<Vec<Prediction>>),
}

/// Classify texts and pairs of texts
#[utoipa::path(
    post,
    path = "/predict",
    tag = "TEI",
    request_body(content = PredictRequest, example = json!({"inputs": "I like you."})),
    responses((status = 200, description = "the response", body = Predictions), TeiFailures)
)]
pub async fn predict(
    State(app): State<Arc<App>>,
    request: Input<PredictRequest>,
) -> Result<Response, Failure> {
    let PredictRequest { model, inputs, truncate, truncation_direction, raw_scores, parameters } =
        request.value;
    let PredictParameters { top_k, function_to_apply } = parameters.unwrap_or_default();
    check_top("parameters.top_k", top_k)?;
    let function = match (raw_scores, function_to_apply) {
        (Some(true), None | Some(Function::None)) => Some(LogitActivation::Identity),
        (Some(true), Some(_)) => {
            let message =
                "parameters.function_to_apply is wrong: expected none, because raw_scores is true";
            return Err(Failure::invalid("parameters.function_to_apply", message));
        }
        (Some(false) | None, function) => function.map(LogitActivation::from),
    };
    let found = ranking::find(&app.registry, model.as_deref())?;
    let (pairs, is_one): (Vec<Pair>, bool) = match inputs {
        PredictInputs::Text(text) => (vec![(text, None)], true),
        PredictInputs::One(list) if list.is_empty() => (vec![], false),
        PredictInputs::One(list) => (vec![pair(list)?], true),
        PredictInputs::Many(all) => (all.into_iter().map(pair).collect::<Result<_, _>>()?, false),
    };
    check_count(&app.limits, pairs.len(), "inputs")?;
    let texts = pairs.len();
    let values = texts * found.pipeline.labels().names().len();
    check_response(values, "inputs")?;
    let name_of = |index| format!("text or pair {index}");
    let truncate = truncate.unwrap_or(true);
    let options = Options { name_of, truncate, truncation_direction, ..Options::new("inputs") };
    let pairs = Arc::new(pairs);
    let logits = ranking::logits(&app, &found, pairs, 0, options, tokenize_mixed);
    let Outputs { values: logits, tokens, truncated, memory } = logits.await?;
    let scores: Vec<Vec<f32>> = match function {
        Some(function) => logits.into_iter().map(|logits| function.apply(logits)).collect(),
        None => found.pipeline.label_scores(logits),
    };
    let classifier = found.pipeline;
    let count = top_k.unwrap_or(usize::MAX);
    let predictions_of_text = move |scores: Vec<f32>| -> Vec<Prediction> {
        let labels = classifier.labels().names();
        let prediction = |i: usize| Prediction { score: scores[i], label: labels[i].clone() };
        descending(&scores).into_iter().take(count).map(prediction).collect()
    };
    let stats = RequestStats { model: found.name, texts, tokens };
    let mut all = scores.into_iter().map(predictions_of_text);
    let predictions =
        if is_one { elements(all.next().into_iter().flatten()) } else { elements(all) };
    let response = list_response(&app.metrics, predictions, memory, stats);
    Ok(with_truncated(response, truncated))
}

/// The tokens of texts and pairs, in their order.
fn tokenize_mixed(classifier: &TextClassifier, pairs: &[Pair]) -> Result<Vec<Tokens>, Failure> {
    let texts: Vec<&str> = pairs
        .iter()
        .filter(|(_, second)| second.is_none())
        .map(|(first, _)| first.as_str())
        .collect();
    let pairs_only: Vec<(&str, &str)> = pairs
        .iter()
        .filter_map(|(first, second)| Some((first.as_str(), second.as_deref()?)))
        .collect();
    let mut text_tokens = classifier.tokenize_texts(&texts)?.into_iter();
    // A model whose chat template cannot render pairs refuses even an empty list.
    let mut pair_tokens = if pairs_only.is_empty() {
        vec![].into_iter()
    } else {
        classifier.tokenize_text_pairs(&pairs_only, Prompt::None)?.into_iter()
    };
    let next = |(_, second): &Pair| match second {
        None => text_tokens.next(),
        Some(_) => pair_tokens.next(),
    };
    Ok(pairs.iter().filter_map(next).collect())
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// Name of the model [default: the first model that ranks]
    #[serde(default)]
    model: Option<String>,
    query: String,
    #[schema(min_items = 1)]
    #[serde(deserialize_with = "list")]
    texts: Vec<String>,
    /// Truncate pairs that are longer than the model's maximum length, instead of refusing them
    /// [default: true]
    #[serde(default)]
    truncate: Option<bool>,
    /// Side on which long texts are truncated [default: that of the model's files]
    #[serde(default, deserialize_with = "optional_choice")]
    truncation_direction: Option<Direction>,
    /// Return logits instead of scores; a multi-vector model has scores only [default: false]
    #[serde(default)]
    raw_scores: Option<bool>,
    /// Return the texts [default: false]
    #[serde(default)]
    return_text: Option<bool>,
    /// Number of results [default: all]
    #[serde(default)]
    #[schema(minimum = 1)]
    top_n: Option<usize>,
}

#[derive(Serialize, ToSchema)]
struct Rank {
    /// The text's index in the request
    index: usize,
    score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// Rank texts by relevance to a query
#[utoipa::path(
    post,
    path = "/rerank",
    tag = "TEI",
    request_body(
        content = RankRequest,
        example = json!({"query": "something to eat", "texts": ["A man eats.", "It snows."]}),
    ),
    responses((status = 200, description = "the response", body = Vec<Rank>), TeiFailures)
)]
pub async fn rerank(
    State(app): State<Arc<App>>,
    request: Input<RankRequest>,
) -> Result<Response, Failure> {
    let RankRequest {
        model,
        query,
        texts,
        truncate,
        truncation_direction,
        raw_scores,
        return_text,
        top_n,
    } = request.value;
    check_top("top_n", top_n)?;
    let found = ranking::find_ranker(&app.registry, model.as_deref())?;
    let texts = Arc::new(texts);
    let returned = (return_text == Some(true)).then(|| texts.clone());
    let count = texts.len();
    let raw = raw_scores == Some(true);
    let truncate = truncate.unwrap_or(true);
    let options = Options { truncate, truncation_direction, ..Options::new("texts") };
    let scored = ranking::score_documents(&app, &found, query, texts, options, raw).await?;
    let DocumentScores { scores, tokens, truncated, memory } = scored;
    let best = descending(&scores).into_iter().take(top_n.unwrap_or(count));
    let ranks = best.map(move |index| {
        let text = returned.as_ref().map(|all| all[index].clone());
        Rank { index, score: scores[index], text }
    });
    let stats = RequestStats { model: found.into_name(), texts: count, tokens };
    let memory = memory.with_body(request.bytes); // the response may contain the texts
    let response = list_response(&app.metrics, elements(ranks), memory, stats);
    Ok(with_truncated(response, truncated))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SimilarityRequest {
    /// Name of the model [default: the first embedding model]
    #[serde(default)]
    model: Option<String>,
    #[serde(deserialize_with = "object")]
    inputs: SimilarityInputs,
    #[serde(default, deserialize_with = "optional_object")]
    parameters: Option<SimilarityParameters>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SimilarityInputs {
    source_sentence: String,
    #[schema(min_items = 1)]
    #[serde(deserialize_with = "list")]
    sentences: Vec<String>,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SimilarityParameters {
    /// Truncate texts that are longer than the model's maximum length, instead of refusing them
    /// [default: true]
    #[serde(default)]
    truncate: Option<bool>,
    /// Side on which long texts are truncated [default: that of the model's files]
    #[serde(default, deserialize_with = "optional_choice")]
    truncation_direction: Option<Direction>,
    /// Name of the model's prompt to put before each text
    #[serde(default)]
    prompt_name: Option<String>,
}

/// Compute the cosine similarity of a sentence with others
#[utoipa::path(
    post,
    path = "/similarity",
    tag = "TEI",
    request_body(
        content = SimilarityRequest,
        example = json!({"inputs": {"source_sentence": "A man eats.", "sentences": ["It snows."]}}),
    ),
    responses((status = 200, description = "the response", body = Vec<f32>), TeiFailures)
)]
pub async fn similarity(
    State(app): State<Arc<App>>,
    request: Input<SimilarityRequest>,
) -> Result<Response, Failure> {
    let SimilarityRequest { model, inputs, parameters } = request.value;
    let SimilarityParameters { truncate, truncation_direction, prompt_name } =
        parameters.unwrap_or_default();
    let found = embedding::find(&app.registry, model.as_deref())?;
    if inputs.sentences.is_empty() {
        let message = "sentences is empty: expected at least one element";
        return Err(Failure::new(Kind::Empty, message).with_field("sentences"));
    }
    let texts = std::iter::once(inputs.source_sentence).chain(inputs.sentences).collect();
    let normalize = Some(true);
    let name_of = |index| match index {
        0 => "source_sentence".to_string(),
        index => format!("sentences[{}]", index - 1),
    };
    let options = Options {
        name_of,
        truncate: truncate.unwrap_or(true),
        truncation_direction,
        prompt_name,
        normalize,
        ..Options::new("source_sentence with sentences")
    };
    let embedded = embedding::vectors(&app, &found, TextsOrIds::Texts(texts), options).await?;
    let cosines: Vec<f32> = match &embedded.values[..] {
        [source, sentences @ ..] => {
            sentences.iter().map(|sentence| cosine(source, sentence)).collect()
        }
        [] => vec![],
    };
    let texts = embedded.values.len();
    let stats = RequestStats { model: found.name, texts, tokens: embedded.tokens };
    let cosines = elements(cosines.into_iter());
    let response = list_response(&app.metrics, cosines, embedded.memory, stats);
    Ok(with_truncated(response, embedded.truncated))
}

/// The cosine of two vectors of length 1, summed in f64. The values of the vectors are rounded to
/// f32, so the sum can be slightly outside −1 to 1; it is clamped.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    dot.clamp(-1.0, 1.0)
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenizeRequest {
    /// Name of the model [default: the first model]
    #[serde(default)]
    model: Option<String>,
    inputs: Texts,
    /// Add the special tokens of the model, such as `[CLS]` [default: true]
    #[serde(default)]
    add_special_tokens: Option<bool>,
    /// Name of the model's prompt to put before each text
    #[serde(default)]
    prompt_name: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct SimpleToken {
    id: u32,
    /// The part of the text, or the name of a special token
    text: String,
    special: bool,
    /// Index, in Unicode code points, of the part's first character in the text with its prompt;
    /// null for a special token
    start: Option<usize>,
    /// Index of the character after the part; null for a special token
    stop: Option<usize>,
}

/// Tokenize texts, without truncation
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "TEI",
    request_body(content = TokenizeRequest, example = json!({"inputs": "I love AI"})),
    responses(
        (status = 200, description = "the response", body = Vec<Vec<SimpleToken>>),
        TeiFailures,
    )
)]
pub async fn tokenize(
    State(app): State<Arc<App>>,
    request: Input<TokenizeRequest>,
) -> Result<Response, Failure> {
    let TokenizeRequest { model, inputs, add_special_tokens, prompt_name } = request.value;
    let (name, model) = app.registry.get(model.as_deref())?;
    let texts = inputs.into_vec();
    check_count(&app.limits, texts.len(), "inputs")?;
    let prompt = prompt(model.task(), prompt_name.as_deref())?;
    // A byte has at most six tokens: NFKC makes 18 characters of the three bytes of U+FDFA.
    let max_tokens: usize =
        texts.iter().map(|text| 6 * (prompt.len() + text.len()) + MAX_SPECIAL).sum();
    let count = texts.len();
    let special = add_special_tokens.unwrap_or(true);
    let prompt_length = prompt.len();
    let total = AtomicUsize::new(0);
    let owned_model = model.clone();
    let split = move |texts: &[String]| {
        let split_text = |text: &String| {
            let with_prompt = format!("{prompt}{text}");
            let split = SplitText::new(owned_model.tokenizer(), with_prompt, special)?;
            let count = split.tokens.len();
            if total.fetch_add(count, Ordering::Relaxed) + count > MAX_TOKENS {
                let message = format!(
                    "the response would have more than {MAX_TOKENS} tokens: send fewer or \
                     shorter texts"
                );
                Err(Failure::new(Kind::TooLarge, message).with_field("inputs"))
            } else {
                Ok(split)
            }
        };
        texts.iter().map(split_text).collect::<Result<Vec<_>, _>>()
    };
    let bytes = size_of::<SplitToken>() * MAX_TOKENS.min(max_tokens);
    let memory = app.memory.reserve(bytes, "inputs").await?;
    let texts = Arc::new(texts);
    let pool = &app.tokenizer_pool;
    let all = pool.tokenize(model.tokenizer(), texts, prompt_length, text_name, split).await?;
    let tokens = all.iter().map(|text| text.tokens.len()).sum();
    let stats = RequestStats { model: name, texts: count, tokens };
    let lists = nested_elements(all.into_iter().map(SplitText::into_tokens));
    Ok(list_response(&app.metrics, lists, memory.with_body(request.bytes), stats))
}

/// Number of bytes of a long token, such as a row of dashes.
const LONGEST_TOKEN: usize = 64;
/// Number of special tokens of a text, for an estimate of memory.
const MAX_SPECIAL: usize = 2;
/// Maximum number of tokens of a response of `/tokenize` and of a request of `/decode`.
const MAX_TOKENS: usize = 1 << 20;

/// The text of the model's prompt called `name`; empty if `name` is `None`.
fn prompt(task: &Task, name: Option<&str>) -> Result<String, Failure> {
    let Some(name) = name else { return Ok(String::new()) };
    match &task.prompts {
        Some(prompts) => Ok(prompts.text(name)?),
        None => {
            let got = name.to_string();
            Err(encoder::Error::from(encoder::InputError::NoPrompt { got, known: vec![] }).into())
        }
    }
}

/// A text with its tokens, which take less memory than [`SimpleToken`]s.
struct SplitText {
    text: String,
    tokens: Vec<SplitToken>,
}

enum SplitToken {
    /// A token of the text, with its range of bytes.
    Text {
        id: u32,
        start: u32,
        end: u32,
    },
    Special {
        id: u32,
        token: Box<str>,
    },
}

impl SplitText {
    /// The tokens of a text of less than 4 GiB.
    fn new(tokenizer: &TextTokenizer, text: String, special: bool) -> Result<Self, Failure> {
        let mut tokens = vec![];
        tokenizer.for_each_piece(&text, special, |Piece { id, token, range }| {
            tokens.push(match range {
                None => SplitToken::Special { id, token: token.into() },
                Some(Range { start, end }) => {
                    SplitToken::Text { id, start: start as u32, end: end as u32 }
                }
            });
        })?;
        Ok(Self { text, tokens })
    }

    fn into_tokens(self) -> impl ExactSizeIterator<Item = SimpleToken> {
        let Self { text, tokens } = self;
        // The start of the last token, in bytes and in characters.
        let mut last = (0, 0);
        tokens.into_iter().map(move |token| match token {
            SplitToken::Special { id, token } => {
                SimpleToken { id, text: token.into(), special: true, start: None, stop: None }
            }
            SplitToken::Text { id, start, end } => {
                let range = start as usize..end as usize;
                let (byte, character) = if last.0 <= range.start { last } else { (0, 0) };
                let start = character + text[byte..range.start].chars().count();
                let stop = start + text[range.clone()].chars().count();
                last = (range.start, start);
                let text = text[range].to_string();
                SimpleToken { id, text, special: false, start: Some(start), stop: Some(stop) }
            }
        })
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DecodeRequest {
    /// Name of the model [default: the first model]
    #[serde(default)]
    model: Option<String>,
    ids: Ids,
    /// Leave out special tokens [default: true]
    #[serde(default)]
    skip_special_tokens: Option<bool>,
}

#[derive(Deserialize, ToSchema)]
#[serde(untagged, try_from = "Nested")]
enum Ids {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

impl TryFrom<Nested> for Ids {
    type Error = &'static str;

    fn try_from(value: Nested) -> Result<Self, Self::Error> {
        let expected = "expected a list of token ids, or a list of lists of token ids";
        match value {
            Nested::Empty => Ok(Self::One(vec![])),
            Nested::Ids(ids) => Ok(Self::One(ids)),
            Nested::Lists(lists) => Nested::id_lists(lists).map(Self::Many).ok_or(expected),
            Nested::Text(_) | Nested::Texts(_) => Err(expected),
        }
    }
}

/// Decode token ids to texts
#[utoipa::path(
    post,
    path = "/decode",
    tag = "TEI",
    request_body(content = DecodeRequest, example = json!({"ids": [101, 1045, 2293, 9932, 102]})),
    responses((status = 200, description = "the response", body = Vec<String>), TeiFailures)
)]
pub async fn decode(
    State(app): State<Arc<App>>,
    request: Input<DecodeRequest>,
) -> Result<Response, Failure> {
    let DecodeRequest { model, ids, skip_special_tokens } = request.value;
    let (name, model) = app.registry.get(model.as_deref())?;
    let lists = match ids {
        Ids::One(ids) if ids.is_empty() => vec![],
        Ids::One(ids) => vec![ids],
        Ids::Many(lists) => lists,
    };
    check_count(&app.limits, lists.len(), "ids")?;
    let tokens = lists.iter().map(Vec::len).sum();
    if tokens > MAX_TOKENS {
        let message = format!("the request has {tokens} token ids: expected at most {MAX_TOKENS}");
        return Err(Failure::new(Kind::TooLarge, message).with_field("ids"));
    }
    let memory = app.memory.reserve(LONGEST_TOKEN * tokens, "ids").await?;
    let owned_model = model.clone();
    let decode = move |lists: &[Vec<u32>]| {
        let decode_list = |ids: &Vec<u32>| {
            if skip_special_tokens.unwrap_or(true) {
                owned_model.tokenizer().decode(ids)
            } else {
                owned_model.tokenizer().decode_all(ids)
            }
        };
        let texts = lists.iter().map(decode_list).collect::<encoder::Result<Vec<String>>>();
        texts.map_err(|error| Failure::from(error).with_field("ids"))
    };
    let pool = &app.tokenizer_pool;
    let texts = pool.tokenize(model.tokenizer(), Arc::new(lists), 0, text_name, decode).await?;
    let stats = RequestStats { model: name, texts: texts.len(), tokens };
    Ok(list_response(&app.metrics, elements(texts.into_iter()), memory, stats))
}

/// The fields that choose the route of a request to `POST /`.
#[derive(Deserialize)]
pub struct RouteFields {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    inputs: FieldType,
    #[serde(default)]
    query: FieldType,
}

/// The main route of a model. For an embedding model: `/embed`, or `/similarity` if `inputs` is an
/// object. For a sparse embedding model: `/embed_sparse`. For a multi-vector model: `/embed_all`, or
/// `/rerank` if there is a `query`. For a classifier: `/predict`, or `/rerank` if there is a `query`
#[utoipa::path(
    post,
    path = "/",
    tag = "TEI",
    request_body(content = Object, example = json!({"inputs": "A man is eating food."})),
    responses(
        (status = 200, description = "the response", body = Vec<serde_json::Value>),
        TeiFailures,
    )
)]
pub async fn any(
    State(app): State<Arc<App>>,
    request: PartialInput<RouteFields>,
) -> Result<Response, Failure> {
    let RouteFields { model, inputs, query } = &request.fields;
    // As for every optional field, an empty name is no name.
    let (name, model) = app.registry.get(model.as_deref().filter(|name| !name.is_empty()))?;
    let has_object = *inputs == FieldType::Object;
    let has_query = *query != FieldType::Null;
    // Without the field `model`, the route that is called would choose its own default model.
    let own_name = Some(name.clone());
    match model.task_name() {
        Embedder::TASK if has_object => {
            let mut request: Input<SimilarityRequest> = request.parse()?;
            request.value.model = own_name;
            similarity(State(app), request).await
        }
        Embedder::TASK => {
            let mut request: Input<EmbedRequest> = request.parse()?;
            request.value.model = own_name;
            embed(State(app), request).await
        }
        SparseEmbedder::TASK => {
            let mut request: Input<EmbedRowsRequest> = request.parse()?;
            request.value.model = own_name;
            embed_sparse(State(app), request).await
        }
        MultiVectorEmbedder::TASK if !has_query => {
            let mut request: Input<EmbedRowsRequest> = request.parse()?;
            request.value.model = own_name;
            embed_all(State(app), request).await
        }
        TextClassifier::TASK | MultiVectorEmbedder::TASK if has_query => {
            let mut request: Input<RankRequest> = request.parse()?;
            request.value.model = own_name;
            rerank(State(app), request).await
        }
        TextClassifier::TASK => {
            let mut request: Input<PredictRequest> = request.parse()?;
            request.value.model = own_name;
            predict(State(app), request).await
        }
        task => {
            let message = format!(
                "model {name:?} is for {task}, which POST / does not serve: use the route of this \
                 task; see /docs"
            );
            Err(Failure::new(Kind::Backend, message))
        }
    }
}
