//! The normalisation that an [`EncoderConfig`] selects: LayerNorm or RMSNorm.

use candle_core::{Module, Tensor};
use ops::{LayerNorm, NotLoaded, RmsNorm, Weights, loaded};

use crate::{EncoderConfig, NormKind, Result};

/// A normalisation over the last axis.
#[derive(Clone, Debug)]
pub(crate) enum Norm {
    Layer(LayerNorm),
    Rms(RmsNorm),
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
            NormKind::RmsNorm { unit_offset } => {
                loaded(RmsNorm::new(width, eps, unit_offset, weights))?.map(Self::Rms)
            }
        };
        Ok(norm.unwrap_or_else(Self::NotLoaded))
    }

    /// `norm(x + y)`
    pub(crate) fn forward_sum(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        match self {
            Self::Layer(norm) => Ok(norm.forward_sum(x, y)?),
            Self::Rms(norm) => Ok(norm.forward_sum(x, y)?),
            Self::NotLoaded(tensor) => Err(ops::Error::from(tensor.clone()).into()),
        }
    }
}

impl Norm {
    /// `(x + y, norm(x + y))`
    pub(crate) fn forward_residual(&self, x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Layer(norm) => Ok(norm.forward_residual(x, y)?),
            Self::Rms(norm) => Ok(norm.forward_residual(x, y)?),
            Self::NotLoaded(tensor) => Err(ops::Error::from(tensor.clone()).into()),
        }
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.forward(x),
            Self::NotLoaded(tensor) => Err(ops::Error::from(tensor.clone()).into()),
        }
    }
}
