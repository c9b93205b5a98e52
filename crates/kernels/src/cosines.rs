//! The cosine between each of some rows and each of some queries.

use crate::{
    Isa,
    lanes::{Lanes, on_isa},
};

/// Rows, and queries, whose products are in registers at a time.
const TILE: usize = 4;

/// `x·q / (|x|·|q|)` for each row `x` and each query `q`, all of `width` numbers: as many as there
/// are queries for the first row, then for the second, on the calling thread alone. A row or a
/// query of nothing but zeros has the cosine 0 with all.
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
    let mut lengths = Vec::with_capacity(count);
    for query in queries.chunks_exact(width) {
        // SAFETY: the caller's instructions.
        lengths.push(unsafe { length::<L>(query) });
    }
    let groups = rows.chunks(TILE * width).zip(out.chunks_mut((TILE * count).max(1)));
    for (rows, out) in groups {
        let row: [&[f32]; TILE] = tile(rows, width);
        let mut of_rows = [0.0; TILE];
        for (length_of, row) in of_rows.iter_mut().zip(row) {
            // SAFETY: the caller's instructions.
            *length_of = unsafe { length::<L>(row) };
        }
        for (start, queries) in (0..count).step_by(TILE).zip(queries.chunks(TILE * width)) {
            let query: [&[f32]; TILE] = tile(queries, width);
            // SAFETY: the caller's instructions; all are of one width.
            let dots = unsafe { dots::<L>(row, query) };
            for (i, out) in out.chunks_exact_mut(count).enumerate() {
                for (j, out) in out[start..].iter_mut().take(TILE).enumerate() {
                    let lengths = of_rows[i] * lengths[start + j];
                    *out = if lengths == 0.0 { 0.0 } else { dots[i][j] / lengths };
                }
            }
        }
    }
}

/// The rows of a tile, the last again where there are fewer.
fn tile(rows: &[f32], width: usize) -> [&[f32]; TILE] {
    let last = rows.len() / width - 1;
    std::array::from_fn(|i| &rows[i.min(last) * width..][..width])
}

/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn length<L: Lanes>(row: &[f32]) -> f32 {
    // SAFETY: `i + n` is within the row.
    unsafe {
        let mut sum = L::splat(0.0);
        for i in (0..row.len()).step_by(L::N) {
            let x = L::load_first(row.as_ptr().add(i), L::N.min(row.len() - i));
            sum = x.fma(x, sum);
        }
        sum.sum().sqrt()
    }
}

/// # Safety
/// The instructions of `L`; slices of one length.
#[inline(always)]
unsafe fn dots<L: Lanes>(rows: [&[f32]; TILE], queries: [&[f32]; TILE]) -> [[f32; TILE]; TILE] {
    let width = rows[0].len();
    // SAFETY: `i + n` is within each.
    unsafe {
        let mut sums = [[L::splat(0.0); TILE]; TILE];
        for i in (0..width).step_by(L::N) {
            let n = L::N.min(width - i);
            let mut query = [L::splat(0.0); TILE];
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
        let mut dots = [[0.0; TILE]; TILE];
        for (dots, sums) in dots.iter_mut().zip(sums) {
            for (dot, sum) in dots.iter_mut().zip(sums) {
                *dot = sum.sum();
            }
        }
        dots
    }
}
