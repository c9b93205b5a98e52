//! The state of a decoder's layers between calls: the keys and values of the preceding tokens, and
//! those of an encoder's output.

use candle_core::Tensor;
use mha::{KvCache, Memory};

use crate::Result;

/// The keys and values of the preceding tokens, for every layer of a decoder.
///
/// Clones are independent of each other.
#[derive(Clone, Debug)]
pub struct DecoderCache {
    pub(super) layers: Vec<KvCache>,
    /// The largest number of tokens since the cache was empty.
    pub(super) longest: usize,
}

/// The keys and values of tokens with which several sequences begin, for every layer of a causal
/// model.
#[derive(Clone, Debug)]
pub(crate) struct Prefix {
    pub(super) layers: Vec<Memory>,
}

impl Prefix {
    /// The number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.layers.first().map_or(0, Memory::keys)
    }

    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().map(Memory::bytes).sum()
    }

    /// The layers of `prefix`, `n` times.
    #[cfg(test)]
    pub(crate) fn repeated(prefix: &Self, n: usize) -> Self {
        Self { layers: (0..n).flat_map(|_| prefix.layers.clone()).collect() }
    }

    /// The first `len` tokens.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] if there are fewer.
    pub(crate) fn first(&self, len: usize) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.first(len));
        Ok(Self { layers: layers.collect::<mha::Result<_>>()? })
    }
}

/// The keys and values of an encoder's output, for every layer of a decoder with cross-attention.
#[derive(Clone, Debug)]
pub struct DecoderMemory {
    pub(super) layers: Vec<Memory>,
    pub(super) padding: Option<Tensor>, // (B, S)
}

/// The attention weights of a decoder, one tensor per layer.
#[derive(Clone, Debug, Default)]
pub struct DecoderAttentions {
    /// Self-attention: `(B, H, T, T)`, the weights of each token for itself and the preceding
    /// tokens.
    pub causal: Vec<Tensor>,
    /// Cross-attention: `(B, H, T, S)`, the weights of each token for the tokens of the memory.
    /// Empty for a decoder without cross-attention.
    pub cross: Vec<Tensor>,
}

impl DecoderCache {
    /// Number of tokens in the cache per sequence.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvCache::len)
    }

    /// Whether the cache has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(KvCache::reset);
        self.longest = 0;
    }

    /// Removes the tokens from index `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
    }

    /// Selects sequences in a new order: sequence `i` becomes the former sequence `beams[i]`.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if an index is out of range.
    pub fn reorder(&mut self, beams: &[u32]) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.reorder(beams))?)
    }
}

impl DecoderMemory {
    /// The keys and values of layer `i`, and the padding.
    pub(super) fn layer(&self, i: usize) -> (&Memory, Option<&Tensor>) {
        (&self.layers[i], self.padding.as_ref())
    }

    /// Checks the number of sequences.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] if it is not `expected`.
    pub(crate) fn check_sequences(&self, expected: usize) -> Result<()> {
        let got = self.layers.first().map_or(expected, Memory::sequences);
        if got != expected {
            let expected = format!("{expected} sequences, one for each prompt");
            let (argument, got) = ("memory", vec![got]);
            return Err(mha::Error::Shape { argument, expected, got }.into());
        }
        Ok(())
    }

    /// A memory whose sequence `i` is this memory's sequence `batch[i]`.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if an index is out of range.
    pub fn reorder(&self, batch: &[u32]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.reorder(batch));
        let layers = layers.collect::<mha::Result<_>>()?;
        let padding = match &self.padding {
            None => None,
            Some(padding) => {
                let index = Tensor::new(batch, padding.device())?;
                Some(padding.contiguous()?.index_select(&index, 0)?)
            }
        };
        Ok(Self { layers, padding })
    }
}
