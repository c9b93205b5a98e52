//! The index of a file of sparse vectors.

use arrow_array::{
    Array,
    cast::AsArray,
    types::{Float32Type, UInt32Type},
};
use arrow_cast::{
    cast,
    display::{ArrayFormatter, FormatOptions},
};
use arrow_schema::DataType;
use encoder::{EmbeddingKind, SparseIndex, SparseIndexBuilder};

use crate::{
    Error, Result, VectorsError,
    vectors::{
        file::{RowType, VectorFile},
        scan::Columns,
    },
};

impl VectorFile {
    /// The index of the sparse vectors of the file, for [`SparseIndex::search`]. The file is read
    /// in parts; in memory are the index and a part per thread. `dimension` is that of the model.
    ///
    /// # Errors
    /// - [`VectorsError::Kind`] if the vectors are not sparse
    /// - [`VectorsError::InvalidRow`] for a row that [`SparseIndexBuilder::push`] refuses
    /// - [`VectorsError::SparseElement`] for null, and for an index that is negative or exceeds u32
    /// - [`InputError::Parquet`](crate::InputError::Parquet) or
    ///   [`InputError::Arrow`](crate::InputError::Arrow) if the file is damaged
    pub fn sparse_index(&self, dimension: usize) -> Result<SparseIndex> {
        if self.row_type != RowType::Sparse {
            return Err(self.other_kind(EmbeddingKind::Sparse));
        }
        let none = || SparseIndexBuilder::new(dimension, 0).build();
        let scan = |first, columns: Columns| {
            let (mut builder, mut row) = (SparseIndexBuilder::new(dimension, first), first);
            for column in columns {
                let column = column?;
                self.push_rows(&mut builder, row, &column)?;
                row += column.len() as u64;
            }
            Ok(builder.build())
        };
        self.scan_parts(none, scan, SparseIndex::merge)
    }

    /// Adds an array of rows, the first of which is row `first` of the file.
    fn push_rows(
        &self,
        builder: &mut SparseIndexBuilder,
        first: u64,
        column: &dyn Array,
    ) -> Result<()> {
        let lists = match column.data_type() {
            DataType::LargeList(element) => &cast(column, &DataType::List(element.clone()))?,
            _ => column,
        };
        let lists = lists.as_list::<i32>();
        let pairs = lists.values().as_struct();
        let field = |name| pairs.column_by_name(name).expect("the fields that `row_type` requires");
        let indices = cast(field("index"), &DataType::UInt32)?; // null if it does not fit
        let values = cast(field("value"), &DataType::Float32)?;
        let parts: [&dyn Array; 4] = [lists, pairs, &indices, &values];
        let has_null = parts.iter().any(|part| part.logical_null_count() > 0);
        let (indices, values) =
            (indices.as_primitive::<UInt32Type>(), values.as_primitive::<Float32Type>());
        for (i, ends) in lists.value_offsets().windows(2).enumerate() {
            let (row, range) = (first + i as u64, ends[0] as usize..ends[1] as usize);
            if has_null {
                let is_null =
                    |&i: &usize| pairs.is_null(i) || indices.is_null(i) || values.is_null(i);
                if lists.is_null(i) {
                    return Err(self.null_element(row, lists, i)?);
                }
                if let Some(element) = range.clone().find(is_null) {
                    return Err(self.null_element(row, pairs, element)?);
                }
            }
            let (indices, values) = (&indices.values()[range.clone()], &values.values()[range]);
            builder.push(indices, values).map_err(|error| self.invalid_row(error))?;
        }
        Ok(())
    }

    /// The error for element `i` of an array, which belongs to the row.
    fn null_element(&self, row: u64, array: &dyn Array, i: usize) -> Result<Error> {
        let options = FormatOptions::new().with_null("null");
        let got = ArrayFormatter::try_new(array, &options)?.value(i).to_string();
        Ok(VectorsError::SparseElement { name: self.name.clone(), row, got }.into())
    }
}
