//! Decoder self-attention: each token attends to itself and to what came before it.

use std::fmt;

use candle_core::Tensor;
use candle_nn::VarBuilder;

use crate::{
    AttentionConfig, AttentionMask, AttentionOptions, KvCache, MultiHeadAttention, Result,
};

/// [`MultiHeadAttention`] over the same hidden states, where no token sees a later one.
///
/// # Examples
/// A sequence at once, and the same token by token:
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
///     let difference = (step - at_once.narrow(1, t, 1)?)?.abs()?.max_all()?;
///     assert!(difference.to_scalar::<f32>()? < 1e-5);
/// }
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalSelfAttention(MultiHeadAttention);

impl CausalSelfAttention {
    /// The module whose tensors are in `vb`, as [`MultiHeadAttention::new`] names them.
    ///
    /// # Errors
    /// as there.
    pub fn new(config: &AttentionConfig, vb: VarBuilder) -> Result<Self> {
        Ok(Self(MultiHeadAttention::new(config, vb)?))
    }

    /// The core that it wraps.
    pub fn attention(&self) -> &MultiHeadAttention {
        &self.0
    }

    /// `x` `(B, T, E)` to `(B, T, E)`; `padding` `(B, T)` of 0 and 1 hides tokens.
    ///
    /// # Errors
    /// as [`MultiHeadAttention::forward`], [`AttentionMask::with_padding`].
    pub fn forward(&self, x: &Tensor, padding: Option<&Tensor>) -> Result<Tensor> {
        self.0.forward(x, x, x, &causal(0, padding)?)
    }

    /// [`Self::forward`], and the weights `(B, H, T, T)`.
    ///
    /// # Errors
    /// as there.
    pub fn forward_with_weights(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        self.0.forward_with_weights(x, x, x, &causal(0, padding)?)
    }

    /// [`Self::forward`] with [`AttentionOptions`]: the weights of some heads, dropout.
    ///
    /// # Errors
    /// as [`MultiHeadAttention::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.0.forward_with(x, x, x, &causal(0, padding)?, options)
    }

    /// The next tokens, one or many: they see those in `cache`, which then holds them too.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`, the new tokens; returns `(B, T, E)`
    /// # Errors
    /// [`crate::Error::CacheFull`], [`crate::Error::Shape`] if the batch is another than the
    /// cache's. After an error the cache is as before.
    pub fn step(&self, x: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.step_padded(x, None, cache)
    }

    /// [`Self::step`] where some of the tokens so far are padding.
    ///
    /// # Shapes
    /// `padding`: `(B, S)` of 0 and 1, for the tokens in the cache and then the new ones
    /// # Errors
    /// as there.
    pub fn step_padded(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let q = self.0.project_query(x)?;
        let memory = cache.extended(self.0.project_memory(x, x)?)?;
        let mask = causal(cache.len(), padding)?;
        let (out, _) = self.0.attend(&q, &memory, &mask, AttentionOptions::default())?;
        cache.store(memory);
        Ok(out)
    }
}

/// Such as one with pruned heads.
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
