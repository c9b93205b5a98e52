//! The instruction sets that kernels may use, detected once per process.

use std::{ffi::OsString, sync::OnceLock};

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
/// ```compile_fail,E0624
/// let _ = mha_kernels::Isa::AMX;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Scalar,
    Avx2Fma,
    Avx512,
    Avx512Vnni,
    Avx512Bf16Vnni,
    Amx,
}

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
    /// x86-64 with AVX2, FMA and F16C.
    pub(crate) const AVX2_FMA: Self = Self(Level::Avx2Fma);
    /// x86-64 with AVX-512 F and BW.
    pub(crate) const AVX512: Self = Self(Level::Avx512);
    /// `AVX512` plus VNNI: dot products of 8-bit integers.
    pub(crate) const AVX512_VNNI: Self = Self(Level::Avx512Vnni);
    /// `AVX512_VNNI` plus BF16: dot products of bf16.
    pub(crate) const AVX512_BF16_VNNI: Self = Self(Level::Avx512Bf16Vnni);
    /// `AVX512_BF16_VNNI` plus AMX: tile products of bf16 and of 8-bit integers. Linear maps in
    /// f32 are computed as BF16x3, attention in f32 with AVX-512.
    pub(crate) const AMX: Self = Self(Level::Amx);

    /// All instruction sets that this machine supports, slowest first.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut available = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 =
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            let levels = [
                (Self::AVX2_FMA, avx2),
                (Self::AVX512, avx512),
                (Self::AVX512_VNNI, is_x86_feature_detected!("avx512vnni")),
                (Self::AVX512_BF16_VNNI, is_x86_feature_detected!("avx512bf16")),
                (Self::AMX, is_x86_feature_detected!("avx512bf16") && request_amx()),
            ];
            // Each level includes the ones before it.
            let supported = levels.into_iter().take_while(|(_, supported)| *supported);
            available.extend(supported.map(|(isa, _)| isa));
        }
        available
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
        match self {
            Self::SCALAR => "scalar",
            Self::AVX2_FMA => "avx2",
            Self::AVX512 => "avx512",
            Self::AVX512_VNNI => "avx512-vnni",
            Self::AVX512_BF16_VNNI => "avx512-bf16-vnni",
            Self::AMX => "amx",
        }
    }
}

/// Whether the CPU has AMX with bf16 and int8, and Linux lets this process use the tile registers.
///
/// Linux grants the registers on request only. After that, signal stacks must have room for them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_amx() -> bool {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    #[allow(unused_unsafe)] // `__cpuid_count` is safe since Rust 1.94
    // SAFETY: every x86-64 CPU has CPUID; an unsupported leaf returns the data of another leaf.
    let features = unsafe { std::arch::x86_64::__cpuid_count(7, 0) }.edx;
    // SAFETY: this system call takes two integers and accesses no memory of the process.
    let request =
        || unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    features & BF16_TILE_INT8 == BF16_TILE_INT8 && request() == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn request_amx() -> bool {
    false
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
