//! The head of a language model: from hidden states to logits over the vocabulary.

use candle_core::{Module, Tensor};
use ops::{Linear, Loaded, RowPooling, Table, Weights};

use crate::{
    Activation, ModelConfig, Result,
    block::{Norm, unsupported},
};

/// `LayerNorm(activation(x·Wᵀ + b)) · Vᵀ + c`, or `x · Vᵀ + c`, where V is the word embeddings or a
/// separate matrix. W maps to the width of the word embeddings. The logits y may be bounded:
/// `s · tanh(y / s)`.
#[derive(Clone, Debug)]
pub(crate) struct LmHead {
    transform: Option<Transform>,
    decoder: Linear,
    softcap: Option<f64>,
}

/// `LayerNorm(activation(x·Wᵀ + b))`
#[derive(Clone, Debug)]
struct Transform {
    linear: Linear,
    activation: Activation,
    norm: Norm,
}

impl LmHead {
    pub(crate) fn new(
        config: &ModelConfig,
        words: Loaded<&Table>,
        weights: Weights,
    ) -> Result<Self> {
        let ModelConfig { encoder, heads, .. } = config;
        let (v, compute_type) = (encoder.vocab_size, encoder.compute_type);
        let width = encoder.embedding_size();
        let may_have = |name: &str| !heads.lm_biases_are_optional || weights.contains_tensor(name);
        let tied = heads.tie_word_embeddings && !has_separate_matrix(&weights, &words, (v, width))?;
        let decoder = if tied {
            let has_decoder_bias = weights.contains_tensor("decoder.bias");
            let name = if has_decoder_bias { "decoder.bias" } else { "bias" };
            let bias = if heads.lm_decoder_bias && may_have(name) {
                Some(weights.get(v, name)?)
            } else {
                None
            };
            Linear::from_table(compute_type, words, weights.dtype(), bias)?
        } else {
            let has_bias = heads.lm_decoder_bias && may_have("decoder.bias");
            Linear::load(compute_type, width, v, has_bias, weights.pp("decoder"))?
        };
        Self::with_decoder(config, decoder, &weights)
    }

    /// The head for the logits of some tokens: their rows of the matrix. `weights` are those of the
    /// model; only these rows are read.
    pub(crate) fn of_tokens(config: &ModelConfig, ids: &[u32], weights: &Weights) -> Result<Self> {
        let ModelConfig { encoder, heads, .. } = config;
        let (v, width, head) =
            (encoder.vocab_size, encoder.embedding_size(), weights.pp("lm_head"));
        let is_separate = !heads.tie_word_embeddings || head.contains_tensor("decoder.weight");
        let rows = if is_separate {
            head.rows((v, width), "decoder.weight", ids)?
        } else {
            weights.pp("embeddings.word_embeddings").rows((v, width), "weight", ids)?
        };
        let has_own_bias = !heads.tie_word_embeddings || head.contains_tensor("decoder.bias");
        let name = if has_own_bias { "decoder.bias" } else { "bias" };
        let may_have = !heads.lm_biases_are_optional || head.contains_tensor(name);
        let bias =
            if heads.lm_decoder_bias && may_have { Some(head.rows(v, name, ids)?) } else { None };
        let decoder = Linear::from_loaded(encoder.compute_type, rows, bias)?;
        Self::with_decoder(config, decoder, &head)
    }

    fn with_decoder(config: &ModelConfig, decoder: Linear, weights: &Weights) -> Result<Self> {
        let ModelConfig { encoder, heads, .. } = config;
        let (e, width, compute_type) =
            (encoder.hidden_size, encoder.embedding_size(), encoder.compute_type);
        let may_have = |name: &str| !heads.lm_biases_are_optional || weights.contains_tensor(name);
        let has_bias = heads.dense_bias && may_have("transform.bias");
        let transform = if heads.lm_transform {
            Some(Transform {
                linear: Linear::load(compute_type, e, width, has_bias, weights.pp("transform"))?,
                activation: heads.lm_activation,
                norm: Norm::new(encoder, width, weights.pp("norm"))?,
            })
        } else {
            None
        };
        Ok(Self { transform, decoder, softcap: heads.lm_softcap })
    }
}

/// Whether `weights` have a decoder matrix that differs from the word embeddings. Such a matrix is
/// used even if the config ties the two. False if one of them is not loaded.
fn has_separate_matrix(
    weights: &Weights,
    words: &Loaded<&Table>,
    shape: (usize, usize),
) -> Result<bool> {
    if !weights.contains_tensor("decoder.weight") {
        return Ok(false);
    }
    match (Table::get(shape, "decoder.weight", weights)?, words) {
        (Ok(matrix), Ok(words)) => Ok(!matrix.has_values_of(words)?),
        _ => Ok(false),
    }
}

impl LmHead {
    /// The input of the matrix of the vocabulary, `(.., E)` to `(.., width)`.
    fn transformed(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match &self.transform {
            None => Ok(x.clone()),
            Some(Transform { linear, activation, norm }) => {
                norm.forward(&linear.forward_activated(x, Some(*activation))?)
            }
        }
    }

    fn bounded(&self, logits: Tensor) -> candle_core::Result<Tensor> {
        match self.softcap {
            None => Ok(logits),
            Some(bound) => Activation::Tanh.forward(&(logits / bound)?)? * bound,
        }
    }

    /// The logits, pooled over each sequence: [`Linear::forward_pooled`].
    pub(crate) fn forward_pooled(
        &self,
        x: &Tensor,
        offsets: &[usize],
        pooling: RowPooling,
    ) -> Result<Tensor> {
        if self.softcap.is_some() && !matches!(pooling, RowPooling::Max) {
            unsupported("lm_softcap", "None, for sums over the tokens of a text", "a number")?;
        }
        let pooled = self.decoder.forward_pooled(&self.transformed(x)?, offsets, pooling)?;
        Ok(self.bounded(pooled)?) // tanh is monotonic, so the maximum is bounded alike
    }
}

impl Module for LmHead {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.bounded(self.decoder.forward(&self.transformed(x)?)?)
    }
}
