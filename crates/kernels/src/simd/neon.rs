//! NEON: registers of 4 lanes; products of 8-bit integers by the dot products of `dotprod` and the
//! matrix products of `i8mm`, and of bf16 by both kinds of products of `bf16`. Instructions whose
//! intrinsics are not stable are inline assembly, for which the surrounding function must enable
//! their features.

use std::{
    arch::{aarch64::*, asm, is_aarch64_feature_detected},
    hint::black_box,
    ptr,
};

use super::{
    dot::{Bf16, Dot, Int8},
    instruction_set::{InstructionSet, ProductKernel, SimdKernel, run_product_kernel},
    microkernel::{Microkernel, RegisterTile, Tile, multiply_for_mr},
    prefetch::prefetch_l2,
    vector::{Register, Vector},
};
use crate::compute_type::ComputeType;

type NeonVector = [float32x4_t; 4];

/// AArch64, whose every CPU has NEON.
pub(super) struct Neon;

impl InstructionSet for Neon {
    const NAME: &'static str = "neon";
    type Vector = NeonVector;
    type F32 = F32ByLane;
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

/// Defines an instruction set that computes the products of one compute type by `$D`, which needs
/// `$feature`, and those of the compute types `$A` and `$B`, and all else, as `$Base`.
macro_rules! extend {
    (
        $(#[$doc:meta])* $Set:ident, $name:literal: $Base:ident with $feature:tt
        for $Type:ident by $D:ident, $A:ident $B:ident $(, without tiles $Smaller:ident)?
    ) => {
        $(#[$doc])*
        pub(super) struct $Set;

        impl InstructionSet for $Set {
            const NAME: &'static str = $name;
            $(const WITHOUT_TILES: &'static str = $Smaller::NAME;)?
            type Vector = NeonVector;
            type $Type = $D;
            type $A = <$Base as InstructionSet>::$A;
            type $B = <$Base as InstructionSet>::$B;

            fn is_supported() -> bool {
                $Base::is_supported() && is_aarch64_feature_detected!($feature)
            }

            unsafe fn run(kernel: impl SimdKernel) {
                // SAFETY: upheld by the caller.
                unsafe { $Base::run(kernel) }
            }

            unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel) {
                #[target_feature(enable = $feature)]
                unsafe fn multiply(kernel: impl ProductKernel) {
                    // SAFETY: upheld by the caller.
                    unsafe { kernel.run::<NeonVector, $D>() }
                }
                // SAFETY: upheld by the caller.
                unsafe {
                    match compute_type {
                        ComputeType::$Type => multiply(kernel),
                        _ => $Base::run_products(compute_type, kernel),
                    }
                }
            }
        }
    };
}

extend!(
    /// [`Neon`] plus dot products of 8-bit integers of one sign (`sdot`).
    NeonDotprod, "neon-dotprod": Neon with "dotprod" for Int8 by SignedDot, F32 Bf16
);
extend!(
    /// [`NeonDotprod`] plus matrix products of unsigned and signed 8-bit integers (`usmmla`).
    NeonI8mm, "neon-i8mm": NeonDotprod with "i8mm" for Int8 by MatrixProduct, F32 Bf16
);
extend!(
    /// [`NeonI8mm`] plus dot products of bf16 (`bfdot`).
    NeonBfdot, "neon-bfdot": NeonI8mm with "bf16" for Bf16 by Bf16Dot, F32 Int8
);
extend!(
    /// [`NeonBfdot`] plus matrix products of bf16 (`bfmmla`), which the same CPUs have.
    NeonBf16, "neon-bf16": NeonBfdot with "bf16" for Bf16 by Bf16MatrixProduct, F32 Int8,
    without tiles NeonBfdot
);

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

    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile) {
        multiply_neon!(D, "neon", mr, tile)
    }
}

/// f32 by `fmla` with one lane of the input.
pub(super) struct F32ByLane;
/// 8-bit integers by `sdot`, whose inputs are both signed.
pub(super) struct SignedDot;
/// 8-bit integers by `usmmla`, which multiplies matrices of 2 × 8 and 8 × 2.
pub(super) struct MatrixProduct;
/// bf16 by `bfdot`.
pub(super) struct Bf16Dot;
/// bf16 by `bfmmla`, which multiplies matrices of 2 × 4 and 4 × 2.
pub(super) struct Bf16MatrixProduct;

impl Microkernel<NeonVector> for F32ByLane {
    const MAX_MR: usize = NeonVector::MAX_MR;
}

impl Microkernel<NeonVector> for SignedDot {
    const MAX_MR: usize = NeonVector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_neon!(Self, "neon,dotprod", mr, tile)
    }
}

/// Products of matrices of 2 × 2 lanes.
trait MatrixDot: Dot<NeonVector> {
    /// Adds the products of the 2 × 2 lanes of `a` and the 2 × 2 lanes of `b` to the 2 × 2 sums.
    ///
    /// # Safety
    /// The CPU supports the instruction.
    unsafe fn multiply_matrices(sum: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t;
}

/// Implements [`Microkernel`] and [`MatrixDot`] with an instruction on operands of a format, for a CPU
/// with these features.
macro_rules! multiply_matrices {
    ($D:ty, $instruction:literal, $format:literal, $features:literal) => {
        impl Microkernel<NeonVector> for $D {
            const MAX_MR: usize = NeonVector::MAX_MR;

            unsafe fn multiply_tile(mr: usize, tile: &Tile) {
                #[target_feature(enable = $features)]
                #[inline(never)]
                unsafe fn multiply(mr: usize, tile: &Tile) {
                    // SAFETY: upheld by the caller.
                    unsafe {
                        match mr {
                            1 | 2 => multiply_row_pairs::<$D, 1>(mr, tile),
                            3 | 4 => multiply_row_pairs::<$D, 2>(mr, tile),
                            5 | 6 => multiply_row_pairs::<$D, 3>(mr, tile),
                            _ => unreachable!("mr is outside 1..=max_mr"),
                        }
                    }
                }
                // SAFETY: upheld by the caller.
                unsafe { multiply(mr, tile) }
            }

            #[inline(always)]
            unsafe fn multiply_registers(steps: usize) -> usize {
                // SAFETY: upheld by the caller.
                unsafe { multiply_matrices_in_registers::<$D>(steps) }
            }
        }

        impl MatrixDot for $D {
            #[inline(always)]
            unsafe fn multiply_matrices(
                mut sum: float32x4_t,
                a: float32x4_t,
                b: float32x4_t,
            ) -> float32x4_t {
                // SAFETY: upheld by the caller; the instruction accesses registers only.
                unsafe {
                    asm!(
                        concat!($instruction, " {sum:v}.4s, {a:v}", $format, ", {b:v}", $format),
                        sum = inout(vreg) sum,
                        a = in(vreg) a,
                        b = in(vreg) b,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                }
                sum
            }
        }
    };
}

multiply_matrices!(MatrixProduct, "usmmla", ".16b", "neon,i8mm");
multiply_matrices!(Bf16MatrixProduct, "bfmmla", ".8h", "neon,bf16");

/// [`Microkernel::multiply_registers`] of products of matrices.
///
/// # Safety
/// The CPU supports the instruction of `D`.
#[inline(always)]
unsafe fn multiply_matrices_in_registers<D: MatrixDot>(steps: usize) -> usize {
    const ACCUMULATORS: usize = 16;
    // SAFETY: upheld by the caller.
    unsafe {
        let mut x = vdupq_n_f32(black_box(0.0));
        let mut sums = [vdupq_n_f32(0.0); ACCUMULATORS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = D::multiply_matrices(*sum, x, x);
            }
            x = vaddq_f32(x, x); // as in the default implementation
        }
        for sum in sums {
            black_box(sum.reduce_add());
        }
    }
    steps * ACCUMULATORS * 8 // 2·2 sums of 2 lanes
}

/// The microkernel of a [`MatrixDot`] for `mr` rows, which are `PAIRS` pairs of rows; if `mr` is
/// odd, the last row is multiplied twice.
///
/// # Safety
/// As for [`Tile::multiply`]; `k_lanes` is even.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)] // as for the register
unsafe fn multiply_row_pairs<D: MatrixDot, const PAIRS: usize>(mr: usize, tile: &Tile) {
    /// Pairs of columns of a panel.
    const COLUMNS: usize = NeonVector::NR / 2;
    let row = |i: usize| tile.a.add(i.min(mr - 1) * tile.a_stride);
    let mut rows = [[tile.a; 2]; PAIRS];
    for (pair, rows) in rows.iter_mut().enumerate() {
        *rows = [row(2 * pair), row(2 * pair + 1)];
    }
    let (mut next, next_step) = tile.prefetch_steps(tile.k_lanes / 2, 2);
    let mut b = tile.b;
    // [r₀c₀, r₀c₁, r₁c₀, r₁c₁] for each pair of rows and pair of columns
    let mut sums = [[vdupq_n_f32(0.0); COLUMNS]; PAIRS];
    for k in (0..tile.k_lanes).step_by(2) {
        prefetch_l2(next);
        prefetch_l2(next.wrapping_add(next_step / 2));
        next = next.wrapping_add(next_step);
        multiply_lane_pair::<D, PAIRS>(&mut sums, &rows, k, b);
        b = b.add(2 * NeonVector::NR);
    }
    for (pair, sums) in sums.iter().enumerate() {
        // The sums of four columns in each of both rows.
        let [a0, b0] = lanes_of_pairs(sums[0], sums[1]);
        let [a1, b1] = lanes_of_pairs(sums[2], sums[3]);
        let [a2, b2] = lanes_of_pairs(sums[4], sums[5]);
        let [a3, b3] = lanes_of_pairs(sums[6], sums[7]);
        for (i, acc) in [[a0, a1, a2, a3], [b0, b1, b2, b3]].into_iter().enumerate() {
            if 2 * pair + i < mr {
                let c = tile.c.add((2 * pair + i) * tile.c_stride);
                let sum: NeonVector = if tile.accumulate {
                    D::add(NeonVector::load_partial(c, tile.columns), acc)
                } else {
                    acc
                };
                sum.store_partial(c, tile.columns);
            }
        }
    }
}

/// The first two lanes of `x` and of `y`, then the last two of each.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn lanes_of_pairs(x: float32x4_t, y: float32x4_t) -> [float32x4_t; 2] {
    // SAFETY: upheld by the caller.
    unsafe {
        let (x, y) = (vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y));
        [vreinterpretq_f32_f64(vtrn1q_f64(x, y)), vreinterpretq_f32_f64(vtrn2q_f64(x, y))]
    }
}

/// Adds the products of lanes `k` and `k + 1` of each pair of rows and the columns of `b` to `sums`.
///
/// # Safety
/// The CPU supports the instruction of `D`; the rows have these lanes, and `b` points to two lanes of a
/// panel.
#[inline(always)]
#[allow(unsafe_op_in_unsafe_fn)] // as for the register
unsafe fn multiply_lane_pair<D: MatrixDot, const PAIRS: usize>(
    sums: &mut [[float32x4_t; NeonVector::NR / 2]; PAIRS],
    rows: &[[*const f32; 2]; PAIRS],
    k: usize,
    b: *const f32,
) {
    let mut x = [vdupq_n_f32(0.0); PAIRS];
    for (x, [first, second]) in x.iter_mut().zip(rows) {
        *x = vcombine_f32(vld1_f32(first.add(k)), vld1_f32(second.add(k)));
    }
    // The compiler would merge two loads into `ldp`, which takes more micro-operations.
    macro_rules! multiply_columns {
        ($($column:literal)*) => {
            $(
                let weights: float32x4_t;
                asm!(
                    "ldr {weights:q}, [{b}, #{offset}]",
                    weights = out(vreg) weights,
                    b = in(reg) b,
                    offset = const 16 * $column,
                    options(pure, readonly, nostack, preserves_flags),
                );
                for (sums, &x) in sums.iter_mut().zip(&x) {
                    sums[$column] = D::multiply_matrices(sums[$column], x, weights);
                }
            )*
        };
    }
    multiply_columns!(0 1 2 3 4 5 6 7);
}

impl Microkernel<NeonVector> for Bf16Dot {
    const MAX_MR: usize = NeonVector::MAX_MR;

    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        multiply_neon!(Self, "neon,bf16", mr, tile)
    }
}

/// Implements [`Dot`] with an instruction that multiplies the lanes of a vector with one lane. The
/// formats are those of the operands: of the vector, and of the lane.
macro_rules! dot_by_lane {
    (
        $D:ty, $instruction:literal, $vector:literal, $lane:literal, $add:ident,
        $($constant:ident: $value:literal),*
    ) => {
        #[allow(unsafe_op_in_unsafe_fn)] // as for the register
        impl Dot<NeonVector> for $D {
            $(const $constant: bool = $value;)*

            #[inline(always)]
            unsafe fn dot([a, ..]: NeonVector, b: NeonVector, mut acc: NeonVector) -> NeonVector {
                for i in 0..4 {
                    asm!(
                        concat!($instruction, " {acc:v}.4s, {b:v}", $vector, ", {a:v}", $lane),
                        acc = inout(vreg) acc[i],
                        a = in(vreg) a,
                        b = in(vreg) b[i],
                        options(pure, nomem, nostack, preserves_flags),
                    );
                }
                acc
            }
            // The compiler would merge two loads into `ldp`, which takes more micro-operations.
            #[inline(always)]
            unsafe fn load_panel(from: *const f32, _i: usize) -> NeonVector {
                let (b0, b1, b2, b3): (float32x4_t, float32x4_t, float32x4_t, float32x4_t);
                asm!(
                    "ldr {b0:q}, [{from}]",
                    "ldr {b1:q}, [{from}, #16]",
                    "ldr {b2:q}, [{from}, #32]",
                    "ldr {b3:q}, [{from}, #48]",
                    b0 = out(vreg) b0,
                    b1 = out(vreg) b1,
                    b2 = out(vreg) b2,
                    b3 = out(vreg) b3,
                    from = in(reg) from,
                    options(pure, readonly, nostack, preserves_flags),
                );
                [b0, b1, b2, b3]
            }
            // A load into one lane occupies a load unit only. A load into all lanes, which the
            // compiler would choose, occupies a vector unit too.
            #[inline(always)]
            unsafe fn multiply_lane<const NV: usize>(
                row: *const f32,
                lane: usize,
                b: &[NeonVector; NV],
                acc: &mut [NeonVector; NV],
            ) {
                for ([c0, c1, c2, c3], [b0, b1, b2, b3]) in acc.iter_mut().zip(b) {
                    asm!(
                        "ldr {a:s}, [{row}, {lane}, lsl #2]",
                        concat!($instruction, " {c0:v}.4s, {b0:v}", $vector, ", {a:v}", $lane),
                        concat!($instruction, " {c1:v}.4s, {b1:v}", $vector, ", {a:v}", $lane),
                        concat!($instruction, " {c2:v}.4s, {b2:v}", $vector, ", {a:v}", $lane),
                        concat!($instruction, " {c3:v}.4s, {b3:v}", $vector, ", {a:v}", $lane),
                        row = in(reg) row,
                        lane = in(reg) lane,
                        a = out(vreg) _,
                        c0 = inout(vreg) *c0,
                        c1 = inout(vreg) *c1,
                        c2 = inout(vreg) *c2,
                        c3 = inout(vreg) *c3,
                        b0 = in(vreg) *b0,
                        b1 = in(vreg) *b1,
                        b2 = in(vreg) *b2,
                        b3 = in(vreg) *b3,
                        options(pure, readonly, nostack, preserves_flags),
                    );
                }
            }
            #[inline(always)]
            unsafe fn add(x: NeonVector, y: NeonVector) -> NeonVector {
                x.$add(y)
            }
        }
    };
}

dot_by_lane!(F32ByLane, "fmla", ".4s", ".s[0]", add, IS_ROUNDED: false);
dot_by_lane!(SignedDot, "sdot", ".16b", ".4b[0]", add_i32, IS_QUANTISED: true, HAS_SIGNED_INPUT: true);
dot_by_lane!(MatrixProduct, "sudot", ".16b", ".4b[0]", add_i32, IS_QUANTISED: true, HAS_LANE_PAIRS: true);
dot_by_lane!(Bf16Dot, "bfdot", ".8h", ".2h[0]", add, IS_ROUNDED: true);
dot_by_lane!(Bf16MatrixProduct, "bfdot", ".8h", ".2h[0]", add, HAS_LANE_PAIRS: true);

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
