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

mod activation;
mod attention_reader;
mod classifier;
mod config;
mod decoder;
mod decoder_layer;
mod dense;
mod embedder;
mod embeddings;
mod encoder;
mod encoder_decoder;
mod error;
mod feed_forward;
mod generate;
mod heads;
mod layer;
mod layer_norm;
mod lm_head;
mod load;
mod mask_filler;
mod model;
mod modules;
mod packing;
mod pooling;
mod precision;
mod prompts;
mod question_answerer;
#[cfg(feature = "cuda")]
mod recorded;
mod search;
mod sentence_config;
mod token_classifier;
mod tokenize;
mod tokenizer_config;
mod vocabulary;

pub use activation::Activation;
pub use attention_reader::{AttentionKind, AttentionReader, TextAttention};
pub use classifier::TextClassifier;
pub use config::BertConfig;
pub use decoder::{BertDecoder, DecoderAttentions, DecoderCache, DecoderMemory};
pub use decoder_layer::DecoderLayer;
pub use embedder::{EmbedOptions, Embedder, Embeddings, LongTexts, TokenizedTexts, Truncated};
pub use embeddings::BertEmbeddings;
pub use encoder::Encoder;
pub use encoder_decoder::{EncoderDecoder, EncoderDecoderConfig};
pub use error::{Error, Result};
pub use feed_forward::PositionWiseFeedForward;
pub use generate::{GenerateConfig, Strategy};
pub use heads::{
    AnswerScores, BertForMaskedLm, BertForNextSentencePrediction, BertForQuestionAnswering,
    BertForSequenceClassification, BertForTokenClassification, Labels,
};
pub use layer::EncoderLayer;
#[cfg(feature = "hub")]
pub use load::{Fetched, Hub};
pub use load::{Inspection, LoadReport, Mismatched, Missing, ModelFiles};
pub use mask_filler::{Candidate, MaskFiller};
pub use model::{BertModel, BertOutput, BertStates};
pub use packing::PackedBatch;
pub use pooling::{Pooling, PoolingMode};
pub use precision::Precision;
pub use prompts::Prompt;
pub use question_answerer::{Answer, Answers, QuestionAnswerer};
pub use search::{Hit, Nearest, Search};
pub use token_classifier::{Aggregation, Entity, TokenClassifier};
pub use tokenize::{TextTokenizer, Tokens};
