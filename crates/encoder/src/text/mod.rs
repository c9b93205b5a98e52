//! Texts to token ids: the tokenizer and its settings, prompts.

use std::ops::Range;

mod ascii_word_piece;
mod bpe;
mod byte_bpe;
pub(crate) mod chat_template;
mod chunks;
mod hash_order;
pub(crate) mod prompts;
pub(crate) mod sentence_config;
mod sentence_piece;
pub(crate) mod tokenizer;
mod tokenizer_class;
pub(crate) mod tokenizer_config;
mod tokenizer_json;
mod unigram;
pub(crate) mod windows;
mod word_piece;

pub use prompts::Prompt;
pub use tokenizer::{Piece, TextTokenizer, Tokens, TruncationSide};
pub(crate) use tokenizer_config::REGISTERED_CLASS;
pub use windows::TextWindows;

/// Converts ranges of bytes of a text to ranges of characters (Unicode code points).
///
/// The time for ranges in ascending order is linear in the length of the text.
///
/// # Examples
/// ```
/// let mut positions = encoder::CharacterPositions::new("né à Lyon");
/// assert_eq!(positions.range(&(0..3)), 0..2);
/// assert_eq!(positions.range(&(7..11)), 5..9);
/// assert_eq!(positions.range(&(4..6)), 3..4);
/// ```
#[derive(Clone, Debug)]
pub struct CharacterPositions<'a> {
    text: &'a str,
    /// The start of the last range, in bytes and in characters.
    last: (usize, usize),
}

impl<'a> CharacterPositions<'a> {
    /// The positions in `text`.
    pub fn new(text: &'a str) -> Self {
        Self { text, last: (0, 0) }
    }

    /// The text.
    pub fn text(&self) -> &'a str {
        self.text
    }

    /// The range of characters for a range of bytes.
    ///
    /// # Panics
    /// If the range is not on the boundaries of characters.
    pub fn range(&mut self, bytes: &Range<usize>) -> Range<usize> {
        let (byte, character) = if self.last.0 <= bytes.start { self.last } else { (0, 0) };
        let start = character + self.text[byte..bytes.start].chars().count();
        self.last = (bytes.start, start);
        start..start + self.text[bytes.clone()].chars().count()
    }
}
