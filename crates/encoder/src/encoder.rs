//! The encoder: L layers, one after another.

use candle_core::Tensor;
use candle_nn::VarBuilder;
use mha::AttentionMask;

use crate::{BertConfig, EncoderLayer, Result};

/// A stack of [`EncoderLayer`]s.
#[derive(Clone, Debug)]
pub struct Encoder {
    layers: Vec<EncoderLayer>,
}

impl Encoder {
    /// The stack whose layers are in `vb` as `layer.0`, `layer.1`, ..
    ///
    /// # Errors
    /// as [`EncoderLayer::new`].
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        let layer = |i| EncoderLayer::new(config, vb.pp("layer").pp(i));
        let layers = (0..config.num_hidden_layers).map(layer);
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    /// `x` `(B, T, E)` to `(B, T, E)`; packed sequences are `(1, N, E)` under a
    /// [block-diagonal mask](AttentionMask::block_diagonal).
    ///
    /// # Errors
    /// as [`EncoderLayer::forward`].
    pub fn forward(&self, x: &Tensor, mask: &AttentionMask) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, mask)?;
        }
        Ok(x)
    }

    /// What goes into each layer and what comes out of the last, L + 1 times `(B, T, E)`, and the
    /// attention weights of each, L times `(B, H, T, T)`.
    ///
    /// # Errors
    /// as [`Self::forward`].
    pub fn forward_all(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
    ) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let mut x = x.clone();
        let mut hidden_states = vec![x.clone()];
        let mut attentions = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let weights;
            (x, weights) = layer.forward_with_weights(&x, mask)?;
            hidden_states.push(x.clone());
            attentions.push(weights);
        }
        Ok((hidden_states, attentions))
    }
}
