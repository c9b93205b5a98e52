//! The scalar reference, in plain Rust: a register of one lane.

use super::{
    dot::{Bf16, Dot, F32, Int8},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel, run_product_kernel},
    microkernel::{MAX_NR, RegisterTile, Tile, multiply_for_mr},
    vector::{LANES, Register},
};
use crate::compute_type::ComputeType;

/// The vector of the scalar reference.
pub(crate) type ScalarVector = [f32; LANES];

/// Plain Rust, on every machine.
pub(super) struct Scalar;

impl InstructionSet for Scalar {
    const NAME: &'static str = "scalar";
    type Vector = ScalarVector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = Int8;

    fn is_supported() -> bool {
        true
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { kernel.run::<ScalarVector>() }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        // SAFETY: upheld by the caller.
        unsafe { run_product_kernel::<Self>(compute_type, kernel) }
    }
}

impl RegisterTile for ScalarVector {
    const NR: usize = MAX_NR;
    const MAX_MR: usize = 4;

    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile) {
        multiply_for_mr!(ScalarVector, D, NV: 1, MR: [1 2 3 4], mr, tile)
    }
}

impl Register for f32 {
    const LANES: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        x
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: upheld by the caller.
        unsafe { *from }
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> Self {
        let _ = (from, n); // n is 0
        0.0
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: upheld by the caller.
        unsafe { *to = self }
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        let _ = (to, n); // n is 0
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
    unsafe fn exp2_int(self) -> Self {
        f32::from_bits(((self as i32 + 127) as u32) << 23)
    }
    #[inline(always)]
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self {
        if self < 0.0 { yes } else { no }
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn exchange(self, _y: Self, _distance: usize) -> (Self, Self) {
        unreachable!("a scalar has one lane")
    }
    #[inline(always)]
    unsafe fn swap_lanes(self, _distance: usize) -> Self {
        unreachable!("a scalar has one lane")
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: upheld by the caller.
        let bits = u32::from(unsafe { *from });
        let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        // The factor 2¹¹² changes the exponent bias from 15, that of f16, to 127, that of f32, and
        // normalises subnormal values. The largest exponent means infinity or NaN.
        let max_exponent = if magnitude >= 0x7c00 << 13 { 0x7f80_0000 } else { 0 };
        let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
        Self::from_bits(scaled.to_bits() | max_exponent | sign)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: upheld by the caller.
        Self::from_bits(u32::from(unsafe { *from }) << 16)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: upheld by the caller.
        unsafe { *to = bf16_bits(self) }
    }
    #[inline(always)]
    unsafe fn pack_bf16(self, high: Self) -> Self {
        Self::from_bits(u32::from(bf16_bits(high)) << 16 | u32::from(bf16_bits(self)))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        // SAFETY: upheld by the caller.
        unsafe { *to = self.round_ties_even() as u8 }
    }
    #[inline(always)]
    unsafe fn pack_high_halves(self, high: Self) -> Self {
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
    unsafe fn add_i32(self, y: Self) -> Self {
        Self::from_bits(self.to_bits().wrapping_add(y.to_bits()))
    }
    #[inline(always)]
    unsafe fn i32_to_f32(self) -> Self {
        self.to_bits() as i32 as f32
    }
    #[inline(always)]
    unsafe fn f32_to_i32(self) -> Self {
        Self::from_bits(self as i32 as u32)
    }
}

/// The bits of the bf16 nearest to `x`, ties to even; NaN stays NaN.
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}
