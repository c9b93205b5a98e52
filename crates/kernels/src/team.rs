//! Sections of work, each shared by the threads that stayed after the last.
//!
//! A pass through a model is some hundred sections with microseconds between them, in which rayon's
//! threads fall asleep: waking one takes longer than the pause. So rayon's pool is asked for threads
//! once, and they look for sections until there has been none for a while.

use std::{
    any::Any,
    hint::spin_loop,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr::null_mut,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*},
    },
    thread::yield_now,
    time::{Duration, Instant},
};

use rayon::prelude::*;

use crate::buffers::Shared;

/// How long a thread stays without a section. Meanwhile it does nothing else of rayon's.
const STAY: Duration = Duration::from_micros(200);

/// Whether some thread has a section.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// That section, while others may join.
static SECTION: AtomicPtr<Section> = AtomicPtr::new(null_mut());
/// How many may have joined.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// Threads that stay, or will as soon as rayon has them.
static HELPERS: AtomicUsize = AtomicUsize::new(0);

struct Section<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    /// What is left: a part for each thread, from one number to before another.
    parts: Vec<AtomicU64>,
    joined: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Calls `work` with each number below `len`, in any order, on as many threads as rayon has.
pub(crate) fn share(len: usize, work: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads().min(len);
    let Some(len_32) = u32::try_from(len).ok().filter(|_| threads > 1) else {
        return (0..len).for_each(work);
    };
    if TAKEN.swap(true, Acquire) {
        return (0..len).into_par_iter().with_max_len(1).for_each(&work);
    }
    let start = |i| u64::from(len_32) * i as u64 / threads as u64;
    let mut section = Section {
        work: &work,
        parts: (0..threads).map(|i| AtomicU64::new(start(i) << 32 | start(i + 1))).collect(),
        joined: AtomicUsize::new(0),
        panic: Mutex::new(None),
    };
    SECTION.store((&raw mut section).cast(), SeqCst);
    while HELPERS.load(Relaxed) < rayon::current_num_threads() - 1 {
        HELPERS.fetch_add(1, Relaxed);
        rayon::spawn(help);
    }
    section.run();
    SECTION.store(null_mut(), SeqCst);
    // Whoever joins from now on finds nothing; those who joined before are at their last.
    for turn in 0u32.. {
        match INSIDE.load(SeqCst) {
            0 => break,
            _ if turn < 1000 => spin_loop(),
            _ => yield_now(),
        }
    }
    TAKEN.store(false, Release);
    if let Some(panic) = section.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(panic);
    }
}

/// Calls `work` with the chunks of `all` and their numbers, as [`share`] does.
pub(crate) fn share_chunks<T: Send>(
    all: &mut [T],
    chunk: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    let (first, len) = (Shared::new(all.as_mut_ptr()), all.len());
    share(len.div_ceil(chunk), |i| {
        let n = chunk.min(len - i * chunk);
        // SAFETY: chunks of one slice, which is borrowed for as long, and no number comes twice.
        work(i, unsafe { std::slice::from_raw_parts_mut(first.get().add(i * chunk), n) });
    });
}

/// Joins sections for as long as there are some.
fn help() {
    let mut last = Instant::now();
    while last.elapsed() < STAY {
        if SECTION.load(Relaxed).is_null() {
            spin_loop();
            continue;
        }
        INSIDE.fetch_add(1, SeqCst);
        // SAFETY: its owner made it null before waiting for all who are inside, and keeps it until
        // then: it is null, or stays while this thread is inside.
        if let Some(section) = unsafe { SECTION.load(SeqCst).as_ref() } {
            section.run();
        }
        INSIDE.fetch_sub(1, SeqCst);
        last = Instant::now();
    }
    HELPERS.fetch_sub(1, Relaxed);
}

impl Section<'_> {
    /// Does what is left; a panic is kept for the owner.
    fn run(&self) {
        let thread = self.joined.fetch_add(1, Relaxed);
        let run = || {
            while let Some(i) = self.take(thread) {
                (self.work)(i);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    /// The first number of a thread's own part, or else the last of another's.
    fn take(&self, thread: usize) -> Option<usize> {
        let n = self.parts.len();
        (0..n).find_map(|i| {
            let split = |part: u64| (part >> 32, part & u64::from(u32::MAX));
            let rest = |part| match split(part) {
                (from, to) if from >= to => None,
                (from, to) if i == 0 => Some((from + 1) << 32 | to),
                (from, to) => Some(from << 32 | (to - 1)),
            };
            let part = self.parts[(thread + i) % n].fetch_update(Relaxed, Relaxed, rest).ok()?;
            let (from, to) = split(part);
            Some(if i == 0 { from } else { to - 1 } as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each number once, whoever else has a section at the time, also from within one.
    #[test]
    fn every_number_once() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let callers = || {
            let count = |len: usize| {
                let counts: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                share(len, |i| {
                    share(2, |_| _ = counts[i].fetch_add(1, Relaxed));
                });
                assert!(counts.into_iter().all(|count| count.into_inner() == 2), "{len}");
            };
            (0..300).for_each(|i| count(i % 70));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| pool.install(callers));
            scope.spawn(callers);
            scope.spawn(|| pool.install(callers));
        });
        let mut numbers = vec![0; 1000];
        share_chunks(&mut numbers, 7, |i, chunk| chunk.fill(i));
        assert!(numbers.into_iter().enumerate().all(|(i, n)| n == i / 7));
    }

    /// A panic comes back to the caller, and the next section is as any.
    #[test]
    fn panics_come_back() {
        for _ in 0..20 {
            let run = || share(50, |i| assert!(i != 31, "the thirty-first"));
            let panic = catch_unwind(run).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"the thirty-first"));
        }
        let sum = AtomicUsize::new(0);
        share(50, |i| _ = sum.fetch_add(i, Relaxed));
        assert_eq!(sum.into_inner(), 49 * 50 / 2);
    }
}
