//! ELECTRA: Clark et al. 2020, <https://arxiv.org/abs/2003.10555>.
//!
//! BERT without a pooler, with embeddings of another width if `embedding_size` differs from
//! `hidden_size`.

use serde::Deserialize;

use crate::{
    Activation, BertConfig, HeadConfig,
    load::{
        LABELS, NARROW_NORM, NARROW_POSITIONS, NARROW_TYPES, NARROW_VOCAB, NARROWING, Names,
        PROJECTION, SQUARE, TWO_OUTPUTS,
    },
    models::{
        architecture::{Accepted, Architecture},
        bert,
    },
};

pub(crate) static ELECTRA: Architecture = Architecture {
    name: "ELECTRA",
    model_types: &[("electra", "BertTokenizer")],
    config: |json| {
        let config: BertConfig = json.to()?; // the keys are BERT's, and one more
        let EmbeddingSize { embedding_size } = json.to()?;
        let mut encoder = config.encoder_config();
        encoder.embeddings.embedding_size =
            embedding_size.or(Some(128)).filter(|&width| width != config.hidden_size);
        let heads = HeadConfig {
            lm_activation: Activation::Gelu, // the heads ignore `hidden_act`
            sequence_activation: Activation::Gelu,
            ..config.head_config()
        };
        Ok((encoder, heads))
    },
    accepted: Accepted::NOTHING,
    names: &[NAMES],
};

#[derive(Deserialize)]
pub(super) struct EmbeddingSize {
    pub(super) embedding_size: Option<usize>,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    wrapper: "electra.",
    model: &[
        ("embeddings.word_embeddings",       "embeddings.word_embeddings",       NARROW_VOCAB),
        ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings", NARROW_TYPES),
        ("embeddings.position_embeddings",   "embeddings.position_embeddings",   NARROW_POSITIONS),
        ("embeddings.norm",                  "embeddings.LayerNorm",             NARROW_NORM),
        ("embeddings.projection",            "embeddings_project",               PROJECTION),
    ],
    heads: &[
        ("lm_head.transform",   "generator_predictions.dense",     NARROWING),
        ("lm_head.norm",        "generator_predictions.LayerNorm", NARROW_NORM),
        ("lm_head.decoder",     "generator_lm_head",               NARROW_VOCAB),
        ("lm_head",             "generator_lm_head",               NARROW_VOCAB),
        ("sequence_head",       "classifier.dense",                SQUARE),
        ("sequence_classifier", "classifier.out_proj",             LABELS),
        ("token_classifier",    "classifier",                      LABELS),
        ("qa_outputs",          "qa_outputs",                      TWO_OUTPUTS),
    ],
    ignored: &["discriminator_predictions", "sequence_summary"],
    ..bert::NAMES
};
