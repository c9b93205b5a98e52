//! BERT with a task-specific head: masked language model, next-sentence prediction, sequence and
//! token classification, question answering.
//! Devlin et al. 2019, section 4, <https://arxiv.org/abs/1810.04805>.

use std::path::Path;

use candle_core::{D, Device, Module, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, Linear};

use crate::{
    BertConfig, BertModel, Labels, LoadReport, ModelFiles, PackedBatch, Precision, Result,
    models::{bert::has_pooler, labels::ReadLabels, lm_head::LmHead, load_encoder::load_encoder},
};

/// Implements `from_dir`, `from_files` and `bert` for a model with a head.
macro_rules! loaders {
    ($Model:ident, $build:expr) => {
        impl $Model {
            /// Loads `config.json` and the weights of a folder. The report lists the loaded
            /// tensors.
            ///
            /// # Errors
            /// The errors of [`BertModel::from_dir`]; [`crate::Error::Checkpoint`] if the head's
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
                let build: fn(&BertConfig, &ReadLabels, VarBuilder) -> Result<Self> = $build;
                load_encoder(files, precision, device, build)
            }

            /// The encoder below the head.
            pub fn bert(&self) -> &BertModel {
                &self.bert
            }
        }
    };
}

loaders!(BertForMaskedLm, |config, _, vb| Self::new(config, vb));
loaders!(BertForNextSentencePrediction, |config, _, vb| Self::new(config, vb));
loaders!(BertForSequenceClassification, |config, labels, vb| Self::new(config, &labels()?, vb));
loaders!(BertForTokenClassification, |config, labels, vb| Self::new(config, &labels()?, vb));
loaders!(BertForQuestionAnswering, |config, _, vb| Self::new(config, vb));

/// Predicts masked tokens.
#[derive(Clone, Debug)]
pub struct BertForMaskedLm {
    bert: BertModel,
    head: LmHead,
}

impl BertForMaskedLm {
    /// Builds the model from `vb`, with this crate's tensor names. The head's matrix is the word
    /// embeddings, unless `vb` has another `lm_head.decoder.weight` or the config unties them.
    ///
    /// # Errors
    /// The errors of [`BertModel::new`]; [`crate::Error::Attention`] or [`crate::Error::Candle`] if
    /// `vb` lacks a tensor of the head or has it in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let bert = BertModel::new(config, has_pooler(&vb), vb.clone())?;
        let head = LmHead::new(config, &bert.words()?, vb.pp("lm_head"))?;
        Ok(Self { bert, head })
    }

    /// The logits of all vocabulary tokens at each position.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, T, vocab_size)`, where the rows of
    /// padding are meaningless
    /// # Errors
    /// The errors of [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let hidden = self.bert.forward(input_ids, token_type_ids, mask)?.last_hidden_state;
        Ok(self.head.forward(&hidden)?)
    }
}

/// Predicts whether the second text of a pair follows the first.
#[derive(Clone, Debug)]
pub struct BertForNextSentencePrediction {
    bert: BertModel,
    next_sentence: Linear,
}

impl BertForNextSentencePrediction {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`BertModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of the
    /// head or has it in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let (e, compute_type) = (config.hidden_size, config.compute_type);
        Ok(Self {
            bert: BertModel::new(config, true, vb.clone())?,
            next_sentence: Linear::load(compute_type, e, 2, true, vb.pp("next_sentence"))?,
        })
    }

    /// The logits of "the second text follows" and "the second text does not follow", in this
    /// order.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, 2)`
    /// # Errors
    /// The errors of [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let out = self.bert.forward(input_ids, token_type_ids, mask)?;
        Ok(self.next_sentence.forward(&require_pooled(out.pooler_output)?)?)
    }
}

/// Classifies a text or a pair of texts. With a single label, the output is a score.
#[derive(Clone, Debug)]
pub struct BertForSequenceClassification {
    bert: BertModel,
    classifier: Linear,
    labels: Labels,
}

impl BertForSequenceClassification {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`BertModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of the
    /// head or has it in another shape.
    pub fn new(config: &BertConfig, labels: &Labels, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            bert: BertModel::new(config, true, vb.clone())?,
            classifier: classifier(config, labels, &vb)?,
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
    /// The errors of [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let out = self.bert.forward(input_ids, token_type_ids, mask)?;
        Ok(self.classifier.forward(&require_pooled(out.pooler_output)?)?)
    }

    /// [`Self::forward`] for packed sequences.
    ///
    /// # Shapes
    /// returns `(B, labels)`
    /// # Errors
    /// The errors of [`BertModel::forward_packed`]; [`crate::Error::EmptySequence`] for a sequence
    /// without tokens.
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        Ok(self.classifier.forward(&require_pooled(self.bert.pool_packed(batch)?)?)?)
    }
}

/// Classifies each token.
#[derive(Clone, Debug)]
pub struct BertForTokenClassification {
    bert: BertModel,
    classifier: Linear,
    labels: Labels,
}

impl BertForTokenClassification {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`BertModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of the
    /// head or has it in another shape.
    pub fn new(config: &BertConfig, labels: &Labels, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            bert: BertModel::new(config, has_pooler(&vb), vb.clone())?,
            classifier: classifier(config, labels, &vb)?,
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
    /// The errors of [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let hidden = self.bert.forward(input_ids, token_type_ids, mask)?.last_hidden_state;
        Ok(self.classifier.forward(&hidden)?)
    }

    /// [`Self::forward`] for packed sequences.
    ///
    /// # Shapes
    /// returns `(N, labels)`
    /// # Errors
    /// The errors of [`BertModel::forward_packed`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        Ok(self.classifier.forward(&self.bert.forward_packed(batch)?)?)
    }
}

/// Locates the answer to a question in a text.
#[derive(Clone, Debug)]
pub struct BertForQuestionAnswering {
    bert: BertModel,
    qa_outputs: Linear,
}

/// The output of [`BertForQuestionAnswering::forward`]: logits over the tokens.
#[derive(Clone, Debug)]
pub struct AnswerScores {
    /// The logits of each token as the first of the answer: `(B, T)`, or `(N,)` for packed
    /// sequences. The values of padding are meaningless.
    pub start: Tensor,
    /// The logits of each token as the last of the answer, in the same shape.
    pub end: Tensor,
}

impl BertForQuestionAnswering {
    /// Builds the model from `vb`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`BertModel::new`]; [`crate::Error::Attention`] if `vb` lacks a tensor of the
    /// head or has it in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let (e, compute_type) = (config.hidden_size, config.compute_type);
        Ok(Self {
            bert: BertModel::new(config, has_pooler(&vb), vb.clone())?,
            qa_outputs: Linear::load(compute_type, e, 2, true, vb.pp("qa_outputs"))?,
        })
    }

    /// The logits of each token as the first and as the last of the answer.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`
    /// # Errors
    /// The errors of [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<AnswerScores> {
        self.scores(&self.bert.forward(input_ids, token_type_ids, mask)?.last_hidden_state)
    }

    /// [`Self::forward`] for packed sequences.
    ///
    /// # Errors
    /// The errors of [`BertModel::forward_packed`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<AnswerScores> {
        self.scores(&self.bert.forward_packed(batch)?)
    }

    fn scores(&self, hidden: &Tensor) -> Result<AnswerScores> {
        let logits = self.qa_outputs.forward(hidden)?; // (.., 2)
        let column = |i| logits.narrow(D::Minus1, i, 1)?.squeeze(D::Minus1);
        Ok(AnswerScores { start: column(0)?, end: column(1)? })
    }
}

fn classifier(config: &BertConfig, labels: &Labels, vb: &VarBuilder) -> Result<Linear> {
    let (e, n) = (config.hidden_size, labels.names().len());
    Ok(Linear::load(config.compute_type, e, n, true, vb.pp("classifier"))?)
}

/// The pooler's output. The callers build their encoder with a pooler.
fn require_pooled(output: Option<Tensor>) -> Result<Tensor> {
    Ok(output.ok_or_else(|| candle_core::Error::msg("no pooler").bt())?)
}
