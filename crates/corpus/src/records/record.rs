//! One record, and the error of an invalid one.

use std::{
    fmt,
    hash::Hasher,
    io::{self, Write},
    sync::Arc,
};

use arrow_array::RecordBatch;
use arrow_ipc::writer::StreamWriter;
use arrow_schema::ArrowError;
use twox_hash::XxHash64;

/// A text, and all fields of the line or row that contains it.
#[derive(Clone, Debug)]
pub struct Record {
    pub(crate) text: String,
    pub(crate) unit: Unit,
    pub(crate) number: u64,
    pub(crate) fields: Fields,
}

/// All fields of a record.
#[derive(Clone, Debug)]
pub(crate) enum Fields {
    /// The field `text` only, which is the record's text.
    Text,
    Json {
        /// A JSON object without its closing brace, so that a field can be appended:
        /// `{"id": 7, "text": "…"`.
        open_object: String,
        /// The names of [`ALL_EMBEDDINGS`](crate::ALL_EMBEDDINGS) among its fields.
        embeddings: Vec<&'static str>,
    },
    /// One row of a table.
    Row { batch: Arc<RowBatch>, row: usize },
}

impl Record {
    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text, without the fields.
    pub fn into_text(self) -> String {
        self.text
    }

    /// Whether [`Self::number`] counts lines, rows or items.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// The number of the record's line, row or item, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The error of a model that refuses the text of this record. `name` is the input's name.
    pub fn refused(&self, name: &str, error: encoder::Error) -> InvalidRecord {
        InvalidRecord {
            name: name.to_string(),
            unit: self.unit,
            number: self.number,
            kind: InvalidRecordKind::Refused(Box::new(error)),
        }
    }
}

/// Writes the JSON object of [`Fields::Text`] without its closing brace.
pub(crate) fn write_text_object(to: &mut impl Write, text: &str) -> io::Result<()> {
    to.write_all(b"{\"text\":")?;
    serde_json::to_writer(to, text).map_err(io::Error::from)
}

/// The object that [`write_text_object`] writes.
pub(crate) fn text_object(text: &str) -> String {
    let mut object = Vec::with_capacity(text_object_size(text));
    // Neither a string nor this writer can fail.
    write_text_object(&mut object, text).ok();
    String::from_utf8(object).expect("JSON of a string is UTF-8")
}

/// Counts the bytes that are written.
#[derive(Default)]
pub(crate) struct CountingWriter(pub(crate) usize);

impl Write for CountingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The number of bytes that [`write_text_object`] writes.
pub(crate) fn text_object_size(text: &str) -> usize {
    let mut size = CountingWriter::default();
    // Neither a string nor this writer can fail.
    write_text_object(&mut size, text).ok();
    size.0
}

/// Rows of a table that were read together.
#[derive(Debug)]
pub(crate) struct RowBatch {
    pub(crate) rows: RecordBatch,
    /// XXH64 of the rows as an Arrow IPC stream.
    pub(crate) hash: u64,
    /// The mean size of a row in bytes.
    pub(crate) row_bytes: usize,
}

impl RowBatch {
    pub(crate) fn new(rows: RecordBatch) -> Result<Self, ArrowError> {
        let mut writer = StreamWriter::try_new(HashingWriter::default(), &rows.schema())?;
        writer.write(&rows)?;
        let hash = writer.get_ref().0.finish();
        let sizes = rows.columns().iter().map(|column| column.to_data().get_slice_memory_size());
        let bytes: usize = sizes.sum::<Result<_, _>>()?;
        let row_bytes = bytes.div_ceil(rows.num_rows().max(1));
        Ok(Self { rows, hash, row_bytes })
    }
}

/// Hashes the bytes that are written.
#[derive(Default)]
pub(crate) struct HashingWriter(pub(crate) XxHash64);

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A record that has no text, cannot be read, or has a text that the model refuses.
#[derive(Debug, thiserror::Error)]
#[error("{name}, {unit} {number}: {kind}")]
#[non_exhaustive]
pub struct InvalidRecord {
    /// The input's name.
    pub name: String,
    /// Whether `number` counts lines, rows or items.
    pub unit: Unit,
    /// The number of the record's line, row or item, from 1.
    pub number: u64,
    /// The reason.
    #[source]
    pub kind: InvalidRecordKind,
}

/// The unit in which the records of an input are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Lines of a text file.
    Line,
    /// Rows of a table.
    Row,
    /// Items of a list of texts.
    Item,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Line => "line",
            Self::Row => "row",
            Self::Item => "item",
        })
    }
}

/// The reason why a record is invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRecordKind {
    /// The input cannot be read any further.
    #[error("cannot be read: {0}")]
    Io(#[source] io::Error),
    /// The table cannot be read any further.
    #[error("cannot be read: {0}")]
    Arrow(#[source] ArrowError),
    /// The line is not UTF-8.
    #[error("expected UTF-8, got an invalid byte at position {position}")]
    Utf8 {
        /// The position of the first invalid byte in the line, from 1.
        position: usize,
    },
    /// The line cannot be parsed: it is not JSON, or a number is out of range.
    #[error("cannot be parsed as a JSON object: {}", without_line(.0))]
    Json(#[source] serde_json::Error),
    /// The line is JSON, but not an object.
    #[error("expected a JSON object, got {got}")]
    NotAnObject {
        /// The type of the JSON value.
        got: &'static str,
    },
    /// The row is not valid CSV.
    #[error("{}", csv_message(.0))]
    Csv(#[source] csv::Error),
    /// A field of the row begins with a quote that is not closed. The rest of the input is in this
    /// field.
    #[error("the quote is not closed: expected another quote at the end of the field")]
    UnclosedQuote,
    /// The JSON object does not have the text field.
    #[error("object has no field {field:?}: {}", list_names("fields", got))]
    NoField {
        /// The text field.
        field: String,
        /// The object's fields.
        got: Vec<String>,
    },
    /// The text field is not a string.
    #[error("expected a string in {field:?}, got {got}")]
    NotText {
        /// The text field.
        field: String,
        /// The digits of the value if it is a number, otherwise the type of the value.
        got: String,
    },
    /// The model refuses the text.
    #[error("{0}")]
    Refused(#[source] Box<encoder::Error>),
}

/// The largest number of names that an error lists.
const MAX_NAMES: usize = 20;

/// Lists the columns or fields that exist, for an error about one that is missing.
pub(crate) fn list_names(what: &str, names: &[String]) -> String {
    match names {
        [] => format!("it has no {what}"),
        // Quoted, because a name may contain a comma or a line feed.
        names => match names.split_at_checked(MAX_NAMES) {
            Some((first, rest @ [_, ..])) => {
                format!("its first {what} are {first:?}, and it has {} more", rest.len())
            }
            _ => format!("its {what} are {names:?}"),
        },
    }
}

/// The error's message without the line number of `csv`, which is too low after CRLF and blank
/// lines.
pub(crate) fn csv_message(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Io(error) => format!("cannot be read: {error}"),
        csv::ErrorKind::Utf8 { err, .. } => {
            let (field, position) = (err.field() + 1, err.valid_up_to() + 1);
            format!("expected UTF-8, got an invalid byte at position {position} of field {field}")
        }
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("expected {expected_len} fields, as in the first row, got {len}")
        }
        _ => error.to_string(),
    }
}

/// The error's message without serde's line number, which is always 1, since a record is one line.
fn without_line(error: &serde_json::Error) -> String {
    error.to_string().replace(&format!(" at line {} column ", error.line()), " at column ")
}

impl InvalidRecord {
    /// Whether the input cannot be read past this record: after an I/O error, an error of the Arrow
    /// or Parquet reader, or a quote that is not closed, whose field includes the rest of the file.
    /// A fatal record cannot be skipped.
    pub fn is_fatal(&self) -> bool {
        match &self.kind {
            InvalidRecordKind::Io(_)
            | InvalidRecordKind::Arrow(_)
            | InvalidRecordKind::UnclosedQuote => true,
            InvalidRecordKind::Csv(error) => error.is_io_error(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_lists_at_most_20_names() {
        let names: Vec<String> = (0..23).map(|i| format!("n{i}")).collect();
        let all = list_names("fields", &names[..20]);
        assert!(
            all.starts_with(r#"its fields are ["n0", "#) && all.ends_with(r#""n19"]"#),
            "{all}"
        );
        let first = list_names("fields", &names);
        assert!(first.starts_with(r#"its first fields are ["n0", "#), "{first}");
        assert!(first.ends_with(r#""n19"], and it has 3 more"#), "{first}");
    }
}
