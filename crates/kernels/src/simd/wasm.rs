//! WebAssembly's SIMD: registers of 4 lanes. A module has its instructions as a whole, so they are
//! chosen when it is compiled: with the target feature `relaxed-simd`, a product and a sum are one
//! instruction, which rounds once on most CPUs; without it, both are rounded.

use std::arch::wasm32::*;

use super::{
    dot::{Bf16, Dot, F32, Int8},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel, run_product_kernel},
    microkernel::{RegisterTile, Tile, multiply_for_mr},
    vector::Register,
};
use crate::compute_type::ComputeType;

type WasmVector = [v128; 4];

/// WebAssembly with the target feature `simd128`.
pub(super) struct Wasm;

impl InstructionSet for Wasm {
    const NAME: &'static str =
        if cfg!(target_feature = "relaxed-simd") { "wasm-relaxed" } else { "wasm" };
    type Vector = WasmVector;
    type F32 = F32;
    type Bf16 = Bf16;
    type Int8 = Int8;

    fn is_supported() -> bool {
        true // the module would not have been loaded otherwise
    }

    unsafe fn run(kernel: impl SimdKernel) {
        // SAFETY: upheld by the caller.
        unsafe { kernel.run::<WasmVector>() }
    }

    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
        // SAFETY: upheld by the caller.
        unsafe { run_product_kernel::<Self>(compute_type, kernel) }
    }
}

impl RegisterTile for WasmVector {
    /// One vector, in four registers.
    const NR: usize = 16;
    /// Engines on x86-64 have 16 registers.
    const MAX_MR: usize = 3;
    const MAX_MR_INT8: usize = 2;
    const UNROLL: usize = 4;
    const PREFETCH_DISTANCE: Option<usize> = None;

    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile) {
        multiply_for_mr!(WasmVector, D, NV: 1, MR: [1 2 3], mr, tile)
    }
}

#[allow(unsafe_op_in_unsafe_fn)] // intrinsics throughout; the trait states their contract
impl Register for v128 {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        f32x4_splat(x)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        v128_load(from.cast())
    }
    #[inline(always)]
    unsafe fn load_partial(from: *const f32, n: usize) -> Self {
        let mut lanes = [0.0f32; 4];
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), n);
        v128_load(lanes.as_ptr().cast())
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        v128_store(to.cast(), self);
    }
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, n: usize) {
        let mut lanes = [0.0f32; 4];
        v128_store(lanes.as_mut_ptr().cast(), self);
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, n);
    }
    #[cfg(target_feature = "relaxed-simd")]
    #[inline(always)]
    unsafe fn fma(self, y: Self, z: Self) -> Self {
        f32x4_relaxed_madd(self, y, z)
    }
    #[cfg(not(target_feature = "relaxed-simd"))]
    #[inline(always)]
    unsafe fn fma(self, y: Self, z: Self) -> Self {
        f32x4_add(f32x4_mul(self, y), z)
    }
    #[inline(always)]
    unsafe fn add(self, y: Self) -> Self {
        f32x4_add(self, y)
    }
    #[inline(always)]
    unsafe fn sub(self, y: Self) -> Self {
        f32x4_sub(self, y)
    }
    #[inline(always)]
    unsafe fn mul(self, y: Self) -> Self {
        f32x4_mul(self, y)
    }
    #[inline(always)]
    unsafe fn div(self, y: Self) -> Self {
        f32x4_div(self, y)
    }
    #[inline(always)]
    unsafe fn max(self, y: Self) -> Self {
        f32x4_pmax(y, self)
    }
    #[inline(always)]
    unsafe fn min(self, y: Self) -> Self {
        f32x4_pmin(y, self)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        f32x4_nearest(self)
    }
    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        i32x4_shl(i32x4_add(i32x4_trunc_sat_f32x4(self), i32x4_splat(127)), 23)
    }
    #[inline(always)]
    unsafe fn select_negative(self, yes: Self, no: Self) -> Self {
        v128_bitselect(yes, no, f32x4_lt(self, f32x4_splat(0.0)))
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let halves = self.add(self.swap_lanes(2));
        f32x4_extract_lane::<0>(halves) + f32x4_extract_lane::<1>(halves)
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let halves = self.max(self.swap_lanes(2));
        f32x4_extract_lane::<0>(halves.max(halves.swap_lanes(1)))
    }
    #[inline(always)]
    unsafe fn exchange(self, y: Self, distance: usize) -> (Self, Self) {
        match distance {
            1 => (i32x4_shuffle::<0, 4, 2, 6>(self, y), i32x4_shuffle::<1, 5, 3, 7>(self, y)),
            _ => (i32x4_shuffle::<0, 1, 4, 5>(self, y), i32x4_shuffle::<2, 3, 6, 7>(self, y)),
        }
    }
    #[inline(always)]
    unsafe fn swap_lanes(self, distance: usize) -> Self {
        match distance {
            1 => i32x4_shuffle::<1, 0, 3, 2>(self, self),
            _ => i32x4_shuffle::<2, 3, 0, 1>(self, self),
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        let bits = u32x4_load_extend_u16x4(from);
        let sign = i32x4_shl(v128_and(bits, i32x4_splat(0x8000)), 16);
        let magnitude = i32x4_shl(v128_and(bits, i32x4_splat(0x7fff)), 13);
        // As in the scalar reference.
        let is_max = i32x4_ge(magnitude, i32x4_splat(0x7c00 << 13));
        let max_exponent = v128_and(is_max, i32x4_splat(0x7f80_0000));
        let scaled = f32x4_mul(magnitude, i32x4_splat((127 + 112) << 23));
        v128_or(v128_or(scaled, max_exponent), sign)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        i32x4_shl(u32x4_load_extend_u16x4(from), 16)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let bits = round_to_bf16(self);
        v128_store64_lane::<0>(u16x8_narrow_i32x4(bits, bits), to.cast());
    }
    #[inline(always)]
    unsafe fn pack_bf16(self, high: Self) -> Self {
        v128_or(i32x4_shl(round_to_bf16(high), 16), round_to_bf16(self))
    }
    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8) {
        let lanes = i32x4_trunc_sat_f32x4(f32x4_nearest(self));
        let halves = i16x8_narrow_i32x4(lanes, lanes);
        v128_store32_lane::<0>(u8x16_narrow_i16x8(halves, halves), to.cast());
    }
    #[inline(always)]
    unsafe fn pack_high_halves(self, high: Self) -> Self {
        v128_or(u32x4_shr(self, 16), high.odd_bf16())
    }
    #[inline(always)]
    unsafe fn even_bf16(self) -> Self {
        i32x4_shl(self, 16)
    }
    #[inline(always)]
    unsafe fn odd_bf16(self) -> Self {
        v128_and(self, u32x4_splat(0xffff_0000))
    }
    #[inline(always)]
    unsafe fn dot_int8(self, b: Self, sum: Self) -> Self {
        let low = i32x4_dot_i16x8(u16x8_extend_low_u8x16(self), i16x8_extend_low_i8x16(b));
        let high = i32x4_dot_i16x8(u16x8_extend_high_u8x16(self), i16x8_extend_high_i8x16(b));
        let even = i32x4_shuffle::<0, 2, 4, 6>(low, high);
        let odd = i32x4_shuffle::<1, 3, 5, 7>(low, high);
        i32x4_add(sum, i32x4_add(even, odd))
    }
    #[inline(always)]
    unsafe fn add_i32(self, y: Self) -> Self {
        i32x4_add(self, y)
    }
    #[inline(always)]
    unsafe fn i32_to_f32(self) -> Self {
        f32x4_convert_i32x4(self)
    }
    #[inline(always)]
    unsafe fn f32_to_i32(self) -> Self {
        i32x4_trunc_sat_f32x4(f32x4_nearest(self))
    }
}

/// The bf16 nearest to each lane, ties to even, in the lower half of the lane; the upper half is 0.
/// NaN stays NaN.
#[inline(always)]
fn round_to_bf16(x: v128) -> v128 {
    let high = u32x4_shr(x, 16);
    let up = i32x4_add(v128_and(high, i32x4_splat(1)), i32x4_splat(0x7fff));
    let rounded = u32x4_shr(i32x4_add(x, up), 16);
    let nan = v128_or(high, i32x4_splat(0x40));
    v128_bitselect(rounded, nan, f32x4_eq(x, x))
}
