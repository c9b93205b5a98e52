//! Sums of embeddings with layer normalisation: `LayerNorm(Σ table[ids])`.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Module, Shape, Storage, Tensor};
use half::{f16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};
use mha_kernels::{EmbeddingTable, Lookup, embed_layer_norm};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    cpu,
    layer_norm::{CpuLayerNorm, LayerNorm},
};
use crate::Result;

/// Looks up `ids` in each table, adds the rows, and applies `norm` if there is one.
///
/// With three tables and a norm, as in BERT, a CPU or CUDA kernel computes all of this in one pass
/// over memory.
///
/// # Shapes
/// each table `(rows, E)`; ids `(.., T)` of u32, the same shape for each table; returns
/// `(.., T, E)` of `dtype`
/// # Errors
/// [`crate::Error::Candle`] if an id is out of range, if the shapes do not match, or if `lookups`
/// is empty.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let words = Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?;
/// let positions = Tensor::new(&[[10f32, 20.], [30., 40.]], &Cpu)?;
/// let (ids, position_ids) = (Tensor::new(&[1u32, 1], &Cpu)?, Tensor::new(&[0u32, 1], &Cpu)?);
/// let lookups = [(&words, &ids), (&positions, &position_ids)];
/// let x = mha::ops::embed(&lookups, None, candle_core::DType::F32)?;
/// assert_eq!(x.to_vec2::<f32>()?, [[13., 24.], [33., 44.]]);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn embed(
    lookups: &[(&Tensor, &Tensor)],
    norm: Option<&LayerNorm>,
    dtype: DType,
) -> Result<Tensor> {
    if let ([a, b, c], Some(norm)) = (lookups, norm)
        && let Some(hidden) = by_kernel([*a, *b, *c], norm)?
    {
        return Ok(hidden);
    }
    let mut sum: Option<Tensor> = None;
    for (table, ids) in lookups {
        let rows = candle_nn::Embedding::new((*table).clone(), table.dim(1)?).forward(ids)?;
        let rows = rows.to_dtype(dtype)?; // (.., T, E); f16 for a compact table
        sum = Some(match sum {
            None => rows,
            Some(sum) => (sum + rows)?,
        });
    }
    let sum = sum.ok_or_else(|| candle_core::Error::msg("embed needs at least one table").bt())?;
    match norm {
        Some(norm) => Ok(norm.forward(&sum)?),
        None => Ok(sum),
    }
}

fn by_kernel(lookups: [(&Tensor, &Tensor); 3], norm: &LayerNorm) -> Result<Option<Tensor>> {
    let (tables, ids) = (lookups.map(|(table, _)| table), lookups.map(|(_, ids)| ids));
    #[cfg(feature = "cuda")]
    if norm.cuda_kernel_supports(&[tables[2]])
        && cuda::supports(&tables)
        && ids.iter().all(|ids| ids.device().is_cuda())
    {
        return Ok(Some(on_cuda(ids, tables, norm)?));
    }
    let f32_tables: Vec<&Tensor> =
        tables.into_iter().filter(|table| table.dtype() != DType::F16).collect();
    let Some(norm) = norm.cpu_kernel(&f32_tables) else { return Ok(None) };
    let on_cpu = |x: &&Tensor| x.device().is_cpu() && !x.track_op();
    if f32_tables.is_empty() || !tables.iter().all(on_cpu) {
        return Ok(None);
    }
    let op = CpuEmbed { tables: tables.map(Tensor::clone), norm: norm.clone() };
    let [a, b, c] = ids.map(Tensor::contiguous);
    Ok(Some(a?.apply_op3_no_bwd(&b?, &c?, &op)?))
}

/// Converts an f32 table on the CPU to f16 if the conversion is lossless, as for a checkpoint that
/// was stored in f16; otherwise returns the table unchanged.
///
/// This halves the memory of a table for [`embed`] and does not change its result.
///
/// # Errors
/// [`crate::Error::Candle`] if a tensor cannot be created.
pub fn compact_table(table: Tensor) -> Result<Tensor> {
    if !cpu::prefers_kernel(&[&table]) || !table.is_contiguous() {
        return Ok(table);
    }
    let halves = cpu::with_slice(&table, |values| {
        let mut halves: Vec<f16> = mha_kernels::zeros(values.len()).reinterpret_into();
        let is_exact = |(halves, values): (&mut [f16], &[f32])| {
            halves.convert_from_f32_slice(values);
            let mut widened = vec![0.0; values.len()];
            halves.convert_to_f32_slice(&mut widened);
            widened.iter().zip(values).fold(true, |exact, (a, b)| exact & (a == b))
        };
        let chunks = halves.par_chunks_mut(4096).zip(values.par_chunks(4096));
        chunks.all(is_exact).then_some(halves)
    })?;
    match halves {
        Some(halves) => Ok(Tensor::from_vec(halves, table.shape(), table.device())?),
        None => Ok(table),
    }
}

struct CpuEmbed {
    tables: [Tensor; 3],
    norm: CpuLayerNorm,
}

impl CustomOp3 for CpuEmbed {
    fn name(&self) -> &'static str {
        "embeddings"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        c: &CpuStorage,
        c_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let ids = [
            cpu::contiguous::<u32>(a, a_layout)?,
            cpu::contiguous(b, b_layout)?,
            cpu::contiguous(c, c_layout)?,
        ];
        if ids.iter().any(|other| other.len() != ids[0].len()) {
            candle_core::bail!("the ids of the three tables differ in shape");
        }
        let storages = self.tables.each_ref().map(Tensor::storage_and_layout);
        let mut lookups = Vec::with_capacity(3);
        for ((storage, layout), ids) in storages.iter().zip(ids) {
            let Storage::Cpu(storage) = &**storage else {
                candle_core::bail!("an embedding table is not on the CPU");
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
        let CpuLayerNorm { weight, bias, eps, isa } = &self.norm;
        let out = embed_layer_norm(*isa, lookups, weight, bias, *eps);
        let out = out.map_err(candle_core::Error::wrap)?;
        let shape = [a_layout.dims(), &[weight.len()]].concat();
        Ok((CpuStorage::F32(out), shape.into()))
    }
}

#[cfg(feature = "cuda")]
fn on_cuda(
    ids: [&Tensor; 3],
    [a, b, c]: [&Tensor; 3],
    norm: &LayerNorm,
) -> candle_core::Result<Tensor> {
    let e = a.dim(1)?;
    let [a_ids, b_ids, c_ids] = ids.map(Tensor::contiguous);
    cuda::apply3("embeddings", [&a_ids?, &b_ids?, &c_ids?], |a_ids, b_ids, c_ids| {
        let ids = [a_ids, b_ids, c_ids];
        let out = norm.with_cuda_parameters(|weight, bias, eps| {
            cuda::with_storage(a, |a| {
                cuda::with_storage(b, |b| {
                    cuda::with_storage(c, |c| {
                        cuda_kernels::embed_layer_norm(ids, [a, b, c], weight, bias, eps)
                    })
                })
            })
        });
        Ok((out?, [a_ids.1.dims(), &[e]].concat().into()))
    })
}
