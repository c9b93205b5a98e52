//! The epilogue of a matrix product: dequantises the accumulators, adds the bias, applies the
//! activation and stores the result. In a gated layer, the activation is applied to the gate, and
//! the product is multiplied by the activated gate.

use super::{element::Store, int8::RowQuantisation, pack::Panel};
use crate::{
    activation::Activation,
    buffer::SharedPtr,
    simd::{Dot, LANES, Tile, Vector},
};

/// The destination of a product.
#[derive(Clone, Copy)]
pub(crate) struct Output<T> {
    pub(crate) data: SharedPtr<T>,
    /// Elements from one row to the next.
    pub(crate) row_stride: usize,
}

/// Turns the accumulators of a finished tile into elements of the output. `gate` holds the
/// accumulators and the panel of a gated layer's gate; the activation is applied to the gate if
/// there is one, otherwise to the tile. `rows` has one element per row of the tile; only int8 reads
/// its values.
///
/// This is a pass over the tile in L1 rather than part of the microkernel, where it would spill the
/// accumulators from the registers.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `tile.c` and the accumulators of `gate` have a
/// row for each of `rows`, `tile.c_stride` apart; `to` is valid for as many output rows,
/// `row_stride` apart.
#[inline(always)]
pub(crate) unsafe fn epilogue<V: Vector, D: Dot<V>, T: Store>(
    tile: &Tile,
    panel: &Panel,
    gate: Option<(*const f32, &Panel)>,
    rows: &[RowQuantisation],
    activation: Activation,
    to: *mut T,
    row_stride: usize,
) {
    for (i, &row) in rows.iter().enumerate() {
        for column in (0..tile.columns).step_by(LANES) {
            let n = LANES.min(tile.columns - column);
            // SAFETY: upheld by the caller; a panel's columns are whole vectors.
            unsafe {
                let at = i * tile.c_stride + column;
                let acc = V::load_partial(tile.c.add(at), n);
                let y = product_and_bias::<V, D>(acc, row, panel, column);
                let y = match gate {
                    None => activation.apply(y, D::IS_ROUNDED),
                    Some((c, panel)) => {
                        let acc = V::load_partial(c.add(at), n);
                        let gate = product_and_bias::<V, D>(acc, row, panel, column);
                        activation.apply(gate, D::IS_ROUNDED).mul(y)
                    }
                };
                T::store::<V, D>(
                    y,
                    T::at(to.wrapping_add(i * row_stride), panel.column + column),
                    n,
                );
            }
        }
    }
}

/// The product plus the bias, from the accumulators `acc`.
///
/// This is not a closure, because a closure has no `#[inline(always)]`: code that is not inlined
/// lacks the target features of its caller, and then each intrinsic is a function call.
///
/// # Safety
/// As for [`dequantise`].
#[inline(always)]
unsafe fn product_and_bias<V: Vector, D: Dot<V>>(
    acc: V,
    row: RowQuantisation,
    panel: &Panel,
    column: usize,
) -> V {
    // SAFETY: upheld by the caller.
    unsafe {
        if D::IS_QUANTISED {
            dequantise::<V, D>(acc, row, panel, column)
        } else {
            acc.add(V::load(panel.bias.as_ptr().add(column)))
        }
    }
}

/// Dequantises i32 accumulators and adds the bias.
///
/// With the scale s and the zero point z of the row, and the scale w of the column:
/// `s·w·Σ (a − z)·b + bias = s·w·Σ a·b − z·s·(w·Σ b) + bias`. `column_sums` holds `Σ b`. With
/// [`Dot::HAS_SIGNED_INPUT`], the accumulators hold `Σ (a − 128)·b`.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `column` starts a whole vector of the panel.
#[inline(always)]
unsafe fn dequantise<V: Vector, D: Dot<V>>(
    acc: V,
    row: RowQuantisation,
    panel: &Panel,
    column: usize,
) -> V {
    // SAFETY: upheld by the caller. 128 · Σ b is below 2³¹, and exact in f32.
    unsafe {
        let load = |values: &[f32]| V::load(values.as_ptr().add(column));
        let (scales, sums) = (load(panel.scales), load(panel.column_sums));
        let acc = if D::HAS_SIGNED_INPUT {
            acc.add_i32(sums.mul(V::splat(128.0)).f32_to_i32())
        } else {
            acc
        };
        let scale = V::splat(row.scale).mul(scales);
        let offset = V::splat(-row.zero_point * row.scale).fma(sums.mul(scales), load(panel.bias));
        acc.i32_to_f32().fma(scale, offset)
    }
}
