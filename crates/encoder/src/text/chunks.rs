//! Splits a long text into chunks that are tokenized one by one. The tokens of the chunks, one after
//! another, are those of the whole text, but a tokenizer needs about 100 bytes of memory per byte
//! of its input, so that a text of 50 MB would take 5 GB at once.
//!
//! A text is cut before a single space between two letters or digits ([`is_word`]). There, the
//! tokenizers that [`can_split`] accepts begin a new word, so that no token spans the cut, and the
//! steps of the tokenizer do not look across it:
//! - normalizers change each character by itself, or together with the combining characters, the
//!   spaces or the punctuation that follow it
//! - pre-tokenizers split at the space
//! - models tokenize each word by itself
//! - added tokens that would match across the cut are excluded

use std::ops::RangeInclusive;

use rayon::prelude::*;
use serde_json::Value;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, NormalizerWrapper, PreTokenizerWrapper, Tokenizer,
    pre_tokenizers::metaspace::PrependScheme,
};

use crate::Result;

/// Size of a chunk in bytes, up to the next cut.
pub(crate) const CHUNK_BYTES: usize = 16 << 10;

/// The characters of [`is_word`], and signs between them, which are not letters.
const WORD_RANGES: [RangeInclusive<char>; 8] = [
    '0'..='z',
    '\u{c0}'..='\u{17f}',
    '\u{391}'..='\u{3c9}',
    '\u{410}'..='\u{45f}',
    '\u{5d0}'..='\u{5ea}',
    '\u{621}'..='\u{64a}',
    '\u{905}'..='\u{939}',
    '\u{ac00}'..='\u{d7a3}',
];

/// Number of chunks of a text that are tokenized at a time, on different threads.
pub(crate) const GROUP: usize = 4;

/// Regular expressions of `Replace` normalizers that match neither a letter or digit nor a single
/// space: those of SentencePiece models and of DeBERTa.
const SAFE_PATTERNS: [&str; 2] = [" {2,}", r"\s{2,}|[\n\r\t]"];

/// Calls `encode` for the chunks of a text, on several threads, and `add` for each chunk and its
/// result, in the order of the text.
///
/// # Errors
/// The first error of `encode` or `add`.
pub(crate) fn for_each_chunk<T: Send>(
    text: &str,
    encode: impl Fn(&str) -> Result<T> + Sync,
    mut add: impl FnMut(&str, &T) -> Result<()>,
) -> Result<()> {
    let mut chunks = chunks(text, CHUNK_BYTES).peekable();
    while chunks.peek().is_some() {
        let group: Vec<&str> = chunks.by_ref().take(GROUP).collect();
        let encoded: Vec<Result<T>> = match group[..] {
            [chunk] => vec![encode(chunk)],
            _ => group.par_iter().map(|chunk| encode(chunk)).collect(),
        };
        for (chunk, encoded) in group.into_iter().zip(encoded) {
            add(chunk, &encoded?)?;
        }
    }
    Ok(())
}

/// The size of the longest chunk of a text, in bytes.
pub(crate) fn longest_chunk(text: &str) -> usize {
    chunks(text, CHUNK_BYTES).map(str::len).max().unwrap_or(0)
}

/// The chunks of a text, of `bytes` bytes up to the next cut: one for an empty text.
pub(crate) fn chunks(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let cut = next_cut(text, bytes);
        let (chunk, after) = text.split_at(cut.unwrap_or(text.len()));
        rest = cut.map(|_| after);
        Some(chunk)
    })
}

/// The first byte from `from` on before which a text can be cut.
pub(crate) fn next_cut(text: &str, from: usize) -> Option<usize> {
    let from = (from.min(text.len())..).find(|&at| text.is_char_boundary(at))?;
    let mut spaces = text[from..].match_indices(' ').map(|(at, _)| from + at);
    spaces.find(|&at| is_cut(text, at))
}

/// Whether a text can be cut before the space at byte `at`.
fn is_cut(text: &str, at: usize) -> bool {
    text[..at].ends_with(is_word) && text[at + 1..].starts_with(is_word)
}

/// Whether a character is a letter or a digit that combines neither with a space before it nor with
/// one after it: of Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari or Korean script.
fn is_word(c: char) -> bool {
    WORD_RANGES.iter().any(|range| range.contains(&c)) && c.is_alphanumeric()
}

/// Whether [`for_each_chunk`] yields the tokens of the whole text.
pub(crate) fn can_split(tokenizer: &Tokenizer) -> bool {
    let normalizer = tokenizer.get_normalizer();
    let splits_at_spaces = tokenizer.get_pre_tokenizer().is_some_and(splits_at_spaces);
    splits_at_spaces
        && normalizer.is_none_or(|normalizer| is_local(normalizer) && keeps_cuts(normalizer))
        && !tokenizer
            .get_added_tokens_decoder()
            .values()
            .any(|token| matches_across_cuts(token, normalizer))
}

/// Whether a normalizer changes no character because of characters on the other side of a cut.
fn is_local(normalizer: &NormalizerWrapper) -> bool {
    use NormalizerWrapper as N;
    match normalizer {
        N::Sequence(all) => all.as_ref().iter().all(is_local),
        N::Replace(replace) => {
            // The pattern has no getter.
            let json = serde_json::to_value(replace).unwrap_or_default();
            match (&json["pattern"]["String"], &json["pattern"]["Regex"]) {
                // Without these characters, the normalizer changes no word and no space.
                (Value::String(text), _) => !text.contains(|c| is_word(c) || is_space(c)),
                (_, Value::String(regex)) => SAFE_PATTERNS.contains(&&regex[..]),
                _ => false,
            }
        }
        N::StripNormalizer(strip) => !strip.strip_left,
        N::BertNormalizer(_)
        | N::StripAccents(_)
        | N::NFC(_)
        | N::NFD(_)
        | N::NFKC(_)
        | N::NFKD(_)
        | N::Lowercase(_)
        | N::Nmt(_)
        | N::Precompiled(_) => true,
        N::Prepend(_) | N::ByteLevel(_) => false,
    }
}

/// Whether a normalizer keeps the spaces between letters and digits, and adds or removes none.
fn keeps_cuts(normalizer: &NormalizerWrapper) -> bool {
    // All letters of a script, or every 44th syllable of Korean.
    let sample = |range: RangeInclusive<char>| {
        let step = 1 + range.clone().count() / 256;
        range.step_by(step).filter(|&c| is_word(c))
    };
    let words: Vec<char> = WORD_RANGES.into_iter().flat_map(sample).collect();
    let text: String = words.iter().flat_map(|&word| [word, ' ']).collect();
    let mut normalized = NormalizedString::from(text.trim_end());
    let is_kept = |word: &str| word.starts_with(char::is_alphanumeric) && !word.contains(is_space);
    normalizer.normalize(&mut normalized).is_ok()
        && normalized.get().split(' ').count() == words.len()
        && normalized.get().split(' ').all(is_kept)
}

/// Whether a pre-tokenizer may split at a character.
fn is_space(c: char) -> bool {
    c.is_whitespace() || c == '▁'
}

/// Whether a pre-tokenizer splits a text before the space of a cut, and looks at no characters on
/// the other side of it.
fn splits_at_spaces(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    use PreTokenizerWrapper as P;
    match pre_tokenizer {
        P::Sequence(all) => {
            let mut all = all.as_ref().iter();
            // A step after the first that splits at spaces sees each part by itself, except that the
            // first part of a text can have a prefix.
            let splits = all.find(|step| !matches!(step, P::Digits(_) | P::Punctuation(_)));
            let is_first = |step: &P| match step {
                P::Metaspace(metaspace) => metaspace.prepend_scheme == PrependScheme::First,
                step => matches!(step, P::Sequence(_)),
            };
            splits.is_some_and(splits_at_spaces) && !all.any(is_first)
        }
        // The expression of GPT-2. A prefix is added only to a text that begins without a space.
        P::ByteLevel(bytes) => bytes.use_regex,
        P::Metaspace(metaspace) => metaspace.split,
        P::BertPreTokenizer(_) | P::Whitespace(_) | P::WhitespaceSplit(_) => true,
        P::Digits(_)
        | P::Punctuation(_)
        | P::Delimiter(_)
        | P::Split(_)
        | P::UnicodeScripts(_)
        | P::FixedLength(_) => false,
    }
}

/// Whether an added token may match text on both sides of a cut, as it is or normalised.
fn matches_across_cuts(token: &AddedToken, normalizer: Option<&NormalizerWrapper>) -> bool {
    let mut normalized = NormalizedString::from(&token.content[..]);
    if let Some(normalizer) = normalizer
        && normalizer.normalize(&mut normalized).is_err()
    {
        return true;
    }
    let matches = |text: &str| {
        spans_cut(text)
            || token.rstrip && text.ends_with(may_end_word)
            || token.single_word && text.starts_with(' ')
    };
    matches(&token.content) || matches(normalized.get())
}

/// Whether a word may end with this character after normalisation, which can decompose letters.
fn may_end_word(c: char) -> bool {
    !c.is_ascii_punctuation() && !c.is_whitespace()
}

/// Whether a text with this part may have a cut within the part.
fn spans_cut(part: &str) -> bool {
    part.match_indices(' ').any(|(at, _)| part[..at].ends_with(may_end_word))
}

#[cfg(test)]
mod tests {
    use tokenizers::{
        models::wordlevel::WordLevel,
        normalizers::{Lowercase, Prepend, Replace, Sequence, Strip},
        pre_tokenizers::{
            byte_level::ByteLevel,
            digits::Digits,
            metaspace::Metaspace,
            sequence::Sequence as PreTokenizers,
            split::{Split, SplitPattern},
            whitespace::WhitespaceSplit,
        },
        tokenizer::SplitDelimiterBehavior,
    };

    use super::*;

    fn tokenizer(
        normalizer: Option<NormalizerWrapper>,
        pre_tokenizer: impl Into<PreTokenizerWrapper>,
        added: Option<AddedToken>,
    ) -> Tokenizer {
        let mut tokenizer = Tokenizer::new(WordLevel::default());
        tokenizer.with_normalizer(normalizer).unwrap();
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer.into()));
        tokenizer.add_tokens(added).unwrap();
        tokenizer
    }

    #[test]
    fn texts_are_cut_before_single_spaces_between_letters_or_digits() {
        let text = "ab c  d\n e. f 1 é × я \u{93e} गा";
        let spaces = text.match_indices(' ').map(|(at, _)| at);
        let cuts: Vec<usize> = spaces.filter(|&at| is_cut(text, at)).collect();
        assert_eq!(cuts, [2, 13, 15]);
        let long = "word ".repeat(20_000);
        let all: Vec<&str> = chunks(&long, CHUNK_BYTES).collect();
        assert_eq!((all.len(), all.concat()), (7, long.clone()));
        assert!(all[1..].iter().all(|chunk| chunk.starts_with(" w")));
        assert_eq!(chunks("", CHUNK_BYTES).collect::<Vec<_>>(), [""]);
        assert_eq!(chunks(&"x".repeat(100_000), CHUNK_BYTES).count(), 1);
    }

    #[test]
    fn steps_that_look_across_a_cut_prevent_splitting() {
        let with = |normalizer: NormalizerWrapper| {
            can_split(&tokenizer(Some(normalizer), WhitespaceSplit, None))
        };
        let replace = |pattern: &str| Replace::new(pattern, "x").unwrap();
        assert!(with(Sequence::new(vec![Lowercase.into(), Strip::new(false, true).into()]).into()));
        assert!(with(replace("``").into()));
        assert!(!with(replace("a b").into()));
        assert!(!with(replace(" ").into()), "no spaces are left");
        assert!(!with(replace(" n't").into()) && !with(replace("ab").into()));
        assert!(!with(Strip::new(true, true).into()));
        assert!(!with(Prepend::new("x".to_string()).into()));

        let splits = |steps: Vec<PreTokenizerWrapper>| {
            can_split(&tokenizer(None, PreTokenizers::new(steps), None))
        };
        let pattern = SplitPattern::Regex("a b".to_string());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
        let bytes = ByteLevel::default();
        assert!(splits(vec![Digits::new(true).into(), Metaspace::default().into()]));
        assert!(splits(vec![WhitespaceSplit.into(), split.clone().into()]));
        assert!(splits(vec![bytes.into()]));
        assert!(!splits(vec![split.into(), bytes.into()]));
        assert!(!splits(vec![bytes.use_regex(false).into()]));
        assert!(!splits(vec![Digits::new(true).into()]));
        let first = Metaspace::new('▁', PrependScheme::First, true);
        assert!(splits(vec![first.clone().into()]));
        assert!(!splits(vec![bytes.into(), first.into()]));
    }

    #[test]
    fn added_tokens_that_match_across_a_cut_prevent_splitting() {
        let with = |token: AddedToken| can_split(&tokenizer(None, WhitespaceSplit, Some(token)));
        let token = |text: &str| AddedToken::from(text, false);
        assert!(with(token("[MASK]").lstrip(true).rstrip(true)));
        assert!(with(token("  ")));
        assert!(with(token("new").lstrip(true)));
        assert!(!with(token("new york")));
        assert!(!with(token("new").rstrip(true)));
        assert!(!with(token("cafe\u{301} au")));
        assert!(!with(token(" new").single_word(true)));
    }
}
