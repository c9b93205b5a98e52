//! Attention weights for a person to look at: those asked for, and no others.

use candle_core::Tensor;

use crate::{AttentionMask, Dropout, Error, Result, mask::Lowered, sdpa};

/// Which attention weights to give back.
///
/// Only what is asked for is ever in memory: one head of twelve is a twelfth of `(B, H, T, S)`.
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
/// let ask = |weights| {
///     let options = AttentionOptions { weights, ..AttentionOptions::default() };
///     attention.forward_with(&x, &AttentionMask::none(), options)
/// };
/// let (_, two) = ask(HeadWeights::Heads(vec![2, 0]))?;
/// assert_eq!(two.unwrap().dims(), [1, 2, 5, 5]);
/// let (_, mean) = ask(HeadWeights::Mean)?;
/// assert_eq!(mean.as_ref().unwrap().dims(), [1, 5, 5]);
/// assert!((mean.unwrap().sum_all()?.to_scalar::<f32>()? - 5.0).abs() < 1e-5);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HeadWeights {
    /// None.
    #[default]
    None,
    /// Those of every head, `(B, H, T, S)`.
    All,
    /// Their mean over the heads, `(B, T, S)`.
    Mean,
    /// Those of these heads, in this order, `(B, heads, T, S)`.
    Heads(Vec<usize>),
}

/// What attention does besides: nothing, by default.
#[derive(Debug, Default)]
pub struct AttentionOptions<'a> {
    /// Which weights to give back; they are those before dropout.
    pub weights: HeadWeights,
    /// What drops weights, in training.
    pub dropout: Option<&'a mut Dropout>,
}

impl HeadWeights {
    /// The weights, from projected queries and keys.
    pub(crate) fn compute(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &AttentionMask,
    ) -> Result<Tensor> {
        let dims = sdpa::check(q, k, v)?;
        let [b, h, t, s] = dims;
        let mask: Lowered = mask.lower(dims, q.device())?;
        let heads = match self {
            Self::None => vec![],
            Self::All | Self::Mean => (0..h).collect(),
            Self::Heads(heads) => heads.clone(),
        };
        if let Some(&head) = heads.iter().find(|&&head| head >= h) {
            return Err(Error::Head { head, what: "is not there", heads: h });
        }
        let of_head = |head| sdpa::weights_of_head(q, k, &mask, head); // (B, 1, T, S)
        if *self == Self::Mean {
            let mut sum = of_head(0)?;
            for head in 1..h {
                sum = (sum + of_head(head)?)?;
            }
            return Ok((sum / h as f64)?.squeeze(1)?);
        }
        let weights = heads.into_iter().map(of_head).collect::<Result<Vec<_>>>()?;
        match weights.is_empty() {
            true => Ok(Tensor::zeros((b, 0, t, s), q.dtype(), q.device())?),
            false => Ok(Tensor::cat(&weights, 1)?),
        }
    }
}
