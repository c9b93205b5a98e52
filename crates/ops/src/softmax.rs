//! The softmax of rows, and its normaliser, the logarithm of the sum of exponentials.

use mha_kernels::Isa;

use crate::Result;

/// `ln Σⱼ exp(xᵢⱼ)` of each row: exponentials in f32, sums in f32 and f64. A row of −∞ gives −∞, and a
/// row with NaN or ∞ gives NaN.
///
/// # Shapes
/// `x`: `(R, width)`; returns R values
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
/// # Panics
/// If `width` is 0 or `x` is not whole rows.
/// # Examples
/// ```
/// let sums = ops::log_sum_exp(&[0., 0., 5., 3.], 2)?;
/// assert!((sums[0] - 2f64.ln()).abs() < 1e-7 && (sums[1] - 5.126928).abs() < 1e-6);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn log_sum_exp(x: &[f32], width: usize) -> Result<Vec<f64>> {
    Ok(mha_kernels::log_sum_exp(Isa::get()?, x, width))
}

/// `exp(xᵢⱼ) / Σₗ exp(xᵢₗ)` of each row, in place, with the sums of [`log_sum_exp`]. A row of −∞, and a
/// row with NaN or ∞, gives NaN.
///
/// # Shapes
/// `x`: `(R, width)`
/// # Errors
/// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
/// # Panics
/// If `width` is 0 or `x` is not whole rows.
/// # Examples
/// ```
/// let mut x = [0., 3f32.ln(), 7., 7.];
/// ops::softmax(&mut x, 2)?;
/// assert!((x[1] - 0.75).abs() < 1e-7 && x[2..] == [0.5, 0.5]);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn softmax(x: &mut [f32], width: usize) -> Result<()> {
    mha_kernels::softmax(Isa::get()?, x, width);
    Ok(())
}
