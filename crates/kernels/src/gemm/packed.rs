//! Weights in panels.

use std::fmt;

use rayon::prelude::*;

use super::quantise::{around_zero, rotate};
use crate::{
    Isa,
    buffers::{Aligned, LINE},
    lanes::{Lanes, on_isa},
};

/// Columns of a panel.
pub(crate) const PANEL: usize = 32;

/// The widest input of [`Format::Int8`]: sums of so many products stay within 32 bits.
const MAX_INT8_INPUT: usize = 1 << 16;

/// What the factors of a product are held in. Sums are in f32, or exact for integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// As they are; [`Isa::Amx`] multiplies each as a sum of three of bf16.
    #[default]
    F32,
    /// Both rounded to bf16, 8 bits of mantissa.
    Bf16,
    /// Both rotated, and then weights as multiples −127..127 of a scale per output, the input as
    /// multiples 0..255 of a scale per row from a zero of its own.
    Int8,
}

impl Format {
    /// What attention's factors are held in beside linear maps of this format: bf16 where it is
    /// asked for less than f32 and has instructions of its own, else f32.
    pub fn of_attention(self, isa: Isa) -> Self {
        match self {
            Self::Bf16 | Self::Int8 if isa >= Isa::Avx512Bf16Vnni => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// Numbers in a word of 32 bits.
    pub(crate) fn per_word(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
            Self::Int8 => 4,
        }
    }
}

/// A linear map's weight `(out, in)` and bias `(out,)`, packed for products.
///
/// # Examples
/// ```
/// use mha_kernels::{Activation, Format, Isa, PackedLinear, linear};
///
/// let isa = Isa::get()?;
/// let (weight, bias) = ([1., 2., 3., 4., 5., 6.], [10., 20., 30.]);
/// let w = PackedLinear::pack(isa, Format::F32, &weight, 3, 2, Some(&bias));
/// let y = linear(isa, &[1., -1.], &[&w], Activation::None);
/// assert_eq!(y, [10. + 1. - 2., 20. + 3. - 4., 30. + 5. - 6.]);
/// assert_eq!(w.unpack(), weight);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
#[derive(Clone)]
pub struct PackedLinear {
    format: Format,
    out: usize,
    input: usize,
    /// Panels of [`Self::words`] rows of [`PANEL`] words.
    panels: Aligned,
    /// Zeros where there is none, up to a whole panel.
    bias: Vec<f32>,
    has_bias: bool,
    /// Of int8: what an output's weights are multiples of.
    scales: Vec<f32>,
    /// Of int8: the sum of these weights.
    sums: Vec<f32>,
}

/// Its sizes; the numbers are too many to read.
impl fmt::Debug for PackedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, input, out, has_bias, .. } = self;
        write!(f, "PackedLinear({input} to {out}, {format:?}, bias: {has_bias})")
    }
}

/// Some columns of the product.
pub(crate) struct Panel<'a> {
    pub(crate) words: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) scales: &'a [f32],
    pub(crate) sums: &'a [f32],
    /// Its first column in the output.
    pub(crate) column: usize,
    /// How many of its columns count.
    pub(crate) columns: usize,
}

impl PackedLinear {
    /// # Panics
    /// If the slices are not of `out·input` and `out` numbers; if int8's `input` is beyond 65,536.
    pub fn pack(
        isa: Isa,
        format: Format,
        weight: &[f32],
        out: usize,
        input: usize,
        bias: Option<&[f32]>,
    ) -> Self {
        assert_eq!(weight.len(), out * input, "a weight of (out, in)");
        assert!(format != Format::Int8 || input <= MAX_INT8_INPUT, "sums of 32 bits");
        let padded = out.next_multiple_of(PANEL);
        let words = input.div_ceil(format.per_word());
        let mut panels = Aligned::zeros(padded * words);
        let (mut scales, mut sums) = (vec![0.0; padded], vec![0.0; padded]);
        let each = panels.as_mut_slice().par_chunks_exact_mut((PANEL * words).max(1));
        let each = each.zip(scales.par_chunks_mut(PANEL)).zip(sums.par_chunks_mut(PANEL));
        each.enumerate().for_each(|(p, ((panel, scales), sums))| {
            let weight = &weight[p * PANEL * input..];
            let columns = PANEL.min(out - p * PANEL);
            let args = Args { format, weight, columns, input, panel, scales, sums };
            on_isa!(isa, pack_panel, args: Args);
        });
        let mut padded_bias = vec![0.0; padded];
        if let Some(bias) = bias {
            assert_eq!(bias.len(), out, "a bias of (out,)");
            padded_bias[..out].copy_from_slice(bias);
        }
        let (bias, has_bias) = (padded_bias, bias.is_some());
        Self { format, out, input, panels, bias, has_bias, scales, sums }
    }

    /// The weight `(out, in)`, rounded as its format has it.
    pub fn unpack(&self) -> Vec<f32> {
        let mut weight = vec![0.0; self.out * self.input];
        let (per_word, words) = (self.format.per_word(), self.words());
        for (n, row) in weight.chunks_mut(self.input.max(1)).enumerate() {
            let panel = &self.panels.as_slice()[n / PANEL * PANEL * words..];
            for (k, w) in row.iter_mut().enumerate() {
                let word = panel[k / per_word * PANEL + n % PANEL].to_bits();
                *w = match self.format {
                    Format::F32 => f32::from_bits(word),
                    Format::Bf16 => f32::from_bits(word >> (16 * (k % 2)) << 16),
                    Format::Int8 => f32::from((word >> (8 * (k % 4))) as u8 as i8) * self.scales[n],
                };
            }
            if self.format == Format::Int8 {
                let rotated = row.to_vec();
                // SAFETY: one number at a time needs no instructions; the row has its own length.
                unsafe { rotate::<f32, f32>(&rotated, row.as_mut_ptr()) };
            }
        }
        weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<&[f32]> {
        self.has_bias.then(|| &self.bias[..self.out])
    }

    /// What its factors are held in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Width of the product.
    pub fn out(&self) -> usize {
        self.out
    }

    /// Width of what is multiplied.
    pub fn input(&self) -> usize {
        self.input
    }

    /// Words of a row of x, or of a column of a panel.
    pub(crate) fn words(&self) -> usize {
        self.input.div_ceil(self.format.per_word())
    }

    /// Its panels, the first of which begins at a `column` of the output.
    pub(crate) fn panels(&self, column: usize) -> impl Iterator<Item = Panel<'_>> {
        let words = PANEL * self.words();
        (0..self.out.div_ceil(PANEL)).map(move |p| Panel {
            words: &self.panels.as_slice()[p * words..][..words],
            bias: &self.bias[p * PANEL..][..PANEL],
            scales: &self.scales[p * PANEL..][..PANEL],
            sums: &self.sums[p * PANEL..][..PANEL],
            column: column + p * PANEL,
            columns: PANEL.min(self.out - p * PANEL),
        })
    }
}

struct Args<'a> {
    format: Format,
    /// From the panel's first row on.
    weight: &'a [f32],
    columns: usize,
    input: usize,
    panel: &'a mut [f32],
    scales: &'a mut [f32],
    sums: &'a mut [f32],
}

/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn pack_panel<L: Lanes>(args: Args) {
    let Args { format, weight, columns, input, panel, scales, sums } = args;
    let mut rotated = vec![0.0; input];
    let mut bytes = vec![128; input.next_multiple_of(LINE)];
    for (column, row) in weight.chunks_exact(input.max(1)).take(columns).enumerate() {
        let words = panel[column..].iter_mut().step_by(PANEL);
        match format {
            Format::F32 => words.zip(row).for_each(|(word, &w)| *word = w),
            Format::Bf16 => words.zip(row.chunks(2)).for_each(|(word, pair)| {
                let high = pair.get(1).map_or(0, |&w| bf16(w));
                *word = f32::from_bits(u32::from(high) << 16 | u32::from(bf16(pair[0])));
            }),
            Format::Int8 => {
                // SAFETY: the caller's, and both buffers have room for a row.
                unsafe {
                    let extremes = rotate::<L, f32>(row, rotated.as_mut_ptr());
                    scales[column] = around_zero(&rotated, extremes, bytes.as_mut_ptr());
                }
                bytes[input..].fill(128);
                let signed = bytes.iter().map(|&byte| i32::from(byte) - 128);
                sums[column] = signed.sum::<i32>() as f32 * scales[column];
                words.zip(bytes.as_chunks().0).for_each(|(word, &four)| {
                    *word = f32::from_bits(u32::from_le_bytes(four) ^ 0x8080_8080);
                });
            }
        }
    }
}

/// The nearest bf16, the even one of two; NaN stays NaN.
pub(crate) fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}
