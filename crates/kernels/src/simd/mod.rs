//! SIMD vectors. Each kernel is written once, generic over [`Vector`], and compiled for every
//! instruction set.
//!
//! A vector has 16 lanes: one register of AVX-512, two of AVX2. The scalar reference is the same
//! source with 16 numbers. All run the same operations in the same order, with one exception: AVX2
//! requires a coarser quantisation of int8 weights ([`Vector::ADDS_INT8_PAIRS_IN_I16`]).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod prefetch;
mod scalar;
mod vector;

pub(crate) use prefetch::{LINE_BYTES, prefetch, prefetch_l2, prefetch_rows};
pub(crate) use scalar::bf16_bits;
pub(crate) use vector::{LANES, Vector};

/// The vector of the scalar reference.
pub(crate) type Scalar = [f32; LANES];
/// The vector of AVX2.
#[cfg(target_arch = "x86_64")]
pub(crate) type Avx2 = [std::arch::x86_64::__m256; 2];
/// The vector of AVX-512.
#[cfg(target_arch = "x86_64")]
pub(crate) type Avx512 = [std::arch::x86_64::__m512; 1];

/// Calls `$body::<V>($args)` with the vector type `V` of an [`Isa`](crate::Isa), compiled with the
/// instructions of that ISA enabled.
macro_rules! dispatch_simd {
    ($isa:expr, $body:ident, $args:ident: $Args:ty) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn avx512($args: $Args) {
            // SAFETY: upheld by the caller; the vector type needs the enabled instructions only.
            unsafe { $body::<crate::simd::Avx512>($args) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($args: $Args) {
            // SAFETY: as above.
            unsafe { $body::<crate::simd::Avx2>($args) }
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
            _ => unsafe { $body::<crate::simd::Scalar>($args) },
        }
    }};
}
pub(crate) use dispatch_simd;
