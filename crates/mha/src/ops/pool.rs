//! Pooling of packed sequences: mean over tokens, and normalisation to unit length.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use mha_kernels::Isa;
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

use super::cpu;
#[cfg(feature = "cuda")]
use super::cuda;
use crate::Result;

/// The mean of each sequence's rows in f32; `None` if no kernel supports `x`.
///
/// # Shapes
/// `x`: `(N, E)`, packed; `offsets`: the index of the first row of each of B sequences, then N;
/// strictly increasing;
/// returns `(B, E)`
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks; on a GPU
/// [`crate::Error::Candle`] if the offsets do not start at 0 and end at N, if they decrease, or if
/// the driver reports an error.
/// # Panics
/// On a CPU, if the offsets are not strictly increasing or exceed N.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let x = Tensor::new(&[[1f32, 8.], [3., 4.], [5., 6.]], &Cpu)?;
/// if let Some(means) = mha::ops::mean_pool(&x, &[0, 2, 3])? {
///     assert_eq!(means.to_vec2::<f32>()?, [[2., 6.], [5., 6.]]);
/// }
/// # Ok::<(), mha::Error>(())
/// ```
pub fn mean_pool(x: &Tensor, offsets: &[usize]) -> Result<Option<Tensor>> {
    #[cfg(feature = "cuda")]
    if cuda::supports(&[x]) && cuda_kernels::supports_even_rows(x.dtype(), x.dim(1)?) {
        let x = cuda::contiguous_pairs(x)?;
        let pooled = cuda::apply1("mean pool", &x, |x| cuda_kernels::mean_pool(x, offsets));
        return Ok(Some(pooled?));
    }
    if cpu::prefers_kernel(&[x]) {
        let op = MeanPool { offsets: offsets.to_vec(), isa: Isa::get()? };
        return Ok(Some(x.contiguous()?.apply_op1_no_bwd(&op)?));
    }
    Ok(None)
}

/// Normalises rows to unit length, `x / max(‖x‖, 10⁻¹²)`. A row of zeros stays zero.
///
/// # Shapes
/// `x`: `(B, E)`; returns `(B, E)`
/// # Errors
/// [`crate::Error::Candle`] if `x` is not a matrix of floats.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let x = Tensor::new(&[[3f32, 4.], [0., 0.]], &Cpu)?;
/// assert_eq!(mha::ops::l2_normalize(&x)?.to_vec2::<f32>()?, [[0.6, 0.8], [0., 0.]]);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn l2_normalize(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.dtype() == candle_core::DType::F32 && cuda::supports(&[x]) {
        return Ok(cuda::apply1("normalize", &x.contiguous()?, cuda_kernels::l2_normalize)?);
    }
    let length = x.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12)?;
    Ok(x.broadcast_div(&length)?)
}

struct MeanPool {
    offsets: Vec<usize>,
    isa: Isa,
}

impl CustomOp1 for MeanPool {
    fn name(&self) -> &'static str {
        "mean pool"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (_n, e) = layout.shape().dims2()?;
        let x = cpu::contiguous(x, layout)?;
        let pooled = mha_kernels::mean_pool(self.isa, x, e, &self.offsets);
        Ok((CpuStorage::F32(pooled), (self.offsets.len() - 1, e).into()))
    }
}
