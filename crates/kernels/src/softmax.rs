//! The softmax of rows, and its normaliser, the logarithm of the sum of exponentials.

use crate::{
    isa::Isa,
    math::exp,
    parallel::parallel_chunks,
    simd::{LANES, RegisterTile, SimdKernel, Vector},
};

/// Values whose exponentials are summed in f32. The sums of these parts are added in f64.
const PART: usize = 64 * LANES;

/// `ln Σⱼ exp(xᵢⱼ)` of each row: exponentials in f32, sums in f32 and f64. A row of −∞ gives −∞, and a
/// row with NaN or ∞ gives NaN.
///
/// # Shapes
/// `x`: `(R, width)`; returns R values
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, log_sum_exp};
///
/// let sums = log_sum_exp(Isa::get()?, &[0., 0., 1000., f32::NEG_INFINITY], 2);
/// assert!((sums[0] - 2f64.ln()).abs() < 1e-7);
/// assert_eq!(sums[1], 1000.);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If `width` is 0 or `x` is not whole rows.
pub fn log_sum_exp(isa: Isa, x: &[f32], width: usize) -> Vec<f64> {
    check_rows(x, width);
    let mut out = vec![0.0; x.len() / width];
    parallel_chunks(&mut out, 1, |i, out| {
        isa.run(LogSumExp { row: &x[i * width..][..width], out: &mut out[0] });
    });
    out
}

/// `exp(xᵢⱼ) / Σₗ exp(xᵢₗ)` of each row, in place. The sums are those of [`log_sum_exp`]. A row of −∞,
/// and a row with NaN or ∞, gives NaN.
///
/// # Shapes
/// `x`: `(R, width)`
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, softmax};
///
/// let mut x = [1000., 1000., 0., f32::NEG_INFINITY];
/// softmax(Isa::get()?, &mut x, 2);
/// assert_eq!(x, [0.5, 0.5, 1., 0.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If `width` is 0 or `x` is not whole rows.
pub fn softmax(isa: Isa, x: &mut [f32], width: usize) {
    check_rows(x, width);
    parallel_chunks(x, width, |_, row| isa.run(Softmax { row }));
}

fn check_rows(x: &[f32], width: usize) {
    assert!(
        width > 0 && x.len().is_multiple_of(width),
        "x: expected a width of at least 1 and whole rows of {width} values"
    );
}

struct LogSumExp<'a> {
    row: &'a [f32],
    out: &'a mut f64,
}

impl SimdKernel for LogSumExp<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        // SAFETY: upheld by the caller.
        let (max, sum) = unsafe { max_and_sum::<V>(self.row) };
        *self.out = f64::from(max) + sum.ln();
    }
}

struct Softmax<'a> {
    row: &'a mut [f32],
}

impl SimdKernel for Softmax<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        // SAFETY: upheld by the caller; `i + n` is within the row.
        unsafe {
            let (max, sum) = max_and_sum::<V>(self.row);
            for i in (0..self.row.len()).step_by(LANES) {
                let n = LANES.min(self.row.len() - i);
                let place = self.row.as_mut_ptr().add(i);
                let e = exp(V::load_partial(place, n).sub(V::splat(max)));
                e.div(V::splat(sum as f32)).store_partial(place, n);
            }
        }
    }
}

/// The largest value of a row, and `Σ exp(x − max)`.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn max_and_sum<V: Vector>(row: &[f32]) -> (f32, f64) {
    let (vectors, rest) = row.as_chunks::<LANES>();
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    // SAFETY: upheld by the caller; every load is of an array of `LANES` values.
    unsafe {
        // `max` returns its argument if either value is NaN. The exponential of NaN is NaN.
        let mut max = V::load(last.as_ptr()).max(V::splat(f32::MIN));
        for vector in vectors {
            max = V::load(vector.as_ptr()).max(max);
        }
        let max = max.reduce_max();
        let mut total = f64::from(exp_of_difference::<V>(&last, max).reduce_add());
        for part in vectors.chunks(PART / LANES) {
            let mut sum = V::splat(0.0);
            for vector in part {
                sum = sum.add(exp_of_difference::<V>(vector, max));
            }
            total += f64::from(sum.reduce_add());
        }
        (max, total)
    }
}

/// `exp(x − max)`.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn exp_of_difference<V: Vector>(x: &[f32; LANES], max: f32) -> V {
    // SAFETY: upheld by the caller; `x` has as many values as a vector.
    unsafe { exp(V::load(x.as_ptr()).sub(V::splat(max))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{random, scaled};

    #[test]
    fn sums_and_quotients_are_those_in_f64() {
        for isa in Isa::available() {
            for width in [1, 15, 16, scaled(5000, 100)] {
                let x: Vec<f32> = random(3 * width, 1).iter().map(|x| 100.0 * x).collect();
                let mut quotients = x.clone();
                softmax(isa, &mut quotients, width);
                let rows = x.chunks(width).zip(quotients.chunks(width));
                for ((row, quotients), got) in rows.zip(log_sum_exp(isa, &x, width)) {
                    let max = row.iter().copied().fold(f32::MIN, f32::max);
                    let e: Vec<f64> = row.iter().map(|&x| f64::from(x - max).exp()).collect();
                    let sum: f64 = e.iter().sum();
                    let expected = f64::from(max) + sum.ln();
                    assert!((got - expected).abs() < 1e-6, "{isa:?}, {width}: {got}, {expected}");
                    for (got, e) in quotients.iter().zip(e) {
                        let error = (f64::from(*got) - e / sum).abs() / (e / sum).max(1e-30);
                        assert!(error < 1e-6, "{isa:?}, {width}: {got}, {}", e / sum);
                    }
                }
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_found() {
        const INFINITY: f32 = f32::INFINITY;
        for isa in Isa::available() {
            for at in [0, 16, 20] {
                let mut row = [0.5; 21];
                row[at] = -INFINITY;
                assert!(log_sum_exp(isa, &row, 21)[0].is_finite());
                for bad in [f32::NAN, INFINITY] {
                    row[at] = bad;
                    assert!(log_sum_exp(isa, &row, 21)[0].is_nan(), "{isa:?}, {at}, {bad}");
                    let mut quotients = row;
                    softmax(isa, &mut quotients, 21);
                    assert!(quotients.iter().all(|x| x.is_nan()), "{isa:?}, {at}, {bad}");
                }
            }
            let rows = [log_sum_exp(isa, &[-INFINITY; 21], 21), log_sum_exp(isa, &[f32::NAN], 1)];
            assert!(rows[0] == [f64::NEG_INFINITY] && rows[1][0].is_nan(), "{isa:?}, {rows:?}");
        }
    }
}
