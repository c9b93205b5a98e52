//! DistilBERT: Sanh et al. 2019, <https://arxiv.org/abs/1910.01108>.
//!
//! BERT without token types and without a pooler.

use serde::Deserialize;

use crate::{
    Activation, EncoderConfig, HeadConfig,
    load::{DOWN, LABELS, NORM, Names, POSITIONS, SQUARE, TWO_OUTPUTS, UP, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        common_keys::with_renamed_keys,
    },
};

pub(crate) static DISTILBERT: Architecture = Architecture {
    name: "DistilBERT",
    model_types: &[("distilbert", "BertTokenizer")],
    config: |json| {
        let keys: Keys = with_renamed_keys(json, OWN_NAMES)?.to()?;
        let mut encoder = EncoderConfig::new(
            keys.vocab_size,
            keys.hidden_size,
            keys.num_hidden_layers,
            keys.num_attention_heads,
            keys.hidden_dim,
        );
        let activation = keys.activation.unwrap_or_default();
        encoder.max_position_embeddings = keys.max_position_embeddings;
        encoder.embeddings.type_vocab_size = None;
        encoder.feed_forward.activation = activation;
        let heads = HeadConfig {
            tie_word_embeddings: keys.tie_word_embeddings.unwrap_or(true),
            ..HeadConfig::new(activation, Activation::Relu)
        };
        Ok((encoder, heads))
    },
    accepted: Accepted::NOTHING,
    names: &[NAMES],
};

/// DistilBERT's own names of keys, each with the usual name. If a file has both, the usual name
/// determines the value, as in transformers.
const OWN_NAMES: &[(&str, &str)] = &[
    ("dim", "hidden_size"),
    ("n_layers", "num_hidden_layers"),
    ("n_heads", "num_attention_heads"),
];

#[derive(Deserialize)]
struct Keys {
    vocab_size: usize,
    max_position_embeddings: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    hidden_dim: usize,
    activation: Option<Activation>,
    tie_word_embeddings: Option<bool>,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    wrapper: "distilbert.",
    model: &[
        ("embeddings.word_embeddings",     "embeddings.word_embeddings",     VOCAB),
        ("embeddings.position_embeddings", "embeddings.position_embeddings", POSITIONS),
        ("embeddings.norm",                "embeddings.LayerNorm",           NORM),
    ],
    layers: "transformer.layer.",
    layer: &[
        ("attention.query",           "attention.q_lin",   SQUARE),
        ("attention.key",             "attention.k_lin",   SQUARE),
        ("attention.value",           "attention.v_lin",   SQUARE),
        ("attention.output",          "attention.out_lin", SQUARE),
        ("attention_norm",            "sa_layer_norm",     NORM),
        ("feed_forward.intermediate", "ffn.lin1",          UP),
        ("feed_forward.output",       "ffn.lin2",          DOWN),
        ("feed_forward_norm",         "output_layer_norm", NORM),
    ],
    fused: &[],
    heads: &[
        ("lm_head.transform",   "vocab_transform",  SQUARE),
        ("lm_head.norm",        "vocab_layer_norm", NORM),
        ("lm_head.decoder",     "vocab_projector",  VOCAB),
        ("lm_head",             "vocab_projector",  VOCAB),
        ("sequence_head",       "pre_classifier",   SQUARE),
        ("sequence_classifier", "classifier",       LABELS),
        ("token_classifier",    "classifier",       LABELS),
        ("qa_outputs",          "qa_outputs",       TWO_OUTPUTS),
    ],
    ignored: &[],
};
