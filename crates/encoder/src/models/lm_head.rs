//! From hidden states to the scores of all tokens: the language model's head.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use mha::{LayerNorm, Linear};

use crate::{Activation, BertConfig, Result};

/// From a hidden state to the scores of all tokens: `LayerNorm(activation(x·W + b))`, then the
/// products with the word embeddings, or with a matrix of its own.
#[derive(Clone, Debug)]
pub(crate) struct LmHead {
    transform: Linear,
    activation: Activation,
    norm: LayerNorm,
    decoder: Linear,
}

impl LmHead {
    pub(crate) fn new(config: &BertConfig, words: &Tensor, vb: VarBuilder) -> Result<Self> {
        let (e, v) = (config.hidden_size, config.vocab_size);
        let tied = config.tie_word_embeddings && !has_other(&vb, words)?;
        let decoder = match tied {
            true => {
                let own = vb.contains_tensor("decoder.bias");
                let bias = if own { "decoder.bias" } else { "bias" };
                Linear::new(config.compute_type, words.clone(), Some(vb.get(v, bias)?))?
            }
            false => Linear::load(config.compute_type, e, v, true, vb.pp("decoder"))?,
        };
        Ok(Self {
            transform: Linear::load(config.compute_type, e, e, true, vb.pp("transform"))?,
            activation: config.hidden_act,
            norm: LayerNorm::new(e, config.layer_norm_eps, true, vb.pp("norm"))?,
            decoder,
        })
    }
}

/// Whether there is a matrix for the scores with other numbers than the word embeddings: it counts
/// then, whatever the config says of ties.
fn has_other(vb: &VarBuilder, words: &Tensor) -> Result<bool> {
    if !vb.contains_tensor("decoder.weight") {
        return Ok(false);
    }
    let own = vb.get(words.shape(), "decoder.weight")?;
    Ok(own.ne(words)?.max_all()?.to_scalar::<u8>()? > 0)
}

impl Module for LmHead {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.transform.forward_activated(x, Some(self.activation))?;
        Ok(self.decoder.forward(&self.norm.forward(&x)?)?)
    }
}
