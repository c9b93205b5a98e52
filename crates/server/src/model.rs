//! A loaded model with its task.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use candle_core::DType;
use encoder::{
    AttentionReader, Choice, Embedder, EncoderModel, Inspection, LoadOptions, ModelFiles, Pipeline,
    Pooling, Precision, RaggedBatch, TaskVisitor, TextTokenizer, Tokens, for_each_task,
};

use crate::engine::{Compute, Key, KeyKind, Sequence, Target};

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
pub(crate) struct Task {
    /// [`Pipeline::TASK`], or [`EMBEDDING`].
    pub name: &'static str,
    pub tokenizer: TextTokenizer,
    pub encoder: EncoderModel,
    /// The labels of a classifier.
    pub labels: Vec<String>,
    pipeline: Arc<dyn Any + Send + Sync>,
}

/// The task of an [`Embedder`].
pub(crate) const EMBEDDING: &str = "embedding";

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
        /// The problems of the files, as `encodle inspect` prints them; only the first if the
        /// weights cannot be opened.
        problems: String,
    },

    /// The model has no task that the server offers.
    #[error(
        "the model has no task that the server offers: expected a sentence-transformers folder, a \
         chosen pooling, or a head for classification, question answering or masked tokens; \
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
        let attention = AttentionReader::from_encoder(task.encoder.clone(), task.tokenizer.clone());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let precision = options.precision;
        Ok(Self { number, task, attention, precision, created: SystemTime::now() })
    }

    /// The name of the task in `/info`: `embedding`, `sequence_classification`,
    /// `token_classification`, `question_answering` or `fill_mask`.
    pub fn task_name(&self) -> &'static str {
        self.task.name
    }

    /// The maximum length of a text in tokens, special tokens included.
    pub fn max_input_length(&self) -> usize {
        self.task.tokenizer.max_seq_length()
    }

    /// The length of the vectors, for an embedding model.
    pub fn dimension(&self) -> Option<usize> {
        self.task.pipeline::<Embedder>().map(|embedder| embedder.dimension())
    }

    /// The number format of matrix products: `f32`, `f16`, `bf16` or `int8`.
    pub fn dtype(&self) -> &'static str {
        self.precision.name()
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn task(&self) -> &Task {
        &self.task
    }

    pub(crate) fn tokenizer(&self) -> &TextTokenizer {
        &self.task.tokenizer
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
        let model = &self.task.encoder;
        let id = self.tokenizer().pad_token_id();
        for length in [1, self.max_input_length().min(128)] {
            let mut batch = RaggedBatch::default();
            batch.push(&vec![id; length], &vec![0; length])?;
            model.forward_ragged(&batch)?;
        }
        Ok(())
    }

    fn target<C: Compute + 'static>(&self, kind: KeyKind, compute: C) -> Target<C::Values> {
        Target::new(Key { model: self.number, kind }, compute)
    }

    /// The computation of vectors, by an [`Embedder`] that shares this model's weights.
    /// `normalize` means the same as in [`KeyKind::Vectors`].
    pub(crate) fn vectors(
        &self,
        embedder: Arc<Embedder>,
        normalize: Option<bool>,
    ) -> Target<Vec<f32>> {
        let dimension = embedder.dimension();
        self.target(KeyKind::Vectors { dimension, normalize }, Vectors(embedder))
    }

    /// The computation of the last hidden states.
    pub(crate) fn states(&self) -> Target<Vec<f32>> {
        self.target(KeyKind::States, States(self.task.encoder.clone()))
    }

    /// The computation of the values of the model's task.
    pub(crate) fn values<P: Pipeline>(
        &self,
        pipeline: Arc<P>,
        params: Arc<P::Params>,
    ) -> Target<P::Values> {
        let batch_key = P::batch_key(&params);
        self.target(KeyKind::Task { batch_key }, TaskValues { pipeline, params })
    }
}

impl Task {
    fn from_files(
        files: &ModelFiles,
        pooling: Option<Pooling>,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        if let Some(pooling) = pooling {
            return Ok(Embedder::from_transformer(files, pooling, options)?.into());
        }
        let Inspection { runs_as, mut problems, weights, .. } = Inspection::new(files);
        if weights.is_none() {
            // These are probably not the files of a model: report the first problem only.
            problems.truncate(1);
        }
        if runs_as.contains(&"Embedder") {
            return Ok(Embedder::from_files(files, options)?.into());
        }
        let mut loader = TaskLoader { runs_as: &runs_as, files, options, task: None };
        for_each_task(&mut loader);
        match loader.task {
            Some(task) => Ok(task?),
            None if problems.is_empty() => Err(Error::NoTask { found: runs_as.join(", ") }),
            None => Err(Error::Problems { problems: problems.join("; ") }),
        }
    }

    /// The pipeline, if it has this type.
    pub fn pipeline<P: Any + Send + Sync>(&self) -> Option<Arc<P>> {
        self.pipeline.clone().downcast().ok()
    }
}

impl From<Embedder> for Task {
    fn from(embedder: Embedder) -> Self {
        Self {
            name: EMBEDDING,
            tokenizer: embedder.tokenizer().clone(),
            encoder: embedder.encoder().clone(),
            labels: vec![],
            pipeline: Arc::new(embedder),
        }
    }
}

/// Loads the model for the first task that it can do.
struct TaskLoader<'a> {
    runs_as: &'a [&'static str],
    files: &'a ModelFiles,
    options: &'a LoadOptions,
    task: Option<encoder::Result<Task>>,
}

impl TaskVisitor for TaskLoader<'_> {
    fn visit<P: Pipeline>(&mut self) {
        if self.task.is_none() && self.runs_as.contains(&P::MODEL) {
            let pipeline = P::load(self.files, self.options);
            self.task = Some(pipeline.map(|pipeline| Task {
                name: P::TASK,
                tokenizer: pipeline.tokenizer().clone(),
                encoder: pipeline.encoder().clone(),
                labels: pipeline.label_names().to_vec(),
                pipeline: Arc::new(pipeline),
            }));
        }
    }
}

/// Sequences to vectors.
struct Vectors(Arc<Embedder>);

impl Compute for Vectors {
    type Values = Vec<f32>;

    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<Vec<f32>>> {
        let all: Vec<_> = sequences.iter().map(|one| (&one.tokens, one.prompt)).collect();
        finite(self.0.embed_sequences(&all)?.to_vec2()?)
    }
}

/// Sequences to their last hidden states, `(T, E)` row after row.
struct States(EncoderModel);

impl Compute for States {
    type Values = Vec<f32>;

    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<Vec<f32>>> {
        let mut batch = RaggedBatch::default();
        for Sequence { tokens, .. } in sequences {
            batch.push(&tokens.input_ids, &tokens.token_type_ids)?;
        }
        let states = self.0.forward_ragged(&batch)?.to_dtype(DType::F32)?; // (N, E)
        let states_of_text = |range: &[usize]| {
            let rows = states.narrow(0, range[0], range[1] - range[0])?; // (T, E)
            Ok(rows.flatten_all()?.to_vec1::<f32>()?)
        };
        finite(batch.offsets().windows(2).map(states_of_text).collect::<encoder::Result<_>>()?)
    }
}

/// The values, or an error if one is NaN or infinite, which JSON cannot represent.
fn finite(values: Vec<Vec<f32>>) -> encoder::Result<Vec<Vec<f32>>> {
    if values.iter().flatten().all(|value| value.is_finite()) {
        Ok(values)
    } else {
        Err(encoder::Error::NonFiniteOutput)
    }
}

/// Sequences to the values of a task.
struct TaskValues<P: Pipeline> {
    pipeline: Arc<P>,
    params: Arc<P::Params>,
}

impl<P: Pipeline> Compute for TaskValues<P> {
    type Values = P::Values;

    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<P::Values>> {
        let tokens: Vec<&Tokens> = sequences.iter().map(|one| &one.tokens).collect();
        self.pipeline.compute(&tokens, &self.params)
    }
}
