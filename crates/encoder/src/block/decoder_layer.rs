//! One decoder layer with post-norm.

use candle_core::{Module, Tensor};
use mha::{AttentionOptions, CausalSelfAttention, CrossAttention, HeadWeights, KvCache, Memory};
use ops::Weights;

use crate::{
    EncoderConfig, InputError, NormPlacement, PositionWiseFeedForward, Result,
    block::{config::unsupported, norm::Norm},
};

/// Causal self-attention, optional cross-attention, and a feed-forward network, each with a
/// residual connection and a normalisation:
/// 1. `x ← norm(x + causal_self_attention(x))`
/// 2. with cross-attention: `x ← norm(x + cross_attention(x, memory))`
/// 3. `x ← norm(x + ffn(x))`
///
/// # Source
/// Vaswani et al. 2017, figure 1, <https://arxiv.org/abs/1706.03762>.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarMap;
/// use encoder::{DecoderLayer, EncoderConfig};
/// use mha::{Init, KvCache};
///
/// let config = EncoderConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
/// let init = Init::Bert { initializer_range: 0.5 };
/// let vb = init.var_builder(&VarMap::new(), 1, DType::F32, &Cpu);
/// let layer = DecoderLayer::new(&config, true, vb)?;
///
/// let memory = layer.memory(&Tensor::randn(0f32, 1., (2, 7, 12), &Cpu)?)?; // B = 2, S = 7
/// let x = Tensor::randn(0f32, 1., (2, 3, 12), &Cpu)?; // T = 3
/// let (y, weights, _) = layer.forward_with_attentions(&x, None, Some((&memory, None)))?;
/// // The first token attends to itself only.
/// assert_eq!(weights.get(0)?.get(0)?.get(0)?.to_vec1::<f32>()?, [1., 0., 0.]);
///
/// // The output of the last token, with the first two in a cache.
/// let mut cache = KvCache::new(3);
/// layer.step(&x.narrow(1, 0, 2)?, None, Some((&memory, None)), &mut cache)?;
/// let last = layer.step(&x.narrow(1, 2, 1)?, None, Some((&memory, None)), &mut cache)?;
/// let is_close = (last - y.narrow(1, 2, 1)?)?.abs()?.lt(1e-5)?; // 0 for NaN
/// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DecoderLayer {
    attention: CausalSelfAttention,
    attention_norm: Norm,
    cross: Option<(CrossAttention, Norm)>,
    feed_forward: PositionWiseFeedForward,
    feed_forward_norm: Norm,
}

impl DecoderLayer {
    /// Builds the layer from `attention`, `attention_norm`, `feed_forward` and `feed_forward_norm`
    /// in `weights`; with `add_cross_attention` also from `cross_attention` and
    /// `cross_attention_norm`.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `weights` lack a tensor or have
    /// it in another shape; [`crate::ConfigError::Unsupported`] for a config with pre-norm layers,
    /// or with anything that makes attention depend on distances, such as rotary positions or
    /// windows; the errors of [`EncoderConfig::check`].
    pub fn new<'a>(
        config: &EncoderConfig,
        add_cross_attention: bool,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let attention = config.attention()?;
        if config.norm.placement != NormPlacement::Post {
            let got = format!("{:?}", config.norm.placement);
            unsupported("norm.placement", "Post, for a decoder", &got)?;
        }
        if config.uses_distances() {
            let expected = "learned positions or none, without windows, relative biases and \
                            disentangled attention, for a decoder";
            unsupported("attention", expected, "that depends on distances")?;
        }
        let norm = |name| Norm::new(config, config.hidden_size, weights.pp(name));
        let cross = if add_cross_attention {
            Some((
                CrossAttention::new(&attention, weights.pp("cross_attention"))?,
                norm("cross_attention_norm")?,
            ))
        } else {
            None
        };
        Ok(Self {
            attention: CausalSelfAttention::new(&attention, weights.pp("attention"))?,
            attention_norm: norm("attention_norm")?,
            cross,
            feed_forward: PositionWiseFeedForward::new(config, weights.pp("feed_forward"))?,
            feed_forward_norm: norm("feed_forward_norm")?,
        })
    }

    /// Computes the keys and values of cross-attention from an encoder's output `(B, S, E)`.
    ///
    /// # Errors
    /// [`InputError::NoCrossAttention`] if the layer has no cross-attention;
    /// [`crate::Error::Attention`] for a wrong shape.
    pub fn memory(&self, encoder_output: &Tensor) -> Result<Memory> {
        match &self.cross {
            Some((cross, _)) => Ok(cross.memory(encoder_output)?),
            None => Err(InputError::NoCrossAttention.into()),
        }
    }

    /// The layer's output for the next tokens. Their keys and values are added to `cache`.
    ///
    /// # Shapes
    /// - `x`: `(B, T, E)`, the new tokens; returns `(B, T, E)`
    /// - `padding`: `(B, P + T)`, where P is the number of tokens in the cache; 0 hides a token
    /// - `memory`: the result of [`Self::memory`], and the padding of the encoder's output
    /// # Errors
    /// - [`InputError::NoMemory`] if the layer has cross-attention and `memory` is `None`
    /// - [`InputError::NoCrossAttention`] if `memory` is given to a layer without cross-attention
    /// - the errors of [`CausalSelfAttention::step_padded`] and [`CrossAttention::forward_with`]
    ///
    /// After an error the cache may contain the new tokens.
    pub fn step(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<(&Memory, Option<&Tensor>)>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let attended = self.attention.step_padded(x, padding, cache)?;
        Ok(self.after_attention(x, &attended, memory, HeadWeights::None)?.0)
    }

    /// The output for whole sequences, the self-attention weights, and the cross-attention weights
    /// if the layer has cross-attention.
    ///
    /// # Shapes
    /// - `x`: `(B, T, E)`; `padding`: `(B, T)`, 0 hides a token
    /// - returns `(B, T, E)`, `(B, H, T, T)` and `(B, H, T, S)`
    /// # Errors
    /// The errors of [`Self::step`].
    pub fn forward_with_attentions(
        &self,
        x: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<(&Memory, Option<&Tensor>)>,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let (attended, weights) = self.attention.forward_with_weights(x, padding)?;
        let (x, cross) = self.after_attention(x, &attended, memory, HeadWeights::All)?;
        Ok((x, weights, cross))
    }

    /// Computes the layer's output from the output `attended` of its self-attention. Also returns
    /// the cross-attention weights that `weights` selects.
    fn after_attention(
        &self,
        x: &Tensor,
        attended: &Tensor,
        memory: Option<(&Memory, Option<&Tensor>)>,
        weights: HeadWeights,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let x = self.attention_norm.forward_sum(x, attended)?; // (B, T, E)
        let (x, weights) = match (&self.cross, memory) {
            (Some((cross, norm)), Some((memory, memory_padding))) => {
                let options = AttentionOptions::new().with_weights(weights);
                let (attended, weights) =
                    cross.forward_with(&x, memory, memory_padding, options)?;
                (norm.forward_sum(&x, &attended)?, weights)
            }
            (None, None) => (x, None),
            (Some(_), None) => return Err(InputError::NoMemory.into()),
            (None, Some(_)) => return Err(InputError::NoCrossAttention.into()),
        };
        let transformed = self.feed_forward.forward(&x)?;
        Ok((self.feed_forward_norm.forward_sum(&x, &transformed)?, weights))
    }
}
