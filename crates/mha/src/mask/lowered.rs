//! [`LoweredMask`]: a mask for scores of one shape.

use std::{ops::Range, sync::OnceLock};

use candle_core::{DType, Device, Tensor};
use ops::{KernelMask, MaskParts, QueryRange, Sequences};

use super::{AttentionMask, MaskTensors};
use crate::{
    Error, Result,
    shape::{score_dtype, shape_error},
};

/// An [`AttentionMask`] for scores of one shape, from [`AttentionMask::lower`]. Its parts have been
/// checked, and are on the device of the queries. What a kernel or candle's operations derive from
/// the parts is computed at the first attention call and used again by later calls: a stack of
/// layers lowers its mask once.
#[derive(Debug)]
pub struct LoweredMask {
    kernel: KernelMask,
    tensors: OnceLock<MaskTensors>,
    key_rows: OnceLock<Tensor>,
    device: Device,
}

impl LoweredMask {
    fn new(dims: [usize; 4], parts: MaskParts, device: &Device) -> Self {
        let (kernel, device) = (KernelMask::new(dims, parts), device.clone());
        Self { kernel, tensors: OnceLock::new(), key_rows: OnceLock::new(), device }
    }

    /// Checks that the mask was lowered for scores `(B, H, T, S)` with these dims.
    ///
    /// # Errors
    /// [`Error::Shape`] if it was not.
    pub(crate) fn check(&self, dims: [usize; 4]) -> Result<()> {
        if self.kernel.dims() == dims {
            return Ok(());
        }
        let (argument, expected) = ("mask", format!("(B, H, T, S) = {dims:?}"));
        Err(Error::Shape { argument, expected, got: self.kernel.dims().to_vec() })
    }

    /// The mask for the kernels.
    pub(crate) fn kernel(&self) -> &KernelMask {
        &self.kernel
    }

    pub(crate) fn sequences(&self) -> Option<&Sequences> {
        self.kernel.parts().sequences.as_ref()
    }

    /// One more than the largest position of a query or key, counted from the first key.
    pub(crate) fn longest_sequence(&self) -> usize {
        let [_b, _h, t, s] = self.kernel.dims();
        longest_sequence(self.sequences(), self.kernel.parts().first_query, [t, s])
    }

    /// The mask as tensors for candle's operations.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor operation fails.
    pub(crate) fn tensors(&self) -> Result<&MaskTensors> {
        if let Some(tensors) = self.tensors.get() {
            return Ok(tensors);
        }
        let tensors = MaskTensors::new(self.kernel.dims(), self.kernel.parts(), &self.device)?;
        Ok(self.tensors.get_or_init(|| tensors))
    }

    /// The mask of these queries of a ragged sequence and its keys.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor operation fails.
    pub(crate) fn of_queries(&self, range: &QueryRange) -> Result<Self> {
        let QueryRange { queries, keys, first } = range;
        let ([b, h, _, _], parts) = (self.kernel.dims(), self.kernel.parts());
        let narrow = |x: &Option<Tensor>, axes: &[(usize, &Range<usize>)]| {
            let Some(mut x) = x.clone() else { return Ok(None) };
            for (axis, range) in axes {
                if x.dim(*axis)? > 1 {
                    x = x.narrow(*axis, range.start, range.len())?;
                }
            }
            candle_core::Result::Ok(Some(x))
        };
        let parts = MaskParts {
            sequences: None,
            first_query: parts.first_query.saturating_add(*first),
            keys: narrow(&parts.keys, &[(1, keys)])?,
            keep: narrow(&parts.keep, &[(2, queries), (3, keys)])?,
            bias: narrow(&parts.bias, &[(2, queries), (3, keys)])?,
            ..parts.clone()
        };
        Ok(Self::new([b, h, queries.len(), keys.len()], parts, &self.device))
    }

    /// The rows of the keys of all ragged sequences, `(S,)` of u32, in the rows of the prefix
    /// followed by those of all tokens: for each sequence the prefix, then its tokens.
    ///
    /// # Errors
    /// [`Error::Candle`] if the tensor cannot be created.
    pub(crate) fn key_rows(&self, sequences: &Sequences) -> Result<&Tensor> {
        if let Some(rows) = self.key_rows.get() {
            return Ok(rows);
        }
        let prefix = sequences.prefix();
        let rows = sequences
            .ranges()
            .flat_map(|(tokens, _)| (0..prefix).chain(prefix + tokens.start..prefix + tokens.end));
        let rows = Tensor::from_iter(rows.map(|row| row as u32), &self.device)?;
        Ok(self.key_rows.get_or_init(|| rows))
    }
}

impl AttentionMask {
    /// The mask for scores `(B, H, T, S)` with the dims `[B, H, T, S]`, of queries with this dtype
    /// on this device.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Offset`] or [`Error::ValidLength`] for a part that does not fit
    /// the dims.
    ///
    /// # Examples
    /// Two layers with the same mask:
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mha::{AttentionConfig, AttentionMask, AttentionOptions, SelfAttention};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
    /// let layer = SelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
    /// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
    /// let mask = AttentionMask::none().with_sequences(&[0, 2, 5])?;
    ///
    /// let lowered = mask.lower([1, 3, 5, 5], DType::F32, &Cpu)?; // B, H, T, S
    /// let (y, _) = layer.forward_lowered(&x, &lowered, AttentionOptions::new())?;
    /// let (y, _) = layer.forward_lowered(&y, &lowered, AttentionOptions::new())?;
    /// let expected = layer.forward(&layer.forward(&x, &mask)?, &mask)?;
    /// assert_eq!(y.to_vec3::<f32>()?, expected.to_vec3::<f32>()?);
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn lower(&self, dims: [usize; 4], dtype: DType, device: &Device) -> Result<LoweredMask> {
        let [b, h, t, s] = dims;
        self.check_queries(t)?;
        self.check_keys(s)?;
        let (dtype, first_query) = (score_dtype(dtype), self.causal.unwrap_or(0));
        let distance_bias = match &self.distance_bias {
            None => None,
            Some(table) => {
                let longest = longest_sequence(self.sequences.as_ref(), first_query, [t, s]);
                let least = longest.saturating_sub(1);
                if table.dim(0)? != h || table.dim(1)? / 2 < least {
                    let expected = format!("(H, 2·R + 1) with H = {h} and R of at least {least}");
                    return Err(shape_error("distance bias", table, expected));
                }
                Some(table.to_device(device)?.to_dtype(dtype)?.contiguous()?)
            }
        };
        let (keep, bias) = self.per_query_parts(dims, dtype, device)?;
        let parts = MaskParts {
            sequences: self.sequences.clone(),
            first_query,
            causal: self.causal.is_some(),
            window: self.window,
            distance_bias,
            keys: self.keys(b, s, device)?,
            keep,
            bias,
            head_mask: self.heads(h, device)?,
        };
        Ok(LoweredMask::new(dims, parts, device))
    }
}

/// One more than the largest position of `t` queries and `s` keys, counted from the first key.
fn longest_sequence(
    sequences: Option<&Sequences>,
    first_query: usize,
    [t, s]: [usize; 2],
) -> usize {
    match sequences {
        None => s.max(t.saturating_add(first_query)),
        Some(sequences) => {
            let ranges = sequences.ranges();
            let longest = ranges
                .map(|(tokens, keys)| keys.len().max(tokens.len().saturating_add(first_query)));
            longest.max().unwrap_or(0)
        }
    }
}
