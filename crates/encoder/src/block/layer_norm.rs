//! Layer normalisation, `(x − mean(x)) / √(var(x) + ε) · weight + bias` over the last axis:
//! Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Module, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};
use mha::cpu;
#[cfg(feature = "cuda")]
use mha::cuda::{apply1, apply2, with_storage};
use mha_kernels::{Isa, add_layer_norm};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as kernels;

/// Layer normalisation over the last axis.
///
/// The variance is that of the centred values. candle's fused `layer_norm` subtracts the squared
/// mean from the mean square instead, which loses what a large mean leaves of the mantissa.
#[derive(Clone, Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor, // (E,)
    bias: Tensor,   // (E,)
    eps: f64,
    /// The parameters for the CPU kernel, if it can compute with them: never in training, where they
    /// change.
    kernel: Option<Kernel>,
}

impl LayerNorm {
    pub(crate) fn new(hidden_size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(hidden_size, "weight", Init::Const(1.))?;
        let bias = vb.get_with_hints(hidden_size, "bias", Init::Const(0.))?;
        let kernel = match cpu::takes(&[&weight, &bias]) {
            true => Some(Kernel::new(&weight, &bias, eps)?),
            false => None,
        };
        Ok(Self { weight, bias, eps, kernel })
    }
}

impl LayerNorm {
    /// `LayerNorm(x + y)`: the residual and its normalisation, in one pass on the CPU.
    pub(crate) fn forward_sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.is_for_cuda(&[x, y]) {
            let (x, y) = (x.contiguous()?, y.contiguous()?);
            return apply2("add and layer norm", [&x, &y], |x, y| self.on_cuda(x, Some(y)));
        }
        match self.kernel(&[x, y]) {
            Some(kernel) => x.contiguous()?.apply_op2_no_bwd(&y.contiguous()?, kernel),
            None => self.slow(&(x + y)?),
        }
    }

    /// Whether a CUDA kernel can compute from tensors of one shape, such as these.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_for_cuda(&self, x: &[&Tensor]) -> bool {
        let all: Vec<&Tensor> = x.iter().copied().chain([&self.weight, &self.bias]).collect();
        let one_shape = x.iter().all(|y| y.shape() == x[0].shape());
        one_shape
            && mha::cuda::takes(&all)
            && self.weight.dims1().is_ok_and(|e| kernels::takes_rows(x[0].dtype(), e))
    }

    /// Its weight and bias for a CUDA kernel.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_weights<T>(
        &self,
        run: impl FnOnce(kernels::Part, kernels::Part, f32) -> Result<T>,
    ) -> Result<T> {
        let (weight, bias) = (self.weight.contiguous()?, self.bias.contiguous()?);
        with_storage(&weight, |weight| {
            with_storage(&bias, |bias| run(weight, bias, self.eps as f32))
        })
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, x: kernels::Part, y: Option<kernels::Part>) -> Result<(CudaStorage, Shape)> {
        let out =
            self.with_weights(|weight, bias, eps| kernels::add_layer_norm(x, y, weight, bias, eps));
        Ok((out?, x.1.shape().clone()))
    }

    /// The CPU kernel, if it can compute from tensors of one shape, such as these.
    fn kernel(&self, x: &[&Tensor]) -> Option<&Kernel> {
        if x.iter().any(|y| y.shape() != x[0].shape()) {
            return None; // candle's error names the shapes
        }
        self.for_kernel(x)
    }

    /// The parameters for a CPU kernel, if it can compute from these tensors.
    pub(crate) fn for_kernel(&self, x: &[&Tensor]) -> Option<&Kernel> {
        self.kernel.as_ref().filter(|_| cpu::takes(x))
    }

    fn slow(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::layer_norm_slow(x, &self.weight, &self.bias, self.eps as f32)
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.is_for_cuda(&[x]) {
            return apply1("layer norm", &x.contiguous()?, |x| self.on_cuda(x, None));
        }
        match self.kernel(&[x]) {
            Some(kernel) => x.contiguous()?.apply_op1_no_bwd(kernel),
            None => self.slow(x),
        }
    }
}

/// A layer normalisation's parameters for the CPU kernel.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) weight: Arc<[f32]>,
    pub(crate) bias: Arc<[f32]>,
    pub(crate) eps: f32,
    pub(crate) isa: Isa,
}

impl Kernel {
    fn new(weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: weight.to_vec1()?.into(),
            bias: bias.to_vec1()?.into(),
            eps: eps as f32,
            isa: Isa::get().map_err(candle_core::Error::wrap)?,
        })
    }

    fn run(&self, x: &[f32], y: Option<&[f32]>, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = add_layer_norm(self.isa, x, y, &self.weight, &self.bias, self.eps);
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

impl CustomOp1 for Kernel {
    fn name(&self) -> &'static str {
        "layer norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.run(cpu::contiguous(x, layout)?, None, layout)
    }
}

impl CustomOp2 for Kernel {
    fn name(&self) -> &'static str {
        "add and layer norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        y: &CpuStorage,
        y_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.run(cpu::contiguous(x, layout)?, Some(cpu::contiguous(y, y_layout)?), layout)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu};

    use super::*;

    #[test]
    fn calls_share_the_parameters_unless_they_are_trained() -> Result<()> {
        let tensors = [("weight", 2f32), ("bias", 1f32)];
        let tensors = tensors.map(|(name, x)| Ok((name.to_string(), Tensor::new(&[x, x], &Cpu)?)));
        let tensors = tensors.into_iter().collect::<Result<std::collections::HashMap<_, _>>>()?;
        let frozen = LayerNorm::new(2, 0.0, VarBuilder::from_tensors(tensors, DType::F32, &Cpu))?;
        let x = Tensor::new(&[1f32, 3.], &Cpu)?;
        assert_eq!(frozen.forward(&x)?.to_vec1::<f32>()?, [-1., 3.]);
        if let Some(kernel) = frozen.for_kernel(&[&x]) {
            let again = frozen.for_kernel(&[&x]).expect("as before");
            assert!(Arc::ptr_eq(&kernel.weight, &again.weight));
        }
        let vars = candle_nn::VarMap::new();
        let trained = LayerNorm::new(2, 0.0, VarBuilder::from_varmap(&vars, DType::F32, &Cpu))?;
        assert_eq!(trained.forward(&x)?.to_vec1::<f32>()?, [-1., 1.]);
        for var in vars.all_vars() {
            var.set(&Tensor::new(&[2f32, 2.], &Cpu)?)?;
        }
        assert_eq!(trained.forward(&x)?.to_vec1::<f32>()?, [0., 4.]);
        Ok(())
    }

    /// 1000, 1001, 1002 is 0, 1, 2 moved: the variance is 2/3 either way. In f32 the mean square
    /// less the squared mean would give 0.6875.
    #[test]
    fn a_large_mean_does_not_disturb_the_variance() -> Result<()> {
        let norm = LayerNorm::new(
            3,
            0.0,
            VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &Cpu),
        )?;
        let x = Tensor::new(&[1000f32, 1001., 1002.], &Cpu)?;
        let y = norm.forward(&x)?.to_vec1::<f32>()?;
        assert!((y[2] - 1.5f32.sqrt()).abs() < 1e-6, "{y:?}");
        Ok(())
    }
}
