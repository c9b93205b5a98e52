//! `parallel_for` with low start-up latency, on rayon's threads.
//!
//! A forward pass runs about a hundred parallel loops with a few microseconds between them. Rayon's
//! workers go to sleep in these gaps, and waking one takes longer than the gap. Here, workers that
//! finish a loop wait for the next one for up to 1 ms ([`WAIT`]), then return to rayon. After 10 ms
//! ([`MAX_STAY`]) they return in any case: other rayon tasks wait, and a thread that waits in
//! `rayon::join` for another task may have become a worker meanwhile. They do not return more often:
//! the next loop may wake another worker, and while both are awake, Linux may leave one on the caller's
//! CPU for tens of milliseconds. A worker that has had no job for 50 µs ([`SPIN`]) yields its CPU to any
//! other thread.
//!
//! A loop uses at most one thread per CPU ([`max_threads`]): a spinning worker without a CPU of its
//! own would take the time of a thread that computes.

use std::{
    any::Any,
    cell::Cell,
    hint::spin_loop,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr::null_mut,
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::{available_parallelism, yield_now},
    time::{Duration, Instant},
};

use crate::buffer::SharedPtr;

/// How long a worker waits for the next job, after the caller of the last one has ended its loop.
const WAIT: Duration = Duration::from_millis(1);
/// How long a worker without a job does not yield.
const SPIN: Duration = Duration::from_micros(50);
/// A worker that finishes a job after this time returns to rayon.
const MAX_STAY: Duration = Duration::from_millis(10);

/// The jobs that workers can join. A caller that finds no free slot runs its loop alone.
static SLOTS: [JobSlot; 8] = [const { JobSlot::new() }; 8];
/// Workers of all pools that run [`work_on_jobs`] or are queued in rayon to do so.
static WORKERS: AtomicUsize = AtomicUsize::new(0);
/// The number of CPUs that the process may use. Tests run loops on more threads than CPUs.
static CPUS: LazyLock<usize> = LazyLock::new(|| match available_parallelism() {
    Ok(cpus) if !cfg!(test) => cpus.get(),
    _ => usize::MAX,
});

thread_local! {
    /// Whether the loops of this thread run on it alone.
    static IS_SERIAL: Cell<bool> = const { Cell::new(false) };
}

#[repr(align(128))] // CPUs prefetch cache lines in pairs
struct JobSlot {
    taken: AtomicBool,
    /// The job, or null if no worker may join.
    job: AtomicPtr<Job<'static>>,
    /// Workers that run the job or are about to read `job`.
    visitors: AtomicUsize,
}

/// A running loop of [`parallel_for`].
struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    /// The indices that each thread has not yet run: the start in the upper 32 bits, the end in the
    /// lower.
    ranges: Vec<AtomicU64>,
    /// Threads that joined. May exceed the number of ranges; the surplus threads do nothing.
    threads: AtomicUsize,
    /// The first panic of `body`.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// The maximum number of threads of a parallel loop: the number of threads of the current rayon pool,
/// at most one per CPU that the process may use.
///
/// # Examples
/// ```
/// let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
/// assert_eq!(pool.install(mha_kernels::max_threads), 1);
/// # Ok::<(), rayon::ThreadPoolBuildError>(())
/// ```
pub fn max_threads() -> usize {
    rayon::current_num_threads().min(*CPUS)
}

/// Calls `f`. The parallel loops of this crate in `f` run on this thread alone: for a caller whose
/// threads compute other parts at the same time, such as the tasks of a rayon iterator.
///
/// # Examples
/// ```
/// use mha_kernels::{ComputeType, Isa, PackedLinear, RowPooling, Rows, pooled_linear, serially};
///
/// let isa = Isa::get()?;
/// let w = PackedLinear::pack(isa, ComputeType::F32, &[1., -1.], 2, 1, None);
/// let pool = || pooled_linear(isa, Rows::F32(&[3., 5.]), &w, &[0, 2], RowPooling::Max);
/// assert_eq!(serially(pool), [5., -3.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
pub fn serially<T>(f: impl FnOnce() -> T) -> T {
    /// Restores the value, also if `f` panics.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_SERIAL.set(self.0);
        }
    }
    let _restore = Restore(IS_SERIAL.replace(true));
    f()
}

/// Calls `body(i)` for each `i < len`, in any order, on this thread and on idle rayon workers, on at
/// most [`max_threads`]. If a call panics, the panic is propagated after the other threads have
/// finished the loop.
pub(crate) fn parallel_for(len: usize, body: impl Fn(usize) + Sync) {
    let threads = max_threads();
    let worth_sharing = threads.min(len) > 1 && u32::try_from(len).is_ok() && !IS_SERIAL.get();
    let take = |slot: &&JobSlot| !slot.taken.load(Relaxed) && !slot.taken.swap(true, Acquire);
    let Some(slot) = SLOTS.iter().filter(|_| worth_sharing).find(take) else {
        return (0..len).for_each(body);
    };
    let (len, parts) = (len as u64, threads.min(len) as u64);
    let start = |part| len * part / parts;
    let job = Job {
        body: &body,
        ranges: (0..parts).map(|i| AtomicU64::new(start(i) << 32 | start(i + 1))).collect(),
        threads: AtomicUsize::new(1),
        panic: Mutex::new(None),
    };
    slot.job.store((&raw const job).cast_mut().cast(), SeqCst);
    while add_worker(threads - 1) {
        rayon::spawn(work_on_jobs);
    }
    job.run(0);
    slot.job.store(null_mut(), SeqCst);
    // No more workers can join. Wait for the workers that have joined.
    let mut spins = 0;
    while slot.visitors.load(SeqCst) > 0 {
        spins += 1;
        if spins < 1000 { spin_loop() } else { yield_now() }
    }
    slot.taken.store(false, Release);
    if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(panic);
    }
}

/// Calls `body(i, chunk)` for the `i`-th chunk of `chunk_len` elements of `data`, as
/// [`parallel_for`] does. The last chunk may be shorter.
pub(crate) fn parallel_chunks<T: Send>(
    data: &mut [T],
    chunk_len: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    let (first, len) = (SharedPtr::new(data.as_mut_ptr()), data.len());
    parallel_for(len.div_ceil(chunk_len), |i| {
        let n = chunk_len.min(len - i * chunk_len);
        // SAFETY: each index occurs once, and chunks of one slice do not overlap. The slice is
        // borrowed until `parallel_for` returns.
        body(i, unsafe { std::slice::from_raw_parts_mut(first.get().add(i * chunk_len), n) });
    });
}

/// Counts one more worker if there are fewer than `max`, and returns whether it did.
fn add_worker(max: usize) -> bool {
    let add = |workers| (workers < max).then_some(workers + 1);
    WORKERS.fetch_update(SeqCst, SeqCst, add).is_ok()
}

/// The loop of a worker: joins jobs until there has been none for [`WAIT`], or until [`MAX_STAY`]
/// has passed.
fn work_on_jobs() {
    let begin = Instant::now();
    let (mut last_job, mut last_loop) = (begin, begin);
    while last_loop.elapsed() < WAIT && begin.elapsed() < MAX_STAY {
        if last_job.elapsed() < SPIN {
            spin_loop()
        } else {
            yield_now()
        }
        for slot in SLOTS.iter().filter(|slot| slot.taken.load(Relaxed)) {
            if !slot.job.load(Relaxed).is_null() {
                slot.join();
                last_job = Instant::now();
            }
            last_loop = Instant::now();
        }
    }
    WORKERS.fetch_sub(1, SeqCst);
    // A caller that started a job after this thread last looked at the slots may have counted this
    // worker, and so queued no other one. The accesses to `WORKERS` and to `job` below and in
    // `parallel_for` are sequentially consistent: either the caller sees the lower count and queues
    // a worker, or this thread sees the job.
    let has_job = |slot: &JobSlot| !slot.job.load(SeqCst).is_null();
    if SLOTS.iter().any(has_job) && add_worker(max_threads().saturating_sub(1)) {
        rayon::spawn(work_on_jobs);
    }
}

impl JobSlot {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            job: AtomicPtr::new(null_mut()),
            visitors: AtomicUsize::new(0),
        }
    }

    fn join(&self) {
        self.visitors.fetch_add(1, SeqCst);
        // SAFETY: `parallel_for` sets `job` to null and then waits until `visitors` is 0 before it
        // drops the job. All accesses are sequentially consistent, so this thread either reads null
        // or is counted as a visitor for as long as it uses the job.
        if let Some(job) = unsafe { self.job.load(SeqCst).as_ref() } {
            let thread = job.threads.fetch_add(1, Relaxed);
            if thread < job.ranges.len() {
                job.run(thread);
            }
            self.job.store(null_mut(), SeqCst); // no index is left, or enough threads joined
        }
        self.visitors.fetch_sub(1, SeqCst);
    }
}

impl Job<'_> {
    /// Runs the remaining indices. Stores the first panic, which [`parallel_for`] propagates.
    fn run(&self, thread: usize) {
        let run = || {
            while let Some(i) = self.next_index(thread) {
                (self.body)(i);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            match *first {
                None => *first = Some(panic),
                Some(_) => std::mem::forget(panic), // dropping the payload could panic again
            }
        }
    }

    /// Takes the first index of the thread's own range. If that is empty, takes the last index of
    /// another thread's range.
    fn next_index(&self, thread: usize) -> Option<usize> {
        let n = self.ranges.len();
        (0..n).find_map(|i| {
            let unpack = |range: u64| (range >> 32, range & u64::from(u32::MAX));
            let shrink = |range| match unpack(range) {
                (start, end) if start >= end => None,
                (start, end) if i == 0 => Some((start + 1) << 32 | end),
                (start, end) => Some(start << 32 | (end - 1)),
            };
            let before =
                self.ranges[(thread + i) % n].fetch_update(Relaxed, Relaxed, shrink).ok()?;
            let (start, end) = unpack(before);
            Some(if i == 0 { start } else { end - 1 } as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scaled;

    #[test]
    fn every_index_runs_once_with_more_callers_than_slots() {
        let pool = &rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let run_loops = || {
            let check = |len: usize| {
                let counts: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                parallel_for(len, |i| {
                    parallel_for(2, |_| _ = counts[i].fetch_add(1, Relaxed));
                });
                assert!(counts.into_iter().all(|count| count.into_inner() == 2), "{len}");
            };
            (0..scaled(300, 5)).for_each(|i| check(19 * i % 70));
        };
        std::thread::scope(|scope| {
            for i in 0..12 {
                scope.spawn(move || if i % 2 == 0 { run_loops() } else { pool.install(run_loops) });
            }
        });
    }

    #[test]
    fn a_task_of_rayon_runs_while_loops_follow_each_other() {
        static HAS_RUN: AtomicBool = AtomicBool::new(false);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        pool.install(|| {
            parallel_for(2, |_| ());
            rayon::spawn(|| HAS_RUN.store(true, SeqCst));
            let start = Instant::now();
            while !HAS_RUN.load(SeqCst) {
                parallel_for(2, |_| ());
                assert!(start.elapsed() < Duration::from_secs(60));
            }
        });
    }

    #[test]
    fn every_chunk_gets_its_index() {
        let mut data = vec![0; 1000];
        parallel_chunks(&mut data, 7, |i, chunk| chunk.fill(i));
        assert!(data.into_iter().enumerate().all(|(i, n)| n == i / 7));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_next_loop_runs() {
        for _ in 0..scaled(20, 2) {
            let run = || parallel_for(50, |i| assert!(i != 31, "index 31"));
            let panic = catch_unwind(run).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"index 31"));
        }
        let sum = AtomicUsize::new(0);
        parallel_for(50, |i| _ = sum.fetch_add(i, Relaxed));
        assert_eq!(sum.into_inner(), 49 * 50 / 2);
    }
}
