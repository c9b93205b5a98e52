//! AVX-512: registers of 16 lanes; products of 8-bit integers by VNNI and of bf16 by BF16.

use std::arch::x86_64::*;

use super::{
    dot::{Bf16, Dot, F32, Int8},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel, run_product_kernel},
    microkernel::{MAX_NR, Microkernel, RegisterTile, Tile, multiply_for_mr},
    vector::{Register, Vector},
};
use crate::compute_type::ComputeType;

pub(super) type Avx512Vector = [__m512; 1];

/// x86-64 with AVX-512 F and BW.
pub(super) struct Avx512;

impl InstructionSet for Avx512 {
    const NAME: &'static str = "avx512";
    type Vector = Avx512Vector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = Int8;

    fn is_supported() -> bool {
        // The levels of x86-64 include the ones before them.
        super::avx2::Avx2::is_supported()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller; the vector type needs the enabled instructions only.
        unsafe { kernel.run::<Avx512Vector>() }
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        // SAFETY: as above.
        unsafe { run_product_kernel::<Self>(compute_type, kernel) }
    }
}

/// [`Avx512`] plus VNNI: dot products of 8-bit integers.
pub(super) struct Avx512Vnni;

impl InstructionSet for Avx512Vnni {
    const NAME: &'static str = "avx512-vnni";
    type Vector = Avx512Vector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = NativeInt8;

    fn is_supported() -> bool {
        Avx512::is_supported() && is_x86_feature_detected!("avx512vnni")
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Avx512::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn int8(kernel: impl ProductKernel) {
            // SAFETY: as in `Avx512`.
            unsafe { kernel.run::<Avx512Vector, NativeInt8>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::Int8 => int8(kernel),
                ComputeType::F32 | ComputeType::Bf16 => Avx512::run_products(compute_type, kernel),
            }
        }
    }
}

/// [`Avx512Vnni`] plus BF16: dot products of bf16.
pub(super) struct Avx512Bf16Vnni;

impl InstructionSet for Avx512Bf16Vnni {
    const NAME: &'static str = "avx512-bf16-vnni";
    type Vector = Avx512Vector;
    type F32 = F32;
    type Bf16 = NativeBf16;
    type Int8 = NativeInt8;

    fn is_supported() -> bool {
        Avx512Vnni::is_supported() && is_x86_feature_detected!("avx512bf16")
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Avx512::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        unsafe fn bf16(kernel: impl ProductKernel) {
            // SAFETY: as in `Avx512`.
            unsafe { kernel.run::<Avx512Vector, NativeBf16>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::Bf16 => bf16(kernel),
                ComputeType::F32 | ComputeType::Int8 => {
                    Avx512Vnni::run_products(compute_type, kernel)
                }
            }
        }
    }
}

/// [`multiply_for_mr!`] for AVX-512.
macro_rules! multiply_avx512 {
    ($D:ty, $features:literal, $mr:expr, $tile:expr) => {
        multiply_for_mr!(
            Avx512Vector, $D, features: $features, NV: 2, MR: [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
            $mr, $tile
        )
    };
}

impl RegisterTile for Avx512Vector {
    const NR: usize = MAX_NR;
    const MAX_MR: usize = 14;
    const MAX_MR_BF16: usize = 12;
    const MAX_MR_INT8: usize = 12;

    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile) {
        multiply_avx512!(D, "avx512f,avx512bw", mr, tile)
    }
}

/// bf16 by AVX-512 BF16 (`vdpbf16ps`).
pub(super) struct NativeBf16;
/// 8-bit integers by AVX-512 VNNI (`vpdpbusd`).
pub(super) struct NativeInt8;

impl Microkernel<Avx512Vector> for NativeBf16 {
    const MAX_MR: usize = Avx512Vector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_avx512!(Self, "avx512f,avx512bw,avx512bf16", mr, tile)
    }
}

impl Microkernel<Avx512Vector> for NativeInt8 {
    const MAX_MR: usize = Avx512Vector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_avx512!(Self, "avx512f,avx512bw,avx512vnni", mr, tile)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as for the register
impl Dot<Avx512Vector> for NativeBf16 {
    #[inline(always)]
    unsafe fn dot([a]: Avx512Vector, [b]: Avx512Vector, [acc]: Avx512Vector) -> Avx512Vector {
        let pairs = |x| std::mem::transmute::<__m512, __m512bh>(x);
        [_mm512_dpbf16_ps(acc, pairs(a), pairs(b))]
    }
    #[inline(always)]
    unsafe fn store_bf16([x]: Avx512Vector, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), round_to_bf16_natively(x));
    }
    #[inline(always)]
    unsafe fn pack_bf16([low]: Avx512Vector, [high]: Avx512Vector) -> Avx512Vector {
        let widen = |x| _mm512_cvtepu16_epi32(round_to_bf16_natively(x));
        let high = _mm512_slli_epi32::<16>(widen(high));
        [_mm512_castsi512_ps(_mm512_or_si512(high, widen(low)))]
    }
    #[inline(always)]
    unsafe fn add(x: Avx512Vector, y: Avx512Vector) -> Avx512Vector {
        x.add(y)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // as for the register
impl Dot<Avx512Vector> for NativeInt8 {
    const IS_QUANTISED: bool = true;
    #[inline(always)]
    unsafe fn dot([a]: Avx512Vector, [b]: Avx512Vector, [acc]: Avx512Vector) -> Avx512Vector {
        let ints = |x| _mm512_castps_si512(x);
        [_mm512_castsi512_ps(_mm512_dpbusd_epi32(ints(acc), ints(a), ints(b)))]
    }
    #[inline(always)]
    unsafe fn add(x: Avx512Vector, y: Avx512Vector) -> Avx512Vector {
        x.add_i32(y)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // intrinsics throughout; the trait states their contract
impl Register for __m512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        _mm512_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> Self {
        _mm512_maskz_loadu_ps(((1u32 << n) - 1) as __mmask16, from)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self)
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
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
    unsafe fn exp2_int(self) -> Self {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn mul_exp2(self, n: Self) -> Self {
        _mm512_scalef_ps(self, n)
    }
    #[inline(always)]
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self {
        let negative = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, _mm512_setzero_ps());
        _mm512_mask_blend_ps(negative, no, yes)
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        _mm512_reduce_add_ps(self)
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        _mm512_reduce_max_ps(self)
    }
    #[inline(always)]
    unsafe fn exchange(self, y: Self, distance: usize) -> (Self, Self) {
        let upper = match distance {
            1 => 0xaaaa,
            2 => 0xcccc,
            4 => 0xf0f0,
            _ => 0xff00,
        };
        let first = _mm512_mask_blend_ps(upper, self, y.swap_lanes(distance));
        (first, _mm512_mask_blend_ps(!upper, y, self.swap_lanes(distance)))
    }
    #[inline(always)]
    unsafe fn swap_lanes(self, distance: usize) -> Self {
        match distance {
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
        let ints = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(ints))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(round_to_bf16(self)));
    }
    #[inline(always)]
    unsafe fn pack_bf16(self, high: Self) -> Self {
        let high = _mm512_slli_epi32::<16>(round_to_bf16(high));
        _mm512_castsi512_ps(_mm512_or_si512(high, round_to_bf16(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        let ints = _mm512_max_epi32(_mm512_cvtps_epi32(self), _mm512_setzero_si512());
        _mm_storeu_si128(to.cast(), _mm512_cvtusepi32_epi8(ints));
    }
    #[inline(always)]
    unsafe fn pack_high_halves(self, high: Self) -> Self {
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
    unsafe fn add_i32(self, y: Self) -> Self {
        let sum = _mm512_add_epi32(_mm512_castps_si512(self), _mm512_castps_si512(y));
        _mm512_castsi512_ps(sum)
    }
    #[inline(always)]
    unsafe fn i32_to_f32(self) -> Self {
        _mm512_cvtepi32_ps(_mm512_castps_si512(self))
    }
    #[inline(always)]
    unsafe fn f32_to_i32(self) -> Self {
        _mm512_castsi512_ps(_mm512_cvtps_epi32(self))
    }
}

/// The bf16 nearest to each lane, ties to even, in the lower half of the lane; the upper half is 0.
/// NaN stays NaN.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn round_to_bf16(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let high = _mm512_srli_epi32::<16>(bits);
    let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
    let nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), rounded, nan)
}

/// The bf16 nearest to each lane; absolute values below 2⁻¹²⁶ give a zero.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn round_to_bf16_natively(x: __m512) -> __m256i {
    std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x))
}
