//! Embedding: rows of three tables, summed and normalised in one pass over memory.

use std::mem::MaybeUninit;

use crate::{
    Isa,
    lanes::{Lanes, MAX_LANES, on_isa},
    norm::{ROWS, normalise_row},
    team::share_chunks,
};

/// A table of rows, and which of them are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    /// Rows one after another.
    pub table: Table<'a>,
    /// A row each.
    pub ids: &'a [u32],
}

/// The numbers of a table.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a> {
    /// f32.
    F32(&'a [f32]),
    /// The bits of f16.
    F16(&'a [u16]),
}

impl Table<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::F16(numbers) => numbers.len(),
        }
    }

    /// `n` numbers from `start` on, and zeros.
    ///
    /// # Safety
    /// The instructions of `L`; so many numbers.
    #[inline(always)]
    unsafe fn load_first<L: Lanes>(&self, start: usize, n: usize) -> L {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::F32(numbers) => L::load_first(numbers.as_ptr().add(start), n),
                Self::F16(numbers) if n == L::N => L::load_f16(numbers.as_ptr().add(start)),
                Self::F16(numbers) => {
                    let mut few = [0; MAX_LANES];
                    few[..n].copy_from_slice(&numbers[start..start + n]);
                    L::load_f16(few.as_ptr())
                }
            }
        }
    }
}

/// An id beyond its table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("id {id} has no row: expected below {rows}")]
pub struct NoRow {
    /// The first such id.
    pub id: u32,
    /// The table's rows.
    pub rows: usize,
}

/// The layer normalisation of `(a + b) + c`, row by row, where a, b and c are rows of three tables.
///
/// # Errors
/// [`NoRow`] for an id beyond its table.
///
/// # Examples
/// ```
/// use mha_kernels::{Isa, Lookup, Table, embed_layer_norm};
///
/// let words = Lookup { table: Table::F32(&[0., 0., 1000., 1002.]), ids: &[1] };
/// let types = Lookup { table: Table::F16(&[0x3c00; 2]), ids: &[0] }; // ones
/// let y = embed_layer_norm(Isa::SCALAR, [words, types, types], &[1.; 2], &[5.; 2], 0.0)?;
/// assert_eq!(y, [4., 6.]); // 1002 and 1004 are −1 and 1 from their mean
/// # Ok::<(), mha_kernels::NoRow>(())
/// ```
///
/// # Panics
/// If the tables are not of whole rows of the width of `weight`, or the ids not as many for each.
pub fn embed_layer_norm(
    isa: Isa,
    tables: [Lookup; 3],
    weight: &[f32],
    bias: &[f32],
    eps: f32,
) -> Result<Vec<f32>, NoRow> {
    let (width, n) = (weight.len().max(1), tables[0].ids.len());
    assert_eq!(bias.len(), weight.len(), "one bias per weight");
    for Lookup { table, ids } in tables {
        assert!(table.len() % width == 0 && ids.len() == n, "tables of whole rows, an id each");
        let rows = table.len() / width;
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= rows) {
            return Err(NoRow { id, rows });
        }
    }
    let mut out = Vec::with_capacity(n * width);
    let spare = &mut out.spare_capacity_mut()[..n * width];
    share_chunks(spare, ROWS * width, |i, out| {
        let (first, rows) = (i * ROWS, out.len() / width);
        let tables = tables.map(|t| Lookup { ids: &t.ids[first..first + rows], ..t });
        let args = Args { tables, weight, bias, eps, out };
        on_isa!(isa, embed, args: Args);
    });
    // SAFETY: every chunk of it has been written.
    unsafe { out.set_len(n * width) };
    Ok(out)
}

struct Args<'a> {
    tables: [Lookup<'a>; 3],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    out: &'a mut [MaybeUninit<f32>],
}

/// # Safety
/// The instructions of `L`; ids within their tables, `out` of a row for each.
#[inline(always)]
unsafe fn embed<L: Lanes>(args: Args) {
    let Args { tables: [a, b, c], weight, bias, eps, out } = args;
    let width = weight.len();
    for i in 0..a.ids.len() {
        // SAFETY: the ids have rows, and `column + n` is within a row.
        unsafe {
            let row = out.as_mut_ptr().cast::<f32>().add(i * width);
            for column in (0..width).step_by(L::N) {
                let n = L::N.min(width - column);
                let [a, b, c] = [a, b, c]
                    .map(|t| t.table.load_first::<L>(t.ids[i] as usize * width + column, n));
                a.add(b).add(c).store_first(row.add(column), n);
            }
            normalise_row::<L>(row, weight, bias, eps);
        }
    }
}
