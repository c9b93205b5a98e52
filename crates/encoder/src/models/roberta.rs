//! RoBERTa: Liu et al. 2019, <https://arxiv.org/abs/1907.11692>; XLM-R: Conneau et al. 2020,
//! <https://arxiv.org/abs/1911.02116>; CamemBERT: Martin et al. 2020,
//! <https://arxiv.org/abs/1911.03894>.
//!
//! BERT's encoder, in which the first token has the position `padding_idx + 1`. The head that
//! classifies sequences has its own linear map instead of the pooler.

use crate::{
    Activation, BertConfig, HeadConfig, Positions,
    load::{LABELS, NORM, Names, Row, SQUARE, TWO_OUTPUTS, VOCAB},
    models::{
        architecture::{Accepted, Architecture},
        bert,
    },
};

pub(crate) static ROBERTA: Architecture = Architecture {
    name: "RoBERTa",
    model_types: &[
        ("roberta", "RobertaTokenizer"),
        ("xlm-roberta", "XLMRobertaTokenizer"),
        ("camembert", "CamembertTokenizer"),
    ],
    config: |json| {
        let config: BertConfig = json.to()?; // the keys are BERT's
        let mut encoder = config.encoder_config();
        encoder.positions = Positions::Learned { padding_idx: config.pad_token_id.or(Some(1)) };
        let heads = HeadConfig {
            lm_activation: Activation::Gelu, // `RobertaLMHead` ignores `hidden_act`
            ..config.head_config()
        };
        Ok((encoder, heads))
    },
    accepted: Accepted::NOTHING,
    names: &[NAMES],
};

#[rustfmt::skip]
const NAMES: Names = Names {
    wrapper: "roberta.",
    heads: HEADS,
    ..bert::NAMES
};

/// The heads of RoBERTa and MPNet.
#[rustfmt::skip]
pub(super) const HEADS: &[Row] = &[
    ("lm_head.transform",   "lm_head.dense",       SQUARE),
    ("lm_head.norm",        "lm_head.layer_norm",  NORM),
    ("lm_head.decoder",     "lm_head.decoder",     VOCAB),
    ("lm_head",             "lm_head",             VOCAB),
    ("sequence_head",       "classifier.dense",    SQUARE),
    ("sequence_classifier", "classifier.out_proj", LABELS),
    ("token_classifier",    "classifier",          LABELS),
    ("qa_outputs",          "qa_outputs",          TWO_OUTPUTS),
];
