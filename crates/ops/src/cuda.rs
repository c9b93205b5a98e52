//! Access to candle tensors on a GPU, for the operations that call CUDA kernels.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, InplaceOp1,
    InplaceOp2, Layout, Module, Shape, Storage, Tensor,
};
use mha_kernels::Activation;
use mha_kernels_cuda::{self as kernels, TensorView};

use crate::Result;

/// Whether the tensors are suitable for the kernels: they have the same dtype, are on the same GPU
/// and are not tracked by autograd, and the kernels support the GPU.
pub fn supports(tensors: &[&Tensor]) -> bool {
    let have_same_dtype = tensors.iter().all(|x| x.dtype() == tensors[0].dtype());
    have_same_dtype && are_on_same_gpu(tensors)
}

/// [`supports`] without the condition on the dtypes.
fn are_on_same_gpu(tensors: &[&Tensor]) -> bool {
    let Device::Cuda(device) = tensors[0].device() else { return false };
    let is_suitable = |x: &&Tensor| x.device().same_device(tensors[0].device()) && !x.track_op();
    tensors.iter().all(is_suitable) && kernels::supports_device(device)
}

/// Makes `x` contiguous, with a start offset that is even, as kernels that read pairs require.
pub fn contiguous_pairs(x: &Tensor) -> candle_core::Result<Tensor> {
    let x = x.contiguous()?;
    match x.layout().start_offset().is_multiple_of(2) {
        true => Ok(x),
        false => x.copy(),
    }
}

/// Calls `read` with the storage and layout of a tensor on a GPU.
///
/// # Errors
/// candle's error if the tensor is on another device; the error of `read`.
pub fn with_storage<T>(
    x: &Tensor,
    read: impl FnOnce(TensorView) -> candle_core::Result<T>,
) -> candle_core::Result<T> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => read((storage, layout)),
        _ => candle_core::bail!(
            "CUDA kernels need tensors on a GPU, got {:?}",
            x.device().location()
        ),
    }
}

/// The output of a kernel.
type Output = candle_core::Result<(CudaStorage, Shape)>;

/// Runs a kernel on one tensor as a candle operation without gradient.
///
/// # Errors
/// The kernel's error; candle's error if the tensor is on another device.
pub fn apply1(
    name: &'static str,
    x: &Tensor,
    run: impl Fn(TensorView) -> Output,
) -> candle_core::Result<Tensor> {
    x.apply_op1_no_bwd(&Op { name, run })
}

/// [`apply1`] for a kernel of two tensors.
pub fn apply2(
    name: &'static str,
    [x, y]: [&Tensor; 2],
    run: impl Fn(TensorView, TensorView) -> Output,
) -> candle_core::Result<Tensor> {
    x.apply_op2_no_bwd(y, &Op { name, run })
}

/// [`apply1`] for a kernel of three tensors.
pub fn apply3(
    name: &'static str,
    [x, y, z]: [&Tensor; 3],
    run: impl Fn(TensorView, TensorView, TensorView) -> Output,
) -> candle_core::Result<Tensor> {
    x.apply_op3_no_bwd(y, z, &Op { name, run })
}

struct Op<F> {
    name: &'static str,
    run: F,
}

impl<F: Fn(TensorView) -> Output> CustomOp1 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!(
            "the CUDA kernel for {} needs a tensor on a GPU, got one on the CPU",
            self.name
        )
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_layout: &Layout) -> Output {
        (self.run)((x, x_layout))
    }
}

impl<F: Fn(TensorView, TensorView) -> Output> CustomOp2 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!(
            "the CUDA kernel for {} needs a tensor on a GPU, got one on the CPU",
            self.name
        )
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        y: &CudaStorage,
        y_layout: &Layout,
    ) -> Output {
        (self.run)((x, x_layout), (y, y_layout))
    }
}

impl<F: Fn(TensorView, TensorView, TensorView) -> Output> CustomOp3 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!(
            "the CUDA kernel for {} needs a tensor on a GPU, got one on the CPU",
            self.name
        )
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        y: &CudaStorage,
        y_layout: &Layout,
        z: &CudaStorage,
        z_layout: &Layout,
    ) -> Output {
        (self.run)((x, x_layout), (y, y_layout), (z, z_layout))
    }
}

/// `activation(x·Wᵀ + b)` by kernels; `None` if they do not support the tensors.
///
/// With a bias and no activation, cublasLt computes f16 and bf16 in one call if it supports the
/// layout. In all other cases candle computes the product, and a kernel applies the bias and the
/// activation in one pass. The activations of cublasLt are not used, because it has GELU in the tanh
/// form only.
pub fn linear(
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

/// `x·Wᵀ + b` for f16 or bf16 by cublasLt. `to` is the dtype of the output and of the bias. Returns
/// `None` if cublasLt does not support the tensors.
pub fn linear_to(
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
        }
    }
}

impl InplaceOp1 for Epilogue {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!(
            "the CUDA kernel for {} needs a tensor on a GPU, got one on the CPU",
            InplaceOp1::name(self)
        )
    }

    fn cuda_fwd(&self, y: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        kernels::epilogue(y, layout, None, self.code())
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
        candle_core::bail!(
            "the CUDA kernel for {} needs a tensor on a GPU, got one on the CPU",
            InplaceOp2::name(self)
        )
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<()> {
        kernels::epilogue(y, layout, Some((bias, bias_layout)), self.code())
    }
}
