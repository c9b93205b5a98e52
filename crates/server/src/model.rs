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
    AttentionReader, BgeM3Embedder, Choice, Embedder, EmbeddingKind, EncoderModel, Inspection,
    LoadOptions, ModelFiles, MultiVectorEmbedder, Pipeline, Pooling, Precision, RaggedBatch,
    SparseEmbedder, TaskVisitor, TextClassifier, TextRole, TextTokenizer, Tokens, for_each_task,
};

use crate::{
    embedding_model::{EmbeddingModel, HasPrompts, Rows, check_finite},
    engine::{Compute, Key, KeyKind, Sequence, Target},
};

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
    /// `None` for a model without an encoder.
    attention: Option<AttentionReader>,
    precision: Precision,
    created: SystemTime,
}

/// The task of a model, with its pipeline.
pub(crate) struct Task {
    /// [`Pipeline::TASK`], or [`EmbeddingModel::TASK`].
    pub name: &'static str,
    /// The route of this task.
    pub route: String,
    pub tokenizer: TextTokenizer,
    /// `None` for an embedding model without an encoder.
    pub encoder: Option<EncoderModel>,
    /// The length of the vectors of an embedding model.
    pub dimension: Option<usize>,
    /// The labels of a classifier.
    pub labels: Vec<String>,
    pub prompts: Option<Arc<dyn HasPrompts>>,
    /// One, or that of each kind of embedding, of which the first has this task's name.
    pipelines: Vec<Arc<dyn Any + Send + Sync>>,
}

/// The choice of an embedding model, instead of the task that the model's files name.
#[derive(Clone, Debug, PartialEq)]
pub enum Embedding {
    /// Dense vectors, pooled in this way instead of as the model's files say.
    Pooled(Pooling),
    /// Embeddings of this kind.
    Kind(EmbeddingKind),
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
        /// The problems of the files, as `encodle inspect` prints them; only the first if the
        /// weights cannot be opened.
        problems: String,
    },

    /// The server does not offer this kind of embedding.
    #[error("a model of the kind {kind} cannot be served")]
    Kind {
        /// The kind.
        kind: EmbeddingKind,
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
    /// Loads a model. Its files determine the task, unless `embedding` makes it an embedding model.
    ///
    /// # Errors
    /// [`Error::NoTask`] or [`Error::Kind`] if the model has no task that the server offers;
    /// [`Error::Problems`] or [`Error::Model`] if the model cannot be loaded.
    pub fn from_files(
        files: &ModelFiles,
        embedding: Option<Embedding>,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let task = Task::from_files(files, embedding, options)?;
        let encoder = task.encoder.clone();
        let attention =
            encoder.map(|encoder| AttentionReader::from_encoder(encoder, task.tokenizer.clone()));
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let precision = options.precision;
        Ok(Self { number, task, attention, precision, created: SystemTime::now() })
    }

    /// The name of the task in `/info`: `embedding`, `sparse_embedding`, `multi_vector_embedding`,
    /// `sequence_classification`, `token_classification`, `question_answering` or `fill_mask`.
    pub fn task_name(&self) -> &'static str {
        self.task.name
    }

    /// The maximum length of a text in tokens, special tokens included.
    pub fn max_input_length(&self) -> usize {
        self.task.tokenizer.max_seq_length()
    }

    /// The length of the vectors, for an embedding model.
    pub fn dimension(&self) -> Option<usize> {
        self.task.dimension
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

    /// # Errors
    /// [`encoder::InputError::NoEncoder`] for a model without an encoder.
    pub(crate) fn attention(&self) -> encoder::Result<&AttentionReader> {
        Ok(self.attention.as_ref().ok_or(encoder::InputError::NoEncoder)?)
    }

    /// When the model was loaded, in seconds since 1970.
    pub(crate) fn created(&self) -> u64 {
        self.created.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
    }

    /// Computes two sequences of padding tokens, of length 1 and of up to 128, so that scratch
    /// buffers are allocated and, on a GPU, the kernels are compiled before the first request.
    pub(crate) fn warm_up(&self) -> encoder::Result<()> {
        let Some(model) = &self.task.encoder else { return Ok(()) };
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

    /// The computation of rows, by an embedding model that shares this model's weights.
    /// `normalize` means the same as in [`KeyKind::Rows`].
    pub(crate) fn rows<E: EmbeddingModel>(
        &self,
        model: Arc<E>,
        role: TextRole,
        normalize: Option<bool>,
    ) -> Target<E::Row> {
        let (task, dimension) = (E::TASK, model.dimension());
        self.target(KeyKind::Rows { task, dimension, normalize, role }, Rows { model, role })
    }

    /// The computation of the last hidden states.
    ///
    /// # Errors
    /// [`encoder::InputError::NoEncoder`] for a model without an encoder.
    pub(crate) fn states(&self) -> encoder::Result<Target<Vec<f32>>> {
        Ok(self.target(KeyKind::States, States(self.task.encoder()?.clone())))
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
        embedding: Option<Embedding>,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        let kind = match embedding {
            Some(Embedding::Pooled(pooling)) => {
                let embedder = Embedder::from_transformer(files, pooling, options)?;
                return Ok(Self::embedding(embedder));
            }
            Some(Embedding::Kind(kind)) => Some(kind),
            // `Dense` is also the kind of a folder that is no embedding model.
            None => match EmbeddingKind::from_files(files) {
                Ok(EmbeddingKind::Dense) | Err(_) => None,
                Ok(kind) => Some(kind),
            },
        };
        if let Some(kind) = kind {
            return Self::of_kind(kind, files, options);
        }
        let Inspection { runs_as, mut problems, weights, .. } = Inspection::new(files);
        if weights.is_none() {
            // These are probably not the files of a model: report the first problem only.
            problems.truncate(1);
        }
        if runs_as.contains(&"Embedder") {
            return Self::of_kind(EmbeddingKind::Dense, files, options);
        }
        let mut loader = TaskLoader { runs_as: &runs_as, files, options, task: None };
        for_each_task(&mut loader);
        match loader.task {
            Some(task) => Ok(task?),
            None if problems.is_empty() => Err(Error::NoTask { found: runs_as.join(", ") }),
            None => Err(Error::Problems { problems: problems.join("; ") }),
        }
    }

    /// Loads an embedding model.
    fn of_kind(
        kind: EmbeddingKind,
        files: &ModelFiles,
        options: &LoadOptions,
    ) -> Result<Self, Error> {
        match kind {
            EmbeddingKind::Dense => Ok(Self::embedding(Embedder::from_files(files, options)?)),
            EmbeddingKind::Sparse => {
                Ok(Self::embedding(SparseEmbedder::from_files(files, options)?))
            }
            EmbeddingKind::Multi => {
                Ok(Self::embedding(MultiVectorEmbedder::from_files(files, options)?))
            }
            EmbeddingKind::All => {
                let model = BgeM3Embedder::from_files(files, options)?;
                let mut task = Self::embedding(model.dense().clone());
                task.pipelines.push(Arc::new(model.sparse().clone()));
                task.pipelines.push(Arc::new(model.multi_vector().clone()));
                Ok(task)
            }
            kind => Err(Error::Kind { kind }),
        }
    }

    /// The task of an embedding model.
    fn embedding<E: EmbeddingModel>(model: E) -> Self {
        let model = Arc::new(model);
        Self {
            name: E::TASK,
            route: E::ROUTE.to_string(),
            tokenizer: model.tokenizer().clone(),
            encoder: model.encoder().cloned(),
            dimension: Some(model.dimension()),
            labels: vec![],
            prompts: Some(model.clone()),
            pipelines: vec![model],
        }
    }

    /// The task of a pipeline.
    fn of_pipeline<P: Pipeline>(pipeline: P) -> Self {
        let pipeline = Arc::new(pipeline);
        let classifier = (pipeline.clone() as Arc<dyn Any + Send + Sync>).downcast();
        Self {
            name: P::TASK,
            route: format!("/{}", P::COMMAND.replace('-', "_")),
            tokenizer: pipeline.tokenizer().clone(),
            encoder: Some(pipeline.encoder().clone()),
            dimension: None,
            labels: pipeline.label_names().to_vec(),
            prompts: classifier.ok().map(|model: Arc<TextClassifier>| model as _),
            pipelines: vec![pipeline],
        }
    }

    /// The task with its route, for errors.
    pub fn described(&self) -> String {
        format!("{} ({})", self.name, self.route)
    }

    /// # Errors
    /// [`encoder::InputError::NoEncoder`] for a model without an encoder.
    pub fn encoder(&self) -> encoder::Result<&EncoderModel> {
        Ok(self.encoder.as_ref().ok_or(encoder::InputError::NoEncoder)?)
    }

    /// The pipeline of this type, if there is one.
    pub fn pipeline<P: Any + Send + Sync>(&self) -> Option<Arc<P>> {
        self.pipelines.iter().find_map(|pipeline| pipeline.clone().downcast().ok())
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
        if self.task.is_none() && P::MODELS.iter().any(|model| self.runs_as.contains(model)) {
            self.task = Some(P::load(self.files, self.options).map(Task::of_pipeline));
        }
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
        let all = batch.offsets().windows(2).map(states_of_text);
        let all = all.collect::<encoder::Result<Vec<Vec<f32>>>>()?;
        check_finite(all.iter().map(Vec::as_slice))?;
        Ok(all)
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
