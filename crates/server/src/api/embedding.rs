//! Computes the vectors or hidden states of texts or token ids, for all routes that embed.

use std::sync::Arc;

use encoder::{
    Embed, EmbedOptions, Embedder, LongTexts, MultiVector, MultiVectorEmbedder, Prompt,
    SparseEmbedder, SparseVector, TextRole, TextTokenizer, TruncationSide,
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    checks::{check_count, check_response, long_text_failure, text_name},
    nested::Nested,
};
use crate::{
    app::App,
    embedding_model::EmbeddingModel,
    engine::{Engine, Sequence, Target, token_count},
    failure::{Failure, Kind},
    memory::MemoryReservation,
    model::Model,
    registry::{Registry, TaskModel},
    tokenizer_pool::TokenizerPool,
};

/// Texts, or texts as token ids.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, try_from = "Nested")]
pub enum TextsOrIds {
    /// A text
    Text(String),
    /// Texts
    Texts(Vec<String>),
    /// The token ids of a text, with the special tokens of the model
    Ids(Vec<u32>),
    /// The token ids of texts
    IdLists(Vec<Vec<u32>>),
}

/// Texts.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, try_from = "Nested")]
pub enum Texts {
    /// A text
    Text(String),
    /// Texts
    Texts(Vec<String>),
}

impl TryFrom<Nested> for TextsOrIds {
    type Error = &'static str;

    fn try_from(value: Nested) -> Result<Self, Self::Error> {
        Ok(match value {
            Nested::Text(text) => Self::Text(text),
            Nested::Empty => Self::Texts(vec![]),
            Nested::Texts(texts) => Self::Texts(texts),
            Nested::Ids(ids) => Self::Ids(ids),
            Nested::Lists(lists) => {
                let expected = "expected a string, a list of strings, a list of token ids, or a \
                                list of lists of token ids";
                Self::IdLists(Nested::id_lists(lists).ok_or(expected)?)
            }
        })
    }
}

impl TextsOrIds {
    /// The length of each text, in bytes or in token ids.
    fn lengths(&self) -> Vec<usize> {
        match self {
            Self::Text(text) => vec![text.len()],
            Self::Texts(texts) => texts.iter().map(String::len).collect(),
            Self::Ids(ids) if ids.is_empty() => vec![],
            Self::Ids(ids) => vec![ids.len()],
            Self::IdLists(lists) => lists.iter().map(Vec::len).collect(),
        }
    }
}

impl TryFrom<Nested> for Texts {
    type Error = &'static str;

    fn try_from(value: Nested) -> Result<Self, Self::Error> {
        match value {
            Nested::Text(text) => Ok(Self::Text(text)),
            Nested::Empty => Ok(Self::Texts(vec![])),
            Nested::Texts(texts) => Ok(Self::Texts(texts)),
            Nested::Ids(_) | Nested::Lists(_) => Err("expected a string or a list of strings"),
        }
    }
}

impl Texts {
    pub fn into_vec(self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text],
            Self::Texts(texts) => texts,
        }
    }
}

/// The side on which long texts are truncated.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, ToSchema)]
pub enum Direction {
    /// Remove the end
    #[serde(rename = "right", alias = "Right")]
    Right,
    /// Remove the beginning
    #[serde(rename = "left", alias = "Left")]
    Left,
}

impl From<Direction> for TruncationSide {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Left => Self::Left,
            Direction::Right => Self::Right,
        }
    }
}

/// How to treat the texts of a request.
#[derive(Clone, Debug)]
pub struct Options {
    /// The field of the request that has the texts, for errors.
    pub field: &'static str,
    /// Returns the name of the text at this index, for error messages.
    pub name_of: fn(usize) -> String,
    /// Whether texts that are too long are truncated. Otherwise they are an error.
    pub truncate: bool,
    pub truncation_direction: Option<Direction>,
    pub prompt_name: Option<String>,
    /// `None`: as the model's files say.
    pub normalize: Option<bool>,
    pub dimensions: Option<usize>,
}

impl Options {
    /// The default options for texts in a field of the request.
    pub fn new(field: &'static str) -> Self {
        Self {
            field,
            name_of: text_name,
            truncate: true,
            truncation_direction: None,
            prompt_name: None,
            normalize: None,
            dimensions: None,
        }
    }

    fn prompt(&self) -> Prompt<'_> {
        self.prompt_name.as_deref().map_or(Prompt::Default, Prompt::Named)
    }
}

/// The values of texts or pairs with their memory, their number of tokens, and the number of texts
/// or pairs that were truncated.
pub struct Outputs<V> {
    pub values: Vec<V>,
    pub tokens: usize,
    pub truncated: usize,
    pub memory: MemoryReservation,
}

/// The embedding model called `name`, or the first one if `name` is `None`.
pub fn find<E: EmbeddingModel>(
    registry: &Registry,
    name: Option<&str>,
) -> Result<TaskModel<E>, Failure> {
    registry.find(name, &format!("{} ({})", E::TASK, E::ROWS), |_| true)
}

/// The vectors of texts.
pub async fn vectors(
    app: &App,
    found: &TaskModel<Embedder>,
    texts: TextsOrIds,
    options: Options,
) -> Result<Outputs<Vec<f32>>, Failure> {
    let (embedder, normalize) = variant(&found.pipeline, &options)?;
    let row_size = size_of::<f32>() * embedder.dimension();
    rows(app, &found.model, embedder, normalize, row_size, texts, options).await
}

/// The sparse vectors of texts.
pub async fn sparse_vectors(
    app: &App,
    found: &TaskModel<SparseEmbedder>,
    texts: TextsOrIds,
    options: Options,
) -> Result<Outputs<SparseVector>, Failure> {
    let embedder = found.pipeline.clone();
    let values = embedder.max_active_dims().unwrap_or(usize::MAX).min(embedder.dimension());
    let row_size = (size_of::<u32>() + size_of::<f32>()) * values;
    rows(app, &found.model, embedder, None, row_size, texts, options).await
}

/// Tokenized texts for a multi-vector model.
pub struct MultiVectorTexts {
    pub sequences: Vec<Sequence>,
    role: TextRole,
    /// The largest number of values of all vectors.
    pub values: usize,
}

impl MultiVectorTexts {
    pub async fn new(
        app: &App,
        embedder: &Arc<MultiVectorEmbedder>,
        texts: TextsOrIds,
        options: Options,
    ) -> Result<Self, Failure> {
        let field = options.field;
        check_count(&app.limits, texts.lengths().len(), field)?;
        let role = embedder.role(EmbedOptions::new().with_prompt(options.prompt()));
        let tokenized = tokenize(&app.tokenizer_pool, embedder, texts, options).await;
        let sequences = tokenized.map_err(|failure| failure.with_default_field(field))?;
        let lengths = sequences.iter().map(|sequence| sequence.tokens.input_ids.len());
        let vectors = lengths.map(|length| embedder.max_vectors(length, role)).sum::<usize>();
        Ok(Self { sequences, role, values: vectors * embedder.dimension() })
    }

    /// The computation of the vectors.
    pub fn target(&self, found: &TaskModel<MultiVectorEmbedder>) -> Target<MultiVector> {
        found.model.rows(found.pipeline.clone(), self.role, None)
    }
}

/// The vectors of the tokens of texts.
pub async fn multi_vectors(
    app: &App,
    found: &TaskModel<MultiVectorEmbedder>,
    texts: TextsOrIds,
    options: Options,
) -> Result<Outputs<MultiVector>, Failure> {
    let field = options.field;
    let texts = MultiVectorTexts::new(app, &found.pipeline, texts, options).await?;
    check_response(texts.values, field)?;
    let memory = app.memory.reserve(size_of::<f32>() * texts.values, field).await?;
    compute(&app.engine, texts.target(found), texts.sequences, memory).await
}

/// The rows of texts, of `row_size` bytes each, by an embedding model that shares the weights of
/// `model`. `normalize` means the same as in `KeyKind::Rows`.
async fn rows<E: EmbeddingModel>(
    app: &App,
    model: &Model,
    embedder: Arc<E>,
    normalize: Option<bool>,
    row_size: usize,
    texts: TextsOrIds,
    options: Options,
) -> Result<Outputs<E::Row>, Failure> {
    let field = options.field;
    let lengths = texts.lengths();
    check_count(&app.limits, lengths.len(), field)?;
    let size_of_rows = lengths.len() * row_size;
    let bytes = sequence_bytes(embedder.tokenizer(), lengths.into_iter()) + size_of_rows;
    let memory = app.memory.reserve(bytes, field).await?;
    let role = embedder.role(EmbedOptions::new().with_prompt(options.prompt()));
    let target = model.rows(embedder.clone(), role, normalize);
    let tokenized = tokenize(&app.tokenizer_pool, &embedder, texts, options).await;
    let sequences = tokenized.map_err(|failure| failure.with_default_field(field))?;
    compute(&app.engine, target, sequences, memory).await
}

/// The last hidden states of texts, `(T, E)` row after row.
pub async fn states(
    app: &App,
    found: &TaskModel<Embedder>,
    texts: TextsOrIds,
    options: Options,
) -> Result<Outputs<Vec<f32>>, Failure> {
    let (field, target) = (options.field, found.model.states()?);
    check_count(&app.limits, texts.lengths().len(), field)?;
    let tokenized = tokenize(&app.tokenizer_pool, &found.pipeline, texts, options).await;
    let sequences = tokenized.map_err(|failure| failure.with_default_field(field))?;
    let values = token_count(&sequences) * hidden_size(&found.model);
    check_response(values, field)?;
    // An upper bound from the lengths of the texts would be several times too high. The tokens that
    // are in memory already take a hundredth of the states.
    let memory = app.memory.reserve(4 * values, field).await?;
    compute(&app.engine, target, sequences, memory).await
}

/// An upper bound of the memory of the sequences of texts that are truncated, in bytes. `lengths`
/// are those of the texts in bytes.
pub fn sequence_bytes(tokenizer: &TextTokenizer, lengths: impl Iterator<Item = usize>) -> usize {
    lengths.map(|length| tokenizer.sequence_size(length)).sum()
}

/// Computes sequences on the engine. `memory` is that of the sequences and their values.
pub async fn compute<V: Clone + 'static>(
    engine: &Engine,
    target: Target<V>,
    sequences: Vec<Sequence>,
    memory: MemoryReservation,
) -> Result<Outputs<V>, Failure> {
    let tokens = token_count(&sequences);
    let truncated = sequences.iter().filter(|sequence| sequence.tokens.truncated > 0).count();
    let values = engine.compute(target, sequences).await?;
    Ok(Outputs { values, tokens, truncated, memory })
}

/// Returns the embedder with the normalisation and the dimension of a request, and the value of
/// `normalize` for `KeyKind::Rows`.
fn variant(
    embedder: &Arc<Embedder>,
    options: &Options,
) -> Result<(Arc<Embedder>, Option<bool>), Failure> {
    let with_dimension = |n| Embedder::clone(embedder).with_dimension(n);
    let truncated = options.dimensions.map(with_dimension).transpose()?;
    let truncated_is_normalized = truncated.as_ref().is_some_and(Embedder::is_normalized);
    let normalize = match (options.normalize, embedder.is_normalized()) {
        (Some(true), true) => None,
        // The model has `Normalize`, and its files set `truncate_dim`. As in sentence-transformers,
        // vectors of this dimension are not normalised again; vectors that a request truncates are.
        (None, false) if truncated_is_normalized => Some(true),
        (other, _) => other,
    };
    let changed = match normalize {
        None => truncated,
        Some(normalize) => {
            let embedder = truncated.unwrap_or_else(|| Embedder::clone(embedder));
            Some(if normalize { embedder.normalized() } else { embedder.unnormalized() })
        }
    };
    Ok((changed.map_or_else(|| embedder.clone(), Arc::new), normalize))
}

async fn tokenize<E: EmbeddingModel>(
    pool: &TokenizerPool,
    embedder: &Arc<E>,
    texts: TextsOrIds,
    options: Options,
) -> Result<Vec<Sequence>, Failure> {
    let texts = match texts {
        TextsOrIds::Text(text) => vec![text],
        TextsOrIds::Texts(texts) => texts,
        TextsOrIds::Ids(ids) => return sequences_from_ids(&**embedder, vec![ids], &options),
        TextsOrIds::IdLists(lists) => return sequences_from_ids(&**embedder, lists, &options),
    };
    let Options { name_of, truncate, truncation_direction, .. } = options;
    let embedder = match truncation_direction {
        None => embedder.clone(),
        Some(side) => Arc::new(E::clone(embedder).with_truncation_side(side.into())),
    };
    let tokenizer = embedder.tokenizer().clone();
    let tokenize = move |texts: &[String]| {
        let embed_options = EmbedOptions::new().with_prompt(options.prompt());
        let embed_options = embed_options.with_long_texts(LongTexts::Truncate);
        Ok(embedder.tokenize(texts, embed_options)?.into_sequences())
    };
    let tokenized = pool.tokenize(&tokenizer, Arc::new(texts), 0, name_of, tokenize).await?;
    sequences(tokenized, truncate, name_of)
}

fn sequences_from_ids<E: EmbeddingModel>(
    embedder: &E,
    lists: Vec<Vec<u32>>,
    options: &Options,
) -> Result<Vec<Sequence>, Failure> {
    if options.prompt_name.is_some() {
        let message = "prompt_name needs texts: expected strings, got token ids";
        return Err(Failure::new(Kind::Invalid, message).with_field("prompt_name"));
    }
    let [before, after] = embedder.tokenizer().special_tokens_around_text()?;
    let lacks = |ids: &Vec<u32>| !ids.starts_with(&before) || !ids.ends_with(&after);
    if let Some(index) = lists.iter().position(lacks) {
        let message = format!(
            "{}: the token ids lack the model's special tokens: expected {before:?} \
             before and {after:?} after the text, as /tokenize returns them; or send strings \
             (LangChain: check_embedding_ctx_length=False)",
            (options.name_of)(index)
        );
        return Err(Failure::new(Kind::Tokenizer, message).with_field(options.field));
    }
    let tokenized = lists.into_iter().enumerate().map(|(index, ids)| {
        let tokens = embedder.tokens_from_ids(ids).map(|tokens| (tokens, 0));
        tokens.map_err(|error| ids_failure(error, &(options.name_of)(index), options.field))
    });
    sequences(tokenized.collect::<Result<_, _>>()?, true, options.name_of)
}

/// The failure for a text that is given as token ids.
fn ids_failure(error: encoder::Error, name: &str, field: &str) -> Failure {
    let message = match &error {
        encoder::Error::Input(encoder::InputError::TooLong { got, max }) => {
            format!("{name} has {got} tokens: expected at most {max}; token ids are not truncated")
        }
        error => format!("{name}: {error}"),
    };
    Failure::new(Failure::from(error).kind(), message).with_field(field)
}

/// The sequences of texts, from each text's tokens and its number of prompt tokens.
///
/// # Errors
/// [`Kind::TooLarge`] for a truncated text, unless `truncate` is true.
pub fn sequences(
    tokenized: Vec<(encoder::Tokens, usize)>,
    truncate: bool,
    name_of: fn(usize) -> String,
) -> Result<Vec<Sequence>, Failure> {
    let long = tokenized.iter().position(|(tokens, _)| tokens.truncated > 0 && !truncate);
    if let Some(index) = long {
        let tokens = &tokenized[index].0;
        let max = tokens.input_ids.len();
        return Err(long_text_failure(&name_of(index), max + tokens.truncated, max));
    }
    Ok(tokenized.into_iter().map(|(tokens, prompt)| Sequence { tokens, prompt }).collect())
}

/// The width of the hidden states, or the length of the vectors of a model without hidden states.
pub fn hidden_size(model: &Model) -> usize {
    let encoder = model.task().encoder.as_ref();
    let width = encoder.map(|encoder| encoder.config().hidden_size);
    width.or(model.dimension()).unwrap_or_default()
}
