//! [`Dot`]: multiply-accumulate of packed lanes, one implementation per number format and
//! instruction.
//!
//! A packed lane has 32 bits: one f32, two bf16 or four 8-bit integers, adjacent along k.

use super::vector::Vector;

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
    /// Whether quantised inputs are signed: 128 less than the bytes of other implementations. The
    /// epilogue adds 128 times the sum of the weights.
    const HAS_SIGNED_INPUT: bool = false;
    /// Whether adjacent products are added in 16 bits, so that the sum of two adjacent weights must be
    /// within ±127.
    const ADDS_INT8_PAIRS_IN_I16: bool = false;
    /// Whether the operands are f32 split into bf16 terms ([`bf16x3`](super::bf16x3)).
    const IS_BF16X3: bool = false;
    /// Lanes of an input row that are multiplied by one packed lane of a panel: 1, or 2 if the row
    /// is bf16 widened to f32, and the panel holds pairs of bf16.
    const INPUT_LANES: usize = 1;

    /// Whether a panel holds pairs of lanes along k: the two lanes of a column are adjacent, and k is
    /// padded to an even number of lanes.
    const HAS_LANE_PAIRS: bool = false;

    /// Reads a vector of a panel. With two input lanes, returns one half of each pair of bf16,
    /// widened: the half that is multiplied by lane `i` of a pair of input lanes.
    #[inline(always)]
    unsafe fn load_panel(from: *const f32, _i: usize) -> V {
        // SAFETY: upheld by the caller.
        unsafe { V::load(from) }
    }

    /// `acc + Σ aᵢ·bᵢ` over the values in each lane.
    unsafe fn dot(a: V, b: V, acc: V) -> V;
    /// [`Self::dot`] of a lane of a row and each vector of `b`.
    #[inline(always)]
    unsafe fn multiply_lane<const NV: usize>(
        row: *const f32,
        lane: usize,
        b: &[V; NV],
        acc: &mut [V; NV],
    ) {
        // SAFETY: upheld by the caller; the row has this lane.
        unsafe {
            let x = V::splat(*row.add(lane));
            for (acc, &b) in acc.iter_mut().zip(b) {
                *acc = Self::dot(x, b, *acc);
            }
        }
    }
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
    const ADDS_INT8_PAIRS_IN_I16: bool = V::ADDS_INT8_PAIRS_IN_I16;

    #[inline(always)]
    unsafe fn dot(a: V, b: V, acc: V) -> V {
        a.dot_int8(b, acc)
    }
    #[inline(always)]
    unsafe fn add(x: V, y: V) -> V {
        x.add_i32(y)
    }
}
