//! The CPU kernel of LayerNorm and RMSNorm on tensors.

use candle_core::{Device, Tensor};
use mha_kernels::{Isa, RowNorm};

use crate::cpu;

/// Whether all inputs have the same shape `(.., E)`, for the `weight` `(E,)` of a norm.
pub(crate) fn fits(weight: &Tensor, inputs: &[&Tensor]) -> bool {
    let has_width = inputs[0].dims().last() == weight.dims().first();
    has_width && inputs.iter().all(|x| x.shape() == inputs[0].shape())
}

/// The norm of `x`, or of `x + y`: f32 tensors that fit the norm, on the CPU.
pub(crate) fn add_norm(
    isa: Isa,
    x: &Tensor,
    y: Option<&Tensor>,
    norm: RowNorm,
) -> candle_core::Result<Tensor> {
    let run = |x: &[f32], y: Option<&[f32]>| mha_kernels::add_norm(isa, x, y, norm);
    let out = cpu::with_slice(&x.contiguous()?, |x| match y {
        None => Ok(run(x, None)),
        Some(y) => cpu::with_slice(&y.contiguous()?, |y| run(x, Some(y))),
    })??;
    Tensor::from_vec(out, x.shape(), &Device::Cpu)
}

/// `x + y` and its norm, for f32 tensors that fit the norm, on the CPU.
pub(crate) fn add_norm_residual(
    isa: Isa,
    x: &Tensor,
    y: &Tensor,
    norm: RowNorm,
) -> candle_core::Result<(Tensor, Tensor)> {
    let (sum, out) = cpu::with_slice(&x.contiguous()?, |x| {
        cpu::with_slice(&y.contiguous()?, |y| mha_kernels::add_norm_residual(isa, x, y, norm))
    })??;
    let tensor = |values| Tensor::from_vec(values, x.shape(), &Device::Cpu);
    Ok((tensor(sum)?, tensor(out)?))
}
