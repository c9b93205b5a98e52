//! Scaled dot-product attention, `softmax(q·kᵀ / √D) · v`: Vaswani et al. 2017, equation 1,
//! <https://arxiv.org/abs/1706.03762>.

use candle_core::{D, DType, Tensor};

use crate::{
    AttentionMask, Error, Result,
    mask::{Lowered, expect_dims},
};

/// At most this many scores are held at a time where the weights were not asked for: 64 MiB of f32.
const SCORES_AT_ONCE: usize = 1 << 24;

/// Scaled dot-product attention, `softmax(q·kᵀ · scale) · v`.
///
/// A query whose every key is hidden yields zeros, not NaN. The scores are never all in memory:
/// long inputs are done a few queries at a time, packed ones sequence by sequence.
///
/// # Shapes
/// - `q`: `(B, H, T, D)`; `k`, `v`: `(B, H, S, D)`; returns `(B, H, T, D)`
/// # Units
/// `scale` multiplies raw scores; `1/√D` where it is `None`.
/// # Numerics
/// f16 and bf16 are computed in f32 and rounded once. Largest difference to PyTorch 2.15 in f32,
/// over the shapes of the golden tests: 5e-7.
/// # Errors
/// [`Error::Shape`] naming the argument that does not fit; a mask's own errors.
/// # Source
/// Vaswani et al. 2017, equation 1, <https://arxiv.org/abs/1706.03762>; compare
/// `torch.nn.functional.scaled_dot_product_attention`.
/// # Examples
/// With `D = 64`, a raw score of 16 is scaled to 16 / √64 = 2, and softmax of 1, 0, −1 is
/// 0.67, 0.24, 0.09:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
///
/// // Of 64 components only the first differs from zero, so q·k is the product of those.
/// let first = |x: &[f32]| -> candle_core::Result<Tensor> {
///     Tensor::new(x, &Cpu)?.reshape((1, 1, x.len(), 1))?.pad_with_zeros(3, 0, 63)
/// };
/// let mask = AttentionMask::none();
/// let (_, weights) = attend(&first(&[4.])?, &first(&[4., 0.])?, &first(&[0., 0.])?, &mask, None)?;
/// let weights = weights.flatten_all()?.to_vec1::<f32>()?;
/// assert!(((weights[0] / weights[1]).ln() - 2.0).abs() < 1e-6); // 16 / √64
///
/// let (q, k) = (first(&[8.])?, first(&[1., 0., -1.])?); // scores 1, 0, −1
/// let (_, weights) = attend(&q, &k, &k, &mask, None)?;
/// let rounded = weights.flatten_all()?.to_vec1::<f32>()?.into_iter().map(|w| (w * 100.).round());
/// assert_eq!(rounded.collect::<Vec<_>>(), [67., 24., 9.]);
/// # Ok::<(), mha::Error>(())
/// ```
pub fn scaled_dot_product_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: Option<f64>,
) -> Result<Tensor> {
    let (b, t, s) = check(q, k, v)?;
    if let Some(offsets) = mask.blocks(s)? {
        let everything = Lowered::default();
        let mut contexts = Vec::with_capacity(offsets.len() - 1);
        for block in offsets.windows(2).filter(|block| block[0] < block[1]) {
            let of = |x: &Tensor| x.narrow(2, block[0], block[1] - block[0]);
            contexts.push(tiled(&of(q)?, &of(k)?, &of(v)?, &everything, scale)?);
        }
        return cat_queries(contexts, q);
    }
    tiled(q, k, v, &mask.lower(b, t, s, q.device())?, scale)
}

/// [`scaled_dot_product_attention`], and the weights it gave to the keys.
///
/// # Shapes
/// as there, and the weights `(B, H, T, S)`: each row sums to 1, or to 0 where no key is visible.
/// # Errors
/// as there.
pub fn scaled_dot_product_attention_with_weights(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: Option<f64>,
) -> Result<(Tensor, Tensor)> {
    let (b, t, s) = check(q, k, v)?;
    attend(q, k, v, &mask.lower(b, t, s, q.device())?, scale)
}

/// The formula itself.
fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Lowered,
    scale: Option<f64>,
) -> Result<(Tensor, Tensor)> {
    let dtype = q.dtype();
    let scale = scale.unwrap_or(1.0 / (q.dim(D::Minus1)? as f64).sqrt());
    let (q, k, v) = (accurate(q)?, accurate(k)?, accurate(v)?);
    let scores = (q * scale)?.contiguous()?.matmul(&k.t()?)?; // (B, H, T, S)
    let weights = softmax(&mask.hide_scores(scores)?)?;
    let context = weights.matmul(&mask.hide_values(v)?)?; // (B, H, T, D)
    Ok((context.to_dtype(dtype)?, weights.to_dtype(dtype)?))
}

/// [`attend`] for as many queries at a time as [`SCORES_AT_ONCE`] allows.
fn tiled(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Lowered, scale: Option<f64>) -> Result<Tensor> {
    let (b, h, t, _d) = q.dims4()?;
    let s = k.dim(2)?;
    let rows = (SCORES_AT_ONCE / (b * h * s).max(1)).max(1);
    if t <= rows {
        return Ok(attend(q, k, v, mask, scale)?.0);
    }
    let mut contexts = Vec::with_capacity(t.div_ceil(rows));
    for start in (0..t).step_by(rows) {
        let len = rows.min(t - start);
        let q = q.narrow(2, start, len)?;
        contexts.push(attend(&q, k, v, &mask.rows(start, len)?, scale)?.0);
    }
    cat_queries(contexts, q)
}

fn cat_queries(mut contexts: Vec<Tensor>, q: &Tensor) -> Result<Tensor> {
    match contexts.len() {
        0 => Ok(q.zeros_like()?),
        1 => Ok(contexts.remove(0)),
        _ => Ok(Tensor::cat(&contexts, 2)?),
    }
}

/// Softmax over the keys; a row of −∞ alone gives zeros.
///
/// The largest visible score contributes `e⁰ = 1`, so a denominator below 1 is that of an empty row.
fn softmax(scores: &Tensor) -> Result<Tensor> {
    let largest = scores.max_keepdim(D::Minus1)?.maximum(f32::MIN)?;
    let numerator = scores.broadcast_sub(&largest)?.exp()?;
    let denominator = numerator.sum_keepdim(D::Minus1)?.maximum(1f32)?;
    Ok(numerator.broadcast_div(&denominator)?)
}

/// Contiguous, and in a dtype whose sums are exact enough.
fn accurate(x: &Tensor) -> Result<Tensor> {
    let dtype = match x.dtype() {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    };
    Ok(x.to_dtype(dtype)?.contiguous()?)
}

/// `(b, t, s)`, once all three fit together.
fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(usize, usize, usize)> {
    let &[b, h, t, d] = q.dims() else {
        let (expected, got) = ("(B, H, T, D)".to_string(), q.dims().to_vec());
        return Err(Error::Shape { argument: "q", expected, got });
    };
    let s = if k.rank() == 4 { k.dim(2)? } else { t };
    expect_dims("k", k, &[b, h, s, d], "(B, H, S, D)")?;
    expect_dims("v", v, &[b, h, s, d], "(B, H, S, D)")?;
    Ok((b, t, s))
}

#[cfg(test)]
mod tests {
    use candle_core::Device::Cpu;

    use super::*;

    const DIMS: [usize; 5] = [2, 3, 5, 7, 4]; // B, H, T, S, D

    fn qkv(dtype: DType) -> Result<(Tensor, Tensor, Tensor)> {
        let [b, h, t, s, d] = DIMS;
        let random = |n: usize| Tensor::randn(0f32, 1f32, (b, h, n, d), &Cpu)?.to_dtype(dtype);
        Ok((random(t)?, random(s)?, random(s)?))
    }

    fn max_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
        let difference = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?.abs()?;
        Ok(difference.max_all()?.to_scalar::<f64>()?)
    }

    /// The definition in f64, one number at a time.
    fn reference(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        keep: impl Fn(usize, usize) -> bool,
    ) -> Result<Tensor> {
        let [b, h, t, s, d] = DIMS;
        let at = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
        let (q, k, v) = (at(q)?, at(k)?, at(v)?);
        let mut out = vec![0f64; b * h * t * d];
        for (row, out) in out.chunks_mut(d).enumerate() {
            let bh = row / t;
            let dot = |j: usize| -> f64 {
                (0..d).map(|x| q[row * d + x] * k[(bh * s + j) * d + x]).sum()
            };
            let weight = |j: usize| (dot(j) / (d as f64).sqrt()).exp();
            let visible: Vec<usize> = (0..s).filter(|&j| keep(bh / h, j)).collect();
            let sum: f64 = visible.iter().map(|&j| weight(j)).sum();
            for (x, out) in out.iter_mut().enumerate() {
                *out = visible.iter().map(|&j| weight(j) / sum * v[(bh * s + j) * d + x]).sum();
            }
        }
        Ok(Tensor::from_vec(out, (b, h, t, d), &Cpu)?)
    }

    #[test]
    fn equals_the_definition() -> Result<()> {
        let (q, k, v) = qkv(DType::F32)?;
        let got = scaled_dot_product_attention(&q, &k, &v, &AttentionMask::none(), None)?;
        let difference = max_difference(&got, &reference(&q, &k, &v, |_, _| true)?)?;
        assert!(difference < 1e-6, "{difference}");
        Ok(())
    }

    /// Half the mantissa of the result's dtype: the arithmetic itself is f32.
    #[test]
    fn hidden_keys_weigh_nothing_whatever_they_hold() -> Result<()> {
        let lens = [3, 0];
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
            let (q, k, v) = qkv(dtype)?;
            let expected = reference(&q, &k, &v, |b, j| j < lens[b])?;
            let mask = AttentionMask::none().with_valid_lens(&Tensor::new(&[3u32, 0], &Cpu)?)?;
            let poison = |x: &Tensor, with: f32| -> Result<Tensor> {
                let lowered = mask.lower(2, 5, 7, &Cpu)?;
                let hole = Tensor::full(with, x.shape(), &Cpu)?.to_dtype(dtype)?;
                let clean = lowered.hide_values(x.clone())?;
                let kept = lowered.hide_values(x.ones_like()?)?.ne(0f32)?;
                Ok(kept.where_cond(&clean, &hole)?)
            };
            for with in [0.0, f32::NAN, f32::INFINITY] {
                let (k, v) = (poison(&k, with)?, poison(&v, with)?);
                let plain = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
                let (context, weights) =
                    scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
                for got in [&plain, &context] {
                    let difference = max_difference(got, &expected)?;
                    assert!(difference < tolerance, "{dtype:?}, {with}: {difference}");
                }
                let sums = weights.to_dtype(DType::F32)?.sum(D::Minus1)?.mean((1, 2))?;
                let sums = sums.to_vec1::<f32>()?;
                assert!((sums[0] - 1.0).abs() < tolerance as f32 && sums[1] == 0.0, "{sums:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn packed_sequences_attend_each_to_itself() -> Result<()> {
        let random = || Tensor::randn(0f32, 1f32, (1, 3, 6, 4), &Cpu);
        let (q, k, v) = (random()?, random()?, random()?);
        let mask = AttentionMask::block_diagonal(&[0, 2, 2, 6])?;
        let packed = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let (dense, weights) = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
        assert!(max_difference(&packed, &dense)? < 1e-6);
        let across = weights.narrow(2, 0, 2)?.narrow(3, 2, 4)?.abs()?.sum_all()?;
        assert_eq!(across.to_scalar::<f32>()?, 0.0);
        for (start, len) in [(0, 2), (2, 4)] {
            let of = |x: &Tensor| x.narrow(2, start, len);
            let alone = scaled_dot_product_attention(
                &of(&q)?,
                &of(&k)?,
                &of(&v)?,
                &AttentionMask::none(),
                None,
            )?;
            assert_eq!(max_difference(&of(&packed)?, &alone)?, 0.0);
        }
        Ok(())
    }

    #[test]
    fn a_long_input_is_done_in_parts() -> Result<()> {
        let n = 2500; // 3 · 2500² scores are more than are held at once
        let random = || Tensor::randn(0f32, 1f32, (1, 3, n, 2), &Cpu);
        let (q, k, v) = (random()?, random()?, random()?);
        let mask = AttentionMask::none();
        let parts = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let (whole, _) = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
        assert!(3 * n * n > SCORES_AT_ONCE && max_difference(&parts, &whole)? < 1e-6);
        Ok(())
    }

    #[test]
    fn an_argument_that_does_not_fit_is_named() -> Result<()> {
        let (q, k, v) = qkv(DType::F32)?;
        let none = AttentionMask::none();
        let error = scaled_dot_product_attention(&q, &k, &v.narrow(2, 0, 6)?, &none, None);
        assert_eq!(
            error.unwrap_err().to_string(),
            "v has the wrong shape: expected (B, H, S, D) = [2, 3, 7, 4], got [2, 3, 6, 4]"
        );
        let error = scaled_dot_product_attention(&q.get(0)?, &k, &v, &none, None);
        assert_eq!(
            error.unwrap_err().to_string(),
            "q has the wrong shape: expected (B, H, T, D), got [3, 5, 4]"
        );
        Ok(())
    }
}
