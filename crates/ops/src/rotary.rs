//! Rotary position embedding in place.

use candle_core::{CpuStorage, DType, InplaceOp3, Layout, Tensor};
use half::slice::HalfFloatSliceExt;
use mha_kernels::{Isa, StridedMut, rotate_bf16, rotate_f32};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    Result,
    cpu::{self, Element},
};

/// Rotates the heads of `x` in place with a CPU or CUDA kernel; see [`rotate_f32`]. Returns false,
/// and leaves `x` unchanged, if no kernel supports the tensors, or if [`Isa::kernels_enabled`] is
/// false and the tensors are on the CPU. The CUDA kernel supports B = 1.
///
/// The kernel overwrites the storage of `x`: no other tensor may read these elements later.
///
/// # Shapes
/// `x`: `(B, H, T, D)`; `cos`, `sin`: `(T, D/2)` or `(B, T, D/2)`, f32
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
pub fn rotate_in_place(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<bool> {
    let has_cpu_kernel = cpu::is_untracked(x.dtype(), x)
        && matches!(x.dtype(), DType::F32 | DType::BF16)
        && cpu::prefers_kernel(&[cos, sin]);
    #[cfg(feature = "cuda")]
    let has_cuda_kernel = cuda::are_on_same_gpu(&[x, cos, sin])
        && cuda_kernels::supports_rotary(x.dtype(), x.layout())
        && [cos, sin].iter().all(|table| table.dtype() == DType::F32);
    #[cfg(not(feature = "cuda"))]
    let has_cuda_kernel = false;
    // Values that share memory, as in a broadcast tensor, cannot be rotated in place.
    let is_dense = !x.layout().has_internal_overlap() && x.stride()[3] == 1;
    let is_supported = (has_cpu_kernel || has_cuda_kernel) && is_dense;
    if !is_supported || !table_fits(cos, x)? || cos.dims() != sin.dims() {
        return Ok(false);
    }
    x.inplace_op3(&cos.contiguous()?, &sin.contiguous()?, &Rotation { isa: Isa::get()? })?;
    Ok(true)
}

/// Whether the shape of a table of cosines or sines fits `x`.
///
/// # Shapes
/// `x`: `(B, H, T, D)`; a table that fits: `(T, D/2)` or `(B, T, D/2)`, with an even D
pub fn table_fits(table: &Tensor, x: &Tensor) -> Result<bool> {
    let ((b, _h, t, d), dims) = (x.dims4()?, table.dims());
    Ok(d.is_multiple_of(2) && (dims == [t, d / 2] || dims == [b, t, d / 2]))
}

struct Rotation {
    isa: Isa,
}

impl InplaceOp3 for Rotation {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu_fwd(
        &self,
        x: &mut CpuStorage,
        layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> candle_core::Result<()> {
        let cos = cpu::slice(f32::elements(cos)?, cos_layout)?;
        let sin = cpu::slice(f32::elements(sin)?, sin_layout)?;
        match x {
            CpuStorage::BF16(x) => {
                rotate_bf16(self.isa, view(x.reinterpret_cast_mut(), layout)?, cos, sin);
            }
            CpuStorage::F32(x) => rotate_f32(self.isa, view(x, layout)?, cos, sin),
            _ => candle_core::bail!("rotary: expected f32 or bf16"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &mut candle_core::CudaStorage,
        layout: &Layout,
        cos: &candle_core::CudaStorage,
        cos_layout: &Layout,
        sin: &candle_core::CudaStorage,
        sin_layout: &Layout,
    ) -> candle_core::Result<()> {
        cuda_kernels::rotate(x, layout, (cos, cos_layout), (sin, sin_layout))
    }
}

/// `(B, H, T, D)` as the kernel expects it.
fn view<'a, T>(data: &'a mut [T], layout: &Layout) -> candle_core::Result<StridedMut<'a, T>> {
    let start = layout.start_offset().min(data.len());
    match (layout.stride(), layout.dims()) {
        (&[batch, head, row, 1], &[b, h, t, d]) => {
            let (strides, dims) = ([batch, head, row], [b, h, t, d]);
            Ok(StridedMut { data: &mut data[start..], strides, dims })
        }
        _ => candle_core::bail!("rotary: expected (B, H, T, D) with stride 1 along D"),
    }
}
