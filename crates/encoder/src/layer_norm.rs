//! Layer normalisation, `(x − mean(x)) / √(var(x) + ε) · weight + bias` over the last axis:
//! Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Layer normalisation over the last axis.
///
/// The variance is that of the centred values. candle's fused `layer_norm` subtracts the squared
/// mean from the mean square instead, which loses what a large mean leaves of the mantissa.
#[derive(Clone, Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor, // (E,)
    bias: Tensor,   // (E,)
    eps: f64,
}

impl LayerNorm {
    pub(crate) fn new(hidden_size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight: vb.get_with_hints(hidden_size, "weight", Init::Const(1.))?,
            bias: vb.get_with_hints(hidden_size, "bias", Init::Const(0.))?,
            eps,
        })
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::layer_norm_slow(x, &self.weight, &self.bias, self.eps as f32)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu};

    use super::*;

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
