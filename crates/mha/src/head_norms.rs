//! RMS normalisation of each head's queries and keys, before the rotation and the scores:
//! `x / √(mean(x²) + ε) · weight` over the D values of a head.
//! Henry et al. 2020, <https://arxiv.org/abs/2010.04245>, with the norm of Zhang and Sennrich 2019.

use candle_core::{Module, Tensor};
use ops::{Loaded, RmsNorm, Weights, loaded, normalise_heads_in_place};
use serde::{Deserialize, Serialize};

use crate::{Result, shape::check_heads};

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

/// The normalisations of the queries and of the keys of a module, from
/// [`AttentionConfig::query_key_norm`]. [`QueryKeyTransform::query_and_key`] applies them.
///
/// [`AttentionConfig::query_key_norm`]: crate::AttentionConfig::query_key_norm
/// [`QueryKeyTransform::query_and_key`]: crate::QueryKeyTransform::query_and_key
#[derive(Clone, Debug)]
pub struct HeadNorms {
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

    /// Normalises queries.
    ///
    /// # Shapes
    /// `q`: `(B, H, T, D)`; returns the same shape
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if `q` has another width or dtype.
    pub fn query(&self, q: &Tensor) -> Result<Tensor> {
        Ok(self.query.forward(q)?)
    }

    /// Normalises keys.
    ///
    /// # Shapes
    /// `k`: `(B, G, S, D)`; returns the same shape
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if `k` has another width or dtype.
    pub fn key(&self, k: &Tensor) -> Result<Tensor> {
        Ok(self.key.forward(k)?)
    }

    /// The norms for a kernel, for a tensor whose first `h` heads are those of queries.
    pub(crate) fn kernel(&self, h: usize) -> ops::HeadNorms<'_> {
        ops::HeadNorms { query_heads: h, query: &self.query, key: &self.key }
    }

    /// The weights under the names that [`Self::load`] reads.
    pub(crate) fn tensors(&self) -> [(&'static str, &Tensor); 2] {
        [("query_norm.weight", self.query.weight()), ("key_norm.weight", self.key.weight())]
    }
}

/// Splits heads into queries and keys, normalised if `norms` is given.
///
/// # Shapes
/// `heads`: `(B, H + G, T, D)`, the H = `h` heads of queries, then the G heads of keys; returns the
/// queries and the keys. Nothing else reads `heads`, which may be overwritten.
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) for other shapes; the errors of [`HeadNorms::query`].
pub(crate) fn queries_and_keys(
    heads: &Tensor,
    h: usize,
    norms: Option<&HeadNorms>,
) -> Result<(Tensor, Tensor)> {
    check_heads(heads, h)?;
    let (q, k) = (heads.narrow(1, 0, h)?, heads.narrow(1, h, heads.dim(1)? - h)?);
    match norms {
        None => Ok((q, k)),
        // candle refuses in-place operations on empty tensors, whose strides can be 0.
        Some(norms)
            if heads.elem_count() > 0 && normalise_heads_in_place(heads, norms.kernel(h))? =>
        {
            Ok((q, k))
        }
        // Some GPU drivers refuse an allocation of 0 bytes.
        Some(norms) => Ok((
            if q.elem_count() > 0 { norms.query(&q)? } else { q },
            if k.elem_count() > 0 { norms.key(&k)? } else { k },
        )),
    }
}
