//! Exact brute-force search of a file of dense vectors, and the parts that the searches of all kinds
//! have in common. All threads are used.

use arrow_array::{
    Array, ArrayRef, RecordBatch,
    cast::AsArray,
    types::{Float16Type, Float32Type},
};
use arrow_schema::SchemaRef;
use encoder::{EmbeddingKind, Nearest, Search};
use half::{
    f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use rayon::prelude::*;

use crate::{
    Error, InputError, Result, VectorsError,
    catch_panic::{catch_panic, catch_panics},
    vectors::{
        dtype::VectorDtype,
        file::{Content, RowType, VectorFile},
        npy::NpyArray,
    },
};

/// The number of rows that are read from a Parquet file, or converted from f16 to f32, at a time.
const ROWS_PER_BATCH: usize = 4096;
/// [`ROWS_PER_BATCH`] of rows with a vector per token, which are a hundred times as large.
const MULTI_ROWS_PER_BATCH: usize = 128;
/// The number of batches of an Arrow file that are read before they are scanned in parallel.
const BATCHES: usize = 32;
/// The number of batches of an Arrow file per parallel task.
const BATCHES_PER_PART: usize = 4;

/// The arrays of consecutive rows of the column of vectors.
pub(crate) type Columns<'a> = &'a mut dyn Iterator<Item = Result<ArrayRef>>;

impl VectorFile {
    /// The rows of a file of dense vectors that are nearest to each query of `search`.
    ///
    /// # Errors
    /// - [`VectorsError::Kind`] if the vectors are not dense
    /// - [`Error::Encoder`] with [`encoder::InputError::VectorWidth`] if the queries do not have
    ///   [`Self::dimension`] values
    /// - [`VectorsError::InvalidRow`] for a row whose cosine is NaN
    /// - [`VectorsError::NullVector`] if a vector is null or contains null
    /// - [`VectorsError::Npy`] if the values of a .npy file do not start at a multiple of their
    ///   size
    /// - [`InputError::Parquet`], [`InputError::Arrow`] if the file is damaged
    pub fn scan(&self, search: &Search) -> Result<Nearest> {
        let RowType::Dense { dimension: got } = self.row_type else {
            return Err(self.other_kind(EmbeddingKind::Dense));
        };
        if let Some(expected) = search.query_width().filter(|&expected| expected != got) {
            return Err(
                encoder::Error::Input(encoder::InputError::VectorWidth { expected, got }).into()
            );
        }
        if let Content::Npy(array) = &self.content {
            return self.scan_npy(search, array);
        }
        let scan = |first, columns: Columns| {
            let (mut found, mut row) = (search.no_hits(), first);
            for column in columns {
                let column = column?;
                found.merge(self.scan_column(search, got, row, &column)?);
                row += column.len() as u64;
            }
            Ok(found)
        };
        self.scan_parts(|| search.no_hits(), scan, Nearest::merge)
    }

    /// The error for vectors of another kind than the caller's.
    pub(crate) fn other_kind(&self, expected: EmbeddingKind) -> Error {
        VectorsError::Kind { name: self.name.clone(), expected, got: self.kind() }.into()
    }

    /// The error for null in the rows from `start` to `end`.
    pub(crate) fn null_vector(&self, start: u64, end: u64) -> Error {
        let (name, column) = (self.name.clone(), self.column);
        VectorsError::NullVector { name, column, start, end }.into()
    }

    /// The error for a row that the encoder refuses.
    pub(crate) fn invalid_row(&self, source: encoder::Error) -> Error {
        let (name, source) = (self.name.clone(), Box::new(source));
        VectorsError::InvalidRow { name, source }.into()
    }

    /// Scans the column of vectors of a table in parallel: `scan` takes the number of the first row
    /// of a part and the arrays of the part, `none` is the result without rows, and `merge` adds
    /// the result of another part.
    ///
    /// # Errors
    /// The errors of `scan`; [`InputError::Parquet`], [`InputError::Arrow`] if the file is damaged.
    pub(crate) fn scan_parts<T: Send>(
        &self,
        none: impl Fn() -> T + Sync,
        scan: impl Fn(u64, Columns) -> Result<T> + Sync,
        merge: impl Fn(&mut T, T) + Sync,
    ) -> Result<T> {
        match &self.content {
            Content::Npy(_) => Ok(none()), // it has no table
            Content::Parquet(metadata) => self.scan_parquet(metadata, none, scan, merge),
            Content::Arrow(schema) => self.scan_arrow(schema, none, scan, merge),
        }
    }

    fn scan_npy(&self, search: &Search, array: &NpyArray) -> Result<Nearest> {
        let values = &self.bytes[array.start..];
        let misaligned = |_| {
            Error::Vectors(VectorsError::Npy {
                name: self.name.clone(),
                expected: format!(
                    "{} values at a multiple of {} bytes (save the array again with numpy.save)",
                    array.dtype,
                    array.dtype.size()
                ),
                got: format!("values at byte {}", array.start),
            })
        };
        let found = match array.dtype {
            VectorDtype::F32 => {
                search.scan(0, bytemuck::try_cast_slice(values).map_err(misaligned)?)
            }
            VectorDtype::F16 => {
                let bits: &[u16] = bytemuck::try_cast_slice(values).map_err(misaligned)?;
                scan_f16(search, 0, array.dimension, bits.reinterpret_cast())
            }
        };
        found.map_err(|error| self.invalid_row(error))
    }

    /// Scans the row groups in parallel.
    fn scan_parquet<T: Send>(
        &self,
        metadata: &ArrowReaderMetadata,
        none: impl Fn() -> T + Sync,
        scan: impl Fn(u64, Columns) -> Result<T> + Sync,
        merge: impl Fn(&mut T, T) + Sync,
    ) -> Result<T> {
        let error = |source| Error::Input(InputError::Parquet { name: self.name.clone(), source });
        let groups = metadata.metadata().row_groups();
        let firsts = first_rows(groups.iter().map(|group| group.num_rows() as u64));
        let parts = firsts.into_par_iter().enumerate().map(|(group, first)| {
            let builder = self.parquet(metadata, |name| name == self.column);
            let rows = match self.row_type {
                RowType::Multi { .. } => MULTI_ROWS_PER_BATCH,
                RowType::Dense { .. } | RowType::Sparse => ROWS_PER_BATCH,
            };
            let builder = builder.with_row_groups(vec![group]).with_batch_size(rows);
            let reader = catch_panic(|| builder.build()).map_err(error)?;
            let batches = catch_panics(reader);
            let mut columns = batches
                .map(|batch| Ok(self.vectors(&batch.map_err(|source| error(source.into()))?)));
            scan(first, &mut columns)
        });
        parts.try_reduce(&none, |mut found, part| {
            merge(&mut found, part);
            Ok(found)
        })
    }

    /// Scans [`BATCHES`] batches at a time in parallel, or one per thread of a vector per token.
    fn scan_arrow<T: Send>(
        &self,
        schema: &SchemaRef,
        none: impl Fn() -> T,
        scan: impl Fn(u64, Columns) -> Result<T> + Sync,
        merge: impl Fn(&mut T, T),
    ) -> Result<T> {
        let (batches_per_part, batches_per_group) = match self.row_type {
            // A batch of rows with a vector per token is large.
            RowType::Multi { .. } => (1, rayon::current_num_threads()),
            RowType::Dense { .. } | RowType::Sparse => (BATCHES_PER_PART, BATCHES),
        };
        let (mut found, mut read) = (none(), 0);
        let mut batches = self.arrow(schema, |name| name == self.column)?;
        loop {
            let group = batches.by_ref().take(batches_per_group).collect::<Result<Vec<_>>>()?;
            if group.is_empty() {
                return Ok(found);
            }
            let rows = |batches: &[RecordBatch]| -> u64 {
                batches.iter().map(|batch| batch.num_rows() as u64).sum()
            };
            let firsts = first_rows(group.chunks(batches_per_part).map(rows));
            let parts = group.par_chunks(batches_per_part).zip(firsts);
            let parts = parts.map(|(batches, first)| {
                scan(read + first, &mut batches.iter().map(|batch| Ok(self.vectors(batch))))
            });
            for part in parts.collect::<Result<Vec<_>>>()? {
                merge(&mut found, part);
            }
            read += rows(&group);
        }
    }

    /// The column of vectors of a batch that was read for this column.
    fn vectors(&self, batch: &RecordBatch) -> ArrayRef {
        batch.column_by_name(self.column).expect("the column that was requested").clone()
    }

    /// Scans an array of vectors, the first of which is row `first` of the file.
    fn scan_column(
        &self,
        search: &Search,
        dimension: usize,
        first: u64,
        column: &dyn Array,
    ) -> Result<Nearest> {
        let vectors = column.as_fixed_size_list();
        if vectors.logical_null_count() > 0 || vectors.values().logical_null_count() > 0 {
            let end = first + vectors.len() as u64;
            return Err(self.null_vector(first, end));
        }
        let found = match vectors.values().as_primitive_opt::<Float32Type>() {
            Some(values) => search.scan(first, values.values()),
            None => {
                let halves = vectors.values().as_primitive::<Float16Type>().values();
                scan_f16(search, first, dimension, halves)
            }
        };
        found.map_err(|error| self.invalid_row(error))
    }
}

/// The first row of each part, given the number of rows of each part.
fn first_rows(counts: impl Iterator<Item = u64>) -> Vec<u64> {
    let firsts = counts.scan(0, |next, count| {
        *next += count;
        Some(*next - count)
    });
    firsts.collect()
}

fn scan_f16(
    search: &Search,
    first: u64,
    dimension: usize,
    rows: &[f16],
) -> encoder::Result<Nearest> {
    // The product can overflow: a file without rows can have any dimension.
    let parts = rows.par_chunks(ROWS_PER_BATCH.saturating_mul(dimension)).enumerate();
    let parts = parts.map(|(part, halves)| {
        let mut values = vec![0.0; halves.len()];
        halves.convert_to_f32_slice(&mut values);
        search.scan(first + (part * ROWS_PER_BATCH) as u64, &values)
    });
    let mut found = search.no_hits();
    for part in parts.collect::<encoder::Result<Vec<_>>>()? {
        found.merge(part);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::npy;

    #[test]
    fn queries_of_another_width_are_an_error() {
        // Two rows of four values could be read as four rows of two.
        let mut bytes = npy::header(VectorDtype::F32, 2, 4);
        bytes.extend([1f32; 8].map(f32::to_le_bytes).as_flattened());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vectors.npy");
        std::fs::write(&path, bytes).unwrap();

        let file = VectorFile::open(&path).unwrap();
        let scan = |width| file.scan(&Search::new(&[vec![1.0; width]], 1).unwrap());
        assert_eq!(scan(4).unwrap().into_hits()[0][0].row, 0);
        let error = scan(2).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a vector has length 4: expected 2, the length of each query"
        );
    }

    #[test]
    fn a_file_without_rows_may_have_any_dimension() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vectors.npy");
        std::fs::write(&path, npy::header(VectorDtype::F16, 0, 1 << 52)).unwrap();
        let file = VectorFile::open(&path).unwrap();
        assert!(file.scan(&Search::new(&[], 1).unwrap()).unwrap().into_hits().is_empty());
    }
}
