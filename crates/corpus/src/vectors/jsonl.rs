//! JSONL output: the fields of each record, and its vector.

use std::{borrow::Cow, sync::Arc};

use arrow_array::RecordBatch;

use crate::{
    Error, OutputError, Result, StoredRow,
    columns::{NonFinite, rows_to_json},
    records::{Fields, Record, text_object, write_text_object},
};

/// One JSON object per record of the input `name`, with the fields of its row at its end.
///
/// # Errors
/// [`OutputError::EmbeddingField`] if a record already has such a field;
/// [`OutputError::RowAsJson`] if a row of a table cannot be written as JSON.
pub(crate) fn json_lines<R: StoredRow>(
    name: &str,
    records: &[Record],
    rows: &[R],
    non_finite: &mut NonFinite,
) -> Result<Vec<u8>> {
    let mut lines = vec![];
    let mut write = |(record, row): (&Record, &R), object: Option<Cow<str>>| {
        if let Fields::Json { embeddings, .. } = &record.fields
            && let Some(field) = R::COLUMNS.iter().find(|column| embeddings.contains(column))
        {
            let (name, number) = (name.to_string(), record.number);
            return Err(Error::Output(OutputError::EmbeddingField { name, number, field }));
        }
        match object {
            Some(object) => lines.extend_from_slice(object.as_bytes()),
            None => write_text_object(&mut lines, &record.text).map_err(serde_json::Error::io)?,
        }
        let end = lines.len();
        serde_json::to_writer(&mut lines, &row.object())?;
        lines[end] = b','; // instead of the brace that opens the row's object
        lines.push(b'\n');
        Ok(())
    };
    let mut pairs = records.iter().zip(rows);
    if records.iter().all(|record| matches!(record.fields, Fields::Text)) {
        pairs.try_for_each(|pair| write(pair, None))?;
    } else {
        let objects = open_objects(name, records, non_finite)?;
        pairs.zip(objects).try_for_each(|(pair, object)| write(pair, Some(object)))?;
    }
    Ok(lines)
}

/// The JSON object of each record of the input `name`, without its closing brace.
///
/// # Errors
/// [`OutputError::RowAsJson`] if a row of a table cannot be written as JSON.
pub(crate) fn open_objects<'a>(
    name: &str,
    records: &'a [Record],
    non_finite: &mut NonFinite,
) -> Result<Vec<Cow<'a, str>>> {
    let mut objects = Vec::with_capacity(records.len());
    for records in records.chunk_by(are_adjacent) {
        match (&records[0].fields, &records[records.len() - 1].fields) {
            (Fields::Row { batch, row: first }, Fields::Row { row: last, .. }) => {
                let rows = batch.rows.slice(*first, last - first + 1);
                let lines = rows_to_json(&rows, non_finite);
                let mut lines = lines.map_err(|source| {
                    let row = records[first_row_that_fails(&rows)].number;
                    Error::Output(OutputError::RowAsJson { name: name.to_string(), row, source })
                })?;
                lines.iter_mut().for_each(|line| line.truncate(line.len() - 1));
                objects.extend(records.iter().filter_map(|record| match record.fields {
                    Fields::Row { row, .. } => {
                        Some(Cow::Owned(std::mem::take(&mut lines[row - first])))
                    }
                    Fields::Json { .. } | Fields::Text => None,
                }));
            }
            _ => objects.extend(records.iter().filter_map(|record| match &record.fields {
                Fields::Json { open_object, .. } => Some(Cow::Borrowed(open_object.as_str())),
                Fields::Text => Some(Cow::Owned(text_object(&record.text))),
                Fields::Row { .. } => None,
            })),
        }
    }
    Ok(objects)
}

/// The index of the first row that cannot be written as JSON.
pub(crate) fn first_row_that_fails(rows: &RecordBatch) -> usize {
    let fails = |row: &usize| rows_to_json(&rows.slice(*row, 1), &mut Default::default()).is_err();
    (0..rows.num_rows()).find(fails).unwrap_or(0)
}

/// Whether two records are consecutive rows of the same batch, or both JSON objects. Rows between
/// two records are skipped records, whose values must not be converted.
fn are_adjacent(one: &Record, next: &Record) -> bool {
    match (&one.fields, &next.fields) {
        (Fields::Row { batch, row }, Fields::Row { batch: next_batch, row: next_row }) => {
            Arc::ptr_eq(batch, next_batch) && *next_row == row + 1
        }
        (Fields::Json { .. } | Fields::Text, Fields::Json { .. } | Fields::Text) => true,
        _ => false,
    }
}
