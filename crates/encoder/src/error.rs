//! What can go wrong in this crate.

use crate::LoadReport;

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A precision that a device does not compute in.
    #[error("{precision:?} is computed on the CPU only: expected F32, F16 or Bf16 on {device:?}")]
    Precision {
        /// What was asked for.
        precision: crate::Precision,
        /// Where.
        device: candle_core::DeviceLocation,
    },

    /// There is no model where one was looked for.
    #[error(
        "model folder {path} not found: expected a folder with config.json and model.safetensors"
    )]
    NoFolder {
        /// The folder.
        path: String,
    },

    /// Nothing that a model can be read from.
    #[error(
        "model {got:?} not found: expected a folder, a file of weights, or org/name[@revision] on \
         the hub"
    )]
    ModelId {
        /// What was asked for.
        got: String,
    },

    /// The hub has no such model, or does not show it.
    #[error(
        "model {id} not found at {endpoint}: expected a public one, one that the token in HF_TOKEN \
         may read, or the path of a folder or a file"
    )]
    NoModel {
        /// Its name.
        id: String,
        /// The hub.
        endpoint: String,
    },

    /// The model is there, and has no such branch, tag or commit.
    #[error("model {id} has no revision {revision:?}: expected a branch, a tag or a commit")]
    NoRevision {
        /// Its name.
        id: String,
        /// What was asked for.
        revision: String,
    },

    /// The model is there, and not for everybody.
    #[error(
        "model {id} may not be read: expected the token of somebody with access in HF_TOKEN; ask \
         for access at {endpoint}/{id}"
    )]
    Gated {
        /// Its name.
        id: String,
        /// The hub.
        endpoint: String,
    },

    /// The cache lacks a file, and the hub was not asked for it or did not answer.
    #[error(
        "{file} of model {id} is not in the cache {cache}, and the hub was not asked or cannot be \
         reached: fetch it once with the network and without HF_HUB_OFFLINE"
    )]
    Offline {
        /// The model's name.
        id: String,
        /// The file.
        file: String,
        /// The folder.
        cache: String,
    },

    /// What the hub has cannot be had.
    #[error("{url} cannot be fetched: {what}; try again later")]
    Fetch {
        /// The file.
        url: String,
        /// What happened.
        what: String,
    },

    /// What was fetched is not what the hub has.
    #[error("{url} was not fetched whole: expected {expected}, got {got}; nothing of it is kept")]
    WrongFile {
        /// The file.
        url: String,
        /// Its length or hash.
        expected: String,
        /// That of what came.
        got: String,
    },

    /// The cache cannot be written.
    #[error("{path} cannot be written: {source}; HF_HUB_CACHE names another cache")]
    Cache {
        /// The file.
        path: String,
        /// What the operating system said.
        source: std::io::Error,
    },

    /// No place for a cache.
    #[error("no folder for a cache is known: expected a home, or HF_HUB_CACHE")]
    NoCache,

    /// A file that the model needs is not there.
    #[error("{path} not found: expected {expected}")]
    NoFile {
        /// The file.
        path: String,
        /// What it would have said.
        expected: &'static str,
    },

    /// A file cannot be read.
    #[error("{path} cannot be read: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the operating system said.
        source: std::io::Error,
    },

    /// A file is not the JSON it should be.
    #[error("{path} is not as expected: {at}{source}")]
    Json {
        /// The file.
        path: String,
        /// The key and `: `, where it is the value of one that is wrong.
        at: String,
        /// Where, and what is wrong.
        source: serde_json::Error,
    },

    /// A model asks for what is not computed here.
    #[error("{path} asks for {key} {got}: expected {expected}, which is all that is computed here")]
    Unsupported {
        /// The file that asks for it.
        path: String,
        /// The key it is asked with.
        key: &'static str,
        /// What is computed.
        expected: &'static str,
        /// What it asks for.
        got: String,
    },

    /// A safetensors file is damaged.
    #[error(
        "{path} is not a whole safetensors file: {source}; fetch it again if a download was cut short"
    )]
    Safetensors {
        /// The file.
        path: String,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },

    /// A file of PyTorch's that cannot be read as tensors.
    #[error(
        "{path} is not a dictionary of tensors that PyTorch saved: {what}; fetch it again if a \
         download was cut short, or save it as safetensors"
    )]
    Pickle {
        /// The file.
        path: String,
        /// What is wrong with it.
        what: String,
    },

    /// A file that git-lfs stands in for.
    #[error("{path} is a pointer of Git LFS: expected the weights themselves; run git lfs pull")]
    LfsPointer {
        /// The file.
        path: String,
    },

    /// A shard's name that leads elsewhere.
    #[error("{path} names the shard {got:?}: expected the name of a file beside it")]
    ShardName {
        /// The index.
        path: String,
        /// The name.
        got: String,
    },

    /// A tensor that is not where the index says.
    #[error("{path}: expected tensor {tensor:?} in {expected}, which does not have it")]
    NotInShard {
        /// The index.
        path: String,
        /// The tensor.
        tensor: String,
        /// The shard that the index names.
        expected: String,
    },

    /// A tensor in two shards.
    #[error("tensor {tensor:?} is in {} and in {}: expected it once", paths[0], paths[1])]
    TwoShards {
        /// The tensor.
        tensor: String,
        /// Both shards.
        paths: [String; 2],
    },

    /// A checkpoint does not hold what its config asks for.
    #[error(transparent)]
    Checkpoint(Box<LoadReport>),

    /// Two models in one file.
    #[error(
        "{path} holds two models: expected tensors under one prefix, \
         got \"{}embeddings.\" and \"{}embeddings.\"",
        prefixes[0],
        prefixes[1]
    )]
    TwoPrefixes {
        /// The file.
        path: String,
        /// The prefixes of both.
        prefixes: [&'static str; 2],
    },

    /// The tokenizer cannot be built, or fails on a text.
    #[error("{path} is not a tokenizer that can be used: {source}")]
    Tokenizer {
        /// The file.
        path: String,
        /// What the tokenizer said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// An id without a row in its table.
    #[error("{name} holds {got}: expected 0 or more, and below {size} ({field})")]
    Id {
        /// The argument.
        name: &'static str,
        /// The first such id.
        got: i64,
        /// The size of the table.
        size: usize,
        /// The key of the config that gives it.
        field: &'static str,
    },

    /// A sequence is longer than the model has positions for.
    #[error(
        "a sequence has {got} tokens: expected at most {max} (max_position_embeddings); truncate it"
    )]
    TooLong {
        /// Its length, padding included where it comes first.
        got: usize,
        /// The longest there can be.
        max: usize,
    },

    /// A mask of packed sequences with padded ones.
    #[error(
        "mask is block-diagonal: expected one of padded sequences, whose positions all begin at 0; \
         give packed sequences to forward_packed"
    )]
    PackedMask,

    /// A longest sequence too short for any text.
    #[error(
        "max_seq_length {got} leaves no room for text: expected more than the {special} special \
         tokens that every text gets ({path})"
    )]
    NoRoom {
        /// The file that sets it, or the model's own positions.
        path: String,
        /// The longest sequence.
        got: usize,
        /// The number of special tokens.
        special: usize,
    },

    /// A text that the tokenizer makes nothing of.
    #[error("text {text:?} has no tokens: expected at least a special one, such as [CLS]")]
    NoTokens {
        /// How the text begins.
        text: String,
    },

    /// An empty sequence in a packed batch: pooling needs its first token.
    #[error("sequence {index} of the batch is empty: expected at least one token")]
    EmptySequence {
        /// Its place in the batch, from 0.
        index: usize,
    },

    /// A text of which pooling leaves nothing.
    #[error(
        "a text has no tokens beyond the {tokens} of its prompt: expected more, since the prompt is \
         not pooled; shorten the prompt"
    )]
    OnlyPrompt {
        /// Its tokens.
        tokens: usize,
    },

    /// A text longer than the model takes, where none may be.
    #[error(
        "text {text:?} has {got} tokens: expected at most {max}; cut it, or let it be truncated or \
         split into windows"
    )]
    LongText {
        /// How the text begins.
        text: String,
        /// Its tokens, special ones included.
        got: usize,
        /// The longest there can be.
        max: usize,
    },

    /// A question so long that no token of the text fits beside it.
    #[error("question {question:?} has {got} tokens: expected at most {max}; shorten it")]
    LongQuestion {
        /// How the question begins.
        question: String,
        /// Its tokens, without special ones.
        got: usize,
        /// The most that leave room for one token of the text.
        max: usize,
    },

    /// A mask in the part of a text that truncation removes.
    #[error(
        "text {text:?} is longer than {max} tokens, and truncation would remove {masks} of its masks: \
         expected none; shorten it"
    )]
    MaskTruncated {
        /// How the text begins.
        text: String,
        /// Number of masks that truncation removes.
        masks: usize,
        /// The model's longest sequence.
        max: usize,
    },

    /// A prompt that the model does not have.
    #[error("prompt {got:?} is unknown: expected {}", one_of(known))]
    NoPrompt {
        /// The name asked for.
        got: String,
        /// The names there are.
        known: Vec<String>,
    },

    /// A module that does not take what the one before it makes.
    #[error("{path}: expected in_features {expected} (of the module before it), got {got}")]
    Width {
        /// The module's file.
        path: String,
        /// What it takes.
        got: usize,
        /// What it is given.
        expected: usize,
    },

    /// A dimension that embeddings cannot be cut to.
    #[error("dimension {got} cannot be cut to: expected 1 to {max}, which the model makes")]
    Dimension {
        /// The dimension asked for.
        got: usize,
        /// The model's.
        max: usize,
    },

    /// A second text for a decoder, which reads one.
    #[error("decoder reads one text: expected no second, got {text:?}")]
    SecondText {
        /// How it begins.
        text: String,
    },

    /// Vectors of another length than the queries.
    #[error("vectors of {got} numbers: expected {expected}, as the queries have")]
    VectorWidth {
        /// Of the queries, or of the first.
        expected: usize,
        /// Of the others, or what is left of the last row.
        got: usize,
    },

    /// A row of a corpus that has NaN in it, or numbers whose squares are infinite.
    #[error("row {row} of the corpus has no cosine: expected finite numbers")]
    NotANumber {
        /// Its number.
        row: u64,
    },

    /// A text with nothing to fill.
    #[error("text {text:?} has no mask: expected at least one, such as [MASK]")]
    NoMask {
        /// How the text begins.
        text: String,
    },

    /// A memory for a decoder that has no use for it.
    #[error("decoder has no cross-attention: expected no memory, got one")]
    NoCrossAttention,

    /// No memory for a decoder that attends to one.
    #[error("decoder attends to a memory: expected the encoder's output, got none")]
    NoMemory,

    /// A cache or a memory that another decoder made.
    #[error("{what} is another decoder's: expected one of {expected} layers, got {got}")]
    OtherDecoder {
        /// Which of the two.
        what: &'static str,
        /// Its layers.
        got: usize,
        /// The decoder's layers.
        expected: usize,
    },

    /// Nothing to begin a text with.
    #[error(
        "config names no decoder_start_token_id: expected the token that every text begins with"
    )]
    NoStart,

    /// Prompts that are no batch.
    #[error("prompt {index} has {got} tokens: expected {expected}, as the first, and at least 1")]
    Prompts {
        /// Which one.
        index: usize,
        /// Its length.
        got: usize,
        /// The length of the first.
        expected: usize,
    },

    /// Scores that say nothing.
    #[error("scores are NaN or infinite: expected numbers; try a wider dtype")]
    NoScore,

    /// A value in a config that no model has.
    #[error("{field} {got} cannot be: expected {expected}")]
    Value {
        /// The key.
        field: &'static str,
        /// What it can be.
        expected: &'static str,
        /// What it is.
        got: f64,
    },

    /// Attention failed.
    #[error(transparent)]
    Attention(#[from] mha::Error),

    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// So that a model can be called with `?` inside a `candle_core::Module`.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Attention(error) => error.into(),
            other => candle_core::Error::wrap(other),
        }
    }
}

/// How a text begins, for errors.
pub(crate) fn beginning(text: &str) -> String {
    text.chars().take(40).collect()
}

fn one_of(names: &[String]) -> String {
    match names {
        [] => "none, for the model has no prompts; give the text itself".to_string(),
        names => format!("one of the model's, {}", names.join(", ")),
    }
}
