//! Normalisation of rows to unit length.

use std::mem::MaybeUninit;

use crate::{
    isa::Isa,
    parallel::parallel_chunks,
    simd::{LANES, RegisterTile, SimdKernel},
};

/// `x / max(‖x‖, 10⁻¹²)` of each row. A row with NaN becomes NaN. A row whose squares sum to ∞ becomes
/// zeros, apart from elements of ∞, which become NaN.
///
/// # Shapes
/// `x`: `(R, width)`; returns `(R, width)`
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, l2_normalize};
///
/// assert_eq!(l2_normalize(Isa::get()?, &[3., 4., 0., 0.], 2), [0.6, 0.8, 0., 0.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If `width` is 0 or `x` is not whole rows.
pub fn l2_normalize(isa: Isa, x: &[f32], width: usize) -> Vec<f32> {
    assert!(
        width > 0 && x.len().is_multiple_of(width),
        "x: expected a width of at least 1 and whole rows of {width} values"
    );
    let mut out = Vec::with_capacity(x.len());
    parallel_chunks(&mut out.spare_capacity_mut()[..x.len()], width, |i, out| {
        isa.run(Args { x: &x[i * width..][..width], out });
    });
    // SAFETY: every row has been written.
    unsafe { out.set_len(x.len()) };
    out
}

struct Args<'a> {
    /// One row.
    x: &'a [f32],
    out: &'a mut [MaybeUninit<f32>],
}

impl SimdKernel for Args<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Args { x, out } = self;
        let (from, to) = (x.as_ptr(), out.as_mut_ptr().cast::<f32>());
        let parts = || (0..x.len()).step_by(LANES).map(|i| (i, LANES.min(x.len() - i)));
        // SAFETY: upheld by the caller; `i + n` is within both rows.
        unsafe {
            let mut squares = V::splat(0.0);
            for (i, n) in parts() {
                let x = V::load_partial(from.add(i), n);
                squares = x.fma(x, squares);
            }
            let squares = squares.reduce_add();
            let length = if squares < 1e-24 { 1e-12 } else { squares.sqrt() }; // NaN stays NaN
            for (i, n) in parts() {
                let y = V::load_partial(from.add(i), n).div(V::splat(length));
                y.store_partial(to.add(i), n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random};

    #[test]
    fn rows_have_unit_length_and_nan_stays_nan() {
        for isa in Isa::available() {
            for width in [1, 5, 16, 50] {
                let x = random(3 * width, 1);
                let expected = x.chunks(width).flat_map(|row| {
                    let length = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                    row.iter().map(move |&x| f64::from(x) / length)
                });
                let got = l2_normalize(isa, &x, width);
                let name = format!("{}, width {width}", isa.name());
                assert_close(&name, &got, &expected.collect::<Vec<_>>(), 2e-7);
            }
            let got = l2_normalize(isa, &[1.0, f32::NAN, 0.0, 5.0], 2);
            assert!(got[..2].iter().all(|x| x.is_nan()) && got[2..] == [0.0, 1.0], "{got:?}");
        }
    }
}
