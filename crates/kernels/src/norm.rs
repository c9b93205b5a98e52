//! Residual and layer normalisation in one pass over memory:
//! `(z − mean(z)) / √(var(z) + ε) · weight + bias` for `z = x + y`, row by row.

use std::mem::MaybeUninit;

use crate::{
    Isa,
    lanes::{Lanes, on_isa},
    team::share_chunks,
};

/// Rows that a thread takes at a time.
pub(crate) const ROWS: usize = 16;

/// Layer normalisation of `x`, or of `x + y`, over rows of the width of `weight`.
///
/// The variance is that of the centred values, in a second pass over a row that is still in the
/// nearest cache.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, add_layer_norm};
///
/// let isa = Isa::get().unwrap();
/// let y = add_layer_norm(isa, &[1000., 1001., 1002.], None, &[1.; 3], &[0.; 3], 0.0);
/// assert!((y[2] - 1.5f32.sqrt()).abs() < 1e-6);
/// ```
///
/// # Panics
/// If the slices are not of one width, or `x` and `y` not of one length.
pub fn add_layer_norm(
    isa: Isa,
    x: &[f32],
    y: Option<&[f32]>,
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) -> Vec<f32> {
    let width = weight.len().max(1);
    assert_eq!(bias.len(), weight.len(), "one bias per weight");
    assert_eq!(x.len() % width, 0, "whole rows");
    assert!(y.is_none_or(|y| y.len() == x.len()), "x and y of one length");
    let mut out = Vec::with_capacity(x.len());
    let chunk = ROWS * width;
    share_chunks(&mut out.spare_capacity_mut()[..x.len()], chunk, |i, out| {
        let (start, end) = (i * chunk, i * chunk + out.len());
        let y = y.map(|y| &y[start..end]);
        let args = Args { x: &x[start..end], y, weight, bias, eps, out };
        on_isa!(isa, normalise, args: Args);
    });
    // SAFETY: every chunk of it has been written.
    unsafe { out.set_len(x.len()) };
    out
}

struct Args<'a> {
    x: &'a [f32],
    y: Option<&'a [f32]>,
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [MaybeUninit<f32>],
}

/// # Safety
/// The instructions of `L`; all slices of as many whole rows.
#[inline(always)]
unsafe fn normalise<L: Lanes>(args: Args) {
    let Args { x, y, weight, bias, eps, out } = args;
    let width = weight.len();
    for start in (0..x.len()).step_by(width) {
        // SAFETY: `start + column + n` is within the row, and so within every slice.
        unsafe {
            let row = out.as_mut_ptr().cast::<f32>().add(start);
            for column in (0..width).step_by(L::N) {
                let n = L::N.min(width - column);
                let mut z = L::load_first(x.as_ptr().add(start + column), n);
                if let Some(y) = y {
                    z = z.add(L::load_first(y.as_ptr().add(start + column), n));
                }
                z.store_first(row.add(column), n);
            }
            normalise_row::<L>(row, weight, bias, eps);
        }
    }
}

/// # Safety
/// The instructions of `L`; a row as wide as the weight and the bias.
#[inline(always)]
pub(crate) unsafe fn normalise_row<L: Lanes>(
    row: *mut f32,
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) {
    let width = weight.len();
    // SAFETY: `column + n` is within the row, and so within every slice.
    unsafe {
        let mut sum = L::splat(0.0);
        for column in (0..width).step_by(L::N) {
            sum = sum.add(L::load_first(row.add(column), L::N.min(width - column)));
        }
        let mean = L::splat(sum.sum() / width as f32);
        let mut squares = L::splat(0.0);
        for column in (0..width).step_by(L::N) {
            let (place, n) = (row.add(column), L::N.min(width - column));
            L::load_first(place, n).sub(mean).store_first(place, n);
            let centred = L::load_first(place, n); // zeros beyond the row
            squares = centred.fma(centred, squares);
        }
        let scale = L::splat(1.0 / (squares.sum() / width as f32 + eps).sqrt());
        for column in (0..width).step_by(L::N) {
            let (place, n) = (row.add(column), L::N.min(width - column));
            let weight = L::load_first(weight.as_ptr().add(column), n);
            let bias = L::load_first(bias.as_ptr().add(column), n);
            L::load_first(place, n).mul(scale).fma(weight, bias).store_first(place, n);
        }
    }
}
