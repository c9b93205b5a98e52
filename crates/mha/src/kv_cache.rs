//! Projected keys and values that are kept between calls: [`KvCache`] for the earlier tokens of a
//! decoder, [`Memory`] for an encoder's output.

use std::{ops::Range, sync::Arc};

use candle_core::Tensor;
use ops::Sequences;

use crate::{AttentionMask, Error, LoweredMask, Result, shape::check_qkv};

/// Projected keys and values.
///
/// # Shapes
/// `k`: `(B, G, S, D)`; `v`: `(B, G, S, V)`, where G is the number of key-value heads and V the
/// width of a head's values
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, CrossAttention};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let attention = CrossAttention::new(&AttentionConfig::new(12, 3), vb)?;
/// let memory = attention.memory(&Tensor::randn(0f32, 1., (2, 7, 12), &Cpu)?)?; // B = 2, S = 7
/// assert_eq!(memory.keys(), 7);
///
/// // Three beams: two continue sequence 1.
/// let memory = memory.reorder(&[1, 1, 0])?;
/// let x = Tensor::randn(0f32, 1., (3, 1, 12), &Cpu)?;
/// assert_eq!(attention.forward(&x, &memory, None)?.dims(), [3, 1, 12]);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Memory {
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
}

impl Memory {
    /// Selects sequences in a new order: sequence `i` of the result is sequence `batch[i]`. If
    /// `batch` names all sequences in their order, nothing is copied.
    ///
    /// # Errors
    /// [`Error::Candle`] for a sequence that does not exist.
    pub fn reorder(&self, batch: &[u32]) -> Result<Self> {
        if self.has_order(batch) {
            return Ok(self.clone());
        }
        self.check(batch)?;
        let index = Tensor::new(batch, self.k.device())?;
        let reordered = |x: &Tensor| x.contiguous()?.index_select(&index, 0);
        Ok(Self { k: reordered(&self.k)?, v: reordered(&self.v)? })
    }

    /// B, the number of sequences.
    pub fn sequences(&self) -> usize {
        self.k.dims()[0]
    }

    /// Whether `batch` names all sequences in their order.
    fn has_order(&self, batch: &[u32]) -> bool {
        batch.iter().copied().eq(0..self.sequences() as u32)
    }

    /// Checks that sequences exist.
    ///
    /// # Errors
    /// [`Error::Candle`] for one that does not.
    fn check(&self, batch: &[u32]) -> Result<()> {
        let sequences = self.sequences();
        match batch.iter().find(|&&index| index as usize >= sequences) {
            None => Ok(()),
            // candle's `index_select` would return zeros for the index `u32::MAX`.
            Some(index) => {
                let message =
                    format!("sequence {index} does not exist: expected an index below {sequences}");
                Err(candle_core::Error::Msg(message).into())
            }
        }
    }

    /// [`Self::reorder`] that overwrites these keys and values where [`ops::reorder_in_place`] can:
    /// `sources` are its arguments for the same order.
    ///
    /// # Errors
    /// The errors of [`ops::reorder_in_place`].
    fn reordered_in_place(&self, sources: &[(usize, Range<usize>)]) -> Result<Self> {
        let reordered = |x: &Tensor| -> Result<Tensor> {
            if ops::reorder_in_place(x, sources)? {
                return Ok(x.narrow(0, 0, sources.len())?);
            }
            let batch: Vec<u32> = sources.iter().map(|(from, _)| *from as u32).collect();
            Ok(x.index_select(&Tensor::new(batch, x.device())?, 0)?)
        };
        Ok(Self { k: reordered(&self.k)?, v: reordered(&self.v)? })
    }

    /// S, the number of keys.
    pub fn keys(&self) -> usize {
        self.k.dims()[2]
    }

    /// The mask for the scores of queries `q` `(B, H, T, D)` and these keys.
    ///
    /// # Errors
    /// The errors of [`check_qkv`] and [`AttentionMask::lower`].
    pub(crate) fn lower(&self, mask: &AttentionMask, q: &Tensor) -> Result<LoweredMask> {
        mask.lower(check_qkv(q, &self.k, &self.v)?, q.dtype(), q.device())
    }

    /// The keys and values of the first `len` tokens, as views.
    ///
    /// # Errors
    /// [`Error::Candle`] if there are fewer tokens.
    pub fn first(&self, len: usize) -> Result<Self> {
        Ok(Self { k: self.k.narrow(2, 0, len)?, v: self.v.narrow(2, 0, len)? })
    }

    /// The size of keys and values in bytes.
    pub fn bytes(&self) -> usize {
        [&self.k, &self.v].map(|x| x.elem_count() * x.dtype().size_in_bytes()).iter().sum()
    }

    /// These keys and values before those of each ragged sequence of `mask` in `tokens`.
    ///
    /// # Shapes
    /// `self`: `(1, G, prefix, D)`; `tokens`: `(1, G, N, D)`; returns `(1, G, N + B·prefix, D)`
    /// # Errors
    /// [`Error::Shape`] if the mask has no ragged sequences after a prefix of this length;
    /// [`Error::Candle`] if the widths of the heads differ.
    pub(crate) fn before_each(&self, tokens: &Self, mask: &LoweredMask) -> Result<Self> {
        let prefix = self.keys();
        let Some(sequences) = mask.sequences().filter(|x| x.prefix() == prefix) else {
            let got = vec![mask.sequences().map_or(0, Sequences::prefix)];
            let expected = format!("ragged sequences after a prefix of {prefix} keys");
            return Err(Error::Shape { argument: "mask", expected, got });
        };
        let rows = mask.key_rows(sequences)?;
        let joined = |prefix: &Tensor, tokens: &Tensor| -> Result<Tensor> {
            // As rows of tokens, which is how the projections are stored.
            let rows_of = |x: &Tensor| x.transpose(1, 2)?.flatten_from(2)?.squeeze(0);
            let (_, g, _, d) = prefix.dims4()?;
            let tokens = tokens.to_dtype(prefix.dtype())?;
            let all = Tensor::cat(&[rows_of(prefix)?, rows_of(&tokens)?], 0)?; // (P + N, G·D)
            let keys = all.index_select(rows, 0)?; // (N + B·P, G·D)
            Ok(keys.reshape((1, keys.dim(0)?, g, d))?.transpose(1, 2)?)
        };
        Ok(Self { k: joined(&self.k, &tokens.k)?, v: joined(&self.v, &tokens.v)? })
    }
}

/// The keys and values of the tokens so far, for [`crate::CausalSelfAttention::step`].
///
/// A step appends its keys and values in place. The buffer doubles in size when it is full, up to
/// the capacity, so that most steps copy no earlier keys and values. A step beyond the capacity is
/// an error and leaves the cache unchanged. Clones are independent: they share a buffer until one
/// of them takes a step.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use mha::{AttentionConfig, CausalSelfAttention, KvCache};
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
/// let attention = CausalSelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
/// let x = Tensor::randn(0f32, 1., (1, 5, 12), &Cpu)?;
///
/// let mut cache = KvCache::new(4);
/// attention.step(&x.narrow(1, 0, 3)?, &mut cache)?;
/// assert_eq!(
///     attention.step(&x.narrow(1, 3, 2)?, &mut cache).unwrap_err().to_string(),
///     "cache is full: expected at most 4 tokens, got 3 in the cache and 2 new; \
///      reset the cache, or give it a larger capacity"
/// );
/// assert_eq!(cache.len(), 3);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct KvCache {
    /// `(B, G, room, D)`: the first `len` keys and values are in use, the others are free.
    buffer: Option<Arc<Memory>>,
    /// Whether the cache allocated the buffer, and so may write to it. The buffer that the first
    /// step stores is a view of projections, which share their memory with other tensors.
    is_own: bool,
    /// For each sequence, the index in the batch of the sequence that computed each token. Tokens of
    /// one position and one index are equal.
    origins: Vec<Vec<u32>>,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty cache for at most `capacity` tokens per sequence.
    pub fn new(capacity: usize) -> Self {
        Self { buffer: None, is_own: false, origins: vec![], len: 0, capacity }
    }

    /// The number of tokens in the cache per sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the cache holds no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The maximum number of tokens per sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The keys and values of the tokens, in memory of their own; `None` if there are no tokens.
    ///
    /// # Errors
    /// [`Error::Candle`] if they cannot be copied.
    pub fn to_memory(&self) -> Result<Option<Memory>> {
        let Some(buffer) = self.buffer.as_ref().filter(|_| self.len > 0) else { return Ok(None) };
        // In the order of tokens, heads and values, as `Memory::before_each` reads them.
        let copy = |x: &Tensor| x.transpose(1, 2)?.force_contiguous()?.transpose(1, 2);
        let Memory { k, v } = buffer.first(self.len)?;
        Ok(Some(Memory { k: copy(&k)?, v: copy(&v)? }))
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        *self = Self::new(self.capacity);
    }

    /// Keeps the first `len` tokens; does nothing if the cache holds at most `len`. Later steps
    /// overwrite the removed tokens. A backward pass from the output of an earlier step then gives
    /// wrong gradients.
    pub fn truncate(&mut self, len: usize) {
        match len {
            0 => self.reset(),
            len => {
                self.len = self.len.min(len);
                self.origins.iter_mut().for_each(|origins| origins.truncate(len));
            }
        }
    }

    /// Reorders the sequences, as beam search does: sequence `i` continues the former sequence
    /// `beams[i]`. On a CPU, only the tokens in which the two differ are copied: beams that continue one
    /// earlier beam share the tokens before.
    ///
    /// # Errors
    /// [`Error::Candle`] for a sequence that does not exist, unless the cache is empty.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use mha::{AttentionConfig, CausalSelfAttention, KvCache};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
    /// let attention = CausalSelfAttention::new(&AttentionConfig::new(12, 3), vb)?;
    /// let x = Tensor::randn(0f32, 1., (2, 3, 12), &Cpu)?;
    /// let mut cache = KvCache::new(8);
    /// attention.step(&x, &mut cache)?;
    ///
    /// // Both sequences continue the former sequence 1, after its first two tokens.
    /// cache.reorder(&[1, 1])?;
    /// cache.truncate(2);
    /// let last = x.narrow(0, 1, 1)?.narrow(1, 2, 1)?; // (1, 1, 12)
    /// let y = attention.step(&Tensor::cat(&[&last, &last], 0)?, &mut cache)?;
    /// let expected = attention.forward(&x.narrow(0, 1, 1)?, None)?.narrow(1, 2, 1)?;
    /// let is_close = y.broadcast_sub(&expected)?.abs()?.lt(1e-5)?; // 0 for NaN
    /// assert_eq!((is_close.min_all()?.to_scalar::<u8>()?, cache.len()), (1, 3));
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn reorder(&mut self, beams: &[u32]) -> Result<()> {
        let Some(buffer) = &mut self.buffer else { return Ok(()) };
        if buffer.has_order(beams) {
            return Ok(());
        }
        buffer.check(beams)?;
        let origins = beams.iter().map(|&beam| self.origins[beam as usize].clone());
        let origins: Vec<Vec<u32>> = origins.collect();
        let source = |((&beam, new), old): ((&u32, &Vec<u32>), &Vec<u32>)| {
            let equal = new.iter().zip(old).take_while(|(new, old)| new == old).count();
            (beam as usize, equal..self.len)
        };
        match Arc::get_mut(buffer) {
            Some(own) if self.is_own && beams.len() <= own.sequences() => {
                let sources = beams.iter().zip(&origins).zip(&self.origins).map(source);
                *own = own.reordered_in_place(&sources.collect::<Vec<_>>())?;
            }
            _ => *buffer = Arc::new(buffer.reorder(beams)?),
        }
        self.is_own = true;
        self.origins = origins;
        Ok(())
    }

    /// Checks that `x` has as many sequences as the cache, unless the cache is empty.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number.
    pub(crate) fn check_sequences(&self, x: &Tensor) -> Result<()> {
        let Some(buffer) = &self.buffer else { return Ok(()) };
        let sequences = buffer.sequences();
        if x.dims().first().is_some_and(|&b| b != sequences) {
            let expected = format!("(B, T, E) with B = {sequences}, as in the cache");
            return Err(Error::Shape { argument: "x", expected, got: x.dims().to_vec() });
        }
        Ok(())
    }

    /// The keys and values of the cache followed by `new`. The caller has checked the number of
    /// sequences. The length of the cache changes only when [`Self::advance`] is called with the
    /// result.
    ///
    /// # Errors
    /// [`Error::CacheFull`] if the tokens exceed the capacity; [`Error::Candle`] if the widths of
    /// the heads differ.
    pub(crate) fn extended(&mut self, new: Memory) -> Result<Memory> {
        let (capacity, len, more) = (self.capacity, self.len, new.keys());
        let total = len + more;
        if total > capacity {
            return Err(Error::CacheFull { capacity, len, more });
        }
        let Some(buffer) = &mut self.buffer else {
            return Ok(new); // the first step copies nothing: `advance` stores `new`
        };
        if more == 0 {
            return buffer.first(len);
        }
        // `Linear` may return another dtype for an input that autograd tracks.
        let dtype = buffer.k.dtype();
        let new = Memory { k: new.k.to_dtype(dtype)?, v: new.v.to_dtype(dtype)? };
        if [&buffer.k, &buffer.v, &new.k, &new.v].into_iter().any(|x| x.track_op()) {
            let old = buffer.first(len)?; // an in-place write has no gradient
            let append = |old: &Tensor, new: &Tensor| Tensor::cat(&[old, new], 2);
            return Ok(Memory { k: append(&old.k, &new.k)?, v: append(&old.v, &new.v)? });
        }
        if !self.is_own || Arc::get_mut(buffer).is_none() || buffer.keys() < total {
            let room = total.saturating_mul(2).min(capacity);
            let old = buffer.first(len)?;
            *buffer = Arc::new(Memory { k: with_room(&old.k, room)?, v: with_room(&old.v, room)? });
            self.is_own = true;
        }
        for (x, new) in [(&buffer.k, &new.k), (&buffer.v, &new.v)] {
            if !ops::copy_in_place(new, &x.narrow(2, len, more)?)? {
                x.slice_set(&new.contiguous()?, 2, len)?;
            }
        }
        buffer.first(total)
    }

    /// Commits a step: `memory`, returned by [`Self::extended`], becomes the content of the cache.
    pub(crate) fn advance(&mut self, memory: Memory) {
        self.len = memory.keys();
        if self.len == 0 {
            return; // a step without tokens
        }
        self.origins.resize(memory.sequences(), vec![]);
        for (sequence, origins) in (0..).zip(&mut self.origins) {
            origins.resize(self.len, sequence);
        }
        if !self.is_own || memory.k.track_op() || memory.v.track_op() {
            (self.buffer, self.is_own) = (Some(Arc::new(memory)), false);
        }
    }
}

/// Copies `x` `(B, G, S, D)` to the start of a new buffer `(B, G, room, D)`.
fn with_room(x: &Tensor, room: usize) -> Result<Tensor> {
    let (b, h, _s, d) = x.dims4()?;
    let buffer = Tensor::zeros((b, h, room, d), x.dtype(), x.device())?;
    buffer.slice_set(&x.contiguous()?, 2, 0)?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Storage};

    use super::*;

    fn step(cache: &mut KvCache, value: f32) -> Result<Memory> {
        let x = Tensor::full(value, (1, 2, 1, 4), &Cpu)?;
        let memory = cache.extended(Memory { k: x.clone(), v: x })?;
        cache.advance(memory.clone());
        Ok(memory)
    }

    fn values(memory: &Memory) -> Result<Vec<f32>> {
        Ok(memory.k.get(0)?.get(1)?.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?)
    }

    #[test]
    fn sequences_that_do_not_exist_are_errors() -> Result<()> {
        let mut cache = KvCache::new(100);
        step(&mut cache, 1.0)?;
        for missing in [1, u32::MAX] {
            let error = cache.reorder(&[0, missing]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("sequence {missing} does not exist")), "{error}");
        }
        Ok(())
    }

    /// With one head, candle considers an empty part of a projection contiguous, so `contiguous`
    /// does not copy it.
    #[test]
    fn a_step_without_tokens_leaves_the_cache_unchanged() -> Result<()> {
        let projected = |tokens: usize| -> Result<Memory> {
            let heads = Tensor::ones((1, 3, tokens, 4), DType::F32, &Cpu)?;
            Ok(Memory { k: heads.narrow(1, 1, 1)?, v: heads.narrow(1, 2, 1)? })
        };
        let mut cache = KvCache::new(100);
        for (tokens, total) in [(0, 0), (2, 2), (0, 2), (1, 3), (0, 3)] {
            let memory = cache.extended(projected(tokens)?)?;
            assert_eq!(memory.keys(), total);
            cache.advance(memory);
            assert_eq!((cache.len(), cache.is_empty()), (total, total == 0));
            cache.reorder(&[0])?;
        }
        Ok(())
    }

    #[test]
    fn steps_write_into_the_same_buffer() -> Result<()> {
        let mut cache = KvCache::new(100);
        let mut copies = 0;
        let mut last = None;
        for i in 0..64 {
            let memory = step(&mut cache, i as f32)?;
            assert_eq!(values(&memory)?, (0..=i).map(|i| i as f32).collect::<Vec<_>>());
            let buffer = cache.buffer.as_ref().map(Arc::as_ptr);
            copies += usize::from(buffer != last);
            last = buffer;
        }
        assert!(copies < 8, "{copies} copies in 64 steps");
        Ok(())
    }

    #[test]
    fn reordered_caches_write_into_one_buffer_that_clones_do_not_share() -> Result<()> {
        let rows = |memory: &Memory| -> Result<Vec<Vec<f32>>> {
            Ok(memory.k.narrow(1, 1, 1)?.narrow(3, 0, 1)?.flatten_from(1)?.to_vec2()?)
        };
        let step = |cache: &mut KvCache, values: &[f32]| -> Result<Vec<Vec<f32>>> {
            let x = Tensor::new(values, &Cpu)?.reshape(((), 1, 1, 1))?;
            let x = x.broadcast_as((values.len(), 3, 1, 4))?.contiguous()?;
            let memory = cache.extended(Memory { k: x.clone(), v: x })?;
            cache.advance(memory.clone());
            rows(&memory)
        };
        let address = |cache: &KvCache| -> Result<*const f32> {
            let (storage, _) = cache.buffer.as_ref().unwrap().k.storage_and_layout();
            match &*storage {
                Storage::Cpu(storage) => Ok(storage.as_slice::<f32>()?.as_ptr()),
                _ => unreachable!("the cache is on the CPU"),
            }
        };
        let mut cache = KvCache::new(20);
        let mut expected = [vec![], vec![], vec![]];
        let append = |cache: &mut KvCache, expected: &mut [Vec<f32>], first: usize| {
            let new: Vec<f32> = (0..expected.len()).map(|i| (first + i) as f32).collect();
            expected.iter_mut().zip(&new).for_each(|(row, value)| row.push(*value));
            step(cache, &new)
        };
        for i in 0..11 {
            append(&mut cache, &mut expected, 10 * i)?; // room for 20 tokens
        }
        let (start, mut clone) = (address(&cache)?, None);
        let orders: [&[u32]; 8] =
            [&[1, 0, 2], &[2, 2, 0], &[1, 1, 1], &[2, 0, 1], &[0, 1, 2], &[1, 0], &[1, 1], &[1]];
        let mut expected = expected.to_vec();
        for (i, beams) in orders.into_iter().enumerate() {
            cache.reorder(beams)?;
            expected = beams.iter().map(|&beam| expected[beam as usize].clone()).collect();
            let len = if i == 4 { 8 } else { 20 };
            cache.truncate(len);
            expected.iter_mut().for_each(|row| row.truncate(len));
            assert_eq!(append(&mut cache, &mut expected, 100 + 10 * i)?, expected, "{i}");
            assert_eq!(address(&cache)? == start, i <= 5, "{i}");
            if i == 5 {
                clone = Some((cache.clone(), expected.clone()));
            }
        }
        let (mut clone, mut expected) = clone.unwrap();
        assert_eq!(append(&mut clone, &mut expected, 300)?, expected);
        Ok(())
    }

    #[test]
    fn clones_do_not_see_each_others_steps() -> Result<()> {
        let mut cache = KvCache::new(10);
        for i in 0..3 {
            step(&mut cache, i as f32)?;
        }
        let mut clone = cache.clone();
        assert_eq!(values(&step(&mut cache, 7.)?)?, [0., 1., 2., 7.]);
        assert_eq!(values(&step(&mut clone, 8.)?)?, [0., 1., 2., 8.]);
        assert_eq!(values(&step(&mut cache, 9.)?)?, [0., 1., 2., 7., 9.]);
        Ok(())
    }

    #[test]
    fn an_abandoned_step_leaves_the_cache_unchanged() -> Result<()> {
        let mut cache = KvCache::new(10);
        for i in 0..3 {
            step(&mut cache, i as f32)?;
        }
        let x = Tensor::full(5f32, (1, 2, 2, 4), &Cpu)?;
        cache.extended(Memory { k: x.clone(), v: x })?; // without `advance`
        assert_eq!(values(&step(&mut cache, 7.)?)?, [0., 1., 2., 7.]);
        Ok(())
    }

    #[test]
    fn steps_do_not_overwrite_the_tensors_of_the_first_step() -> Result<()> {
        let both = Tensor::arange(0f32, 8., &Cpu)?.reshape((1, 1, 4, 2))?;
        let mut cache = KvCache::new(10);
        let first = both.narrow(2, 0, 2)?; // contiguous, in the same storage as the rest of `both`
        let memory = cache.extended(Memory { k: first.clone(), v: first })?;
        cache.advance(memory);
        cache.truncate(1);
        let x = Tensor::full(9f32, (1, 1, 1, 2), &Cpu)?;
        let memory = cache.extended(Memory { k: x.clone(), v: x })?;
        assert_eq!(memory.k.flatten_all()?.to_vec1::<f32>()?, [0., 1., 9., 9.]);
        assert_eq!(both.flatten_all()?.to_vec1::<f32>()?, [0., 1., 2., 3., 4., 5., 6., 7.]);
        Ok(())
    }

    #[test]
    fn tracked_keys_keep_their_gradient() -> Result<()> {
        let mut cache = KvCache::new(10);
        step(&mut cache, 1.)?;
        let x = candle_core::Var::ones((1, 2, 1, 4), DType::F32, &Cpu)?;
        let tracked = Memory { k: x.as_tensor().clone(), v: x.as_tensor().clone() };
        let memory = cache.extended(tracked)?;
        cache.advance(memory);
        let memory = step(&mut cache, 3.)?;
        assert_eq!(values(&memory)?, [1., 1., 3.]);
        let gradients = memory.k.sum_all()?.backward()?;
        assert_eq!(gradients.get(&x).unwrap().sum_all()?.to_scalar::<f32>()?, 8.);
        Ok(())
    }
}
