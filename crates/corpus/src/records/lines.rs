//! Text files, one record per line.

use std::io::{BufRead, BufReader, Read};

use crate::records::{
    record::{Fields, InvalidRecord, InvalidRecordKind, Record, Unit},
    stream::{ReadRecord, Records, string_columns},
};

/// UTF-8's byte order mark, which some programs write at the start of a file. It is not part of the
/// text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The text and the fields of a line; `None` if the line is skipped.
pub(crate) type ParsedLine = Result<Option<(String, Fields)>, InvalidRecordKind>;

/// One record per line of a text file. The line is the text.
pub(crate) fn read(input: impl Read + Send + 'static, name: String) -> Records {
    let records = parse_lines(input, name, |line| Ok(Some((line, Fields::Text))));
    Records::new(Some(string_columns(["text"])), records)
}

/// One record per line. `parse` receives the line without its line ending.
pub(crate) fn parse_lines(
    input: impl Read + Send,
    name: String,
    parse: impl Fn(String) -> ParsedLine + Send,
) -> impl Iterator<Item = ReadRecord> + Send {
    let mut failed = false;
    let lines = BufReader::new(input).split(b'\n').zip(1u64..);
    // An I/O error is the last item.
    let lines = lines.take_while(move |(line, _)| !std::mem::replace(&mut failed, line.is_err()));
    lines.filter_map(move |(line, number)| {
        let parse_bytes = |mut line: Vec<u8>| {
            if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            let line = String::from_utf8(line).map_err(|error| {
                let position = error.utf8_error().valid_up_to() + 1;
                InvalidRecordKind::Utf8 { position }
            });
            parse(line?)
        };
        let parsed = line.map_err(InvalidRecordKind::Io).and_then(parse_bytes).transpose()?;
        let unit = Unit::Line;
        let record = parsed.map(|(text, fields)| Record { text, unit, number, fields });
        Some(record.map_err(|kind| InvalidRecord { name: name.clone(), unit, number, kind }))
    })
}
