//! f32 matrix products on bf16 units (BF16x3).
//!
//! AMX does not multiply f32, so each f32 value x is split into three bf16 terms with
//! x = x₀ + x₁ + x₂: x₀ = bf16(x), x₁ = bf16(x − x₀), x₂ = x − x₀ − x₁. Of the nine partial
//! products of two values, the six largest are summed; the other three add up to less than 2⁻²⁴ of
//! the product of the two values, which is the rounding error of f32.
//!
//! # Layout
//! Values are stored in blocks of [`BLOCK`] along k: all x₀ of the block, then all x₁, then all x₂.
//! If x₂ is 0 in the whole weight, as for a checkpoint in f16, the weight is stored and multiplied
//! with two terms per value. The result is the same.
//!
//! # Limits
//! - Inputs and weights with a magnitude above 3.396e38, and infinities, give NaN: they overflow
//!   bf16.
//! - bf16 units flush operands and sums below 2⁻¹²⁶ to zero. A term or a partial product that is
//!   not zero can be as small as about 2⁻²⁴ times the value or the product that it belongs to, so
//!   values and products below 2⁻¹⁰² lose bits.

use super::{
    dot::Dot,
    element::{Element, Store},
    microkernel::MAX_NR,
};
use crate::{
    compute_type::ComputeType,
    isa::Isa,
    simd::{LANES, Vector},
};

/// Packed lanes per term of a block. A lane contains one term of each of two adjacent values.
const TERM_LANES: usize = 16;
/// Values of a block along k. Ranges of k that are multiplied separately are whole blocks.
pub(crate) const BLOCK: usize = 2 * TERM_LANES;

/// Whether products of this type are computed as BF16x3.
pub(crate) fn is_used(isa: Isa, compute_type: ComputeType) -> bool {
    isa >= Isa::AMX && compute_type == ComputeType::F32
}

/// Blocks that `k` values take; the last is padded with zeros.
pub(crate) const fn blocks(k: usize) -> usize {
    k.div_ceil(BLOCK)
}

/// Packed lanes that `k` values take with three terms each.
pub(crate) const fn lanes(k: usize) -> usize {
    lanes_per_block(3) * blocks(k)
}

/// Packed lanes of a block with this number of terms per value.
pub(crate) const fn lanes_per_block(terms: usize) -> usize {
    terms * TERM_LANES
}

/// The number of terms that represent every value of a weight exactly: two if all significands have
/// at most 16 bits, else three.
pub(crate) fn terms_needed(weight: &[f32]) -> usize {
    if weight.iter().fold(0, |bits, w| bits | w.to_bits()) & 0xff == 0 { 2 } else { 3 }
}

/// The sum of the terms of value `k` of a packed row or column. `lane(i)` reads its packed lane i.
pub(crate) fn join(terms: usize, k: usize, lane: impl Fn(usize) -> f32) -> f32 {
    let term = |term| {
        let lane = lane((k / BLOCK * terms + term) * TERM_LANES + k % BLOCK / 2);
        f32::from_bits(lane.to_bits() >> (16 * (k % 2)) << 16)
    };
    match (1..terms).rev().map(term).sum::<f32>() {
        0.0 => term(0), // keeps the sign of −0
        rest => term(0) + rest,
    }
}

/// The first bf16 term of a value. The second and third terms are [`BLOCK`] and 2·[`BLOCK`]
/// elements after it.
#[derive(Clone, Copy)]
pub(crate) struct Bf16x3(#[expect(dead_code, reason = "read by AMX instructions only")] u16);

/// Vectors must start at a multiple of `LANES` within a block.
impl Store for Bf16x3 {
    #[inline(always)]
    fn at(row: *mut Self, column: usize) -> *mut Self {
        row.wrapping_add(column / BLOCK * (2 * lanes_per_block(3)) + column % BLOCK)
    }

    #[inline(always)]
    unsafe fn store<V: Vector, D: Dot<V>>(x: V, to: *mut Self, _n: usize) {
        let mut rest = x;
        for term in 0..3 {
            // SAFETY: upheld by the caller; a block holds whole vectors.
            unsafe {
                let to = to.cast::<u16>().add(term * BLOCK);
                D::store_bf16(rest, to);
                rest = rest.sub(V::load_bf16(to));
            }
        }
    }

    unsafe fn pad_row(row: *mut Self, n: usize) {
        for column in n..n.next_multiple_of(BLOCK) {
            // SAFETY: the row has room for whole blocks.
            (0..3).for_each(|term| unsafe { *Self::at(row, column).add(term * BLOCK) = Self(0) });
        }
    }
}

/// Splits a row into terms.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `to` has room for [`lanes`]`(row.len())`.
#[inline(always)]
pub(crate) unsafe fn split_row<V: Vector, D: Dot<V>, T: Element>(row: &[T], to: *mut f32) {
    for first in (0..BLOCK * blocks(row.len())).step_by(LANES) {
        let n = LANES.min(row.len().saturating_sub(first));
        // SAFETY: reads are within the row; writes are within its blocks, which hold whole vectors.
        unsafe {
            let values = T::load::<V>(row.as_ptr().wrapping_add(first), n);
            Bf16x3::store::<V, D>(values, Bf16x3::at(to.cast(), first), LANES);
        }
    }
}

/// Splits a block of a weight panel into `terms` terms. Each packed lane holds one term of two
/// values, which are in adjacent rows of the block.
///
/// # Safety
/// The CPU supports the instructions of `V`; `to` has room for
/// `MAX_NR ·` [`lanes_per_block`]`(terms)`.
#[inline(always)]
pub(crate) unsafe fn split_block<V: Vector>(
    block: &[f32; BLOCK * MAX_NR],
    terms: usize,
    to: *mut f32,
) {
    for pair in 0..TERM_LANES {
        for column in (0..MAX_NR).step_by(LANES) {
            let first = 2 * pair * MAX_NR + column;
            // SAFETY: upheld by the caller; rows of the block are whole vectors.
            unsafe {
                let low = block.as_ptr().add(first);
                let high = low.add(MAX_NR);
                let half_ulp = V::splat(f32::from_bits(0x8000)); // of bf16
                let mut rest = [V::load(low), V::load(high)];
                for term in 0..terms {
                    // The nearest bf16, ties away from zero: half an ulp is added to the bits, and
                    // the lower half is dropped.
                    let nearest = if term + 1 == terms {
                        rest // The last term is exact. Rounding could turn NaN into a number.
                    } else {
                        rest.map(|x| x.add_i32(half_ulp).odd_bf16())
                    };
                    let lanes = nearest[0].pack_high_halves(nearest[1]);
                    lanes.store(to.add((term * TERM_LANES + pair) * MAX_NR + column));
                    rest = [rest[0].sub(nearest[0]), rest[1].sub(nearest[1])];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gemm::dot::Bf16, simd::dispatch_simd};

    struct Args<'a> {
        row: &'a [f32],
        packed_row: &'a mut [f32],
        panel: &'a [f32],
        terms: usize,
        packed_panel: &'a mut [f32],
    }

    #[inline(always)]
    unsafe fn split<V: Vector>(args: Args) {
        let (blocks, _) = args.panel.as_chunks();
        let packed_panel = args.packed_panel.chunks_mut(lanes_per_block(args.terms) * MAX_NR);
        // SAFETY: upheld by the caller, and the buffers have room.
        unsafe {
            split_row::<V, Bf16, f32>(args.row, args.packed_row.as_mut_ptr());
            for (block, to) in blocks.iter().zip(packed_panel) {
                split_block::<V>(block, args.terms, to.as_mut_ptr());
            }
        }
    }

    #[test]
    fn terms_shrink_by_256_and_sum_to_the_value() {
        let sizes = [1, 31, 32, 37, 70].map(|n| [2, 3].map(|terms| (n, terms))).concat();
        for (isa, (n, terms)) in
            Isa::available().into_iter().flat_map(|isa| sizes.iter().map(move |&size| (isa, size)))
        {
            let value = |i: usize| 2f32.powi(7 * i as i32 % 200 - 100) * 1.618_034;
            let row: Vec<f32> = (0..n).map(value).collect();
            let panel_len = BLOCK * blocks(n) * MAX_NR;
            let mut panel: Vec<f32> = (0..panel_len).map(|i| value(i) * (i as f32).sin()).collect();
            assert_eq!(terms_needed(&panel), 3);
            if terms == 2 {
                panel.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits() & !0xff));
                assert_eq!(terms_needed(&panel), 2);
            }
            let (mut packed_row, mut packed_panel) =
                (vec![f32::NAN; lanes(n)], vec![f32::NAN; lanes(n) / 3 * terms * MAX_NR]);
            let (packed_row, packed_panel) = (&mut packed_row[..], &mut packed_panel[..]);
            let args = Args { row: &row, packed_row, panel: &panel, terms, packed_panel };
            dispatch_simd!(isa, split, args: Args);
            let check = |terms, i: usize, lane: &dyn Fn(usize) -> f32, value: f32| {
                assert_eq!(join(terms, i, lane), value, "{} {i} of {n}", isa.name());
                let mut max = value.abs() / 256.0;
                for term in 1..terms {
                    let at = (i / BLOCK * terms + term) * TERM_LANES + i % BLOCK / 2;
                    let size = f32::from_bits(lane(at).to_bits() >> (16 * (i % 2)) << 16).abs();
                    assert!(size <= max, "{} {i} of {n}", isa.name());
                    max /= 256.0;
                }
            };
            for i in 0..BLOCK * blocks(n) {
                check(3, i, &|at| packed_row[at], row.get(i).copied().unwrap_or(0.0));
                for column in 0..MAX_NR {
                    let value = panel[i * MAX_NR + column];
                    check(terms, i, &|at| packed_panel[at * MAX_NR + column], value);
                }
            }
        }
    }
}
