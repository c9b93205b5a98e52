//! [`AttentionMask`]: which keys each query may attend to.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use ops::{QueryRange, Sequences};

use super::keep::{Keep, keys_before};
use crate::{
    Error, Result,
    shape::{check_offsets, expect_dims, expect_rank, score_dtype, shape_error},
};

/// Which keys each query may attend to; `1 = may attend`, as in Hugging Face's `attention_mask`
/// and in PyTorch's `scaled_dot_product_attention`.
///
/// A mask combines several parts, and a key is visible to a query if no part hides it. The
/// attention weight of a hidden key is exactly 0: the key and its value vector do not affect the
/// output, even if they contain NaN or ∞. If a key is hidden from every query, the key and its
/// value vector do not affect the gradients of queries, keys and values either. The output of a
/// query with no visible key is zero.
///
/// A mask is only a description. Attention lowers it once the shapes are known; see
/// [`AttentionMask::lower`].
///
/// # Examples
/// Padding: a sequence of 3 tokens and one of 2, padded to 4:
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
    pub(super) padding: Option<Tensor>,    // (B, S), u8
    pub(super) valid_lens: Option<Tensor>, // (B,), u32
    pub(super) query_lens: Option<Tensor>, // (B, T), u32
    /// Number of keys before the first query of a causal mask.
    pub(super) causal: Option<usize>,
    /// Maximum distance between a query and a visible key.
    pub(super) window: Option<usize>,
    pub(super) sequences: Option<Sequences>,
    pub(super) keep: Vec<Tensor>, // each broadcasts to (B, H, T, S), u8
    pub(super) bias: Vec<Tensor>, // each broadcasts to (B, H, T, S)
    pub(super) distance_bias: Option<Tensor>, // (H, 2·radius + 1)
    pub(super) head_mask: Option<Tensor>, // (H,)
}

impl AttentionMask {
    /// Every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// A mask with [`Self::with_causal`] only.
    pub fn causal(offset: usize) -> Self {
        Self::none().with_causal(offset)
    }

    /// Query `t` sees the keys up to `t + offset`. `offset` is the number of keys before the first
    /// query: 0 without a cache, else the number of tokens in the cache. In ragged sequences, query
    /// and keys are counted from the first token of their sequence.
    ///
    /// If the method is called twice, the smaller offset applies.
    ///
    /// # Examples
    /// Ragged sequences of 1 and 2 tokens:
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention as attend};
    ///
    /// let mask = AttentionMask::none().with_sequences(&[0, 1, 3])?.with_causal(0);
    /// let q = Tensor::zeros((1, 1, 3, 1), candle_core::DType::F32, &Cpu)?; // all scores are 0
    /// let v = Tensor::new(&[7f32, 2., 4.], &Cpu)?.reshape((1, 1, 3, 1))?;
    /// let out = attend(&q, &q, &v, &mask, None)?.flatten_all()?;
    /// assert_eq!(out.to_vec1::<f32>()?, [7., 2., 3.]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn with_causal(self, offset: usize) -> Self {
        let causal = Some(self.causal.map_or(offset, |earlier| earlier.min(offset)));
        Self { causal, ..self }
    }

    /// The tokens of each ragged sequence see the tokens of the same sequence only.
    ///
    /// Attention runs sequence by sequence and computes no scores between sequences, except if it
    /// returns weights. If the method is called twice, the sequences of the second call apply.
    ///
    /// # Shapes
    /// `offsets`: the index of the first token of each sequence, then N, the number of ragged
    /// tokens: `[0, 3, 5]` for sequences of 3 and 2 tokens. The hidden states are `(1, N, E)`.
    ///
    /// # Errors
    /// [`Error::Offset`] if the offsets do not start at 0 or if they decrease; [`Error::Shape`] if
    /// there is no offset.
    ///
    /// # Examples
    /// Sequences of 1 and 2 tokens:
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention as attend};
    ///
    /// let mask = AttentionMask::none().with_sequences(&[0, 1, 3])?;
    /// assert_eq!(mask.positions(3)?, [0, 0, 1]);
    /// let q = Tensor::zeros((1, 1, 3, 1), candle_core::DType::F32, &Cpu)?; // all scores are 0
    /// let v = Tensor::new(&[7f32, 2., 4.], &Cpu)?.reshape((1, 1, 3, 1))?;
    /// let out = attend(&q, &q, &v, &mask, None)?.flatten_all()?;
    /// assert_eq!(out.to_vec1::<f32>()?, [7., 3., 3.]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn with_sequences(self, offsets: &[usize]) -> Result<Self> {
        self.with_sequences_after(offsets, 0)
    }

    /// [`Self::with_sequences`] where `prefix` keys come before the keys of the tokens of each
    /// sequence. A causal mask has the offset `prefix`, so that all tokens see the prefix.
    ///
    /// # Shapes
    /// for B sequences of N tokens together, the queries are `(1, H, N, D)` and the keys
    /// `(1, G, N + B·prefix, D)`: for each sequence those of the prefix, then those of its tokens
    ///
    /// # Errors
    /// The errors of [`Self::with_sequences`].
    ///
    /// # Examples
    /// Sequences of 1 and 2 tokens, after a prefix of one key:
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention as attend};
    ///
    /// let mask = AttentionMask::causal(1).with_sequences_after(&[0, 1, 3], 1)?;
    /// assert_eq!(mask.positions(3)?, [1, 1, 2]);
    /// let zeros = |tokens| Tensor::zeros((1, 1, tokens, 1), candle_core::DType::F32, &Cpu);
    /// let v = Tensor::new(&[1f32, 7., 1., 3., 8.], &Cpu)?.reshape((1, 1, 5, 1))?;
    /// let out = attend(&zeros(3)?, &zeros(5)?, &v, &mask, None)?.flatten_all()?;
    /// assert_eq!(out.to_vec1::<f32>()?, [4., 2., 4.]); // means of 1 and 7; 1 and 3; 1, 3 and 8
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn with_sequences_after(self, offsets: &[usize], prefix: usize) -> Result<Self> {
        check_offsets(offsets, 0, offsets.last().copied().unwrap_or(0))?;
        Ok(Self { sequences: Some(Sequences::new(offsets, prefix)), ..self })
    }

    /// The mask of ragged sequences for the queries of some of their tokens. The keys remain those of
    /// all tokens. The queries have the positions of their tokens.
    ///
    /// # Shapes
    /// `tokens`: `(T,)`, the indices of the tokens among all N in ascending order; the queries are
    /// `(1, H, T, D)`
    ///
    /// # Errors
    /// [`Error::QueryToken`] for an index that is not larger than the one before or not below N;
    /// [`Error::QueryTokensOfMask`] if the mask has no ragged sequences, or has parts for each query.
    ///
    /// # Examples
    /// The last tokens of sequences of 1 and 3 tokens, with a causal mask:
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention as attend};
    ///
    /// let mask = AttentionMask::causal(0).with_sequences(&[0, 1, 4])?;
    /// let v = Tensor::new(&[5f32, 2., 4., 9.], &Cpu)?.reshape((1, 1, 4, 1))?;
    /// let q = v.zeros_like()?; // all scores are 0
    /// let all = attend(&q, &q, &v, &mask, None)?;
    /// assert_eq!(all.flatten_all()?.to_vec1::<f32>()?, [5., 2., 3., 5.]);
    /// let of_last = mask.for_queries_of(&[0, 3])?;
    /// let last = attend(&q.narrow(2, 0, 2)?, &q, &v, &of_last, None)?;
    /// assert_eq!(last.flatten_all()?.to_vec1::<f32>()?, [5., 5.]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn for_queries_of(&self, tokens: &[usize]) -> Result<Self> {
        let has_query_parts =
            self.query_lens.is_some() || !self.keep.is_empty() || !self.bias.is_empty();
        let Some(sequences) = self.sequences.as_ref().filter(|_| !has_query_parts) else {
            return Err(Error::QueryTokensOfMask);
        };
        let n = sequences.offsets().last().copied().unwrap_or(0);
        let mut least = 0;
        for (index, &got) in tokens.iter().enumerate() {
            if got < least || got >= n {
                return Err(Error::QueryToken { index, got, least, tokens: n });
            }
            least = got + 1;
        }
        Ok(Self { sequences: Some(sequences.for_queries_of(tokens)), ..self.clone() })
    }

    /// Hides the keys of each sequence where `padding` is 0.
    ///
    /// # Shapes
    /// `padding`: `(B, S)` of 0 and 1, any dtype.
    ///
    /// # Errors
    /// [`Error::Shape`] if the rank is not 2 or the shape differs from that of an earlier call;
    /// [`Error::MaskValue`] for a value other than 0 and 1, such as the −∞ of an additive mask.
    /// Attention returns [`Error::Shape`] if the shape is not `(B, S)`.
    pub fn with_padding(mut self, padding: &Tensor) -> Result<Self> {
        expect_rank("padding mask", padding, 2, "(B, S)")?;
        let padding = zeros_and_ones("padding mask", padding)?;
        self.padding = Some(combined("padding mask", self.padding, padding, Tensor::mul)?);
        Ok(self)
    }

    /// [`Self::with_padding`] if `padding` is `Some`; returns `self` unchanged otherwise.
    ///
    /// # Errors
    /// The errors of [`Self::with_padding`].
    pub fn with_optional_padding(self, padding: Option<&Tensor>) -> Result<Self> {
        match padding {
            None => Ok(self),
            Some(padding) => self.with_padding(padding),
        }
    }

    /// Hides the keys `valid_lens[b]..S` from sequence `b`, or `valid_lens[b, t]..S` from query
    /// `t`. The lengths of earlier calls apply too.
    ///
    /// # Shapes
    /// `valid_lens`: `(B,)` or `(B, T)`, integers; each is the number of leading keys that stay
    /// visible
    ///
    /// # Errors
    /// [`Error::Shape`] for another rank, or if the shape differs from that of an earlier call with
    /// the same rank; [`Error::DType`] for a dtype that is not an integer type;
    /// [`Error::ValidLengthRange`] for a length below 0 or above 2³² − 1. Attention returns
    /// [`Error::ValidLength`] for a length above S, and [`Error::Shape`] if the shape is not `(B,)`
    /// or `(B, T)`.
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
            return Err(Error::ValidLengthRange { got });
        }
        let valid_lens = valid_lens.to_dtype(DType::U32)?;
        let shorter = |a: &Tensor, b: &Tensor| a.minimum(b);
        *lens = Some(combined("valid_lens", lens.take(), valid_lens, shorter)?);
        Ok(self)
    }

    /// Hides key `s` from query `t` where `keep[.., t, s]` is 0.
    ///
    /// # Shapes
    /// `keep`: 0 and 1 of any dtype. It is broadcast to `(B, H, T, S)` by PyTorch's rules, so it
    /// can be `(T, S)`, `(B, 1, 1, S)` or `(B, H, T, S)`, for example.
    ///
    /// # Errors
    /// [`Error::MaskValue`] for a value other than 0 and 1. Attention returns [`Error::Shape`] for
    /// a shape that does not broadcast.
    ///
    /// # Examples
    /// Two queries; the first does not see key 1:
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
    ///
    /// let keep = Tensor::new(&[[1u8, 0], [1, 1]], &Cpu)?; // (T, S)
    /// let x = Tensor::zeros((1, 1, 2, 4), candle_core::DType::F32, &Cpu)?;
    /// let (_, weights) = attend(&x, &x, &x, &AttentionMask::none().with_keep(&keep)?, None)?;
    /// assert_eq!(weights.flatten_all()?.to_vec1::<f32>()?, [1., 0., 0.5, 0.5]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn with_keep(mut self, keep: &Tensor) -> Result<Self> {
        self.keep.push(zeros_and_ones("keep mask", keep)?);
        Ok(self)
    }

    /// Adds `bias` to the scaled scores. Biases are added in f32, or in f64 if the queries are f64.
    /// A key whose summed bias is −∞ is hidden.
    ///
    /// # Shapes
    /// `bias`: floats, broadcast to `(B, H, T, S)` as in [`Self::with_keep`]
    ///
    /// # Errors
    /// [`Error::DType`] for integers: use [`Self::with_keep`] for a mask of 0 and 1. Attention
    /// returns [`Error::Shape`] for a shape that does not broadcast.
    ///
    /// # Examples
    /// A bias of ln 3 for key 0, and −∞ for key 2, for every query:
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
    ///
    /// let bias = Tensor::new(&[[3f32.ln(), 0., f32::NEG_INFINITY]], &Cpu)?; // (1, S)
    /// let mask = AttentionMask::none().with_bias(&bias)?;
    /// let q = Tensor::zeros((1, 1, 1, 4), candle_core::DType::F32, &Cpu)?;
    /// let k = Tensor::zeros((1, 1, 3, 4), candle_core::DType::F32, &Cpu)?;
    /// let weights = attend(&q, &k, &k, &mask, None)?.1.flatten_all()?.to_vec1::<f32>()?;
    /// assert!((weights[0] - 0.75).abs() < 1e-6 && weights[2] == 0.);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn with_bias(mut self, bias: &Tensor) -> Result<Self> {
        if !bias.dtype().is_float() {
            return Err(Error::DType {
                argument: "bias",
                expected: "floats that are added to the scores (pass 0 and 1 to with_keep)",
                got: bias.dtype(),
            });
        }
        self.bias.push(without_f8(bias)?);
        Ok(self)
    }

    /// Adds `bias[h, R + d]` to the scaled scores of head h, where d is the index of the key minus
    /// that of the query, and R the largest distance, as in [`crate::RelativeBias`] and
    /// [`crate::alibi()`]. A query has the index `t + offset`, where `offset` is the argument of
    /// [`Self::causal`], or 0 without a causal mask. In ragged sequences the indices are those
    /// within each sequence.
    ///
    /// If the method is called twice, the biases are added, in f64 if one of them is f64, otherwise
    /// in f32. A key whose bias is −∞ is hidden.
    ///
    /// # Shapes
    /// `bias`: `(H, 2·R + 1)`, floats
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
    ///
    /// // A bias of ln 3 for the next key: its weight is three times that of the others.
    /// let bias = Tensor::new(&[[0f32, 0., 3f32.ln()]], &Cpu)?; // distances −1, 0, 1
    /// let mask = AttentionMask::none().with_distance_bias(&bias)?;
    /// let x = Tensor::zeros((1, 1, 2, 4), candle_core::DType::F32, &Cpu)?;
    /// let (_, weights) = attend(&x, &x, &x, &mask, None)?;
    /// let weights = weights.flatten_all()?.to_vec1::<f32>()?;
    /// let expected = [0.25, 0.75, 0.5, 0.5];
    /// assert!(weights.iter().zip(expected).all(|(w, e)| (w - e).abs() < 1e-6), "{weights:?}");
    /// # Ok::<(), mha::Error>(())
    /// ```
    /// # Errors
    /// [`Error::DType`] for integers; [`Error::Shape`] if the shape is not `(H, 2·R + 1)` or
    /// differs from that of an earlier call. Attention returns [`Error::Shape`] if H is not its
    /// number of heads, or if a distance exceeds R.
    pub fn with_distance_bias(mut self, bias: &Tensor) -> Result<Self> {
        const NAME: &str = "distance bias";
        if !bias.dtype().is_float() {
            let (argument, expected, got) = (NAME, "floats", bias.dtype());
            return Err(Error::DType { argument, expected, got });
        }
        expect_rank(NAME, bias, 2, "(H, 2·R + 1)")?;
        if bias.dim(1)? % 2 == 0 {
            return Err(shape_error(NAME, bias, "(H, 2·R + 1)".into()));
        }
        let bias = bias.to_dtype(score_dtype(bias.dtype()))?;
        self.distance_bias = Some(combined(NAME, self.distance_bias, bias, Tensor::add)?);
        Ok(self)
    }

    /// Hides the keys that are farther than `radius` from a query: query `t` sees key `s` if
    /// `|t + offset − s| ≤ radius`, where `offset` is the argument of [`Self::causal`], or 0
    /// without a causal mask. A window is `2·radius + 1` keys wide, or `radius + 1` with a causal
    /// mask.
    ///
    /// If the method is called twice, the smaller radius applies. In ragged sequences the window
    /// applies to each sequence.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention_with_weights as attend};
    ///
    /// let x = Tensor::zeros((1, 1, 3, 2), candle_core::DType::F32, &Cpu)?;
    /// let (_, weights) = attend(&x, &x, &x, &AttentionMask::none().with_window(1), None)?;
    /// let third = 1. / 3.;
    /// assert_eq!(
    ///     weights.squeeze(0)?.squeeze(0)?.to_vec2::<f32>()?,
    ///     [[0.5, 0.5, 0.], [third, third, third], [0., 0.5, 0.5]]
    /// );
    /// # Ok::<(), mha::Error>(())
    /// ```
    /// # Source
    /// Beltagy et al. 2020, section 3.1, <https://arxiv.org/abs/2004.05150>.
    pub fn with_window(self, radius: usize) -> Self {
        let window = Some(self.window.map_or(radius, |earlier| earlier.min(radius)));
        Self { window, ..self }
    }

    /// Multiplies the attention weights of each head by a factor: 0 disables a head, 1 has no
    /// effect. If the method is called twice, the factors are multiplied.
    ///
    /// # Shapes
    /// `head_mask`: `(H,)`, floats
    ///
    /// # Errors
    /// [`Error::Shape`] if the rank is not 1 or the shape differs from that of an earlier call;
    /// [`Error::DType`] for integers. Attention returns [`Error::Shape`] if the number of factors
    /// is not H.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::{AttentionMask, scaled_dot_product_attention as attend};
    ///
    /// let mask = AttentionMask::none().with_head_mask(&Tensor::new(&[1f32, 0.], &Cpu)?)?;
    /// let x = Tensor::ones((1, 2, 1, 1), candle_core::DType::F32, &Cpu)?;
    /// let out = attend(&x, &x, &x, &mask, None)?.flatten_all()?;
    /// assert_eq!(out.to_vec1::<f32>()?, [1., 0.]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn with_head_mask(mut self, head_mask: &Tensor) -> Result<Self> {
        expect_rank("head mask", head_mask, 1, "(H,)")?;
        if !head_mask.dtype().is_float() {
            let (expected, got) = ("floats", head_mask.dtype());
            return Err(Error::DType { argument: "head mask", expected, got });
        }
        let head_mask = without_f8(head_mask)?;
        self.head_mask = Some(combined("head mask", self.head_mask, head_mask, Tensor::mul)?);
        Ok(self)
    }

    /// The position of each of `t` queries in its sequence: its index in the sequence plus the
    /// offset of a causal mask. Positions beyond `u32::MAX` are `u32::MAX`.
    ///
    /// # Errors
    /// [`Error::Offset`] if the last offset of ragged sequences is not `t`.
    pub fn positions(&self, t: usize) -> Result<Vec<u32>> {
        self.check_queries(t)?;
        let first = u32::try_from(self.causal.unwrap_or(0)).unwrap_or(u32::MAX);
        let positions = |tokens: Range<usize>| {
            tokens.map(move |token| first.saturating_add(u32::try_from(token).unwrap_or(u32::MAX)))
        };
        Ok(match self.query_ranges() {
            None => positions(0..t).collect(),
            Some(ranges) => {
                let tokens = |range: QueryRange| range.first..range.first + range.queries.len();
                ranges.into_iter().flat_map(|range| positions(tokens(range))).collect()
            }
        })
    }

    /// The number of tokens of each ragged sequence, its prefix included, or of each of `b` sequences
    /// of `t` queries.
    ///
    /// In padded sequences, the tokens before the first visible token and after the
    /// last one are not counted; padding and the valid length of each sequence determine which
    /// tokens are visible. The keys before the first query of a causal mask with an offset are
    /// counted.
    ///
    /// # Errors
    /// [`Error::Offset`] if the last offset of ragged sequences is not `t`; [`Error::Shape`] or
    /// [`Error::ValidLength`] if padding or valid lengths do not fit `b` sequences of `t + offset`
    /// keys, where `offset` is that of the causal mask.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use mha::AttentionMask;
    ///
    /// let padding = Tensor::new(&[[0u8, 1, 0, 1, 0], [0, 0, 1, 1, 1]], &Cpu)?;
    /// let mask = AttentionMask::none().with_padding(&padding)?;
    /// assert_eq!(mask.sequence_lengths(2, 5)?, [3, 3]);
    /// let ragged = AttentionMask::none().with_sequences(&[0, 3, 5])?;
    /// assert_eq!(ragged.sequence_lengths(1, 5)?, [3, 2]);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn sequence_lengths(&self, b: usize, t: usize) -> Result<Vec<usize>> {
        self.check_queries(t)?;
        if let Some(sequences) = &self.sequences {
            return Ok(sequences.ranges().map(|(_, keys)| keys.len()).collect());
        }
        let s = t.saturating_add(self.causal.unwrap_or(0));
        let Some(visible) = self.keys(b, s, &Device::Cpu)? else { return Ok(vec![s; b]) };
        let length = |row: Vec<u8>| {
            let first = row.iter().position(|&visible| visible == 1)?;
            Some(row.iter().rposition(|&visible| visible == 1)? + 1 - first)
        };
        Ok(visible.to_vec2()?.into_iter().map(|row| length(row).unwrap_or(0)).collect())
    }

    /// Whether the mask has ragged sequences, from [`Self::with_sequences`].
    pub fn is_ragged(&self) -> bool {
        self.sequences.is_some()
    }

    /// The number of ragged sequences; 0 without ragged sequences.
    pub fn ragged_sequences(&self) -> usize {
        self.sequences.as_ref().map_or(0, |sequences| sequences.ranges().count())
    }

    /// The visible keys, if the mask has no other parts than padding and valid lengths per
    /// sequence; `None` otherwise.
    ///
    /// # Shapes
    /// returns `(B, S)` of u8, 1 = visible
    /// # Errors
    /// [`Error::Shape`] or [`Error::ValidLength`] if a part does not fit `b` sequences of `s` keys.
    pub fn visible_keys(&self, b: usize, s: usize, device: &Device) -> Result<Option<Tensor>> {
        if self.is_padding_alone() { Ok(Some(self.unpadded_keys(b, s, device)?)) } else { Ok(None) }
    }

    /// The keys that padding and valid lengths per sequence leave visible; other parts are ignored.
    ///
    /// # Shapes
    /// returns `(B, S)` of u8, 1 = visible
    /// # Errors
    /// [`Error::Shape`] or [`Error::ValidLength`] if a part does not fit `b` sequences of `s` keys.
    pub fn unpadded_keys(&self, b: usize, s: usize, device: &Device) -> Result<Tensor> {
        match self.keys(b, s, device)? {
            Some(visible) => Ok(visible),
            None => Ok(Tensor::ones((b, s), DType::U8, device)?),
        }
    }

    /// Whether the mask has no other parts than padding and valid lengths per sequence.
    pub fn is_padding_alone(&self) -> bool {
        self.sequences.is_none()
            && self.causal.is_none()
            && self.window.is_none()
            && self.query_lens.is_none()
            && self.keep.is_empty()
            && self.bias.is_empty()
            && self.distance_bias.is_none()
            && self.head_mask.is_none()
    }

    /// Checks that the last offset of ragged sequences is `n`.
    ///
    /// # Errors
    /// [`Error::Offset`] if it is not.
    pub(super) fn check_sequences(&self, n: usize) -> Result<()> {
        self.sequences.as_ref().map_or(Ok(()), |x| check_offsets(x.offsets(), 0, n))
    }

    /// Checks that there are `t` queries, if there are ragged sequences.
    ///
    /// # Errors
    /// [`Error::Offset`] or [`Error::Shape`] if there are not.
    pub(super) fn check_queries(&self, t: usize) -> Result<()> {
        match self.sequences.as_ref().and_then(Sequences::query_tokens) {
            None => self.check_sequences(t),
            Some(tokens) if tokens.len() == t => Ok(()),
            Some(tokens) => {
                let expected = format!("(B, H, T, D) with T = {}, as in the mask", tokens.len());
                Err(Error::Shape { argument: "q", expected, got: vec![t] })
            }
        }
    }

    /// Checks that ragged sequences have `s` keys.
    ///
    /// # Errors
    /// [`Error::Offset`] or, with a prefix, [`Error::Shape`] if they have another number.
    pub(super) fn check_keys(&self, s: usize) -> Result<()> {
        let Some(sequences) = &self.sequences else { return Ok(()) };
        let (prefix, keys) = (sequences.prefix(), sequences.keys());
        if prefix == 0 {
            return self.check_sequences(s);
        }
        if keys == s {
            return Ok(());
        }
        let expected = format!("(B, G, S, D) with S = {keys}, {prefix} keys before each sequence");
        Err(Error::Shape { argument: "k", expected, got: vec![s] })
    }

    /// The queries of ragged sequences; `None` for other sequences.
    pub(crate) fn query_ranges(&self) -> Option<Vec<QueryRange>> {
        self.sequences.as_ref().map(Sequences::queries)
    }

    /// The keys that padding and the valid length of each sequence leave visible, `(B, S)` of u8;
    /// `None` if the mask has neither.
    pub(super) fn keys(&self, b: usize, s: usize, device: &Device) -> Result<Option<Tensor>> {
        let mut keep = Keep::default();
        if let Some(padding) = &self.padding {
            expect_dims("padding mask", padding, &[b, s], "(B, S)")?;
            keep.and(padding.to_device(device)?)?;
        }
        if let Some(lens) = &self.valid_lens {
            expect_dims("valid_lens", lens, &[b], "(B,)")?;
            keep.and(keys_before(lens, s, device)?)?;
        }
        Ok(keep.into_tensor())
    }
}

/// Combines a part of the mask with the same part from an earlier call, if there was such a call.
/// If the two differ in dtype, both are converted to f32, or to f64 if one is f64.
///
/// # Errors
/// [`Error::Shape`] if the two differ in shape.
fn combined(
    argument: &'static str,
    earlier: Option<Tensor>,
    part: Tensor,
    combine: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let Some(earlier) = earlier else {
        return Ok(part);
    };
    expect_dims(argument, &part, earlier.dims(), "the shape of the earlier call")?;
    if earlier.dtype() == part.dtype() {
        return Ok(combine(&earlier, &part)?);
    }
    let has_f64 = [earlier.dtype(), part.dtype()].contains(&DType::F64);
    let dtype = if has_f64 { DType::F64 } else { DType::F32 };
    Ok(combine(&earlier.to_dtype(dtype)?, &part.to_dtype(dtype)?)?)
}

/// `x`, in f32 if its dtype is F8E4M3: candle 0.11.1 never returns from a conversion of F8E4M3 to
/// f64.
fn without_f8(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F8E4M3 => Ok(x.to_dtype(DType::F32)?),
        _ => Ok(x.clone()),
    }
}

/// Converts a mask of 0 and 1 to u8.
///
/// # Errors
/// [`Error::MaskValue`] for a value other than 0 and 1.
fn zeros_and_ones(argument: &'static str, x: &Tensor) -> Result<Tensor> {
    let x = &without_f8(x)?;
    let values = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
    match values.into_iter().find(|&value| value != 0.0 && value != 1.0) {
        Some(got) => Err(Error::MaskValue { argument, got }),
        None => Ok(x.to_dtype(DType::U8)?),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device::Cpu;

    use super::*;
    use crate::scaled_dot_product_attention_with_weights as attend;

    /// The keep mask of one sequence and one head, a row per query.
    fn rows(mask: &AttentionMask, t: usize, s: usize) -> Result<Vec<Vec<u8>>> {
        let mask = mask.lower([1, 1, t, s], DType::F32, &Cpu)?;
        let keep = mask.tensors()?.keep.as_ref().expect("a mask that hides keys");
        Ok(keep.broadcast_as((1, 1, t, s))?.squeeze(0)?.squeeze(0)?.to_vec2()?)
    }

    #[test]
    fn parts_in_f8_give_the_same_result_as_in_f32() -> Result<()> {
        let q = Tensor::zeros((1, 1, 1, 2), DType::F64, &Cpu)?;
        let k = Tensor::zeros((1, 1, 3, 2), DType::F64, &Cpu)?;
        let weights = |dtype| -> Result<Vec<f64>> {
            let part = |values: &[f32; 3]| Tensor::new(&[*values], &Cpu)?.to_dtype(dtype);
            let mask = AttentionMask::none()
                .with_padding(&part(&[1., 0., 1.])?)?
                .with_keep(&part(&[1., 1., 1.])?)?
                .with_bias(&part(&[0., 0., 2.])?)?
                .with_distance_bias(&part(&[0., 0., 1.])?.pad_with_zeros(1, 1, 1)?)?
                .with_head_mask(&Tensor::new(&[0.5f32], &Cpu)?.to_dtype(dtype)?)?;
            let (_, weights) = attend(&q, &k, &k, &mask, None)?;
            Ok(weights.flatten_all()?.to_vec1()?)
        };
        assert_eq!(weights(DType::F8E4M3)?, weights(DType::F32)?);
        Ok(())
    }

    #[test]
    fn a_causal_mask_counts_the_keys_before_the_first_query() -> Result<()> {
        assert_eq!(rows(&AttentionMask::causal(0), 2, 3)?, [[1, 0, 0], [1, 1, 0]]);
        assert_eq!(rows(&AttentionMask::causal(1), 2, 3)?, [[1, 1, 0], [1, 1, 1]]);
        Ok(())
    }

    #[test]
    fn a_window_hides_keys_on_both_sides() -> Result<()> {
        let window = AttentionMask::none().with_window(2).with_window(1);
        assert_eq!(rows(&window, 3, 4)?, [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]);
        let causal = AttentionMask::causal(2).with_window(1);
        assert_eq!(rows(&causal, 2, 4)?, [[0, 1, 1, 0], [0, 0, 1, 1]]);
        let wide = AttentionMask::causal(0).with_window(usize::MAX);
        assert_eq!(rows(&wide, 2, 2)?, [[1, 0], [1, 1]]);
        Ok(())
    }

    #[test]
    fn a_key_is_visible_if_no_part_hides_it() -> Result<()> {
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
    fn additive_and_boolean_masks_are_not_mistaken_for_each_other() -> Result<()> {
        let additive = Tensor::new(&[[0f32, f32::NEG_INFINITY]], &Cpu)?;
        let error = AttentionMask::none().with_padding(&additive).unwrap_err();
        assert_eq!(
            error.to_string(),
            "padding mask holds -inf: expected 1 (may attend) or 0 (hidden); \
             pass an additive mask to AttentionMask::with_bias"
        );
        let error = AttentionMask::none().with_bias(&Tensor::new(&[1u8, 0], &Cpu)?).unwrap_err();
        assert_eq!(
            error.to_string(),
            "bias has the wrong dtype: expected floats that are added to the scores \
             (pass 0 and 1 to with_keep), got U8"
        );
        Ok(())
    }

    #[test]
    fn a_mask_of_the_wrong_shape_is_an_error() -> Result<()> {
        let three = Tensor::new(&[[1u8, 1, 0]], &Cpu)?;
        let padding = AttentionMask::none().with_padding(&three)?;
        let lens = AttentionMask::none().with_valid_lens(&Tensor::new(&[3u32, 5], &Cpu)?)?;
        let keep = AttentionMask::none().with_keep(&three)?;
        let heads = AttentionMask::none().with_head_mask(&Tensor::new(&[1f32, 0.], &Cpu)?)?;
        for (mask, expected) in [
            (padding, "padding mask has the wrong shape: expected (B, S) = [2, 4], got [1, 3]"),
            (lens, "valid length 5 at index 1 is too long: expected at most 4 keys"),
            (
                keep,
                "keep mask has the wrong shape: expected one that broadcasts to \
                 (B, H, T, S) = [2, 3, 5, 4], got [1, 3]",
            ),
            (heads, "head mask has the wrong shape: expected (H,) = [3], got [2]"),
        ] {
            let error = mask.lower([2, 3, 5, 4], DType::F32, &Cpu).err().unwrap();
            assert_eq!(error.to_string(), expected);
        }
        let rank_3 = Tensor::zeros((1, 1, 1), DType::U32, &Cpu)?;
        assert_eq!(
            AttentionMask::none().with_valid_lens(&rank_3).unwrap_err().to_string(),
            "valid_lens has the wrong shape: expected (B,) or (B, T), got [1, 1, 1]"
        );
        Ok(())
    }

    #[test]
    fn queries_are_those_of_tokens_in_ascending_order() -> Result<()> {
        let mask = AttentionMask::causal(0).with_sequences(&[0, 3, 5])?;
        assert_eq!(mask.for_queries_of(&[1, 2, 4])?.positions(3)?, [1, 2, 1]);
        for (tokens, message) in [
            (&[1, 1][..], "token 1 at index 1 of the queries: expected 2 to 4"),
            (&[2, 5], "token 5 at index 1 of the queries: expected 3 to 4"),
        ] {
            assert_eq!(mask.for_queries_of(tokens).unwrap_err().to_string(), message);
        }
        let keep = mask.with_keep(&Tensor::ones((5, 5), DType::U8, &Cpu)?)?;
        for other in [keep, AttentionMask::causal(0)] {
            assert!(matches!(other.for_queries_of(&[0]), Err(Error::QueryTokensOfMask)));
        }
        let mask = AttentionMask::none().with_sequences(&[0, 3, 5])?.for_queries_of(&[1, 4])?;
        assert_eq!(
            mask.lower([1, 1, 5, 5], DType::F32, &Cpu).unwrap_err().to_string(),
            "q has the wrong shape: expected (B, H, T, D) with T = 2, as in the mask, got [5]"
        );
        Ok(())
    }

    #[test]
    fn offsets_must_be_sorted_from_zero_to_the_number_of_tokens() -> Result<()> {
        let none = AttentionMask::none;
        for (wrong, message) in [
            (
                &[][..],
                "offsets has the wrong shape: expected (B + 1,), at least one offset, got [0]",
            ),
            (&[1, 2], "offsets[0] is 1: expected 0"),
            (&[0, 3, 2], "offsets[2] is 2: expected at least 3, because offsets[1] is 3"),
        ] {
            assert_eq!(none().with_sequences(wrong).unwrap_err().to_string(), message);
        }
        let mask = none().with_sequences(&[0, 3, 5])?;
        assert_eq!(mask.positions(5)?, [0, 1, 2, 0, 1]);
        assert_eq!(
            mask.positions(6).unwrap_err().to_string(),
            "offsets[2] is 5: expected 6, the number of tokens"
        );
        Ok(())
    }
}
