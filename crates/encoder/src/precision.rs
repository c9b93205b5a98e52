//! The numeric precision of a model's computation.

use candle_core::{DType, Device};
use ops::ComputeType;

use crate::{ConfigError, Result};

crate::choices! {
    /// The precision of a model's computation. On some devices, a lower precision is faster.
    ///
    /// | | on a CPU | on a GPU |
    /// |---|---|---|
    /// | `F32` | f32 | f32 |
    /// | `F16` | f16 with candle's operations, which are slow | f16 |
    /// | `Bf16` | f32; linear layers multiply bf16 | f32; linear layers and attention multiply bf16 |
    /// | `Int8` | f32; linear layers multiply 8-bit integers | not available |
    ///
    /// - f32 has a 24-bit significand. f16 has an 11-bit significand and values up to 65,504. bf16
    ///   has an 8-bit significand and the exponents of f32.
    /// - int8: weights and activations are first rotated by a Hadamard matrix in blocks of 64; a
    ///   shorter block at the end of a row is not rotated. Weights have one scale per output: the
    ///   largest rotated magnitude divided by 127. On CPUs with AVX2 and without AVX-512, the scale
    ///   is also at least |a + b| / 126 for each pair of rotated weights a, b at the positions 2i
    ///   and 2i + 1. Activations have one scale and one zero point per token; the scale is (max −
    ///   min) / 255, where max and min are taken over the token's rotated values and 0.
    ///
    /// Matrix products accumulate in f32 or in integers. Softmax and layer normalisation compute in
    /// f32. On a CPU with AVX-512 BF16, attention multiplies bf16 under `Bf16` and `Int8`; on other
    /// CPUs it multiplies f32.
    ///
    /// # Examples
    /// ```
    /// use encoder::{Embedder, LoadOptions, Precision};
    ///
    /// let embed = |precision| {
    ///     let dir = "../../weights/all-MiniLM-L6-v2";
    ///     let options = LoadOptions::default().with_precision(precision);
    ///     Embedder::from_dir(dir, &options)?.embed(&["I love AI"])
    /// };
    /// let exact = embed(Precision::F32)?;
    /// for (precision, minimum) in [(Precision::Bf16, 0.9999), (Precision::Int8, 0.998)] {
    ///     let cosine = (&exact * embed(precision)?)?.sum_all()?.to_scalar::<f32>()?;
    ///     assert!(cosine > minimum && cosine < 1.0);
    /// }
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub enum Precision: "precision", default F32 {
        /// 32-bit floats.
        F32 = "f32",
        /// 16-bit floats; slow on a CPU.
        F16 = "f16",
        /// bfloat16; in the tests, the cosine between an embedding and the f32 embedding of the
        /// same text is at least 0.9999.
        Bf16 = "bf16",
        /// 8-bit integers; CPU only; in the tests, the cosine between an embedding and the f32
        /// embedding of the same text is at least 0.998.
        Int8 = "int8",
    }
}

impl Precision {
    /// The dtype of the tensors and the compute type of the linear layers on `device`.
    ///
    /// # Errors
    /// [`ConfigError::Precision`] for `Int8` if `device` is not a CPU.
    pub fn on(self, device: &Device) -> Result<(DType, ComputeType)> {
        match (self, device.is_cpu()) {
            (Self::F32, _) => Ok((DType::F32, ComputeType::F32)),
            (Self::F16, _) => Ok((DType::F16, ComputeType::F32)),
            (Self::Bf16, _) => Ok((DType::F32, ComputeType::Bf16)),
            (Self::Int8, true) => Ok((DType::F32, ComputeType::Int8)),
            (Self::Int8, false) => {
                Err(ConfigError::Precision { precision: self, device: device.location() }.into())
            }
        }
    }
}
