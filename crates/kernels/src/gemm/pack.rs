//! Weights, packed into panels of nr columns of the product ([`RegisterTile::NR`]).

use std::{fmt, ops::Range};

use rayon::prelude::*;

use super::{
    bf16x3::split_block,
    int8::{quantise_symmetric, rotate},
};
use crate::{
    buffer::{AlignedBuf, F32_PER_LINE, SharedBytes, Values},
    compute_type::ComputeType,
    isa::Isa,
    simd::{LANES, MAX_NR, Products, RegisterTile, ScalarVector, SimdKernel, bf16_bits, bf16x3},
};

/// The largest input width of [`ComputeType::Int8`], so that the sum of all products fits an i32.
pub const MAX_INT8_INPUT: usize = 1 << 16;

/// The weight `(out, in)` and the bias `(out,)` of a linear layer, packed for matrix products.
///
/// # Examples
/// ```
/// use mha_kernels::{Activation, ComputeType, Isa, PackedLinear, linear};
///
/// let isa = Isa::get()?;
/// let (weight, bias) = ([1., 2., 3., 4., 5., 6.], [10., 20., 30.]);
/// let w = PackedLinear::pack(isa, ComputeType::F32, &weight, 3, 2, Some(&bias));
/// let y = linear(isa, &[1., -1.], &[&w], Activation::None);
/// assert_eq!(y, [10. + 1. - 2., 20. + 3. - 4., 30. + 5. - 6.]);
/// assert_eq!(w.unpack(), weight);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
#[derive(Clone)]
pub struct PackedLinear {
    compute_type: ComputeType,
    /// bf16 terms per value, if packed as [`bf16x3`].
    terms: Option<usize>,
    out: usize,
    input: usize,
    /// k in packed lanes; for BF16x3, with three terms per value.
    k_lanes: usize,
    /// The products that the weight is packed for.
    products: Products,
    /// Lanes of a panel: `nr · k_lanes`, or two thirds of that if values have two terms.
    panel_len: usize,
    panels: Values,
    /// Padded with zeros to whole panels; all zeros without a bias.
    bias: Vec<f32>,
    has_bias: bool,
    /// int8: the scale of each output column.
    scales: Vec<f32>,
    /// int8: the sum of each column's quantised weights.
    column_sums: Vec<f32>,
}

/// Prints the shape, not the weights.
impl fmt::Debug for PackedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compute_type, input, out, has_bias, .. } = self;
        write!(f, "PackedLinear({input} to {out}, {compute_type:?}, bias: {has_bias})")
    }
}

/// The arrays of a [`PackedLinear`], of f32 values or 32-bit packed lanes. Their layout depends on
/// the ISA.
#[derive(Clone, Copy, Debug)]
pub struct PackedArrays<A> {
    /// The packed weight.
    pub panels: A,
    /// The bias, padded with zeros; `None` without a bias.
    pub bias: Option<A>,
    /// int8: the scale of each output column; `None` for other compute types.
    pub scales: Option<A>,
    /// int8: the sum of each column's quantised weights; `None` for other
    /// compute types.
    pub column_sums: Option<A>,
}

/// A packed panel: up to nr columns of the product.
pub(crate) struct Panel<'a> {
    lanes: &'a [f32],
    /// Lanes per step along k.
    pub(super) nr: usize,
    /// Terms per value of a BF16x3 panel ([`bf16x3`]). Other panels use 3, which makes
    /// `k_lanes · terms / 3` equal `k_lanes`.
    pub(crate) terms: usize,
    pub(crate) bias: &'a [f32],
    pub(crate) scales: &'a [f32],
    pub(crate) column_sums: &'a [f32],
    /// The output column of the panel's first column.
    pub(crate) column: usize,
    /// Columns of the product in this panel; the others are padding.
    pub(crate) columns: usize,
}

impl<'a> Panel<'a> {
    /// The part of the panel for a range of lanes of k.
    pub(crate) fn k_range(&self, k_lanes: Range<usize>) -> &'a [f32] {
        let offset = |k_lane: usize| k_lane * self.terms / 3 * self.nr;
        &self.lanes[offset(k_lanes.start)..offset(k_lanes.end)]
    }
}

/// k in packed lanes; for BF16x3, with three terms per value.
fn k_lanes(isa: Isa, compute_type: ComputeType, k: usize) -> usize {
    let Products { is_bf16x3, has_lane_pairs, .. } = isa.products(compute_type);
    let lanes = k.div_ceil(compute_type.values_per_lane());
    match (is_bf16x3, has_lane_pairs) {
        (true, _) => bf16x3::lanes(k),
        (false, true) => lanes.next_multiple_of(2),
        (false, false) => lanes,
    }
}

/// The index in a panel of a column's lane.
fn lane_index(products: Products, k_lane: usize, column: usize) -> usize {
    let Products { nr, has_lane_pairs, .. } = products;
    if has_lane_pairs { (k_lane / 2 * nr + column) * 2 + k_lane % 2 } else { k_lane * nr + column }
}

impl PackedLinear {
    /// Packs a weight `(out, input)` and a bias `(out,)`.
    ///
    /// # Panics
    /// If a slice does not have the stated shape, or if `input` exceeds 65,536 for int8.
    pub fn pack(
        isa: Isa,
        compute_type: ComputeType,
        weight: &[f32],
        out: usize,
        input: usize,
        bias: Option<&[f32]>,
    ) -> Self {
        assert_eq!(weight.len(), out * input, "weight: expected shape (out, in)");
        Self::pack_rows(
            isa,
            compute_type,
            || weight,
            |weight, rows| &weight[rows.start * input..rows.end * input],
            (out, input),
            bias,
        )
    }

    /// [`Self::pack`] of a weight that is not in memory in f32: `read(buffer, first, rows)` writes
    /// the rows from `first` on to `rows`, which has room for whole rows. Only the rows that are
    /// being packed are in memory in f32. Several threads call `read`, twice for a row if the
    /// layout depends on the values. `buffer` makes a buffer that consecutive calls share.
    ///
    /// # Panics
    /// As [`Self::pack`].
    ///
    /// # Examples
    /// ```
    /// use mha_kernels::{ComputeType, Isa, PackedLinear};
    ///
    /// let bf16 = [0x3f80u16, 0x4000, 0x4040, 0x4080]; // 1, 2, 3, 4
    /// let read = |_: &mut (), first: usize, rows: &mut [f32]| {
    ///     for (x, bits) in rows.iter_mut().zip(&bf16[first * 2..]) {
    ///         *x = f32::from_bits(u32::from(*bits) << 16);
    ///     }
    /// };
    /// let w = PackedLinear::pack_with(Isa::get()?, ComputeType::F32, || (), read, 2, 2, None);
    /// assert_eq!(w.unpack(), [1., 2., 3., 4.]);
    /// # Ok::<(), mha_kernels::IsaError>(())
    /// ```
    pub fn pack_with<B>(
        isa: Isa,
        compute_type: ComputeType,
        buffer: impl Fn() -> B + Sync + Send,
        read: impl Fn(&mut B, usize, &mut [f32]) + Sync,
        out: usize,
        input: usize,
        bias: Option<&[f32]>,
    ) -> Self {
        Self::pack_rows(
            isa,
            compute_type,
            || (buffer(), vec![]),
            |(buffer, rows), range| {
                rows.resize(range.len() * input, 0.0);
                read(buffer, range.start, rows);
                rows
            },
            (out, input),
            bias,
        )
    }

    /// Packs the rows that `rows` returns, which may be in a buffer that `buffer` made.
    fn pack_rows<B>(
        isa: Isa,
        compute_type: ComputeType,
        buffer: impl Fn() -> B + Sync + Send,
        rows: impl for<'b> Fn(&'b mut B, Range<usize>) -> &'b [f32] + Sync,
        (out, input): (usize, usize),
        bias: Option<&[f32]>,
    ) -> Self {
        assert!(
            compute_type != ComputeType::Int8 || input <= MAX_INT8_INPUT,
            "int8: the input width exceeds {MAX_INT8_INPUT}"
        );
        let products @ Products { nr, is_bf16x3, .. } = isa.products(compute_type);
        let padded = out.next_multiple_of(nr);
        let k_lanes = k_lanes(isa, compute_type, input);
        let rows_of_panel = |p: usize| p * nr..out.min((p + 1) * nr);
        let terms = is_bf16x3.then(|| {
            let panels = (0..padded / nr).into_par_iter();
            let needed = |buffer: &mut B, p| bf16x3::terms_needed(rows(buffer, rows_of_panel(p)));
            panels.map_init(&buffer, needed).max().unwrap_or(2)
        });
        let panel_len = nr * k_lanes * terms.unwrap_or(3) / 3;
        let mut panels = AlignedBuf::par_zeros(padded / nr * panel_len);
        let (mut scales, mut column_sums) = (vec![0.0; padded], vec![0.0; padded]);
        let chunks = panels.as_mut_slice().par_chunks_exact_mut(panel_len.max(1));
        let chunks = chunks.zip(scales.par_chunks_mut(nr)).zip(column_sums.par_chunks_mut(nr));
        chunks.enumerate().for_each_init(&buffer, |buffer, (p, ((panel, scales), column_sums))| {
            let (weight, columns) = (rows(buffer, rows_of_panel(p)), rows_of_panel(p).len());
            isa.run(PackPanel {
                compute_type,
                terms,
                products,
                weight,
                columns,
                input,
                panel,
                scales,
                column_sums,
            });
        });
        let mut padded_bias = vec![0.0; padded];
        if let Some(bias) = bias {
            assert_eq!(bias.len(), out, "bias: expected shape (out,)");
            padded_bias[..out].copy_from_slice(bias);
        }
        let (bias, has_bias) = (padded_bias, bias.is_some());
        Self {
            compute_type,
            terms,
            out,
            input,
            k_lanes,
            products,
            panel_len,
            panels: Values::Owned(panels),
            bias,
            has_bias,
            scales,
            column_sums,
        }
    }

    /// The packed arrays, from which [`Self::from_arrays`] makes the same weight on this ISA.
    pub fn arrays(&self) -> PackedArrays<&[f32]> {
        let is_int8 = self.compute_type == ComputeType::Int8;
        PackedArrays {
            panels: &self.panels.as_slice()[..self.bias.len() / self.products.nr * self.panel_len],
            bias: self.has_bias.then_some(&self.bias[..]),
            scales: is_int8.then_some(&self.scales[..]),
            column_sums: is_int8.then_some(&self.column_sums[..]),
        }
    }

    /// A weight `(out, input)` from the arrays of a weight that was packed for the same ISA and
    /// compute type. The panels are used where they are; the other arrays are copied.
    ///
    /// Returns `None` if the arrays do not have the lengths of such a weight or do not start at
    /// multiples of 64 bytes, or if `scales` or `column_sums` is missing for int8 or present for
    /// another compute type.
    ///
    /// # Examples
    /// ```
    /// use std::sync::Arc;
    /// use mha_kernels::{ComputeType, Isa, PackedArrays, PackedLinear, SharedBytes};
    ///
    /// let isa = Isa::get()?;
    /// let (out, input) = (2, 2);
    /// let weight = PackedLinear::pack(isa, ComputeType::F32, &[1., 2., 3., 4.], out, input, None);
    /// let mut file: Vec<u8> = vec![0; 63]; // room to start at a multiple of 64 bytes
    /// file.extend(weight.arrays().panels.iter().flat_map(|value| value.to_ne_bytes()));
    /// let start = file.as_ptr().align_offset(64);
    /// file.copy_within(63.., start);
    /// let range = start..start + 4 * weight.arrays().panels.len();
    /// let panels = SharedBytes::new(Arc::new(file), range, 64).unwrap();
    /// let arrays = PackedArrays { panels, bias: None, scales: None, column_sums: None };
    /// let shared = PackedLinear::from_arrays(isa, ComputeType::F32, out, input, arrays).unwrap();
    /// assert_eq!(shared.unpack(), [1., 2., 3., 4.]);
    /// # Ok::<(), mha_kernels::IsaError>(())
    /// ```
    pub fn from_arrays(
        isa: Isa,
        compute_type: ComputeType,
        out: usize,
        input: usize,
        arrays: PackedArrays<SharedBytes>,
    ) -> Option<Self> {
        let PackedArrays { panels, bias, scales, column_sums } = arrays;
        let all = [Some(&panels), bias.as_ref(), scales.as_ref(), column_sums.as_ref()];
        if !all.into_iter().flatten().all(|array| array.is_aligned_to(4 * F32_PER_LINE)) {
            return None;
        }
        let products @ Products { nr, is_bf16x3, .. } = isa.products(compute_type);
        let (padded, k_lanes) = (out.next_multiple_of(nr), k_lanes(isa, compute_type, input));
        let per_panel = |terms: usize| nr * k_lanes * terms / 3;
        let len = panels.as_f32().len();
        let fits = |terms: &usize| padded / nr * per_panel(*terms) == len;
        let terms = if is_bf16x3 { Some([2, 3].into_iter().find(fits)?) } else { None };
        let is_int8 = compute_type == ComputeType::Int8;
        let is_padded = |array: &SharedBytes| array.as_f32().len() == padded;
        let are_valid = fits(&terms.unwrap_or(3))
            && [&scales, &column_sums].iter().all(|array| array.is_some() == is_int8)
            && [&bias, &scales, &column_sums].into_iter().flatten().all(is_padded);
        let or_zeros = |array: Option<SharedBytes>| {
            array.map_or_else(|| vec![0.0; padded], |array| array.as_f32().to_vec())
        };
        are_valid.then(|| Self {
            compute_type,
            terms,
            out,
            input,
            k_lanes,
            products,
            panel_len: per_panel(terms.unwrap_or(3)),
            panels: Values::Shared(panels),
            has_bias: bias.is_some(),
            bias: or_zeros(bias),
            scales: or_zeros(scales),
            column_sums: or_zeros(column_sums),
        })
    }

    /// The weight `(out, in)`, rounded to the compute type. f32 weights are exact, except on AMX:
    /// values below 2⁻¹¹⁰ have an absolute error below 2⁻¹³³, and values above 3.396e38 are NaN.
    pub fn unpack(&self) -> Vec<f32> {
        let mut weight = vec![0.0; self.out * self.input];
        let values_per_lane = self.compute_type.values_per_lane();
        for (n, row) in weight.chunks_mut(self.input.max(1)).enumerate() {
            let nr = self.products.nr;
            let panel = &self.panels.as_slice()[n / nr * self.panel_len..];
            let lane = |k_lane| panel[lane_index(self.products, k_lane, n % nr)];
            for (k, w) in row.iter_mut().enumerate() {
                let bits = lane(k / values_per_lane).to_bits();
                *w = match (self.compute_type, self.terms) {
                    (ComputeType::F32, Some(terms)) => bf16x3::join(terms, k, lane),
                    (ComputeType::F32, None) => f32::from_bits(bits),
                    (ComputeType::Bf16, _) => f32::from_bits(bits >> (16 * (k % 2)) << 16),
                    (ComputeType::Int8, _) => {
                        f32::from((bits >> (8 * (k % 4))) as u8 as i8) * self.scales[n]
                    }
                };
            }
            if self.compute_type == ComputeType::Int8 {
                let rotated = row.to_vec();
                // SAFETY: the scalar vector needs no special instructions; both rows have the same
                // length.
                unsafe { rotate::<ScalarVector, f32>(&rotated, row.as_mut_ptr()) };
            }
        }
        weight
    }

    /// The bias `(out,)`, if the layer has one.
    pub fn bias(&self) -> Option<&[f32]> {
        self.has_bias.then(|| &self.bias[..self.out])
    }

    /// The number format of the product's operands.
    pub fn compute_type(&self) -> ComputeType {
        self.compute_type
    }

    /// The output width.
    pub fn out(&self) -> usize {
        self.out
    }

    /// The input width.
    pub fn input(&self) -> usize {
        self.input
    }

    pub(crate) fn k_lanes(&self) -> usize {
        self.k_lanes
    }

    /// Whether kernels of this ISA can read the packed layout.
    pub(crate) fn is_for(&self, isa: Isa) -> bool {
        self.products == isa.products(self.compute_type)
    }

    /// The panels. `column` is the output column of the first panel's first column.
    pub(crate) fn panels(&self, column: usize) -> impl Iterator<Item = Panel<'_>> {
        let nr = self.products.nr;
        (0..self.out.div_ceil(nr)).map(move |p| Panel {
            lanes: &self.panels.as_slice()[p * self.panel_len..][..self.panel_len],
            terms: self.terms.unwrap_or(3),
            nr,
            bias: &self.bias[p * nr..][..nr],
            scales: &self.scales[p * nr..][..nr],
            column_sums: &self.column_sums[p * nr..][..nr],
            column: column + p * nr,
            columns: nr.min(self.out - p * nr),
        })
    }
}

/// A panel to be packed.
struct PackPanel<'a> {
    compute_type: ComputeType,
    terms: Option<usize>,
    products: Products,
    /// The rows of the weight that are the panel's columns.
    weight: &'a [f32],
    columns: usize,
    input: usize,
    panel: &'a mut [f32],
    scales: &'a mut [f32],
    column_sums: &'a mut [f32],
}

impl SimdKernel for PackPanel<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        match self.compute_type {
            // SAFETY: upheld by the caller.
            ComputeType::F32 => unsafe { pack_f32::<V>(self) },
            ComputeType::Bf16 => pack_bf16(self),
            // SAFETY: upheld by the caller.
            ComputeType::Int8 => unsafe { pack_int8::<V>(self) },
        }
    }
}

/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn pack_f32<V: RegisterTile>(panel: PackPanel) {
    let PackPanel { terms, weight, columns, input, panel, .. } = panel;
    let block_len = terms.map_or(bf16x3::BLOCK, bf16x3::lanes_per_block) * V::NR;
    // A block of k at a time, which stays in cache while its columns are written.
    for (panel, first) in panel.chunks_mut(block_len).zip((0..input).step_by(bf16x3::BLOCK)) {
        let mut block = [0.0; bf16x3::BLOCK * MAX_NR];
        for (column, row) in weight.chunks_exact(input).take(columns).enumerate() {
            let to = block[column..bf16x3::BLOCK * V::NR].iter_mut().step_by(V::NR);
            to.zip(&row[first..]).for_each(|(to, &w)| *to = w);
        }
        match terms {
            // SAFETY: upheld by the caller; the panel has room for the block's terms.
            Some(terms) => unsafe { split_block::<V>(&block, terms, panel.as_mut_ptr()) },
            None => panel.copy_from_slice(&block[..panel.len()]),
        }
    }
}

fn pack_bf16(panel: PackPanel) {
    let PackPanel { products, weight, columns, input, panel, .. } = panel;
    for (column, row) in weight.chunks_exact(input.max(1)).take(columns).enumerate() {
        for (k_lane, pair) in row.chunks(2).enumerate() {
            let high = pair.get(1).map_or(0, |&w| bf16_bits(w));
            let lane = f32::from_bits(u32::from(high) << 16 | u32::from(bf16_bits(pair[0])));
            panel[lane_index(products, k_lane, column)] = lane;
        }
    }
}

/// # Safety
/// The CPU supports the instructions of `V`.
#[inline(always)]
unsafe fn pack_int8<V: RegisterTile>(panel: PackPanel) {
    let PackPanel { products, weight, columns, input, panel, scales, column_sums, .. } = panel;
    let mut rotated = vec![0.0; input];
    let mut bytes = vec![128; input.next_multiple_of(LANES)];
    for (column, row) in weight.chunks_exact(input.max(1)).take(columns).enumerate() {
        // SAFETY: upheld by the caller; `rotated` has room for the row, `bytes` for the row in
        // whole vectors.
        unsafe {
            let range = rotate::<V, f32>(row, rotated.as_mut_ptr());
            let limits_pairs = products.adds_int8_pairs_in_i16;
            scales[column] = quantise_symmetric(&rotated, range, limits_pairs, bytes.as_mut_ptr());
        }
        bytes[input..].fill(128);
        let signed = bytes.iter().map(|&byte| i32::from(byte) - 128);
        column_sums[column] = signed.sum::<i32>() as f32; // exact: at most 127 · MAX_INT8_INPUT
        let lanes = bytes[..input.next_multiple_of(4)].as_chunks().0;
        for (k_lane, &four) in lanes.iter().enumerate() {
            let signed = u32::from_le_bytes(four) ^ 0x8080_8080;
            panel[lane_index(products, k_lane, column)] = f32::from_bits(signed);
        }
    }
}
