//! Cosine similarity of vectors and queries.

use std::ops::RangeInclusive;

use crate::{
    isa::Isa,
    simd::{LANES, RegisterTile, SimdKernel, Vector},
};

/// The cosine similarity `x·q / (‖x‖·‖q‖)` of each row x and each query q. Runs on the calling
/// thread.
///
/// A vector that contains NaN or infinity gives NaN. A zero vector has the similarity 0 to
/// every vector of finite numbers. Sums are in f32, or in f64 for vectors with a norm outside 1e-18
/// to 1e18. The result for a row and a query is bit-identical whatever the other rows and queries
/// are.
///
/// # Shapes
/// `rows`: `(R, width)`; `queries`: `(Q, width)`; returns `(R, Q)`.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, cosine_similarities};
///
/// let (rows, queries) = ([3., 4., 0., 2.], [1., 0., 5., 5.]);
/// let similarities = cosine_similarities(Isa::get()?, &rows, &queries, 2);
/// let expected = [0.6, 0.98994949, 0.0, 0.70710678];
/// assert!(similarities.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6));
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If `width` is 0 or a slice is not whole rows.
pub fn cosine_similarities(isa: Isa, rows: &[f32], queries: &[f32], width: usize) -> Vec<f32> {
    assert!(
        width > 0 && rows.len().is_multiple_of(width),
        "rows: expected a width of at least 1 and whole rows of {width} values"
    );
    assert!(queries.len().is_multiple_of(width), "queries: expected whole rows of {width} values");
    let mut out = vec![0.0; rows.len() / width * (queries.len() / width)];
    let args = Args { rows, queries, width, out: &mut out };
    isa.run(args);
    out
}

/// The norms whose squares, and the products of two of them, are normal f32 numbers.
const F32_NORMS: RangeInclusive<f32> = 1e-18..=1e18;

struct Args<'a> {
    rows: &'a [f32],
    queries: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

impl SimdKernel for Args<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Args { rows, queries, width, out } = self;
        if queries.len() / width == 1 {
            // Row by row: with one query, memory bandwidth is the limit.
            // SAFETY: upheld by the caller.
            unsafe { tiled::<V, 1, 1>(rows, queries, width, out) }
        } else if V::REGISTERS == 1 {
            // SAFETY: upheld by the caller.
            unsafe { tiled::<V, 4, 4>(rows, queries, width, out) }
        } else {
            // SAFETY: upheld by the caller.
            unsafe { tiled::<V, 3, 2>(rows, queries, width, out) }
        }
    }
}

/// Computes `R` rows × `Q` queries at a time in registers.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn tiled<V: Vector, const R: usize, const Q: usize>(
    rows: &[f32],
    queries: &[f32],
    width: usize,
    out: &mut [f32],
) {
    let count = queries.len() / width;
    let mut query_norms = Vec::with_capacity(count);
    for query in queries.chunks_exact(width) {
        // SAFETY: upheld by the caller.
        query_norms.push(unsafe { norm::<V>(query) });
    }
    for (rows, out) in rows.chunks(R * width).zip(out.chunks_mut((R * count).max(1))) {
        let row_tile: [&[f32]; R] = tile(rows, width);
        let mut row_norms = [0.0; R];
        for (row_norm, row) in row_norms.iter_mut().zip(row_tile) {
            // SAFETY: upheld by the caller.
            *row_norm = unsafe { norm::<V>(row) };
        }
        for (start, queries) in (0..count).step_by(Q).zip(queries.chunks(Q * width)) {
            // SAFETY: upheld by the caller; all slices have the same length.
            let dots = unsafe { dots::<V, R, Q>(row_tile, tile(queries, width)) };
            for (i, out) in out.chunks_exact_mut(count).enumerate() {
                for (j, out) in out[start..].iter_mut().take(Q).enumerate() {
                    let (row_norm, query_norm) = (row_norms[i], query_norms[start + j]);
                    *out = if F32_NORMS.contains(&row_norm) && F32_NORMS.contains(&query_norm) {
                        dots[i][j] / (row_norm * query_norm)
                    } else {
                        cosine_in_f64(row_tile[i], &queries[j * width..][..width])
                    };
                }
            }
        }
    }
}

/// The cosine similarity of any two vectors of finite numbers: f64 represents all sums of squares.
#[cold]
fn cosine_in_f64(x: &[f32], y: &[f32]) -> f32 {
    let dot = |x: &[f32], y: &[f32]| -> f64 {
        x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
    };
    let norms = dot(x, x).sqrt() * dot(y, y).sqrt();
    if norms == 0.0 { 0.0 } else { (dot(x, y) / norms) as f32 }
}

/// The first `R` rows; if there are fewer, the last is repeated.
#[inline(always)]
fn tile<const R: usize>(rows: &[f32], width: usize) -> [&[f32]; R] {
    let last = rows.len() / width - 1;
    std::array::from_fn(|i| &rows[i.min(last) * width..][..width])
}

/// The Euclidean norm.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn norm<V: Vector>(x: &[f32]) -> f32 {
    // SAFETY: upheld by the caller.
    unsafe { dots::<V, 1, 1>([x], [x])[0][0] }.sqrt()
}

/// The dot product of each row and each query.
///
/// # Safety
/// The CPU supports the instructions of `V`; all slices have the same length.
#[inline(always)]
unsafe fn dots<V: Vector, const R: usize, const Q: usize>(
    rows: [&[f32]; R],
    queries: [&[f32]; Q],
) -> [[f32; Q]; R] {
    let width = rows[0].len();
    let mut dots = [[0.0; Q]; R];
    // SAFETY: `i + n` is within each slice.
    unsafe {
        let mut sums = [[V::splat(0.0); Q]; R];
        for i in (0..width).step_by(LANES) {
            let n = LANES.min(width - i);
            let mut query_vectors = [V::splat(0.0); Q];
            for (vector, query) in query_vectors.iter_mut().zip(queries) {
                *vector = V::load_partial(query.as_ptr().add(i), n);
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = V::load_partial(row.as_ptr().add(i), n);
                for (sum, query) in sums.iter_mut().zip(query_vectors) {
                    *sum = x.fma(query, *sum);
                }
            }
        }
        for (dots, sums) in dots.iter_mut().zip(sums) {
            for (dot, sum) in dots.iter_mut().zip(sums) {
                *dot = sum.reduce_add();
            }
        }
    }
    dots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random};

    /// Tolerance: a sum of up to 70 products has an error of at most 70 · 2⁻²⁴ = 4.2e-6 in f32. The
    /// rounding errors of its terms mostly cancel, so that 2e-6 suffices.
    #[test]
    fn cosines_match_f64_and_do_not_depend_on_other_vectors() {
        for isa in Isa::available() {
            for (n, count, width) in
                [(1, 1, 1), (9, 1, 70), (6, 5, 17), (4, 8, 32), (0, 2, 3), (3, 0, 3)]
            {
                let (rows, queries) = (random(n * width, 1), random(count * width, 2));
                let dot = |x: &[f32], y: &[f32]| -> f64 {
                    x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
                };
                let expected: Vec<f64> = rows
                    .chunks(width)
                    .flat_map(|x| queries.chunks(width).map(move |q| (x, q)))
                    .map(|(x, q)| dot(x, q) / (dot(x, x) * dot(q, q)).sqrt())
                    .collect();
                let got = cosine_similarities(isa, &rows, &queries, width);
                assert_close(isa.name(), &got, &expected, 2e-6);
                for (i, row) in rows.chunks(width).enumerate() {
                    for (j, query) in queries.chunks(width).enumerate() {
                        let alone = cosine_similarities(isa, row, query, width);
                        assert_eq!(alone, [got[i * count + j]]);
                    }
                }
            }
        }
    }

    #[test]
    fn a_zero_vector_gives_zero_and_nan_gives_nan() {
        for isa in Isa::available() {
            assert_eq!(cosine_similarities(isa, &[0.0; 3], &[1.0; 3], 3), [0.0]);
            for value in [f32::NAN, f32::INFINITY] {
                assert!(cosine_similarities(isa, &[value, 0.0], &[1.0, 0.0], 2)[0].is_nan());
            }
            assert!(cosine_similarities(isa, &[0.0; 2], &[f32::NAN, 0.0], 2)[0].is_nan());
        }
    }

    #[test]
    fn the_cosine_does_not_depend_on_the_norms() {
        let norms = [1e-44, 1e-30, 1e-18, 1.0, 1e18, 1e19, 1e38];
        let rows: Vec<f32> = norms.iter().flat_map(|&norm| [3.0 * norm, 0.0, -norm]).collect();
        // A single query takes another code path than several.
        for queries in [&norms[..1], &norms] {
            let queries: Vec<f32> = queries.iter().flat_map(|&norm| [norm, norm, 0.0]).collect();
            for isa in Isa::available() {
                let cosines = cosine_similarities(isa, &rows, &queries, 3);
                for cosine in &cosines {
                    assert!((cosine - 0.670_820_4).abs() < 1e-6, "{}: {cosines:?}", isa.name());
                }
            }
        }
    }
}
