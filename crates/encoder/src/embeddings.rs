//! BERT's input: `LayerNorm(word + token type + position)`, Devlin et al. 2019, figure 2.

use candle_core::{Module, Tensor};
use candle_nn::{Embedding, VarBuilder, embedding};

use crate::{BertConfig, Result, layer_norm::LayerNorm};

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
        Ok(Self {
            word_embeddings: table("word_embeddings", config.vocab_size)?,
            token_type_embeddings: table("token_type_embeddings", config.type_vocab_size)?,
            position_embeddings: table("position_embeddings", config.max_position_embeddings)?,
            norm: LayerNorm::new(config.hidden_size, config.layer_norm_eps, vb.pp("norm"))?,
        })
    }

    /// The word embeddings, `(vocab_size, E)`.
    pub(crate) fn words(&self) -> &Tensor {
        self.word_embeddings.embeddings()
    }

    /// What it computes in.
    pub(crate) fn dtype(&self) -> candle_core::DType {
        self.words().dtype()
    }

    /// # Shapes
    /// three times `(B, T)`, u32; returns `(B, T, E)`
    /// # Errors
    /// An id that its table has no row for.
    pub fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        position_ids: &Tensor,
    ) -> Result<Tensor> {
        let words = self.word_embeddings.forward(input_ids)?; // (B, T, E)
        let types = self.token_type_embeddings.forward(token_type_ids)?;
        let positions = self.position_embeddings.forward(position_ids)?;
        Ok(self.norm.forward(&((words + types)? + positions)?)?)
    }
}
