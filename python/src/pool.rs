//! Threads: one rayon pool per number of threads, shared by all models of the process. A call from
//! Python starts a thread, which submits the parts of its computation to a pool one after the
//! other, so that the parts of several calls alternate. The calling thread waits without the GIL
//! and handles signals.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
        mpsc::{RecvTimeoutError, sync_channel},
    },
    thread,
    time::Duration,
};

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::errors::{error, log_warning};

/// The time between two checks for signals while a computation runs.
pub const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// The stack size of a worker. It is large because a worker that waits for a parallel loop may
/// start the computation of another caller on the same stack.
const STACK_SIZE: usize = 16 << 20;

/// The id of the process that requested a pool; 0 before the first request.
static OWNER: AtomicU32 = AtomicU32::new(0);

static POOLS: Mutex<BTreeMap<usize, Arc<ThreadPool>>> = Mutex::new(BTreeMap::new());

/// The threads that a model computes on.
#[derive(Clone)]
pub struct Pool(Arc<ThreadPool>);

/// State shared by the calling thread and a computation: the request to stop, the progress, and the
/// pool.
pub struct Watch {
    /// Set if the computation must stop.
    pub stop: AtomicBool,
    /// The number of texts or pairs that are done, or of records that are read.
    pub done: AtomicUsize,
    pool: Arc<ThreadPool>,
}

impl Watch {
    /// Runs a part of the computation on the pool. Between two parts, the pool can run parts of
    /// other calls.
    ///
    /// # Errors
    /// [`encoder::Error::Stopped`] if the computation must stop.
    pub fn compute<T: Send>(&self, part: impl FnOnce() -> T + Send) -> encoder::Result<T> {
        if self.stop.load(Ordering::Relaxed) {
            Err(encoder::Error::Stopped)
        } else {
            Ok(self.pool.install(part))
        }
    }
}

impl Pool {
    /// The pool with [`encoder::threads`] threads.
    ///
    /// # Errors
    /// In a process that was forked after the first pool was requested, and if the threads cannot
    /// be created.
    pub fn new(py: Python<'_>, threads: Option<usize>) -> PyResult<Self> {
        check_process()?;
        // Before the lock, because a fork copies a lock that another thread holds.
        OWNER.store(process::id(), Ordering::Relaxed);
        let threads = encoder::threads(threads, log_warning);
        py.detach(|| {
            let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(pool) = pools.get(&threads) {
                return Ok(Self(pool.clone()));
            }
            let pool = Self::build(threads)?;
            pools.insert(threads, pool.0.clone());
            Ok(pool)
        })
    }

    fn build(threads: usize) -> PyResult<Self> {
        let builder = ThreadPoolBuilder::new().num_threads(threads).stack_size(STACK_SIZE);
        let pool = builder.thread_name(|i| format!("encodle-{i}")).build().map_err(error)?;
        Ok(Self(Arc::new(pool)))
    }

    /// A new pool with the same number of threads, for a computation that has only one long part.
    /// Tasks that the computation gives to threads of its own run on rayon's global pool, with the
    /// default number of threads.
    pub fn separate(&self, py: Python<'_>) -> PyResult<Self> {
        check_process()?;
        py.detach(|| {
            let global = ThreadPoolBuilder::new().num_threads(encoder::threads(None, |_| ()));
            global.build_global().ok(); // fails if an earlier call has built the pool
            Self::build(self.threads())
        })
    }

    pub fn threads(&self) -> usize {
        self.0.current_num_threads()
    }

    /// Runs `job` on a new thread; the job computes on the pool with [`Watch::compute`]. The
    /// calling thread waits without the GIL, and checks for signals every 50 ms. If a signal
    /// handler raises an exception, such as `KeyboardInterrupt`, this function returns it at once;
    /// the job sees [`Watch::stop`] and ends later. `progress`, if it is not `None`, is called with
    /// [`Watch::done`] at each check.
    ///
    /// # Errors
    /// The errors of the job, of signal handlers and of `progress`; `EncodleError` in a process
    /// that was forked after the pool was created, and if the thread cannot be started.
    pub fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        progress: Option<&Bound<'_, PyAny>>,
        job: impl FnOnce(&Watch) -> PyResult<T> + Send + 'static,
    ) -> PyResult<T> {
        check_process()?;
        let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        let watch = Arc::new(Watch { stop, done, pool: self.0.clone() });
        let (send, mut receive) = sync_channel(1);
        let shared = watch.clone();
        let call = thread::Builder::new().name("encodle-call".into());
        let spawned = call.spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(|| job(&shared)));
            send.send(result).ok(); // the receiver is gone after a signal
        });
        spawned.map_err(error)?;
        loop {
            let received;
            (received, receive) = py.detach(move || (receive.recv_timeout(SIGNAL_CHECK), receive));
            match received {
                Ok(result) => return result.unwrap_or_else(|panic| resume_unwind(panic)),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(error("the computation ended without a result"));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let done = watch.done.load(Ordering::Relaxed);
                    let report = |callback: &Bound<'_, PyAny>| callback.call1((done,)).map(drop);
                    let outcome = py.check_signals().and_then(|()| progress.map_or(Ok(()), report));
                    if let Err(exception) = outcome {
                        watch.stop.store(true, Ordering::Relaxed);
                        return Err(exception);
                    }
                }
            }
        }
    }
}

/// Fails in a process that was forked after the first pool was requested: a fork copies the memory
/// of the pools and not their threads, so that a computation would wait forever.
fn check_process() -> PyResult<()> {
    let (owner, process) = (OWNER.load(Ordering::Relaxed), process::id());
    if owner == 0 || owner == process {
        return Ok(());
    }
    Err(error(format!(
        "process {process} was forked from process {owner} after encodle had started threads there, \
         and a fork does not copy threads: expected a new process; use the start method \"spawn\" or \
         \"forkserver\" of multiprocessing, or load models only after the fork"
    )))
}
