//! A span of a text in JSON output.

use std::ops::Range;

use serde::Serialize;

/// A span of a text, and its score.
#[derive(Serialize)]
pub struct Span<'a> {
    score: f32,
    text: &'a str,
    /// In characters (Unicode code points), not in bytes.
    start: usize,
    end: usize,
}

impl<'a> Span<'a> {
    /// The span of `text` at a range of bytes.
    pub fn new(text: &'a str, score: f32, range: Range<usize>) -> Self {
        let start = text[..range.start].chars().count();
        let text = &text[range];
        Self { score, text, start, end: start + text.chars().count() }
    }
}
