//! The mean over the rows of each of several sequences, which lie one after another.

use std::mem::MaybeUninit;

use crate::{
    Isa,
    lanes::{Lanes, on_isa},
    team::share_chunks,
};

/// The mean of the rows of `width` between each two `offsets`.
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
/// If the offsets do not rise, each by at least 1, to no more than the rows there are.
pub fn mean_pool(isa: Isa, x: &[f32], width: usize, offsets: &[usize]) -> Vec<f32> {
    assert!(offsets.windows(2).all(|w| w[0] < w[1]), "sequences of at least a row");
    assert!(offsets.last().is_none_or(|end| end * width <= x.len()), "rows that are there");
    let len = offsets.len().saturating_sub(1) * width;
    let mut out = Vec::with_capacity(len);
    share_chunks(&mut out.spare_capacity_mut()[..len], width.max(1), |i, out| {
        let args = Args { x: &x[offsets[i] * width..offsets[i + 1] * width], out };
        on_isa!(isa, mean, args: Args);
    });
    // SAFETY: each row of it has been written.
    unsafe { out.set_len(len) };
    out
}

struct Args<'a> {
    x: &'a [f32],
    out: &'a mut [MaybeUninit<f32>],
}

/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn mean<L: Lanes>(args: Args) {
    let Args { x, out } = args;
    let (width, rows) = (out.len(), (x.len() / out.len()) as f32);
    for column in (0..width).step_by(L::N) {
        let n = L::N.min(width - column);
        // SAFETY: `column + n` is within a row.
        unsafe {
            let mut sum = L::splat(0.0);
            for row in x.chunks_exact(width) {
                sum = sum.add(L::load_first(row.as_ptr().add(column), n));
            }
            sum.div(L::splat(rows)).store_first(out.as_mut_ptr().cast::<f32>().add(column), n);
        }
    }
}
