//! The rows of x in the format of the weights that they are multiplied with.

use crate::{
    buffers::{Buffer, LINE, Shared},
    gemm::{
        Dot, Format, Product, Step, Tiles, Work,
        quantise::{Quant, between_extremes, rotate},
        run,
    },
    norm::ROWS,
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
    pub(super) fn of(step: &Step, x: &[f32], x_stride: usize) -> Self {
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

/// The product of one map, which the next one takes: as it takes it, but for int8, which must have
/// seen a row to its end.
pub(super) struct Between {
    words: Buffer,
    format: Format,
    width: usize,
    stride: usize,
    rows: usize,
}

impl Between {
    pub(super) fn new(next: &Step, rows: usize) -> Self {
        let (format, width) = (next.format, next.input);
        let stride = stride(if format == Format::Bf16 { next.words } else { width });
        let mut words = Buffer::new(rows * stride);
        if format == Format::Bf16 && width % 2 == 1 {
            for row in 0..rows {
                // SAFETY: a word of a row of the buffer, of which the second half is none of the product.
                unsafe { *words.as_mut_ptr().add(row * stride + width / 2) = 0.0 };
            }
        }
        Self { words, format, width, stride, rows }
    }

    pub(super) fn product(&mut self) -> Product {
        let (words, stride) = (self.words.as_mut_ptr(), self.stride);
        match self.format {
            Format::F32 | Format::Int8 => Product::F32 { data: Shared::new(words), stride },
            Format::Bf16 => Product::Bf16 { data: Shared::new(words.cast()), stride: 2 * stride },
        }
    }

    /// It as the next map takes it, once all of it is written.
    pub(super) fn rows(self, next: &Step) -> Rows {
        let Self { words, format, width, stride, rows } = self;
        if format != Format::Int8 {
            return Rows { words, stride, quants: vec![Quant::default(); rows] };
        }
        let len = (rows - 1) * stride + width;
        // SAFETY: the buffer has so many numbers.
        let x = unsafe { std::slice::from_raw_parts(words.as_ptr(), len) };
        Rows::of(next, x, stride)
    }
}

/// `to` has a row of `stride` for each of `x`.
struct Convert<'a> {
    format: Format,
    x: &'a [f32],
    x_stride: usize,
    k: usize,
    quants: &'a mut [Quant],
    to: *mut f32,
    stride: usize,
}

impl Work for Convert<'_> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        let Self { format, x, x_stride, k, quants, to, stride } = self;
        let mut rotated = vec![0.0; if format == Format::Int8 { k } else { 0 }];
        for (i, (row, quant)) in x.chunks(x_stride).zip(quants).enumerate() {
            let row = &row[..k];
            let from = row.as_ptr();
            // SAFETY: reads are within the row. Writes are of whole vectors, beyond k only within the
            // line that a row of `to` ends with: 16 numbers are at most a line.
            unsafe {
                let to = to.add(i * stride);
                match format {
                    Format::F32 => std::ptr::copy_nonoverlapping(from, to, k),
                    Format::Bf16 => {
                        for column in (0..k.next_multiple_of(2)).step_by(L::N) {
                            let n = L::N.min(k.saturating_sub(column)); // the last pair is whole
                            let x = L::load_first(from.add(column), n);
                            D::store_bf16(x, to.cast::<u16>().add(column));
                        }
                    }
                    Format::Int8 => {
                        let extremes = rotate::<L>(row, rotated.as_mut_ptr());
                        *quant = between_extremes(&rotated, extremes, to.cast());
                    }
                }
            }
        }
    }
}
