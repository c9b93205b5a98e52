//! Exact brute-force search of a file of vectors, on all threads.

use arrow_array::{
    Array, RecordBatch,
    cast::AsArray,
    types::{Float16Type, Float32Type},
};
use arrow_schema::SchemaRef;
use encoder::{Nearest, Search};
use half::{
    f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use rayon::prelude::*;

use crate::{
    EMBEDDING, Error, InputError, Result, VectorsError,
    catch_panic::{catch_panic, catch_panics},
    vectors::{
        dtype::VectorDtype,
        file::{Content, VectorFile},
        npy::NpyArray,
    },
};

/// The number of rows that are read from a Parquet file, or converted from f16 to f32, at a time.
const ROWS_PER_BATCH: usize = 4096;
/// The number of batches of an Arrow file that are read before they are scanned in parallel.
const BATCHES: usize = 32;

impl VectorFile {
    /// The rows of the file that are nearest to each query of `search`.
    ///
    /// # Errors
    /// - [`Error::Encoder`] with [`encoder::InputError::VectorWidth`] if the queries do not have
    ///   [`Self::dimension`] values, or with [`encoder::InputError::NotFinite`] for a row whose
    ///   cosine is NaN
    /// - [`VectorsError::NullVector`] if a vector is null or contains null
    /// - [`VectorsError::Npy`] if the values of a .npy file do not start at a multiple of their
    ///   size
    /// - [`InputError::Parquet`], [`InputError::Arrow`] if the file is damaged
    pub fn scan(&self, search: &Search) -> Result<Nearest> {
        let (expected, got) = (search.query_width(), self.dimension());
        if let Some(expected) = expected.filter(|&expected| expected != got) {
            return Err(
                encoder::Error::Input(encoder::InputError::VectorWidth { expected, got }).into()
            );
        }
        match &self.content {
            Content::Npy(array) => self.scan_npy(search, array),
            Content::Parquet(metadata) => self.scan_parquet(search, metadata),
            Content::Arrow(schema) => self.scan_arrow(search, schema),
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
        match array.dtype {
            VectorDtype::F32 => {
                Ok(search.scan(0, bytemuck::try_cast_slice(values).map_err(misaligned)?)?)
            }
            VectorDtype::F16 => {
                let bits: &[u16] = bytemuck::try_cast_slice(values).map_err(misaligned)?;
                scan_f16(search, 0, self.dimension(), bits.reinterpret_cast())
            }
        }
    }

    /// Scans the row groups in parallel.
    fn scan_parquet(&self, search: &Search, metadata: &ArrowReaderMetadata) -> Result<Nearest> {
        let error = |source| Error::Input(InputError::Parquet { name: self.name.clone(), source });
        let groups = metadata.metadata().row_groups();
        let firsts = first_rows(groups.iter().map(|group| group.num_rows() as u64));
        let parts = firsts.into_par_iter().enumerate().map(|(group, mut first)| {
            let builder = self.parquet(metadata, |name| name == EMBEDDING);
            let builder = builder.with_row_groups(vec![group]).with_batch_size(ROWS_PER_BATCH);
            let mut found = search.no_hits();
            let reader = catch_panic(|| builder.build()).map_err(error)?;
            for batch in catch_panics(reader) {
                let batch = batch.map_err(|source| error(source.into()))?;
                found.merge(self.scan_batch(search, first, &batch)?);
                first += batch.num_rows() as u64;
            }
            Ok(found)
        });
        parts.try_reduce(
            || search.no_hits(),
            |mut found, part| {
                found.merge(part);
                Ok(found)
            },
        )
    }

    /// Scans [`BATCHES`] batches at a time in parallel.
    fn scan_arrow(&self, search: &Search, schema: &SchemaRef) -> Result<Nearest> {
        let (mut found, mut read) = (search.no_hits(), 0);
        let mut batches = self.arrow(schema, |name| name == EMBEDDING)?;
        loop {
            let group = batches.by_ref().take(BATCHES).collect::<Result<Vec<_>>>()?;
            if group.is_empty() {
                return Ok(found);
            }
            let firsts = first_rows(group.iter().map(|batch| batch.num_rows() as u64));
            let parts = group.par_iter().zip(firsts);
            let parts = parts.map(|(batch, first)| self.scan_batch(search, read + first, batch));
            for part in parts.collect::<Result<Vec<_>>>()? {
                found.merge(part);
            }
            read += group.iter().map(|batch| batch.num_rows() as u64).sum::<u64>();
        }
    }

    /// Scans a batch whose first row is row `first` of the file.
    fn scan_batch(&self, search: &Search, first: u64, batch: &RecordBatch) -> Result<Nearest> {
        let column = batch.column_by_name(EMBEDDING).expect("the column that was requested");
        let vectors = column.as_fixed_size_list();
        if vectors.logical_null_count() > 0 || vectors.values().logical_null_count() > 0 {
            let end = first + batch.num_rows() as u64;
            return Err(
                VectorsError::NullVector { name: self.name.clone(), start: first, end }.into()
            );
        }
        match vectors.values().as_primitive_opt::<Float32Type>() {
            Some(values) => Ok(search.scan(first, values.values())?),
            None => {
                let halves = vectors.values().as_primitive::<Float16Type>().values();
                scan_f16(search, first, self.dimension(), halves)
            }
        }
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

fn scan_f16(search: &Search, first: u64, dimension: usize, rows: &[f16]) -> Result<Nearest> {
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
