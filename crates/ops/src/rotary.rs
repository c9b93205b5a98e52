//! Rotary position embedding in place.

use candle_core::{CpuStorage, DType, InplaceOp3, Layout, Tensor};
use half::slice::HalfFloatSliceExt;
use mha_kernels::{Isa, StridedMut, rotate_bf16, rotate_f32};

use crate::{
    Result,
    cpu::{self, Element},
};

/// Rotates the heads of `x` in place with a CPU kernel; see [`rotate_f32`]. Returns false, and leaves
/// `x` unchanged, if the kernel does not support the tensors, or if
/// [`Isa::kernels_enabled`] is false.
///
/// The kernel overwrites the storage of `x`: no other tensor may read these elements later.
///
/// # Shapes
/// `x`: `(B, H, T, D)`; `cos`, `sin`: `(T, D/2)` or `(B, T, D/2)`, f32
pub fn rotate_in_place(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<bool> {
    let is_supported = cpu::is_untracked(x.dtype(), x)
        && matches!(x.dtype(), DType::F32 | DType::BF16)
        && cpu::prefers_kernel(&[cos, sin]);
    // Values that share memory, as in a broadcast tensor, cannot be rotated in place.
    let is_dense = !x.layout().has_internal_overlap() && x.stride()[3] == 1;
    if !is_supported || !is_dense || !table_fits(cos, x)? || cos.dims() != sin.dims() {
        return Ok(false);
    }
    let op = CpuRotation { isa: Isa::get()? };
    x.inplace_op3(&cos.contiguous()?, &sin.contiguous()?, &op)?;
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

struct CpuRotation {
    isa: Isa,
}

impl InplaceOp3 for CpuRotation {
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
