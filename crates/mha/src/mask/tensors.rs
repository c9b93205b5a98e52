//! A mask as tensors for candle's operations. `reference.rs` is the only other file that sets
//! hidden scores of candle tensors to −∞.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use ops::MaskParts;

use super::{
    AttentionMask,
    keep::{Keep, keys_before},
};
use crate::{
    Result,
    shape::{expect_dims, shape_error},
};

impl AttentionMask {
    /// The head mask, `(1, H, 1, 1)`.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the mask does not have `h` factors.
    pub(super) fn heads(&self, h: usize, device: &Device) -> Result<Option<Tensor>> {
        let Some(head_mask) = &self.head_mask else { return Ok(None) };
        expect_dims("head mask", head_mask, &[h], "(H,)")?;
        Ok(Some(head_mask.to_device(device)?.reshape((1, h, 1, 1))?))
    }

    /// The parts that can differ between queries or heads, except the causal mask, the window, the
    /// ragged sequences and the distance bias: a keep mask of u8, and the bias in `dtype`, the
    /// dtype of the scores. Both broadcast to `(B, H, T, S)`.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] or [`crate::Error::ValidLength`] for a part that does not fit
    /// `dims`.
    pub(super) fn per_query_parts(
        &self,
        dims: [usize; 4],
        dtype: DType,
        device: &Device,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [b, _h, t, s] = dims;
        let mut keep = Keep::default();
        if let Some(lens) = &self.query_lens {
            expect_dims("valid_lens", lens, &[b, t], "(B, T)")?;
            keep.and(keys_before(lens, s, device)?.reshape((b, 1, t, s))?)?;
        }
        for part in &self.keep {
            keep.and(rank_4("keep mask", part, dims)?.to_device(device)?)?;
        }
        let mut bias: Option<Tensor> = None;
        for part in &self.bias {
            let part = rank_4("bias", part, dims)?.to_device(device)?.to_dtype(dtype)?;
            bias = Some(match bias {
                None => part,
                Some(earlier) => earlier.broadcast_add(&part)?,
            });
        }
        Ok((keep.into_tensor(), bias))
    }
}

/// A mask as tensors.
#[derive(Clone, Debug, Default)]
pub(crate) struct MaskTensors {
    pub(super) keep: Option<Tensor>, // broadcasts to (B, H, T, S), u8
    keys: Option<Tensor>,            // (B, S), u8
    bias: Option<Tensor>,            // broadcasts to (B, H, T, S)
    head_mask: Option<Tensor>,       // (1, H, 1, 1)
    /// Whether `keep` is only `keys`, broadcast.
    is_padding_alone: bool,
    /// The position of each query, counted from the first key of its sequence.
    query_positions: Vec<usize>,
    /// The position of each key in its sequence.
    key_positions: Vec<usize>,
}

impl MaskTensors {
    /// The mask of scores with the dims B, H, T and S.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if a tensor operation fails.
    pub(super) fn new(dims: [usize; 4], parts: &MaskParts, device: &Device) -> Result<Self> {
        let [b, _h, t, s] = dims;
        let mut keep = Keep::default();
        if let Some(keys) = &parts.keys {
            keep.and(keys.reshape((b, 1, 1, s))?)?;
        }
        let (query_positions, key_positions) = positions(parts, [t, s]);
        let row = |values: &mut dyn Iterator<Item = usize>| {
            Tensor::from_iter(values.map(|value| value as u32), device)
        };
        if parts.causal {
            let query = row(&mut query_positions.iter().map(|&query| query.min(s)))?; // s sees every key
            let key = row(&mut key_positions.iter().copied())?.reshape((1, 1, 1, s))?;
            keep.and(query.reshape((1, 1, t, 1))?.broadcast_ge(&key)?)?;
        }
        if let Some(sequences) = &parts.sequences {
            // The first key of the sequence of each query and of each key.
            let of = |keys: Range<usize>, length| std::iter::repeat_n(keys.start, length);
            let queries = sequences.queries().into_iter();
            let query = row(&mut queries.flat_map(|x| of(x.keys, x.queries.len())))?;
            let key =
                row(&mut sequences.ranges().flat_map(|(_, keys)| of(keys.clone(), keys.len())))?;
            let (query, key) = (query.reshape((1, 1, t, 1))?, key.reshape((1, 1, 1, s))?);
            keep.and(query.broadcast_eq(&key)?)?;
        }
        if let Some(radius) = parts.window {
            keep.and(window(radius, &query_positions, &key_positions, device)?)?;
        }
        let mut bias = parts.bias.clone();
        if let Some(table) = &parts.distance_bias {
            let distances = distances(table, &query_positions, &key_positions)?;
            bias = Some(match bias {
                None => distances,
                Some(bias) => bias.broadcast_add(&distances)?,
            });
        }
        if let Some(query_keep) = &parts.keep {
            keep.and(query_keep.clone())?;
        }
        let is_padding_alone = parts.sequences.is_none()
            && !parts.causal
            && parts.window.is_none()
            && parts.keep.is_none()
            && bias.is_none();
        if let Some(bias) = &bias {
            keep.and(bias.ne(f64::NEG_INFINITY)?)?;
        }
        Ok(Self {
            is_padding_alone,
            keep: keep.into_tensor(),
            keys: parts.keys.clone(),
            bias,
            head_mask: parts.head_mask.clone(),
            query_positions,
            key_positions,
        })
    }

    /// The position of each query and of each key, counted from the first key of its sequence.
    pub(crate) fn positions(&self) -> [&[usize]; 2] {
        [&self.query_positions, &self.key_positions]
    }

    /// The mask of the queries `start..start + len`.
    pub(crate) fn rows(&self, start: usize, len: usize) -> Result<Self> {
        let rows = |x: &Option<Tensor>| match x {
            Some(x) if x.dim(2)? > 1 => Ok(Some(x.narrow(2, start, len)?)),
            x => candle_core::Result::Ok(x.clone()),
        };
        Ok(Self {
            keep: rows(&self.keep)?,
            bias: rows(&self.bias)?,
            query_positions: self.query_positions[start..start + len].into(),
            ..self.clone()
        })
    }

    /// The mask of head `h`.
    pub(crate) fn head(&self, h: usize) -> Result<Self> {
        let head = |x: &Option<Tensor>| match x {
            Some(x) if x.dim(1)? > 1 => Ok(Some(x.narrow(1, h, 1)?)),
            x => candle_core::Result::Ok(x.clone()),
        };
        let (keep, bias, head_mask) =
            (head(&self.keep)?, head(&self.bias)?, head(&self.head_mask)?);
        Ok(Self { keep, bias, head_mask, ..self.clone() })
    }

    /// Adds the bias to `scores` `(B, H, T, S)` and sets the scores of hidden keys to −∞.
    pub(crate) fn apply(&self, scores: Tensor) -> Result<Tensor> {
        let scores = match &self.bias {
            None => scores,
            Some(bias) => scores.broadcast_add(bias)?,
        };
        select(self.keep.as_ref(), scores, f32::NEG_INFINITY)
    }

    /// Multiplies `x` `(B, H, T, ..)` by the head mask.
    pub(crate) fn scale_heads(&self, x: Tensor) -> Result<Tensor> {
        match &self.head_mask {
            None => Ok(x),
            Some(head_mask) => Ok(x.broadcast_mul(&head_mask.to_dtype(x.dtype())?)?),
        }
    }

    /// 1 for each query with no visible key, else 0; broadcasts to `(B, H, T, 1)`. `None` if no
    /// part hides keys.
    pub(crate) fn empty_rows(&self, dtype: DType) -> Result<Option<Tensor>> {
        let Some(keep) = &self.keep else { return Ok(None) };
        Ok(Some(keep.max_keepdim(3)?.eq(0u8)?.to_dtype(dtype)?))
    }

    /// Sets the rows of `x` `(B, G, S, D|V)` to 0 for keys that are hidden from every query.
    pub(crate) fn hide_unused_keys(&self, x: &Tensor) -> Result<Tensor> {
        let Some(keep) = &self.keep else { return Ok(x.clone()) };
        let (b, h, t, s) = keep.dims4()?; // H may be 1, for all heads
        let groups = x.dim(1)?.min(h);
        let queries = keep.reshape((b, groups, h / groups * t, s))?;
        let is_used = queries.max_keepdim(2)?.transpose(2, 3)?; // (B, G, S, 1)
        select(Some(&is_used), x.clone(), 0.0)
    }

    /// Sets the rows of `x` `(B, G, S, D|V)` to 0 for keys that padding and valid lengths hide.
    pub(crate) fn hide_keys(&self, x: &Tensor) -> Result<Tensor> {
        let keys = match &self.keys {
            None => None,
            Some(keys) => Some(keys.unsqueeze(1)?.unsqueeze(3)?), // (B, 1, S, 1)
        };
        select(keys.as_ref(), x.clone(), 0.0)
    }

    /// `weights·v`, `(B, H, T, S)` times `(B, G, S, V)`, by the matrix product `product`. A hidden
    /// key contributes 0 even if its value is NaN or ∞, although `0 · NaN` is NaN.
    pub(crate) fn weighted_sum(
        &self,
        weights: &Tensor,
        v: &Tensor,
        product: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Some(keep) = self.keep.as_ref().filter(|_| !self.is_padding_alone) else {
            return product(weights, &self.hide_keys(v)?);
        };
        // Zeros for keys that are hidden from every query: the gradient of the weights is
        // `grad·vᵀ`, which may overflow, and `0 · ∞` is NaN.
        let v = self.hide_unused_keys(v)?;
        let not_finite = not_finite_keys(&v)?;
        if not_finite.is_empty() {
            return product(weights, &v);
        }
        // A value that is not finite may be visible to one query and hidden from another: these
        // keys are left out of the product, and their terms are added for the queries that see
        // them.
        let (_, h, t, s) = weights.dims4()?;
        let (b, kv_heads, _, width) = v.dims4()?;
        let is_finite = (0..s).map(|key| u8::from(!not_finite.contains(&key)));
        let is_finite = Tensor::from_iter(is_finite, v.device())?.reshape((1, 1, s, 1))?;
        let mut sum = product(weights, &select(Some(&is_finite), v.clone(), 0.0)?)?;
        let keep = keep.broadcast_as((b, h, t, s))?;
        for key in not_finite {
            let value = v.narrow(2, key, 1)?.unsqueeze(2)?; // (B, G, 1, 1, V)
            let value = value
                .broadcast_as((b, kv_heads, h / kv_heads, 1, width))?
                .reshape((b, h, 1, width))?;
            let terms = weights.narrow(3, key, 1)?.broadcast_mul(&value)?; // (B, H, T, V)
            sum = (sum + select(Some(&keep.narrow(3, key, 1)?), terms, 0.0)?)?;
        }
        Ok(sum)
    }
}

/// The position of each of T queries and of each of S keys, counted from the first key of its
/// sequence.
fn positions(parts: &MaskParts, [t, s]: [usize; 2]) -> (Vec<usize>, Vec<usize>) {
    let queries =
        |first: usize, t: usize| (first..first + t).map(|i| parts.first_query.saturating_add(i));
    match &parts.sequences {
        None => (queries(0, t).collect(), (0..s).collect()),
        Some(sequences) => (
            (sequences.queries().iter())
                .flat_map(|range| queries(range.first, range.queries.len()))
                .collect(),
            sequences.ranges().flat_map(|(_, keys)| 0..keys.len()).collect(),
        ),
    }
}

/// The biases of the distances, `(1, H, T, S)`.
fn distances(table: &Tensor, queries: &[usize], keys: &[usize]) -> Result<Tensor> {
    let radius = table.dim(1)? / 2;
    // Pairs of tokens of different ragged sequences are hidden, whatever their bias.
    let column = |query: usize, key: usize| (radius + key).saturating_sub(query).min(2 * radius);
    let columns =
        queries.iter().flat_map(|&query| keys.iter().map(move |&key| column(query, key) as u32));
    let columns = Tensor::from_iter(columns, table.device())?;
    let dims = (1, table.dim(0)?, queries.len(), keys.len());
    Ok(table.index_select(&columns, 1)?.reshape(dims)?)
}

/// `(1, 1, T, S)` of u8: 1 where the distance is at most `radius`.
fn window(radius: usize, queries: &[usize], keys: &[usize], device: &Device) -> Result<Tensor> {
    let row = |&query: &usize| keys.iter().map(move |&key| u8::from(query.abs_diff(key) <= radius));
    let keep: Vec<u8> = queries.iter().flat_map(row).collect();
    Ok(Tensor::from_vec(keep, (1, 1, queries.len(), keys.len()), device)?)
}

/// `x` where `keep` is 1, and `otherwise` where `keep` is 0.
fn select(keep: Option<&Tensor>, x: Tensor, otherwise: f32) -> Result<Tensor> {
    let Some(keep) = keep else { return Ok(x) };
    let otherwise = Tensor::new(otherwise, x.device())?.to_dtype(x.dtype())?;
    let keep = keep.broadcast_as(x.shape())?;
    Ok(keep.where_cond(&x, &otherwise.broadcast_as(x.shape())?)?)
}

/// The keys with a value that is not finite in `v` `(B, G, S, V)`: `0·v` sums to NaN there, and to
/// 0 elsewhere.
fn not_finite_keys(v: &Tensor) -> Result<Vec<usize>> {
    let sums = (v.detach() * 0.0)?.sum((0, 1, 3))?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok((0..sums.len()).filter(|key| sums[*key] != 0.0).collect())
}

/// Prepends axes of length 1 to `x` up to rank 4.
///
/// # Errors
/// [`crate::Error::Shape`] if `x` does not broadcast to `dims`.
fn rank_4(argument: &'static str, x: &Tensor, dims: [usize; 4]) -> Result<Tensor> {
    let missing = 4usize.saturating_sub(x.rank());
    let padded = [&[1; 4][..missing], x.dims()].concat();
    let fits =
        padded.len() == 4 && padded.iter().zip(dims).all(|(&got, dim)| got == 1 || got == dim);
    if fits {
        Ok(x.reshape(padded)?)
    } else {
        Err(shape_error(argument, x, format!("one that broadcasts to (B, H, T, S) = {dims:?}")))
    }
}
