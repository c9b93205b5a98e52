//! Memory in whole lines of the cache, and memory that is used again: fresh pages cost more than
//! what is computed in them.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    mem::MaybeUninit,
    ptr::NonNull,
    slice,
    sync::{Mutex, PoisonError},
};

use rayon::prelude::*;

/// Words of 32 bits in a line of the cache.
pub(crate) const LINE: usize = 16;

/// Words that a thread makes zeros at a time.
const AT_A_TIME: usize = 1 << 16;

/// Bytes of a huge page, where the system has them.
const HUGE_PAGE: usize = 2 << 20;

/// Words of 32 bits from the start of a line of the cache on; many, from that of a huge page.
pub(crate) struct Aligned {
    words: NonNull<f32>,
    len: usize,
}

// SAFETY: it owns its words.
unsafe impl Send for Aligned {}
// SAFETY: they change only through a mutable reference.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// At least `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        Self::filled(len, |words| words.fill(MaybeUninit::new(0.0)))
    }

    /// The same, written by all threads.
    pub(crate) fn zeros_by_all(len: usize) -> Self {
        let zero = |words: &mut [MaybeUninit<f32>]| words.fill(MaybeUninit::new(0.0));
        Self::filled(len, |words| words.par_chunks_mut(AT_A_TIME).for_each(zero))
    }

    /// `fill` writes all of them.
    fn filled(len: usize, fill: impl FnOnce(&mut [MaybeUninit<f32>])) -> Self {
        let len = len.next_multiple_of(LINE);
        if len == 0 {
            return Self::default();
        }
        let layout = Self::layout(len);
        // SAFETY: the layout is of more than nothing.
        let words: *mut MaybeUninit<f32> = unsafe { alloc(layout) }.cast();
        let Some(words) = NonNull::new(words) else { handle_alloc_error(layout) };
        want_huge_pages(words.as_ptr(), layout.size());
        // SAFETY: so many words are there.
        fill(unsafe { slice::from_raw_parts_mut(words.as_ptr(), len) });
        Self { words: words.cast(), len }
    }

    fn layout(len: usize) -> Layout {
        let size = 4 * len;
        let align = if size < HUGE_PAGE { 4 * LINE } else { HUGE_PAGE };
        Layout::from_size_align(size, align).expect("memory that can be addressed")
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        // SAFETY: so many words are there, all of them written.
        unsafe { slice::from_raw_parts(self.words.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.words.as_ptr(), self.len) }
    }
}

impl Default for Aligned {
    fn default() -> Self {
        Self { words: NonNull::dangling(), len: 0 }
    }
}

impl Clone for Aligned {
    fn clone(&self) -> Self {
        let mut copy = Self::zeros(self.len);
        copy.as_mut_slice().copy_from_slice(self.as_slice());
        copy
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: it was allocated with this layout.
            unsafe { dealloc(self.words.as_ptr().cast(), Self::layout(self.len)) };
        }
    }
}

/// `len` zeros, in huge pages where the system has them: for what is large, and written once.
///
/// # Examples
/// ```
/// assert_eq!(mha_kernels::zeros::<f32>(3), [0.; 3]);
/// ```
pub fn zeros<T: Copy + Default>(len: usize) -> Vec<T> {
    let mut zeros = vec![T::default(); len];
    want_huge_pages(zeros.as_mut_ptr(), size_of_val(&zeros[..]));
    zeros
}

/// Asks for huge pages: there are fewer of them for the processor to find, and for the system to give.
fn want_huge_pages<T>(memory: *mut T, size: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        let first = memory.addr().next_multiple_of(HUGE_PAGE);
        let whole = (memory.addr() + size).saturating_sub(first) / HUGE_PAGE * HUGE_PAGE;
        if whole > 0 {
            // SAFETY: advice about memory that is there; where it is not taken, nothing changes.
            unsafe { libc::madvise(memory.with_addr(first).cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (memory, size);
}

static FREE: Mutex<Vec<Aligned>> = Mutex::new(Vec::new());

/// Words of no particular value, given back when dropped.
pub(crate) struct Buffer(Aligned);

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().enumerate().filter(|(_, buffer)| buffer.len() >= len);
        let best = fits.min_by_key(|(_, buffer)| buffer.len()).map(|(i, _)| i);
        Self(match best {
            Some(i) => free.swap_remove(i),
            None => Aligned::zeros(len.next_multiple_of(4096)),
        })
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_slice().as_mut_ptr()
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.0.as_slice().as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(std::mem::take(&mut self.0));
        // As many as there can be in use at a time; the smallest is missed least.
        if free.len() > 2 * rayon::current_num_threads() + 2 {
            let sizes = free.iter().enumerate().min_by_key(|(_, buffer)| buffer.len());
            if let Some(smallest) = sizes.map(|(i, _)| i) {
                free.swap_remove(smallest);
            }
        }
    }
}

/// A pointer that threads share, each to write a part of its own.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(*mut T);

// SAFETY: whoever writes through it sees to it that no two threads write the same place.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}
