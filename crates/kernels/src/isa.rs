//! Which instructions a kernel may use, found out once.

use std::sync::OnceLock;

use crate::{Format, gemm::thirds};

/// A set of instructions that this machine has. Kernels run the instructions that an `Isa` names, so
/// one is only made by [`Isa::all`] and [`Isa::get`], which ask the processor, and by [`Isa::SCALAR`].
///
/// # Examples
/// ```
/// use mha_kernels::Isa;
///
/// assert!(Isa::all().contains(&Isa::get()?));
/// assert_eq!(Isa::SCALAR.name(), "scalar");
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
/// A machine's missing instructions cannot be asked for:
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

/// Rows of a tile in AMX's registers, two of them high.
pub(crate) const AMX_ROWS: usize = 32;

/// `MHA_ISA` asks for what is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("MHA_ISA is {got:?}: expected one of {}, which this machine has", has.join(", "))]
pub struct IsaError {
    /// What it says.
    pub got: String,
    /// What it may say here.
    pub has: Vec<&'static str>,
}

impl Isa {
    /// One number at a time, on every machine: the specification of the others.
    pub const SCALAR: Self = Self(Level::Scalar);
    /// x86-64 with AVX2, FMA and F16C: 8 numbers of f32 at a time.
    pub(crate) const AVX2_FMA: Self = Self(Level::Avx2Fma);
    /// x86-64 with AVX-512 F and BW: 16 numbers of f32 at a time.
    pub(crate) const AVX512: Self = Self(Level::Avx512);
    /// With VNNI besides: products of 8-bit integers.
    pub(crate) const AVX512_VNNI: Self = Self(Level::Avx512Vnni);
    /// With BF16 besides: products of bf16.
    pub(crate) const AVX512_BF16_VNNI: Self = Self(Level::Avx512Bf16Vnni);
    /// With AMX besides: products of whole tiles of bf16 and of 8-bit integers, and of f32 made of
    /// those of bf16.
    pub(crate) const AMX: Self = Self(Level::Amx);

    /// All that this machine has, the best last.
    pub fn all() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut all = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 =
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            let each = [
                (Self::AVX2_FMA, avx2),
                (Self::AVX512, avx512),
                (Self::AVX512_VNNI, is_x86_feature_detected!("avx512vnni")),
                (Self::AVX512_BF16_VNNI, is_x86_feature_detected!("avx512bf16")),
                (Self::AMX, is_x86_feature_detected!("avx512bf16") && may_use_amx()),
            ];
            all.extend(each.into_iter().take_while(|(_, has)| *has).map(|(isa, _)| isa));
        }
        all
    }

    /// What `MHA_ISA` names, or else the best there is; found out once for the whole program.
    ///
    /// # Errors
    /// [`IsaError`] if `MHA_ISA` names what this machine does not have.
    pub fn get() -> Result<Self, IsaError> {
        static CHOSEN: OnceLock<Result<Isa, IsaError>> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::choose(std::env::var("MHA_ISA").ok())).clone()
    }

    /// Whether the kernels are faster here than a good library's portable product: where there is
    /// more than [`Isa::SCALAR`], or where `MHA_ISA` asks for something.
    pub fn is_worth_it() -> bool {
        static WORTH_IT: OnceLock<bool> = OnceLock::new();
        *WORTH_IT.get_or_init(|| std::env::var_os("MHA_ISA").is_some() || Self::all().len() > 1)
    }

    fn choose(wanted: Option<String>) -> Result<Self, IsaError> {
        let all = Self::all();
        let Some(got) = wanted else {
            return Ok(all[all.len() - 1]);
        };
        match all.iter().find(|isa| isa.name() == got) {
            Some(&isa) => Ok(isa),
            None => Err(IsaError { got, has: all.iter().map(|isa| isa.name()).collect() }),
        }
    }

    /// Rows of a tile of the product, the most that the registers hold: a format that is widened
    /// first needs some of them for that.
    pub(crate) fn tile_rows(self, format: Format) -> usize {
        let widened = match format {
            Format::F32 => false,
            Format::Bf16 => self < Self::AVX512_BF16_VNNI,
            Format::Int8 => self < Self::AVX512_VNNI,
        };
        match (self, widened) {
            (Self::SCALAR, _) => 4,
            (Self::AVX2_FMA, false) => 6,
            (Self::AVX2_FMA, true) => 4,
            (Self::AMX, _) => AMX_ROWS,
            (_, false) => 14,
            (_, true) => 12,
        }
    }

    /// Whether a format's numbers are multiplied by their [`thirds`].
    pub(crate) fn has_thirds(self, format: Format) -> bool {
        self >= Self::AMX && format == Format::F32
    }

    /// Words of 32 bits that so many numbers take.
    pub(crate) fn words(self, format: Format, numbers: usize) -> usize {
        match self.has_thirds(format) {
            true => thirds::words(numbers),
            false => numbers.div_ceil(format.per_word()),
        }
    }

    /// What `MHA_ISA` calls it.
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

/// Whether the processor has AMX for both kinds of numbers, and the system grants this process its
/// registers, as it has to be asked: once it did, it wants signal stacks with room for them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_amx() -> bool {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    #[allow(unused_unsafe)] // safe since Rust 1.94
    // SAFETY: every x86-64 has the instruction; a leaf that there is not reads as another.
    let has = unsafe { std::arch::x86_64::__cpuid_count(7, 0) }.edx;
    // SAFETY: the call takes two numbers and answers with one.
    let asked =
        || unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    has & BF16_TILE_INT8 == BF16_TILE_INT8 && asked() == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_amx() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_overrides_and_what_is_not_there_is_an_error() {
        assert_eq!(Isa::choose(Some("scalar".into())), Ok(Isa::SCALAR));
        assert_eq!(Isa::choose(None).unwrap(), *Isa::all().last().unwrap());
        let error = Isa::choose(Some("sse9".into())).unwrap_err();
        assert!(error.to_string().starts_with("MHA_ISA is \"sse9\": expected one of scalar"));
    }
}
