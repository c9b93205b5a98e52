//! The registry of architectures. Each architecture has a file in this folder, which converts its
//! `config.json` to an [`EncoderConfig`] and lists the tensor names of its checkpoints.

use std::sync::LazyLock;

use crate::{
    EncoderConfig, Result,
    load::{Json, Names},
    models::{
        HeadConfig, albert::ALBERT, bert::BERT, common_keys::refuse, deberta::DEBERTA,
        distilbert::DISTILBERT, electra::ELECTRA, gte::GTE, jina_bert::JINA_BERT,
        model_config::ModelType, modernbert::MODERNBERT, mpnet::MPNET, nomic_bert::NOMIC_BERT,
        roberta::ROBERTA,
    },
};

/// All architectures except Jina v2, which has BERT's `model_type`; see [`Architecture::find`].
static ARCHITECTURES: [&Architecture; 10] = [
    &BERT,
    &ROBERTA,
    &MPNET,
    &DISTILBERT,
    &ELECTRA,
    &ALBERT,
    &MODERNBERT,
    &NOMIC_BERT,
    &GTE,
    &DEBERTA,
];

/// Reads a `config.json`.
type ReadConfig = fn(&Json) -> Result<(EncoderConfig, HeadConfig)>;

/// An encoder architecture.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The name in messages.
    pub(crate) name: &'static str,
    /// The values of `model_type`, each with the tokenizer class to use if no file of the folder
    /// names one. [`REGISTERED_CLASS`](crate::text::REGISTERED_CLASS) is used even if a file names
    /// another class.
    pub(crate) model_types: &'static [(&'static str, &'static str)],
    /// The encoder and the heads that a `config.json` describes.
    pub(crate) config: ReadConfig,
    /// The keys and the custom code in `config.json` that this architecture accepts and other
    /// architectures refuse.
    pub(crate) accepted: Accepted,
    /// The sets of tensor names that published checkpoints use; most architectures have one.
    pub(crate) names: &'static [Names],
}

/// The keys and classes in `config.json` that an architecture accepts although `CommonKeys` refuses
/// them for other architectures.
#[derive(Debug)]
pub(crate) struct Accepted {
    /// Keys that `CommonKeys` does not check, since `Architecture::config` checks or ignores them.
    pub(crate) keys: &'static [&'static str],
    /// Prefixes of the names of Python classes that implement this architecture, such as
    /// `NomicBert` for `NomicBertModel`. `auto_map` may name such classes.
    pub(crate) classes: &'static [&'static str],
}

impl Architecture {
    /// The value of [`Self::accepted`] of most architectures.
    pub(crate) const NOTHING: Accepted = Self::accepting(&[], &[]);

    /// The value of [`Self::accepted`] with these keys and classes.
    pub(crate) const fn accepting(
        keys: &'static [&'static str],
        classes: &'static [&'static str],
    ) -> Accepted {
        Accepted { keys, classes }
    }

    /// The architecture of a `config.json`, and the tokenizer class to use if no file names one.
    /// Jina v2 has BERT's `model_type`; `position_embedding_type` distinguishes it from BERT.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for an unknown `model_type`. The error lists the
    /// supported values. The error of [`ModelType::name`].
    pub(crate) fn find(keys: &ModelType, path: &str) -> Result<(&'static Self, &'static str)> {
        static KNOWN: LazyLock<String> = LazyLock::new(|| model_types().join(", "));
        let model_type = keys.name(path)?;
        if model_type == "bert" && keys.position_embedding_type.as_deref() == Some("alibi") {
            return Ok((&JINA_BERT, JINA_BERT.model_types[0].1));
        }
        let known = ARCHITECTURES.iter().flat_map(|architecture| {
            architecture.model_types.iter().map(|&(name, class)| (name, *architecture, class))
        });
        match known.into_iter().find(|(name, ..)| *name == model_type) {
            Some((_, architecture, class)) => Ok((architecture, class)),
            None => refuse(path, "model_type", KNOWN.as_str(), model_type),
        }
    }
}

/// Every supported value of `model_type`.
fn model_types() -> Vec<&'static str> {
    let all = ARCHITECTURES.iter().flat_map(|architecture| architecture.model_types);
    all.map(|(name, _)| *name).collect()
}
