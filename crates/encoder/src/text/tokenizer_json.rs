//! The parts of a `tokenizer.json`.

use serde::Deserialize;
use tokenizers::{AddedToken, ModelWrapper, utils::truncation::TruncationParams};

use crate::text::tokenizer_config::TokenizerConfig;

/// The keys of a `tokenizer.json` that the classes with WordPiece and byte-level BPE read.
#[derive(Deserialize)]
pub(crate) struct TokenizerJson {
    pub(crate) model: ModelWrapper,
    #[serde(default)]
    added_tokens: Vec<TokenWithId>,
    pub(crate) truncation: Option<TruncationParams>,
}

/// The model type of a `tokenizer.json`, without the vocabulary.
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

/// The added tokens of a file with their ids; none if `added_tokens_decoder` lists the added tokens.
pub(crate) fn added_tokens(
    tokens: &[TokenWithId],
    config: &TokenizerConfig,
) -> Vec<(u32, AddedToken)> {
    match config.lists_added_tokens() {
        true => vec![],
        false => tokens.iter().map(|token| (token.id, token.token.clone())).collect(),
    }
}
