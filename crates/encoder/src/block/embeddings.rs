//! The input of an encoder: `norm(word + token_type + position)`, Devlin et al. 2019, figure 2.

use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, embedding};
use mha::{Linear, ops};

use crate::{EncoderConfig, Positions, Result, block::norm::Norm};

/// The sum of the word, token type and position embeddings, then a normalisation and a projection
/// to `hidden_size`. The config determines which of these parts exist.
#[derive(Clone, Debug)]
pub struct InputEmbeddings {
    words: Tensor,             // (vocab_size, W), W = embedding_size
    types: Option<Tensor>,     // (type_vocab_size, W)
    positions: Option<Tensor>, // (max_position_embeddings, W)
    norm: Option<Norm>,
    projection: Option<Linear>,
    dtype: DType,
}

impl InputEmbeddings {
    /// Builds the module from `word_embeddings` in `vb`, and from `token_type_embeddings`,
    /// `position_embeddings`, `norm` and `projection` if the config has these parts.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `vb` lacks a tensor or has it in
    /// another shape.
    pub fn new(config: &EncoderConfig, vb: VarBuilder) -> Result<Self> {
        let width = config.embedding_size();
        let table = |name, rows| embedding(rows, width, vb.pp(name));
        let words = table("word_embeddings", config.vocab_size)?.embeddings().clone();
        let types = match config.embeddings.type_vocab_size {
            Some(rows) => Some(table("token_type_embeddings", rows)?.embeddings().clone()),
            None => None,
        };
        let positions = match config.positions {
            Positions::Learned { .. } => {
                let rows = config.max_position_embeddings;
                Some(table("position_embeddings", rows)?.embeddings().clone())
            }
            _ => None,
        };
        let projection = match config.embeddings.embedding_size {
            Some(_) => {
                let (e, vb) = (config.hidden_size, vb.pp("projection"));
                Some(Linear::load(config.compute_type, width, e, true, vb)?)
            }
            None => None,
        };
        let norm = match config.embeddings.norm {
            true => Some(Norm::new(config, width, vb.pp("norm"))?),
            false => None,
        };
        let dtype = words.dtype();
        Ok(Self { words: ops::compact_table(words)?, types, positions, norm, projection, dtype })
    }

    /// The word embeddings, `(vocab_size, W)`, in the dtype of the hidden states.
    pub(crate) fn words(&self) -> Result<Tensor> {
        Ok(self.words.to_dtype(self.dtype)?)
    }

    /// The dtype of the hidden states.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The hidden states of tokens. `token_type_ids` and `position_ids` are ignored if the module
    /// has no table for them.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`, `position_ids`: `(B, T)`, u32; returns `(B, T, E)`
    /// # Errors
    /// [`mha::Error::Candle`] if an id is not below the number of rows of its table.
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        position_ids: &Tensor,
    ) -> Result<Tensor> {
        let mut lookups = vec![(&self.words, input_ids)];
        lookups.extend(self.types.as_ref().map(|table| (table, token_type_ids)));
        lookups.extend(self.positions.as_ref().map(|table| (table, position_ids)));
        let embedded = match &self.norm {
            Some(Norm::LayerNorm(norm)) => ops::embed(&lookups, Some(norm), self.dtype)?,
            norm => {
                let sum = ops::embed(&lookups, None, self.dtype)?;
                match norm {
                    Some(norm) => candle_core::Module::forward(norm, &sum)?,
                    None => sum,
                }
            }
        }; // (B, T, W)
        match &self.projection {
            Some(projection) => Ok(projection.forward(&embedded)?),
            None => Ok(embedded),
        }
    }
}
