//! AVX2, FMA and F16C: registers of 8 lanes.

use std::arch::{asm, x86_64::*};

use super::{
    dot::{Bf16, Dot, F32, Int8},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel, run_product_kernel},
    microkernel::{Microkernel, RegisterTile, Tile, multiply_for_mr},
    vector::{Register, Vector},
};
use crate::compute_type::ComputeType;

type Avx2Vector = [__m256; 2];

/// x86-64 with AVX2, FMA and F16C.
pub(super) struct Avx2;

impl InstructionSet for Avx2 {
    const NAME: &'static str = "avx2";
    type Vector = Avx2Vector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = Int8;

    fn is_supported() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller; the vector type needs the enabled instructions only.
        unsafe { kernel.run::<Avx2Vector>() }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        // SAFETY: as above.
        unsafe { run_product_kernel::<Self>(compute_type, kernel) }
    }
}

/// [`Avx2`] with exact products of 8-bit integers, so that their results have the bits of all
/// instruction sets but [`Avx2`]. It is slower in int8.
pub(super) struct Avx2ExactInt8;

impl InstructionSet for Avx2ExactInt8 {
    const NAME: &'static str = "avx2-exact-int8";
    type Vector = Avx2Vector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = ExactInt8;

    fn is_supported() -> bool {
        Avx2::is_supported()
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Avx2::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn int8(kernel: impl ProductKernel) {
            // SAFETY: upheld by the caller.
            unsafe { kernel.run::<Avx2Vector, ExactInt8>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::Int8 => int8(kernel),
                ComputeType::F32 | ComputeType::Bf16 => Avx2::run_products(compute_type, kernel),
            }
        }
    }
}

/// 8-bit integers, of which no sum saturates.
pub(super) struct ExactInt8;

impl Microkernel<Avx2Vector> for ExactInt8 {
    const MAX_MR: usize = Avx2Vector::MAX_MR_INT8;
}

#[allow(unsafe_op_in_unsafe_fn)] // as for the register
impl Dot<Avx2Vector> for ExactInt8 {
    const IS_QUANTISED: bool = true;

    #[inline(always)]
    unsafe fn dot([a, _]: Avx2Vector, b: Avx2Vector, acc: Avx2Vector) -> Avx2Vector {
        [add_exact_products(a, b[0], acc[0]), add_exact_products(a, b[1], acc[1])]
    }
    #[inline(always)]
    unsafe fn add(x: Avx2Vector, y: Avx2Vector) -> Avx2Vector {
        x.add_i32(y)
    }
}

/// [`Register::dot_int8`] for any weights. The products of the even bytes and those of the odd bytes
/// are computed separately: the instruction adds each to 0 in 16 bits.
///
/// # Safety
/// The CPU supports AVX2.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)] // as for the register
unsafe fn add_exact_products(a: __m256, b: __m256, sum: __m256) -> __m256 {
    let (a, b, sum) = (_mm256_castps_si256(a), _mm256_castps_si256(b), _mm256_castps_si256(sum));
    let even = _mm256_and_si256(a, _mm256_set1_epi16(0xff));
    let odd = _mm256_xor_si256(a, even);
    let ones = _mm256_set1_epi16(1);
    let even = _mm256_madd_epi16(_mm256_maddubs_epi16(even, b), ones);
    let odd = _mm256_madd_epi16(_mm256_maddubs_epi16(odd, b), ones);
    _mm256_castsi256_ps(opaque(_mm256_add_epi32(_mm256_add_epi32(sum, even), odd)))
}

/// `x`, of which the compiler does not know how it was computed. It would add the products of several
/// lanes to each other before it adds them to a sum, and spill registers.
#[target_feature(enable = "avx2")]
#[inline]
fn opaque(mut x: __m256i) -> __m256i {
    // SAFETY: the block has no instructions.
    unsafe { asm!("/* {0} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags)) };
    x
}

impl RegisterTile for Avx2Vector {
    /// One vector, in two registers.
    const NR: usize = 16;
    const MAX_MR: usize = 6;
    const MAX_MR_INT8: usize = 4;
    // Measured on an EPYC (Zen 3).
    const UNROLL: usize = 8;
    const PREFETCH_DISTANCE: Option<usize> = None;

    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile) {
        multiply_for_mr!(
            Avx2Vector, D, features: "avx2,fma,f16c", NV: 1, MR: [1 2 3 4 5 6], mr, tile
        )
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // intrinsics throughout; the trait states their contract
impl Register for __m256 {
    const LANES: usize = 8;
    const ADDS_INT8_PAIRS_IN_I16: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        _mm256_loadu_ps(from)
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> Self {
        _mm256_maskload_ps(from, lane_mask(n))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self)
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        _mm256_maskstore_ps(to, lane_mask(n), self)
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
    unsafe fn exp2_int(self) -> Self {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self {
        let negative = _mm256_cmp_ps::<_CMP_LT_OQ>(self, _mm256_setzero_ps());
        _mm256_blendv_ps(no, yes, negative)
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let mut lanes = [0f32; 8];
        self.store(lanes.as_mut_ptr());
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let mut lanes = [0f32; 8];
        self.store(lanes.as_mut_ptr());
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn exchange(self, y: Self, distance: usize) -> (Self, Self) {
        let (a, b) = (self.swap_lanes(distance), y.swap_lanes(distance));
        match distance {
            1 => (_mm256_blend_ps::<0xaa>(self, b), _mm256_blend_ps::<0x55>(y, a)),
            2 => (_mm256_blend_ps::<0xcc>(self, b), _mm256_blend_ps::<0x33>(y, a)),
            _ => (_mm256_blend_ps::<0xf0>(self, b), _mm256_blend_ps::<0x0f>(y, a)),
        }
    }
    #[inline(always)]
    unsafe fn swap_lanes(self, distance: usize) -> Self {
        match distance {
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
        let ints = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(ints))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let ints = round_to_bf16(self);
        let (low, high) = (_mm256_castsi256_si128(ints), _mm256_extracti128_si256::<1>(ints));
        _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
    }
    #[inline(always)]
    unsafe fn pack_bf16(self, high: Self) -> Self {
        let high = _mm256_slli_epi32::<16>(round_to_bf16(high));
        _mm256_castsi256_ps(_mm256_or_si256(high, round_to_bf16(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        let ints = _mm256_cvtps_epi32(self);
        let (low, high) = (_mm256_castsi256_si128(ints), _mm256_extracti128_si256::<1>(ints));
        let halves = _mm_packs_epi32(low, high);
        _mm_storel_epi64(to.cast(), _mm_packus_epi16(halves, halves));
    }
    #[inline(always)]
    unsafe fn pack_high_halves(self, high: Self) -> Self {
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
        // Each weight and the sum of two adjacent weights are within ±127, so the sum of two
        // adjacent products is within ±255·127 = ±32,385, which fits an i16.
        let pairs = _mm256_maddubs_epi16(a, b);
        let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        _mm256_castsi256_ps(opaque(_mm256_add_epi32(_mm256_castps_si256(sum), fours)))
    }
    #[inline(always)]
    unsafe fn add_i32(self, y: Self) -> Self {
        let sum = _mm256_add_epi32(_mm256_castps_si256(self), _mm256_castps_si256(y));
        _mm256_castsi256_ps(sum)
    }
    #[inline(always)]
    unsafe fn i32_to_f32(self) -> Self {
        _mm256_cvtepi32_ps(_mm256_castps_si256(self))
    }
    #[inline(always)]
    unsafe fn f32_to_i32(self) -> Self {
        _mm256_castsi256_ps(_mm256_cvtps_epi32(self))
    }
}

/// The bf16 nearest to each lane, in the lower half of the lane; NaN stays NaN.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn round_to_bf16(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let high = _mm256_srli_epi32::<16>(bits);
    let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, up));
    let nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x)))
}

/// A mask of the first `n` lanes.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn lane_mask(n: usize) -> __m256i {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane)
}
