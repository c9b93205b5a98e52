//! Quantisation to 8 bits, after a Hadamard rotation.
//!
//! A few channels of a transformer's hidden states are much larger than the others. A scale that
//! covers them leaves few quantisation steps for the rest. Both operands are therefore rotated
//! first, in blocks of [`BLOCK`] values, by H, the Hadamard matrix divided by √64. The product is
//! the same, `x·Wᵀ = (x·H)·(W·H)ᵀ`, because `H·Hᵀ = I`, and no channel of `x·H` is much larger than
//! the others. Ashkboos et al. 2024, QuaRot, <https://arxiv.org/abs/2404.00456>.

use super::element::Element;
use crate::simd::{Dot, LANES, Vector};

/// Values that are rotated together. A shorter remainder at the end of a row is not rotated.
const BLOCK: usize = 64;

/// The scale and the zero point of a quantised row: a byte q stands for `(q − zero_point) · scale`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowQuantisation {
    pub(crate) scale: f32,
    pub(crate) zero_point: f32,
}

/// The minimum and the maximum of 0 and the values of a row, per lane.
#[derive(Clone, Copy)]
pub(crate) struct ValueRange<V> {
    min: V,
    max: V,
    /// 0, or NaN if a value is not finite.
    nan: V,
}

impl<V: Vector> ValueRange<V> {
    /// # Safety
    /// The CPU supports the instructions of `V`. This applies to all methods.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: upheld by the caller.
        let zero = unsafe { V::splat(0.0) };
        Self { min: zero, max: zero, nan: zero }
    }

    #[inline(always)]
    unsafe fn include(&mut self, x: V) {
        // SAFETY: upheld by the caller.
        unsafe {
            self.min = x.min(self.min);
            self.max = x.max(self.max);
            self.nan = x.fma(V::splat(0.0), self.nan);
        }
    }

    /// The minimum and the maximum of all lanes; NaN if a value is not finite.
    #[inline(always)]
    unsafe fn reduce(self) -> (f32, f32) {
        // SAFETY: upheld by the caller.
        unsafe {
            let nan = self.nan.reduce_add();
            (nan - V::splat(0.0).sub(self.min).reduce_max(), nan + self.max.reduce_max())
        }
    }
}

/// Writes `from · H` per block, with H as in the module documentation. H is its own inverse.
/// Returns the range of the result.
///
/// # Safety
/// The CPU supports the instructions of `V`; `to` has room for the row.
#[inline(always)]
pub(crate) unsafe fn rotate<V: Vector, T: Element>(from: &[T], to: *mut f32) -> ValueRange<V> {
    /// Vectors of a block.
    const N: usize = BLOCK / LANES;
    let (from, k) = (from.as_ptr(), from.len());
    let rotated = k - k % BLOCK;
    // SAFETY: whole blocks are within the row, and so is the remainder.
    unsafe {
        let mut range = ValueRange::new();
        for start in (0..rotated).step_by(BLOCK) {
            let mut block = [V::splat(0.0); N];
            for (i, x) in block.iter_mut().enumerate() {
                let from = from.add(start + i * LANES);
                *x = T::load::<V>(from, LANES).mul(V::splat(1.0 / 8.0)).hadamard();
            }
            let mut distance = 1;
            while distance < N {
                for i in (0..N).filter(|i| i & distance == 0) {
                    let (a, b) = (block[i], block[i + distance]);
                    (block[i], block[i + distance]) = (a.add(b), a.sub(b));
                }
                distance *= 2;
            }
            for (i, x) in block.into_iter().enumerate() {
                range.include(x);
                x.store(to.add(start + i * LANES));
            }
        }
        for i in (rotated..k).step_by(LANES) {
            let n = LANES.min(k - i);
            let x = T::load::<V>(from.add(i), n);
            range.include(x);
            x.store_partial(to.add(i), n);
        }
        range
    }
}

/// Quantises a row to 0..=255 so that its range, which includes 0, is covered; to −128..=127, with the
/// same zero point, if [`Dot::HAS_SIGNED_INPUT`]. The scale is NaN if
/// a value is not finite, and infinite if the width of the range overflows f32; the products of the
/// row are then NaN.
///
/// # Safety
/// The CPU supports the instructions of `V`; `to` has room for the row in whole vectors.
#[inline(always)]
pub(crate) unsafe fn quantise_asymmetric<V: Vector, D: Dot<V>>(
    row: &[f32],
    range: ValueRange<V>,
    to: *mut u8,
) -> RowQuantisation {
    // SAFETY: upheld by the caller.
    unsafe {
        let (min, max) = range.reduce();
        let scale = (max - min) / 255.0;
        let inverse_scale = finite_reciprocal(scale);
        let zero_point = (-min * inverse_scale).round_ties_even();
        store_u8::<V>(row, inverse_scale, zero_point, to);
        if D::HAS_SIGNED_INPUT {
            let bytes = std::slice::from_raw_parts_mut(to, row.len());
            bytes.iter_mut().for_each(|byte| *byte ^= 0x80);
        }
        RowQuantisation { scale, zero_point }
    }
}

/// Quantises a row of weights to 1..=255 with the zero point 128, and returns the scale. The scale
/// is NaN if a value is not finite. With `limits_pairs` ([`Dot::ADDS_INT8_PAIRS_IN_I16`]), the scale
/// is large enough that the sum of two adjacent values is within ±126 before they are rounded, and so within
/// ±127 after.
///
/// # Safety
/// As for [`quantise_asymmetric`].
#[inline(always)]
pub(crate) unsafe fn quantise_symmetric<V: Vector>(
    row: &[f32],
    range: ValueRange<V>,
    limits_pairs: bool,
    to: *mut u8,
) -> f32 {
    // SAFETY: upheld by the caller.
    unsafe {
        let (min, max) = range.reduce();
        let mut scale = max.max(-min) / 127.0; // if a value is not finite, min and max are both NaN
        if limits_pairs {
            for &[a, b] in row.as_chunks().0 {
                // a and b are divided before they are added, so that the sum is finite.
                let pair_scale = (a / 126.0 + b / 126.0).abs();
                // False if one of the scales is NaN, so that `scale` stays NaN.
                if pair_scale > scale {
                    scale = pair_scale;
                }
            }
        }
        store_u8::<V>(row, finite_reciprocal(scale), 128.0, to);
        scale
    }
}

/// `1/x`, or 0 if that is not finite.
fn finite_reciprocal(x: f32) -> f32 {
    Some(1.0 / x).filter(|y| y.is_finite()).unwrap_or(0.0)
}

/// Writes `x · inverse_scale + zero_point` as bytes.
///
/// # Safety
/// As for [`quantise_asymmetric`].
#[inline(always)]
unsafe fn store_u8<V: Vector>(row: &[f32], inverse_scale: f32, zero_point: f32, to: *mut u8) {
    let (from, k) = (row.as_ptr(), row.len());
    // SAFETY: reads are within the row; the caller guarantees room for the writes.
    unsafe {
        for i in (0..k).step_by(LANES) {
            let x = V::load_partial(from.add(i), LANES.min(k - i));
            x.fma(V::splat(inverse_scale), V::splat(zero_point)).store_u8(to.add(i));
        }
    }
}
