//! Small batches on a GPU as one launch.
//!
//! A few tokens are a hundred kernels of a few microseconds each, which a CPU takes longer to launch
//! than a GPU to run. So what a model does for sequences of some lengths is recorded when these come a
//! second time, and from then on asked for as a whole, with other ids.

use std::{
    cell::RefCell,
    sync::{Arc, Weak},
};

use candle_core::Tensor;
use mha::AttentionMask;
use mha_kernels_cuda::Graph;

use crate::{PackedBatch, Result};

/// Tokens beyond which a GPU is busy for longer than it takes to launch the next kernel.
const TOKENS: usize = 256;

/// Lengths that a thread has recordings for.
const RECORDINGS: usize = 128;

thread_local! {
    /// The one that was asked for last is the last.
    static RECORDINGS_HERE: RefCell<Vec<Recording>> = const { RefCell::new(vec![]) };
}

struct Recording {
    model: Weak<()>,
    /// Of the batch that it is for.
    offsets: Vec<usize>,
    state: State,
}

enum State {
    SeenOnce,
    Recorded(Recorded),
    /// It could not be recorded, or gave other numbers.
    Refused,
}

/// What a graph reads and writes, besides the model.
struct Recorded {
    graph: Graph,
    ids: Tensor,
    hidden: Tensor,
    _mask: AttentionMask,
}

impl Recorded {
    /// # Errors
    /// What cannot be recorded, as what gradients follow, and what gives other numbers than the
    /// `expected` ones of `ids`.
    fn new(
        ids: &Tensor,
        mask: &AttentionMask,
        expected: &Tensor,
        encode: impl Fn(&Tensor, &AttentionMask) -> Result<Tensor>,
    ) -> Result<Self> {
        if expected.track_op() {
            return Err(candle_core::Error::msg("a recording knows no gradient").into());
        }
        // Other ids than these, so that what is recorded cannot depend on them.
        let (own, hidden) = (ids.zeros_like()?, expected.zeros_like()?);
        let work = || {
            let computed = encode(&own, mask).map_err(candle_core::Error::wrap)?;
            hidden.slice_set(&computed, 0, 0)
        };
        let graph = Graph::record(ids.device().as_cuda_device()?, work)?;
        let recorded = Self { graph, ids: own, hidden, _mask: mask.clone() };
        match equal(&recorded.run(ids)?, expected)? {
            true => Ok(recorded),
            false => Err(candle_core::Error::msg("a recording of other numbers").into()),
        }
    }

    fn run(&self, ids: &Tensor) -> Result<Tensor> {
        self.ids.slice_set(ids, 0, 0)?;
        self.graph.launch()?;
        Ok(self.hidden.copy()?)
    }
}

/// A model's, whose clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recordings {
    model: Arc<()>,
}

impl Recordings {
    /// What `encode` makes of the ids `(3, 1, N)` of a batch, `(N, E)`.
    pub(crate) fn encode(
        &self,
        batch: &PackedBatch,
        ids: &Tensor,
        encode: impl Fn(&Tensor, &AttentionMask) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mask = batch.mask()?;
        let at_once = || encode(ids, &mask);
        if batch.tokens() > TOKENS {
            return at_once();
        }
        RECORDINGS_HERE.with_borrow_mut(|all| {
            all.retain(|recording| recording.model.strong_count() > 0);
            let Some(i) = all.iter().position(|x| self.is_of(x) && x.offsets == batch.offsets())
            else {
                if all.len() == RECORDINGS {
                    // Lengths that came once, before what was recorded.
                    let once = |recording: &Recording| matches!(recording.state, State::SeenOnce);
                    all.remove(all.iter().position(once).unwrap_or(0));
                }
                let (model, offsets) = (Arc::downgrade(&self.model), batch.offsets().to_vec());
                all.push(Recording { model, offsets, state: State::SeenOnce });
                return at_once();
            };
            let mut recording = all.remove(i);
            let hidden = match &recording.state {
                State::Recorded(recorded) => recorded.run(ids).ok(),
                State::SeenOnce | State::Refused => None,
            };
            let hidden = match hidden {
                Some(hidden) => Ok(hidden),
                None => at_once().inspect(|hidden| {
                    recording.state = match recording.state {
                        State::SeenOnce => Recorded::new(ids, &mask, hidden, &encode)
                            .map_or(State::Refused, State::Recorded),
                        _ => State::Refused,
                    }
                }),
            };
            all.push(recording);
            hidden
        })
    }

    fn is_of(&self, recording: &Recording) -> bool {
        std::ptr::eq(recording.model.as_ptr(), Arc::as_ptr(&self.model))
    }

    /// Recordings of this model that this thread has.
    pub(crate) fn len(&self) -> usize {
        let recorded = |x: &&Recording| self.is_of(x) && matches!(x.state, State::Recorded(_));
        RECORDINGS_HERE.with_borrow(|all| all.iter().filter(recorded).count())
    }
}

/// Whether all numbers are equal, and none NaN.
fn equal(x: &Tensor, y: &Tensor) -> Result<bool> {
    let same = x.eq(y)?.flatten_all()?.min(0)?;
    Ok(same.to_scalar::<u8>()? == 1)
}
