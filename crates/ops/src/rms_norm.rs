//! Root mean square normalisation, `x / √(mean(x²) + ε) · weight` over the last axis:
//! Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>.

use std::sync::Arc;

use candle_core::{D, Module, Tensor};
use candle_nn::Init;
use mha_kernels::{Isa, RowNorm};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    Error, Result, Weights, add, cpu,
    row_norm::{self, fits},
    widen,
};

/// Root mean square normalisation over the last axis: `x / √(mean(x²) + ε) · weight`, or
/// `· (1 + weight)` with a unit offset.
///
/// # Numerics
/// f16 and bf16 inputs are normalised and multiplied by the weight in f32, and rounded once. The
/// weight may have another float dtype than the input. transformers also rounds the normalised
/// values of Llama and Qwen before it multiplies them by the weight; in f32 this is the same.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Module, Tensor};
/// use candle_nn::VarBuilder;
///
/// let x = Tensor::new(&[[1f32, 7.]], &Cpu)?; // the root mean square is 5
/// let ones = VarBuilder::from_tensors(
///     [("weight".to_string(), Tensor::new(&[1f32, 1.], &Cpu)?)].into(),
///     DType::F32,
///     &Cpu,
/// );
/// let norm = ops::RmsNorm::new(2, 0.0, false, ones.clone())?;
/// assert_eq!(norm.forward(&x)?.to_vec2::<f32>()?, [[0.2, 1.4]]);
/// let norm = ops::RmsNorm::new(2, 0.0, true, ones)?; // multiplies by 1 + 1
/// assert_eq!(norm.forward(&x)?.to_vec2::<f32>()?, [[0.4, 2.8]]);
/// # Ok::<(), ops::Error>(())
/// ```
/// # Source
/// Zhang and Sennrich 2019, equation 4, <https://arxiv.org/abs/1910.07467>; `LlamaRMSNorm` and, with
/// a unit offset, `Gemma3RMSNorm` of transformers.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor, // (E,)
    eps: f64,
    unit_offset: bool,
    /// The parameters for the CPU kernel; `None` if [`cpu::prefers_kernel`] is false, for example
    /// because the weight is trained.
    kernel: Option<CpuRmsNorm>,
    /// The factor of the normalised values in f32 on a GPU, for the CUDA kernels; `None` for a weight
    /// that is trained.
    #[cfg(feature = "cuda")]
    factor_on_gpu: Option<Tensor>,
}

impl RmsNorm {
    /// Loads `weight` `(hidden_size,)` from `weights`. `eps` is ε, which is added to the mean square.
    /// With `unit_offset`, values are multiplied by `1 + weight`.
    ///
    /// # Errors
    /// [`Error::Value`] if `eps` is negative or not finite; [`Error::Candle`] if `weights` lack the
    /// tensor or have it in another shape; [`Error::NotLoaded`] if its values are not loaded;
    /// [`Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn new<'a>(
        hidden_size: usize,
        eps: f64,
        unit_offset: bool,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        if !(eps.is_finite() && eps >= 0.0) {
            let expected = "0 or a small positive number";
            return Err(Error::Value { field: "eps", expected, got: eps });
        }
        let init = Init::Const(if unit_offset { 0.0 } else { 1.0 });
        let weight = weights.into().get_with_hints(hidden_size, "weight", init)??;
        let kernel = if cpu::prefers_kernel(&[&weight]) {
            let factor = factor(&weight, unit_offset)?.to_vec1()?.into();
            Some(CpuRmsNorm { factor, eps: eps as f32, isa: Isa::get()? })
        } else {
            None
        };
        #[cfg(feature = "cuda")]
        let factor_on_gpu = if cuda::are_on_same_gpu(&[&weight]) {
            Some(factor(&weight.to_dtype(candle_core::DType::F32)?, unit_offset)?)
        } else {
            None
        };
        Ok(Self {
            weight,
            eps,
            unit_offset,
            kernel,
            #[cfg(feature = "cuda")]
            factor_on_gpu,
        })
    }

    /// The weight `(E,)` as it was loaded: without the 1 of a unit offset.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `RMSNorm(x + y)`: a residual connection followed by normalisation.
    ///
    /// # Shapes
    /// `x`, `y`: `(.., E)`; returns `(.., E)`
    /// # Errors
    /// [`Error::Candle`] if the shapes, dtypes or devices differ, or if the last dimension is not E.
    pub fn forward_sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(factor) = self.cuda_factor(&[x, y]) {
            let (x, y) = (cuda::contiguous_pairs(x)?, cuda::contiguous_pairs(y)?);
            let sum =
                cuda::apply2("add and RMS norm", [&x, &y], |x, y| self.on_cuda(x, Some(y), factor));
            return Ok(sum?);
        }
        match self.cpu_kernel(&[x, y]) {
            Some(kernel) => Ok(row_norm::add_norm(kernel.isa, x, Some(y), kernel.norm())?),
            None => Ok(self.forward(&(x + y)?)?),
        }
    }

    /// `x + y` and `RMSNorm(x + y)`: the end of one residual connection and the input of the next
    /// sublayer, in a pre-norm layer. The CPU kernel computes both in one pass over memory.
    ///
    /// # Shapes
    /// `x`, `y`: `(.., E)`; returns two of `(.., E)`
    /// # Errors
    /// The errors of [`Self::forward_sum`].
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu); // weight 1
    /// let norm = ops::RmsNorm::new(2, 0.0, false, vb)?;
    /// let (x, y) = (Tensor::new(&[[1f32, 3.]], &Cpu)?, Tensor::new(&[[0f32, 4.]], &Cpu)?);
    /// let (sum, normalised) = norm.forward_residual(&x, &y)?;
    /// assert_eq!(sum.to_vec2::<f32>()?, [[1., 7.]]);
    /// assert_eq!(normalised.to_vec2::<f32>()?, [[0.2, 1.4]]); // the root mean square is 5
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn forward_residual(&self, x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
        if let Some(kernel) = self.cpu_kernel(&[x, y]) {
            return Ok(row_norm::add_norm_residual(kernel.isa, x, y, kernel.norm())?);
        }
        let sum = add(x, y)?;
        let normalised = self.forward(&sum)?;
        Ok((sum, normalised))
    }

    /// The factors `(E,)` of the normalised values and ε, for a CPU kernel; `None` if the kernel does
    /// not support them.
    pub(crate) fn cpu_parameters(&self) -> Option<(&[f32], f32)> {
        self.kernel.as_ref().map(|kernel| (&*kernel.factor, kernel.eps))
    }

    /// The parameters for the CPU kernel; `None` if the kernel does not support them or `inputs`, if
    /// the shapes do not fit, or if [`Isa::kernels_enabled`] is false. The computation by candle
    /// returns an error for shapes that do not fit.
    fn cpu_kernel(&self, inputs: &[&Tensor]) -> Option<&CpuRmsNorm> {
        let is_supported = cpu::prefers_kernel(inputs) && fits(&self.weight, inputs);
        self.kernel.as_ref().filter(|_| is_supported)
    }

    /// The factor and ε for a CUDA kernel of heads.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_parameters(&self) -> Option<(&Tensor, f32)> {
        self.factor_on_gpu.as_ref().map(|factor| (factor, self.eps as f32))
    }

    /// The factor for the CUDA kernel; `None` if the kernel does not support it or `inputs`, or if the
    /// shapes do not fit.
    #[cfg(feature = "cuda")]
    fn cuda_factor(&self, inputs: &[&Tensor]) -> Option<&Tensor> {
        let factor = self.factor_on_gpu.as_ref()?;
        let is_supported = cuda::supports(inputs)
            && cuda::are_on_same_gpu(&[inputs[0], factor])
            && fits(factor, inputs)
            && cuda_kernels::supports_even_rows(inputs[0].dtype(), factor.elem_count());
        is_supported.then_some(factor)
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(
        &self,
        x: cuda_kernels::TensorView,
        y: Option<cuda_kernels::TensorView>,
        factor: &Tensor,
    ) -> candle_core::Result<(candle_core::CudaStorage, candle_core::Shape)> {
        let out = cuda::with_storage(factor, |factor| {
            cuda_kernels::add_rms_norm(x, y, factor, self.eps as f32)
        });
        Ok((out?, x.1.shape().clone()))
    }

    fn by_candle(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        // candle would broadcast a width of 1, and panic for integers.
        if x.dims().last() != self.weight.dims().first() || !x.dtype().is_float() {
            candle_core::bail!(
                "input of RMS norm has dtype {:?} and shape {:?}: expected floats of shape (.., {})",
                x.dtype(),
                x.dims(),
                self.weight.elem_count()
            );
        }
        let wide = widen(x)?;
        let mean_square = wide.sqr()?.mean_keepdim(D::Minus1)?;
        let normalised = wide.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?;
        let factor = factor(&self.weight.to_dtype(wide.dtype())?, self.unit_offset)?;
        normalised.broadcast_mul(&factor)?.to_dtype(x.dtype())
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(factor) = self.cuda_factor(&[x]) {
            let x = cuda::contiguous_pairs(x)?;
            return cuda::apply1("RMS norm", &x, |x| self.on_cuda(x, None, factor));
        }
        match self.cpu_kernel(&[x]) {
            Some(kernel) => row_norm::add_norm(kernel.isa, x, None, kernel.norm()),
            None => self.by_candle(x),
        }
    }
}

/// The factor of the normalised values: `weight`, or `1 + weight` with a unit offset.
fn factor(weight: &Tensor, unit_offset: bool) -> candle_core::Result<Tensor> {
    if unit_offset { weight + 1.0 } else { Ok(weight.clone()) }
}

/// The parameters of an [`RmsNorm`] for the CPU kernel.
#[derive(Clone, Debug)]
struct CpuRmsNorm {
    factor: Arc<[f32]>,
    eps: f32,
    isa: Isa,
}

impl CpuRmsNorm {
    fn norm(&self) -> RowNorm<'_> {
        RowNorm::Rms { weight: &self.factor, eps: self.eps }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Var};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;

    const ROWS: usize = 3;
    const WIDTH: usize = 5;

    /// Values whose root mean square differs from row to row.
    fn input() -> Result<Tensor> {
        let x = Tensor::arange(0f32, (ROWS * WIDTH) as f32, &Cpu)?;
        Ok(((x * 0.9)?.sin()? * 3.0)?.reshape((ROWS, WIDTH))?)
    }

    fn weight() -> Result<Tensor> {
        Ok((Tensor::arange(0f32, WIDTH as f32, &Cpu)? * 0.7)?.cos()?)
    }

    fn norm(unit_offset: bool, weight: &Tensor) -> Result<RmsNorm> {
        let tensors = [("weight".to_string(), weight.clone())].into();
        let vb = VarBuilder::from_tensors(tensors, weight.dtype(), &Cpu);
        RmsNorm::new(WIDTH, 1e-3, unit_offset, vb)
    }

    /// The definition in f64.
    fn expected(x: &[f64], weight: &[f64], unit_offset: bool) -> Vec<f64> {
        let normalise = |row: &[f64]| -> Vec<f64> {
            let mean_square = row.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
            let offset = if unit_offset { 1.0 } else { 0.0 };
            let scaled = |(x, w): (&f64, &f64)| x / (mean_square + 1e-3).sqrt() * (w + offset);
            row.iter().zip(weight).map(scaled).collect()
        };
        x.chunks(WIDTH).flat_map(normalise).collect()
    }

    fn values(x: &Tensor) -> Result<Vec<f64>> {
        Ok(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
    }

    /// Results are below 5, and are rounded once: by at most 2⁻⁹ in f16 and 2⁻⁶ in bf16.
    #[test]
    fn norms_match_the_definition_in_every_dtype() -> Result<()> {
        for (dtype, tolerance) in
            [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)]
        {
            let x = input()?.to_dtype(dtype)?;
            // A weight in the dtype of the input, or in f32.
            for weight in [weight()?.to_dtype(dtype)?, weight()?] {
                for unit_offset in [false, true] {
                    let expected = expected(&values(&x)?, &values(&weight)?, unit_offset);
                    let got = norm(unit_offset, &weight)?.forward(&x)?;
                    assert_eq!((got.dims(), got.dtype()), (&[ROWS, WIDTH][..], dtype));
                    for (got, expected) in values(&got)?.into_iter().zip(expected) {
                        let difference = (got - expected).abs();
                        assert!(difference <= tolerance, "{dtype:?}: {got} {expected}");
                    }
                }
            }
        }
        Ok(())
    }

    /// The kernel, and candle's operations for a tracked input, for contiguous and transposed
    /// inputs.
    #[test]
    fn the_kernel_equals_candle_with_and_without_a_residual_connection() -> Result<()> {
        let x = input()?;
        let y = (input()?.reshape((WIDTH, ROWS))?.t()? * -0.7)?; // not contiguous
        let tracked = Var::from_tensor(&x)?;
        for unit_offset in [false, true] {
            let norm = norm(unit_offset, &weight()?)?;
            let close = |got: &Tensor, expected: &Tensor| -> Result<()> {
                for (got, expected) in values(got)?.into_iter().zip(values(expected)?) {
                    assert!((got - expected).abs() < 1e-6, "{got} {expected}");
                }
                Ok(())
            };
            assert!(norm.cpu_kernel(&[&x, &y]).is_some() || !Isa::kernels_enabled());
            close(&norm.forward(&x)?, &norm.forward(&tracked)?)?;
            let (sum, normalised) = norm.forward_residual(&x, &y)?;
            let by_candle = norm.forward_residual(&tracked, &y)?;
            assert_eq!(values(&sum)?, values(&by_candle.0)?);
            close(&normalised, &by_candle.1)?;
            assert_eq!(values(&norm.forward_sum(&x, &y)?)?, values(&normalised)?);
            close(&norm.forward_sum(&tracked, &y)?, &normalised)?;
        }
        Ok(())
    }

    /// The gradient of a sum of outputs, with respect to the weight, is the sum of the normalised
    /// values.
    #[test]
    fn trained_weights_get_gradients_and_their_updates_take_effect() -> Result<()> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Cpu);
        for (unit_offset, vb) in [(false, vb.pp("plain")), (true, vb.pp("offset"))] {
            let norm = RmsNorm::new(WIDTH, 0.0, unit_offset, vb)?; // multiplies by 1 at first
            let x = Var::from_tensor(&input()?)?;
            let y = norm.forward(&x)?;
            let gradients = y.sum_all()?.backward()?;
            let got = values(gradients.get(norm.weight()).expect("a gradient"))?;
            for (got, expected) in got.into_iter().zip(values(&y.sum(0)?)?) {
                assert!((got - expected).abs() < 1e-6, "{got} {expected}");
            }
            assert!(gradients.get(&x).is_some());
            for var in vars.all_vars() {
                var.set(&Tensor::full(2f32, WIDTH, &Cpu)?)?;
            }
            let factor = if unit_offset { 3.0 } else { 2.0 };
            for (got, y) in values(&norm.forward(&input()?)?)?.into_iter().zip(values(&y)?) {
                assert!((got - factor * y).abs() < 1e-5, "{got} {y}");
            }
        }
        Ok(())
    }

    #[test]
    fn inputs_and_settings_that_do_not_fit_are_errors() -> Result<()> {
        let norm = norm(false, &weight()?)?;
        let error = norm.forward(&Tensor::ones((2, 1), DType::F32, &Cpu)?).unwrap_err();
        let expected = "input of RMS norm has dtype F32 and shape [2, 1]: \
                        expected floats of shape (.., 5)";
        assert!(error.to_string().starts_with(expected), "{error}");
        let (x, y) = (input()?, input()?.t()?.contiguous()?); // 15 values each
        assert!(norm.forward_sum(&x, &y).is_err());
        assert!(norm.forward_residual(&x, &y).is_err());
        let error = norm.forward(&input()?.to_dtype(DType::U32)?).unwrap_err().to_string();
        assert!(error.starts_with("input of RMS norm has dtype U32 and shape [3, 5]"), "{error}");
        for eps in [-1.0, f64::NAN, f64::INFINITY] {
            let vb = VarBuilder::zeros(DType::F32, &Cpu);
            let error = RmsNorm::new(3, eps, false, vb).unwrap_err().to_string();
            let expected = format!("eps {eps} is invalid: expected 0 or a small positive number");
            assert_eq!(error, expected);
        }
        Ok(())
    }
}
