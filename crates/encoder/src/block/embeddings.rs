//! BERT's input: `LayerNorm(word + token type + position)`, Devlin et al. 2019, figure 2.

use candle_core::{DType, Tensor};
use candle_nn::{Embedding, VarBuilder, embedding};
use mha::{LayerNorm, ops};

use crate::{BertConfig, Result};

/// Word, token type and position embeddings, summed and normalised.
#[derive(Clone, Debug)]
pub struct BertEmbeddings {
    word_embeddings: Embedding,
    token_type_embeddings: Embedding,
    position_embeddings: Embedding,
    norm: LayerNorm,
}

impl BertEmbeddings {
    /// The module whose `word_embeddings`, `token_type_embeddings`, `position_embeddings` and
    /// `norm` are in `vb`.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let table = |name, rows| embedding(rows, config.hidden_size, vb.pp(name));
        let words = table("word_embeddings", config.vocab_size)?.embeddings().clone();
        Ok(Self {
            word_embeddings: Embedding::new(ops::compact_table(words)?, config.hidden_size),
            token_type_embeddings: table("token_type_embeddings", config.type_vocab_size)?,
            position_embeddings: table("position_embeddings", config.max_position_embeddings)?,
            norm: LayerNorm::new(config.hidden_size, config.layer_norm_eps, true, vb.pp("norm"))?,
        })
    }

    /// The word embeddings, `(vocab_size, E)`, in the dtype of the hidden states.
    pub(crate) fn words(&self) -> Result<Tensor> {
        Ok(self.word_embeddings.embeddings().to_dtype(self.dtype())?)
    }

    /// The dtype of the hidden states.
    pub(crate) fn dtype(&self) -> DType {
        self.position_embeddings.embeddings().dtype()
    }

    /// The hidden states of tokens.
    ///
    /// # Shapes
    /// all three `(B, T)`, u32; returns `(B, T, E)`
    /// # Errors
    /// [`mha::Error::Candle`] for an id without a row in its table.
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        position_ids: &Tensor,
    ) -> Result<Tensor> {
        let lookups = [
            (self.word_embeddings.embeddings(), input_ids),
            (self.token_type_embeddings.embeddings(), token_type_ids),
            (self.position_embeddings.embeddings(), position_ids),
        ];
        Ok(ops::embed(&lookups, Some(&self.norm), self.dtype())?)
    }
}
