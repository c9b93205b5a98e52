//! What stands on the encoder in checkpoints that were trained for a task.
//! Devlin et al. 2019, section 4, <https://arxiv.org/abs/1810.04805>.

use std::path::Path;

use candle_core::{D, Device, Module, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, Linear};

use crate::{
    BertConfig, BertModel, Labels, LoadReport, ModelFiles, PackedBatch, Precision, Result,
    models::{bert::has_pooler, labels::ReadLabels, lm_head::LmHead, load_encoder::load_encoder},
};

/// `from_dir` and `from_files` of a model with a head.
macro_rules! loaded {
    ($Model:ident, $build:expr) => {
        impl $Model {
            /// Loads `config.json` and the weights of a folder, and tells what was loaded.
            ///
            /// # Errors
            /// Those of [`BertModel::from_dir`]; [`crate::Error::Checkpoint`] if the head is not there.
            pub fn from_dir(
                dir: impl AsRef<Path>,
                precision: Precision,
                device: &Device,
            ) -> Result<(Self, LoadReport)> {
                Self::from_files(&ModelFiles::dir(dir)?, precision, device)
            }

            /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
            ///
            /// # Errors
            /// as there.
            pub fn from_files(
                files: &ModelFiles,
                precision: Precision,
                device: &Device,
            ) -> Result<(Self, LoadReport)> {
                let build: fn(&BertConfig, &ReadLabels, VarBuilder) -> Result<Self> = $build;
                load_encoder(files, precision, device, build)
            }

            /// The encoder that the head stands on.
            pub fn bert(&self) -> &BertModel {
                &self.bert
            }
        }
    };
}

loaded!(BertForMaskedLm, |config, _, vb| Self::new(config, vb));
loaded!(BertForNextSentencePrediction, |config, _, vb| Self::new(config, vb));
loaded!(BertForSequenceClassification, |config, labels, vb| Self::new(config, &labels()?, vb));
loaded!(BertForTokenClassification, |config, labels, vb| Self::new(config, &labels()?, vb));
loaded!(BertForQuestionAnswering, |config, _, vb| Self::new(config, vb));

/// Which token stands at a place: the model that BERT was trained as.
#[derive(Clone, Debug)]
pub struct BertForMaskedLm {
    bert: BertModel,
    head: LmHead,
}

impl BertForMaskedLm {
    /// The model whose tensors are in `vb`, in this crate's names; the scores' matrix is that of
    /// the words unless there is another.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let bert = BertModel::new(config, has_pooler(&vb), vb.clone())?;
        let head = LmHead::new(config, &bert.words()?, vb.pp("lm_head"))?;
        Ok(Self { bert, head })
    }

    /// The scores of all tokens at each place, before softmax.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, T, vocab_size)`, without meaning at
    /// padding
    /// # Errors
    /// as [`BertModel::forward`].
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

/// Whether the second text of a pair follows the first.
#[derive(Clone, Debug)]
pub struct BertForNextSentencePrediction {
    bert: BertModel,
    next_sentence: Linear,
}

impl BertForNextSentencePrediction {
    /// The model whose tensors are in `vb`, in this crate's names.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let (e, compute_type) = (config.hidden_size, config.compute_type);
        Ok(Self {
            bert: BertModel::new(config, true, vb.clone())?,
            next_sentence: Linear::load(compute_type, e, 2, true, vb.pp("next_sentence"))?,
        })
    }

    /// The scores of "it follows" and "it does not", before softmax.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, 2)`
    /// # Errors
    /// as [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let out = self.bert.forward(input_ids, token_type_ids, mask)?;
        Ok(self.next_sentence.forward(&pooled(out.pooler_output)?)?)
    }
}

/// Which label a text, or a pair of texts, has; with one label, its score.
#[derive(Clone, Debug)]
pub struct BertForSequenceClassification {
    bert: BertModel,
    classifier: Linear,
    labels: Labels,
}

impl BertForSequenceClassification {
    /// The model whose tensors are in `vb`, in this crate's names.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, labels: &Labels, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            bert: BertModel::new(config, true, vb.clone())?,
            classifier: classifier(config, labels, &vb)?,
            labels: labels.clone(),
        })
    }

    /// What the scores are of.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The score of each label, before softmax; of one label, the score.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, labels)`
    /// # Errors
    /// as [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let out = self.bert.forward(input_ids, token_type_ids, mask)?;
        Ok(self.classifier.forward(&pooled(out.pooler_output)?)?)
    }

    /// [`Self::forward`] of packed sequences, none of them empty.
    ///
    /// # Shapes
    /// returns `(B, labels)`
    /// # Errors
    /// The errors of [`BertModel::forward_packed`]; [`crate::Error::EmptySequence`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        Ok(self.classifier.forward(&pooled(self.bert.pool_packed(batch)?)?)?)
    }
}

/// Which label each token has.
#[derive(Clone, Debug)]
pub struct BertForTokenClassification {
    bert: BertModel,
    classifier: Linear,
    labels: Labels,
}

impl BertForTokenClassification {
    /// The model whose tensors are in `vb`, in this crate's names.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, labels: &Labels, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            bert: BertModel::new(config, has_pooler(&vb), vb.clone())?,
            classifier: classifier(config, labels, &vb)?,
            labels: labels.clone(),
        })
    }

    /// What the scores are of.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The score of each label for each token, before softmax.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`; returns `(B, T, labels)`, without meaning at padding
    /// # Errors
    /// as [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let hidden = self.bert.forward(input_ids, token_type_ids, mask)?.last_hidden_state;
        Ok(self.classifier.forward(&hidden)?)
    }

    /// [`Self::forward`] of packed sequences.
    ///
    /// # Shapes
    /// returns `(N, labels)`
    /// # Errors
    /// as [`BertModel::forward_packed`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<Tensor> {
        Ok(self.classifier.forward(&self.bert.forward_packed(batch)?)?)
    }
}

/// Where in a text the answer to a question stands.
#[derive(Clone, Debug)]
pub struct BertForQuestionAnswering {
    bert: BertModel,
    qa_outputs: Linear,
}

/// What [`BertForQuestionAnswering::forward`] gives, before softmax over the tokens.
#[derive(Clone, Debug)]
pub struct AnswerScores {
    /// `(B, T)`, or `(N,)` of packed sequences: that the answer begins at a token; without meaning
    /// at padding.
    pub start: Tensor,
    /// As many: that it ends with a token.
    pub end: Tensor,
}

impl BertForQuestionAnswering {
    /// The model whose tensors are in `vb`, in this crate's names.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let (e, compute_type) = (config.hidden_size, config.compute_type);
        Ok(Self {
            bert: BertModel::new(config, has_pooler(&vb), vb.clone())?,
            qa_outputs: Linear::load(compute_type, e, 2, true, vb.pp("qa_outputs"))?,
        })
    }

    /// The scores of each token as the answer's first and last.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`
    /// # Errors
    /// as [`BertModel::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: Option<&Tensor>,
        mask: &AttentionMask,
    ) -> Result<AnswerScores> {
        self.scores(&self.bert.forward(input_ids, token_type_ids, mask)?.last_hidden_state)
    }

    /// [`Self::forward`] of packed sequences.
    ///
    /// # Errors
    /// as [`BertModel::forward_packed`].
    pub fn forward_packed(&self, batch: &PackedBatch) -> Result<AnswerScores> {
        self.scores(&self.bert.forward_packed(batch)?)
    }

    fn scores(&self, hidden: &Tensor) -> Result<AnswerScores> {
        let both = self.qa_outputs.forward(hidden)?; // (.., 2)
        let of = |i| both.narrow(D::Minus1, i, 1)?.squeeze(D::Minus1);
        Ok(AnswerScores { start: of(0)?, end: of(1)? })
    }
}

fn classifier(config: &BertConfig, labels: &Labels, vb: &VarBuilder) -> Result<Linear> {
    let (e, n) = (config.hidden_size, labels.names().len());
    Ok(Linear::load(config.compute_type, e, n, true, vb.pp("classifier"))?)
}

/// Of a model that was built with a pooler.
fn pooled(output: Option<Tensor>) -> Result<Tensor> {
    Ok(output.ok_or_else(|| candle_core::Error::msg("no pooler").bt())?)
}
