//! The errors of this crate.

use crate::ComputeType;

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number is out of range.
    #[error("{field} {got} is invalid: expected {expected}")]
    Value {
        /// The name of the number.
        field: &'static str,
        /// The valid numbers.
        expected: &'static str,
        /// The number.
        got: f64,
    },

    /// An argument has the wrong shape.
    #[error("{argument} has the wrong shape: expected {expected}, got {got:?}")]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The expected shape, or the expected property of the shape.
        expected: String,
        /// The argument's shape.
        got: Vec<usize>,
    },

    /// An argument has an unsupported dtype.
    #[error("{argument} has the wrong dtype: expected {expected}, got {got:?}")]
    DType {
        /// The argument's name.
        argument: &'static str,
        /// The expected dtypes.
        expected: &'static str,
        /// The argument's dtype.
        got: candle_core::DType,
    },

    /// The weights cannot be converted to the compute type.
    #[error(
        "{compute_type:?} products need f32 weights and biases{} that autograd does not track: got \
         {dtype:?} on {device:?}{}; convert or detach the tensors, or use ComputeType::F32",
        if *compute_type == ComputeType::Int8 { " on the CPU" } else { "" },
        if *tracked { ", tracked" } else { "" }
    )]
    ComputeType {
        /// The requested compute type.
        compute_type: ComputeType,
        /// The dtype of the tensor that cannot be converted: the weights or the bias.
        dtype: candle_core::DType,
        /// The device of this tensor.
        device: candle_core::DeviceLocation,
        /// Whether autograd tracks this tensor.
        tracked: bool,
    },

    /// A module was computed whose tensors are not loaded.
    #[error(transparent)]
    NotLoaded(#[from] NotLoaded),

    /// `MHA_ISA` is not the name of an instruction set that this machine supports.
    #[error(transparent)]
    Isa(#[from] mha_kernels::IsaError),

    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Allows `?` on this crate's results inside an implementation of `candle_core::Module`.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

/// The name of a tensor that is not loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor {tensor:?} is not loaded: only its name and shape were read")]
pub struct NotLoaded {
    /// The tensor's name.
    pub tensor: String,
}
