//! One encoder layer, post-LN as in the original Transformer and in BERT:
//! `x ← LayerNorm(x + Attention(x))`, then `x ← LayerNorm(x + FFN(x))`.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, AttentionOptions, LayerNorm, SelfAttention};

use crate::{BertConfig, PositionWiseFeedForward, Result};

/// Self-attention and feed-forward network, each with its residual and layer normalisation.
#[derive(Clone, Debug)]
pub struct EncoderLayer {
    attention: SelfAttention,
    attention_norm: LayerNorm,
    feed_forward: PositionWiseFeedForward,
    feed_forward_norm: LayerNorm,
}

impl EncoderLayer {
    /// The layer whose `attention`, `attention_norm`, `feed_forward` and `feed_forward_norm` are
    /// in `vb`.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape; sizes that do not fit together.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let norm =
            |name| LayerNorm::new(config.hidden_size, config.layer_norm_eps, true, vb.pp(name));
        Ok(Self {
            attention: SelfAttention::new(&config.attention()?, vb.pp("attention"))?,
            attention_norm: norm("attention_norm")?,
            feed_forward: PositionWiseFeedForward::new(config, vb.pp("feed_forward"))?,
            feed_forward_norm: norm("feed_forward_norm")?,
        })
    }

    /// `x` `(B, T, E)` to `(B, T, E)`.
    ///
    /// # Errors
    /// as [`SelfAttention::forward`].
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        Ok(self.forward_with(x, mask, AttentionOptions::default())?.0)
    }

    /// [`Self::forward`] with [`AttentionOptions`]: the weights of some heads, dropout on them.
    ///
    /// # Errors
    /// as [`SelfAttention::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        options: AttentionOptions,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (attended, weights) = self.attention.forward_with(x, mask, options)?;
        let x = self.attention_norm.forward_sum(x, &attended)?; // (B, T, E)
        let fed = self.feed_forward.forward(&x)?;
        Ok((self.feed_forward_norm.forward_sum(&x, &fed)?, weights))
    }
}
