//! The registry of architectures.

use std::sync::LazyLock;

use crate::{
    Error, Result,
    models::{
        albert::ALBERT,
        architecture::Architecture,
        bert::BERT,
        deberta::DEBERTA,
        distilbert::DISTILBERT,
        electra::ELECTRA,
        eurobert::EUROBERT,
        gemma3::GEMMA3,
        gte::GTE,
        jina_bert::JINA_BERT,
        llama::LLAMA,
        mistral::MISTRAL,
        model_type::ModelType,
        modernbert::MODERNBERT,
        modernbert_decoder::MODERNBERT_DECODER,
        mpnet::MPNET,
        nomic_bert::NOMIC_BERT,
        qwen::{QWEN2, QWEN3},
        roberta::ROBERTA,
    },
};

/// All architectures except Jina v2, which has BERT's `model_type`; see [`find`].
static ARCHITECTURES: [&Architecture; 17] = [
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
    &QWEN3,
    &QWEN2,
    &EUROBERT,
    &LLAMA,
    &MISTRAL,
    &GEMMA3,
    &MODERNBERT_DECODER,
];

/// The architecture of a `config.json`, and the tokenizer class to use if no file names one.
/// Jina v2 has BERT's `model_type`; `position_embedding_type` distinguishes it from BERT.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for an unknown `model_type`. The error lists the
/// supported values. The error of [`ModelType::name`].
pub(crate) fn find(keys: &ModelType, path: &str) -> Result<(&'static Architecture, &'static str)> {
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
        None => Err(Error::unsupported(path, "model_type", KNOWN.as_str(), model_type)),
    }
}

/// Every supported value of `model_type`.
fn model_types() -> Vec<&'static str> {
    let all = ARCHITECTURES.iter().flat_map(|architecture| architecture.model_types);
    all.map(|(name, _)| *name).collect()
}
