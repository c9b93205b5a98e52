//! Architectures: configs from `config.json`, models, task heads and text generation.

mod albert;
mod architecture;
pub(crate) mod bert;
mod bert_config;
mod causal_lm;
mod common_keys;
mod deberta;
mod distilbert;
mod electra;
mod encoder_decoder;
mod encoder_decoder_config;
pub(crate) mod encoder_model;
mod eurobert;
mod gemma3;
mod generate;
mod gte;
mod head_config;
mod heads;
mod jina_bert;
pub(crate) mod labels;
mod llama;
mod lm_head;
pub(crate) mod load_encoder;
mod logit_score;
mod mistral;
mod model_config;
mod model_type;
mod modernbert;
mod modernbert_decoder;
mod mpnet;
mod nomic_bert;
mod qwen;
pub(crate) mod ragged_batch;
mod registry;
mod roberta;
mod rope;
mod shared_prefix;

pub use bert_config::BertConfig;
pub use causal_lm::CausalLm;
pub use encoder_decoder::EncoderDecoder;
pub use encoder_decoder_config::EncoderDecoderConfig;
pub use encoder_model::{EncoderModel, EncoderOutput, EncoderStates};
pub use generate::{GenerateConfig, Strategy};
pub use head_config::{HeadConfig, SequencePooling};
pub use heads::{
    AnswerScores, EncoderForMaskedLm, EncoderForNextSentencePrediction,
    EncoderForQuestionAnswering, EncoderForSequenceClassification, EncoderForTokenClassification,
};
pub use labels::Labels;
pub use logit_score::EncoderForLogitScore;
pub use model_config::ModelConfig;
pub use ragged_batch::RaggedBatch;
