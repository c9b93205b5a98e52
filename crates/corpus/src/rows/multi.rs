//! A vector per token: a list of lists of E numbers per record.

use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray, ListArray};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field};
use encoder::{MultiVector, Row};

use crate::{
    VectorDtype,
    rows::{StoredColumn, numbers},
};

impl StoredColumn for MultiVector {
    const HAS_FIXED_LENGTH: bool = false;

    const DTYPE: VectorDtype = VectorDtype::F16;

    fn data_type(dimension: usize, dtype: VectorDtype) -> DataType {
        let vectors = Vec::<f32>::data_type(dimension, dtype);
        DataType::List(Arc::new(Field::new("element", vectors, false)))
    }

    fn column<'a>(
        rows: impl IntoIterator<Item = &'a Self> + Clone,
        data_type: &DataType,
    ) -> Result<ArrayRef, ArrowError> {
        let DataType::List(vectors) = data_type else {
            unreachable!("`data_type` returns a type of lists");
        };
        let DataType::FixedSizeList(element, dimension) = vectors.data_type() else {
            unreachable!("the elements are vectors");
        };
        let values = rows.clone().into_iter().flat_map(Row::values).copied();
        let values = numbers(values, element.data_type());
        let flat = FixedSizeListArray::try_new(element.clone(), *dimension, values, None)?;
        let offsets = OffsetBuffer::from_lengths(rows.into_iter().map(MultiVector::len));
        Ok(Arc::new(ListArray::try_new(vectors.clone(), offsets, Arc::new(flat), None)?))
    }
}
