//! Mistral: Jiang et al. 2023, <https://arxiv.org/abs/2310.06825>. Checkpoints: E5-mistral.
//!
//! Llama's block, with a window in all layers or in none.

use serde::Deserialize;

use crate::{
    models::{
        architecture::{Accepted, Architecture},
        common_keys::expect_values,
        llama::{DECODER_KEYS, DecoderKeys, NAMES, radius},
    },
    text::REGISTERED_CLASS,
};

pub(crate) static MISTRAL: Architecture = Architecture {
    name: "Mistral",
    model_types: &[("mistral", REGISTERED_CLASS)],
    config: |json| {
        expect_values(json, &[("layer_types", "null")])?;
        let keys: DecoderKeys = json.to()?;
        let mut config = keys.config(json)?;
        let Keys { sliding_window } = json.to()?;
        if let Some(window) = sliding_window {
            let radius = radius(json, config.causal, window)?;
            config.attention_windows = vec![Some(radius); keys.num_hidden_layers];
        }
        Ok((config, keys.heads()))
    },
    accepted: Accepted { keys: DECODER_KEYS, classes: &[] },
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Keys {
    /// An absent key means 4,096 in transformers. Published files have it.
    #[serde(default = "default_window")]
    sliding_window: Option<usize>,
}

fn default_window() -> Option<usize> {
    Some(4096)
}
