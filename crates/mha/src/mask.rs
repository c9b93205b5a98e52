//! Which keys a query may attend to: `1 = may attend`, everywhere.
//!
//! A mask is described, not built: what it says becomes a tensor only inside attention, once the
//! shapes are known. This is the only file that knows that a hidden score is −∞.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::{Error, Result};

/// Which keys each query may attend to; `1 = may attend`, as in Hugging Face's `attention_mask`
/// and in PyTorch's `scaled_dot_product_attention`.
///
/// Parts compose: a key is visible where every part lets it be. A hidden key weighs exactly 0,
/// and what it holds (NaN and ∞ too) reaches no output; a query with no visible key gets zeros.
///
/// # Examples
/// Padding is hidden: one sequence of 3 tokens and one of 2, padded to 4.
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::AttentionMask;
///
/// let by_length = AttentionMask::none().with_valid_lens(&Tensor::new(&[3u32, 2], &Cpu)?)?;
/// let by_token = Tensor::new(&[[1u32, 1, 1, 0], [1, 1, 0, 0]], &Cpu)?;
/// let by_token = AttentionMask::none().with_padding(&by_token)?;
/// for mask in [by_length, by_token] {
///     let visible = mask.visible_keys(2, 4, &Cpu)?.unwrap();
///     assert_eq!(visible.to_vec2::<u8>()?, [[1, 1, 1, 0], [1, 1, 0, 0]]);
/// }
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct AttentionMask {
    padding: Option<Tensor>,      // (B, S), u8
    valid_lens: Option<Tensor>,   // (B,), u32
    blocks: Option<Arc<[usize]>>, // where each packed sequence begins, then N
}

impl AttentionMask {
    /// Every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// Sequences packed one after another attend each to itself: the mask is block-diagonal.
    ///
    /// Attention then runs sequence by sequence, and no score between two of them is computed.
    ///
    /// # Shapes
    /// `offsets`: where each sequence begins, then N, the number of packed tokens; such as
    /// `[0, 3, 5]` for sequences of 3 and 2 tokens. The hidden states are `(1, N, E)`.
    ///
    /// # Errors
    /// [`Error::Offsets`] if they do not rise from 0.
    pub fn block_diagonal(offsets: &[usize]) -> Result<Self> {
        let rises = offsets.first() == Some(&0) && offsets.is_sorted();
        if !rises {
            return Err(Error::Offsets {
                got: offsets.to_vec(),
                tokens: offsets.last().copied().unwrap_or(0),
            });
        }
        Ok(Self { blocks: Some(offsets.into()), ..Self::default() })
    }

    /// Hides the keys of each sequence where `padding` is 0.
    ///
    /// # Shapes
    /// `padding`: `(B, S)` of 0 and 1, any dtype.
    ///
    /// # Errors
    /// [`Error::Shape`] if it is not of rank 2; [`Error::MaskValue`] if it holds anything but 0
    /// and 1 (an additive mask of 0 and −∞, say); `padding` given twice multiplies.
    pub fn with_padding(mut self, padding: &Tensor) -> Result<Self> {
        expect_rank("padding mask", padding, 2, "(B, S)")?;
        let values = padding.to_dtype(DType::F64)?.flatten_all()?;
        if let Some(&got) =
            values.to_vec1::<f64>()?.iter().find(|&&value| value != 0.0 && value != 1.0)
        {
            let argument = "padding mask";
            return Err(Error::MaskValue { argument, got });
        }
        let padding = padding.to_dtype(DType::U8)?;
        self.padding = Some(match self.padding {
            None => padding,
            Some(earlier) => (earlier * padding)?,
        });
        Ok(self)
    }

    /// Hides the keys of each sequence from its valid length on.
    ///
    /// # Shapes
    /// `valid_lens`: `(B,)`, integers, in tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if it is not of rank 1, [`Error::DType`] if it is not of integers.
    /// A length above S is found when the mask meets the keys: [`Error::ValidLength`].
    pub fn with_valid_lens(mut self, valid_lens: &Tensor) -> Result<Self> {
        expect_rank("valid_lens", valid_lens, 1, "(B,)")?;
        if !valid_lens.dtype().is_int() {
            return Err(Error::DType {
                argument: "valid_lens",
                expected: "integers",
                got: valid_lens.dtype(),
            });
        }
        let valid_lens = valid_lens.to_dtype(DType::U32)?;
        self.valid_lens = Some(match self.valid_lens {
            None => valid_lens,
            Some(earlier) => earlier.minimum(&valid_lens)?,
        });
        Ok(self)
    }

    /// `(B, S)` of u8, 1 where the key may be attended to, if the mask says the same to every
    /// query of a sequence; `None` if it differs from query to query.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ValidLength`] if the mask is of other sequences.
    pub fn visible_keys(&self, b: usize, s: usize, device: &Device) -> Result<Option<Tensor>> {
        if self.blocks.is_some() {
            return Ok(None);
        }
        let visible = match self.hidden_keys(b, s, device)? {
            Some(visible) => visible,
            None => Tensor::ones((b, s), DType::U8, device)?,
        };
        Ok(Some(visible))
    }

    /// Where each packed sequence begins and ends, if that is all this mask says of `n` tokens.
    pub(crate) fn blocks(&self, n: usize) -> Result<Option<&[usize]>> {
        match &self.blocks {
            Some(offsets) if offsets.last() != Some(&n) => {
                Err(Error::Offsets { got: offsets.to_vec(), tokens: n })
            }
            Some(offsets) if self.padding.is_none() && self.valid_lens.is_none() => {
                Ok(Some(offsets))
            }
            _ => Ok(None),
        }
    }

    /// The one place where what was described becomes tensors.
    pub(crate) fn lower(&self, b: usize, t: usize, s: usize, device: &Device) -> Result<Lowered> {
        let keys = self.hidden_keys(b, s, device)?;
        let mut keep = match &keys {
            Some(keys) => Some(keys.reshape((b, 1, 1, s))?),
            None => None,
        };
        if let Some(offsets) = &self.blocks {
            self.blocks(t)?;
            self.blocks(s)?;
            let sequence_of: Vec<u32> = (0u32..)
                .zip(offsets.windows(2))
                .flat_map(|(i, w)| std::iter::repeat_n(i, w[1] - w[0]))
                .collect();
            let row = Tensor::new(sequence_of, device)?;
            let own = row.reshape((t, 1))?.broadcast_eq(&row.reshape((1, s))?)?;
            let own = own.reshape((1, 1, t, s))?;
            keep = Some(match keep {
                None => own,
                Some(keep) => keep.broadcast_mul(&own)?,
            });
        }
        Ok(Lowered { keep, keys })
    }

    /// `(B, S)` of u8: 0 where a key is hidden from every query; `None` if none is.
    fn hidden_keys(&self, b: usize, s: usize, device: &Device) -> Result<Option<Tensor>> {
        let padding = match &self.padding {
            None => None,
            Some(padding) => {
                expect_dims("padding mask", padding, &[b, s], "(B, S)")?;
                Some(padding.to_device(device)?)
            }
        };
        let Some(valid_lens) = &self.valid_lens else {
            return Ok(padding);
        };
        expect_dims("valid_lens", valid_lens, &[b], "(B,)")?;
        for (index, got) in valid_lens.to_vec1::<u32>()?.into_iter().enumerate() {
            let (got, length) = (got as usize, s);
            if got > length {
                return Err(Error::ValidLength { index, got, length });
            }
        }
        let position = Tensor::arange(0, s as u32, device)?.reshape((1, s))?;
        let lens = valid_lens.to_device(device)?.reshape((b, 1))?;
        let within = position.broadcast_lt(&lens)?; // (B, S)
        Ok(Some(match padding {
            None => within,
            Some(padding) => (padding * within)?,
        }))
    }
}

/// A mask as tensors.
#[derive(Default)]
pub(crate) struct Lowered {
    keep: Option<Tensor>, // (B, 1, 1|T, S), u8
    keys: Option<Tensor>, // (B, S), u8
}

impl Lowered {
    /// The part of the mask that speaks of `len` queries from `start` on.
    pub(crate) fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let keep = match &self.keep {
            Some(keep) if keep.dim(2)? > 1 => Some(keep.narrow(2, start, len)?),
            keep => keep.clone(),
        };
        let keys = self.keys.clone();
        Ok(Self { keep, keys })
    }

    /// `scores` `(B, H, T, S)` with −∞ where a key is hidden from a query.
    pub(crate) fn hide_scores(&self, scores: Tensor) -> Result<Tensor> {
        select(self.keep.as_ref(), scores, f32::NEG_INFINITY)
    }

    /// `v` `(B, H, S, D)` with zeros in the keys that no query sees, since `0 × NaN` is NaN.
    pub(crate) fn hide_values(&self, v: Tensor) -> Result<Tensor> {
        let keys = match &self.keys {
            None => None,
            Some(keys) => Some(keys.unsqueeze(1)?.unsqueeze(3)?), // (B, 1, S, 1)
        };
        select(keys.as_ref(), v, 0.0)
    }
}

/// `x` where `keep` is 1, `otherwise` where it is 0.
fn select(keep: Option<&Tensor>, x: Tensor, otherwise: f32) -> Result<Tensor> {
    let Some(keep) = keep else { return Ok(x) };
    let otherwise = Tensor::new(otherwise, x.device())?.to_dtype(x.dtype())?;
    let keep = keep.broadcast_as(x.shape())?;
    Ok(keep.where_cond(&x, &otherwise.broadcast_as(x.shape())?)?)
}

fn expect_rank(argument: &'static str, x: &Tensor, rank: usize, shape: &'static str) -> Result<()> {
    if x.rank() == rank {
        return Ok(());
    }
    Err(Error::Shape { argument, expected: shape.to_string(), got: x.dims().to_vec() })
}

/// Checks that `x` is `dims`, whose letters are `shape`.
pub(crate) fn expect_dims(
    argument: &'static str,
    x: &Tensor,
    dims: &[usize],
    shape: &'static str,
) -> Result<()> {
    if x.dims() == dims {
        return Ok(());
    }
    Err(Error::Shape { argument, expected: format!("{shape} = {dims:?}"), got: x.dims().to_vec() })
}

#[cfg(test)]
mod tests {
    use candle_core::Device::Cpu;

    use super::*;

    #[test]
    fn parts_compose() -> Result<()> {
        let mask = AttentionMask::none()
            .with_valid_lens(&Tensor::new(&[3u32, 2], &Cpu)?)?
            .with_padding(&Tensor::new(&[[0f32, 1., 1., 1.], [1., 1., 1., 1.]], &Cpu)?)?;
        let visible = mask.visible_keys(2, 4, &Cpu)?.unwrap();
        assert_eq!(visible.to_vec2::<u8>()?, [[0, 1, 1, 0], [1, 1, 0, 0]]);
        Ok(())
    }

    #[test]
    fn an_additive_mask_is_refused() -> Result<()> {
        let additive = Tensor::new(&[[0f32, f32::NEG_INFINITY]], &Cpu)?;
        let error = AttentionMask::none().with_padding(&additive).unwrap_err();
        assert_eq!(
            error.to_string(),
            "padding mask holds -inf: expected 1 (may attend) or 0 (hidden); \
             an additive mask is not a padding mask"
        );
        Ok(())
    }

    #[test]
    fn shapes_of_other_sequences_are_refused() -> Result<()> {
        let three = Tensor::new(&[[1u8, 1, 0]], &Cpu)?;
        let mask = AttentionMask::none().with_padding(&three)?;
        assert_eq!(
            mask.visible_keys(2, 4, &Cpu).unwrap_err().to_string(),
            "padding mask has the wrong shape: expected (B, S) = [2, 4], got [1, 3]"
        );
        let mask = AttentionMask::none().with_valid_lens(&Tensor::new(&[3u32, 5], &Cpu)?)?;
        assert_eq!(
            mask.visible_keys(2, 4, &Cpu).unwrap_err().to_string(),
            "valid length 5 of sequence 1 is too long: expected at most 4 keys"
        );
        assert_eq!(
            AttentionMask::none().with_valid_lens(&three).unwrap_err().to_string(),
            "valid_lens has the wrong shape: expected (B,), got [1, 3]"
        );
        Ok(())
    }

    #[test]
    fn offsets_must_rise_from_zero_to_the_number_of_tokens() -> Result<()> {
        for wrong in [&[][..], &[1, 2], &[0, 3, 2]] {
            AttentionMask::block_diagonal(wrong).unwrap_err();
        }
        let mask = AttentionMask::block_diagonal(&[0, 3, 5])?;
        assert_eq!(mask.blocks(5)?, Some(&[0, 3, 5][..]));
        assert_eq!(
            mask.blocks(6).unwrap_err().to_string(),
            "offsets [0, 3, 5] do not describe 6 packed tokens: expected 0, .., 6, never falling"
        );
        Ok(())
    }
}
