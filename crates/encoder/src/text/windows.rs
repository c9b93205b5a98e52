//! The windows of a text: sequences within a model's maximum length that overlap, so that each token
//! has context on both sides in some window.

use std::{cmp::Reverse, mem::replace, ops::Range};

use tokenizers::TruncationDirection;

use crate::{
    Result, Tokens,
    text::packing::{TOKEN_BUDGET, within_budget},
};

/// A tokenized text, for a task on its tokens: the windows, and the byte range and the word of each
/// token. From [`TokenClassifier::tokenize`](crate::TokenClassifier::tokenize) or
/// [`QuestionAnswerer::tokenize`](crate::QuestionAnswerer::tokenize).
#[derive(Clone, Debug)]
pub struct TextWindows {
    pub(crate) windows: Vec<Window>,
    /// The byte range of each token in the text.
    pub(crate) byte_ranges: Vec<Range<usize>>,
    /// The index of the word that each token belongs to.
    pub(crate) words: Vec<Option<u32>>,
    /// Whether a token continues the word of the token before it; see
    /// [`TextTokenizer`](crate::TextTokenizer)'s `continues_word`.
    pub(crate) continues_word: Vec<bool>,
}

/// A sequence: the question, if there is one, consecutive tokens of the text, and special tokens.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) tokens: Tokens,
    /// The index of the window's first token among the tokens of the text.
    pub(crate) first: usize,
    /// For each token of the text that is in this window: its position in the sequence.
    pub(crate) positions: Vec<usize>,
}

impl TextWindows {
    /// The sequences of the windows. The task's second step computes the values of each, and the
    /// last step takes these values in the same order.
    pub fn sequences(&self) -> impl ExactSizeIterator<Item = &Tokens> {
        self.windows.iter().map(|window| &window.tokens)
    }

    /// Removes the sequences, so that their memory can be returned before the task's last step.
    pub fn take_sequences(&mut self) -> Vec<Tokens> {
        let empty = || Tokens { input_ids: vec![], token_type_ids: vec![], truncated: 0 };
        self.windows.iter_mut().map(|window| replace(&mut window.tokens, empty())).collect()
    }

    /// Calls `compute` for successive parts of the sequences, of at most 2,048 tokens or one
    /// sequence, and returns the values of all sequences. Only the states of one part are in memory
    /// at a time. `compute` can end the computation with an error.
    ///
    /// # Errors
    /// The error of the first part for which `compute` fails.
    /// # Examples
    /// ```
    /// use encoder::{Aggregation, Error, LoadOptions, TokenClassifier};
    ///
    /// let dir = "../../tests/golden/heads/tagger";
    /// let model = TokenClassifier::from_dir(dir, &LoadOptions::default())?;
    /// let windows = model.tokenize(&"a cab x ".repeat(1000))?;
    /// let mut parts = 0;
    /// let values = windows.in_parts(|part| {
    ///     parts += 1;
    ///     model.scores(part)
    /// })?;
    /// assert_eq!((values.len(), parts), (windows.sequences().len(), 6));
    /// assert!(matches!(windows.in_parts::<()>(|_| Err(Error::Stopped)), Err(Error::Stopped)));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn in_parts<T>(
        &self,
        mut compute: impl FnMut(&[&Tokens]) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let sequences: Vec<&Tokens> = self.sequences().collect();
        let lengths: Vec<usize> = sequences.iter().map(|tokens| tokens.input_ids.len()).collect();
        let order: Vec<usize> = (0..sequences.len()).collect();
        let mut values = Vec::with_capacity(sequences.len());
        for part in within_budget(&order, &lengths, TOKEN_BUDGET) {
            values.extend(compute(&sequences[part[0]..part[0] + part.len()])?);
        }
        Ok(values)
    }

    /// For each token of the text: the index of the window with the most context for the token, and
    /// the token's position in this window. The context is the number of tokens before the token or
    /// after it in the window, whichever is smaller.
    pub(crate) fn most_context(&self) -> impl Iterator<Item = (usize, usize)> {
        // The windows of right truncation ascend by their first tokens, those of left truncation
        // descend.
        let mut windows: Vec<(usize, &Window)> = self.windows.iter().enumerate().collect();
        windows.sort_by_key(|(_, window)| window.first);
        let mut passed = 0; // windows that end before the token
        (0..self.byte_ranges.len()).map(move |token| {
            let end = |window: &Window| window.first + window.positions.len();
            passed += windows[passed..].iter().take_while(|(_, w)| end(w) <= token).count();
            let around = windows[passed..].iter().take_while(|(_, w)| w.first <= token);
            let context = |window: &Window| (token - window.first).min(end(window) - 1 - token);
            let best = around.max_by_key(|(i, window)| (context(window), Reverse(*i)));
            let (i, window) = best.expect("each token is in a window");
            (*i, window.positions[token - window.first])
        })
    }

    /// For each token: the indices of the tokens of its word. A token without a word is a range of
    /// its own.
    pub(crate) fn word_ranges(&self) -> Vec<Range<usize>> {
        let is_same_word = |a: &Option<u32>, b: &Option<u32>| a.is_some() && a == b;
        let mut ranges = Vec::with_capacity(self.words.len());
        for word in self.words.chunk_by(is_same_word) {
            let range = ranges.len()..ranges.len() + word.len();
            ranges.extend(std::iter::repeat_n(range, word.len()));
        }
        ranges
    }
}

/// The ranges of the windows of `len` tokens: at most `room` tokens each, of which two consecutive
/// windows share `overlap`. The first window begins, or with [`TruncationDirection::Left`] ends,
/// where the text does.
pub(crate) fn window_ranges(
    len: usize,
    room: usize,
    overlap: usize,
    side: TruncationDirection,
) -> Vec<Range<usize>> {
    let count = len.saturating_sub(room).div_ceil(room - overlap) + 1;
    let window = |i: usize| {
        let shift = i * (room - overlap);
        let rest = len - shift;
        match side {
            TruncationDirection::Right => shift..shift + rest.min(room),
            TruncationDirection::Left => rest.saturating_sub(room)..rest,
        }
    };
    (0..count).map(window).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_the_text_from_either_side() {
        use TruncationDirection::{Left, Right};
        let windows = |len, room, overlap, side| {
            let ranges = window_ranges(len, room, overlap, side).into_iter();
            ranges.map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(windows(0, 4, 1, Right), [(0, 0)]);
        assert_eq!(windows(4, 4, 1, Right), [(0, 4)]);
        assert_eq!(windows(8, 4, 1, Right), [(0, 4), (3, 7), (6, 8)]);
        assert_eq!(windows(8, 4, 1, Left), [(4, 8), (1, 5), (0, 2)]);
        assert_eq!(windows(8, 4, 0, Right), [(0, 4), (4, 8)]);
        assert_eq!(windows(3, 1, 0, Left), [(2, 3), (1, 2), (0, 1)]);
    }
}
