//! The most that the processor multiplies, for products to be measured by.

use std::{hint::black_box, time::Instant};

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
        let mut lanes = 0;
        run(isa, format, Registers { steps, lanes: &mut lanes });
        let operations = 2 * steps * SUMS * lanes * format.per_word();
        operations as f64 / start.elapsed().as_secs_f64()
    });
    rates.into_iter().sum()
}

/// Sums at a time: enough that none waits for its predecessor, few enough for all registers.
const SUMS: usize = 10;

struct Registers<'a> {
    steps: usize,
    lanes: &'a mut usize,
}

impl Work for Registers<'_> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        *self.lanes = L::N;
        // SAFETY: the caller's.
        unsafe {
            let (mut a, b) = (L::splat(black_box(0.0)), L::splat(black_box(0.0)));
            let mut sums = [L::splat(0.0); SUMS];
            for _ in 0..self.steps {
                for sum in &mut sums {
                    *sum = D::dot(a, b, *sum);
                }
                a = D::add(a, b); // another factor, so that no product is computed once for all
            }
            black_box(sums.map(|sum| sum.sum()));
        }
    }
}
