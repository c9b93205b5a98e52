//! Text to token ids, as `tokenizer.json` and `sentence_bert_config.json` say.

use serde::Deserialize;
use tokenizers::{
    PostProcessor, Tokenizer, TruncationParams,
    normalizers::{BertNormalizer, NormalizerWrapper},
};

use crate::{BertConfig, Error, ModelFiles, Result};

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
    do_lower_case: bool,
}

/// The tokens of one text, special tokens included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Row of each token in the vocabulary.
    pub input_ids: Vec<u32>,
    /// 0 for the first text, 1 for the second of a pair.
    pub token_type_ids: Vec<u32>,
}

/// `sentence_bert_config.json` of a sentence-transformers folder.
#[derive(Default, Deserialize)]
struct SentenceBertConfig {
    max_seq_length: Option<usize>,
    #[serde(default)]
    do_lower_case: bool,
}

/// `tokenizer_config.json`; the length may be a float as large as 1e30.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    tokenizer_class: Option<String>,
    model_max_length: Option<f64>,
    do_lower_case: Option<bool>,
    strip_accents: Option<bool>,
    tokenize_chinese_chars: Option<bool>,
}

impl TokenizerConfig {
    /// Where the class is BERT's, its switches count, and not what `tokenizer.json` baked in.
    fn apply(&self, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
        let class = self.tokenizer_class.as_deref().unwrap_or_default();
        let Some(NormalizerWrapper::BertNormalizer(baked)) = tokenizer.get_normalizer() else {
            return Ok(());
        };
        if matches!(class, "BertTokenizer" | "BertTokenizerFast") {
            let normalizer = BertNormalizer::new(
                baked.clean_text,
                self.tokenize_chinese_chars.unwrap_or(baked.handle_chinese_chars),
                self.strip_accents.or(baked.strip_accents),
                self.do_lower_case.unwrap_or(baked.lowercase),
            );
            tokenizer.with_normalizer(Some(normalizer))?;
        }
        Ok(())
    }
}

impl TextTokenizer {
    /// The tokenizer of `tokenizer.json`. Padding and truncation that the file bakes in do not
    /// count: texts are cut at `max_seq_length` of `sentence_bert_config.json`, or at
    /// `model_max_length` of `tokenizer_config.json`, and never beyond the model's positions.
    ///
    /// # Errors
    /// A file that is missing (`tokenizer.json`) or damaged; [`Error::NoRoom`] if the longest
    /// sequence is no longer than the special tokens of every text.
    pub fn from_files(files: &ModelFiles, config: &BertConfig) -> Result<Self> {
        const FILE: &str = "tokenizer.json";
        const CONFIG: &str = "tokenizer_config.json";
        const SENTENCE: &str = "sentence_bert_config.json";
        let path = files.path(FILE);
        let json = files.need(FILE, "the tokenizer's vocabulary and rules")?;
        let error = |source| Error::Tokenizer { path: path.clone(), source };
        let sentence: SentenceBertConfig = files.json(SENTENCE)?.unwrap_or_default();
        let config_of_class: TokenizerConfig = files.json(CONFIG)?.unwrap_or_default();
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(error)?;
        config_of_class.apply(&mut tokenizer).map_err(error)?;

        let positions = config.max_position_embeddings;
        let (limit, limit_path) = match (sentence.max_seq_length, config_of_class.model_max_length)
        {
            (Some(length), _) => (length, files.path(SENTENCE)),
            (None, Some(length)) => (length as usize, files.path(CONFIG)),
            (None, None) => (positions, files.path("config.json")),
        };
        let max_seq_length = limit.min(positions);
        let special = tokenizer.get_post_processor().map_or(0, |p| p.added_tokens(false));
        if max_seq_length <= special {
            return Err(Error::NoRoom { path: limit_path, got: max_seq_length, special });
        }
        let truncation =
            TruncationParams { max_length: max_seq_length, ..TruncationParams::default() };
        tokenizer.with_truncation(Some(truncation)).map_err(error)?;
        tokenizer.with_padding(None);
        Ok(Self { tokenizer, max_seq_length, do_lower_case: sentence.do_lower_case, path })
    }

    /// The longest sequence it makes, in tokens.
    pub fn max_seq_length(&self) -> usize {
        self.max_seq_length
    }

    /// The tokens of each text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no way to write a text.
    pub fn encode<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Tokens>> {
        let texts = texts.iter().map(|text| match self.do_lower_case {
            true => text.as_ref().to_lowercase(),
            false => text.as_ref().to_string(),
        });
        let encodings = self.tokenizer.encode_batch_fast(texts.collect(), true);
        let encodings =
            encodings.map_err(|source| Error::Tokenizer { path: self.path.clone(), source })?;
        let tokens = encodings.iter().map(|encoding| Tokens {
            input_ids: encoding.get_ids().to_vec(),
            token_type_ids: encoding.get_type_ids().to_vec(),
        });
        Ok(tokens.collect())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary lacks one of them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer
            .decode(ids, true)
            .map_err(|source| Error::Tokenizer { path: self.path.clone(), source })
    }
}
