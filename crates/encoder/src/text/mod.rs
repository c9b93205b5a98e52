//! Texts to packed token ids: the tokenizer and its settings, prompts, packing.

pub(crate) mod packing;
pub(crate) mod prompts;
pub(crate) mod sentence_config;
pub(crate) mod tokenizer;
pub(crate) mod tokenizer_config;
mod vocabulary;

pub use packing::PackedBatch;
pub use prompts::Prompt;
pub use tokenizer::{TextTokenizer, Tokens};
