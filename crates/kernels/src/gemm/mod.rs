//! `activation(x·Wᵀ + b)` with W packed beforehand.
//!
//! W, `(out, in)` as a checkpoint has it, is stored in panels of [`PANEL`] columns of the product;
//! the rows of x are brought into the weight's [`Format`]. Both are words of 32 bits: one number
//! of f32, two of bf16 or four of 8 bits. So all formats share their loops, and differ in what two
//! words give ([`Dot`]). A tile of some rows times a panel stays in registers.
//!
//! An element of the product is a sum over blocks of k, in order, each a sum of fused
//! multiply-adds, in order: the error grows with the block and not with k. So it is the same to the
//! bit whatever the other rows are, and on whatever threads; integers are exact anyway.

mod dot;
mod packed;
mod quantise;
mod rows;
mod tile;
mod work;

use std::mem::MaybeUninit;

use rayon::prelude::*;

pub(crate) use dot::{Dot, F32};
use packed::Panel;
pub use packed::{Format, PackedLinear};
pub(crate) use packed::{PANEL, bf16};
use rows::Rows;
pub(crate) use tile::{Tile, Tiles, tile_rows};
pub(crate) use work::{Work, run};

use crate::{Isa, buffers::Shared, math::Activation};

/// Words of k summed by themselves, before the next rows: a panel's part of them stays near.
const K_BLOCK: usize = 384;
/// Rows that are done with one panel before the next: they stay in the second cache.
const ROW_BLOCK: usize = 168;

/// `activation(x·Wᵀ + b)` for each of `weights`, side by side: `(m, in)` to `(m, Σ out)`.
///
/// # Panics
/// If the weights are not all of one format and one input width that divides `x`.
pub fn linear(isa: Isa, x: &[f32], weights: &[&PackedLinear], activation: Activation) -> Vec<f32> {
    let Some(first) = weights.first() else {
        return vec![];
    };
    let k = first.input().max(1);
    let alike = |w: &&PackedLinear| w.input() == first.input() && w.format() == first.format();
    assert!(weights.iter().all(alike), "weights of one format and input width");
    assert_eq!(x.len() % k, 0, "whole rows");
    let (m, width) = (x.len() / k, weights.iter().map(|w| w.out()).sum::<usize>());
    let mut panels = vec![];
    let mut column = 0;
    for w in weights {
        panels.extend(w.panels(column));
        column += w.out();
    }
    let mut out = Vec::with_capacity(m * width);
    product(isa, first, x, &panels, activation, &mut out.spare_capacity_mut()[..m * width], width);
    // SAFETY: `product` has written all m·width numbers.
    unsafe { out.set_len(m * width) };
    out
}

/// Writes all of `out`, rows of `width`.
fn product(
    isa: Isa,
    like: &PackedLinear,
    x: &[f32],
    panels: &[Panel],
    activation: Activation,
    out: &mut [MaybeUninit<f32>],
    width: usize,
) {
    if out.is_empty() {
        return;
    }
    let (format, words) = (like.format(), like.words());
    let rows = Rows::new(isa, format, x, like.input());
    let highest = isa.tile_rows(format);
    let tiles: Vec<(usize, usize)> = tile_rows(out.len() / width, highest).collect();
    let out = Shared::new(out.as_mut_ptr().cast::<f32>());
    let blocks: Vec<&[(usize, usize)]> = tiles.chunks((ROW_BLOCK / highest).max(1)).collect();
    let tasks = blocks.len() * panels.len();
    (0..tasks).into_par_iter().for_each(|task| {
        let (block, panel) = (blocks[task / panels.len()], &panels[task % panels.len()]);
        let work = Block { rows: &rows, block, words, panel, activation, out, width };
        run(isa, format, work);
    });
}

/// Tiles of some rows, and a panel.
struct Block<'a> {
    rows: &'a Rows,
    block: &'a [(usize, usize)],
    words: usize,
    panel: &'a Panel<'a>,
    activation: Activation,
    out: Shared<f32>,
    width: usize,
}

/// Rows and panel are in one format, and the rows are in the output.
impl Work for Block<'_> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        let Block { rows, block, words, panel, activation, out, width } = self;
        for start in (0..words).step_by(K_BLOCK) {
            let steps = K_BLOCK.min(words - start);
            let last = start + steps == words;
            for &(row, height) in block {
                // SAFETY: the rows and the panel have `steps` more words from `start`; the output's
                // rows and columns are this task's alone, and within it.
                unsafe {
                    let tile = Tile {
                        a: rows.row(row).add(start),
                        a_row: rows.stride(),
                        b: panel.words.as_ptr().add(start * PANEL),
                        steps,
                        c: out.get().add(row * width + panel.column),
                        c_row: width,
                        columns: panel.columns,
                        go_on: start > 0,
                    };
                    L::tile::<D>(height, &tile);
                    if last {
                        tile.finish::<L, D>(panel, rows.quants(row, height), activation);
                    }
                }
            }
        }
    }
}
