//! Sections of work, each shared by the threads that stayed after the last.
//!
//! A pass through a model is some hundred sections with microseconds between them, in which rayon's
//! threads fall asleep: waking one takes longer than the pause. So rayon's pool is asked for threads
//! once, and they look for sections until there has been none for a while, or until it is time to
//! look what else rayon has to do.

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

use crate::buffers::Shared;

/// How long a thread stays without a section.
const STAY: Duration = Duration::from_micros(200);
/// After how long it leaves once a section is done.
const TURN: Duration = Duration::from_millis(2);

/// Where callers put their sections; whoever finds no place works alone.
static PLACES: [Place; 8] = [const { Place::new() }; 8];
/// Threads of all pools that stay, or will as soon as rayon has them.
static HELPERS: AtomicUsize = AtomicUsize::new(0);

#[repr(align(128))] // no two in lines that are fetched together
struct Place {
    taken: AtomicBool,
    /// Null unless others may join.
    section: AtomicPtr<Section<'static>>,
    /// How many have joined, or look whether there is something to join.
    inside: AtomicUsize,
}

struct Section<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    /// What is left of each thread's part: from one number, the upper half, to before another.
    parts: Vec<AtomicU64>,
    /// How many came, more perhaps than there are parts.
    threads: AtomicUsize,
    /// The first.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Calls `work` with each number below `len`, in any order, on this thread and on those that rayon
/// has free, no more in all than it has. A panic comes back once all is done.
pub(crate) fn share(len: usize, work: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads();
    let shared = threads.min(len) > 1 && u32::try_from(len).is_ok();
    let free = |place: &&Place| !place.taken.load(Relaxed) && !place.taken.swap(true, Acquire);
    let Some(place) = PLACES.iter().filter(|_| shared).find(free) else {
        return (0..len).for_each(work);
    };
    let (len, parts) = (len as u64, threads.min(len) as u64);
    let start = |part| len * part / parts;
    let section = Section {
        work: &work,
        parts: (0..parts).map(|i| AtomicU64::new(start(i) << 32 | start(i + 1))).collect(),
        threads: AtomicUsize::new(1),
        panic: Mutex::new(None),
    };
    place.section.store((&raw const section).cast_mut().cast(), SeqCst);
    let one_more = |helpers| (helpers < threads - 1).then_some(helpers + 1);
    while HELPERS.fetch_update(Relaxed, Relaxed, one_more).is_ok() {
        rayon::spawn(help);
    }
    section.run(0);
    place.section.store(null_mut(), SeqCst);
    // Who comes now finds nothing; who came before may still be at work.
    let mut turns = 0;
    while place.inside.load(SeqCst) > 0 {
        turns += 1;
        if turns < 1000 { spin_loop() } else { yield_now() }
    }
    place.taken.store(false, Release);
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
    let begun = Instant::now();
    let mut last = begun;
    while last.elapsed() < STAY && begun.elapsed() < TURN {
        spin_loop();
        for place in PLACES.iter().filter(|place| place.taken.load(Relaxed)) {
            if !place.section.load(Relaxed).is_null() {
                place.join();
            }
            last = Instant::now();
        }
    }
    HELPERS.fetch_sub(1, Relaxed);
}

impl Place {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            section: AtomicPtr::new(null_mut()),
            inside: AtomicUsize::new(0),
        }
    }

    fn join(&self) {
        self.inside.fetch_add(1, SeqCst);
        // SAFETY: its owner makes it null, and then waits for all who are inside before it lets go of
        // it, all in one order of time: it is null, or stays while this thread is inside.
        if let Some(section) = unsafe { self.section.load(SeqCst).as_ref() } {
            let thread = section.threads.fetch_add(1, Relaxed);
            if thread < section.parts.len() {
                section.run(thread);
            }
            self.section.store(null_mut(), SeqCst); // nothing is left, or enough are there
        }
        self.inside.fetch_sub(1, SeqCst);
    }
}

impl Section<'_> {
    /// Does what is left; a panic is kept for the owner.
    fn run(&self, thread: usize) {
        let run = || {
            while let Some(i) = self.take(thread) {
                (self.work)(i);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            match *first {
                None => *first = Some(panic),
                Some(_) => std::mem::forget(panic), // what it carries might panic in turn
            }
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
    use crate::tests::size;

    /// Each number once, whoever else has sections at the time, more than there are places.
    #[test]
    fn every_number_once() {
        let pool = &rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let callers = || {
            let count = |len: usize| {
                let counts: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
                share(len, |i| {
                    share(2, |_| _ = counts[i].fetch_add(1, Relaxed));
                });
                assert!(counts.into_iter().all(|count| count.into_inner() == 2), "{len}");
            };
            (0..size(300, 5)).for_each(|i| count(19 * i % 70));
        };
        std::thread::scope(|scope| {
            for i in 0..12 {
                scope.spawn(move || if i % 2 == 0 { callers() } else { pool.install(callers) });
            }
        });
        let mut numbers = vec![0; 1000];
        share_chunks(&mut numbers, 7, |i, chunk| chunk.fill(i));
        assert!(numbers.into_iter().enumerate().all(|(i, n)| n == i / 7));
    }

    /// A panic comes back to the caller, and the next section is as any.
    #[test]
    fn panics_come_back() {
        for _ in 0..size(20, 2) {
            let run = || share(50, |i| assert!(i != 31, "the thirty-first"));
            let panic = catch_unwind(run).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"the thirty-first"));
        }
        let sum = AtomicUsize::new(0);
        share(50, |i| _ = sum.fetch_add(i, Relaxed));
        assert_eq!(sum.into_inner(), 49 * 50 / 2);
    }
}
