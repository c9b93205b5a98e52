//! The dtype of stored vectors.

use half::f16;

encoder::choices! {
    /// The dtype of the vectors in a file.
    pub enum VectorDtype: "dtype of vectors", default F32 {
        /// 32-bit floats.
        F32 = "f32",
        /// 16-bit floats.
        F16 = "f16",
    }
}

impl VectorDtype {
    /// Whether a value is finite when converted to this dtype.
    pub(crate) fn is_finite(self, value: f32) -> bool {
        match self {
            Self::F32 => value.is_finite(),
            Self::F16 => f16::from_f32(value).is_finite(),
        }
    }

    /// The values in this dtype, little-endian.
    pub(crate) fn to_bytes<'a>(self, values: impl Iterator<Item = &'a f32>) -> Vec<u8> {
        match self {
            Self::F32 => values.flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16 => values.flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        }
    }

    /// The size of a value in bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}
