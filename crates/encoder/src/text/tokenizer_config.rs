//! The settings of a tokenizer: `tokenizer_config.json`, and the files `special_tokens_map.json`
//! and `added_tokens.json` of transformers before version 4.34. They are merged as in
//! `PreTrainedTokenizerBase._from_pretrained` of transformers 5.23.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::{
    AddedToken, Tokenizer, TruncationDirection, normalizers::BertNormalizer,
    pre_tokenizers::metaspace::PrependScheme,
};

use crate::{
    Error, Result,
    load::{ModelFolder, parse_value},
    text::sentence_config::SentenceConfig,
    text::tokenizer_class::{BERT_TOKENS, TokenizerClass},
};

pub(crate) const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const ADDED_TOKENS: &str = "added_tokens.json";

/// The names, without the suffix `Fast`, of tokenizer classes that follow all rules of
/// `tokenizer.json`.
const GENERAL_CLASSES: [&str; 3] = [CONVBERT, "PreTrainedTokenizer", REGISTERED_CLASS];

/// The default class of the architectures for which transformers ignores the class that a file
/// names.
pub(crate) const REGISTERED_CLASS: &str = "TokenizersBackend";

/// The only class of [`GENERAL_CLASSES`] with token types.
const CONVBERT: &str = "ConvBertTokenizer";

/// The keys of the named special tokens, in the order in which they are added.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The key of the special tokens without a name.
const EXTRA: &str = "extra_special_tokens";
/// The older name of [`EXTRA`].
const ADDITIONAL: &str = "additional_special_tokens";
/// The key of the special tokens with names that the model defines.
const BY_NAME: &str = "model_specific_special_tokens";

/// A token: its text alone, or its text with options.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a token: a string, or an object with content")]
pub(crate) enum Token {
    Text(String),
    WithOptions {
        content: String,
        #[serde(default)]
        single_word: bool,
        #[serde(default)]
        lstrip: bool,
        #[serde(default)]
        rstrip: bool,
        normalized: Option<bool>,
        #[serde(default)]
        special: bool,
    },
    /// A user-defined symbol of a SentencePiece model, which is not a special token.
    #[serde(skip)]
    Symbol(String),
}

impl Token {
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::WithOptions { content: text, .. } | Self::Symbol(text) => text,
        }
    }

    /// The token. A token without options is changed to include the white space before it.
    fn with_space_before(self) -> Self {
        match self {
            Self::Text(content) => Self::WithOptions {
                content,
                single_word: false,
                lstrip: true,
                rstrip: false,
                normalized: None,
                special: true,
            },
            token => token,
        }
    }

    /// The token as `tokenizers` expects it. A symbol is never special; another token is special if
    /// the argument or its own flag is true.
    fn added(&self, special: bool) -> AddedToken {
        match self {
            Self::Text(text) => AddedToken::from(text, special),
            Self::Symbol(text) => AddedToken::from(text, false).normalized(false),
            Self::WithOptions {
                content,
                single_word,
                lstrip,
                rstrip,
                normalized,
                special: own,
            } => {
                let special = special || *own;
                AddedToken::from(content, special)
                    .single_word(*single_word)
                    .lstrip(*lstrip)
                    .rstrip(*rstrip)
                    .normalized(normalized.unwrap_or(!special))
            }
        }
    }
}

/// The keys of the merged settings, without the special tokens.
#[derive(Debug, Default, Deserialize)]
struct Keys {
    tokenizer_class: Option<String>,
    model_max_length: Option<f64>,
    do_lower_case: Option<bool>,
    strip_accents: Option<bool>,
    tokenize_chinese_chars: Option<bool>,
    truncation_side: Option<String>,
    split_special_tokens: Option<bool>,
    add_prefix_space: Option<bool>,
    legacy: Option<bool>,
    trim_offsets: Option<bool>,
    keep_accents: Option<bool>,
    split_by_punct: Option<bool>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    model_input_names: Option<Vec<String>>,
    /// Added tokens by id; the keys are decimal numbers.
    added_tokens_decoder: Option<BTreeMap<String, Token>>,
    init_inputs: Option<Vec<Value>>,
    fast_tokenizer_files: Option<Vec<String>>,
    vocab: Option<Value>,
    unk_id: Option<usize>,
}

/// The merged settings of a tokenizer.
#[derive(Debug)]
pub(crate) struct TokenizerConfig {
    keys: Keys,
    /// Added tokens with their ids, in ascending order.
    with_ids: Vec<(u32, AddedToken)>,
    /// The named special tokens that the files set: key and token.
    named: Vec<(String, Token)>,
    /// The special tokens without a name; `None` if no file sets them.
    extra: Option<Vec<Token>>,
    /// Whether [`Self::extra`] is kept if a SentencePiece model has symbols.
    keeps_extra: bool,
    /// See [`Self::adds_bos_and_eos`].
    adds_bos_and_eos: Option<[bool; 2]>,
    /// The keys of named special tokens that the files set to null.
    without: Vec<String>,
    /// The path of the file that sets `tokenizer_class`.
    class_path: String,
    /// The class if no file names one. [`REGISTERED_CLASS`] applies even if a file names a class.
    default_class: &'static str,
}

impl TokenizerConfig {
    /// Reads and merges the settings. The keys of `sentence.tokenizer` override those of
    /// `tokenizer_config.json`. `default_class` is the class if no file names one.
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if a file cannot be read or parsed;
    /// [`crate::ConfigError::Unsupported`] for a setting that is not implemented.
    pub(crate) fn from_files(
        files: &ModelFolder,
        sentence: &SentenceConfig,
        default_class: &'static str,
    ) -> Result<Self> {
        let (path, overrides) = (files.path(CONFIG), &sentence.tokenizer);
        let mut config: Map<String, Value> = files.json(CONFIG)?.unwrap_or_default();
        let mut class_path = path.clone();
        // config.json may set tokenizer_class if tokenizer_config.json does not.
        if config.get("tokenizer_class").is_none_or(Value::is_null)
            && let Some(model) = files.json::<Map<String, Value>>("config.json")?
            && let Some(class) = model.get("tokenizer_class")
        {
            class_path = files.path("config.json");
            let class = Map::from_iter([("tokenizer_class".to_string(), class.clone())]);
            check_types(class.clone(), &class_path)?;
            config.extend(class);
        }
        config.extend(overrides.clone());
        let is_legacy = !config.contains_key("added_tokens_decoder");
        let map: Map<String, Value> = if is_legacy {
            files.json(SPECIAL_TOKENS_MAP)?.unwrap_or_default()
        } else {
            Map::new()
        };
        let path_of = |key: &str| match key {
            key if overrides.contains_key(key) => sentence.path.clone(),
            key if map.contains_key(key) => files.path(SPECIAL_TOKENS_MAP),
            _ => path.clone(),
        };
        let keeps_extra = keeps_extra(&config, &map);
        // A value of the wrong type is an error of the file that sets it.
        check_types(overrides.clone(), &sentence.path)?;
        let effective = map.iter().filter(|(key, _)| !overrides.contains_key(*key));
        let effective = effective.map(|(key, value)| (key.clone(), value.clone())).collect();
        check_types(effective, &files.path(SPECIAL_TOKENS_MAP))?;
        merge_special_tokens_map(&mut config, map.clone(), overrides);
        rename_old_keys(&mut config);
        let keys: Keys = parse_value(Value::Object(config.clone()), &path)?;
        keys.check(path_of)?;
        let (mut named, mut extra) = (vec![], None);
        for (key, value) in &config {
            if (is_named_token(key) && !value.is_null()) || is_model_specific_token(key, value) {
                named.push((key.clone(), token(value, key, &path_of(key))?));
            }
        }
        for key in [EXTRA, BY_NAME] {
            match config.get(key) {
                None => {}
                Some(Value::Null) if key == EXTRA => extra = Some(vec![]),
                Some(Value::Null) => {}
                Some(Value::Array(tokens)) => {
                    let tokens = tokens.iter().map(|value| token(value, key, &path_of(key)));
                    extra.get_or_insert_with(Vec::new).extend(tokens.collect::<Result<Vec<_>>>()?);
                }
                Some(Value::Object(tokens)) => {
                    for (name, value) in tokens {
                        named.push((name.clone(), token(value, key, &path_of(key))?));
                    }
                }
                Some(got) => {
                    let expected = "a list of tokens, or tokens by their names";
                    return Err(Error::unsupported(path_of(key), key, expected, got));
                }
            }
        }
        named.sort_by_key(|(key, _)| {
            NAMED_TOKENS.iter().position(|name| name == key).unwrap_or(NAMED_TOKENS.len())
        });
        let nulls = config.iter().filter(|(key, value)| is_named_token(key) && value.is_null());
        let mut config = Self {
            adds_bos_and_eos: adds_bos_and_eos(&config, &keys),
            without: nulls.map(|(key, _)| key.clone()).collect(),
            keys,
            with_ids: vec![],
            named,
            extra,
            keeps_extra,
            class_path,
            default_class,
        };
        config.with_ids = if is_legacy {
            config.legacy_added_tokens(files)?
        } else {
            config.added_tokens_decoder(&path_of("added_tokens_decoder"))?
        };
        Ok(config)
    }

    /// The tokens of `added_tokens_decoder` with their ids.
    fn added_tokens_decoder(&self, path: &str) -> Result<Vec<(u32, AddedToken)>> {
        let tokens = self.keys.added_tokens_decoder.iter().flatten().map(|(id, token)| {
            let id = id.parse::<u32>().map_err(|_| {
                Error::unsupported(
                    path,
                    "added_tokens_decoder",
                    "tokens by their ids",
                    format!("{id:?}"),
                )
            })?;
            let is_named = self.named.iter().any(|(_, named)| named.text() == token.text())
                || self.is_named_token_of_class(token.text());
            let normalized = token.added(false).normalized; // independent of `is_named`
            Ok((id, token.added(is_named).normalized(normalized)))
        });
        let mut tokens = tokens.collect::<Result<Vec<_>>>()?;
        tokens.sort_by_key(|(id, _)| *id);
        Ok(tokens)
    }

    /// The tokens of `added_tokens.json` with their ids. A token is special if another file lists
    /// it as special, or if it is a named special token of the class.
    fn legacy_added_tokens(&self, files: &ModelFolder) -> Result<Vec<(u32, AddedToken)>> {
        let added: BTreeMap<String, u32> = files.json(ADDED_TOKENS)?.unwrap_or_default();
        let special = |text: &str| {
            let named = self.named.iter().filter(|(key, _)| is_named_token(key));
            let named = named.map(|(_, token)| token);
            named.chain(self.extra.iter().flatten()).any(|token| token.text() == text)
        };
        let tokens = added.into_iter().map(|(text, id)| {
            let mut token = AddedToken::from(&text[..], special(&text));
            // Set after `AddedToken::from`, which derives `normalized` from `special`.
            token.special |= self.is_named_token_of_class(&text);
            (id, token)
        });
        let mut tokens: Vec<_> = tokens.collect();
        tokens.sort_by_key(|(id, _)| *id);
        Ok(tokens)
    }

    /// Whether transformers has the rules of the class in code, and a text is one of its named
    /// special tokens, set by a file or by default.
    fn is_named_token_of_class(&self, text: &str) -> bool {
        self.rules().is_some() && NAMED_TOKENS.iter().any(|key| self.named(key) == text)
    }

    /// The path of the file that sets `tokenizer_class`, by default `tokenizer_config.json`.
    pub(crate) fn class_path(&self) -> &str {
        &self.class_path
    }

    /// The tokenizer class of transformers, if a file names it.
    pub(crate) fn class(&self) -> Option<&str> {
        self.keys.tokenizer_class.as_deref()
    }

    /// The class for an error message, with a note if it is the default.
    pub(crate) fn describe_class(&self) -> String {
        match (self.default_class, self.class()) {
            (REGISTERED_CLASS, _) => format!("{REGISTERED_CLASS} (the class of this model_type)"),
            (_, Some(class)) => class.to_string(),
            (default, None) => format!("{default} (the default, since no class is named)"),
        }
    }

    /// The name of the class, without the suffix `Fast`.
    fn class_stem(&self) -> &str {
        match self.default_class {
            REGISTERED_CLASS => REGISTERED_CLASS,
            default => self.class().unwrap_or(default).trim_end_matches("Fast"),
        }
    }

    /// The rules of the class, if transformers has them in code and not in `tokenizer.json`.
    pub(crate) fn rules(&self) -> Option<&'static TokenizerClass> {
        TokenizerClass::find(self.class_stem())
    }

    /// The message for a `tokenizer.json` whose model is not `expected`, the model of the class.
    pub(crate) fn wrong_model(&self, expected: &str) -> String {
        format!("model is not {expected}: expected {expected} for {}", self.describe_class())
    }

    /// Whether the class follows all rules of `tokenizer.json`. Other classes override some of
    /// them.
    pub(crate) fn follows_tokenizer_json(&self) -> bool {
        GENERAL_CLASSES.contains(&self.class_stem())
    }

    /// Whether `added_tokens_decoder` lists the added tokens. Added tokens of other files are then
    /// ignored.
    pub(crate) fn lists_added_tokens(&self) -> bool {
        self.keys.added_tokens_decoder.is_some()
    }

    /// The maximum length in tokens, if a file sets it. Files without a limit store 1e30.
    pub(crate) fn model_max_length(&self) -> Option<f64> {
        self.keys.model_max_length
    }

    /// The side of a text on which truncation removes tokens, if a file sets it.
    pub(crate) fn truncation_side(&self) -> Option<TruncationDirection> {
        self.keys.truncation_side.as_deref().map(|side| match side {
            "left" => TruncationDirection::Left,
            _ => TruncationDirection::Right,
        })
    }

    /// Whether the spelling of a special token in a text is split like any other word.
    pub(crate) fn split_special_tokens(&self) -> bool {
        self.keys.split_special_tokens.unwrap_or(false)
    }

    /// Whether the model uses token types: set by `model_input_names`, or else by the class.
    pub(crate) fn has_type_ids(&self) -> bool {
        let class_has_type_ids =
            || self.rules().map_or(self.class_stem() == CONVBERT, |class| class.has_type_ids);
        let names = self.keys.model_input_names.as_ref();
        names.map_or_else(class_has_type_ids, |names| {
            names.iter().any(|name| name == "token_type_ids")
        })
    }

    /// The text of a named special token, by default that of the class, or else of BERT's classes.
    pub(crate) fn named(&self, key: &str) -> &str {
        let named = self.named.iter().find(|(name, _)| name == key).map(|(_, token)| token.text());
        let defaults = self.rules().map_or(BERT_TOKENS, |class| class.special_tokens);
        let default = || defaults.iter().find(|(name, _)| *name == key).map(|(_, text)| *text);
        named.or_else(default).unwrap_or_default()
    }

    /// The keys and texts of the named special tokens that the tokenizer has.
    pub(crate) fn special_tokens_map(&self) -> Vec<(&'static str, String)> {
        let defaults = self.rules().map_or(&[][..], |class| class.special_tokens);
        let text = |key: &'static str| {
            let named = self.named.iter().find(|(name, _)| name == key);
            let named = named.map(|(_, token)| token.text());
            let default = || defaults.iter().find(|(name, _)| *name == key).map(|(_, text)| *text);
            let default = || default().filter(|_| !self.without.iter().any(|null| null == key));
            Some((key, named.or_else(default)?.to_string()))
        };
        NAMED_TOKENS.into_iter().filter_map(text).collect()
    }

    /// [`Self::named`], and its id.
    ///
    /// # Errors
    /// An error that names the token if the tokenizer does not have it.
    pub(crate) fn token_with_id(
        &self,
        tokenizer: &Tokenizer,
        key: &str,
    ) -> tokenizers::Result<(String, u32)> {
        let token = self.named(key);
        let id = tokenizer.token_to_id(token).ok_or_else(|| lacks_token(token, key))?;
        Ok((token.to_string(), id))
    }

    /// Whether texts are lowercased; `default` applies if the key is absent.
    pub(crate) fn lowercases(&self, default: bool) -> bool {
        self.keys.do_lower_case.unwrap_or(default)
    }

    /// Whether [DeBERTa's class](super::unigram) separates punctuation from words.
    pub(crate) fn splits_punctuation(&self) -> bool {
        self.keys.split_by_punct.unwrap_or(false)
    }

    /// The id of the unknown token, if [DeBERTa's class](super::unigram) does not find it by its
    /// text.
    pub(crate) fn unknown_id(&self) -> usize {
        self.keys.unk_id.unwrap_or(1)
    }

    /// Whether [ALBERT's class](super::unigram) keeps accents.
    pub(crate) fn keeps_accents(&self) -> bool {
        self.keys.keep_accents.unwrap_or(false)
    }

    /// Whether `bos_token` is added before each text, and `eos_token` after it. `None` if no file
    /// sets `add_bos_token` or `add_eos_token`. Only [ALBERT's class](super::unigram) without a
    /// `tokenizer.json` uses these keys.
    pub(crate) fn adds_bos_and_eos(&self) -> Option<[bool; 2]> {
        self.adds_bos_and_eos
    }

    /// Whether the beginning of a text is tokenized like a word after a space.
    pub(crate) fn add_prefix_space(&self) -> Option<bool> {
        self.keys.add_prefix_space
    }

    /// For Llama's class: where its pre-tokenizer inserts the character ▁ for a space.
    pub(crate) fn llama_prepend_scheme(&self) -> Option<PrependScheme> {
        if self.class_stem() != "LlamaTokenizer" {
            return None;
        }
        Some(match (self.keys.add_prefix_space, self.keys.legacy) {
            (Some(false), _) => PrependScheme::Never,
            (_, Some(true)) => PrependScheme::Always,
            _ => PrependScheme::First,
        })
    }

    /// Whether the byte range of a token excludes the space before it.
    pub(crate) fn trim_offsets(&self) -> bool {
        self.keys.trim_offsets.unwrap_or(true)
    }

    /// The normalizer of BERT's classes.
    pub(crate) fn bert_normalizer(&self) -> BertNormalizer {
        BertNormalizer::new(
            true,
            self.keys.tokenize_chinese_chars.unwrap_or(true),
            self.keys.strip_accents,
            self.lowercases(true),
        )
    }

    /// Adds the tokens with ids, and the tokens `more`, to a tokenizer. The tokenizer then does not
    /// split these tokens.
    ///
    /// # Errors
    /// An error that names the token if the tokenizer assigns it another id. It assigns the id of
    /// the vocabulary, or else the next free id.
    pub(crate) fn add_tokens_with_ids(
        &self,
        tokenizer: &mut Tokenizer,
        more: Vec<(u32, AddedToken)>,
    ) -> tokenizers::Result<()> {
        let mut with_ids = self.with_ids.clone();
        with_ids.extend(more);
        with_ids.sort_by_key(|(id, _)| *id);
        with_ids.retain(|(_, token)| !token.content.is_empty());
        tokenizer.add_tokens(with_ids.iter().map(|(_, token)| token.clone()))?;
        for (id, AddedToken { content, .. }) in &with_ids {
            let expected = tokenizer.token_to_id(content).unwrap_or_default();
            if expected != *id {
                let rule = "the vocabulary's, or the next free one";
                let error =
                    format!("added token {content:?}: expected id {expected} ({rule}), got {id}");
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Replaces the special tokens without a name by the symbols of a SentencePiece model, unless
    /// [`keeps_extra`] is true for the files.
    pub(crate) fn set_symbols(&mut self, symbols: Vec<Token>) {
        if !self.keeps_extra {
            self.extra = Some(symbols);
        }
    }

    /// All special tokens: the named ones, then those without a name, each with the defaults of the
    /// class if `with_defaults`.
    pub(crate) fn special_tokens(&self, with_defaults: bool) -> impl Iterator<Item = Token> {
        let class = self.rules().filter(|_| with_defaults);
        let defaults = class.map_or(&[][..], |class| class.special_tokens);
        let named = NAMED_TOKENS.iter().filter_map(move |key| {
            let named = self.named.iter().find(|(name, _)| name == key).map(|(_, token)| token);
            let default = defaults.iter().find(|(name, _)| name == key);
            let token = named
                .cloned()
                .or_else(|| default.map(|(_, text)| Token::Text(text.to_string())))?;
            match (*key, class) {
                ("mask_token", Some(class)) if class.mask_includes_space() => {
                    Some(token.with_space_before())
                }
                _ => Some(token),
            }
        });
        let own = self.named.iter().filter(|(name, _)| !is_named_token(name));
        let default = class.map_or(&[][..], TokenizerClass::extra_special_tokens);
        let default = || default.iter().map(|text| Token::Text(text.to_string())).collect();
        let extra = self.extra.clone().unwrap_or_else(default);
        named.chain(own.map(|(_, token)| token.clone())).chain(extra)
    }

    /// Adds the missing [special tokens](Self::special_tokens) to a tokenizer, and sets whether it
    /// splits special tokens in texts. Of two missing tokens with the same text, the options of the
    /// second apply.
    pub(crate) fn add_special_tokens(
        &self,
        tokenizer: &mut Tokenizer,
        with_defaults: bool,
    ) -> tokenizers::Result<()> {
        let present: BTreeSet<String> =
            tokenizer.get_added_tokens_decoder().into_values().map(|added| added.content).collect();
        let missing =
            self.special_tokens(with_defaults).filter(|token| !present.contains(token.text()));
        tokenizer.add_tokens(missing.map(|token| token.added(true)))?;
        tokenizer.set_encode_special_tokens(self.split_special_tokens());
        Ok(())
    }
}

impl Keys {
    /// Checks that the values are implemented. `path_of` returns the path of the file that sets a
    /// key.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a value that is not implemented.
    fn check(&self, path_of: impl Fn(&str) -> String) -> Result<()> {
        let unsupported =
            |key, expected, got: String| Error::unsupported(path_of(key), key, expected, got);
        if let Some(side) = self.truncation_side.as_deref()
            && !["left", "right"].contains(&side)
        {
            return Err(unsupported("truncation_side", "left or right", side.to_string()));
        }
        if let Some(inputs) = self.init_inputs.as_ref().filter(|inputs| !inputs.is_empty()) {
            return Err(unsupported(
                "init_inputs",
                "an empty list",
                Value::from(inputs.clone()).to_string(),
            ));
        }
        if let Some(vocab) = &self.vocab {
            return Err(unsupported(
                "vocab",
                "a vocab.txt or a tokenizer.json instead",
                vocab.to_string(),
            ));
        }
        let files = self.fast_tokenizer_files.iter().flatten();
        match files.into_iter().find(|file| *file != "tokenizer.json") {
            Some(file) => Err(unsupported("fast_tokenizer_files", "tokenizer.json", file.clone())),
            None => Ok(()),
        }
    }
}

/// The message of an error for a special token that the vocabulary does not contain. `key` is the
/// setting that names the token.
pub(crate) fn lacks_token(token: &str, key: &str) -> String {
    format!(
        "the vocabulary does not contain {token:?}: expected the {key} of the tokenizer settings"
    )
}

/// Checks the types of the settings of the file `path`.
///
/// # Errors
/// [`crate::FileError::Json`] for a setting of the wrong type.
fn check_types(mut map: Map<String, Value>, path: &str) -> Result<()> {
    rename_old_keys(&mut map);
    parse_value::<Keys>(Value::Object(map), path).map(|_| ())
}

/// Moves values from old keys to current keys that are not set.
fn rename_old_keys(config: &mut Map<String, Value>) {
    if !config.contains_key("model_max_length")
        && let Some(max_len) = config.remove("max_len")
    {
        config.insert("model_max_length".to_string(), max_len);
    }
    // `additional_special_tokens` applies if `extra_special_tokens` is empty or is an object of
    // model-specific tokens.
    let by_name = config.get(EXTRA).filter(|tokens| tokens.is_object()).cloned();
    if by_name.is_some() || !config.get(EXTRA).is_some_and(is_not_empty) {
        match config.remove(ADDITIONAL) {
            Some(older) => config.insert(EXTRA.to_string(), older),
            None if by_name.is_some() => config.remove(EXTRA),
            None => None,
        };
    }
    // An object `extra_special_tokens` replaces `model_specific_special_tokens`. Otherwise, the
    // latter is ignored if a model-specific token has a top-level key.
    if let Some(by_name) = by_name {
        config.insert(BY_NAME.to_string(), by_name);
    } else if config.iter().any(|(key, value)| is_model_specific_token(key, value)) {
        config.remove(BY_NAME);
    }
}

/// Whether a key is one of [`NAMED_TOKENS`].
fn is_named_token(key: &str) -> bool {
    NAMED_TOKENS.contains(&key)
}

/// Whether a key holds a special token with a name that the model defines.
fn is_model_specific_token(key: &str, value: &Value) -> bool {
    key.ends_with("_token") && !is_named_token(key) && (value.is_string() || value.is_object())
}

/// Merges `map`, the keys of `special_tokens_map.json`, into `config`, the keys of
/// `tokenizer_config.json`. A key of `map` replaces the key in `config`, unless `overrides` has it.
/// If both have a list `extra_special_tokens`, that of `map` is appended to that of `config`. If
/// `config` has an object of model-specific tokens instead, the object moves to
/// `model_specific_special_tokens`. `additional_special_tokens` of `map` apply only if `config` has
/// no list under `extra_special_tokens` or `additional_special_tokens`.
fn merge_special_tokens_map(
    config: &mut Map<String, Value>,
    map: Map<String, Value>,
    overrides: &Map<String, Value>,
) {
    let has_list = [EXTRA, ADDITIONAL]
        .iter()
        .any(|key| config.get(*key).is_some_and(|tokens| tokens.is_array()));
    let has_names = config.get(EXTRA).is_some_and(Value::is_object);
    let replaces = map.get(EXTRA).is_some_and(Value::is_array) && !overrides.contains_key(EXTRA);
    if has_names && replaces {
        let by_name = config.remove(EXTRA).unwrap_or_default();
        config.insert(BY_NAME.to_string(), by_name);
    }
    for (key, value) in map {
        match (config.get_mut(EXTRA), value) {
            _ if overrides.contains_key(&key) => {}
            (Some(Value::Array(tokens)), Value::Array(more)) if key == EXTRA => {
                tokens.extend(
                    more.into_iter().filter(|token| !tokens.contains(token)).collect::<Vec<_>>(),
                );
            }
            _ if key == ADDITIONAL && has_list => {}
            (_, value) => {
                config.insert(key, value);
            }
        }
    }
}

/// See [`TokenizerConfig::adds_bos_and_eos`]. In transformers, an absent key means `false` if the
/// other key is present, and a token that is `null` is not added.
fn adds_bos_and_eos(config: &Map<String, Value>, keys: &Keys) -> Option<[bool; 2]> {
    let is_set = ["add_bos_token", "add_eos_token"].iter().any(|key| config.contains_key(*key));
    let adds = |value, token| value == Some(true) && !config.get(token).is_some_and(Value::is_null);
    let added = [adds(keys.add_bos_token, "bos_token"), adds(keys.add_eos_token, "eos_token")];
    is_set.then_some(added)
}

/// Whether transformers keeps the files' special tokens without a name if a SentencePiece model has
/// symbols. The symbols replace `additional_special_tokens`, unless transformers has renamed this
/// key to `extra_special_tokens` before: it does so for `tokenizer_config.json` (`config`), but not
/// for `special_tokens_map.json` (`map`).
fn keeps_extra(config: &Map<String, Value>, map: &Map<String, Value>) -> bool {
    if let Some(extra) = map.get(EXTRA) {
        return !extra.is_object();
    }
    match config.get(EXTRA) {
        Some(extra) if is_not_empty(extra) => extra.is_array(),
        Some(Value::Object(_)) | None => {
            config.get(ADDITIONAL).is_some_and(|tokens| !tokens.is_object())
        }
        Some(_) => true,
    }
}

/// Whether a value is neither null nor an empty list or object.
fn is_not_empty(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
        _ => true,
    }
}

/// Parses the token `value`. `key` and `path` are for the error.
fn token(value: &Value, key: &str, path: &str) -> Result<Token> {
    let object = Value::Object(Map::from_iter([(key.to_string(), value.clone())]));
    let mut tokens: BTreeMap<String, Token> = parse_value(object, path)?;
    Ok(tokens.remove(key).unwrap_or_else(|| Token::Text(String::new())))
}
