//! The CPU kernels as operations on candle tensors: f32, beside maps of less also bf16, and nothing
//! that autograd follows. Whatever else comes goes through candle's own operations.

use std::sync::Arc;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, DType, Layout, Shape, Storage, Tensor, WithDType,
};
use half::{bf16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};
use mha_kernels::{
    Activation, Attention, ComputeType as Format, Isa, LinearMap, PackedLinear, Rows, Strided,
};

use crate::{
    AttentionMask, Result,
    mask::{ForKernel, Strides, all_finite},
    sdpa::check,
};

/// Whether the kernels may compute from these, and are worth it on this machine.
pub fn takes(tensors: &[&Tensor]) -> bool {
    is_worth_it() && fits(tensors)
}

/// Whether the kernels may compute from these.
pub(crate) fn fits(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|x| holds(DType::F32, x))
}

fn holds(dtype: DType, x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == dtype && !x.track_op()
}

/// Whether a packed map of this format may compute from it.
pub(crate) fn takes_input(format: Format, x: &Tensor) -> bool {
    holds(DType::F32, x) || format != Format::F32 && holds(DType::BF16, x)
}

/// What stays within a module of packed maps of this format is held in: what attention multiplies.
pub(crate) fn dtype_inside(format: Format) -> Result<DType> {
    Ok(match format.for_attention(Isa::get()?) {
        Format::Bf16 => DType::BF16,
        Format::F32 | Format::Int8 => DType::F32,
    })
}

/// Whether the kernels are faster than candle's own operations on this machine.
pub(crate) fn is_worth_it() -> bool {
    Isa::kernels_enabled()
}

/// What `f` makes of the numbers of a contiguous tensor that the kernels [take](takes).
///
/// # Errors
/// candle's, if it is another one.
pub fn with_numbers<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(f(contiguous(storage, layout)?)),
        _ => candle_core::bail!("kernels take tensors on the CPU, got {:?}", x.device()),
    }
}

/// The numbers of a contiguous tensor's storage.
///
/// # Errors
/// candle's, if it is of another dtype or not contiguous.
pub fn contiguous<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a [T]> {
    dense(storage.as_slice()?, layout)
}

fn dense<'a, T>(numbers: &'a [T], layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&numbers[start..end]),
        None => candle_core::bail!("kernels take contiguous tensors, got {layout:?}"),
    }
}

/// Weights of one input, their products side by side, and what is then applied.
pub(crate) type Map = (Vec<Arc<PackedLinear>>, Activation);

/// An element type of candle tensors for which the kernels have entry points.
trait Stored: Copy + 'static {
    fn of(storage: &CpuStorage) -> candle_core::Result<&[Self]>;
    fn storage(numbers: Vec<Self>) -> CpuStorage;
    fn rows(numbers: &[Self]) -> Rows<'_>;
    fn chain(isa: Isa, x: Rows, maps: &[LinearMap]) -> Vec<Self>;
    fn attention(isa: Isa, args: Attention<Self>) -> Vec<Self>;
}

impl Stored for f32 {
    fn of(storage: &CpuStorage) -> candle_core::Result<&[f32]> {
        storage.as_slice()
    }

    fn storage(numbers: Vec<f32>) -> CpuStorage {
        CpuStorage::F32(numbers)
    }

    fn rows(numbers: &[f32]) -> Rows<'_> {
        Rows::F32(numbers)
    }

    fn chain(isa: Isa, x: Rows, maps: &[LinearMap]) -> Vec<f32> {
        mha_kernels::chain_f32(isa, x, maps)
    }

    fn attention(isa: Isa, args: Attention<f32>) -> Vec<f32> {
        mha_kernels::attention_f32(isa, args)
    }
}

impl Stored for u16 {
    fn of(storage: &CpuStorage) -> candle_core::Result<&[u16]> {
        Ok(storage.as_slice::<bf16>()?.reinterpret_cast())
    }

    fn storage(numbers: Vec<u16>) -> CpuStorage {
        CpuStorage::BF16(numbers.reinterpret_into())
    }

    fn rows(numbers: &[u16]) -> Rows<'_> {
        Rows::Bf16(numbers)
    }

    fn chain(isa: Isa, x: Rows, maps: &[LinearMap]) -> Vec<u16> {
        mha_kernels::chain_bf16(isa, x, maps)
    }

    fn attention(isa: Isa, args: Attention<u16>) -> Vec<u16> {
        mha_kernels::attention_bf16(isa, args)
    }
}

/// `activation(x·Wᵀ + b)`, one map after another, to f32 or bf16.
pub(crate) fn linear(x: &Tensor, maps: Vec<Map>, to: DType) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1_no_bwd(&Linear { maps, to, isa: Isa::get()? })?)
}

struct Linear {
    maps: Vec<Map>,
    to: DType,
    isa: Isa,
}

impl Linear {
    fn run<T: Stored, U: Stored>(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        maps: &[LinearMap],
    ) -> candle_core::Result<CpuStorage> {
        let x = T::rows(dense(T::of(x)?, layout)?);
        Ok(U::storage(U::chain(self.isa, x, maps)))
    }
}

impl CustomOp1 for Linear {
    fn name(&self) -> &'static str {
        "packed linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let weights: Vec<Vec<&PackedLinear>> = self
            .maps
            .iter()
            .map(|(weights, _)| weights.iter().map(Arc::as_ref).collect())
            .collect();
        let maps: Vec<LinearMap> = weights
            .iter()
            .zip(&self.maps)
            .map(|(weights, (_, activation))| LinearMap { weights, activation: *activation })
            .collect();
        let mut dims = layout.dims().to_vec();
        let input = weights[0][0].input();
        let Some(last) = dims.last_mut().filter(|last| **last == input) else {
            candle_core::bail!("a linear map of {input} cannot take {:?}", layout.dims());
        };
        *last = weights.last().into_iter().flatten().map(|w| w.out()).sum();
        let y = match (x, self.to) {
            (CpuStorage::BF16(_), DType::BF16) => self.run::<u16, u16>(x, layout, &maps),
            (CpuStorage::BF16(_), _) => self.run::<u16, f32>(x, layout, &maps),
            (_, DType::BF16) => self.run::<f32, u16>(x, layout, &maps),
            _ => self.run::<f32, f32>(x, layout, &maps),
        };
        Ok((y?, dims.into()))
    }
}

/// `(B, H, T, V)`, if the kernel can.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: Option<f64>,
    format: Format,
) -> Result<Option<Tensor>> {
    let in_bf16 = dtype_inside(format)? == DType::BF16
        && [q, k, v].into_iter().all(|x| holds(DType::BF16, x));
    if !(in_bf16 || takes(&[q, k, v])) || mask.is_trained() {
        return Ok(None);
    }
    let dims = check(q, k, v)?;
    let kernel_mask = mask.for_kernel(dims, q.device())?;
    if !mask.is_of_keys() && !all_finite(v)? {
        return Ok(None); // some queries may see what others may not
    }
    let scale = scale.unwrap_or(1.0 / (q.dim(3)? as f64).sqrt()) as f32;
    let isa = Isa::get()?;
    let dense_rows = |x: &Tensor| match x.stride()[3] {
        1 => Ok(x.clone()),
        _ => x.contiguous(),
    };
    let op = Attend { mask: kernel_mask, scale, isa };
    let context = dense_rows(q)?.apply_op3_no_bwd(&dense_rows(k)?, &dense_rows(v)?, &op)?; // (B, T, H, V)
    Ok(Some(mask.scale_heads(context.transpose(1, 2)?)?))
}

struct Attend {
    mask: ForKernel,
    scale: f32,
    isa: Isa,
}

impl Attend {
    /// `(B, T, H, V)`
    fn run<T: Stored>(
        &self,
        [q, k, v]: [(&CpuStorage, &Layout); 3],
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (q, k, v) = (strided::<T>(q)?, strided(k)?, strided(v)?);
        let ([b, h, t, _], value_d) = (q.dims, v.dims[3]);
        let ForKernel { sequences, visible, keep, bias, causal } = &self.mask;
        let args = Attention {
            q,
            k,
            v,
            sequences,
            visible: visible.as_deref(),
            keep: keep.as_ref().map(Strides::view),
            bias: bias.as_ref().map(Strides::view),
            causal: *causal,
            scale: self.scale,
        };
        let out = T::attention(self.isa, args);
        Ok((T::storage(out), (b, t, h, value_d).into()))
    }
}

impl CustomOp3 for Attend {
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
            CpuStorage::BF16(_) => self.run::<u16>(all),
            _ => self.run::<f32>(all),
        }
    }
}

fn strided<'a, T: Stored>(
    (storage, layout): (&'a CpuStorage, &Layout),
) -> candle_core::Result<Strided<'a, T>> {
    let data = &T::of(storage)?[layout.start_offset()..];
    match (layout.stride(), layout.dims()) {
        (&[of_b, of_h, of_t, 1], &[b, h, t, d]) => {
            Ok(Strided { data, strides: [of_b, of_h, of_t], dims: [b, h, t, d] })
        }
        _ => candle_core::bail!("attention takes (B, H, T, D) with dense D, got {layout:?}"),
    }
}
