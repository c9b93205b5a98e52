//! Encoder self-attention: every token attends to every token of its own sequence.

use std::fmt;

use candle_core::Tensor;
use ops::Weights;

use crate::{
    AttentionConfig, AttentionMask, AttentionOptions, Error, KvCache, LoweredMask, Memory,
    MultiHeadAttention, Result,
};

/// [`MultiHeadAttention`] whose queries, keys and values come from the same hidden states.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, AttentionMask, SelfAttention};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Cpu);
/// let attention = SelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
///
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let (out, weights) = attention.forward_with_weights(&x, &AttentionMask::none())?;
/// assert_eq!((out.dims(), weights.dims()), (&[1, 5, 12][..], &[1, 3, 5, 5][..]));
/// let sums = weights.sum(3)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-6));
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SelfAttention(MultiHeadAttention);

impl SelfAttention {
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

    /// Self-attention over `x`.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; returns `(B, T, E)`
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward`].
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        self.0.forward(x, x, x, mask).map_err(Error::with_query_named_x)
    }

    /// [`Self::forward`] and the weights `(B, H, T, T)`.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
    ) -> Result<(Tensor, Tensor)> {
        self.0.forward_with_weights(x, x, x, mask).map_err(Error::with_query_named_x)
    }

    /// [`Self::forward`] with [`AttentionOptions`].
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; returns `(B, T, E)` and the weights that the options select, see
    /// [`crate::HeadWeights`]
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.0.forward_with(x, x, x, mask, options).map_err(Error::with_query_named_x)
    }

    /// [`Self::forward_with`] with a mask that was lowered before; see [`AttentionMask::lower`].
    ///
    /// # Errors
    /// The errors of [`MultiHeadAttention::forward_lowered`].
    pub fn forward_lowered(
        &self,
        x: &Tensor,
        mask: &LoweredMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.0.forward_lowered(x, x, x, mask, options).map_err(Error::with_query_named_x)
    }

    /// [`Self::forward_lowered`] for tokens that follow those in `cache`: each attends to the tokens
    /// in the cache and to the new ones, as the mask allows. The keys and values of the new tokens
    /// are appended to the cache, after the transformation of the options.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`, the new tokens; the mask is for scores `(B, H, T, S)`, where S is T and the
    /// number of tokens in the cache; returns `(B, T, E)` and the weights that the options select
    /// # Errors
    /// The errors of [`Self::forward_lowered`] and [`CausalSelfAttention::step`]. An error leaves the
    /// cache unchanged.
    ///
    /// [`CausalSelfAttention::step`]: crate::CausalSelfAttention::step
    ///
    /// # Examples
    /// The last of three tokens, in one pass and after a step of two tokens:
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mha::{AttentionConfig, AttentionMask, AttentionOptions, KvCache, SelfAttention};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
    /// let attention = SelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
    /// let x = Tensor::randn(0f32, 1., (1, 3, 12), &Cpu)?;
    /// let expected = attention.forward(&x, &AttentionMask::causal(0))?.narrow(1, 2, 1)?;
    ///
    /// let mut cache = KvCache::new(3);
    /// let mut step = |start: usize, t: usize| -> mha::Result<Tensor> {
    ///     let mask = AttentionMask::causal(start).lower([1, 3, t, start + t], DType::F32, &Cpu)?;
    ///     let x = x.narrow(1, start, t)?;
    ///     Ok(attention.step_lowered(&x, &mask, &mut cache, AttentionOptions::new())?.0)
    /// };
    /// step(0, 2)?;
    /// let is_close = (step(2, 1)? - expected)?.abs()?.lt(1e-5)?; // 0 for NaN
    /// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn step_lowered(
        &self,
        x: &Tensor,
        mask: &LoweredMask,
        cache: &mut KvCache,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        cache.check_sequences(x)?;
        let projected = self.0.project(x, x, x, &options);
        let (q, new) = projected.map_err(Error::with_query_named_x)?;
        let memory = cache.extended(new)?;
        let output = self.0.attend(&q, &memory, mask, options)?;
        cache.advance(memory);
        Ok(output)
    }

    /// [`Self::forward_lowered`] for ragged sequences that all follow the same tokens, the prefix,
    /// whose keys and values are `prefix`. Each query attends to the prefix and to the tokens `x` of
    /// its sequence, as the mask allows.
    ///
    /// # Shapes
    /// `query`: `(1, T, E)`, `x`, or the rows of [`AttentionMask::for_queries_of`]; `x`: `(1, N, E)`;
    /// `prefix`: of one sequence of P tokens; the mask is for scores `(1, H, T, N + B·P)`, from
    /// [`AttentionMask::with_sequences_after`]; returns `(1, T, E)` and the weights that the options
    /// select
    /// # Errors
    /// The errors of [`Self::forward_lowered`]; [`Error::Shape`] if the mask is not for ragged
    /// sequences after P keys.
    ///
    /// # Examples
    /// Sequences of 1 and 2 tokens after the same two tokens:
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mha::{AttentionConfig, AttentionMask, AttentionOptions, KvCache, SelfAttention};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
    /// let attention = SelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
    /// let options = AttentionOptions::new;
    /// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?; // the prefix, then both sequences
    /// let (prefix, tokens) = (x.narrow(1, 0, 2)?, x.narrow(1, 2, 3)?);
    ///
    /// let mut cache = KvCache::new(2);
    /// let mask = AttentionMask::causal(0).lower([1, 3, 2, 2], DType::F32, &Cpu)?;
    /// attention.step_lowered(&prefix, &mask, &mut cache, options())?;
    /// let memory = cache.to_memory()?.unwrap();
    /// let mask = AttentionMask::causal(2).with_sequences_after(&[0, 1, 3], 2)?;
    /// let mask = mask.lower([1, 3, 3, 7], DType::F32, &Cpu)?;
    /// let (got, _) = attention.forward_after(&tokens, &tokens, &mask, &memory, options())?;
    ///
    /// let second = Tensor::cat(&[&prefix, &tokens.narrow(1, 1, 2)?], 1)?;
    /// let expected = attention.forward(&second, &AttentionMask::causal(0))?;
    /// let (got, expected) = (got.narrow(1, 1, 2)?, expected.narrow(1, 2, 2)?);
    /// let is_close = (got - expected)?.abs()?.lt(1e-5)?; // 0 for NaN
    /// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn forward_after(
        &self,
        query: &Tensor,
        x: &Tensor,
        mask: &LoweredMask,
        prefix: &Memory,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let projected = self.0.project(query, x, x, &options);
        let (q, tokens) = projected.map_err(Error::with_query_named_x)?;
        self.0.attend(&q, &prefix.before_each(&tokens, mask)?, mask, options)
    }
}

/// Wraps a module, for example after [`MultiHeadAttention::prune_heads`].
impl From<MultiHeadAttention> for SelfAttention {
    fn from(attention: MultiHeadAttention) -> Self {
        Self(attention)
    }
}

impl fmt::Display for SelfAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SelfAttention({})", self.0.config())
    }
}
