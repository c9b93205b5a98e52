//! The peak arithmetic rate of the CPU, to which benchmarks compare matrix products.

use std::time::Instant;

use crate::{
    compute_type::ComputeType,
    isa::Isa,
    simd::{Microkernel, ProductKernel, RegisterTile},
};

/// Operations per second of all threads together, measured for a few milliseconds on values in
/// registers and the L1 cache. A multiply-add counts as two operations.
///
/// # Examples
/// ```
/// use mha_kernels::{ComputeType, Isa, peak};
///
/// let isa = Isa::get()?;
/// assert!(peak(isa, ComputeType::F32) > 1e8);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
pub fn peak(isa: Isa, compute_type: ComputeType) -> f64 {
    let steps = 400_000;
    let rates = rayon::broadcast(|_| {
        let start = Instant::now();
        let mut lane_products = 0;
        let kernel = MultiplyRegisters { steps, lane_products: &mut lane_products };
        isa.run_products(compute_type, kernel);
        let operations = 2 * lane_products * compute_type.values_per_lane();
        operations as f64 / start.elapsed().as_secs_f64()
    });
    rates.into_iter().sum()
}

struct MultiplyRegisters<'a> {
    steps: usize,
    lane_products: &'a mut usize,
}

impl ProductKernel for MultiplyRegisters<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self) {
        // SAFETY: upheld by the caller.
        *self.lane_products = unsafe { D::multiply_registers(self.steps) };
    }
}
