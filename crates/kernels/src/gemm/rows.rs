//! The rows of x in the format of the weights that they are multiplied with.

use crate::{
    buffers::{Buffer, LINE, Shared},
    gemm::{
        Dot, Format, Product, Step, Tiles, Work,
        quantise::{Quant, between_extremes, rotate},
        run, thirds,
    },
    norm::ROWS,
    number::{Element, Written},
    team::share_chunks,
};

/// Rows of words, and of int8 what the words mean.
pub(super) struct Rows {
    words: Buffer,
    stride: usize,
    quants: Vec<Quant>,
}

/// From one row to the next: an odd number of lines, so that the rows of a tile do not push each
/// other out of a cache whose sets repeat every 4 KiB.
fn stride(words: usize) -> usize {
    words.next_multiple_of(LINE) | LINE
}

impl Rows {
    /// The rows of `x`, which begin `x_stride` apart, as `step` takes them.
    pub(super) fn of<T: Element>(step: &Step, x: &[T], x_stride: usize) -> Self {
        let Step { isa, format, input: k, words, .. } = *step;
        let (rows, stride) = (x.len().div_ceil(x_stride), stride(words));
        let mut words = Buffer::new(rows * stride);
        let mut quants = vec![Quant::default(); rows];
        let into = Shared::new(words.as_mut_ptr());
        share_chunks(&mut quants, ROWS, |i, quants| {
            let x = &x[i * ROWS * x_stride..];
            // SAFETY: the rows of this chunk are within the buffer, and its alone.
            let to = unsafe { into.get().add(i * ROWS * stride) };
            let args = Convert { format, x, x_stride, k, quants, to, stride };
            run(isa, format, args);
        });
        Self { words, stride, quants }
    }

    /// The `m` rows of words that `write` writes.
    pub(super) fn written<T: Written>(
        step: &Step,
        m: usize,
        write: impl FnOnce(Product<T>),
    ) -> Self {
        let of_row = stride(step.words);
        let mut words = Buffer::new(m * of_row);
        let (data, stride) = (words.as_mut_ptr().cast::<T>(), of_row * 4 / size_of::<T>());
        write(Product { data: Shared::new(data), stride });
        for row in 0..m {
            // SAFETY: the row has whole words.
            unsafe { T::end(data.add(row * stride), step.input) };
        }
        Self { words, stride: of_row, quants: vec![Quant::default(); m] }
    }

    /// The `m` rows of f32 that `write` writes, as `step` takes them.
    pub(super) fn made(step: &Step, m: usize, write: impl FnOnce(Product<f32>)) -> Self {
        let stride = stride(step.input);
        let mut rows = Buffer::new(m * stride);
        write(Product { data: Shared::new(rows.as_mut_ptr()), stride });
        // SAFETY: the buffer has so many numbers, and those of the rows have been written.
        let x = unsafe { std::slice::from_raw_parts(rows.as_ptr(), m * stride) };
        Self::of(step, x, stride)
    }

    /// Words from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Where a row begins.
    pub(super) fn row(&self, row: usize) -> *const f32 {
        assert!(row < self.quants.len());
        // SAFETY: so many rows are in the buffer.
        unsafe { self.words.as_ptr().add(row * self.stride) }
    }

    /// What the numbers of some rows stand for.
    pub(super) fn quants(&self, row: usize, height: usize) -> &[Quant] {
        &self.quants[row..][..height]
    }
}

/// `to` has a row of `stride` for each of `x`.
struct Convert<'a, T> {
    format: Format,
    x: &'a [T],
    x_stride: usize,
    k: usize,
    quants: &'a mut [Quant],
    to: *mut f32,
    stride: usize,
}

impl<T: Element> Work for Convert<'_, T> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        let Self { format, x, x_stride, k, quants, to, stride } = self;
        let mut rotated = vec![0.0; if format == Format::Int8 { k } else { 0 }];
        for (i, (row, quant)) in x.chunks(x_stride).zip(quants).enumerate() {
            let row = &row[..k];
            let from = row.as_ptr();
            // SAFETY: reads are within the row. Writes are of whole vectors, beyond k only within the
            // line that a row of `to` ends with, 16 numbers being at most a line, or a block of thirds.
            unsafe {
                let to = to.add(i * stride);
                match format {
                    Format::F32 if D::THIRDS => thirds::split_row::<L, D, T>(row, to),
                    Format::F32 => {
                        for column in (0..k).step_by(L::N) {
                            let n = L::N.min(k - column);
                            T::load::<L>(from.add(column), n).store_first(to.add(column), n);
                        }
                    }
                    Format::Bf16 => {
                        for column in (0..k.next_multiple_of(2)).step_by(L::N) {
                            let n = L::N.min(k.saturating_sub(column)); // the last pair is whole
                            let x = T::load::<L>(from.add(column), n);
                            D::store_bf16(x, to.cast::<u16>().add(column));
                        }
                    }
                    Format::Int8 => {
                        let extremes = rotate::<L, T>(row, rotated.as_mut_ptr());
                        *quant = between_extremes(&rotated, extremes, to.cast());
                    }
                }
            }
        }
    }
}
