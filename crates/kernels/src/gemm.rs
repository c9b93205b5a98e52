//! `activation(x·Wᵀ + b)` with W packed beforehand.
//!
//! W, `(out, in)` as a checkpoint has it, is stored in panels of [`PANEL`] columns of the product;
//! x is copied into tiles of some rows, each stored column by column, so that the inner loop reads
//! both from start to end. A tile times a panel stays in registers.
//!
//! An element of the product is a sum over blocks of k, in order, each a sum of fused
//! multiply-adds, in order: the error grows with the block and not with k. So it is the same to the
//! bit whatever the other rows are, on whatever instructions and threads.

use std::{fmt, mem::MaybeUninit};

use rayon::prelude::*;

use crate::{
    Isa,
    buffers::{Buffer, Shared},
    lanes::{Lanes, on_isa},
    math::Activation,
};

/// Columns of a panel.
pub(crate) const PANEL: usize = 32;
/// Steps of k summed by themselves, before the next rows: a panel's part of them stays near.
const K_BLOCK: usize = 384;
/// Rows that are done with one panel before the next: their tiles stay in the second cache.
const ROW_BLOCK: usize = 168;

/// A linear map's weight `(out, in)` and bias `(out,)`, packed for products.
///
/// # Examples
/// ```
/// use mha_kernels::{Activation, Isa, PackedLinear, linear};
///
/// let w = PackedLinear::pack(&[1., 2., 3., 4., 5., 6.], 3, 2, Some(&[10., 20., 30.]));
/// let isa = Isa::get().unwrap();
/// let y = linear(isa, &[1., -1.], &[&w], Activation::None);
/// assert_eq!(y, [10. + 1. - 2., 20. + 3. - 4., 30. + 5. - 6.]);
/// assert_eq!(w.unpack(), [1., 2., 3., 4., 5., 6.]);
/// ```
#[derive(Clone)]
pub struct PackedLinear {
    out: usize,
    input: usize,
    /// Panels of `input` rows of [`PANEL`] columns.
    panels: Vec<f32>,
    /// Zeros where there is none, up to a whole panel.
    bias: Vec<f32>,
    has_bias: bool,
}

/// Its sizes; the numbers are too many to read.
impl fmt::Debug for PackedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedLinear({} to {}, bias: {})", self.input, self.out, self.has_bias)
    }
}

impl PackedLinear {
    /// # Panics
    /// If the slices are not of `out·input` and `out` numbers.
    pub fn pack(weight: &[f32], out: usize, input: usize, bias: Option<&[f32]>) -> Self {
        assert_eq!(weight.len(), out * input, "a weight of (out, in)");
        let padded = out.next_multiple_of(PANEL);
        let mut panels = vec![0.0; padded * input];
        let panel_len = (PANEL * input).max(1);
        panels.par_chunks_mut(panel_len).enumerate().for_each(|(p, panel)| {
            for column in 0..PANEL.min(out - p * PANEL) {
                let row = &weight[(p * PANEL + column) * input..][..input];
                for (k, &w) in row.iter().enumerate() {
                    panel[k * PANEL + column] = w;
                }
            }
        });
        let mut padded_bias = vec![0.0; padded];
        if let Some(bias) = bias {
            assert_eq!(bias.len(), out, "a bias of (out,)");
            padded_bias[..out].copy_from_slice(bias);
        }
        Self { out, input, panels, bias: padded_bias, has_bias: bias.is_some() }
    }

    /// The weight as it was, `(out, in)`.
    pub fn unpack(&self) -> Vec<f32> {
        let mut weight = vec![0.0; self.out * self.input];
        for (n, row) in weight.chunks_mut(self.input.max(1)).enumerate() {
            let panel = &self.panels[n / PANEL * PANEL * self.input..];
            for (k, w) in row.iter_mut().enumerate() {
                *w = panel[k * PANEL + n % PANEL];
            }
        }
        weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&[f32]> {
        self.has_bias.then(|| &self.bias[..self.out])
    }

    /// Width of the product.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Width of what is multiplied.
    pub fn input(&self) -> usize {
        self.input
    }
}

/// `activation(x·Wᵀ + b)` for each of `weights`, side by side: `(m, in)` to `(m, Σ out)`.
///
/// # Panics
/// If the weights are not all of one input width that divides `x`.
pub fn linear(isa: Isa, x: &[f32], weights: &[&PackedLinear], activation: Activation) -> Vec<f32> {
    let k = weights.first().map_or(1, |w| w.input.max(1));
    assert!(weights.iter().all(|w| w.input == k), "weights of one input width");
    assert_eq!(x.len() % k, 0, "whole rows");
    let (m, width) = (x.len() / k, weights.iter().map(|w| w.out).sum::<usize>());
    let mut out = Vec::with_capacity(m * width);
    product(isa, x, m, k, &panels(weights), activation, out.spare_capacity_mut(), width);
    // SAFETY: `product` has written all m·width numbers.
    unsafe { out.set_len(m * width) };
    out
}

/// One panel, with where its columns go.
struct Panel<'a> {
    weights: &'a [f32],
    bias: &'a [f32],
    /// Its first column in the output.
    column: usize,
    /// How many of its columns count.
    columns: usize,
}

fn panels<'a>(weights: &[&'a PackedLinear]) -> Vec<Panel<'a>> {
    let (mut panels, mut start) = (vec![], 0);
    for w in weights {
        for (p, bias) in w.bias.chunks(PANEL).enumerate() {
            let first = p * PANEL;
            panels.push(Panel {
                weights: &w.panels[first * w.input..][..PANEL * w.input],
                bias,
                column: start + first,
                columns: PANEL.min(w.out - first),
            });
        }
        start += w.out;
    }
    panels
}

/// Rows of the tiles: as even as can be, none higher than the registers allow.
pub(crate) fn tile_rows(m: usize, highest: usize) -> impl Iterator<Item = (usize, usize)> {
    let tiles = m.div_ceil(highest).max(1);
    let (height, higher) = (m / tiles, m % tiles);
    (0..tiles).map(move |i| (i * height + i.min(higher), height + usize::from(i < higher)))
}

/// Writes all of `out`, `(m, width)`.
#[allow(clippy::too_many_arguments)] // one caller, and no two of them belong together
fn product(
    isa: Isa,
    x: &[f32],
    m: usize,
    k: usize,
    panels: &[Panel],
    activation: Activation,
    out: &mut [MaybeUninit<f32>],
    width: usize,
) {
    assert!(x.len() == m * k && out.len() >= m * width);
    if m == 0 {
        return;
    }
    let highest = isa.tile_rows();
    let tiles: Vec<(usize, usize)> = tile_rows(m, highest).collect();
    let mut packed = Buffer::new(m * k);
    let into = Shared::new(packed.as_mut_ptr());
    tiles.par_iter().for_each(|&(row, height)| {
        // SAFETY: a tile's place is its own, and within m·k.
        let tile = unsafe { std::slice::from_raw_parts_mut(into.get().add(row * k), height * k) };
        for (i, x) in x[row * k..][..height * k].chunks_exact(k).enumerate() {
            for (j, &x) in x.iter().enumerate() {
                tile[j * height + i] = x;
            }
        }
    });
    let packed = Shared::new(packed.as_ptr().cast_mut());
    let out = Shared::new(out.as_mut_ptr().cast::<f32>());
    let blocks: Vec<&[(usize, usize)]> = tiles.chunks((ROW_BLOCK / highest).max(1)).collect();
    let tasks = blocks.len() * panels.len();
    (0..tasks).into_par_iter().for_each(|task| {
        let (block, panel) = (blocks[task / panels.len()], &panels[task % panels.len()]);
        let args = Block { packed, block, k, panel, activation, out, width };
        on_isa!(isa, block_times_panel, args: Block);
    });
}

/// Tiles of some rows, and a panel.
struct Block<'a> {
    packed: Shared<f32>,
    block: &'a [(usize, usize)],
    k: usize,
    panel: &'a Panel<'a>,
    activation: Activation,
    out: Shared<f32>,
    width: usize,
}

/// # Safety
/// The instructions of `L`; the tiles are packed, and their rows are in the output.
#[inline(always)]
unsafe fn block_times_panel<L: Lanes>(args: Block) {
    let Block { packed, block, k, panel, activation, out, width } = args;
    for start in (0..k).step_by(K_BLOCK) {
        let steps = K_BLOCK.min(k - start);
        let last = start + steps == k;
        for &(row, height) in block {
            // SAFETY: the tile and the panel have `steps` more steps from `start`; the output's
            // rows and columns are this task's alone, and within m·width.
            unsafe {
                let tile = Tile {
                    a: packed.get().add(row * k + start * height),
                    a_row: 1,
                    a_step: height,
                    b: panel.weights.as_ptr().add(start * PANEL),
                    steps,
                    c: out.get().add(row * width + panel.column),
                    c_row: width,
                    columns: panel.columns,
                    bias: if last { panel.bias.as_ptr() } else { std::ptr::null() },
                    go_on: start > 0,
                    activation,
                };
                L::tile(height, tile);
            }
        }
    }
}

/// A tile times a panel.
pub(crate) struct Tile {
    /// The tile: element (i, step) at `i·a_row + step·a_step`.
    pub(crate) a: *const f32,
    pub(crate) a_row: usize,
    pub(crate) a_step: usize,
    /// The panel: [`PANEL`] columns a step.
    pub(crate) b: *const f32,
    pub(crate) steps: usize,
    /// Where the product goes: rows `c_row` apart, of `columns` that count.
    pub(crate) c: *mut f32,
    pub(crate) c_row: usize,
    pub(crate) columns: usize,
    /// [`PANEL`] numbers to add at the end, or null.
    pub(crate) bias: *const f32,
    /// Adds to the sums that `c` holds.
    pub(crate) go_on: bool,
    pub(crate) activation: Activation,
}

/// `R` rows and `V` vectors of columns at a time, in registers.
///
/// # Safety
/// The instructions of `L`; the places that `t` tells of.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const V: usize>(t: &Tile) {
    // SAFETY: the caller's.
    unsafe {
        for first in (0..t.columns).step_by(V * L::N) {
            let here = |v: usize| (t.columns - first).saturating_sub(v * L::N).min(L::N);
            let mut sums = [[L::splat(0.0); V]; R];
            let (mut a, mut b) = (t.a, t.b.add(first));
            for _ in 0..t.steps {
                let mut columns = [L::splat(0.0); V];
                for (v, column) in columns.iter_mut().enumerate() {
                    *column = L::load(b.add(v * L::N));
                }
                for (i, row) in sums.iter_mut().enumerate() {
                    let x = L::splat(*a.add(i * t.a_row));
                    for (sum, &column) in row.iter_mut().zip(&columns) {
                        *sum = x.fma(column, *sum);
                    }
                }
                a = a.add(t.a_step);
                b = b.add(PANEL);
            }
            if t.go_on {
                for (i, row) in sums.iter_mut().enumerate() {
                    for (v, sum) in row.iter_mut().enumerate() {
                        let c = t.c.add(i * t.c_row + first + v * L::N);
                        *sum = L::load_first(c, here(v)).add(*sum);
                    }
                }
            }
            for (i, row) in sums.iter().enumerate() {
                for (v, &sum) in row.iter().enumerate() {
                    sum.store_first(t.c.add(i * t.c_row + first + v * L::N), here(v));
                }
            }
        }
        if !t.bias.is_null() {
            // From the nearest cache again: among the sums it would push them out of registers.
            for i in 0..R {
                for column in (0..t.columns).step_by(L::N) {
                    let (c, n) = (t.c.add(i * t.c_row + column), L::N.min(t.columns - column));
                    let y = L::load_first(c, n).add(L::load(t.bias.add(column)));
                    t.activation.apply(y).store_first(c, n);
                }
            }
        }
    }
}

/// [`tile`] for a height that is known at run time only.
macro_rules! tile_of_height {
    ($L:ty, $V:literal, $height:expr, $tile:expr, [$($R:literal)*]) => {
        match $height {
            $($R => tile::<$L, $R, $V>(&$tile),)*
            _ => unreachable!("tiles are at most so high"),
        }
    };
}

/// The tiles that fit a machine's registers.
pub(crate) trait Tiles: Sized {
    /// # Safety
    /// As [`tile`]'s; `1 ≤ height ≤` [`Isa::tile_rows`].
    unsafe fn tile(height: usize, tile: Tile);
}

impl Tiles for f32 {
    #[inline(always)]
    unsafe fn tile(height: usize, t: Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_height!(f32, 4, height, t, [1 2 3 4]) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Tiles for std::arch::x86_64::__m256 {
    #[inline(always)]
    unsafe fn tile(height: usize, t: Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_height!(Self, 2, height, t, [1 2 3 4 5 6]) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Tiles for std::arch::x86_64::__m512 {
    #[inline(always)]
    unsafe fn tile(height: usize, t: Tile) {
        // SAFETY: the caller's.
        unsafe { tile_of_height!(Self, 2, height, t, [1 2 3 4 5 6 7 8 9 10 11 12 13 14]) }
    }
}
