//! A span of a text in JSON output.

use std::ops::Range;

use encoder::CharacterPositions;
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
    /// The span of a text at a range of bytes.
    pub fn new(text: &mut CharacterPositions<'a>, score: f32, range: Range<usize>) -> Self {
        let Range { start, end } = text.range(&range);
        Self { score, text: &text.text()[range], start, end }
    }
}
