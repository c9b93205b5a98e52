//! BERT's input: `LayerNorm(word + token type + position)`, Devlin et al. 2019, figure 2.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Module, Shape, Storage, Tensor};
use candle_nn::{Embedding, VarBuilder, embedding};
use half::{f16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};
use mha::cpu;
#[cfg(feature = "cuda")]
use mha::cuda::{apply3, with_storage};
use mha_kernels::{EmbeddingTable, Lookup, embed_layer_norm};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as kernels;
use rayon::prelude::*;

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
        let words = table("word_embeddings", config.vocab_size)?.embeddings().clone();
        Ok(Self {
            word_embeddings: Embedding::new(compact(words)?, config.hidden_size),
            token_type_embeddings: table("token_type_embeddings", config.type_vocab_size)?,
            position_embeddings: table("position_embeddings", config.max_position_embeddings)?,
            norm: LayerNorm::new(config.hidden_size, config.layer_norm_eps, vb.pp("norm"))?,
        })
    }

    /// The word embeddings, `(vocab_size, E)`, in what it computes in.
    ///
    /// # Errors
    /// candle's.
    pub(crate) fn words(&self) -> Result<Tensor> {
        Ok(self.word_embeddings.embeddings().to_dtype(self.dtype())?)
    }

    fn token_types(&self) -> &Tensor {
        self.token_type_embeddings.embeddings()
    }

    fn positions(&self) -> &Tensor {
        self.position_embeddings.embeddings()
    }

    /// What it computes in.
    pub(crate) fn dtype(&self) -> DType {
        self.positions().dtype()
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
        let words = self.word_embeddings.embeddings();
        let tables = [words, self.token_types(), self.positions()];
        #[cfg(feature = "cuda")]
        if self.norm.is_for_cuda(&[self.positions()])
            && mha::cuda::takes(&tables)
            && [input_ids, token_type_ids, position_ids].iter().all(|ids| ids.device().is_cuda())
        {
            return self.on_cuda([input_ids, token_type_ids, position_ids], tables);
        }
        let in_f32 = if words.dtype() == DType::F16 { &tables[1..] } else { &tables };
        if let Some(norm) = self.norm.for_kernel(in_f32) {
            let op = Lookups { tables: tables.map(Tensor::clone), norm: norm.clone() };
            let ids = [input_ids, token_type_ids, position_ids].map(Tensor::contiguous);
            let [input_ids, token_type_ids, position_ids] = ids;
            return Ok(input_ids?.apply_op3_no_bwd(&token_type_ids?, &position_ids?, &op)?);
        }
        let words = self.word_embeddings.forward(input_ids)?.to_dtype(self.dtype())?; // (B, T, E)
        let types = self.token_type_embeddings.forward(token_type_ids)?;
        let positions = self.position_embeddings.forward(position_ids)?;
        Ok(self.norm.forward(&((words + types)? + positions)?)?)
    }
}

/// A table for the CPU's kernel in half the memory, if no number of it needs more than f16: then it
/// came from a file of f16.
fn compact(table: Tensor) -> Result<Tensor> {
    if !cpu::takes(&[&table]) || !table.is_contiguous() {
        return Ok(table);
    }
    let halves = cpu::with_numbers(&table, |numbers| {
        let mut halves: Vec<f16> = mha_kernels::zeros(numbers.len()).reinterpret_into();
        let same = |(halves, numbers): (&mut [f16], &[f32])| {
            halves.convert_from_f32_slice(numbers);
            let mut again = vec![0.0; numbers.len()];
            halves.convert_to_f32_slice(&mut again);
            again.iter().zip(numbers).fold(true, |same, (again, number)| same & (again == number))
        };
        let all = halves.par_chunks_mut(4096).zip(numbers.par_chunks(4096)).all(same);
        all.then_some(halves)
    })?;
    match halves {
        Some(halves) => Ok(Tensor::from_vec(halves, table.shape(), table.device())?),
        None => Ok(table),
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
            let table = match storage {
                CpuStorage::F16(_) => {
                    EmbeddingTable::F16(cpu::contiguous::<f16>(storage, layout)?.reinterpret_cast())
                }
                _ => EmbeddingTable::F32(cpu::contiguous(storage, layout)?),
            };
            lookups.push(Lookup { table, ids });
        }
        let lookups = [lookups[0], lookups[1], lookups[2]];
        let Kernel { weight, bias, eps, isa } = &self.norm;
        let out = embed_layer_norm(*isa, lookups, weight, bias, *eps);
        let out = out.map_err(candle_core::Error::wrap)?;
        let shape = [layout.dims(), &[weight.len()]].concat();
        Ok((CpuStorage::F32(out), shape.into()))
    }
}

#[cfg(feature = "cuda")]
impl BertEmbeddings {
    /// The same in a CUDA kernel.
    fn on_cuda(
        &self,
        ids: [&Tensor; 3],
        [words, types, positions]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let e = words.dim(1)?;
        let [input_ids, type_ids, position_ids] = ids.map(Tensor::contiguous);
        let ids = [&input_ids?, &type_ids?, &position_ids?];
        let hidden = apply3("embeddings", ids, |input_ids, type_ids, position_ids| {
            let ids = [input_ids, type_ids, position_ids];
            let out = self.norm.with_weights(|weight, bias, eps| {
                with_storage(words, |words| {
                    with_storage(types, |types| {
                        with_storage(positions, |positions| {
                            let tables = [words, types, positions];
                            kernels::embed_layer_norm(ids, tables, weight, bias, eps)
                        })
                    })
                })
            });
            Ok((out?, [input_ids.1.dims(), &[e]].concat().into()))
        });
        Ok(hidden?)
    }
}
