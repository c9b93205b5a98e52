//! The errors of this crate.

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// An error of building or running an attention module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The width of a head is odd, but rotary position embedding rotates pairs of values.
    #[error("head width {got} is odd: expected an even width for rotary position embedding")]
    OddHeadDim {
        /// The width of a head.
        got: usize,
    },

    /// A size is zero.
    #[error("{field} is zero: expected at least 1, got 0")]
    Zero {
        /// The name of the size.
        field: &'static str,
    },

    /// A size is too large.
    #[error("{field} is {got}: expected at most {max}")]
    TooLarge {
        /// The name of the size.
        field: &'static str,
        /// The size.
        got: usize,
        /// The maximum.
        max: usize,
    },

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

    /// A relative bias has a `num_buckets` below 4, or a `max_distance` that is not above
    /// `num_buckets / 4`.
    #[error(
        "num_buckets {num_buckets} and max_distance {max_distance} are out of range: expected at \
         least 4 buckets, and a max_distance above num_buckets / 4"
    )]
    Buckets {
        /// Number of buckets.
        num_buckets: usize,
        /// The distance from which all distances share a bucket.
        max_distance: usize,
    },

    /// A position is beyond the table of rotary positions.
    #[error("position {got} is out of range: expected less than {positions}")]
    Position {
        /// The position.
        got: u32,
        /// The number of positions.
        positions: usize,
    },

    /// `hidden_size` is not a multiple of the number of heads.
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

    /// An argument has the wrong rank or shape.
    #[error("{argument} has the wrong shape: expected {expected}, got {got:?}")]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The expected shape in the letters of the table in the crate's documentation and in
        /// numbers, or the expected property of the shape.
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

    /// A boolean mask holds a value other than 0 and 1.
    #[error(
        "{argument} holds {got}: expected 1 (may attend) or 0 (hidden); \
         pass an additive mask to AttentionMask::with_bias"
    )]
    MaskValue {
        /// The argument's name.
        argument: &'static str,
        /// The first value other than 0 and 1.
        got: f64,
    },

    /// A valid length exceeds the number of keys.
    #[error("valid length {got} at index {index} is too long: expected at most {length} keys")]
    ValidLength {
        /// The index of the length in the flattened tensor of lengths.
        index: usize,
        /// The valid length.
        got: usize,
        /// S, the number of keys.
        length: usize,
    },

    /// A valid length is negative or too large.
    #[error("valid_lens holds {got}: expected at least 0 and less than 2³²")]
    ValidLengthRange {
        /// The first length that is out of range.
        got: i64,
    },

    /// An offset of ragged sequences is wrong: the first is not 0, one is too small, or the last is
    /// not N.
    #[error("offsets[{index}] is {got}: expected {expected}")]
    Offset {
        /// The index of the first wrong offset.
        index: usize,
        /// The offset.
        got: usize,
        /// What is expected.
        expected: String,
    },

    /// The tokens of queries are not in ascending order, or one does not exist.
    #[error("token {got} at index {index} of the queries: expected {least} to {}", tokens.saturating_sub(1))]
    QueryToken {
        /// The index in the list of tokens.
        index: usize,
        /// The token.
        got: usize,
        /// The least token that may follow those before.
        least: usize,
        /// N, the number of tokens.
        tokens: usize,
    },

    /// Queries of some tokens need a mask of ragged sequences without parts for each query.
    #[error(
        "the mask cannot select the queries of some tokens: expected ragged sequences without a \
         keep mask, a bias or valid lengths for each query"
    )]
    QueryTokensOfMask,

    /// The number of heads is not a multiple of the number of key-value heads.
    #[error(
        "num_attention_heads {num_attention_heads} is not divisible by num_key_value_heads \
         {num_key_value_heads}: expected a multiple of {num_key_value_heads}, got remainder {}",
        num_attention_heads % num_key_value_heads
    )]
    GroupsDoNotDivide {
        /// Number of heads.
        num_attention_heads: usize,
        /// Number of key-value heads.
        num_key_value_heads: usize,
    },

    /// Pruning would leave groups of different sizes. A group is the heads that share one key-value
    /// head.
    #[error(
        "pruning leaves {got:?} heads in the groups that share a key-value head: expected the same \
         number in each group"
    )]
    UnequalGroups {
        /// The number of heads left in each group that is not empty.
        got: Vec<usize>,
    },

    /// Disentangled attention with fewer key-value heads than heads.
    #[error(
        "num_key_value_heads is {groups}: expected {heads}, the number of heads, for disentangled \
         attention"
    )]
    GroupedHeads {
        /// H, the number of heads.
        heads: usize,
        /// The number of key-value heads.
        groups: usize,
    },

    /// Disentangled attention in a module that normalises queries and keys.
    #[error(
        "the config has a query_key_norm: expected none for disentangled attention, because no \
         published model defines whether it also normalises the keys and queries of relative \
         positions"
    )]
    DisentangledNorm,

    /// Pruning would leave no head.
    #[error("pruning leaves no head: expected at least one of {heads} heads to remain")]
    NoHeadLeft {
        /// H, the number of heads.
        heads: usize,
    },

    /// A head does not exist.
    #[error("head {head} does not exist: expected heads below {heads}")]
    Head {
        /// The head.
        head: usize,
        /// H, the number of heads.
        heads: usize,
    },

    /// A cache has no room for more tokens.
    #[error(
        "cache is full: expected at most {capacity} tokens, got {len} in the cache and {more} new; \
         reset the cache, or give it a larger capacity"
    )]
    CacheFull {
        /// The maximum number of tokens.
        capacity: usize,
        /// The number of tokens in the cache.
        len: usize,
        /// The number of tokens to add.
        more: usize,
    },

    /// A probability is out of range.
    #[error(
        "dropout probability {name} = {got} is out of range: expected at least 0 and less than 1"
    )]
    Probability {
        /// The argument's name.
        name: &'static str,
        /// The argument's value.
        got: f64,
    },

    /// Cross-attention was called with a transformation of queries and keys.
    #[error(
        "the options have a transformation of queries and keys: expected none in cross-attention, \
         because CrossAttention::memory has already computed the keys; use \
         MultiHeadAttention::forward_with"
    )]
    Transform,

    /// An error of an operation, for example [`ops::Error::ComputeType`].
    #[error(transparent)]
    Operation(ops::Error),

    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// Renames the argument of an [`Error::Shape`] from `from` to `to`. Other errors do not change.
    pub(crate) fn with_argument(self, from: &str, to: &'static str) -> Self {
        match self {
            Self::Shape { argument, expected, got } if argument == from => {
                Self::Shape { argument: to, expected, got }
            }
            other => other,
        }
    }

    /// The error of a module whose argument `x` is the query.
    pub(crate) fn with_query_named_x(self) -> Self {
        self.with_argument("query", "x")
    }
}

impl From<ops::Error> for Error {
    fn from(error: ops::Error) -> Self {
        match error {
            ops::Error::Candle(error) => Self::Candle(error),
            other => Self::Operation(other),
        }
    }
}

/// Allows `?` on this crate's results inside an implementation of `candle_core::Module`.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Operation(error) => error.into(),
            other => candle_core::Error::wrap(other),
        }
    }
}
