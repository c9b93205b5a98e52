//! CSV and TSV, one record per row. The first row names the columns.

use std::{
    collections::VecDeque,
    io::{self, Read},
    sync::{Arc, Mutex, PoisonError},
};

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
    let line_ends = LineEnds::default();
    let input =
        LineEndRecorder { input, line_ends: line_ends.clone(), read: 0, is_after_cr: false };
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
    let mut row = csv::StringRecord::new();
    let rows = std::iter::from_fn(move || {
        let read = reader.read_record(&mut row);
        let line =
            |position: &csv::Position| position.line() + line_ends.skipped_at(position.byte());
        match read {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                return Some(Err(InvalidRecord {
                    name: name.clone(),
                    unit: Unit::Line,
                    number: line(error.position().unwrap_or(reader.position())),
                    kind: InvalidRecordKind::Csv(error),
                }));
            }
        }
        let fields = header.iter().zip(row.iter());
        let fields =
            fields.map(|(name, field)| format!("{}:{}", Value::from(name), Value::from(field)));
        let open_object = format!("{{{}", fields.collect::<Vec<_>>().join(","));
        let fields = Fields::Json { open_object, has_embedding };
        let text = row.get(text_column).unwrap_or_default().to_string();
        let number = row.position().map_or(0, line);
        Some(Ok(Record { text, number, fields }))
    });
    Ok(Records::new(Some(schema), rows))
}

/// The positions of the line feeds that have been read, each with whether a carriage return
/// precedes it.
///
/// The position that `csv` 1.4 gives for a record is before the line feed of the previous record's
/// CRLF, and before blank lines, so that its line is too low.
#[derive(Clone, Default)]
struct LineEnds(Arc<Mutex<VecDeque<(u64, bool)>>>);

impl LineEnds {
    /// The number of line ends without other characters between them from the position `byte` on.
    /// Forgets all positions before it.
    fn skipped_at(&self, mut byte: u64) -> u64 {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut skipped = 0;
        while let Some(&(at, is_after_cr)) = all.front() {
            if at == byte || (at == byte + 1 && is_after_cr) {
                (byte, skipped) = (at + 1, skipped + 1);
            } else if at > byte {
                break;
            }
            all.pop_front();
        }
        skipped
    }
}

/// A reader that records the line ends of its input.
struct LineEndRecorder<R> {
    input: R,
    line_ends: LineEnds,
    /// Number of bytes read.
    read: u64,
    is_after_cr: bool,
}

impl<R: Read> Read for LineEndRecorder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        let mut all = self.line_ends.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (i, &byte) in buffer[..n].iter().enumerate() {
            if byte == b'\n' {
                all.push_back((self.read + i as u64, self.is_after_cr));
            }
            self.is_after_cr = byte == b'\r';
        }
        self.read += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_with_every_line_end_and_blank_lines() {
        for end in ["\n", "\r\n"] {
            let rows = ["text", "", "", "a", "\"b", "c\"", "", "d"].join(end) + end;
            let rows = io::Cursor::new(rows.into_bytes());
            let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
            let numbers: Vec<u64> = records.map(|record| record.unwrap().number).collect();
            assert_eq!(numbers, [4, 5, 8], "{end:?}");
        }
    }

    #[test]
    fn a_row_with_another_number_of_fields_is_named_by_its_line() {
        let rows = io::Cursor::new(b"text,n\r\na,1\r\nb\r\n");
        let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        let errors = records.filter_map(|record| Some(record.err()?.to_string()));
        let expected = "a.csv, line 3: expected 2 fields, as in the first row, got 1";
        assert_eq!(errors.collect::<Vec<_>>(), [expected]);
    }

    #[test]
    fn a_read_error_has_the_line_at_which_it_happened() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("broken"))
            }
        }
        let input = io::Cursor::new(b"text,n\na,1\nb,2\n").chain(Broken);
        let mut records = read(input, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        assert_eq!(records.by_ref().take(2).filter(Result::is_ok).count(), 2);
        let error = records.next().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "a.csv, line 4: cannot be read: broken");
        assert!(error.is_fatal());
    }

    #[test]
    fn an_invalid_byte_is_named_by_its_field_and_position() {
        let rows = io::Cursor::new(b"text,n\na,b\xff\n");
        let mut records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        let error = records.next().unwrap().unwrap_err().to_string();
        let expected = "expected UTF-8, got an invalid byte at position 2 of field 2";
        assert_eq!(error, format!("a.csv, line 2: {expected}"));
    }
}
