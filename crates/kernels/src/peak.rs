//! The most that the processor multiplies, for products to be measured by.

use std::time::Instant;

use crate::{
    Format, Isa,
    gemm::{Dot, Tiles, Work, run},
};

/// Operations per second of all threads, multiplications and additions counted apart, on words that
/// stay in registers; measured for some milliseconds.
///
/// # Examples
/// ```
/// use mha_kernels::{Format, Isa, peak};
///
/// let isa = Isa::get()?;
/// assert!(peak(isa, Format::F32) > 1e8);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
pub fn peak(isa: Isa, format: Format) -> f64 {
    let steps = 400_000;
    let rates = rayon::broadcast(|_| {
        let start = Instant::now();
        let mut products = 0; // of words
        run(isa, format, Registers { steps, products: &mut products });
        let operations = 2 * products * format.per_word();
        operations as f64 / start.elapsed().as_secs_f64()
    });
    rates.into_iter().sum()
}

struct Registers<'a> {
    steps: usize,
    products: &'a mut usize,
}

impl Work for Registers<'_> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        // SAFETY: the caller's.
        *self.products = unsafe { D::keep_busy(self.steps) };
    }
}
