//! Text to token ids, with the vocabulary (`tokenizer.json`, `vocab.txt`, `vocab.json` and
//! `merges.txt`, or a SentencePiece model) and the settings files of the model.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use rayon::prelude::*;
use serde::de::DeserializeOwned;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model, ModelWrapper, PostProcessor, PostProcessorWrapper,
    PreTokenizerWrapper, Tokenizer, TokenizerImpl, TruncationDirection,
    models::unigram::Unigram,
    normalizers::{Lowercase, NormalizerWrapper, Sequence},
    pre_tokenizers::metaspace::Metaspace,
};

use crate::{
    ConfigError, Error, FileError, InputError, ModelConfig, ModelFiles, Result,
    error::beginning,
    load::{CONFIG, ModelFolder},
    text::ascii_word_piece::AsciiWordPiece,
    text::sentence_config::{Loader, SentenceConfig},
    text::sentence_piece::SentencePieceModel,
    text::tokenizer_class::{Algorithm, UnigramRules},
    text::tokenizer_config::{self, TokenizerConfig},
    text::tokenizer_json::{self, model_type},
    text::windows::{TextWindows, Window, window_ranges},
    text::{bpe, byte_bpe, chunks, hash_order, unigram, word_piece},
};

/// The vocabulary and the rules of the `tokenizers` library.
const TOKENIZER_JSON: &str = "tokenizer.json";
/// The vocabulary of BERT's tokenizers: one token per line.
const WORD_PIECES: &str = "vocab.txt";
/// The vocabulary of RoBERTa's tokenizers: tokens and ids.
const BYTE_PAIRS: &str = "vocab.json";
const MERGES: &str = "merges.txt";
/// Possible names of the vocabulary file.
pub(crate) const VOCABULARIES: [&str; 6] = [
    TOKENIZER_JSON,
    WORD_PIECES,
    BYTE_PAIRS,
    UnigramRules::XlmRoberta.model_file(),
    UnigramRules::Albert.model_file(),
    UnigramRules::Deberta.model_file(),
];

/// The maximum length of texts for a model that has none. Clients of a server read it as JSON, in
/// which larger integers are not exact.
pub(crate) const UNLIMITED: usize = i32::MAX as usize;

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
/// let files = encoder::ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?;
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
    /// If set, a text is cut to this number of characters per token of the maximum length.
    characters_per_token: Option<usize>,
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
    /// See [`Self::special_tokens_map`].
    special_tokens_map: Arc<[(&'static str, String)]>,
    /// Whether long texts can be tokenized in chunks.
    can_split: bool,
    /// The rules for ASCII texts, if they are BERT's.
    ascii: Option<Arc<AsciiWordPiece>>,
}

/// The tokens of one text or of one pair of texts, special tokens included.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tokens {
    /// The id of each token in the vocabulary.
    pub input_ids: Vec<u32>,
    /// 0 for the first text, 1 for the second text of a pair. Always 0 if the tokenizer has no
    /// token types: `model_input_names` of `tokenizer_config.json` decides, or the tokenizer class
    /// if this key is absent.
    pub token_type_ids: Vec<u32>,
    /// Number of tokens that truncation removed; for a pair, from both texts. It is too small, but
    /// not 0, if the rest of a text was not tokenized.
    pub truncated: usize,
}

/// The tokens of a text that [`Tokens::truncated`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// All tokens.
    All,
    /// The tokens of the part of the text that is tokenized. This part has the tokens that truncation
    /// keeps, and at least one more if the text has more.
    Kept,
}

/// How the texts of a table of token vectors are tokenized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StaticRules {
    /// As the StaticEmbedding of sentence-transformers: `tokenizer.json` has the maximum length.
    SentenceTransformers,
    /// As model2vec: a text is cut to `max_length` times the median number of characters of a
    /// token, and then truncated to `max_length` tokens. Unknown tokens are not pooled.
    Model2Vec { max_length: Option<usize> },
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

/// The token ids of a text, without special tokens and truncated.
struct TextIds {
    ids: Vec<u32>,
    /// Number of tokens before truncation.
    all: usize,
}

/// The question of the windows of a text, and their numbers of tokens.
struct WindowSpace {
    /// The token ids of the question.
    question: Option<Vec<u32>>,
    /// Number of special tokens.
    special: usize,
    /// Maximum number of tokens of the text.
    room: usize,
    /// Number of tokens that two consecutive windows share.
    overlap: usize,
}

/// The tokens of a text, without special tokens.
struct TextTokens {
    ids: Vec<u32>,
    /// The byte range of each token in the text.
    byte_ranges: Vec<Range<usize>>,
    /// The index of the word that each token belongs to.
    words: Vec<Option<u32>>,
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
    /// [`FileError::NoFile`] if a file of the vocabulary is missing; [`FileError::Io`],
    /// [`FileError::Json`] or [`FileError::Tokenizer`] for a damaged file;
    /// [`ConfigError::Unsupported`] for a setting that is not implemented; [`ConfigError::NoRoom`]
    /// if the maximum length leaves no room for text beside the special tokens.
    pub fn from_files(files: &ModelFiles, config: &ModelConfig) -> Result<Self> {
        Self::for_loader(&ModelFolder::new(files), config, Loader::Transformers)
    }

    /// [`Self::from_files`] with the settings that the Python class `loader` reads.
    pub(crate) fn for_loader(
        files: &ModelFolder,
        config: &ModelConfig,
        loader: Loader,
    ) -> Result<Self> {
        let sentence = SentenceConfig::from_files(files, loader)?;
        let mut settings = TokenizerConfig::from_files(files, &sentence, config.tokenizer_class)?;
        let (mut tokenizer, path) = Self::tokenizer(files, &mut settings)?;
        let error = |source| Error::File(FileError::Tokenizer { path: path.clone(), source });
        let default_side = tokenizer.get_truncation().map(|truncation| truncation.direction);
        let truncation_side =
            settings.truncation_side().or(default_side).unwrap_or(TruncationDirection::Right);

        let (max_seq_length, max_length_path) = max_length(files, config, &sentence, &settings);
        let special = special_token_count(&tokenizer, false);
        if max_seq_length <= special {
            let (path, got) = (max_length_path, max_seq_length);
            return Err(ConfigError::NoRoom { path, got, special }.into());
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
            special_tokens_map: settings.special_tokens_map().into(),
            // A damaged tokenizer that panics here also does so when it is used, which is an error.
            can_split: guarded(|| Ok(chunks::can_split(&tokenizer))).unwrap_or(false),
            ascii: AsciiWordPiece::new(&tokenizer).map(Arc::new),
            tokenizer: Arc::new(tokenizer),
            max_seq_length,
            characters_per_token: None,
            max_length_path,
            mask_token: settings.named("mask_token").to_string(),
            truncation_side,
            has_type_ids: settings.has_type_ids(),
            path,
        })
    }

    /// The tokenizer of a table of token vectors: all of `tokenizer.json` except the special tokens
    /// around a text. A text has any number of tokens unless the rules set a maximum.
    ///
    /// # Errors
    /// [`FileError::NoFile`] if the file is missing; [`FileError::Io`] or [`FileError::Tokenizer`]
    /// for a damaged file; [`ConfigError::NoRoom`] for a maximum length of 0.
    pub(crate) fn for_static(files: &ModelFolder, rules: StaticRules) -> Result<Self> {
        let json = files.need(TOKENIZER_JSON, "the tokenizer's vocabulary and rules")?;
        let path = files.path(TOKENIZER_JSON);
        let read = || {
            let mut tokenizer = from_whole_json(&json)?;
            let truncation = tokenizer.get_truncation().cloned();
            tokenizer.with_truncation(None)?;
            tokenizer.with_padding(None);
            tokenizer.with_post_processor(None::<PostProcessorWrapper>);
            hash_order::choose_added_tokens(&mut tokenizer)?;
            let unknown_id = tokenizer_json::unknown_id(&json, &tokenizer)?;
            Ok((tokenizer, truncation, unknown_id))
        };
        let (tokenizer, truncation, unknown_id) =
            guarded(read).map_err(|source| FileError::Tokenizer { path: path.clone(), source })?;
        let (limit, max_length_path) = match rules {
            StaticRules::SentenceTransformers => {
                (truncation.as_ref().map(|truncation| truncation.max_length), path.clone())
            }
            StaticRules::Model2Vec { max_length } => (max_length, files.path(CONFIG)),
        };
        if limit == Some(0) {
            return Err(ConfigError::NoRoom { path: max_length_path, got: 0, special: 0 }.into());
        }
        let characters_per_token = match rules {
            StaticRules::Model2Vec { .. } => Some(median_characters(&tokenizer)),
            StaticRules::SentenceTransformers => None,
        };
        let truncation_side = match (rules, truncation) {
            (StaticRules::SentenceTransformers, Some(truncation)) => truncation.direction,
            _ => TruncationDirection::Right,
        };
        Ok(Self {
            unknown_id,
            pad_id: 0,
            special_ids: BTreeSet::new(),
            special_tokens_map: Arc::default(),
            can_split: guarded(|| Ok(chunks::can_split(&tokenizer))).unwrap_or(false),
            ascii: AsciiWordPiece::new(&tokenizer).map(Arc::new),
            tokenizer: Arc::new(tokenizer),
            max_seq_length: limit.unwrap_or(UNLIMITED),
            characters_per_token,
            max_length_path,
            mask_token: String::new(),
            truncation_side,
            has_type_ids: false,
            path,
        })
    }

    /// The tokenizer of a folder, and the path of the file with its vocabulary. Passes the symbols
    /// of a SentencePiece model to `settings`.
    fn tokenizer(
        files: &ModelFolder,
        settings: &mut TokenizerConfig,
    ) -> Result<(Tokenizer, String)> {
        let algorithm = settings.rules().map(|class| class.algorithm);
        let mut vocabulary = TOKENIZER_JSON;
        let read = if let Some(json) = files.read(TOKENIZER_JSON)? {
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
            return Err(no_vocabulary(files, settings, TOKENIZER_JSON)?);
        };
        let path = files.path(vocabulary);
        match read {
            Ok(tokenizer) => Ok((tokenizer, path)),
            Err(source) => Err(FileError::Tokenizer { path, source }.into()),
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
    /// [`ConfigError::NoRoom`] if the length leaves no room for text beside the special tokens.
    pub fn with_max_seq_length(self, max_seq_length: usize) -> Result<Self> {
        let (special, path) = (self.special_token_count(), "set by the caller".to_string());
        if max_seq_length <= special {
            return Err(ConfigError::NoRoom { path, got: max_seq_length, special }.into());
        }
        Ok(Self { max_seq_length, max_length_path: path, ..self })
    }

    /// [`Self::with_max_seq_length`] for a model of `max` tokens.
    ///
    /// # Errors
    /// [`ConfigError::MaxSeqLength`] if the length is larger than `max`; the error of
    /// [`Self::with_max_seq_length`].
    pub(crate) fn with_max_seq_length_within(self, got: usize, max: usize) -> Result<Self> {
        if got > max {
            return Err(ConfigError::MaxSeqLength { got, max }.into());
        }
        self.with_max_seq_length(got)
    }

    /// The number of characters that a text is cut to before it is tokenized.
    fn max_characters(&self) -> usize {
        self.characters_per_token.map_or(usize::MAX, |n| n.saturating_mul(self.max_seq_length))
    }

    /// Sets the side on which truncation removes tokens, instead of that of the model's files.
    ///
    /// # Examples
    /// ```
    /// use encoder::{ModelConfig, ModelFiles, TextTokenizer, TruncationSide};
    ///
    /// let files = ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?;
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

    /// Makes tokens of the vocabulary special, so that they are one token in texts. Each of
    /// `prefixes` names a token, or begins with one and a space. Prefixes that are one token
    /// already, and those that are not in the vocabulary, stay as they are.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] for a damaged tokenizer.
    pub(crate) fn with_prefix_tokens(mut self, prefixes: &[&str]) -> Result<Self> {
        for prefix in prefixes {
            let first = prefix.split_whitespace().next().unwrap_or_default();
            let known = [*prefix, first].into_iter().find(|token| self.token_id(token).is_some());
            if let Some(token) = known.filter(|token| !token.is_empty())
                && self.encode_bare(token)? != Vec::from_iter(self.token_id(token))
            {
                let special = AddedToken::from(token, true).normalized(false);
                let mut tokenizer = (*self.tokenizer).clone();
                self.guarded(|_| tokenizer.add_special_tokens([special]).map(|_| ()))?;
                self.can_split = guarded(|| Ok(chunks::can_split(&tokenizer))).unwrap_or(false);
                self.ascii = AsciiWordPiece::new(&tokenizer).map(Arc::new);
                self.tokenizer = Arc::new(tokenizer);
            }
        }
        Ok(self)
    }

    /// The id of a token of the vocabulary.
    pub(crate) fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The id of the token that fills up shorter sequences of a padded batch; 0 if the vocabulary
    /// has none.
    pub fn pad_token_id(&self) -> u32 {
        self.pad_id
    }

    /// The id of the token for parts of a text that the vocabulary lacks, if it has one.
    pub(crate) fn unknown_token_id(&self) -> Option<u32> {
        self.unknown_id
    }

    /// The keys and texts of the named special tokens, such as `eos_token`. Chat templates have
    /// them as variables.
    pub(crate) fn special_tokens_map(&self) -> &[(&'static str, String)] {
        &self.special_tokens_map
    }

    /// The number of special tokens that are added to every text.
    pub fn special_token_count(&self) -> usize {
        special_token_count(&self.tokenizer, false)
    }

    /// The tokens of each text, truncated to the maximum length. Tokens are removed on the
    /// `truncation_side` of `tokenizer_config.json`, by default at the end.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary has no token for a part of a text.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Tokens>> {
        self.encode_counting(texts, Count::All)
    }

    /// [`Self::encode`]; `count` chooses whether [`Tokens::truncated`] is exact.
    pub(crate) fn encode_counting<S: AsRef<str>>(
        &self,
        texts: &[S],
        count: Count,
    ) -> Result<Vec<Tokens>> {
        let room = self.max_seq_length - self.special_token_count();
        self.for_each_text(texts, |text| {
            let TextIds { ids, all } = self.ids(text, room, count)?;
            let truncated = all - ids.len();
            Ok(Tokens { truncated, ..self.sequence(ids)? })
        })
    }

    /// Splits each text into consecutive windows of at most the maximum length, each with its own
    /// special tokens. A text within the maximum length has one window.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary has no token for a part of a text.
    pub fn encode_windows<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<Tokens>>> {
        let room = self.max_seq_length - self.special_token_count();
        self.for_each_text(texts, |text| {
            let (mut windows, mut rest) = (vec![], vec![]);
            self.for_each_chunk(
                text,
                |chunk| self.chunk_ids(chunk),
                |_, ids: &Vec<u32>| {
                    rest.extend_from_slice(ids);
                    let full = rest.len().saturating_sub(1) / room * room; // the last one may grow
                    for ids in rest.drain(..full).as_slice().chunks(room) {
                        windows.push(self.sequence(ids.to_vec())?);
                    }
                    Ok(())
                },
            )?;
            windows.push(self.sequence(rest)?);
            Ok(windows)
        })
    }

    /// Calls `f` for each text, on several threads.
    fn for_each_text<S: AsRef<str>, T: Send>(
        &self,
        texts: &[S],
        f: impl Fn(&str) -> Result<T> + Send + Sync,
    ) -> Result<Vec<T>> {
        let texts: Vec<&str> = texts.iter().map(|text| text.as_ref()).collect();
        texts.into_par_iter().map(f).collect()
    }

    /// The tokens of a text or window with its special tokens.
    fn sequence(&self, ids: Vec<u32>) -> Result<Tokens> {
        if self.tokenizer.get_post_processor().is_some() {
            return Ok(self.tokens(&self.joined(&ids, None)?));
        }
        Ok(Tokens { token_type_ids: vec![0; ids.len()], input_ids: ids, truncated: 0 })
    }

    /// The ids and types of the tokens.
    fn tokens(&self, encoding: &Encoding) -> Tokens {
        let token_type_ids = if self.has_type_ids {
            encoding.get_type_ids().to_vec()
        } else {
            vec![0; encoding.len()]
        };
        Tokens { input_ids: encoding.get_ids().to_vec(), token_type_ids, truncated: 0 }
    }

    /// Calls `encode` for the chunks of a text, and `add` for each chunk and its tokens, in the
    /// order of the text.
    fn for_each_chunk<T: Send>(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<T> + Sync,
        mut add: impl FnMut(&str, &T) -> Result<()>,
    ) -> Result<()> {
        if self.can_split {
            chunks::for_each_chunk(text, encode, add)
        } else {
            add(text, &encode(text)?)
        }
    }

    /// The token ids of a chunk, without special tokens.
    fn chunk_ids(&self, chunk: &str) -> Result<Vec<u32>> {
        if let Some(ids) = self.ascii.as_ref().and_then(|rules| rules.ids(&self.tokenizer, chunk)) {
            return Ok(ids);
        }
        Ok(self.guarded(|tokenizer| tokenizer.encode_fast(chunk, false))?.get_ids().to_vec())
    }

    /// The token ids of a text, without special tokens, truncated to `max` tokens.
    fn ids(&self, text: &str, max: usize, count: Count) -> Result<TextIds> {
        match count {
            Count::All => self.text_ids(text, max),
            Count::Kept => self.kept_ids(text, max),
        }
    }

    /// [`Self::text_ids`] that does not tokenize the whole of a long text, so that the number of all
    /// tokens may be too small, but more than `max`.
    fn kept_ids(&self, text: &str, max: usize) -> Result<TextIds> {
        /// More than the average length of a token, so that most texts have the tokens in one part.
        const TOKEN_BYTES: usize = 8;
        let mut bytes = max.saturating_add(1).saturating_mul(TOKEN_BYTES).max(256);
        let (kept, rest) = split_at_character(text, self.max_characters());
        if !self.can_split {
            return self.text_ids(text, max);
        }
        let mut found = loop {
            let cut = match self.truncation_side {
                _ if bytes >= kept.len() => None,
                TruncationDirection::Right => chunks::next_cut(kept, bytes),
                TruncationDirection::Left => chunks::next_cut(kept, kept.len() - bytes),
            };
            let part = match (cut, self.truncation_side) {
                (None, _) => kept,
                (Some(cut), TruncationDirection::Right) => &kept[..cut],
                (Some(cut), TruncationDirection::Left) => &kept[cut..],
            };
            let found = self.text_ids(part, max)?;
            if cut.is_none() || found.all > max {
                break found;
            }
            bytes = bytes.saturating_mul(4);
        };
        // The characters after the maximum have no vectors, but may be tokens that are removed.
        let mut chunks = chunks::chunks(rest, 256).filter(|chunk| !chunk.is_empty());
        while found.all <= found.ids.len()
            && let Some(chunk) = chunks.next()
        {
            found.all += self.chunk_ids(chunk)?.len();
        }
        Ok(found)
    }

    /// [`Self::ids`] that counts all tokens of the text.
    fn text_ids(&self, text: &str, max: usize) -> Result<TextIds> {
        let (mut ids, mut all) = (vec![], 0);
        let (text, rest) = split_at_character(text, self.max_characters());
        if !rest.is_empty() {
            // Tokens that are not computed for the vector; they are counted for warnings.
            self.for_each_chunk(
                rest,
                |chunk| self.chunk_ids(chunk),
                |_, ids| {
                    all += ids.len();
                    Ok(())
                },
            )?;
        }
        self.for_each_chunk(
            text,
            |chunk| self.chunk_ids(chunk),
            |_, more| {
                all += more.len();
                match self.truncation_side {
                    TruncationDirection::Right => {
                        ids.extend_from_slice(&more[..more.len().min(max - ids.len())]);
                    }
                    TruncationDirection::Left => {
                        ids.extend_from_slice(&more[more.len().saturating_sub(max)..]);
                        ids.drain(..ids.len().saturating_sub(max));
                    }
                }
                Ok(())
            },
        )?;
        Ok(TextIds { ids, all })
    }

    /// The tokens of pairs of texts. Tokens of the second text have type 1 if the tokenizer has
    /// token types. If a pair is too long, tokens are removed from the longer text until both texts
    /// have equal length, and then from both texts, on the same side as in [`Self::encode`].
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary has no token for a part of a text;
    /// [`ConfigError::NoRoom`] if the maximum length leaves no room for text beside the special
    /// tokens of a pair.
    pub fn encode_pairs<S: AsRef<str>>(&self, pairs: &[(S, S)]) -> Result<Vec<Tokens>> {
        self.encode_pairs_counting(pairs, Count::All)
    }

    /// [`Self::encode_pairs`]; `count` chooses whether [`Tokens::truncated`] is exact.
    pub(crate) fn encode_pairs_counting<S: AsRef<str>>(
        &self,
        pairs: &[(S, S)],
        count: Count,
    ) -> Result<Vec<Tokens>> {
        let special = special_token_count(&self.tokenizer, true);
        let got = self.max_seq_length;
        if got <= special {
            return Err(
                ConfigError::NoRoom { path: self.max_length_path.clone(), got, special }.into()
            );
        }
        let room = got - special;
        let firsts: BTreeSet<&str> = pairs.iter().map(|(first, _)| first.as_ref()).collect();
        let firsts: Vec<&str> = firsts.into_iter().collect(); // a shared query is tokenized once
        let ids = self.for_each_text(&firsts, |text| self.ids(text, room, count))?;
        let first: BTreeMap<&str, &TextIds> = firsts.iter().copied().zip(&ids).collect();
        let pairs: Vec<[&str; 2]> =
            pairs.iter().map(|(text, second)| [text.as_ref(), second.as_ref()]).collect();
        let joined = pairs.into_par_iter().map(|texts| {
            let (ids1, ids2) = (first[texts[0]], &self.ids(texts[1], room, count)?);
            let [mut all1, mut all2] = [ids1.all, ids2.all];
            if count == Count::Kept && all1.min(all2) > room && !room.is_multiple_of(2) {
                // The longer text keeps one token more than the other.
                [all1, all2] = [self.text_ids(texts[0], 0)?.all, self.text_ids(texts[1], 0)?.all];
            }
            let (n1, n2) = pair_lengths(all1, all2, room);
            let joined =
                self.joined(self.truncated(&ids1.ids, n1), Some(self.truncated(&ids2.ids, n2)))?;
            Ok(Tokens { truncated: all1 - n1 + all2 - n2, ..self.tokens(&joined) })
        });
        joined.collect()
    }

    /// The `n` ids that truncation keeps.
    fn truncated<'a>(&self, ids: &'a [u32], n: usize) -> &'a [u32] {
        match self.truncation_side {
            TruncationDirection::Right => &ids[..n],
            TruncationDirection::Left => &ids[ids.len() - n..],
        }
    }

    /// Joins one or two texts with their special tokens. The post-processor depends on the ids
    /// only, apart from offsets, which are not used.
    fn joined(&self, first: &[u32], second: Option<&[u32]>) -> Result<Encoding> {
        let encoding = |ids: &[u32], type_id| {
            let token = |&id: &u32| tokenizers::Token::new(id, String::new(), (0, 0));
            Encoding::from_tokens(ids.iter().map(token).collect(), type_id)
        };
        let (first, second) = (encoding(first, 0), second.map(|ids| encoding(ids, 1)));
        self.guarded(|tokenizer| tokenizer.post_process(first, second, true))
    }

    /// Splits a text into windows. A sequence consists of the question, if there is one, a window
    /// of the text and special tokens, and has at most `max_length` tokens. The windows overlap, so
    /// that each token has context on both sides in some window. The first window starts at the
    /// side of the text that truncation would keep.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary has no token for a part of a text;
    /// [`ConfigError::NoRoom`] if the special tokens leave no room for the text;
    /// [`InputError::LongQuestion`] for a question that leaves no room for the text.
    pub(crate) fn encode_text_windows(
        &self,
        question: Option<&str>,
        text: &str,
        max_length: usize,
    ) -> Result<(Vec<Tokens>, TextWindows)> {
        let WindowSpace { question, room, overlap, .. } =
            self.window_space(question, max_length)?;
        let question_length = question.as_ref().map_or(0, Vec::len);
        let TextTokens { ids, byte_ranges, words } = self.encode_with_ranges(text)?;
        let continues_word = self.continues_word(text, &ids, &words, &byte_ranges);
        let window = |range: Range<usize>| {
            let (first, own) = (range.start, range.len());
            let joined = match &question {
                Some(question) => self.joined(question, Some(&ids[range]))?,
                None => self.joined(&ids[range], None)?,
            };
            let special = joined.get_special_tokens_mask();
            let positions = (0..joined.len()).filter(|&position| special[position] == 0);
            let positions = positions.skip(question_length).take(own).collect();
            Ok((self.tokens(&joined), Window { first, positions }))
        };
        let windows = window_ranges(ids.len(), room, overlap, self.truncation_side);
        let windows = windows.into_iter().map(window).collect::<Result<Vec<_>>>()?;
        let (sequences, windows) = windows.into_iter().unzip();
        Ok((sequences, TextWindows { windows, byte_ranges, words, continues_word }))
    }

    /// An upper bound of the size of the sequence of a text of `length` bytes that is truncated,
    /// with a prompt and special tokens of at most 64 tokens.
    pub fn sequence_size(&self, length: usize) -> usize {
        /// Bytes of a sequence without its tokens, in a queue and with its values.
        const SEQUENCE: usize = 256;
        /// Bytes of the id and the type of a token.
        const TOKEN: usize = 8;
        SEQUENCE + TOKEN * self.max_seq_length.min(length + 64)
    }

    /// The number of tokens of all sequences of [`Self::encode_text_windows`], computed without
    /// storing them.
    ///
    /// # Errors
    /// The errors of [`Self::encode_text_windows`].
    pub(crate) fn count_window_tokens(
        &self,
        question: Option<&str>,
        text: &str,
        max_length: usize,
    ) -> Result<usize> {
        let WindowSpace { question, special, room, overlap } =
            self.window_space(question, max_length)?;
        let around = question.map_or(0, |ids| ids.len()) + special;
        let windows =
            window_ranges(self.text_ids(text, 0)?.all, room, overlap, self.truncation_side);
        Ok(windows.into_iter().map(|range| range.len() + around).sum())
    }

    /// The space of a window. The errors are those of [`Self::encode_text_windows`].
    fn window_space(&self, question: Option<&str>, max_length: usize) -> Result<WindowSpace> {
        // The default `doc_stride` of the question answering pipeline of transformers.
        const OVERLAP: usize = 128;
        let max_length = max_length.min(self.max_seq_length);
        let special = special_token_count(&self.tokenizer, question.is_some());
        let space = max_length.saturating_sub(special);
        if space <= usize::from(question.is_some()) {
            let (path, got) = (self.max_length_path.clone(), max_length);
            return Err(ConfigError::NoRoom { path, got, special }.into());
        }
        let ids = question.map(|question| self.text_ids(question, space)).transpose()?;
        let got = ids.as_ref().map_or(0, |ids| ids.all);
        if got >= space {
            let (question, max) =
                (beginning(question.unwrap_or_default()), space.saturating_sub(1));
            return Err(InputError::LongQuestion { question, got, max }.into());
        }
        let room = space - got;
        // Windows advance by at least half their room, so that their number is linear in the length
        // of the text whatever the length of the question.
        let overlap = OVERLAP.min(max_length / 2).min(room / 2);
        Ok(WindowSpace { question: ids.map(|ids| ids.ids), special, room, overlap })
    }

    /// See [`TextWindows::continues_word`]. In a WordPiece model, a token continues a word if the
    /// token before it belongs to the same word; transformers instead compares the length of the
    /// token with that of its text, which gives other words if the normalizer changes the number of
    /// characters. In other models, a token continues a word if a character other than a space
    /// precedes it, it does not begin with a space, and it is not the unknown token.
    fn continues_word(
        &self,
        text: &str,
        ids: &[u32],
        words: &[Option<u32>],
        byte_ranges: &[Range<usize>],
    ) -> Vec<bool> {
        if matches!(self.tokenizer.get_model(), ModelWrapper::WordPiece(_)) {
            let joined = |i: usize| i > 0 && words[i].is_some() && words[i] == words[i - 1];
            return (0..words.len()).map(joined).collect();
        }
        let continues = |(range, id): (&Range<usize>, &u32)| {
            let before = text[..range.start].chars().next_back();
            let first = text[range.start..].chars().next();
            before.is_some_and(|c| c != ' ') && first != Some(' ') && Some(*id) != self.unknown_id
        };
        byte_ranges.iter().zip(ids).map(continues).collect()
    }

    /// The tokens of a text, not truncated, with or without special tokens.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary has no token for a part of the text.
    /// # Examples
    /// ```
    /// use encoder::{ModelConfig, ModelFiles, TextTokenizer};
    ///
    /// let files = ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?;
    /// let config = ModelConfig::from_json(&files.need("config.json", "sizes")?, "config.json")?;
    /// let tokenizer = TextTokenizer::from_files(&files, &config)?;
    /// let pieces = tokenizer.pieces("I love AI", true)?;
    /// assert_eq!((pieces[0].id, &pieces[0].token[..], &pieces[0].range), (101, "[CLS]", &None));
    /// assert_eq!((pieces[2].id, pieces[2].range.clone()), (2293, Some(2..6)));
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn pieces(&self, text: &str, with_special_tokens: bool) -> Result<Vec<Piece>> {
        let mut pieces = vec![];
        self.for_each_piece(text, with_special_tokens, |piece| pieces.push(piece))?;
        Ok(pieces)
    }

    /// Calls `f` for each of [`Self::pieces`]. Only the tokens of a part of a long text are in
    /// memory at a time.
    ///
    /// # Errors
    /// The errors of [`Self::pieces`].
    pub fn for_each_piece(
        &self,
        text: &str,
        with_special_tokens: bool,
        mut f: impl FnMut(Piece),
    ) -> Result<()> {
        // The special tokens around a text are the same for every text.
        let around =
            if with_special_tokens { Some(self.joined(&[self.pad_id], None)?) } else { None };
        let special = |around: &Encoding, is_before: bool| -> Vec<Piece> {
            let is_special = around.get_special_tokens_mask();
            let text = is_special.iter().position(|&special| special == 0);
            let range = match (is_before, text) {
                (true, text) => 0..text.unwrap_or(around.len()),
                (false, Some(text)) => text + 1..around.len(),
                (false, None) => 0..0,
            };
            let piece = |i: usize| {
                let (id, token) = (around.get_ids()[i], around.get_tokens()[i].clone());
                Piece { id, token, range: None }
            };
            range.map(piece).collect()
        };
        around.iter().for_each(|around| special(around, true).into_iter().for_each(&mut f));
        self.for_each_range(text, |tokens, ranges| {
            let tokens = tokens.get_ids().iter().zip(tokens.get_tokens()).zip(ranges);
            for ((&id, token), range) in tokens {
                f(Piece { id, token: token.clone(), range: Some(range) });
            }
        })?;
        around.iter().for_each(|around| special(around, false).into_iter().for_each(&mut f));
        Ok(())
    }

    /// An estimate of the memory that the tokenization of a text needs, besides its tokens, in
    /// bytes. Most tokenizers split a long text at spaces; a text without spaces, as in Chinese,
    /// needs memory in proportion to its length.
    pub fn tokenization_memory(&self, text: &str) -> usize {
        /// Bytes per byte of a text, measured.
        const FACTOR: usize = 128;
        let part = if self.can_split {
            text.len().min(chunks::GROUP * chunks::longest_chunk(text))
        } else {
            text.len()
        };
        part * FACTOR
    }

    /// Calls `add` for the tokens of each chunk of a text, without special tokens, and the range of
    /// bytes of each token in the text.
    fn for_each_range(
        &self,
        text: &str,
        mut add: impl FnMut(&Encoding, Vec<Range<usize>>),
    ) -> Result<()> {
        // A post-processor that excludes white space from the offsets of a token subtracts a number
        // of characters, so that offsets in bytes would be wrong after U+3000, for example. The
        // post-processor subtracts at each call, so the offsets are read before the special tokens
        // are added.
        let encode =
            |chunk: &str| self.guarded(|tokenizer| tokenizer.encode_char_offsets(chunk, false));
        let mut before = 0;
        self.for_each_chunk(text, encode, |chunk, tokens: &Encoding| {
            let starts = chunk.char_indices().map(|(byte, _)| before + byte);
            let starts: Vec<usize> = starts.chain([before + chunk.len()]).collect();
            let byte = |character: usize| starts[character.min(starts.len() - 1)];
            let offsets = tokens.get_offsets().iter();
            add(tokens, offsets.map(|&(start, end)| byte(start)..byte(end)).collect());
            before += chunk.len();
            Ok(())
        })
    }

    /// The tokens of a text, without special tokens, with their ranges of bytes and their words.
    fn encode_with_ranges(&self, text: &str) -> Result<TextTokens> {
        let mut all = TextTokens { ids: vec![], byte_ranges: vec![], words: vec![] };
        let mut words_before = 0;
        self.for_each_range(text, |tokens, ranges| {
            all.ids.extend_from_slice(tokens.get_ids());
            all.byte_ranges.extend(ranges);
            let words = tokens.get_word_ids().iter().map(|word| word.map(|i| words_before + i));
            all.words.extend(words);
            words_before = all.words.iter().rev().find_map(|word| *word).map_or(0, |last| last + 1);
        })?;
        Ok(all)
    }

    /// The token ids of a text, without special tokens.
    pub(crate) fn encode_bare(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.text_ids(text, usize::MAX)?.ids)
    }

    /// [`Self::encode_bare`], truncated to `max` tokens.
    pub(crate) fn encode_bare_within(
        &self,
        text: &str,
        max: usize,
        count: Count,
    ) -> Result<Tokens> {
        let TextIds { ids, all } = self.ids(text, max, count)?;
        let (types, truncated) = (vec![0; ids.len()], all - ids.len());
        Ok(Tokens { input_ids: ids, token_type_ids: types, truncated })
    }

    /// The number of tokens that a prompt takes at the beginning of a text: those of the prompt
    /// alone, truncated to the maximum length. The special token at its beginning is counted, the
    /// one at its end is not, as in sentence-transformers.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary has no token for a part of the prompt.
    pub fn prompt_length(&self, prompt: &str) -> Result<usize> {
        let ids = &self.encode(&[prompt])?[0].input_ids;
        let is_special = ids.last().is_some_and(|id| self.special_ids.contains(id));
        Ok(ids.len() - usize::from(is_special))
    }

    /// The ids of the special tokens before and after the tokens of a text, as in [`Self::encode`].
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] for a damaged tokenizer.
    /// # Examples
    /// ```
    /// use encoder::{Embedder, LoadOptions};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let embedder = Embedder::from_dir("weights/all-MiniLM-L6-v2", &LoadOptions::default())?;
    /// let [before, after] = embedder.tokenizer().special_tokens_around_text()?;
    /// assert_eq!((before, after), (vec![101], vec![102])); // [CLS], [SEP]
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn special_tokens_around_text(&self) -> Result<[Vec<u32>; 2]> {
        let encoding = self.joined(&[0], None)?;
        let mut parts = encoding.get_ids().iter().zip(encoding.get_special_tokens_mask());
        let before = parts.by_ref().map_while(|(&id, &special)| (special == 1).then_some(id));
        Ok([before.collect(), parts.map(|(&id, _)| id).collect()])
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
    /// [`FileError::Tokenizer`] if the vocabulary lacks it.
    pub(crate) fn mask_token_id(&self) -> Result<u32> {
        self.need_token_id(&self.mask_token, "mask_token")
    }

    /// The id of a token that a setting names.
    ///
    /// # Errors
    /// [`FileError::Tokenizer`] if the vocabulary lacks it.
    pub(crate) fn need_token_id(&self, token: &str, setting: &str) -> Result<u32> {
        let error = || tokenizer_config::lacks_token(token, setting);
        self.token_id(token).ok_or_else(|| self.error(error().into()))
    }

    /// The vocabulary's spelling of a token, or the id in digits if the vocabulary lacks it.
    pub(crate) fn token(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string())
    }

    /// Decodes tokens to text, special tokens included.
    ///
    /// # Errors
    /// [`InputError::UnknownToken`] if the vocabulary lacks one of the ids.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, false)
    }

    /// Decodes tokens to text. Special tokens are left out.
    ///
    /// # Errors
    /// [`InputError::UnknownToken`] if the vocabulary lacks one of the ids.
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
            return Err(InputError::UnknownToken { id }.into());
        }
        self.guarded(|tokenizer| tokenizer.decode(ids, skip_special_tokens))
    }

    /// Calls `f`. Returns [`FileError::Tokenizer`] if it fails or panics.
    fn guarded<T>(&self, f: impl FnOnce(&Tokenizer) -> tokenizers::Result<T>) -> Result<T> {
        guarded(|| f(&self.tokenizer)).map_err(|e| self.error(e))
    }

    fn error(&self, source: tokenizers::Error) -> Error {
        Error::File(FileError::Tokenizer { path: self.path.clone(), source })
    }
}

/// A text up to the character `at`, and the rest.
fn split_at_character(text: &str, at: usize) -> (&str, &str) {
    if text.len() <= at {
        return (text, "");
    }
    text.split_at(text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte))
}

/// The median number of characters of a token, rounded down.
fn median_characters(tokenizer: &Tokenizer) -> usize {
    let vocabulary = tokenizer.get_vocab(true);
    let mut lengths: Vec<usize> = vocabulary.keys().map(|token| token.chars().count()).collect();
    lengths.sort_unstable();
    let n = lengths.len();
    if n == 0 { 0 } else { (lengths[(n - 1) / 2] + lengths[n / 2]) / 2 }
}

/// Calls `f`. Returns an error if it panics: the `tokenizers` crate panics if the rules in the file
/// are damaged, for example the character map or the template of the special tokens.
fn guarded<T>(f: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    let panic = |_| Err("the tokenizer panicked; the file is probably damaged".into());
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(panic)
}

/// The error if a folder lacks `file` (`tokenizer.json`) and a vocabulary that the class reads.
/// [`ConfigError::Unsupported`] if the class has no rules here and the folder has the vocabulary of
/// another class; otherwise [`FileError::NoFile`].
///
/// # Errors
/// [`FileError::Io`] or a download error if the folder cannot be searched.
fn no_vocabulary(files: &ModelFolder, settings: &TokenizerConfig, file: &str) -> Result<Error> {
    let expected = match settings.rules().map(|class| class.algorithm) {
        None => {
            for (file, expected) in FILES_OF_CLASSES {
                if files.has(file)? {
                    let (path, got) = (settings.class_path(), settings.describe_class());
                    return Ok(Error::unsupported(path, "tokenizer_class", expected, got));
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
            "BPE" => return byte_bpe::from_json(std::str::from_utf8(json)?, settings),
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
    let mut tokenizer = from_whole_json(json)?;
    if let Some(scheme) = settings.llama_prepend_scheme()
        && !serde_json::to_string(&tokenizer.get_pre_tokenizer())?.contains("ByteLevel")
    {
        // transformers takes only the vocabulary and the post-processor from the file.
        tokenizer.with_normalizer(None::<NormalizerWrapper>)?;
        tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', scheme, false)));
    }
    settings.add_tokens_with_ids(&mut tokenizer, vec![])?;
    settings.add_special_tokens(&mut tokenizer, false)?;
    Ok(tokenizer)
}

/// The tokenizer that a `tokenizer.json` describes.
fn from_whole_json(json: &[u8]) -> tokenizers::Result<Tokenizer> {
    let text = std::str::from_utf8(json)?;
    if let Some(tokenizer) = bpe::from_json(text)? {
        return Ok(tokenizer);
    }
    // `ModelWrapper` copies a vocabulary several times before it builds the model.
    let parsed = match model_type(json).as_deref() {
        Ok("Unigram") => with_model::<Unigram>(text),
        _ => with_model::<ModelWrapper>(text),
    };
    let tokenizer =
        parsed.map_err(|error| hash_order::missing_key(json).unwrap_or(error.into()))?;
    if !matches!(tokenizer.get_model(), ModelWrapper::Unigram(_)) {
        hash_order::check_ids_of(&tokenizer)?;
    }
    Ok(tokenizer)
}

/// The tokenizer of a `tokenizer.json` whose model is an `M`.
fn with_model<M: Model + DeserializeOwned + Into<ModelWrapper>>(
    json: &str,
) -> serde_json::Result<Tokenizer> {
    type Rules<M> = TokenizerImpl<
        M,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >;
    Ok(serde_json::from_str::<Rules<M>>(json)?.into())
}

/// The maximum length in tokens, and the path of the file that sets it. The first of these keys
/// that is set applies: in `sentence_bert_config.json`, `max_length` of `processing_kwargs`,
/// `model_max_length` of `processor_kwargs` and `max_seq_length`; in `tokenizer_config.json`,
/// `model_max_length`. The result is limited to
/// [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens).
fn max_length(
    files: &ModelFolder,
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

/// The numbers of tokens that truncation keeps of the `first` and `second` tokens of a pair with
/// room for `room` tokens: the shorter text is truncated only if both are longer than half the
/// room. `LongestFirst` in Hugging Face tokenizers.
fn pair_lengths(first: usize, second: usize, room: usize) -> (usize, usize) {
    if first + second <= room {
        return (first, second);
    }
    let short = first.min(second).min(room / 2);
    let long = room - short;
    if first <= second { (short, long) } else { (long, short) }
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
        let files = ModelFolder::new(&ModelFiles::memory("m", [("README.md", b"".as_slice())]));
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
            let files = ModelFolder::new(&ModelFiles::memory("m", contents));
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
        let files = ModelFolder::new(&ModelFiles::memory("m", [("README.md", b"".as_slice())]));
        let settings =
            TokenizerConfig::from_files(&files, &SentenceConfig::default(), "BertTokenizer")?;
        let json = br#"{"model": {"vocab": [["a", 0.0]], "unk_id": 0}}"#;
        assert!(matches!(from_json(json, &settings)?.get_model(), ModelWrapper::Unigram(_)));
        Ok(())
    }

    #[test]
    fn pairs_are_truncated_as_by_longest_first() {
        for (lengths, kept) in [
            ((3, 4), (3, 4)),
            ((0, 9), (0, 7)),
            ((9, 2), (5, 2)),
            ((4, 4), (3, 4)),
            ((5, 4), (4, 3)),
            ((90, 91), (3, 4)),
        ] {
            assert_eq!(pair_lengths(lengths.0, lengths.1, 7), kept, "{lengths:?}");
        }
    }

    /// The tokenizers in the repository, with the maximum length of all-MiniLM-L6-v2.
    fn tokenizers() -> Result<Vec<TextTokenizer>> {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let minilm = format!("{root}/weights/all-MiniLM-L6-v2");
        let config = ModelFiles::dir(&minilm)?.need("config.json", "sizes")?;
        let config = ModelConfig::from_json(&config, "config.json")?;
        let mut folders = vec![minilm];
        for folder in ["sentences", "tokenizers"] {
            let folder = format!("{root}/tests/golden/architectures/{folder}");
            let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let entries = entries.filter(|path| path.is_dir());
            folders.extend(entries.map(|path| path.to_str().unwrap().to_string()));
        }
        let load = |folder| TextTokenizer::from_files(&ModelFiles::dir(folder)?, &config);
        folders.iter().map(load).collect()
    }

    #[test]
    fn ascii_texts_have_the_token_ids_of_the_library() -> Result<()> {
        let parts = [
            "face", " ", "CAB", "bad", "[MASK]", "[UNK", "##a", "\t", "\r\n", "\u{b}", "\0",
            "\u{7f}", "a", "b", "zz", "'s", "...", "Q", "9", "_x", "é",
        ];
        let (mut random, mut fast) = (7u64, 0);
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize
        };
        let all = tokenizers()?;
        for tokenizer in all.iter().filter(|tokenizer| tokenizer.ascii.is_some()) {
            for i in 0..3000 {
                let mut text = "a".repeat(if i % 50 == 0 { 95 + next() % 10 } else { 0 });
                for _ in 0..next() % 12 {
                    match next() % 3 {
                        0 => text.push(char::from((next() % 95 + 32) as u8)),
                        _ => text += parts[next() % parts.len()],
                    }
                }
                let library = tokenizer.guarded(|library| library.encode_fast(&*text, false))?;
                let rules = tokenizer.ascii.as_ref().unwrap();
                if let Some(ids) = rules.ids(&tokenizer.tokenizer, &text) {
                    assert_eq!(ids, library.get_ids(), "{text:?}, {}", tokenizer.path);
                    fast += 1;
                }
            }
        }
        assert!(fast > 3000, "{fast}");
        Ok(())
    }

    #[test]
    fn a_text_in_chunks_has_the_tokens_of_the_whole_text() -> Result<()> {
        let parts = [
            "a bad cab",
            " face",
            "  two spaces",
            "\tTab\n",
            "1 2 3 4",
            " \u{3000}x",
            "e\u{301} \u{301}e",
            " [MASK] a",
            "<mask> b",
            "\u{fdfa}",
            "'s it's",
            " 漢字 kanji",
            "``quoted''",
            "ß ẞ ﬁ",
            "▁ a",
        ];
        let mut random = 7u64;
        let mut text = String::new();
        while text.len() < 3 * chunks::CHUNK_BYTES {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            text.push_str(parts[(random >> 33) as usize % parts.len()]);
        }
        let mut in_chunks = 0;
        let all = tokenizers()?;
        for tokenizer in &all {
            let whole = TextTokenizer { can_split: false, ..tokenizer.clone() };
            in_chunks += usize::from(tokenizer.can_split);
            let same = |a: TextTokens, b: TextTokens| {
                // The numbers of the words may differ, but not which tokens belong to one word.
                let words = |tokens: &TextTokens| {
                    let pairs = tokens.words.windows(2).map(|pair| pair[0] == pair[1]);
                    pairs.collect::<Vec<_>>()
                };
                words(&a) == words(&b) && a.ids == b.ids && a.byte_ranges == b.byte_ranges
            };
            let path = &tokenizer.path;
            let ranges = tokenizer.encode_with_ranges(&text)?;
            assert!(same(ranges, whole.encode_with_ranges(&text)?), "{path}");
            assert_eq!(tokenizer.pieces(&text, true)?, whole.pieces(&text, true)?, "{path}");
            for side in [TruncationSide::Left, TruncationSide::Right] {
                let all = [tokenizer, &whole].map(|one| one.clone().with_truncation_side(side));
                let [ours, whole] = all.map(|one| one.encode(&[&text]));
                assert_eq!(ours?, whole?, "{path}");
                for max in [0, 1, 30, 400, 3000] {
                    let side = tokenizer.clone().with_truncation_side(side);
                    let [kept, whole] =
                        [Count::Kept, Count::All].map(|count| side.ids(&text, max, count));
                    let (kept, whole) = (kept?, whole?);
                    assert_eq!(kept.ids, whole.ids, "{path}");
                    assert!(max < kept.all && kept.all < whole.all, "{path} {max}");
                }
            }
            assert_eq!(tokenizer.encode_windows(&[&text])?, whole.encode_windows(&[&text])?);
            // Of two long texts, the longer one may keep one token more.
            let longer = format!("{text} a");
            let pairs = [[&text, &longer], [&longer, &text], [&text, &"a b".to_string()]];
            let pairs = pairs.map(|[first, second]| (first, second));
            for max in [29, 30] {
                let tokenizer = TextTokenizer { max_seq_length: max, ..tokenizer.clone() };
                let [kept, exact] = [Count::Kept, Count::All]
                    .map(|count| tokenizer.encode_pairs_counting(&pairs, count));
                for (kept, exact) in kept?.iter().zip(&exact?) {
                    assert_eq!(kept.input_ids, exact.input_ids, "{path} {max}");
                    assert!(0 < kept.truncated && kept.truncated <= exact.truncated, "{path}");
                }
            }
        }
        assert_eq!((all.len(), in_chunks), (18, 18));
        Ok(())
    }
}
