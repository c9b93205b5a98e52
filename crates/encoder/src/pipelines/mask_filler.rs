//! Predicts the most likely tokens for each mask token of a text: tokenize, encode, score.

use std::path::Path;

use candle_core::{D, DType, IndexOp, Tensor};
use candle_nn::ops::softmax;

use crate::{
    EncoderForMaskedLm, EncoderModel, Error, LoadOptions, ModelFiles, PackedBatch, Result,
    TextTokenizer, Tokens, error::beginning, pipelines::modules::transformer,
    pipelines::with_tokenizer::with_tokenizer, text::sentence_config::Loader,
};

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
    mask_id: u32,
}

/// A candidate token for a mask token.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The id of the token in the vocabulary.
    pub token_id: u32,
    /// The text of the token.
    pub token: String,
    /// The probability of the token: softmax over the vocabulary.
    pub score: f32,
}

impl MaskFiller {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForMaskedLm::from_dir`] and [`TextTokenizer::from_files`];
    /// [`Error::Tokenizer`] if the vocabulary has no mask token.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &transformer(files)?;
        let load = || EncoderForMaskedLm::from_files(files, options);
        let ((model, _report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        let mask_id = tokenizer.mask_token_id()?;
        Ok(Self { model, tokenizer, mask_id })
    }

    /// The `top` most likely tokens for each mask token of a text, in descending order of
    /// probability.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`] and [`Self::fill_tokens`].
    pub fn fill(&self, text: &str, top: usize) -> Result<Vec<Vec<Candidate>>> {
        self.fill_tokens(&self.tokenize(text)?, top)
    }

    /// The tokens of a text, truncated to the model's maximum length.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::encode`]; [`Error::NoMask`] for a text without a mask
    /// token; [`Error::MaskTruncated`] if truncation removes a mask token.
    pub fn tokenize(&self, text: &str) -> Result<Tokens> {
        let tokens = self.tokenizer.encode(&[text])?.swap_remove(0);
        let masks = |ids: &[u32]| ids.iter().filter(|&&id| id == self.mask_id).count();
        let all = match tokens.truncated {
            0 => masks(&tokens.input_ids),
            _ => masks(&self.tokenizer.encode_bare(text)?),
        };
        let removed = all - masks(&tokens.input_ids);
        if all == 0 {
            return Err(Error::NoMask { text: beginning(text) });
        }
        if removed > 0 {
            let (text, max) = (beginning(text), self.tokenizer.max_seq_length());
            return Err(Error::MaskTruncated { text, masks: removed, max });
        }
        Ok(tokens)
    }

    /// [`Self::fill`] for a tokenized text. Returns one list per mask token, and no list if
    /// there is no mask token.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_packed`]; [`mha::Error::Shape`] if the numbers of ids
    /// and types differ; [`Error::NonFiniteOutput`] for scores that are NaN or infinite.
    pub fn fill_tokens(&self, tokens: &Tokens, top: usize) -> Result<Vec<Vec<Candidate>>> {
        let ids = (0u32..).zip(&tokens.input_ids);
        let masks: Vec<u32> = ids.filter(|(_, id)| **id == self.mask_id).map(|(i, _)| i).collect();
        if masks.is_empty() {
            return Ok(vec![]);
        }
        let hidden = self.encoder().forward_packed(&PackedBatch::of([tokens])?)?; // (T, E)
        let mut all = vec![];
        for masks in masks.chunks(MASKS_PER_PART) {
            let masks = Tensor::new(masks, hidden.device())?;
            let logits = self.model.logits(&hidden.index_select(&masks, 0)?)?; // (masks, vocab_size)
            for i in 0..logits.dim(0)? {
                all.push(self.most_likely(&logits.i(i)?, top)?);
            }
        }
        Ok(all)
    }

    /// The token to fill, such as `[MASK]`.
    pub fn mask_token(&self) -> &str {
        self.tokenizer.mask_token()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// The encoder below the head.
    pub fn encoder(&self) -> &EncoderModel {
        self.model.encoder()
    }

    /// The `top` most likely tokens by their logits `(vocab_size,)`.
    fn most_likely(&self, logits: &Tensor, top: usize) -> Result<Vec<Candidate>> {
        let scores = softmax(&logits.to_dtype(DType::F32)?, D::Minus1)?.to_vec1::<f32>()?;
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
