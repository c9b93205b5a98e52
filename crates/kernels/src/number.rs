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

/// How vectors are written.
///
/// # Safety
/// All functions need the instructions of `L` and `D`, and room where their pointers tell.
pub(crate) trait Written: Copy + Send + Sync {
    /// Whether sums of f32 may become them where they are.
    const SUMS: bool = false;

    /// Where a row has the number of a column.
    fn at(row: *mut Self, column: usize) -> *mut Self {
        row.wrapping_add(column)
    }
    /// The first `n` of a vector, beyond which it has zeros.
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut Self, n: usize);
    /// Makes zeros of what follows the `n` numbers of a row in the same word, or what else is read
    /// at once.
    unsafe fn end(row: *mut Self, n: usize);
}

/// How vectors are read too.
///
/// # Safety
/// As above, and numbers where the pointers tell.
pub(crate) trait Element: Written {
    /// What they are as factors.
    const FORMAT: Format;

    /// The first `n` of a vector, and zeros.
    unsafe fn load<L: Lanes>(from: *const Self, n: usize) -> L;
    /// `n` rows of `d`, `stride` apart, as rows of words, and how many words these are apart: where
    /// they are, or in `to`, `to_stride` apart.
    unsafe fn words(
        rows: (*const Self, usize),
        dims: [usize; 2],
        to: (*mut f32, usize),
    ) -> (*const f32, usize);
}

impl Written for f32 {
    const SUMS: bool = true;

    #[inline(always)]
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut f32, n: usize) {
        // SAFETY: the caller's.
        unsafe { x.store_first(to, n) }
    }

    unsafe fn end(_row: *mut f32, _n: usize) {}
}

impl Element for f32 {
    const FORMAT: Format = Format::F32;

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32, n: usize) -> L {
        // SAFETY: the caller's.
        unsafe { L::load_first(from, n) }
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

impl Written for u16 {
    #[inline(always)]
    unsafe fn store<L: Lanes, D: Dot<L>>(x: L, to: *mut u16, n: usize) {
        // SAFETY: the caller's; a vector has at most as many as a line.
        unsafe {
            if n == L::N {
                return D::store_bf16(x, to);
            }
            let mut all = [0; LINE];
            D::store_bf16(x, all.as_mut_ptr());
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, n);
        }
    }

    unsafe fn end(row: *mut u16, n: usize) {
        if n % 2 == 1 {
            // SAFETY: the second half of a word.
            unsafe { *row.add(n) = 0 };
        }
    }
}

impl Element for u16 {
    const FORMAT: Format = Format::Bf16;

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16, n: usize) -> L {
        // SAFETY: as above.
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
