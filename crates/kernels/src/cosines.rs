//! The cosine between each of some rows and each of some queries.

use crate::{
    Isa,
    lanes::{Lanes, on_isa},
};

/// `x·q / (|x|·|q|)` for each row `x` and each query `q`, all of `width` numbers: as many as there
/// are queries for the first row, then for the second, on the calling thread alone. A row or a
/// query of nothing but zeros has the cosine 0 with all.
/// Squares are summed in f32: lengths are between 1e-18 and 1e18, or else count as zero or give NaN.
///
/// A cosine is the same to the bit whatever other rows and queries it is computed with.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, cosines};
///
/// let (rows, queries) = ([3., 4., 0., 2.], [1., 0., 5., 5.]);
/// let found = cosines(Isa::get()?, &rows, &queries, 2);
/// let expected = [0.6, 0.98994949, 0.0, 0.70710678];
/// assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6));
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If the slices are not of whole rows.
pub fn cosines(isa: Isa, rows: &[f32], queries: &[f32], width: usize) -> Vec<f32> {
    assert!(width > 0 && rows.len().is_multiple_of(width), "whole rows");
    assert!(queries.len().is_multiple_of(width), "whole queries");
    let mut out = vec![0.0; rows.len() / width * (queries.len() / width)];
    let args = Args { rows, queries, width, out: &mut out };
    on_isa!(isa, all, args: Args);
    out
}

struct Args<'a> {
    rows: &'a [f32],
    queries: &'a [f32],
    width: usize,
    out: &'a mut [f32],
}

/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn all<L: Lanes>(args: Args) {
    let Args { rows, queries, width, out } = args;
    let count = queries.len() / width;
    if count == 1 {
        // Row by row, as memory gives them: it is slower than any arithmetic on so few products.
        // SAFETY: the caller's.
        unsafe { tiles::<L, 1, 1>(rows, queries, width, out) }
    } else {
        // SAFETY: the caller's.
        unsafe { tiles::<L, 4, 4>(rows, queries, width, out) }
    }
}

/// With the products of so many rows and queries in registers at a time.
///
/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn tiles<L: Lanes, const R: usize, const Q: usize>(
    rows: &[f32],
    queries: &[f32],
    width: usize,
    out: &mut [f32],
) {
    let count = queries.len() / width;
    let mut of_queries = Vec::with_capacity(count);
    for query in queries.chunks_exact(width) {
        // SAFETY: the caller's instructions.
        of_queries.push(unsafe { dots::<L, 1, 1>([query], [query])[0][0] }.sqrt());
    }
    for (rows, out) in rows.chunks(R * width).zip(out.chunks_mut((R * count).max(1))) {
        let row: [&[f32]; R] = tile(rows, width);
        let mut of_rows = [0.0; R];
        for (length, row) in of_rows.iter_mut().zip(row) {
            // SAFETY: the caller's instructions.
            *length = unsafe { dots::<L, 1, 1>([row], [row])[0][0] }.sqrt();
        }
        for (start, queries) in (0..count).step_by(Q).zip(queries.chunks(Q * width)) {
            // SAFETY: the caller's instructions; all are of one width.
            let dots = unsafe { dots::<L, R, Q>(row, tile(queries, width)) };
            for (i, out) in out.chunks_exact_mut(count).enumerate() {
                for (j, out) in out[start..].iter_mut().take(Q).enumerate() {
                    let lengths = of_rows[i] * of_queries[start + j];
                    *out = if lengths == 0.0 { 0.0 } else { dots[i][j] / lengths };
                }
            }
        }
    }
}

/// So many rows, the last again where there are fewer.
#[inline(always)]
fn tile<const R: usize>(rows: &[f32], width: usize) -> [&[f32]; R] {
    let last = rows.len() / width - 1;
    std::array::from_fn(|i| &rows[i.min(last) * width..][..width])
}

/// # Safety
/// The instructions of `L`; slices of one length.
#[inline(always)]
unsafe fn dots<L: Lanes, const R: usize, const Q: usize>(
    rows: [&[f32]; R],
    queries: [&[f32]; Q],
) -> [[f32; Q]; R] {
    let width = rows[0].len();
    let mut dots = [[0.0; Q]; R];
    // SAFETY: `i + n` is within each.
    unsafe {
        let mut sums = [[L::splat(0.0); Q]; R];
        for i in (0..width).step_by(L::N) {
            let n = L::N.min(width - i);
            let mut query = [L::splat(0.0); Q];
            for (lanes, query) in query.iter_mut().zip(queries) {
                *lanes = L::load_first(query.as_ptr().add(i), n);
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = L::load_first(row.as_ptr().add(i), n);
                for (sum, query) in sums.iter_mut().zip(query) {
                    *sum = x.fma(query, *sum);
                }
            }
        }
        for (dots, sums) in dots.iter_mut().zip(sums) {
            for (dot, sum) in dots.iter_mut().zip(sums) {
                *dot = sum.sum();
            }
        }
    }
    dots
}
