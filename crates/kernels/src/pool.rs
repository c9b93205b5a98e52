//! Mean pooling of ragged sequences.

use std::mem::MaybeUninit;

use crate::{
    isa::Isa,
    parallel::parallel_chunks,
    simd::{LANES, RegisterTile, SimdKernel},
};

/// The mean over the rows of each sequence. Sequence `i` is the rows `offsets[i]..offsets[i + 1]`.
///
/// # Shapes
/// `x`: `(N, width)`; `offsets`: `(B + 1,)`; returns `(B, width)`.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, mean_pool};
///
/// let rows = [1., 8., 3., 4., 5., 6.];
/// assert_eq!(mean_pool(Isa::get()?, &rows, 2, &[0, 2, 3]), [2., 6., 5., 6.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If `x` is not whole rows, or if the offsets are not strictly increasing or exceed the rows of
/// `x`.
pub fn mean_pool(isa: Isa, x: &[f32], width: usize, offsets: &[usize]) -> Vec<f32> {
    assert!(x.len().is_multiple_of(width), "x: expected whole rows of {width} values");
    assert!(
        offsets.windows(2).all(|w| w[0] < w[1]),
        "offsets: expected strictly increasing values"
    );
    assert!(
        offsets.last().is_none_or(|end| end.checked_mul(width).is_some_and(|n| n <= x.len())),
        "offsets: the last offset exceeds the number of rows of x"
    );
    let len = offsets.len().saturating_sub(1) * width;
    let mut out = Vec::with_capacity(len);
    parallel_chunks(&mut out.spare_capacity_mut()[..len], width.max(1), |i, out| {
        let args = Args { x: &x[offsets[i] * width..offsets[i + 1] * width], out };
        isa.run(args);
    });
    // SAFETY: every row has been written.
    unsafe { out.set_len(len) };
    out
}

struct Args<'a> {
    /// The rows of one sequence.
    x: &'a [f32],
    /// One row.
    out: &'a mut [MaybeUninit<f32>],
}

impl SimdKernel for Args<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Args { x, out } = self;
        let (width, rows) = (out.len(), (x.len() / out.len()) as f32);
        for column in (0..width).step_by(LANES) {
            let n = LANES.min(width - column);
            // SAFETY: `column + n` is within a row.
            unsafe {
                let mut sum = V::splat(0.0);
                for row in x.chunks_exact(width) {
                    sum = sum.add(V::load_partial(row.as_ptr().add(column), n));
                }
                sum.div(V::splat(rows))
                    .store_partial(out.as_mut_ptr().cast::<f32>().add(column), n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random};

    #[test]
    fn mean_pool_averages_the_rows_of_each_sequence() {
        for width in [1, 5, 16, 50] {
            let (x, offsets) = (random(11 * width, 1), [0, 1, 8, 11]);
            let mean = |w: &[usize], i: usize| {
                (w[0]..w[1]).map(|row| f64::from(x[row * width + i])).sum::<f64>()
                    / (w[1] - w[0]) as f64
            };
            let expected: Vec<f64> =
                offsets.windows(2).flat_map(|w| (0..width).map(move |i| mean(w, i))).collect();
            for isa in Isa::available() {
                let got = mean_pool(isa, &x, width, &offsets);
                assert_close(&format!("{}, width {width}", isa.name()), &got, &expected, 3e-7);
            }
        }
        assert_eq!(mean_pool(Isa::SCALAR, &[], 3, &[0]), [] as [f32; 0]);
    }

    #[test]
    #[should_panic(expected = "x: expected whole rows of 2 values")]
    fn an_incomplete_row_panics() {
        mean_pool(Isa::SCALAR, &[0.0; 7], 2, &[0, 3]);
    }
}
