//! Parquet, one record per row.

use std::fs::File;

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::{
    Error, Result,
    catch_panic::catch_panic,
    columns,
    records::{
        batches::{self, BATCH_ROWS},
        stream::Records,
    },
};

/// The rows of a Parquet file, whose column `column` is the text.
///
/// # Errors
/// [`Error::Parquet`] if the file is not Parquet; [`Error::NoColumn`]; [`Error::DuplicateColumn`];
/// [`Error::NotText`].
pub(crate) fn read(file: File, name: &str, column: &str) -> Result<Records> {
    let error = |source| Error::Parquet { name: name.to_string(), source };
    let builder = catch_panic(|| ParquetRecordBatchReaderBuilder::try_new(file)).map_err(error)?;
    let total = builder.metadata().file_metadata().num_rows();
    // The schema of the reader has no metadata, so the schema is taken from the builder.
    let schema = columns::with_time_zones(builder.schema(), builder.metadata().file_metadata());
    let reader = catch_panic(|| builder.with_batch_size(BATCH_ROWS).build()).map_err(error)?;
    let records = batches::read(schema, reader, name, column)?;
    Ok(records.with_total(u64::try_from(total).ok()))
}
