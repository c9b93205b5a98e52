//! The thread that computes: it joins sequences of waiting requests with equal [`Key`]s into one
//! batch, computes the batch, and answers the requests whose sequences are done.
//!
//! A batch is computed as soon as the engine is free; with [`Limits::batch_delay`], a batch that is
//! not full waits up to that time. A batch has no padding, so that sequences of
//! different lengths share a batch at no extra cost. On a CPU with AVX2, except in f16, the values
//! of a sequence have the same bits in every batch; see `docs/numerics.md`.

mod queue;

use std::{
    any::Any,
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use encoder::Distinct;
use tokio::sync::{mpsc, oneshot};

use queue::{Batch, Call, Item, Queue, SpeedKey, UntypedTarget};
pub use queue::{Compute, Key, KeyKind, Sequence, Target, token_count};

use crate::{
    Limits,
    failure::{Failure, Kind},
    metrics::{Metrics, Stage},
};

/// Weight of earlier batches in the exponential moving average of a speed.
const DECAY: f64 = 0.8;

/// The longest time after which a refused request should be sent again.
const MAX_RETRY: Duration = Duration::from_secs(300);

/// The handle of the engine's thread. The thread ends when the handle is dropped.
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    limits: Limits,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct State {
    queue: Queue,
    /// Tokens and seconds of the last batches of each key: sums in which earlier batches have less
    /// weight ([`DECAY`]).
    speeds: HashMap<SpeedKey, (f64, f64)>,
    /// When the next refused request should be sent again.
    next_retry: Option<Instant>,
    is_closed: bool,
}

impl Engine {
    pub fn start(limits: Limits, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let shared =
            Arc::new(Shared { state: Mutex::default(), wake: Condvar::new(), limits, metrics });
        let shared_of_thread = shared.clone();
        thread::Builder::new().name("engine".to_string()).spawn(move || shared_of_thread.run())?;
        Ok(Self { shared })
    }

    /// Computes sequences, together with those of other requests. Equal sequences are computed once.
    ///
    /// If the future is dropped, the sequences that are not computed yet are removed.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if the request would wait too long; [`Kind::Internal`] if the
    /// computation panics; the errors of [`Compute::compute`].
    pub async fn compute<V: Clone + 'static>(
        &self,
        target: Target<V>,
        sequences: Vec<Sequence>,
    ) -> Result<Vec<V>, Failure> {
        if sequences.is_empty() {
            return Ok(vec![]);
        }
        let count = sequences.len();
        let key = |x: &Sequence| (x.tokens.clone(), x.prompt);
        let mut distinct = Distinct::by_key(sequences, key);
        let sequences = std::mem::take(&mut distinct.items);
        let repeated = self.shared.metrics.repeated(target.untyped.key.model);
        repeated.inc_by((count - sequences.len()) as u64);
        let tokens = token_count(&sequences);
        let start = Instant::now();
        let (reply, received) = oneshot::channel();
        {
            let mut state = self.shared.admit(tokens)?;
            state.queue.push(target.untyped, sequences, reply);
            self.shared.set_queue_metrics(&state);
        }
        self.shared.wake.notify_one();
        let values = received.await.unwrap_or_else(|_| Err(stop_failure()));
        self.observe(start);
        let typed = |values: Box<dyn Any + Send>| {
            *values.downcast().expect("the computation of a target has the target's type of values")
        };
        Ok(distinct.expand(values?.into_iter().map(typed).collect()))
    }

    /// Copies measured speeds to models that are loaded again. Each pair has the number of an old
    /// model and the number of the model that replaces it. The speeds of models in no pair are
    /// removed.
    pub fn inherit_speeds(&self, pairs: &[(u64, u64)]) {
        let speeds = &mut self.shared.lock().speeds;
        // Requests in progress still use the old models.
        speeds.retain(|key, _| pairs.iter().any(|&(old, _)| old == key.model));
        for &(old, model) in pairs {
            for is_call in [false, true] {
                if let Some(&speed) = speeds.get(&SpeedKey { model: old, is_call }) {
                    speeds.insert(SpeedKey { model, is_call }, speed);
                }
            }
        }
    }

    /// Seconds after which a request of the average size should be sent again.
    pub fn retry_after(&self) -> u64 {
        let mut state = self.shared.lock();
        let wait: f64 = state.waits(usize::MAX).sum();
        let one = wait / state.queue.len().max(1) as f64;
        self.shared.retry_after(&mut state, one, one)
    }

    /// How long the oldest request in the queue has waited; 0 if the queue is empty.
    pub fn oldest_wait(&self) -> Duration {
        self.shared.lock().queue.oldest().map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn observe(&self, start: Instant) {
        self.shared.metrics.stage(Stage::Engine).observe(start.elapsed().as_secs_f64());
    }

    /// Calls `compute` for each input, on the thread of the engine, between the batches of other
    /// requests. Each input comes with its estimated number of tokens.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if the request would wait too long; [`Kind::Internal`] if `compute`
    /// panics; the first error of `compute`.
    pub async fn map<I: Send + 'static, T: Send + 'static>(
        &self,
        model: u64,
        inputs: Vec<(usize, I)>,
        compute: impl Fn(I) -> Result<T, Failure> + Send + Sync + 'static,
    ) -> Result<Vec<T>, Failure> {
        let start = Instant::now();
        let count = inputs.len();
        let compute = Arc::new(compute);
        let (send, mut results) = mpsc::unbounded_channel();
        let total = inputs.iter().map(|(tokens, _)| tokens).sum();
        let call = |(index, (tokens, input)): (usize, (usize, I))| {
            let send = send.clone();
            let compute = compute.clone();
            let run = move || {
                if !send.is_closed() {
                    let result = catch_unwind(AssertUnwindSafe(|| compute(input)))
                        .unwrap_or_else(|panic| Err(panic_failure(&*panic)));
                    send.send((index, result)).ok(); // the client may be gone
                }
            };
            Call { tokens, run: Box::new(run) }
        };
        let calls = inputs.into_iter().enumerate().map(call).collect();
        let waiting = send.clone();
        drop(send);
        if count > 0 {
            let mut state = self.shared.admit(total)?;
            state.queue.push_calls(model, calls, Box::new(move || waiting.is_closed()));
            self.shared.set_queue_metrics(&state);
            drop(state);
            self.shared.wake.notify_one();
        }
        let mut all: Vec<Option<T>> = (0..count).map(|_| None).collect();
        for _ in 0..count {
            let (index, result) = results.recv().await.ok_or_else(stop_failure)?;
            match result {
                Ok(result) => all[index] = Some(result),
                Err(failure) => {
                    self.observe(start);
                    return Err(failure);
                }
            }
        }
        self.observe(start);
        Ok(all.into_iter().flatten().collect())
    }
}

impl State {
    /// For each request that somebody waits for: the estimated seconds for which a new request of
    /// `tokens` tokens waits for it.
    fn waits(&self, tokens: usize) -> impl Iterator<Item = f64> {
        self.queue.ahead(tokens).map(|(key, tokens)| {
            let speed = self.speeds.get(&key);
            speed.map_or(0.0, |(computed, seconds)| tokens as f64 * seconds / computed)
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state to add a request of `tokens` tokens.
    ///
    /// # Errors
    /// [`Kind::Overloaded`] if the estimated wait is longer than [`Limits::max_wait`].
    fn admit(&self, tokens: usize) -> Result<MutexGuard<'_, State>, Failure> {
        let mut state = self.lock();
        let wait: f64 = state.waits(tokens).sum();
        let max = self.limits.max_wait.as_secs_f64();
        if wait > max {
            let shown = (wait * 10.0).ceil() / 10.0; // rounded up, so that it is more than `max`
            let message = format!(
                "the request would wait {shown:.1} s: expected at most {max} s; try again later"
            );
            // The time of this request is about its share of the wait.
            let own = wait / (state.queue.len() + 1) as f64;
            let seconds = self.retry_after(&mut state, wait - max, own);
            return Err(Failure::overloaded(message, seconds));
        }
        Ok(state)
    }

    /// Seconds after which a refused request should be sent again: at least `excess`. Each refused
    /// request adds `own`, the estimated seconds of its computation, to the time of the next, so
    /// that refused requests return at the speed of the queue and not all at once.
    fn retry_after(&self, state: &mut State, excess: f64, own: f64) -> u64 {
        let now = Instant::now();
        let after = |seconds: f64| {
            now + Duration::try_from_secs_f64(seconds).unwrap_or(MAX_RETRY).min(MAX_RETRY)
        };
        let at = state.next_retry.unwrap_or(now).max(after(excess)).min(now + MAX_RETRY);
        state.next_retry = Some(at + (after(own) - now));
        (at - now).as_secs_f64().ceil().max(1.0) as u64
    }

    /// Sets the metrics of the queue.
    fn set_queue_metrics(&self, state: &State) {
        self.metrics.queue_requests.set(state.queue.len() as i64);
        self.metrics.queue_tokens.set(state.queue.tokens() as i64);
    }

    /// Computes batches until the engine is dropped.
    fn run(&self) {
        while let Some(batch) = self.next() {
            let start = Instant::now();
            let (key, tokens) = match batch {
                Batch::Sequences(target, items) => {
                    let length = |item: &Item| item.sequence.length();
                    let tokens = items.iter().map(length).sum();
                    self.metrics.batch_tokens.observe(tokens as f64);
                    self.metrics.batch_sequences.observe(items.len() as f64);
                    self.metrics.tokens(target.key.model).inc_by(tokens as u64);
                    compute(&target, items);
                    (SpeedKey { model: target.key.model, is_call: false }, tokens)
                }
                Batch::Call { model, call } => {
                    (call.run)();
                    (SpeedKey { model, is_call: true }, call.tokens)
                }
            };
            let seconds = start.elapsed().as_secs_f64();
            self.metrics.stage(Stage::Compute).observe(seconds);
            if tokens > 0 {
                let mut state = self.lock();
                let speed = state.speeds.entry(key).or_default();
                *speed = (speed.0 * DECAY + tokens as f64, speed.1 * DECAY + seconds);
            }
        }
    }

    /// Waits for the next batch; `None` after the engine is dropped.
    fn next(&self) -> Option<Batch> {
        let budget = self.limits.max_batch_tokens;
        let delay = self.limits.batch_delay;
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            let age = state.queue.oldest().map(|oldest| oldest.elapsed());
            let missing = match age {
                // If a call waits, the batch starts without delay.
                Some(age) if !state.queue.has_call() => delay.saturating_sub(age),
                _ => Duration::ZERO,
            };
            if age.is_some() && (missing.is_zero() || state.queue.tokens() >= budget) {
                let batch = state.queue.next(budget);
                self.set_queue_metrics(&state);
                if batch.is_some() {
                    return batch;
                }
                continue;
            }
            state = match age {
                None => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(_) => {
                    let waited = self.wake.wait_timeout(state, missing);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// Computes a batch. If the batch fails, each sequence is computed alone, so that only the
/// sequences at fault fail.
fn compute(target: &UntypedTarget, items: Vec<Item>) {
    let compute = |items: &[Item]| {
        let sequences: Vec<&Sequence> = items.iter().map(|item| &item.sequence).collect();
        let result = catch_unwind(AssertUnwindSafe(|| target.compute.compute_any(&sequences)));
        match result {
            Ok(values) => values.map_err(Failure::from),
            Err(panic) => Err(panic_failure(&*panic)),
        }
    };
    match compute(&items) {
        Ok(values) => {
            for (item, values) in items.iter().zip(values) {
                item.progress.finish(item.index, Ok(values));
            }
        }
        Err(failure) if items.len() == 1 => items[0].progress.finish(items[0].index, Err(failure)),
        Err(_) => {
            for item in items.chunks(1) {
                let values = compute(item).map(|mut values| values.swap_remove(0));
                item[0].progress.finish(item[0].index, values);
            }
        }
    }
}

fn stop_failure() -> Failure {
    Failure::unavailable("the server is shutting down: try again later")
}

fn panic_failure(panic: &(dyn Any + Send)) -> Failure {
    let string = panic.downcast_ref::<String>().map(String::as_str);
    let text = string.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
    tracing::error!(panic = text, "a computation panicked");
    Failure::new(Kind::Internal, "the computation panicked: this is a defect of the server")
}

#[cfg(test)]
mod tests {
    use encoder::Tokens;

    use super::*;

    /// Fails for sequences that begin with token 1, and panics for sequences that begin with
    /// token 2.
    struct Picky;

    impl Compute for Picky {
        type Values = Vec<f32>;

        fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<Vec<f32>>> {
            let values = |sequence: &&Sequence| match sequence.tokens.input_ids[0] {
                1 => Err(encoder::Error::NonFiniteOutput),
                2 => panic!("token 2"),
                id => Ok(vec![id as f32]),
            };
            sequences.iter().map(values).collect()
        }
    }

    fn sequence(id: u32) -> Sequence {
        let tokens = Tokens { input_ids: vec![id], token_type_ids: vec![0], truncated: 0 };
        Sequence { tokens, prompt: 0 }
    }

    fn target() -> Target<Vec<f32>> {
        Target::new(Key { model: 0, kind: KeyKind::Task { batch_key: 0 } }, Picky)
    }

    fn engine(limits: Limits) -> Engine {
        Engine::start(limits, Arc::default()).unwrap()
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn a_failing_sequence_does_not_affect_the_other_requests_of_its_batch() {
        let engine = engine(Limits { batch_delay: Duration::from_millis(50), ..Limits::default() });
        let request =
            |ids: &[u32]| engine.compute(target(), ids.iter().map(|&id| sequence(id)).collect());
        let all = async {
            tokio::join!(request(&[5, 6]), request(&[7, 1]), request(&[2]), request(&[8]))
        };
        let (good, fails, panics, last) = block_on(all);
        assert_eq!(good.unwrap(), [[5.0], [6.0]]);
        assert_eq!(fails.unwrap_err().kind(), Kind::Backend);
        assert_eq!(panics.unwrap_err().kind(), Kind::Internal);
        assert_eq!(last.unwrap(), [[8.0]]);
    }

    #[test]
    fn calls_do_not_wait_for_the_batch_delay() {
        let engine = engine(Limits { batch_delay: Duration::from_secs(600), ..Limits::default() });
        let double = |input: u32| Ok(2 * input);
        assert_eq!(block_on(engine.map(0, vec![(1, 3)], double)).unwrap(), [6]);
        // A call behind a batch that waits for more requests.
        let all = async {
            tokio::join!(
                engine.compute(target(), vec![sequence(5)]),
                engine.map(0, vec![(1, 4)], double)
            )
        };
        let (computed, called) = block_on(all);
        assert_eq!((computed.unwrap(), called.unwrap()), (vec![vec![5.0]], vec![8]));
    }

    #[test]
    fn calls_return_their_results_in_order_or_the_first_failure() {
        let engine = engine(Limits::default());
        let inputs = |all: &[u32]| all.iter().map(|&input| (1, input)).collect();
        let double = |input: u32| match input {
            13 | 17 => Err(Failure::new(Kind::Invalid, input)),
            _ => Ok(2 * input),
        };
        assert_eq!(block_on(engine.map(0, inputs(&[3, 1, 2]), double)).unwrap(), [6, 2, 4]);
        let failure = block_on(engine.map(0, inputs(&[3, 13, 17]), double)).unwrap_err();
        assert_eq!(failure.message(), "13");
    }

    #[test]
    fn a_request_that_would_wait_too_long_is_refused() {
        let engine = engine(Limits { max_wait: Duration::from_millis(100), ..Limits::default() });
        let slow = |input: u32| {
            thread::sleep(Duration::from_millis(100));
            Ok(input)
        };
        let inputs = || (0..3).map(|input| (10, input)).collect();
        block_on(async {
            engine.map(0, inputs(), slow).await.unwrap(); // measures 100 tokens per second
            let mut waiting = Box::pin(engine.map(0, inputs(), slow));
            let poll = std::future::poll_fn(|context| {
                std::task::Poll::Ready(waiting.as_mut().poll(context).is_ready())
            });
            assert!(!poll.await);
            let refused = engine.map(0, inputs(), slow).await.unwrap_err();
            assert_eq!(refused.kind(), Kind::Overloaded);
            assert_eq!(waiting.await.unwrap(), [0, 1, 2]);
        });
    }

    #[test]
    fn a_model_that_is_loaded_again_inherits_the_speed() {
        let engine = engine(Limits::default());
        let key = |model| SpeedKey { model, is_call: true };
        let speeds = || engine.shared.lock().speeds.clone();
        engine.shared.lock().speeds = HashMap::from([(key(0), (9.0, 1.0)), (key(1), (5.0, 1.0))]);
        engine.inherit_speeds(&[(1, 2), (7, 8)]);
        assert_eq!(speeds(), HashMap::from([(key(1), (5.0, 1.0)), (key(2), (5.0, 1.0))]));
        engine.inherit_speeds(&[(2, 3)]);
        assert_eq!(speeds(), HashMap::from([(key(2), (5.0, 1.0)), (key(3), (5.0, 1.0))]));
    }
}
