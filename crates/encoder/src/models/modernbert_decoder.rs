//! The decoder with ModernBERT's layers: Weller et al. 2025, <https://arxiv.org/abs/2507.11412>.
//! Checkpoints: the decoders of ettin.

use serde::Deserialize;

use crate::{
    HeadConfig, SequencePooling,
    load::{DOWN, LABELS, NORM, Names, SQUARE, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        llama::longest,
        modernbert::{self, Keys},
    },
};

pub(crate) static MODERNBERT_DECODER: Architecture = Architecture {
    name: "ModernBERT decoder",
    model_types: &[("modernbert-decoder", modernbert::MODERNBERT.model_types[0].1)],
    config: |json| {
        // `sliding_window` is that of the encoder with the same keys; it has no effect.
        let mut keys: Keys = json.to()?;
        keys.sliding_window = None;
        let has_bias = keys.classifier_bias == Some(true);
        let pad_token_id = Some(keys.pad_token_id.unwrap_or(50_283));
        let (mut config, heads) = keys.config(json.path())?;
        let Causal { is_causal } = json.to()?;
        config.causal = is_causal.unwrap_or(true);
        config.max_position_embeddings = longest(&config.positions, config.max_position_embeddings);
        if config.causal {
            // A query sees as many keys as the window of the encoder has on one side, with its own.
            for window in config.attention_windows.iter_mut().flatten() {
                *window = window.saturating_sub(1);
            }
        }
        let heads = HeadConfig {
            sequence_pooling: SequencePooling::Last { pad_token_id },
            classifier_bias: has_bias,
            ..heads
        };
        Ok((config, heads))
    },
    accepted: Accepted {
        keys: &["is_causal", "sliding_window", "position_embedding_type"],
        classes: &[],
    },
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Causal {
    is_causal: Option<bool>,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    layer: &[
        ("attention.query",     "attn.q_proj", SQUARE),
        ("attention.key",       "attn.k_proj", SQUARE),
        ("attention.value",     "attn.v_proj", SQUARE),
        ("attention.output",    "attn.Wo",     SQUARE),
        ("attention_norm",      "attn_norm",   NORM),
        ("feed_forward.output", "mlp.Wo",      DOWN),
        ("feed_forward_norm",   "mlp_norm",    NORM),
    ],
    fused: &[
        ("feed_forward.gate",         "mlp.Wi", 0, 2),
        ("feed_forward.intermediate", "mlp.Wi", 1, 2),
    ],
    heads: &[
        ("lm_head.transform",   "lm_head.dense", SQUARE),
        ("lm_head.norm",        "lm_head.norm",  NORM),
        ("lm_head.decoder",     "decoder",       VOCAB),
        ("lm_head",             "decoder",       VOCAB),
        ("sequence_head",       "head.dense",    SQUARE),
        ("sequence_head_norm",  "head.norm",     NORM),
        ("sequence_classifier", "classifier",    LABELS),
    ],
    ..modernbert::NAMES
};
