//! GTE: Zhang et al. 2024, <https://arxiv.org/abs/2407.19669>. Checkpoints: gte-*-v1.5,
//! gte-multilingual-*, snowflake-arctic-embed-m-v2.0.
//!
//! BERT with rotary positions, whose frequencies may be scaled, and gated feed-forward networks.

use serde::Deserialize;

use crate::{
    Activation, BertConfig, FeedForwardKind,
    load::{DOWN, LABELS, NORM, Names, Row, SQUARE, TWO_OUTPUTS, TYPES, UP, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        common_keys::expect_values,
        rope::RopeKeys,
    },
};

pub(crate) static GTE: Architecture = Architecture {
    name: "GTE",
    // `new` is the type of the first checkpoints, which transformers loads by custom code.
    model_types: &[("new", "PreTrainedTokenizer"), ("gte", "XLMRobertaTokenizer")],
    config: |json| {
        expect_values(json, SETTINGS)?;
        let config: BertConfig = json.to()?; // the keys are BERT's, and some more
        let Keys { model_type, type_vocab_size } = json.to()?;
        // The published code and transformers differ in the default of `rope_theta`, and in the
        // activation of the language model head.
        let is_published = model_type == "new";
        let rope: RopeKeys = json.to()?;
        let mut encoder = config.encoder_config();
        let types = type_vocab_size.unwrap_or(1);
        encoder.embeddings.type_vocab_size = (types > 0).then_some(types);
        encoder.feed_forward.kind = FeedForwardKind::Gated;
        encoder.feed_forward.intermediate_bias = false;
        let theta = if is_published { 10_000.0 } else { 160_000.0 };
        rope.apply(json.path(), theta, &mut encoder)?;
        let mut heads = config.head_config();
        if !is_published {
            heads.lm_activation = Activation::Gelu; // `GteLMHead` ignores `hidden_act`
        }
        Ok((encoder, heads))
    },
    accepted: Accepted {
        keys: &["position_embedding_type", "rope_scaling"],
        classes: &["New", "Gte"],
    },
    names: &[PUBLISHED, Names { wrapper: "gte.", ..PUBLISHED }, MODULES],
};

#[derive(Deserialize)]
struct Keys {
    model_type: String,
    type_vocab_size: Option<usize>,
}

/// Keys of the first checkpoints, and the only value of each key that is implemented.
const SETTINGS: &[(&str, &str)] = &[
    ("position_embedding_type", "\"rope\""),
    ("layer_norm_type", "\"layer_norm\""),
    ("logn_attention_scale", "false"),
    ("pack_qkv", "true"),
];

#[rustfmt::skip]
const MODEL: &[Row] = &[
    ("embeddings.word_embeddings",       "embeddings.word_embeddings",       VOCAB),
    ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings", TYPES),
    ("embeddings.norm",                  "embeddings.LayerNorm",             NORM),
    ("pooler",                           "pooler.dense",                     SQUARE),
    ("sequence_head",                    "pooler.dense",                     SQUARE),
];

/// The names in published files, which `save_pretrained` of transformers 5 also writes.
#[rustfmt::skip]
const PUBLISHED: Names = Names {
    wrapper: "new.",
    model: MODEL,
    layers: "encoder.layer.",
    layer: &[
        ("attention.output",    "attention.o_proj", SQUARE),
        ("attention_norm",      "attn_ln",          NORM),
        ("feed_forward.output", "mlp.down_proj",    DOWN),
        ("feed_forward_norm",   "mlp_ln",           NORM),
    ],
    fused: &[
        ("attention.query",           "attention.qkv_proj", 0, 3),
        ("attention.key",             "attention.qkv_proj", 1, 3),
        ("attention.value",           "attention.qkv_proj", 2, 3),
        ("feed_forward.intermediate", "mlp.up_gate_proj",   0, 2),
        ("feed_forward.gate",         "mlp.up_gate_proj",   1, 2),
    ],
    heads: &[
        ("lm_head.transform",   "lm_head.dense",   SQUARE),
        ("lm_head.norm",        "lm_head.norm",    NORM),
        ("lm_head.decoder",     "lm_head.decoder", VOCAB),
        ("lm_head",             "lm_head",         VOCAB),
        ("sequence_classifier", "classifier",      LABELS),
        ("token_classifier",    "classifier",      LABELS),
        ("qa_outputs",          "qa_outputs",      TWO_OUTPUTS),
    ],
    ignored: &[],
};

/// The names of the modules in transformers 5.
#[rustfmt::skip]
pub(super) const MODULES: Names = Names {
    wrapper: "gte.",
    model: MODEL,
    layers: "layers.",
    layer: &[
        ("attention.query",           "self_attn.q_proj",         SQUARE),
        ("attention.key",             "self_attn.k_proj",         SQUARE),
        ("attention.value",           "self_attn.v_proj",         SQUARE),
        ("attention.output",          "self_attn.o_proj",         SQUARE),
        ("attention_norm",            "post_attention_layernorm", NORM),
        ("feed_forward.gate",         "mlp.gate_proj",            UP),
        ("feed_forward.intermediate", "mlp.up_proj",              UP),
        ("feed_forward.output",       "mlp.down_proj",            DOWN),
        ("feed_forward_norm",         "post_mlp_layernorm",       NORM),
    ],
    fused: &[],
    heads: &[
        ("lm_head.transform",   "lm_head.dense",      SQUARE),
        ("lm_head.norm",        "lm_head.layer_norm", NORM),
        ("lm_head.decoder",     "lm_head.decoder",    VOCAB),
        ("lm_head",             "lm_head",            VOCAB),
        ("sequence_classifier", "classifier",         LABELS),
        ("token_classifier",    "classifier",         LABELS),
        ("qa_outputs",          "qa_outputs",         TWO_OUTPUTS),
    ],
    ignored: &[],
};
