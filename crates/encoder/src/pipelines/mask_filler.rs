//! Predicts the most likely tokens for each mask token of a text: tokenize, encode, score.

use std::path::Path;

use candle_core::{DType, IndexOp, Tensor};
use serde::Serialize;

use super::{
    modules::transformer,
    task::{Example, ParameterKind, Pipeline, TaskSize, TokenizedText, parameters},
    with_tokenizer::with_tokenizer,
};
use crate::{
    EncoderForMaskedLm, EncoderModel, Error, InputError, LoadOptions, LoadReport, ModelFiles,
    RaggedBatch, Result, TextTokenizer, Tokens, error::beginning, load::ModelFolder,
    text::sentence_config::Loader,
};

/// An upper bound of the size of a candidate.
const CANDIDATE_BYTES: usize = 96;

/// Number of mask tokens whose logits are in memory at a time. With a vocabulary of 250,000 tokens,
/// the logits of one mask token take 1 MB.
const MASKS_PER_PART: usize = 16;

/// A masked language model and its tokenizer.
///
/// # Source
/// `FillMaskPipeline` of Hugging Face transformers.
///
/// # Examples
/// A small model with random weights. The expected values are those of
/// transformers:
/// ```
/// use encoder::{LoadOptions, MaskFiller};
///
/// let dir = "../../tests/golden/heads/masked_lm";
/// let model = MaskFiller::from_dir(dir, &LoadOptions::default())?;
/// let masks = model.fill("a [MASK] cab", 5)?; // the five most likely tokens for each mask
/// let best = &masks[0][0];
/// assert_eq!((best.token_id, &best.token[..]), (16, "l"));
/// assert!((best.score - 0.12414).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MaskFiller {
    model: EncoderForMaskedLm,
    tokenizer: TextTokenizer,
    report: LoadReport,
    mask_id: u32,
}

/// The candidates for the mask tokens of a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Filled {
    /// The candidates for each mask token, in the order of the text.
    pub masks: Vec<Vec<Candidate>>,
}

/// A candidate token for a mask token.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Candidate {
    /// The id of the token in the vocabulary.
    pub token_id: u32,
    /// The text of the token.
    pub token: String,
    /// The probability of the token: softmax over the vocabulary.
    pub score: f32,
}

parameters! {
    /// The parameters of [`MaskFiller`].
    pub struct MaskFillerParams {
        /// Number of candidate tokens per mask token, the most probable first.
        top: usize = ParameterKind::Count { default: 5 },
    }
}

impl MaskFiller {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForMaskedLm::from_dir`] and [`TextTokenizer::from_files`];
    /// [`crate::FileError::Tokenizer`] if the vocabulary has no mask token.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &transformer(&ModelFolder::new(files))?;
        let load = || EncoderForMaskedLm::load(files, options);
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        let mask_id = tokenizer.mask_token_id()?;
        Ok(Self { model, tokenizer, report, mask_id })
    }

    /// The `top` most likely tokens for each mask token of a text, in descending order of
    /// probability. The text is truncated to the model's maximum length.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::encode`]; [`InputError::NoMask`] for a text without a mask
    /// token; [`InputError::MaskTruncated`] if truncation removes a mask token; the errors of
    /// [`EncoderModel::forward_ragged`]; [`Error::NonFiniteOutput`] for scores that are NaN or
    /// infinite.
    pub fn fill(&self, text: &str, top: usize) -> Result<Vec<Vec<Candidate>>> {
        Ok(self.run(&[text], &MaskFillerParams { top })?.swap_remove(0).masks)
    }

    /// The `top` most likely tokens by their logits `(vocab_size,)`.
    fn most_likely(&self, logits: &Tensor, top: usize) -> Result<Vec<Candidate>> {
        let mut scores = logits.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        ops::softmax(&mut scores, logits.dim(0)?)?;
        if scores.iter().any(|score| !score.is_finite()) {
            return Err(Error::NonFiniteOutput);
        }
        let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
        ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize])); // ties by id
        let best = ids.into_iter().take(top).map(|token_id| {
            let token = self.tokenizer.decode_one(token_id)?;
            Ok(Candidate { token_id, token, score: scores[token_id as usize] })
        });
        best.collect()
    }
}

impl Pipeline for MaskFiller {
    const TASK: &'static str = "fill_mask";
    const COMMAND: &'static str = "fill-mask";
    const ABOUT: &'static str = "Predict the masked tokens of texts (masked language model)";
    const EXAMPLE: Example =
        Example { parameters: &[("top", "3")], text: "Paris is the [MASK] of France." };
    const MODELS: &'static [&'static str] = &["EncoderForMaskedLm"];
    const SPLITS_TEXTS: bool = false;

    type Params = MaskFillerParams;
    type Context = ();
    /// The candidates for each mask token of a sequence.
    type Values = Vec<Vec<Candidate>>;
    type Output = Filled;

    fn load(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        Self::from_files(files, options)
    }

    fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    fn encoder(&self) -> &EncoderModel {
        self.model.encoder()
    }

    fn report(&self) -> &LoadReport {
        &self.report
    }

    fn size(&self, text: &str, params: &MaskFillerParams) -> Result<TaskSize> {
        let candidates = text.matches(self.tokenizer.mask_token()).count() * params.top;
        let bytes = self.tokenizer.sequence_size(text.len()) + CANDIDATE_BYTES * candidates;
        Ok(TaskSize { bytes, values: 2 * candidates })
    }

    fn tokenize(&self, text: &str, _: &MaskFillerParams) -> Result<TokenizedText<()>> {
        let tokens = self.tokenizer.encode(&[text])?.swap_remove(0);
        let masks = |ids: &[u32]| ids.iter().filter(|&&id| id == self.mask_id).count();
        let all = match tokens.truncated {
            0 => masks(&tokens.input_ids),
            _ => masks(&self.tokenizer.encode_bare(text)?),
        };
        let removed = all - masks(&tokens.input_ids);
        if all == 0 {
            return Err(InputError::NoMask { text: beginning(text) }.into());
        }
        if removed > 0 {
            let (text, max) = (beginning(text), self.tokenizer.max_seq_length());
            return Err(InputError::MaskTruncated { text, masks: removed, max }.into());
        }
        Ok(TokenizedText { sequences: vec![tokens], context: () })
    }

    fn batch_key(params: &MaskFillerParams) -> usize {
        params.top
    }

    fn compute(
        &self,
        sequences: &[&Tokens],
        params: &MaskFillerParams,
    ) -> Result<Vec<Vec<Vec<Candidate>>>> {
        let ids: Vec<u32> =
            sequences.iter().flat_map(|tokens| &tokens.input_ids).copied().collect();
        let masks: Vec<usize> = (0..ids.len()).filter(|&i| ids[i] == self.mask_id).collect();
        if masks.is_empty() {
            return Ok(vec![vec![]; sequences.len()]);
        }
        let batch = RaggedBatch::from_tokens(sequences.iter().copied())?;
        let hidden = self.model.encoder().forward_ragged_tokens(&batch, &masks)?; // (masks, E)
        let mut candidates = Vec::with_capacity(masks.len());
        for start in (0..masks.len()).step_by(MASKS_PER_PART) {
            let part = hidden.narrow(0, start, MASKS_PER_PART.min(masks.len() - start))?;
            let logits = self.model.logits(&part)?; // (masks of the part, vocab_size)
            for i in 0..logits.dim(0)? {
                candidates.push(self.most_likely(&logits.i(i)?, params.top)?);
            }
        }
        let mut candidates = candidates.into_iter();
        let own = |tokens: &&Tokens| {
            let masks = tokens.input_ids.iter().filter(|&&id| id == self.mask_id).count();
            candidates.by_ref().take(masks).collect()
        };
        Ok(sequences.iter().map(own).collect())
    }

    fn finish(
        &self,
        _: &str,
        (): (),
        mut values: Vec<Vec<Vec<Candidate>>>,
        _: &MaskFillerParams,
    ) -> Result<Filled> {
        Ok(Filled { masks: values.swap_remove(0) })
    }
}
