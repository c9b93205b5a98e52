//! BERT: Devlin et al. 2019, <https://arxiv.org/abs/1810.04805>.

use crate::{
    BertConfig,
    load::{DOWN, LABELS, NORM, Names, POSITIONS, Row, SQUARE, TWO_OUTPUTS, TYPES, UP, VOCAB},
    models::architecture::{Accepted, Architecture},
};

pub(crate) static BERT: Architecture = Architecture {
    name: "BERT",
    model_types: &[("bert", "BertTokenizer")],
    config: |json| {
        let config: BertConfig = json.to()?;
        Ok((config.encoder_config(), config.head_config()))
    },
    accepted: Accepted::NOTHING,
    names: &[NAMES],
};

#[rustfmt::skip]
pub(crate) const NAMES: Names = Names {
    wrapper: "bert.",
    model: &[
        ("embeddings.word_embeddings",       "embeddings.word_embeddings",          VOCAB),
        ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings",    TYPES),
        ("embeddings.position_embeddings",   "embeddings.position_embeddings",      POSITIONS),
        ("embeddings.norm",                  "embeddings.LayerNorm",                NORM),
        ("pooler",                           "pooler.dense",                        SQUARE),
        ("sequence_head",                    "pooler.dense",                        SQUARE),
    ],
    layers: "encoder.layer.",
    layer: LAYER,
    fused: &[],
    heads: &[
        ("lm_head.transform",                "cls.predictions.transform.dense",     SQUARE),
        ("lm_head.norm",                     "cls.predictions.transform.LayerNorm", NORM),
        ("lm_head.decoder",                  "cls.predictions.decoder",             VOCAB),
        ("lm_head",                          "cls.predictions",                     VOCAB),
        ("next_sentence",                    "cls.seq_relationship",                TWO_OUTPUTS),
        ("sequence_classifier",              "classifier",                          LABELS),
        ("token_classifier",                 "classifier",                          LABELS),
        ("qa_outputs",                       "qa_outputs",                          TWO_OUTPUTS),
    ],
    ignored: &[],
};

/// The modules of a layer of BERT, and of the architectures that use its names.
#[rustfmt::skip]
pub(crate) const LAYER: &[Row] = &[
    ("attention.query",           "attention.self.query",            SQUARE),
    ("attention.key",             "attention.self.key",              SQUARE),
    ("attention.value",           "attention.self.value",            SQUARE),
    ("attention.output",          "attention.output.dense",          SQUARE),
    ("attention_norm",            "attention.output.LayerNorm",      NORM),
    ("cross_attention.query",     "crossattention.self.query",       SQUARE),
    ("cross_attention.key",       "crossattention.self.key",         SQUARE),
    ("cross_attention.value",     "crossattention.self.value",       SQUARE),
    ("cross_attention.output",    "crossattention.output.dense",     SQUARE),
    ("cross_attention_norm",      "crossattention.output.LayerNorm", NORM),
    ("feed_forward.intermediate", "intermediate.dense",              UP),
    ("feed_forward.output",       "output.dense",                    DOWN),
    ("feed_forward_norm",         "output.LayerNorm",                NORM),
];
