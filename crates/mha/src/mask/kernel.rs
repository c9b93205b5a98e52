//! Conversion of an [`AttentionMask`] to slices and strides for the CPU kernel.

use candle_core::{DType, Device, Tensor, WithDType};
use mha_kernels::{Broadcast, Sequence};

use super::AttentionMask;
use crate::Result;

/// A mask in the form that the CPU kernel expects.
pub(crate) struct KernelMask {
    pub(crate) sequences: Vec<Sequence>,
    /// `(B, S)`, 1 = visible.
    pub(crate) visible: Option<Vec<u8>>,
    pub(crate) keep: Option<BroadcastTensor<u8>>,
    pub(crate) bias: Option<BroadcastTensor<f32>>,
    /// The table `(H, 2·radius + 1)`, and the radius.
    pub(crate) distance_bias: Option<(Vec<f32>, usize)>,
    pub(crate) causal: Option<usize>,
    pub(crate) window: Option<usize>,
}

/// The elements of a tensor of rank 4, and its strides; the stride of a broadcast axis is 0.
pub(crate) struct BroadcastTensor<T> {
    data: Vec<T>,
    strides: [usize; 4],
}

impl<T: WithDType> BroadcastTensor<T> {
    fn new(x: Tensor) -> Result<Self> {
        let (mut strides, x) = ([0; 4], x.contiguous()?);
        for ((stride, &dim), &dense) in strides.iter_mut().zip(x.dims()).zip(x.stride()) {
            *stride = if dim == 1 { 0 } else { dense };
        }
        Ok(Self { data: x.flatten_all()?.to_vec1()?, strides })
    }

    pub(crate) fn view(&self) -> Broadcast<'_, T> {
        Broadcast { data: &self.data, strides: self.strides }
    }
}

impl AttentionMask {
    /// The mask for `(B, H, T, S)` scores in the form that the CPU kernel expects. The head mask is
    /// not included: [`AttentionMask::scale_heads`] applies it.
    ///
    /// # Errors
    /// [`crate::Error::Shape`], [`crate::Error::Offset`] or [`crate::Error::ValidLength`] for a
    /// part that does not fit `dims`.
    pub(crate) fn for_kernel(&self, dims: [usize; 4], device: &Device) -> Result<KernelMask> {
        let [b, h, t, s] = dims;
        let sequences = match &self.blocks {
            None => (0..b).map(|b| Sequence { b, queries: 0..t, keys: 0..s }).collect(),
            Some(offsets) => {
                self.check_blocks(t)?;
                self.check_blocks(s)?;
                let ranges = offsets.windows(2).map(|w| w[0]..w[1]);
                let sequences_of =
                    |b| ranges.clone().map(move |r| Sequence { b, queries: r.clone(), keys: r });
                (0..b).flat_map(sequences_of).collect()
            }
        };
        let visible = match self.keys(b, s, device)? {
            None => None,
            Some(keys) => Some(keys.flatten_all()?.to_vec1()?),
        };
        let (keep, bias) = self.per_query_parts(dims, DType::F32, device)?;
        let distance_bias = match &self.distance_bias {
            None => None,
            Some(table) => {
                let radius = self.check_distances(table, h, [t, s])?;
                let table = table.to_dtype(DType::F32)?.flatten_all()?;
                Some((table.to_vec1()?, radius))
            }
        };
        Ok(KernelMask {
            sequences,
            visible,
            keep: keep.map(BroadcastTensor::new).transpose()?,
            bias: bias.map(BroadcastTensor::new).transpose()?,
            distance_bias,
            causal: self.causal,
            window: self.window,
        })
    }
}
