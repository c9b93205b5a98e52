//! The interface between [`Linear`](crate::Linear) and its backends.

use candle_core::{DType, Module, Tensor};

use crate::{Activation, Result};

/// The weights of a linear map in the form that one backend multiplies.
pub(super) trait Backend {
    /// `(out, in)`.
    fn dims(&self) -> Result<(usize, usize)>;

    /// The weights `(out, in)`, rounded as the backend multiplies them.
    fn weight(&self) -> Result<Tensor>;

    /// The bias `(out,)`, if the map has one.
    fn bias(&self) -> Result<Option<Tensor>>;

    /// The dtype of the output for an input of dtype `input`, or else the names of the supported
    /// dtypes.
    fn output_dtype(&self, input: DType) -> std::result::Result<DType, &'static str>;

    /// `activation(x·Wᵀ + b)`.
    ///
    /// # Shapes
    /// `x`: `(.., in)`, contiguous, of rank 2 to 4, with elements and a supported dtype; returns
    /// `(.., out)`
    fn forward_activated(&self, x: &Tensor, activation: Option<Activation>) -> Result<Tensor>;
}

/// `activation(y)`.
pub(super) fn activate(y: Tensor, activation: Option<Activation>) -> Result<Tensor> {
    match activation {
        Some(activation) => Ok(activation.forward(&y)?),
        None => Ok(y),
    }
}
