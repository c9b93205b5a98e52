//! Attention with linear biases (ALiBi): a bias on the scores, linear in the distance of the tokens.
//! Press et al. 2022, <https://arxiv.org/abs/2108.12409>.

use candle_core::{Device, Tensor};

use crate::{Error, Result};

/// The maximum radius: f32 represents every integer up to this one.
pub(crate) const MAX_RADIUS: usize = 1 << 24;

/// The slopes of `heads` heads.
///
/// If `heads` is a power of two, the slopes are `2^(−8k/heads)` for k from 1 to `heads`. Otherwise,
/// let p be the largest power of two below `heads`: the first p slopes are those of p heads, and
/// the others are the first, third, fifth and following odd-numbered slopes of 2p heads.
///
/// # Source
/// Press et al. 2022, section 3; the authors' code for numbers of heads that are not a power of two,
/// <https://github.com/ofirpress/attention_with_linear_biases>.
///
/// # Examples
/// ```
/// assert_eq!(mha::alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
/// assert_eq!(mha::alibi_slopes(6)[4..], [0.5, 0.125]); // 8 heads have 0.5, 0.25, 0.125, ..
/// ```
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let power_of_two = |n: usize| (1..=n).map(move |k| (-8.0 * k as f64 / n as f64).exp2() as f32);
    let Some(exponent) = heads.checked_ilog2() else { return vec![] };
    let p = 1 << exponent;
    power_of_two(p).chain(power_of_two(2 * p).step_by(2).take(heads - p)).collect()
}

/// The bias `−slope · |d|` of each head and distance d, for [`AttentionMask::with_distance_bias`].
///
/// The bias is symmetric: encoders use it for keys before and after the query. With a causal mask,
/// which hides the keys after the query, the bias is that of Press et al.
///
/// [`AttentionMask::with_distance_bias`]: crate::AttentionMask::with_distance_bias
///
/// # Shapes
/// returns `(heads, 2·radius + 1)` in f32; column `radius + d` is for distance d
/// # Errors
/// [`Error::TooLarge`] for a radius above 2²⁴, since f32 does not represent every larger distance;
/// [`Error::Candle`] if the tensor cannot be created.
/// # Source
/// Press et al. 2022, section 3.
///
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
///
/// let table = mha::alibi(2, 2, &Cpu)?; // slopes 2⁻⁴ and 2⁻⁸
/// assert_eq!(table.get(0)?.to_vec1::<f32>()?, [-0.125, -0.0625, 0., -0.0625, -0.125]);
///
/// let mask = AttentionMask::none().with_distance_bias(&table)?;
/// let x = Tensor::zeros((1, 2, 3, 4), candle_core::DType::F32, &Cpu)?; // all scores are 0
/// let (_, weights) = attend(&x, &x, &x, &mask, None)?;
/// let first = weights.get(0)?.get(0)?.get(0)?.to_vec1::<f32>()?; // of the first query of head 0
/// assert!((first[2] / first[0] - (-0.125f32).exp()).abs() < 1e-6);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn alibi(heads: usize, radius: usize, device: &Device) -> Result<Tensor> {
    if radius > MAX_RADIUS {
        return Err(Error::TooLarge { field: "radius", got: radius, max: MAX_RADIUS });
    }
    let columns = 2 * radius + 1;
    let biases = alibi_slopes(heads)
        .into_iter()
        .flat_map(|slope| (0..columns).map(move |column| -slope * column.abs_diff(radius) as f32));
    Ok(Tensor::from_iter(biases, device)?.reshape((heads, columns))?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Var};

    use super::*;
    use crate::testing::max_difference;
    use crate::{AttentionMask, scaled_dot_product_attention};

    #[test]
    fn slopes_match_the_definition_for_powers_of_two_and_other_numbers_of_heads() {
        let exponents = |heads| alibi_slopes(heads).iter().map(|s| -s.log2()).collect::<Vec<f32>>();
        assert_eq!(exponents(1), [8.0]);
        assert_eq!(exponents(8), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(exponents(3), [4.0, 8.0, 2.0]);
        // BERT-base has 12 heads: the slopes of 8 heads, then 4 odd-numbered slopes of 16 heads.
        assert_eq!(exponents(12)[8..], [0.5, 1.5, 2.5, 3.5]);
        assert!(alibi_slopes(0).is_empty());
    }

    fn wave(shape: &[usize], step: f64) -> Result<Tensor> {
        let n = shape.iter().product::<usize>();
        Ok((Tensor::arange(0f32, n as f32, &Cpu)? * step)?.sin()?.reshape(shape)?)
    }

    /// The bias as a matrix per head, by its definition.
    fn matrix(heads: usize, t: usize) -> Result<Tensor> {
        let slopes = Tensor::new(alibi_slopes(heads), &Cpu)?.reshape((heads, 1, 1))?;
        let index = Tensor::arange(0f32, t as f32, &Cpu)?;
        let distance = index.unsqueeze(1)?.broadcast_sub(&index.unsqueeze(0)?)?.abs()?;
        Ok(slopes.broadcast_mul(&distance.unsqueeze(0)?)?.neg()?) // (H, T, T)
    }

    /// Outputs are at most 1, so rounding to f16 or bf16 changes them by at most 2⁻¹² or 2⁻⁹.
    #[test]
    fn attention_with_the_table_equals_attention_with_a_matrix_in_every_dtype() -> Result<()> {
        let (heads, t) = (3, 40);
        let [q, k, v] = [0.7, 1.1, 1.9].map(|step| wave(&[2, heads, t, 4], step).unwrap());
        let bias = matrix(heads, t)?;
        let part = alibi(heads, t + 3, &Cpu)?.narrow(1, 2, 2 * t + 3)?; // not contiguous
        let mask = AttentionMask::none().with_distance_bias(&part)?;
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(dtype).unwrap());
            let got = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
            let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(DType::F32).unwrap());
            let scores = (q.matmul(&k.t()?)? * 0.5)?.broadcast_add(&bias)?;
            let weights = candle_nn::ops::softmax_last_dim(&scores)?;
            let difference = max_difference(&got, &weights.matmul(&v)?)?;
            assert!(difference < tolerance, "{dtype:?}: {difference}");
        }
        Ok(())
    }

    #[test]
    fn gradients_pass_through_attention_with_the_table() -> Result<()> {
        let (heads, t) = (3, 7);
        let [k, v] = [1.1, 1.9].map(|step| wave(&[1, heads, t, 4], step).unwrap());
        let q = Var::from_tensor(&wave(&[1, heads, t, 4], 0.7)?)?;
        let gradient = |mask: AttentionMask| -> Result<Tensor> {
            let loss = (scaled_dot_product_attention(&q, &k, &v, &mask, None)? * &v)?.sum_all()?;
            Ok(loss.backward()?.get(&q).unwrap().clone())
        };
        let table = gradient(AttentionMask::none().with_distance_bias(&alibi(heads, t, &Cpu)?)?)?;
        let matrix = gradient(AttentionMask::none().with_bias(&matrix(heads, t)?)?)?;
        let difference = max_difference(&table, &matrix)?;
        assert!(difference < 1e-6, "{difference}");
        assert!(table.abs()?.max_all()?.to_scalar::<f32>()? > 0.01);
        Ok(())
    }
}
