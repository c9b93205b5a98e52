//! The head of a language model: from hidden states to logits over the vocabulary.

use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use ops::Linear;

use crate::{Activation, ModelConfig, Result, block::Norm, load::is_placeholder};

/// `LayerNorm(activation(x·Wᵀ + b)) · Vᵀ + c`, where V is the word embeddings or a separate matrix.
/// W maps to the width of the word embeddings.
#[derive(Clone, Debug)]
pub(crate) struct LmHead {
    transform: Linear,
    activation: Activation,
    norm: Norm,
    decoder: Linear,
}

impl LmHead {
    pub(crate) fn new(config: &ModelConfig, words: &Tensor, vb: VarBuilder) -> Result<Self> {
        let ModelConfig { encoder, heads, .. } = config;
        let (e, v, compute_type) = (encoder.hidden_size, encoder.vocab_size, encoder.compute_type);
        let width = encoder.embedding_size();
        let may_have = |name: &str| !heads.lm_biases_are_optional || vb.contains_tensor(name);
        let tied = heads.tie_word_embeddings && !has_separate_matrix(&vb, words)?;
        let decoder = match tied {
            true => {
                let has_decoder_bias = vb.contains_tensor("decoder.bias");
                let name = if has_decoder_bias { "decoder.bias" } else { "bias" };
                let bias = match heads.lm_decoder_bias && may_have(name) {
                    true => Some(vb.get(v, name)?),
                    false => None,
                };
                match is_placeholder(words) {
                    true => candle_nn::Linear::new(words.clone(), bias).into(), // no data to pack
                    false => Linear::new(compute_type, words.clone(), bias)?,
                }
            }
            false => {
                let has_bias = heads.lm_decoder_bias && may_have("decoder.bias");
                Linear::load(compute_type, width, v, has_bias, vb.pp("decoder"))?
            }
        };
        let has_bias = heads.dense_bias && may_have("transform.bias");
        Ok(Self {
            transform: Linear::load(compute_type, e, width, has_bias, vb.pp("transform"))?,
            activation: heads.lm_activation,
            norm: Norm::new(encoder, width, vb.pp("norm"))?,
            decoder,
        })
    }
}

/// Whether `vb` has a decoder matrix that differs from the word embeddings. Such a matrix is used
/// even if the config ties the two. False for placeholders, which have no data.
fn has_separate_matrix(vb: &VarBuilder, words: &Tensor) -> Result<bool> {
    if !vb.contains_tensor("decoder.weight") {
        return Ok(false);
    }
    let matrix = vb.get(words.shape(), "decoder.weight")?;
    if is_placeholder(&matrix) || is_placeholder(words) {
        return Ok(false);
    }
    Ok(matrix.ne(words)?.max_all()?.to_scalar::<u8>()? > 0)
}

impl Module for LmHead {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.transform.forward_activated(x, Some(self.activation))?;
        Ok(self.decoder.forward(&self.norm.forward(&x)?)?)
    }
}
