//! `activation(x·Wᵀ + b)` with W packed beforehand.
//!
//! W, `(out, in)` as a checkpoint has it, is stored in panels of [`PANEL`] columns of the product;
//! the rows of x are brought into the weight's [`Format`]. Both are words of 32 bits: one number
//! of f32, two of bf16 or four of 8 bits. So all formats share their loops, and differ in what two
//! words give ([`Dot`]). A tile of some rows times a panel stays in registers.
//!
//! An element of the product is a sum over blocks of k, in order, each a sum of fused
//! multiply-adds, in order: the error grows with the block and not with k. So it is the same to the
//! bit whatever the other rows are, and on whatever threads; integers are exact anyway. AMX has an
//! order of its own, likewise the same for all: sums of 32 products of bf16, one after another, which
//! are also what it makes those of f32 of ([`thirds`]).

#[cfg(target_arch = "x86_64")]
mod amx;
mod dot;
mod packed;
mod quantise;
mod rows;
pub(crate) mod thirds;
mod tile;
mod work;

pub(crate) use dot::Dot;
use packed::Panel;
pub use packed::{Format, PackedLinear};
pub(crate) use packed::{PANEL, bf16};
use rows::Rows;
use thirds::{OF_BLOCK, Third};
pub(crate) use tile::{Tile, Tiles, tile_rows};
pub(crate) use work::{Work, run};

use crate::{
    Isa,
    buffers::{Buffer, Shared},
    lanes::prefetch_rows,
    math::Activation,
    number::{Element, Number, Written},
    team::share,
};

/// Tiles that are done with one panel before the next: their rows stay in the second cache.
const TILES_AT_ONCE: usize = 12;
/// Panels that share a part of the rows while it is near.
const PANELS_AT_ONCE: usize = 4;
/// The same of [`thirds`], whose rows are one and a half times as long and whose tiles are higher; AMX
/// asks for a panel while it uses the one before, so that more of them may share the rows.
const TILES_OF_THIRDS_AT_ONCE: usize = 6;
const PANELS_OF_THIRDS_AT_ONCE: usize = 24;

/// `activation(x·Wᵀ + b)` for each of some weights of one format and input width, side by side.
#[derive(Clone, Copy, Debug)]
pub struct LinearMap<'a> {
    /// The weights.
    pub weights: &'a [&'a PackedLinear],
    /// What is applied to the products.
    pub activation: Activation,
}

impl LinearMap<'_> {
    fn input(&self) -> usize {
        self.weights[0].input()
    }

    fn out(&self) -> usize {
        self.weights.iter().map(|w| w.out()).sum()
    }

    fn format(&self) -> Format {
        self.weights[0].format()
    }

    /// # Panics
    /// If the weights are not of one format and input width, or not packed for such an `isa`.
    fn check(&self, isa: Isa) {
        let alike = |w: &&PackedLinear| w.input() == self.input() && w.format() == self.format();
        assert!(self.weights.iter().all(alike), "weights of one format and input width");
        assert!(
            self.weights.iter().all(|w| w.is_for(isa)),
            "weights packed for these instructions"
        );
    }

    fn panels(&self) -> Vec<Panel<'_>> {
        let starts = self.weights.iter().scan(0, |start, w| {
            *start += w.out();
            Some(*start - w.out())
        });
        self.weights.iter().zip(starts).flat_map(|(w, start)| w.panels(start)).collect()
    }
}

/// `activation(x·Wᵀ + b)` for each of `weights`, side by side: `(m, in)` to `(m, Σ out)`.
///
/// # Panics
/// If the weights are not all of one format and one input width that divides `x`, or were packed for
/// other instructions.
pub fn linear(isa: Isa, x: &[f32], weights: &[&PackedLinear], activation: Activation) -> Vec<f32> {
    chain(isa, x, &[LinearMap { weights, activation }])
}

/// One map after another; what lies between them is in memory that is used again.
///
/// # Examples
/// ```
/// use mha_kernels::{Activation, Format, Isa, LinearMap, PackedLinear, chain};
///
/// let isa = Isa::get()?;
/// let double = PackedLinear::pack(isa, Format::F32, &[2.], 1, 1, None);
/// let double = LinearMap { weights: &[&double], activation: Activation::Relu };
/// let y: Vec<f32> = chain(isa, &[3f32, -1.], &[double, double]);
/// assert_eq!(y, [12., 0.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// As [`linear()`]; if there are no maps, or they do not fit one after another.
pub fn chain<T: Number, U: Number>(isa: Isa, x: &[T], maps: &[LinearMap]) -> Vec<U> {
    assert!(maps.iter().all(|map| !map.weights.is_empty()), "maps of something");
    maps.iter().for_each(|map| map.check(isa));
    let fit = |w: &[LinearMap]| w[0].out() == w[1].input() && w[0].format() == w[1].format();
    assert!(maps.windows(2).all(fit), "maps that fit one after another");
    let (Some(first), Some(last)) = (maps.first(), maps.last()) else { panic!("maps to run") };
    let k = first.input().max(1);
    assert_eq!(x.len() % k, 0, "whole rows");
    let (m, width) = (x.len() / k, last.out());
    let mut out = Vec::with_capacity(m * width);
    if m * width > 0 {
        // Not a reference: the numbers are not there yet.
        let product = Product { data: Shared::new(out.as_mut_ptr()), stride: width };
        let steps: Vec<Step> = maps.iter().map(|map| Step::new(isa, map)).collect();
        let tiles: Vec<_> = tile_rows(m, isa.tile_rows(first.format())).collect();
        run_chain(&steps, x, &tiles, product);
    }
    // SAFETY: all of its rows have been written.
    unsafe { out.set_len(m * width) };
    out
}

/// Where a product's rows go, in numbers that the next of a row is away.
#[derive(Clone, Copy)]
struct Product<T> {
    data: Shared<T>,
    stride: usize,
}

/// A map of a chain.
struct Step<'a> {
    isa: Isa,
    format: Format,
    input: usize,
    words: usize,
    panels: Vec<Panel<'a>>,
    activation: Activation,
}

impl<'a> Step<'a> {
    fn new(isa: Isa, map: &'a LinearMap) -> Self {
        Self {
            isa,
            format: map.format(),
            input: map.input(),
            words: map.weights[0].words(),
            panels: map.panels(),
            activation: map.activation,
        }
    }

    /// All rows through the map, each thread some panels of it.
    fn run<T: Written>(&self, rows: &Rows, tiles: &[(usize, usize)], out: Product<T>) {
        let (tiles_at_once, panels_at_once) = match self.isa.has_thirds(self.format) {
            true => (TILES_OF_THIRDS_AT_ONCE, PANELS_OF_THIRDS_AT_ONCE),
            false => (TILES_AT_ONCE, PANELS_AT_ONCE),
        };
        let blocks: Vec<_> = tile_rows(tiles.len(), tiles_at_once)
            .map(|(first, n)| &tiles[first..first + n])
            .collect();
        // Several times as many tasks as threads, so that all end at about the same time.
        let most = blocks.len() * self.panels.len() / (8 * rayon::current_num_threads());
        let panels: Vec<_> = self.panels.chunks(most.clamp(1, panels_at_once)).collect();
        share(blocks.len() * panels.len(), |task| {
            let of_task = |task| panels.get(task / blocks.len()).copied().unwrap_or_default();
            let (tiles, panels, next) =
                (blocks[task % blocks.len()], of_task(task), of_task(task + 1).first());
            let (words, activation) = (self.words, self.activation);
            run(self.isa, self.format, Block { rows, tiles, words, panels, next, activation, out });
        });
    }
}

/// Through one map and then the next.
fn run_chain<T: Element, U: Written>(
    steps: &[Step],
    x: &[T],
    tiles: &[(usize, usize)],
    out: Product<U>,
) {
    let m = x.len() / steps[0].input;
    let mut rows = Rows::of(&steps[0], x, steps[0].input);
    for steps in steps.windows(2) {
        let (step, next) = (&steps[0], &steps[1]);
        rows = match next.format {
            Format::Bf16 => Rows::written::<u16>(next, m, |out| step.run(&rows, tiles, out)),
            Format::F32 if !next.isa.has_thirds(Format::F32) => {
                Rows::written::<f32>(next, m, |out| step.run(&rows, tiles, out))
            }
            Format::F32 if step.panels.iter().all(|p| p.column.is_multiple_of(OF_BLOCK)) => {
                Rows::written::<Third>(next, m, |out| step.run(&rows, tiles, out))
            }
            _ => Rows::made(next, m, |out| step.run(&rows, tiles, out)),
        };
    }
    steps[steps.len() - 1].run(&rows, tiles, out);
}

/// Tiles of some rows, and some panels.
struct Block<'a, T> {
    rows: &'a Rows,
    tiles: &'a [(usize, usize)],
    words: usize,
    panels: &'a [Panel<'a>],
    /// What probably comes after these.
    next: Option<&'a Panel<'a>>,
    activation: Activation,
    out: Product<T>,
}

/// Rows and panels are in one format, and the rows are in the output.
impl<T: Written> Work for Block<'_, T> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        let Block { rows, tiles, words, panels, next, activation, out } = self;
        // Sums that are not yet elements, where they are not written in place: of all tiles if there is
        // more of k to come, else a tile's, of which the first is the highest.
        let ((first, highest), (last, height)) = (tiles[0], tiles[tiles.len() - 1]);
        let of_all = words > D::K_BLOCK;
        let sums_rows = if of_all { (last + height - first) * panels.len() } else { highest };
        let in_place = D::IN_PLACE && T::SUMS;
        let mut sums = (!in_place).then(|| Buffer::new(sums_rows * PANEL));
        let sums = sums.as_mut().map_or(std::ptr::null_mut(), Buffer::as_mut_ptr);
        let part = |start: usize| start..words.min(start + D::K_BLOCK);
        for start in (0..words.max(1)).step_by(D::K_BLOCK) {
            let now = part(start);
            let last = now.end == words;
            for (p, panel) in panels.iter().enumerate() {
                let b = panel.part(now.clone());
                let next = match panels.get(p + 1) {
                    Some(next) => next.part(now.clone()),
                    None if last => next.map_or(&[][..], |next| next.part(part(0))),
                    None => panels[0].part(part(now.end)),
                };
                let share = |i: usize| next.len() * i / tiles.len();
                for (i, &(row, height)) in tiles.iter().enumerate() {
                    // SAFETY: the rows and the panel have the words of `now`; the output's
                    // rows and columns are this task's alone, and within it; so are those of the sums.
                    unsafe {
                        let to = out.data.get().add(row * out.stride);
                        let here = T::at(to, panel.column);
                        let (c, c_row) = match (in_place, of_all) {
                            (true, _) => (here.cast(), out.stride),
                            (_, true) => {
                                let before = (row - first) * panels.len() + p * height;
                                (sums.add(before * PANEL), PANEL)
                            }
                            _ => (sums, PANEL),
                        };
                        if !in_place && last {
                            let end = T::at(to, panel.column + panel.columns);
                            let width = end.offset_from_unsigned(here);
                            prefetch_rows(here, out.stride, [height, width]);
                        }
                        let tile = Tile {
                            a: rows.row(row).add(start),
                            a_row: rows.stride(),
                            b: b.as_ptr(),
                            thirds: panel.thirds,
                            steps: now.len(),
                            next: &next[share(i)..share(i + 1)],
                            c,
                            c_row,
                            columns: panel.columns,
                            go_on: start > 0,
                        };
                        D::tile(height, &tile);
                        if last {
                            let quants = rows.quants(row, height);
                            tile.finish::<L, D, T>(panel, quants, activation, to, out.stride);
                        }
                    }
                }
            }
        }
    }
}
