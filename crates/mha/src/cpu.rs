//! The CPU kernels as operations on candle tensors: f32, and nothing that autograd follows.
//! Whatever else comes goes through candle's own operations.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp3, DType, Layout, Shape, Tensor, WithDType};
use mha_kernels::{Activation, Attention, Format, Isa, LinearMap, PackedLinear, Strided};

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
    tensors.iter().all(|x| x.device().is_cpu() && x.dtype() == DType::F32 && !x.track_op())
}

/// Whether the kernels are faster than candle's own operations on this machine.
pub(crate) fn is_worth_it() -> bool {
    Isa::is_worth_it()
}

/// The numbers of a contiguous tensor's storage.
///
/// # Errors
/// candle's, if it is of another dtype or not contiguous.
pub fn contiguous<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("kernels take contiguous tensors, got {layout:?}"),
    }
}

/// Weights of one input, their products side by side, and what is then applied.
pub(crate) type Map = (Vec<Arc<PackedLinear>>, Activation);

/// `activation(x·Wᵀ + b)`, one map after another.
pub(crate) fn linear(x: &Tensor, maps: Vec<Map>) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1_no_bwd(&Linear { maps, isa: Isa::get()? })?)
}

struct Linear {
    maps: Vec<Map>,
    isa: Isa,
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
        let y = mha_kernels::chain(self.isa, contiguous(x, layout)?, &maps);
        Ok((CpuStorage::F32(y), dims.into()))
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
    if !takes(&[q, k, v]) || mask.is_trained() {
        return Ok(None);
    }
    let dims = check(q, k, v)?;
    let kernel_mask = mask.for_kernel(dims, q.device())?;
    if !mask.is_of_keys() && !all_finite(v)? {
        return Ok(None); // some queries may see what others may not
    }
    let scale = scale.unwrap_or(1.0 / (q.dim(3)? as f64).sqrt()) as f32;
    let isa = Isa::get()?;
    let dense = |x: &Tensor| match x.stride()[3] {
        1 => Ok(x.clone()),
        _ => x.contiguous(),
    };
    let op = Attend { mask: kernel_mask, scale, format: format.of_attention(isa), isa };
    let context = dense(q)?.apply_op3_no_bwd(&dense(k)?, &dense(v)?, &op)?; // (B, T, H, V)
    Ok(Some(mask.scale_heads(context.transpose(1, 2)?)?))
}

struct Attend {
    mask: ForKernel,
    scale: f32,
    format: Format,
    isa: Isa,
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
        let (q, k, v) = (strided(q, q_layout)?, strided(k, k_layout)?, strided(v, v_layout)?);
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
            format: self.format,
        };
        let out = mha_kernels::attention(self.isa, args);
        Ok((CpuStorage::F32(out), (b, t, h, value_d).into()))
    }
}

fn strided<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<Strided<'a>> {
    let data = &storage.as_slice::<f32>()?[layout.start_offset()..];
    match (layout.stride(), layout.dims()) {
        (&[of_b, of_h, of_t, 1], &[b, h, t, d]) => {
            Ok(Strided { data, strides: [of_b, of_h, of_t], dims: [b, h, t, d] })
        }
        _ => candle_core::bail!("attention takes (B, H, T, D) with dense D, got {layout:?}"),
    }
}
