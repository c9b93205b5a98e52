//! Dense vectors: a list of E numbers per record.

use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray};
use arrow_schema::{ArrowError, DataType, Field};

use crate::{
    VectorDtype,
    rows::{StoredColumn, number_type, numbers},
};

impl StoredColumn for Vec<f32> {
    const HAS_FIXED_LENGTH: bool = true;

    fn data_type(dimension: usize, dtype: VectorDtype) -> DataType {
        let element = Arc::new(Field::new("element", number_type(dtype), false));
        DataType::FixedSizeList(element, dimension as i32)
    }

    fn column<'a>(
        rows: impl IntoIterator<Item = &'a Self> + Clone,
        data_type: &DataType,
    ) -> Result<ArrayRef, ArrowError> {
        let DataType::FixedSizeList(element, dimension) = data_type else {
            unreachable!("`data_type` returns a type of fixed-size lists");
        };
        let values = numbers(rows.into_iter().flatten().copied(), element.data_type());
        Ok(Arc::new(FixedSizeListArray::try_new(element.clone(), *dimension, values, None)?))
    }
}
