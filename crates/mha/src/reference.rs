//! Textbook multi-head attention, in three steps of candle operations.
//!
//! Start here to learn how attention works. The rest of this crate computes the same result faster
//! and with more options; the tests compare both.
//!
//! Vaswani et al. 2017, section 3.2, <https://arxiv.org/abs/1706.03762>.

use candle_core::{D, Result, Tensor};

/// Multi-head attention: `concat(head₁, .., head_H)·W_O`.
///
/// `projections` are the weights `(out, in)` and biases `(out,)` of query, key, value and output.
/// `keep` broadcasts to `(B, H, T, S)`, 1 = may attend; every query must see at least one key. All
/// float dtypes are supported.
///
/// # Shapes
/// `x`: `(B, T, E)`; `memory`: `(B, S, E)`, equal to `x` in self-attention; returns `(B, T, E)` and
/// the weights `(B, H, T, S)`
/// # Errors
/// candle's error if the shapes do not match, or if `num_heads` is 0.
/// # Examples
/// One head with identity projections: softmax of the scores 2/√1 and 4/√1.
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let (one, zero) = (Tensor::new(&[[1f32]], &Cpu)?, Tensor::new(&[0f32], &Cpu)?);
/// let identity = [(); 4].map(|()| (one.clone(), zero.clone()));
/// let (x, memory) = (Tensor::new(&[[[2f32]]], &Cpu)?, Tensor::new(&[[[1f32], [2.]]], &Cpu)?);
/// let (_, weights) = mha::reference::multi_head_attention(&x, &memory, &identity, 1, None)?;
/// let weights = weights.flatten_all()?.to_vec1::<f32>()?;
/// assert!((weights[1] - 1.0 / (1.0 + (-2f32).exp())).abs() < 1e-6); // σ(4 − 2)
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn multi_head_attention(
    x: &Tensor,
    memory: &Tensor,
    projections: &[(Tensor, Tensor); 4],
    num_heads: usize,
    keep: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    if num_heads == 0 {
        candle_core::bail!("num_heads is 0: expected at least 1");
    }
    let [query, key, value, output] = projections;
    let linear = |x: &Tensor, (weight, bias): &(Tensor, Tensor)| {
        x.broadcast_matmul(&weight.t()?)?.broadcast_add(bias) // (B, T, out)
    };
    let split = |x: Tensor| {
        let (b, t, e) = x.dims3()?;
        x.reshape((b, t, num_heads, e / num_heads))?.transpose(1, 2)?.contiguous() // (B, H, T, D)
    };

    // 1. Project: queries from x, keys and values from the memory, split into heads.
    let q = split(linear(x, query)?)?; // (B, H, T, D)
    let k = split(linear(memory, key)?)?; // (B, H, S, D)
    let v = split(linear(memory, value)?)?; // (B, H, S, D)

    // 2. Attend: each query's weighted mean of the values.
    let (context, weights) = attention(&q, &k, &v, keep, None)?; // (B, H, T, D), (B, H, T, S)

    // 3. Merge: concatenate the heads and project.
    let heads = context.transpose(1, 2)?.flatten_from(2)?; // (B, T, H·D)
    Ok((linear(&heads, output)?, weights))
}

/// Scaled dot-product attention: `softmax(q·kᵀ / √D + bias)·v` over the keys whose `keep` is 1.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`, `v`: `(B, H, S, D)`; `keep`, `bias`: broadcast to `(B, H, T, S)`;
/// returns `(B, H, T, D)` and the weights `(B, H, T, S)`
/// # Errors
/// candle's error if the shapes do not match.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    keep: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<(Tensor, Tensor)> {
    let d = q.dim(D::Minus1)? as f64;
    let mut scores = (q.matmul(&k.t()?)? / d.sqrt())?; // (B, H, T, S)
    if let Some(bias) = bias {
        scores = scores.broadcast_add(bias)?;
    }
    if let Some(keep) = keep {
        let hidden = (scores.zeros_like()? + f64::NEG_INFINITY)?;
        scores = keep.broadcast_as(scores.shape())?.where_cond(&scores, &hidden)?;
    }
    let weights = candle_nn::ops::softmax(&scores, D::Minus1)?; // (B, H, T, S)
    Ok((weights.matmul(v)?, weights))
}

/// RMS normalisation over the last axis: `x / √(mean(x²) + ε) · weight`. Models such as Qwen3
/// normalise the queries and keys of each head by it, between steps 1 and 2. Gemma's weight is this
/// `weight` minus 1.
///
/// # Shapes
/// `x`: `(.., D)`; `weight`: `(D,)`; returns `(.., D)`
/// # Errors
/// candle's error if the shapes do not match.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
///
/// let x = Tensor::new(&[1f32, 7.], &Cpu)?; // the root mean square is 5
/// let y = mha::reference::rms_norm(&x, &Tensor::new(&[1f32, 10.], &Cpu)?, 0.0)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0.2, 14.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
/// # Source
/// Zhang and Sennrich 2019, equation 4, <https://arxiv.org/abs/1910.07467>.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?; // (.., 1)
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::testing::max_difference;
    use crate::{AttentionConfig, AttentionMask, MultiHeadAttention};

    #[test]
    fn multi_head_attention_equals_the_reference() -> crate::Result<()> {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &Cpu);
        let module = MultiHeadAttention::new(&AttentionConfig::new(12, 3), vb)?;
        let tensors = module.tensors()?;
        let tensor = |name: &str, part: &str| tensors[&format!("{name}.{part}")].clone();
        let projections = ["query", "key", "value", "output"]
            .map(|name| (tensor(name, "weight"), tensor(name, "bias")));
        let x = Tensor::randn(0f64, 1., (2, 4, 12), &Cpu)?;
        let memory = Tensor::randn(0f64, 1., (2, 5, 12), &Cpu)?;
        let keep = Tensor::new(&[[1u8, 1, 0, 1, 0], [0, 1, 1, 1, 1]], &Cpu)?;
        let mask = AttentionMask::none().with_padding(&keep)?;
        let (out, weights) = module.forward_with_weights(&x, &memory, &memory, &mask)?;
        let keep = keep.reshape((2, 1, 1, 5))?;
        let (expected, expected_weights) =
            multi_head_attention(&x, &memory, &projections, 3, Some(&keep))?;
        for (got, expected) in [(out, expected), (weights, expected_weights)] {
            let difference = max_difference(&got, &expected)?;
            assert!(difference < 1e-12, "{difference}");
        }
        Ok(())
    }
}
