//! Parquet, one record per row.

use std::fs::File;

use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};

use crate::{
    Error, InputError, Result,
    catch_panic::catch_panic,
    columns::{with_int96_units, with_time_zones, without_dictionaries},
    records::{
        batches::{self, BATCH_ROWS},
        stream::Records,
    },
};

/// The rows of a Parquet file. The column `column` contains the texts.
///
/// # Errors
/// [`InputError::Parquet`] if the file is not Parquet; [`InputError::NoColumn`];
/// [`InputError::DuplicateColumn`]; [`InputError::NotText`].
pub(crate) fn read(file: File, name: &str, column: &str) -> Result<Records> {
    let error = |source| Error::Input(InputError::Parquet { name: name.to_string(), source });
    let options = ArrowReaderOptions::new;
    let metadata = catch_panic(|| ArrowReaderMetadata::load(&file, options())).map_err(error)?;
    // `parquet` 60.1 cannot read dictionaries of some types, such as booleans.
    let schema = without_dictionaries(metadata.schema());
    let file_metadata = metadata.metadata().file_metadata();
    let schema = with_time_zones(&schema, file_metadata);
    let schema = catch_panic(|| with_int96_units(&schema, file_metadata, &file)).map_err(error)?;
    let metadata = if schema == *metadata.schema() {
        metadata
    } else {
        let options = options().with_schema(schema);
        let metadata = || ArrowReaderMetadata::try_new(metadata.metadata().clone(), options);
        catch_panic(metadata).map_err(error)?
    };
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata);
    let total = builder.metadata().file_metadata().num_rows();
    // The schema of the reader has no metadata, so the schema is taken from the builder.
    let schema = builder.schema().clone();
    let reader = catch_panic(|| builder.with_batch_size(BATCH_ROWS).build()).map_err(error)?;
    let records = batches::read(schema, reader, name, column)?;
    Ok(records.with_total(u64::try_from(total).ok()))
}
