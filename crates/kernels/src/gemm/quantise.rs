//! Rows as 8-bit integers, after a rotation.
//!
//! A few channels of a transformer's hidden states are much larger than the others, and a scale
//! that reaches them leaves few steps to the rest. So both factors of a product are rotated first,
//! by Hadamard's matrix in blocks of [`BLOCK`] numbers: `x·Wᵀ = (x·H)·(W·H)ᵀ`, since `H·Hᵀ = 1`,
//! and x·H has no such channels. Ashkboos et al. 2024, <https://arxiv.org/abs/2404.00456>.

use crate::{
    lanes::{Lanes, hadamard},
    number::Element,
};

/// Numbers rotated together; the last of a row, if fewer, stay as they are.
const BLOCK: usize = 64;

/// What the numbers 0..=255 of a row stand for: `(number − zero) · scale`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quant {
    pub(crate) scale: f32,
    pub(crate) zero: f32,
}

/// The least and the largest of some numbers and 0, in each lane, and 0 unless one is not finite.
#[derive(Clone, Copy)]
pub(crate) struct Extremes<L> {
    least: L,
    most: L,
    nan: L,
}

impl<L: Lanes> Extremes<L> {
    /// # Safety
    /// The instructions of `L`, as for all its functions.
    #[inline(always)]
    unsafe fn none() -> Self {
        // SAFETY: the caller's.
        let zero = unsafe { L::splat(0.0) };
        Self { least: zero, most: zero, nan: zero }
    }

    #[inline(always)]
    unsafe fn also(&mut self, x: L) {
        // SAFETY: the caller's.
        unsafe {
            self.least = x.min(self.least);
            self.most = x.max(self.most);
            self.nan = x.fma(L::splat(0.0), self.nan);
        }
    }

    /// The least and the largest of all lanes; NaN if one number is not finite.
    #[inline(always)]
    unsafe fn ends(self) -> (f32, f32) {
        // SAFETY: the caller's.
        unsafe {
            let nan = self.nan.sum();
            (nan - L::splat(0.0).sub(self.least).largest(), nan + self.most.largest())
        }
    }
}

/// `from`, rotated: each block times Hadamard's matrix over √64, which is its own inverse.
///
/// # Safety
/// The instructions of `L`; `to` has room for the row.
#[inline(always)]
pub(crate) unsafe fn rotate<L: Lanes, T: Element>(from: &[T], to: *mut f32) -> Extremes<L> {
    // SAFETY: the caller's; as many vectors as make a block.
    unsafe {
        match L::N {
            16 => rotate_by::<L, T, 4>(from, to),
            8 => rotate_by::<L, T, 8>(from, to),
            _ => rotate_by::<L, T, BLOCK>(from, to),
        }
    }
}

/// [`rotate`] with `V` vectors to a block.
///
/// # Safety
/// As there; `V` times the lanes is [`BLOCK`].
#[inline(always)]
unsafe fn rotate_by<L: Lanes, T: Element, const V: usize>(from: &[T], to: *mut f32) -> Extremes<L> {
    let (from, k) = (from.as_ptr(), from.len());
    let rotated = k - k % BLOCK;
    // SAFETY: blocks are within the row, and vectors within a block or what is left.
    unsafe {
        let mut extremes = Extremes::none();
        for start in (0..rotated).step_by(BLOCK) {
            let mut block = [L::splat(0.0); V];
            for (i, x) in block.iter_mut().enumerate() {
                let from = from.add(start + i * L::N);
                *x = hadamard(T::load::<L>(from, L::N).mul(L::splat(1.0 / 8.0)));
            }
            let mut apart = 1;
            while apart < V {
                for i in (0..V).filter(|i| i & apart == 0) {
                    let (a, b) = (block[i], block[i + apart]);
                    (block[i], block[i + apart]) = (a.add(b), a.sub(b));
                }
                apart *= 2;
            }
            for (i, x) in block.into_iter().enumerate() {
                extremes.also(x);
                x.store(to.add(start + i * L::N));
            }
        }
        for i in (rotated..k).step_by(L::N) {
            let n = L::N.min(k - i);
            let x = T::load::<L>(from.add(i), n);
            extremes.also(x);
            x.store_first(to.add(i), n);
        }
        extremes
    }
}

/// The numbers of a row from its least to its largest as 0..=255, with 0 among them; a scale of NaN
/// if one is not finite.
///
/// # Safety
/// The instructions of `L`; `to` has room for the row in whole vectors.
#[inline(always)]
pub(crate) unsafe fn between_extremes<L: Lanes>(
    row: &[f32],
    extremes: Extremes<L>,
    to: *mut u8,
) -> Quant {
    // SAFETY: the caller's.
    unsafe {
        let (least, most) = extremes.ends();
        let scale = (most - least) / 255.0;
        let per_scale = reciprocal(scale);
        let zero = (-least * per_scale).round_ties_even();
        store::<L>(row, per_scale, zero, to);
        Quant { scale, zero }
    }
}

/// The numbers of a row, of either sign up to the largest, as 1..=255, with 0 as 128; gives what
/// they are multiples of, NaN if one is not finite.
///
/// # Safety
/// As above.
#[inline(always)]
pub(crate) unsafe fn around_zero<L: Lanes>(row: &[f32], extremes: Extremes<L>, to: *mut u8) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let (least, most) = extremes.ends();
        let scale = most.max(-least) / 127.0 + 0.0 * least;
        store::<L>(row, reciprocal(scale), 128.0, to);
        scale
    }
}

/// `1/x`; 0 where that is not finite.
fn reciprocal(x: f32) -> f32 {
    Some(1.0 / x).filter(|y| y.is_finite()).unwrap_or(0.0)
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
            x.fma(L::splat(per_scale), L::splat(zero)).store_u8(to.add(i));
        }
    }
}
