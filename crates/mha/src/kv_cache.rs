//! Projected keys and values that are kept between calls: [`KvCache`] for the earlier tokens of a
//! decoder, [`Memory`] for an encoder's output.

use std::sync::Arc;

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
    /// `(B, S)`: the sequence in whose place in `k` and `v` the key and value of each token are
    /// stored. `None` if each is in the place of its own sequence.
    pub(crate) key_sources: Option<Arc<[u32]>>,
}

impl Memory {
    /// Keys and values in the places of their own sequences.
    pub(crate) fn new(k: Tensor, v: Tensor) -> Self {
        Self { k, v, key_sources: None }
    }

    /// The same keys and values, each in the place of its own sequence.
    ///
    /// # Errors
    /// [`Error::Candle`] if a tensor operation fails.
    pub(crate) fn gathered(&self) -> Result<Self> {
        match &self.key_sources {
            None => Ok(self.clone()),
            Some(sources) => self.gather(sources, 0..self.sequences() as u32),
        }
    }

    /// The keys and values of the sequences `batch`, copied from their sources.
    fn gather(&self, sources: &[u32], batch: impl Iterator<Item = u32>) -> Result<Self> {
        let (b, g, s, _d) = self.k.dims4()?;
        let of_sequence = |i: u32| {
            let sources = &sources[i as usize * s..][..s];
            sources.iter().zip(0..s as u32).map(|(source, token)| source * s as u32 + token)
        };
        let rows: Vec<u32> = batch.flat_map(of_sequence).collect();
        let count = rows.len() / s.max(1);
        let rows = Tensor::new(rows, self.k.device())?;
        let gather = |x: &Tensor| -> candle_core::Result<Tensor> {
            let d = x.dim(3)?;
            let tokens = x.transpose(1, 2)?.reshape((b * s, g * d))?;
            tokens.index_select(&rows, 0)?.reshape((count, s, g, d))?.transpose(1, 2)
        };
        Ok(Self::new(gather(&self.k)?, gather(&self.v)?))
    }

    /// Selects sequences in a new order: sequence `i` of the result is sequence `batch[i]`. If
    /// `batch` names all sequences in their order, or none, nothing is copied.
    ///
    /// # Errors
    /// [`Error::Candle`] for a sequence that does not exist.
    pub fn reorder(&self, batch: &[u32]) -> Result<Self> {
        if self.has_order(batch) {
            return Ok(self.clone());
        }
        self.check(batch)?;
        if batch.is_empty() {
            return Ok(Self::new(self.k.narrow(0, 0, 0)?, self.v.narrow(0, 0, 0)?));
        }
        if let Some(sources) = &self.key_sources {
            return self.gather(sources, batch.iter().copied());
        }
        let index = Tensor::new(batch, self.k.device())?;
        let reordered = |x: &Tensor| x.contiguous()?.index_select(&index, 0);
        Ok(Self::new(reordered(&self.k)?, reordered(&self.v)?))
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
        let (k, v) = (self.k.narrow(2, 0, len)?, self.v.narrow(2, 0, len)?);
        let first = |sources: &Arc<[u32]>| {
            let of_sequences = sources.chunks(self.keys().max(1));
            of_sequences.flat_map(|sources| &sources[..len]).copied().collect()
        };
        Ok(Self { k, v, key_sources: self.key_sources.as_ref().map(first) })
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
        let (prefix, tokens) = (self.gathered()?, tokens.gathered()?);
        Ok(Self::new(joined(&prefix.k, &tokens.k)?, joined(&prefix.v, &tokens.v)?))
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
    /// For each sequence, the sequence in whose place in the buffer each token is stored.
    sources: Vec<Vec<u32>>,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty cache for at most `capacity` tokens per sequence.
    pub fn new(capacity: usize) -> Self {
        Self { buffer: None, is_own: false, sources: vec![], len: 0, capacity }
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
        let Memory { k, v, .. } = self.tokens(buffer, self.len)?.gathered()?;
        Ok(Some(Memory::new(copy(&k)?, copy(&v)?)))
    }

    /// The keys and values of the first `len` tokens of a buffer. Tokens beyond those of the cache
    /// are in the places of their own sequences.
    fn tokens(&self, buffer: &Memory, len: usize) -> Result<Memory> {
        let mut memory = buffer.first(len)?;
        let all = (0..).zip(&self.sources);
        if !all.clone().all(|(own, sources)| sources.iter().all(|&source| source == own)) {
            let of_sequence = |(own, sources): (u32, &Vec<u32>)| {
                let added = std::iter::repeat_n(own, len - sources.len());
                sources.iter().copied().chain(added).collect::<Vec<_>>()
            };
            memory.key_sources = Some(all.flat_map(of_sequence).collect());
        }
        Ok(memory)
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
                self.sources.iter_mut().for_each(|sources| sources.truncate(len));
            }
        }
    }

    /// Reorders the sequences, as beam search does: sequence `i` continues the former sequence
    /// `beams[i]`. With a CPU kernel, and if the number of sequences does not change, no token is
    /// copied: sequences read the tokens that they have in common from one place.
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
        let Some(buffer) = &self.buffer else { return Ok(()) };
        if buffer.has_order(beams) {
            return Ok(());
        }
        buffer.check(beams)?;
        let reads_sources = [&buffer.k, &buffer.v].into_iter().all(ops::reads_key_sources);
        if beams.len() == buffer.sequences() && reads_sources {
            let sources = beams.iter().map(|&beam| self.sources[beam as usize].clone());
            self.sources = sources.collect();
            return Ok(());
        }
        let memory = self.tokens(buffer, buffer.keys())?.reorder(beams)?;
        self.sources = own_sources(beams.len(), self.len);
        (self.buffer, self.is_own) = (Some(Arc::new(memory)), true);
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
            let buffer = buffer.clone();
            return self.tokens(&buffer, len);
        }
        // `Linear` may return another dtype for an input that autograd tracks.
        let dtype = buffer.k.dtype();
        let new = Memory::new(new.k.to_dtype(dtype)?, new.v.to_dtype(dtype)?);
        if [&buffer.k, &buffer.v, &new.k, &new.v].into_iter().any(|x| x.track_op()) {
            let buffer = buffer.clone();
            let old = self.tokens(&buffer, len)?.gathered()?; // an in-place write has no gradient
            let append = |old: &Tensor, new: &Tensor| Tensor::cat(&[old, new], 2);
            return Ok(Memory::new(append(&old.k, &new.k)?, append(&old.v, &new.v)?));
        }
        if !self.is_own || Arc::get_mut(buffer).is_none() || buffer.keys() < total {
            let room = total.saturating_mul(2).min(capacity);
            let old = buffer.first(len)?;
            *buffer = Arc::new(Memory::new(with_room(&old.k, room)?, with_room(&old.v, room)?));
            self.is_own = true;
        }
        for (x, new) in [(&buffer.k, &new.k), (&buffer.v, &new.v)] {
            if !ops::copy_in_place(new, &x.narrow(2, len, more)?)? {
                x.slice_set(&new.contiguous()?, 2, len)?;
            }
        }
        let buffer = buffer.clone();
        self.tokens(&buffer, total)
    }

    /// Commits a step: `memory`, returned by [`Self::extended`], becomes the content of the cache.
    pub(crate) fn advance(&mut self, memory: Memory) {
        self.len = memory.keys();
        if self.len == 0 {
            return; // a step without tokens
        }
        self.sources.resize(memory.sequences(), vec![]);
        for (own, sources) in (0..).zip(&mut self.sources) {
            sources.resize(self.len, own);
        }
        let is_own = self.is_own && !memory.k.track_op() && !memory.v.track_op();
        if !is_own && memory.key_sources.is_none() {
            self.sources = own_sources(memory.sequences(), self.len);
            (self.buffer, self.is_own) = (Some(Arc::new(memory)), false);
        }
    }
}

/// The sources of `len` tokens of each sequence, each in the place of its own sequence.
fn own_sources(sequences: usize, len: usize) -> Vec<Vec<u32>> {
    (0..sequences as u32).map(|own| vec![own; len]).collect()
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
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::{
        AttentionConfig, CausalSelfAttention, MultiHeadAttention, testing::max_difference,
    };

    fn step(cache: &mut KvCache, value: f32) -> Result<Memory> {
        let x = Tensor::full(value, (1, 2, 1, 4), &Cpu)?;
        let memory = cache.extended(Memory::new(x.clone(), x))?;
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
            Ok(Memory::new(heads.narrow(1, 1, 1)?, heads.narrow(1, 2, 1)?))
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
            let memory = cache.extended(Memory::new(x.clone(), x))?;
            cache.advance(memory.clone());
            rows(&memory.gathered()?)
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
            assert_eq!(address(&cache)? == start, i < 5, "{i}");
            if i == 5 {
                clone = Some((cache.clone(), expected.clone()));
            }
        }
        let (mut clone, mut expected) = clone.unwrap();
        assert_eq!(append(&mut clone, &mut expected, 300)?, expected);
        Ok(())
    }

    /// Steps that read shared tokens equal steps of a cache in which each sequence has its own.
    #[test]
    fn attention_reads_the_tokens_of_reordered_sequences() -> Result<()> {
        let config = AttentionConfig { num_key_value_heads: 2, ..AttentionConfig::new(24, 4) };
        let tracked = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
        let tensors = MultiHeadAttention::new(&config, tracked)?.tensors()?;
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, tensor.detach())).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
        let attention = CausalSelfAttention::new(&config, vb)?;
        let random = |tokens: usize| Tensor::randn(0f32, 1., (3, tokens, 24), &Cpu);
        let (mut cache, mut copied) = (KvCache::new(40), KvCache::new(40));
        for (tokens, beams) in [(3, [1u32, 1, 0]), (1, [2, 0, 0]), (2, [0, 1, 2]), (1, [1, 1, 1])] {
            let x = random(tokens)?;
            let got = attention.step(&x, &mut cache)?;
            assert_eq!(max_difference(&got, &attention.step(&x, &mut copied)?)?, 0.0);
            for cache in [&mut cache, &mut copied] {
                cache.reorder(&beams)?;
            }
            let memory = copied.to_memory()?.expect("tokens");
            assert!(memory.key_sources.is_none());
            copied.sources = own_sources(3, copied.len);
            copied.buffer = Some(Arc::new(memory));
            copied.is_own = false;
        }
        let shared = cache.tokens(cache.buffer.as_ref().expect("tokens"), cache.len)?;
        assert!(shared.key_sources.is_some() && copied.len() == 7);
        let x = random(1)?;
        let mut of_two = cache.clone();
        of_two.reorder(&[2, 0])?;
        let two = x.narrow(0, 0, 2)?;
        let got = attention.step(&two, &mut of_two)?;
        copied.reorder(&[2, 0])?;
        assert_eq!(max_difference(&got, &attention.step(&two, &mut copied)?)?, 0.0);
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
        cache.extended(Memory::new(x.clone(), x))?; // without `advance`
        assert_eq!(values(&step(&mut cache, 7.)?)?, [0., 1., 2., 7.]);
        Ok(())
    }

    #[test]
    fn steps_do_not_overwrite_the_tensors_of_the_first_step() -> Result<()> {
        let both = Tensor::arange(0f32, 8., &Cpu)?.reshape((1, 1, 4, 2))?;
        let mut cache = KvCache::new(10);
        let first = both.narrow(2, 0, 2)?; // contiguous, in the same storage as the rest of `both`
        let memory = cache.extended(Memory::new(first.clone(), first))?;
        cache.advance(memory);
        cache.truncate(1);
        let x = Tensor::full(9f32, (1, 1, 1, 2), &Cpu)?;
        let memory = cache.extended(Memory::new(x.clone(), x))?;
        assert_eq!(memory.k.flatten_all()?.to_vec1::<f32>()?, [0., 1., 9., 9.]);
        assert_eq!(both.flatten_all()?.to_vec1::<f32>()?, [0., 1., 2., 3., 4., 5., 6., 7.]);
        Ok(())
    }

    #[test]
    fn tracked_keys_keep_their_gradient() -> Result<()> {
        let mut cache = KvCache::new(10);
        step(&mut cache, 1.)?;
        let x = candle_core::Var::ones((1, 2, 1, 4), DType::F32, &Cpu)?;
        let tracked = Memory::new(x.as_tensor().clone(), x.as_tensor().clone());
        let memory = cache.extended(tracked)?;
        cache.advance(memory);
        let memory = step(&mut cache, 3.)?;
        assert_eq!(values(&memory)?, [1., 1., 3.]);
        let gradients = memory.k.sum_all()?.backward()?;
        assert_eq!(gradients.get(&x).unwrap().sum_all()?.to_scalar::<f32>()?, 8.);
        Ok(())
    }
}
