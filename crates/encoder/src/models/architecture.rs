//! The description of an architecture. Each architecture has a file in this folder, which converts
//! its `config.json` to an [`EncoderConfig`] and lists the tensor names of its checkpoints.

use crate::{
    EncoderConfig, HeadConfig, Result,
    load::{Json, Names},
};

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

impl Accepted {
    /// No key and no class, as for most architectures.
    pub(crate) const NOTHING: Self = Self { keys: &[], classes: &[] };
}
