//! BERT's input: `LayerNorm(word + token type + position)`, Devlin et al. 2019, figure 2.

use candle_core::{CpuStorage, CustomOp3, Layout, Module, Shape, Storage, Tensor};
use candle_nn::{Embedding, VarBuilder, embedding};
use mha::cpu;
use mha_kernels::{Lookup, embed_layer_norm};

use crate::{
    BertConfig, Result,
    layer_norm::{Kernel, LayerNorm},
};

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

    fn token_types(&self) -> &Tensor {
        self.token_type_embeddings.embeddings()
    }

    fn positions(&self) -> &Tensor {
        self.position_embeddings.embeddings()
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
        let tables = [self.words(), self.token_types(), self.positions()];
        if let Some(norm) = self.norm.for_kernel(&tables) {
            let op = Lookups { tables: tables.map(Tensor::clone), norm: norm? };
            let ids = [input_ids, token_type_ids, position_ids].map(Tensor::contiguous);
            let [input_ids, token_type_ids, position_ids] = ids;
            return Ok(input_ids?.apply_op3_no_bwd(&token_type_ids?, &position_ids?, &op)?);
        }
        let words = self.word_embeddings.forward(input_ids)?; // (B, T, E)
        let types = self.token_type_embeddings.forward(token_type_ids)?;
        let positions = self.position_embeddings.forward(position_ids)?;
        Ok(self.norm.forward(&((words + types)? + positions)?)?)
    }
}

/// The same in the CPU's kernel.
struct Lookups {
    tables: [Tensor; 3],
    norm: Kernel,
}

impl CustomOp3 for Lookups {
    fn name(&self) -> &'static str {
        "embeddings"
    }

    fn cpu_fwd(
        &self,
        input_ids: &CpuStorage,
        layout: &Layout,
        token_type_ids: &CpuStorage,
        types_layout: &Layout,
        position_ids: &CpuStorage,
        positions_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let ids = [
            cpu::contiguous::<u32>(input_ids, layout)?,
            cpu::contiguous(token_type_ids, types_layout)?,
            cpu::contiguous(position_ids, positions_layout)?,
        ];
        if ids.iter().any(|of_table| of_table.len() != ids[0].len()) {
            candle_core::bail!("input, token type and position ids of other shapes");
        }
        let [words, types, positions] = &self.tables;
        let storages = [words, types, positions].map(Tensor::storage_and_layout);
        let mut lookups = Vec::with_capacity(3);
        for ((storage, layout), ids) in storages.iter().zip(ids) {
            let Storage::Cpu(storage) = &**storage else {
                candle_core::bail!("embeddings that are not on the CPU");
            };
            lookups.push(Lookup { table: cpu::contiguous(storage, layout)?, ids });
        }
        let lookups = [lookups[0], lookups[1], lookups[2]];
        let Kernel { weight, bias, eps, isa } = &self.norm;
        let out = embed_layer_norm(*isa, lookups, weight, bias, *eps);
        let out = out.map_err(candle_core::Error::wrap)?;
        let shape = [layout.dims(), &[weight.len()]].concat();
        Ok((CpuStorage::F32(out), shape.into()))
    }
}
