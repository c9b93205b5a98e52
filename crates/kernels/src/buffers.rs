//! Memory in whole lines of the cache, and memory that is used again: fresh pages cost more than
//! what is computed in them.

use std::sync::{Mutex, PoisonError};

/// Words of 32 bits in a line of the cache.
pub(crate) const LINE: usize = 16;

/// Words of 32 bits from the start of a line of the cache on.
#[derive(Clone, Default)]
pub(crate) struct Aligned(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

impl Aligned {
    /// At least `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        Self(vec![Line([0.0; LINE]); len.div_ceil(LINE)])
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len() * LINE
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        // SAFETY: a line is so many numbers and nothing else.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.len()) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.len()) }
    }
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
