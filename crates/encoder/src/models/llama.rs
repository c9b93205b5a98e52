//! Llama: Touvron et al. 2023, <https://arxiv.org/abs/2302.13971>; Grattafiori et al. 2024,
//! <https://arxiv.org/abs/2407.21783>. Checkpoints: Llama 3, llama-nemotron-embed, whose attention
//! is not causal.
//!
//! Causal attention with grouped heads, rotary positions, RMSNorm before attention and feed-forward
//! network, gated feed-forward networks. The other decoders of this folder are variants.

use mha::{ProjectionBias, RotaryScaling};
use serde::Deserialize;

use crate::{
    Activation, EncoderConfig, Error, FeedForwardKind, HeadConfig, NormKind, NormPlacement,
    Positions, Result,
    block::check_num_hidden_layers,
    load::{ATTENTION_OUTPUT, DOWN, HEAD, Json, KEY_VALUE, LABELS, NORM, Names, QUERY, UP, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        rope::RopeKeys,
    },
};

pub(crate) static LLAMA: Architecture = Architecture {
    name: "Llama",
    model_types: &[
        ("llama", "PreTrainedTokenizer"),
        // llama-nemotron-embed: the published class attends in both directions.
        ("llama_bidirec", "PreTrainedTokenizer"),
    ],
    config: |json| {
        let keys: DecoderKeys = json.to()?;
        let Keys { model_type, mlp_bias } = json.to()?;
        let heads = keys.heads();
        let mut config = keys.config(json)?;
        config.causal &= model_type != "llama_bidirec";
        if mlp_bias == Some(true) {
            config.feed_forward.intermediate_bias = true;
            config.feed_forward.output_bias = true;
        }
        Ok((config, heads))
    },
    accepted: Accepted { keys: DECODER_KEYS, classes: &["LlamaBidirectional"] },
    names: &[NAMES],
};

/// The keys that `CommonKeys` refuses and all decoders accept.
pub(super) const DECODER_KEYS: &[&str] = &["is_causal", "sliding_window", "rope_scaling"];

#[derive(Deserialize)]
struct Keys {
    model_type: String,
    mlp_bias: Option<bool>,
}

/// The keys of `config.json` that all decoders have.
#[derive(Deserialize)]
pub(super) struct DecoderKeys {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    pub(super) num_hidden_layers: usize,
    num_attention_heads: usize,
    // If these keys are absent, some classes of transformers have other defaults than those of
    // `EncoderConfig`. Their checkpoints then have tensors of other shapes, which is an error.
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<Activation>,
    pub(super) max_position_embeddings: usize,
    rms_norm_eps: Option<f64>,
    attention_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    /// Some files have −1, for none.
    pad_token_id: Option<i64>,
    /// False for a model that attends in both directions.
    is_causal: Option<bool>,
}

impl DecoderKeys {
    /// The block of a Llama with these sizes.
    ///
    /// # Errors
    /// The errors of [`RopeKeys::rotary`]; [`mha::Error::TooLarge`] for more than 1,024 layers.
    pub(super) fn config(&self, json: &Json) -> Result<EncoderConfig> {
        let layers = self.num_hidden_layers;
        check_num_hidden_layers(layers)?;
        let mut config = EncoderConfig::new(
            self.vocab_size,
            self.hidden_size,
            layers,
            self.num_attention_heads,
            self.intermediate_size,
        );
        config.num_key_value_heads = self.num_key_value_heads;
        config.head_dim = self.head_dim;
        config.causal = self.is_causal.unwrap_or(true);
        let trained = self.max_position_embeddings;
        let rotary = json.to::<RopeKeys>()?.rotary(json.path(), 10_000.0, trained)?;
        config.positions = Positions::Rotary(vec![rotary; layers]);
        config.max_position_embeddings = longest(&config.positions, trained);
        config.embeddings.type_vocab_size = None;
        config.embeddings.norm = false;
        config.norm.kind = NormKind::RmsNorm { unit_offset: false };
        config.norm.eps = self.rms_norm_eps.unwrap_or(1e-6);
        config.norm.placement = NormPlacement::Pre;
        config.norm.final_norm = true;
        let has_bias = self.attention_bias == Some(true);
        config.projection_bias = if has_bias { ProjectionBias::ALL } else { ProjectionBias::NONE };
        config.feed_forward.kind = FeedForwardKind::Gated;
        config.feed_forward.activation = self.hidden_act.unwrap_or(Activation::Silu);
        config.feed_forward.intermediate_bias = false;
        config.feed_forward.output_bias = false;
        Ok(config)
    }

    pub(super) fn heads(&self) -> HeadConfig {
        let pad_token_id = self.pad_token_id.and_then(|id| u32::try_from(id).ok());
        HeadConfig::of_decoder(self.tie_word_embeddings.unwrap_or(false), pad_token_id)
    }
}

/// The maximum number of tokens of a sequence, if `max_position_embeddings` in `config.json` is
/// `trained`: `factor` times the length in training for the scalings that extend it. In published
/// files with such a scaling, `max_position_embeddings` may be the length in training.
pub(super) fn longest(positions: &Positions, trained: usize) -> usize {
    let Positions::Rotary(layers) = positions else { return trained };
    let extended = layers.iter().map(|layer| match layer.scaling {
        RotaryScaling::DynamicNtk { factor, trained }
        | RotaryScaling::Yarn { factor, trained, .. } => (trained as f64 * factor) as usize,
        _ => 0,
    });
    extended.max().unwrap_or(0).max(trained)
}

/// The largest distance of a visible key, for a layer whose `sliding_window` in `config.json` is
/// `window`: with causal attention a query sees `window` keys with its own, otherwise `window` keys
/// on each side.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for a window of 0.
pub(super) fn radius(json: &Json, causal: bool, window: usize) -> Result<usize> {
    match window {
        0 => Err(Error::unsupported(json.path(), "sliding_window", "at least 1", "0")),
        _ => Ok(if causal { window - 1 } else { window }),
    }
}

#[rustfmt::skip]
pub(super) const NAMES: Names = Names {
    wrapper: "model.",
    model: &[
        ("embeddings.word_embeddings", "embed_tokens", VOCAB),
        ("encoder.final_norm",         "norm",         NORM),
    ],
    layers: "layers.",
    layer: &[
        ("attention.query",           "self_attn.q_proj",         QUERY),
        ("attention.key",             "self_attn.k_proj",         KEY_VALUE),
        ("attention.value",           "self_attn.v_proj",         KEY_VALUE),
        ("attention.output",          "self_attn.o_proj",         ATTENTION_OUTPUT),
        ("attention.query_norm",      "self_attn.q_norm",         HEAD),
        ("attention.key_norm",        "self_attn.k_norm",         HEAD),
        ("attention_norm",            "input_layernorm",          NORM),
        ("feed_forward.gate",         "mlp.gate_proj",            UP),
        ("feed_forward.intermediate", "mlp.up_proj",              UP),
        ("feed_forward.output",       "mlp.down_proj",            DOWN),
        ("feed_forward_norm",         "post_attention_layernorm", NORM),
    ],
    fused: &[],
    heads: &[
        ("lm_head.decoder",     "lm_head",    VOCAB),
        ("sequence_classifier", "score",      LABELS),
        ("token_classifier",    "score",      LABELS),
    ],
    ignored: &[],
};
