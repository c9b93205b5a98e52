//! Text to token ids, as `tokenizer.json` or `vocab.txt` and `sentence_bert_config.json` say.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use serde::Deserialize;
use tokenizers::{
    Encoding, PostProcessor, Tokenizer, TruncationDirection, TruncationParams,
    normalizers::{Lowercase, NormalizerWrapper, Sequence},
    utils::truncation::truncate_encodings,
};

use crate::{BertConfig, Error, ModelFiles, Result, error::beginning, vocabulary::WordPieceConfig};

/// Turns texts into token ids, cut to the model's longest sequence.
///
/// # Examples
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let files = encoder::ModelFiles::dir("weights/all-MiniLM-L6-v2")?;
/// let config = encoder::BertConfig::from_json(&files.need("config.json", "sizes")?, "config.json")?;
/// let tokenizer = encoder::TextTokenizer::from_files(&files, &config)?;
/// let tokens = tokenizer.encode(&["Hello!"])?;
/// assert_eq!(tokens[0].input_ids, [101, 7592, 999, 102]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone)]
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    path: String,
    max_seq_length: usize,
    mask: String,
}

/// The tokens of one text, special tokens included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Row of each token in the vocabulary.
    pub input_ids: Vec<u32>,
    /// 0 for the first text, 1 for the second of a pair.
    pub token_type_ids: Vec<u32>,
}

impl Tokens {
    fn of(encoding: &Encoding) -> Self {
        Self {
            input_ids: encoding.get_ids().to_vec(),
            token_type_ids: encoding.get_type_ids().to_vec(),
        }
    }
}

/// A text in windows.
pub(crate) struct Spans {
    pub(crate) windows: Vec<Window>,
    /// Where each of the text's tokens is in it, in bytes.
    pub(crate) spans: Vec<Range<usize>>,
    /// The word that each is a part of.
    pub(crate) words: Vec<Option<u32>>,
}

/// A sequence of some of a text's tokens, and special ones.
pub(crate) struct Window {
    pub(crate) tokens: Tokens,
    /// The first of the text's tokens that are in it.
    pub(crate) first: usize,
    /// Where in the sequence they are.
    pub(crate) places: Vec<usize>,
}

impl Spans {
    /// For each token of the text the window that has most around it, and its place there.
    pub(crate) fn most_context(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.spans.len()).map(|token| {
            let around = |window: &Window| {
                let before = token.checked_sub(window.first)?;
                let after = window.places.len().checked_sub(before + 1)?;
                Some(before.min(after))
            };
            let windows = self.windows.iter().enumerate().rev(); // of equal ones the first
            let (i, window) = windows.max_by_key(|(_, w)| around(w)).expect("a window at least");
            (i, window.places[token - window.first])
        })
    }

    /// The tokens of the word that a token is a part of.
    pub(crate) fn word(&self, token: usize) -> Range<usize> {
        let same = |i: &usize| self.words[*i].is_some() && self.words[*i] == self.words[token];
        let start = (0..token).rev().take_while(same).last().unwrap_or(token);
        let end = (token + 1..self.words.len()).take_while(same).last().unwrap_or(token);
        start..end + 1
    }
}

/// `sentence_bert_config.json` of a sentence-transformers folder.
#[derive(Default, Deserialize)]
struct SentenceBertConfig {
    max_seq_length: Option<usize>,
    do_lower_case: Option<bool>,
}

impl SentenceBertConfig {
    /// The file's names, the present one first; what it says has not changed.
    const FILES: [&str; 7] = [
        "sentence_bert_config.json",
        "sentence_roberta_config.json",
        "sentence_distilbert_config.json",
        "sentence_camembert_config.json",
        "sentence_albert_config.json",
        "sentence_xlm-roberta_config.json",
        "sentence_xlnet_config.json",
    ];

    /// What the first of them says that is there, and its path.
    fn from_files(files: &ModelFiles) -> Result<(Self, String)> {
        for file in Self::FILES {
            if let Some(config) = files.json(file)? {
                return Ok((config, files.path(file)));
            }
        }
        Ok(Default::default())
    }
}

/// `tokenizer_config.json`; the length may be a float as large as 1e30.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    tokenizer_class: Option<String>,
    model_max_length: Option<f64>,
    #[serde(flatten)]
    word_pieces: WordPieceConfig,
}

/// Classes of Hugging Face transformers that make BERT's word pieces.
const BERT_CLASSES: [&str; 6] = [
    "BertTokenizer",
    "BertTokenizerFast",
    "DistilBertTokenizer",
    "DistilBertTokenizerFast",
    "ElectraTokenizer",
    "ElectraTokenizerFast",
];

impl TokenizerConfig {
    /// Whether it is BERT's, as it is for BERT models that do not say.
    fn is_berts(&self) -> bool {
        self.tokenizer_class.as_deref().is_none_or(|class| BERT_CLASSES.contains(&class))
    }

    /// Where the class is BERT's, its switches count, and not what `tokenizer.json` baked in.
    fn apply(&self, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
        let baked = tokenizer.get_normalizer();
        if self.is_berts() && matches!(baked, Some(NormalizerWrapper::BertNormalizer(_))) {
            tokenizer.with_normalizer(Some(self.word_pieces.normalizer()))?;
        }
        Ok(())
    }
}

impl TextTokenizer {
    /// The tokenizer of `tokenizer.json`, or of BERT's word pieces in `vocab.txt`. Padding and
    /// truncation that the file bakes in do not count: texts are cut at `max_seq_length` of
    /// `sentence_bert_config.json`, or at `model_max_length` of `tokenizer_config.json`, and never
    /// beyond the model's positions.
    ///
    /// # Errors
    /// A file that is missing or damaged; [`Error::NoRoom`] if the longest sequence is no longer
    /// than the special tokens of every text.
    pub fn from_files(files: &ModelFiles, config: &BertConfig) -> Result<Self> {
        const FILE: &str = "tokenizer.json";
        const VOCABULARY: &str = "vocab.txt";
        const CONFIG: &str = "tokenizer_config.json";
        let (sentence, sentence_path) = SentenceBertConfig::from_files(files)?;
        let config_of_class: TokenizerConfig = files.json(CONFIG)?.unwrap_or_default();
        let (path, read) = if let Some(json) = files.read(FILE)? {
            let read = Tokenizer::from_bytes(json).and_then(|mut tokenizer| {
                config_of_class.apply(&mut tokenizer)?;
                Ok(tokenizer)
            });
            (files.path(FILE), read)
        } else if let Some(vocabulary) = files.read(VOCABULARY)? {
            if !config_of_class.is_berts() {
                return Err(Error::Unsupported {
                    path: files.path(CONFIG),
                    key: "tokenizer_class",
                    expected: "BertTokenizer for a vocab.txt, or a tokenizer.json",
                    got: config_of_class.tokenizer_class.unwrap_or_default(),
                });
            }
            (files.path(VOCABULARY), config_of_class.word_pieces.tokenizer(&vocabulary))
        } else {
            let expected = "the tokenizer's vocabulary and rules, or vocab.txt with word pieces";
            return Err(files.no_file(FILE, expected));
        };
        let error = |source| Error::Tokenizer { path: path.clone(), source };
        let mut tokenizer = read.map_err(error)?;

        let positions = config.max_position_embeddings;
        let (limit, limit_path) = match (sentence.max_seq_length, config_of_class.model_max_length)
        {
            (Some(length), _) => (length, sentence_path),
            (None, Some(length)) => (length as usize, files.path(CONFIG)),
            (None, None) => (positions, files.path("config.json")),
        };
        let (max_seq_length, limit_path) = match positions < limit {
            true => (positions, files.path("config.json")),
            false => (limit, limit_path),
        };
        let special = special_tokens(&tokenizer, false);
        if max_seq_length <= special {
            return Err(Error::NoRoom { path: limit_path, got: max_seq_length, special });
        }
        if sentence.do_lower_case == Some(true) {
            // Of all but the tokens that are found in a text as they are.
            let first = NormalizerWrapper::from(Lowercase);
            let all = std::iter::once(first).chain(tokenizer.get_normalizer().cloned());
            tokenizer.with_normalizer(Some(Sequence::new(all.collect()))).map_err(error)?;
        }
        // Truncation here would not tell how much it cut.
        tokenizer.with_truncation(None).map_err(error)?;
        tokenizer.with_padding(None);
        let mask = config_of_class.word_pieces.mask().to_string();
        Ok(Self { tokenizer, max_seq_length, mask, path })
    }

    /// The longest sequence it makes, in tokens.
    pub fn max_seq_length(&self) -> usize {
        self.max_seq_length
    }

    /// Special tokens that every sequence gets.
    pub fn special_tokens(&self) -> usize {
        special_tokens(&self.tokenizer, false)
    }

    /// The tokens of each text, cut to the model's longest sequence.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no way to write a text.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Tokens>> {
        let windows = self.encode_windows(texts)?;
        Ok(windows.into_iter().map(|mut windows| windows.swap_remove(0)).collect())
    }

    /// The tokens of each text in windows, one after another, none longer than the model's longest
    /// sequence and each with its special tokens: one window where the text fits.
    ///
    /// # Errors
    /// as [`Self::encode`].
    pub fn encode_windows<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<Tokens>>> {
        let whole = self.without_special(texts)?.into_iter();
        whole.map(|encoding| self.windows(encoding).map_err(|e| self.error(e))).collect()
    }

    /// The whole of each text.
    fn without_special<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Encoding>> {
        let texts = texts.iter().map(|text| text.as_ref()).collect();
        self.tokenizer.encode_batch_fast(texts, false).map_err(|e| self.error(e))
    }

    /// Tokens without special ones in parts, with them.
    fn windows(&self, mut tokens: Encoding) -> tokenizers::Result<Vec<Tokens>> {
        let room = self.max_seq_length - self.special_tokens();
        tokens.truncate(room, 0, TruncationDirection::Right);
        let rest = tokens.take_overflowing();
        let windows = std::iter::once(tokens)
            .chain(rest)
            .map(|window| Ok(Tokens::of(&self.tokenizer.post_process(window, None, true)?)));
        windows.collect()
    }

    /// The tokens of pairs of texts, those of the second of type 1; where a pair is too long, the
    /// longer text loses its end.
    ///
    /// # Errors
    /// as [`Self::encode`]; [`Error::NoRoom`] if no pair fits.
    pub fn encode_pairs<S: AsRef<str>>(&self, pairs: &[(S, S)]) -> Result<Vec<Tokens>> {
        let special = special_tokens(&self.tokenizer, true);
        let got = self.max_seq_length;
        if got <= special {
            return Err(Error::NoRoom { path: self.path.clone(), got, special });
        }
        let room = TruncationParams { max_length: got - special, ..TruncationParams::default() };
        let firsts: BTreeSet<&str> = pairs.iter().map(|(first, _)| first.as_ref()).collect();
        let firsts: Vec<&str> = firsts.into_iter().collect(); // a query is one for all documents
        let first = firsts.iter().copied().zip(self.without_special(&firsts)?);
        let first: BTreeMap<&str, Encoding> = first.collect();
        let seconds: Vec<&str> = pairs.iter().map(|(_, second)| second.as_ref()).collect();
        let seconds = self.without_special(&seconds)?;
        let joined = pairs.iter().zip(seconds).map(|((text, _), second)| {
            let first = first[text.as_ref()].clone();
            let cut = truncate_encodings(first, Some(second), &room);
            let (mut first, mut second) = cut.map_err(|e| self.error(e))?;
            for text in std::iter::once(&mut first).chain(&mut second) {
                text.take_overflowing(); // what was cut off
            }
            Ok(Tokens::of(&self.joined(first, second)?))
        });
        joined.collect()
    }

    /// One or two texts with the special tokens that they get.
    fn joined(&self, first: Encoding, second: Option<Encoding>) -> Result<Encoding> {
        let second = second.map(|mut second| {
            second.set_type_ids(vec![1; second.len()]);
            second
        });
        self.tokenizer.post_process(first, second, true).map_err(|e| self.error(e))
    }

    /// The tokens of a text, perhaps after a question, in windows of at most `longest` that overlap,
    /// so that no token lacks what stands around it, and where in the text they are.
    ///
    /// # Errors
    /// as [`Self::encode`]; [`Error::LongText`] for a question that leaves no room for the text.
    pub(crate) fn encode_spans(
        &self,
        question: Option<&str>,
        text: &str,
        longest: usize,
    ) -> Result<Spans> {
        const OVERLAP: usize = 128;
        let encode = |text| self.tokenizer.encode(text, false).map_err(|e| self.error(e));
        let first = question.map(encode).transpose()?;
        let asked = first.as_ref().map_or(0, Encoding::len);
        let all = longest.min(self.max_seq_length);
        let space = all.saturating_sub(special_tokens(&self.tokenizer, question.is_some()));
        if asked >= space {
            let (text, max) = (beginning(question.unwrap_or(text)), space.saturating_sub(1));
            return Err(Error::LongText { text, got: asked, max });
        }
        let room = space - asked;
        let overlap = (all / 2).min(OVERLAP).min(room - 1);
        let mut whole = encode(text)?;
        let spans = whole.get_offsets().iter().map(|&(start, end)| start..end).collect();
        let words = whole.get_word_ids().to_vec();
        whole.truncate(room, overlap, TruncationDirection::Right);
        let rest = whole.take_overflowing();
        let windows = std::iter::once(whole).chain(rest).enumerate().map(|(i, window)| {
            let own = window.len();
            let joined = match &first {
                Some(first) => self.joined(first.clone(), Some(window))?,
                None => self.joined(window, None)?,
            };
            let special = joined.get_special_tokens_mask();
            let places = (0..joined.len()).filter(|&place| special[place] == 0).skip(asked);
            let (first, places) = (i * (room - overlap), places.take(own).collect());
            Ok(Window { tokens: Tokens::of(&joined), first, places })
        });
        Ok(Spans { windows: windows.collect::<Result<_>>()?, spans, words })
    }

    /// The tokens of a text without special ones.
    pub(crate) fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(text, false).map_err(|e| self.error(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of a prompt at the beginning of a text, counted as sentence-transformers does: those
    /// of the prompt by itself, without the special one at its end.
    ///
    /// # Errors
    /// as [`Self::encode`].
    pub fn prompt_length(&self, prompt: &str) -> Result<usize> {
        let ids = &self.encode(&[prompt])?[0].input_ids;
        let special =
            |id| self.tokenizer.get_added_tokens_decoder().get(id).is_some_and(|t| t.special);
        Ok(ids.len() - usize::from(ids.last().is_some_and(special)))
    }

    /// The row of the token that stands for a gap.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has none.
    pub(crate) fn mask_token(&self) -> Result<u32> {
        let lacks = || self.error(format!("it lacks {:?}, which gaps need", self.mask).into());
        self.tokenizer.token_to_id(&self.mask).ok_or_else(lacks)
    }

    /// A token as the vocabulary spells it, or its number where there is none.
    pub(crate) fn token(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string())
    }

    /// The text of tokens, special ones too.
    pub(crate) fn decode_all(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, false).map_err(|e| self.error(e))
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary lacks one of them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(|e| self.error(e))
    }

    fn error(&self, source: tokenizers::Error) -> Error {
        Error::Tokenizer { path: self.path.clone(), source }
    }
}

/// Special tokens that every text, or every pair, gets.
fn special_tokens(tokenizer: &Tokenizer, pair: bool) -> usize {
    tokenizer.get_post_processor().map_or(0, |p| p.added_tokens(pair))
}
