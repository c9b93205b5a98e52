//! The sum of two tensors, for residual connections.

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};

use crate::{Result, cpu};

/// `x + y`.
///
/// The CPU kernel adds on the threads of the other CPU kernels. candle adds on threads of its own,
/// which would compete with them.
///
/// # Shapes
/// `x`, `y` and the result have the same shape
/// # Errors
/// [`crate::Error::Candle`] if the shapes, dtypes or devices differ.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let x = Tensor::new(&[1f32, 2.], &Cpu)?;
/// assert_eq!(ops::add(&x, &x)?.to_vec1::<f32>()?, [2., 4.]);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if cpu::prefers_kernel(&[x, y]) && x.shape() == y.shape() {
        Ok(x.contiguous()?.apply_op2_no_bwd(&y.contiguous()?, &CpuAdd)?)
    } else {
        Ok((x + y)?)
    }
}

struct CpuAdd;

impl CustomOp2 for CpuAdd {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        y: &CpuStorage,
        y_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let sum = mha_kernels::add(cpu::contiguous(x, x_layout)?, cpu::contiguous(y, y_layout)?);
        Ok((CpuStorage::F32(sum), x_layout.shape().clone()))
    }
}
