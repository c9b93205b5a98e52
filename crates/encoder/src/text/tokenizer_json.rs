//! The parts of a `tokenizer.json`.

use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;
use tokenizers::{
    AddedToken, Tokenizer,
    utils::truncation::{TruncationDirection, TruncationParams},
};

use crate::text::tokenizer_config::TokenizerConfig;

/// The keys of a `tokenizer.json` that a class with its own rules reads. `M` has the keys of the
/// class's model; `N` and `P` are the types of the normalizer and the post-processor.
#[derive(Deserialize)]
pub(crate) struct TokenizerJson<M, N = IgnoredAny, P = IgnoredAny> {
    pub(crate) model: M,
    pub(crate) normalizer: Option<N>,
    pub(crate) post_processor: Option<P>,
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

/// The id of the unknown token that the model in a `tokenizer.json` names; `None` if it names none.
///
/// # Errors
/// An error if the file cannot be parsed.
pub(crate) fn unknown_id(json: &[u8], tokenizer: &Tokenizer) -> serde_json::Result<Option<u32>> {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        /// The key of Unigram models.
        unk_id: Option<u32>,
        /// The key of all other models.
        unk_token: Option<String>,
    }
    let File { model } = serde_json::from_slice(json)?;
    Ok(model.unk_id.or_else(|| tokenizer.token_to_id(&model.unk_token?)))
}

/// The type of the model in a `tokenizer.json`, such as `WordPiece`. Old versions of the
/// `tokenizers` library write no type; the other keys of the model then determine the type.
///
/// # Errors
/// An error if the file cannot be parsed, or has no model. The vocabulary is not parsed.
pub(crate) fn model_type(json: &[u8]) -> serde_json::Result<String> {
    #[derive(Deserialize)]
    struct File<'a> {
        #[serde(borrow)]
        model: Model<'a>,
    }
    #[derive(Deserialize)]
    #[serde(expecting = "the tokenizer's model, an object")]
    struct Model<'a> {
        r#type: Option<String>,
        #[serde(borrow)]
        vocab: Option<&'a RawValue>,
        merges: Option<IgnoredAny>,
        continuing_subword_prefix: Option<IgnoredAny>,
    }
    let File { model } = serde_json::from_slice(json)?;
    Ok(model.r#type.unwrap_or_else(|| {
        let is_list = model.vocab.is_some_and(|vocab| vocab.get().starts_with('['));
        let name = match (model.merges, model.continuing_subword_prefix) {
            _ if is_list => "Unigram",
            (Some(_), _) => "BPE",
            (None, Some(_)) => "WordPiece",
            (None, None) => "WordLevel",
        };
        name.to_string()
    }))
}

/// An added token and its id.
#[derive(Deserialize)]
struct TokenWithId {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

impl<M, N, P> TokenizerJson<M, N, P> {
    /// The added tokens with their ids; none if `tokenizer_config.json` has the key
    /// `added_tokens_decoder`.
    pub(crate) fn added_tokens(&self, config: &TokenizerConfig) -> Vec<(u32, AddedToken)> {
        if config.lists_added_tokens() {
            vec![]
        } else {
            self.added_tokens.iter().map(|token| (token.id, token.token.clone())).collect()
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
