//! The instruction sets that kernels may use, detected once per process.

use std::{ffi::OsString, sync::OnceLock};

use crate::{
    compute_type::ComputeType,
    simd::{Level, ProductKernel, Products, SimdKernel},
};

/// An instruction set that this machine supports.
///
/// A value proves that the CPU can run the instructions, so safe functions may execute them:
/// [`Isa::available`] and [`Isa::get`] query the CPU, and [`Isa::SCALAR`] needs no special
/// instructions. No other public item returns an `Isa`.
///
/// # Examples
/// ```
/// use mha_kernels::Isa;
///
/// assert!(Isa::available().contains(&Isa::get()?));
/// assert_eq!(Isa::SCALAR.name(), "scalar");
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
/// Safe code cannot name an instruction set that was not detected:
/// ```compile_fail,E0423
/// let _ = mha_kernels::Isa(0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Level);

/// `MHA_ISA` is not the name of an instruction set that this machine supports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "MHA_ISA is {got:?}: expected one of {} (supported by this machine)",
    available.join(", ")
)]
pub struct IsaError {
    /// The value of `MHA_ISA`.
    pub got: String,
    /// The names of the instruction sets that this machine supports.
    pub available: Vec<&'static str>,
}

impl Isa {
    /// Plain Rust on every machine: the reference for the other instruction sets.
    pub const SCALAR: Self = Self(Level::Scalar);

    /// All instruction sets that this machine supports, slowest first.
    pub fn available() -> Vec<Self> {
        Level::ALL.iter().filter(|level| level.is_supported()).map(|&level| Self(level)).collect()
    }

    /// The instruction set that the environment variable `MHA_ISA` names, or the fastest available
    /// one if the variable is not set. The choice is made once per process.
    ///
    /// # Errors
    /// [`IsaError`] if `MHA_ISA` is not the name of an instruction set that this machine supports.
    pub fn get() -> Result<Self, IsaError> {
        static CHOSEN: OnceLock<Result<Isa, IsaError>> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::choose(std::env::var_os("MHA_ISA"))).clone()
    }

    /// Whether callers should prefer these kernels to a portable GEMM library: true if the machine
    /// has a SIMD path or `MHA_ISA` is set. The scalar path is slower than such a library.
    pub fn kernels_enabled() -> bool {
        static ENABLED: OnceLock<bool> = OnceLock::new();
        *ENABLED
            .get_or_init(|| std::env::var_os("MHA_ISA").is_some() || Self::available().len() > 1)
    }

    fn choose(requested: Option<OsString>) -> Result<Self, IsaError> {
        let available = Self::available();
        let Some(requested) = requested else {
            return Ok(available[available.len() - 1]);
        };
        let got = requested.to_string_lossy().into_owned();
        match available.iter().find(|isa| isa.name() == got) {
            Some(&isa) => Ok(isa),
            None => {
                Err(IsaError { got, available: available.iter().map(|isa| isa.name()).collect() })
            }
        }
    }

    /// The name that `MHA_ISA` accepts for this instruction set.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// The properties of the products of a compute type.
    pub(crate) fn products(self, compute_type: ComputeType) -> Products {
        self.0.products(compute_type)
    }

    /// The instruction set for kernels with too few products to pay for tile registers, or for pairs of
    /// lanes.
    pub(crate) fn without_tiles(self) -> Self {
        Self(self.0.without_tiles())
    }

    /// Runs a kernel with the vectors of this instruction set.
    pub(crate) fn run(self, kernel: impl SimdKernel) {
        // SAFETY: an `Isa` proves that the CPU supports its instructions. The code that built the
        // kernel checked its other preconditions.
        unsafe { self.0.run(kernel) }
    }

    /// Runs a kernel with the fastest products that this instruction set has for `compute_type`.
    pub(crate) fn run_products(self, compute_type: ComputeType, kernel: impl ProductKernel) {
        // SAFETY: as above.
        unsafe { self.0.run_products(compute_type, kernel) }
    }
}

impl ComputeType {
    /// The compute type of attention whose inputs come from linear layers of this type: bf16 if
    /// this type is narrower than f32 and `isa` has bf16 instructions, otherwise f32.
    pub fn for_attention(self, isa: Isa) -> Self {
        match self {
            Self::Bf16 | Self::Int8 if isa.products(Self::Bf16).input_lanes == 1 => Self::Bf16,
            _ => Self::F32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mha_isa_selects_an_available_isa_and_rejects_others() {
        for isa in Isa::available() {
            assert_eq!(Isa::choose(Some(isa.name().into())), Ok(isa));
        }
        assert_eq!(Isa::choose(None).unwrap(), *Isa::available().last().unwrap());
        let error = Isa::choose(Some("sse9".into())).unwrap_err();
        assert!(error.to_string().starts_with("MHA_ISA is \"sse9\": expected one of scalar"));
    }
}
