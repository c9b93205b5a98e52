//! A part of a text, in the result of a task.

use std::ops::Range;

use serde::Serialize;

use crate::CharacterPositions;

/// A part of a text with its score.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Span {
    /// The score, a probability.
    pub score: f32,
    /// The part.
    pub text: String,
    /// Index of the first character, in Unicode code points.
    pub start: usize,
    /// Index of the character after the last one.
    pub end: usize,
    /// The range of the part in bytes. It is not serialised.
    #[serde(skip)]
    pub range: Range<usize>,
}

impl Span {
    /// The part of a text at a range of bytes.
    pub(crate) fn new(text: &mut CharacterPositions, score: f32, range: Range<usize>) -> Self {
        let Range { start, end } = text.range(&range);
        Self { score, text: text.text()[range.clone()].to_string(), start, end, range }
    }
}
