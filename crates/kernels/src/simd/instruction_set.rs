//! [`InstructionSet`]: the vectors and products of an instruction set, and the functions that kernels
//! are compiled in.

use super::microkernel::{Microkernel, RegisterTile};
use crate::compute_type::ComputeType;

/// A computation that is compiled once for each vector type.
pub(crate) trait SimdKernel {
    /// # Safety
    /// The CPU supports the instructions of `V`; the code that built the kernel checked its other
    /// preconditions.
    unsafe fn run<V: RegisterTile>(self);
}

/// A computation that is compiled once for each pair of vector type and microkernel.
pub(crate) trait ProductKernel {
    /// # Safety
    /// The CPU supports the instructions of `V` and `D`; the code that built the kernel checked its
    /// other preconditions.
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self);
}

/// An instruction set.
///
/// # Safety
/// The unsafe methods require that the CPU supports the instructions ([`Self::is_supported`]).
pub(super) trait InstructionSet {
    /// The name that `MHA_ISA` accepts.
    const NAME: &'static str;
    /// The name of the instruction set for kernels with too few products to pay for the layout of tile
    /// registers, or of matrices in vector registers.
    const WITHOUT_TILES: &'static str = Self::NAME;
    type Vector: RegisterTile;
    /// The products of each compute type.
    type F32: Microkernel<Self::Vector>;
    type Bf16: Microkernel<Self::Vector>;
    type Int8: Microkernel<Self::Vector>;

    /// Whether this machine has the instructions.
    fn is_supported() -> bool;
    /// Runs a kernel with [`Self::Vector`] in a function with these instructions enabled.
    unsafe fn run(kernel: impl SimdKernel);
    /// Runs a kernel with [`Self::Vector`] and the products of `compute_type`.
    unsafe fn run_products(compute_type: ComputeType, kernel: impl ProductKernel);
}

/// [`InstructionSet::run_products`] for a set whose products need the same instructions for all
/// compute types.
///
/// # Safety
/// The CPU supports the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn run_product_kernel<S: InstructionSet>(
    compute_type: ComputeType,
    kernel: impl ProductKernel,
) {
    // SAFETY: upheld by the caller.
    unsafe {
        match compute_type {
            ComputeType::F32 => kernel.run::<S::Vector, S::F32>(),
            ComputeType::Bf16 => kernel.run::<S::Vector, S::Bf16>(),
            ComputeType::Int8 => kernel.run::<S::Vector, S::Int8>(),
        }
    }
}
