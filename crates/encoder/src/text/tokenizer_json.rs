//! The parts of a `tokenizer.json`.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    AddedToken,
    utils::truncation::{TruncationDirection, TruncationParams},
};

use crate::text::tokenizer_config::TokenizerConfig;

/// The keys of a `tokenizer.json` that a class with its own rules reads. `M` has the keys of the
/// class's model.
#[derive(Deserialize)]
pub(crate) struct TokenizerJson<M> {
    pub(crate) model: M,
    pub(crate) normalizer: Option<Value>,
    pub(crate) post_processor: Option<Value>,
    #[serde(default)]
    added_tokens: Vec<TokenWithId>,
    truncation: Option<Truncation>,
}

/// The key `truncation` of a `tokenizer.json`. Its other keys, such as the length, are ignored.
#[derive(Clone, Copy, Deserialize)]
struct Truncation {
    #[serde(default)]
    direction: TruncationDirection,
}

/// The key `model.type` of a `tokenizer.json`, read without parsing the vocabulary.
#[derive(Deserialize)]
pub(crate) struct TokenizerKind {
    pub(crate) model: ModelKind,
}

#[derive(Deserialize)]
pub(crate) struct ModelKind {
    /// `None` in files of old versions of the `tokenizers` library.
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
}

/// An added token and its id.
#[derive(Deserialize)]
struct TokenWithId {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

impl<M> TokenizerJson<M> {
    /// The added tokens with their ids; none if `tokenizer_config.json` has the key
    /// `added_tokens_decoder`.
    pub(crate) fn added_tokens(&self, config: &TokenizerConfig) -> Vec<(u32, AddedToken)> {
        match config.lists_added_tokens() {
            true => vec![],
            false => {
                self.added_tokens.iter().map(|token| (token.id, token.token.clone())).collect()
            }
        }
    }

    /// Truncation with the direction of the file; `None` if the file has no truncation.
    pub(crate) fn truncation(&self) -> Option<TruncationParams> {
        self.truncation.map(|Truncation { direction }| TruncationParams {
            direction,
            ..TruncationParams::default()
        })
    }
}
