//! Text to token ids, with the vocabulary (`tokenizer.json`, `vocab.txt`, `vocab.json` and
//! `merges.txt`, or a SentencePiece model) and the settings files of the model.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tokenizers::{
    Encoding, ModelWrapper, PostProcessor, Tokenizer, TruncationDirection, TruncationParams,
    normalizers::{Lowercase, NormalizerWrapper, Sequence},
    utils::truncation::truncate_encodings,
};

use crate::{
    Error, ModelConfig, ModelFiles, Result,
    error::beginning,
    text::sentence_config::{Loader, SentenceConfig},
    text::sentence_piece::SentencePieceModel,
    text::tokenizer_class::{Algorithm, UnigramRules},
    text::tokenizer_config::{self, TokenizerConfig},
    text::tokenizer_json::model_type,
    text::{byte_bpe, hash_order, unigram, word_piece},
};

/// The vocabulary of BERT's tokenizers: one token per line.
const WORD_PIECES: &str = "vocab.txt";
/// The vocabulary of RoBERTa's tokenizers: tokens and ids.
const BYTE_PAIRS: &str = "vocab.json";
const MERGES: &str = "merges.txt";
/// Possible names of the vocabulary file.
pub(crate) const VOCABULARIES: [&str; 6] = [
    "tokenizer.json",
    WORD_PIECES,
    BYTE_PAIRS,
    UnigramRules::XlmRoberta.model_file(),
    UnigramRules::Albert.model_file(),
    UnigramRules::Deberta.model_file(),
];

/// Vocabulary files that only some classes read, and what to do if the class is not one of them.
const FILES_OF_CLASSES: [(&str, &str); 5] = [
    (WORD_PIECES, "BertTokenizer for a vocab.txt, or a tokenizer.json"),
    (BYTE_PAIRS, "RobertaTokenizer for a vocab.json, or a tokenizer.json"),
    (
        UnigramRules::XlmRoberta.model_file(),
        "XLMRobertaTokenizer for a sentencepiece.bpe.model, or a tokenizer.json",
    ),
    (UnigramRules::Albert.model_file(), "AlbertTokenizer for a spiece.model, or a tokenizer.json"),
    (UnigramRules::Deberta.model_file(), "DebertaV2Tokenizer for a spm.model, or a tokenizer.json"),
];

/// Converts texts to token ids, truncated to the model's maximum length.
///
/// # Examples
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let files = encoder::ModelFiles::dir("weights/all-MiniLM-L6-v2")?;
/// let json = files.need("config.json", "sizes")?;
/// let config = encoder::ModelConfig::from_json(&json, "config.json")?;
/// let tokenizer = encoder::TextTokenizer::from_files(&files, &config)?;
/// let tokens = tokenizer.encode(&["Hello!"])?;
/// assert_eq!(tokens[0].input_ids, [101, 7592, 999, 102]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone)]
pub struct TextTokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The file of the vocabulary, for errors.
    path: String,
    max_seq_length: usize,
    /// The source of `max_seq_length`, for errors.
    max_length_path: String,
    mask_token: String,
    unknown_id: Option<u32>,
    pad_id: u32,
    /// The side of a text on which truncation removes tokens.
    truncation_side: TruncationDirection,
    /// Whether tokens of the second text of a pair have type 1.
    has_type_ids: bool,
    /// The ids of all special tokens: those of the settings, and the defaults of the class.
    special_ids: BTreeSet<u32>,
}

/// The tokens of one text or of one pair of texts, special tokens included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// The id of each token in the vocabulary.
    pub input_ids: Vec<u32>,
    /// 0 for the first text, 1 for the second text of a pair. Always 0 if the tokenizer has no
    /// token types: `model_input_names` of `tokenizer_config.json` decides, or the tokenizer class
    /// if this key is absent.
    pub token_type_ids: Vec<u32>,
    /// Number of tokens that truncation removed; for a pair, from both texts.
    pub truncated: usize,
}

/// The side of a text on which truncation removes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TruncationSide {
    /// The beginning of the text.
    Left,
    /// The end of the text.
    Right,
}

/// A token of a text, from [`TextTokenizer::pieces`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The id of the token in the vocabulary.
    pub id: u32,
    /// The vocabulary's spelling of the token.
    pub token: String,
    /// The byte range of the token in the text; `None` for the special tokens around the text.
    pub range: Option<Range<usize>>,
}

/// The tokens of a text: their byte ranges and words, and the windows that contain them.
pub(crate) struct Spans {
    pub(crate) windows: Vec<Window>,
    /// The byte range of each token in the text.
    pub(crate) byte_ranges: Vec<Range<usize>>,
    /// The index of the word that each token belongs to.
    pub(crate) words: Vec<Option<u32>>,
    /// Whether a token continues the word of the token before it; see
    /// [`TextTokenizer::continues_word`].
    pub(crate) continues_word: Vec<bool>,
}

/// One sequence: the question, if there is one, consecutive tokens of the text, and special tokens.
pub(crate) struct Window {
    pub(crate) tokens: Tokens,
    /// The index of the window's first token among the tokens of the text.
    pub(crate) first: usize,
    /// For each token of the text that is in this window: its position in the sequence.
    pub(crate) positions: Vec<usize>,
}

impl Spans {
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

/// Prints the file of the vocabulary and the maximum length, not the vocabulary.
impl fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, max_seq_length, .. } = self;
        f.debug_struct("TextTokenizer")
            .field("path", path)
            .field("max_seq_length", max_seq_length)
            .finish_non_exhaustive()
    }
}

impl TextTokenizer {
    /// Loads `tokenizer.json`, or the WordPiece vocabulary in `vocab.txt`, or the byte-level BPE
    /// vocabulary in `vocab.json` and `merges.txt`, or the Unigram vocabulary in
    /// `sentencepiece.bpe.model`, `spiece.model` or `spm.model`.
    ///
    /// Settings and added tokens are read from `tokenizer_config.json`, `special_tokens_map.json`
    /// and `added_tokens.json`. If transformers 5 defines the rules of the tokenizer class in code,
    /// as for `BertTokenizer`, only the vocabulary, the added tokens and the truncation side of
    /// `tokenizer.json` are used, as in transformers; some classes with a Unigram vocabulary also
    /// use the character map or the post-processor. Padding and truncation lengths in
    /// `tokenizer.json` are always ignored.
    ///
    /// The maximum length is [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens) of the
    /// model, or `model_max_length` of `tokenizer_config.json` if that is smaller.
    /// [`Embedder`](crate::Embedder) and [`TextClassifier`](crate::TextClassifier) also apply
    /// `sentence_bert_config.json`, as sentence-transformers does.
    ///
    /// # Errors
    /// [`Error::NoFile`] if a file of the vocabulary is missing; [`Error::Io`], [`Error::Json`] or
    /// [`Error::Tokenizer`] for a damaged file; [`Error::Unsupported`] for a setting that is not
    /// implemented; [`Error::NoRoom`] if the maximum length leaves no room for text beside the
    /// special tokens.
    pub fn from_files(files: &ModelFiles, config: &ModelConfig) -> Result<Self> {
        Self::for_loader(files, config, Loader::Transformers)
    }

    /// [`Self::from_files`] with the settings that the Python class `loader` reads.
    pub(crate) fn for_loader(
        files: &ModelFiles,
        config: &ModelConfig,
        loader: Loader,
    ) -> Result<Self> {
        let sentence = SentenceConfig::from_files(files, loader)?;
        let mut settings = TokenizerConfig::from_files(files, &sentence, config.tokenizer_class)?;
        let (mut tokenizer, path) = Self::tokenizer(files, &mut settings)?;
        let error = |source| Error::Tokenizer { path: path.clone(), source };
        let default_side = tokenizer.get_truncation().map(|truncation| truncation.direction);
        let truncation_side =
            settings.truncation_side().or(default_side).unwrap_or(TruncationDirection::Right);

        let (max_seq_length, max_length_path) = max_length(files, config, &sentence, &settings);
        let special = special_token_count(&tokenizer, false);
        if max_seq_length <= special {
            let (path, got) = (max_length_path, max_seq_length);
            return Err(Error::NoRoom { path, got, special });
        }
        if sentence.do_lower_case {
            // Added tokens with `normalized: false`, such as special tokens, are matched before
            // normalisation: lowercasing does not affect them.
            let first = NormalizerWrapper::from(Lowercase);
            let all = std::iter::once(first).chain(tokenizer.get_normalizer().cloned());
            tokenizer.with_normalizer(Some(Sequence::new(all.collect()))).map_err(error)?;
        }
        // The tokenizer's truncation is disabled, since it does not report how many tokens it
        // removes. `encode` and `encode_pairs` truncate the texts instead.
        tokenizer.with_truncation(None).map_err(error)?;
        tokenizer.with_padding(None);
        guarded(|| hash_order::choose_added_tokens(&mut tokenizer)).map_err(error)?;
        let special_ids = settings.special_tokens(true);
        let special_ids = special_ids.filter_map(|token| tokenizer.token_to_id(token.text()));
        Ok(Self {
            unknown_id: tokenizer.token_to_id(settings.named("unk_token")),
            pad_id: tokenizer.token_to_id(settings.named("pad_token")).unwrap_or(0),
            special_ids: special_ids.collect(),
            tokenizer: Arc::new(tokenizer),
            max_seq_length,
            max_length_path,
            mask_token: settings.named("mask_token").to_string(),
            truncation_side,
            has_type_ids: settings.has_type_ids(),
            path,
        })
    }

    /// The tokenizer of a folder, and the path of the file with its vocabulary. Passes the symbols
    /// of a SentencePiece model to `settings`.
    fn tokenizer(
        files: &ModelFiles,
        settings: &mut TokenizerConfig,
    ) -> Result<(Tokenizer, String)> {
        const FILE: &str = "tokenizer.json";
        let algorithm = settings.rules().map(|class| class.algorithm);
        let mut vocabulary = FILE;
        let read = if let Some(json) = files.read(FILE)? {
            guarded(|| from_json(&json, settings))
        } else if algorithm == Some(Algorithm::ByteBpe)
            && let Some(ids) = files.read(BYTE_PAIRS)?
        {
            let merges = files.need(MERGES, "the merges of the vocabulary in vocab.json")?;
            vocabulary = BYTE_PAIRS;
            guarded(|| byte_bpe::from_vocab_and_merges(&ids, &merges, settings))
        } else if let Some(Algorithm::Unigram(rules)) = algorithm
            && let Some(model) = files.read(rules.model_file())?
        {
            vocabulary = rules.model_file();
            SentencePieceModel::from_bytes(&model).and_then(|mut model| {
                settings.set_symbols(std::mem::take(&mut model.symbols));
                guarded(|| unigram::from_sentence_piece(model, settings, rules))
            })
        } else if let Some(Algorithm::WordPiece(layout)) = algorithm
            && let Some(lines) = files.read(WORD_PIECES)?
        {
            vocabulary = WORD_PIECES;
            guarded(|| word_piece::from_vocab_txt(&lines, settings, layout))
        } else {
            return Err(no_vocabulary(files, settings, FILE)?);
        };
        let path = files.path(vocabulary);
        match read {
            Ok(tokenizer) => Ok((tokenizer, path)),
            Err(source) => Err(Error::Tokenizer { path, source }),
        }
    }

    /// The name of the file with the vocabulary.
    pub(crate) fn vocabulary_file(&self) -> Option<&'static str> {
        VOCABULARIES.into_iter().find(|file| self.path.ends_with(file))
    }

    /// The maximum length of a sequence in tokens, special tokens included.
    pub fn max_seq_length(&self) -> usize {
        self.max_seq_length
    }

    /// Sets the maximum length of a sequence in tokens, special tokens included.
    ///
    /// # Errors
    /// [`Error::NoRoom`] if the length leaves no room for text beside the special tokens.
    pub fn with_max_seq_length(self, max_seq_length: usize) -> Result<Self> {
        let (special, path) = (self.special_token_count(), "set by the caller".to_string());
        if max_seq_length <= special {
            return Err(Error::NoRoom { path, got: max_seq_length, special });
        }
        Ok(Self { max_seq_length, max_length_path: path, ..self })
    }

    /// Sets the side on which truncation removes tokens, instead of that of the model's files.
    ///
    /// # Examples
    /// ```
    /// use encoder::{ModelConfig, ModelFiles, TextTokenizer, TruncationSide};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let files = ModelFiles::dir("weights/all-MiniLM-L6-v2")?;
    /// let config = ModelConfig::from_json(&files.need("config.json", "sizes")?, "config.json")?;
    /// let tokenizer = TextTokenizer::from_files(&files, &config)?.with_max_seq_length(4)?;
    /// let tokenizer = tokenizer.with_truncation_side(TruncationSide::Left);
    /// assert_eq!(tokenizer.encode(&["I love AI"])?[0].input_ids, [101, 2293, 9932, 102]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn with_truncation_side(self, side: TruncationSide) -> Self {
        let truncation_side = match side {
            TruncationSide::Left => TruncationDirection::Left,
            TruncationSide::Right => TruncationDirection::Right,
        };
        Self { truncation_side, ..self }
    }

    /// The id of the token that fills up shorter sequences of a padded batch; 0 if the vocabulary
    /// has none.
    pub fn pad_token_id(&self) -> u32 {
        self.pad_id
    }

    /// The number of special tokens that are added to every text.
    pub fn special_token_count(&self) -> usize {
        special_token_count(&self.tokenizer, false)
    }

    /// The tokens of each text, truncated to the maximum length. Tokens are removed on the
    /// `truncation_side` of `tokenizer_config.json`, by default at the end.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of a text.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Tokens>> {
        let room = self.max_seq_length - self.special_token_count();
        let whole = self.encode_without_special_tokens(texts)?.into_iter();
        let truncated = whole.map(|mut tokens| {
            let all = tokens.len();
            tokens.truncate(room, 0, self.truncation_side);
            tokens.take_overflowing();
            let truncated = all - tokens.len();
            Ok(Tokens {
                truncated,
                ..self.joined(tokens, None).map(|joined| self.tokens(&joined))?
            })
        });
        truncated.collect()
    }

    /// Splits each text into consecutive windows of at most the maximum length, each with its own
    /// special tokens. A text within the maximum length has one window.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of a text.
    pub fn encode_windows<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<Tokens>>> {
        let room = self.max_seq_length - self.special_token_count();
        let whole = self.encode_without_special_tokens(texts)?.into_iter();
        let windows = whole.map(|mut tokens| {
            tokens.truncate(room, 0, TruncationDirection::Right);
            let rest = tokens.take_overflowing();
            let windows = std::iter::once(tokens).chain(rest);
            windows.map(|window| Ok(self.tokens(&self.joined(window, None)?))).collect()
        });
        windows.collect()
    }

    /// The ids and types of the tokens.
    fn tokens(&self, encoding: &Encoding) -> Tokens {
        let token_type_ids = match self.has_type_ids {
            true => encoding.get_type_ids().to_vec(),
            false => vec![0; encoding.len()],
        };
        Tokens { input_ids: encoding.get_ids().to_vec(), token_type_ids, truncated: 0 }
    }

    /// The tokens of each text, not truncated and without special tokens.
    fn encode_without_special_tokens<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Encoding>> {
        let texts = texts.iter().map(|text| text.as_ref()).collect();
        self.guarded(|tokenizer| tokenizer.encode_batch_fast(texts, false))
    }

    /// The tokens of pairs of texts. Tokens of the second text have type 1 if the tokenizer has
    /// token types. If a pair is too long, tokens are removed from the longer text until both texts
    /// have equal length, and then from both texts, on the same side as in [`Self::encode`].
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of a text; [`Error::NoRoom`]
    /// if the maximum length leaves no room for text beside the special tokens of a pair.
    pub fn encode_pairs<S: AsRef<str>>(&self, pairs: &[(S, S)]) -> Result<Vec<Tokens>> {
        let special = special_token_count(&self.tokenizer, true);
        let got = self.max_seq_length;
        if got <= special {
            return Err(Error::NoRoom { path: self.max_length_path.clone(), got, special });
        }
        let (max_length, direction) = (got - special, self.truncation_side);
        let room = TruncationParams { max_length, direction, ..TruncationParams::default() };
        let firsts: BTreeSet<&str> = pairs.iter().map(|(first, _)| first.as_ref()).collect();
        let firsts: Vec<&str> = firsts.into_iter().collect(); // a shared query is tokenized once
        let first = firsts.iter().copied().zip(self.encode_without_special_tokens(&firsts)?);
        let first: BTreeMap<&str, Encoding> = first.collect();
        let seconds: Vec<&str> = pairs.iter().map(|(_, second)| second.as_ref()).collect();
        let seconds = self.encode_without_special_tokens(&seconds)?;
        let joined = pairs.iter().zip(seconds).map(|((text, _), second)| {
            let first = first[text.as_ref()].clone();
            let all = first.len() + second.len();
            let kept = truncate_encodings(first, Some(second), &room);
            let (mut first, mut second) = kept.map_err(|e| self.error(e))?;
            for text in std::iter::once(&mut first).chain(&mut second) {
                text.take_overflowing();
            }
            let truncated = all - first.len() - second.as_ref().map_or(0, Encoding::len);
            Ok(Tokens { truncated, ..self.tokens(&self.joined(first, second)?) })
        });
        joined.collect()
    }

    /// Joins one or two texts with their special tokens.
    fn joined(&self, first: Encoding, second: Option<Encoding>) -> Result<Encoding> {
        let second = second.map(|mut second| {
            second.set_type_ids(vec![1; second.len()]);
            second
        });
        self.guarded(|tokenizer| tokenizer.post_process(first, second, true))
    }

    /// Splits a text into windows. A sequence consists of the question, if there is one, a window
    /// of the text and special tokens, and has at most `max_length` tokens. The windows overlap, so
    /// that each token has context on both sides in some window. The first window starts at the
    /// side of the text that truncation would keep.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of a text; [`Error::NoRoom`]
    /// if the special tokens leave no room for the text; [`Error::LongQuestion`] for a question
    /// that leaves no room for the text.
    pub(crate) fn encode_spans(
        &self,
        question: Option<&str>,
        text: &str,
        max_length: usize,
    ) -> Result<Spans> {
        // The default `doc_stride` of the question answering pipeline of transformers.
        const OVERLAP: usize = 128;
        let encode = |text| self.guarded(|tokenizer| tokenizer.encode_fast(text, false));
        let first = question.map(encode).transpose()?;
        let question_length = first.as_ref().map_or(0, Encoding::len);
        let max_length = max_length.min(self.max_seq_length);
        let special = special_token_count(&self.tokenizer, question.is_some());
        let space = max_length.saturating_sub(special);
        if space <= usize::from(question.is_some()) {
            let (path, got) = (self.max_length_path.clone(), max_length);
            return Err(Error::NoRoom { path, got, special });
        }
        if question_length >= space {
            let (question, max) =
                (beginning(question.unwrap_or_default()), space.saturating_sub(1));
            return Err(Error::LongQuestion { question, got: question_length, max });
        }
        let room = space - question_length;
        let overlap = (max_length / 2).min(OVERLAP).min(room - 1);
        let (mut whole, byte_ranges) = self.encode_with_ranges(text)?;
        let words = whole.get_word_ids().to_vec();
        let continues_word = self.continues_word(text, &whole, &byte_ranges);
        let (all, side) = (whole.len(), self.truncation_side);
        whole.truncate(room, overlap, side);
        let rest = whole.take_overflowing();
        let windows = std::iter::once(whole).chain(rest).enumerate().map(|(i, window)| {
            let own = window.len();
            let joined = match &first {
                Some(first) => self.joined(first.clone(), Some(window))?,
                None => self.joined(window, None)?,
            };
            let special = joined.get_special_tokens_mask();
            let positions = (0..joined.len()).filter(|&position| special[position] == 0);
            let positions = positions.skip(question_length).take(own).collect();
            let shift = i * (room - overlap);
            let first = match side {
                TruncationDirection::Right => shift,
                TruncationDirection::Left => all - shift - own,
            };
            Ok(Window { tokens: self.tokens(&joined), first, positions })
        });
        Ok(Spans { windows: windows.collect::<Result<_>>()?, byte_ranges, words, continues_word })
    }

    /// See [`Spans::continues_word`]. In a WordPiece model, a token continues a word if the token
    /// before it belongs to the same word; transformers instead compares the length of the token
    /// with that of its text, which gives other words if the normalizer changes the number of
    /// characters. In other models, a token continues a word if a character other than a space
    /// precedes it, it does not begin with a space, and it is not the unknown token.
    fn continues_word(
        &self,
        text: &str,
        tokens: &Encoding,
        byte_ranges: &[Range<usize>],
    ) -> Vec<bool> {
        if matches!(self.tokenizer.get_model(), ModelWrapper::WordPiece(_)) {
            let words = tokens.get_word_ids();
            let joined = |i: usize| i > 0 && words[i].is_some() && words[i] == words[i - 1];
            return (0..words.len()).map(joined).collect();
        }
        let continues = |(range, id): (&Range<usize>, &u32)| {
            let before = text[..range.start].chars().next_back();
            let first = text[range.start..].chars().next();
            before.is_some_and(|c| c != ' ') && first != Some(' ') && Some(*id) != self.unknown_id
        };
        byte_ranges.iter().zip(tokens.get_ids()).map(continues).collect()
    }

    /// The tokens of a text, not truncated, with or without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of the text.
    /// # Examples
    /// ```
    /// use encoder::{ModelConfig, ModelFiles, TextTokenizer};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let files = ModelFiles::dir("weights/all-MiniLM-L6-v2")?;
    /// let config = ModelConfig::from_json(&files.need("config.json", "sizes")?, "config.json")?;
    /// let tokenizer = TextTokenizer::from_files(&files, &config)?;
    /// let pieces = tokenizer.pieces("I love AI", true)?;
    /// assert_eq!((pieces[0].id, &pieces[0].token[..], &pieces[0].range), (101, "[CLS]", &None));
    /// assert_eq!((pieces[2].id, pieces[2].range.clone()), (2293, Some(2..6)));
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn pieces(&self, text: &str, with_special_tokens: bool) -> Result<Vec<Piece>> {
        let (encoding, byte_ranges) = self.encode_with_ranges(text)?;
        let encoding = match with_special_tokens {
            true => self.joined(encoding, None)?,
            false => encoding,
        };
        let mut byte_ranges = byte_ranges.into_iter();
        let pieces = encoding.get_ids().iter().zip(encoding.get_tokens());
        let pieces = pieces.zip(encoding.get_special_tokens_mask());
        let pieces = pieces.map(|((&id, token), &is_special)| {
            let range = if is_special == 1 { None } else { byte_ranges.next() };
            Piece { id, token: token.clone(), range }
        });
        Ok(pieces.collect())
    }

    /// The tokens of a text, without special tokens, and the range of bytes of each.
    fn encode_with_ranges(&self, text: &str) -> Result<(Encoding, Vec<Range<usize>>)> {
        // A post-processor that excludes white space from the offsets of a token subtracts a number
        // of characters, so that offsets in bytes would be wrong after U+3000, for example. The
        // post-processor subtracts at each call, so the offsets are read before the special tokens
        // are added.
        let encoding = self.guarded(|tokenizer| tokenizer.encode_char_offsets(text, false))?;
        let starts = text.char_indices().map(|(byte, _)| byte);
        let starts: Vec<usize> = starts.chain([text.len()]).collect();
        let byte = |character: usize| starts[character.min(starts.len() - 1)];
        let offsets = encoding.get_offsets().iter();
        let byte_ranges = offsets.map(|&(start, end)| byte(start)..byte(end)).collect();
        Ok((encoding, byte_ranges))
    }

    /// The token ids of a text, without special tokens.
    pub(crate) fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.guarded(|tokenizer| tokenizer.encode(text, false))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The number of tokens that a prompt takes at the beginning of a text: those of the prompt
    /// alone, truncated to the maximum length. The special token at its beginning is counted, the
    /// one at its end is not, as in sentence-transformers.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of the prompt.
    pub fn prompt_length(&self, prompt: &str) -> Result<usize> {
        let ids = &self.encode(&[prompt])?[0].input_ids;
        let is_special = ids.last().is_some_and(|id| self.special_ids.contains(id));
        Ok(ids.len() - usize::from(is_special))
    }

    /// Whether the first of `ids` is a special token.
    pub(crate) fn starts_with_special_token(&self, ids: &[u32]) -> bool {
        ids.first().is_some_and(|id| self.special_ids.contains(id))
    }

    pub(crate) fn mask_token(&self) -> &str {
        &self.mask_token
    }

    /// The id of the mask token.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary lacks it.
    pub(crate) fn mask_token_id(&self) -> Result<u32> {
        let mask = &self.mask_token;
        let error = || tokenizer_config::lacks_token(mask, "mask_token");
        self.tokenizer.token_to_id(mask).ok_or_else(|| self.error(error().into()))
    }

    /// The vocabulary's spelling of a token, or the id in digits if the vocabulary lacks it.
    pub(crate) fn token(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string())
    }

    /// Decodes tokens to text, special tokens included.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] if the vocabulary lacks one of the ids.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, false)
    }

    /// Decodes tokens to text. Special tokens are left out.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] if the vocabulary lacks one of the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, true)
    }

    /// The text of a token. The text is empty if the vocabulary lacks the id, as for the rows that
    /// pad an embedding table.
    pub(crate) fn decode_one(&self, id: u32) -> Result<String> {
        self.guarded(|tokenizer| tokenizer.decode(&[id], false))
    }

    fn decode_with(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        // `Tokenizer::decode` leaves out unknown ids.
        if let Some(&id) = ids.iter().find(|&&id| self.tokenizer.id_to_token(id).is_none()) {
            return Err(Error::UnknownToken { id });
        }
        self.guarded(|tokenizer| tokenizer.decode(ids, skip_special_tokens))
    }

    /// Calls `f`. Returns [`Error::Tokenizer`] if it fails or panics.
    fn guarded<T>(&self, f: impl FnOnce(&Tokenizer) -> tokenizers::Result<T>) -> Result<T> {
        guarded(|| f(&self.tokenizer)).map_err(|e| self.error(e))
    }

    fn error(&self, source: tokenizers::Error) -> Error {
        Error::Tokenizer { path: self.path.clone(), source }
    }
}

/// Calls `f`. Returns an error if it panics: the `tokenizers` crate panics if the rules in the file
/// are damaged, for example the character map or the template of the special tokens.
fn guarded<T>(f: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    let panic = |_| Err("the tokenizer panicked; the file is probably damaged".into());
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(panic)
}

/// The error if a folder lacks `file` (`tokenizer.json`) and a vocabulary that the class reads.
/// [`Error::Unsupported`] if the class has no rules here and the folder has the vocabulary of
/// another class; otherwise [`Error::NoFile`].
///
/// # Errors
/// [`Error::Io`] or a download error if the folder cannot be searched.
fn no_vocabulary(files: &ModelFiles, settings: &TokenizerConfig, file: &str) -> Result<Error> {
    let expected = match settings.rules().map(|class| class.algorithm) {
        None => {
            for (file, expected) in FILES_OF_CLASSES {
                if files.has(file)? {
                    let (path, got) = (settings.class_path().into(), settings.describe_class());
                    return Ok(Error::Unsupported { path, key: "tokenizer_class", expected, got });
                }
            }
            "the tokenizer's vocabulary and rules"
        }
        Some(Algorithm::WordPiece(_)) => {
            "the tokenizer's vocabulary and rules, or vocab.txt with word pieces"
        }
        Some(Algorithm::ByteBpe) => {
            "the tokenizer's vocabulary and rules, or vocab.json and merges.txt"
        }
        Some(Algorithm::Unigram(UnigramRules::Albert)) => {
            "the tokenizer's vocabulary and rules, or spiece.model"
        }
        Some(Algorithm::Unigram(UnigramRules::Deberta)) => {
            "the tokenizer's vocabulary and rules, or spm.model"
        }
        Some(Algorithm::Unigram(UnigramRules::XlmRoberta | UnigramRules::Camembert)) => {
            "the tokenizer's vocabulary and rules, or sentencepiece.bpe.model"
        }
    };
    Ok(files.no_file(file, expected))
}

/// Builds the tokenizer from a `tokenizer.json`.
fn from_json(json: &[u8], settings: &TokenizerConfig) -> tokenizers::Result<Tokenizer> {
    let wrong_model = |expected| Err(settings.wrong_model(expected).into());
    match settings.rules().map(|class| class.algorithm) {
        Some(Algorithm::WordPiece(layout)) => match model_type(json)?.as_str() {
            "WordPiece" => {
                return word_piece::from_json(serde_json::from_slice(json)?, settings, layout);
            }
            "Unigram" if settings.class().is_none() => {}
            _ => return wrong_model("WordPiece"),
        },
        Some(Algorithm::ByteBpe) => match model_type(json)?.as_str() {
            "BPE" => return byte_bpe::from_json(serde_json::from_slice(json)?, settings),
            _ => return wrong_model("BPE"),
        },
        Some(Algorithm::Unigram(rules)) => match serde_json::from_slice(json) {
            Ok(json) => return unigram::from_json(json, settings, rules),
            Err(_) if model_type(json)? != "Unigram" => return wrong_model("Unigram"),
            Err(error) => return Err(error.into()),
        },
        None if !settings.follows_tokenizer_json() && model_type(json)? == "WordPiece" => {
            let class = settings.describe_class();
            return Err(format!(
                "tokenizer_class {class} has WordPiece rules that are not implemented: expected \
                 BertTokenizer, or PreTrainedTokenizerFast to use the rules of the file"
            )
            .into());
        }
        None => {}
    }
    // The whole file is used in three cases: for a class that follows the file, for an unknown
    // class whose vocabulary is not WordPiece, and for a Unigram vocabulary if no class is named.
    let parsed = std::str::from_utf8(json)?.parse::<Tokenizer>();
    let mut tokenizer = parsed.map_err(|error| hash_order::missing_key(json).unwrap_or(error))?;
    if !matches!(tokenizer.get_model(), ModelWrapper::Unigram(_)) {
        hash_order::check_ids(&tokenizer.get_vocab(false))?;
    }
    settings.add_tokens_with_ids(&mut tokenizer, vec![])?;
    settings.add_special_tokens(&mut tokenizer, false)?;
    Ok(tokenizer)
}

/// The maximum length in tokens, and the path of the file that sets it. The first of these keys
/// that is set applies: in `sentence_bert_config.json`, `max_length` of `processing_kwargs`,
/// `model_max_length` of `processor_kwargs` and `max_seq_length`; in `tokenizer_config.json`,
/// `model_max_length`. The result is limited to
/// [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens).
fn max_length(
    files: &ModelFiles,
    config: &ModelConfig,
    sentence: &SentenceConfig,
    settings: &TokenizerConfig,
) -> (usize, String) {
    let of_tokenizer = settings.model_max_length().map(|length| length as usize);
    let overridden = of_tokenizer.filter(|_| sentence.tokenizer.contains_key("model_max_length"));
    let of_sentence = sentence.max_length.or(overridden).or(sentence.max_seq_length);
    let limits = [
        of_sentence.map(|length| (length, sentence.path.clone())),
        of_tokenizer.map(|length| (length, files.path(tokenizer_config::CONFIG))),
    ];
    let positions = (config.encoder.max_tokens(), files.path("config.json"));
    match limits.into_iter().flatten().next() {
        Some(limit) if limit.0 <= positions.0 => limit,
        _ => positions,
    }
}

/// The number of special tokens that are added to every text, or to every pair.
fn special_token_count(tokenizer: &Tokenizer, pair: bool) -> usize {
    tokenizer.get_post_processor().map_or(0, |p| p.added_tokens(pair))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_another_type_than_the_class_is_an_error() -> Result<()> {
        let files = ModelFiles::memory("m", [("README.md", b"".as_slice())]);
        for (class, json, expected) in [
            ("BertTokenizer", r#"{"model": {"type": "BPE"}}"#, "WordPiece"),
            ("RobertaTokenizer", r#"{"model": {"type": "WordPiece"}}"#, "BPE"),
            ("AlbertTokenizer", r#"{"model": {"type": "BPE"}}"#, "Unigram"),
            ("BertTokenizer", r#"{"model": {"vocab": {}, "merges": []}}"#, "WordPiece"),
            ("BertTokenizer", r#"{"model": {"vocab": {}}}"#, "WordPiece"),
            ("RobertaTokenizer", r###"{"model": {"continuing_subword_prefix": "##"}}"###, "BPE"),
            ("AlbertTokenizer", r#"{"model": {"vocab": {}, "merges": []}}"#, "Unigram"),
        ] {
            let settings = TokenizerConfig::from_files(&files, &SentenceConfig::default(), class)?;
            assert_eq!(
                from_json(json.as_bytes(), &settings).unwrap_err().to_string(),
                format!(
                    "model is not {expected}: expected {expected} for {}",
                    settings.describe_class()
                )
            );
        }
        Ok(())
    }

    #[test]
    fn a_vocabulary_of_another_class_is_an_error_that_names_the_class() -> Result<()> {
        for (file, class) in [
            ("vocab.txt", "BertTokenizer"),
            ("vocab.json", "RobertaTokenizer"),
            ("sentencepiece.bpe.model", "XLMRobertaTokenizer"),
            ("spiece.model", "AlbertTokenizer"),
            ("spm.model", "DebertaV2Tokenizer"),
        ] {
            let settings = br#"{"tokenizer_class": "GPT2Tokenizer"}"#.as_slice();
            let contents = [("tokenizer_config.json", settings), (file, b"")];
            let files = ModelFiles::memory("m", contents);
            let mut settings =
                TokenizerConfig::from_files(&files, &SentenceConfig::default(), "BertTokenizer")?;
            assert_eq!(
                TextTokenizer::tokenizer(&files, &mut settings).unwrap_err().to_string(),
                format!(
                    "m/tokenizer_config.json: tokenizer_class GPT2Tokenizer is not supported: \
                     expected {class} for a {file}, or a tokenizer.json"
                )
            );
        }
        Ok(())
    }

    #[test]
    fn a_unigram_model_without_a_type_is_read_if_no_class_is_named() -> tokenizers::Result<()> {
        let files = ModelFiles::memory("m", [("README.md", b"".as_slice())]);
        let settings =
            TokenizerConfig::from_files(&files, &SentenceConfig::default(), "BertTokenizer")?;
        let json = br#"{"model": {"vocab": [["a", 0.0]], "unk_id": 0}}"#;
        assert!(matches!(from_json(json, &settings)?.get_model(), ModelWrapper::Unigram(_)));
        Ok(())
    }
}
