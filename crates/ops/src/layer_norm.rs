//! Layer normalisation, `(x − mean(x)) / √(var(x) + ε) · weight + bias` over the last axis:
//! Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::Shape;
use candle_core::{Module, Tensor};
use candle_nn::Init;
use mha_kernels::{Isa, RowNorm};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    Error, Result, Weights, add, cpu,
    row_norm::{self, fits},
};

/// Layer normalisation over the last axis, with or without bias:
/// `(x − mean(x)) / √(var(x) + ε) · weight + bias`.
///
/// The variance is the mean square of the centred values. candle's fused `layer_norm` computes the
/// mean square minus the squared mean instead, which loses precision if the mean is large.
///
/// # Examples
/// [`LayerNorm::forward_sum`] adds a residual connection and normalises in one pass over memory:
/// ```
/// use candle_core::{DType, Device::Cpu, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu); // weight 1, bias 0
/// let norm = ops::LayerNorm::new(2, 0.0, true, vb)?;
/// let (x, y) = (Tensor::new(&[[1f32, 2.]], &Cpu)?, Tensor::new(&[[2f32, 5.]], &Cpu)?);
/// assert_eq!(norm.forward_sum(&x, &y)?.to_vec2::<f32>()?, [[-1., 1.]]); // the sum is 3, 7
/// # Ok::<(), ops::Error>(())
/// ```
/// # Source
/// Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor, // (E,)
    bias: Tensor,   // (E,); zeros for a module without bias
    eps: f64,
    /// The parameters for the CPU kernel; `None` if [`cpu::prefers_kernel`] is false, for example
    /// because the parameters are trained.
    kernel: Option<CpuLayerNorm>,
}

impl LayerNorm {
    /// Loads `weight` `(hidden_size,)` and, if `bias` is true, `bias` `(hidden_size,)` from
    /// `weights`. `eps` is ε, which is added to the variance.
    ///
    /// # Errors
    /// [`Error::Value`] if `eps` is negative or not finite; [`Error::Candle`] if `weights` lack a
    /// tensor or have it in another shape; [`Error::NotLoaded`] if its values are not loaded;
    /// [`Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn new<'a>(
        hidden_size: usize,
        eps: f64,
        bias: bool,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        if !(eps.is_finite() && eps >= 0.0) {
            let expected = "0 or a small positive number";
            return Err(Error::Value { field: "eps", expected, got: eps });
        }
        let weight = weights.get_with_hints(hidden_size, "weight", Init::Const(1.))?;
        let bias = bias.then(|| weights.get(hidden_size, "bias")).transpose()?;
        let weight = weight?;
        let bias = match bias {
            Some(bias) => bias?,
            None => weight.zeros_like()?,
        };
        let kernel = if cpu::prefers_kernel(&[&weight, &bias]) {
            Some(CpuLayerNorm::new(&weight, &bias, eps)?)
        } else {
            None
        };
        Ok(Self { weight, bias, eps, kernel })
    }

    /// `LayerNorm(x + y)`: a residual connection followed by normalisation.
    ///
    /// # Shapes
    /// `x`, `y`: `(.., E)`; returns `(.., E)`
    /// # Errors
    /// [`crate::Error::Candle`] if the shapes, dtypes or devices differ, or if the last dimension
    /// is not E.
    pub fn forward_sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.cuda_kernel_supports(&[x, y]) {
            let (x, y) = (cuda::contiguous_pairs(x)?, cuda::contiguous_pairs(y)?);
            let sum = cuda::apply2("add and layer norm", [&x, &y], |x, y| self.on_cuda(x, Some(y)));
            return Ok(sum?);
        }
        match self.cpu_kernel_for_equal_shapes(&[x, y]) {
            Some(kernel) => Ok(row_norm::add_norm(kernel.isa, x, Some(y), kernel.norm())?),
            None => Ok(self.by_candle(&(x + y)?)?),
        }
    }

    /// `x + y` and `LayerNorm(x + y)`: the end of one residual connection and the input of the next
    /// sublayer, in a pre-norm layer. The CPU kernel computes both in one pass over memory.
    ///
    /// # Shapes
    /// `x`, `y`: `(.., E)`; returns two of `(.., E)`
    /// # Errors
    /// The errors of [`Self::forward_sum`].
    pub fn forward_residual(&self, x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
        if let Some(kernel) = self.cpu_kernel_for_equal_shapes(&[x, y]) {
            return Ok(row_norm::add_norm_residual(kernel.isa, x, y, kernel.norm())?);
        }
        let sum = add(x, y)?;
        let normalised = self.forward(&sum)?;
        Ok((sum, normalised))
    }

    /// The parameters for the CPU kernel; `None` if the kernel does not support them or `inputs`,
    /// or if [`Isa::kernels_enabled`](mha_kernels::Isa::kernels_enabled) is false.
    pub(crate) fn cpu_kernel(&self, inputs: &[&Tensor]) -> Option<&CpuLayerNorm> {
        self.kernel.as_ref().filter(|_| cpu::prefers_kernel(inputs))
    }

    /// [`Self::cpu_kernel`], but `None` if the shapes do not fit. The computation by candle then
    /// returns an error.
    fn cpu_kernel_for_equal_shapes(&self, inputs: &[&Tensor]) -> Option<&CpuLayerNorm> {
        self.cpu_kernel(inputs).filter(|_| fits(&self.weight, inputs))
    }

    /// E, the width of a row.
    pub(crate) fn width(&self) -> Option<usize> {
        self.weight.dims().first().copied()
    }

    /// Whether the CUDA kernel supports these inputs and this module's parameters.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_kernel_supports(&self, inputs: &[&Tensor]) -> bool {
        let all: Vec<&Tensor> = inputs.iter().copied().chain([&self.weight, &self.bias]).collect();
        let supports_width = |e| cuda_kernels::supports_even_rows(inputs[0].dtype(), e);
        fits(&self.weight, inputs)
            && cuda::supports(&all)
            && self.weight.dims1().is_ok_and(supports_width)
    }

    /// Calls `run` with weight, bias and ε for a CUDA kernel.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_cuda_parameters<T>(
        &self,
        run: impl FnOnce(
            cuda_kernels::TensorView,
            cuda_kernels::TensorView,
            f32,
        ) -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        let weight = cuda::contiguous_pairs(&self.weight)?;
        let bias = cuda::contiguous_pairs(&self.bias)?;
        cuda::with_storage(&weight, |weight| {
            cuda::with_storage(&bias, |bias| run(weight, bias, self.eps as f32))
        })
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(
        &self,
        x: cuda_kernels::TensorView,
        y: Option<cuda_kernels::TensorView>,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let out = self.with_cuda_parameters(|weight, bias, eps| {
            cuda_kernels::add_layer_norm(x, y, weight, bias, eps)
        });
        Ok((out?, x.1.shape().clone()))
    }

    fn by_candle(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        // candle would broadcast a width of 1, and panic for integers.
        if x.dims().last() != self.weight.dims().first() || !x.dtype().is_float() {
            candle_core::bail!(
                "input of layer norm has dtype {:?} and shape {:?}: expected floats of shape \
                 (.., {})",
                x.dtype(),
                x.dims(),
                self.weight.elem_count()
            );
        }
        candle_nn::ops::layer_norm_slow(x, &self.weight, &self.bias, self.eps as f32)
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.cuda_kernel_supports(&[x]) {
            let x = cuda::contiguous_pairs(x)?;
            return cuda::apply1("layer norm", &x, |x| self.on_cuda(x, None));
        }
        match self.cpu_kernel_for_equal_shapes(&[x]) {
            Some(kernel) => row_norm::add_norm(kernel.isa, x, None, kernel.norm()),
            None => self.by_candle(x),
        }
    }
}

/// The parameters of a [`LayerNorm`] for the CPU kernel.
#[derive(Clone, Debug)]
pub(crate) struct CpuLayerNorm {
    pub(crate) weight: Arc<[f32]>,
    pub(crate) bias: Arc<[f32]>,
    pub(crate) eps: f32,
    pub(crate) isa: Isa,
}

impl CpuLayerNorm {
    fn new(weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Self> {
        let (weight, bias) = (weight.to_vec1()?.into(), bias.to_vec1()?.into());
        Ok(Self { weight, bias, eps: eps as f32, isa: Isa::get()? })
    }

    fn norm(&self) -> RowNorm<'_> {
        RowNorm::Layer { weight: &self.weight, bias: &self.bias, eps: self.eps }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu};
    use candle_nn::VarBuilder;

    use super::*;

    #[test]
    fn updates_of_trained_parameters_take_effect() -> Result<()> {
        let tensors = [("weight", 2f32), ("bias", 1f32)];
        let tensors = tensors.map(|(name, x)| Ok((name.to_string(), Tensor::new(&[x, x], &Cpu)?)));
        let tensors = tensors.into_iter().collect::<Result<std::collections::HashMap<_, _>>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
        let frozen = LayerNorm::new(2, 0.0, true, vb.clone())?;
        let x = Tensor::new(&[1f32, 3.], &Cpu)?;
        assert_eq!(frozen.forward(&x)?.to_vec1::<f32>()?, [-1., 3.]);
        let without_bias = LayerNorm::new(2, 0.0, false, vb)?;
        assert_eq!(without_bias.forward(&x)?.to_vec1::<f32>()?, [-2., 2.]);
        let vars = candle_nn::VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Cpu);
        let trained = LayerNorm::new(2, 0.0, true, vb)?;
        assert_eq!(trained.forward(&x)?.to_vec1::<f32>()?, [-1., 1.]);
        for var in vars.all_vars() {
            var.set(&Tensor::new(&[2f32, 2.], &Cpu)?)?;
        }
        assert_eq!(trained.forward(&x)?.to_vec1::<f32>()?, [0., 4.]);
        Ok(())
    }

    /// By the kernel, and by candle for tracked inputs.
    #[test]
    fn the_sum_and_its_norm_are_those_of_separate_calls() -> Result<()> {
        let tensors = [("weight", [1f32, -2., 3.]), ("bias", [0.5, 0., -1.])];
        let tensors = tensors.map(|(name, x)| (name.to_string(), Tensor::new(&x, &Cpu).unwrap()));
        let vb = VarBuilder::from_tensors(tensors.into(), DType::F32, &Cpu);
        let norm = LayerNorm::new(3, 0.1, true, vb)?;
        let x = Tensor::new(&[[1f32, 2., 4.], [0., -1., 3.]], &Cpu)?;
        let y = (&x.t()?.reshape((2, 3))? * 0.5)?;
        for x in [x.clone(), candle_core::Var::from_tensor(&x)?.into_inner()] {
            let (sum, normalised) = norm.forward_residual(&x, &y)?;
            assert_eq!(sum.to_vec2::<f32>()?, (&x + &y)?.to_vec2::<f32>()?);
            let expected = norm.forward_sum(&x, &y)?.to_vec2::<f32>()?;
            assert_eq!(normalised.to_vec2::<f32>()?, expected);
        }
        Ok(())
    }

    /// The storage of the tensor is empty, but the start offset of the view is 3.
    #[test]
    fn views_without_elements_are_accepted() -> Result<()> {
        let x = Tensor::zeros((0, 5, 3), DType::F32, &Cpu)?.narrow(1, 1, 2)?;
        let norm = LayerNorm::new(3, 1e-5, true, VarBuilder::zeros(DType::F32, &Cpu))?;
        let weight = Tensor::ones((3, 3), DType::F32, &Cpu)?;
        let linear = crate::Linear::new(crate::ComputeType::F32, weight, None)?;
        for y in [norm.forward(&x)?, add(&x, &x)?, linear.forward(&x)?] {
            assert_eq!(y.dims(), [0, 2, 3]);
        }
        Ok(())
    }

    #[test]
    fn inputs_and_settings_that_do_not_fit_are_errors() -> Result<()> {
        let vb = VarBuilder::zeros(DType::F32, &Cpu);
        let x = |width| Tensor::ones((4, width), DType::F32, &Cpu);
        // 4 rows of 3 are as many values as 2 rows of 6; a width of 1 could be broadcast.
        for (hidden_size, width) in [(6, 3), (6, 1), (1, 3)] {
            let norm = LayerNorm::new(hidden_size, 1e-5, true, vb.clone())?;
            let x = x(width)?;
            assert!(norm.forward(&x).is_err(), "{hidden_size} {width}");
            assert!(norm.forward_sum(&x, &x).is_err(), "{hidden_size} {width}");
            assert!(norm.forward_residual(&x, &x).is_err(), "{hidden_size} {width}");
        }
        let norm = LayerNorm::new(3, 1e-5, true, vb.clone())?;
        let error = norm.forward(&x(3)?.to_dtype(DType::U32)?).unwrap_err().to_string();
        assert!(error.starts_with("input of layer norm has dtype U32 and shape [4, 3]"), "{error}");
        let error = LayerNorm::new(3, -1.0, true, vb).unwrap_err().to_string();
        assert_eq!(error, "eps -1 is invalid: expected 0 or a small positive number");
        Ok(())
    }

    /// The variance of 1000, 1001, 1002 is 2/3. Computed in f32 as the mean square minus the
    /// squared mean, it would be 0.6875.
    #[test]
    fn the_variance_is_accurate_for_a_large_mean() -> Result<()> {
        let x = Tensor::new(&[1000f32, 1001., 1002.], &Cpu)?;
        let ones = Tensor::ones(3, DType::F32, &Cpu)?;
        let frozen = [("weight".to_string(), ones.clone()), ("bias".to_string(), ones)];
        // Autograd tracks only the parameters of the second module, so the kernel computes only the
        // first.
        for vb in [
            VarBuilder::from_tensors(frozen.into(), DType::F32, &Cpu),
            VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &Cpu),
        ] {
            let bias = vb.get(3, "bias")?.to_vec1::<f32>()?[2];
            let norm = LayerNorm::new(3, 0.0, true, vb)?;
            let y = norm.forward(&x)?.to_vec1::<f32>()?;
            assert!((y[2] - bias - 1.5f32.sqrt()).abs() < 1e-6, "{y:?}");
        }
        Ok(())
    }
}
