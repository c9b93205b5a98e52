//! NomicBERT: Nussbaum et al. 2024, <https://arxiv.org/abs/2402.01613>. Checkpoints:
//! nomic-embed-text-v1 and v1.5, snowflake-arctic-embed-m-long, CodeRankEmbed. The mixture of
//! experts of nomic-embed-text-v2-moe is not implemented.
//!
//! BERT with rotary positions, gated feed-forward networks, and no biases in the linear maps of the
//! layers.

use mha::ProjectionBias;
use serde::Deserialize;

use crate::{
    Activation, BertConfig, EncoderConfig, FeedForwardKind, HeadConfig, Result,
    load::{DOWN, Json, LABELS, NORM, Names, SQUARE, TWO_OUTPUTS, TYPES, UP, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        common_keys::{expect_values, require_keys, with_renamed_keys},
        gte,
        rope::RopeKeys,
    },
};

pub(crate) static NOMIC_BERT: Architecture = Architecture {
    name: "NomicBERT",
    model_types: &[("nomic_bert", "BertTokenizer")],
    config: |json| {
        expect_values(json, SETTINGS)?;
        config(&with_renamed_keys(json, OLDER_KEYS)?)
    },
    accepted: Accepted { keys: &["rope_scaling"], classes: &["NomicBert"] },
    names: &[PUBLISHED, Names { wrapper: "nomic_bert.", ..PUBLISHED }, MODULES],
};

/// The keys of the first checkpoints, each with its current name. `max_trained_positions` takes
/// precedence over `n_positions`, because dynamic rotary scaling needs the maximum length in
/// training. Afterwards, the function `config` sets the maximum length of a text to `n_positions`
/// (0 means 2,048).
const OLDER_KEYS: &[(&str, &str)] = &[
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_inner", "intermediate_size"),
    ("layer_norm_epsilon", "layer_norm_eps"),
    ("max_trained_positions", "max_position_embeddings"),
    ("n_positions", "max_position_embeddings"),
    ("rotary_emb_base", "rope_theta"),
];

/// Other keys of checkpoints with custom code, and the only value of each key that is implemented.
/// In configs of the published code, the first four keys are required, because its defaults for
/// them are not implemented.
const SETTINGS: &[(&str, &str)] = &[
    ("rotary_emb_fraction", "1"),
    ("qkv_proj_bias", "false"),
    ("mlp_fc1_bias", "false"),
    ("mlp_fc2_bias", "false"),
    ("num_experts", "0"),
    ("moe_every_n_layers", "0"),
    ("activation_function", "\"swiglu\""),
    ("prenorm", "false"),
    ("use_rms_norm", "false"),
    ("parallel_block", "false"),
    ("causal", "false"),
    ("rotary_emb_interleaved", "false"),
    ("rotary_emb_scale_base", "null"),
    ("rotary_head_dim", "false"),
    ("norm_mlp", "false"),
    ("scale_attn_weights", "true"),
    ("scale_attn_by_inverse_layer_idx", "false"),
];

/// The keys that BERT does not have, or for which BERT has another default.
#[derive(Deserialize)]
struct Keys {
    /// Set in configs of the published custom code only.
    n_embd: Option<usize>,
    max_position_embeddings: Option<usize>,
    layer_norm_eps: Option<f64>,
    mlp_fc1_bias: Option<bool>,
    hidden_act: Option<Activation>,
    n_positions: Option<usize>,
    pad_vocab_size_multiple: Option<usize>,
}

fn config(json: &Json) -> Result<(EncoderConfig, HeadConfig)> {
    let keys: Keys = json.to()?;
    let mut config: BertConfig = json.to()?;
    config.hidden_act = keys.hidden_act.unwrap_or(Activation::Silu);
    let rope: RopeKeys = json.to()?;
    let mut encoder = config.encoder_config();
    let rows =
        config.vocab_size.checked_next_multiple_of(keys.pad_vocab_size_multiple.unwrap_or(1));
    encoder.vocab_size = rows.unwrap_or(config.vocab_size); // a multiple of 0 means no padding
    encoder.projection_bias = ProjectionBias::NONE;
    encoder.feed_forward.kind = FeedForwardKind::Gated;
    encoder.feed_forward.intermediate_bias = false;
    encoder.feed_forward.output_bias = false;
    // The published code and transformers have different defaults.
    let is_published = keys.n_embd.is_some();
    if is_published {
        require_keys(json, &SETTINGS[..4])?;
        encoder.norm.eps = keys.layer_norm_eps.unwrap_or(1e-5);
        encoder.max_position_embeddings = keys.max_position_embeddings.unwrap_or(1024);
    }
    let types = &mut encoder.embeddings.type_vocab_size;
    *types = types.filter(|&types| types > 0);
    let theta = if is_published { 10_000.0 } else { 1000.0 };
    rope.apply_with_factor(json.path(), theta, &mut encoder)?;
    if let Some(positions) = keys.n_positions {
        encoder.max_position_embeddings = if positions == 0 { 2048 } else { positions };
    }
    // In the published code, `mlp_fc1_bias` also enables the biases of the language model head.
    let lm_biases_are_optional = keys.mlp_fc1_bias == Some(false);
    Ok((encoder, HeadConfig { lm_biases_are_optional, ..config.head_config() }))
}

/// The names in published files.
#[rustfmt::skip]
const PUBLISHED: Names = Names {
    wrapper: "bert.",
    model: &[
        ("embeddings.word_embeddings",       "embeddings.word_embeddings",       VOCAB),
        ("embeddings.token_type_embeddings", "embeddings.token_type_embeddings", TYPES),
        ("embeddings.norm",                  "emb_ln",                           NORM),
        ("pooler",                           "pooler.dense",                     SQUARE),
        ("sequence_head",                    "pooler.dense",                     SQUARE),
    ],
    layers: "encoder.layers.",
    layer: &[
        ("attention.output",          "attn.out_proj", SQUARE),
        ("attention_norm",            "norm1",         NORM),
        ("feed_forward.intermediate", "mlp.fc11",      UP),
        ("feed_forward.gate",         "mlp.fc12",      UP),
        ("feed_forward.output",       "mlp.fc2",       DOWN),
        ("feed_forward_norm",         "norm2",         NORM),
    ],
    fused: &[
        ("attention.query", "attn.Wqkv", 0, 3),
        ("attention.key",   "attn.Wqkv", 1, 3),
        ("attention.value", "attn.Wqkv", 2, 3),
    ],
    heads: &[
        ("lm_head.transform",   "cls.predictions.transform.dense",      SQUARE),
        ("lm_head.norm",        "cls.predictions.transform.layer_norm", NORM),
        ("lm_head.decoder",     "cls.predictions.decoder",              VOCAB),
        ("lm_head",             "cls.predictions",                      VOCAB),
        ("sequence_classifier", "classifier",                           LABELS),
        ("token_classifier",    "classifier",                           LABELS),
        ("qa_outputs",          "qa_outputs",                           TWO_OUTPUTS),
    ],
    ignored: &[],
};

/// The names of the modules in transformers 5.
const MODULES: Names = Names { wrapper: "nomic_bert.", heads: PUBLISHED.heads, ..gte::MODULES };
