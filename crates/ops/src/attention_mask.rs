//! The mask of attention in the form that the kernels expect.

use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

use candle_core::{Tensor, WithDType};
use mha_kernels::{Broadcast, Sequence};

use crate::{Result, widen};

/// Ragged sequences: the tokens of each see the tokens of the same sequence only, and the keys of a
/// prefix before them. Clones share what the kernels compute from the offsets.
#[derive(Clone, Debug)]
pub struct Sequences(Arc<Offsets>);

#[derive(Debug)]
struct Offsets {
    offsets: Box<[usize]>,
    prefix: usize,
    /// The offsets in the form that the CUDA kernel expects, on the first GPU that was used.
    #[cfg(feature = "cuda")]
    tiles: OnceLock<mha_kernels_cuda::Tiles>,
}

impl Sequences {
    /// The sequences with these offsets: the index of the first token of each sequence, then the
    /// number of tokens. The offsets start at 0 and do not decrease. The tokens of each sequence
    /// follow `prefix` keys, which only the keys and values contain: a sequence of n tokens has
    /// `prefix + n` keys.
    pub fn new(offsets: &[usize], prefix: usize) -> Self {
        Self(Arc::new(Offsets {
            offsets: offsets.into(),
            prefix,
            #[cfg(feature = "cuda")]
            tiles: OnceLock::new(),
        }))
    }

    /// The index of the first token of each sequence, then the number of tokens.
    pub fn offsets(&self) -> &[usize] {
        &self.0.offsets
    }

    /// The number of keys before the tokens of each sequence.
    pub fn prefix(&self) -> usize {
        self.0.prefix
    }

    /// The number of keys of all sequences, `N + B·prefix` for B sequences of N tokens; `usize::MAX`
    /// if it is larger.
    pub fn keys(&self) -> usize {
        let (b, n) = (self.offsets().len().saturating_sub(1), self.offsets().last().copied());
        b.saturating_mul(self.prefix()).saturating_add(n.unwrap_or(0))
    }

    /// The indices of the tokens and of the keys of each sequence.
    pub fn ranges(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + Clone {
        let prefix = self.prefix();
        self.offsets().windows(2).enumerate().map(move |(i, w)| {
            let [start, end] = [i, i + 1].map(|sequences| sequences * prefix);
            (w[0]..w[1], w[0] + start..w[1] + end)
        })
    }

    /// The number of tokens of each sequence.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.offsets().windows(2).map(|w| w[1] - w[0])
    }

    /// The tiles of the CUDA kernel on this device. Those of the first device that was used are
    /// stored, so that a CUDA graph can read them; those of any other device are computed at each
    /// call.
    #[cfg(feature = "cuda")]
    pub(super) fn tiles(
        &self,
        device: &candle_core::CudaDevice,
    ) -> candle_core::Result<mha_kernels_cuda::Tiles> {
        if let Some(tiles) = self.0.tiles.get().filter(|tiles| tiles.are_on(device)) {
            return Ok(tiles.clone());
        }
        let made = mha_kernels_cuda::Tiles::new(device, self.offsets(), self.prefix())?;
        self.0.tiles.set(made.clone()).ok(); // another device may have been used first
        Ok(made)
    }
}

/// The parts of a mask for scores `(B, H, T, S)`. A key is visible to a query if no part hides it.
/// The tensors are on the device of the queries. Floats have the dtype of the scores: f64 if the
/// queries are f64, otherwise f32. The default has no part.
#[derive(Clone, Debug, Default)]
pub struct MaskParts {
    /// Ragged sequences, for T and S of [`Sequences::offsets`] and [`Sequences::keys`]. All other
    /// parts apply within each sequence.
    pub sequences: Option<Sequences>,
    /// The offset of a causal mask: query t sees the keys up to `t + offset`.
    pub causal: Option<usize>,
    /// Query t sees the keys at a distance of at most this number from `t + offset`.
    pub window: Option<usize>,
    /// `(H, 2·R + 1)`, added to the scores: column `R + d` is for the distance d from `t + offset`
    /// to the key. A bias of −∞ hides the key.
    pub distance_bias: Option<Tensor>,
    /// `(B, S)` of u8: 0 hides a key from all queries.
    pub keys: Option<Tensor>,
    /// Rank 4 of u8, broadcasts to `(B, H, T, S)`: 0 hides a key.
    pub keep: Option<Tensor>,
    /// Rank 4, broadcasts to `(B, H, T, S)`, added to the scores. If the sum of the biases is −∞,
    /// the key is hidden.
    pub bias: Option<Tensor>,
    /// `(1, H, 1, 1)`: factors of the attention weights.
    pub head_mask: Option<Tensor>,
}

impl MaskParts {
    /// The position of the first query of a sequence, counted from the first key.
    pub fn first_query(&self) -> usize {
        self.causal.unwrap_or(0)
    }

    /// Multiplies `x` `(B, H, T, ..)` by the head mask, in f32 if `x` is f16 or bf16.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if a tensor operation fails.
    pub(super) fn scale_heads(&self, x: &Tensor) -> Result<Tensor> {
        let Some(head_mask) = &self.head_mask else { return Ok(x.clone()) };
        let wide = widen(x)?;
        Ok(wide.broadcast_mul(&head_mask.to_dtype(wide.dtype())?)?.to_dtype(x.dtype())?)
    }

    /// Whether autograd tracks a part.
    pub(super) fn is_tracked(&self) -> bool {
        let parts = [&self.bias, &self.distance_bias, &self.head_mask];
        parts.into_iter().flatten().any(Tensor::track_op)
    }

    /// Whether the parts that the CUDA kernel does not compute are absent. The head mask is applied
    /// to its result.
    #[cfg(feature = "cuda")]
    pub(super) fn has_cuda_kernel(&self) -> bool {
        self.keys.is_none() && self.keep.is_none() && self.bias.is_none() && !self.is_tracked()
    }
}

/// A mask for scores of one shape, with the forms that kernels compute from its parts at their
/// first use. The CPU kernel computes all parts but the head mask, which is applied to its result.
/// The CUDA kernel computes ragged sequences with causal mask, window and distance bias.
#[derive(Debug)]
pub struct KernelMask {
    dims: [usize; 4],
    parts: MaskParts,
    cpu: OnceLock<CpuMask>,
}

impl KernelMask {
    /// The mask of scores with the dims B, H, T and S. The parts fit these dims.
    pub fn new(dims: [usize; 4], parts: MaskParts) -> Self {
        Self { dims, parts, cpu: OnceLock::new() }
    }

    /// B, H, T and S.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The parts.
    pub fn parts(&self) -> &MaskParts {
        &self.parts
    }

    /// The form that the CPU kernel expects.
    pub(super) fn cpu(&self) -> Result<&CpuMask> {
        if let Some(mask) = self.cpu.get() {
            return Ok(mask);
        }
        let mask = CpuMask::new(self.dims, &self.parts)?;
        Ok(self.cpu.get_or_init(|| mask))
    }
}

/// A mask in the form that the CPU kernel expects.
#[derive(Debug)]
pub(super) struct CpuMask {
    pub(super) sequences: Vec<Sequence>,
    /// `(B, S)`, 1 = visible.
    pub(super) visible: Option<Vec<u8>>,
    pub(super) keep: Option<BroadcastTensor<u8>>,
    pub(super) bias: Option<BroadcastTensor<f32>>,
    /// `(H, 2·R + 1)`
    pub(super) distance_bias: Option<Vec<f32>>,
    /// Whether each key is visible to all queries of its sequence or to none.
    pub(super) hides_same_keys: bool,
}

impl CpuMask {
    fn new([b, _h, t, s]: [usize; 4], parts: &MaskParts) -> Result<Self> {
        let sequences = match &parts.sequences {
            None => (0..b).map(|b| Sequence { b, queries: 0..t, keys: 0..s }).collect(),
            Some(sequences) => {
                let ranges = sequences.ranges();
                let sequences_of =
                    |b| ranges.clone().map(move |(queries, keys)| Sequence { b, queries, keys });
                (0..b).flat_map(sequences_of).collect()
            }
        };
        let distance_bias = parts.distance_bias.as_ref();
        let distance_bias = distance_bias.map(|x| x.flatten_all()?.to_vec1::<f32>()).transpose()?;
        let hides_no_distance =
            distance_bias.iter().flatten().all(|bias| *bias > f32::NEG_INFINITY);
        Ok(Self {
            sequences,
            visible: match &parts.keys {
                None => None,
                Some(keys) => Some(keys.flatten_all()?.to_vec1()?),
            },
            keep: parts.keep.as_ref().map(BroadcastTensor::new).transpose()?,
            bias: parts.bias.as_ref().map(BroadcastTensor::new).transpose()?,
            distance_bias,
            hides_same_keys: hides_no_distance
                && parts.causal.is_none()
                && parts.window.is_none()
                && parts.keep.is_none()
                && parts.bias.is_none(),
        })
    }
}

/// The elements of a tensor of rank 4, and its strides; the stride of a broadcast axis is 0.
#[derive(Debug)]
pub(super) struct BroadcastTensor<T> {
    data: Vec<T>,
    strides: [usize; 4],
}

impl<T: WithDType> BroadcastTensor<T> {
    fn new(x: &Tensor) -> candle_core::Result<Self> {
        let (mut strides, x) = ([0; 4], x.contiguous()?);
        for ((stride, &dim), &dense) in strides.iter_mut().zip(x.dims()).zip(x.stride()) {
            *stride = if dim == 1 { 0 } else { dense };
        }
        Ok(Self { data: x.flatten_all()?.to_vec1()?, strides })
    }

    pub(super) fn view(&self) -> Broadcast<'_, T> {
        Broadcast { data: &self.data, strides: self.strides }
    }
}
