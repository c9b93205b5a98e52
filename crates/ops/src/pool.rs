//! Pooling of ragged sequences: mean over tokens, and normalisation to unit length.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use mha_kernels::Isa;
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Error, Result, cpu, widen};

/// The mean of each sequence's rows in f32; `None` if no kernel supports `x`.
///
/// # Shapes
/// `x`: `(N, E)`, a ragged batch; `offsets`: the index of the first row of each of B sequences,
/// then N, strictly increasing; returns `(B, E)`
/// # Errors
/// [`Error::Shape`] if the offsets do not increase strictly from 0 to N; [`Error::Isa`] if
/// `MHA_ISA` names instructions that this machine lacks; [`Error::Candle`] if `x` is not a matrix,
/// or if the driver of a GPU reports an error.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let x = Tensor::new(&[[1f32, 8.], [3., 4.], [5., 6.]], &Cpu)?;
/// if let Some(means) = ops::mean_pool(&x, &[0, 2, 3])? {
///     assert_eq!(means.to_vec2::<f32>()?, [[2., 6.], [5., 6.]]);
/// }
/// # Ok::<(), ops::Error>(())
/// ```
pub fn mean_pool(x: &Tensor, offsets: &[usize]) -> Result<Option<Tensor>> {
    let (n, _e) = x.dims2()?;
    check_offsets(offsets, n)?;
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

/// Checks the offsets of a ragged batch of `n` rows.
///
/// # Errors
/// [`Error::Shape`] if they do not increase strictly from 0 to `n`.
pub(crate) fn check_offsets(offsets: &[usize], n: usize) -> Result<()> {
    let increase = offsets.windows(2).all(|pair| pair[0] < pair[1]);
    if offsets.first() == Some(&0) && offsets.last() == Some(&n) && increase {
        return Ok(());
    }
    let expected = format!("offsets that increase strictly from 0 to N = {n}");
    Err(Error::Shape { argument: "offsets", expected, got: offsets.to_vec() })
}

/// Normalises rows to unit length, `x / max(‖x‖, 10⁻¹²)`, computed in f32 or f64. A row of zeros
/// stays zero.
///
/// # Shapes
/// `x`: `(B, E)`; returns `(B, E)`
/// # Errors
/// [`Error::Candle`] if `x` is not a matrix of floats.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let x = Tensor::new(&[[3f32, 4.], [0., 0.]], &Cpu)?;
/// assert_eq!(ops::l2_normalize(&x)?.to_vec2::<f32>()?, [[0.6, 0.8], [0., 0.]]);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn l2_normalize(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.dtype() == candle_core::DType::F32 && cuda::supports(&[x]) {
        return Ok(cuda::apply1("normalize", &x.contiguous()?, cuda_kernels::l2_normalize)?);
    }
    x.dims2()?;
    let dtype = x.dtype();
    if !dtype.is_float() {
        let message = format!("l2_normalize: expected a tensor of floats, got {dtype:?}");
        return Err(candle_core::Error::Msg(message).into());
    }
    let x = widen(x)?;
    if cpu::prefers_kernel(&[&x]) && x.elem_count() > 0 {
        let op = L2Normalize { isa: Isa::get()? };
        return Ok(x.contiguous()?.apply_op1_no_bwd(&op)?.to_dtype(dtype)?);
    }
    // 1e-24 is the square of 1e-12. The maximum is taken before the root, because the gradient of
    // sqrt(0) is infinite.
    let length = x.sqr()?.sum_keepdim(1)?.maximum(1e-24)?.sqrt()?;
    Ok(x.broadcast_div(&length)?.to_dtype(dtype)?)
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

struct L2Normalize {
    isa: Isa,
}

impl CustomOp1 for L2Normalize {
    fn name(&self) -> &'static str {
        "l2 normalize"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (_b, e) = layout.shape().dims2()?;
        let rows = mha_kernels::l2_normalize(self.isa, cpu::contiguous(x, layout)?, e);
        Ok((CpuStorage::F32(rows), layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Var};

    use super::*;

    #[test]
    fn half_precision_rows_of_zeros_stay_zero_and_large_values_do_not_overflow() -> Result<()> {
        let x = Tensor::new(&[[0f32, 0.], [3000., 4000.]], &Cpu)?;
        for dtype in [DType::F16, DType::BF16] {
            let y = l2_normalize(&x.to_dtype(dtype)?)?;
            assert_eq!(y.dtype(), dtype);
            let y = y.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            for (got, expected) in y.into_iter().zip([0., 0., 0.6, 0.8]) {
                assert!((got - expected).abs() < 2e-3, "{dtype:?}: {got} {expected}");
            }
        }
        assert!(l2_normalize(&x.unsqueeze(0)?).is_err());
        assert!(l2_normalize(&x.to_dtype(DType::U32)?).is_err());
        Ok(())
    }

    #[test]
    fn the_gradient_of_a_row_of_zeros_is_finite() -> Result<()> {
        let x = Var::new(&[[0f32, 0.], [3., 4.]], &Cpu)?;
        let grads = l2_normalize(&x)?.sum_all()?.backward()?;
        let grad = grads.get(&x).expect("x is tracked").to_vec2::<f32>()?;
        assert!(grad[0].iter().all(|g| g.is_finite()), "{grad:?}");
        // The derivative of (a + b)/√(a² + b²) is (b² − a·b, a² − a·b)/(a² + b²)^1.5.
        for (got, expected) in grad[1].iter().zip([4. / 125., -3. / 125.]) {
            assert!((got - expected).abs() < 1e-7, "{grad:?}");
        }
        Ok(())
    }

    #[test]
    fn offsets_that_do_not_fit_are_errors() -> Result<()> {
        let x = Tensor::ones((3, 2), DType::F32, &Cpu)?;
        for offsets in [&[][..], &[0], &[1, 3], &[0, 2], &[0, 4], &[0, 2, 2, 3], &[0, 2, 1, 3]] {
            assert!(matches!(mean_pool(&x, offsets), Err(Error::Shape { .. })), "{offsets:?}");
        }
        assert!(mean_pool(&x.unsqueeze(0)?, &[0, 3]).is_err());
        Ok(())
    }
}
