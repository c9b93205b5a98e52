//! [`Level`]: the list of all instruction sets.

#[cfg(target_arch = "aarch64")]
use super::neon::{Neon, NeonBf16, NeonBfdot, NeonDotprod, NeonI8mm};
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::wasm::Wasm;
#[cfg(target_arch = "x86_64")]
use super::{
    amx::Amx,
    avx2::{Avx2, Avx2ExactInt8},
    avx512::{Avx512, Avx512Bf16Vnni, Avx512Vnni},
};
use super::{
    instruction_set::{InstructionSet, ProductKernel, SimdKernel},
    microkernel::{Microkernel, RegisterTile},
    scalar::Scalar,
};
use crate::compute_type::ComputeType;

/// The properties of the products of an instruction set in a compute type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Products {
    /// [`RegisterTile::NR`]
    pub(crate) nr: usize,
    /// [`Microkernel::MAX_MR`]
    pub(crate) max_mr: usize,
    /// [`Microkernel::BLOCK`]
    pub(crate) block: (usize, usize),
    /// [`Dot::INPUT_LANES`](super::Dot::INPUT_LANES)
    pub(crate) input_lanes: usize,
    /// [`Dot::IS_BF16X3`](super::Dot::IS_BF16X3)
    pub(crate) is_bf16x3: bool,
    /// [`Dot::HAS_LANE_PAIRS`](super::Dot::HAS_LANE_PAIRS)
    pub(crate) has_lane_pairs: bool,
    /// [`Dot::ADDS_INT8_PAIRS_IN_I16`](super::Dot::ADDS_INT8_PAIRS_IN_I16)
    pub(crate) adds_int8_pairs_in_i16: bool,
}

impl Products {
    const fn of<V: RegisterTile, D: Microkernel<V>>() -> Self {
        Self {
            nr: V::NR,
            max_mr: D::MAX_MR,
            block: D::BLOCK,
            input_lanes: D::INPUT_LANES,
            is_bf16x3: D::IS_BF16X3,
            has_lane_pairs: D::HAS_LANE_PAIRS,
            adds_int8_pairs_in_i16: D::ADDS_INT8_PAIRS_IN_I16,
        }
    }
}

/// Defines [`Level`], with the instruction sets of the target architecture, slowest first.
macro_rules! instruction_sets {
    ($($(#[$attribute:meta])* $Set:ident,)*) => {
        /// An instruction set, as a value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Level { $($(#[$attribute])* $Set,)* }

        /// # Safety
        /// As for [`InstructionSet`].
        impl Level {
            /// Slowest first.
            pub(crate) const ALL: &[Self] = &[$($(#[$attribute])* Self::$Set,)*];

            pub(crate) fn name(self) -> &'static str {
                match self { $($(#[$attribute])* Self::$Set => $Set::NAME,)* }
            }

            pub(crate) fn is_supported(self) -> bool {
                match self { $($(#[$attribute])* Self::$Set => $Set::is_supported(),)* }
            }

            /// [`InstructionSet::WITHOUT_TILES`]
            pub(crate) fn without_tiles(self) -> Self {
                let name = match self { $($(#[$attribute])* Self::$Set => $Set::WITHOUT_TILES,)* };
                Self::ALL.iter().copied().find(|level| level.name() == name).unwrap_or(self)
            }

            pub(crate) fn products(self, compute_type: ComputeType) -> Products {
                fn of<S: InstructionSet>(compute_type: ComputeType) -> Products {
                    match compute_type {
                        ComputeType::F32 => Products::of::<S::Vector, S::F32>(),
                        ComputeType::Bf16 => Products::of::<S::Vector, S::Bf16>(),
                        ComputeType::Int8 => Products::of::<S::Vector, S::Int8>(),
                    }
                }
                match self { $($(#[$attribute])* Self::$Set => of::<$Set>(compute_type),)* }
            }

            pub(crate) unsafe fn run(self, kernel: impl SimdKernel) {
                // SAFETY: upheld by the caller.
                unsafe { match self { $($(#[$attribute])* Self::$Set => $Set::run(kernel),)* } }
            }

            pub(crate) unsafe fn run_products(
                self,
                compute_type: ComputeType,
                kernel: impl ProductKernel,
            ) {
                // SAFETY: upheld by the caller.
                unsafe {
                    match self {
                        $($(#[$attribute])* Self::$Set => $Set::run_products(compute_type, kernel),)*
                    }
                }
            }
        }
    };
}

instruction_sets! {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2ExactInt8,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16Vnni,
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDotprod,
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
    #[cfg(target_arch = "aarch64")]
    NeonBfdot,
    #[cfg(target_arch = "aarch64")]
    NeonBf16,
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    Wasm,
}
