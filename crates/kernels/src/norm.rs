//! Residual and layer normalisation in one pass over memory:
//! `(z − mean(z)) / √(var(z) + ε) · weight + bias` with `z = x + y`, row by row.
//!
//! Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.

use std::mem::MaybeUninit;

use crate::{
    isa::Isa,
    parallel::parallel_chunks,
    simd::{Vector, dispatch_simd},
};

/// Rows that a thread takes at a time.
pub(crate) const ROWS_PER_CHUNK: usize = 16;

/// Layer normalisation of `x`, or of `x + y`, over rows as wide as `weight`.
///
/// The variance is computed from the centred values, in a second pass over the row while it is in
/// L1.
///
/// # Shapes
/// `x`, `y`: `(N, E)`; `weight`, `bias`: `(E,)`; returns `(N, E)`.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, add_layer_norm};
///
/// let isa = Isa::get()?;
/// let y = add_layer_norm(isa, &[1000., 1001., 1002.], None, &[1.; 3], &[0.; 3], 0.0);
/// assert!((y[2] - 1.5f32.sqrt()).abs() < 1e-6);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If the lengths of `weight` and `bias` or of `x` and `y` differ, or if `x` is not whole rows.
pub fn add_layer_norm(
    isa: Isa,
    x: &[f32],
    y: Option<&[f32]>,
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) -> Vec<f32> {
    let width = weight.len();
    assert_eq!(bias.len(), weight.len(), "bias: expected the length of weight");
    // `n.is_multiple_of(0)` is true only for n = 0, so a width of 0 requires an empty x.
    assert!(x.len().is_multiple_of(width), "x: expected whole rows of {width} values");
    assert!(y.is_none_or(|y| y.len() == x.len()), "y: expected the length of x");
    let mut out = Vec::with_capacity(x.len());
    let chunk = ROWS_PER_CHUNK * width.max(1);
    parallel_chunks(&mut out.spare_capacity_mut()[..x.len()], chunk, |i, out| {
        let (start, end) = (i * chunk, i * chunk + out.len());
        let y = y.map(|y| &y[start..end]);
        let args = Args { x: &x[start..end], y, weight, bias, eps, out };
        dispatch_simd!(isa, normalise, args: Args);
    });
    // SAFETY: every chunk has been written.
    unsafe { out.set_len(x.len()) };
    out
}

/// `x + y`, a residual connection.
///
/// # Examples
/// ```
/// assert_eq!(mha_kernels::add(&[1., 2.], &[10., 20.]), [11., 22.]);
/// ```
///
/// # Panics
/// If the lengths differ.
pub fn add(x: &[f32], y: &[f32]) -> Vec<f32> {
    const CHUNK: usize = 1 << 14;
    assert_eq!(x.len(), y.len(), "y: expected the length of x");
    let mut out = Vec::with_capacity(x.len());
    parallel_chunks(&mut out.spare_capacity_mut()[..x.len()], CHUNK, |i, out| {
        let range = i * CHUNK..i * CHUNK + out.len();
        for (out, (x, y)) in out.iter_mut().zip(x[range.clone()].iter().zip(&y[range])) {
            out.write(x + y);
        }
    });
    // SAFETY: every chunk has been written.
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
/// The CPU supports the instructions of `V`; `x`, `y` and `out` have the same number of whole rows.
#[inline(always)]
unsafe fn normalise<V: Vector>(args: Args) {
    let Args { x, y, weight, bias, eps, out } = args;
    let width = weight.len();
    for start in (0..x.len()).step_by(width) {
        // SAFETY: `start + column + n` is within the row, and so within every slice.
        unsafe {
            let row = out.as_mut_ptr().cast::<f32>().add(start);
            for column in (0..width).step_by(V::LANES) {
                let n = V::LANES.min(width - column);
                let mut z = V::load_partial(x.as_ptr().add(start + column), n);
                if let Some(y) = y {
                    z = z.add(V::load_partial(y.as_ptr().add(start + column), n));
                }
                z.store_partial(row.add(column), n);
            }
            normalise_row::<V>(row, weight, bias, eps);
        }
    }
}

/// Normalises a row in place.
///
/// # Safety
/// The CPU supports the instructions of `V`; `weight`, `bias` and the row have the same length.
#[inline(always)]
pub(crate) unsafe fn normalise_row<V: Vector>(
    row: *mut f32,
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) {
    let width = weight.len();
    // SAFETY: `column + n` is within the row, and so within every slice.
    unsafe {
        let mut sum = V::splat(0.0);
        for column in (0..width).step_by(V::LANES) {
            sum = sum.add(V::load_partial(row.add(column), V::LANES.min(width - column)));
        }
        let mean = V::splat(sum.reduce_add() / width as f32);
        let mut squares = V::splat(0.0);
        for column in (0..width).step_by(V::LANES) {
            let (place, n) = (row.add(column), V::LANES.min(width - column));
            V::load_partial(place, n).sub(mean).store_partial(place, n);
            let centred = V::load_partial(place, n); // the lanes beyond the row are 0
            squares = centred.fma(centred, squares);
        }
        let scale = V::splat(1.0 / (squares.reduce_add() / width as f32 + eps).sqrt());
        for column in (0..width).step_by(V::LANES) {
            let (place, n) = (row.add(column), V::LANES.min(width - column));
            let weight = V::load_partial(weight.as_ptr().add(column), n);
            let bias = V::load_partial(bias.as_ptr().add(column), n);
            V::load_partial(place, n).mul(scale).fma(weight, bias).store_partial(place, n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random, scaled};

    #[test]
    fn layer_norm_matches_f64_with_and_without_residual() {
        for width in [1, 3, 16, 17, 50, 384] {
            let rows = scaled(37, 5);
            let (x, y) = (random(rows * width, 1), random(rows * width, 2));
            let (weight, bias) = (random(width, 3), random(width, 4));
            for y in [None, Some(&y[..])] {
                let mut expected = vec![];
                for row in 0..rows {
                    let at = |i: usize| row * width + i;
                    let residual = |i: usize| y.map_or(0.0, |y| y[at(i)]);
                    let z: Vec<f64> =
                        (0..width).map(|i| f64::from(x[at(i)] + residual(i))).collect();
                    let mean = z.iter().sum::<f64>() / width as f64;
                    let variance = z.iter().map(|z| (z - mean).powi(2)).sum::<f64>() / width as f64;
                    let scale = 1.0 / (variance + 1e-5).sqrt();
                    expected.extend((0..width).map(|i| {
                        (z[i] - mean) * scale * f64::from(weight[i]) + f64::from(bias[i])
                    }));
                }
                for isa in Isa::available() {
                    let got = add_layer_norm(isa, &x, y, &weight, &bias, 1e-5);
                    assert_close(&format!("{}, E = {width}", isa.name()), &got, &expected, 1e-6);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "x: expected whole rows of 0 values")]
    fn values_for_rows_of_width_0_panic() {
        add_layer_norm(Isa::SCALAR, &[1.0], None, &[], &[], 1e-5);
    }
}
