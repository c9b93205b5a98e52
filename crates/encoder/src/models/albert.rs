//! ALBERT: Lan et al. 2020, <https://arxiv.org/abs/1909.11942>.
//!
//! BERT with embeddings of width `embedding_size`, and one layer that is applied
//! `num_hidden_layers` times.

use serde::Deserialize;

use crate::{
    Activation, BertConfig, Error, HeadConfig,
    load::{
        DOWN, LABELS, NARROW_NORM, NARROW_POSITIONS, NARROW_TYPES, NARROW_VOCAB, NARROWING, NORM,
        Names, PROJECTION, SQUARE, TWO_OUTPUTS, UP,
    },
    models::architecture::{Accepted, Architecture},
};

pub(crate) static ALBERT: Architecture = Architecture {
    name: "ALBERT",
    model_types: &[("albert", "AlbertTokenizer")],
    config: |json| {
        let config: BertConfig = json.to()?; // the keys that ALBERT shares with BERT
        let keys: Keys = json.to()?;
        for (key, groups) in [
            ("num_hidden_groups", keys.num_hidden_groups),
            ("inner_group_num", keys.inner_group_num),
        ] {
            if let Some(groups) = groups.filter(|&groups| groups != 1) {
                return Err(Error::unsupported(json.path(), key, "1", groups));
            }
        }
        let activation = keys.hidden_act.unwrap_or(Activation::GeluTanh);
        let mut encoder = config.encoder_config();
        encoder.embeddings.embedding_size = Some(keys.embedding_size.unwrap_or(128));
        encoder.feed_forward.activation = activation;
        encoder.shares_layers = true;
        let heads = HeadConfig { lm_activation: activation, ..config.head_config() };
        Ok((encoder, heads))
    },
    accepted: Accepted::NOTHING,
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Keys {
    embedding_size: Option<usize>,
    hidden_act: Option<Activation>,
    num_hidden_groups: Option<usize>,
    inner_group_num: Option<usize>,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    wrapper: "albert.",
    model: &[
        ("embeddings.word_embeddings",       "embeddings.word_embeddings",           NARROW_VOCAB),
        ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings",     NARROW_TYPES),
        ("embeddings.position_embeddings",   "embeddings.position_embeddings",       NARROW_POSITIONS),
        ("embeddings.norm",                  "embeddings.LayerNorm",                 NARROW_NORM),
        ("embeddings.projection",            "encoder.embedding_hidden_mapping_in",  PROJECTION),
        ("pooler",                           "pooler",                               SQUARE),
        ("sequence_head",                    "pooler",                               SQUARE),
    ],
    layers: "encoder.albert_layer_groups.0.albert_layers.",
    layer: &[
        ("attention.query",           "attention.query",       SQUARE),
        ("attention.key",             "attention.key",         SQUARE),
        ("attention.value",           "attention.value",       SQUARE),
        ("attention.output",          "attention.dense",       SQUARE),
        ("attention_norm",            "attention.LayerNorm",   NORM),
        ("feed_forward.intermediate", "ffn",                   UP),
        ("feed_forward.output",       "ffn_output",            DOWN),
        ("feed_forward_norm",         "full_layer_layer_norm", NORM),
    ],
    fused: &[],
    heads: &[
        ("lm_head.transform",   "predictions.dense",     NARROWING),
        ("lm_head.norm",        "predictions.LayerNorm", NARROW_NORM),
        ("lm_head.decoder",     "predictions.decoder",   NARROW_VOCAB),
        ("lm_head",             "predictions",           NARROW_VOCAB),
        ("sequence_classifier", "classifier",            LABELS),
        ("token_classifier",    "classifier",            LABELS),
        ("qa_outputs",          "qa_outputs",            TWO_OUTPUTS),
    ],
    ignored: &["sop_classifier"],
};
