//! CSV and TSV, one record per row. The first row names the columns.

use std::{
    collections::VecDeque,
    io::{self, Read},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;

use crate::{
    ALL_EMBEDDINGS, Error, InputError, Result,
    records::{
        record::{Fields, InvalidRecord, InvalidRecordKind, Record, Unit},
        stream::{Records, check_distinct, string_columns},
    },
};

/// The rows of a CSV file. `column` is the name of the column that contains the text.
///
/// # Errors
/// [`InputError::Csv`] for an unreadable header; [`Error::InvalidRecord`] if a quote in the header
/// is not closed; [`InputError::NoColumn`] if the header lacks `column`;
/// [`InputError::DuplicateColumn`] if two columns have the same name.
pub(crate) fn read(
    input: impl Read + Send + 'static,
    delimiter: u8,
    name: String,
    column: String,
) -> Result<Records> {
    let scan = Scan::default();
    let input = Scanner {
        input,
        delimiter,
        scan: scan.clone(),
        read: 0,
        is_after_cr: false,
        place: Place::FieldStart,
    };
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(input);
    let header = reader
        .headers()
        .map_err(|source| Error::Input(InputError::Csv { name: name.clone(), source }))?;
    let header = header.clone();
    let unclosed = {
        let (scan, name) = (scan.clone(), name.clone());
        move || {
            let kind = InvalidRecordKind::UnclosedQuote;
            let number = scan.take_unclosed_quote()?;
            Some(InvalidRecord { name: name.clone(), unit: Unit::Line, number, kind })
        }
    };
    if let Some(invalid) = unclosed() {
        return Err(invalid.into());
    }
    let Some(text_column) = header.iter().position(|name| name == column) else {
        let got = header.iter().map(String::from).collect();
        return Err(InputError::NoColumn { name, expected: column, got }.into());
    };
    check_distinct(&name, header.iter())?;
    let is_field = |name: &&str| header.iter().any(|field| field == *name);
    let embeddings: Vec<&str> = ALL_EMBEDDINGS.into_iter().filter(is_field).collect();
    let schema = string_columns(header.iter());
    let mut row = csv::StringRecord::new();
    let rows = std::iter::from_fn(move || {
        let read = reader.read_record(&mut row);
        let line = |position: &csv::Position| scan.line_at(position.byte());
        if let Some(invalid) = unclosed() {
            return Some(Err(invalid));
        }
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
        let fields = Fields::Json { open_object, embeddings: embeddings.clone() };
        let text = row.get(text_column).unwrap_or_default().to_string();
        let number = row.position().map_or(0, line);
        Some(Ok(Record { text, unit: Unit::Line, number, fields }))
    });
    Ok(Records::new(Some(schema), rows))
}

/// The line ends and the unclosed quote that a [`Scanner`] has found.
///
/// `csv` 1.4 places a record before the line feed of the previous record's CRLF and before
/// preceding blank lines, so the line of the record's position is too low. `csv` also does not
/// report a quote that is not closed: the rest of the input is then one field.
#[derive(Clone, Default)]
struct Scan(Arc<Mutex<Found>>);

#[derive(Default)]
struct Found {
    /// The byte ranges of the line ends after the position of the last call of [`Scan::line_at`].
    line_ends: VecDeque<Range<u64>>,
    /// The number of line ends before those in `line_ends`.
    lines: u64,
    /// The line of the quote that is open at the end of the input.
    unclosed_quote: Option<u64>,
}

impl Scan {
    fn lock(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number, from 1, of the line at offset `byte`. If line ends start at `byte`, they are
    /// skipped first. `byte` must not decrease from call to call.
    fn line_at(&self, mut byte: u64) -> u64 {
        let mut found = self.lock();
        while let Some(end) = found.line_ends.front().filter(|end| end.start <= byte) {
            byte = byte.max(end.end);
            found.line_ends.pop_front();
            found.lines += 1;
        }
        found.lines + 1
    }

    fn take_unclosed_quote(&self) -> Option<u64> {
        self.lock().unclosed_quote.take()
    }
}

/// The place of the next byte in a row.
enum Place {
    FieldStart,
    Unquoted,
    /// In a quoted field. Holds the line of the opening quote.
    Quoted(u64),
    /// After a quote in a quoted field, which closes the field unless another quote follows. Holds
    /// the line of the opening quote.
    AfterQuote(u64),
}

/// The byte order mark, which may precede the first row.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// A reader that scans its input for line ends and quotes.
struct Scanner<R> {
    input: R,
    delimiter: u8,
    scan: Scan,
    /// Number of bytes read.
    read: u64,
    is_after_cr: bool,
    place: Place,
}

impl<R: Read> Read for Scanner<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = if self.read == 0 {
            // `csv` 1.4 looks for a byte order mark in its first buffer only, and takes a buffer
            // with nothing else for the end of the input. The first read of a pipe may return
            // fewer bytes.
            let mut start = vec![];
            let len = (BOM.len() + 1).min(buffer.len());
            self.input.by_ref().take(len as u64).read_to_end(&mut start)?;
            buffer[..start.len()].copy_from_slice(&start);
            start.len()
        } else {
            self.input.read(buffer)?
        };
        let scan = self.scan.clone();
        let mut found = scan.lock();
        for &byte in &buffer[..n] {
            self.scan_byte(byte, &mut found);
        }
        if n == 0
            && !buffer.is_empty()
            && let Place::Quoted(line) = self.place
        {
            found.unclosed_quote = Some(line);
            self.place = Place::FieldStart;
        }
        Ok(n)
    }
}

impl<R> Scanner<R> {
    /// Updates the line ends and the place. Outside of quotes, a CR without LF is a line end and
    /// ends the row; in quotes, it is a character of the field.
    fn scan_byte(&mut self, byte: u8, found: &mut Found) {
        let at = self.read;
        self.read += 1;
        let is_quoted = matches!(self.place, Place::Quoted(_));
        match (byte, found.line_ends.back_mut()) {
            (b'\n', Some(cr)) if self.is_after_cr && cr.end == at => cr.end = self.read,
            (b'\n', _) if self.is_after_cr && !is_quoted => {} // the CR is counted already
            (b'\n', _) => found.line_ends.push_back(at..self.read),
            (b'\r', _) if !is_quoted => found.line_ends.push_back(at..self.read),
            _ => {}
        }
        self.is_after_cr = byte == b'\r';
        if at < 3 && BOM.contains(&byte) {
            return;
        }
        let ends_field = byte == self.delimiter || byte == b'\n' || byte == b'\r';
        self.place = match (&self.place, byte) {
            (Place::FieldStart, b'"') => {
                Place::Quoted(found.lines + found.line_ends.len() as u64 + 1)
            }
            (Place::Quoted(line), b'"') => Place::AfterQuote(*line),
            (Place::AfterQuote(line), b'"') | (Place::Quoted(line), _) => Place::Quoted(*line),
            _ if ends_field => Place::FieldStart,
            _ => Place::Unquoted,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_with_every_line_end_and_blank_lines() {
        // In the last file, the CR between quotes is no line end.
        for (end, last) in [("\n", 8), ("\r\n", 8), ("\r", 7)] {
            let rows = ["text", "", "", "a", "\"b", "c\"", "", "d"].join(end) + end;
            let rows = io::Cursor::new(rows.into_bytes());
            let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
            let numbers: Vec<u64> = records.map(|record| record.unwrap().number).collect();
            assert_eq!(numbers, [4, 5, last], "{end:?}");
        }
    }

    #[test]
    fn a_byte_order_mark_may_arrive_in_several_reads() {
        let rows = io::Cursor::new(b"\xef").chain(io::Cursor::new(b"\xbb\xbftext\na\n"));
        let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        let texts: Vec<String> = records.map(|record| record.unwrap().text).collect();
        assert_eq!(texts, ["a"]);
    }

    #[test]
    fn a_carriage_return_between_quotes_is_no_line_end() {
        let rows = io::Cursor::new(b"text\n\"a\rb\r\nc\"\nd\n");
        let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        let numbers: Vec<u64> = records.map(|record| record.unwrap().number).collect();
        assert_eq!(numbers, [2, 4]);
    }

    #[test]
    fn a_quote_that_is_not_closed_is_an_error_with_its_line() {
        for (rows, valid, line) in [
            ("text\n\"abc\ndef\nghi\n", 0, 2),
            ("text,n\na,1\r\n\"b\"\"\",\"2\r\nc,3\r\nd,4", 1, 3),
            ("\u{feff}\"text\"\n\"a\"\n\"", 1, 3),
            ("\"text\na\n", 0, 1),
        ] {
            let input = io::Cursor::new(rows.as_bytes());
            let records = match read(input, b',', "a.csv".to_string(), "text".to_string()) {
                Ok(records) => records.collect(),
                Err(Error::InvalidRecord(invalid)) => vec![Err(invalid)],
                Err(error) => panic!("{rows:?}: {error}"),
            };
            assert_eq!(records.iter().filter(|record| record.is_ok()).count(), valid, "{rows:?}");
            let error = records.last().unwrap().as_ref().unwrap_err().to_string();
            let expected = format!("a.csv, line {line}: the quote is not closed");
            assert!(error.starts_with(&expected), "{rows:?}: {error}");
        }
        // A quote inside an unquoted field is a character.
        let rows = io::Cursor::new(b"text\na \"b\nc\n");
        let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        assert_eq!(records.filter(Result::is_ok).count(), 2);
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

    /// The field extends to the end of the file, so skipping the record would skip the rest.
    #[test]
    fn a_quote_that_is_not_closed_is_fatal() {
        let rows = io::Cursor::new(b"text\na\n\"b\nc\nd\n");
        let records = read(rows, b',', "a.csv".to_string(), "text".to_string()).unwrap();
        let error = records.filter_map(std::result::Result::err).next().unwrap();
        assert!(error.to_string().starts_with("a.csv, line 3: the quote is not closed"), "{error}");
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
