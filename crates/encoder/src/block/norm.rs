//! The normalisation that an [`EncoderConfig`] selects: LayerNorm or RMSNorm.

use candle_core::{D, Module, Tensor};
use candle_nn::Init;
use ops::{LayerNorm, NotLoaded, Weights, loaded};

use crate::{EncoderConfig, NormKind, Result};

/// A normalisation over the last axis.
#[derive(Clone, Debug)]
pub(crate) enum Norm {
    Layer(LayerNorm),
    Rms { weight: Tensor, eps: f64 },
    NotLoaded(NotLoaded),
}

impl Norm {
    /// Builds the normalisation of vectors of length `width` from `weight` in `weights`, and from
    /// `bias` for a LayerNorm with bias.
    pub(crate) fn new(config: &EncoderConfig, width: usize, weights: Weights) -> Result<Self> {
        let eps = config.norm.eps;
        let norm = match config.norm.kind {
            NormKind::LayerNorm { bias } => {
                loaded(LayerNorm::new(width, eps, bias, weights))?.map(Self::Layer)
            }
            NormKind::RmsNorm => {
                let weight = weights.get_with_hints(width, "weight", Init::Const(1.))?;
                weight.map(|weight| Self::Rms { weight, eps })
            }
        };
        Ok(norm.unwrap_or_else(Self::NotLoaded))
    }

    /// `norm(x + y)`
    pub(crate) fn forward_sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        match self {
            Self::Layer(norm) => Ok(norm.forward_sum(x, y)?),
            _ => Ok(self.forward(&ops::add(x, y)?)?),
        }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::NotLoaded(tensor) => Err(ops::Error::from(tensor.clone()).into()),
            Self::Rms { weight, eps } => {
                let (expected, got) = (weight.elem_count(), x.dims().last().copied());
                if got != Some(expected) || !x.dtype().is_float() {
                    candle_core::bail!(
                        "input of RMS norm has dtype {:?} and shape {:?}: expected floats of shape \
                         (.., {expected})",
                        x.dtype(),
                        x.dims()
                    );
                }
                let x_f32 = ops::widen(x)?;
                let mean_square = x_f32.sqr()?.mean_keepdim(D::Minus1)?;
                let normalised = x_f32.broadcast_div(&(mean_square + *eps)?.sqrt()?)?;
                normalised.to_dtype(x.dtype())?.broadcast_mul(weight)
            }
        }
    }
}
