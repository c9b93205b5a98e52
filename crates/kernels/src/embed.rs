//! Embedding: rows of three tables, summed and layer-normalised in one pass over memory.

use std::mem::MaybeUninit;

use crate::{
    isa::Isa,
    norm::{ROWS_PER_CHUNK, normalise_row},
    parallel::parallel_chunks,
    simd::{LANES, RegisterTile, SimdKernel, Vector},
};

/// A table and the ids of its rows to look up.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    /// The table.
    pub table: EmbeddingTable<'a>,
    /// A row index per token, `(N,)`.
    pub ids: &'a [u32],
}

/// An embedding table, row-major.
#[derive(Clone, Copy, Debug)]
pub enum EmbeddingTable<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// The bits of f16 values.
    F16(&'a [u16]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
}

impl EmbeddingTable<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) | Self::Bf16(values) => values.len(),
        }
    }

    /// Reads `n` values from `start` on; the other lanes are 0.
    ///
    /// # Safety
    /// The CPU supports the instructions of `V`; the values are within the table.
    #[inline(always)]
    unsafe fn load<V: Vector>(&self, start: usize, n: usize) -> V {
        let mut padded = [0; LANES];
        let mut of_vector = |values: &[u16]| {
            if n == LANES {
                return values[start..].as_ptr();
            }
            padded[..n].copy_from_slice(&values[start..start + n]);
            padded.as_ptr()
        };
        // SAFETY: upheld by the caller; `padded` has room for the widest vector.
        unsafe {
            match self {
                Self::F32(values) => V::load_partial(values.as_ptr().add(start), n),
                Self::F16(values) => V::load_f16(of_vector(values)),
                Self::Bf16(values) => V::load_bf16(of_vector(values)),
            }
        }
    }
}

/// An id is not below the number of rows of its table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("id {id} is out of range: expected an id below {rows} (the number of rows of the table)")]
pub struct IdOutOfRange {
    /// The first id that is out of range.
    pub id: u32,
    /// The number of rows of the table.
    pub rows: usize,
}

/// `LayerNorm((a + b) + c)` for each token, where a, b and c are rows of three tables.
///
/// # Shapes
/// Tables: `(rows, E)`; ids: `(N,)`; `weight`, `bias`: `(E,)`; returns `(N, E)`.
///
/// # Errors
/// [`IdOutOfRange`] if an id is not below the number of rows of its table.
///
/// # Examples
/// ```
/// use mha_kernels::{EmbeddingTable, Isa, Lookup, embed_layer_norm};
///
/// let words = Lookup { table: EmbeddingTable::F32(&[0., 0., 1000., 1002.]), ids: &[1] };
/// let types = Lookup { table: EmbeddingTable::F16(&[0x3c00; 2]), ids: &[0] }; // ones
/// let y = embed_layer_norm(Isa::SCALAR, [words, types, types], &[1.; 2], &[5.; 2], 0.0)?;
/// assert_eq!(y, [4., 6.]); // 1002 and 1004 are −1 and 1 from their mean
/// # Ok::<(), mha_kernels::IdOutOfRange>(())
/// ```
///
/// # Panics
/// If a table is not whole rows of the width of `weight`, if the numbers of ids differ, or if the
/// lengths of `weight` and `bias` differ.
pub fn embed_layer_norm(
    isa: Isa,
    tables: [Lookup; 3],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) -> Result<Vec<f32>, IdOutOfRange> {
    let (width, n) = (weight.len(), tables[0].ids.len());
    assert_eq!(bias.len(), weight.len(), "bias: expected the length of weight");
    for Lookup { table, ids } in tables {
        // A table of width 0 must be empty: only 0 is a multiple of 0.
        let is_whole = table.len().is_multiple_of(width);
        assert!(is_whole, "table: expected whole rows of {width} values");
        assert_eq!(ids.len(), n, "ids: expected the same number for each table");
        let rows = table.len().checked_div(width).unwrap_or(0);
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= rows) {
            return Err(IdOutOfRange { id, rows });
        }
    }
    if n * width == 0 {
        return Ok(vec![]);
    }
    let mut out = Vec::with_capacity(n * width);
    let spare = &mut out.spare_capacity_mut()[..n * width];
    parallel_chunks(spare, ROWS_PER_CHUNK * width, |i, out| {
        let (first, rows) = (i * ROWS_PER_CHUNK, out.len() / width);
        let tables = tables.map(|t| Lookup { ids: &t.ids[first..first + rows], ..t });
        let args = Args { tables, weight, bias, eps, out };
        isa.run(args);
    });
    // SAFETY: every chunk has been written.
    unsafe { out.set_len(n * width) };
    Ok(out)
}

/// The ids are within their tables, and `out` has a row for each token.
struct Args<'a> {
    tables: [Lookup<'a>; 3],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [MaybeUninit<f32>],
}

impl SimdKernel for Args<'_> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile>(self) {
        let Args { tables: [a, b, c], weight, bias, eps, out } = self;
        let width = weight.len();
        for i in 0..a.ids.len() {
            // SAFETY: the ids are within their tables, and `column + n` is within a row.
            unsafe {
                let row = out.as_mut_ptr().cast::<f32>().add(i * width);
                for column in (0..width).step_by(LANES) {
                    let n = LANES.min(width - column);
                    let [a, b, c] =
                        [a, b, c].map(|t| t.table.load::<V>(t.ids[i] as usize * width + column, n));
                    a.add(b).add(c).store_partial(row.add(column), n);
                }
                normalise_row::<V>(row, row, weight, bias, eps);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scaled;

    /// The value of an f16, by its definition.
    fn f16_value(bits: u16) -> f32 {
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
        let magnitude = match exponent {
            0 => fraction * 2f32.powi(-24),
            31 if fraction == 0.0 => f32::INFINITY,
            31 => f32::NAN,
            _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
        };
        if bits < 0x8000 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_f16_is_widened_exactly() {
        let every = (0..=u16::MAX).step_by(scaled(1, 64)).cycle();
        let bits: Vec<u16> = every.take(19 * scaled(3450, 54)).collect();
        let wide: Vec<f32> = bits.iter().map(|&bits| f16_value(bits)).collect();
        let ids: Vec<u32> = (0..bits.len() as u32 / 19).collect();
        let zero_ids = vec![0; ids.len()];
        for isa in Isa::available() {
            let zeros = Lookup { table: EmbeddingTable::F32(&[0.0; 19]), ids: &zero_ids };
            let embed = |table| {
                let words = Lookup { table, ids: &ids };
                embed_layer_norm(isa, [words, zeros, zeros], &[1.0; 19], &[0.0; 19], 1.0).unwrap()
            };
            let (half, wide) =
                (embed(EmbeddingTable::F16(&bits)), embed(EmbeddingTable::F32(&wide)));
            let same = |(x, y): (&f32, &f32)| x == y || x.is_nan() && y.is_nan();
            assert!(half.iter().zip(&wide).all(same), "{}", isa.name());
            assert!(half.iter().filter(|x| x.is_finite()).count() > bits.len() / 10 * 9);
        }
    }

    #[test]
    fn every_bf16_is_widened_exactly() {
        let every = (0..=u16::MAX).step_by(scaled(1, 64)).cycle();
        let bits: Vec<u16> = every.take(19 * scaled(3450, 54)).collect();
        let wide: Vec<f32> =
            bits.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect();
        let ids: Vec<u32> = (0..bits.len() as u32 / 19).collect();
        for isa in Isa::available() {
            let embed = |table| {
                let words = Lookup { table, ids: &ids };
                let zeros =
                    Lookup { table: EmbeddingTable::F32(&[0.0; 19]), ids: &vec![0; ids.len()] };
                embed_layer_norm(isa, [words, zeros, zeros], &[1.0; 19], &[0.0; 19], 1.0).unwrap()
            };
            let (half, wide) =
                (embed(EmbeddingTable::Bf16(&bits)), embed(EmbeddingTable::F32(&wide)));
            let same = |(x, y): (&f32, &f32)| x == y || x.is_nan() && y.is_nan();
            assert!(half.iter().zip(&wide).all(same), "{}", isa.name());
        }
    }

    #[test]
    fn an_id_beyond_its_table_is_an_error() {
        let table = EmbeddingTable::F32(&[0.0; 6]);
        let (valid, invalid) = (Lookup { table, ids: &[1, 2] }, Lookup { table, ids: &[2, 3] });
        let embed = |tables| embed_layer_norm(Isa::SCALAR, tables, &[1.0; 2], &[0.0; 2], 1e-5);
        assert_eq!(embed([valid; 3]), Ok(vec![0.0; 4]));
        let error = IdOutOfRange { id: 3, rows: 3 };
        assert_eq!(embed([valid, valid, invalid]), Err(error));
    }

    #[test]
    #[should_panic(expected = "table: expected whole rows of 0 values")]
    fn a_table_with_values_for_rows_of_width_0_panics() {
        let one = Lookup { table: EmbeddingTable::F32(&[1.0]), ids: &[0] };
        let _ = embed_layer_norm(Isa::SCALAR, [one; 3], &[], &[], 1e-5);
    }
}
