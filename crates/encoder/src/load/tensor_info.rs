//! The location of a tensor in a weights file.

use std::collections::BTreeMap;

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
