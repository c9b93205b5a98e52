//! ModernBERT: Warner et al. 2024, <https://arxiv.org/abs/2412.13663>.
//!
//! Rotary positions, windows in most layers, pre-norm without biases, and a gated feed-forward
//! network. All heads have the same first part.

use serde::Deserialize;

use crate::{
    Activation, EncoderConfig, Error, FeedForwardKind, HeadConfig, NormKind, NormPlacement,
    Positions, SequencePooling,
    load::{DOWN, LABELS, NORM, Names, SQUARE, TWO_OUTPUTS, VOCAB, parse_json},
    models::architecture::Architecture,
};
use mha::ProjectionBias;

pub(crate) static MODERNBERT: Architecture = Architecture {
    name: "ModernBERT",
    model_types: &[("modernbert", "TokenizersBackend")],
    config: |json, path| {
        let keys: Keys = parse_json(json, path)?;
        keys.config(path)
    },
    names: NAMES,
};

/// The keys of `config.json`, in the older and in the current form.
#[derive(Deserialize)]
struct Keys {
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
    global_attn_every_n_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    global_rope_theta: Option<f64>,
    local_rope_theta: Option<f64>,
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<serde_json::Value>,
    decoder_bias: Option<bool>,
    classifier_bias: Option<bool>,
    classifier_activation: Option<Activation>,
    classifier_pooling: Option<SequencePooling>,
    tie_word_embeddings: Option<bool>,
}

#[derive(Deserialize)]
struct RopeParameters {
    full_attention: Option<Rope>,
    sliding_attention: Option<Rope>,
}

#[derive(Deserialize)]
struct Rope {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
}

const GLOBAL: &str = "full_attention";
const LOCAL: &str = "sliding_attention";

impl Keys {
    fn config(self, path: &str) -> crate::Result<(EncoderConfig, HeadConfig)> {
        let refuse = |key, expected, got: String| {
            Err(Error::Unsupported { path: path.to_string(), key, expected, got })
        };
        if let Some(scaling) = self.rope_scaling.filter(|scaling| !scaling.is_null()) {
            return refuse("rope_scaling", "the key to be absent", scaling.to_string());
        }
        let (global, local) = self
            .rope_parameters
            .map_or((None, None), |rope| (rope.full_attention, rope.sliding_attention));
        let other_type = |rope: &Rope| rope.rope_type.clone().filter(|kind| kind != "default");
        if let Some(kind) = global.iter().chain(&local).find_map(other_type) {
            return refuse("rope_parameters", "the rope_type default", kind);
        }
        let theta = |rope: Option<Rope>, older: Option<f64>, default| {
            rope.and_then(|rope| rope.rope_theta).or(older).unwrap_or(default)
        };
        let global_theta = theta(global, self.global_rope_theta, 160_000.0);
        let local_theta = theta(local, self.local_rope_theta, 10_000.0);
        let layers = self.num_hidden_layers;
        let every = self.global_attn_every_n_layers.unwrap_or(3).max(1);
        let by_index = |i: usize| if i.is_multiple_of(every) { GLOBAL } else { LOCAL }.to_string();
        let types = self.layer_types.unwrap_or_else(|| (0..layers).map(by_index).collect());
        if let Some(other) = types.iter().find(|kind| ![GLOBAL, LOCAL].contains(&kind.as_str())) {
            return refuse("layer_types", "full_attention or sliding_attention", other.clone());
        }
        if types.len() != layers {
            return refuse("layer_types", "num_hidden_layers types", types.len().to_string());
        }

        let mut encoder = EncoderConfig::new(
            self.vocab_size,
            self.hidden_size,
            layers,
            self.num_attention_heads,
            self.intermediate_size,
        );
        let is_local: Vec<bool> = types.iter().map(|kind| kind == LOCAL).collect();
        let radius = self.local_attention.unwrap_or(128) / 2;
        let has = |bias: Option<bool>| bias.unwrap_or(false);
        encoder.max_position_embeddings = self.max_position_embeddings;
        encoder.attention_windows = is_local.iter().map(|&local| local.then_some(radius)).collect();
        let theta = is_local.iter().map(|&local| if local { local_theta } else { global_theta });
        encoder.positions = Positions::Rotary { theta: theta.collect() };
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
            lm_activation: activation,
            lm_decoder_bias: self.decoder_bias.unwrap_or(true),
            sequence_activation: activation,
            sequence_pooling: self.classifier_pooling.unwrap_or_default(),
            dense_bias: has(self.classifier_bias),
            norm: true,
            token_dense: true,
        };
        Ok((encoder, heads))
    }
}

#[rustfmt::skip]
const NAMES: Names = Names {
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
    other_heads: &[],
};
