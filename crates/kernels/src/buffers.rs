//! Memory that is used again: fresh pages cost more than what is computed in them.

use std::sync::{Mutex, PoisonError};

static FREE: Mutex<Vec<Vec<f32>>> = Mutex::new(Vec::new());

/// Numbers of no particular value, given back when dropped.
pub(crate) struct Buffer(Vec<f32>);

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = free.iter().enumerate().filter(|(_, buffer)| buffer.len() >= len);
        let best = fits.min_by_key(|(_, buffer)| buffer.len()).map(|(i, _)| i);
        Self(match best {
            Some(i) => free.swap_remove(i),
            None => vec![0.0; len.next_multiple_of(4096)],
        })
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr()
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr()
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

    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}
