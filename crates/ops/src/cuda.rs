//! Access to candle tensors on a GPU, for the operations that call CUDA kernels.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Device, Layout, Shape, Storage,
    Tensor,
};
use mha_kernels_cuda::{TensorView, supports_device};

/// Whether the tensors are suitable for the kernels: they have the same dtype, are on the same GPU
/// and are not tracked by autograd, and the kernels support the GPU.
pub fn supports(tensors: &[&Tensor]) -> bool {
    let have_same_dtype = tensors.iter().all(|x| x.dtype() == tensors[0].dtype());
    have_same_dtype && are_on_same_gpu(tensors)
}

/// [`supports`] without the condition on the dtypes.
pub(crate) fn are_on_same_gpu(tensors: &[&Tensor]) -> bool {
    let Device::Cuda(device) = tensors[0].device() else { return false };
    let is_suitable = |x: &&Tensor| x.device().same_device(tensors[0].device()) && !x.track_op();
    tensors.iter().all(is_suitable) && supports_device(device)
}

/// Makes `x` contiguous, with a start offset that is even, as kernels that read pairs require.
pub fn contiguous_pairs(x: &Tensor) -> candle_core::Result<Tensor> {
    let x = x.contiguous()?;
    if x.layout().start_offset().is_multiple_of(2) { Ok(x) } else { x.copy() }
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

/// [`with_storage`] of an optional tensor.
pub fn with_optional_storage<T>(
    x: Option<&Tensor>,
    read: impl FnOnce(Option<TensorView>) -> candle_core::Result<T>,
) -> candle_core::Result<T> {
    match x {
        Some(x) => with_storage(x, |x| read(Some(x))),
        None => read(None),
    }
}

/// [`with_storage`] of several tensors.
pub fn with_all<T>(
    tensors: &[Tensor],
    read: &mut dyn FnMut(&[TensorView]) -> candle_core::Result<T>,
) -> candle_core::Result<T> {
    let Some((last, others)) = tensors.split_last() else { return read(&[]) };
    with_storage(last, |view| with_all(others, &mut |views| read(&[views, &[view]].concat())))
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

/// The error of a kernel for a tensor on the CPU.
pub fn needs_gpu<T>(name: &str) -> candle_core::Result<T> {
    candle_core::bail!("the CUDA kernel for {name} needs a tensor on a GPU, got one on the CPU")
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
        needs_gpu(self.name)
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
        needs_gpu(self.name)
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
        needs_gpu(self.name)
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
