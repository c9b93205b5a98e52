//! Jina v2 (jina-embeddings-v2-base-en and others): Günther et al. 2023,
//! <https://arxiv.org/abs/2310.19923>. Models that normalise queries and keys, such as
//! jina-embeddings-v2-base-code, are refused.
//!
//! BERT with ALiBi instead of position embeddings. The feed-forward networks are gated unless
//! `feed_forward_type` is absent or `original`.

use serde::Deserialize;

use crate::{
    Activation, BertConfig, Error, FeedForwardKind, Positions,
    load::{DOWN, NORM, Names, SQUARE},
    models::{
        architecture::{Accepted, Architecture},
        bert,
    },
};

pub(crate) static JINA_BERT: Architecture = Architecture {
    name: "Jina v2",
    model_types: &[("bert", "BertTokenizer")], // with `position_embedding_type: alibi`
    config: |json| {
        let config: BertConfig = json.to()?; // the keys are BERT's, and some more
        let Keys { feed_forward_type, auto_map } = json.to()?;
        let code = auto_map.unwrap_or_default();
        if let Some(got) = code.values().map(ToString::to_string).find(|x| x.contains(NORMALISED)) {
            let expected = "a model without normalised queries and keys";
            return Err(Error::unsupported(json.path(), "auto_map", expected, got));
        }
        let mut encoder = config.encoder_config();
        encoder.positions = Positions::Alibi;
        let gate = match feed_forward_type.as_deref() {
            None | Some("original") => None,
            Some("geglu") => Some(Activation::Gelu),
            Some("reglu") => Some(Activation::Relu),
            Some(got) => {
                return Err(Error::unsupported(
                    json.path(),
                    "feed_forward_type",
                    "original, geglu or reglu",
                    got,
                ));
            }
        };
        if let Some(activation) = gate {
            encoder.feed_forward.kind = FeedForwardKind::Gated;
            // `hidden_act` remains the activation of the language model head.
            encoder.feed_forward.activation = activation;
            encoder.feed_forward.intermediate_bias = false;
        }
        Ok((encoder, config.head_config()))
    },
    accepted: Accepted {
        keys: &["position_embedding_type", "feed_forward_type"],
        classes: &["JinaBert"],
    },
    names: &[GATED, bert::NAMES],
};

#[derive(Deserialize)]
struct Keys {
    feed_forward_type: Option<String>,
    auto_map: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Part of the name of the repository with the code for normalised queries and keys.
const NORMALISED: &str = "qk-post-norm";

/// The names of the tensors if the feed-forward networks are gated.
#[rustfmt::skip]
const GATED: Names = Names {
    layer: &[
        ("attention.query",     "attention.self.query",       SQUARE),
        ("attention.key",       "attention.self.key",         SQUARE),
        ("attention.value",     "attention.self.value",       SQUARE),
        ("attention.output",    "attention.output.dense",     SQUARE),
        ("attention_norm",      "attention.output.LayerNorm", NORM),
        ("feed_forward.output", "mlp.wo",                     DOWN),
        ("feed_forward_norm",   "mlp.layernorm",              NORM),
    ],
    fused: &[
        ("feed_forward.gate",         "mlp.gated_layers", 0, 2),
        ("feed_forward.intermediate", "mlp.gated_layers", 1, 2),
    ],
    ..bert::NAMES
};
