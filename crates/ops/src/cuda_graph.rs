//! Replays the kernels of small batches on a GPU as CUDA graphs.
//!
//! A forward pass of a few tokens launches about a hundred kernels of a few microseconds each.
//! Launching such a kernel takes longer than running it. When a second batch with the same sequence
//! lengths arrives, its launches are captured in a CUDA graph. For later batches of these lengths,
//! the ids are copied to the graph's input and one launch replays the graph.

use candle_core::{Device, Tensor};

use crate::Result;

/// Checks that this device can compute the operations: a GPU needs compute capability 8.0 or later.
///
/// # Errors
/// [`crate::Error::Candle`] if it cannot, or if the driver reports an error.
pub fn check_device(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        mha_kernels_cuda::check_device(device)?;
    }
    let _ = device;
    Ok(())
}

/// Makes CUDA keep freed memory for the next batch, instead of returning it to the driver after
/// each batch. Has no effect on a device that is not a GPU.
///
/// # Errors
/// [`crate::Error::Candle`] if the driver reports an error.
pub fn keep_freed_memory(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        mha_kernels_cuda::keep_memory(device)?;
    }
    let _ = device;
    Ok(())
}

/// The CUDA graphs of a model: one for each thread, list of sequence lengths and list of tokens that
/// are read. Clones of a cache share their graphs. Without a GPU the cache is empty.
#[derive(Clone, Debug, Default)]
pub struct CudaGraphCache {
    #[cfg(feature = "cuda")]
    model: std::sync::Arc<()>,
}

impl CudaGraphCache {
    /// The hidden states that `encode` computes from the ids of ragged sequences and `mask`, which
    /// depends on nothing but `offsets` and `read`, the tokens whose hidden states are read. On a GPU,
    /// a CUDA graph computes them if one was captured for these; the graph reads the tensors of its
    /// own clone of `mask`.
    ///
    /// A batch of at most 256 tokens is captured if it is the second with these sequence lengths and
    /// read tokens. The graph is used only if its result equals that of `encode`. Batches that cannot
    /// be captured are always computed by `encode`.
    ///
    /// # Shapes
    /// `ids`: `(.., N)`; `offsets`: the index of the first token of each sequence, then N; `read`:
    /// `(R,)`, `None` for all tokens; returns `(R, E)`
    /// # Errors
    /// The errors of `encode`.
    pub fn run<M, E>(
        &self,
        offsets: &[usize],
        read: Option<&[usize]>,
        ids: &Tensor,
        mask: &M,
        encode: impl Fn(&Tensor, &M) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Tensor, E>
    where
        M: Clone + 'static,
        E: std::error::Error + Send + Sync + 'static,
    {
        #[cfg(feature = "cuda")]
        if ids.device().is_cuda() {
            return self.replay_or_capture(offsets, read, ids, mask, encode);
        }
        let _ = (offsets, read);
        encode(ids, mask)
    }

    /// Number of graphs that the current thread holds for this model.
    pub fn graphs(&self) -> usize {
        #[cfg(feature = "cuda")]
        return self.count_captured();
        #[cfg(not(feature = "cuda"))]
        0
    }
}

#[cfg(feature = "cuda")]
mod graphs {
    use std::{
        any::Any,
        cell::RefCell,
        sync::{Arc, Weak},
    };

    use candle_core::Tensor;
    use mha_kernels_cuda::Graph;

    use super::CudaGraphCache;
    use crate::Result;

    /// Maximum number of tokens of a captured batch. The kernels of larger batches run for longer
    /// than a launch takes.
    const MAX_TOKENS: usize = 256;

    /// Maximum number of entries per thread.
    const MAX_ENTRIES: usize = 128;

    /// Once the thread has [`MAX_ENTRIES`], a new entry evicts one of them: if at least this many
    /// entries have no graph, the least recently used of those; otherwise the least recently used
    /// of all.
    const MAX_WITHOUT_GRAPH: usize = MAX_ENTRIES / 4;

    thread_local! {
        /// The entries of this thread, least recently used first.
        static ENTRIES: RefCell<Vec<Entry>> = const { RefCell::new(vec![]) };
    }

    /// A model, and the sequence lengths and read tokens of a batch, with the state of the batch's
    /// graph.
    struct Entry {
        model: Weak<()>,
        offsets: Vec<usize>,
        read: Option<Vec<usize>>,
        state: State,
    }

    enum State {
        SeenOnce,
        Captured(Captured),
        /// A capture or a replay failed, or the graph's result differed from that of `encode`.
        Failed,
    }

    /// A graph with the tensors that the graph reads and writes, except the model's weights.
    struct Captured {
        graph: Graph,
        ids: Tensor,
        hidden: Tensor,
        _mask: Box<dyn Any>,
    }

    impl Captured {
        /// Captures the launches of `encode`.
        ///
        /// # Errors
        /// [`crate::Error::Candle`] if the launches cannot be captured, if autograd tracks the
        /// tensors, or if the graph does not compute `expected` from `ids`.
        fn new<M: Clone + 'static, E: std::error::Error + Send + Sync + 'static>(
            ids: &Tensor,
            mask: &M,
            expected: &Tensor,
            encode: impl Fn(&Tensor, &M) -> std::result::Result<Tensor, E>,
        ) -> Result<Self> {
            if expected.track_op() {
                return Err(candle_core::Error::msg("a CUDA graph has no gradient").into());
            }
            // Capture with ids of 0, so that the comparison below fails if the graph depends on the
            // ids that it was captured with.
            let (graph_ids, hidden) = (ids.zeros_like()?, expected.zeros_like()?);
            let work = || {
                let computed = encode(&graph_ids, mask).map_err(candle_core::Error::wrap)?;
                hidden.slice_set(&computed, 0, 0)
            };
            let graph = Graph::record(ids.device().as_cuda_device()?, work)?;
            let captured = Self { graph, ids: graph_ids, hidden, _mask: Box::new(mask.clone()) };
            if are_equal(&captured.replay(ids)?, expected)? {
                Ok(captured)
            } else {
                Err(candle_core::Error::msg("the CUDA graph's result differs from that of encode")
                    .into())
            }
        }

        fn replay(&self, ids: &Tensor) -> Result<Tensor> {
            self.ids.slice_set(ids, 0, 0)?;
            self.graph.launch()?;
            Ok(self.hidden.copy()?)
        }
    }

    impl CudaGraphCache {
        pub(super) fn replay_or_capture<M, E>(
            &self,
            offsets: &[usize],
            read: Option<&[usize]>,
            ids: &Tensor,
            mask: &M,
            encode: impl Fn(&Tensor, &M) -> std::result::Result<Tensor, E>,
        ) -> std::result::Result<Tensor, E>
        where
            M: Clone + 'static,
            E: std::error::Error + Send + Sync + 'static,
        {
            if offsets.last().is_some_and(|&tokens| tokens > MAX_TOKENS) {
                return encode(ids, mask);
            }
            // `encode` may itself use the entries, so they are not borrowed while it runs.
            let Some(mut entry) = self.take_or_add(offsets, read) else { return encode(ids, mask) };
            let replayed = match &entry.state {
                State::Captured(captured) => captured.replay(ids).ok(),
                State::SeenOnce | State::Failed => None,
            };
            let hidden = match replayed {
                Some(hidden) => Ok(hidden),
                None => encode(ids, mask).inspect(|hidden| {
                    entry.state = match entry.state {
                        State::SeenOnce => Captured::new(ids, mask, hidden, &encode)
                            .map_or(State::Failed, State::Captured),
                        _ => State::Failed,
                    }
                }),
            };
            ENTRIES.with_borrow_mut(|entries| entries.push(entry));
            hidden
        }

        /// Removes the entry of a batch and returns it. If there is none, adds one and returns
        /// `None`; if there already are [`MAX_ENTRIES`], one is evicted, see [`MAX_WITHOUT_GRAPH`].
        fn take_or_add(&self, offsets: &[usize], read: Option<&[usize]>) -> Option<Entry> {
            ENTRIES.with_borrow_mut(|entries| {
                entries.retain(|entry| entry.model.strong_count() > 0);
                let is_same_batch = |entry: &Entry| {
                    self.owns(entry) && entry.offsets == offsets && entry.read.as_deref() == read
                };
                if let Some(i) = entries.iter().position(is_same_batch) {
                    return Some(entries.remove(i));
                }
                if entries.len() >= MAX_ENTRIES {
                    let has_graph = |entry: &Entry| matches!(entry.state, State::Captured(_));
                    let without: Vec<usize> =
                        (0..entries.len()).filter(|&i| !has_graph(&entries[i])).collect();
                    let evicted = if without.len() >= MAX_WITHOUT_GRAPH { without[0] } else { 0 };
                    entries.remove(evicted);
                }
                let (model, offsets) = (Arc::downgrade(&self.model), offsets.to_vec());
                let read = read.map(<[usize]>::to_vec);
                entries.push(Entry { model, offsets, read, state: State::SeenOnce });
                None
            })
        }

        fn owns(&self, entry: &Entry) -> bool {
            std::ptr::eq(entry.model.as_ptr(), Arc::as_ptr(&self.model))
        }

        pub(super) fn count_captured(&self) -> usize {
            let is_captured =
                |entry: &&Entry| self.owns(entry) && matches!(entry.state, State::Captured(_));
            ENTRIES.with_borrow(|entries| entries.iter().filter(is_captured).count())
        }
    }

    /// Whether all elements are equal, and none is NaN.
    fn are_equal(x: &Tensor, y: &Tensor) -> Result<bool> {
        let same = x.eq(y)?.flatten_all()?.min(0)?;
        Ok(same.to_scalar::<u8>()? == 1)
    }
}
