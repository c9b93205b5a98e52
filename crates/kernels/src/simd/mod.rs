//! SIMD vectors. Each kernel is written once, generic over [`Vector`], and compiled for every
//! instruction set.
//!
//! The scalar reference is the same source with a vector of one lane. It runs the same operations,
//! with two exceptions: sums across lanes (`reduce_add`) are added in another order, and AVX2
//! requires a coarser quantisation of int8 weights ([`Vector::ADDS_INT8_PAIRS_IN_I16`]).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod ops;
mod scalar;
mod vector;

pub(crate) use ops::{LINE_BYTES, hadamard, prefetch, prefetch_l2, prefetch_rows, transpose};
pub(crate) use scalar::bf16_bits;
pub(crate) use vector::{MAX_LANES, Vector};

/// Calls `$body::<V>($args)` with the vector type `V` of an [`Isa`](crate::Isa), compiled with the
/// instructions of that ISA enabled.
macro_rules! dispatch_simd {
    ($isa:expr, $body:ident, $args:ident: $Args:ty) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn avx512($args: $Args) {
            // SAFETY: upheld by the caller; the vector type needs the enabled instructions only.
            unsafe { $body::<std::arch::x86_64::__m512>($args) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($args: $Args) {
            // SAFETY: as above.
            unsafe { $body::<std::arch::x86_64::__m256>($args) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves that the CPU supports its instructions. The code that built
            // the arguments checked the other preconditions of `$body`.
            isa if isa >= crate::isa::Isa::AVX512 => unsafe { avx512($args) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            crate::isa::Isa::AVX2_FMA => unsafe { avx2($args) },
            // SAFETY: as above; the scalar vector needs no special instructions.
            _ => unsafe { $body::<f32>($args) },
        }
    }};
}
pub(crate) use dispatch_simd;
