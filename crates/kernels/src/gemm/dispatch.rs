//! [`dispatch`]: runs a kernel with the best microkernel of an ISA for a compute type.

#[cfg(target_arch = "x86_64")]
use super::{
    amx::{Amx, AmxProduct, AmxSession},
    dot::{NativeBf16, NativeInt8},
};
use super::{
    dot::{Bf16, F32, Int8},
    microkernel::{Microkernel, RegisterTile},
};
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::{compute_type::ComputeType, isa::Isa, simd::Scalar};

/// A computation that is compiled once for each pair of vector type and microkernel.
pub(crate) trait Kernel {
    /// # Safety
    /// The CPU supports the instructions of `V` and `D`; the code that built the kernel checked its
    /// other preconditions.
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self);
}

/// A microkernel that exists for every vector type.
#[cfg(target_arch = "x86_64")]
trait Portable: Microkernel<Scalar> + Microkernel<Avx2> + Microkernel<Avx512> {}
#[cfg(not(target_arch = "x86_64"))]
trait Portable: Microkernel<Scalar> {}

impl Portable for F32 {}
impl Portable for Bf16 {}
impl Portable for Int8 {}

/// Runs `kernel` with the fastest instructions that `isa` has for `compute_type`.
pub(crate) fn dispatch(isa: Isa, compute_type: ComputeType, kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        unsafe fn bf16(kernel: impl Kernel) {
            // SAFETY: upheld by the caller; the types need the enabled instructions only.
            unsafe { kernel.run::<Avx512, NativeBf16>() }
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn int8(kernel: impl Kernel) {
            // SAFETY: as above.
            unsafe { kernel.run::<Avx512, NativeInt8>() }
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vnni")]
        unsafe fn amx<D: AmxProduct>(kernel: impl Kernel) {
            let _session = AmxSession;
            // SAFETY: upheld by the caller. The intrinsics of `Amx` need the enabled instructions
            // only; its AMX instructions are inline assembly, which `isa >= Isa::AMX` permits.
            unsafe { kernel.run::<Avx512, Amx<D>>() }
        }
        match compute_type {
            // SAFETY: an `Isa` proves that the CPU supports its instructions. The code that built
            // the kernel checked the other preconditions.
            ComputeType::F32 if isa >= Isa::AMX => return unsafe { amx::<F32>(kernel) },
            // SAFETY: as above.
            ComputeType::Bf16 if isa >= Isa::AMX => return unsafe { amx::<NativeBf16>(kernel) },
            // SAFETY: as above.
            ComputeType::Int8 if isa >= Isa::AMX => return unsafe { amx::<NativeInt8>(kernel) },
            // SAFETY: as above.
            ComputeType::Bf16 if isa >= Isa::AVX512_BF16_VNNI => return unsafe { bf16(kernel) },
            // SAFETY: as above.
            ComputeType::Int8 if isa >= Isa::AVX512_VNNI => return unsafe { int8(kernel) },
            _ => {}
        }
    }
    match compute_type {
        ComputeType::F32 => dispatch_portable::<F32>(isa, kernel),
        ComputeType::Bf16 => dispatch_portable::<Bf16>(isa, kernel),
        ComputeType::Int8 => dispatch_portable::<Int8>(isa, kernel),
    }
}

fn dispatch_portable<D: Portable>(isa: Isa, kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn avx512<D: Portable>(kernel: impl Kernel) {
            // SAFETY: upheld by the caller; the vector type needs the enabled instructions only.
            unsafe { kernel.run::<Avx512, D>() }
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<D: Portable>(kernel: impl Kernel) {
            // SAFETY: as above.
            unsafe { kernel.run::<Avx2, D>() }
        }
        match isa {
            Isa::SCALAR => {}
            // SAFETY: as in `dispatch`.
            Isa::AVX2_FMA => return unsafe { avx2::<D>(kernel) },
            // SAFETY: as in `dispatch`.
            _ => return unsafe { avx512::<D>(kernel) },
        }
    }
    let _ = isa;
    // SAFETY: as in `dispatch`; the scalar vector needs no special instructions.
    unsafe { kernel.run::<Scalar, D>() }
}
