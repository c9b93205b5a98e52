//! BERT and similar encoders: load a checkpoint, and compute hidden states, embeddings or the
//! results of a head.
//!
//! Symbols in shapes:
//!
//! | symbol | meaning |
//! |---|---|
//! | B, T, S | batch size, query (target) length, key (source) length |
//! | N | number of tokens of a ragged batch |
//! | E, F | `hidden_size`, `intermediate_size` |
//! | L, H | number of layers, number of heads |
//!
//! # From text to vectors
//! [`Embedder`] runs these steps in order:
//!
//! 1. [`TextTokenizer`]: text to token ids
//! 2. [`RaggedBatch`]: sequences stored one after another, without padding
//! 3. [`InputEmbeddings`]: token ids to the first hidden states
//! 4. [`Encoder`], a stack of [`EncoderLayer`]s: [`mha::SelfAttention`] and
//!    [`PositionWiseFeedForward`]
//! 5. [`Pooling`]: hidden states to one vector
//! 6. the modules after the pooling, such as a linear map, or normalisation to length 1
//!
//! [`mod@reference`] is steps 3 and 4 of a BERT in about 80 lines of candle: start there to learn
//! how it works.
//!
//! # Models
//! - [`EncoderModel`]: steps 3 and 4, and the pooler. [`EncoderConfig`] is its config;
//!   [`ModelConfig`] reads the `config.json` of every architecture.
//! - [`CausalLm`]: a decoder with a language model head. [`EncoderDecoder`] combines it with an
//!   encoder.
//! - Encoders with a head: [`EncoderForMaskedLm`], [`EncoderForNextSentencePrediction`],
//!   [`EncoderForSequenceClassification`], [`EncoderForTokenClassification`],
//!   [`EncoderForQuestionAnswering`]; [`EncoderForLogitScore`] for causal language models that
//!   rank.
//!
//! # Files
//! [`ModelFiles`] provides the files of a model. [`LoadReport`] lists the tensors that were loaded,
//! ignored, unexpected, missing or mismatched. [`Inspection`] reports the types that can run the
//! model in a folder.
//!
//! # Pipelines
//! A pipeline combines a tokenizer and a model: [`Embedder`], [`TextClassifier`],
//! [`TokenClassifier`], [`QuestionAnswerer`], [`MaskFiller`], [`AttentionReader`].
//!
//! # Features
//! - `hub`: `Hub` loads models by name from the Hugging Face hub, with a local cache.
//! - `cuda`: runs models on NVIDIA GPUs. The build needs nvcc.
//!
//! # Examples
//! Embed sentences:
//! ```
//! use encoder::{Embedder, LoadOptions};
//!
//! let dir = "../../weights/all-MiniLM-L6-v2";
//! let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
//! let e = embedder.embed(&["I love AI"])?; // (1, 384)
//! let length = e.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
//! assert!((length - 1.0).abs() < 1e-6);
//! # Ok::<(), encoder::Error>(())
//! ```
#![deny(unsafe_code)] // with one exception: memory-mapping a file

mod block;
mod choice;
mod error;
mod load;
mod models;
mod pipelines;
mod precision;
pub mod reference;
mod text;
mod threads;

pub use block::{
    DecoderAttentions, DecoderCache, DecoderMemory, DisentangledConfig, EmbeddingsConfig, Encoder,
    EncoderConfig, EncoderLayer, FeedForwardConfig, FeedForwardKind, InputEmbeddings, NormConfig,
    NormKind, NormPlacement, PositionWiseFeedForward, Positions, RelativeBiasConfig,
    RotaryPositions,
};
pub use choice::{Choice, phrase};
pub use error::{
    CheckpointError, ConfigError, Error, FileError, HubError, InputError, Result,
    SparseVectorError, beginning,
};
#[cfg(feature = "hub")]
pub use load::{DownloadProgress, Hub};
pub use load::{
    LoadOptions, LoadReport, Mismatched, Missing, ModelFiles, PackedCache, PackedCacheFile,
};
pub use mha;
pub use models::{
    AnswerScores, BertConfig, CausalLm, EncoderDecoder, EncoderDecoderConfig, EncoderForLogitScore,
    EncoderForMaskedLm, EncoderForNextSentencePrediction, EncoderForQuestionAnswering,
    EncoderForSequenceClassification, EncoderForTokenClassification, EncoderModel, EncoderOutput,
    EncoderStates, GenerateConfig, HeadConfig, Labels, ModelConfig, RaggedBatch, SequencePooling,
    Strategy,
};
pub use ops::Activation;
pub use pipelines::*;
pub use precision::Precision;
pub use text::{
    CharacterPositions, Piece, Prompt, TextTokenizer, TextWindows, Tokens, TruncationSide,
};
pub use threads::threads;

/// Compiles the Rust blocks of README.md and of the pages of docs/ about this crate. These files
/// are not part of the published package, which is why the module exists in doctests only.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../../../README.md")]
    struct Readme;

    #[cfg(feature = "hub")]
    #[doc = include_str!("../../../docs/checkpoints.md")]
    struct Checkpoints;

    #[doc = include_str!("../../../docs/cuda.md")]
    struct Cuda;

    #[doc = include_str!("../../../docs/numerics.md")]
    struct Numerics;
}
