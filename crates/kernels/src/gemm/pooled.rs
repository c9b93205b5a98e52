//! `pool(x·Wᵀ + b)`: a product whose rows are pooled over sequences as soon as they are computed,
//! so that the whole product is never in memory.

use super::{
    element::Element,
    epilogue::Output,
    linear::{Block, Layer, LinearMap, Rows},
    pack::{PackedLinear, Panel},
    pack_input::PackedInput,
};
use crate::{
    activation::Activation,
    buffer::{ScratchBuf, SharedPtr},
    isa::Isa,
    parallel::parallel_for,
    simd::{LANES, Products, RegisterTile, SimdKernel, split_evenly},
};

/// How the rows of a sequence are pooled, for each column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPooling {
    /// The maximum.
    Max,
    /// `Σ ln(1 + max(x, 0))`.
    SumLog1p,
    /// `Σ ln(1 + ln(1 + max(x, 0)))`.
    SumLog1pTwice,
}

impl RowPooling {
    /// The value that the pooling of a sequence begins with.
    fn start(self) -> f32 {
        match self {
            Self::Max => f32::NEG_INFINITY,
            Self::SumLog1p | Self::SumLog1pTwice => 0.0,
        }
    }
}

/// The rows of `x·Wᵀ + b`, pooled over each sequence. Sequence `i` is the rows
/// `offsets[i]..offsets[i + 1]`. An empty sequence yields −∞ for [`RowPooling::Max`], else 0.
///
/// A row of the result is bit-identical whatever the other sequences are. A product that is NaN or
/// infinite makes the result of its sequence and column NaN or infinite.
///
/// # Shapes
/// `x`: `(N, input)`; `offsets`: `(B + 1,)`; returns `(B, out)`
///
/// # Examples
/// ```
/// use mha_kernels::{ComputeType, Isa, PackedLinear, RowPooling, Rows, pooled_linear};
///
/// let isa = Isa::get()?;
/// let w = PackedLinear::pack(isa, ComputeType::F32, &[1., -1.], 2, 1, None);
/// let x = Rows::F32(&[3., -2., 5.]);
/// let pooled = pooled_linear(isa, x, &w, &[0, 2, 3], RowPooling::Max);
/// assert_eq!(pooled, [3., 2., 5., -5.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If the weight is packed for another ISA, if `x` is not whole rows, or if the offsets decrease or
/// exceed the rows of `x`.
pub fn pooled_linear(
    isa: Isa,
    x: Rows,
    weight: &PackedLinear,
    offsets: &[usize],
    pooling: RowPooling,
) -> Vec<f32> {
    match x {
        Rows::F32(x) => pooled(isa, x, weight, offsets, pooling),
        Rows::Bf16(x) => pooled(isa, x, weight, offsets, pooling),
    }
}

fn pooled<T: Element>(
    isa: Isa,
    x: &[T],
    weight: &PackedLinear,
    offsets: &[usize],
    pooling: RowPooling,
) -> Vec<f32> {
    let map = LinearMap { weights: &[weight], activation: Activation::None, factor: None };
    map.check(isa);
    let (k, width) = (weight.input(), weight.out());
    assert!(k > 0 && x.len().is_multiple_of(k), "x: expected whole rows of {k} values");
    let n = x.len() / k;
    assert!(offsets.is_sorted(), "offsets: expected values that do not decrease");
    assert!(
        offsets.last().is_none_or(|&end| end <= n),
        "offsets: the last offset exceeds the number of rows of x"
    );
    let mut out = vec![pooling.start(); offsets.len().saturating_sub(1) * width];
    if out.is_empty() || n == 0 {
        return out;
    }
    let layer = Layer::new(isa, &map);
    let rows = PackedInput::pack(layer.input, x, k);
    let compute_type = weight.compute_type();
    let Products { max_mr, block: (mc_tiles, nc_panels), .. } = isa.products(compute_type);
    let tiles: Vec<_> = split_evenly(n, max_mr).collect();
    let row_blocks: Vec<&[(usize, usize)]> = tiles.chunks(mc_tiles).collect();
    // About eight tasks per thread if there are enough panels.
    let max_panels = layer.panels.len() / (8 * rayon::current_num_threads());
    let panel_blocks: Vec<&[Panel]> = layer.panels.chunks(max_panels.clamp(1, nc_panels)).collect();
    let out_ptr = SharedPtr::new(out.as_mut_ptr());
    // A task has all rows of its columns, so that rows are pooled in their order.
    parallel_for(panel_blocks.len(), |task| {
        let panels = panel_blocks[task];
        let first = panels[0].column;
        let columns: usize = panels.iter().map(|panel| panel.columns).sum();
        let mut product = ScratchBuf::new(mc_tiles * max_mr * columns);
        let mut sequence = 0;
        for tiles in &row_blocks {
            let (start, (last, last_mr)) = (tiles[0].0, tiles[tiles.len() - 1]);
            // The block writes to its rows and columns of the whole product.
            let data = product.as_mut_ptr().wrapping_sub(start * columns + first);
            let block = Block {
                rows: &rows,
                tiles,
                k_lanes: layer.k_lanes,
                panels,
                next_panel: None,
                activation: Activation::None,
                is_gated: false,
                out: Output { data: SharedPtr::new(data), row_stride: columns },
            };
            isa.run_products(compute_type, block);
            for row in start..last + last_mr {
                while offsets.get(sequence + 1).is_some_and(|&end| end <= row) {
                    sequence += 1;
                }
                if sequence + 1 >= offsets.len() || row < offsets[sequence] {
                    continue;
                }
                // SAFETY: the row has been written. The columns of the sequence belong to this
                // task.
                let (x, pooled) = unsafe {
                    let x = product.as_ptr().add((row - start) * columns);
                    let to = out_ptr.get().add(sequence * width + first);
                    (
                        std::slice::from_raw_parts(x, columns),
                        std::slice::from_raw_parts_mut(to, columns),
                    )
                };
                pool_row(isa, x, pooled, pooling);
            }
        }
    });
    out
}

/// Adds a row to the pooled rows of its sequence.
fn pool_row(isa: Isa, x: &[f32], pooled: &mut [f32], pooling: RowPooling) {
    let sum = |pooled: &mut [f32], f: fn(f32) -> f32| {
        for (sum, &x) in pooled.iter_mut().zip(x) {
            // Most values of a sparse model are not above 0.
            if x > 0.0 {
                *sum += f(x);
            } else if !x.is_finite() {
                *sum = f32::NAN;
            }
        }
    };
    match pooling {
        RowPooling::Max => {
            isa.run(Max { x, pooled });
        }
        RowPooling::SumLog1p => sum(pooled, libm::log1pf),
        RowPooling::SumLog1pTwice => sum(pooled, |x| libm::log1pf(libm::log1pf(x))),
    }
}

/// Replaces each pooled value by the maximum of it and of the value of the row, which has as many.
struct Max<'a> {
    x: &'a [f32],
    pooled: &'a mut [f32],
}

impl SimdKernel for Max<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Self { x, pooled } = self;
        for column in (0..x.len()).step_by(LANES) {
            let n = LANES.min(x.len() - column);
            // SAFETY: `column + n` is within both rows, which have the same length.
            unsafe {
                let x = V::load_partial(x.as_ptr().add(column), n);
                let to = pooled.as_mut_ptr().add(column);
                // `max` returns its second operand if one is NaN, so that NaN stays. The difference
                // is 0, or NaN if x is not finite.
                x.max(V::load_partial(to, n)).add(x.sub(x)).store_partial(to, n);
            }
        }
    }
}
