//! An encoder with a task-specific head: masked language model, next-sentence prediction, sequence
//! and token classification, question answering.
//! Devlin et al. 2019, section 4, <https://arxiv.org/abs/1810.04805>.

use std::path::Path;

use candle_core::{D, Device, Module, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, Linear};

use crate::{
    Activation, EncoderModel, Labels, LoadReport, ModelConfig, ModelFiles, PackedBatch, Precision,
    Result, SequencePooling,
    block::Norm,
    models::{
        encoder_model::has_pooler, labels::ReadLabels, lm_head::LmHead, load_encoder::load_encoder,
    },
};

/// Implements `from_dir`, `from_files` and `encoder` for a model with a head.
macro_rules! loaders {
    ($Model:ident, $build:expr) => {
        impl $Model {
            /// Loads `config.json` and the weights of a folder. The report lists the loaded
            /// tensors.
            ///
            /// # Errors
            /// The errors of [`EncoderModel::from_dir`]; [`crate::Error::Checkpoint`] if the head's
            /// tensors are missing.
            pub fn from_dir(
                dir: impl AsRef<Path>,
                precision: Precision,
                device: &Device,
            ) -> Result<(Self, LoadReport)> {
                Self::from_files(&ModelFiles::dir(dir)?, precision, device)
            }

            /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
            ///
            /// # Errors
            /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`]
            /// lists.
            pub fn from_files(
                files: &ModelFiles,
                precision: Precision,
                device: &Device,
            ) -> Result<(Self, LoadReport)> {
                let build: fn(&ModelConfig, &ReadLabels, VarBuilder) -> Result<Self> = $build;
                load_encoder(files, precision, device, build)
            }

            /// The encoder below the head.
            pub fn encoder(&self) -> &EncoderModel {
                &self.encoder
            }
        }
    };
}

loaders!(EncoderForMaskedLm, |config, _, vb| Self::new(config, vb));
loaders!(EncoderForNextSentencePrediction, |config, _, vb| Self::new(config, vb));
loaders!(EncoderForSequenceClassification, |config, labels, vb| Self::new(config, &labels()?, vb));
loaders!(EncoderForTokenClassification, |config, labels, vb| Self::new(config, &labels()?, vb));
loaders!(EncoderForQuestionAnswering, |config, _, vb| Self::new(config, vb));

/// Predicts masked tokens.
#[derive(Clone, Debug)]
pub struct EncoderForMaskedLm {
    encoder: EncoderModel,
    head: LmHead,
}

impl EncoderForMaskedLm {
    /// Builds the model from `vb`, with this crate's tensor names. The head's matrix is the word
    /// embeddings, unless `vb` has another `lm_head.decoder.weight` or the config unties them.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] or [`crate::Error::Candle`]
    /// if `vb` lacks a tensor of the head or has it in another shape.
    pub fn new(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        let encoder = EncoderModel::new(&config.encoder, has_pooler(&vb), vb.clone())?;
        let head = LmHead::new(config, &encoder.words()?, vb.pp("lm_head"))?;
        Ok(Self { encoder, head })
    }

    /// The logits of all vocabulary tokens at each position.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, T, vocab_size)`, where the rows of
    /// padding are meaningless
    /// # Errors
    /// The errors of [`EncoderModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        self.logits(&self.encoder.forward(input_ids, token_type_ids, mask)?.last_hidden_state)
    }

    /// The logits of hidden states: `(.., E)` to `(.., vocab_size)`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head.forward(hidden)?)
    }
}

/// Predicts whether the second text of a pair follows the first.
#[derive(Clone, Debug)]
pub struct EncoderForNextSentencePrediction {
    encoder: EncoderModel,
    head: DenseHead,
    next_sentence: Linear,
}

impl EncoderForNextSentencePrediction {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of
    /// the head or has it in another shape.
    pub fn new(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        let (e, compute_type) = (config.encoder.hidden_size, config.encoder.compute_type);
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, false, vb.clone())?,
            head: DenseHead::new(config, &vb)?,
            next_sentence: Linear::load(compute_type, e, 2, true, vb.pp("next_sentence"))?,
        })
    }

    /// The logits of "the second text follows" and "the second text does not follow", in this
    /// order.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, 2)`
    /// # Errors
    /// The errors of [`EncoderModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let x =
            self.encoder.forward_pooled(input_ids, token_type_ids, mask, SequencePooling::Cls)?;
        Ok(self.next_sentence.forward(&self.head.forward(&x)?)?)
    }
}

/// Classifies a text or a pair of texts. With a single label, the output is a score.
#[derive(Clone, Debug)]
pub struct EncoderForSequenceClassification {
    encoder: EncoderModel,
    head: DenseHead,
    pooling: SequencePooling,
    classifier: Linear,
    labels: Labels,
}

impl EncoderForSequenceClassification {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of
    /// the head or has it in another shape.
    pub fn new(config: &ModelConfig, labels: &Labels, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, false, vb.clone())?,
            head: DenseHead::new(config, &vb)?,
            pooling: config.heads.sequence_pooling,
            classifier: classifier(config, labels, vb.pp("sequence_classifier"))?,
            labels: labels.clone(),
        })
    }

    /// The labels, in the order of the logits.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The logit of each label.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, labels)`
    /// # Errors
    /// The errors of [`EncoderModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let x = self.encoder.forward_pooled(input_ids, token_type_ids, mask, self.pooling)?;
        Ok(self.classifier.forward(&self.head.forward(&x)?)?)
    }

    /// [`Self::forward`] for packed sequences.
    ///
    /// # Shapes
    /// returns `(B, labels)`
    /// # Errors
    /// The errors of [`EncoderModel::forward_packed`]; [`crate::Error::EmptySequence`] for a
    /// sequence without tokens.
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        let x = self.encoder.forward_pooled_packed(batch, self.pooling)?;
        Ok(self.classifier.forward(&self.head.forward(&x)?)?)
    }
}

/// Classifies each token.
#[derive(Clone, Debug)]
pub struct EncoderForTokenClassification {
    encoder: EncoderModel,
    head: Option<DenseHead>,
    classifier: Linear,
    labels: Labels,
}

impl EncoderForTokenClassification {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of
    /// the head or has it in another shape.
    pub fn new(config: &ModelConfig, labels: &Labels, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, has_pooler(&vb), vb.clone())?,
            head: DenseHead::of_tokens(config, &vb)?,
            classifier: classifier(config, labels, vb.pp("token_classifier"))?,
            labels: labels.clone(),
        })
    }

    /// The labels, in the order of the logits.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The logits of all labels for each token.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, T, labels)`, where the rows of padding
    /// are meaningless
    /// # Errors
    /// The errors of [`EncoderModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        self.logits(self.encoder.forward(input_ids, token_type_ids, mask)?.last_hidden_state)
    }

    /// [`Self::forward`] for packed sequences.
    ///
    /// # Shapes
    /// returns `(N, labels)`
    /// # Errors
    /// The errors of [`EncoderModel::forward_packed`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        self.logits(self.encoder.forward_packed(batch)?)
    }

    fn logits(&self, mut hidden: Tensor) -> Result<Tensor> {
        if let Some(head) = &self.head {
            hidden = head.forward(&hidden)?;
        }
        Ok(self.classifier.forward(&hidden)?)
    }
}

/// Locates the answer to a question in a text.
#[derive(Clone, Debug)]
pub struct EncoderForQuestionAnswering {
    encoder: EncoderModel,
    head: Option<DenseHead>,
    qa_outputs: Linear,
}

/// The output of [`EncoderForQuestionAnswering::forward`]: logits over the tokens.
#[derive(Clone, Debug)]
pub struct AnswerScores {
    /// The logits of each token as the first of the answer: `(B, T)`, or `(N,)` for packed
    /// sequences. The values of padding are meaningless.
    pub start: Tensor,
    /// The logits of each token as the last of the answer, in the same shape.
    pub end: Tensor,
}

impl EncoderForQuestionAnswering {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of
    /// the head or has it in another shape.
    pub fn new(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        let (e, compute_type) = (config.encoder.hidden_size, config.encoder.compute_type);
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, has_pooler(&vb), vb.clone())?,
            head: DenseHead::of_tokens(config, &vb)?,
            qa_outputs: Linear::load(compute_type, e, 2, true, vb.pp("qa_outputs"))?,
        })
    }

    /// The logits of each token as the first and as the last of the answer.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`
    /// # Errors
    /// The errors of [`EncoderModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<AnswerScores> {
        self.scores(&self.encoder.forward(input_ids, token_type_ids, mask)?.last_hidden_state)
    }

    /// [`Self::forward`] for packed sequences.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_packed`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<AnswerScores> {
        self.scores(&self.encoder.forward_packed(batch)?)
    }

    fn scores(&self, hidden: &Tensor) -> Result<AnswerScores> {
        let logits = match &self.head {
            Some(head) => self.qa_outputs.forward(&head.forward(hidden)?)?,
            None => self.qa_outputs.forward(hidden)?,
        }; // (.., 2)
        let column = |i| logits.narrow(D::Minus1, i, 1)?.squeeze(D::Minus1);
        Ok(AnswerScores { start: column(0)?, end: column(1)? })
    }
}

fn classifier(config: &ModelConfig, labels: &Labels, vb: VarBuilder) -> Result<Linear> {
    let (e, n) = (config.encoder.hidden_size, labels.names().len());
    Ok(Linear::load(config.encoder.compute_type, e, n, true, vb)?)
}

/// `activation(x·Wᵀ + b)`, normalised in some architectures. In BERT, W and b are those of the
/// pooler.
#[derive(Clone, Debug)]
struct DenseHead {
    dense: Linear,
    activation: Activation,
    norm: Option<Norm>,
}

impl DenseHead {
    /// Builds the head from `sequence_head` and, if it normalises, `sequence_head_norm` in `vb`.
    fn new(config: &ModelConfig, vb: &VarBuilder) -> Result<Self> {
        let ModelConfig { encoder, heads, .. } = config;
        let (e, bias) = (encoder.hidden_size, heads.dense_bias);
        Ok(Self {
            dense: Linear::load(encoder.compute_type, e, e, bias, vb.pp("sequence_head"))?,
            activation: heads.sequence_activation,
            norm: match heads.norm {
                true => Some(Norm::new(encoder, e, vb.pp("sequence_head_norm"))?),
                false => None,
            },
        })
    }

    /// The dense layer that precedes the token classifier or the question-answering layer; `None`
    /// if the architecture has none.
    fn of_tokens(config: &ModelConfig, vb: &VarBuilder) -> Result<Option<Self>> {
        match config.heads.token_dense {
            true => Ok(Some(Self::new(config, vb)?)),
            false => Ok(None),
        }
    }

    /// `x`: `(.., E)`; returns `(.., E)`
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.activation.forward(&self.dense.forward(x)?)?;
        match &self.norm {
            None => Ok(x),
            Some(norm) => Ok(norm.forward(&x)?),
        }
    }
}
