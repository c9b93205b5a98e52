//! NEON: registers of 4 lanes; products of 8-bit integers by the dot products of `dotprod` and
//! `i8mm`, and of bf16 by those of `bf16`. Instructions whose intrinsics are not stable are inline
//! assembly, for which the surrounding function must enable their features.

use std::{
    arch::{aarch64::*, asm, is_aarch64_feature_detected},
    ptr,
};

use super::{
    dot::{Bf16, Dot, F32, Int8},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel, run_product_kernel},
    microkernel::{Microkernel, RegisterTile, Tile, multiply_for_mr},
    vector::{Register, Vector},
};
use crate::compute_type::ComputeType;

type NeonVector = [float32x4_t; 4];

/// AArch64, whose every CPU has NEON.
pub(super) struct Neon;

impl InstructionSet for Neon {
    const NAME: &'static str = "neon";
    type Vector = NeonVector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = Int8;

    fn is_supported() -> bool {
        is_aarch64_feature_detected!("neon")
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { kernel.run::<NeonVector>() }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        // SAFETY: upheld by the caller.
        unsafe { run_product_kernel::<Self>(compute_type, kernel) }
    }
}

/// [`Neon`] plus dot products of 8-bit integers of one sign (`sdot`).
pub(super) struct NeonDotprod;

impl InstructionSet for NeonDotprod {
    const NAME: &'static str = "neon-dotprod";
    type Vector = NeonVector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = SignedDot;

    fn is_supported() -> bool {
        Neon::is_supported() && is_aarch64_feature_detected!("dotprod")
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Neon::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "dotprod")]
        unsafe fn int8(kernel: impl ProductKernel) {
            // SAFETY: upheld by the caller.
            unsafe { kernel.run::<NeonVector, SignedDot>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::Int8 => int8(kernel),
                ComputeType::F32 | ComputeType::Bf16 => Neon::run_products(compute_type, kernel),
            }
        }
    }
}

/// [`NeonDotprod`] plus dot products of signed and unsigned 8-bit integers (`sudot`).
pub(super) struct NeonI8mm;

impl InstructionSet for NeonI8mm {
    const NAME: &'static str = "neon-i8mm";
    type Vector = NeonVector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = MixedDot;

    fn is_supported() -> bool {
        NeonDotprod::is_supported() && is_aarch64_feature_detected!("i8mm")
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Neon::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "i8mm")]
        unsafe fn int8(kernel: impl ProductKernel) {
            // SAFETY: upheld by the caller.
            unsafe { kernel.run::<NeonVector, MixedDot>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::Int8 => int8(kernel),
                ComputeType::F32 | ComputeType::Bf16 => Neon::run_products(compute_type, kernel),
            }
        }
    }
}

/// [`NeonI8mm`] plus dot products of bf16 (`bfdot`).
pub(super) struct NeonBf16;

impl InstructionSet for NeonBf16 {
    const NAME: &'static str = "neon-bf16";
    type Vector = NeonVector;
    type F32 = F32;
    type Bf16 = Bf16Dot;
    type Int8 = MixedDot;

    fn is_supported() -> bool {
        NeonI8mm::is_supported() && is_aarch64_feature_detected!("bf16")
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { Neon::run(kernel) }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        #[target_feature(enable = "bf16")]
        unsafe fn bf16(kernel: impl ProductKernel) {
            // SAFETY: upheld by the caller.
            unsafe { kernel.run::<NeonVector, Bf16Dot>() }
        }
        // SAFETY: upheld by the caller.
        unsafe {
            match compute_type {
                ComputeType::Bf16 => bf16(kernel),
                ComputeType::F32 | ComputeType::Int8 => {
                    NeonI8mm::run_products(compute_type, kernel)
                }
            }
        }
    }
}

/// [`multiply_for_mr!`] for NEON: 24 of 32 registers hold accumulators if mr is 6.
macro_rules! multiply_neon {
    ($D:ty, $features:literal, $mr:expr, $tile:expr) => {
        multiply_for_mr!(
            NeonVector, $D, features: $features, NV: 1, MR: [1 2 3 4 5 6], $mr, $tile
        )
    };
}

impl RegisterTile for NeonVector {
    /// One vector, in four registers.
    const NR: usize = 16;
    const MAX_MR: usize = 6;
    const MAX_MR_INT8: usize = 4;
    const UNROLL: usize = 4;

    #[inline(always)]
    unsafe fn broadcast(from: *const f32) -> Self {
        // SAFETY: upheld by the caller. A load into one lane occupies a load unit only; a load into
        // all lanes, which the compiler would use if the read was not volatile, occupies a vector
        // unit too. Products take the lane as it is.
        unsafe { [vdupq_n_f32(from.read_volatile()); 4] }
    }

    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile) {
        multiply_neon!(D, "neon", mr, tile)
    }
}

/// 8-bit integers by `sdot`, whose inputs are both signed.
pub(super) struct SignedDot;
/// 8-bit integers by `sudot`.
pub(super) struct MixedDot;
/// bf16 by `bfdot`.
pub(super) struct Bf16Dot;

impl Microkernel<NeonVector> for SignedDot {
    const MAX_MR: usize = NeonVector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_neon!(Self, "neon,dotprod", mr, tile)
    }
}

impl Microkernel<NeonVector> for MixedDot {
    const MAX_MR: usize = NeonVector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_neon!(Self, "neon,i8mm", mr, tile)
    }
}

impl Microkernel<NeonVector> for Bf16Dot {
    const MAX_MR: usize = NeonVector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_neon!(Self, "neon,bf16", mr, tile)
    }
}

/// Defines a function that adds to each lane of `sum` the products of a lane of `b` and lane 0 of
/// `a`, with an instruction for packed lanes.
macro_rules! dot_by_lane {
    ($name:ident, $instruction:literal) => {
        #[inline(always)]
        unsafe fn $name(mut sum: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: the caller guarantees the instruction, which accesses registers only.
            unsafe {
                asm!(
                    $instruction,
                    sum = inout(vreg) sum,
                    a = in(vreg) a,
                    b = in(vreg) b,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            sum
        }
    };
}

dot_by_lane!(sdot, "sdot {sum:v}.4s, {b:v}.16b, {a:v}.4b[0]");
dot_by_lane!(sudot, "sudot {sum:v}.4s, {b:v}.16b, {a:v}.4b[0]");
dot_by_lane!(bfdot, "bfdot {sum:v}.4s, {b:v}.8h, {a:v}.2h[0]");

/// Implements [`Dot`] with an instruction for packed lanes.
macro_rules! dot_of_vectors {
    ($D:ty, $dot:ident, $add:ident, quantised: $quantised:literal, signed: $signed:literal) => {
        #[allow(unsafe_op_in_unsafe_fn)] // as for the register
        impl Dot<NeonVector> for $D {
            const IS_QUANTISED: bool = $quantised;
            const HAS_SIGNED_INPUT: bool = $signed;

            #[inline(always)]
            unsafe fn dot([a, ..]: NeonVector, b: NeonVector, acc: NeonVector) -> NeonVector {
                [
                    $dot(acc[0], a, b[0]),
                    $dot(acc[1], a, b[1]),
                    $dot(acc[2], a, b[2]),
                    $dot(acc[3], a, b[3]),
                ]
            }
            #[inline(always)]
            unsafe fn add(x: NeonVector, y: NeonVector) -> NeonVector {
                x.$add(y)
            }
        }
    };
}

dot_of_vectors!(SignedDot, sdot, add_i32, quantised: true, signed: true);
dot_of_vectors!(MixedDot, sudot, add_i32, quantised: true, signed: false);
dot_of_vectors!(Bf16Dot, bfdot, add, quantised: false, signed: false);

#[allow(unsafe_op_in_unsafe_fn)] // intrinsics throughout; the trait states their contract
impl Register for float32x4_t {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        vdupq_n_f32(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        vld1q_f32(from)
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; 4];
        ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n);
        vld1q_f32(lanes.as_ptr())
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        vst1q_f32(to, self);
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        let mut lanes = [0.0; 4];
        vst1q_f32(lanes.as_mut_ptr(), self);
        ptr::copy_nonoverlapping(lanes.as_ptr(), to, n);
    }
    #[inline(always)]
    unsafe fn fma(self, y: Self, z: Self) -> Self {
        vfmaq_f32(z, y, self)
    }
    #[inline(always)]
    unsafe fn add(self, y: Self) -> Self {
        vaddq_f32(self, y)
    }
    #[inline(always)]
    unsafe fn sub(self, y: Self) -> Self {
        vsubq_f32(self, y)
    }
    #[inline(always)]
    unsafe fn mul(self, y: Self) -> Self {
        vmulq_f32(self, y)
    }
    #[inline(always)]
    unsafe fn div(self, y: Self) -> Self {
        vdivq_f32(self, y)
    }
    #[inline(always)]
    unsafe fn max(self, y: Self) -> Self {
        vbslq_f32(vcgtq_f32(self, y), self, y)
    }
    #[inline(always)]
    unsafe fn min(self, y: Self) -> Self {
        vbslq_f32(vcltq_f32(self, y), self, y)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        vrndnq_f32(self)
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        let biased = vaddq_s32(vcvtnq_s32_f32(self), vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
    }
    #[inline(always)]
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self {
        vbslq_f32(vcltzq_f32(self), yes, no)
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let halves = vadd_f32(vget_low_f32(self), vget_high_f32(self));
        vget_lane_f32::<0>(halves) + vget_lane_f32::<1>(halves)
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        vmaxvq_f32(self)
    }
    #[inline(always)]
    unsafe fn exchange(self, y: Self, distance: usize) -> (Self, Self) {
        if distance == 1 {
            return (vtrn1q_f32(self, y), vtrn2q_f32(self, y));
        }
        let (x, y) = (vreinterpretq_f64_f32(self), vreinterpretq_f64_f32(y));
        (vreinterpretq_f32_f64(vtrn1q_f64(x, y)), vreinterpretq_f32_f64(vtrn2q_f64(x, y)))
    }
    #[inline(always)]
    unsafe fn swap_lanes(self, distance: usize) -> Self {
        match distance {
            1 => vrev64q_f32(self),
            _ => vextq_f32::<2>(self, self),
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let (values, wide): (uint16x4_t, Self);
        values = vld1_u16(from);
        asm!("fcvtl {wide:v}.4s, {values:v}.4h", wide = lateout(vreg) wide,
            values = in(vreg) values, options(pure, nomem, nostack, preserves_flags));
        wide
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from)))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        vst1_u16(to, vmovn_u32(round_to_bf16(self)));
    }
    #[inline(always)]
    unsafe fn pack_bf16(self, high: Self) -> Self {
        let high = vshlq_n_u32::<16>(round_to_bf16(high));
        vreinterpretq_f32_u32(vorrq_u32(high, round_to_bf16(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        let halves = vqmovun_s32(vcvtnq_s32_f32(self));
        let bytes = vqmovn_u16(vcombine_u16(halves, halves));
        to.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_u8(bytes)));
    }
    #[inline(always)]
    unsafe fn pack_high_halves(self, high: Self) -> Self {
        let low = vshrq_n_u32::<16>(vreinterpretq_u32_f32(self));
        vreinterpretq_f32_u32(vorrq_u32(low, vreinterpretq_u32_f32(high.odd_bf16())))
    }
    #[inline(always)]
    unsafe fn even_bf16(self) -> Self {
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(self)))
    }
    #[inline(always)]
    unsafe fn odd_bf16(self) -> Self {
        let bits = vandq_u32(vreinterpretq_u32_f32(self), vdupq_n_u32(0xffff_0000));
        vreinterpretq_f32_u32(bits)
    }
    #[inline(always)]
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self {
        let (a, b) = (vreinterpretq_u8_f32(self), vreinterpretq_s8_f32(b));
        // A product of 8 bits is within ±255·128, which fits an i16.
        let low =
            vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a))), vmovl_s8(vget_low_s8(b)));
        let high =
            vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(a))), vmovl_s8(vget_high_s8(b)));
        let fours = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
        vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(sum), fours))
    }
    #[inline(always)]
    unsafe fn add_i32(self, y: Self) -> Self {
        vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(self), vreinterpretq_s32_f32(y)))
    }
    #[inline(always)]
    unsafe fn i32_to_f32(self) -> Self {
        vcvtq_f32_s32(vreinterpretq_s32_f32(self))
    }
    #[inline(always)]
    unsafe fn f32_to_i32(self) -> Self {
        vreinterpretq_f32_s32(vcvtnq_s32_f32(self))
    }
}

/// The bf16 nearest to each lane, ties to even, in the lower half of the lane; the upper half is 0.
/// NaN stays NaN.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn round_to_bf16(x: float32x4_t) -> uint32x4_t {
    let bits = vreinterpretq_u32_f32(x);
    let high = vshrq_n_u32::<16>(bits);
    let up = vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
    let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, up));
    let nan = vorrq_u32(high, vdupq_n_u32(0x40));
    vbslq_u32(vceqq_f32(x, x), rounded, nan)
}
