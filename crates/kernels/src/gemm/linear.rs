//! `activation(x·Wᵀ + b)`: the loops around the microkernel.
//!
//! The loop nest is that of BLIS with the weight packed beforehand. A task is a block of row tiles
//! (mc) times a block of panels (nc). Within it, k is split into ranges of kc lanes; for each
//! range, each panel is multiplied with each tile. The epilogue runs after the last range.

use super::{
    bf16x3::Bf16x3,
    element::{Element, Store, WidenedBf16},
    epilogue::{Output, epilogue},
    pack::{PackedLinear, Panel},
    pack_input::{InputFormat, PackedInput},
};
use crate::{
    activation::Activation,
    buffer::{ScratchBuf, SharedPtr},
    compute_type::ComputeType,
    isa::Isa,
    parallel::parallel_for,
    simd::{Microkernel, ProductKernel, RegisterTile, Tile, bf16x3, prefetch_rows, split_evenly},
};

/// A linear layer, `activation(x·Wᵀ + b)`, or a gated one, `activation(x·Wᵀ + b) ⊙ (x·Fᵀ + c)`.
/// With several weights, which have the same input width and compute type, the products are
/// concatenated along the columns.
#[derive(Clone, Copy, Debug)]
pub struct LinearMap<'a> {
    /// The weights, at least one.
    pub weights: &'a [&'a PackedLinear],
    /// The function applied to each element of the products.
    pub activation: Activation,
    /// F and c of a gated layer, which has one weight of the same shape.
    pub factor: Option<&'a PackedLinear>,
}

impl LinearMap<'_> {
    fn input(&self) -> usize {
        self.weights[0].input()
    }

    fn out(&self) -> usize {
        self.weights.iter().map(|w| w.out()).sum()
    }

    fn compute_type(&self) -> ComputeType {
        self.weights[0].compute_type()
    }

    /// # Panics
    /// If the weights differ in compute type or input width, or are packed for another ISA, or if
    /// a factor does not have the shape of the only weight.
    pub(super) fn check(&self, isa: Isa) {
        let alike = |w: &&PackedLinear| {
            w.input() == self.input() && w.compute_type() == self.compute_type()
        };
        let all = || self.weights.iter().copied().chain(self.factor);
        assert!(
            self.factor.is_none_or(|factor| self.weights.len() == 1 && factor.out() == self.out()),
            "factor: expected exactly one weight, and a factor of its output width"
        );
        assert!(
            all().all(|w| alike(&w)),
            "weights of one layer: expected one compute type and one input width"
        );
        assert!(
            all().all(|w| w.is_for(isa)),
            "weights are packed for another instruction set: expected {}",
            isa.name()
        );
    }

    /// The panels of the weights. In a gated layer, each is followed by the factor's panel for the
    /// same columns.
    fn panels(&self) -> Vec<Panel<'_>> {
        if let Some(factor) = self.factor {
            let pairs = self.weights[0].panels(0).zip(factor.panels(0));
            return pairs.flat_map(<[_; 2]>::from).collect();
        }
        let starts = self.weights.iter().scan(0, |start, w| {
            *start += w.out();
            Some(*start - w.out())
        });
        self.weights.iter().zip(starts).flat_map(|(w, start)| w.panels(start)).collect()
    }
}

/// The input rows of [`chain_f32`] and [`chain_bf16`].
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
}

/// `activation(x·Wᵀ + b)` for each of `weights`, with the products concatenated along the columns:
/// `(m, input)` to `(m, Σ out)`.
///
/// # Panics
/// As [`chain_f32`] with one layer.
pub fn linear(isa: Isa, x: &[f32], weights: &[&PackedLinear], activation: Activation) -> Vec<f32> {
    chain_f32(isa, Rows::F32(x), &[LinearMap { weights, activation, factor: None }])
}

/// Applies linear layers in sequence, `(m, input)` to `(m, out)` in f32. Intermediate results stay
/// in scratch buffers, in the format that the next layer reads.
///
/// # Examples
/// ```
/// use mha_kernels::{Activation, ComputeType, Isa, LinearMap, PackedLinear, Rows, chain_f32};
///
/// let isa = Isa::get()?;
/// let double = PackedLinear::pack(isa, ComputeType::F32, &[2.], 1, 1, None);
/// let weights = &[&double];
/// let relu = LinearMap { weights, activation: Activation::Relu, factor: None };
/// assert_eq!(chain_f32(isa, Rows::F32(&[3., -1.]), &[relu, relu]), [12., 0.]);
/// // A gated layer: relu(2·3) · (2·3)
/// let gated = LinearMap { factor: Some(&double), ..relu };
/// assert_eq!(chain_f32(isa, Rows::F32(&[3., -1.]), &[gated]), [36., 0.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// - If there are no layers, or a layer has no weights.
/// - If the weights of a layer differ in compute type or input width, or are packed for another
///   ISA.
/// - If a layer with a factor has several weights, or a factor of another output width.
/// - If `x` is not whole rows of the first input width.
/// - If consecutive layers differ in compute type, or an output width is not the next input width.
pub fn chain_f32(isa: Isa, x: Rows, layers: &[LinearMap]) -> Vec<f32> {
    match x {
        Rows::F32(x) => chain(isa, x, layers),
        Rows::Bf16(x) => chain(isa, x, layers),
    }
}

/// [`chain_f32`] with the output rounded to bf16, as bits.
///
/// # Panics
/// As [`chain_f32`].
pub fn chain_bf16(isa: Isa, x: Rows, layers: &[LinearMap]) -> Vec<u16> {
    match x {
        Rows::F32(x) => chain(isa, x, layers),
        Rows::Bf16(x) => chain(isa, x, layers),
    }
}

fn chain<T: Element, U: Store>(isa: Isa, x: &[T], layers: &[LinearMap]) -> Vec<U> {
    assert!(
        layers.iter().all(|layer| !layer.weights.is_empty()),
        "layers: expected at least one weight each"
    );
    layers.iter().for_each(|layer| layer.check(isa));
    let fit =
        |w: &[LinearMap]| w[0].out() == w[1].input() && w[0].compute_type() == w[1].compute_type();
    assert!(
        layers.windows(2).all(fit),
        "layers: expected one compute type, and each output width to be the next input width"
    );
    let (Some(first), Some(last)) = (layers.first(), layers.last()) else {
        panic!("layers: expected at least one")
    };
    let k = first.input();
    assert!(x.len().is_multiple_of(k), "x: expected whole rows of {k} values");
    let (m, width) = (x.len().checked_div(k).unwrap_or(0), last.out());
    let mut out = Vec::with_capacity(m * width);
    if m * width > 0 {
        // A raw pointer, because the buffer is uninitialised.
        let output = Output { data: SharedPtr::new(out.as_mut_ptr()), row_stride: width };
        let layers: Vec<Layer> = layers.iter().map(|layer| Layer::new(isa, layer)).collect();
        let tiles: Vec<_> = split_evenly(m, isa.products(first.compute_type()).max_mr).collect();
        run_layers(&layers, x, &tiles, output);
    }
    // SAFETY: every element has been written.
    unsafe { out.set_len(m * width) };
    out
}

/// A [`LinearMap`], prepared to run.
pub(super) struct Layer<'a> {
    pub(super) input: InputFormat,
    /// k in packed lanes, as in [`PackedLinear`].
    pub(super) k_lanes: usize,
    pub(super) panels: Vec<Panel<'a>>,
    activation: Activation,
    /// Whether the panels are pairs of a gate and its factor.
    is_gated: bool,
}

impl<'a> Layer<'a> {
    pub(super) fn new(isa: Isa, layer: &'a LinearMap) -> Self {
        let (compute_type, k_lanes) = (layer.compute_type(), layer.weights[0].k_lanes());
        let lanes = k_lanes * isa.products(compute_type).input_lanes;
        let input = InputFormat { isa, compute_type, k: layer.input(), lanes };
        let is_gated = layer.factor.is_some();
        Self { input, k_lanes, panels: layer.panels(), activation: layer.activation, is_gated }
    }

    /// Multiplies all rows. `tiles` are the first row and mr of each tile.
    fn run<T: Store>(&self, rows: &PackedInput, tiles: &[(usize, usize)], out: Output<T>) {
        let InputFormat { isa, compute_type, .. } = self.input;
        let (mc_tiles, nc_panels) = isa.products(compute_type).block;
        let row_blocks: Vec<_> = split_evenly(tiles.len(), mc_tiles)
            .map(|(first, n)| &tiles[first..first + n])
            .collect();
        // About eight tasks per thread if there are enough panels, so that all threads end at about
        // the same time.
        let max_panels = row_blocks.len() * self.panels.len() / (8 * rayon::current_num_threads());
        let max_panels = max_panels.clamp(1, nc_panels);
        let max_panels = if self.is_gated { max_panels.next_multiple_of(2) } else { max_panels };
        let panel_blocks: Vec<_> = self.panels.chunks(max_panels).collect();
        parallel_for(row_blocks.len() * panel_blocks.len(), |task| {
            let panels_of =
                |task| panel_blocks.get(task / row_blocks.len()).copied().unwrap_or_default();
            let block = Block {
                rows,
                tiles: row_blocks[task % row_blocks.len()],
                k_lanes: self.k_lanes,
                panels: panels_of(task),
                next_panel: panels_of(task + 1).first(),
                activation: self.activation,
                is_gated: self.is_gated,
                out,
            };
            isa.run_products(compute_type, block);
        });
    }
}

/// Runs the layers in sequence. A layer writes its output in the packed format of the next layer if
/// the epilogue supports the format; otherwise the output is packed in a separate pass.
fn run_layers<T: Element, U: Store>(
    layers: &[Layer],
    x: &[T],
    tiles: &[(usize, usize)],
    out: Output<U>,
) {
    let InputFormat { isa, compute_type, k, .. } = layers[0].input;
    let m = x.len() / k;
    let products = isa.products(compute_type);
    let mut rows = PackedInput::pack(layers[0].input, x, k);
    for pair in layers.windows(2) {
        let (layer, next) = (&pair[0], pair[1].input);
        let whole_blocks = || layer.panels.iter().all(|p| p.column.is_multiple_of(bf16x3::BLOCK));
        rows = match compute_type {
            ComputeType::Bf16 if products.input_lanes == 2 => {
                PackedInput::from_packed::<WidenedBf16>(next, m, |out| {
                    layer.run(&rows, tiles, out);
                })
            }
            ComputeType::Bf16 => {
                PackedInput::from_packed::<u16>(next, m, |out| layer.run(&rows, tiles, out))
            }
            ComputeType::F32 if !products.is_bf16x3 => {
                PackedInput::from_packed::<f32>(next, m, |out| layer.run(&rows, tiles, out))
            }
            ComputeType::F32 if whole_blocks() => {
                PackedInput::from_packed::<Bf16x3>(next, m, |out| {
                    layer.run(&rows, tiles, out);
                })
            }
            _ => PackedInput::from_f32(next, m, |out| layer.run(&rows, tiles, out)),
        };
    }
    layers[layers.len() - 1].run(&rows, tiles, out);
}

/// A block of row tiles times a block of panels. The rows and the panels have the same packed
/// format, and the tiles are within the rows of the output.
pub(super) struct Block<'a, T> {
    pub(super) rows: &'a PackedInput,
    pub(super) tiles: &'a [(usize, usize)],
    pub(super) k_lanes: usize,
    pub(super) panels: &'a [Panel<'a>],
    /// The first panel of the next task, to be prefetched.
    pub(super) next_panel: Option<&'a Panel<'a>>,
    pub(super) activation: Activation,
    pub(super) is_gated: bool,
    pub(super) out: Output<T>,
}

impl<T: Store> ProductKernel for Block<'_, T> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self) {
        debug_assert!(self.panels.iter().all(|panel| panel.nr == V::NR));
        let Block { rows, tiles, k_lanes, panels, next_panel, activation, is_gated, out } = self;
        // The accumulators have a scratch buffer, even if the output is f32: the rows of the buffer
        // are adjacent, so that the epilogue finds them in L1. If k has several ranges or the layer
        // is gated, the buffer holds the accumulators of all tiles, otherwise those of one tile.
        // The first tile has the most rows.
        let ((first_row, max_mr), (last_row, last_mr)) = (tiles[0], tiles[tiles.len() - 1]);
        let keeps_all = k_lanes > D::KC || is_gated;
        let acc_rows =
            if keeps_all { (last_row + last_mr - first_row) * panels.len() } else { max_mr };
        let mut acc = ScratchBuf::new(acc_rows * V::NR);
        let acc = acc.as_mut_ptr();
        let range = |start: usize| start..k_lanes.min(start + D::KC);
        for start in (0..k_lanes.max(1)).step_by(D::KC) {
            let k_range = range(start);
            let is_last = k_range.end == k_lanes;
            for (p, panel) in panels.iter().enumerate() {
                let b = panel.k_range(k_range.clone());
                let next = match panels.get(p + 1) {
                    Some(next) => next.k_range(k_range.clone()),
                    None if is_last => next_panel.map_or(&[][..], |next| next.k_range(range(0))),
                    None => panels[0].k_range(range(k_range.end)),
                };
                // Each tile prefetches an equal part of the next panel.
                let prefetch_start = |i: usize| next.len() * i / tiles.len();
                for (i, &(row, mr)) in tiles.iter().enumerate() {
                    // SAFETY: the rows and the panel have the lanes of `k_range`. The output's rows
                    // and columns are within the output and belong to this task, and so do the
                    // accumulators.
                    unsafe {
                        let to = out.data.get().wrapping_add(row * out.row_stride);
                        let tile_start = T::at(to, panel.column);
                        let kept = |p: usize| {
                            let rows_before = (row - first_row) * panels.len() + p * mr;
                            acc.add(rows_before * V::NR)
                        };
                        if is_last {
                            let tile_end = T::at(to, panel.column + panel.columns);
                            let width = tile_end.offset_from_unsigned(tile_start);
                            prefetch_rows(tile_start, out.row_stride, [mr, width]);
                        }
                        let tile = Tile {
                            a: rows.row(row).add(start * D::INPUT_LANES),
                            a_stride: rows.row_stride(),
                            b: b.as_ptr(),
                            terms: panel.terms,
                            k_lanes: k_range.len(),
                            prefetch: &next[prefetch_start(i)..prefetch_start(i + 1)],
                            c: if keeps_all { kept(p) } else { acc },
                            c_stride: V::NR,
                            columns: panel.columns,
                            accumulate: start > 0,
                        };
                        D::multiply_tile(mr, &tile);
                        let is_gate = is_gated && p.is_multiple_of(2);
                        if is_last && !is_gate {
                            let quantisation = rows.quantisation(row, mr);
                            let gate = is_gated.then(|| (kept(p - 1).cast_const(), &panels[p - 1]));
                            epilogue::<V, D, T>(
                                &tile,
                                panel,
                                gate,
                                quantisation,
                                activation,
                                to,
                                out.row_stride,
                            );
                        }
                    }
                }
            }
        }
    }
}
