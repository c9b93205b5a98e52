//! A linear map whose output rows are pooled over sequences, without the whole output in memory.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};
use mha_kernels::{Isa, PackedLinear, RowPooling, Rows};

use super::{Kind, Linear};
use crate::{
    Result,
    cpu::{self, Element},
    pool::check_offsets,
    widen,
};

/// Columns of the output that are in memory at a time if no kernel pools.
const COLUMNS: usize = 4096;

impl Linear {
    /// The rows of `x·Wᵀ + b` in f32, pooled over each sequence. On a CPU, one kernel call computes
    /// and pools the product.
    ///
    /// # Shapes
    /// `x`: `(N, in)`, a ragged batch; `offsets`: the index of the first row of each of B
    /// sequences, then N, strictly increasing; returns `(B, out)`
    /// # Errors
    /// [`crate::Error::Shape`] if the offsets do not increase strictly from 0 to N;
    /// [`crate::Error::Candle`] if `x` is not `(N, in)`; the errors of [`Self::forward`].
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use ops::{ComputeType, Linear, RowPooling};
    ///
    /// let w = Tensor::new(&[[1f32], [-1.]], &Cpu)?;
    /// let linear = Linear::new(ComputeType::F32, w, None)?;
    /// let x = Tensor::new(&[[3f32], [-2.], [5.]], &Cpu)?;
    /// let pooled = linear.forward_pooled(&x, &[0, 2, 3], RowPooling::Max)?;
    /// assert_eq!(pooled.to_vec2::<f32>()?, [[3., 2.], [5., -5.]]);
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn forward_pooled(
        &self,
        x: &Tensor,
        offsets: &[usize],
        pooling: RowPooling,
    ) -> Result<Tensor> {
        let (n, _) = x.dims2()?;
        check_offsets(offsets, n)?;
        if let Some(packed) = self.packed().filter(|packed| packed.supports(x)) {
            let (weights, isa) = (&packed.weights, Isa::get()?);
            let op = CpuPooled { weights, offsets, pooling, isa };
            return Ok(x.contiguous()?.apply_op1_no_bwd(&op)?);
        }
        let (weight, bias) = match &self.0 {
            Kind::Bf16(bf16) => (bf16.rounded.weight().clone(), bf16.rounded.bias().cloned()),
            _ => (self.backend()?.weight()?, self.backend()?.bias()?),
        };
        let x = x.to_dtype(weight.dtype())?;
        let parts = (0..weight.dim(0)?).step_by(COLUMNS).map(|start| {
            let columns = COLUMNS.min(weight.dim(0)? - start);
            let y = widen(&x.matmul(&weight.narrow(0, start, columns)?.t()?)?)?;
            let y = match &bias {
                Some(bias) => y.broadcast_add(&widen(&bias.narrow(0, start, columns)?)?)?,
                None => y,
            };
            let non_finite = y.sub(&y)?; // 0, or NaN for values that are not finite
            let y = match pooling {
                RowPooling::Max => y,
                RowPooling::SumLog1p => log1p_relu(&y)?,
                RowPooling::SumLog1pTwice => log1p_relu(&log1p_relu(&y)?)?,
            };
            let y = (y + non_finite)?;
            let sequences = offsets.windows(2).map(|at| {
                let rows = y.narrow(0, at[0], at[1] - at[0])?;
                if pooling == RowPooling::Max { rows.max_keepdim(0) } else { rows.sum_keepdim(0) }
            });
            Tensor::cat(&sequences.collect::<candle_core::Result<Vec<_>>>()?, 0)
        });
        Ok(Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 1)?)
    }
}

/// `ln(1 + max(x, 0))`
fn log1p_relu(x: &Tensor) -> candle_core::Result<Tensor> {
    (x.relu()? + 1.0)?.log()
}

struct CpuPooled<'a> {
    weights: &'a PackedLinear,
    offsets: &'a [usize],
    pooling: RowPooling,
    isa: Isa,
}

impl CustomOp1 for CpuPooled<'_> {
    fn name(&self) -> &'static str {
        "pooled linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let Self { weights, offsets, pooling, isa } = *self;
        let (input, dims) = (weights.input(), layout.dims());
        if dims.last() != Some(&input) {
            candle_core::bail!("x has the wrong shape: expected (N, {input}), got {dims:?}");
        }
        let rows = match x {
            CpuStorage::BF16(_) => Rows::Bf16(cpu::slice(u16::elements(x)?, layout)?),
            _ => Rows::F32(cpu::slice(f32::elements(x)?, layout)?),
        };
        let y = mha_kernels::pooled_linear(isa, rows, weights, offsets, pooling);
        Ok((f32::into_storage(y), (offsets.len() - 1, weights.out()).into()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, Var};

    use super::*;
    use crate::{ComputeType, Error};

    /// The kernel, and candle's operations on more columns than one part, for an input that
    /// autograd tracks.
    #[test]
    fn the_kernel_and_candle_pool_alike() -> Result<()> {
        let weight = Tensor::randn(0f32, 1., (COLUMNS + 3, 8), &Cpu)?;
        let bias = Tensor::randn(0f32, 1., COLUMNS + 3, &Cpu)?;
        let linear = Linear::new(ComputeType::F32, weight, Some(bias))?;
        let x = Var::randn(0f32, 1., (5, 8), &Cpu)?;
        for pooling in [RowPooling::Max, RowPooling::SumLog1p, RowPooling::SumLog1pTwice] {
            let tracked = linear.forward_pooled(&x, &[0, 1, 5], pooling)?;
            let untracked = linear.forward_pooled(&x.detach(), &[0, 1, 5], pooling)?;
            assert_eq!(tracked.dims(), [2, COLUMNS + 3]);
            let difference = (tracked - untracked)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(difference < 1e-5, "{pooling:?}: {difference}");
        }
        let error = linear.forward_pooled(&x, &[0, 5, 5], RowPooling::Max).unwrap_err();
        assert!(matches!(error, Error::Shape { argument: "offsets", .. }), "{error}");
        Ok(())
    }
}
