//! The requests that wait for the engine, and the choice of the next batch.

use std::{
    any::Any,
    collections::VecDeque,
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use encoder::{TextRole, Tokens};
use tokio::sync::oneshot;

use crate::failure::Failure;

/// The tokens of a text, or of a pair of texts.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub tokens: Tokens,
    /// Number of tokens that belong to the prompt.
    pub prompt: usize,
}

impl Sequence {
    /// Number of tokens.
    pub fn length(&self) -> usize {
        self.tokens.input_ids.len()
    }
}

/// The number of tokens of all sequences.
pub fn token_count(sequences: &[Sequence]) -> usize {
    sequences.iter().map(Sequence::length).sum()
}

/// A computation on ragged sequences.
pub trait Compute: Send + Sync {
    /// The values of a sequence.
    type Values: Send + 'static;

    /// The values of each sequence.
    ///
    /// # Errors
    /// The error of a sequence; then each sequence is computed alone.
    fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<Self::Values>>;
}

/// The values of a sequence, of the type [`Compute::Values`] of its request.
pub type AnyValues = Box<dyn Any + Send>;

/// A [`Compute`] without its type of values.
pub trait ComputeAny: Send + Sync {
    fn compute_any(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<AnyValues>>;
}

impl<C: Compute> ComputeAny for C {
    fn compute_any(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<AnyValues>> {
        let values = self.compute(sequences)?.into_iter();
        Ok(values.map(|values| Box::new(values) as AnyValues).collect())
    }
}

/// The computation of a request's sequences to values of type `V`.
pub struct Target<V> {
    pub untyped: UntypedTarget,
    values: PhantomData<fn() -> V>,
}

impl<V: Send + 'static> Target<V> {
    pub fn new(key: Key, compute: impl Compute<Values = V> + 'static) -> Self {
        Self { untyped: UntypedTarget { key, compute: Arc::new(compute) }, values: PhantomData }
    }
}

/// A [`Target`] without its type of values. Sequences with equal keys are computed together.
#[derive(Clone)]
pub struct UntypedTarget {
    pub key: Key,
    pub compute: Arc<dyn ComputeAny>,
}

/// Key of a measured speed: a model, and whether the speed is that of its batches or of its
/// [`Call`]s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpeedKey {
    pub model: u64,
    pub is_call: bool,
}

/// A model and the settings of the computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The number of the loaded model; see [`crate::model::Model`].
    pub model: u64,
    pub kind: KeyKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// Rows of an embedding model of a dimension for a task,
    /// [`EmbeddingModel::TASK`](crate::embedding_model::EmbeddingModel::TASK). `normalize`: the
    /// request adds the normalisation (true), removes it (false), or keeps that of the model's
    /// files (`None`).
    Rows { task: &'static str, dimension: usize, normalize: Option<bool>, role: TextRole },
    /// The last hidden states.
    States,
    /// The values of the model's task, with this [`encoder::Pipeline::batch_key`].
    Task { batch_key: usize },
}

/// Receives the values of each sequence of a request.
pub type Reply = oneshot::Sender<Result<Vec<AnyValues>, Failure>>;

/// The results of a request whose sequences may be in several batches.
pub struct Progress(Mutex<Inner>);

struct Inner {
    values: Vec<Option<AnyValues>>,
    /// Number of sequences that have no values yet.
    left: usize,
    /// `None` after the request is answered.
    reply: Option<Reply>,
}

impl Progress {
    fn new(sequences: usize, reply: Reply) -> Self {
        let values = (0..sequences).map(|_| None).collect();
        Self(Mutex::new(Inner { values, left: sequences, reply: Some(reply) }))
    }

    /// Whether nobody waits for the results: the client is gone, or a sequence has failed.
    fn is_abandoned(&self) -> bool {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.reply.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// Stores the values of a sequence. The last sequence, or a failure, answers the request.
    pub fn finish(&self, index: usize, values: Result<AnyValues, Failure>) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match values {
            Ok(values) => {
                inner.values[index] = Some(values);
                inner.left -= 1;
                if inner.left > 0 {
                    return;
                }
                Ok(std::mem::take(&mut inner.values).into_iter().flatten().collect())
            }
            Err(failure) => Err(failure),
        };
        if let Some(reply) = inner.reply.take() {
            reply.send(result).ok(); // the client may be gone
        }
    }
}

/// A sequence of a request, in the queue or in a batch.
pub struct Item {
    pub sequence: Sequence,
    /// The index of the sequence in its request.
    pub index: usize,
    pub progress: Arc<Progress>,
}

/// A computation that is not batched with others.
pub struct Call {
    /// Estimated number of tokens.
    pub tokens: usize,
    /// Runs the computation and sends the result.
    pub run: Box<dyn FnOnce() + Send>,
}

/// Whether nobody waits for the results of calls.
pub type IsAbandoned = Box<dyn Fn() -> bool + Send>;

/// The next computation.
pub enum Batch {
    Sequences(UntypedTarget, Vec<Item>),
    Call { model: u64, call: Call },
}

struct Request {
    work: Work,
    /// Number of tokens that wait.
    tokens: usize,
    since: Instant,
}

enum Work {
    Sequences { target: UntypedTarget, items: VecDeque<Item> },
    Calls { model: u64, calls: VecDeque<Call>, is_abandoned: IsAbandoned },
}

impl Request {
    fn is_done(&self) -> bool {
        match &self.work {
            Work::Sequences { items, .. } => {
                items.front().is_none_or(|item| item.progress.is_abandoned())
            }
            Work::Calls { calls, is_abandoned, .. } => calls.is_empty() || is_abandoned(),
        }
    }

    /// Number of tokens of the next sequence or call.
    fn next_tokens(&self) -> usize {
        match &self.work {
            Work::Sequences { items, .. } => items.front().map_or(0, |item| item.sequence.length()),
            Work::Calls { calls, .. } => calls.front().map_or(0, |call| call.tokens),
        }
    }

    fn speed_key(&self) -> SpeedKey {
        match &self.work {
            Work::Sequences { target, .. } => SpeedKey { model: target.key.model, is_call: false },
            Work::Calls { model, .. } => SpeedKey { model: *model, is_call: true },
        }
    }
}

/// Requests in the order in which they are served. When a part of a request is taken for a batch,
/// the request moves to the end of the queue, behind the requests that arrive while the batch is
/// computed, so that a request of many texts and requests of few texts advance together.
#[derive(Default)]
pub struct Queue {
    requests: VecDeque<Request>,
    /// The requests that the last batch has served in part. They follow `requests`.
    served: VecDeque<Request>,
    /// Number of tokens that wait.
    tokens: usize,
}

impl Queue {
    pub fn push(&mut self, target: UntypedTarget, sequences: Vec<Sequence>, reply: Reply) {
        let progress = Arc::new(Progress::new(sequences.len(), reply));
        let tokens = token_count(&sequences);
        let item = |(index, sequence)| Item { sequence, index, progress: progress.clone() };
        let items = sequences.into_iter().enumerate().map(item).collect();
        self.add(Work::Sequences { target, items }, tokens);
    }

    pub fn push_calls(&mut self, model: u64, calls: VecDeque<Call>, is_abandoned: IsAbandoned) {
        let tokens = calls.iter().map(|call| call.tokens).sum();
        self.add(Work::Calls { model, calls, is_abandoned }, tokens);
    }

    fn add(&mut self, work: Work, tokens: usize) {
        self.tokens += tokens;
        self.requests.push_back(Request { work, tokens, since: Instant::now() });
    }

    /// Number of requests that wait.
    pub fn len(&self) -> usize {
        self.requests.len() + self.served.len()
    }

    /// All requests that wait.
    fn waiting(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().chain(&self.served)
    }

    /// Number of tokens that wait.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// When the oldest request arrived, if there is one.
    pub fn oldest(&self) -> Option<Instant> {
        self.waiting().map(|request| request.since).min()
    }

    /// Whether a [`Call`] waits.
    pub fn has_call(&self) -> bool {
        self.waiting().any(|request| matches!(request.work, Work::Calls { .. }))
    }

    /// For each request that somebody waits for: its speed key, and an estimate of how many of its
    /// tokens are computed before a new request of `tokens` tokens is done. Requests take turns, so
    /// the estimate is `tokens`, but at least the tokens of the waiting request's next sequence or
    /// call, and at most all its tokens.
    pub fn ahead(&self, tokens: usize) -> impl Iterator<Item = (SpeedKey, usize)> + '_ {
        let waiting = self.waiting().filter(|request| !request.is_done());
        waiting.map(move |request| {
            let ahead = request.tokens.min(tokens.max(request.next_tokens()));
            (request.speed_key(), ahead)
        })
    }

    /// Removes the next batch of at most `budget` tokens; a longer sequence is a batch of its own.
    /// Requests that nobody waits for are dropped.
    ///
    /// The batch has the key of the request at the front. Each pass over the queue takes one
    /// sequence from every request with this key.
    pub fn next(&mut self, budget: usize) -> Option<Batch> {
        self.requests.append(&mut self.served);
        self.requests.retain(|request| {
            let done = request.is_done();
            self.tokens -= if done { request.tokens } else { 0 };
            !done
        });
        let mut first = self.requests.pop_front()?;
        let key = match &mut first.work {
            Work::Calls { model, calls, .. } => {
                let call = calls.pop_front().expect("the front request has a call");
                let model = *model;
                first.tokens -= call.tokens;
                self.tokens -= call.tokens;
                if !calls.is_empty() {
                    self.served.push_back(first);
                }
                return Some(Batch::Call { model, call });
            }
            Work::Sequences { target, .. } => target.key,
        };
        self.requests.push_front(first);
        let mut batch = vec![];
        let mut tokens = 0;
        let mut target = None;
        let mut served = vec![false; self.requests.len()];
        let mut took = true;
        'passes: while std::mem::take(&mut took) {
            for (request, served) in self.requests.iter_mut().zip(&mut served) {
                let Work::Sequences { target: own, items } = &mut request.work else { continue };
                if own.key != key {
                    continue;
                }
                let Some(item) = items.front() else { continue };
                let length = item.sequence.length();
                if !batch.is_empty() && tokens + length > budget {
                    break 'passes;
                }
                batch.extend(items.pop_front());
                target.get_or_insert_with(|| own.clone());
                tokens += length;
                request.tokens -= length;
                self.tokens -= length;
                *served = true;
                took = true;
            }
        }
        self.move_back(&served);
        target.map(|target| Batch::Sequences(target, batch))
    }

    /// Moves the served requests to [`Self::served`]. Removes requests without further sequences.
    fn move_back(&mut self, served: &[bool]) {
        let all = std::mem::take(&mut self.requests).into_iter().zip(served);
        let (behind, front): (Vec<_>, Vec<_>) = all.partition(|(_, served)| **served);
        let waits = |request: &Request| match &request.work {
            Work::Sequences { items, .. } => !items.is_empty(),
            Work::Calls { .. } => true,
        };
        let waiting = |requests: Vec<(Request, _)>| {
            requests.into_iter().map(|(request, _)| request).filter(waits).collect()
        };
        self.requests = waiting(front);
        self.served = waiting(behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Lengths;

    impl Compute for Lengths {
        type Values = Vec<f32>;

        fn compute(&self, sequences: &[&Sequence]) -> encoder::Result<Vec<Vec<f32>>> {
            Ok(sequences.iter().map(|sequence| vec![sequence.length() as f32]).collect())
        }
    }

    fn target(model: u64) -> UntypedTarget {
        Target::new(Key { model, kind: KeyKind::Task { batch_key: 0 } }, Lengths).untyped
    }

    /// A request of sequences with these lengths. Each token id is the request's number.
    fn push(
        queue: &mut Queue,
        model: u64,
        request: u32,
        lengths: &[usize],
    ) -> oneshot::Receiver<Result<Vec<AnyValues>, Failure>> {
        let sequence = |&length: &usize| Sequence {
            tokens: Tokens {
                input_ids: vec![request; length],
                token_type_ids: vec![0; length],
                truncated: 0,
            },
            prompt: 0,
        };
        let (reply, received) = oneshot::channel();
        queue.push(target(model), lengths.iter().map(sequence).collect(), reply);
        received
    }

    /// The request and the index of each sequence of the next batch.
    fn next(queue: &mut Queue, budget: usize) -> Vec<(u32, usize)> {
        match queue.next(budget) {
            Some(Batch::Sequences(_, items)) => {
                items.iter().map(|item| (item.sequence.tokens.input_ids[0], item.index)).collect()
            }
            _ => vec![],
        }
    }

    #[test]
    fn a_small_request_that_arrives_during_a_huge_one_is_in_the_next_batch() {
        let mut queue = Queue::default();
        let _huge = push(&mut queue, 0, 1, &[10; 100]);
        assert_eq!(next(&mut queue, 30), [(1, 0), (1, 1), (1, 2)]);
        let _small = push(&mut queue, 0, 2, &[10]);
        assert_eq!(next(&mut queue, 30), [(2, 0), (1, 3), (1, 4)]);
        assert_eq!((queue.len(), queue.tokens()), (1, 950));
    }

    #[test]
    fn requests_that_do_not_fit_into_one_batch_take_turns() {
        let mut queue = Queue::default();
        let _waiting: Vec<_> = (1..=3).map(|i| push(&mut queue, 0, i, &[10, 10])).collect();
        assert_eq!(next(&mut queue, 20), [(1, 0), (2, 0)]);
        assert_eq!(next(&mut queue, 20), [(3, 0), (1, 1)]);
        assert_eq!(next(&mut queue, 20), [(2, 1), (3, 1)]);
        assert!(next(&mut queue, 20).is_empty());
        assert_eq!((queue.len(), queue.tokens()), (0, 0));
    }

    #[test]
    fn a_request_for_another_model_that_arrives_during_a_batch_is_the_next_batch() {
        let mut queue = Queue::default();
        let _huge = push(&mut queue, 0, 1, &[10; 100]);
        assert_eq!(next(&mut queue, 20), [(1, 0), (1, 1)]);
        let _small = push(&mut queue, 7, 2, &[10]);
        assert_eq!(next(&mut queue, 20), [(2, 0)]);
        let _small = push(&mut queue, 7, 3, &[10]);
        assert_eq!(next(&mut queue, 20), [(1, 2), (1, 3)], "the huge request is not starved");
        assert_eq!(next(&mut queue, 20), [(3, 0)]);
    }

    #[test]
    fn models_take_turns() {
        let mut queue = Queue::default();
        let _waiting = [push(&mut queue, 0, 1, &[10; 3]), push(&mut queue, 7, 2, &[10; 2])];
        assert_eq!(next(&mut queue, 20), [(1, 0), (1, 1)]);
        assert_eq!(next(&mut queue, 20), [(2, 0), (2, 1)]);
        assert_eq!(next(&mut queue, 20), [(1, 2)]);
    }

    #[test]
    fn a_long_sequence_is_a_batch_of_its_own() {
        let mut queue = Queue::default();
        let _waiting = push(&mut queue, 0, 1, &[50, 5, 5]);
        assert_eq!(next(&mut queue, 20), [(1, 0)]);
        assert_eq!(next(&mut queue, 20), [(1, 1), (1, 2)]);
    }

    #[test]
    fn abandoned_requests_are_not_computed() {
        let mut queue = Queue::default();
        drop(push(&mut queue, 0, 1, &[10; 5]));
        let _waiting = push(&mut queue, 0, 2, &[10]);
        assert_eq!(next(&mut queue, 100), [(2, 0)]);
        assert_eq!((queue.len(), queue.tokens()), (0, 0));
    }

    #[test]
    fn the_work_ahead_of_a_small_request_does_not_grow_with_a_huge_one() {
        let mut queue = Queue::default();
        let _waiting = [push(&mut queue, 0, 1, &[10; 1000]), push(&mut queue, 7, 2, &[5])];
        let key = |model| SpeedKey { model, is_call: false };
        assert_eq!(queue.ahead(20).collect::<Vec<_>>(), [(key(0), 20), (key(7), 5)]);
        // A text is computed as a whole.
        assert_eq!(queue.ahead(2).collect::<Vec<_>>(), [(key(0), 10), (key(7), 5)]);
    }

    #[test]
    fn abandoned_calls_are_not_computed() {
        let mut queue = Queue::default();
        let call = || Call { tokens: 10, run: Box::new(|| unreachable!()) };
        queue.push_calls(0, VecDeque::from([call(), call()]), Box::new(|| true));
        assert!(queue.next(100).is_none());
        assert_eq!((queue.len(), queue.tokens()), (0, 0));
    }
}
