//! A tile of some rows times a panel, in registers.

use super::{
    dot::Dot,
    packed::{PANEL, Panel},
    quantise::Quant,
};
use crate::{
    buffers::LINE,
    lanes::{Lanes, prefetch},
    math::Activation,
    number::Written,
};

/// Rows of the tiles: as even as can be, none higher than the registers allow.
pub(crate) fn tile_rows(m: usize, highest: usize) -> impl Iterator<Item = (usize, usize)> {
    let tiles = m.div_ceil(highest).max(1);
    let (height, higher) = (m / tiles, m % tiles);
    (0..tiles).map(move |i| (i * height + i.min(higher), height + usize::from(i < higher)))
}

const AHEAD: usize = 32;

/// A tile times a panel.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    /// The tile's words, rows `a_row` apart.
    pub(crate) a: *const f32,
    pub(crate) a_row: usize,
    /// The panel: [`PANEL`] words a step.
    pub(crate) b: *const f32,
    /// As a [`Panel`]'s.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AMX has thirds"))]
    pub(crate) thirds: usize,
    pub(crate) steps: usize,
    /// What is read after this and may be far away: it is asked for meanwhile.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only AMX asks"))]
    pub(crate) next: &'a [f32],
    /// Where the sums go: rows `c_row` apart, of `columns` that count.
    pub(crate) c: *mut f32,
    pub(crate) c_row: usize,
    pub(crate) columns: usize,
    /// Adds to the sums that `c` holds.
    pub(crate) go_on: bool,
}

impl Tile<'_> {
    /// `R` rows and `V` vectors of columns at a time, in registers.
    ///
    /// # Safety
    /// The instructions of `L` and `D`; the places that the tile tells of.
    #[inline(always)]
    unsafe fn multiply<L: Lanes, D: Dot<L>, const R: usize, const V: usize>(&self) {
        // SAFETY: the caller's.
        unsafe {
            for first in (0..self.columns).step_by(V * L::N) {
                let here = |v: usize| (self.columns - first).saturating_sub(v * L::N).min(L::N);
                for i in 0..R {
                    // The lines that the sums go to: they arrive while these are computed.
                    let c = self.c.wrapping_add(i * self.c_row + first);
                    (0..V * L::N).step_by(LINE).for_each(|line| prefetch(c.wrapping_add(line)));
                }
                let mut sums = [[L::splat(0.0); V]; R];
                let (mut a, mut b) = (self.a, self.b.add(first));
                for _ in 0..self.steps {
                    for line in (0..V * L::N).step_by(LINE) {
                        prefetch(b.wrapping_add(AHEAD * PANEL + line));
                    }
                    let mut columns = [L::splat(0.0); V];
                    for (v, column) in columns.iter_mut().enumerate() {
                        *column = L::load(b.add(v * L::N));
                    }
                    for (i, row) in sums.iter_mut().enumerate() {
                        let x = L::splat(*a.add(i * self.a_row));
                        for (sum, &column) in row.iter_mut().zip(&columns) {
                            *sum = D::dot(x, column, *sum);
                        }
                    }
                    a = a.add(1);
                    b = b.wrapping_add(PANEL);
                }
                // Past the columns, where no number is, this may be outside of the output.
                let c = |i: usize, v: usize| self.c.wrapping_add(i * self.c_row + first + v * L::N);
                if self.go_on {
                    for (i, row) in sums.iter_mut().enumerate() {
                        for (v, sum) in row.iter_mut().enumerate() {
                            *sum = D::add(L::load_first(c(i, v), here(v)), *sum);
                        }
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    for (v, &sum) in row.iter().enumerate() {
                        sum.store_first(c(i, v), here(v));
                    }
                }
            }
        }
    }

    /// Makes elements of the product of the sums, which are still in the nearest cache: in the
    /// registers, among the sums, this would push them out.
    ///
    /// # Safety
    /// As above; sums of all rows, one for each of `rows`; as many rows of the output `to_row` apart.
    #[inline(always)]
    pub(crate) unsafe fn finish<L: Lanes, D: Dot<L>, T: Written>(
        &self,
        panel: &Panel,
        rows: &[Quant],
        activation: Activation,
        to: *mut T,
        to_row: usize,
    ) {
        for (i, &row) in rows.iter().enumerate() {
            for column in (0..self.columns).step_by(L::N) {
                let n = L::N.min(self.columns - column);
                // SAFETY: the caller's; a panel has whole vectors of everything.
                unsafe {
                    let sum = L::load_first(self.c.add(i * self.c_row + column), n);
                    let y = activation.apply(D::element(sum, row, panel, column), D::ROUNDS);
                    T::store::<L, D>(y, T::at(to.add(i * to_row), panel.column + column), n);
                }
            }
        }
    }
}

/// [`Tile::multiply`] for a height that is known at run time only.
macro_rules! tile_of_height {
    ($V:literal, $height:expr, $tile:expr, [$($R:literal)*]) => {
        match $height {
            $($R => $tile.multiply::<Self, D, $R, $V>(),)*
            _ => unreachable!("tiles are at most so high"),
        }
    };
}

/// The tiles that fit a machine's registers.
pub(crate) trait Tiles: Lanes {
    /// # Safety
    /// As [`Tile::multiply`]'s; `1 ≤ height ≤` [`crate::Isa::tile_rows`].
    unsafe fn tile<D: Dot<Self>>(height: usize, tile: &Tile);
}

impl Tiles for f32 {
    #[inline(always)]
    unsafe fn tile<D: Dot<Self>>(height: usize, t: &Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_height!(4, height, t, [1 2 3 4]) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Tiles for std::arch::x86_64::__m256 {
    #[inline(always)]
    unsafe fn tile<D: Dot<Self>>(height: usize, t: &Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_height!(2, height, t, [1 2 3 4 5 6]) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Tiles for std::arch::x86_64::__m512 {
    #[inline(always)]
    unsafe fn tile<D: Dot<Self>>(height: usize, t: &Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_height!(2, height, t, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]) }
    }
}
