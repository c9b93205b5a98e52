//! Scaled dot-product attention by a CPU or CUDA kernel.

use std::{ops::Deref, sync::Arc};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Storage, Tensor};
use mha_kernels::{Attention, DistanceBias, Isa, RelativePositions, Strided};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

use crate::{
    AttentionMask, ComputeType, DisentangledPositions, Result,
    mask::{BroadcastTensor, KernelMask},
    sdpa::Scoring,
    shape::check_qkv,
};
use ops::cpu::{self, Element};
#[cfg(feature = "cuda")]
use ops::cuda;

/// Scaled dot-product attention by a CPU or CUDA kernel. Returns `None` if no kernel supports these
/// tensors and this mask; the caller then uses candle's operations.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`; `v`: `(B, G, S, V)`; returns `(B, H, T, V)`
/// # Errors
/// The errors of [`check_qkv`] and [`AttentionMask::for_kernel`]; [`ops::Error::Isa`] if
/// `MHA_ISA` names instructions that this machine lacks.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scoring: Scoring,
    compute_type: ComputeType,
) -> Result<Option<Tensor>> {
    if let Some(context) = on_cpu(q, k, v, mask, scoring, compute_type)? {
        return Ok(Some(context));
    }
    #[cfg(feature = "cuda")]
    if scoring.positions.is_none()
        && let Some(context) = on_cuda(q, k, v, mask, scoring.scale as f32)?
    {
        return Ok(Some(context));
    }
    Ok(None)
}

fn on_cpu(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scoring: Scoring,
    compute_type: ComputeType,
) -> Result<Option<Tensor>> {
    let Scoring { scale, positions, .. } = scoring;
    let all = [q, k, v];
    let is_bf16 = ops::attention_dtype(compute_type)? == DType::BF16
        && all.iter().all(|x| cpu::is_untracked(DType::BF16, x));
    let is_tracked = mask.is_tracked() || positions.is_some_and(DisentangledPositions::is_tracked);
    if !(is_bf16 || cpu::prefers_kernel(&all)) || is_tracked {
        return Ok(None);
    }
    let dims = check_qkv(q, k, v)?;
    let kernel_mask = mask.for_kernel(dims, q.device())?;
    let with_dense_rows = |x: &Tensor| match x.stride()[3] {
        1 => Ok(x.clone()),
        _ => x.force_contiguous(), // `contiguous` ignores the strides of dimensions of size 1
    };
    let [q, k, v] = [with_dense_rows(q)?, with_dense_rows(k)?, with_dense_rows(v)?];
    // If a key is visible to some queries only, the kernel multiplies its value by a weight of 0
    // for the other queries, which gives NaN if the value is not finite.
    let distance_bias = kernel_mask.distance_bias.iter().flat_map(|(biases, _)| biases);
    let hides_same_keys = !mask.has_per_query_part()
        && distance_bias.into_iter().all(|bias| *bias > f32::NEG_INFINITY);
    if !hides_same_keys && !all_finite(&v)? {
        return Ok(None);
    }
    let relative = match positions {
        None => None,
        Some(positions) => Some(RelativeTensors {
            keys_and_queries: positions.for_kernel(q.dtype())?,
            rows: positions.rows().clone(),
            offset: mask.first_query(),
        }),
    };
    let op = CpuAttention {
        mask: kernel_mask,
        relative,
        scale: scale as f32,
        isa: Isa::get().map_err(ops::Error::from)?,
    };
    let context = q.apply_op3_no_bwd(&k, &v, &op)?; // (B, T, H, V)
    Ok(Some(mask.scale_heads(context.transpose(1, 2)?)?))
}

/// Whether no value of a CPU tensor `(B, H, T, D)`, f32 or bf16, is NaN or infinite.
fn all_finite(x: &Tensor) -> candle_core::Result<bool> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("v is not on the CPU: expected a CPU tensor")
    };
    Ok(match storage {
        CpuStorage::BF16(_) => strided::<u16>((storage, layout))?.all_finite(),
        _ => strided::<f32>((storage, layout))?.all_finite(),
    })
}

/// Attention by the CUDA kernel. It supports packed sequences without other masks if B = 1, T = S,
/// and V = D is 32 or 64.
#[cfg(feature = "cuda")]
fn on_cuda(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: f32,
) -> Result<Option<Tensor>> {
    let [_b, _h, t, s] = check_qkv(q, k, v)?;
    let all = [q, k, v];
    let supports_heads = |x: &&Tensor| cuda_kernels::supports_heads(x.dtype(), x.layout());
    let value_heads_match = q.dim(3)? == v.dim(3)? && k.dim(1)? == v.dim(1)?;
    if t != s || !value_heads_match || !cuda::supports(&all) || !all.iter().all(supports_heads) {
        return Ok(None);
    }
    let Some(offsets) = mask.blocks(t)? else { return Ok(None) };
    let candle_core::Device::Cuda(device) = q.device() else { return Ok(None) };
    let tiles = mask.cuda_tiles(device, offsets)?;
    let context = cuda::apply3("attention of packed sequences", all, |q, k, v| {
        cuda_kernels::attention(q, k, v, &tiles, cuda_kernels::Positions::default(), scale)
    })?; // (1, N, H, D)
    Ok(Some(context.transpose(1, 2)?))
}

struct CpuAttention {
    mask: KernelMask,
    relative: Option<RelativeTensors>,
    scale: f32,
    isa: Isa,
}

/// The tensors of [`RelativePositions`].
struct RelativeTensors {
    /// The keys and the queries, `(1, H, R, D)`.
    keys_and_queries: [Option<Tensor>; 2],
    rows: Arc<[u32]>,
    offset: usize,
}

impl RelativeTensors {
    /// Calls `f` with the elements of the tensors.
    fn with_views<T: Element, R>(
        &self,
        f: impl FnOnce(RelativePositions<T>) -> R,
    ) -> candle_core::Result<R> {
        fn view<'a, T: Element>(
            x: &'a Option<(impl Deref<Target = Storage>, &Layout)>,
        ) -> candle_core::Result<Option<Strided<'a, T>>> {
            let Some((storage, layout)) = x else { return Ok(None) };
            match &**storage {
                Storage::Cpu(storage) => Ok(Some(strided((storage, layout))?)),
                _ => candle_core::bail!("relative positions: expected tensors on the CPU"),
            }
        }
        let [keys, queries] =
            self.keys_and_queries.each_ref().map(|x| x.as_ref().map(Tensor::storage_and_layout));
        let (keys, queries) = (view(&keys)?, view(&queries)?);
        let Self { rows, offset, .. } = self;
        Ok(f(RelativePositions { keys, queries, rows, offset: *offset }))
    }
}

impl CpuAttention {
    /// Returns `(B, T, H, V)`.
    fn run<T: Element>(
        &self,
        [q, k, v]: [(&CpuStorage, &Layout); 3],
        kernel: fn(Isa, Attention<T>) -> Vec<T>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (q, k, v) = (strided::<T>(q)?, strided(k)?, strided(v)?);
        let ([b, h, t, _], value_d) = (q.dims, v.dims[3]);
        let KernelMask { sequences, visible, keep, bias, distance_bias, causal, window } =
            &self.mask;
        let args = Attention {
            q,
            k,
            v,
            sequences,
            visible: visible.as_deref(),
            keep: keep.as_ref().map(BroadcastTensor::view),
            bias: bias.as_ref().map(BroadcastTensor::view),
            distance_bias: distance_bias.as_ref().map(|(data, radius)| DistanceBias {
                data,
                radius: *radius,
                offset: causal.unwrap_or(0),
            }),
            relative: None,
            causal: *causal,
            window: *window,
            scale: self.scale,
        };
        let out = match &self.relative {
            None => kernel(self.isa, args),
            Some(relative) => relative.with_views(|relative| {
                kernel(self.isa, Attention { relative: Some(relative), ..args })
            })?,
        };
        Ok((T::into_storage(out), (b, t, h, value_d).into()))
    }
}

impl CustomOp3 for CpuAttention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let all = [(q, q_layout), (k, k_layout), (v, v_layout)];
        match q {
            CpuStorage::BF16(_) => self.run(all, mha_kernels::attention_bf16),
            _ => self.run(all, mha_kernels::attention_f32),
        }
    }
}

fn strided<'a, T: Element>(
    (storage, layout): (&'a CpuStorage, &Layout),
) -> candle_core::Result<Strided<'a, T>> {
    let elements = T::elements(storage)?;
    // The offset may exceed the length of an empty storage.
    let data = &elements[layout.start_offset().min(elements.len())..];
    match (layout.stride(), layout.dims()) {
        (&[batch, head, row, 1], &[b, h, t, d]) => {
            Ok(Strided { data, strides: [batch, head, row], dims: [b, h, t, d] })
        }
        _ => candle_core::bail!(
            "the attention kernel needs (B, H, T, D) with stride 1 along D, got {layout:?}"
        ),
    }
}
