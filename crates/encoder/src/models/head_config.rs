//! The config of the heads of an encoder.

use serde::Deserialize;

use crate::Activation;

/// The settings of an architecture's heads, such as activations, biases and tied weights.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeadConfig {
    /// Whether the language model head uses the word embeddings as its output matrix. A different
    /// matrix in the checkpoint takes precedence.
    pub tie_word_embeddings: bool,
    /// The activation of the language model head.
    pub lm_activation: Activation,
    /// Whether the output matrix of the language model head has a bias.
    pub lm_decoder_bias: bool,
    /// Whether a checkpoint may lack the biases of the language model head. A missing bias is then
    /// zero.
    pub lm_biases_are_optional: bool,
    /// The activation after the first linear map of the heads other than the language model head.
    pub sequence_activation: Activation,
    /// The hidden states that the sequence classification head reads.
    pub sequence_pooling: SequencePooling,
    /// Whether the first linear map of a head has a bias.
    pub dense_bias: bool,
    /// Whether the heads normalise after the activation. A language model head always does.
    pub norm: bool,
    /// Whether the heads of token classification and question answering have the first linear map,
    /// the activation and the normalisation of the sequence classification head.
    pub token_dense: bool,
}

/// The hidden states that the sequence classification head reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SequencePooling {
    /// The hidden state of the first token that is not padding.
    #[default]
    Cls,
    /// The mean of the hidden states of all tokens that are not padding.
    Mean,
}

impl HeadConfig {
    /// BERT's heads. `lm` is the activation of the language model head, `sequence` that of the
    /// other heads.
    pub fn new(lm: Activation, sequence: Activation) -> Self {
        Self {
            tie_word_embeddings: true,
            lm_activation: lm,
            lm_decoder_bias: true,
            lm_biases_are_optional: false,
            sequence_activation: sequence,
            sequence_pooling: SequencePooling::Cls,
            dense_bias: true,
            norm: false,
            token_dense: false,
        }
    }
}
