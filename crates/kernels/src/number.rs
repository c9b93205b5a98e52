//! Numbers in memory. Arithmetic is on f32, whatever they are kept as.

use crate::{
    buffers::LINE,
    gemm::{Dot, Format},
    lanes::Lanes,
};

/// A number in memory: f32, or u16 for the bits of one of bf16.
#[expect(private_bounds, reason = "of no other kind")]
pub trait Number: Element {}

impl Number for f32 {}
impl Number for u16 {}

/// How vectors are read and written.
///
/// # Safety
/// All functions need the instructions of `L` and `D`, and numbers or room where their pointers tell.
pub(crate) trait Element: Copy + Send + Sync {
    /// What they are as factors.
    const FORMAT: Format;

    /// The first `n` of a vector, and zeros.
    unsafe fn load<L: Lanes>(from: *const Self, n: usize) -> L;
    /// The first `n` of a vector.
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut Self, n: usize);
    /// `n` rows of `d`, `stride` apart, as rows of words, and how many words these are apart: where
    /// they are, or in `to`, `to_stride` apart.
    unsafe fn words(
        rows: (*const Self, usize),
        dims: [usize; 2],
        to: (*mut f32, usize),
    ) -> (*const f32, usize);
}

impl Element for f32 {
    const FORMAT: Format = Format::F32;

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32, n: usize) -> L {
        // SAFETY: the caller's.
        unsafe { L::load_first(from, n) }
    }

    #[inline(always)]
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut f32, n: usize) {
        // SAFETY: the caller's.
        unsafe { x.store_first(to, n) }
    }

    #[inline(always)]
    unsafe fn words(
        rows: (*const f32, usize),
        _dims: [usize; 2],
        _to: (*mut f32, usize),
    ) -> (*const f32, usize) {
        rows
    }
}

impl Element for u16 {
    const FORMAT: Format = Format::Bf16;

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16, n: usize) -> L {
        // SAFETY: the caller's; a vector has at most as many as a line.
        unsafe {
            if n == L::N {
                return L::load_bf16(from);
            }
            let mut all = [0; LINE];
            std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), n);
            L::load_bf16(all.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut u16, n: usize) {
        // SAFETY: as above.
        unsafe {
            if n == L::N {
                return D::store_bf16(x, to);
            }
            let mut all = [0; LINE];
            D::store_bf16(x, all.as_mut_ptr());
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, n);
        }
    }

    #[inline(always)]
    unsafe fn words(
        (rows, stride): (*const u16, usize),
        [n, d]: [usize; 2],
        (to, to_stride): (*mut f32, usize),
    ) -> (*const f32, usize) {
        if d.is_multiple_of(2) && stride.is_multiple_of(2) && rows.cast::<f32>().is_aligned() {
            return (rows.cast(), stride / 2);
        }
        for i in 0..n {
            // SAFETY: the caller's; what is left of a row's last word is 0.
            unsafe {
                let to = to.add(i * to_stride);
                if d % 2 == 1 {
                    *to.add(d / 2) = 0.0;
                }
                std::ptr::copy_nonoverlapping(rows.add(i * stride), to.cast(), d);
            }
        }
        (to, to_stride)
    }
}
