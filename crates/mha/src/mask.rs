//! Which keys a query may attend to: `1 = may attend`, everywhere.
//!
//! A mask is described, not built: what it says becomes tensors only inside attention, once the
//! shapes are known.

mod lowered;

use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor, WithDType};
pub(crate) use lowered::{Lowered, all_finite};
use mha_kernels::{Broadcast, Sequence};

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
    /// What a GPU's kernel makes of `blocks`, sent there once for all layers.
    #[cfg(feature = "cuda")]
    tiles: Arc<std::sync::OnceLock<mha_kernels_cuda::Tiles>>,
    keep: Vec<Tensor>,         // each broadcast to (B, H, T, S), u8
    bias: Vec<Tensor>,         // each broadcast to (B, H, T, S)
    head_mask: Option<Tensor>, // (H,)
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
        self.padding = Some(combined("padding mask", self.padding, padding, Tensor::mul)?);
        Ok(self)
    }

    /// [`Self::with_padding`], if there is any.
    ///
    /// # Errors
    /// as there.
    pub fn with_optional_padding(self, padding: Option<&Tensor>) -> Result<Self> {
        match padding {
            None => Ok(self),
            Some(padding) => self.with_padding(padding),
        }
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
        let shorter = |a: &Tensor, b: &Tensor| a.minimum(b);
        *lens = Some(combined("valid_lens", lens.take(), valid_lens, shorter)?);
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
        let head_mask = head_mask.clone();
        self.head_mask = Some(combined("head mask", self.head_mask, head_mask, Tensor::mul)?);
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
        match self.is_padding_alone() {
            true => Ok(Some(self.unpadded_keys(b, s, device)?)),
            false => Ok(None),
        }
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

    /// Whether [`Self::unpadded_keys`] is all that it says.
    pub fn is_padding_alone(&self) -> bool {
        self.blocks.is_none() && self.is_of_keys()
    }

    /// It as the CPU kernel takes it, for `(B, H, T, S)` scores; the head mask is left out.
    pub(crate) fn for_kernel(&self, dims: [usize; 4], device: &Device) -> Result<ForKernel> {
        let [b, _h, t, s] = dims;
        let sequences = match &self.blocks {
            None => (0..b).map(|b| Sequence { b, queries: 0..t, keys: 0..s }).collect(),
            Some(offsets) => {
                self.check_blocks(t)?;
                self.check_blocks(s)?;
                let ranges = offsets.windows(2).map(|w| w[0]..w[1]);
                let each =
                    |b| ranges.clone().map(move |r| Sequence { b, queries: r.clone(), keys: r });
                (0..b).flat_map(each).collect()
            }
        };
        let visible = match self.hidden_keys(b, s, device)? {
            None => None,
            Some(keys) => Some(keys.flatten_all()?.to_vec1()?),
        };
        let (keep, bias) = self.by_query(dims, device)?;
        Ok(ForKernel {
            sequences,
            visible,
            keep: keep.map(Strides::of).transpose()?,
            bias: bias.map(|bias| Strides::of(bias.to_dtype(DType::F32)?)).transpose()?,
            causal: self.causal.map(|offset| offset.min(s)),
        })
    }

    /// Where each packed sequence begins and ends, if that is all this mask says of `n` tokens.
    pub(crate) fn blocks(&self, n: usize) -> Result<Option<&[usize]>> {
        self.check_blocks(n)?;
        let alone = self.is_of_keys() && self.padding.is_none() && self.valid_lens.is_none();
        Ok(self.blocks.as_deref().filter(|_| alone))
    }

    /// What `make` makes of the blocks for their device, once for all that share this mask.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(
        &self,
        make: impl FnOnce() -> candle_core::Result<mha_kernels_cuda::Tiles>,
    ) -> Result<mha_kernels_cuda::Tiles> {
        if let Some(tiles) = self.tiles.get() {
            return Ok(tiles.clone());
        }
        let made = make()?;
        Ok(self.tiles.get_or_init(|| made).clone())
    }

    fn check_blocks(&self, n: usize) -> Result<()> {
        match &self.blocks {
            Some(offsets) if offsets.last() != Some(&n) => {
                Err(Error::Offsets { got: offsets.to_vec(), tokens: n })
            }
            _ => Ok(()),
        }
    }

    /// Whether, blocks aside, it says the same to every query and head.
    pub(crate) fn is_of_keys(&self) -> bool {
        self.causal.is_none()
            && self.query_lens.is_none()
            && self.keep.is_empty()
            && self.bias.is_empty()
            && self.head_mask.is_none()
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
    pub(crate) visible: Option<Vec<u8>>,
    pub(crate) keep: Option<Strides<u8>>,
    pub(crate) bias: Option<Strides<f32>>,
    pub(crate) causal: Option<usize>,
}

/// A tensor of rank 4 that is broadcast to `(B, H, T, S)`: its numbers, and how far apart they are.
pub(crate) struct Strides<T> {
    data: Vec<T>,
    strides: [usize; 4],
}

impl<T: WithDType> Strides<T> {
    fn of(x: Tensor) -> Result<Self> {
        let (mut strides, x) = ([0; 4], x.contiguous()?);
        for ((stride, &dim), &apart) in strides.iter_mut().zip(x.dims()).zip(x.stride()) {
            *stride = if dim == 1 { 0 } else { apart };
        }
        Ok(Self { data: x.flatten_all()?.to_vec1()?, strides })
    }

    pub(crate) fn view(&self) -> Broadcast<'_, T> {
        Broadcast { data: &self.data, strides: self.strides }
    }
}

/// A part of the mask and the same part given `earlier`, which must be of its shape.
fn combined(
    argument: &'static str,
    earlier: Option<Tensor>,
    part: Tensor,
    combine: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let Some(earlier) = earlier else {
        return Ok(part);
    };
    expect_dims(argument, &part, earlier.dims(), "the shape of the one before")?;
    Ok(combine(&earlier, &part)?)
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

/// `x` as u8, if it is of 0 and 1.
fn zeros_and_ones(argument: &'static str, x: &Tensor) -> Result<Tensor> {
    let values = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    match values.into_iter().find(|&value| value != 0.0 && value != 1.0) {
        Some(got) => Err(Error::MaskValue { argument, got }),
        None => Ok(x.to_dtype(DType::U8)?),
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
