//! The score of a text by a causal language model: the logit of one token, or the difference of the
//! logits of two, as the next token of the text. Sun et al. 2023,
//! <https://arxiv.org/abs/2304.09542>; compare `LogitScore` of sentence-transformers 6.2.

use std::path::Path;

use candle_core::{D, Module, Tensor};
use mha::AttentionMask;
use ops::Weights;

use crate::{
    EncoderModel, Error, Labels, LoadOptions, LoadReport, ModelConfig, ModelFiles, RaggedBatch,
    Result, SequencePooling,
    load::{Json, ModelFolder},
    models::{
        lm_head::LmHead,
        load_encoder::{load_encoder, not_causal},
    },
};

/// The hidden state that the head reads: that of the last token, whatever its id.
const POOLING: SequencePooling = SequencePooling::Last { pad_token_id: None };

/// Scores a text by the logits of its next token: the logit of the token `true_token_id`, minus
/// that of the token `false_token_id`, if there is one. Only the rows of these tokens are read of
/// the output matrix.
///
/// # Examples
/// A small model with random weights. The expected values are those of sentence-transformers:
/// ```
/// use encoder::{EncoderForLogitScore, LoadOptions, RaggedBatch};
///
/// let dir = "../../tests/golden/decoders/rerank/qwen3";
/// let (yes, no) = (299, Some(297));
/// let (model, _) = EncoderForLogitScore::from_dir(dir, yes, no, &LoadOptions::default())?;
/// let mut batch = RaggedBatch::default();
/// batch.push(&[5, 9, 7], &[0; 3])?;
/// let score = model.forward_ragged(&batch)?.to_vec2::<f32>()?;
/// assert!((score[0][0] + 0.33508).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderForLogitScore {
    encoder: EncoderModel,
    /// The head for the one or two tokens.
    head: LmHead,
    labels: Labels,
}

impl EncoderForLogitScore {
    /// Builds the model from `weights`, with this crate's tensor names.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`]; [`Error::Candle`] for an id outside the vocabulary;
    /// [`Error::Attention`] if `weights` lack a tensor of the head or have it in another shape.
    pub fn new<'a>(
        config: &ModelConfig,
        true_token_id: u32,
        false_token_id: Option<u32>,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        let ids: Vec<u32> = [true_token_id].into_iter().chain(false_token_id).collect();
        let encoder = EncoderModel::new(&config.encoder, false, weights.clone())?;
        let head = LmHead::of_tokens(config, &ids, &weights)?;
        Ok(Self { encoder, head, labels: Labels::of_one_score() })
    }

    /// Loads `config.json` and the weights of a folder. The report lists the loaded tensors.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`] and [`Self::new`];
    /// [`crate::ConfigError::Unsupported`] for a model whose attention is not causal.
    pub fn from_dir(
        dir: impl AsRef<Path>,
        true_token_id: u32,
        false_token_id: Option<u32>,
        options: &LoadOptions,
    ) -> Result<(Self, LoadReport)> {
        let files = ModelFiles::dir(dir)?;
        Self::load(&ModelFolder::new(&files), true_token_id, false_token_id, options)
    }

    /// [`Self::from_dir`] for files of which some are already read.
    pub(crate) fn load(
        files: &ModelFolder,
        true_token_id: u32,
        false_token_id: Option<u32>,
        options: &LoadOptions,
    ) -> Result<(Self, LoadReport)> {
        let json = files.config()?;
        load_encoder(files, options, |config, _, weights| {
            Self::check_causal(config, &json)?;
            Self::new(config, true_token_id, false_token_id, weights)
        })
    }

    /// Checks that attention is causal. `json` is `config.json`.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if it is not.
    pub(crate) fn check_causal(config: &ModelConfig, json: &Json) -> Result<()> {
        if config.encoder.causal {
            return Ok(());
        }
        let (key, expected, got) = not_causal(json, config.architecture())?;
        Err(Error::unsupported(json.path(), key, expected, got))
    }

    /// The encoder below the head.
    pub fn encoder(&self) -> &EncoderModel {
        &self.encoder
    }

    /// The label of the score.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    /// The score of padded sequences.
    ///
    /// # Shapes
    /// `input_ids`: `(B, T)`; returns `(B, 1)`
    /// # Errors
    /// The errors of [`EncoderModel::forward`].
    pub fn forward(&self, input_ids: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        let of_tokens = |x: &Tensor| Ok(x.clone());
        self.scores(self.encoder.forward_pooled(input_ids, None, mask, POOLING, of_tokens)?)
    }

    /// [`Self::forward`] for ragged sequences.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_ragged`]; [`crate::InputError::EmptySequence`] for a
    /// sequence without tokens.
    pub fn forward_ragged(&self, batch: &RaggedBatch) -> Result<Tensor> {
        let of_tokens = |x: &Tensor| Ok(x.clone());
        self.scores(self.encoder.forward_pooled_ragged(batch, POOLING, of_tokens)?)
    }

    /// The scores of the last hidden states: `(B, E)` to `(B, 1)`
    fn scores(&self, last: Tensor) -> Result<Tensor> {
        let logits = self.head.forward(&last)?; // (B, 1 or 2)
        let column = |i| logits.narrow(D::Minus1, i, 1);
        match logits.dim(D::Minus1)? {
            1 => Ok(logits),
            _ => Ok((column(0)? - column(1)?)?),
        }
    }
}
