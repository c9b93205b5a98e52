//! Rows as 8-bit integers, after a rotation.
//!
//! A few channels of a transformer's hidden states are much larger than the others, and a scale
//! that reaches them leaves few steps to the rest. So both factors of a product are rotated first,
//! by Hadamard's matrix in blocks of [`BLOCK`] numbers: `x·Wᵀ = (x·H)·(W·H)ᵀ`, since `H·Hᵀ = 1`,
//! and x·H has no such channels. Ashkboos et al. 2024, <https://arxiv.org/abs/2404.00456>.

use crate::lanes::{Lanes, hadamard};

/// Numbers rotated together; the last of a row, if fewer, stay as they are.
const BLOCK: usize = 64;

/// What the numbers 0..=255 of a row stand for: `(number − zero) · scale`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quant {
    pub(crate) scale: f32,
    pub(crate) zero: i32,
}

/// `from`, rotated: each block times Hadamard's matrix over √64, which is its own inverse.
///
/// # Safety
/// The instructions of `L`; `to` has room for the row.
#[inline(always)]
pub(crate) unsafe fn rotate<L: Lanes>(from: &[f32], to: *mut f32) {
    let (from, k) = (from.as_ptr(), from.len());
    let rotated = k - k % BLOCK;
    // SAFETY: blocks are within the row, and vectors within a block.
    unsafe {
        for start in (0..rotated).step_by(BLOCK) {
            let to = to.add(start);
            for i in (0..BLOCK).step_by(L::N) {
                let x = L::load(from.add(start + i)).mul(L::splat(1.0 / 8.0));
                hadamard(x).store(to.add(i));
            }
            let mut apart = L::N;
            while apart < BLOCK {
                for i in (0..BLOCK).step_by(L::N).filter(|i| i & apart == 0) {
                    let (a, b) = (L::load(to.add(i)), L::load(to.add(i + apart)));
                    a.add(b).store(to.add(i));
                    a.sub(b).store(to.add(i + apart));
                }
                apart *= 2;
            }
        }
        std::ptr::copy_nonoverlapping(from.add(rotated), to.add(rotated), k - rotated);
    }
}

/// The numbers of a row from its least to its largest as 0..=255, with 0 among them; a scale of NaN
/// if one is not finite.
///
/// # Safety
/// The instructions of `L`; `to` has room for the row in whole vectors.
#[inline(always)]
pub(crate) unsafe fn between_extremes<L: Lanes>(row: &[f32], to: *mut u8) -> Quant {
    // SAFETY: the caller's.
    unsafe {
        let (least, most) = extremes::<L>(row);
        let scale = (most - least) / 255.0;
        let per_scale = reciprocal(scale);
        let zero = (-least * per_scale).round_ties_even();
        store::<L>(row, per_scale, zero, to);
        Quant { scale, zero: zero as i32 }
    }
}

/// The numbers of a row, of either sign up to the largest, as 1..=255, with 0 as 128; gives what
/// they are multiples of, NaN if one is not finite.
///
/// # Safety
/// As above.
#[inline(always)]
pub(crate) unsafe fn around_zero<L: Lanes>(row: &[f32], to: *mut u8) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let (least, most) = extremes::<L>(row);
        let scale = most.max(-least) / 127.0 + 0.0 * least;
        store::<L>(row, reciprocal(scale), 128.0, to);
        scale
    }
}

/// `1/x`; 0 where that is not finite.
fn reciprocal(x: f32) -> f32 {
    Some(1.0 / x).filter(|y| y.is_finite()).unwrap_or(0.0)
}

/// The least and the largest of a row and 0; NaN if one number is not finite.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn extremes<L: Lanes>(row: &[f32]) -> (f32, f32) {
    let (from, k) = (row.as_ptr(), row.len());
    // SAFETY: reads are within the row.
    unsafe {
        let zero = L::splat(0.0);
        let (mut least, mut most, mut nan) = (zero, zero, zero);
        for i in (0..k).step_by(L::N) {
            let x = L::load_first(from.add(i), L::N.min(k - i));
            least = x.min(least);
            most = x.max(most);
            nan = x.fma(zero, nan);
        }
        let nan = nan.sum(); // 0 unless there is one
        (nan - zero.sub(least).largest(), nan + most.largest())
    }
}

/// Each number times `per_scale` plus `zero`, as a byte.
///
/// # Safety
/// The instructions of `L`; `to` has room for the row in whole vectors.
#[inline(always)]
unsafe fn store<L: Lanes>(row: &[f32], per_scale: f32, zero: f32, to: *mut u8) {
    let (from, k) = (row.as_ptr(), row.len());
    // SAFETY: reads are within the row, writes the caller's.
    unsafe {
        for i in (0..k).step_by(L::N) {
            let x = L::load_first(from.add(i), L::N.min(k - i));
            let number = x.fma(L::splat(per_scale), L::splat(zero)).round();
            L::splat(255.0).min(L::splat(0.0).max(number)).store_u8(to.add(i));
        }
    }
}
