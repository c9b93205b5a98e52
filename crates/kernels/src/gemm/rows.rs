//! The rows of x in the format of the weights that they are multiplied with.

use rayon::prelude::*;

use crate::{
    Isa,
    buffers::{Buffer, LINE, Shared},
    gemm::{
        Format,
        quantise::{Quant, between_extremes, rotate},
    },
    lanes::{Lanes, on_isa},
    norm::ROWS,
};

/// Rows of words, and of int8 what the words mean.
pub(crate) struct Rows {
    words: Buffer,
    stride: usize,
    quants: Vec<Quant>,
}

impl Rows {
    /// `x`, whole rows of `k`.
    pub(crate) fn new(isa: Isa, format: Format, x: &[f32], k: usize) -> Self {
        let rows = x.len() / k;
        // Rows an odd number of lines apart: those of a tile do not push each other out of a cache
        // whose sets repeat every 4 KiB.
        let stride = k.div_ceil(format.per_word()).next_multiple_of(LINE) | LINE;
        let mut words = Buffer::new(rows * stride);
        let mut quants = vec![Quant::default(); rows];
        let into = Shared::new(words.as_mut_ptr());
        let chunks = x.par_chunks(ROWS * k).zip(quants.par_chunks_mut(ROWS)).enumerate();
        chunks.for_each(|(i, (x, quants))| {
            // SAFETY: the rows of this chunk are within the buffer, and its alone.
            let to = unsafe { into.get().add(i * ROWS * stride) };
            let args = Args { format, x, k, quants, to, stride };
            on_isa!(isa, convert, args: Args);
        });
        Self { words, stride, quants }
    }

    /// Words from one row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Where a row begins.
    pub(crate) fn row(&self, row: usize) -> *const f32 {
        assert!(row < self.quants.len());
        // SAFETY: so many rows are in the buffer.
        unsafe { self.words.as_ptr().add(row * self.stride) }
    }

    /// What the numbers of some rows stand for.
    pub(crate) fn quants(&self, row: usize, height: usize) -> &[Quant] {
        &self.quants[row..][..height]
    }
}

struct Args<'a> {
    format: Format,
    x: &'a [f32],
    k: usize,
    quants: &'a mut [Quant],
    to: *mut f32,
    stride: usize,
}

/// # Safety
/// The instructions of `L`; `to` has a row of `stride` for each of `x`.
#[inline(always)]
unsafe fn convert<L: Lanes>(args: Args) {
    let Args { format, x, k, quants, to, stride } = args;
    let mut rotated = Buffer::new(if format == Format::Int8 { k } else { 0 });
    for (i, (row, quant)) in x.chunks_exact(k).zip(quants).enumerate() {
        let from = row.as_ptr();
        // SAFETY: reads are within the row. Writes are of whole vectors, beyond k only within the
        // line that a row of `to` ends with: 16 numbers are at most a line.
        unsafe {
            let to = to.add(i * stride);
            match format {
                Format::F32 => std::ptr::copy_nonoverlapping(from, to, k),
                Format::Bf16 => {
                    for column in (0..k).step_by(L::N) {
                        let x = L::load_first(from.add(column), L::N.min(k - column));
                        x.store_bf16(to.cast::<u16>().add(column));
                    }
                }
                Format::Int8 => {
                    rotate::<L>(row, rotated.as_mut_ptr());
                    let row = std::slice::from_raw_parts(rotated.as_ptr(), k);
                    *quant = between_extremes::<L>(row, to.cast());
                }
            }
        }
    }
}
