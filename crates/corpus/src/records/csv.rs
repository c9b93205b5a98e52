//! CSV and TSV, one record per row. The first row names the columns.

use std::io::Read;

use serde_json::Value;

use crate::{
    EMBEDDING, Error, Result,
    records::{
        record::{Fields, InvalidRecord, InvalidRecordKind, Record, Unit},
        stream::{Records, check_distinct, string_columns},
    },
};

/// The rows of a CSV file. `column` is the name of the column that contains the text.
///
/// # Errors
/// [`Error::Csv`] for an unreadable header; [`Error::NoColumn`] if the header lacks `column`;
/// [`Error::DuplicateColumn`] if two columns have the same name.
pub(crate) fn read(
    input: impl Read + Send + 'static,
    delimiter: u8,
    name: String,
    column: String,
) -> Result<Records> {
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(input);
    let header = reader.headers().map_err(|source| Error::Csv { name: name.clone(), source })?;
    let header = header.clone();
    let Some(text_column) = header.iter().position(|name| name == column) else {
        let got = header.iter().map(String::from).collect();
        return Err(Error::NoColumn { name, expected: column, got });
    };
    check_distinct(&name, header.iter())?;
    let has_embedding = header.iter().any(|name| name == EMBEDDING);
    let schema = string_columns(header.iter());
    let rows = reader.into_records().map(move |row| {
        let line = |position: Option<&csv::Position>| position.map_or(0, csv::Position::line);
        let row = row.map_err(|error| InvalidRecord {
            name: name.clone(),
            unit: Unit::Line,
            number: line(error.position()),
            kind: InvalidRecordKind::Csv(error),
        })?;
        let fields = header.iter().zip(row.iter());
        let fields =
            fields.map(|(name, field)| format!("{}:{}", Value::from(name), Value::from(field)));
        let open_object = format!("{{{}", fields.collect::<Vec<_>>().join(","));
        let fields = Fields::Json { open_object, has_embedding };
        let text = row.get(text_column).unwrap_or_default().to_string();
        Ok(Record { text, number: line(row.position()), fields })
    });
    Ok(Records::new(Some(schema), rows))
}
