//! Qwen2: Yang et al. 2024, <https://arxiv.org/abs/2407.10671>; Qwen3: Yang et al. 2025,
//! <https://arxiv.org/abs/2505.09388>. Checkpoints: Qwen3-Embedding, Qwen3-Reranker, mxbai-rerank-v2,
//! gte-Qwen2 and pplx-embed, whose attention is not causal.
//!
//! Llama's block. Qwen2 has biases in the projections to queries, keys and values; Qwen3 normalises
//! the queries and keys of each head. Layers may have a window.

use mha::ProjectionBias;
use serde::Deserialize;

use crate::{
    EncoderConfig, Error, HeadConfig, Result,
    load::Json,
    models::{
        architecture::{Accepted, Architecture},
        llama::{DECODER_KEYS, DecoderKeys, NAMES, radius},
        rope::LayerType,
    },
};

pub(crate) static QWEN2: Architecture = Architecture {
    name: "Qwen2",
    model_types: &[("qwen2", "Qwen2Tokenizer")],
    config: |json| {
        let (mut config, heads) = config(json, true)?;
        config.projection_bias = ProjectionBias { output: false, ..ProjectionBias::ALL };
        Ok((config, heads))
    },
    accepted: Accepted { keys: DECODER_KEYS, classes: &[] },
    names: &[NAMES],
};

pub(crate) static QWEN3: Architecture = Architecture {
    name: "Qwen3",
    model_types: &[
        ("qwen3", "Qwen2Tokenizer"),
        // pplx-embed: the published class attends in both directions.
        ("bidirectional_pplx_qwen3", "Qwen2Tokenizer"),
    ],
    config: |json| {
        let Type { model_type } = json.to()?;
        let is_causal = model_type != "bidirectional_pplx_qwen3";
        let (mut config, heads) = config(json, is_causal)?;
        config.query_key_norm = true;
        Ok((config, heads))
    },
    accepted: Accepted { keys: DECODER_KEYS, classes: &["PPLXQwen3"] },
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Type {
    model_type: String,
}

/// The keys for windows.
#[derive(Deserialize)]
struct Keys {
    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<LayerType>>,
}

/// The encoder and the heads, without the biases of Qwen2 and without the norms of queries and keys
/// of Qwen3. The attention is causal if `is_causal` is true and the file does not say otherwise.
fn config(json: &Json, is_causal: bool) -> Result<(EncoderConfig, HeadConfig)> {
    let keys: DecoderKeys = json.to()?;
    let mut config = keys.config(json)?;
    config.causal &= is_causal;
    let Keys { use_sliding_window, sliding_window, max_window_layers, layer_types } = json.to()?;
    let window = if use_sliding_window == Some(true) { sliding_window } else { None };
    let max_window_layers = max_window_layers.unwrap_or(28);
    let is_local = |i| window.is_some() && i >= max_window_layers;
    let types = LayerType::of_layers(json.path(), layer_types, keys.num_hidden_layers, is_local)?;
    if types.iter().any(|kind| kind.is_local()) {
        let Some(window) = window else {
            if sliding_window.is_some() {
                let expected = "true, for layers of the type sliding_attention";
                let key = "use_sliding_window";
                return Err(Error::unsupported(json.path(), key, expected, "false"));
            }
            let expected = "a number, for layers of the type sliding_attention";
            return Err(Error::unsupported(json.path(), "sliding_window", expected, "null"));
        };
        let radius = radius(json, config.causal, window)?;
        config.attention_windows =
            types.iter().map(|kind| kind.is_local().then_some(radius)).collect();
    }
    Ok((config, keys.heads()))
}
