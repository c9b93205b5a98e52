//! The CUDA kernels as operations on candle tensors: nothing that autograd follows. Whatever else
//! comes goes through candle's own operations.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, InplaceOp1,
    InplaceOp2, Layout, Module, Shape, Storage, Tensor,
};
use mha_kernels::Activation;
pub use mha_kernels_cuda::keep_memory;
use mha_kernels_cuda::{self as kernels, Part};

use crate::{AttentionMask, Result, sdpa::check};

/// Whether the kernels may compute from these: of one dtype, on one GPU that they are made for.
pub fn takes(tensors: &[&Tensor]) -> bool {
    let fits = |x: &&Tensor| x.dtype() == tensors[0].dtype();
    tensors.iter().all(fits) && are_here(tensors)
}

/// Whether the kernels may compute from these, but for their dtypes.
fn are_here(tensors: &[&Tensor]) -> bool {
    let Device::Cuda(device) = tensors[0].device() else { return false };
    let here = |x: &&Tensor| x.device().same_device(tensors[0].device()) && !x.track_op();
    tensors.iter().all(here) && kernels::works_on(device)
}

/// The storage of a tensor that [`takes`] takes, and what of it the tensor is.
///
/// # Errors
/// candle's, if it is elsewhere.
pub fn with_storage<T>(
    x: &Tensor,
    read: impl FnOnce(Part) -> candle_core::Result<T>,
) -> candle_core::Result<T> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => read((storage, layout)),
        _ => candle_core::bail!("kernels take tensors on a GPU, got {:?}", x.device().location()),
    }
}

/// What a kernel makes of tensors.
type Made = candle_core::Result<(CudaStorage, Shape)>;

/// A kernel of one tensor as candle's operation, which no gradient follows.
///
/// # Errors
/// The kernel's; candle's, if the tensor is on a CPU.
pub fn apply1(
    name: &'static str,
    x: &Tensor,
    run: impl Fn(Part) -> Made,
) -> candle_core::Result<Tensor> {
    x.apply_op1_no_bwd(&Op { name, run })
}

/// [`apply1`] of two.
///
/// # Errors
/// as there.
pub fn apply2(
    name: &'static str,
    [x, y]: [&Tensor; 2],
    run: impl Fn(Part, Part) -> Made,
) -> candle_core::Result<Tensor> {
    x.apply_op2_no_bwd(y, &Op { name, run })
}

/// [`apply1`] of three.
///
/// # Errors
/// as there.
pub fn apply3(
    name: &'static str,
    [x, y, z]: [&Tensor; 3],
    run: impl Fn(Part, Part, Part) -> Made,
) -> candle_core::Result<Tensor> {
    x.apply_op3_no_bwd(y, z, &Op { name, run })
}

struct Op<F> {
    name: &'static str,
    run: F,
}

impl<F: Fn(Part) -> Made> CustomOp1 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!("{} of a GPU's kernel on a CPU", self.name)
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_layout: &Layout) -> Made {
        (self.run)((x, x_layout))
    }
}

impl<F: Fn(Part, Part) -> Made> CustomOp2 for Op<F> {
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
        candle_core::bail!("{} of a GPU's kernel on a CPU", self.name)
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        y: &CudaStorage,
        y_layout: &Layout,
    ) -> Made {
        (self.run)((x, x_layout), (y, y_layout))
    }
}

impl<F: Fn(Part, Part, Part) -> Made> CustomOp3 for Op<F> {
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
        candle_core::bail!("{} of a GPU's kernel on a CPU", self.name)
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        y: &CudaStorage,
        y_layout: &Layout,
        z: &CudaStorage,
        z_layout: &Layout,
    ) -> Made {
        (self.run)((x, x_layout), (y, y_layout), (z, z_layout))
    }
}

/// `activation(x·Wᵀ + b)`, if the kernels can: cublasLt's product, which has no exact activation, or
/// candle's and the rest in one pass.
pub(crate) fn linear(
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
    if !takes(&tensors) || !kernels::takes_pairs(x.dtype(), weight.dim(0)?) {
        return Ok(None);
    }
    let y = candle_nn::Linear::new(weight.clone(), None).forward(x)?.contiguous()?;
    let op = Epilogue(activation);
    match bias {
        Some(bias) => y.inplace_op2(&bias.contiguous()?, &op)?,
        None if activation == Activation::None => {}
        None => y.inplace_op1(&op)?,
    }
    Ok(Some(y))
}

/// `x·Wᵀ + b` of 16 bits, to these or to f32, the dtype of the bias, if cublasLt can.
pub(crate) fn linear_to(
    to: DType,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let sixteen_bits = matches!(x.dtype(), DType::F16 | DType::BF16);
    if !sixteen_bits || x.dtype() != weight.dtype() || bias.is_some_and(|b| b.dtype() != to) {
        return Ok(None);
    }
    let tensors: Vec<&Tensor> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    let x = x.contiguous()?;
    if !are_here(&tensors) || !kernels::takes_linear(x.dtype(), x.layout(), weight.layout()) {
        return Ok(None);
    }
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let y = apply2("linear map", [&x, weight], |x, weight| match &bias {
        None => kernels::linear(x, weight, None, to),
        Some(bias) => with_storage(bias, |bias| kernels::linear(x, weight, Some(bias), to)),
    })?;
    Ok(Some(y))
}

struct Epilogue(Activation);

impl Epilogue {
    /// As the kernel counts them.
    fn number(&self) -> i32 {
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
        candle_core::bail!("{} of a GPU's kernel on a CPU", InplaceOp1::name(self))
    }

    fn cuda_fwd(&self, y: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        kernels::epilogue(y, layout, None, self.number())
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
        candle_core::bail!("{} of a GPU's kernel on a CPU", InplaceOp2::name(self))
    }

    fn cuda_fwd(
        &self,
        y: &mut CudaStorage,
        layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<()> {
        kernels::epilogue(y, layout, Some((bias, bias_layout)), self.number())
    }
}

/// `(1, H, N, D)` of packed sequences, if the kernel can: heads of 32 or 64, and nothing else masked.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: Option<f64>,
) -> Result<Option<Tensor>> {
    let [_b, _h, t, s] = check(q, k, v)?;
    let heads = |x: &Tensor| kernels::takes_heads(x.dtype(), x.layout());
    let one_width = q.dim(3)? == v.dim(3)? && k.dim(1)? == v.dim(1)?;
    if t != s || !one_width || !takes(&[q, k, v]) || ![q, k, v].into_iter().all(heads) {
        return Ok(None);
    }
    let Some(offsets) = mask.blocks(t)? else { return Ok(None) };
    let Device::Cuda(device) = q.device() else { return Ok(None) };
    let tiles = mask.on_device(|| kernels::Tiles::new(device, offsets))?;
    let scale = scale.unwrap_or(1.0 / (q.dim(3)? as f64).sqrt()) as f32;
    let context = apply3("attention of packed sequences", [q, k, v], |q, k, v| {
        kernels::attention(q, k, v, &tiles, scale)
    })?; // (1, N, H, D)
    Ok(Some(context.transpose(1, 2)?))
}
