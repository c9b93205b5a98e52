//! One encoder layer: self-attention and a feed-forward network, each with a residual connection.

use candle_core::{Module, Tensor};
use mha::{AttentionMask, AttentionOptions, LoweredMask, SelfAttention};
use ops::Weights;

use crate::{EncoderConfig, NormPlacement, PositionWiseFeedForward, Result, block::norm::Norm};

/// Self-attention and a feed-forward network, each with a residual connection and a normalisation.
///
/// Post-norm, as in BERT: `x ← norm(x + attention(x))`, then `x ← norm(x + ffn(x))`.
/// Pre-norm: `x ← x + attention(norm(x))`, then `x ← x + ffn(norm(x))`.
///
/// # Source
/// Vaswani et al. 2017, section 3.1, <https://arxiv.org/abs/1706.03762>; pre-norm: Xiong et al.
/// 2020, <https://arxiv.org/abs/2002.04745>.
///
/// # Examples
/// If all weights are 0, a pre-norm layer returns its input, because of its residual connections:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarBuilder;
/// use encoder::{EncoderConfig, EncoderLayer, NormPlacement};
/// use mha::AttentionMask;
///
/// let mut config = EncoderConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
/// config.norm.placement = NormPlacement::Pre;
/// let layer = EncoderLayer::new(&config, 0, VarBuilder::zeros(DType::F32, &Cpu))?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let y = layer.forward(&x, &AttentionMask::none())?;
/// assert_eq!(y.to_vec3::<f32>()?, x.to_vec3::<f32>()?);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderLayer {
    placement: NormPlacement,
    attention: SelfAttention,
    /// `None` in the first layer of a pre-norm encoder whose `first_attention_norm` is false.
    attention_norm: Option<Norm>,
    feed_forward: PositionWiseFeedForward,
    feed_forward_norm: Norm,
}

impl EncoderLayer {
    /// Builds layer `layer` of an encoder from `attention`, `attention_norm`, `feed_forward` and
    /// `feed_forward_norm` in `weights`.
    ///
    /// A layer does not apply the positions and the attention windows of the config: [`Encoder`]
    /// passes them to its layers with the mask and the [`AttentionOptions`].
    ///
    /// [`Encoder`]: super::Encoder
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `weights` lack a tensor or have
    /// it in another shape; the errors of [`EncoderConfig::check`].
    pub fn new<'a>(
        config: &EncoderConfig,
        layer: usize,
        weights: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let weights = weights.into();
        config.check()?;
        let placement = config.norm.placement;
        let has_attention_norm =
            layer > 0 || placement == NormPlacement::Post || config.norm.first_attention_norm;
        let norm = |name| Norm::new(config, config.hidden_size, weights.pp(name));
        Ok(Self {
            placement,
            attention: SelfAttention::new(&config.attention()?, weights.pp("attention"))?,
            attention_norm: if has_attention_norm { Some(norm("attention_norm")?) } else { None },
            feed_forward: PositionWiseFeedForward::new(config, weights.pp("feed_forward"))?,
            feed_forward_norm: norm("feed_forward_norm")?,
        })
    }

    /// The self-attention.
    pub(crate) fn attention(&self) -> &SelfAttention {
        &self.attention
    }

    /// The layer's output.
    ///
    /// # Shapes
    /// `x`: `(B, T, E)`; returns `(B, T, E)`
    /// # Errors
    /// The errors of [`SelfAttention::forward`].
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        Ok(self.forward_with(x, mask, AttentionOptions::default())?.0)
    }

    /// [`Self::forward`] with [`AttentionOptions`]. Also returns the attention weights that the
    /// options select.
    ///
    /// # Errors
    /// The errors of [`SelfAttention::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let mask = self.lower(x, mask)?;
        self.forward_lowered(x, &mask, options)
    }

    /// The mask for [`Self::forward_lowered`] of inputs with the shape of `x`, `(B, T, E)`.
    pub(crate) fn lower(&self, x: &Tensor, mask: &AttentionMask) -> Result<LoweredMask> {
        let (b, t, _e) = x.dims3()?;
        let heads = self.attention.attention().config().num_attention_heads;
        Ok(mask.lower([b, heads, t, t], x.dtype(), x.device())?)
    }

    /// [`Self::forward_with`] with a mask from [`Self::lower`]. All layers of an encoder can use
    /// it.
    pub(crate) fn forward_lowered(
        &self,
        x: &Tensor,
        mask: &LoweredMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match (&self.attention_norm, self.placement) {
            (Some(attention_norm), NormPlacement::Post) => {
                let (attended, weights) = self.attention.forward_lowered(x, mask, options)?;
                let x = attention_norm.forward_sum(x, &attended)?; // (B, T, E)
                let transformed = self.feed_forward.forward(&x)?;
                Ok((self.feed_forward_norm.forward_sum(&x, &transformed)?, weights))
            }
            (attention_norm, _) => {
                let normed = match attention_norm {
                    Some(norm) => norm.forward(x)?,
                    None => x.clone(),
                };
                let (attended, weights) = self.attention.forward_lowered(&normed, mask, options)?;
                let x = ops::add(x, &attended)?; // (B, T, E)
                let normed = self.feed_forward_norm.forward(&x)?;
                Ok((ops::add(&x, &self.feed_forward.forward(&normed)?)?, weights))
            }
        }
    }
}
