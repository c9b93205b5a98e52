//! Weights in panels.

use std::{fmt, ops::Range};

use rayon::prelude::*;

use super::{
    quantise::{around_zero, rotate},
    thirds::{self, OF_BLOCK, split_block},
};
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
    /// As they are; for AMX each as a sum of three of bf16.
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
            Self::Bf16 | Self::Int8 if isa >= Isa::AVX512_BF16_VNNI => Self::Bf16,
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
    /// Where the numbers are there as their [`thirds`], how many of each.
    thirds: Option<usize>,
    out: usize,
    input: usize,
    /// Of a row of x.
    words: usize,
    /// Of a panel: as many rows of [`PANEL`], or two of three.
    of_panel: usize,
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
    /// Of three [`thirds`] of each number, how many are there; 3 also where numbers are whole.
    pub(crate) thirds: usize,
    pub(crate) bias: &'a [f32],
    pub(crate) scales: &'a [f32],
    pub(crate) sums: &'a [f32],
    /// Its first column in the output.
    pub(crate) column: usize,
    /// How many of its columns count.
    pub(crate) columns: usize,
}

impl<'a> Panel<'a> {
    /// Its part for so many words of a row.
    pub(crate) fn part(&self, words: Range<usize>) -> &'a [f32] {
        let here = |words: usize| words * self.thirds / 3 * PANEL;
        &self.words[here(words.start)..here(words.end)]
    }
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
        let words = isa.words(format, input);
        let thirds = isa.has_thirds(format).then(|| thirds::needed(weight));
        let of_panel = PANEL * words * thirds.unwrap_or(3) / 3;
        let mut panels = Aligned::zeros_by_all(padded / PANEL * of_panel);
        let (mut scales, mut sums) = (vec![0.0; padded], vec![0.0; padded]);
        let each = panels.as_mut_slice().par_chunks_exact_mut(of_panel.max(1));
        let each = each.zip(scales.par_chunks_mut(PANEL)).zip(sums.par_chunks_mut(PANEL));
        each.enumerate().for_each(|(p, ((panel, scales), sums))| {
            let weight = &weight[p * PANEL * input..];
            let columns = PANEL.min(out - p * PANEL);
            let args = Args { format, thirds, weight, columns, input, panel, scales, sums };
            on_isa!(isa, pack_panel, args: Args);
        });
        let mut padded_bias = vec![0.0; padded];
        if let Some(bias) = bias {
            assert_eq!(bias.len(), out, "a bias of (out,)");
            padded_bias[..out].copy_from_slice(bias);
        }
        let (bias, has_bias) = (padded_bias, bias.is_some());
        Self { format, thirds, out, input, words, of_panel, panels, bias, has_bias, scales, sums }
    }

    /// The weight `(out, in)`, rounded as its format has it: f32 not at all, but that AMX holds
    /// what is below 2⁻¹¹⁰ to within 2⁻¹³⁴, and has NaN for what is beyond 3.396e38.
    pub fn unpack(&self) -> Vec<f32> {
        let mut weight = vec![0.0; self.out * self.input];
        let per_word = self.format.per_word();
        for (n, row) in weight.chunks_mut(self.input.max(1)).enumerate() {
            let panel = &self.panels.as_slice()[n / PANEL * self.of_panel..];
            let at = |word| panel[word * PANEL + n % PANEL];
            for (k, w) in row.iter_mut().enumerate() {
                let word = at(k / per_word).to_bits();
                *w = match (self.format, self.thirds) {
                    (Format::F32, Some(thirds)) => thirds::sum(thirds, k, at),
                    (Format::F32, None) => f32::from_bits(word),
                    (Format::Bf16, _) => f32::from_bits(word >> (16 * (k % 2)) << 16),
                    (Format::Int8, _) => {
                        f32::from((word >> (8 * (k % 4))) as u8 as i8) * self.scales[n]
                    }
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

    pub(crate) fn words(&self) -> usize {
        self.words
    }

    /// Whether it was packed for such instructions.
    pub(crate) fn is_for(&self, isa: Isa) -> bool {
        self.thirds.is_some() == isa.has_thirds(self.format)
    }

    /// Its panels, the first of which begins at a `column` of the output.
    pub(crate) fn panels(&self, column: usize) -> impl Iterator<Item = Panel<'_>> {
        (0..self.out.div_ceil(PANEL)).map(move |p| Panel {
            words: &self.panels.as_slice()[p * self.of_panel..][..self.of_panel],
            thirds: self.thirds.unwrap_or(3),
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
    thirds: Option<usize>,
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
    if args.format == Format::F32 {
        // SAFETY: the caller's.
        return unsafe { pack_f32::<L>(args) };
    }
    let Args { format, weight, columns, input, panel, scales, sums, .. } = args;
    let mut rotated = vec![0.0; input];
    let mut bytes = vec![128; input.next_multiple_of(LINE)];
    for (column, row) in weight.chunks_exact(input.max(1)).take(columns).enumerate() {
        let words = panel[column..].iter_mut().step_by(PANEL);
        match format {
            Format::F32 => unreachable!("packed above"),
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

/// # Safety
/// The instructions of `L`.
#[inline(always)]
unsafe fn pack_f32<L: Lanes>(args: Args) {
    let Args { thirds, weight, columns, input, panel, .. } = args;
    let of_block = thirds.map_or(OF_BLOCK, thirds::words_of_block) * PANEL;
    // Some of k at a time, which stay near while the columns are written.
    for (panel, first) in panel.chunks_mut(of_block).zip((0..input).step_by(OF_BLOCK)) {
        let mut block = [0.0; OF_BLOCK * PANEL];
        for (column, row) in weight.chunks_exact(input).take(columns).enumerate() {
            let to = block[column..].iter_mut().step_by(PANEL);
            to.zip(&row[first..]).for_each(|(to, &w)| *to = w);
        }
        match thirds {
            // SAFETY: the caller's; the panel has room for a block's thirds.
            Some(thirds) => unsafe { split_block::<L>(&block, thirds, panel.as_mut_ptr()) },
            None => panel.copy_from_slice(&block[..panel.len()]),
        }
    }
}

/// The nearest bf16, the even one of two; NaN stays NaN.
pub(crate) fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}
