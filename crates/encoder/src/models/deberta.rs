//! DeBERTa v2 and v3: He et al. 2021, <https://arxiv.org/abs/2006.03654> and
//! <https://arxiv.org/abs/2111.09543>.
//!
//! BERT with disentangled attention: the scores depend on embeddings of relative positions. The
//! published checkpoints have no absolute positions (`position_biased_input` is false).

use serde::Deserialize;
use serde_json::Value;

use crate::{
    Activation, BertConfig, DisentangledConfig, EncoderConfig, Error, HeadConfig, Positions,
    Result,
    load::{DOWN, LABELS, NORM, Names, POSITIONS, SQUARE, TWO_OUTPUTS, TYPES, UP, VOCAB},
    models::architecture::{Accepted, Architecture},
};

pub(crate) static DEBERTA: Architecture = Architecture {
    name: "DeBERTa",
    model_types: &[("deberta-v2", "DebertaV2Tokenizer")],
    config: |json| json.to::<Keys>()?.config(&json.to()?, json.path()),
    accepted: Accepted::NOTHING,
    names: &[NAMES, NAMES_OF_V3],
};

/// The keys of `config.json` that BERT does not have, or whose default differs from that of BERT.
#[derive(Deserialize)]
struct Keys {
    type_vocab_size: Option<usize>,
    layer_norm_eps: Option<f64>,
    position_biased_input: Option<bool>,
    relative_attention: Option<bool>,
    share_att_key: Option<bool>,
    /// `["p2c", "c2p"]` or `"p2c|c2p"`.
    pos_att_type: Option<Value>,
    max_relative_positions: Option<isize>,
    position_buckets: Option<isize>,
    norm_rel_ebd: Option<String>,
    pooler_hidden_act: Option<Activation>,
    pooler_hidden_size: Option<usize>,
    embedding_size: Option<usize>,
    attention_head_size: Option<usize>,
    conv_kernel_size: Option<Value>,
    legacy: Option<bool>,
}

impl Keys {
    fn config(self, bert: &BertConfig, path: &str) -> Result<(EncoderConfig, HeadConfig)> {
        let (e, head_dim) = (bert.hidden_size, bert.hidden_size / bert.num_attention_heads.max(1));
        let of_head = "hidden_size / num_attention_heads";
        for (key, value, size, expected) in [
            ("embedding_size", self.embedding_size, e, "hidden_size"),
            ("pooler_hidden_size", self.pooler_hidden_size, e, "hidden_size"),
            ("attention_head_size", self.attention_head_size, head_dim, of_head),
        ] {
            if let Some(got) = value.filter(|&got| got != size) {
                return Err(Error::unsupported(path, key, expected, got));
            }
        }
        if let Some(size) = self.conv_kernel_size.filter(|size| *size != 0) {
            return Err(Error::unsupported(path, "conv_kernel_size", "0 (no convolution)", size));
        }
        let mut encoder = bert.encoder_config();
        encoder.embeddings.type_vocab_size = self.type_vocab_size.filter(|&types| types > 0);
        encoder.norm.eps = self.layer_norm_eps.unwrap_or(1e-7);
        if self.position_biased_input == Some(false) {
            encoder.positions = Positions::None;
        }
        let terms = self.pos_att_type.unwrap_or_default().to_string().to_lowercase();
        let (c2p, p2c) = (terms.contains("c2p"), terms.contains("p2c"));
        let is_relative = self.relative_attention == Some(true);
        let got = |key: Option<bool>| key.map_or("(absent)".to_string(), |x| x.to_string());
        if (c2p || p2c) && !is_relative {
            let got = got(self.relative_attention);
            return Err(Error::unsupported(
                path,
                "relative_attention",
                "true with pos_att_type",
                got,
            ));
        }
        if (c2p || p2c) && self.share_att_key != Some(true) {
            return Err(Error::unsupported(path, "share_att_key", "true", got(self.share_att_key)));
        }
        if is_relative {
            let positive = |x: Option<isize>| x.filter(|&x| x > 0).map(|x| x as usize);
            let max = positive(self.max_relative_positions).unwrap_or(bert.max_position_embeddings);
            let mut config = DisentangledConfig::new(max, positive(self.position_buckets));
            (config.content_to_position, config.position_to_content) = (c2p, p2c);
            config.norm =
                self.norm_rel_ebd.is_some_and(|norms| norms.to_lowercase().contains("layer_norm"));
            encoder.disentangled = Some(config);
        }
        let heads = HeadConfig {
            sequence_activation: self.pooler_hidden_act.unwrap_or_default(),
            // With `legacy: false`, the language model head has no matrix of its own.
            tie_word_embeddings: bert.tie_word_embeddings || self.legacy == Some(false),
            ..bert.head_config()
        };
        Ok((encoder, heads))
    }
}

#[rustfmt::skip]
const NAMES: Names = Names {
    wrapper: "deberta.",
    model: &[
        ("embeddings.word_embeddings",            "embeddings.word_embeddings",       VOCAB),
        ("embeddings.token_type_embeddings",      "embeddings.token_type_embeddings", TYPES),
        ("embeddings.position_embeddings",        "embeddings.position_embeddings",   POSITIONS),
        ("embeddings.norm",                       "embeddings.LayerNorm",             NORM),
        ("encoder.relative_positions.embeddings", "encoder.rel_embeddings",           &["number of relative positions", "hidden_size"]),
        ("encoder.relative_positions.norm",       "encoder.LayerNorm",                NORM),
    ],
    layers: "encoder.layer.",
    layer: &[
        ("attention.query",           "attention.self.query_proj",  SQUARE),
        ("attention.key",             "attention.self.key_proj",    SQUARE),
        ("attention.value",           "attention.self.value_proj",  SQUARE),
        ("attention.output",          "attention.output.dense",     SQUARE),
        ("attention_norm",            "attention.output.LayerNorm", NORM),
        ("feed_forward.intermediate", "intermediate.dense",         UP),
        ("feed_forward.output",       "output.dense",               DOWN),
        ("feed_forward_norm",         "output.LayerNorm",           NORM),
    ],
    fused: &[],
    heads: &[
        ("lm_head.transform",   "cls.predictions.transform.dense",     SQUARE),
        ("lm_head.norm",        "cls.predictions.transform.LayerNorm", NORM),
        ("lm_head.decoder",     "cls.predictions.decoder",             VOCAB),
        ("lm_head",             "cls.predictions",                     VOCAB),
        ("sequence_head",       "pooler.dense",                        SQUARE),
        ("sequence_classifier", "classifier",                          LABELS),
        ("token_classifier",    "classifier",                          LABELS),
        ("qa_outputs",          "qa_outputs",                          TWO_OUTPUTS),
    ],
    ignored: &["lm_predictions", "mask_predictions", "embeddings.position_embeddings"],
};

/// [`NAMES`] and [`NAMES_OF_V3`] for a config without relative positions. With `norm_rel_ebd`,
/// transformers then still saves the normalisation of their embeddings, and does not use it.
pub(crate) static NAMES_WITHOUT_RELATIVE_POSITIONS: [Names; 2] = {
    const IGNORED: &[&str] = &[
        "lm_predictions",
        "mask_predictions",
        "embeddings.position_embeddings",
        "encoder.LayerNorm",
    ];
    [Names { ignored: IGNORED, ..NAMES }, Names { ignored: IGNORED, ..NAMES_OF_V3 }]
};

/// The names in the published v3 checkpoints, and in those that transformers saves with
/// `legacy: false`. Only the language model head differs from [`NAMES`].
#[rustfmt::skip]
const NAMES_OF_V3: Names = Names {
    heads: &[
        ("lm_head.transform",   "lm_predictions.lm_head.dense",     SQUARE),
        ("lm_head.norm",        "lm_predictions.lm_head.LayerNorm", NORM),
        ("lm_head",             "lm_predictions.lm_head",           VOCAB),
        ("lm_head.decoder",     "lm_predictions.lm_head.decoder",   VOCAB),
        ("sequence_head",       "pooler.dense",                     SQUARE),
        ("sequence_classifier", "classifier",                       LABELS),
        ("token_classifier",    "classifier",                       LABELS),
        ("qa_outputs",          "qa_outputs",                       TWO_OUTPUTS),
    ],
    ..NAMES
};
