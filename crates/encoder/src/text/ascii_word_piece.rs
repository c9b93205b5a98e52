//! BERT's WordPiece tokenizer for ASCII texts, without the strings and offsets that the
//! `tokenizers` library keeps of every step. The token ids are equal to the library's.
//!
//! In ASCII, BERT's rules are: lowercase, split at white space, make each punctuation character a
//! word, and replace each word by the longest pieces of the vocabulary from its beginning on, or by
//! the unknown token if there is a rest without a piece. Source: `BertNormalizer`,
//! `BertPreTokenizer` and `WordPiece` of `tokenizers` 0.23.

use tokenizers::{
    Model, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer,
    models::wordpiece::WordPiece,
};

/// The settings of a tokenizer with BERT's rules.
pub(crate) struct AsciiWordPiece {
    /// The beginning of pieces inside a word, such as `##`.
    prefix: Vec<u8>,
    /// Maximum number of characters of a word. Longer words become the unknown token.
    max_word: usize,
    unknown_id: u32,
    lowercase: bool,
    /// The added tokens, which are matched before the text is split.
    added: Vec<String>,
    /// Whether an added token starts with this byte.
    starts_added: [bool; 256],
}

impl AsciiWordPiece {
    /// The settings of a tokenizer; `None` if it has other rules.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::WordPiece(model) = tokenizer.get_model() else { return None };
        let Some(NormalizerWrapper::BertNormalizer(normalizer)) = tokenizer.get_normalizer() else {
            return None;
        };
        let Some(PreTokenizerWrapper::BertPreTokenizer(_)) = tokenizer.get_pre_tokenizer() else {
            return None;
        };
        let added = tokenizer.get_added_tokens_decoder().into_values();
        // Other added tokens are matched in the normalised text.
        let added = added.map(|token| (!token.normalized).then_some(token.content));
        let added = added.collect::<Option<Vec<String>>>()?;
        let mut starts_added = [false; 256];
        for token in &added {
            starts_added[usize::from(*token.as_bytes().first()?)] = true;
        }
        Some(Self {
            prefix: model.continuing_subword_prefix.clone().into_bytes(),
            max_word: model.max_input_chars_per_word,
            unknown_id: model.token_to_id(&model.unk_token)?,
            lowercase: normalizer.lowercase,
            added,
            starts_added,
        })
    }

    /// The token ids of a text, without special tokens. `None` if the text has an added token, a
    /// control character or a character outside ASCII. `tokenizer` is that of [`Self::new`].
    pub(crate) fn ids(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        let ModelWrapper::WordPiece(model) = tokenizer.get_model() else { return None };
        let mut ids = Vec::with_capacity(text.len() / 4);
        let mut word = self.prefix.clone(); // and the characters of the word
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            if self.starts_added[usize::from(byte)]
                && self
                    .added
                    .iter()
                    .any(|token| text.as_bytes()[at..].starts_with(token.as_bytes()))
            {
                return None;
            }
            match byte {
                b' ' | b'\t' | b'\n' | b'\r' => self.end_word(model, &mut word, &mut ids),
                _ if byte.is_ascii_punctuation() => {
                    self.end_word(model, &mut word, &mut ids);
                    word.push(byte);
                    self.end_word(model, &mut word, &mut ids);
                }
                _ if !byte.is_ascii_graphic() => return None,
                _ if self.lowercase => word.push(byte.to_ascii_lowercase()),
                _ => word.push(byte),
            }
        }
        self.end_word(model, &mut word, &mut ids);
        Some(ids)
    }

    /// Appends the ids of a word's pieces to `ids`, and removes the word, which stands after the
    /// prefix.
    fn end_word(&self, model: &WordPiece, word: &mut Vec<u8>, ids: &mut Vec<u32>) {
        let (prefix, first_id) = (self.prefix.len(), ids.len());
        let length = word.len() - prefix;
        let mut done = 0;
        while done < length && length <= self.max_word {
            let from = if done == 0 {
                prefix
            } else {
                // The bytes before the rest belong to pieces that were found.
                word[done..done + prefix].copy_from_slice(&self.prefix);
                done
            };
            let piece = |end: &usize| {
                model.token_to_id(std::str::from_utf8(&word[from..prefix + end]).ok()?)
            };
            let longest = (done + 1..=length).rev().find_map(|end| Some((end, piece(&end)?)));
            let Some((end, id)) = longest else { break };
            ids.push(id);
            done = end;
        }
        if done < length {
            ids.truncate(first_id);
            ids.push(self.unknown_id);
        }
        word.clear();
        word.extend_from_slice(&self.prefix);
    }
}
