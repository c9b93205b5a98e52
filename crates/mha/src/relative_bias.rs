//! Relative position bias: a learned bias on the scores, per head and bucket of distances.
//! Raffel et al. 2020, section 2.1, <https://arxiv.org/abs/1910.10683>.

use candle_core::Tensor;
use ops::{Loaded, NotLoaded, Weights};

use crate::{Error, Result, alibi::MAX_RADIUS};

/// The bucket of a signed distance: the index of the key minus that of the query.
///
/// Half of the `num_buckets` buckets are for keys after the query. In each half, absolute distances
/// below `num_buckets / 4` have a bucket of their own. Larger distances share buckets, whose index
/// grows with the logarithm of the distance; those of at least `max_distance` have the last bucket
/// of their half.
///
/// # Examples
/// ```
/// let bucket = |distance| mha::relative_position_bucket(distance, 32, 128);
/// assert_eq!([0, -1, -7, -8, -127, -1000].map(bucket), [0, 1, 7, 8, 15, 15]);
/// assert_eq!([1, 7, 8, 1000].map(bucket), [17, 23, 24, 31]);
/// ```
/// # Panics
/// If [`RelativeBias::new`] refuses the numbers: `num_buckets` is below 4, or `max_distance` is not
/// above `num_buckets / 4`.
/// # Source
/// Raffel et al. 2020; `MPNetEncoder.relative_position_bucket` of transformers 5.23, which computes
/// the logarithm in f32.
pub fn relative_position_bucket(distance: isize, num_buckets: usize, max_distance: usize) -> usize {
    let half = num_buckets / 2;
    let exact = half / 2;
    if let Err(error) = check_buckets(num_buckets, max_distance) {
        panic!("{error}");
    }
    let first = if distance > 0 { half } else { 0 };
    let n = distance.unsigned_abs();
    if n < exact {
        return first + n;
    }
    let fraction =
        libm::logf(n as f32 / exact as f32) / libm::log(max_distance as f64 / exact as f64) as f32;
    first + (exact + (fraction * (half - exact) as f32) as usize).min(half - 1)
}

/// Checks the arguments of [`relative_position_bucket`].
fn check_buckets(num_buckets: usize, max_distance: usize) -> Result<()> {
    if num_buckets >= 4 && max_distance > num_buckets / 4 {
        Ok(())
    } else {
        Err(Error::Buckets { num_buckets, max_distance })
    }
}

/// A table of biases, from which [`AttentionMask::with_distance_bias`] takes the bias of each query
/// and key.
///
/// [`AttentionMask::with_distance_bias`]: crate::AttentionMask::with_distance_bias
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionMask, RelativeBias, scaled_dot_product_attention_with_weights as attend};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let bias = RelativeBias::new(32, 128, 2, 9, vb)?; // 2 heads, distances up to 9
/// assert_eq!(bias.forward()?.dims(), [2, 19]);
/// let x = Tensor::zeros((1, 2, 5, 4), DType::F32, &Cpu)?;
/// let mask = AttentionMask::none().with_distance_bias(&bias.forward()?)?;
/// let (_, weights) = attend(&x, &x, &x, &mask, None)?;
/// assert_eq!(weights.sum_all()?.to_scalar::<f32>()?.round(), 10.); // 2 heads · 5 queries · 1
/// # Ok::<(), mha::Error>(())
/// ```
/// # Source
/// Raffel et al. 2020, section 2.1, <https://arxiv.org/abs/1910.10683>.
#[derive(Clone, Debug)]
pub struct RelativeBias {
    weight: Loaded<Tensor>, // (num_buckets, H)
    buckets: Tensor,        // (2·radius + 1,), u32
}

impl RelativeBias {
    /// Loads `weight` from `weights`, for distances of at most `radius`.
    ///
    /// # Shapes
    /// `weight`: `(num_buckets, heads)`
    /// # Errors
    /// [`Error::Buckets`] if `num_buckets` is below 4 or `max_distance` is not above
    /// `num_buckets / 4`; [`Error::TooLarge`] for a radius above 2²⁴; [`Error::Candle`] if
    /// `weights` lack the weight or have it in another shape.
    pub fn new<'a>(
        num_buckets: usize,
        max_distance: usize,
        heads: usize,
        radius: usize,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        check_buckets(num_buckets, max_distance)?;
        if radius > MAX_RADIUS {
            return Err(Error::TooLarge { field: "radius", got: radius, max: MAX_RADIUS });
        }
        let weights = weights.into();
        let weight = weights.get((num_buckets, heads), "weight")?;
        let radius = radius as isize;
        let buckets = (-radius..=radius)
            .map(|distance| relative_position_bucket(distance, num_buckets, max_distance) as u32);
        let buckets = Tensor::from_iter(buckets, weights.device())?;
        Ok(Self { weight, buckets })
    }

    /// The bias of each head and distance.
    ///
    /// # Shapes
    /// returns `(H, 2·radius + 1)`; column `radius + d` is for distance d
    /// # Errors
    /// [`crate::Error::Candle`] if a tensor operation fails.
    pub fn forward(&self) -> Result<Tensor> {
        let weight = self.weight.as_ref().map_err(NotLoaded::clone).map_err(ops::Error::from)?;
        Ok(weight.index_select(&self.buckets, 0)?.t()?.contiguous()?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, Var};

    use super::*;
    use crate::{AttentionMask, scaled_dot_product_attention};

    /// The gradient of a weighted sum of attention outputs equals a difference quotient.
    #[test]
    fn the_table_gets_gradients_through_attention() -> Result<()> {
        let wave = |shape: &[usize], step: f64| -> Result<Tensor> {
            let n = shape.iter().product::<usize>();
            Ok((Tensor::arange(0f32, n as f32, &Cpu)? * step)?.sin()?.reshape(shape)?)
        };
        let (q, k, v) =
            (wave(&[1, 2, 6, 4], 0.7)?, wave(&[1, 2, 6, 4], 1.1)?, wave(&[1, 2, 6, 4], 1.9)?);
        let loss = |weight: &Tensor| -> Result<Tensor> {
            let buckets = (-9..=9).map(|d| relative_position_bucket(d, 8, 6) as u32);
            let buckets = Tensor::from_iter(buckets, &Cpu)?;
            let bias = RelativeBias { weight: Ok(weight.clone()), buckets };
            let mask = AttentionMask::none().with_distance_bias(&bias.forward()?)?;
            Ok((scaled_dot_product_attention(&q, &k, &v, &mask, None)? * &v)?.sum_all()?)
        };
        let weight = Var::from_tensor(&wave(&[8, 2], 0.3)?)?;
        let gradient = loss(&weight)?.backward()?.get(&weight).unwrap().to_vec2::<f32>()?;
        for (bucket, head) in [(0, 0), (1, 1), (3, 0), (5, 1), (7, 0)] {
            let shifted = |step: f64| -> Result<f32> {
                let mut one = vec![0f32; 16];
                one[bucket * 2 + head] = 1.0;
                let one = (Tensor::from_vec(one, (8, 2), &Cpu)? * step)?;
                Ok(loss(&(weight.as_tensor() + one)?)?.to_scalar()?)
            };
            let slope = (shifted(0.01)? - shifted(-0.01)?) / 0.02;
            let got = gradient[bucket][head];
            assert!((got - slope).abs() < 2e-3, "bucket {bucket}, head {head}: {got} {slope}");
        }
        Ok(())
    }
}
