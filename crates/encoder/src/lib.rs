//! BERT as a transformer encoder: from a checkpoint's files to hidden states and embeddings.
//!
//! | letter | meaning |
//! |---|---|
//! | B, T | batch, sequence length |
//! | N | tokens of a packed batch |
//! | E, F | `hidden_size`, `intermediate_size` |
//! | L, H | layers, heads |
//!
//! Text goes through these in order, each the only one that knows its step:
//!
//! 1. [`Embedder`]: the whole way
//! 2. [`TextTokenizer`]: text to token ids
//! 3. [`PackedBatch`]: sequences one after another, no padding
//! 4. [`BertEmbeddings`]: ids to hidden states
//! 5. [`Encoder`] of [`EncoderLayer`]s: [`mha::SelfAttention`], [`PositionWiseFeedForward`]
//! 6. [`Pooling`]: hidden states to one vector
//!
//! The other half of the Transformer is [`BertDecoder`], a stack of [`DecoderLayer`]s that
//! [`EncoderDecoder`] joins to an encoder.
//!
//! Checkpoints that were trained for a task have a head on the encoder: [`BertForMaskedLm`],
//! [`BertForNextSentencePrediction`], [`BertForSequenceClassification`],
//! [`BertForTokenClassification`], [`BertForQuestionAnswering`].
//!
//! [`BertModel`] is 4 and 5 with the pooler; [`BertConfig`] and [`ModelFiles`] say what it is
//! made from, [`LoadReport`] what of it was found, [`Inspection`] what a folder can be run as.
//!
//! # Examples
//! Embed sentences:
//! ```
//! use candle_core::Device;
//! use encoder::{Embedder, Precision};
//!
//! # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
//! let dir = "weights/all-MiniLM-L6-v2";
//! let embedder = Embedder::from_dir(dir, Precision::F32, &Device::Cpu)?;
//! let e = embedder.embed(&["I love AI"])?; // (1, 384)
//! let length = e.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
//! assert!((length - 1.0).abs() < 1e-6);
//! # Ok::<(), encoder::Error>(())
//! ```
#![forbid(unsafe_code)]

mod block;
mod error;
mod load;
mod models;
mod pipelines;
mod precision;
mod text;

pub use block::{BertEmbeddings, DecoderLayer, Encoder, EncoderLayer, PositionWiseFeedForward};
pub use error::{Error, Result};
#[cfg(feature = "hub")]
pub use load::{Fetched, Hub};
pub use load::{LoadReport, Mismatched, Missing, ModelFiles};
pub use mha::Activation;
pub use models::{
    AnswerScores, BertConfig, BertDecoder, BertForMaskedLm, BertForNextSentencePrediction,
    BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification, BertModel,
    BertOutput, BertStates, DecoderAttentions, DecoderCache, DecoderMemory, EncoderDecoder,
    EncoderDecoderConfig, GenerateConfig, Labels, Strategy,
};
pub use pipelines::{
    Aggregation, Answer, Answers, AttentionKind, AttentionReader, Candidate, EmbedOptions,
    Embedder, Embeddings, Entity, Hit, Inspection, LongTexts, MaskFiller, Nearest, Pooling,
    PoolingMode, QuestionAnswerer, Search, TextAttention, TextClassifier, TokenClassifier,
    TokenizedTexts, Truncated,
};
pub use precision::Precision;
pub use text::{PackedBatch, Prompt, TextTokenizer, Tokens};
