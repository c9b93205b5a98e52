//! Texts to packed token ids: the tokenizer and its settings, prompts, packing.

mod byte_bpe;
pub(crate) mod packing;
pub(crate) mod prompts;
pub(crate) mod sentence_config;
pub(crate) mod tokenizer;
mod tokenizer_class;
pub(crate) mod tokenizer_config;
mod tokenizer_json;
mod unigram;
mod word_piece;

pub use packing::PackedBatch;
pub use prompts::Prompt;
pub use tokenizer::{TextTokenizer, Tokens};
