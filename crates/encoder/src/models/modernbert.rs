//! ModernBERT: Warner et al. 2024, <https://arxiv.org/abs/2412.13663>.
//!
//! Rotary positions, attention windows, pre-norm, gated feed-forward networks, and by default no
//! biases in the encoder.

use mha::ProjectionBias;
use serde::Deserialize;

use crate::{
    Activation, EncoderConfig, Error, FeedForwardKind, HeadConfig, NormKind, NormPlacement, Result,
    SequencePooling,
    load::{DOWN, LABELS, NORM, Names, SQUARE, TWO_OUTPUTS, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        rope::{LayerType, RopeOfLayerTypes},
    },
    text::REGISTERED_CLASS,
};

pub(crate) static MODERNBERT: Architecture = Architecture {
    name: "ModernBERT",
    model_types: &[("modernbert", REGISTERED_CLASS)],
    config: |json| json.to::<Keys>()?.config(json.path()),
    // Published configs have `absolute` or `sans_pos`; the positions are rotary in any case.
    accepted: Accepted { keys: &["position_embedding_type"], classes: &[] },
    names: &[NAMES],
};

/// The keys of `config.json`, in the older and in the current form.
#[derive(Deserialize)]
pub(super) struct Keys {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    max_position_embeddings: usize,
    hidden_activation: Option<Activation>,
    norm_eps: Option<f64>,
    norm_bias: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    local_attention: Option<usize>,
    /// The radius of the attention window. If it is set, `local_attention`, twice the radius, is
    /// ignored.
    pub(super) sliding_window: Option<usize>,
    global_attn_every_n_layers: Option<usize>,
    layer_types: Option<Vec<LayerType>>,
    global_rope_theta: Option<f64>,
    local_rope_theta: Option<f64>,
    /// The current form of `global_rope_theta` and `local_rope_theta`. It takes precedence.
    rope_parameters: Option<RopeOfLayerTypes>,
    decoder_bias: Option<bool>,
    pub(super) pad_token_id: Option<u32>,
    pub(super) classifier_bias: Option<bool>,
    classifier_activation: Option<Activation>,
    classifier_pooling: Option<SequencePooling>,
    tie_word_embeddings: Option<bool>,
}

impl Keys {
    pub(super) fn config(self, path: &str) -> Result<(EncoderConfig, HeadConfig)> {
        let layers = self.num_hidden_layers;
        let every = self.global_attn_every_n_layers.unwrap_or(3);
        if every == 0 {
            return Err(Error::unsupported(path, "global_attn_every_n_layers", "at least 1", "0"));
        }
        let is_local = |i: usize| !i.is_multiple_of(every);
        let types = LayerType::of_layers(path, self.layer_types, layers, is_local)?;
        let thetas = [
            self.global_rope_theta.unwrap_or(160_000.0),
            self.local_rope_theta.unwrap_or(10_000.0),
        ];
        let max = self.max_position_embeddings;
        let radius = self.sliding_window.unwrap_or(self.local_attention.unwrap_or(128) / 2);
        let has = |bias: Option<bool>| bias.unwrap_or(false);
        let (v, e, f) = (self.vocab_size, self.hidden_size, self.intermediate_size);
        let mut encoder = EncoderConfig::new(v, e, layers, self.num_attention_heads, f);
        encoder.max_position_embeddings = max;
        encoder.attention_windows =
            types.iter().map(|kind| kind.is_local().then_some(radius)).collect();
        let rope = self.rope_parameters.unwrap_or_default();
        encoder.positions = rope.positions(path, thetas, max, &types)?;
        encoder.embeddings.type_vocab_size = None;
        encoder.norm.kind = NormKind::LayerNorm { bias: has(self.norm_bias) };
        encoder.norm.eps = self.norm_eps.unwrap_or(1e-5);
        encoder.norm.placement = NormPlacement::Pre;
        encoder.norm.first_attention_norm = false;
        encoder.norm.final_norm = true;
        encoder.projection_bias =
            if has(self.attention_bias) { ProjectionBias::ALL } else { ProjectionBias::NONE };
        encoder.feed_forward.kind = FeedForwardKind::Gated;
        encoder.feed_forward.activation = self.hidden_activation.unwrap_or_default();
        encoder.feed_forward.intermediate_bias = has(self.mlp_bias);
        encoder.feed_forward.output_bias = has(self.mlp_bias);
        let activation = self.classifier_activation.unwrap_or_default();
        let heads = HeadConfig {
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(true),
            lm_decoder_bias: self.decoder_bias.unwrap_or(true),
            sequence_pooling: self.classifier_pooling.unwrap_or_default(),
            dense_bias: has(self.classifier_bias),
            norm: true,
            token_dense: true,
            ..HeadConfig::new(activation, activation)
        };
        Ok((encoder, heads))
    }
}

#[rustfmt::skip]
pub(super) const NAMES: Names = Names {
    wrapper: "model.",
    model: &[
        ("embeddings.word_embeddings", "embeddings.tok_embeddings", VOCAB),
        ("embeddings.norm",            "embeddings.norm",           NORM),
        ("encoder.final_norm",         "final_norm",                NORM),
    ],
    layers: "layers.",
    layer: &[
        ("attention.output",    "attn.Wo",   SQUARE),
        ("attention_norm",      "attn_norm", NORM),
        ("feed_forward.output", "mlp.Wo",    DOWN),
        ("feed_forward_norm",   "mlp_norm",  NORM),
    ],
    fused: &[
        ("attention.query",           "attn.Wqkv", 0, 3),
        ("attention.key",             "attn.Wqkv", 1, 3),
        ("attention.value",           "attn.Wqkv", 2, 3),
        ("feed_forward.gate",         "mlp.Wi",    0, 2),
        ("feed_forward.intermediate", "mlp.Wi",    1, 2),
    ],
    heads: &[
        ("lm_head.transform",   "head.dense", SQUARE),
        ("lm_head.norm",        "head.norm",  NORM),
        ("lm_head.decoder",     "decoder",    VOCAB),
        ("lm_head",             "decoder",    VOCAB),
        ("sequence_head",       "head.dense", SQUARE),
        ("sequence_head_norm",  "head.norm",  NORM),
        ("sequence_classifier", "classifier", LABELS),
        ("token_classifier",    "classifier", LABELS),
        ("qa_outputs",          "classifier", TWO_OUTPUTS),
    ],
    ignored: &[],
};
