//! The parts of a `tokenizer.json`.

use serde::Deserialize;
use tokenizers::{
    AddedToken, ModelWrapper,
    utils::truncation::{TruncationDirection, TruncationParams},
};

use crate::text::tokenizer_config::TokenizerConfig;

/// The keys of a `tokenizer.json` that the classes with WordPiece and byte-level BPE read.
#[derive(Deserialize)]
pub(crate) struct TokenizerJson {
    pub(crate) model: ModelWrapper,
    #[serde(default)]
    added_tokens: Vec<TokenWithId>,
    pub(crate) truncation: Option<Truncation>,
}

/// The key `truncation` of a `tokenizer.json`. Its other keys, such as the length, are ignored.
#[derive(Clone, Copy, Deserialize)]
pub(crate) struct Truncation {
    #[serde(default)]
    direction: TruncationDirection,
}

impl From<Truncation> for TruncationParams {
    fn from(Truncation { direction }: Truncation) -> Self {
        Self { direction, ..Self::default() }
    }
}

/// The key `model.type` of a `tokenizer.json`, read without parsing the vocabulary.
#[derive(Deserialize)]
pub(crate) struct TokenizerKind {
    pub(crate) model: ModelKind,
}

#[derive(Deserialize)]
pub(crate) struct ModelKind {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
}

/// An added token and its id.
#[derive(Deserialize)]
pub(crate) struct TokenWithId {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

impl TokenizerJson {
    /// The added tokens with their ids.
    pub(crate) fn added_tokens(&self, config: &TokenizerConfig) -> Vec<(u32, AddedToken)> {
        added_tokens(&self.added_tokens, config)
    }
}

/// The added tokens of a `tokenizer.json` with their ids; none if `tokenizer_config.json` has the
/// key `added_tokens_decoder`.
pub(crate) fn added_tokens(
    tokens: &[TokenWithId],
    config: &TokenizerConfig,
) -> Vec<(u32, AddedToken)> {
    match config.lists_added_tokens() {
        true => vec![],
        false => tokens.iter().map(|token| (token.id, token.token.clone())).collect(),
    }
}
