//! Architectures: configs from `config.json`, models, task heads and text generation.

pub(crate) mod bert;
pub(crate) mod bert_config;
mod bert_decoder;
mod encoder_decoder;
mod encoder_decoder_config;
mod generate;
mod heads;
pub(crate) mod labels;
mod lm_head;
mod load_encoder;

pub use bert::{BertModel, BertOutput, BertStates};
pub use bert_config::BertConfig;
pub use bert_decoder::{BertDecoder, DecoderAttentions, DecoderCache, DecoderMemory};
pub use encoder_decoder::EncoderDecoder;
pub use encoder_decoder_config::EncoderDecoderConfig;
pub use generate::{GenerateConfig, Strategy};
pub use heads::{
    AnswerScores, BertForMaskedLm, BertForNextSentencePrediction, BertForQuestionAnswering,
    BertForSequenceClassification, BertForTokenClassification,
};
pub use labels::Labels;
