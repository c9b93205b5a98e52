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
    /// Whether the language model head has a linear map, an activation and a normalisation before
    /// its output matrix.
    pub lm_transform: bool,
    /// The activation of the language model head.
    pub lm_activation: Activation,
    /// Whether the output matrix of the language model head has a bias.
    pub lm_decoder_bias: bool,
    /// Whether a checkpoint may lack the biases of the language model head. A missing bias is then
    /// zero.
    pub lm_biases_are_optional: bool,
    /// c in `c · tanh(logits / c)`, if the language model head bounds its logits.
    pub lm_softcap: Option<f64>,
    /// The activation after the first linear map of the heads other than the language model head.
    pub sequence_activation: Activation,
    /// The hidden states that the sequence classification head reads.
    pub sequence_pooling: SequencePooling,
    /// Whether the sequence classification head has a first linear map and an activation.
    pub sequence_dense: bool,
    /// Whether the sequence classifier, the last linear map, has a bias.
    pub classifier_bias: bool,
    /// Whether the first linear map of a head has a bias.
    pub dense_bias: bool,
    /// Whether the heads normalise after the activation. A language model head with `lm_transform`
    /// always does.
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
    /// The hidden state of the last token that is not padding.
    #[serde(skip)]
    Last {
        /// The id of the padding token. A token of a text with this id is not read, although it is
        /// not padding.
        pad_token_id: Option<u32>,
    },
    /// The hidden states of all tokens that are not padding (EuroBERT). The logits are the means of the logits
    /// of these tokens.
    #[serde(skip)]
    Late,
}

impl HeadConfig {
    /// BERT's heads. `lm` is the activation of the language model head, `sequence` that of the
    /// other heads.
    pub fn new(lm: Activation, sequence: Activation) -> Self {
        Self {
            tie_word_embeddings: true,
            lm_transform: true,
            lm_activation: lm,
            lm_decoder_bias: true,
            lm_biases_are_optional: false,
            lm_softcap: None,
            sequence_activation: sequence,
            sequence_pooling: SequencePooling::Cls,
            sequence_dense: true,
            classifier_bias: true,
            dense_bias: true,
            norm: false,
            token_dense: false,
        }
    }

    /// The heads of decoders: a language model head that is a single matrix, and classifiers that
    /// read the hidden states. The sequence classifier reads the last token's and has no bias.
    pub(super) fn of_decoder(tie_word_embeddings: bool, pad_token_id: Option<u32>) -> Self {
        Self {
            tie_word_embeddings,
            lm_transform: false,
            lm_decoder_bias: false,
            sequence_pooling: SequencePooling::Last { pad_token_id },
            sequence_dense: false,
            classifier_bias: false,
            ..Self::new(Activation::Gelu, Activation::Gelu) // without a map, no activation is used
        }
    }
}
