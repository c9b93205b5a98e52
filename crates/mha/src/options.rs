//! Options of an attention call: returned weights, dropout, a transformation of queries and keys,
//! and relative positions.

use std::fmt::Debug;

use candle_core::Tensor;

use crate::{
    DisentangledPositions, Dropout, HeadNorms, HeadWeights, Result, head_norms::queries_and_keys,
};

/// Transforms the projected queries and keys before the scores are computed, as rotary position
/// embedding does.
///
/// The transformation may depend on the positions of the tokens, so it is passed to each attention
/// call and not stored in a module.
/// A [`crate::KvCache`] stores the transformed keys.
///
/// # Examples
/// Normalise queries and keys to unit length, so that the scores are scaled cosines:
/// ```
/// use candle_core::{D, DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, AttentionMask, AttentionOptions, ProjectionBias};
/// use mha::{QueryKeyTransform, SelfAttention};
///
/// #[derive(Debug)]
/// struct UnitLength;
///
/// impl QueryKeyTransform for UnitLength {
///     fn query(&self, q: &Tensor) -> mha::Result<Tensor> {
///         Ok(q.broadcast_div(&q.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)?)
///     }
///
///     fn key(&self, k: &Tensor) -> mha::Result<Tensor> {
///         self.query(k)
///     }
/// }
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let config = AttentionConfig::new(12, 3).with_bias(ProjectionBias::NONE);
/// let attention = SelfAttention::new(&config, vb)?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let outputs = [&x, &(&x * 9.0)?].map(|x| {
///     let options = AttentionOptions::new()
///         .with_weights(mha::HeadWeights::All)
///         .with_transform(&UnitLength);
///     attention.forward_with(x, &AttentionMask::none(), options)
/// });
/// let [weights, scaled_weights] = outputs.map(|output| output.unwrap().1.unwrap());
/// // The scores do not depend on the norm of the input.
/// let is_close = (weights - scaled_weights)?.abs()?.lt(1e-5)?; // 0 for NaN
/// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
/// # Ok::<(), mha::Error>(())
/// ```
pub trait QueryKeyTransform: Debug {
    /// Transforms queries.
    ///
    /// # Shapes
    /// `q`: `(B, H, T, D)`; returns the same shape
    /// # Errors
    /// The errors of the implementation.
    fn query(&self, q: &Tensor) -> Result<Tensor>;

    /// Transforms keys.
    ///
    /// # Shapes
    /// `k`: `(B, G, S, D)`, where G is the number of key-value heads; returns the same shape
    /// # Errors
    /// The errors of the implementation.
    fn key(&self, k: &Tensor) -> Result<Tensor>;

    /// Transforms queries and keys that were projected to one tensor, in self-attention. If the module
    /// normalises queries and keys, applies `norms` before the transformation: an implementation can
    /// compute both in one pass. The default calls [`Self::query`] and [`Self::key`].
    ///
    /// # Shapes
    /// `heads`: `(B, H + G, T, D)`, the H = `h` heads of queries, then the G heads of keys; H or G is
    /// 0 for the queries or the keys of other tokens alone; returns the queries and the keys. Nothing
    /// else reads `heads`, so an implementation may overwrite it.
    /// # Errors
    /// The errors of the implementation.
    fn query_and_key(
        &self,
        heads: &Tensor,
        h: usize,
        norms: Option<&HeadNorms>,
    ) -> Result<(Tensor, Tensor)> {
        let (q, k) = queries_and_keys(heads, h, norms)?;
        let q = if q.dim(1)? > 0 { self.query(&q)? } else { q };
        let k = if k.dim(1)? > 0 { self.key(&k)? } else { k };
        Ok((q, k))
    }
}

/// Options of an attention call. By default attention returns no weights, and applies no dropout,
/// no transformation and no relative positions.
///
/// # Examples
/// Self-attention with rotary positions, and the weights of head 2:
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, AttentionMask, AttentionOptions, HeadWeights, Rotary, SelfAttention};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let attention = SelfAttention::new(&AttentionConfig::new(12, 3), vb)?; // D = 4
/// let rotation = Rotary::new(10_000., 4, 100, &Cpu)?.at(&[0, 1, 2, 3, 4])?;
/// let options = AttentionOptions::new()
///     .with_transform(&rotation)
///     .with_weights(HeadWeights::Heads(vec![2]));
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let (y, weights) = attention.forward_with(&x, &AttentionMask::none(), options)?;
/// assert_eq!((y.dims(), weights.unwrap().dims()), (&[1, 5, 12][..], &[1, 1, 5, 5][..]));
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct AttentionOptions<'a> {
    /// The attention weights to return. They are taken before dropout.
    pub weights: HeadWeights,
    /// Dropout on the attention weights, for training.
    pub dropout: Option<&'a mut Dropout>,
    /// The transformation of projected queries and keys.
    pub transform: Option<&'a dyn QueryKeyTransform>,
    /// The transformation of queries that are not those of the same tokens as the keys. The default
    /// is `transform`.
    pub query_transform: Option<&'a dyn QueryKeyTransform>,
    /// The relative positions of disentangled attention.
    pub disentangled: Option<&'a DisentangledPositions>,
}

impl<'a> AttentionOptions<'a> {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the attention weights to return.
    pub fn with_weights(self, weights: HeadWeights) -> Self {
        Self { weights, ..self }
    }

    /// Applies dropout to the attention weights.
    pub fn with_dropout(self, dropout: &'a mut Dropout) -> Self {
        Self { dropout: Some(dropout), ..self }
    }

    /// Applies a transformation to the projected queries and keys.
    pub fn with_transform(self, transform: &'a dyn QueryKeyTransform) -> Self {
        Self { transform: Some(transform), ..self }
    }

    /// Applies another transformation to the queries than to the keys.
    pub fn with_query_transform(self, transform: &'a dyn QueryKeyTransform) -> Self {
        Self { query_transform: Some(transform), ..self }
    }

    /// Adds the scores of relative positions, and scales all scores by `1/√(n·D)`, or by `scale/√n`
    /// if the config has a `scale`. n is 1 plus the number of terms in `positions`: `q·K[r]`, `k·Q[r]` or both, where r is the row for the
    /// distance of query and key. These terms use q and k after the transformation of
    /// [`Self::with_transform`]. After a transformation that depends on positions, such as rotary
    /// positions, the terms depend on the absolute positions, not only on r.
    pub fn with_disentangled(self, positions: &'a DisentangledPositions) -> Self {
        Self { disentangled: Some(positions), ..self }
    }
}
