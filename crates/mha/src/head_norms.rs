//! RMS normalisation of each head's queries and keys, before the rotation and the scores:
//! `x / √(mean(x²) + ε) · weight` over the D values of a head.
//! Henry et al. 2020, <https://arxiv.org/abs/2010.04245>, with the norm of Zhang and Sennrich 2019.

use candle_core::{Module, Tensor};
use ops::{Loaded, RmsNorm, Weights, loaded};
use serde::{Deserialize, Serialize};

use crate::Result;

/// RMS normalisation of each head's queries and keys, see [`AttentionConfig::query_key_norm`].
///
/// # Source
/// `Qwen3Attention` and, with a unit offset, `Gemma3Attention` of transformers.
///
/// [`AttentionConfig::query_key_norm`]: crate::AttentionConfig::query_key_norm
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueryKeyNorm {
    /// ε, which is added to the mean square.
    pub eps: f64,
    /// Whether the normalised values are multiplied by `1 + weight` instead of `weight`.
    pub unit_offset: bool,
}

/// The normalisations of queries and of keys. All heads have the same weight.
#[derive(Clone, Debug)]
pub(crate) struct HeadNorms {
    query: RmsNorm,
    key: RmsNorm,
}

impl HeadNorms {
    /// Loads `query_norm.weight` and `key_norm.weight`, each `(D,)`, for heads of width `d`.
    ///
    /// # Errors
    /// The errors of [`RmsNorm::new`], except that of weights that are not loaded.
    pub(crate) fn load(d: usize, norm: QueryKeyNorm, weights: &Weights) -> Result<Loaded<Self>> {
        let [query, key] = ["query_norm", "key_norm"]
            .map(|name| loaded(RmsNorm::new(d, norm.eps, norm.unit_offset, weights.pp(name))));
        let (query, key) = (query?, key?);
        Ok(query.and_then(|query| Ok(Self { query, key: key? })))
    }

    /// Normalises queries `(B, H, T, D)`.
    pub(crate) fn query(&self, q: &Tensor) -> Result<Tensor> {
        Ok(self.query.forward(q)?)
    }

    /// Normalises keys `(B, G, S, D)`.
    pub(crate) fn key(&self, k: &Tensor) -> Result<Tensor> {
        Ok(self.key.forward(k)?)
    }

    /// The weights under the names that [`Self::load`] reads.
    pub(crate) fn tensors(&self) -> [(&'static str, &Tensor); 2] {
        [("query_norm.weight", self.query.weight()), ("key_norm.weight", self.key.weight())]
    }
}
