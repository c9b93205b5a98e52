//! Rows and weights split into the bf16 terms of BF16x3 ([`bf16x3`](crate::simd::bf16x3)).

use super::element::{Element, Store};
use crate::simd::{
    Dot, LANES, MAX_NR, Vector,
    bf16x3::{BLOCK, TERM_LANES, blocks, lanes_per_block},
};

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
/// The CPU supports the instructions of `V` and `D`; `to` has room for [`lanes`](crate::simd::bf16x3::lanes)`(row.len())`.
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
    use crate::{
        Isa,
        simd::{
            Bf16, RegisterTile, SimdKernel,
            bf16x3::{join, lanes, terms_needed},
        },
    };

    struct Args<'a> {
        row: &'a [f32],
        packed_row: &'a mut [f32],
        panel: &'a [f32],
        terms: usize,
        packed_panel: &'a mut [f32],
    }

    impl SimdKernel for Args<'_> {
        #[inline(always)]
        unsafe fn run<V: RegisterTile>(self) {
            let (blocks, _) = self.panel.as_chunks();
            let packed_panel = self.packed_panel.chunks_mut(lanes_per_block(self.terms) * MAX_NR);
            // SAFETY: upheld by the caller, and the buffers have room.
            unsafe {
                split_row::<V, Bf16, f32>(self.row, self.packed_row.as_mut_ptr());
                for (block, to) in blocks.iter().zip(packed_panel) {
                    split_block::<V>(block, self.terms, to.as_mut_ptr());
                }
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
            isa.run(args);
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
