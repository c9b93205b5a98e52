//! Sparse vectors: a list of indices with values per record.

use std::sync::Arc;

use arrow_array::{ArrayRef, ListArray, StructArray, UInt32Array};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field, Fields};
use encoder::SparseVector;

use crate::{
    VectorDtype,
    rows::{StoredColumn, number_type, numbers},
};

impl StoredColumn for SparseVector {
    const HAS_FIXED_LENGTH: bool = false;

    fn data_type(_dimension: usize, dtype: VectorDtype) -> DataType {
        let fields = Fields::from(vec![
            Field::new("index", DataType::UInt32, false),
            Field::new("value", number_type(dtype), false),
        ]);
        DataType::List(Arc::new(Field::new("element", DataType::Struct(fields), false)))
    }

    fn column<'a>(
        rows: impl IntoIterator<Item = &'a Self> + Clone,
        data_type: &DataType,
    ) -> Result<ArrayRef, ArrowError> {
        let DataType::List(element) = data_type else {
            unreachable!("`data_type` returns a type of lists");
        };
        let DataType::Struct(fields) = element.data_type() else {
            unreachable!("the elements are pairs of an index and a value");
        };
        let indices = rows.clone().into_iter().flat_map(|row| row.indices.iter().copied());
        let values = rows.clone().into_iter().flat_map(|row| row.values.iter().copied());
        let values = numbers(values, fields[1].data_type());
        let indices: ArrayRef = Arc::new(UInt32Array::from_iter_values(indices));
        let pairs = StructArray::try_new(fields.clone(), vec![indices, values], None)?;
        let offsets = OffsetBuffer::from_lengths(rows.into_iter().map(|row| row.indices.len()));
        Ok(Arc::new(ListArray::try_new(element.clone(), offsets, Arc::new(pairs), None)?))
    }
}
