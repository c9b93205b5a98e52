//! Linear maps with weights in candle tensors of any dtype, by candle's matrix product. On a GPU, a
//! kernel applies the bias and the activation.

use candle_core::{DType, Module, Tensor};
use candle_nn::Linear;

use super::backend::{Backend, activate};
#[cfg(feature = "cuda")]
use super::cuda;
use crate::{Activation, Result};

impl Backend for Linear {
    fn dims(&self) -> Result<(usize, usize)> {
        Ok(self.weight().dims2()?)
    }

    fn weight(&self) -> Result<Tensor> {
        Ok(self.weight().clone())
    }

    fn bias(&self) -> Result<Option<Tensor>> {
        Ok(self.bias().cloned())
    }

    fn output_dtype(&self, input: DType) -> std::result::Result<DType, &'static str> {
        let dtype = self.weight().dtype();
        if input == dtype { Ok(dtype) } else { Err(dtype.as_str()) }
    }

    fn forward_activated(&self, x: &Tensor, activation: Option<Activation>) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(y) = cuda::linear(self, x, Activation::for_kernel(activation))? {
            return Ok(y);
        }
        activate(forward(self, x)?, activation)
    }
}

/// `x·Wᵀ + b`. A trained bias in half precision is added in f32: its gradient is the sum over all
/// tokens, which candle would compute in half precision.
fn forward(linear: &Linear, x: &Tensor) -> Result<Tensor> {
    let is_half = matches!(x.dtype(), DType::F16 | DType::BF16);
    match linear.bias().filter(|bias| is_half && bias.track_op()) {
        None => Ok(linear.forward(x)?),
        Some(bias) => {
            let y = Linear::new(linear.weight().clone(), None).forward(x)?;
            let bias = bias.to_dtype(DType::F32)?;
            Ok(y.to_dtype(DType::F32)?.broadcast_add(&bias)?.to_dtype(x.dtype())?)
        }
    }
}
