//! Access to the elements of candle tensors on the CPU, for the operations that call CPU kernels.

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor, WithDType};
use half::{bf16, slice::HalfFloatSliceExt, vec::HalfBitsVecExt};
use mha_kernels::{Isa, Strided, StridedMut};

/// Whether an f32 CPU kernel should run: the tensors are f32, on the CPU and not tracked by
/// autograd, and [`Isa::kernels_enabled`] is true.
pub fn prefers_kernel(tensors: &[&Tensor]) -> bool {
    Isa::kernels_enabled() && are_untracked_f32(tensors)
}

/// Whether all tensors are f32, on the CPU and not tracked by autograd.
pub fn are_untracked_f32(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|x| is_untracked(DType::F32, x))
}

/// Whether a tensor has this dtype, is on the CPU and is not tracked by autograd.
pub fn is_untracked(dtype: DType, x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == dtype && !x.track_op()
}

/// Calls `f` with the elements of a contiguous f32 tensor on the CPU.
///
/// # Errors
/// candle's error if the tensor is not on the CPU, not f32 or not contiguous.
pub fn with_slice<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(f(contiguous(storage, layout)?)),
        _ => candle_core::bail!("CPU kernels need tensors on the CPU, got {:?}", x.device()),
    }
}

/// The elements of a contiguous tensor.
///
/// # Errors
/// candle's error if the dtype of the storage is not `T` or the layout is not contiguous.
pub fn contiguous<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a [T]> {
    slice(storage.as_slice()?, layout)
}

/// The part of `elements` that a contiguous layout covers.
///
/// # Errors
/// candle's error if the layout is not contiguous.
pub fn slice<'a, T>(elements: &'a [T], layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) if start == end => Ok(&[]), // can be beyond the end of the storage
        Some((start, end)) => Ok(&elements[start..end]),
        None => candle_core::bail!("CPU kernels need contiguous tensors, got {layout:?}"),
    }
}

/// `(B, H, T, D)` with stride 1 along D, for a kernel.
///
/// # Errors
/// candle's error for another rank or another stride along D.
pub fn strided<'a, T>(data: &'a [T], layout: &Layout) -> candle_core::Result<Strided<'a, T>> {
    let (start, strides, dims) = rows(layout, data.len())?;
    Ok(Strided { data: &data[start..], strides, dims })
}

/// [`strided`] for a kernel that writes to the tensor.
pub fn strided_mut<'a, T>(
    data: &'a mut [T],
    layout: &Layout,
) -> candle_core::Result<StridedMut<'a, T>> {
    let (start, strides, dims) = rows(layout, data.len())?;
    Ok(StridedMut { data: &mut data[start..], strides, dims })
}

/// The first element, the strides of B, H and T, and the dims of `(B, H, T, D)` in a storage of `len`
/// elements.
fn rows(layout: &Layout, len: usize) -> candle_core::Result<(usize, [usize; 3], [usize; 4])> {
    match (layout.stride(), layout.dims()) {
        (&[batch, head, row, 1], &[b, h, t, d]) => {
            // The offset may exceed the length of an empty storage.
            Ok((layout.start_offset().min(len), [batch, head, row], [b, h, t, d]))
        }
        _ => candle_core::bail!("expected (B, H, T, D) with stride 1 along D, got {layout:?}"),
    }
}

/// An element type of the kernels and the candle storage that holds it; `u16` holds bf16 bits.
pub trait Element: Copy + 'static {
    fn elements(storage: &CpuStorage) -> candle_core::Result<&[Self]>;
    fn into_storage(elements: Vec<Self>) -> CpuStorage;
}

impl Element for f32 {
    fn elements(storage: &CpuStorage) -> candle_core::Result<&[f32]> {
        storage.as_slice()
    }

    fn into_storage(elements: Vec<f32>) -> CpuStorage {
        CpuStorage::F32(elements)
    }
}

impl Element for u16 {
    fn elements(storage: &CpuStorage) -> candle_core::Result<&[u16]> {
        Ok(storage.as_slice::<bf16>()?.reinterpret_cast())
    }

    fn into_storage(elements: Vec<u16>) -> CpuStorage {
        CpuStorage::BF16(elements.reinterpret_into())
    }
}
