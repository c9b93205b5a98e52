//! Columns of tables: inference from JSON objects, conversion to Parquet's types and to JSON.

mod int96;
mod json_arrays;
mod json_schema;
mod json_value;
mod nested;
mod parquet_types;
mod rows_to_json;

pub(crate) use int96::with_int96_units;
pub(crate) use json_arrays::arrays;
pub use json_schema::AsText;
pub(crate) use json_schema::JsonSchema;
pub(crate) use json_value::Json;
pub use json_value::ValueMismatch;
pub(crate) use nested::{children, compact, without_dictionaries};
pub(crate) use parquet_types::{convert, parquet_schema, with_time_zones};
pub use rows_to_json::NonFinite;
pub(crate) use rows_to_json::rows_to_json;
