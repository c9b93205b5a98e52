//! Element-wise activations: by a CPU kernel, or by candle's operations.

use candle_core::{CpuStorage, CustomOp1, Layout, Module, Result, Shape, Tensor};
use mha_kernels::Isa;
use serde::{Deserialize, Serialize};

use crate::{Error, cpu, widen};

/// An element-wise activation. It is serialised as its name in a Hugging Face `config.json`
/// (`hidden_act`).
///
/// # Numerics
/// Maximum difference from PyTorch in f32 over [−20, 20]: 5e-7, relative for values above 1.
/// # Source
/// `ACT2FN` of Hugging Face transformers; GELU: Hendrycks and Gimpel 2016,
/// <https://arxiv.org/abs/1606.08415>.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Module, Tensor};
/// use ops::Activation;
///
/// let x = Tensor::new(&[-1f32, 0., 2.], &Cpu)?;
/// assert_eq!(Activation::Relu.forward(&x)?.to_vec1::<f32>()?, [0., 0., 2.]);
/// let gelu = Activation::Gelu.forward(&x)?.to_vec1::<f32>()?;
/// assert!((gelu[0] - -0.158_655_25).abs() < 1e-7); // −1·Φ(−1)
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Activation {
    /// `x·Φ(x)`, computed with erf: `gelu`, `gelu_python`.
    #[default]
    Gelu,
    /// `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`: `gelu_new`, `gelu_fast`, `gelu_pytorch_tanh`.
    GeluTanh,
    /// `max(0, x)`: `relu`.
    Relu,
    /// `x·σ(x)`: `silu`, `swish`.
    Silu,
    /// `tanh(x)`: `tanh`.
    Tanh,
    /// `x·σ(1.702·x)`: `quick_gelu`.
    QuickGelu,
    /// `x·tanh(ln(1 + eˣ))`: `mish`.
    Mish,
    /// `σ(x) = 1 / (1 + e⁻ˣ)`: `sigmoid`.
    Sigmoid,
}

/// The accepted values of `hidden_act`. An activation is serialised as its first name.
const NAMES: [(&str, Activation); 12] = [
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("relu", Activation::Relu),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("tanh", Activation::Tanh),
    ("quick_gelu", Activation::QuickGelu),
    ("mish", Activation::Mish),
    ("sigmoid", Activation::Sigmoid),
];

impl Activation {
    /// An optional activation as the kernels' type.
    pub(crate) fn for_kernel(activation: Option<Self>) -> mha_kernels::Activation {
        match activation {
            None => mha_kernels::Activation::None,
            Some(Self::Gelu) => mha_kernels::Activation::Gelu,
            Some(Self::GeluTanh) => mha_kernels::Activation::GeluTanh,
            Some(Self::Relu) => mha_kernels::Activation::Relu,
            Some(Self::Silu) => mha_kernels::Activation::Silu,
            Some(Self::Tanh) => mha_kernels::Activation::Tanh,
            Some(Self::QuickGelu) => mha_kernels::Activation::QuickGelu,
            Some(Self::Mish) => mha_kernels::Activation::Mish,
            Some(Self::Sigmoid) => mha_kernels::Activation::Sigmoid,
        }
    }
}

impl TryFrom<String> for Activation {
    type Error = String;

    fn try_from(name: String) -> std::result::Result<Self, String> {
        match NAMES.iter().find(|(known, _)| *known == name) {
            Some(&(_, activation)) => Ok(activation),
            None => {
                let known = NAMES.map(|(known, _)| known).join(", ");
                Err(format!("activation {name:?} is unknown: expected one of {known}"))
            }
        }
    }
}

impl From<Activation> for String {
    fn from(activation: Activation) -> String {
        let named = NAMES.iter().find(|(_, known)| *known == activation);
        let (name, _) = named.expect("NAMES has every activation");
        name.to_string()
    }
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if !x.dtype().is_float() {
            candle_core::bail!("activation of {:?}: expected floats", x.dtype());
        }
        if x.device().is_cpu() {
            let wide = widen(x)?;
            if cpu::prefers_kernel(&[&wide]) {
                let op = CpuActivation {
                    activation: Self::for_kernel(Some(*self)),
                    isa: Isa::get().map_err(Error::from)?,
                };
                return wide.contiguous()?.apply_op1_no_bwd(&op)?.to_dtype(x.dtype());
            }
        }
        match self {
            Self::Gelu => x.gelu_erf(),
            Self::GeluTanh => for_gradients(x)?.gelu()?.to_dtype(x.dtype()),
            // `relu` of candle 0.11.1 turns NaN into 0, and its gradient at 0 is 1; PyTorch's is 0.
            Self::Relu => x.le(0f64)?.where_cond(&x.zeros_like()?, x),
            Self::Silu => for_gradients(x)?.silu()?.to_dtype(x.dtype()),
            Self::Tanh => x.tanh(),
            Self::QuickGelu => {
                let wide = for_gradients(x)?;
                (&wide * candle_nn::ops::sigmoid(&(&wide * 1.702)?)?)?.to_dtype(x.dtype())
            }
            Self::Mish => mish(x),
            Self::Sigmoid => candle_nn::ops::sigmoid(x),
        }
    }
}

struct CpuActivation {
    activation: mha_kernels::Activation,
    isa: Isa,
}

impl CustomOp1 for CpuActivation {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = mha_kernels::activate(self.isa, cpu::contiguous(x, layout)?, self.activation);
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }
}

/// `x`, in f32 if autograd tracks it and it has a half-precision dtype. candle's backward passes
/// would otherwise compute in half precision: x³ in the tanh form of GELU would overflow f16, and
/// rounding would make the gradient of SiLU 0 instead of 1 for large x.
fn for_gradients(x: &Tensor) -> Result<Tensor> {
    if x.track_op() { widen(x) } else { Ok(x.clone()) }
}

/// `x·tanh(ln(1 + eˣ))`, computed as `x·n / (n + 2)` with `n = eˣ·(eˣ + 2)`, because `1 + eˣ` would
/// lose the low bits of a small eˣ. For x > 20 the quotient `n / (n + 2)` rounds to 1 in f32.
fn mish(x: &Tensor) -> Result<Tensor> {
    let wide = widen(x)?;
    let e = wide.minimum(20.0)?.exp()?;
    let n = (&e * (&e + 2.0)?)?;
    (&wide * (&n / (&n + 2.0)?)?)?.to_dtype(x.dtype())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Var};

    use super::*;

    /// For x = 50, the x³ in GELU's tanh form exceeds the largest value of f16, 65,504.
    #[test]
    fn gradients_of_large_inputs_are_exact_in_half_precision() -> Result<()> {
        for (_, activation) in NAMES {
            for (dtype, large) in [(DType::F16, 50.), (DType::F16, 1e4), (DType::BF16, 300.)] {
                let x = Var::from_tensor(&Tensor::new(&[-large, large], &Cpu)?.to_dtype(dtype)?)?;
                let gradients = activation.forward(&x)?.sum_all()?.backward()?;
                let gradient = gradients.get(&x).expect("a gradient").to_dtype(DType::F32)?;
                let flat = [Activation::Tanh, Activation::Sigmoid].contains(&activation);
                let positive = if flat { 0. } else { 1. };
                assert_eq!(gradient.to_vec1::<f32>()?, [0., positive], "{activation:?} {dtype:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn the_gradient_of_relu_at_zero_is_zero_and_nan_stays_nan() -> Result<()> {
        let untracked = Tensor::new(&[-1f32, 0., 2., f32::NAN], &Cpu)?;
        let y = Activation::Relu.forward(&untracked)?.to_vec1::<f32>()?;
        assert!(y[..3] == [0., 0., 2.] && y[3].is_nan(), "{y:?}");
        let x = Var::from_tensor(&untracked)?;
        let y = Activation::Relu.forward(&x)?;
        let gradients = y.narrow(0, 0, 3)?.sum_all()?.backward()?;
        let gradient = gradients.get(&x).expect("a gradient");
        assert_eq!(gradient.narrow(0, 0, 3)?.to_vec1::<f32>()?, [0., 0., 1.]);
        let y = y.to_vec1::<f32>()?;
        assert!(y[..3] == [0., 0., 2.] && y[3].is_nan(), "{y:?}");
        Ok(())
    }

    #[test]
    fn integers_are_an_error() -> Result<()> {
        for (_, activation) in NAMES {
            let error = activation.forward(&Tensor::new(&[1u32], &Cpu)?).unwrap_err().to_string();
            assert!(error.starts_with("activation of U32: expected floats"), "{error}");
        }
        Ok(())
    }
}
