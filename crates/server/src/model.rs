//! A loaded model with its task.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use candle_core::DType;
use encoder::{
    AttentionReader, Embedder, EncoderModel, Inspection, LoadOptions, MaskFiller, ModelFiles,
    PackedBatch, Pooling, Precision, QuestionAnswerer, TextClassifier, TextTokenizer,
    TokenClassifier, Tokens,
};

use crate::engine::{Compute, Key, KeyKind, Sequence, Target, Values};

/// A loaded model.
///
/// # Examples
/// ```
/// use encoder::{LoadOptions, ModelFiles};
/// use server::Model;
///
/// let files = ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?;
/// let model = Model::from_files(&files, None, &LoadOptions::default())?;
/// assert_eq!((model.task_name(), model.max_input_length()), ("embedding", 256));
/// # Ok::<(), server::Error>(())
/// ```
pub struct Model {
    /// Distinguishes loaded models: a model that is loaded again has a new number.
    number: u64,
    task: Task,
    attention: AttentionReader,
    precision: Precision,
    created: SystemTime,
}

/// The task of a model, with its pipeline.
pub(crate) enum Task {
    Embedding(Arc<Embedder>),
    SequenceClassification(Arc<TextClassifier>),
    TokenClassification(Arc<TokenClassifier>),
    QuestionAnswering(Arc<QuestionAnswerer>),
    FillMask(Arc<MaskFiller>),
}

/// Why models cannot be loaded or served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model cannot be loaded.
    #[error(transparent)]
    Model(#[from] encoder::Error),

    /// The model cannot be run.
    #[error("{problems}")]
    Problems {
        /// The problems of the files, as `encodle inspect` prints them; only the first if the weights
        /// cannot be opened.
        problems: String,
    },

    /// The model has no task that the server offers.
    #[error(
        "the model has no task that the server offers: expected a sentence-transformers folder, a \
         pooling (--pooling), or a head for classification, question answering or masked tokens; \
         the model's files can be loaded as {found}"
    )]
    NoTask {
        /// The types that can run the model.
        found: String,
    },

    /// Two models have the same name.
    #[error("two models have the name {name:?}: expected different names")]
    SameName {
        /// The name.
        name: String,
    },

    /// The thread of the engine cannot be started.
    #[error("the thread of the engine cannot be started: {0}")]
    Thread(#[source] std::io::Error),
}

/// Prints the task and the precision, not the weights.
impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("task", &self.task_name())
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Loads a model. Its files determine the task, unless `pooling` makes it an embedding model.
    ///
    /// # Errors
    /// [`Error::NoTask`] if the model has no task that the server offers; [`Error::Problems`] or
    /// [`Error::Model`] if the model cannot be loaded.
    pub fn from_files(
        files: &ModelFiles,
        pooling: Option<Pooling>,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let task = Task::from_files(files, pooling, options)?;
        let attention =
            AttentionReader::from_encoder(task.encoder().clone(), task.tokenizer().clone());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let precision = options.precision;
        Ok(Self { number, task, attention, precision, created: SystemTime::now() })
    }

    /// The name of the task in `/info`: `embedding`, `sequence_classification`,
    /// `token_classification`, `question_answering` or `fill_mask`.
    pub fn task_name(&self) -> &'static str {
        self.task.name()
    }

    /// The maximum length of a text in tokens, special tokens included.
    pub fn max_input_length(&self) -> usize {
        self.task.tokenizer().max_seq_length()
    }

    /// The length of the vectors, for an embedding model.
    pub fn dimension(&self) -> Option<usize> {
        match &self.task {
            Task::Embedding(embedder) => Some(embedder.dimension()),
            _ => None,
        }
    }

    /// The number format of matrix products: `f32`, `f16`, `bf16` or `int8`.
    pub fn dtype(&self) -> String {
        format!("{:?}", self.precision).to_lowercase()
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn task(&self) -> &Task {
        &self.task
    }

    pub(crate) fn tokenizer(&self) -> &TextTokenizer {
        self.task.tokenizer()
    }

    pub(crate) fn attention(&self) -> &AttentionReader {
        &self.attention
    }

    /// When the model was loaded, in seconds since 1970.
    pub(crate) fn created(&self) -> u64 {
        self.created.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
    }

    /// Computes two sequences of padding tokens, of length 1 and of up to 128, so that scratch
    /// buffers are allocated and, on a GPU, the kernels are compiled before the first request.
    pub(crate) fn warm_up(&self) -> encoder::Result<()> {
        let model = self.task.encoder();
        let id = self.tokenizer().pad_token_id();
        for length in [1, self.max_input_length().min(128)] {
            let mut batch = PackedBatch::default();
            batch.push(&vec![id; length], &vec![0; length])?;
            model.forward_packed(&batch)?;
        }
        Ok(())
    }

    fn target(&self, kind: KeyKind, compute: Arc<dyn Compute>) -> Target {
        Target { key: Key { model: self.number, kind }, compute }
    }

    /// The computation of vectors, by an [`Embedder`] that shares this model's weights.
    /// `normalize` means the same as in [`KeyKind::Vectors`].
    pub(crate) fn vectors(&self, embedder: Arc<Embedder>, normalize: Option<bool>) -> Target {
        let dimension = embedder.dimension();
        self.target(KeyKind::Vectors { dimension, normalize }, Arc::new(Vectors(embedder)))
    }

    /// The computation of the last hidden states.
    pub(crate) fn states(&self) -> Target {
        self.target(KeyKind::States, Arc::new(States(self.task.encoder().clone())))
    }

    /// The computation of the values of the head of the model's task.
    pub(crate) fn head<H: Send + Sync + 'static>(&self, pipeline: Arc<H>) -> Target
    where
        Head<H>: Compute,
    {
        self.target(KeyKind::Head, Arc::new(Head(pipeline)))
    }
}

impl Task {
    fn from_files(
        files: &ModelFiles,
        pooling: Option<Pooling>,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        if let Some(pooling) = pooling {
            let embedder = Embedder::from_transformer(files, pooling, options)?;
            return Ok(Self::Embedding(Arc::new(embedder)));
        }
        let Inspection { runs_as, mut problems, weights, .. } = Inspection::new(files);
        if weights.is_none() {
            // These are probably not the files of a model: report the first problem only.
            problems.truncate(1);
        }
        let has = |class: &str| runs_as.contains(&class);
        Ok(if has("Embedder") {
            Self::Embedding(Arc::new(Embedder::from_files(files, options)?))
        } else if has("EncoderForSequenceClassification") {
            let classifier = TextClassifier::from_files(files, options)?;
            Self::SequenceClassification(Arc::new(classifier))
        } else if has("EncoderForTokenClassification") {
            let classifier = TokenClassifier::from_files(files, options)?;
            Self::TokenClassification(Arc::new(classifier))
        } else if has("EncoderForQuestionAnswering") {
            let answerer = QuestionAnswerer::from_files(files, options)?;
            Self::QuestionAnswering(Arc::new(answerer))
        } else if has("EncoderForMaskedLm") {
            Self::FillMask(Arc::new(MaskFiller::from_files(files, options)?))
        } else {
            return Err(match problems.is_empty() {
                true => Error::NoTask { found: runs_as.join(", ") },
                false => Error::Problems { problems: problems.join("; ") },
            });
        })
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Embedding(_) => "embedding",
            Self::SequenceClassification(_) => "sequence_classification",
            Self::TokenClassification(_) => "token_classification",
            Self::QuestionAnswering(_) => "question_answering",
            Self::FillMask(_) => "fill_mask",
        }
    }

    pub fn tokenizer(&self) -> &TextTokenizer {
        match self {
            Self::Embedding(model) => model.tokenizer(),
            Self::SequenceClassification(model) => model.tokenizer(),
            Self::TokenClassification(model) => model.tokenizer(),
            Self::QuestionAnswering(model) => model.tokenizer(),
            Self::FillMask(model) => model.tokenizer(),
        }
    }

    pub fn encoder(&self) -> &EncoderModel {
        match self {
            Self::Embedding(model) => model.model(),
            Self::SequenceClassification(model) => model.encoder(),
            Self::TokenClassification(model) => model.encoder(),
            Self::QuestionAnswering(model) => model.encoder(),
            Self::FillMask(model) => model.encoder(),
        }
    }
}

/// Sequences to vectors.
struct Vectors(Arc<Embedder>);

impl Compute for Vectors {
    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Values> {
        let all: Vec<_> = sequences.iter().map(|one| (&one.tokens, one.prompt)).collect();
        Ok(self.0.embed_tokens(&all)?.to_vec2()?)
    }
}

/// Sequences to their last hidden states, `(T, E)` row after row.
struct States(EncoderModel);

impl Compute for States {
    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Values> {
        let mut batch = PackedBatch::default();
        for Sequence { tokens, .. } in sequences {
            batch.push(&tokens.input_ids, &tokens.token_type_ids)?;
        }
        let states = self.0.forward_packed(&batch)?.to_dtype(DType::F32)?; // (N, E)
        let of = |at: &[usize]| {
            Ok(states.narrow(0, at[0], at[1] - at[0])?.flatten_all()?.to_vec1::<f32>()?)
        };
        batch.offsets().windows(2).map(of).collect()
    }
}

/// Sequences to the values of the head of a task.
pub(crate) struct Head<T>(Arc<T>);

/// To the logits of each label.
impl Compute for Head<TextClassifier> {
    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Values> {
        let tokens: Vec<Tokens> = sequences.iter().map(|one| one.tokens.clone()).collect();
        self.0.logits(&tokens)
    }
}

/// To the score of each label for each token.
impl Compute for Head<TokenClassifier> {
    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Values> {
        self.0.scores(&tokens(sequences))
    }
}

/// To the logits of each token as the start and the end of the answer.
impl Compute for Head<QuestionAnswerer> {
    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Values> {
        self.0.logits(&tokens(sequences))
    }
}

fn tokens<'a>(sequences: &[&'a Sequence]) -> Vec<&'a Tokens> {
    sequences.iter().map(|one| &one.tokens).collect()
}
