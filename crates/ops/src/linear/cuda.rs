//! Linear maps by candle's and cublasLt's matrix products and the CUDA kernel for bias and activation.

use candle_core::{CpuStorage, CudaStorage, DType, InplaceOp1, InplaceOp2, Layout, Module, Tensor};
use mha_kernels::Activation;
use mha_kernels_cuda as kernels;

use crate::{
    Result,
    cuda::{
        apply2, are_on_same_gpu, contiguous_pairs, needs_gpu, supports, with_optional_storage,
        with_storage,
    },
};

/// `activation(x·Wᵀ + b)` by kernels; `None` if they do not support the tensors.
///
/// With a bias and no activation, cublasLt computes f16 and bf16 in one call if it supports the
/// layout. In all other cases candle computes the product, and a kernel applies the bias and the
/// activation in one pass. The activations of cublasLt are not used, because it has GELU in the tanh
/// form only.
pub(super) fn linear(
    linear: &candle_nn::Linear,
    x: &Tensor,
    activation: Activation,
) -> Result<Option<Tensor>> {
    let (weight, bias) = (linear.weight(), linear.bias());
    if activation == Activation::None
        && bias.is_some()
        && let Some(y) = linear_to(x.dtype(), x, weight, bias)?
    {
        return Ok(Some(y));
    }
    let tensors: Vec<&Tensor> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    if !supports(&tensors) || !kernels::supports_even_rows(x.dtype(), weight.dim(0)?) {
        return Ok(None);
    }
    let y = candle_nn::Linear::new(weight.clone(), None).forward(x)?.contiguous()?;
    let op = Epilogue(activation);
    match bias {
        Some(bias) => y.inplace_op2(&contiguous_pairs(bias)?, &op)?,
        None if activation == Activation::None => {}
        None => y.inplace_op1(&op)?,
    }
    Ok(Some(y))
}

/// `activation(gate(x)) ⊙ factor(x)` by two products and a kernel for the biases, the activation and
/// the product of both; `None` if the kernel does not support the tensors.
pub(super) fn gated(
    gate: &candle_nn::Linear,
    factor: &candle_nn::Linear,
    x: &Tensor,
    activation: Activation,
) -> Result<Option<Tensor>> {
    let (gate_bias, factor_bias) = (gate.bias(), factor.bias());
    let tensors = [Some(x), Some(gate.weight()), Some(factor.weight()), gate_bias, factor_bias];
    let tensors: Vec<&Tensor> = tensors.into_iter().flatten().collect();
    let (dims, width) = (gate.weight().dims(), gate.weight().dim(0)?);
    if !supports(&tensors)
        || !(2..=4).contains(&x.rank())
        || x.elem_count() == 0
        || x.dims().last() != dims.last()
        || factor.weight().dims() != dims
        || !kernels::supports_even_rows(x.dtype(), width)
    {
        return Ok(None);
    }
    let x = x.contiguous()?;
    let product = |map: &candle_nn::Linear| {
        candle_nn::Linear::new(map.weight().clone(), None).forward(&x)?.contiguous()
    };
    let (y, factor) = (product(gate)?, product(factor)?);
    let bias = gate_bias.map(contiguous_pairs).transpose()?;
    let factor_bias = factor_bias.map(contiguous_pairs).transpose()?;
    y.inplace_op2(&factor, &Gate { activation: Epilogue(activation), bias, factor_bias })?;
    Ok(Some(y))
}

/// `x·Wᵀ + b` for f16 or bf16 by cublasLt. `to` is the dtype of the output and of the bias. Returns
/// `None` if cublasLt does not support the tensors.
pub(super) fn linear_to(
    to: DType,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let is_half_precision = matches!(x.dtype(), DType::F16 | DType::BF16);
    if !is_half_precision || x.dtype() != weight.dtype() || bias.is_some_and(|b| b.dtype() != to) {
        return Ok(None);
    }
    let tensors: Vec<&Tensor> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    let x = x.contiguous()?;
    if !are_on_same_gpu(&tensors)
        || !kernels::supports_linear(x.dtype(), x.layout(), weight.layout())
    {
        return Ok(None);
    }
    let bias = bias.map(contiguous_pairs).transpose()?;
    let y = apply2("linear map", [&x, weight], |x, weight| match &bias {
        None => kernels::linear(x, weight, None, to),
        Some(bias) => with_storage(bias, |bias| kernels::linear(x, weight, Some(bias), to)),
    })?;
    Ok(Some(y))
}

struct Epilogue(Activation);

impl Epilogue {
    /// The activation's code in `epilogue.cu`.
    fn code(&self) -> i32 {
        match self.0 {
            Activation::None => 0,
            Activation::Gelu => 1,
            Activation::GeluTanh => 2,
            Activation::Relu => 3,
            Activation::Silu => 4,
            Activation::Tanh => 5,
            Activation::QuickGelu => 6,
            Activation::Mish => 7,
            Activation::Sigmoid => 8,
        }
    }
}

impl InplaceOp1 for Epilogue {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        needs_gpu(InplaceOp1::name(self))
    }

    fn cuda_fwd(&self, y: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        kernels::epilogue(y, layout, None, None, self.code())
    }
}

impl InplaceOp2 for Epilogue {
    fn name(&self) -> &'static str {
        "bias and activation"
    }

    fn cpu_fwd(
        &self,
        _: &mut CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<()> {
        needs_gpu(InplaceOp2::name(self))
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<()> {
        kernels::epilogue(y, layout, Some((bias, bias_layout)), None, self.code())
    }
}

struct Gate {
    activation: Epilogue,
    bias: Option<Tensor>,
    factor_bias: Option<Tensor>,
}

impl InplaceOp2 for Gate {
    fn name(&self) -> &'static str {
        "gated activation"
    }

    fn cpu_fwd(
        &self,
        _: &mut CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<()> {
        needs_gpu(self.name())
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        factor: &CudaStorage,
        factor_layout: &Layout,
    ) -> candle_core::Result<()> {
        with_optional_storage(self.bias.as_ref(), |bias| {
            with_optional_storage(self.factor_bias.as_ref(), |factor_bias| {
                let factor = Some(((factor, factor_layout), factor_bias));
                kernels::epilogue(y, layout, bias, factor, self.activation.code())
            })
        })
    }
}
