//! Numbers of f32 as sums of three of bf16, for instructions that multiply no others.
//!
//! The first third is the bf16 nearest to a number, the second the nearest to what is left, and the
//! last is what is left then: together the number. Of the nine products of two numbers' thirds the
//! six largest are added; the others are less than 2⁻²⁴ of the whole, which a rounding of f32 may be
//! too.
//!
//! Such instructions take what is below 2⁻¹²⁶ as 0, factors and sums, so that a product below 2⁻¹⁰² may
//! be less exact. What is infinite, or as bf16 would be, so beyond 3.396e38, becomes NaN.
//!
//! The thirds of each [`OF_BLOCK`] numbers of k lie together: the first ones, the second, the last.
//! The last ones of a weight that was f16 are zeros: it is held without them, and multiplied so, which
//! gives the same sums.

use rayon::prelude::*;

use super::{Dot, PANEL};
use crate::{
    lanes::Lanes,
    number::{Element, Written},
};

/// Words of a block's thirds of one kind.
const THIRD: usize = 16;
/// Numbers of a block; parts of a sum over k are whole ones.
pub(crate) const OF_BLOCK: usize = 2 * THIRD;

/// Blocks of so many numbers; what is left of the last is zeros.
pub(crate) const fn blocks(numbers: usize) -> usize {
    numbers.div_ceil(OF_BLOCK)
}

/// Words that all thirds of so many numbers take.
pub(crate) const fn words(numbers: usize) -> usize {
    words_of_block(3) * blocks(numbers)
}

/// Words of a block that has so many thirds of each number.
pub(crate) const fn words_of_block(thirds: usize) -> usize {
    thirds * THIRD
}

/// How many thirds the numbers of a weight need: two where all come of f16, or of no more than 16 bits
/// of mantissa otherwise.
pub(crate) fn needed(weight: &[f32]) -> usize {
    let fits = |some: &[f32]| some.iter().fold(0, |bits, w| bits | w.to_bits()) & 0xff == 0;
    if weight.par_chunks(1 << 14).all(fits) { 2 } else { 3 }
}

/// The number `k` of a row or column that has so many thirds of each.
pub(crate) fn sum(thirds: usize, k: usize, word: impl Fn(usize) -> f32) -> f32 {
    let third = |third| {
        let word = word((k / OF_BLOCK * thirds + third) * THIRD + k % OF_BLOCK / 2);
        f32::from_bits(word.to_bits() >> (16 * (k % 2)) << 16)
    };
    match (1..thirds).rev().map(third).sum::<f32>() {
        0.0 => third(0), // which may be -0
        rest => third(0) + rest,
    }
}

/// One of a number's thirds, in bf16; the others are a block's thirds of one kind further on each.
#[derive(Clone, Copy)]
pub(crate) struct Third(#[expect(dead_code, reason = "the instructions' to read")] u16);

/// Vectors begin at whole numbers of them in a block.
impl Written for Third {
    #[inline(always)]
    fn at(row: *mut Self, column: usize) -> *mut Self {
        row.wrapping_add(column / OF_BLOCK * (2 * words_of_block(3)) + column % OF_BLOCK)
    }

    #[inline(always)]
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut Self, _n: usize) {
        let mut rest = x;
        for third in 0..3 {
            // SAFETY: the caller's; a block is whole vectors.
            unsafe {
                let to = to.cast::<u16>().add(third * OF_BLOCK);
                D::store_bf16(rest, to);
                rest = rest.sub(L::load_bf16(to));
            }
        }
    }

    unsafe fn end(row: *mut Self, n: usize) {
        for column in n..n.next_multiple_of(OF_BLOCK) {
            // SAFETY: of the last block, which is whole.
            (0..3).for_each(|third| unsafe {
                *Self::at(row, column).add(third * OF_BLOCK) = Self(0)
            });
        }
    }
}

/// The thirds of a row.
///
/// # Safety
/// The instructions of `L` and `D`; `to` has room for the [`words`].
#[inline(always)]
pub(crate) unsafe fn split_row<L: Lanes, D: Dot<L>, T: Element>(row: &[T], to: *mut f32) {
    for first in (0..OF_BLOCK * blocks(row.len())).step_by(L::N) {
        let n = L::N.min(row.len().saturating_sub(first));
        // SAFETY: reads are within the row; writes within its blocks, which are whole vectors.
        unsafe {
            let numbers = T::load::<L>(row.as_ptr().wrapping_add(first), n);
            Third::store::<L, D>(numbers, Third::at(to.cast(), first), L::N);
        }
    }
}

/// So many thirds of a panel's numbers, for a block of k, in pairs of rows.
///
/// # Safety
/// The instructions of `L`; `to` has room for the [`words_of_block`] of all columns.
#[inline(always)]
pub(crate) unsafe fn split_block<L: Lanes>(
    block: &[f32; OF_BLOCK * PANEL],
    thirds: usize,
    to: *mut f32,
) {
    for pair in 0..THIRD {
        for column in (0..PANEL).step_by(L::N) {
            let first = 2 * pair * PANEL + column;
            // SAFETY: the caller's; rows of the block are whole vectors.
            unsafe {
                let low = block.as_ptr().add(first);
                let high = low.add(PANEL);
                let half = L::splat(f32::from_bits(0x8000)); // of bf16's last bit
                let mut rest = [L::load(low), L::load(high)];
                for third in 0..thirds {
                    let nearest = match third + 1 == thirds {
                        true => rest, // exact, and NaN, which half a bit might make a number
                        false => rest.map(|x| x.add_int(half).odd_bf16()),
                    };
                    let words = nearest[0].pair_halves(nearest[1]);
                    words.store(to.add((third * THIRD + pair) * PANEL + column));
                    rest = [rest[0].sub(nearest[0]), rest[1].sub(nearest[1])];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, gemm::dot::Bf16, lanes::on_isa};

    struct Args<'a> {
        row: &'a [f32],
        of_row: &'a mut [f32],
        panel: &'a [f32],
        thirds: usize,
        of_panel: &'a mut [f32],
    }

    #[inline(always)]
    unsafe fn split<L: Lanes>(args: Args) {
        let (blocks, _) = args.panel.as_chunks();
        let of_panel = args.of_panel.chunks_mut(words_of_block(args.thirds) * PANEL);
        // SAFETY: the caller's, and there is room.
        unsafe {
            split_row::<L, Bf16, f32>(args.row, args.of_row.as_mut_ptr());
            for (block, to) in blocks.iter().zip(of_panel) {
                split_block::<L>(block, args.thirds, to.as_mut_ptr());
            }
        }
    }

    #[test]
    fn thirds_are_ever_smaller_and_sum_to_the_number() {
        let sizes = [1, 31, 32, 37, 70].map(|n| [2, 3].map(|thirds| (n, thirds))).concat();
        for (isa, (n, thirds)) in
            Isa::all().into_iter().flat_map(|isa| sizes.clone().into_iter().map(move |s| (isa, s)))
        {
            let number = |i: usize| 2f32.powi(7 * i as i32 % 200 - 100) * 1.618_034;
            let row: Vec<f32> = (0..n).map(number).collect();
            let whole = OF_BLOCK * blocks(n) * PANEL;
            let mut panel: Vec<f32> = (0..whole).map(|i| number(i) * (i as f32).sin()).collect();
            assert_eq!(needed(&panel), 3);
            if thirds == 2 {
                panel.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits() & !0xff));
                assert_eq!(needed(&panel), 2);
            }
            let (mut of_row, mut of_panel) =
                (vec![f32::NAN; words(n)], vec![f32::NAN; words(n) / 3 * thirds * PANEL]);
            let (of_row, of_panel) = (&mut of_row[..], &mut of_panel[..]);
            let args = Args { row: &row, of_row, panel: &panel, thirds, of_panel };
            on_isa!(isa, split, args: Args);
            let check = |thirds, i: usize, word: &dyn Fn(usize) -> f32, number: f32| {
                assert_eq!(sum(thirds, i, word), number, "{} {i} of {n}", isa.name());
                let mut most = number.abs() / 256.0;
                for third in 1..thirds {
                    let at = (i / OF_BLOCK * thirds + third) * THIRD + i % OF_BLOCK / 2;
                    let size = f32::from_bits(word(at).to_bits() >> (16 * (i % 2)) << 16).abs();
                    assert!(size <= most, "{} {i} of {n}", isa.name());
                    most /= 256.0;
                }
            };
            for i in 0..OF_BLOCK * blocks(n) {
                check(3, i, &|at| of_row[at], row.get(i).copied().unwrap_or(0.0));
                for column in 0..PANEL {
                    let number = panel[i * PANEL + column];
                    check(thirds, i, &|at| of_panel[at * PANEL + column], number);
                }
            }
        }
    }
}
