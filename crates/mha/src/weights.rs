//! Selection of the attention weights to return.

use candle_core::Tensor;

use crate::{
    Error, LoweredMask, Result,
    sdpa::{self, Scoring},
    shape::check_qkv,
};

/// Which attention weights to return.
///
/// Only the weights of the chosen heads are computed and kept in memory: one head of twelve takes a
/// twelfth of the memory of `(B, H, T, S)`.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, AttentionMask, AttentionOptions, HeadWeights, SelfAttention};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let attention = SelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
/// let run = |weights| {
///     let options = AttentionOptions::new().with_weights(weights);
///     attention.forward_with(&x, &AttentionMask::none(), options)
/// };
/// let (_, two) = run(HeadWeights::Heads(vec![2, 0]))?;
/// assert_eq!(two.unwrap().dims(), [1, 2, 5, 5]);
/// let (_, mean) = run(HeadWeights::Mean)?;
/// assert_eq!(mean.as_ref().unwrap().dims(), [1, 5, 5]);
/// assert!((mean.unwrap().sum_all()?.to_scalar::<f32>()? - 5.0).abs() < 1e-5);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeadWeights {
    /// No weights.
    #[default]
    None,
    /// The weights of every head, `(B, H, T, S)`.
    All,
    /// The mean over the heads, `(B, T, S)`.
    Mean,
    /// The weights of these heads, in this order, `(B, heads, T, S)`.
    Heads(Vec<usize>),
}

impl HeadWeights {
    /// The chosen weights, from projected queries, keys and values.
    ///
    /// # Errors
    /// [`Error::Head`] for a head that does not exist; the errors of [`check_qkv`] and
    /// [`LoweredMask::check`].
    pub(crate) fn compute(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &LoweredMask,
        scoring: Scoring,
    ) -> Result<Tensor> {
        let dims = check_qkv(q, k, v)?;
        let [b, h, t, s] = dims;
        mask.check(dims)?;
        let heads = match self {
            Self::None => vec![],
            Self::All | Self::Mean => (0..h).collect(),
            Self::Heads(heads) => heads.clone(),
        };
        if let Some(&head) = heads.iter().find(|&&head| head >= h) {
            return Err(Error::Head { head, heads: h });
        }
        let is_mean = *self == Self::Mean;
        if b * t * s == 0 || heads.is_empty() {
            let dims = if is_mean { vec![b, t, s] } else { vec![b, heads.len(), t, s] };
            return Ok(Tensor::zeros(dims, q.dtype(), q.device())?); // has no elements
        }
        if !is_mean {
            return sdpa::weights_of_heads(q, k, mask, scoring, &heads);
        }
        // One head at a time: the weights of all heads may not fit into memory.
        let (q, k) = (&ops::widen(q)?, &ops::widen(k)?);
        let mut sum = sdpa::weights_of_heads(q, k, mask, scoring, &[0])?;
        for head in 1..h {
            sum = (sum + sdpa::weights_of_heads(q, k, mask, scoring, &[head])?)?;
        }
        Ok((sum / h as f64)?.squeeze(1)?)
    }
}
