//! The normalisation that an [`EncoderConfig`] selects: LayerNorm or RMSNorm.

use candle_core::{D, DType, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use ops::LayerNorm;

use crate::{EncoderConfig, NormKind, Result};

/// A normalisation over the last axis.
#[derive(Clone, Debug)]
pub(crate) enum Norm {
    LayerNorm(LayerNorm),
    RmsNorm { weight: Tensor, eps: f64 },
}

impl Norm {
    /// Builds the normalisation of vectors of length `width` from `weight` in `vb`, and from `bias`
    /// for a LayerNorm with bias.
    pub(crate) fn new(config: &EncoderConfig, width: usize, vb: VarBuilder) -> Result<Self> {
        let eps = config.norm.eps;
        Ok(match config.norm.kind {
            NormKind::LayerNorm { bias } => Self::LayerNorm(LayerNorm::new(width, eps, bias, vb)?),
            NormKind::RmsNorm => {
                let weight = vb.get_with_hints(width, "weight", Init::Const(1.))?;
                Self::RmsNorm { weight, eps }
            }
        })
    }

    /// `norm(x + y)`
    pub(crate) fn forward_sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        match self {
            Self::LayerNorm(norm) => Ok(norm.forward_sum(x, y)?),
            Self::RmsNorm { .. } => Ok(self.forward(&ops::add(x, y)?)?),
        }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::LayerNorm(norm) => norm.forward(x),
            Self::RmsNorm { weight, eps } => {
                let (expected, got) = (weight.elem_count(), x.dims().last().copied());
                if got != Some(expected) || !x.dtype().is_float() {
                    candle_core::bail!(
                        "input of RMS norm has dtype {:?} and shape {:?}: expected floats of shape \
                         (.., {expected})",
                        x.dtype(),
                        x.dims()
                    );
                }
                let x_f32 = match x.dtype() {
                    DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
                    _ => x.clone(),
                };
                let mean_square = x_f32.sqr()?.mean_keepdim(D::Minus1)?;
                let normalised = x_f32.broadcast_div(&(mean_square + *eps)?.sqrt()?)?;
                normalised.to_dtype(x.dtype())?.broadcast_mul(weight)
            }
        }
    }
}
