//! The encoder: L layers, one after another.

use candle_core::Tensor;
use candle_nn::VarBuilder;
use mha::{AttentionMask, AttentionOptions, HeadWeights};

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
        self.forward_with(x, mask, |_| HeadWeights::None, |_, _| ())
    }

    /// [`Self::forward`], showing each layer's output `(B, T, E)` to `see` with the attention
    /// weights that `select` chooses for the layer of that number.
    ///
    /// # Errors
    /// as [`EncoderLayer::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        mask: &AttentionMask,
        select: impl Fn(usize) -> HeadWeights,
        mut see: impl FnMut(&Tensor, Option<Tensor>),
    ) -> Result<Tensor> {
        let mut x = x.clone();
        for (i, layer) in self.layers.iter().enumerate() {
            let options = AttentionOptions::new().with_weights(select(i));
            let weights;
            (x, weights) = layer.forward_with(&x, mask, options)?;
            see(&x, weights);
        }
        Ok(x)
    }
}
