//! Prefetching.

#[cfg(target_arch = "aarch64")]
use std::arch::asm;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

/// Size of a cache line in bytes.
pub(super) const LINE_BYTES: usize = 64;

/// Prefetches the cache line of an address into L1. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(from: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and every x86-64 CPU has it.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(from.cast())
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch never faults.
    unsafe {
        asm!("prfm pldl1keep, [{0}]", in(reg) from, options(readonly, nostack, preserves_flags))
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = from;
}

/// Prefetches the cache line of an address into L2. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch_l2(from: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and every x86-64 CPU has it.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(from.cast())
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch never faults.
    unsafe {
        asm!("prfm pldl2keep, [{0}]", in(reg) from, options(readonly, nostack, preserves_flags))
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = from;
}

/// Prefetches a block of `n` rows of `width` elements, `row_stride` elements apart.
#[inline(always)]
pub(crate) fn prefetch_rows<T>(to: *const T, row_stride: usize, [n, width]: [usize; 2]) {
    for row in 0..n {
        for column in (0..width).step_by(LINE_BYTES / size_of::<T>()) {
            prefetch(to.wrapping_add(row * row_stride + column).cast());
        }
    }
}
