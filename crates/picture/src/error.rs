//! The error type of this crate.

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a picture cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model has no layer or no head with this number.
    #[error("{name} {got} does not exist: expected 0 to {max}")]
    NoLayerOrHead {
        /// `layer` or `head`.
        name: &'static str,
        /// The number.
        got: usize,
        /// The largest number.
        max: usize,
    },

    /// The weights are not a `(L, H, T, S)` tensor of f32.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// A matrix cannot be encoded as PNG.
    #[error(transparent)]
    Png(#[from] png::EncodingError),
}
