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

use super::{Dot, PANEL};
use crate::{
    lanes::{Lanes, prefetch},
    number::Element,
};

/// Words of a block's thirds of one kind.
const THIRD: usize = 16;
/// Numbers of a block; parts of a sum over k are whole ones.
pub(crate) const OF_BLOCK: usize = 2 * THIRD;

/// Rows of a panel between what is read and what is asked for.
const AHEAD: usize = 64;

/// Blocks of so many numbers; what is left of the last is zeros.
pub(crate) fn blocks(numbers: usize) -> usize {
    numbers.div_ceil(OF_BLOCK)
}

/// Words that the thirds of so many numbers take.
pub(crate) fn words(numbers: usize) -> usize {
    3 * THIRD * blocks(numbers)
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
            let mut rest = T::load::<L>(row.as_ptr().wrapping_add(first), n);
            let block = to.add(first / OF_BLOCK * 3 * THIRD);
            for third in 0..3 {
                let to = block.add(third * THIRD).cast::<u16>().add(first % OF_BLOCK);
                D::store_bf16(rest, to);
                rest = rest.sub(L::load_bf16(to));
            }
        }
    }
}

/// The thirds of some rows of a panel, in pairs of rows.
///
/// # Safety
/// The instructions of `L`; `to` has room for the [`words`] of so many rows.
#[inline(always)]
pub(crate) unsafe fn split_panel<L: Lanes>(panel: &[f32], to: *mut f32) {
    let (blocks, rest) = panel.as_chunks::<{ OF_BLOCK * PANEL }>();
    // SAFETY: the caller's.
    unsafe {
        for (i, block) in blocks.iter().enumerate() {
            split_block::<L>(block, to.add(i * 3 * THIRD * PANEL));
        }
        if !rest.is_empty() {
            let mut block = [0.0; OF_BLOCK * PANEL];
            block[..rest.len()].copy_from_slice(rest);
            split_block::<L>(&block, to.add(blocks.len() * 3 * THIRD * PANEL));
        }
    }
}

/// # Safety
/// As above, for a block.
#[inline(always)]
unsafe fn split_block<L: Lanes>(block: &[f32; OF_BLOCK * PANEL], to: *mut f32) {
    for pair in 0..THIRD {
        for column in (0..PANEL).step_by(L::N) {
            let first = 2 * pair * PANEL + column;
            // SAFETY: the caller's; rows of the block are whole vectors.
            unsafe {
                let low = block.as_ptr().add(first);
                let high = low.add(PANEL);
                prefetch(low.wrapping_add(AHEAD * PANEL));
                prefetch(high.wrapping_add(AHEAD * PANEL));
                let half = L::splat(f32::from_bits(0x8000)); // of bf16's last bit
                let mut rest = [L::load(low), L::load(high)];
                for third in 0..3 {
                    let nearest = match third {
                        2 => rest, // exact, and NaN, which half a bit might make a number
                        _ => rest.map(|x| x.add_int(half).odd_bf16()),
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
        of_panel: &'a mut [f32],
    }

    #[inline(always)]
    unsafe fn split<L: Lanes>(args: Args) {
        // SAFETY: the caller's, and there is room.
        unsafe {
            split_row::<L, Bf16, f32>(args.row, args.of_row.as_mut_ptr());
            split_panel::<L>(args.panel, args.of_panel.as_mut_ptr());
        }
    }

    #[test]
    fn thirds_are_ever_smaller_and_sum_to_the_number() {
        for (isa, n) in Isa::all().into_iter().flat_map(|isa| [1, 31, 32, 37, 70].map(|n| (isa, n)))
        {
            let number = |i: usize| 2f32.powi(7 * i as i32 % 200 - 100) * 1.618_034;
            let row: Vec<f32> = (0..n).map(number).collect();
            let panel: Vec<f32> = (0..n * PANEL).map(|i| number(i) * (i as f32).sin()).collect();
            let (mut of_row, mut of_panel) =
                (vec![f32::NAN; words(n)], vec![f32::NAN; words(n) * PANEL]);
            let (of_row, of_panel) = (&mut of_row[..], &mut of_panel[..]);
            let args = Args { row: &row, of_row, panel: &panel, of_panel };
            on_isa!(isa, split, args: Args);
            let check = |i: usize, word: &dyn Fn(usize) -> f32, number: Option<&f32>| {
                let at = |third| i / OF_BLOCK * 3 * THIRD + third * THIRD + i % OF_BLOCK / 2;
                let wide = |word: f32| f32::from_bits(word.to_bits() >> (16 * (i % 2)) << 16);
                let [first, second, last] = [0, 1, 2].map(|third| wide(word(at(third))));
                let number = number.copied().unwrap_or(0.0);
                assert_eq!(last + second + first, number, "{} {i} of {n}", isa.name());
                assert!(second.abs() <= number.abs() / 256.0, "{} {i} of {n}", isa.name());
                assert!(last.abs() <= number.abs() / 65536.0, "{} {i} of {n}", isa.name());
            };
            for i in 0..OF_BLOCK * blocks(n) {
                check(i, &|at| of_row[at], row.get(i));
                for column in 0..PANEL {
                    check(i, &|at| of_panel[at * PANEL + column], panel.get(i * PANEL + column));
                }
            }
        }
    }
}
