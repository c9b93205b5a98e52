//! How files store rows. A kind of row is a file in this folder; as JSON, a row is what it
//! serialises to.

mod dense;
mod multi;
mod sparse;

use std::sync::Arc;

use arrow_array::{ArrayRef, Float16Array, Float32Array};
use arrow_schema::{ArrowError, DataType};
use encoder::Row;
use half::f16;

use crate::VectorDtype;

/// A row that files can store.
pub trait StoredRow: Row {
    /// Whether all rows have as many values as the model's dimension says, so that a `.npy` file
    /// can store them.
    const HAS_FIXED_LENGTH: bool;

    /// The default dtype of the values in Parquet and Arrow files.
    const DTYPE: VectorDtype = VectorDtype::F32;

    /// The type of the column `embedding` in Parquet and Arrow files. `dimension` is that of the
    /// model, `dtype` the type of the values.
    fn data_type(dimension: usize, dtype: VectorDtype) -> DataType;

    /// The rows as an array of a type from [`Self::data_type`].
    ///
    /// # Errors
    /// [`ArrowError`] if the rows do not have this type.
    fn column(rows: &[Self], data_type: &DataType) -> Result<ArrayRef, ArrowError>
    where
        Self: Sized;
}

/// The type of the values of a column.
fn number_type(dtype: VectorDtype) -> DataType {
    match dtype {
        VectorDtype::F32 => DataType::Float32,
        VectorDtype::F16 => DataType::Float16,
    }
}

/// Values as an array of a type from [`number_type`].
fn numbers(values: impl Iterator<Item = f32>, data_type: &DataType) -> ArrayRef {
    if *data_type == DataType::Float16 {
        Arc::new(Float16Array::from_iter_values(values.map(f16::from_f32)))
    } else {
        Arc::new(Float32Array::from_iter_values(values))
    }
}
