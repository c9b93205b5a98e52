//! An encoder with a task-specific head: masked language model, next-sentence prediction, sequence
//! and token classification, question answering.
//! Devlin et al. 2019, section 4, <https://arxiv.org/abs/1810.04805>.

use std::path::Path;

use candle_core::{D, Module, Tensor};
use mha::AttentionMask;
use ops::{Linear, RowPooling, Weights};

use crate::{
    Activation, EncoderModel, InputError, Labels, LoadOptions, LoadReport, ModelConfig, ModelFiles,
    RaggedBatch, Result, SequencePooling,
    block::{Norm, unsupported},
    load::ModelFolder,
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
            /// The errors of [`EncoderModel::from_dir`]; [`crate::CheckpointError::Tensors`] if the
            /// head's tensors are missing; for a head with labels, the errors of
            /// [`Labels::from_json`].
            pub fn from_dir(
                dir: impl AsRef<Path>,
                options: &LoadOptions,
            ) -> Result<(Self, LoadReport)> {
                Self::from_files(&ModelFiles::dir(dir)?, options)
            }

            /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
            ///
            /// # Errors
            /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`]
            /// lists.
            pub fn from_files(
                files: &ModelFiles,
                options: &LoadOptions,
            ) -> Result<(Self, LoadReport)> {
                Self::load(&ModelFolder::new(files), options)
            }

            /// [`Self::from_files`] for files of which some are already read.
            pub(crate) fn load(
                files: &ModelFolder,
                options: &LoadOptions,
            ) -> Result<(Self, LoadReport)> {
                let build: fn(&ModelConfig, &ReadLabels, Weights) -> Result<Self> = $build;
                load_encoder(files, options, build)
            }

            /// The encoder below the head.
            pub fn encoder(&self) -> &EncoderModel {
                &self.encoder
            }
        }
    };
}

loaders!(EncoderForMaskedLm, |config, _, weights| Self::new(config, weights));
loaders!(EncoderForNextSentencePrediction, |config, _, weights| Self::new(config, weights));
loaders!(EncoderForSequenceClassification, |config, labels, weights| Self::new(
    config,
    &labels()?,
    weights
));
loaders!(EncoderForTokenClassification, |config, labels, weights| Self::new(
    config,
    &labels()?,
    weights
));
loaders!(EncoderForQuestionAnswering, |config, _, weights| Self::new(config, weights));

/// Predicts masked tokens.
///
/// # Examples
/// A small model with random weights. The expected values are PyTorch's:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderForMaskedLm, LoadOptions};
/// use mha::AttentionMask;
///
/// let dir = "../../tests/golden/heads/masked_lm";
/// let (model, _) = EncoderForMaskedLm::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[2u32, 5, 4, 7, 3]], &Cpu)?; // [CLS] a [MASK] c [SEP]
/// let logits = model.forward(&input_ids, None, &AttentionMask::none())?; // (1, 5, 53)
/// let of_mask = logits.get(0)?.get(2)?;
/// assert_eq!(of_mask.argmax(0)?.to_scalar::<u32>()?, 16);
/// assert!((of_mask.max(0)?.to_scalar::<f32>()? - 3.6713).abs() < 1e-4);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderForMaskedLm {
    encoder: EncoderModel,
    head: LmHead,
}

impl EncoderForMaskedLm {
    /// Builds the model from `weights`, with this crate's tensor names. The head's output matrix is
    /// the word embeddings, unless `tie_word_embeddings` is false or `weights` have a different
    /// matrix `lm_head.decoder.weight`.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] or [`crate::Error::Candle`]
    /// if `weights` lack a tensor of the head or have it in another shape;
    /// [`crate::ConfigError::Unsupported`] for causal attention.
    pub fn new<'a>(config: &ModelConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        if config.encoder.causal {
            unsupported("causal", "false, for a masked language model (use CausalLm)", "true")?;
        }
        let encoder = EncoderModel::new(&config.encoder, has_pooler(&weights), weights.clone())?;
        let head = LmHead::new(config, encoder.words(), weights.pp("lm_head"))?;
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

    /// The logits of a ragged batch, pooled over each sequence, `(B, vocab_size)`, in f32. The
    /// logits of all tokens are not in memory at the same time.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_ragged`]; [`crate::InputError::EmptySequence`] for a
    /// sequence without tokens.
    pub(crate) fn forward_pooled(
        &self,
        batch: &RaggedBatch,
        pooling: RowPooling,
    ) -> Result<Tensor> {
        if let Some(index) = batch.offsets().windows(2).position(|at| at[0] == at[1]) {
            return Err(InputError::EmptySequence { index }.into());
        }
        let hidden = self.encoder.forward_ragged(batch)?; // (N, E)
        self.head.forward_pooled(&hidden, batch.offsets(), pooling)
    }

    /// The logits of hidden states: `(.., E)` to `(.., vocab_size)`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.head.forward(hidden)?)
    }
}

/// Predicts whether the second text of a pair follows the first.
///
/// # Examples
/// A small model with random weights. The expected values are PyTorch's:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderForNextSentencePrediction, LoadOptions};
/// use mha::AttentionMask;
///
/// let dir = "../../tests/golden/heads/next_sentence";
/// let (model, _) = EncoderForNextSentencePrediction::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[2u32, 5, 3, 7, 3]], &Cpu)?; // [CLS] a [SEP] c [SEP]
/// let types = Tensor::new(&[[0u32, 0, 0, 1, 1]], &Cpu)?;
/// let logits = model.forward(&input_ids, Some(&types), &AttentionMask::none())?; // (1, 2)
/// let [follows, does_not] = logits.to_vec2::<f32>()?[0][..] else { unreachable!() };
/// assert!((follows - 1.1498).abs() < 1e-4 && (does_not + 1.0596).abs() < 1e-4);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderForNextSentencePrediction {
    encoder: EncoderModel,
    head: DenseHead,
    next_sentence: Linear,
}

impl EncoderForNextSentencePrediction {
    /// Builds the model from `weights`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `weights` lack a tensor
    /// of the head or have it in another shape.
    pub fn new<'a>(config: &ModelConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        let (e, compute_type) = (config.encoder.hidden_size, config.encoder.compute_type);
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, false, weights.clone())?,
            head: DenseHead::new(config, &weights)?,
            next_sentence: Linear::load(compute_type, e, 2, true, weights.pp("next_sentence"))?,
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
        let (pooling, of_tokens) = (SequencePooling::Cls, |x: &Tensor| Ok(x.clone()));
        let x = self.encoder.forward_pooled(input_ids, token_type_ids, mask, pooling, of_tokens)?;
        Ok(self.next_sentence.forward(&self.head.forward(&x)?)?)
    }
}

/// Classifies a text or a pair of texts. A model with a single label computes one logit, for
/// example the relevance of a document to a query.
///
/// # Examples
/// A small model with random weights. The expected values are PyTorch's:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderForSequenceClassification, LoadOptions};
/// use mha::AttentionMask;
///
/// let dir = "../../tests/golden/heads/sequence";
/// let (model, _) = EncoderForSequenceClassification::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[2u32, 5, 7, 3]], &Cpu)?; // [CLS] a c [SEP]
/// let logits = model.forward(&input_ids, None, &AttentionMask::none())?.to_vec2::<f32>()?;
/// assert_eq!(logits[0].len(), model.labels().names().len());
/// assert!((logits[0][2] - 1.3191).abs() < 1e-4);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderForSequenceClassification {
    encoder: EncoderModel,
    head: Option<DenseHead>,
    pooling: SequencePooling,
    classifier: Linear,
    labels: Labels,
}

impl EncoderForSequenceClassification {
    /// Builds the model from `weights`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `weights` lack a tensor
    /// of the head or have it in another shape.
    pub fn new<'a>(
        config: &ModelConfig,
        labels: &Labels,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        let has_dense = config.heads.sequence_dense;
        let (bias, classifier_weights) =
            (config.heads.classifier_bias, weights.pp("sequence_classifier"));
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, false, weights.clone())?,
            head: if has_dense { Some(DenseHead::new(config, &weights)?) } else { None },
            pooling: config.heads.sequence_pooling,
            classifier: classifier(config, labels, bias, classifier_weights)?,
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
        let of_tokens = |x: &Tensor| self.before_pooling(x);
        let x = self.encoder.forward_pooled(
            input_ids,
            token_type_ids,
            mask,
            self.pooling,
            of_tokens,
        )?;
        self.logits(x)
    }

    /// [`Self::forward`] for ragged sequences.
    ///
    /// # Shapes
    /// returns `(B, labels)`
    /// # Errors
    /// The errors of [`EncoderModel::forward_ragged`]; [`crate::InputError::EmptySequence`] for a
    /// sequence without tokens.
    pub fn forward_ragged(&self, batch: &RaggedBatch) -> Result<Tensor> {
        let of_tokens = |x: &Tensor| self.before_pooling(x);
        self.logits(self.encoder.forward_pooled_ragged(batch, self.pooling, of_tokens)?)
    }

    /// The vectors that are pooled, from the hidden states `(.., E)`. With
    /// [`SequencePooling::Late`], these are the inputs of the classifier: it is linear, so that the
    /// logits of the mean input are the means of the logits.
    fn before_pooling(&self, hidden: &Tensor) -> Result<Tensor> {
        match &self.head {
            Some(head) if self.pooling == SequencePooling::Late => head.forward(hidden),
            _ => Ok(hidden.clone()),
        }
    }

    /// The logits of pooled vectors `(B, E)`.
    fn logits(&self, pooled: Tensor) -> Result<Tensor> {
        match &self.head {
            Some(head) if self.pooling != SequencePooling::Late => {
                Ok(self.classifier.forward(&head.forward(&pooled)?)?)
            }
            _ => Ok(self.classifier.forward(&pooled)?),
        }
    }
}

/// Classifies each token.
///
/// # Examples
/// A small model with random weights. The expected values are PyTorch's:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderForTokenClassification, LoadOptions};
/// use mha::AttentionMask;
///
/// let dir = "../../tests/golden/heads/token";
/// let (model, _) = EncoderForTokenClassification::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[2u32, 5, 7, 3]], &Cpu)?; // [CLS] a c [SEP]
/// let logits = model.forward(&input_ids, None, &AttentionMask::none())?.to_vec3::<f32>()?;
/// assert_eq!(logits[0][1].len(), model.labels().names().len());
/// assert!((logits[0][1][3] - 4.7475).abs() < 1e-4);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderForTokenClassification {
    encoder: EncoderModel,
    head: Option<DenseHead>,
    classifier: Linear,
    labels: Labels,
}

impl EncoderForTokenClassification {
    /// Builds the model from `weights`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `weights` lack a tensor
    /// of the head or have it in another shape.
    pub fn new<'a>(
        config: &ModelConfig,
        labels: &Labels,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, has_pooler(&weights), weights.clone())?,
            head: DenseHead::of_tokens(config, &weights)?,
            classifier: classifier(config, labels, true, weights.pp("token_classifier"))?,
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

    /// [`Self::forward`] for ragged sequences.
    ///
    /// # Shapes
    /// returns `(N, labels)`
    /// # Errors
    /// The errors of [`EncoderModel::forward_ragged`].
    pub fn forward_ragged(&self, batch: &RaggedBatch) -> Result<Tensor> {
        self.logits(self.encoder.forward_ragged(batch)?)
    }

    fn logits(&self, mut hidden: Tensor) -> Result<Tensor> {
        if let Some(head) = &self.head {
            hidden = head.forward(&hidden)?;
        }
        Ok(self.classifier.forward(&hidden)?)
    }
}

/// Locates the answer to a question in a text.
///
/// # Examples
/// A small model with random weights. The expected values are PyTorch's:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderForQuestionAnswering, LoadOptions};
/// use mha::AttentionMask;
///
/// let dir = "../../tests/golden/heads/answer";
/// let (model, _) = EncoderForQuestionAnswering::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[2u32, 5, 3, 7, 8, 3]], &Cpu)?; // [CLS] a [SEP] c d [SEP]
/// let types = Tensor::new(&[[0u32, 0, 0, 1, 1, 1]], &Cpu)?;
/// let scores = model.forward(&input_ids, Some(&types), &AttentionMask::none())?;
/// let (start, end) = (scores.start.to_vec2::<f32>()?, scores.end.to_vec2::<f32>()?);
/// assert!((start[0][3] + 2.5631).abs() < 1e-4 && (end[0][2] - 1.2705).abs() < 1e-4);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderForQuestionAnswering {
    encoder: EncoderModel,
    head: Option<DenseHead>,
    qa_outputs: Linear,
}

/// The output of [`EncoderForQuestionAnswering::forward`]: logits over the tokens.
#[derive(Clone, Debug)]
pub struct AnswerScores {
    /// The logit of each token as the start of the answer: `(B, T)`, or `(N,)` for packed
    /// sequences. The values of padding are meaningless.
    pub start: Tensor,
    /// The logit of each token as the end of the answer, in the same shape.
    pub end: Tensor,
}

impl EncoderForQuestionAnswering {
    /// Builds the model from `weights`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`crate::Error::Attention`] if `weights` lack a tensor
    /// of the head or have it in another shape.
    pub fn new<'a>(config: &ModelConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        let (e, compute_type) = (config.encoder.hidden_size, config.encoder.compute_type);
        Ok(Self {
            encoder: EncoderModel::new(&config.encoder, has_pooler(&weights), weights.clone())?,
            head: DenseHead::of_tokens(config, &weights)?,
            qa_outputs: Linear::load(compute_type, e, 2, true, weights.pp("qa_outputs"))?,
        })
    }

    /// The logits of each token as the start and as the end of the answer.
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

    /// [`Self::forward`] for ragged sequences.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_ragged`].
    pub fn forward_ragged(&self, batch: &RaggedBatch) -> Result<AnswerScores> {
        self.scores(&self.encoder.forward_ragged(batch)?)
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

fn classifier(
    config: &ModelConfig,
    labels: &Labels,
    bias: bool,
    weights: Weights,
) -> Result<Linear> {
    let (e, n) = (config.encoder.hidden_size, labels.names().len());
    Ok(Linear::load(config.encoder.compute_type, e, n, bias, weights)?)
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
    /// Builds the head from `sequence_head` and, if it normalises, `sequence_head_norm` in
    /// `weights`.
    fn new(config: &ModelConfig, weights: &Weights) -> Result<Self> {
        let ModelConfig { encoder, heads, .. } = config;
        let (e, bias) = (encoder.hidden_size, heads.dense_bias);
        Ok(Self {
            dense: Linear::load(encoder.compute_type, e, e, bias, weights.pp("sequence_head"))?,
            activation: heads.sequence_activation,
            norm: if heads.norm {
                Some(Norm::new(encoder, e, weights.pp("sequence_head_norm"))?)
            } else {
                None
            },
        })
    }

    /// The dense layer that precedes the token classifier or the question-answering layer; `None`
    /// if the architecture has none.
    fn of_tokens(config: &ModelConfig, weights: &Weights) -> Result<Option<Self>> {
        if config.heads.token_dense { Ok(Some(Self::new(config, weights)?)) } else { Ok(None) }
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
