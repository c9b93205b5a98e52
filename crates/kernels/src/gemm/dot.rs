//! [`Dot`]: multiply-accumulate of packed lanes, one implementation per number format and
//! instruction.
//!
//! A packed lane has 32 bits: one f32, two bf16 or four 8-bit integers, adjacent along k.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use crate::simd::Avx512;
use crate::simd::Vector;

/// Multiplies packed lanes and accumulates the products.
///
/// # Safety
/// All methods require that the CPU supports the instructions of `V` and of the implementing type.
pub(crate) trait Dot<V: Vector>: Sized {
    /// Whether the operands are rounded to fewer bits than those of f32, so that an approximate
    /// activation is accurate enough.
    const IS_ROUNDED: bool = true;
    /// Whether operands are quantised: accumulators are i32 and need dequantising.
    const IS_QUANTISED: bool = false;
    /// Whether the operands are f32 split into bf16 terms ([`bf16x3`](super::bf16x3)).
    const IS_BF16X3: bool = false;
    /// Lanes of an input row that are multiplied by one packed lane of a panel: 1, or 2 if the row
    /// is bf16 widened to f32, and the panel holds pairs of bf16.
    const INPUT_LANES: usize = 1;

    /// Reads a vector of a panel. With two input lanes, returns one half of each pair of bf16,
    /// widened: the half that is multiplied by lane `i` of a pair of input lanes.
    #[inline(always)]
    unsafe fn load_panel(from: *const f32, _i: usize) -> V {
        // SAFETY: upheld by the caller.
        unsafe { V::load(from) }
    }

    /// `acc + Σ aᵢ·bᵢ` over the values in each lane.
    unsafe fn dot(a: V, b: V, acc: V) -> V;
    /// Adds two accumulators.
    unsafe fn add(x: V, y: V) -> V;
    /// Writes `LANES` values, rounded to bf16.
    #[inline(always)]
    unsafe fn store_bf16(x: V, to: *mut u16) {
        // SAFETY: upheld by the caller.
        unsafe { x.store_bf16(to) }
    }
    /// Packs pairs of values, rounded to bf16, as [`Vector::pack_bf16`] does.
    #[inline(always)]
    unsafe fn pack_bf16(low: V, high: V) -> V {
        // SAFETY: upheld by the caller.
        unsafe { low.pack_bf16(high) }
    }
}

/// f32.
pub(crate) struct F32;
/// bf16, widened to f32: input rows when they are packed, panels when they are multiplied.
pub(crate) struct Bf16;
/// 8-bit integers, multiplied by instructions of the vector type's own ISA (without VNNI).
pub(crate) struct Int8;
/// bf16 by AVX-512 BF16 (`vdpbf16ps`).
#[cfg(target_arch = "x86_64")]
pub(crate) struct NativeBf16;
/// 8-bit integers by AVX-512 VNNI (`vpdpbusd`).
#[cfg(target_arch = "x86_64")]
pub(crate) struct NativeInt8;

#[allow(unsafe_op_in_unsafe_fn)] // vector operations throughout; the trait states their contract
impl<V: Vector> Dot<V> for F32 {
    const IS_ROUNDED: bool = false;
    #[inline(always)]
    unsafe fn dot(a: V, b: V, acc: V) -> V {
        a.fma(b, acc)
    }
    #[inline(always)]
    unsafe fn add(x: V, y: V) -> V {
        x.add(y)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as above
impl<V: Vector> Dot<V> for Bf16 {
    const INPUT_LANES: usize = 2;

    #[inline(always)]
    unsafe fn load_panel(from: *const f32, i: usize) -> V {
        match i {
            0 => V::load(from).even_bf16(),
            _ => V::load(from).odd_bf16(),
        }
    }
    #[inline(always)]
    unsafe fn dot(a: V, b: V, acc: V) -> V {
        a.fma(b, acc)
    }
    #[inline(always)]
    unsafe fn add(x: V, y: V) -> V {
        x.add(y)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as above
impl<V: Vector> Dot<V> for Int8 {
    const IS_QUANTISED: bool = true;
    #[inline(always)]
    unsafe fn dot(a: V, b: V, acc: V) -> V {
        a.dot_int8(b, acc)
    }
    #[inline(always)]
    unsafe fn add(x: V, y: V) -> V {
        x.add_i32(y)
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_op_in_unsafe_fn)] // as above
impl Dot<Avx512> for NativeBf16 {
    #[inline(always)]
    unsafe fn dot([a]: Avx512, [b]: Avx512, [acc]: Avx512) -> Avx512 {
        let pairs = |x| std::mem::transmute::<__m512, __m512bh>(x);
        [_mm512_dpbf16_ps(acc, pairs(a), pairs(b))]
    }
    #[inline(always)]
    unsafe fn store_bf16([x]: Avx512, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), round_to_bf16(x));
    }
    #[inline(always)]
    unsafe fn pack_bf16([low]: Avx512, [high]: Avx512) -> Avx512 {
        let widen = |x| _mm512_cvtepu16_epi32(round_to_bf16(x));
        let high = _mm512_slli_epi32::<16>(widen(high));
        [_mm512_castsi512_ps(_mm512_or_si512(high, widen(low)))]
    }
    #[inline(always)]
    unsafe fn add(x: Avx512, y: Avx512) -> Avx512 {
        x.add(y)
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_op_in_unsafe_fn)] // as above
impl Dot<Avx512> for NativeInt8 {
    const IS_QUANTISED: bool = true;
    #[inline(always)]
    unsafe fn dot([a]: Avx512, [b]: Avx512, [acc]: Avx512) -> Avx512 {
        let ints = |x| _mm512_castps_si512(x);
        [_mm512_castsi512_ps(_mm512_dpbusd_epi32(ints(acc), ints(a), ints(b)))]
    }
    #[inline(always)]
    unsafe fn add(x: Avx512, y: Avx512) -> Avx512 {
        x.add_i32(y)
    }
}

/// The bf16 nearest to each lane; absolute values below 2⁻¹²⁶ give a zero.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn round_to_bf16(x: __m512) -> __m256i {
    std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
}
