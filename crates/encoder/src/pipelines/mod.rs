//! Pipelines from texts to results: embeddings, labels, entities, answers, tokens for masks, and
//! attention weights. Also the search for vectors, and the inspection of model folders.

mod attention_reader;
mod classifier;
mod dense;
mod embedder;
mod inspect;
mod mask_filler;
mod modules;
mod pooling;
mod question_answerer;
mod search;
mod token_classifier;
mod with_tokenizer;

pub use attention_reader::{AttentionKind, AttentionReader, TextAttention};
pub use classifier::{LogitActivation, TextClassifier};
pub use embedder::{
    BatchFn, EmbedOptions, Embedder, Embeddings, LongTexts, TokenizedTexts, Truncated,
};
pub use inspect::Inspection;
pub use mask_filler::{Candidate, MaskFiller};
pub use pooling::{Pooling, PoolingMode};
pub use question_answerer::{Answer, Answers, QuestionAnswerer};
pub use search::{Hit, Nearest, Search};
pub use token_classifier::{Aggregation, Entity, TokenClassifier};
