//! Dropout on the attention weights: Srivastava et al. 2014,
//! <https://jmlr.org/papers/v15/srivastava14a.html>.

use candle_core::Tensor;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{Error, Result};

/// Sets each value to 0 with probability `p`, and divides the others by `1 − p` to preserve the
/// mean.
///
/// Attention applies dropout only if [`crate::AttentionOptions`] holds a `Dropout`, as in training.
/// The caller owns the random number generator: the same seed and the same calls drop the same
/// weights on every device.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
///
/// let x = Tensor::ones((10_000,), DType::F32, &Cpu)?;
/// let dropped = mha::Dropout::new(0.2, 7)?.apply(&x)?;
/// let kept = dropped.gt(0f32)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
/// assert!((kept - 8000.).abs() < 200.);
/// assert_eq!(dropped.max_all()?.to_scalar::<f32>()?, 1.25);
///
/// let again = mha::Dropout::new(0.2, 7)?.apply(&x)?;
/// assert_eq!((dropped - again)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.);
/// # Ok::<(), mha::Error>(())
/// ```
/// # Source
/// Srivastava et al. 2014, <https://jmlr.org/papers/v15/srivastava14a.html>.
#[derive(Clone, Debug)]
pub struct Dropout {
    p: f64,
    rng: ChaCha8Rng,
}

impl Dropout {
    /// Dropout with probability `p`.
    ///
    /// # Errors
    /// [`Error::Probability`] unless `0 ≤ p < 1`.
    pub fn new(p: f64, seed: u64) -> Result<Self> {
        if !(0.0..1.0).contains(&p) {
            return Err(Error::Probability { name: "p", got: p });
        }
        Ok(Self { p, rng: ChaCha8Rng::seed_from_u64(seed) })
    }

    /// `x` with dropped values set to 0 and the others divided by `1 − p`.
    ///
    /// # Shapes
    /// `x`: any shape, floats; returns the same shape
    /// # Errors
    /// [`Error::DType`] for integers; [`Error::Candle`] if an operation fails on the device of
    /// `x`.
    pub fn apply(&mut self, x: &Tensor) -> Result<Tensor> {
        if !x.dtype().is_float() {
            return Err(Error::DType { argument: "x", expected: "floats", got: x.dtype() });
        }
        let keep = |_| u8::from(!self.rng.random_bool(self.p));
        let keep: Vec<u8> = (0..x.elem_count()).map(keep).collect();
        let keep = Tensor::from_vec(keep, x.shape(), x.device())?;
        let scaled = x.affine(1.0 / (1.0 - self.p), 0.0)?;
        Ok(keep.where_cond(&scaled, &x.zeros_like()?)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device::Cpu;

    use super::*;

    #[test]
    fn dropped_values_are_zero_even_if_they_were_infinite() -> Result<()> {
        let x = Tensor::full(f32::INFINITY, 100, &Cpu)?;
        let values = Dropout::new(0.5, 1)?.apply(&x)?.to_vec1::<f32>()?;
        let zeros = values.iter().filter(|value| **value == 0.0).count();
        assert!((30..70).contains(&zeros), "{zeros}");
        assert!(values.iter().all(|value| *value == 0.0 || *value == f32::INFINITY));
        Ok(())
    }
}
