//! MPNet: Song et al. 2020, <https://arxiv.org/abs/2004.09297>.
//!
//! BERT without token types, with RoBERTa's positions, and a relative position bias that all layers
//! share.

use serde::Deserialize;

use crate::{
    Activation, BertConfig, Error, HeadConfig, Positions, RelativeBiasConfig,
    load::{DOWN, NORM, Names, POSITIONS, SQUARE, UP, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        roberta,
    },
};

pub(crate) static MPNET: Architecture = Architecture {
    name: "MPNet",
    model_types: &[("mpnet", "MPNetTokenizer")],
    config: |json| {
        let config: BertConfig = json.to()?; // the keys are BERT's, and one more
        let Keys { relative_attention_num_buckets: buckets } = json.to()?;
        let num_buckets = 32; // transformers computes with 32 buckets, whatever the key says
        if let Some(got) = buckets.filter(|&buckets| buckets != num_buckets) {
            return Err(Error::unsupported(
                json.path(),
                "relative_attention_num_buckets",
                "32",
                got,
            ));
        }
        let mut encoder = config.encoder_config();
        encoder.embeddings.type_vocab_size = None;
        encoder.positions = Positions::Learned { padding_idx: Some(1) }; // not `pad_token_id`
        encoder.relative_bias = Some(RelativeBiasConfig { num_buckets, max_distance: 128 });
        let heads = HeadConfig {
            lm_activation: Activation::Gelu, // `MPNetLMHead` ignores `hidden_act`
            ..config.head_config()
        };
        Ok((encoder, heads))
    },
    accepted: Accepted::NOTHING,
    names: &[NAMES],
};

#[derive(Deserialize)]
struct Keys {
    relative_attention_num_buckets: Option<usize>,
}

#[rustfmt::skip]
const NAMES: Names = Names {
    wrapper: "mpnet.",
    model: &[
        ("embeddings.word_embeddings",     "embeddings.word_embeddings",      VOCAB),
        ("embeddings.position_embeddings", "embeddings.position_embeddings",  POSITIONS),
        ("embeddings.norm",                "embeddings.LayerNorm",            NORM),
        ("encoder.relative_bias",          "encoder.relative_attention_bias", &["number of buckets", "num_attention_heads"]),
        ("pooler",                         "pooler.dense",                    SQUARE),
    ],
    layers: "encoder.layer.",
    layer: &[
        ("attention.query",           "attention.attn.q",    SQUARE),
        ("attention.key",             "attention.attn.k",    SQUARE),
        ("attention.value",           "attention.attn.v",    SQUARE),
        ("attention.output",          "attention.attn.o",    SQUARE),
        ("attention_norm",            "attention.LayerNorm", NORM),
        ("feed_forward.intermediate", "intermediate.dense",  UP),
        ("feed_forward.output",       "output.dense",        DOWN),
        ("feed_forward_norm",         "output.LayerNorm",    NORM),
    ],
    fused: &[],
    heads: roberta::HEADS,
    ignored: &[],
};
