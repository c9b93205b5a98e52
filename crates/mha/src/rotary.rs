//! Rotary position embedding: queries and keys are rotated by angles proportional to their
//! positions, so that scores depend on the distance of the tokens.
//! Su et al. 2021, <https://arxiv.org/abs/2104.09864>.

use candle_core::{DType, Device, Tensor};
use candle_nn::rotary_emb::{rope, rope_slow};

use crate::{Error, QueryKeyTransform, Result};

/// The cosines and sines of all positions: the angle of the pair of values `i` and `i + D/2` of a
/// token at position p is `p · theta^(−2i/D)`.
///
/// # Numerics
/// Angles are computed in f32, rotations in f32 or, for f64 inputs, in f64.
///
/// # Examples
/// The score of two tokens depends on their distance only:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::{QueryKeyTransform, Rotary};
///
/// let rotary = Rotary::new(10_000., 4, 100, &Cpu)?; // theta, D, positions
/// let x = Tensor::new(&[[[[1f32, 2., 3., 4.], [5., 6., 7., 8.]]]], &Cpu)?; // (1, 1, 2, 4)
/// let score = |positions: [u32; 2]| -> mha::Result<f32> {
///     let rotated = rotary.at(&positions)?.query(&x)?.squeeze(0)?.squeeze(0)?;
///     Ok((rotated.get(0)? * rotated.get(1)?)?.sum_all()?.to_scalar()?)
/// };
/// assert!((score([0, 3])? - score([90, 93])?).abs() < 1e-4);
/// assert!((score([0, 0])? - 70.).abs() < 1e-4); // 1·5 + 2·6 + 3·7 + 4·8
/// # Ok::<(), mha::Error>(())
/// ```
/// # Source
/// Su et al. 2021, equation 34, in the layout of GPT-NeoX: `rotate_half` of transformers.
#[derive(Clone, Debug)]
pub struct Rotary {
    cos: Tensor, // (positions, D / 2)
    sin: Tensor, // (positions, D / 2)
}

impl Rotary {
    /// The rotation for heads of width `d`, for the positions below `positions`.
    ///
    /// # Errors
    /// [`Error::OddHeadDim`] if `d` is odd; [`Error::Candle`] if a tensor cannot be created.
    pub fn new(theta: f64, d: usize, positions: usize, device: &Device) -> Result<Self> {
        if !d.is_multiple_of(2) {
            return Err(Error::OddHeadDim { got: d });
        }
        // In f32, as transformers computes the frequencies.
        let frequency = |i: usize| 1.0 / (theta as f32).powf((2 * i) as f32 / d as f32);
        let frequencies: Vec<f32> = (0..d / 2).map(frequency).collect();
        let frequencies = Tensor::from_vec(frequencies, (1, d / 2), device)?;
        let positions = Tensor::arange(0f32, positions as f32, device)?.unsqueeze(1)?;
        let angles = positions.broadcast_mul(&frequencies)?; // (positions, D / 2)
        Ok(Self { cos: angles.cos()?, sin: angles.sin()? })
    }

    /// The rotation of tokens at these positions: `positions[t]` is that of token t of every
    /// sequence.
    ///
    /// # Errors
    /// [`Error::Candle`] if a position is out of range.
    pub fn at(&self, positions: &[u32]) -> Result<RotaryAt> {
        let positions = Tensor::new(positions, self.cos.device())?;
        let rows = |table: &Tensor| table.index_select(&positions, 0);
        Ok(RotaryAt { cos: rows(&self.cos)?, sin: rows(&self.sin)? })
    }
}

/// The cosines and sines of T positions, from [`Rotary::at`].
#[derive(Clone, Debug)]
pub struct RotaryAt {
    cos: Tensor, // (T, D / 2)
    sin: Tensor, // (T, D / 2)
}

impl RotaryAt {
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let x_f32 = match x.dtype() {
            DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
            _ => x.clone(),
        };
        let (cos, sin) = (self.cos.to_dtype(x_f32.dtype())?, self.sin.to_dtype(x_f32.dtype())?);
        let rotated = match x.track_op() {
            true => rope_slow(&x_f32.contiguous()?, &cos, &sin)?, // has gradients
            false => rope(&x_f32.contiguous()?, &cos, &sin)?,
        };
        Ok(rotated.to_dtype(x.dtype())?)
    }
}

impl QueryKeyTransform for RotaryAt {
    fn query(&self, q: &Tensor) -> Result<Tensor> {
        self.rotate(q)
    }

    fn key(&self, k: &Tensor) -> Result<Tensor> {
        self.rotate(k)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, Var};

    use super::*;

    /// The rotation by its definition, in f64: a complex number per pair.
    #[test]
    fn rotations_match_the_definition_in_every_dtype() -> Result<()> {
        let (theta, d, positions) = (160_000.0, 6, [0u32, 7, 3, 40]);
        let rotary = Rotary::new(theta, d, 41, &Cpu)?.at(&positions)?;
        let x = (Tensor::arange(0f32, 48., &Cpu)? * 0.9)?.sin()?.reshape((1, 2, 4, d))?;
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            let input = x.to_dtype(dtype)?;
            let got =
                rotary.query(&input)?.to_dtype(DType::F64)?.flatten_to(2)?.to_vec2::<f64>()?;
            let rows = input.to_dtype(DType::F64)?.flatten_to(2)?.to_vec2::<f64>()?;
            for (i, (got, x)) in got.iter().zip(&rows).enumerate() {
                for pair in 0..d / 2 {
                    let frequency = theta.powf(-2.0 * pair as f64 / d as f64);
                    let (sin, cos) = (f64::from(positions[i % 4]) * frequency).sin_cos();
                    let (a, b) = (x[pair], x[pair + d / 2]);
                    for (got, expected) in
                        [(got[pair], a * cos - b * sin), (got[pair + d / 2], b * cos + a * sin)]
                    {
                        assert!((got - expected).abs() < tolerance, "{dtype:?} {got} {expected}");
                    }
                }
            }
        }
        Ok(())
    }

    /// A rotation preserves norms, so the gradient of the squared norm is `2x`.
    #[test]
    fn gradients_pass_through_a_rotation() -> Result<()> {
        let rotary = Rotary::new(100.0, 4, 9, &Cpu)?.at(&[8, 2, 5])?;
        let x = Var::from_tensor(&Tensor::arange(1f32, 13., &Cpu)?.reshape((1, 1, 3, 4))?)?;
        let gradients = rotary.key(&x)?.sqr()?.sum_all()?.backward()?;
        let difference = (gradients.get(&x).unwrap() - (x.as_tensor() * 2.0)?)?.abs()?;
        assert!(difference.max_all()?.to_scalar::<f32>()? < 1e-4);
        Ok(())
    }

    #[test]
    fn an_odd_head_width_is_an_error() {
        assert_eq!(
            Rotary::new(10.0, 5, 2, &Cpu).unwrap_err().to_string(),
            "head width 5 is odd: expected an even width for rotary position embedding"
        );
    }
}
