//! Search of a file with a vector per token.

use arrow_array::{
    Array,
    cast::AsArray,
    types::{Float16Type, Float32Type},
};
use arrow_cast::cast;
use arrow_schema::DataType;
use encoder::{EmbeddingKind, MultiVectorSearch, Nearest, VectorSlice};

use crate::{
    Result,
    vectors::{
        file::{RowType, VectorFile},
        scan::Columns,
    },
};

impl VectorFile {
    /// The rows of a multi-vector file with the highest score for each query of `search`. The file
    /// is read in parts; in memory is a part per thread.
    ///
    /// # Errors
    /// - [`crate::VectorsError::Kind`] if the rows are not lists of vectors
    /// - [`crate::Error::Encoder`] with [`encoder::InputError::VectorWidth`] if the vectors of the
    ///   queries do not have [`Self::dimension`] values
    /// - [`crate::VectorsError::InvalidRow`] for a row with NaN or infinite values
    /// - [`crate::VectorsError::NullVector`] if a row is null or contains null
    /// - [`InputError::Parquet`](crate::InputError::Parquet) or
    ///   [`InputError::Arrow`](crate::InputError::Arrow) if the file is damaged
    pub fn scan_multi(&self, search: &MultiVectorSearch) -> Result<Nearest> {
        let RowType::Multi { dimension: got } = self.row_type else {
            return Err(self.other_kind(EmbeddingKind::Multi));
        };
        if let Some(expected) = search.query_width().filter(|&expected| expected != got) {
            let error = encoder::InputError::VectorWidth { expected, got };
            return Err(encoder::Error::Input(error).into());
        }
        let scan = |first, columns: Columns| {
            let (mut found, mut row) = (search.no_hits(), first);
            for column in columns {
                let column = column?;
                found.merge(self.scan_lists(search, row, &column)?);
                row += column.len() as u64;
            }
            Ok(found)
        };
        self.scan_parts(|| search.no_hits(), scan, Nearest::merge)
    }

    /// Scans an array of lists of vectors, the first of which is row `first` of the file.
    fn scan_lists(
        &self,
        search: &MultiVectorSearch,
        first: u64,
        column: &dyn Array,
    ) -> Result<Nearest> {
        let lists = match column.data_type() {
            DataType::LargeList(element) => &cast(column, &DataType::List(element.clone()))?,
            _ => column,
        };
        let lists = lists.as_list::<i32>();
        let vectors = lists.values().as_fixed_size_list();
        let parts: [&dyn Array; 3] = [lists, vectors, vectors.values()];
        if parts.iter().any(|part| part.logical_null_count() > 0) {
            let end = first + lists.len() as u64;
            return Err(self.null_vector(first, end));
        }
        let offsets: Vec<usize> = lists.value_offsets().iter().map(|&end| end as usize).collect();
        let values = match vectors.values().as_primitive_opt::<Float32Type>() {
            Some(values) => VectorSlice::F32(values.values()),
            None => VectorSlice::F16(vectors.values().as_primitive::<Float16Type>().values()),
        };
        search.scan(first, values, &offsets).map_err(|error| self.invalid_row(error))
    }
}
