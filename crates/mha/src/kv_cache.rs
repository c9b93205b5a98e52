//! Keys and values that stay from one call to the next: those of earlier tokens, and those of an
//! encoder's output.

use candle_core::Tensor;

use crate::{Error, Result};

/// Keys and values, projected once: what queries attend to.
///
/// # Shapes
/// `k`, `v`: `(B, H, S, D)`
#[derive(Clone, Debug)]
pub struct Memory {
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
}

impl Memory {
    /// The same for other sequences: `batch[i]` says whose keys and values sequence `i` gets.
    ///
    /// # Errors
    /// candle's, for a sequence that is not there.
    pub fn reorder(&self, batch: &[u32]) -> Result<Self> {
        let index = Tensor::new(batch, self.k.device())?;
        let reordered = |x: &Tensor| x.contiguous()?.index_select(&index, 0);
        Ok(Self { k: reordered(&self.k)?, v: reordered(&self.v)? })
    }

    /// S, the number of keys.
    pub fn keys(&self) -> usize {
        self.k.dims()[2]
    }
}

/// The keys and values of the tokens so far, for [`crate::CausalSelfAttention::step`].
///
/// It has a capacity, and a step that exceeds it is an error that changes nothing. Copies are
/// independent: a step on one does not show in the other.
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
///     "cache is full: expected at most 4 tokens, got 3 and 2 more; \
///      reset it, or give it a larger capacity"
/// );
/// assert_eq!(cache.len(), 3);
/// # Ok::<(), mha::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct KvCache {
    memory: Option<Memory>,
    capacity: usize,
}

impl KvCache {
    /// An empty cache for at most `capacity` tokens of each sequence.
    pub fn new(capacity: usize) -> Self {
        Self { memory: None, capacity }
    }

    /// The number of tokens it holds.
    pub fn len(&self) -> usize {
        self.memory.as_ref().map_or(0, Memory::keys)
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most tokens it holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.memory = None;
    }

    /// Forgets the tokens from `len` on; does nothing if it holds no more than that.
    ///
    /// # Errors
    /// candle's.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len == 0 {
            self.reset();
        }
        if let Some(Memory { k, v }) = &mut self.memory
            && len < k.dim(2)?
        {
            (*k, *v) = (k.narrow(2, 0, len)?, v.narrow(2, 0, len)?);
        }
        Ok(())
    }

    /// Makes sequence `i` continue what was sequence `beams[i]`, as beam search needs.
    ///
    /// # Errors
    /// candle's, for a sequence that is not there.
    pub fn reorder(&mut self, beams: &[u32]) -> Result<()> {
        if let Some(memory) = &mut self.memory {
            *memory = memory.reorder(beams)?;
        }
        Ok(())
    }

    /// What it holds with `new` after it; it is unchanged until [`Self::store`].
    pub(crate) fn extended(&self, new: Memory) -> Result<Memory> {
        let (capacity, len, more) = (self.capacity, self.len(), new.keys());
        if len + more > capacity {
            return Err(Error::CacheFull { capacity, len, more });
        }
        let Some(Memory { k, v }) = &self.memory else {
            return Ok(new);
        };
        if k.dim(0)? != new.k.dim(0)? {
            return Err(Error::Shape {
                argument: "x",
                expected: format!("a batch of {}, as the cache holds", k.dim(0)?),
                got: new.k.dims().to_vec(),
            });
        }
        // What autograd follows may come in another dtype.
        let after = |x: &Tensor, new: &Tensor| Tensor::cat(&[x, &new.to_dtype(x.dtype())?], 2);
        Ok(Memory { k: after(k, &new.k)?, v: after(v, &new.v)? })
    }

    pub(crate) fn store(&mut self, memory: Memory) {
        self.memory = Some(memory);
    }
}
