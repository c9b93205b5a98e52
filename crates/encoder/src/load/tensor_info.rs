//! The location of a tensor in a weights file.

use std::collections::BTreeMap;

use candle_core::DType;
use safetensors::Dtype;

/// The tensors of a file, by name.
pub(super) type TensorInfos = BTreeMap<String, TensorInfo>;

/// The dtype, shape and byte range of a tensor in a file.
pub(crate) struct TensorInfo {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Offset of the first byte.
    pub(super) start: u64,
    /// Offset after the last byte.
    pub(super) end: u64,
    /// Strides in elements, if the tensor is not contiguous.
    pub(super) strides: Option<Vec<usize>>,
}

impl TensorInfo {
    /// The offset and the number of the bytes of the tensor, or of one of its equal parts: `part`
    /// is the index of the part and the number of parts.
    pub(super) fn range_of(&self, part: Option<(usize, usize)>) -> (u64, usize) {
        let (index, parts) = part.unwrap_or((0, 1));
        let len = (self.end - self.start) as usize / parts;
        (self.start + (index * len) as u64, len)
    }

    /// The dtype in which the bytes of the file are the values in row-major order; `None` for a
    /// tensor that must be converted or copied.
    pub(super) fn raw_dtype(&self) -> Option<DType> {
        if self.strides.is_some() || cfg!(target_endian = "big") {
            return None;
        }
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        }
    }
}
