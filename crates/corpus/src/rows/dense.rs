//! Dense vectors: a list of E numbers per record.

use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray, Float16Array, Float32Array};
use arrow_schema::{ArrowError, DataType, Field};
use half::f16;

use crate::{VectorDtype, rows::StoredRow};

impl StoredRow for Vec<f32> {
    const HAS_FIXED_LENGTH: bool = true;

    fn data_type(dimension: usize, dtype: VectorDtype) -> DataType {
        let element = match dtype {
            VectorDtype::F32 => DataType::Float32,
            VectorDtype::F16 => DataType::Float16,
        };
        let element = Arc::new(Field::new("element", element, false));
        DataType::FixedSizeList(element, dimension as i32)
    }

    fn column(rows: &[Self], data_type: &DataType) -> Result<ArrayRef, ArrowError> {
        let DataType::FixedSizeList(element, dimension) = data_type else {
            unreachable!("`data_type` returns a type of fixed-size lists");
        };
        let values = rows.iter().flatten().copied();
        let values: ArrayRef = if *element.data_type() == DataType::Float16 {
            Arc::new(Float16Array::from_iter_values(values.map(f16::from_f32)))
        } else {
            Arc::new(Float32Array::from_iter_values(values))
        };
        Ok(Arc::new(FixedSizeListArray::try_new(element.clone(), *dimension, values, None)?))
    }
}
