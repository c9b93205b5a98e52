//! EuroBERT: Boizard et al. 2025, <https://arxiv.org/abs/2503.05500>.
//!
//! Llama's block, not causal.

use serde::Deserialize;

use crate::{
    Activation, HeadConfig, SequencePooling,
    load::{LABELS, Names, SQUARE, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        llama::{self, DECODER_KEYS, DecoderKeys},
    },
};

pub(crate) static EUROBERT: Architecture = Architecture {
    name: "EuroBERT",
    model_types: &[("eurobert", "PreTrainedTokenizer")],
    config: |json| {
        let keys: DecoderKeys = json.to()?;
        let Keys { mlp_bias, rms_norm_eps, classifier_pooling } = json.to()?;
        let mut config = keys.config(json)?;
        config.causal = false;
        config.norm.eps = rms_norm_eps.unwrap_or(1e-5);
        let has_bias = mlp_bias == Some(true);
        config.feed_forward.intermediate_bias = has_bias;
        config.feed_forward.output_bias = has_bias;
        let heads = HeadConfig {
            lm_decoder_bias: has_bias,
            sequence_dense: true,
            sequence_activation: Activation::Gelu,
            sequence_pooling: match classifier_pooling {
                None | Some(Pooling::Late) => SequencePooling::Late,
                Some(Pooling::Bos) => SequencePooling::Cls,
                Some(Pooling::Mean) => SequencePooling::Mean,
            },
            classifier_bias: true,
            ..keys.heads()
        };
        Ok((config, heads))
    },
    accepted: Accepted { keys: DECODER_KEYS, classes: &["EuroBert"] },
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Keys {
    /// The key also determines whether the language model head has a bias.
    mlp_bias: Option<bool>,
    rms_norm_eps: Option<f64>,
    classifier_pooling: Option<Pooling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Pooling {
    Bos,
    Mean,
    Late,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    heads: &[
        ("lm_head.decoder",     "lm_head",    VOCAB),
        ("lm_head",             "lm_head",    VOCAB),
        ("sequence_head",       "dense",      SQUARE),
        ("sequence_classifier", "classifier", LABELS),
        ("token_classifier",    "classifier", LABELS),
    ],
    ..llama::NAMES
};
