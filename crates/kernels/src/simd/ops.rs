//! Operations built from [`Vector`]: transpose, Hadamard transform, prefetch.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

use super::vector::{MAX_LANES, Vector};

/// Size of a cache line in bytes.
pub(crate) const LINE_BYTES: usize = 64;

/// Prefetches the cache line of an address into L1. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(from: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and every x86-64 CPU has it.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(from.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
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
    #[cfg(not(target_arch = "x86_64"))]
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

/// Transposes the square matrix of the first `LANES` rows, in place.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn transpose<V: Vector>(rows: &mut [V; MAX_LANES]) {
    let mut distance = 1;
    while distance < V::LANES {
        for i in (0..V::LANES).filter(|i| i & distance == 0) {
            // SAFETY: upheld by the caller; `distance` is a power of two below `LANES`.
            let (x, y) = unsafe { rows[i].exchange(rows[i + distance], distance) };
            (rows[i], rows[i + distance]) = (x, y);
        }
        distance *= 2;
    }
}

/// `x · H` for the Hadamard matrix of `LANES` rows: `(a + b, a − b)` for neighbouring lanes, then
/// for lanes 2 apart, and so on.
///
/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn hadamard<V: Vector>(mut x: V) -> V {
    /// For each stage, −1 in the lanes that are subtracted.
    const SIGNS: [[f32; MAX_LANES]; 4] = {
        let mut signs = [[1.0; MAX_LANES]; 4];
        let (mut stage, mut lane) = (0, 0);
        while stage < 4 {
            if lane & 1 << stage != 0 {
                signs[stage][lane] = -1.0;
            }
            lane += 1;
            if lane == MAX_LANES {
                (stage, lane) = (stage + 1, 0);
            }
        }
        signs
    };
    let mut stage = 0;
    while 1 << stage < V::LANES {
        // SAFETY: upheld by the caller; a row of `SIGNS` has `MAX_LANES` values.
        unsafe {
            x = x.fma(V::load(SIGNS[stage].as_ptr()), x.swap_lanes(1 << stage));
        }
        stage += 1;
    }
    x
}
