//! Masking and the online softmax of a row of scores.

use std::f32::consts::LOG2_E;

use super::args::{Attention, Sequence};
use crate::{
    compute_type::ComputeType,
    gemm::{Element, Store, WidenedBf16},
    math::{exp2, exp2_each},
    simd::{Dot, LANES, Vector},
};

/// The softmax of a query over the keys so far.
#[derive(Clone, Copy)]
pub(super) struct SoftmaxState {
    /// The maximum of `score · scale · log₂ e`.
    pub(super) max: f32,
    /// The sum of the exponentials relative to the maximum.
    pub(super) sum: f32,
}

impl SoftmaxState {
    /// No keys so far. The maximum is finite, so that a first block of scores of −∞ gives weights
    /// of 0 and not NaN.
    pub(super) const NEW: Self = Self { max: f32::MIN, sum: 0.0 };
}

/// Applies the biases and `keep` to the scores of query `t` for the keys from `key` on, a position in
/// `sequence`.
///
/// Returns the factor by which the caller must multiply the scores. It is `scale` if there is no
/// bias and `scale` is positive. Otherwise this function scales the scores, and the factor is 1: a
/// bias is added to scaled scores, and the −∞ of a masked key must not be multiplied by 0 or by a
/// negative number.
pub(super) fn apply_mask<T>(
    attention: &Attention<T>,
    scores: &mut [f32],
    sequence: &Sequence,
    [h, t, key]: [usize; 3],
) -> f32 {
    let mut scale = attention.scale;
    let is_positive = scale > 0.0; // false for NaN
    if !is_positive {
        scores.iter_mut().for_each(|score| *score *= scale);
        scale = 1.0;
    }
    let (position, keys) = (sequence.position(t), scores.len());
    let distance_biases = attention.distance_bias.map(|bias| bias.row(h, position, key, keys));
    if let Some(biases) = distance_biases {
        for (score, &bias) in scores.iter_mut().zip(biases) {
            *score = if bias == f32::NEG_INFINITY { bias } else { biased(*score * scale, bias) };
        }
        scale = 1.0;
    }
    let (b, key) = (sequence.b, sequence.keys.start + key);
    if let Some(bias) = attention.bias {
        for (i, score) in scores.iter_mut().enumerate() {
            let bias = bias.at(b, h, t, key + i);
            let sum = bias + distance_biases.map_or(0.0, |biases| biases[i]);
            *score = if sum == f32::NEG_INFINITY { sum } else { biased(*score * scale, bias) };
        }
        scale = 1.0;
    }
    if let Some(keep) = attention.keep {
        for (i, score) in scores.iter_mut().enumerate() {
            if keep.at(b, h, t, key + i) == 0 {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    scale
}

/// `score + bias`. A finite sum is clamped so that its product with log₂ e is finite too. A bias of
/// `f32::MIN` or `f32::MAX` for all keys, which absorbs the scores, therefore gives all keys the
/// same weight and not NaN.
fn biased(score: f32, bias: f32) -> f32 {
    const MAX: f32 = f32::MAX / (LOG2_E * 1.000_001);
    let sum = score + bias;
    if sum.is_finite() { sum.clamp(-MAX, MAX) } else { sum }
}

/// Multiplies the scores by `scale`, and clamps the products of finite scores to the range of f32.
/// Returns the maximum.
#[cold]
fn scale_and_clamp(scores: &mut [f32], scale: f32) -> f32 {
    for score in scores.iter_mut().filter(|score| score.is_finite()) {
        *score = (*score * scale).clamp(f32::MIN, f32::MAX);
    }
    scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Writes `row · scale`, of `width` values, to `to`.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; both rows have `width` elements.
#[inline(always)]
pub(super) unsafe fn scale_row<V: Vector, D: Dot<V>, T: Element>(
    row: *const f32,
    width: usize,
    scale: f32,
    to: *mut T,
) {
    for column in (0..width).step_by(LANES) {
        // SAFETY: `column + n` is within both rows.
        unsafe {
            let n = LANES.min(width - column);
            let x = V::load_partial(row.add(column), n).mul(V::splat(scale));
            T::store::<V, D>(x, to.add(column), n);
        }
    }
}

/// Replaces `n` scores by the weights `2^(score · scale · log₂ e − m)` in the compute type, where m
/// is the maximum of the exponents over this block and all earlier ones, and adds the weights to
/// the sum in `state`. Returns the factor `2^(old m − m)`, which is applied to the sum here and
/// must be applied to the context by the caller. `scale` is positive.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `scores` has room for `n` values, rounded up
/// to whole vectors and to an even number.
#[inline(always)]
pub(super) unsafe fn online_softmax<V: Vector, D: Dot<V>>(
    compute_type: ComputeType,
    scores: *mut f32,
    n: usize,
    scale: f32,
    state: &mut SoftmaxState,
) -> f32 {
    // SAFETY: upheld by the caller.
    unsafe {
        match V::REGISTERS {
            1 => softmax_in_groups::<V, D, 4>(compute_type, scores, n, scale, state),
            _ => softmax_in_groups::<V, D, 2>(compute_type, scores, n, scale, state),
        }
    }
}

/// [`online_softmax`] that computes the weights of `GROUP` vectors together.
///
/// # Safety
/// As for [`online_softmax`].
#[inline(always)]
unsafe fn softmax_in_groups<V: Vector, D: Dot<V>, const GROUP: usize>(
    compute_type: ComputeType,
    scores: *mut f32,
    n: usize,
    scale: f32,
    state: &mut SoftmaxState,
) -> f32 {
    // SAFETY: all accesses are within the scores, which have room for whole vectors.
    unsafe {
        let scale = scale * LOG2_E;
        let mut scale_vector = V::splat(scale);
        let whole = n - n % LANES;
        let mut max = V::splat(f32::NEG_INFINITY);
        for i in (0..whole).step_by(LANES) {
            max = max.max(V::load(scores.add(i)));
        }
        // The scale is positive, so that the maximum of the products is the product of the maximum.
        let mut max = (whole..n).fold(max.reduce_max(), |max, i| max.max(*scores.add(i))) * scale;
        if max.is_infinite() {
            max = scale_and_clamp(std::slice::from_raw_parts_mut(scores, n), scale);
            scale_vector = V::splat(1.0);
        }
        let (old_max, max) = (state.max, max.max(state.max));
        let mut sum = V::splat(0.0);
        let grouped = n - n % (GROUP * LANES);
        for first in (0..grouped).step_by(GROUP * LANES) {
            let mut e = [V::splat(0.0); GROUP];
            for (v, e) in e.iter_mut().enumerate() {
                let score = V::load(scores.add(first + v * LANES));
                *e = score.mul(scale_vector).sub(V::splat(max));
            }
            for (v, e) in exp2_each(e).into_iter().enumerate() {
                sum = sum.add(e);
                store_weights::<V, D>(compute_type, e, scores, first + v * LANES);
            }
        }
        for i in (grouped..n.next_multiple_of(2)).step_by(LANES) {
            let (place, len) = (scores.add(i), LANES.min(n.saturating_sub(i)));
            let mut e = exp2(V::load_partial(place, len).mul(scale_vector).sub(V::splat(max)));
            if len < LANES {
                e.store_partial(place, len);
                e = V::load_partial(place, len); // the lanes beyond n are 0
            }
            sum = sum.add(e);
            store_weights::<V, D>(compute_type, e, scores, i);
        }
        let rescale = if old_max == max { 1.0 } else { exp2(V::splat(old_max - max)).first() };
        state.max = max;
        state.sum = state.sum * rescale + sum.reduce_add();
        rescale
    }
}

/// Overwrites scores by the weights of the keys from `i` on. f32 and widened bf16 take the places of
/// their scores. Packed bf16 takes half the memory, so it overwrites only scores that have been read.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; the row has room for the vector.
#[inline(always)]
unsafe fn store_weights<V: Vector, D: Dot<V>>(
    compute_type: ComputeType,
    weights: V,
    scores: *mut f32,
    i: usize,
) {
    // SAFETY: upheld by the caller.
    unsafe {
        match compute_type {
            ComputeType::Bf16 if D::INPUT_LANES == 2 => {
                WidenedBf16::store::<V, D>(weights, scores.add(i).cast(), LANES);
            }
            ComputeType::Bf16 => D::store_bf16(weights, scores.cast::<u16>().add(i)),
            _ => weights.store(scores.add(i)),
        }
    }
}
