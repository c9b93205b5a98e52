//! How files store rows. A kind of row is a file in this folder; as JSON, a row is what it
//! serialises to.

mod dense;
mod sparse;

use arrow_array::ArrayRef;
use arrow_schema::{ArrowError, DataType};
use encoder::Row;

use crate::VectorDtype;

/// A row that files can store.
pub trait StoredRow: Row {
    /// Whether all rows have as many values as the model's dimension says, so that a `.npy` file
    /// can store them.
    const HAS_FIXED_LENGTH: bool;

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
