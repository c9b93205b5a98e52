//! Input rows, packed in the compute type of the weight that they are multiplied with.

use super::{
    bf16x3::split_row,
    element::{Element, Store, WidenedBf16, round_row},
    epilogue::Output,
    int8::{RowQuantisation, quantise_asymmetric, rotate},
};
use crate::{
    buffer::{F32_PER_LINE, ScratchBuf, SharedPtr},
    compute_type::ComputeType,
    isa::Isa,
    parallel::parallel_chunks,
    simd::{LANES, Microkernel, ProductKernel, RegisterTile},
};

/// Rows that a thread packs at a time.
const ROWS_PER_CHUNK: usize = 16;

/// The input format that a packed weight requires.
#[derive(Clone, Copy)]
pub(super) struct InputFormat {
    pub(super) isa: Isa,
    pub(super) compute_type: ComputeType,
    /// Values of a row.
    pub(super) k: usize,
    /// Lanes of a packed row, of 32 bits each.
    pub(super) lanes: usize,
}

/// Rows of packed lanes. For int8, with the quantisation of each row.
pub(super) struct PackedInput {
    lanes: ScratchBuf,
    row_stride: usize,
    quantisation: Vec<RowQuantisation>,
}

/// Row stride for `lanes` lanes: an odd number of cache lines. The rows of a tile then fall into
/// different sets of a cache whose sets repeat every 4 KiB.
fn row_stride(lanes: usize) -> usize {
    lanes.next_multiple_of(F32_PER_LINE) | F32_PER_LINE
}

impl PackedInput {
    /// Packs the rows of `x`, which are `x_stride` elements apart.
    pub(super) fn pack<T: Element>(format: InputFormat, x: &[T], x_stride: usize) -> Self {
        let (rows, row_stride) = (x.len().div_ceil(x_stride), row_stride(format.lanes));
        let mut lanes = ScratchBuf::new(rows * row_stride);
        let mut quantisation = vec![RowQuantisation::default(); rows];
        let to = SharedPtr::new(lanes.as_mut_ptr());
        parallel_chunks(&mut quantisation, ROWS_PER_CHUNK, |i, quantisation| {
            let x = &x[i * ROWS_PER_CHUNK * x_stride..];
            // SAFETY: the rows of this chunk are within the buffer, and no other chunk has them.
            let to = unsafe { to.get().add(i * ROWS_PER_CHUNK * row_stride) };
            let InputFormat { isa, compute_type, k, .. } = format;
            let kernel = PackRows { compute_type, x, x_stride, k, quantisation, to, row_stride };
            isa.run_products(compute_type, kernel);
        });
        Self { lanes, row_stride, quantisation }
    }

    /// `m` rows that `write` fills in the packed layout.
    pub(super) fn from_packed<T: Store>(
        format: InputFormat,
        m: usize,
        write: impl FnOnce(Output<T>),
    ) -> Self {
        let lane_stride = row_stride(format.lanes);
        let mut lanes = ScratchBuf::new(m * lane_stride);
        let data = lanes.as_mut_ptr().cast::<T>();
        let row_stride = lane_stride * size_of::<f32>() / size_of::<T>();
        write(Output { data: SharedPtr::new(data), row_stride });
        for row in 0..m {
            // SAFETY: the row has room for whole pairs of lanes.
            unsafe { T::pad_row(data.add(row * row_stride), format.k) };
        }
        Self { lanes, row_stride: lane_stride, quantisation: vec![RowQuantisation::default(); m] }
    }

    /// Packs `m` rows that `write` fills with f32 values.
    pub(super) fn from_f32(format: InputFormat, m: usize, write: impl FnOnce(Output<f32>)) -> Self {
        let row_stride = row_stride(format.k);
        let mut rows = ScratchBuf::new(m * row_stride);
        write(Output { data: SharedPtr::new(rows.as_mut_ptr()), row_stride });
        // SAFETY: the buffer has this length and is initialised.
        let x = unsafe { std::slice::from_raw_parts(rows.as_ptr(), m * row_stride) };
        Self::pack(format, x, row_stride)
    }

    /// Lanes from one row to the next.
    pub(super) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// The address of a row.
    pub(super) fn row(&self, row: usize) -> *const f32 {
        let rows = self.quantisation.len();
        assert!(row < rows, "row {row} is out of range: expected less than {rows}");
        // SAFETY: the buffer holds this row.
        unsafe { self.lanes.as_ptr().add(row * self.row_stride) }
    }

    /// The quantisation of the `n` rows from `row` on.
    pub(super) fn quantisation(&self, row: usize, n: usize) -> &[RowQuantisation] {
        &self.quantisation[row..][..n]
    }
}

/// Packs the rows of `x`; `to` has room for `row_stride` lanes per row.
struct PackRows<'a, T> {
    compute_type: ComputeType,
    x: &'a [T],
    x_stride: usize,
    k: usize,
    quantisation: &'a mut [RowQuantisation],
    to: *mut f32,
    row_stride: usize,
}

impl<T: Element> ProductKernel for PackRows<'_, T> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self) {
        let Self { compute_type, x, x_stride, k, quantisation, to, row_stride } = self;
        let mut rotated = vec![0.0; if compute_type == ComputeType::Int8 { k } else { 0 }];
        for (i, (row, quantisation)) in x.chunks(x_stride).zip(quantisation).enumerate() {
            let row = &row[..k];
            // SAFETY: reads are within the row. The last write may be a whole vector that extends
            // beyond k. It stays within the packed row, because the row stride is a multiple of a
            // cache line, which is as long as the widest vector. The row also has room for whole
            // BF16x3 blocks.
            unsafe {
                let to = to.add(i * row_stride);
                match compute_type {
                    ComputeType::F32 if D::IS_BF16X3 => split_row::<V, D, T>(row, to),
                    ComputeType::F32 => copy_row::<V, T>(row, to),
                    ComputeType::Bf16 if D::INPUT_LANES == 2 => {
                        round_row::<V, D, T, WidenedBf16>(row, to.cast());
                    }
                    ComputeType::Bf16 => round_row::<V, D, T, u16>(row, to.cast()),
                    ComputeType::Int8 => {
                        let range = rotate::<V, T>(row, rotated.as_mut_ptr());
                        *quantisation = quantise_asymmetric::<V, D>(&rotated, range, to.cast());
                    }
                }
            }
        }
    }
}

/// Copies a row as f32.
///
/// # Safety
/// The CPU supports the instructions of `V`; `to` has room for the row.
#[inline(always)]
unsafe fn copy_row<V: RegisterTile, T: Element>(row: &[T], to: *mut f32) {
    let (from, k) = (row.as_ptr(), row.len());
    for column in (0..k).step_by(LANES) {
        let n = LANES.min(k - column);
        // SAFETY: reads are within the row; the caller guarantees room for the writes.
        unsafe { T::load::<V>(from.add(column), n).store_partial(to.add(column), n) };
    }
}
