//! Arrow record batches as records, one per row.

use std::sync::Arc;

use arrow_array::{Array, RecordBatch, StringArray, cast::AsArray};
use arrow_cast::cast;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};

use crate::{
    Error, Result,
    columns::map_children,
    records::{
        record::{Fields, InvalidRecord, InvalidRecordKind, Record, RowBatch, Unit},
        stream::{ReadRecord, Records, check_distinct},
    },
};

/// The maximum number of rows of a batch.
pub(crate) const BATCH_ROWS: usize = 1024;

/// The rows of `batches`. The column `column` contains the texts.
///
/// # Errors
/// [`Error::NoColumn`] if there is no such column; [`Error::DuplicateColumn`] if two columns have
/// the same name; [`Error::NotText`] if the column does not contain strings.
pub(crate) fn read(
    schema: SchemaRef,
    batches: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
    name: &str,
    column: &str,
) -> Result<Records> {
    let names = || schema.fields().iter().map(|field| field.name().as_str());
    let Some(text_column) = names().position(|name| name == column) else {
        let got = names().map(String::from).collect();
        return Err(Error::NoColumn { name: name.to_string(), expected: column.to_string(), got });
    };
    check_distinct(name, names())?;
    let fields = schema.fields().iter().map(|field| without_dictionary(field));
    let schema =
        Arc::new(Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone()));
    let (name, column) = (name.to_string(), column.to_string());
    match schema.field(text_column).data_type() {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {}
        other => return Err(Error::NotText { name, column, got: other.clone() }),
    }
    let mut rows = BatchRows { schema: schema.clone(), text_column, name, column, read: 0 };
    let mut failed = false;
    let records = batches.flat_map(split).map_while(move |batch| {
        if failed {
            return None;
        }
        let records = rows.records(batch);
        failed = records.is_err();
        Some(records.unwrap_or_else(|error| vec![Err(error)]))
    });
    Ok(Records::new(Some(schema), records.flatten()))
}

/// The field with dictionary types replaced by their value types, because the batches of an input
/// may have different dictionaries.
fn without_dictionary(field: &Field) -> Arc<Field> {
    let data_type = match field.data_type() {
        DataType::Dictionary(_, value) => value.as_ref().clone(),
        nested => map_children(nested, |_, child| without_dictionary(child)),
    };
    Arc::new(field.clone().with_data_type(data_type))
}

/// Splits a batch into batches of at most [`BATCH_ROWS`] rows.
fn split(batch: Result<RecordBatch, ArrowError>) -> Vec<Result<RecordBatch, ArrowError>> {
    match batch {
        Ok(batch) => (0..batch.num_rows())
            .step_by(BATCH_ROWS)
            .map(|start| Ok(batch.slice(start, BATCH_ROWS.min(batch.num_rows() - start))))
            .collect(),
        Err(error) => vec![Err(error)],
    }
}

/// Converts batches to records and counts their rows.
struct BatchRows {
    schema: SchemaRef,
    text_column: usize,
    /// The input's name.
    name: String,
    /// The text column's name.
    column: String,
    /// The number of rows so far.
    read: u64,
}

impl BatchRows {
    /// The records of a batch.
    ///
    /// # Errors
    /// A fatal [`InvalidRecord`] if the batch cannot be read.
    fn records(
        &mut self,
        batch: Result<RecordBatch, ArrowError>,
    ) -> Result<Vec<ReadRecord>, InvalidRecord> {
        let read = batch.and_then(|batch| {
            let columns = batch.columns().iter().zip(self.schema.fields());
            let columns = columns.map(|(column, field)| cast(column, field.data_type()));
            let columns = columns.collect::<Result<_, _>>()?;
            let batch = RecordBatch::try_new(self.schema.clone(), columns)?;
            let texts = cast(batch.column(self.text_column), &DataType::Utf8)?;
            Ok((texts, Arc::new(RowBatch::new(batch)?)))
        });
        let invalid = |number: u64, kind: InvalidRecordKind| InvalidRecord {
            name: self.name.clone(),
            unit: Unit::Row,
            number,
            kind,
        };
        let (texts, batch) =
            read.map_err(|error| invalid(self.read + 1, InvalidRecordKind::Arrow(error)))?;
        let texts: &StringArray = texts.as_string();
        let records = (self.read + 1..).zip(texts.iter().enumerate());
        let records = records.map(|(number, (row, text))| match text {
            Some(text) => {
                let fields = Fields::Row { batch: batch.clone(), row };
                Ok(Record { text: text.to_string(), number, fields })
            }
            None => {
                let (field, got) = (self.column.clone(), "null".to_string());
                Err(invalid(number, InvalidRecordKind::NotText { field, got }))
            }
        });
        let records = records.collect();
        self.read += texts.len() as u64;
        Ok(records)
    }
}
