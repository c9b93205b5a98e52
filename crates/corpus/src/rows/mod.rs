//! How files store rows. A kind of row is a file in this folder; as JSON, a row is what it
//! serialises to.

mod all;
mod dense;
mod multi;
mod sparse;

use std::sync::Arc;

use arrow_array::{ArrayRef, Float16Array, Float32Array};
use arrow_schema::{ArrowError, DataType};
use encoder::Row;
use half::f16;
use serde::Serialize;

use crate::{EMBEDDING, VectorDtype};

/// A row that files can store, in one or more columns.
pub trait StoredRow: Row {
    /// Whether a `.npy` file can store the rows: see [`StoredColumn::HAS_FIXED_LENGTH`].
    const HAS_FIXED_LENGTH: bool;

    /// The names of the columns in Parquet and Arrow files, and of the fields in JSON objects.
    const COLUMNS: &'static [&'static str];

    /// The default dtype of the values in Parquet and Arrow files; of rows of several columns, the
    /// largest default.
    const DTYPE: VectorDtype;

    /// The type of each column in Parquet and Arrow files. `dimensions` are those of the model
    /// ([`Embed::dimensions`](encoder::Embed::dimensions)); `dtype` is the type of the values, and
    /// `None` the default of each column.
    fn data_types(dimensions: &[usize], dtype: Option<VectorDtype>) -> Vec<DataType>;

    /// The rows as arrays of types from [`Self::data_types`].
    ///
    /// # Errors
    /// [`ArrowError`] if the rows do not have these types.
    fn columns(rows: &[Self], data_types: &[&DataType]) -> Result<Vec<ArrayRef>, ArrowError>
    where
        Self: Sized;

    /// The row as a JSON object with the fields [`Self::COLUMNS`].
    fn object(&self) -> impl Serialize;
}

/// A row that is stored in one column, `embedding`.
pub trait StoredColumn: Row {
    /// Whether all rows have as many values as the model's dimension says, so that a `.npy` file
    /// can store them.
    const HAS_FIXED_LENGTH: bool;

    /// The default dtype of the values in Parquet and Arrow files.
    const DTYPE: VectorDtype = VectorDtype::F32;

    /// The type of the column in Parquet and Arrow files. `dimension` is that of the model, `dtype`
    /// the type of the values.
    fn data_type(dimension: usize, dtype: VectorDtype) -> DataType;

    /// The rows as an array of a type from [`Self::data_type`].
    ///
    /// # Errors
    /// [`ArrowError`] if the rows do not have this type.
    fn column<'a>(
        rows: impl IntoIterator<Item = &'a Self> + Clone,
        data_type: &DataType,
    ) -> Result<ArrayRef, ArrowError>;
}

impl<R: StoredColumn> StoredRow for R {
    const HAS_FIXED_LENGTH: bool = <R as StoredColumn>::HAS_FIXED_LENGTH;
    const COLUMNS: &'static [&'static str] = &[EMBEDDING];
    const DTYPE: VectorDtype = <R as StoredColumn>::DTYPE;

    fn data_types(dimensions: &[usize], dtype: Option<VectorDtype>) -> Vec<DataType> {
        vec![data_type::<R>(dimensions[0], dtype)]
    }

    fn columns(rows: &[Self], data_types: &[&DataType]) -> Result<Vec<ArrayRef>, ArrowError> {
        Ok(vec![R::column(rows, data_types[0])?])
    }

    fn object(&self) -> impl Serialize {
        #[derive(Serialize)]
        struct Object<'a, R> {
            embedding: &'a R,
        }
        Object { embedding: self }
    }
}

/// The type of a column of rows of the type `R`. `None` is the default dtype of the rows.
fn data_type<R: StoredColumn>(dimension: usize, dtype: Option<VectorDtype>) -> DataType {
    R::data_type(dimension, dtype.unwrap_or(<R as StoredColumn>::DTYPE))
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
