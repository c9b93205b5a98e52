//! The error type of this crate.

use crate::LoadReport;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error from loading or running a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model's files cannot be obtained from the hub: check the model's name, the token, the
    /// network or the cache folder.
    #[error(transparent)]
    Hub(#[from] HubError),

    /// A file or folder is missing, cannot be read or written, or is damaged: mend the file.
    #[error(transparent)]
    File(#[from] FileError),

    /// The settings of a model, or the options it is loaded with, are not supported or contradict
    /// each other: use another model, or change the settings.
    #[error(transparent)]
    Config(#[from] ConfigError),

    /// The tensors in a model's weights files do not fit its config.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),

    /// A text, a token id or an argument of a call is invalid: change the input.
    #[error(transparent)]
    Input(#[from] InputError),

    /// A score, or another value that the model computed, is NaN or infinite. In generation, a
    /// score may be −∞ if another score is finite.
    #[error(
        "the model computed NaN or infinite values: expected finite values; if the dtype is f16, try \
         bf16 or f32"
    )]
    NonFiniteOutput,

    /// The caller set the flag that stops the computation.
    #[error("computation stopped by the caller")]
    Stopped,

    /// An error of the crates `mha` and `ops`. The docs of this crate name either this variant or
    /// the error in it, for example [`mha::Error::Shape`].
    #[error(transparent)]
    Attention(#[from] mha::Error),

    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A model's files cannot be obtained from the hub: check the model's name, the token, the network
/// or the cache folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The model id is neither a path of a folder or file nor a name on the hub.
    #[error(
        "model {got:?} not found: expected a folder, a weights file, or org/name[@revision] on \
         the hub"
    )]
    ModelId {
        /// The model id.
        got: String,
    },

    /// The hub has no model of this name, or the token has no access to it.
    #[error(
        "model {id} not found at {endpoint}: expected a public model, a model that the token in \
         HF_TOKEN may read, or the path of a folder or file"
    )]
    NoModel {
        /// The model's name.
        id: String,
        /// The hub's URL.
        endpoint: String,
    },

    /// The model has no branch, tag or commit of this name.
    #[error("model {id} has no revision {revision:?}: expected a branch, a tag or a commit")]
    NoRevision {
        /// The model's name.
        id: String,
        /// The requested revision.
        revision: String,
    },

    /// Access to the model is restricted, and the token does not grant it.
    #[error(
        "access to model {id} is restricted: expected a token with access in HF_TOKEN; request \
         access at {endpoint}/{id}"
    )]
    Gated {
        /// The model's name.
        id: String,
        /// The hub's URL.
        endpoint: String,
    },

    /// A file is not in the cache, and the hub is in offline mode or cannot be reached.
    #[error(
        "{file} of model {id} is not in the cache {cache}, and the hub {}",
        why_offline(cause.as_deref())
    )]
    Offline {
        /// The model's name.
        id: String,
        /// The file.
        file: String,
        /// The cache folder.
        cache: String,
        /// Why the hub cannot be reached; `None` in offline mode.
        cause: Option<String>,
    },

    /// The hub's URL is not an HTTP URL.
    #[error(
        "the hub's URL {got:?} is not supported: expected a URL that starts with https:// or \
         http://; check HF_ENDPOINT"
    )]
    Endpoint {
        /// The URL.
        got: String,
    },

    /// The access token has a character that is not a visible ASCII character.
    #[error(
        "the access token has a character that is not a visible ASCII character: expected the hub's \
         token in HF_TOKEN or in the token file"
    )]
    Token,

    /// A download failed.
    #[error("{url} cannot be fetched: {what}")]
    Fetch {
        /// The file's URL.
        url: String,
        /// The cause.
        what: String,
    },

    /// A downloaded file has the wrong length or hash.
    #[error(
        "{url} failed verification: expected {expected}, got {got}; the download was discarded"
    )]
    WrongFile {
        /// The file's URL.
        url: String,
        /// The length or hash according to the hub.
        expected: String,
        /// The length or hash of the download.
        got: String,
    },

    /// The cache cannot be written.
    #[error("{path} cannot be written: {source}; set HF_HUB_CACHE to use another cache")]
    Cache {
        /// The file.
        path: String,
        /// The error of the operating system.
        source: std::io::Error,
    },

    /// The environment variables do not determine the cache folder.
    #[error(
        "cache folder is unknown: expected HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME to be set, or a \
         home folder"
    )]
    NoCache,
}

/// A file or folder is missing, cannot be read or written, or is damaged: mend the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The model folder does not exist.
    #[error(
        "model folder {path} not found: expected a folder with config.json and model.safetensors"
    )]
    NoFolder {
        /// The folder.
        path: String,
    },

    /// A file that the model needs does not exist.
    #[error("{path} not found: expected {expected}")]
    NoFile {
        /// The file.
        path: String,
        /// The content that the file should have.
        expected: &'static str,
    },

    /// A file cannot be read.
    #[error("{path} cannot be read: {source}")]
    Io {
        /// The file.
        path: String,
        /// The error of the operating system.
        source: std::io::Error,
    },

    /// A file or folder cannot be written or removed.
    #[error("{path} cannot be written or removed: {source}")]
    Write {
        /// The file or folder.
        path: String,
        /// The error of the operating system.
        source: std::io::Error,
    },

    /// A file is not valid JSON, lacks a required key, or has a key with an invalid value.
    #[error("{path} cannot be parsed: {at}{source}")]
    Json {
        /// The file.
        path: String,
        /// The key of an invalid value, followed by `: `; otherwise empty.
        at: String,
        /// The parser's error, with its position.
        source: serde_json::Error,
    },

    /// A safetensors file is invalid.
    #[error(
        "{path} is not a valid safetensors file: {source}; download it again if it was truncated"
    )]
    Safetensors {
        /// The file.
        path: String,
        /// The cause.
        source: safetensors::SafeTensorError,
    },

    /// A file written by `torch.save` cannot be read as a dictionary of tensors.
    #[error(
        "{path} cannot be read as a PyTorch dictionary of tensors: {what}; download it again if it \
         was truncated, or convert it to safetensors"
    )]
    Pickle {
        /// The file.
        path: String,
        /// The cause.
        what: String,
    },

    /// A file is a Git LFS pointer: its content was not downloaded.
    #[error("{path} is a Git LFS pointer: expected the file's content; run git lfs pull")]
    LfsPointer {
        /// The file.
        path: String,
    },

    /// A web page was saved in place of a file.
    #[error(
        "{path} is an HTML or XML page: expected the file's content; download the file itself (on \
         the hub, its address has /resolve/, not /blob/)"
    )]
    WebPage {
        /// The file.
        path: String,
    },

    /// The tokenizer cannot be built, or fails on a text.
    #[error("{path} is not a usable tokenizer: {source}")]
    Tokenizer {
        /// The file.
        path: String,
        /// The tokenizer's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The settings of a model, or the options it is loaded with, are not supported or contradict each
/// other: use another model, or change the settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The device does not support the precision.
    #[error("{precision:?} is computed on the CPU only: expected F32, F16 or Bf16 on {device:?}")]
    Precision {
        /// The requested precision.
        precision: crate::Precision,
        /// The device.
        device: candle_core::DeviceLocation,
    },

    /// A setting of the model has a value that this crate does not support.
    #[error("{path}: {key} {got} is not supported: expected {expected}")]
    Unsupported {
        /// The file or the config with the setting.
        path: String,
        /// The setting.
        key: &'static str,
        /// The supported values.
        expected: &'static str,
        /// The unsupported value.
        got: String,
    },

    /// A chat template cannot render a query and a document.
    #[error("{path}: chat_template is not supported: {what}")]
    ChatTemplate {
        /// The file with the template, or the one that needs it.
        path: String,
        /// The reason.
        what: String,
    },

    /// The maximum sequence length leaves no room for text beside the special tokens.
    #[error(
        "the maximum length of {got} tokens ({path}) leaves no room for text: expected more than \
         {special}, the number of special tokens"
    )]
    NoRoom {
        /// The source of the maximum: the path of a file, the model's number of positions, or `set
        /// by the caller`.
        path: String,
        /// The maximum sequence length.
        got: usize,
        /// The number of special tokens of a text or of a pair of texts.
        special: usize,
    },

    /// The maximum sequence length exceeds the model's number of positions.
    #[error(
        "max_seq_length {got} is too large: expected at most {max}, the number of the model's \
         positions"
    )]
    MaxSeqLength {
        /// The maximum sequence length.
        got: usize,
        /// The number of positions.
        max: usize,
    },

    /// A module's input width differs from the output width of the preceding module.
    #[error(
        "{path}: expected in_features {expected} (the width of the preceding module), got {got}"
    )]
    Width {
        /// The module's file.
        path: String,
        /// The module's input width.
        got: usize,
        /// The output width of the preceding module.
        expected: usize,
    },

    /// The config has no `decoder_start_token_id`.
    #[error(
        "config has no decoder_start_token_id: expected the id of the token that starts every text"
    )]
    NoStart,

    /// A value is out of range.
    #[error("{field} {got} is invalid: expected {expected}")]
    Value {
        /// The name of the setting.
        field: &'static str,
        /// The valid values.
        expected: &'static str,
        /// The value.
        got: f64,
    },
}

/// The tensors in a model's weights files do not fit its config.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A tensor to save belongs neither to the encoder nor to the decoder.
    #[error("tensor {got:?} has no known prefix: expected encoder. or decoder.")]
    TensorPrefix {
        /// The tensor's name.
        got: String,
    },

    /// The name of a shard in an index is not a plain file name.
    #[error("{path} names the shard {got:?}: expected the name of a file in the same folder")]
    ShardName {
        /// The index.
        path: String,
        /// The shard's name.
        got: String,
    },

    /// A tensor is not in the shard that the index names.
    #[error("{path}: tensor {tensor:?} not found: expected it in {expected}")]
    NotInShard {
        /// The index.
        path: String,
        /// The tensor.
        tensor: String,
        /// The shard that the index names.
        expected: String,
    },

    /// A tensor is in two shards.
    #[error("tensor {tensor:?} is in {} and in {}: expected it in one shard", paths[0], paths[1])]
    TwoShards {
        /// The tensor.
        tensor: String,
        /// Both shards.
        paths: [String; 2],
    },

    /// The tensors of a checkpoint do not match its config.
    #[error(transparent)]
    Tensors(Box<LoadReport>),

    /// A file holds two models.
    #[error(
        "{path} holds two models: expected tensors under one prefix, \
         got \"{}embeddings.\" and \"{}embeddings.\"",
        prefixes[0],
        prefixes[1]
    )]
    TwoPrefixes {
        /// The file.
        path: String,
        /// The prefixes of both models.
        prefixes: [String; 2],
    },
}

/// A text, a token id or an argument of a call is invalid: change the input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// An id is outside its embedding table.
    #[error("{name} holds {got}: expected 0 or more, and below {size} ({field})")]
    Id {
        /// The argument.
        name: &'static str,
        /// The first id outside the table.
        got: i64,
        /// Number of rows of the table.
        size: usize,
        /// The config key of the number of rows.
        field: &'static str,
    },

    /// A sequence is longer than the model allows.
    #[error("a sequence has {got} tokens: expected at most {max}; truncate it")]
    TooLong {
        /// The sequence's length, including padding before its tokens, or, in generation, the
        /// requested `max_length`.
        got: usize,
        /// The maximum length.
        max: usize,
    },

    /// A mask for ragged sequences was passed with padded sequences.
    #[error(
        "mask is for ragged sequences: expected a mask for padded sequences; use forward_ragged for \
         ragged sequences"
    )]
    RaggedMask,

    /// A prompt leaves no room for text in the first window of a long text.
    #[error(
        "the prompt has {got} tokens or more: expected room for text beside the prompt in a window \
         of {max} tokens; use a shorter prompt"
    )]
    LongPrompt {
        /// The number of tokens of the prompt, truncated to the window.
        got: usize,
        /// The maximum sequence length.
        max: usize,
    },

    /// The tokenizer produced no tokens for a text.
    #[error(
        "text {text:?} has no tokens: expected a text with at least one token, since this \
         tokenizer adds no special tokens"
    )]
    NoTokens {
        /// The beginning of the text.
        text: String,
    },

    /// A single text for a model that scores pairs.
    #[error(
        "text {text:?} is not a pair: expected a query and a document, because the model is a \
         reranker that is a causal language model"
    )]
    OnlyPairs {
        /// The beginning of the text.
        text: String,
    },

    /// A sequence of a batch is empty. Pooling needs at least one token per sequence.
    #[error("sequence {index} of the batch is empty: expected at least one token")]
    EmptySequence {
        /// The sequence's index in the batch, from 0.
        index: usize,
    },

    /// The hidden states or the attention weights of a model without an encoder.
    #[error(
        "the model is a StaticEmbedding: expected a transformer, since only a transformer has \
         hidden states and attention weights"
    )]
    NoEncoder,

    /// All tokens of a text belong to its prompt, which pooling excludes.
    #[error(
        "a text has no tokens after its prompt: expected at least 1 (pooling excludes the prompt), \
         got 0 of {tokens}; shorten the prompt"
    )]
    OnlyPrompt {
        /// Number of tokens of the text.
        tokens: usize,
    },

    /// A text is longer than the maximum, and neither truncation nor splitting is enabled.
    #[error(
        "text {text:?} has {got} tokens: expected at most {max}; shorten it, or enable truncation \
         or splitting into windows"
    )]
    LongText {
        /// The index of the text, from 0.
        index: usize,
        /// The beginning of the text.
        text: String,
        /// Number of tokens of the text, special tokens included.
        got: usize,
        /// The maximum number of tokens.
        max: usize,
    },

    /// A question leaves no room for a token of the text.
    #[error("question {question:?} has {got} tokens: expected at most {max}; shorten it")]
    LongQuestion {
        /// The beginning of the question.
        question: String,
        /// Number of tokens of the question, without special tokens.
        got: usize,
        /// The largest number that leaves room for one token of the text.
        max: usize,
    },

    /// Truncation would remove mask tokens of a text.
    #[error(
        "text {text:?} is longer than {max} tokens: truncation would remove {masks} of its mask \
         tokens; shorten the text"
    )]
    MaskTruncated {
        /// The beginning of the text.
        text: String,
        /// Number of mask tokens that truncation would remove.
        masks: usize,
        /// The maximum sequence length.
        max: usize,
    },

    /// A setting has no value of this name.
    #[error("{setting} {got:?} is unknown: expected one of {}", expected.join(", "))]
    UnknownChoice {
        /// The setting.
        setting: &'static str,
        /// The name.
        got: String,
        /// The names of the setting's values.
        expected: Vec<&'static str>,
    },

    /// The parameters of a task are incomplete or have wrong types.
    #[error("the parameters of the task are invalid: {0}")]
    Parameter(#[source] serde_json::Error),

    /// The model has no prompt of this name.
    #[error("prompt {got:?} is unknown: expected {}", expected_prompts(known))]
    NoPrompt {
        /// The requested name.
        got: String,
        /// The names of the model's prompts.
        known: Vec<String>,
    },

    /// Embeddings cannot be truncated to this dimension.
    #[error(
        "embeddings cannot be truncated to dimension {got}: expected 1 to {max} (the dimension of \
         the model's embeddings)"
    )]
    Dimension {
        /// The requested dimension.
        got: usize,
        /// The dimension of the model's embeddings.
        max: usize,
    },

    /// A pair of texts was passed to a decoder, which reads one text.
    #[error("the model is a decoder, which reads one text: expected no second text, got {text:?}")]
    SecondText {
        /// The beginning of the second text.
        text: String,
    },

    /// The queries differ in length.
    #[error(
        "query {query} and query 0 differ in their number of values: expected {expected}, got {got}"
    )]
    QueryWidth {
        /// The query's index.
        query: usize,
        /// The number of values of query 0.
        expected: usize,
        /// The query's number of values.
        got: usize,
    },

    /// The vectors to search differ in length from the queries.
    #[error("a vector has length {got}: expected {expected}, the length of each query")]
    VectorWidth {
        /// The length of the queries.
        expected: usize,
        /// The length of the vectors of a file, or of an incomplete last row.
        got: usize,
    },

    /// A query has a value that is NaN or infinite.
    #[error("query {query} contains {value}: expected finite numbers")]
    QueryValue {
        /// The query's index.
        query: usize,
        /// The value.
        value: f32,
    },

    /// A token id is not in the vocabulary.
    #[error("token id {id} is unknown: expected the id of a token in the vocabulary")]
    UnknownToken {
        /// The id.
        id: u32,
    },

    /// A query has no values.
    #[error("query {query} is empty: expected at least one value")]
    EmptyQuery {
        /// The query's index.
        query: usize,
    },

    /// A row of a corpus contains NaN or ∞.
    #[error("row {row} of the corpus contains NaN or infinity: expected finite numbers")]
    NotFinite {
        /// The row's index.
        row: u64,
    },

    /// A row of a corpus is not a valid sparse vector.
    #[error("row {row} of the corpus: {source}")]
    SparseRow {
        /// The row's index.
        row: u64,
        /// The defect of the indices or values.
        source: SparseVectorError,
    },

    /// A query is not a valid sparse vector.
    #[error("query {query}: {source}")]
    SparseQuery {
        /// The query's index.
        query: usize,
        /// The defect of the indices or values.
        source: SparseVectorError,
    },

    /// The dot product of two sparse vectors exceeds the range of f32.
    #[error(
        "the dot product of row {row} of the corpus and a query is not finite in f32: expected \
         smaller values"
    )]
    ScoreOverflow {
        /// The row's index.
        row: u64,
    },

    /// A text has no mask token to fill.
    #[error("text {text:?} has no mask token: expected at least one, such as [MASK]")]
    NoMask {
        /// The beginning of the text.
        text: String,
    },

    /// A memory was passed to a decoder without cross-attention.
    #[error("decoder has no cross-attention: expected no memory, got one")]
    NoCrossAttention,

    /// No memory was passed to a decoder with cross-attention.
    #[error("decoder has cross-attention: expected a memory of the encoder's output, got none")]
    NoMemory,

    /// A cache or a memory has another number of layers than the decoder.
    #[error("{what} belongs to another decoder: expected layers = {expected}, got {got}")]
    OtherDecoder {
        /// `cache` or `memory`.
        what: &'static str,
        /// Number of layers of the cache or memory.
        got: usize,
        /// Number of layers of the decoder.
        expected: usize,
    },

    /// The prompts are empty or of different lengths.
    #[error(
        "prompt {index} has {got} tokens: expected {}",
        match expected {
            0 => "at least 1".to_string(),
            n => format!("{n}, as many as the first prompt"),
        }
    )]
    Prompts {
        /// The prompt's index.
        index: usize,
        /// The prompt's length.
        got: usize,
        /// The length of the first prompt; 0 if it is empty.
        expected: usize,
    },
}

/// Indices and values are not those of a sparse vector.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SparseVectorError {
    /// The numbers of indices and values differ.
    #[error("expected as many values as indices, got {indices} indices and {values} values")]
    Length {
        /// The number of indices.
        indices: usize,
        /// The number of values.
        values: usize,
    },

    /// An index is not above the index before it.
    #[error("expected ascending indices, each once, got {got} after {previous}")]
    Order {
        /// The index before.
        previous: u32,
        /// The index.
        got: u32,
    },

    /// An index is not a dimension of the model.
    #[error("expected indices below {dimension} (the dimension), got {got}")]
    Index {
        /// The index.
        got: u32,
        /// The dimension of the vectors.
        dimension: usize,
    },

    /// A value is NaN or infinite.
    #[error("expected finite values, got {value} at index {index}")]
    NotFinite {
        /// The index.
        index: u32,
        /// The value.
        value: f32,
    },
}

impl Error {
    /// [`ConfigError::Unsupported`] for the value `got` of a key in the file at `path`.
    pub(crate) fn unsupported(
        path: impl Into<String>,
        key: &'static str,
        expected: &'static str,
        got: impl ToString,
    ) -> Self {
        let got = got.to_string();
        Self::Config(ConfigError::Unsupported { path: path.into(), key, expected, got })
    }
}

impl From<ops::Error> for Error {
    fn from(error: ops::Error) -> Self {
        Self::Attention(error.into())
    }
}

/// Allows `?` on this crate's results inside a `candle_core::Module`.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Attention(error) => error.into(),
            other => candle_core::Error::wrap(other),
        }
    }
}

/// The first 40 characters of a text, by which an error names the text.
///
/// ```
/// assert_eq!(encoder::beginning(&"é".repeat(50)), "é".repeat(40));
/// ```
pub fn beginning(text: &str) -> String {
    text.chars().take(40).collect()
}

fn why_offline(cause: Option<&str>) -> String {
    match cause {
        Some(cause) => format!("cannot be reached: {cause}; try again later"),
        None => "is in offline mode: download it once online, without HF_HUB_OFFLINE and \
                 TRANSFORMERS_OFFLINE"
            .to_string(),
    }
}

fn expected_prompts(names: &[String]) -> String {
    match names {
        [] => "none, since the model has no prompts; pass the prompt's text instead".to_string(),
        names => format!("one of {}", names.join(", ")),
    }
}
