//! The mask of attention in the form that the kernels expect.

use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

use candle_core::{Tensor, WithDType};
use mha_kernels::{Broadcast, Sequence};

use crate::{Result, widen};

/// Ragged sequences: the tokens of each see the tokens of the same sequence only, and the keys of a
/// prefix before them. The queries are those of all tokens or of some. Clones share what the kernels
/// compute from the sequences.
#[derive(Clone, Debug)]
pub struct Sequences(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    offsets: Box<[usize]>,
    prefix: usize,
    /// The tokens of the queries; `None` if each token has one.
    query_tokens: Option<Box<[usize]>>,
    /// The result of the first call of [`Sequences::for_queries_of`].
    of_some: OnceLock<Sequences>,
    /// The first result of [`Sequences::tiles`], with its first query.
    #[cfg(feature = "cuda")]
    tiles: OnceLock<(usize, mha_kernels_cuda::Tiles)>,
}

/// Queries of consecutive tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryRange {
    /// The indices of the queries.
    pub queries: Range<usize>,
    /// The indices of the keys of the sequence.
    pub keys: Range<usize>,
    /// The index of the first query's token in the sequence.
    pub first: usize,
}

impl Sequences {
    /// The sequences with these offsets: the index of the first token of each sequence, then the
    /// number of tokens. The offsets start at 0 and do not decrease. The tokens of each sequence
    /// follow `prefix` keys, which only the keys and values contain: a sequence of n tokens has
    /// `prefix + n` keys.
    pub fn new(offsets: &[usize], prefix: usize) -> Self {
        Self::from_parts(offsets, prefix, None)
    }

    /// The same sequences with the queries of `tokens` only, which are in ascending order. The
    /// result of the first call is stored, so that a CUDA graph can read it.
    pub fn for_queries_of(&self, tokens: &[usize]) -> Self {
        let stored = self.0.of_some.get().filter(|stored| stored.query_tokens() == Some(tokens));
        stored.cloned().unwrap_or_else(|| {
            let made = Self::from_parts(self.offsets(), self.prefix(), Some(tokens.into()));
            self.0.of_some.set(made.clone()).ok(); // other tokens may have been first
            made
        })
    }

    fn from_parts(offsets: &[usize], prefix: usize, query_tokens: Option<Box<[usize]>>) -> Self {
        Self(Arc::new(Parts {
            offsets: offsets.into(),
            prefix,
            query_tokens,
            of_some: OnceLock::new(),
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

    /// The tokens of the queries; `None` if each token has one.
    pub fn query_tokens(&self) -> Option<&[usize]> {
        self.0.query_tokens.as_deref()
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

    /// The queries of each sequence, in order. Those of a sequence whose tokens are not consecutive
    /// are several ranges.
    pub fn queries(&self) -> Vec<QueryRange> {
        let Some(mut rest) = self.query_tokens() else {
            let whole = |(queries, keys)| QueryRange { queries, keys, first: 0 };
            return self.ranges().map(whole).collect();
        };
        let (mut all, mut count) = (vec![], 0);
        for (tokens, keys) in self.ranges() {
            let (of_sequence, later) =
                rest.split_at(rest.partition_point(|&token| token < tokens.end));
            rest = later;
            for run in of_sequence.chunk_by(|&a, &b| a + 1 == b) {
                let (queries, first) = (count..count + run.len(), run[0] - tokens.start);
                all.push(QueryRange { queries, keys: keys.clone(), first });
                count += run.len();
            }
        }
        all
    }

    /// The tiles of the CUDA kernel on this device, where a query of the first token of a sequence
    /// has the position `first_query`. The first tiles that were made are stored, so that a CUDA
    /// graph can read them; those of any other device or position are made at each call.
    #[cfg(feature = "cuda")]
    pub(super) fn tiles(
        &self,
        device: &candle_core::CudaDevice,
        first_query: usize,
    ) -> candle_core::Result<mha_kernels_cuda::Tiles> {
        let stored = self
            .0
            .tiles
            .get()
            .filter(|(first, tiles)| *first == first_query && tiles.are_on(device));
        if let Some((_, tiles)) = stored {
            return Ok(tiles.clone());
        }
        let sequences = self.queries().into_iter().map(|QueryRange { queries, keys, first }| {
            let first_query = first_query.saturating_add(first);
            mha_kernels_cuda::Sequence { queries, keys, first_query }
        });
        let made = mha_kernels_cuda::Tiles::new(device, &sequences.collect::<Vec<_>>())?;
        self.0.tiles.set((first_query, made.clone())).ok(); // others may have been made first
        Ok(made)
    }
}

/// The parts of a mask for scores `(B, H, T, S)`. A key is visible to a query if no part hides it.
/// The tensors are on the device of the queries. Floats have the dtype of the scores: f64 if the
/// queries are f64, otherwise f32. The default has no part.
#[derive(Clone, Debug, Default)]
pub struct MaskParts {
    /// Ragged sequences with T queries and S keys. All other parts apply within each sequence.
    pub sequences: Option<Sequences>,
    /// The position of the first query, counted from the first key. In ragged sequences, that of a
    /// query of the first token.
    pub first_query: usize,
    /// Whether a query sees no key at a later position.
    pub causal: bool,
    /// A query sees the keys at a distance of at most this number from its position.
    pub window: Option<usize>,
    /// `(H, 2·R + 1)`, added to the scores: column `R + d` is for the distance d from the query's
    /// position to the key's. A bias of −∞ hides the key.
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
    /// Multiplies `x` `(B, H, T, ..)` by the head mask, in f32 if `x` is f16 or bf16.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if a tensor operation fails.
    pub(super) fn scale_heads(&self, x: &Tensor) -> Result<Tensor> {
        let Some(head_mask) = &self.head_mask else { return Ok(x.clone()) };
        let wide = widen(x)?;
        Ok(wide.broadcast_mul(&head_mask.to_dtype(wide.dtype())?)?.to_dtype(x.dtype())?)
    }

    /// Multiplies `x` `(B, heads, T, ..)` in f32 by the factors of these heads.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if a tensor operation fails.
    pub(super) fn scale_chosen_heads(&self, x: &Tensor, heads: &[usize]) -> Result<Tensor> {
        let Some(head_mask) = &self.head_mask else { return Ok(x.clone()) };
        let heads: Vec<u32> = heads.iter().map(|&head| head as u32).collect();
        let factors = head_mask.index_select(&Tensor::new(heads, x.device())?, 1)?;
        Ok(x.broadcast_mul(&factors.to_dtype(x.dtype())?)?)
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
        let ranges = match &parts.sequences {
            None => vec![QueryRange { queries: 0..t, keys: 0..s, first: 0 }],
            Some(sequences) => sequences.queries(),
        };
        let sequence = |b, QueryRange { queries, keys, first }| {
            let first_query = parts.first_query.saturating_add(first);
            Sequence { b, queries, keys, first_query }
        };
        let sequences_of = |b| ranges.iter().cloned().map(move |range| sequence(b, range));
        let sequences: Vec<Sequence> = (0..b).flat_map(sequences_of).collect();
        // One query after all other tokens, as in generation, sees every key.
        let hides_later_keys =
            |x: &Sequence| !x.queries.is_empty() && x.first_query.saturating_add(1) < x.keys.len();
        let causal_mask_hides_keys = parts.causal && sequences.iter().any(hides_later_keys);
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
                && !causal_mask_hides_keys
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
