//! What a masked language model puts in a text's gaps: tokenize, encode, score.

use std::path::Path;

use candle_core::{D, DType, Device, IndexOp, Tensor};
use candle_nn::ops::softmax;
use mha::AttentionMask;

use crate::{
    BertForMaskedLm, Error, ModelFiles, Precision, Result, TextTokenizer, Tokens, error::beginning,
    pipelines::modules::transformer, pipelines::with_tokenizer::with_tokenizer,
    text::sentence_config::Loader,
};

/// A masked language model and its tokenizer.
///
/// # Source
/// `FillMaskPipeline` of Hugging Face transformers.
#[derive(Clone)]
pub struct MaskFiller {
    model: BertForMaskedLm,
    tokenizer: TextTokenizer,
    mask: u32,
}

/// A token for a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its row in the vocabulary.
    pub token_id: u32,
    /// Its text.
    pub token: String,
    /// Its probability among all tokens.
    pub score: f32,
}

impl MaskFiller {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// Those of [`BertForMaskedLm::from_dir`] and [`TextTokenizer::from_files`]; a vocabulary
    /// without a mask.
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        let files = &transformer(files)?;
        let load = || BertForMaskedLm::from_files(files, precision, device);
        let ((model, _report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        let mask = tokenizer.mask_token()?;
        Ok(Self { model, tokenizer, mask })
    }

    /// The `top` likeliest tokens for each mask of a text, the likeliest first.
    ///
    /// # Errors
    /// [`Error::NoMask`] for a text without a mask; [`Error::MaskTruncated`] for one with a mask that
    /// truncation removes; [`Error::NoScore`] for scores that are NaN or infinite.
    pub fn fill(&self, text: &str, top: usize) -> Result<Vec<Vec<Candidate>>> {
        self.fill_tokens(&self.tokenize(text)?, top)
    }

    /// The tokens of a text, truncated to the model's longest sequence.
    ///
    /// # Errors
    /// [`Error::NoMask`] for a text without a mask; [`Error::MaskTruncated`] for one with a mask that
    /// truncation removes.
    pub fn tokenize(&self, text: &str) -> Result<Tokens> {
        let tokens = self.tokenizer.encode(&[text])?.swap_remove(0);
        let masks = |ids: &[u32]| ids.iter().filter(|&&id| id == self.mask).count();
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

    /// [`Self::fill`] of the tokens of a text.
    ///
    /// # Errors
    /// [`Error::NoScore`] for scores that are NaN or infinite.
    pub fn fill_tokens(&self, tokens: &Tokens, top: usize) -> Result<Vec<Vec<Candidate>>> {
        let masks =
            (0..tokens.input_ids.len()).filter(|&place| tokens.input_ids[place] == self.mask);
        let ids = Tensor::new(&tokens.input_ids[..], self.model.bert().device())?.unsqueeze(0)?;
        let logits = self.model.forward(&ids, None, &AttentionMask::none())?.squeeze(0)?; // (T, V)
        masks.map(|place| self.likeliest(&logits.i(place)?, top)).collect()
    }

    /// The tokenizer of its texts.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// Of scores `(V,)`.
    fn likeliest(&self, logits: &Tensor, top: usize) -> Result<Vec<Candidate>> {
        let scores = softmax(&logits.to_dtype(DType::F32)?, D::Minus1)?.to_vec1::<f32>()?;
        if scores.iter().any(|score| !score.is_finite()) {
            return Err(Error::NoScore);
        }
        let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
        ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize])); // stable
        let best = ids.into_iter().take(top).map(|token_id| {
            let token = self.tokenizer.decode_all(&[token_id])?;
            Ok(Candidate { token_id, token, score: scores[token_id as usize] })
        });
        best.collect()
    }
}
