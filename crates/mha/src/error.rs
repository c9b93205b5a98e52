//! What can go wrong in this crate.

use mha_kernels::ComputeType as Format;

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
         an additive mask is a bias"
    )]
    MaskValue {
        /// The argument's name.
        argument: &'static str,
        /// The first value found that is neither.
        got: f64,
    },

    /// A sequence claims to be longer than its padded length.
    #[error("valid length {got} at {index} is too long: expected at most {length} keys")]
    ValidLength {
        /// Which one, counted over sequences and their queries.
        index: usize,
        /// The claimed length.
        got: usize,
        /// S, the number of keys there are.
        length: usize,
    },

    /// A valid length that is no length.
    #[error("valid_lens holds {got}: expected 0 or more, and less than 2³²")]
    MaskLength {
        /// The first such value.
        got: i64,
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

    /// The groups of heads that share keys and values are not equal.
    #[error(
        "num_attention_heads {num_attention_heads} is not divisible by num_key_value_heads \
         {num_key_value_heads}: expected a multiple of {num_key_value_heads}, got remainder {}",
        num_attention_heads % num_key_value_heads
    )]
    GroupsDoNotDivide {
        /// Number of heads.
        num_attention_heads: usize,
        /// Number of heads that have keys and values of their own.
        num_key_value_heads: usize,
    },

    /// Pruning would leave more heads to some keys than to others.
    #[error(
        "pruning leaves {got:?} heads in the groups that share keys: expected equally many in each"
    )]
    UnequalGroups {
        /// The heads left in each group that has any.
        got: Vec<usize>,
    },

    /// A head that is not there, or that cannot be taken away.
    #[error("head {head} {what}: expected heads below {heads}")]
    Head {
        /// The head.
        head: usize,
        /// What is wrong with it.
        what: &'static str,
        /// H, the number of heads there are.
        heads: usize,
    },

    /// A cache has no room for more tokens.
    #[error(
        "cache is full: expected at most {capacity} tokens, got {len} and {more} more; \
         reset it, or give it a larger capacity"
    )]
    CacheFull {
        /// The most tokens it holds.
        capacity: usize,
        /// The tokens it holds.
        len: usize,
        /// The tokens there is no room for.
        more: usize,
    },

    /// A probability outside of its range.
    #[error("{name} {got} is no probability to drop with: expected 0 or more, and less than 1")]
    Probability {
        /// The argument's name.
        name: &'static str,
        /// Its value.
        got: f64,
    },

    /// Products in less than f32, of tensors that are not rounded to it.
    #[error(
        "{format:?} products want f32 weights that nobody trains{}: got {dtype:?} on \
         {device:?}{}; give the weights so, or take Format::F32",
        if *format == Format::Int8 { ", on the CPU" } else { "" },
        if *trained { ", in training" } else { "" }
    )]
    Format {
        /// The format asked for.
        format: Format,
        /// The weights' dtype.
        dtype: candle_core::DType,
        /// Where they are.
        device: candle_core::DeviceLocation,
        /// Whether autograd follows them.
        trained: bool,
    },

    /// `MHA_ISA` asks for what this machine does not have.
    #[error(transparent)]
    Isa(#[from] mha_kernels::IsaError),

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
