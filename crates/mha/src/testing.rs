//! A comparison of tensors, for the tests.

use candle_core::{DType, Tensor};

use crate::Result;

/// The maximum absolute difference between two tensors of the same shape; NaN if there is a NaN,
/// which `Tensor::max_all` would skip.
pub fn max_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    let difference = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?.abs()?;
    let differences = difference.flatten_all()?.to_vec1::<f64>()?;
    Ok(differences.into_iter().max_by(f64::total_cmp).unwrap_or(0.0))
}
