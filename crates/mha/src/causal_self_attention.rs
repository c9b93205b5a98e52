//! Decoder self-attention: each token attends to itself and to the tokens before it.

use std::fmt;

use candle_core::Tensor;
use ops::Weights;

use crate::{
    AttentionConfig, AttentionMask, AttentionOptions, Error, KvCache, MultiHeadAttention, Result,
};

/// Self-attention by [`MultiHeadAttention`] in which no token attends to a later token.
///
/// # Examples
/// Processing a sequence token by token gives the same output as processing it at once:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, CausalSelfAttention, KvCache};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let attention = CausalSelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let at_once = attention.forward(&x, None)?;
///
/// let mut cache = KvCache::new(5);
/// for t in 0..5 {
///     let step = attention.step(&x.narrow(1, t, 1)?, &mut cache)?;
///     let is_close = (step - at_once.narrow(1, t, 1)?)?.abs()?.lt(1e-5)?; // 0 for NaN
///     assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
/// }
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalSelfAttention(MultiHeadAttention);

impl CausalSelfAttention {
    /// Loads the module from `weights`, with the tensor names of [`MultiHeadAttention::new`].
    ///
    /// # Errors
    /// The errors of [`MultiHeadAttention::new`].
    pub fn new<'a>(config: &AttentionConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        Ok(Self(MultiHeadAttention::new(config, weights)?))
    }

    /// The wrapped module.
    pub fn attention(&self) -> &MultiHeadAttention {
        &self.0
    }

    /// Causal self-attention over a whole sequence.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; `padding`: `(B, T)`, 0 hides a token; returns `(B, T, E)`
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward`] and [`AttentionMask::with_padding`].
    pub fn forward(&self, x: &Tensor, padding: Option<&Tensor>) -> Result<Tensor> {
        self.0.forward(x, x, x, &causal(0, padding)?).map_err(Error::with_query_named_x)
    }

    /// [`Self::forward`] and the weights `(B, H, T, T)`.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let mask = causal(0, padding)?;
        self.0.forward_with_weights(x, x, x, &mask).map_err(Error::with_query_named_x)
    }

    /// [`Self::forward`] with [`AttentionOptions`].
    ///
    /// # Shapes
    /// as [`Self::forward`]; also returns the weights that the options select, see
    /// [`crate::HeadWeights`]
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward_with`] and [`AttentionMask::with_padding`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mask = causal(0, padding)?;
        self.0.forward_with(x, x, x, &mask, options).map_err(Error::with_query_named_x)
    }

    /// Processes one or more new tokens. Each attends to the tokens in `cache`, to the new tokens
    /// before it and to itself. The keys and values of the new tokens are appended to `cache`.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`, the new tokens; returns `(B, T, E)`
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward`]; [`crate::Error::CacheFull`] if the tokens
    /// exceed the cache's capacity; [`crate::Error::Shape`] if the batch size differs from the
    /// cache's; [`crate::Error::Candle`] if the cache has keys of a module with other widths. An
    /// error leaves the cache unchanged.
    pub fn step(&self, x: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.step_padded(x, None, cache)
    }

    /// [`Self::step`] with padding.
    ///
    /// # Shapes
    /// `padding`: `(B, S)`, 0 hides a token; the first columns are the tokens in the cache, the
    /// last T are the new tokens
    /// # Errors
    /// The errors of [`Self::step`] and [`AttentionMask::with_padding`].
    pub fn step_padded(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        Ok(self.step_with(x, padding, cache, AttentionOptions::default())?.0)
    }

    /// [`Self::step_padded`] with [`AttentionOptions`]. The cache stores transformed keys.
    ///
    /// # Shapes
    /// returns `(B, T, E)` and the weights that the options select, see [`crate::HeadWeights`]
    /// # Errors
    /// The errors of [`Self::step_padded`] and [`MultiHeadAttention::forward_with`].
    pub fn step_with(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        cache: &mut KvCache,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        cache.check_sequences(x)?;
        let projected = self.0.project(x, x, x, &options);
        let (q, new) = projected.map_err(Error::with_query_named_x)?;
        let mask = causal(cache.len(), padding)?;
        let memory = cache.extended(new)?;
        let mask = memory.lower(&mask, &q)?;
        let output = self.0.attend(&q, &memory, &mask, options)?;
        cache.advance(memory);
        Ok(output)
    }
}

/// Wraps a module, for example after [`MultiHeadAttention::prune_heads`].
impl From<MultiHeadAttention> for CausalSelfAttention {
    fn from(attention: MultiHeadAttention) -> Self {
        Self(attention)
    }
}

impl fmt::Display for CausalSelfAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CausalSelfAttention({})", self.0.config())
    }
}

fn causal(offset: usize, padding: Option<&Tensor>) -> Result<AttentionMask> {
    AttentionMask::causal(offset).with_optional_padding(padding)
}
