//! What can go wrong in this crate.

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why an attention module could not be built or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A size of a config is zero.
    #[error("{field} is zero: expected at least 1, got 0")]
    Zero {
        /// The config's field.
        field: &'static str,
    },

    /// The heads do not share `hidden_size` evenly.
    #[error(
        "hidden_size {hidden_size} is not divisible by num_attention_heads {num_attention_heads}: \
         expected a multiple of {num_attention_heads}, got remainder {}",
        hidden_size % num_attention_heads
    )]
    HeadsDoNotDivide {
        /// Width of the hidden states.
        hidden_size: usize,
        /// Number of heads.
        num_attention_heads: usize,
    },

    /// An argument has another shape than its neighbours demand.
    #[error("{argument} has the wrong shape: expected {expected}, got {got:?}")]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The shape it should have, in the legend's letters and in numbers.
        expected: String,
        /// The shape it has.
        got: Vec<usize>,
    },

    /// An argument has a dtype that means nothing for it.
    #[error("{argument} has the wrong dtype: expected {expected}, got {got:?}")]
    DType {
        /// The argument's name.
        argument: &'static str,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        got: candle_core::DType,
    },

    /// A mask holds something other than 0 and 1.
    #[error(
        "{argument} holds {got}: expected 1 (may attend) or 0 (hidden); \
         an additive mask is not a padding mask"
    )]
    MaskValue {
        /// The argument's name.
        argument: &'static str,
        /// The first value found that is neither.
        got: f64,
    },

    /// A sequence claims to be longer than its padded length.
    #[error("valid length {got} of sequence {index} is too long: expected at most {length} keys")]
    ValidLength {
        /// Which sequence.
        index: usize,
        /// Its claimed length.
        got: usize,
        /// S, the number of keys there are.
        length: usize,
    },

    /// The offsets of packed sequences do not describe the tokens there are.
    #[error(
        "offsets {got:?} do not describe {tokens} packed tokens: expected 0, .., {tokens}, never falling"
    )]
    Offsets {
        /// The offsets given.
        got: Vec<usize>,
        /// N, the number of packed tokens.
        tokens: usize,
    },

    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// So that these modules can be called with `?` inside a `candle_core::Module`.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}
