//! One decoder layer, post-LN: `x ← LayerNorm(x + CausalSelfAttention(x))`, then
//! `x ← LayerNorm(x + CrossAttention(x, memory))` where there is a memory, then
//! `x ← LayerNorm(x + FFN(x))`. Vaswani et al. 2017, figure 1, <https://arxiv.org/abs/1706.03762>.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionOptions, CausalSelfAttention, CrossAttention, HeadWeights, KvCache, Memory};

use crate::{
    EncoderConfig, Error, NormPlacement, PositionWiseFeedForward, Result, block::norm::Norm,
};

/// Causal self-attention, cross-attention if the decoder has it, and feed-forward network, each with
/// its residual connection and normalisation.
#[derive(Clone, Debug)]
pub struct DecoderLayer {
    attention: CausalSelfAttention,
    attention_norm: Norm,
    cross: Option<(CrossAttention, Norm)>,
    feed_forward: PositionWiseFeedForward,
    feed_forward_norm: Norm,
}

impl DecoderLayer {
    /// The layer whose `attention`, `attention_norm`, `feed_forward`, `feed_forward_norm` and,
    /// with `add_cross_attention`, `cross_attention` and `cross_attention_norm` are in `vb`.
    ///
    /// # Errors
    /// [`mha::Error::Candle`] for a tensor that `vb` lacks or has in another shape;
    /// [`Error::Unsupported`] for a pre-norm config.
    pub fn new(config: &EncoderConfig, add_cross_attention: bool, vb: VarBuilder) -> Result<Self> {
        let attention = config.attention()?;
        if config.norm.placement != NormPlacement::Post {
            let (path, key) = ("EncoderConfig".to_string(), "norm placement of a decoder");
            let (expected, got) = ("Post", format!("{:?}", config.norm.placement));
            return Err(Error::Unsupported { path, key, expected, got });
        }
        let norm = |name| Norm::new(config, config.hidden_size, vb.pp(name));
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

    /// The output of the next tokens, which are added to `cache`.
    ///
    /// # Shapes
    /// - `x`: `(B, T, E)`; returns `(B, T, E)`
    /// - `padding`: `(B, S)`, 0 hides a token: first those in the cache, then the new ones
    /// - `memory`: the result of [`Self::memory`], and its padding
    /// # Errors
    /// [`Error::NoMemory`] if the layer has cross-attention and no memory is given,
    /// [`Error::NoCrossAttention`] if it has none and a memory is given: the tokens are added to the
    /// cache before either is returned. The errors of [`CausalSelfAttention::step`].
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

    /// The output of a whole sequence, the weights of its self-attention and those of its
    /// cross-attention.
    ///
    /// # Shapes
    /// - `x`: `(B, T, E)`; `padding`: `(B, T)`
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

    /// The layer after its self-attention, and the chosen weights of its cross-attention.
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
