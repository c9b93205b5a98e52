//! Texts to packed token ids: the tokenizer and its settings, prompts, packing.

use std::ops::Range;

mod byte_bpe;
pub(crate) mod packing;
pub(crate) mod prompts;
pub(crate) mod sentence_config;
mod sentence_piece;
pub(crate) mod tokenizer;
mod tokenizer_class;
pub(crate) mod tokenizer_config;
mod tokenizer_json;
mod unigram;
mod word_piece;

pub use packing::PackedBatch;
pub use prompts::Prompt;
pub use tokenizer::{Piece, TextTokenizer, Tokens, TruncationSide};

/// The range of characters (Unicode code points) for a range of bytes of a text.
///
/// # Panics
/// If the range is not on the boundaries of characters.
/// # Examples
/// ```
/// assert_eq!(encoder::character_range("né à Lyon", &(7..11)), 5..9);
/// ```
pub fn character_range(text: &str, bytes: &Range<usize>) -> Range<usize> {
    let start = text[..bytes.start].chars().count();
    start..start + text[bytes.clone()].chars().count()
}
