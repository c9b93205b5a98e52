//! The tokens of a text whose vectors a multi-vector model returns.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::{Result, TextRole, TextTokenizer, load::ModelFolder};

/// The punctuation of Python's `string.punctuation`, which older models skip in documents.
pub(crate) const PUNCTUATION: &str = r##"!"#$%&'()*+,-./:;<=>?@[\]^_`{|}~"##;

/// Selects the tokens that have a vector: `MultiVectorMask` of sentence-transformers.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenMask {
    skipped: BTreeSet<u32>,
    skips_queries: bool,
    /// Whether tokens of documents are skipped, and of texts that are not queries.
    skips_documents: bool,
    /// If it is not empty, texts other than queries have vectors of these tokens only.
    kept: BTreeSet<u32>,
    /// Whether the first token has no vector.
    skips_first: bool,
}

/// The keys of the module's `config.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TokenMaskConfig {
    skiplist_words: Option<Vec<String>>,
    skiplist_tasks: Option<OneOrMany>,
    keep_only_token_ids: Option<BTreeSet<u32>>,
    /// Not a key: whether the first token has no vector.
    #[serde(skip)]
    skips_first: bool,
}

/// The tasks that a setting applies to.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn has(&self, task: &str) -> bool {
        match self {
            Self::One(one) => one == task,
            Self::Many(many) => many.iter().any(|one| one == task),
        }
    }
}

/// Whether a setting for `tasks` applies to texts; by default to those that are not queries.
pub(crate) fn applies(tasks: Option<&OneOrMany>, role: TextRole) -> bool {
    match tasks {
        None => role != TextRole::Query,
        Some(tasks) => tasks.has(if role == TextRole::Query { "query" } else { "document" }),
    }
}

impl TokenMaskConfig {
    /// Reads the `config.json` of the module.
    pub(crate) fn from_files(files: &ModelFolder) -> Result<Self> {
        Ok(files.json("config.json")?.unwrap_or_default())
    }

    /// The skip list of [`PUNCTUATION`].
    pub(crate) fn punctuation() -> Self {
        Self::of_words(PUNCTUATION.chars().map(String::from).collect())
    }

    /// No skip list; the first token has no vector.
    pub(crate) fn without_first_token() -> Self {
        Self { skips_first: true, ..Self::default() }
    }

    /// A skip list for documents.
    pub(crate) fn of_words(words: Vec<String>) -> Self {
        Self { skiplist_words: Some(words), ..Self::default() }
    }
}

impl TokenMask {
    /// Words that are not one token of the vocabulary are not skipped.
    pub(crate) fn new(config: &TokenMaskConfig, tokenizer: &TextTokenizer) -> Self {
        let words = config.skiplist_words.iter().flatten();
        let tasks = config.skiplist_tasks.as_ref();
        Self {
            skipped: words.filter_map(|word| tokenizer.token_id(word)).collect(),
            skips_queries: applies(tasks, TextRole::Query),
            skips_documents: applies(tasks, TextRole::Document),
            kept: config.keep_only_token_ids.clone().unwrap_or_default(),
            skips_first: config.skips_first,
        }
    }

    /// Whether the token at a position of a text has a vector.
    pub(crate) fn keeps(&self, position: usize, id: u32, role: TextRole) -> bool {
        let is_query = role == TextRole::Query;
        let skips = if is_query { self.skips_queries } else { self.skips_documents };
        let is_skipped = self.skips_first && position == 0 || skips && self.skipped.contains(&id);
        !is_skipped && (is_query || self.kept.is_empty() || self.kept.contains(&id))
    }
}
