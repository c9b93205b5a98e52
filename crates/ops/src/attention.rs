//! Scaled dot-product attention by a CPU or CUDA kernel.

#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::{ops::Deref, sync::Arc};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Shape, Storage, Tensor};
use mha_kernels::{Attention, DistanceBias, Isa, RelativePositions, Strided};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    attention_mask::{BroadcastTensor, CpuMask, KernelMask},
    cpu::{self, Element, strided},
    linear::attention_dtype,
};
use crate::{ComputeType, Result, widen};

/// How the scores of queries and keys are computed.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// The factor that multiplies the raw scores.
    pub scale: f64,
    /// Relative positions, whose scores are added to the raw scores.
    pub relative: Option<RelativeTerms<'a>>,
}

/// The projected relative positions of disentangled attention. The raw score of query i and key j
/// is `qᵢ·kⱼ + qᵢ·keys[h, r] + kⱼ·queries[h, r]`. The row r is `rows[R + d]`, where d is the
/// distance from the query to the key.
#[derive(Clone, Copy, Debug)]
pub struct RelativeTerms<'a> {
    /// `(H, rows, D)`; `None` omits the term.
    pub keys: Option<&'a Tensor>,
    /// `(H, rows, D)`; `None` omits the term.
    pub queries: Option<&'a Tensor>,
    /// The row of each distance.
    pub rows: &'a RelativeRows,
}

/// The row of each distance from −R to R in [`RelativeTerms`], `2·R + 1` numbers. Clones share what
/// the kernels compute from the rows.
#[derive(Clone, Debug)]
pub struct RelativeRows {
    rows: Arc<[u32]>,
    /// The rows on the first GPU that was used.
    #[cfg(feature = "cuda")]
    on_gpu: Arc<OnceLock<cuda_kernels::RelativeRows>>,
}

impl RelativeRows {
    /// The rows of the distances −R to R. Their number is odd.
    pub fn new(rows: Arc<[u32]>) -> Self {
        Self {
            rows,
            #[cfg(feature = "cuda")]
            on_gpu: Arc::default(),
        }
    }

    /// The rows on this device. Those on the first device that was used are stored, so that a CUDA
    /// graph can read them; those on any other device are copied at each call.
    #[cfg(feature = "cuda")]
    fn on(
        &self,
        device: &candle_core::CudaDevice,
    ) -> candle_core::Result<cuda_kernels::RelativeRows> {
        if let Some(rows) = self.on_gpu.get().filter(|rows| rows.are_on(device)) {
            return Ok(rows.clone());
        }
        let made = cuda_kernels::RelativeRows::new(device, self)?;
        self.on_gpu.set(made.clone()).ok(); // another device may have been used first
        Ok(made)
    }
}

impl Deref for RelativeRows {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.rows
    }
}

/// Scaled dot-product attention by a CPU or CUDA kernel. Returns `None` if no kernel supports these
/// tensors and this mask; the caller then uses candle's operations.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`; `v`: `(B, G, S, V)`, where G divides H; `key_sources`:
/// `(B, S)`, the batch index of `k` and `v` from which each key and value is read, `None` for those of
/// the same batch index; `mask`: for these dims; returns `(B, H, T, V)`
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
/// # Panics
/// If `key_sources` is not `(B, S)` numbers below B.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    key_sources: Option<&[u32]>,
    mask: &KernelMask,
    scoring: Scoring,
    compute_type: ComputeType,
) -> Result<Option<Tensor>> {
    let context = match on_cpu([q, k, v], key_sources, mask, scoring, compute_type)? {
        #[cfg(feature = "cuda")]
        None if key_sources.is_none() => on_cuda([q, k, v], mask, scoring)?,
        context => context,
    };
    context.map(|context| mask.parts().scale_heads(&context)).transpose()
}

/// Whether [`attention`] can read keys and values like `x` with `key_sources`: f32, f16 or bf16 on a CPU
/// with kernels, not tracked by autograd.
pub fn reads_key_sources(x: &Tensor) -> bool {
    let is_supported = matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16);
    is_supported && cpu::is_untracked(x.dtype(), x) && Isa::kernels_enabled()
}

/// The softmax weights of `heads` in f32, by the CPU kernel. f16 and bf16 inputs are converted to f32.
/// A query that yields NaN in [`attention`] has weights of NaN and, for hidden keys, 0 or NaN. Returns `None` if the kernel does not support these
/// tensors; the caller then uses candle's operations.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`, where G divides H; `key_sources` and `mask`: as for
/// [`attention`]; returns `(B, heads, T, S)`
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
/// # Panics
/// If a head is not below H, or if `key_sources` is not `(B, S)` numbers below B.
pub fn attention_weights(
    q: &Tensor,
    k: &Tensor,
    key_sources: Option<&[u32]>,
    mask: &KernelMask,
    scoring: Scoring,
    heads: &[usize],
) -> Result<Option<Tensor>> {
    if is_tracked(mask, scoring) || ![q, k].into_iter().all(|x| cpu::is_untracked(x.dtype(), x)) {
        return Ok(None);
    }
    let (q, k) = (&widen(q)?, &widen(k)?);
    if !cpu::prefers_kernel(&[q, k]) {
        return Ok(None);
    }
    let (q, k) = (with_dense_rows(q)?, with_dense_rows(k)?);
    let attention = CpuAttention::new(key_sources, mask, scoring, DType::F32)?;
    let weights = q.apply_op2_no_bwd(&k, &CpuWeights { attention, heads })?;
    Ok(Some(mask.parts().scale_chosen_heads(&weights, heads)?))
}

/// Whether autograd tracks a part of the mask or a relative position.
fn is_tracked(mask: &KernelMask, scoring: Scoring) -> bool {
    mask.parts().is_tracked() || scoring.relative.is_some_and(|r| r.is_tracked())
}

/// The tensor with a stride of 1 along its last dimension.
fn with_dense_rows(x: &Tensor) -> candle_core::Result<Tensor> {
    match x.stride()[3] {
        1 => Ok(x.clone()),
        _ => x.force_contiguous(), // `contiguous` ignores the strides of dimensions of size 1
    }
}

/// Attention by the CPU kernel, without the head mask. f16 and bf16 inputs are converted to f32 and
/// the output is rounded, unless all inputs are bf16 and `compute_type` is bf16 for this CPU.
fn on_cpu(
    qkv: [&Tensor; 3],
    key_sources: Option<&[u32]>,
    mask: &KernelMask,
    scoring: Scoring,
    compute_type: ComputeType,
) -> Result<Option<Tensor>> {
    let is_bf16 = attention_dtype(compute_type)? == DType::BF16
        && qkv.iter().all(|x| cpu::is_untracked(DType::BF16, x));
    if is_tracked(mask, scoring) || !qkv.iter().all(|x| cpu::is_untracked(x.dtype(), x)) {
        return Ok(None);
    }
    if !is_bf16 && !cpu::prefers_kernel(&qkv) {
        let [q, k, v] = qkv.map(widen);
        let widened = [&q?, &k?, &v?];
        if !cpu::prefers_kernel(&widened) {
            return Ok(None);
        }
        let context = on_cpu(widened, key_sources, mask, scoring, ComputeType::F32)?;
        return Ok(context.map(|context| context.to_dtype(qkv[0].dtype())).transpose()?);
    }
    let [q, k, v] = qkv.map(with_dense_rows);
    let (q, k, v) = (q?, k?, v?);
    // If a key is visible to some queries only, the kernel multiplies its value by a weight of 0
    // for the other queries, which gives NaN if the value is not finite.
    if !mask.cpu()?.hides_same_keys && !all_finite(&v)? {
        return Ok(None);
    }
    let attention = CpuAttention::new(key_sources, mask, scoring, q.dtype())?;
    let context = q.apply_op3_no_bwd(&k, &v, &attention)?; // (B, T, H, V)
    Ok(Some(context.transpose(1, 2)?))
}

/// Whether no value of a CPU tensor `(B, H, T, D)`, f32 or bf16, is NaN or infinite.
fn all_finite(x: &Tensor) -> candle_core::Result<bool> {
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        candle_core::bail!("v is not on the CPU: expected a CPU tensor")
    };
    Ok(match storage {
        CpuStorage::BF16(_) => strided(u16::elements(storage)?, layout)?.all_finite(),
        _ => strided(f32::elements(storage)?, layout)?.all_finite(),
    })
}

/// Attention by the CUDA kernel, without the head mask. It supports ragged sequences with and
/// without a prefix, causal mask and window, and with distance bias or relative positions, if B = 1,
/// and V = D is a multiple of 8 up to 128.
#[cfg(feature = "cuda")]
fn on_cuda(qkv: [&Tensor; 3], mask: &KernelMask, scoring: Scoring) -> Result<Option<Tensor>> {
    let [q, _k, v] = qkv;
    let parts = mask.parts();
    let supports_heads = |x: &&Tensor| cuda_kernels::supports_heads(x.dtype(), x.layout());
    let value_heads_match = q.dim(3)? == v.dim(3)?;
    let is_tracked = scoring.relative.is_some_and(|relative| relative.is_tracked());
    if (scoring.relative.is_some() && parts.distance_bias.is_some())
        || is_tracked
        || !parts.has_cuda_kernel()
        || !value_heads_match
        || !cuda::supports(&qkv)
        || !qkv.iter().all(supports_heads)
    {
        return Ok(None);
    }
    let Some(sequences) = &parts.sequences else { return Ok(None) };
    let candle_core::Device::Cuda(device) = q.device() else { return Ok(None) };
    let tiles = sequences.tiles(device, parts.first_query)?;
    let run = |bias: Option<cuda_kernels::TensorView>, relative: Option<cuda_kernels::Relative>| {
        let before = parts.window;
        let after = if parts.causal { Some(0) } else { parts.window };
        let positions = cuda_kernels::Positions { before, after, bias };
        cuda::apply3("attention of ragged sequences", qkv, |q, k, v| {
            cuda_kernels::attention(q, k, v, &tiles, positions, relative, scoring.scale as f32)
        })
    };
    let context = match (&parts.distance_bias, scoring.relative) {
        (Some(bias), _) => cuda::with_storage(bias, |bias| run(Some(bias), None))?,
        (None, None) => run(None, None)?,
        (None, Some(relative)) => {
            let on_gpu = |x: Option<&Tensor>| {
                let convert = |x: &Tensor| -> candle_core::Result<Tensor> {
                    let x = x.to_dtype(q.dtype())?;
                    let is_aligned = cuda_kernels::supports_relative(x.layout());
                    if is_aligned { Ok(x) } else { x.force_contiguous() }
                };
                x.map(convert).transpose()
            };
            let (keys, queries) = (on_gpu(relative.keys)?, on_gpu(relative.queries)?);
            let rows = relative.rows.on(device)?;
            cuda::with_optional_storage(keys.as_ref(), |keys| {
                cuda::with_optional_storage(queries.as_ref(), |queries| {
                    run(None, Some(cuda_kernels::Relative { keys, queries, rows: &rows }))
                })
            })?
        }
    }; // (1, N, H, D)
    Ok(Some(context.transpose(1, 2)?))
}

struct CpuAttention<'a> {
    key_sources: Option<&'a [u32]>,
    mask: &'a CpuMask,
    causal: bool,
    window: Option<usize>,
    relative: Option<RelativeTensors>,
    scale: f32,
    isa: Isa,
}

impl RelativeTerms<'_> {
    /// Whether autograd tracks a projection.
    fn is_tracked(&self) -> bool {
        [self.keys, self.queries].into_iter().flatten().any(Tensor::track_op)
    }
}

/// The tensors of [`RelativePositions`].
struct RelativeTensors {
    /// The keys and the queries, `(1, H, R, D)`.
    keys_and_queries: [Option<Tensor>; 2],
    rows: RelativeRows,
}

impl RelativeTensors {
    fn new(terms: RelativeTerms, dtype: DType) -> candle_core::Result<Self> {
        let convert = |x: Option<&Tensor>| -> candle_core::Result<Option<Tensor>> {
            let Some(x) = x else { return Ok(None) };
            let x = x.to_dtype(dtype)?.unsqueeze(0)?;
            Ok(Some(if x.stride()[3] == 1 { x } else { x.force_contiguous()? }))
        };
        let keys_and_queries = [convert(terms.keys)?, convert(terms.queries)?];
        Ok(Self { keys_and_queries, rows: terms.rows.clone() })
    }

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
                Storage::Cpu(storage) => Ok(Some(strided(T::elements(storage)?, layout)?)),
                _ => candle_core::bail!("relative positions: expected tensors on the CPU"),
            }
        }
        let [keys, queries] =
            self.keys_and_queries.each_ref().map(|x| x.as_ref().map(Tensor::storage_and_layout));
        let (keys, queries) = (view(&keys)?, view(&queries)?);
        Ok(f(RelativePositions { keys, queries, rows: &self.rows }))
    }
}

impl<'a> CpuAttention<'a> {
    /// Attention of inputs of this dtype.
    fn new(
        key_sources: Option<&'a [u32]>,
        mask: &'a KernelMask,
        scoring: Scoring,
        dtype: DType,
    ) -> Result<Self> {
        let relative = scoring.relative.map(|r| RelativeTensors::new(r, dtype));
        Ok(Self {
            key_sources,
            mask: mask.cpu()?,
            causal: mask.parts().causal,
            window: mask.parts().window,
            relative: relative.transpose()?,
            scale: scoring.scale as f32,
            isa: Isa::get()?,
        })
    }

    /// Calls `kernel` with the arguments of the attention.
    fn run<T: Element, R>(
        &self,
        [q, k, v]: [Strided<T>; 3],
        kernel: impl FnOnce(Isa, Attention<T>) -> R,
    ) -> candle_core::Result<R> {
        let h = q.dims[1];
        let CpuMask { sequences, visible, keep, bias, distance_bias, .. } = self.mask;
        let args = Attention {
            q,
            k,
            v,
            key_sources: self.key_sources,
            sequences,
            visible: visible.as_deref(),
            keep: keep.as_ref().map(BroadcastTensor::view),
            bias: bias.as_ref().map(BroadcastTensor::view),
            distance_bias: distance_bias
                .as_ref()
                .map(|data| DistanceBias { data, radius: data.len() / h.max(1) / 2 }),
            relative: None,
            causal: self.causal,
            window: self.window,
            scale: self.scale,
        };
        match &self.relative {
            None => Ok(kernel(self.isa, args)),
            Some(relative) => relative.with_views(|relative| {
                kernel(self.isa, Attention { relative: Some(relative), ..args })
            }),
        }
    }

    /// The output of `kernel`, `(B, T, H, V)`.
    fn context<T: Element>(
        &self,
        qkv: [(&CpuStorage, &Layout); 3],
        kernel: fn(Isa, Attention<T>) -> Vec<T>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let [q, k, v] = qkv.map(|(storage, layout)| strided(T::elements(storage)?, layout));
        let (q, k, v) = (q?, k?, v?);
        let ([b, h, t, _], value_d) = (q.dims, v.dims[3]);
        let out = self.run([q, k, v], kernel)?;
        Ok((T::into_storage(out), (b, t, h, value_d).into()))
    }
}

impl CustomOp3 for CpuAttention<'_> {
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
            CpuStorage::BF16(_) => self.context(all, mha_kernels::attention_bf16),
            _ => self.context(all, mha_kernels::attention_f32),
        }
    }
}

/// The weights of some heads.
struct CpuWeights<'a> {
    attention: CpuAttention<'a>,
    heads: &'a [usize],
}

impl CustomOp2 for CpuWeights<'_> {
    fn name(&self) -> &'static str {
        "attention weights"
    }

    /// Returns `(B, heads, T, S)`.
    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (q, k) = (strided(f32::elements(q)?, q_layout)?, strided(f32::elements(k)?, k_layout)?);
        let ([b, _, t, _], [_, g, s, _]) = (q.dims, k.dims);
        let no_values = Strided { data: &[], strides: [0; 3], dims: [b, g, s, 0] };
        let weights = self.attention.run([q, k, no_values], |isa, args| {
            mha_kernels::attention_weights_f32(isa, args, self.heads)
        })?;
        Ok((CpuStorage::F32(weights), (b, self.heads.len(), t, s).into()))
    }
}
