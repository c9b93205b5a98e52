//! What two words of 32 bits give, for each [`Format`](super::Format).

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::hint::black_box;

use super::{
    packed::Panel,
    quantise::Quant,
    tile::{Tile, Tiles},
};
use crate::lanes::Lanes;

/// Products of the numbers in two words, and their sum.
///
/// # Safety
/// All methods need the instructions of `L` and of the implementing type.
pub(crate) trait Dot<L: Lanes>: Sized {
    /// Whether the words' numbers are rounded, so that what is made of the product need not be exact.
    const ROUNDS: bool = true;
    /// Whether what is multiplied are the [`thirds`](super::thirds) of words.
    const THIRDS: bool = false;
    /// Words of k before the next rows, whose sums go on later: a panel's part of them stays near.
    const K_BLOCK: usize = 384;
    /// Whether sums are best written where the product goes, if they are as wide as its elements.
    const IN_PLACE: bool = true;
    /// `sum + Σ aᵢ·bᵢ` over the numbers of each word.
    unsafe fn dot(a: L, b: L, sum: L) -> L;
    /// Of two sums.
    unsafe fn add(sum: L, more: L) -> L;
    /// The element of the product that a sum stands for, in a row and from a column of the panel on.
    unsafe fn element(sum: L, row: Quant, panel: &Panel, column: usize) -> L;
    /// A tile of some rows times a panel; `1 ≤ height ≤` [`crate::Isa::tile_rows`].
    #[inline(always)]
    unsafe fn tile(height: usize, tile: &Tile)
    where
        L: Tiles,
    {
        // SAFETY: the caller's.
        unsafe { L::tile::<Self>(height, tile) }
    }
    /// Products of what stays in registers, and how many.
    #[inline(always)]
    unsafe fn keep_busy(steps: usize) -> usize {
        /// At a time: enough that none waits for its predecessor, few enough for all registers.
        const SUMS: usize = 10;
        // SAFETY: the caller's.
        unsafe {
            let (mut a, b) = (L::splat(black_box(0.0)), L::splat(black_box(0.0)));
            let mut sums = [L::splat(0.0); SUMS];
            for _ in 0..steps {
                for sum in &mut sums {
                    *sum = Self::dot(a, b, *sum);
                }
                a = Self::add(a, b); // another factor, so that no product is computed once for all
            }
            black_box(sums.map(|sum| sum.sum()));
        }
        steps * SUMS * L::N
    }
    /// `N` numbers of bf16, the nearest to these.
    #[inline(always)]
    unsafe fn store_bf16(x: L, to: *mut u16) {
        // SAFETY: the caller's.
        unsafe { x.store_bf16(to) }
    }
    /// Words of two numbers of bf16, the nearest to `low` and to `high`.
    #[inline(always)]
    unsafe fn pair_bf16(low: L, high: L) -> L {
        // SAFETY: the caller's.
        unsafe { low.pair_bf16(high) }
    }
}

/// Words that are numbers of f32.
pub(crate) struct F32;
/// Words of two numbers of bf16, widened to f32.
pub(crate) struct Bf16;
/// Words of four numbers of 8 bits, a's unsigned and b's signed, widened to 16.
pub(crate) struct Int8;
/// [`Bf16`] by the instruction for it.
#[cfg(target_arch = "x86_64")]
pub(crate) struct NativeBf16;
/// [`Int8`] by the instruction for it.
#[cfg(target_arch = "x86_64")]
pub(crate) struct NativeInt8;

#[allow(unsafe_op_in_unsafe_fn)] // vectors throughout, under the trait's own contract
impl<L: Lanes> Dot<L> for F32 {
    const ROUNDS: bool = false;
    #[inline(always)]
    unsafe fn dot(a: L, b: L, sum: L) -> L {
        a.fma(b, sum)
    }
    #[inline(always)]
    unsafe fn add(sum: L, more: L) -> L {
        sum.add(more)
    }
    #[inline(always)]
    unsafe fn element(sum: L, _row: Quant, panel: &Panel, column: usize) -> L {
        sum.add(L::load(panel.bias.as_ptr().add(column)))
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as above
impl<L: Lanes> Dot<L> for Bf16 {
    #[inline(always)]
    unsafe fn dot(a: L, b: L, sum: L) -> L {
        let (a_odd, b_odd) = (a.odd_bf16(), b.odd_bf16());
        a.even_bf16().fma(b.even_bf16(), a_odd.fma(b_odd, sum))
    }
    #[inline(always)]
    unsafe fn add(sum: L, more: L) -> L {
        sum.add(more)
    }
    #[inline(always)]
    unsafe fn element(sum: L, row: Quant, panel: &Panel, column: usize) -> L {
        F32::element(sum, row, panel, column)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as above
impl<L: Lanes> Dot<L> for Int8 {
    #[inline(always)]
    unsafe fn dot(a: L, b: L, sum: L) -> L {
        a.dot_int8(b, sum)
    }
    #[inline(always)]
    unsafe fn add(sum: L, more: L) -> L {
        sum.add_int(more)
    }
    #[inline(always)]
    unsafe fn element(sum: L, row: Quant, panel: &Panel, column: usize) -> L {
        // Σ (a − zero)·b = Σ a·b − zero·Σ b
        let at = |numbers: &[f32]| L::load(numbers.as_ptr().add(column));
        let scale = L::splat(row.scale).mul(at(panel.scales));
        let rest = L::splat(-row.zero * row.scale).fma(at(panel.sums), at(panel.bias));
        sum.to_float().fma(scale, rest)
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_op_in_unsafe_fn)] // as above
impl Dot<__m512> for NativeBf16 {
    #[inline(always)]
    unsafe fn dot(a: __m512, b: __m512, sum: __m512) -> __m512 {
        let words = |x| std::mem::transmute::<__m512, __m512bh>(x);
        _mm512_dpbf16_ps(sum, words(a), words(b))
    }
    #[inline(always)]
    unsafe fn store_bf16(x: __m512, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), bf16_of_16(x));
    }
    #[inline(always)]
    unsafe fn pair_bf16(low: __m512, high: __m512) -> __m512 {
        let words = |x| _mm512_cvtepu16_epi32(bf16_of_16(x));
        let high = _mm512_slli_epi32::<16>(words(high));
        _mm512_castsi512_ps(_mm512_or_si512(high, words(low)))
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, more: __m512) -> __m512 {
        sum.add(more)
    }
    #[inline(always)]
    unsafe fn element(sum: __m512, row: Quant, panel: &Panel, column: usize) -> __m512 {
        F32::element(sum, row, panel, column)
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_op_in_unsafe_fn)] // as above
impl Dot<__m512> for NativeInt8 {
    #[inline(always)]
    unsafe fn dot(a: __m512, b: __m512, sum: __m512) -> __m512 {
        let words = |x| _mm512_castps_si512(x);
        _mm512_castsi512_ps(_mm512_dpbusd_epi32(words(sum), words(a), words(b)))
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, more: __m512) -> __m512 {
        sum.add_int(more)
    }
    #[inline(always)]
    unsafe fn element(sum: __m512, row: Quant, panel: &Panel, column: usize) -> __m512 {
        Int8::element(sum, row, panel, column)
    }
}

/// The nearest bf16 of each; 0 for what is below 2⁻¹²⁶.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn bf16_of_16(x: __m512) -> __m256i {
    std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
}
