//! Vectors of f32 of whatever width: each kernel is written once, over [`Lanes`].
//!
//! One number is a vector of width 1, and that is the scalar reference: the same source, the same
//! operations in the same order.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::{buffers::LINE, gemm::bf16};

/// A vector of [`Lanes::N`] numbers.
///
/// # Safety
/// All methods need the instructions of the implementing type, which [`crate::Isa`] vouches for;
/// those that take a pointer read or write as many numbers as they say.
pub(crate) trait Lanes: Copy + Send + Sync {
    const N: usize;

    unsafe fn splat(x: f32) -> Self;
    /// `N` numbers.
    unsafe fn load(from: *const f32) -> Self;
    /// `n ≤ N` numbers, and zeros.
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    /// `N` numbers.
    unsafe fn store(self, to: *mut f32);
    /// The first `n ≤ N` numbers.
    unsafe fn store_first(self, to: *mut f32, n: usize);
    /// `self · y + z`, rounded once.
    unsafe fn fma(self, y: Self, z: Self) -> Self;
    unsafe fn add(self, y: Self) -> Self;
    unsafe fn sub(self, y: Self) -> Self;
    unsafe fn mul(self, y: Self) -> Self;
    unsafe fn div(self, y: Self) -> Self;
    /// The larger; `y` where either is NaN.
    unsafe fn max(self, y: Self) -> Self;
    /// The smaller; `y` where either is NaN.
    unsafe fn min(self, y: Self) -> Self;
    /// The nearest integer, the even one of two.
    unsafe fn round(self) -> Self;
    /// `2ⁿ` for integers −126 ≤ n ≤ 127.
    unsafe fn exp2_of_integer(self) -> Self;
    /// `self · 2ⁿ` for integers n, rounded once where that is below 2⁻¹²⁶; `self` is about 1.
    #[inline(always)]
    unsafe fn times_exp2(self, n: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let n = n.max(Self::splat(-252.0)).min(Self::splat(254.0));
            let half = n.mul(Self::splat(0.5)).round();
            self.mul(half.exp2_of_integer()).mul(n.sub(half).exp2_of_integer())
        }
    }
    /// `yes` where it is below 0, else `no`.
    unsafe fn if_negative(self, yes: Self, no: Self) -> Self;
    unsafe fn sum(self) -> f32;
    unsafe fn largest(self) -> f32;

    /// Two vectors after exchanging the upper of each two lanes `apart` in the first with the lower
    /// of them in the second; `apart` is a power of two below `N`.
    unsafe fn exchange(self, y: Self, apart: usize) -> (Self, Self);
    /// Each lane's number in the lane `apart` from it.
    unsafe fn swap(self, apart: usize) -> Self;

    // Words that hold something else than one number of f32.

    /// `N` numbers of f16.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// `N` numbers of bf16.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// `N` numbers of bf16, the nearest to these.
    unsafe fn store_bf16(self, to: *mut u16);
    /// Words of two numbers of bf16, the nearest to these and to `high`.
    unsafe fn pair_bf16(self, high: Self) -> Self;
    /// `N` bytes, the integers of 0..=255 nearest to these; of NaN any.
    unsafe fn store_u8(self, to: *mut u8);
    /// Words of the upper halves of these and of `high`.
    unsafe fn pair_halves(self, high: Self) -> Self;
    /// The lower of the two numbers of bf16 in each word.
    unsafe fn even_bf16(self) -> Self;
    /// The higher of them.
    unsafe fn odd_bf16(self) -> Self;
    /// `sum + Σ aᵢ·bᵢ` of integers, over the four bytes of each word, those of b signed.
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self;
    /// Of integers.
    unsafe fn add_int(self, y: Self) -> Self;
    /// The numbers nearest to integers.
    unsafe fn to_float(self) -> Self;
}

impl Lanes for f32 {
    const N: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        x
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's.
        unsafe { *from }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        // SAFETY: the caller's.
        if n == 0 { 0.0 } else { unsafe { *from } }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { *to = self }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        if n > 0 {
            // SAFETY: the caller's.
            unsafe { *to = self }
        }
    }
    #[inline(always)]
    unsafe fn fma(self, y: Self, z: Self) -> Self {
        self.mul_add(y, z)
    }
    #[inline(always)]
    unsafe fn add(self, y: Self) -> Self {
        self + y
    }
    #[inline(always)]
    unsafe fn sub(self, y: Self) -> Self {
        self - y
    }
    #[inline(always)]
    unsafe fn mul(self, y: Self) -> Self {
        self * y
    }
    #[inline(always)]
    unsafe fn div(self, y: Self) -> Self {
        self / y
    }
    #[inline(always)]
    unsafe fn max(self, y: Self) -> Self {
        if self > y { self } else { y }
    }
    #[inline(always)]
    unsafe fn min(self, y: Self) -> Self {
        if self < y { self } else { y }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.round_ties_even()
    }
    #[inline(always)]
    unsafe fn exp2_of_integer(self) -> Self {
        f32::from_bits(((self as i32 + 127) as u32) << 23)
    }
    #[inline(always)]
    unsafe fn if_negative(self, yes: Self, no: Self) -> Self {
        if self < 0.0 { yes } else { no }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn exchange(self, _y: Self, _apart: usize) -> (Self, Self) {
        unreachable!("one lane has no other")
    }
    #[inline(always)]
    unsafe fn swap(self, _apart: usize) -> Self {
        unreachable!("one lane has no other")
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller's.
        let bits = u32::from(unsafe { *from });
        let (sign, size) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        // An exponent counts from 15 here and from 127 there; that of infinity is the last in both.
        let infinite = if size >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
        let size = f32::from_bits(size) * f32::from_bits((127 + 112) << 23);
        Self::from_bits(size.to_bits() | infinite | sign)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller's.
        Self::from_bits(u32::from(unsafe { *from }) << 16)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller's.
        unsafe { *to = bf16(self) }
    }
    #[inline(always)]
    unsafe fn pair_bf16(self, high: Self) -> Self {
        Self::from_bits(u32::from(bf16(high)) << 16 | u32::from(bf16(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        // SAFETY: the caller's.
        unsafe { *to = self.round_ties_even() as u8 }
    }
    #[inline(always)]
    unsafe fn pair_halves(self, high: Self) -> Self {
        Self::from_bits(self.to_bits() >> 16 | high.to_bits() & 0xffff_0000)
    }
    #[inline(always)]
    unsafe fn even_bf16(self) -> Self {
        Self::from_bits(self.to_bits() << 16)
    }
    #[inline(always)]
    unsafe fn odd_bf16(self) -> Self {
        Self::from_bits(self.to_bits() & 0xffff_0000)
    }
    #[inline(always)]
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self {
        let (a, b) = (self.to_bits().to_ne_bytes(), b.to_bits().to_ne_bytes());
        let products = a.into_iter().zip(b).map(|(a, b)| i32::from(a) * i32::from(b as i8));
        Self::from_bits(sum.to_bits().wrapping_add(products.sum::<i32>() as u32))
    }
    #[inline(always)]
    unsafe fn add_int(self, y: Self) -> Self {
        Self::from_bits(self.to_bits().wrapping_add(y.to_bits()))
    }
    #[inline(always)]
    unsafe fn to_float(self) -> Self {
        self.to_bits() as i32 as f32
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_op_in_unsafe_fn)] // intrinsics throughout, under the trait's own contract
impl Lanes for __m512 {
    const N: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        if n == Self::N {
            return Self::load(from);
        }
        _mm512_maskz_loadu_ps(((1u32 << n) - 1) as __mmask16, from)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self)
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        if n == Self::N {
            return self.store(to);
        }
        _mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as __mmask16, self)
    }
    #[inline(always)]
    unsafe fn fma(self, y: Self, z: Self) -> Self {
        _mm512_fmadd_ps(self, y, z)
    }
    #[inline(always)]
    unsafe fn add(self, y: Self) -> Self {
        _mm512_add_ps(self, y)
    }
    #[inline(always)]
    unsafe fn sub(self, y: Self) -> Self {
        _mm512_sub_ps(self, y)
    }
    #[inline(always)]
    unsafe fn mul(self, y: Self) -> Self {
        _mm512_mul_ps(self, y)
    }
    #[inline(always)]
    unsafe fn div(self, y: Self) -> Self {
        _mm512_div_ps(self, y)
    }
    #[inline(always)]
    unsafe fn max(self, y: Self) -> Self {
        _mm512_max_ps(self, y)
    }
    #[inline(always)]
    unsafe fn min(self, y: Self) -> Self {
        _mm512_min_ps(self, y)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self)
    }
    #[inline(always)]
    unsafe fn exp2_of_integer(self) -> Self {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn times_exp2(self, n: Self) -> Self {
        _mm512_scalef_ps(self, n)
    }
    #[inline(always)]
    unsafe fn if_negative(self, yes: Self, no: Self) -> Self {
        let negative = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, _mm512_setzero_ps());
        _mm512_mask_blend_ps(negative, no, yes)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        _mm512_reduce_add_ps(self)
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        _mm512_reduce_max_ps(self)
    }
    #[inline(always)]
    unsafe fn exchange(self, y: Self, apart: usize) -> (Self, Self) {
        let upper = match apart {
            1 => 0xaaaa,
            2 => 0xcccc,
            4 => 0xf0f0,
            _ => 0xff00,
        };
        let first = _mm512_mask_blend_ps(upper, self, y.swap(apart));
        (first, _mm512_mask_blend_ps(!upper, y, self.swap(apart)))
    }
    #[inline(always)]
    unsafe fn swap(self, apart: usize) -> Self {
        match apart {
            1 => _mm512_permute_ps::<0b10_11_00_01>(self),
            2 => _mm512_permute_ps::<0b01_00_11_10>(self),
            4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(self, self),
            _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(self, self),
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(bf16_of_16(self)));
    }
    #[inline(always)]
    unsafe fn pair_bf16(self, high: Self) -> Self {
        let high = _mm512_slli_epi32::<16>(bf16_of_16(high));
        _mm512_castsi512_ps(_mm512_or_si512(high, bf16_of_16(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        let words = _mm512_max_epi32(_mm512_cvtps_epi32(self), _mm512_setzero_si512());
        _mm_storeu_si128(to.cast(), _mm512_cvtusepi32_epi8(words));
    }
    #[inline(always)]
    unsafe fn pair_halves(self, high: Self) -> Self {
        let (low, high) = (_mm512_castps_si512(self), _mm512_castps_si512(high.odd_bf16()));
        _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32::<16>(low), high))
    }
    #[inline(always)]
    unsafe fn even_bf16(self) -> Self {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(self)))
    }
    #[inline(always)]
    unsafe fn odd_bf16(self) -> Self {
        let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self), high))
    }
    #[inline(always)]
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self {
        let (a, b) = (_mm512_castps_si512(self), _mm512_castps_si512(b));
        let even = _mm512_madd_epi16(
            _mm512_and_si512(a, _mm512_set1_epi16(0xff)),
            _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(b)),
        );
        let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(a), _mm512_srai_epi16::<8>(b));
        let both = _mm512_add_epi32(even, odd);
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), both))
    }
    #[inline(always)]
    unsafe fn add_int(self, y: Self) -> Self {
        let sum = _mm512_add_epi32(_mm512_castps_si512(self), _mm512_castps_si512(y));
        _mm512_castsi512_ps(sum)
    }
    #[inline(always)]
    unsafe fn to_float(self) -> Self {
        _mm512_cvtepi32_ps(_mm512_castps_si512(self))
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_op_in_unsafe_fn)] // intrinsics throughout, under the trait's own contract
impl Lanes for __m256 {
    const N: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        _mm256_maskload_ps(from, first(n))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self)
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        _mm256_maskstore_ps(to, first(n), self)
    }
    #[inline(always)]
    unsafe fn fma(self, y: Self, z: Self) -> Self {
        _mm256_fmadd_ps(self, y, z)
    }
    #[inline(always)]
    unsafe fn add(self, y: Self) -> Self {
        _mm256_add_ps(self, y)
    }
    #[inline(always)]
    unsafe fn sub(self, y: Self) -> Self {
        _mm256_sub_ps(self, y)
    }
    #[inline(always)]
    unsafe fn mul(self, y: Self) -> Self {
        _mm256_mul_ps(self, y)
    }
    #[inline(always)]
    unsafe fn div(self, y: Self) -> Self {
        _mm256_div_ps(self, y)
    }
    #[inline(always)]
    unsafe fn max(self, y: Self) -> Self {
        _mm256_max_ps(self, y)
    }
    #[inline(always)]
    unsafe fn min(self, y: Self) -> Self {
        _mm256_min_ps(self, y)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self)
    }
    #[inline(always)]
    unsafe fn exp2_of_integer(self) -> Self {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn if_negative(self, yes: Self, no: Self) -> Self {
        let negative = _mm256_cmp_ps::<_CMP_LT_OQ>(self, _mm256_setzero_ps());
        _mm256_blendv_ps(no, yes, negative)
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut lanes = [0f32; 8];
        self.store(lanes.as_mut_ptr());
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let mut lanes = [0f32; 8];
        self.store(lanes.as_mut_ptr());
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn exchange(self, y: Self, apart: usize) -> (Self, Self) {
        let (a, b) = (self.swap(apart), y.swap(apart));
        match apart {
            1 => (_mm256_blend_ps::<0xaa>(self, b), _mm256_blend_ps::<0x55>(y, a)),
            2 => (_mm256_blend_ps::<0xcc>(self, b), _mm256_blend_ps::<0x33>(y, a)),
            _ => (_mm256_blend_ps::<0xf0>(self, b), _mm256_blend_ps::<0x0f>(y, a)),
        }
    }
    #[inline(always)]
    unsafe fn swap(self, apart: usize) -> Self {
        match apart {
            1 => _mm256_permute_ps::<0b10_11_00_01>(self),
            2 => _mm256_permute_ps::<0b01_00_11_10>(self),
            _ => _mm256_permute2f128_ps::<0x01>(self, self),
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let words = bf16_of_8(self);
        let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
    }
    #[inline(always)]
    unsafe fn pair_bf16(self, high: Self) -> Self {
        let high = _mm256_slli_epi32::<16>(bf16_of_8(high));
        _mm256_castsi256_ps(_mm256_or_si256(high, bf16_of_8(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        let words = _mm256_cvtps_epi32(self);
        let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        let halves = _mm_packs_epi32(low, high);
        _mm_storel_epi64(to.cast(), _mm_packus_epi16(halves, halves));
    }
    #[inline(always)]
    unsafe fn pair_halves(self, high: Self) -> Self {
        let (low, high) = (_mm256_castps_si256(self), _mm256_castps_si256(high.odd_bf16()));
        _mm256_castsi256_ps(_mm256_or_si256(_mm256_srli_epi32::<16>(low), high))
    }
    #[inline(always)]
    unsafe fn even_bf16(self) -> Self {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(self)))
    }
    #[inline(always)]
    unsafe fn odd_bf16(self) -> Self {
        let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(self), high))
    }
    #[inline(always)]
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self {
        let (a, b) = (_mm256_castps_si256(self), _mm256_castps_si256(b));
        let even = _mm256_madd_epi16(
            _mm256_and_si256(a, _mm256_set1_epi16(0xff)),
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b)),
        );
        let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(a), _mm256_srai_epi16::<8>(b));
        let both = _mm256_add_epi32(even, odd);
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), both))
    }
    #[inline(always)]
    unsafe fn add_int(self, y: Self) -> Self {
        let sum = _mm256_add_epi32(_mm256_castps_si256(self), _mm256_castps_si256(y));
        _mm256_castsi256_ps(sum)
    }
    #[inline(always)]
    unsafe fn to_float(self) -> Self {
        _mm256_cvtepi32_ps(_mm256_castps_si256(self))
    }
}

/// The nearest bf16 of each, in the lower half of a word; NaN stays NaN.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn bf16_of_16(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let high = _mm512_srli_epi32::<16>(bits);
    let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
    let nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), rounded, nan)
}

/// The same of 8.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn bf16_of_8(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let high = _mm256_srli_epi32::<16>(bits);
    let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, up));
    let nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)))
}

/// A mask of the first `n` of 8 lanes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn first(n: usize) -> __m256i {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane)
}

/// Asks for what will soon be read; any address will do.
#[inline(always)]
pub(crate) fn prefetch(from: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing, and every x86-64 has it.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(from.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// Asks for the places of `n` rows of `width` numbers, which will soon be written.
#[inline(always)]
pub(crate) fn prefetch_rows<T>(to: *const T, stride: usize, [n, width]: [usize; 2]) {
    for row in 0..n {
        for column in (0..width).step_by(size_of::<f32>() * LINE / size_of::<T>()) {
            prefetch(to.wrapping_add(row * stride + column).cast());
        }
    }
}

/// The most lanes of a vector.
pub(crate) const MAX_LANES: usize = 16;

/// The first `N` of `rows` as columns.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn transpose<L: Lanes>(rows: &mut [L; MAX_LANES]) {
    let mut apart = 1;
    while apart < L::N {
        for i in (0..L::N).filter(|i| i & apart == 0) {
            // SAFETY: the caller's; `apart` is as demanded.
            let (x, y) = unsafe { rows[i].exchange(rows[i + apart], apart) };
            (rows[i], rows[i + apart]) = (x, y);
        }
        apart *= 2;
    }
}

/// `x` times Hadamard's matrix of `N` rows: `(a + b, a − b)` of neighbours, then of those 2 apart,
/// and so on.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn hadamard<L: Lanes>(mut x: L) -> L {
    /// For each stage, −1 at the upper of two lanes.
    const SIGNS: [[f32; MAX_LANES]; 4] = {
        let mut signs = [[1.0; MAX_LANES]; 4];
        let (mut stage, mut lane) = (0, 0);
        while stage < 4 {
            if lane & 1 << stage != 0 {
                signs[stage][lane] = -1.0;
            }
            lane += 1;
            if lane == MAX_LANES {
                (stage, lane) = (stage + 1, 0);
            }
        }
        signs
    };
    let mut stage = 0;
    while 1 << stage < L::N {
        // SAFETY: the caller's; a row of signs is as long as the longest vector.
        unsafe {
            x = x.fma(L::load(SIGNS[stage].as_ptr()), x.swap(1 << stage));
        }
        stage += 1;
    }
    x
}

/// Runs `$body::<L>($args)` with the vectors of an [`crate::Isa`], compiled for its instructions.
macro_rules! on_isa {
    ($isa:expr, $body:ident, $args:ident: $Args:ty) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn avx512($args: $Args) {
            // SAFETY: the caller's, and the instructions are those of the vectors.
            unsafe { $body::<std::arch::x86_64::__m512>($args) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($args: $Args) {
            // SAFETY: as above.
            unsafe { $body::<std::arch::x86_64::__m256>($args) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` beyond `Scalar` is only had where the machine was found to have it;
            // the rest is what the arguments' maker checked.
            isa if isa >= crate::Isa::AVX512 => unsafe { avx512($args) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            crate::Isa::AVX2_FMA => unsafe { avx2($args) },
            // SAFETY: as above; no instructions are needed.
            _ => unsafe { $body::<f32>($args) },
        }
    }};
}
pub(crate) use on_isa;
