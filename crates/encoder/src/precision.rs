//! How exactly a model computes, and how fast.

use candle_core::{DType, Device};
use mha::ComputeType;

use crate::{Error, Result};

/// What a model computes in. Less of it is faster. Sums are in f32 or exact, softmax and layer
/// normalisation in f32; on processors with AVX-512 BF16 the factors of attention's products are
/// bf16 under `Bf16` and `Int8`, on others f32.
///
/// | | on a CPU | elsewhere |
/// |---|---|---|
/// | `F32` | f32 | f32 |
/// | `F16` | candle's f16: slow | f16 |
/// | `Bf16` | f32, but the factors of the linear maps' products are bf16 | the same, and attention's |
/// | `Int8` | f32, but the factors of the linear maps' products are 8-bit integers | – |
///
/// # Examples
/// ```
/// use candle_core::Device;
/// use encoder::{Embedder, Precision};
///
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let embed = |precision| {
///     let dir = "weights/all-MiniLM-L6-v2";
///     Embedder::from_dir(dir, precision, &Device::Cpu)?.embed(&["I love AI"])
/// };
/// let exact = embed(Precision::F32)?;
/// for (precision, least) in [(Precision::Bf16, 0.9999), (Precision::Int8, 0.998)] {
///     let cosine = (&exact * embed(precision)?)?.sum_all()?.to_scalar::<f32>()?;
///     assert!(cosine > least && cosine < 1.0);
/// }
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 24 bits of mantissa.
    #[default]
    F32,
    /// 11 bits of mantissa, numbers up to 65,504.
    F16,
    /// 8 bits of mantissa.
    Bf16,
    /// Weights in steps of 1/127 of the largest of an output, the rest in steps of 1/255 of a
    /// token's range.
    Int8,
}

impl Precision {
    /// The dtype of the tensors on a device, and what the linear maps multiply in.
    ///
    /// # Errors
    /// [`Error::Precision`] if it is not computed there.
    pub fn on(self, device: &Device) -> Result<(DType, ComputeType)> {
        match (self, device.is_cpu()) {
            (Self::F32, _) => Ok((DType::F32, ComputeType::F32)),
            (Self::F16, _) => Ok((DType::F16, ComputeType::F32)),
            (Self::Bf16, _) => Ok((DType::F32, ComputeType::Bf16)),
            (Self::Int8, true) => Ok((DType::F32, ComputeType::Int8)),
            (Self::Int8, false) => {
                Err(Error::Precision { precision: self, device: device.location() })
            }
        }
    }
}
