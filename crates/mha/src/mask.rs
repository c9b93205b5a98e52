//! Which keys a query may attend to: `1 = may attend`, everywhere.
//!
//! A mask is described, not built: what it says becomes tensors only inside attention, once the
//! shapes are known. This is the only file that knows that a hidden score is −∞.

use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use mha_kernels::Sequence;

use crate::{Error, Result};

/// Which keys each query may attend to; `1 = may attend`, as in Hugging Face's `attention_mask`
/// and in PyTorch's `scaled_dot_product_attention`.
///
/// Parts compose: a key is visible where every part lets it be. A hidden key weighs exactly 0,
/// and what it holds (NaN and ∞ too) reaches no output, nor a gradient if it is hidden from every
/// query; a query with no visible key gets zeros.
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
/// A causal mask with padding: three queries, the first key is padding.
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
///
/// let x = Tensor::zeros((1, 1, 3, 2), candle_core::DType::F32, &Cpu)?;
/// let mask = AttentionMask::causal(0).with_padding(&Tensor::new(&[[0u8, 1, 1]], &Cpu)?)?;
/// let (_, weights) = attend(&x, &x, &x, &mask, None)?;
/// assert_eq!(
///     weights.squeeze(0)?.squeeze(0)?.to_vec2::<f32>()?,
///     [[0., 0., 0.], [0., 1., 0.], [0., 0.5, 0.5]]
/// );
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct AttentionMask {
    padding: Option<Tensor>,      // (B, S), u8
    valid_lens: Option<Tensor>,   // (B,), u32
    query_lens: Option<Tensor>,   // (B, T), u32
    causal: Option<usize>,        // keys before the first query
    blocks: Option<Arc<[usize]>>, // where each packed sequence begins, then N
    keep: Vec<Tensor>,            // each broadcast to (B, H, T, S), u8
    bias: Vec<Tensor>,            // each broadcast to (B, H, T, S)
    head_mask: Option<Tensor>,    // (H,)
}

impl AttentionMask {
    /// Every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// Query `t` sees the keys up to `t + offset`: `offset` is how many keys come before the first
    /// query, 0 where a sequence attends to itself.
    pub fn causal(offset: usize) -> Self {
        Self { causal: Some(offset), ..Self::default() }
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
            let tokens = offsets.last().copied().unwrap_or(0);
            return Err(Error::Offsets { got: offsets.to_vec(), tokens });
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
    /// and 1 (an additive mask of 0 and −∞, say).
    pub fn with_padding(mut self, padding: &Tensor) -> Result<Self> {
        expect_rank("padding mask", padding, 2, "(B, S)")?;
        let padding = zeros_and_ones("padding mask", padding)?;
        self.padding = Some(match self.padding {
            None => padding,
            Some(earlier) => {
                expect_dims(
                    "padding mask",
                    &padding,
                    earlier.dims(),
                    "the shape of the one before",
                )?;
                (earlier * padding)?
            }
        });
        Ok(self)
    }

    /// Hides the keys from a valid length on: one length for a sequence, or one for each of its
    /// queries.
    ///
    /// # Shapes
    /// `valid_lens`: `(B,)` or `(B, T)`, integers, in keys.
    ///
    /// # Errors
    /// [`Error::Shape`] if it is of another rank, [`Error::DType`] if it is not of integers.
    /// A length above S is found when the mask meets the keys: [`Error::ValidLength`].
    pub fn with_valid_lens(mut self, valid_lens: &Tensor) -> Result<Self> {
        if !valid_lens.dtype().is_int() {
            return Err(Error::DType {
                argument: "valid_lens",
                expected: "integers",
                got: valid_lens.dtype(),
            });
        }
        let lens = match valid_lens.rank() {
            1 => &mut self.valid_lens,
            2 => &mut self.query_lens,
            _ => return Err(shape_error("valid_lens", valid_lens, "(B,) or (B, T)".into())),
        };
        let counts = valid_lens.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
        if let Some(&got) = counts.iter().find(|&&len| u32::try_from(len).is_err()) {
            return Err(Error::MaskLength { got });
        }
        let valid_lens = valid_lens.to_dtype(DType::U32)?;
        *lens = Some(match lens.take() {
            None => valid_lens,
            Some(earlier) => {
                expect_dims(
                    "valid_lens",
                    &valid_lens,
                    earlier.dims(),
                    "the shape of those before",
                )?;
                earlier.minimum(&valid_lens)?
            }
        });
        Ok(self)
    }

    /// Hides keys from queries where `keep` is 0.
    ///
    /// # Shapes
    /// `keep`: of 0 and 1, any dtype; broadcast to `(B, H, T, S)` from the right, as in PyTorch:
    /// `(T, S)`, `(B, 1, 1, S)`, `(B, H, T, S)`, ..
    ///
    /// # Errors
    /// [`Error::MaskValue`] if it holds anything but 0 and 1. A shape that does not broadcast is
    /// found when the mask meets the keys: [`Error::Shape`].
    pub fn with_keep(mut self, keep: &Tensor) -> Result<Self> {
        self.keep.push(zeros_and_ones("keep mask", keep)?);
        Ok(self)
    }

    /// Adds `bias` to the scaled scores; a bias of −∞ hides the key.
    ///
    /// # Shapes
    /// `bias`: floats, broadcast as in [`Self::with_keep`].
    ///
    /// # Errors
    /// [`Error::DType`] if it is not of floats: 0 and 1 are for [`Self::with_keep`].
    pub fn with_bias(mut self, bias: &Tensor) -> Result<Self> {
        if !bias.dtype().is_float() {
            return Err(Error::DType {
                argument: "bias",
                expected: "floats that are added to the scores (0 and 1 are a keep mask)",
                got: bias.dtype(),
            });
        }
        self.bias.push(bias.clone());
        Ok(self)
    }

    /// Multiplies all weights of each head: 0 turns a head off, 1 leaves it.
    ///
    /// # Shapes
    /// `head_mask`: `(H,)`, floats
    ///
    /// # Errors
    /// [`Error::Shape`] if it is not of rank 1, [`Error::DType`] if it is not of floats.
    pub fn with_head_mask(mut self, head_mask: &Tensor) -> Result<Self> {
        expect_rank("head mask", head_mask, 1, "(H,)")?;
        if !head_mask.dtype().is_float() {
            let (expected, got) = ("floats", head_mask.dtype());
            return Err(Error::DType { argument: "head mask", expected, got });
        }
        self.head_mask = Some(match self.head_mask {
            None => head_mask.clone(),
            Some(earlier) => {
                expect_dims("head mask", head_mask, earlier.dims(), "the shape of the one before")?;
                (earlier * head_mask)?
            }
        });
        Ok(self)
    }

    /// Whether it is of packed sequences, each of which attends to itself.
    pub fn is_packed(&self) -> bool {
        self.blocks.is_some()
    }

    /// `(B, S)` of u8, 1 where the key may be attended to, if that is all the mask says; `None`
    /// if it says more: something that differs from query to query or between heads, or a bias.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::ValidLength`] if the mask is of other sequences.
    pub fn visible_keys(&self, b: usize, s: usize, device: &Device) -> Result<Option<Tensor>> {
        if self.blocks.is_some() || !self.is_of_keys() {
            return Ok(None);
        }
        Ok(Some(self.unpadded_keys(b, s, device)?))
    }

    /// `(B, S)` of u8, 0 where padding or a valid length hides a key from every query, whatever
    /// else the mask says.
    ///
    /// # Errors
    /// as [`Self::visible_keys`].
    pub fn unpadded_keys(&self, b: usize, s: usize, device: &Device) -> Result<Tensor> {
        match self.hidden_keys(b, s, device)? {
            Some(visible) => Ok(visible),
            None => Ok(Tensor::ones((b, s), DType::U8, device)?),
        }
    }

    /// What the CPU kernel knows of masks, if that is all this one says.
    pub(crate) fn for_kernel(
        &self,
        dims: [usize; 4],
        device: &Device,
    ) -> Result<Option<ForKernel>> {
        let [b, _h, t, s] = dims;
        let only_causal = Self { causal: None, ..self.clone() };
        if !only_causal.is_of_keys() || (self.causal.is_some() && self.blocks.is_some()) {
            return Ok(None);
        }
        let sequences = match &self.blocks {
            None => (0..b).map(|b| Sequence { b, queries: 0..t, keys: 0..s }).collect(),
            Some(offsets) => {
                self.blocks(t)?;
                self.blocks(s)?;
                let ranges = offsets.windows(2).map(|w| w[0]..w[1]);
                ranges.map(|r| Sequence { b: 0, queries: r.clone(), keys: r }).collect()
            }
        };
        let keep = match self.hidden_keys(b, s, device)? {
            None => None,
            Some(keys) => Some(keys.flatten_all()?.to_vec1()?),
        };
        Ok(Some(ForKernel { sequences, keep, causal: self.causal }))
    }

    /// Where each packed sequence begins and ends, if that is all this mask says of `n` tokens.
    pub(crate) fn blocks(&self, n: usize) -> Result<Option<&[usize]>> {
        match &self.blocks {
            Some(offsets) if offsets.last() != Some(&n) => {
                Err(Error::Offsets { got: offsets.to_vec(), tokens: n })
            }
            Some(offsets)
                if self.is_of_keys() && self.padding.is_none() && self.valid_lens.is_none() =>
            {
                Ok(Some(offsets))
            }
            _ => Ok(None),
        }
    }

    /// Whether, blocks aside, it says the same to every query and head.
    fn is_of_keys(&self) -> bool {
        self.causal.is_none()
            && self.query_lens.is_none()
            && self.keep.is_empty()
            && self.bias.is_empty()
            && self.head_mask.is_none()
    }

    /// The one place where what was described becomes tensors, for `(B, H, T, S)` scores.
    pub(crate) fn lower(&self, dims: [usize; 4], device: &Device) -> Result<Lowered> {
        let [b, h, t, s] = dims;
        let keys = self.hidden_keys(b, s, device)?;
        let mut keep = Keep(match &keys {
            Some(keys) => Some(keys.reshape((b, 1, 1, s))?),
            None => None,
        });
        if let Some(offset) = self.causal {
            let query = Tensor::arange(0, t as u32, device)?.reshape((1, 1, t, 1))?;
            let key = Tensor::arange(0, s as u32, device)?.reshape((1, 1, 1, s))?;
            let offset = Tensor::new(offset as u32, device)?;
            keep.also(query.broadcast_add(&offset)?.broadcast_ge(&key)?)?;
        }
        if let Some(lens) = &self.query_lens {
            expect_dims("valid_lens", lens, &[b, t], "(B, T)")?;
            keep.also(within(lens, s, device)?.reshape((b, 1, t, s))?)?;
        }
        if let Some(offsets) = &self.blocks {
            self.blocks(t)?;
            self.blocks(s)?;
            let sequence_of: Vec<u32> = (0u32..)
                .zip(offsets.windows(2))
                .flat_map(|(i, w)| std::iter::repeat_n(i, w[1] - w[0]))
                .collect();
            let row = Tensor::new(sequence_of, device)?;
            keep.also(row.reshape((1, 1, t, 1))?.broadcast_eq(&row.reshape((1, 1, 1, s))?)?)?;
        }
        for part in &self.keep {
            keep.also(rank_4("keep mask", part, dims)?.to_device(device)?)?;
        }
        let mut bias: Option<Tensor> = None;
        for part in &self.bias {
            let part = rank_4("bias", part, dims)?.to_device(device)?;
            keep.also(part.ne(f64::NEG_INFINITY)?)?;
            bias = Some(match bias {
                None => part,
                Some(earlier) => earlier.broadcast_add(&part.to_dtype(earlier.dtype())?)?,
            });
        }
        let head_mask = match &self.head_mask {
            None => None,
            Some(head_mask) => {
                expect_dims("head mask", head_mask, &[h], "(H,)")?;
                Some(head_mask.to_device(device)?.reshape((1, h, 1, 1))?)
            }
        };
        Ok(Lowered {
            of_keys_alone: self.blocks.is_none() && self.is_of_keys(),
            keep: keep.0,
            keys,
            bias,
            head_mask,
        })
    }

    /// `(B, S)` of u8: 0 where a key is hidden from every query; `None` if none is.
    fn hidden_keys(&self, b: usize, s: usize, device: &Device) -> Result<Option<Tensor>> {
        let mut keep = Keep(None);
        if let Some(padding) = &self.padding {
            expect_dims("padding mask", padding, &[b, s], "(B, S)")?;
            keep.also(padding.to_device(device)?)?;
        }
        if let Some(lens) = &self.valid_lens {
            expect_dims("valid_lens", lens, &[b], "(B,)")?;
            keep.also(within(lens, s, device)?)?;
        }
        Ok(keep.0)
    }
}

/// A mask as the CPU kernel takes it.
pub(crate) struct ForKernel {
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) keep: Option<Vec<u8>>,
    pub(crate) causal: Option<usize>,
}

/// Whether no value is NaN or ∞: 0·x then sums to 0.
pub(crate) fn all_finite(x: &Tensor) -> Result<bool> {
    let sum = (x.detach() * 0.0)?.sum_all()?.to_dtype(DType::F32)?;
    Ok(sum.to_scalar::<f32>()? == 0.0)
}

/// What is kept by every part so far; everything at first.
struct Keep(Option<Tensor>);

impl Keep {
    fn also(&mut self, part: Tensor) -> Result<()> {
        self.0 = Some(match self.0.take() {
            None => part,
            Some(keep) => keep.broadcast_mul(&part)?,
        });
        Ok(())
    }
}

/// `(.., S)` of u8 from lengths `(..)`: 1 for the keys before the length.
fn within(lens: &Tensor, s: usize, device: &Device) -> Result<Tensor> {
    let host = lens.flatten_all()?.to_vec1::<u32>()?;
    if let Some(index) = host.iter().position(|&len| len as usize > s) {
        return Err(Error::ValidLength { index, got: host[index] as usize, length: s });
    }
    let lens = lens.to_device(device)?.unsqueeze(D::Minus1)?;
    Ok(Tensor::arange(0, s as u32, device)?.broadcast_lt(&lens)?)
}

/// A mask as tensors.
#[derive(Default)]
pub(crate) struct Lowered {
    keep: Option<Tensor>,      // broadcast to (B, H, T, S), u8
    keys: Option<Tensor>,      // (B, S), u8
    bias: Option<Tensor>,      // broadcast to (B, H, T, S)
    head_mask: Option<Tensor>, // (1, H, 1, 1)
    /// `keys` is all that `keep` says.
    of_keys_alone: bool,
}

impl Lowered {
    /// The part of the mask that speaks of `len` queries from `start` on.
    pub(crate) fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let rows = |x: &Option<Tensor>| match x {
            Some(x) if x.dim(2)? > 1 => Ok(Some(x.narrow(2, start, len)?)),
            x => candle_core::Result::Ok(x.clone()),
        };
        let (keep, bias) = (rows(&self.keep)?, rows(&self.bias)?);
        Ok(Self { keep, bias, keys: self.keys.clone(), head_mask: self.head_mask.clone(), ..*self })
    }

    /// The part of the mask that speaks of head `h`.
    pub(crate) fn head(&self, h: usize) -> Result<Self> {
        let head = |x: &Option<Tensor>| match x {
            Some(x) if x.dim(1)? > 1 => Ok(Some(x.narrow(1, h, 1)?)),
            x => candle_core::Result::Ok(x.clone()),
        };
        let (keep, bias, head_mask) =
            (head(&self.keep)?, head(&self.bias)?, head(&self.head_mask)?);
        Ok(Self { keep, bias, head_mask, keys: self.keys.clone(), ..*self })
    }

    /// `scores` `(B, H, T, S)` with the bias added, and −∞ where a key is hidden from a query.
    pub(crate) fn apply(&self, scores: Tensor) -> Result<Tensor> {
        let scores = match &self.bias {
            None => scores,
            Some(bias) => scores.broadcast_add(&bias.to_dtype(scores.dtype())?)?,
        };
        select(self.keep.as_ref(), scores, f32::NEG_INFINITY)
    }

    /// `x`, the weights or what they mixed, `(B, H, T, ..)`, times the head mask.
    pub(crate) fn scale_heads(&self, x: Tensor) -> Result<Tensor> {
        match &self.head_mask {
            None => Ok(x),
            Some(head_mask) => Ok(x.broadcast_mul(&head_mask.to_dtype(x.dtype())?)?),
        }
    }

    /// `x` `(B, H, S, D)` with zeros in the keys that no query sees.
    pub(crate) fn hide_keys(&self, x: &Tensor) -> Result<Tensor> {
        let keys = match &self.keys {
            None => None,
            Some(keys) => Some(keys.unsqueeze(1)?.unsqueeze(3)?), // (B, 1, S, 1)
        };
        select(keys.as_ref(), x.clone(), 0.0)
    }

    /// `weights` `(B, H, T, S)` times `v` `(B, H, S, D)`, where a hidden key contributes nothing
    /// even if it holds NaN or ∞, though `0 × NaN` is NaN. `product` is the plain way.
    pub(crate) fn mix(
        &self,
        weights: &Tensor,
        v: &Tensor,
        product: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let v = self.hide_keys(v)?;
        let Some(keep) = self.keep.as_ref().filter(|_| !self.of_keys_alone) else {
            return product(weights, &v);
        };
        if all_finite(&v)? {
            return product(weights, &v);
        }
        // Some queries may see what others may not: term by term, only the terms that are kept.
        let (_, h, t, s) = weights.dims4()?;
        let (b, kv_heads, _, d) = v.dims4()?;
        let v = v
            .unsqueeze(2)?
            .broadcast_as((b, kv_heads, h / kv_heads, s, d))?
            .reshape((b, h, s, d))?;
        let keep = keep.broadcast_as((b, h, t, s))?;
        let mut rows = Vec::with_capacity(t);
        for row in 0..t {
            let weights = weights.narrow(2, row, 1)?.transpose(2, 3)?; // (B, H, S, 1)
            let keep = keep.narrow(2, row, 1)?.transpose(2, 3)?.broadcast_as(v.shape())?;
            let terms = weights.broadcast_mul(&select(Some(&keep), v.clone(), 0.0)?)?;
            rows.push(terms.sum_keepdim(2)?); // (B, H, 1, D)
        }
        Ok(Tensor::cat(&rows, 2)?)
    }
}

/// `x` where `keep` is 1, `otherwise` where it is 0.
fn select(keep: Option<&Tensor>, x: Tensor, otherwise: f32) -> Result<Tensor> {
    let Some(keep) = keep else { return Ok(x) };
    let otherwise = Tensor::new(otherwise, x.device())?.to_dtype(x.dtype())?;
    let keep = keep.broadcast_as(x.shape())?;
    Ok(keep.where_cond(&x, &otherwise.broadcast_as(x.shape())?)?)
}

/// `x` as u8, if it is of 0 and 1.
fn zeros_and_ones(argument: &'static str, x: &Tensor) -> Result<Tensor> {
    let values = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    match values.into_iter().find(|&value| value != 0.0 && value != 1.0) {
        Some(got) => Err(Error::MaskValue { argument, got }),
        None => Ok(x.to_dtype(DType::U8)?),
    }
}

/// `x` with leading axes of 1 up to rank 4, if it broadcasts to `dims`.
fn rank_4(argument: &'static str, x: &Tensor, dims: [usize; 4]) -> Result<Tensor> {
    let missing = 4usize.saturating_sub(x.rank());
    let padded = [&[1; 4][..missing], x.dims()].concat();
    let fits =
        padded.len() == 4 && padded.iter().zip(dims).all(|(&got, dim)| got == 1 || got == dim);
    match fits {
        true => Ok(x.reshape(padded)?),
        false => {
            Err(shape_error(argument, x, format!("one that broadcasts to (B, H, T, S) = {dims:?}")))
        }
    }
}

fn shape_error(argument: &'static str, x: &Tensor, expected: String) -> Error {
    Error::Shape { argument, expected, got: x.dims().to_vec() }
}

fn expect_rank(argument: &'static str, x: &Tensor, rank: usize, shape: &str) -> Result<()> {
    match x.rank() == rank {
        true => Ok(()),
        false => Err(shape_error(argument, x, shape.to_string())),
    }
}

/// Checks that `x` is `dims`, whose letters are `shape`.
pub(crate) fn expect_dims(
    argument: &'static str,
    x: &Tensor,
    dims: &[usize],
    shape: &'static str,
) -> Result<()> {
    match x.dims() == dims {
        true => Ok(()),
        false => Err(shape_error(argument, x, format!("{shape} = {dims:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device::Cpu;

    use super::*;

    /// `keep` for one sequence and one head, row by row.
    fn rows(mask: &AttentionMask, t: usize, s: usize) -> Result<Vec<Vec<u8>>> {
        let keep = mask.lower([1, 1, t, s], &Cpu)?.keep.expect("it hides something");
        Ok(keep.broadcast_as((1, 1, t, s))?.squeeze(0)?.squeeze(0)?.to_vec2()?)
    }

    #[test]
    fn causal_counts_the_keys_before_the_first_query() -> Result<()> {
        assert_eq!(rows(&AttentionMask::causal(0), 2, 3)?, [[1, 0, 0], [1, 1, 0]]);
        assert_eq!(rows(&AttentionMask::causal(1), 2, 3)?, [[1, 1, 0], [1, 1, 1]]);
        Ok(())
    }

    #[test]
    fn parts_compose() -> Result<()> {
        let mask = AttentionMask::none()
            .with_valid_lens(&Tensor::new(&[3u32, 2], &Cpu)?)?
            .with_padding(&Tensor::new(&[[0f32, 1., 1., 1.], [1., 1., 1., 1.]], &Cpu)?)?;
        let visible = mask.visible_keys(2, 4, &Cpu)?.unwrap();
        assert_eq!(visible.to_vec2::<u8>()?, [[0, 1, 1, 0], [1, 1, 0, 0]]);

        let mask = AttentionMask::causal(1)
            .with_valid_lens(&Tensor::new(&[[3u32, 2]], &Cpu)?)?
            .with_keep(&Tensor::new(&[[1u8, 1, 1], [0, 1, 1]], &Cpu)?)?
            .with_bias(&Tensor::new(&[0f32, 7., f32::NEG_INFINITY], &Cpu)?)?;
        assert_eq!(rows(&mask, 2, 3)?, [[1, 1, 0], [0, 1, 0]]);
        assert!(mask.visible_keys(1, 3, &Cpu)?.is_none());
        Ok(())
    }

    #[test]
    fn what_has_the_other_meaning_is_refused() -> Result<()> {
        let additive = Tensor::new(&[[0f32, f32::NEG_INFINITY]], &Cpu)?;
        let error = AttentionMask::none().with_padding(&additive).unwrap_err();
        assert_eq!(
            error.to_string(),
            "padding mask holds -inf: expected 1 (may attend) or 0 (hidden); \
             an additive mask is a bias"
        );
        let error = AttentionMask::none().with_bias(&Tensor::new(&[1u8, 0], &Cpu)?).unwrap_err();
        assert_eq!(
            error.to_string(),
            "bias has the wrong dtype: expected floats that are added to the scores \
             (0 and 1 are a keep mask), got U8"
        );
        Ok(())
    }

    #[test]
    fn shapes_of_other_sequences_are_refused() -> Result<()> {
        let three = Tensor::new(&[[1u8, 1, 0]], &Cpu)?;
        let padding = AttentionMask::none().with_padding(&three)?;
        let lens = AttentionMask::none().with_valid_lens(&Tensor::new(&[3u32, 5], &Cpu)?)?;
        let keep = AttentionMask::none().with_keep(&three)?;
        let heads = AttentionMask::none().with_head_mask(&Tensor::new(&[1f32, 0.], &Cpu)?)?;
        for (mask, expected) in [
            (padding, "padding mask has the wrong shape: expected (B, S) = [2, 4], got [1, 3]"),
            (lens, "valid length 5 at 1 is too long: expected at most 4 keys"),
            (
                keep,
                "keep mask has the wrong shape: expected one that broadcasts to \
                 (B, H, T, S) = [2, 3, 5, 4], got [1, 3]",
            ),
            (heads, "head mask has the wrong shape: expected (H,) = [3], got [2]"),
        ] {
            let error = mask.lower([2, 3, 5, 4], &Cpu).err().unwrap();
            assert_eq!(error.to_string(), expected);
        }
        let cube = Tensor::zeros((1, 1, 1), DType::U32, &Cpu)?;
        assert_eq!(
            AttentionMask::none().with_valid_lens(&cube).unwrap_err().to_string(),
            "valid_lens has the wrong shape: expected (B,) or (B, T), got [1, 1, 1]"
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
