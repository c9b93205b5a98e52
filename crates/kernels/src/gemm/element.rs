//! The element types of inputs and outputs: f32, and bf16 as the bits in a `u16`. A packed lane has
//! 32 bits: one f32 or two bf16. [`WidenedBf16`] is bf16 with one lane per value. `bf16x3.rs`
//! implements [`Store`] for f32 split into bf16 terms.

use crate::{
    compute_type::ComputeType,
    simd::{Dot, LANES, Vector},
};

/// The addresses of consecutive rows: at one distance from each other, or, if `batch` is given, each in
/// a batch index of its own.
#[derive(Clone, Copy)]
pub(crate) struct RowAddresses<'a, T> {
    /// The first row, in batch index 0 if `batch` is given.
    pub(crate) first: *const T,
    pub(crate) stride: usize,
    /// The batch index of each row, and the stride between batch indices.
    pub(crate) batch: Option<(&'a [u32], usize)>,
}

impl<T> RowAddresses<'_, T> {
    pub(crate) fn new(first: *const T, stride: usize) -> Self {
        Self { first, stride, batch: None }
    }

    /// The address of row `i`, which may be beyond the last row.
    #[inline(always)]
    pub(crate) fn at(&self, i: usize) -> *const T {
        let row = self.first.wrapping_add(i.wrapping_mul(self.stride));
        match self.batch {
            None => row,
            Some((indices, stride)) => {
                let index = indices.get(i).map_or(0, |&index| index as usize);
                row.wrapping_add(index.wrapping_mul(stride))
            }
        }
    }

    /// The rows from row `n` on.
    pub(crate) fn after(mut self, n: usize) -> Self {
        self.first = self.first.wrapping_add(n.wrapping_mul(self.stride));
        self.batch = self.batch.map(|(indices, stride)| (indices.get(n..).unwrap_or(&[]), stride));
        self
    }
}

/// An element type that the epilogue can write.
///
/// # Safety
/// All methods require that the CPU supports the instructions of `V` and `D`, and that the pointers
/// are valid for the stated accesses.
pub(crate) trait Store: Copy + Send + Sync {
    /// The address of a column within a row.
    fn at(row: *mut Self, column: usize) -> *mut Self {
        row.wrapping_add(column)
    }
    /// Writes the first `n` lanes. BF16x3 writes all lanes.
    unsafe fn store<V: Vector, D: Dot<V>>(x: V, to: *mut Self, n: usize);
    /// Zeroes the padding after the `n` elements of a row, up to a pair of packed lanes, or a block for
    /// BF16x3.
    unsafe fn pad_row(row: *mut Self, n: usize);
}

/// An element type that can also be read.
///
/// # Safety
/// As for [`Store`].
pub(crate) trait Element: Store {
    /// The compute type of products of these elements.
    const COMPUTE_TYPE: ComputeType;

    /// Reads `n` values; the other lanes are 0.
    unsafe fn load<V: Vector>(from: *const Self, n: usize) -> V;
    /// `n` rows of `d` elements as rows of packed lanes. `dims` is `[n, d]`; `to` is a pointer and a row
    /// stride. The rows stay where they are if they are whole aligned lanes; otherwise they are copied
    /// to `to`.
    unsafe fn packed_rows<'a>(
        rows: RowAddresses<'a, Self>,
        dims: [usize; 2],
        to: (*mut f32, usize),
    ) -> RowAddresses<'a, f32>;

    /// `n` rows of `d` elements as input rows of a microkernel. `rows`, `to` and the result are pairs of
    /// a pointer and a row stride, that of the result in lanes. If the microkernel takes widened bf16
    /// ([`Dot::INPUT_LANES`]), the rows are copied to `to`, widened and padded with 0 to whole pairs.
    #[inline(always)]
    unsafe fn input_rows<V: Vector, D: Dot<V>>(
        (rows, row_stride): (*const Self, usize),
        [n, d]: [usize; 2],
        (to, to_stride): (*mut f32, usize),
    ) -> (*const f32, usize) {
        // SAFETY: upheld by the caller; the rows of `to` have room for whole vectors.
        unsafe {
            if D::INPUT_LANES == 1 {
                let rows = RowAddresses::new(rows, row_stride);
                let rows = Self::packed_rows(rows, [n, d], (to, to_stride));
                return (rows.first, rows.stride);
            }
            for i in 0..n {
                let row = std::slice::from_raw_parts(rows.add(i * row_stride), d);
                round_row::<V, D, Self, WidenedBf16>(row, to.add(i * to_stride).cast());
            }
        }
        (to, to_stride)
    }
}

/// Rounds a row to bf16, padded with 0 to whole vectors. `U` is the type of the packed values: `u16`,
/// or [`WidenedBf16`] if the microkernel has two input lanes.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `to` has room for the row in whole vectors.
#[inline(always)]
pub(super) unsafe fn round_row<V: Vector, D: Dot<V>, T: Element, U: Store>(row: &[T], to: *mut U) {
    let (from, k) = (row.as_ptr(), row.len());
    for column in (0..k.next_multiple_of(2)).step_by(LANES) {
        let n = LANES.min(k - column);
        // SAFETY: reads are within the row; the caller guarantees room for the writes.
        unsafe {
            let x = T::load::<V>(from.wrapping_add(column), n);
            U::store::<V, D>(x, to.add(column), LANES);
        }
    }
}

impl Store for f32 {
    #[inline(always)]
    unsafe fn store<V: Vector, D: Dot<V>>(x: V, to: *mut f32, n: usize) {
        // SAFETY: upheld by the caller.
        unsafe { x.store_partial(to, n) }
    }

    unsafe fn pad_row(_row: *mut f32, _n: usize) {}
}

impl Element for f32 {
    const COMPUTE_TYPE: ComputeType = ComputeType::F32;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32, n: usize) -> V {
        // SAFETY: upheld by the caller.
        unsafe { V::load_partial(from, n) }
    }

    #[inline(always)]
    unsafe fn packed_rows<'a>(
        rows: RowAddresses<'a, f32>,
        _dims: [usize; 2],
        _to: (*mut f32, usize),
    ) -> RowAddresses<'a, f32> {
        rows
    }
}

/// A bf16 value, widened to f32.
#[derive(Clone, Copy)]
pub(crate) struct WidenedBf16(#[expect(dead_code, reason = "read as a lane of f32")] f32);

impl Store for WidenedBf16 {
    #[inline(always)]
    unsafe fn store<V: Vector, D: Dot<V>>(x: V, to: *mut Self, n: usize) {
        // SAFETY: upheld by the caller.
        unsafe { V::splat(0.0).pack_bf16(x).store_partial(to.cast(), n) }
    }

    unsafe fn pad_row(row: *mut Self, n: usize) {
        if n % 2 == 1 {
            // SAFETY: the row has room for whole pairs.
            unsafe { *row.add(n) = Self(0.0) };
        }
    }
}

impl Store for u16 {
    #[inline(always)]
    unsafe fn store<V: Vector, D: Dot<V>>(x: V, to: *mut u16, n: usize) {
        // SAFETY: upheld by the caller; `values` has room for the widest vector.
        unsafe {
            if n == LANES {
                return D::store_bf16(x, to);
            }
            let mut values = [0; LANES];
            D::store_bf16(x, values.as_mut_ptr());
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, n);
        }
    }

    unsafe fn pad_row(row: *mut u16, n: usize) {
        for i in n..n.next_multiple_of(4) {
            // SAFETY: the row has room for whole pairs of lanes.
            unsafe { *row.add(i) = 0 };
        }
    }
}

impl Element for u16 {
    const COMPUTE_TYPE: ComputeType = ComputeType::Bf16;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const u16, n: usize) -> V {
        // SAFETY: upheld by the caller; `values` has room for the widest vector.
        unsafe {
            if n == LANES {
                return V::load_bf16(from);
            }
            let mut values = [0; LANES];
            std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), n);
            V::load_bf16(values.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn packed_rows<'a>(
        rows: RowAddresses<'a, u16>,
        [n, d]: [usize; 2],
        (to, to_stride): (*mut f32, usize),
    ) -> RowAddresses<'a, f32> {
        let RowAddresses { first, stride, batch } = rows;
        let strides = [d, stride, batch.map_or(0, |(_, stride)| stride)];
        let is_whole_lanes = strides.into_iter().all(|stride| stride.is_multiple_of(2));
        if is_whole_lanes && first.cast::<f32>().is_aligned() {
            let batch = batch.map(|(indices, stride)| (indices, stride / 2));
            return RowAddresses { first: first.cast(), stride: stride / 2, batch };
        }
        for i in 0..n {
            // SAFETY: upheld by the caller. If d is odd, the upper half of the last lane is 0.
            unsafe {
                let to = to.add(i * to_stride);
                if d % 2 == 1 {
                    *to.add(d / 2) = 0.0;
                }
                std::ptr::copy_nonoverlapping(rows.at(i), to.cast(), d);
            }
        }
        RowAddresses::new(to, to_stride)
    }
}
