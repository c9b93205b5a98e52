//! Linear maps with bf16 weights on a GPU.

use candle_core::{DType, Module, Tensor};

use super::backend::{Backend, activate};
#[cfg(feature = "cuda")]
use super::cuda;
use crate::{Activation, Result};

/// A linear map on a GPU whose weight is bf16.
#[derive(Clone, Debug)]
pub(super) struct Bf16 {
    /// The map with the bias rounded to bf16, for output in bf16.
    pub(super) rounded: candle_nn::Linear,
    /// The bias in f32, for output in f32.
    pub(super) bias: Option<Tensor>,
}

impl Bf16 {
    pub(super) fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self> {
        let bf16 = |x: &Tensor| x.to_dtype(DType::BF16);
        let rounded_bias = bias.as_ref().map(bf16).transpose()?;
        Ok(Self { rounded: candle_nn::Linear::new(bf16(weight)?, rounded_bias), bias })
    }
}

impl Backend for Bf16 {
    fn dims(&self) -> Result<(usize, usize)> {
        self.rounded.dims()
    }

    fn weight(&self) -> Result<Tensor> {
        Ok(self.rounded.weight().to_dtype(DType::F32)?)
    }

    fn bias(&self) -> Result<Option<Tensor>> {
        Ok(self.bias.clone())
    }

    fn output_dtype(&self, input: DType) -> std::result::Result<DType, &'static str> {
        match input {
            DType::F32 | DType::BF16 => Ok(DType::F32),
            _ => Err("f32 or bf16"),
        }
    }

    fn forward_activated(&self, x: &Tensor, activation: Option<Activation>) -> Result<Tensor> {
        let x = x.to_dtype(DType::BF16)?;
        #[cfg(feature = "cuda")]
        if let Some(y) = cuda::linear_to(DType::F32, &x, self.rounded.weight(), self.bias.as_ref())?
        {
            return activate(y, activation);
        }
        activate(self.rounded.forward(&x)?.to_dtype(DType::F32)?, activation)
    }
}
