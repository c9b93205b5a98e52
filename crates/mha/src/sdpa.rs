//! Scaled dot-product attention, `softmax(q·kᵀ / √D) · v`: Vaswani et al. 2017, equation 1,
//! <https://arxiv.org/abs/1706.03762>.

use std::ops::Range;

use candle_core::{D, DType, Tensor};
use ops::widen;

use crate::{
    AttentionMask, ComputeType, DisentangledPositions, Dropout, LoweredMask, Memory, Result,
    mask::MaskTensors, shape::check_qkv,
};

/// Maximum number of scores of a block of queries, if the weights are not returned. The softmax
/// holds three tensors of this size at a time, each of 64 MiB in f32. A block has at least one
/// query, so it has `B·H·S` scores if `B·H·S` is larger. With autograd, the tensors of all blocks
/// stay in memory.
const MAX_SCORES: usize = 1 << 24;

/// How the scores of queries and keys are computed.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<'a> {
    /// The factor that multiplies the raw scores.
    pub(crate) scale: f64,
    /// Relative positions that are multiplied by queries and keys.
    pub(crate) positions: Option<&'a DisentangledPositions>,
}

impl<'a> Scoring<'a> {
    /// `q·kᵀ · scale`, where `None` means `1/√D`.
    fn scaled(q: &Tensor, scale: Option<f64>) -> Result<Self> {
        let scale = scale.unwrap_or(1.0 / (q.dim(D::Minus1)? as f64).sqrt());
        Ok(Self { scale, positions: None })
    }

    /// The scoring of queries `(B, H, T, D)` with this mask. `scale` is the factor of the raw
    /// scores without relative positions, where `None` means `1/√D`.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if `positions` does not fit H, D or the number of tokens.
    pub(crate) fn new(
        q: &Tensor,
        mask: &LoweredMask,
        scale: Option<f64>,
        positions: Option<&'a DisentangledPositions>,
    ) -> Result<Self> {
        let Some(positions) = positions else { return Self::scaled(q, scale) };
        let (_b, h, _t, d) = q.dims4()?;
        positions.check([h, d], mask.longest_sequence())?;
        Ok(Self { scale: positions.scale(d, scale), positions: Some(positions) })
    }

    /// The scoring for the kernels.
    fn kernel(self) -> ops::Scoring<'a> {
        ops::Scoring {
            scale: self.scale,
            relative: self.positions.map(DisentangledPositions::terms),
        }
    }
}

/// Scaled dot-product attention, `softmax(q·kᵀ · scale) · v`.
///
/// The output is zero for a query whose keys are all hidden. It is NaN if the scores of all visible
/// keys are −∞, or if any visible key has a score of +∞ or NaN.
///
/// A CPU or CUDA kernel computes the attention if it supports the arguments. Otherwise candle's
/// operations compute ragged sequences one by one, and long sequences in blocks of queries. A block
/// has at most 2²⁴ scores, or `B·H·S` if `B·H·S` is larger. With autograd, the scores of all blocks
/// stay in memory.
///
/// # Shapes
/// - `q`: `(B, H, T, D)`; `k`, `v`: `(B, H, S, D)`; returns `(B, H, T, D)`
/// - if `v` is `(B, H, S, V)` with another width V, the result is `(B, H, T, V)`
/// - `k` and `v` may have G heads, where G divides H: H / G heads of `q` share one head of `k` and
///   `v`
/// # Units
/// `scale` multiplies raw scores; `None` means `1/√D`.
/// # Numerics
/// f16 and bf16 inputs are converted to f32; only the output is rounded. The CUDA kernel, and for
/// bf16 inputs a CPU with instructions for bf16, also round the softmax weights. Maximum absolute
/// difference from PyTorch 2.15 in f32 over the shapes of the golden tests: 3.6e-7.
/// # Errors
/// [`crate::Error::Shape`], naming the argument, if the shapes do not match;
/// [`crate::Error::Zero`] if D is 0; [`crate::Error::DType`] for integers, and if some tensors are
/// in f64 and others are not; [`crate::Error::Offset`] or [`crate::Error::ValidLength`] if the
/// mask does not fit T and S; [`ops::Error::Isa`] if `MHA_ISA` names instructions that this
/// machine lacks.
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
/// // Each vector has 64 components. All are 0 except the first, so q·k is the product of the first
/// // components of q and k.
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
    let mask = mask.lower(check_qkv(q, k, v)?, q.dtype(), q.device())?;
    let compute_type = compute_type_of(q);
    let memory = Memory::new(k.clone(), v.clone());
    attend_with_compute_type(q, &memory, &mask, Scoring::scaled(q, scale)?, compute_type, None)
}

/// [`scaled_dot_product_attention`] of the outputs of linear maps that compute in `compute_type`,
/// with dropout on the weights if it is given. The CPU kernel accepts bf16 inputs
/// for some compute types, see [`ComputeType::for_attention`].
pub(crate) fn attend_with_compute_type(
    q: &Tensor,
    memory: &Memory,
    mask: &LoweredMask,
    scoring: Scoring,
    compute_type: ComputeType,
    mut dropout: Option<&mut Dropout>,
) -> Result<Tensor> {
    let Memory { k, v, key_sources } = memory;
    mask.check(check_qkv(q, k, v)?)?;
    if dropout.is_none() {
        let (kernel_mask, scoring) = (mask.kernel(), scoring.kernel());
        let sources = key_sources.as_deref();
        let context = ops::attention(q, k, v, sources, kernel_mask, scoring, compute_type)?;
        if let Some(context) = context {
            return Ok(context);
        }
    }
    let Memory { k, v, .. } = &memory.gathered()?;
    let Some(sequences) = mask.sequences() else {
        return attend_in_blocks(q, k, v, mask.tensors()?, scoring, dropout);
    };
    let mut contexts = vec![];
    for range in sequences.queries().iter().filter(|range| !range.queries.is_empty()) {
        let part = |x: &Tensor, range: &Range<usize>| x.narrow(2, range.start, range.len());
        let (q, k, v) = (part(q, &range.queries)?, part(k, &range.keys)?, part(v, &range.keys)?);
        let mask = mask.of_queries(range)?;
        let dropout = dropout.as_deref_mut();
        contexts.push(attend_in_blocks(&q, &k, &v, mask.tensors()?, scoring, dropout)?);
    }
    if contexts.is_empty() {
        return attend_in_blocks(q, k, v, &MaskTensors::default(), scoring, None); // no tokens
    }
    Ok(Tensor::cat(&contexts, 2)?)
}

/// [`scaled_dot_product_attention`] and its attention weights.
///
/// # Shapes
/// - `q`: `(B, H, T, D)`; `k`, `v`: `(B, H, S, D)`
/// - returns `(B, H, T, D)` and the weights `(B, H, T, S)`; each row sums to 1 (times the
///   head's factor in a head mask), or to 0 if no key is visible
/// # Errors
/// The errors of [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_with_weights(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    scale: Option<f64>,
) -> Result<(Tensor, Tensor)> {
    let mask = mask.lower(check_qkv(q, k, v)?, q.dtype(), q.device())?;
    let compute_type = compute_type_of(q);
    let memory = Memory::new(k.clone(), v.clone());
    attend_with_weights(q, &memory, &mask, Scoring::scaled(q, scale)?, compute_type)
}

/// [`attend_with_compute_type`], and the attention weights in the dtype of `q`.
pub(crate) fn attend_with_weights(
    q: &Tensor,
    memory: &Memory,
    mask: &LoweredMask,
    scoring: Scoring,
    compute_type: ComputeType,
) -> Result<(Tensor, Tensor)> {
    let Memory { k, v, key_sources } = memory;
    let dims = check_qkv(q, k, v)?;
    mask.check(dims)?;
    let heads: Vec<usize> = (0..dims[1]).collect();
    let (sources, kernel_mask) = (key_sources.as_deref(), mask.kernel());
    let weights = ops::attention_weights(q, k, sources, kernel_mask, scoring.kernel(), &heads)?;
    let (context, weights) = match weights {
        Some(weights) => {
            (attend_with_compute_type(q, memory, mask, scoring, compute_type, None)?, weights)
        }
        None => {
            let Memory { k, v, .. } = memory.gathered()?;
            attend(q, &k, &v, mask.tensors()?, scoring, None)?
        }
    };
    Ok((context, weights.to_dtype(q.dtype())?))
}

/// The compute type of attention whose tensors have the dtype of `q`.
fn compute_type_of(q: &Tensor) -> ComputeType {
    match q.dtype() {
        DType::BF16 => ComputeType::Bf16,
        _ => ComputeType::F32,
    }
}

/// Computes attention by candle's operations. The returned weights are those before dropout, in
/// f32 or f64.
pub(crate) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &MaskTensors,
    scoring: Scoring,
    dropout: Option<&mut Dropout>,
) -> Result<(Tensor, Tensor)> {
    let [b, h, t, s] = check_qkv(q, k, v)?;
    if b * h * t * s == 0 {
        let zeros = |width, dtype| Tensor::zeros((b, h, t, width), dtype, q.device());
        let weights = zeros(s, widen(q)?.dtype())?; // without elements
        return Ok((zeros(v.dim(3)?, q.dtype())?, weights));
    }
    let weights = weights(q, k, mask, scoring)?; // (B, H, T, S)
    let dropped = match dropout {
        None => weights.clone(),
        Some(dropout) => dropout.apply(&weights)?,
    };
    let context = mask.weighted_sum(&dropped, &widen(v)?.contiguous()?, product)?; // (B, H, T, V)
    let context = mask.scale_heads(context)?.to_dtype(q.dtype())?;
    Ok((context, mask.scale_heads(weights)?))
}

/// The softmax of the scores, `(B, H, T, S)` in f32 or f64.
fn weights(q: &Tensor, k: &Tensor, mask: &MaskTensors, scoring: Scoring) -> Result<Tensor> {
    let Scoring { scale, positions } = scoring;
    let (q, mut k) = (widen(q)?.contiguous()?, widen(k)?.contiguous()?);
    let is_tracked = positions.is_some_and(DisentangledPositions::is_tracked);
    if q.track_op() || k.track_op() || is_tracked {
        // A NaN in a hidden key would give 0 · NaN in the backward pass.
        k = mask.hide_unused_keys(&k)?;
    }
    let mut scores = product(&(&q * scale)?, &k.t()?)?;
    if let Some(positions) = positions {
        scores = (scores + (positions.scores(&q, &k, mask.positions())? * scale)?)?;
    }
    softmax(&mask.apply(scores)?, mask.empty_rows(q.dtype())?)
}

/// The weights `(B, heads, T, S)` of some heads, at least one.
pub(crate) fn weights_of_heads(
    q: &Tensor,
    k: &Tensor,
    mask: &LoweredMask,
    scoring: Scoring,
    heads: &[usize],
) -> Result<Tensor> {
    let by_kernel = ops::attention_weights(q, k, None, mask.kernel(), scoring.kernel(), heads)?;
    if let Some(weights) = by_kernel {
        return Ok(weights);
    }
    let weights = heads.iter().map(|&head| weights_of_head(q, k, mask, scoring, head));
    Ok(Tensor::cat(&weights.collect::<Result<Vec<_>>>()?, 1)?)
}

/// The weights `(B, 1, T, S)` of head `h`, by candle's operations.
fn weights_of_head(
    q: &Tensor,
    k: &Tensor,
    mask: &LoweredMask,
    scoring: Scoring,
    h: usize,
) -> Result<Tensor> {
    let group = q.dim(1)? / k.dim(1)?;
    let (head_k, mask) = (k.narrow(1, h / group, 1)?, mask.tensors()?.head(h)?);
    let positions = scoring.positions.map(|positions| positions.head(h)).transpose()?;
    let scoring = Scoring { positions: positions.as_ref(), ..scoring };
    mask.scale_heads(weights(&q.narrow(1, h, 1)?, &head_k, &mask, scoring)?)
}

/// `x·y` for `x` `(B, H, T, A)` and `y` `(B, G, A, C)`. The rows of the H / G heads that use the
/// same matrix of `y` are stacked into one product, so that `y` is not copied per head.
fn product(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let (b, h, t, a) = x.dims4()?;
    let (_b, g, _a, c) = y.dims4()?;
    if g == h {
        return Ok(x.matmul(y)?);
    }
    let stacked = x.reshape((b, g, h / g * t, a))?;
    Ok(stacked.matmul(y)?.reshape((b, h, t, c))?)
}

/// [`attend`] in blocks of queries with at most [`MAX_SCORES`] scores each, or one query each.
pub(crate) fn attend_in_blocks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &MaskTensors,
    scoring: Scoring,
    mut dropout: Option<&mut Dropout>,
) -> Result<Tensor> {
    let (b, h, t, _d) = q.dims4()?;
    let s = k.dim(2)?;
    let rows = (MAX_SCORES / (b * h * s).max(1)).max(1);
    if t <= rows {
        return Ok(attend(q, k, v, mask, scoring, dropout)?.0);
    }
    let mut contexts = Vec::with_capacity(t.div_ceil(rows));
    for start in (0..t).step_by(rows) {
        let len = rows.min(t - start);
        let q = q.narrow(2, start, len)?;
        let dropout = dropout.as_deref_mut();
        contexts.push(attend(&q, k, v, &mask.rows(start, len)?, scoring, dropout)?.0);
    }
    Ok(Tensor::cat(&contexts, 2)?)
}

/// Softmax over the keys. `empty_rows` is 1 for each row with no visible key, so that the row
/// becomes zeros. Any other row whose scores are all −∞ gives NaN.
///
/// The largest score is detached from the gradient, since its gradient cancels. The denominator of
/// a row with a finite score is at least `e⁰ = 1`.
fn softmax(scores: &Tensor, empty_rows: Option<Tensor>) -> Result<Tensor> {
    let largest = scores.detach().max_keepdim(D::Minus1)?;
    let largest = match largest.dtype() {
        DType::F64 => largest.maximum(f64::MIN)?,
        _ => largest.maximum(f32::MIN)?,
    };
    let numerator = scores.broadcast_sub(&largest)?.exp()?;
    let mut denominator = numerator.sum_keepdim(D::Minus1)?;
    if let Some(empty_rows) = empty_rows {
        denominator = denominator.broadcast_add(&empty_rows)?;
    }
    Ok(numerator.broadcast_div(&denominator)?)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device::Cpu, Var};

    use super::*;
    use crate::testing::max_difference;

    const DIMS: [usize; 5] = [2, 3, 5, 7, 4]; // B, H, T, S, D

    fn qkv(dtype: DType) -> Result<(Tensor, Tensor, Tensor)> {
        let [b, h, t, s, d] = DIMS;
        let random = |n: usize| Tensor::randn(0f32, 1f32, (b, h, n, d), &Cpu)?.to_dtype(dtype);
        Ok((random(t)?, random(s)?, random(s)?))
    }

    #[test]
    fn attention_equals_the_reference() -> Result<()> {
        let (q, k, v) = qkv(DType::F32)?;
        let got = scaled_dot_product_attention(&q, &k, &v, &AttentionMask::none(), None)?;
        let [q, k, v] = [q, k, v].map(|x| x.to_dtype(DType::F64).unwrap());
        let (expected, _) = crate::reference::attention(&q, &k, &v, None, None)?;
        let difference = max_difference(&got, &expected)?;
        assert!(difference < 5e-6, "{difference}");
        Ok(())
    }

    /// candle ignores the stride of a dimension of size 1 when it tests whether a tensor is
    /// contiguous.
    #[test]
    fn transposed_heads_of_width_1_equal_contiguous_ones() -> Result<()> {
        let x = Tensor::randn(0f32, 1f32, (2, 3, 1, 5), &Cpu)?;
        let (transposed, mask) = (x.t()?, AttentionMask::none()); // (2, 3, 5, 1), stride 5
        let dense = transposed.force_contiguous()?;
        let [got, expected] = [&transposed, &dense]
            .map(|x| scaled_dot_product_attention(x, x, x, &mask, None).unwrap());
        assert_eq!(max_difference(&got, &expected)?, 0.0);
        Ok(())
    }

    #[test]
    fn biases_are_added_in_the_dtype_of_the_scores() -> Result<()> {
        let x = Tensor::zeros((1, 1, 2, 4), DType::F32, &Cpu)?;
        let v = Tensor::new(&[[[[1f32, 2., 3., 4.], [5., 7., 11., 13.]]]], &Cpu)?;
        let weights = |mask: &AttentionMask| -> Result<Tensor> {
            let (context, weights) =
                scaled_dot_product_attention_with_weights(&x, &x, &v, mask, None)?;
            let kernel = scaled_dot_product_attention(&x, &x, &v, mask, None)?;
            // The kernel multiplies biases by log2 e, which rounds those around 2048 by up to 1e-4.
            let difference = max_difference(&kernel, &context)?;
            assert!(difference < 1e-3, "{difference}");
            Ok(weights)
        };
        // In f16, 2048 + 0.5 is 2048.
        let large = Tensor::full(2048f32, (2, 2), &Cpu)?.to_dtype(DType::F16)?;
        let small = Tensor::new(&[[0.5f32, 0.], [0.5, 0.]], &Cpu)?;
        let none = AttentionMask::none;
        let expected = weights(&none().with_bias(&small)?.with_bias(&large)?)?;
        let got = weights(&none().with_bias(&large)?.with_bias(&small)?)?;
        assert_eq!(max_difference(&got, &expected)?, 0.0);
        let distances = Tensor::new(&[[0f32, 1. / 3., 0.5]], &Cpu)?;
        let expected = weights(&none().with_distance_bias(&distances)?)?;
        for dtype in [DType::F16, DType::BF16, DType::F64] {
            let zeros = Tensor::zeros((2, 2), dtype, &Cpu)?;
            let got = weights(&none().with_bias(&zeros)?.with_distance_bias(&distances)?)?;
            assert_eq!(max_difference(&got, &expected)?, 0.0, "{dtype:?}");
            let zeros = Tensor::zeros((1, 3), dtype, &Cpu)?;
            let mask = none().with_distance_bias(&zeros)?.with_distance_bias(&distances)?;
            assert_eq!(max_difference(&weights(&mask)?, &expected)?, 0.0, "{dtype:?}");
        }
        let [large, small] = [[2048f32, 0., 0.], [0.5; 3]]
            .map(|row| Tensor::new(&[row], &Cpu).and_then(|row| row.to_dtype(DType::F16)).unwrap());
        let sum = Tensor::new(&[[2048.5f32, 0.5, 0.5]], &Cpu)?;
        let expected = weights(&none().with_distance_bias(&sum)?)?;
        let got = weights(&none().with_distance_bias(&large)?.with_distance_bias(&small)?)?;
        assert_eq!(max_difference(&got, &expected)?, 0.0);
        // f64::MIN is −∞ in f32, and hides all keys.
        let least = Tensor::full(f64::MIN, (2, 2), &Cpu)?;
        let got = weights(&none().with_bias(&least)?)?;
        assert_eq!(max_difference(&got, &got.zeros_like()?)?, 0.0);
        Ok(())
    }

    /// A visible key with a score of −∞ is not a hidden key: only a query with no visible key gives
    /// zeros.
    #[test]
    fn infinite_scores_of_visible_keys_give_nan() -> Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let new = |x: &[f32]| Tensor::new(x, &Cpu)?.reshape((1, 1, 3, 1))?.to_dtype(dtype);
            let (q, k, v) =
                (new(&[-1., 1., 1.])?, new(&[f32::INFINITY, 1., 1.])?, new(&[1., 2., 4.])?);
            // The first two queries see only the first key, with scores of −∞ and +∞. The last
            // query sees none.
            let keep = Tensor::new(&[[1u8, 0, 0], [1, 0, 0], [0, 0, 0]], &Cpu)?;
            let keep_mask = AttentionMask::none().with_keep(&keep)?;
            // With this mask, every query sees the first key.
            let padding = AttentionMask::none().with_padding(&keep.narrow(0, 0, 1)?)?;
            // The sum of two biases of the smallest number is −∞, which hides the key.
            let min = if dtype == DType::F64 { f64::MIN } else { f32::MIN.into() };
            let least = Tensor::new(&[[0., min, min], [0., min, min], [min; 3]], &Cpu)?;
            let biased = AttentionMask::none().with_bias(&least)?.with_bias(&least)?;
            for (mask, last) in [(keep_mask, 0.0), (padding, f64::NAN), (biased, 0.0)] {
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

    /// In the additive masks of transformers, every key of a padding query has the smallest number
    /// of the dtype as its bias. As in PyTorch, the output of such a query is the mean of the
    /// values. The same holds for the largest number.
    #[test]
    fn finite_scores_of_any_size_give_finite_results() -> Result<()> {
        let tensor = |values: &[f32]| Tensor::new(values, &Cpu)?.reshape((1, 1, (), 1));
        let (q, v) = (tensor(&[3e19])?, tensor(&[1., 2.])?);
        let keys = [([1e19, -1e19], 1.0), ([-1e19, -1e19], 1.5), ([1e19, 1e19], 1.5)];
        for (keys, expected) in keys {
            let k = tensor(&keys)?;
            let out = scaled_dot_product_attention(&q, &k, &v, &AttentionMask::none(), None)?;
            assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, [expected], "{keys:?}");
        }
        Ok(())
    }

    /// Values that are not finite reach the queries that see them, and no others.
    #[test]
    fn infinite_values_reach_the_queries_that_see_them() -> Result<()> {
        let [b, h, t, _, d] = DIMS;
        let random = |n: usize| Tensor::randn(0f32, 1f32, (b, h, n, d), &Cpu);
        let (q, k, v) = (random(t)?, random(t)?, random(t)?);
        let mask = AttentionMask::causal(0);
        let clean = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let mut values = v.flatten_all()?.to_vec1::<f32>()?;
        values[2 * d] = f32::INFINITY; // sequence 0, head 0, key 2
        values[3 * d + 1] = f32::NAN; // key 3
        let v = Tensor::from_vec(values, v.shape(), &Cpu)?;
        let got = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let rows = |x: &Tensor| x.flatten_to(2)?.to_vec2::<f32>();
        for (row, (got, clean)) in rows(&got)?.iter().zip(rows(&clean)?).enumerate() {
            for (column, (&got, clean)) in got.iter().zip(clean).enumerate() {
                match (row, column) {
                    (2..5, 0) => assert_eq!(got, f32::INFINITY, "query {row}"),
                    (3..5, 1) => assert!(got.is_nan(), "query {row}"),
                    _ => assert!((got - clean).abs() < 1e-5, "query {row}: {got} {clean}"),
                }
            }
        }
        Ok(())
    }

    #[test]
    fn huge_values_of_hidden_keys_do_not_affect_the_gradients() -> Result<()> {
        let var = |values: &[f32]| {
            Var::from_tensor(&Tensor::new(values, &Cpu)?.reshape((1, 1, (), 1))?)
        };
        let gradients = |last: f32| -> Result<[Vec<f32>; 2]> {
            let (q, k, v) = (var(&[1.])?, var(&[1., 2., 3.])?, var(&[1., 2., last])?);
            let mask = AttentionMask::causal(1); // hides key 2 from the only query
            let out = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
            let gradients = (out * 2.0)?.sum_all()?.backward()?;
            let of = |x: &Var| gradients.get(x).unwrap().flatten_all()?.to_vec1::<f32>();
            Ok([of(&q)?, of(&k)?])
        };
        assert_eq!(gradients(3e38)?, gradients(0.0)?);
        Ok(())
    }

    #[test]
    fn an_extreme_bias_on_all_keys_gives_equal_weights() -> Result<()> {
        let new = |x: &[f32]| Tensor::new(x, &Cpu)?.reshape((1, 1, 3, 1));
        let (q, v) = (new(&[-1., 1., 3.])?, new(&[1., 2., 6.])?);
        // The smallest numbers of f32 and of bf16, and the largest of f32.
        for extreme in [f32::MIN, -3.389_531_4e38, f32::MAX] {
            let bias = Tensor::full(extreme, (3, 3), &Cpu)?;
            let distances = Tensor::full(extreme, (1, 5), &Cpu)?;
            for mask in [
                AttentionMask::none().with_bias(&bias)?,
                AttentionMask::none().with_distance_bias(&distances)?,
            ] {
                let plain = scaled_dot_product_attention(&q, &q, &v, &mask, None)?;
                let (out, _) = scaled_dot_product_attention_with_weights(&q, &q, &v, &mask, None)?;
                for got in [plain, out] {
                    let got = got.flatten_all()?.to_vec1::<f32>()?;
                    assert!(got.iter().all(|x| (x - 3.0).abs() < 1e-5), "{extreme}: {got:?}");
                }
            }
        }
        let (q, v) = (q.to_dtype(DType::F64)?, v.to_dtype(DType::F64)?);
        let mask = AttentionMask::none().with_bias(&Tensor::full(f64::MIN, (3, 3), &Cpu)?)?;
        let got = scaled_dot_product_attention(&q, &q, &v, &mask, None)?;
        let got = got.flatten_all()?.to_vec1::<f64>()?;
        assert!(got.iter().all(|x| (x - 3.0).abs() < 1e-12), "{got:?}");
        Ok(())
    }

    /// The queries of some tokens of sequences after a prefix, by the kernel and by candle's
    /// operations, with every part of a mask that depends on the position.
    #[test]
    fn the_queries_of_some_tokens_have_the_results_of_those_of_all() -> Result<()> {
        let (h, d, prefix, tokens) = (2, 6, 3, [0usize, 2, 3, 8, 11]);
        let sequences = AttentionMask::none().with_sequences_after(&[0, 4, 4, 9, 12], prefix)?;
        let table = Tensor::randn(0f64, 1., (h, 2 * 9 + 1), &Cpu)?;
        let index = Tensor::new(&tokens.map(|token| token as u32), &Cpu)?;
        for mask in [
            sequences.clone(),
            sequences.clone().with_causal(prefix),
            sequences.clone().with_causal(prefix).with_window(2),
            sequences.clone().with_window(1),
            sequences.with_distance_bias(&table)?,
        ] {
            let some = mask.for_queries_of(&tokens)?;
            for dtype in [DType::F32, DType::F64, DType::F16] {
                let random =
                    |n: usize| Tensor::randn(0f32, 1., (1, h, n, d), &Cpu)?.to_dtype(dtype);
                let (q, k, v) = (random(12)?, random(12 + 4 * prefix)?, random(12 + 4 * prefix)?);
                let all = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
                let expected = all.contiguous()?.index_select(&index, 2)?.to_dtype(DType::F64)?;
                let q = q.index_select(&index, 2)?;
                let got = scaled_dot_product_attention(&q, &k, &v, &some, None)?;
                let difference = max_difference(&got, &expected)?;
                let tolerance = if dtype == DType::F16 { 2e-3 } else { 1e-5 };
                assert!(difference < tolerance, "{dtype:?} {difference} {mask:?}");
                assert!(dtype != DType::F32 || difference == 0.0, "{difference} {mask:?}");
                let (got, _) = scaled_dot_product_attention_with_weights(&q, &k, &v, &some, None)?;
                assert!(max_difference(&got, &expected)? < tolerance, "{dtype:?} {mask:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn ragged_sequences_do_not_attend_to_each_other() -> Result<()> {
        let random = || Tensor::randn(0f32, 1f32, (1, 3, 6, 4), &Cpu);
        let (q, k, v) = (random()?, random()?, random()?);
        let mask = AttentionMask::none().with_sequences(&[0, 2, 2, 6])?;
        let ragged = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let (dense, weights) = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
        assert!(max_difference(&ragged, &dense)? < 5e-6);
        let across = weights.narrow(2, 0, 2)?.narrow(3, 2, 4)?.abs()?.sum_all()?;
        assert_eq!(across.to_scalar::<f32>()?, 0.0);
        for (start, len) in [(0, 2), (2, 4)] {
            let part = |x: &Tensor| x.narrow(2, start, len);
            let alone = scaled_dot_product_attention(
                &part(&q)?,
                &part(&k)?,
                &part(&v)?,
                &AttentionMask::none(),
                None,
            )?;
            assert_eq!(max_difference(&part(&ragged)?, &alone)?, 0.0);
        }
        Ok(())
    }

    /// The CPU kernel computes f32, and candle's operations compute f64 and tensors that autograd
    /// tracks.
    #[test]
    fn all_parts_of_a_mask_apply_within_each_ragged_sequence() -> Result<()> {
        let none = AttentionMask::none;
        let (offsets, h, n) = ([0, 4, 4, 5, 12], 2, 12);
        let random = |shape: &[usize]| Tensor::randn(0f64, 1f64, shape, &Cpu);
        let (table, bias) = (random(&[h, 21])?, random(&[h, n, n])?);
        let padding = Tensor::new(&[[1u8, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1]], &Cpu)?;
        let heads = Tensor::new(&[1f64, 0.5], &Cpu)?;
        type MaskOfTokens<'a> = &'a dyn Fn(usize, usize) -> Result<AttentionMask>;
        let masks: [(&str, MaskOfTokens); 7] = [
            ("causal", &|_, _| Ok(AttentionMask::causal(0))),
            ("causal with an offset", &|_, _| Ok(AttentionMask::causal(2))),
            ("window", &|_, _| Ok(none().with_window(2))),
            ("causal window", &|_, _| Ok(AttentionMask::causal(1).with_window(3))),
            ("distance bias", &|_, _| none().with_distance_bias(&table)),
            ("all biases", &|start, len| {
                let bias = bias.narrow(1, start, len)?.narrow(2, start, len)?;
                let mask = AttentionMask::causal(0).with_distance_bias(&table)?;
                mask.with_bias(&bias)?.with_head_mask(&heads)
            }),
            ("padding", &|start, len| {
                AttentionMask::causal(0).with_padding(&padding.narrow(1, start, len)?)
            }),
        ];
        for dtype in [DType::F32, DType::F64] {
            let heads = || random(&[1, h, n, 4])?.to_dtype(dtype);
            let (q, k, v) = (heads()?, heads()?, heads()?);
            let tracked = Var::from_tensor(&q)?;
            for (name, mask) in &masks {
                let ragged = mask(0, n)?.with_sequences(&offsets)?;
                let untracked = scaled_dot_product_attention(&q, &k, &v, &ragged, None)?;
                let by_candle = scaled_dot_product_attention(&tracked, &k, &v, &ragged, None)?;
                let (with_weights, _) =
                    scaled_dot_product_attention_with_weights(&q, &k, &v, &ragged, None)?;
                for (start, end) in offsets.into_iter().zip(offsets.into_iter().skip(1)) {
                    let part = |x: &Tensor| x.narrow(2, start, end - start);
                    let (q, k, v) = (part(&q)?, part(&k)?, part(&v)?);
                    let mask = mask(start, end - start)?;
                    let expected = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
                    for got in [&untracked, &by_candle, &with_weights] {
                        let difference = max_difference(&part(got)?, &expected)?;
                        let what = format!("{name}, {dtype:?}, {start}..{end}");
                        assert!(difference < 2e-6, "{what}: {difference}");
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn blocks_of_queries_equal_all_queries_at_once() -> Result<()> {
        let n = 2500; // 3 · 2500² scores exceed MAX_SCORES
        // f64, which the CPU kernel does not compute.
        let random = |shape: &[usize]| Tensor::randn(0f64, 1f64, shape, &Cpu);
        let random_heads = || random(&[1, 3, n, 2]);
        let (q, k, v) = (random_heads()?, random_heads()?, random_heads()?);
        let lens = Tensor::new(&[n as u32 - 7], &Cpu)?;
        let bias = random(&[n, 1])?.broadcast_mul(&random(&[1, n])?)?;
        let mask = AttentionMask::causal(0).with_valid_lens(&lens)?.with_bias(&bias)?;
        let parts = scaled_dot_product_attention(&q, &k, &v, &mask, None)?;
        let (whole, _) = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, None)?;
        assert!(3 * n * n > MAX_SCORES && max_difference(&parts, &whole)? < 1e-12);
        Ok(())
    }

    #[test]
    fn shape_errors_name_the_argument() -> Result<()> {
        let (q, k, v) = qkv(DType::F32)?;
        let none = AttentionMask::none();
        let error = scaled_dot_product_attention(&q, &k, &v.narrow(2, 0, 6)?, &none, None);
        assert_eq!(
            error.unwrap_err().to_string(),
            "v has the wrong shape: expected (B, G, S, V) = [2, 3, 7, 4], got [2, 3, 6, 4]"
        );
        let error = scaled_dot_product_attention(&q.get(0)?, &k, &v, &none, None);
        assert_eq!(
            error.unwrap_err().to_string(),
            "q has the wrong shape: expected (B, H, T, D), got [3, 5, 4]"
        );
        Ok(())
    }
}
