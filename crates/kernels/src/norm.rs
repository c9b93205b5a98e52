//! LayerNorm and RMSNorm, with the residual connection before them, in one pass over memory: for
//! each row of `z = x + y`, `(z − mean(z)) / √(var(z) + ε) · weight + bias` or
//! `z / √(mean(z²) + ε) · weight`.
//!
//! Ba et al. 2016, <https://arxiv.org/abs/1607.06450>; Zhang and Sennrich 2019,
//! <https://arxiv.org/abs/1910.07467>.

use std::mem::MaybeUninit;

use crate::{
    buffer::SharedPtr,
    isa::Isa,
    parallel::{parallel_chunks, parallel_for},
    simd::{LANES, RegisterTile, SimdKernel, Vector},
};

/// Rows that a thread takes at a time.
pub(crate) const ROWS_PER_CHUNK: usize = 16;

/// A normalisation of rows as wide as `weight`. ε is added to the variance or to the mean square.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the formulas name the fields
pub enum RowNorm<'a> {
    /// LayerNorm, `(z − mean(z)) / √(var(z) + ε) · weight + bias`. The variance is computed from the
    /// centred values, in a second pass over the row while it is in L1.
    Layer { weight: &'a [f32], bias: &'a [f32], eps: f32 },
    /// RMSNorm, `z / √(mean(z²) + ε) · weight`.
    Rms { weight: &'a [f32], eps: f32 },
}

impl RowNorm<'_> {
    /// The width of a row.
    fn width(&self) -> usize {
        match self {
            Self::Layer { weight, .. } | Self::Rms { weight, .. } => weight.len(),
        }
    }
}

/// The normalised rows of `x`, or of `x + y`.
///
/// # Shapes
/// `x`, `y`: `(N, E)`; the parameters of `norm`: `(E,)`; returns `(N, E)`
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, RowNorm, add_norm};
///
/// let isa = Isa::get()?;
/// let layer = RowNorm::Layer { weight: &[1.; 3], bias: &[0.; 3], eps: 0. };
/// let y = add_norm(isa, &[1000., 1001., 1002.], None, layer);
/// assert!((y[2] - 1.5f32.sqrt()).abs() < 1e-6);
///
/// let rms = RowNorm::Rms { weight: &[1., 10.], eps: 0. };
/// assert_eq!(add_norm(isa, &[1., 3.], Some(&[0., 4.]), rms), [0.2, 14.]); // √((1² + 7²) / 2) = 5
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If the lengths of `weight` and `bias` or of `x` and `y` differ, or if `x` is not whole rows.
pub fn add_norm(isa: Isa, x: &[f32], y: Option<&[f32]>, norm: RowNorm) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    normalise_rows(isa, x, y, norm, None, &mut out.spare_capacity_mut()[..x.len()]);
    // SAFETY: every row has been written.
    unsafe { out.set_len(x.len()) };
    out
}

/// The sum `x + y`, and its normalised rows. In a pre-norm layer, the sum is the input of the next
/// residual connection.
///
/// # Shapes
/// `x`, `y`: `(N, E)`; the parameters of `norm`: `(E,)`; returns two of `(N, E)`
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, RowNorm, add_norm_residual};
///
/// let norm = RowNorm::Rms { weight: &[1., 10.], eps: 0. };
/// let (sum, normalised) = add_norm_residual(Isa::get()?, &[1., 3.], &[0., 4.], norm);
/// assert_eq!((sum, normalised), (vec![1., 7.], vec![0.2, 14.])); // √((1² + 7²) / 2) = 5
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// As [`add_norm`].
pub fn add_norm_residual(isa: Isa, x: &[f32], y: &[f32], norm: RowNorm) -> (Vec<f32>, Vec<f32>) {
    let len = x.len();
    let (mut sum, mut out) = (Vec::with_capacity(len), Vec::with_capacity(len));
    let sums = &mut sum.spare_capacity_mut()[..len];
    normalise_rows(isa, x, Some(y), norm, Some(sums), &mut out.spare_capacity_mut()[..len]);
    // SAFETY: every row of both has been written.
    unsafe {
        sum.set_len(len);
        out.set_len(len);
    }
    (sum, out)
}

/// Writes the normalised rows of `x` or `x + y` to `out`, and the rows before the normalisation to
/// `sum`.
fn normalise_rows(
    isa: Isa,
    x: &[f32],
    y: Option<&[f32]>,
    norm: RowNorm,
    sum: Option<&mut [MaybeUninit<f32>]>,
    out: &mut [MaybeUninit<f32>],
) {
    let (width, len) = (norm.width(), x.len());
    if let RowNorm::Layer { weight, bias, .. } = norm {
        assert_eq!(bias.len(), weight.len(), "bias: expected the length of weight");
    }
    // `n.is_multiple_of(0)` is true only for n = 0, so a width of 0 requires an empty x.
    assert!(len.is_multiple_of(width), "x: expected whole rows of {width} values");
    assert!(y.is_none_or(|y| y.len() == len), "y: expected the length of x");
    assert!(out.len() == len && sum.as_ref().is_none_or(|sum| sum.len() == len));
    let chunk = ROWS_PER_CHUNK * width.max(1);
    let (out, sum) =
        (SharedPtr::new(out.as_mut_ptr()), sum.map(|x| SharedPtr::new(x.as_mut_ptr())));
    parallel_for(len.div_ceil(chunk), |i| {
        let (start, end) = (i * chunk, len.min((i + 1) * chunk));
        // SAFETY: `start` is within both slices.
        let at = |to: SharedPtr<MaybeUninit<f32>>| unsafe { to.get().add(start) }.cast();
        let rows = Rows {
            x: &x[start..end],
            y: y.map(|y| &y[start..end]),
            norm,
            sum: sum.map(at),
            out: at(out),
        };
        isa.run(rows);
    });
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

/// The same number of whole rows of inputs and outputs. No other thread accesses the rows of `sum` and
/// `out`.
struct Rows<'a> {
    x: &'a [f32],
    y: Option<&'a [f32]>,
    norm: RowNorm<'a>,
    /// The sums, if they are kept; as many elements as `x`.
    sum: Option<*mut f32>,
    /// As many elements as `x`.
    out: *mut f32,
}

impl SimdKernel for Rows<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Rows { x, y, norm, sum, out } = self;
        let width = norm.width();
        for start in (0..x.len()).step_by(width) {
            // SAFETY: `start + column + n` is within the row, and so within every slice.
            unsafe {
                let out = out.add(start);
                let sum = sum.map_or(out, |sum| sum.add(start));
                let x = x.as_ptr().add(start);
                let squares = add_row::<V>(x, y.map(|y| y.as_ptr().add(start)), sum, width);
                match norm {
                    RowNorm::Layer { weight, bias, eps } => {
                        normalise_row::<V>(sum, out, weight, bias, eps);
                    }
                    RowNorm::Rms { weight, eps } => {
                        let scale = inverse_root::<V>(squares, width, eps);
                        for column in (0..width).step_by(LANES) {
                            let n = LANES.min(width - column);
                            let weight = V::load_partial(weight.as_ptr().add(column), n);
                            let z = V::load_partial(sum.add(column), n);
                            z.mul(scale).mul(weight).store_partial(out.add(column), n);
                        }
                    }
                }
            }
        }
    }
}

/// Writes `z = x + y` to `to`, and returns the sums of squares of z in each lane. LayerNorm does not
/// use them, so the compiler removes their computation.
///
/// # Safety
/// The CPU supports the instructions of `V`; `x`, `y` and `to` have `width` elements.
#[inline(always)]
unsafe fn add_row<V: Vector>(
    x: *const f32,
    y: Option<*const f32>,
    to: *mut f32,
    width: usize,
) -> V {
    // SAFETY: `column + n` is within the rows.
    unsafe {
        let mut squares = V::splat(0.0);
        for column in (0..width).step_by(LANES) {
            let n = LANES.min(width - column);
            let mut z = V::load_partial(x.add(column), n);
            if let Some(y) = y {
                z = z.add(V::load_partial(y.add(column), n));
            }
            z.store_partial(to.add(column), n);
            squares = z.fma(z, squares);
        }
        squares
    }
}

/// `1 / √(mean + ε)` in all lanes, for the mean of `width` squares that are summed in each lane.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn inverse_root<V: Vector>(squares: V, width: usize, eps: f32) -> V {
    // SAFETY: upheld by the caller.
    unsafe { V::splat(1.0 / (squares.reduce_add() / width as f32 + eps).sqrt()) }
}

/// Applies LayerNorm to the row `from`, and writes it to `to`, which can be the same row.
///
/// # Safety
/// The CPU supports the instructions of `V`; `weight`, `bias` and the rows have the same length.
#[inline(always)]
pub(crate) unsafe fn normalise_row<V: Vector>(
    from: *const f32,
    to: *mut f32,
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) {
    let width = weight.len();
    // SAFETY: `column + n` is within the row, and so within every slice.
    unsafe {
        let mut sum = V::splat(0.0);
        for column in (0..width).step_by(LANES) {
            sum = sum.add(V::load_partial(from.add(column), LANES.min(width - column)));
        }
        let mean = V::splat(sum.reduce_add() / width as f32);
        let mut squares = V::splat(0.0);
        for column in (0..width).step_by(LANES) {
            let (to, n) = (to.add(column), LANES.min(width - column));
            V::load_partial(from.add(column), n).sub(mean).store_partial(to, n);
            let centred = V::load_partial(to, n); // the lanes beyond the row are 0
            squares = centred.fma(centred, squares);
        }
        let scale = inverse_root::<V>(squares, width, eps);
        for column in (0..width).step_by(LANES) {
            let (to, n) = (to.add(column), LANES.min(width - column));
            let weight = V::load_partial(weight.as_ptr().add(column), n);
            let bias = V::load_partial(bias.as_ptr().add(column), n);
            V::load_partial(to, n).mul(scale).fma(weight, bias).store_partial(to, n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random, scaled};

    const EPS: f32 = 1e-5;

    /// The definition in f64.
    fn expected(z: &[f32], norm: RowNorm) -> Vec<f64> {
        let mut all = vec![];
        for z in z.chunks(norm.width()) {
            let mut z: Vec<f64> = z.iter().map(|&z| f64::from(z)).collect();
            let mean = |z: &[f64]| z.iter().sum::<f64>() / z.len() as f64;
            if let RowNorm::Layer { .. } = norm {
                let mean = mean(&z);
                z.iter_mut().for_each(|z| *z -= mean);
            }
            let squares: Vec<f64> = z.iter().map(|z| z * z).collect();
            let scale = 1.0 / (mean(&squares) + f64::from(EPS)).sqrt();
            all.extend(z.iter().enumerate().map(|(i, z)| match norm {
                RowNorm::Layer { weight, bias, .. } => {
                    z * scale * f64::from(weight[i]) + f64::from(bias[i])
                }
                RowNorm::Rms { weight, .. } => z * scale * f64::from(weight[i]),
            }));
        }
        all
    }

    /// The tolerance is that of the scalar reference, which adds up to 384 squares one by one.
    #[test]
    fn norms_match_f64_with_and_without_residual() {
        for width in [1, 3, 16, 17, 50, 384] {
            let rows = scaled(37, 5);
            let (x, y) = (random(rows * width, 1), random(rows * width, 2));
            let (weight, bias) = (random(width, 3), random(width, 4));
            let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
            let norms = [
                ("LayerNorm", RowNorm::Layer { weight: &weight, bias: &bias, eps: EPS }),
                ("RMSNorm", RowNorm::Rms { weight: &weight, eps: EPS }),
            ];
            for (kind, norm) in norms {
                let (of_x, of_sum) = (expected(&x, norm), expected(&sum, norm));
                for isa in Isa::available() {
                    let name = format!("{kind}, {}, E = {width}", isa.name());
                    let got = add_norm(isa, &x, None, norm);
                    assert_close(&name, &got, &of_x, 2e-6);
                    let got = add_norm(isa, &x, Some(&y), norm);
                    assert_close(&name, &got, &of_sum, 2e-6);
                    let (got_sum, normalised) = add_norm_residual(isa, &x, &y, norm);
                    assert_eq!(got_sum, sum, "{name}");
                    assert_eq!(normalised, got, "{name}");
                }
            }
        }
    }

    /// The rows of a batch are computed on several threads; a row alone is computed on one.
    #[test]
    fn a_row_has_the_same_bits_in_every_batch() {
        let width = 50;
        let rows = scaled(3 * ROWS_PER_CHUNK + 5, ROWS_PER_CHUNK + 2);
        let (x, y) = (random(rows * width, 1), random(rows * width, 2));
        let weight = random(width, 3);
        let norm = RowNorm::Rms { weight: &weight, eps: EPS };
        for isa in Isa::available() {
            let all = add_norm(isa, &x, Some(&y), norm);
            for start in (0..x.len()).step_by(width) {
                let row = start..start + width;
                let alone = add_norm(isa, &x[row.clone()], Some(&y[row.clone()]), norm);
                assert_eq!(alone, all[row], "{}, from {start}", isa.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "x: expected whole rows of 0 values")]
    fn values_for_rows_of_width_0_panic() {
        add_norm(Isa::SCALAR, &[1.0], None, RowNorm::Layer { weight: &[], bias: &[], eps: EPS });
    }
}
