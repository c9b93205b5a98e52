//! The windows of a text: sequences within a model's maximum length that overlap, so that each token
//! has context on both sides in some window.

use std::{cmp::Reverse, ops::Range};

use tokenizers::TruncationDirection;

/// An upper bound of the size of a token in a [`TextWindows`] and in a sequence, in bytes: its id, its
/// type, its position in the sequence, its range in the text and its word.
pub(crate) const WINDOW_TOKEN_BYTES: usize = 64;

/// The windows of a text for a task on its tokens: the byte range and the word of each token, and the
/// position of each token in its sequences.
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

/// The tokens of the text in a sequence, which also has the question, if there is one, and special
/// tokens.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// The index of the window's first token among the tokens of the text.
    pub(crate) first: usize,
    /// For each token of the text that is in this window: its position in the sequence.
    pub(crate) positions: Vec<usize>,
}

impl TextWindows {
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
