//! Cache-line aligned buffers, shared byte ranges, and a pool that reuses buffers.
//!
//! Kernels reuse scratch memory, because the page faults of a fresh allocation cost more than the
//! arithmetic on its contents.

use std::{
    alloc::{Layout, alloc, dealloc, handle_alloc_error},
    fmt,
    mem::MaybeUninit,
    ops::Range,
    ptr::NonNull,
    slice,
    sync::{Arc, Mutex, PoisonError},
};

use rayon::prelude::*;

/// Number of f32 values, or of packed lanes of 32 bits, in a cache line of 64 bytes.
pub(crate) const F32_PER_LINE: usize = 16;

/// Values that one rayon task initialises.
const ZERO_CHUNK: usize = 1 << 16;

/// Size of a huge page in bytes, on systems that have them.
const HUGE_PAGE: usize = 2 << 20;

/// A buffer of f32 with a fixed size. It is aligned to a huge page if it is at least that large,
/// otherwise to a cache line.
pub(crate) struct AlignedBuf {
    data: NonNull<f32>,
    len: usize,
}

// SAFETY: the buffer owns its memory.
unsafe impl Send for AlignedBuf {}
// SAFETY: the memory is written through `&mut` only.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zeros, rounded up to whole cache lines.
    pub(crate) fn zeros(len: usize) -> Self {
        Self::init_with(len, |data| data.fill(MaybeUninit::new(0.0)))
    }

    /// Like [`Self::zeros`], initialised on all threads.
    pub(crate) fn par_zeros(len: usize) -> Self {
        let zero = |data: &mut [MaybeUninit<f32>]| data.fill(MaybeUninit::new(0.0));
        Self::init_with(len, |data| data.par_chunks_mut(ZERO_CHUNK).for_each(zero))
    }

    /// `init` must write every element.
    fn init_with(len: usize, init: impl FnOnce(&mut [MaybeUninit<f32>])) -> Self {
        let len = len.next_multiple_of(F32_PER_LINE);
        if len == 0 {
            return Self::default();
        }
        let layout = Self::layout(len);
        // SAFETY: the size of the layout is not 0.
        let data: *mut MaybeUninit<f32> = unsafe { alloc(layout) }.cast();
        let Some(data) = NonNull::new(data) else { handle_alloc_error(layout) };
        advise_huge_pages(data.as_ptr(), layout.size());
        // SAFETY: the allocation holds `len` elements.
        init(unsafe { slice::from_raw_parts_mut(data.as_ptr(), len) });
        Self { data: data.cast(), len }
    }

    fn layout(len: usize) -> Layout {
        let size = 4 * len;
        let align = if size < HUGE_PAGE { 4 * F32_PER_LINE } else { HUGE_PAGE };
        Layout::from_size_align(size, align).expect("the buffer fits the address space")
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        // SAFETY: `len` elements are allocated and initialised.
        unsafe { slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl Default for AlignedBuf {
    fn default() -> Self {
        Self { data: NonNull::dangling(), len: 0 }
    }
}

impl Clone for AlignedBuf {
    fn clone(&self) -> Self {
        let mut copy = Self::zeros(self.len);
        copy.as_mut_slice().copy_from_slice(self.as_slice());
        copy
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the memory was allocated with this layout.
            unsafe { dealloc(self.data.as_ptr().cast(), Self::layout(self.len)) };
        }
    }
}

/// A range of bytes in memory that something else owns, such as a mapped file.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// The bytes `range` of `owner`; `None` if the range is not within the owner's bytes, or does
    /// not start at a multiple of `alignment` bytes in memory. Packed weights need 64, a cache
    /// line; a table needs the size of its values.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// use mha_kernels::SharedBytes;
    ///
    /// let owner = Arc::new(vec![7u8; 200]);
    /// let first = owner.as_ptr().align_offset(64);
    /// let bytes = SharedBytes::new(owner.clone(), first..first + 8, 64).unwrap();
    /// assert_eq!(bytes.as_slice(), [7; 8]);
    /// assert!(SharedBytes::new(owner.clone(), first + 4..first + 8, 64).is_none());
    /// assert!(SharedBytes::new(owner.clone(), first + 4..first + 8, 4).is_some());
    /// assert!(SharedBytes::new(owner, first..201, 64).is_none());
    /// ```
    pub fn new(
        owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
        range: Range<usize>,
        alignment: usize,
    ) -> Option<Self> {
        let bytes = Self { range: (*owner).as_ref().get(range.clone()).map(|_| range)?, owner };
        bytes.is_aligned_to(alignment).then_some(bytes)
    }

    /// Whether the bytes start at a multiple of `alignment` in memory.
    pub fn is_aligned_to(&self, alignment: usize) -> bool {
        self.as_slice().as_ptr().addr().is_multiple_of(alignment)
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// The bytes as values in native byte order, without an incomplete value at the end.
    fn values<T>(&self) -> &[T] {
        // SAFETY: this private function is called for f32 and u16 only, for which all bit patterns
        // are valid.
        let (before, values, _) = unsafe { self.as_slice().align_to() };
        assert!(before.is_empty(), "the owner's bytes have moved");
        values
    }

    /// The bytes as f32 values.
    pub fn as_f32(&self) -> &[f32] {
        self.values()
    }

    /// The bytes as u16 values, such as the bits of f16 values.
    pub fn as_u16(&self) -> &[u16] {
        self.values()
    }
}

/// Prints the length, not the bytes.
impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

/// f32 values in an owned buffer or in [`SharedBytes`].
#[derive(Clone)]
pub(crate) enum Values {
    Owned(AlignedBuf),
    Shared(SharedBytes),
}

impl Values {
    pub(crate) fn as_slice(&self) -> &[f32] {
        match self {
            Self::Owned(buffer) => buffer.as_slice(),
            Self::Shared(bytes) => bytes.as_f32(),
        }
    }
}

/// Returns freed memory to the system. By default, glibc's allocator keeps a part of it for later
/// allocations: about 60 MB after a model of 1 GB is loaded. Has no effect on other allocators.
///
/// # Examples
/// ```
/// drop(vec![1u8; 1 << 20]);
/// mha_kernels::release_freed_memory();
/// ```
pub fn release_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` has no preconditions, and any thread may call it.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// `len` zeros, in huge pages if the system has them. Meant for large, long-lived buffers.
///
/// # Examples
/// ```
/// assert_eq!(mha_kernels::zeros::<f32>(3), [0.; 3]);
/// ```
pub fn zeros<T: Copy + Default>(len: usize) -> Vec<T> {
    let mut zeros = vec![T::default(); len];
    advise_huge_pages(zeros.as_mut_ptr(), size_of_val(&zeros[..]));
    zeros
}

/// Requests huge pages for `memory`, to reduce TLB misses and page faults.
fn advise_huge_pages<T>(memory: *mut T, size: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        let first = memory.addr().next_multiple_of(HUGE_PAGE);
        let len = (memory.addr() + size).saturating_sub(first) / HUGE_PAGE * HUGE_PAGE;
        if len > 0 {
            // SAFETY: the range is allocated, and the advice does not change its contents.
            unsafe { libc::madvise(memory.with_addr(first).cast(), len, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (memory, size);
}

static FREE: Mutex<Vec<AlignedBuf>> = Mutex::new(Vec::new());

/// A buffer from the pool, with unspecified contents. It returns to the pool when it is dropped.
pub(crate) struct ScratchBuf(AlignedBuf);

impl ScratchBuf {
    pub(crate) fn new(len: usize) -> Self {
        let free = Self::take_free(len);
        Self(free.unwrap_or_else(|| AlignedBuf::zeros(len.next_multiple_of(4096))))
    }

    /// The smallest buffer of the pool that has at least `len` values.
    fn take_free(len: usize) -> Option<AlignedBuf> {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free.iter().enumerate().filter(|(_, buffer)| buffer.len() >= len);
        let (smallest, _) = fitting.min_by_key(|(_, buffer)| buffer.len())?;
        Some(free.swap_remove(smallest))
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_slice().as_mut_ptr()
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.0.as_slice().as_ptr()
    }
}

impl Drop for ScratchBuf {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(std::mem::take(&mut self.0));
        // Keep as many buffers as can be in use at once. Free the smallest, which is the cheapest
        // to allocate again.
        if free.len() > 2 * rayon::current_num_threads() + 2 {
            let smallest = free.iter().enumerate().min_by_key(|(_, buffer)| buffer.len());
            if let Some(i) = smallest.map(|(i, _)| i) {
                free.swap_remove(i);
            }
        }
    }
}

/// A pointer that several threads write through, each to its own part.
#[derive(Clone, Copy)]
pub(crate) struct SharedPtr<T>(*mut T);

// SAFETY: the code that writes through the pointer ensures that no two threads write to the same
// element.
unsafe impl<T> Send for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}
