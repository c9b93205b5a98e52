//! Arrow record batches as records, one per row.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch, cast::AsArray};
use arrow_schema::{ArrowError, DataType, SchemaRef};

use crate::{
    InputError, Result,
    catch_panic::catch_panics,
    columns::{compact, without_dictionaries},
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
/// [`InputError::NoColumn`] if there is no such column; [`InputError::DuplicateColumn`] if two
/// columns have the same name; [`InputError::NotText`] if the column does not contain strings.
pub(crate) fn read(
    schema: SchemaRef,
    batches: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
    name: &str,
    column: &str,
) -> Result<Records> {
    let names = || schema.fields().iter().map(|field| field.name().as_str());
    let Some(text_column) = names().position(|name| name == column) else {
        let got = names().map(String::from).collect();
        return Err(InputError::NoColumn {
            name: name.to_string(),
            expected: column.to_string(),
            got,
        }
        .into());
    };
    check_distinct(name, names())?;
    let schema = without_dictionaries(&schema);
    let (name, column) = (name.to_string(), column.to_string());
    match schema.field(text_column).data_type() {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {}
        other => return Err(InputError::NotText { name, column, got: other.clone() }.into()),
    }
    let mut rows = BatchRows { schema: schema.clone(), text_column, name, column, read: 0 };
    let (mut failed, mut before) = (false, 0);
    let batches = catch_panics(batches).flat_map(move |batch| match batch {
        Ok(batch) => {
            let split = split(&batch, before);
            before += batch.num_rows();
            split.into_iter().map(Ok).collect()
        }
        Err(error) => vec![Err(error)],
    });
    let records = batches.map_while(move |batch| {
        if failed {
            return None;
        }
        let records = rows.records(batch);
        failed = records.is_err();
        Some(records.unwrap_or_else(|error| vec![Err(error)]))
    });
    Ok(Records::new(Some(schema), records.flatten()))
}

/// Splits a batch before each row whose index in the input, from 0, is a multiple of
/// [`BATCH_ROWS`]. `read` is the number of rows before the batch.
///
/// The hash in the run state includes the hashes of batches. A run state is saved after a multiple
/// of [`BATCH_ROWS`] rows, or at the end of the input. No batch extends beyond this position, so a
/// change of later rows does not change the hash.
fn split(batch: &RecordBatch, read: usize) -> Vec<RecordBatch> {
    let (mut batches, mut start) = (vec![], 0);
    while start < batch.num_rows() {
        let length = BATCH_ROWS - (read + start) % BATCH_ROWS;
        let length = length.min(batch.num_rows() - start);
        batches.push(batch.slice(start, length));
        start += length;
    }
    batches
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
            let columns = batch.columns().iter().map(compact).collect::<Result<_, _>>()?;
            Ok(Arc::new(RowBatch::new(RecordBatch::try_new(self.schema.clone(), columns)?)?))
        });
        let invalid = |number: u64, kind: InvalidRecordKind| InvalidRecord {
            name: self.name.clone(),
            unit: Unit::Row,
            number,
            kind,
        };
        let batch =
            read.map_err(|error| invalid(self.read + 1, InvalidRecordKind::Arrow(error)))?;
        let texts = texts(batch.rows.column(self.text_column));
        let records = (self.read + 1..).zip(texts.iter().enumerate());
        let records = records.map(|(number, (row, text))| match text {
            Some(text) => {
                let fields = Fields::Row { batch: batch.clone(), row };
                Ok(Record { text: text.to_string(), unit: Unit::Row, number, fields })
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

/// The values of an array of strings.
fn texts(array: &ArrayRef) -> Vec<Option<&str>> {
    match array.data_type() {
        DataType::Utf8 => array.as_string::<i32>().iter().collect(),
        DataType::LargeUtf8 => array.as_string::<i64>().iter().collect(),
        _ => array.as_string_view().iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{ListArray, StringViewArray, StructArray};
    use arrow_buffer::OffsetBuffer;
    use arrow_schema::Field;

    use super::*;

    /// The batches of a column of views, also in a struct or a list, hold the text of their own
    /// rows only.
    #[test]
    fn batches_of_views_are_compact() {
        let texts = (0..8 * BATCH_ROWS).map(|i| format!("{i:0100}"));
        let texts: ArrayRef = Arc::new(StringViewArray::from_iter_values(texts));
        let inner = Arc::new(Field::new("inner", DataType::Utf8View, false));
        let nested: ArrayRef = Arc::new(StructArray::from(vec![(inner, texts.clone())]));
        let inner = Arc::new(Field::new("inner", DataType::Utf8View, false));
        let offsets = OffsetBuffer::from_lengths(vec![1; 8 * BATCH_ROWS]);
        let lists = ListArray::try_new(inner, offsets, texts.clone(), None).unwrap();
        let lists = Arc::new(lists) as ArrayRef;
        let columns = [("text", texts), ("nested", nested), ("lists", lists)];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let records = read(batch.schema(), [Ok(batch)].into_iter(), "a.arrow", "text").unwrap();
        let mut count = 0;
        for record in records {
            let record = record.unwrap();
            assert_eq!(record.text, format!("{count:0100}"));
            count += 1;
            let Fields::Row { batch, .. } = &record.fields else { panic!("a row") };
            assert_eq!(batch.rows.schema().field(0).data_type(), &DataType::Utf8View);
            let size = batch.rows.get_array_memory_size();
            assert!(size < 3 * 200 * BATCH_ROWS, "{size} bytes");
        }
        assert_eq!(count, 8 * BATCH_ROWS);
    }

    #[test]
    fn batches_end_at_the_same_rows_whatever_the_batches_of_the_input() {
        let texts: ArrayRef = Arc::new(StringViewArray::from_iter_values(vec!["a"; 1000]));
        let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
        let sizes = |read| split(&batch, read).iter().map(RecordBatch::num_rows).collect();
        let all: [Vec<usize>; 3] = [0, 1000, 2000].map(sizes);
        assert_eq!(all, [vec![1000], vec![24, 976], vec![48, 952]]);
    }
}
