//! Gemma 3 without images: Gemma Team 2025, <https://arxiv.org/abs/2503.19786>. Checkpoints:
//! EmbeddingGemma, whose attention is not causal.
//!
//! Llama's block with norms before and after attention and feed-forward network, norms of queries
//! and keys, and windows in five of six layers. The norms multiply by 1 plus their weight; the word
//! embeddings are multiplied by √E. As in transformers 5.23, `attn_logit_softcapping` has no effect.

use serde::Deserialize;

use crate::{
    Activation, Error, HeadConfig, NormKind, NormPlacement,
    load::{ATTENTION_OUTPUT, DOWN, HEAD, KEY_VALUE, NORM, Names, QUERY, UP},
    models::{
        architecture::{Accepted, Architecture},
        llama::{self, DECODER_KEYS, DecoderKeys, longest, radius},
        rope::{LayerType, RopeOfLayerTypes},
    },
};

pub(crate) static GEMMA3: Architecture = Architecture {
    name: "Gemma 3",
    model_types: &[("gemma3_text", "GemmaTokenizer")],
    config: |json| {
        let keys: DecoderKeys = json.to()?;
        let own: Keys = json.to()?;
        let path = json.path();
        let mut config = keys.config(json)?;
        let is_halved = own.use_bidirectional_attention == Some(true);
        if is_halved && !config.causal {
            // transformers 5.23 then combines the windows of both keys.
            let expected = "absent or true, with use_bidirectional_attention";
            return Err(Error::unsupported(path, "is_causal", expected, "false"));
        }
        config.causal &= !is_halved;
        let every = own.sliding_window_pattern.unwrap_or(6);
        if every == 0 {
            return Err(Error::unsupported(path, "sliding_window_pattern", "at least 1", "0"));
        }
        let is_local = |i: usize| !(i + 1).is_multiple_of(every);
        let types = LayerType::of_layers(path, own.layer_types, keys.num_hidden_layers, is_local)?;
        let radius = if is_halved {
            own.sliding_window / 2 // half of the window on each side
        } else {
            radius(json, config.causal, own.sliding_window)?
        };
        config.attention_windows =
            types.iter().map(|kind| kind.is_local().then_some(radius)).collect();
        let thetas = [own.rope_theta.unwrap_or(1e6), own.rope_local_base_freq.unwrap_or(1e4)];
        let rope = own.rope_parameters.unwrap_or_default().with_global_scaling(json)?;
        let trained = keys.max_position_embeddings;
        config.positions = rope.positions(path, thetas, trained, &types)?;
        config.max_position_embeddings = longest(&config.positions, trained);
        config.attention_scale = Some(own.query_pre_attn_scalar.unwrap_or(256.0).powf(-0.5));
        config.query_key_norm = true;
        config.embeddings.scale = Some((config.hidden_size as f64).sqrt());
        config.norm.kind = NormKind::RmsNorm { unit_offset: true };
        config.norm.placement = NormPlacement::PreAndPost;
        config.feed_forward.activation = own.hidden_activation.unwrap_or(Activation::GeluTanh);
        let heads = HeadConfig {
            tie_word_embeddings: own.tie_word_embeddings.unwrap_or(true),
            lm_softcap: own.final_logit_softcapping,
            ..keys.heads()
        };
        Ok((config, heads))
    },
    accepted: Accepted { keys: DECODER_KEYS, classes: &[] },
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Keys {
    hidden_activation: Option<Activation>,
    query_pre_attn_scalar: Option<f64>,
    sliding_window: usize,
    /// In older files: every such layer is global.
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<LayerType>>,
    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
    /// The current form of `rope_theta` and `rope_local_base_freq`. It takes precedence.
    rope_parameters: Option<RopeOfLayerTypes>,
    use_bidirectional_attention: Option<bool>,
    final_logit_softcapping: Option<f64>,
    tie_word_embeddings: Option<bool>,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    layer: &[
        ("attention.query",           "self_attn.q_proj",           QUERY),
        ("attention.key",             "self_attn.k_proj",           KEY_VALUE),
        ("attention.value",           "self_attn.v_proj",           KEY_VALUE),
        ("attention.output",          "self_attn.o_proj",           ATTENTION_OUTPUT),
        ("attention.query_norm",      "self_attn.q_norm",           HEAD),
        ("attention.key_norm",        "self_attn.k_norm",           HEAD),
        ("attention_norm",            "input_layernorm",            NORM),
        ("attention_output_norm",     "post_attention_layernorm",   NORM),
        ("feed_forward.gate",         "mlp.gate_proj",              UP),
        ("feed_forward.intermediate", "mlp.up_proj",                UP),
        ("feed_forward.output",       "mlp.down_proj",              DOWN),
        ("feed_forward_norm",         "pre_feedforward_layernorm",  NORM),
        ("feed_forward_output_norm",  "post_feedforward_layernorm", NORM),
    ],
    ..llama::NAMES
};
