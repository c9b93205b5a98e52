//! Scaled dot-product attention, `softmax(q·kᵀ / √D) · v`: Vaswani et al. 2017, equation 1,
//! <https://arxiv.org/abs/1706.03762>.

use candle_core::{D, DType, Tensor};
use mha_kernels::ComputeType as Format;

use crate::{
    AttentionMask, Dropout, Error, Result, cpu,
    mask::{Lowered, expect_dims},
};

/// The most scores held at a time where the weights were not asked for, 64 MiB of f32; but no
/// fewer than one query's.
const SCORES_AT_ONCE: usize = 1 << 24;

/// Scaled dot-product attention, `softmax(q·kᵀ · scale) · v`.
///
/// A query whose every key is hidden yields zeros, not NaN; one that sees keys, but whose every score
/// of them is −∞, yields NaN. Packed sequences are done one by one, and long ones some queries at a
/// time, so that no more than 2²⁴ scores are held at once, or one query's.
///
/// # Shapes
/// - `q`: `(B, H, T, D)`; `k`, `v`: `(B, H, S, D)`; returns `(B, H, T, D)`
/// - `v` may be of another width than `q` and `k`, which is then the result's
/// - `k` and `v` may have fewer heads, each serving a group of equally many heads of `q`
/// # Units
/// `scale` multiplies raw scores; `1/√D` where it is `None`.
/// # Numerics
/// f16 and bf16 are computed in f32 and rounded once. Largest difference to PyTorch 2.15 in f32,
/// over the shapes of the golden tests: 3.6e-7.
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
    in_format(q, k, v, mask, scale, Format::F32)
}

/// [`scaled_dot_product_attention`] beside linear maps of a format, which the CPU's kernel heeds.
pub(crate) fn in_format(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: Option<f64>,
    format: Format,
) -> Result<Tensor> {
    let dims = check(q, k, v)?;
    if let Some(context) = cpu::attention(q, k, v, mask, scale, format)? {
        return Ok(context);
    }
    #[cfg(feature = "cuda")]
    if let Some(context) = crate::cuda::attention(q, k, v, mask, scale)? {
        return Ok(context);
    }
    if let Some(offsets) = mask.blocks(dims[3])? {
        mask.blocks(dims[2])?;
        let everything = Lowered::default();
        let mut contexts = Vec::with_capacity(offsets.len() - 1);
        for block in offsets.windows(2).filter(|block| block[0] < block[1]) {
            let of = |x: &Tensor| x.narrow(2, block[0], block[1] - block[0]);
            contexts.push(tiled(&of(q)?, &of(k)?, &of(v)?, &everything, scale)?);
        }
        return match contexts.is_empty() {
            true => tiled(q, k, v, &everything, scale), // no tokens: zeros of the right width
            false => Ok(Tensor::cat(&contexts, 2)?),
        };
    }
    tiled(q, k, v, &mask.lower(dims, q.device())?, scale)
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
    let mask = mask.lower(check(q, k, v)?, q.device())?;
    let (context, weights) = attend(q, k, v, &mask, scale, None)?;
    Ok((context, weights.to_dtype(q.dtype())?))
}

/// The formula itself; the weights are those before dropout, in f32 or more.
pub(crate) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Lowered,
    scale: Option<f64>,
    dropout: Option<&mut Dropout>,
) -> Result<(Tensor, Tensor)> {
    let [b, h, t, s] = check(q, k, v)?;
    if b * h * t * s == 0 {
        let zeros = |width| Tensor::zeros((b, h, t, width), q.dtype(), q.device());
        return Ok((zeros(v.dim(3)?)?, zeros(s)?)); // no key, so none is visible
    }
    let weights = weights(q, k, mask, scale)?; // (B, H, T, S)
    let dropped = match dropout {
        None => weights.clone(),
        Some(dropout) => dropout.apply(&weights)?,
    };
    let context = mask.mix(&dropped, &accurate(v)?, product)?; // (B, H, T, D)
    let context = mask.scale_heads(context)?.to_dtype(q.dtype())?;
    Ok((context, mask.scale_heads(weights)?))
}

/// `softmax(q·kᵀ · scale)`, `(B, H, T, S)`, as exact as the softmax is computed.
fn weights(q: &Tensor, k: &Tensor, mask: &Lowered, scale: Option<f64>) -> Result<Tensor> {
    let scale = scale.unwrap_or(1.0 / (q.dim(D::Minus1)? as f64).sqrt());
    let q = (accurate(q)? * scale)?;
    let mut k = accurate(k)?;
    if q.track_op() || k.track_op() {
        k = mask.hide_keys(&k)?; // a gradient of 0 times a hidden NaN would be NaN
    }
    softmax(&mask.apply(product(&q, &k.t()?)?)?, mask.sees_none(q.dtype())?)
}

/// The weights of one head, `(B, 1, T, S)`, without those of the others.
pub(crate) fn weights_of_head(q: &Tensor, k: &Tensor, mask: &Lowered, h: usize) -> Result<Tensor> {
    let group = q.dim(1)? / k.dim(1)?;
    let (own, mask) = (k.narrow(1, h / group, 1)?, mask.head(h)?);
    let weights = weights(&q.narrow(1, h, 1)?, &own, &mask, None)?;
    mask.scale_heads(weights)
}

/// `x·y` for `x` `(B, H, T, A)` and `y` `(B, G, A, C)`, where each of the G matrices serves H / G
/// heads: these are stacked, so that no matrix is copied.
fn product(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let (b, h, t, a) = x.dims4()?;
    let (_b, g, _a, c) = y.dims4()?;
    if g == h {
        return Ok(x.matmul(y)?);
    }
    let stacked = x.reshape((b, g, h / g * t, a))?;
    Ok(stacked.matmul(y)?.reshape((b, h, t, c))?)
}

/// [`attend`] for as many queries at a time as [`SCORES_AT_ONCE`] allows.
pub(crate) fn tiled(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Lowered,
    scale: Option<f64>,
) -> Result<Tensor> {
    let (b, h, t, _d) = q.dims4()?;
    let s = k.dim(2)?;
    let rows = (SCORES_AT_ONCE / (b * h * s).max(1)).max(1);
    if t <= rows {
        return Ok(attend(q, k, v, mask, scale, None)?.0);
    }
    let mut contexts = Vec::with_capacity(t.div_ceil(rows));
    for start in (0..t).step_by(rows) {
        let len = rows.min(t - start);
        let q = q.narrow(2, start, len)?;
        contexts.push(attend(&q, k, v, &mask.rows(start, len)?, scale, None)?.0);
    }
    Ok(Tensor::cat(&contexts, 2)?)
}

/// Softmax over the keys; a row that is `empty`, its every score hidden, gives zeros, and NaN one
/// whose scores are all −∞ otherwise.
///
/// The largest score is a constant to the gradient, since it cancels; a row that is not empty has
/// a denominator of at least `e⁰ = 1`.
fn softmax(scores: &Tensor, empty: Option<Tensor>) -> Result<Tensor> {
    let largest = scores.detach().max_keepdim(D::Minus1)?.maximum(f32::MIN)?;
    let numerator = scores.broadcast_sub(&largest)?.exp()?;
    let mut denominator = numerator.sum_keepdim(D::Minus1)?;
    if let Some(empty) = empty {
        denominator = denominator.broadcast_add(&empty)?;
    }
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

/// `[b, h, t, s]`, once all three fit together.
pub(crate) fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<[usize; 4]> {
    let shape_error = |argument, expected: &str, got: &Tensor| {
        let (expected, got) = (expected.to_string(), got.dims().to_vec());
        Err(Error::Shape { argument, expected, got })
    };
    let &[b, h, t, d] = q.dims() else {
        return shape_error("q", "(B, H, T, D)", q);
    };
    let &[_, groups, s, _] = k.dims() else {
        return shape_error("k", "(B, H, S, D)", k);
    };
    if groups == 0 || !h.is_multiple_of(groups) {
        return shape_error("k", &format!("a number of heads that divides H = {h}"), k);
    }
    let &[_, _, _, value_d] = v.dims() else {
        return shape_error("v", "(B, H, S, D)", v);
    };
    expect_dims("k", k, &[b, groups, s, d], "(B, H, S, D)")?;
    expect_dims("v", v, &[b, groups, s, value_d], "(B, H, S, D)")?;
    Ok([b, h, t, s])
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
        assert!(difference < 5e-6, "{difference}");
        Ok(())
    }

    /// Hidden is not the same as infinitely far: only a query that sees no key gets zeros.
    #[test]
    fn no_number_comes_of_scores_of_minus_infinity() -> Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let new = |x: &[f32]| Tensor::new(x, &Cpu)?.reshape((1, 1, 3, 1))?.to_dtype(dtype);
            let (q, k, v) =
                (new(&[-1., 1., 1.])?, new(&[f32::INFINITY, 1., 1.])?, new(&[1., 2., 4.])?);
            // The first two queries see the first key, the last one none.
            let keep = Tensor::new(&[[1u8, 0, 0], [1, 0, 0], [0, 0, 0]], &Cpu)?;
            let of_queries = AttentionMask::none().with_keep(&keep)?;
            let of_keys = AttentionMask::none().with_padding(&keep.narrow(0, 0, 1)?)?;
            // Twice the least number is −∞, and hides.
            let least = Tensor::new(
                &[[0f32, f32::MIN, f32::MIN], [0., f32::MIN, f32::MIN], [f32::MIN; 3]],
                &Cpu,
            )?;
            let biased = AttentionMask::none().with_bias(&least)?.with_bias(&least)?;
            for (mask, last) in [(of_queries, 0.0), (of_keys, f64::NAN), (biased, 0.0)] {
                let plain = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
                let (out, _) = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
                for got in [plain, out] {
                    let got = got.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
                    assert!(got[..2].iter().all(|x| x.is_nan()), "{dtype:?}: {got:?}");
                    assert!(got[2] == last || last.is_nan() && got[2].is_nan(), "{got:?}");
                }
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
        assert!(max_difference(&packed, &dense)? < 5e-6);
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
        let lens = Tensor::new(&[n as u32 - 7], &Cpu)?;
        let bias = Tensor::randn(0f32, 1f32, (n, 1), &Cpu)?.broadcast_mul(&Tensor::randn(
            0f32,
            1f32,
            (1, n),
            &Cpu,
        )?)?;
        let mask = AttentionMask::causal(0).with_valid_lens(&lens)?.with_bias(&bias)?;
        let parts = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let (whole, _) = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
        assert!(3 * n * n > SCORES_AT_ONCE && max_difference(&parts, &whole)? < 5e-6);
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
