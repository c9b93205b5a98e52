//! One decoder layer, post-LN: `x ← LayerNorm(x + CausalSelfAttention(x))`, then
//! `x ← LayerNorm(x + CrossAttention(x, memory))` where there is a memory, then
//! `x ← LayerNorm(x + FFN(x))`. Vaswani et al. 2017, figure 1, <https://arxiv.org/abs/1706.03762>.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::{
    AttentionOptions, CausalSelfAttention, CrossAttention, HeadWeights, KvCache, LayerNorm, Memory,
};

use crate::{BertConfig, Error, PositionWiseFeedForward, Result};

/// Causal self-attention, cross-attention where the decoder has it, and feed-forward network, each
/// with its residual and layer normalisation.
#[derive(Clone, Debug)]
pub struct DecoderLayer {
    attention: CausalSelfAttention,
    attention_norm: LayerNorm,
    cross: Option<(CrossAttention, LayerNorm)>,
    feed_forward: PositionWiseFeedForward,
    feed_forward_norm: LayerNorm,
}

impl DecoderLayer {
    /// The layer whose `attention`, `attention_norm`, `feed_forward`, `feed_forward_norm` and,
    /// with `add_cross_attention`, `cross_attention` and `cross_attention_norm` are in `vb`.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape; sizes that do not fit together.
    pub fn new(config: &BertConfig, add_cross_attention: bool, vb: VarBuilder) -> Result<Self> {
        let attention = config.attention()?;
        let norm =
            |name| LayerNorm::new(config.hidden_size, config.layer_norm_eps, true, vb.pp(name));
        let cross = match add_cross_attention {
            false => None,
            true => Some((
                CrossAttention::new(&attention, vb.pp("cross_attention"))?,
                norm("cross_attention_norm")?,
            )),
        };
        Ok(Self {
            attention: CausalSelfAttention::new(&attention, vb.pp("attention"))?,
            attention_norm: norm("attention_norm")?,
            cross,
            feed_forward: PositionWiseFeedForward::new(config, vb.pp("feed_forward"))?,
            feed_forward_norm: norm("feed_forward_norm")?,
        })
    }

    /// The keys and values of an encoder's output `(B, S, E)`.
    ///
    /// # Errors
    /// [`Error::NoCrossAttention`] if this layer has none.
    pub fn memory(&self, encoder_output: &Tensor) -> Result<Memory> {
        match &self.cross {
            Some((cross, _)) => Ok(cross.memory(encoder_output)?),
            None => Err(Error::NoCrossAttention),
        }
    }

    /// The next tokens after those in `cache`, which then holds them too.
    ///
    /// # Shapes
    /// - `x`: `(B, T, E)`; returns `(B, T, E)`
    /// - `padding`: `(B, S)` of 0 and 1, for the tokens in the cache and the new ones
    /// - `memory`: what [`Self::memory`] gave, and its padding of 0 and 1
    /// # Errors
    /// [`Error::NoMemory`] if this layer attends to a memory and gets none,
    /// [`Error::NoCrossAttention`] the other way around, and the cache then has the tokens all the
    /// same; [`CausalSelfAttention::step`]'s.
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

    /// A whole sequence, and what its tokens give to those up to themselves, and to the memory's.
    ///
    /// # Shapes
    /// as [`Self::step`], S being T; returns `(B, T, E)`, `(B, H, T, T)` and `(B, H, T, S)`
    /// # Errors
    /// as there.
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

    /// All that follows self-attention, and the weights of cross-attention that are asked for.
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
            (Some(_), None) => return Err(Error::NoMemory),
            (None, Some(_)) => return Err(Error::NoCrossAttention),
        };
        let fed = self.feed_forward.forward(&x)?;
        Ok((self.feed_forward_norm.forward_sum(&x, &fed)?, weights))
    }
}
