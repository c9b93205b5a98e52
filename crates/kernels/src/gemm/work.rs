//! Work on words of a [`Format`], compiled for each of the instructions that can do it.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

#[cfg(target_arch = "x86_64")]
use super::{
    amx::{Amx, Registers, Session},
    dot::{NativeBf16, NativeInt8},
};
use super::{
    dot::{Bf16, Dot, F32, Int8},
    packed::Format,
    tile::Tiles,
};
use crate::Isa;

/// What is the same for all vectors and words.
pub(crate) trait Work {
    /// # Safety
    /// The instructions of `L` and `D`, and what the maker of the work has checked.
    unsafe fn run<L: Tiles, D: Dot<L>>(self);
}

/// Words that every vector knows.
#[cfg(target_arch = "x86_64")]
trait Portable: Dot<f32> + Dot<__m256> + Dot<__m512> {}
#[cfg(not(target_arch = "x86_64"))]
trait Portable: Dot<f32> {}

impl Portable for F32 {}
impl Portable for Bf16 {}
impl Portable for Int8 {}

/// Runs it on words of a format, with the best instructions that an [`Isa`] has for them.
pub(crate) fn run(isa: Isa, format: Format, work: impl Work) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        unsafe fn bf16(work: impl Work) {
            // SAFETY: the caller's, and the instructions are those of the vectors and words.
            unsafe { work.run::<__m512, NativeBf16>() }
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        unsafe fn int8(work: impl Work) {
            // SAFETY: as above.
            unsafe { work.run::<__m512, NativeInt8>() }
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vnni")]
        unsafe fn amx<D: Registers>(work: impl Work) {
            let _session = Session;
            // SAFETY: as above.
            unsafe { work.run::<__m512, Amx<D>>() }
        }
        match format {
            // SAFETY: an `Isa` is only had where the machine was found to have it; the rest is what
            // the work's maker checked.
            Format::F32 if isa.has_thirds(format) => return unsafe { amx::<F32>(work) },
            // SAFETY: as above.
            Format::Bf16 if isa >= Isa::AMX => return unsafe { amx::<NativeBf16>(work) },
            // SAFETY: as above.
            Format::Int8 if isa >= Isa::AMX => return unsafe { amx::<NativeInt8>(work) },
            // SAFETY: as above.
            Format::Bf16 if isa >= Isa::AVX512_BF16_VNNI => return unsafe { bf16(work) },
            // SAFETY: as above.
            Format::Int8 if isa >= Isa::AVX512_VNNI => return unsafe { int8(work) },
            _ => {}
        }
    }
    match format {
        Format::F32 => portable::<F32>(isa, work),
        Format::Bf16 => portable::<Bf16>(isa, work),
        Format::Int8 => portable::<Int8>(isa, work),
    }
}

fn portable<D: Portable>(isa: Isa, work: impl Work) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw")]
        unsafe fn avx512<D: Portable>(work: impl Work) {
            // SAFETY: the caller's, and the instructions are those of the vectors.
            unsafe { work.run::<__m512, D>() }
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<D: Portable>(work: impl Work) {
            // SAFETY: as above.
            unsafe { work.run::<__m256, D>() }
        }
        match isa {
            Isa::SCALAR => {}
            // SAFETY: as in `run`.
            Isa::AVX2_FMA => return unsafe { avx2::<D>(work) },
            // SAFETY: as in `run`.
            _ => return unsafe { avx512::<D>(work) },
        }
    }
    let _ = isa;
    // SAFETY: one number at a time needs no instructions; the rest as in `run`.
    unsafe { work.run::<f32, D>() }
}
