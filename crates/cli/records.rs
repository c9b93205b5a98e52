//! The records of a file, one field of which is the text: lines, objects of JSON, rows of CSV or of a
//! table.

use std::{
    collections::HashSet,
    fmt,
    fs::File,
    hash::Hasher,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Result, anyhow, bail};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use clap::{Args, ValueEnum};
use flate2::read::MultiGzDecoder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use twox_hash::XxHash64;

use crate::{
    columns::{self, Rows},
    ending::{Compression, compressed, is_unreadable},
};

/// What some programs begin UTF-8 with; it is no part of the text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The field that vectors are written to.
pub const EMBEDDING: &str = "embedding";

/// Where records are read from.
#[derive(Args, Clone, Debug)]
pub struct Input {
    /// File to read texts from, or - for standard input. .jsonl, .ndjson, .csv, .tsv, .parquet and
    /// .arrow are read by a field, other files by lines; .gz and .zst are decompressed
    #[arg(id = "input", long = "input", value_name = "FILE", conflicts_with = "texts")]
    pub path: Option<String>,

    /// Format of the input, if its name does not tell
    #[arg(long, value_enum, value_name = "FORMAT", requires = "input", conflicts_with = "texts")]
    input_format: Option<Format>,

    /// Field or column that holds the text [default: text]
    #[arg(long, value_name = "NAME", requires = "input", conflicts_with = "texts")]
    field: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A text a line
    Lines,
    /// An object of JSON a line
    Jsonl,
    /// Values between commas, with a header
    Csv,
    /// Values between tabs, with a header
    Tsv,
    Parquet,
    /// Arrow IPC, a file or a stream
    Arrow,
}

/// Records, one after another.
pub struct Records {
    /// The columns of a table of them; of objects of JSON it is not known before all are read.
    pub schema: Option<SchemaRef>,
    /// How many there are, where the file says.
    pub count: Option<u64>,
    /// Blank lines of JSONL that were skipped so far.
    pub blank_lines: Arc<AtomicU64>,
    records: Box<dyn Iterator<Item = Read1> + Send>,
}

/// What is read of each line, or of each row.
pub type Read1 = std::result::Result<Record, Bad>;

/// A text, and what it came with.
pub struct Record {
    pub text: String,
    /// That of its line or row, from 1.
    pub number: u64,
    pub carried: Carried,
}

/// All fields of a record.
pub enum Carried {
    /// `{"id": 7, "text": "…"`: without the brace that ends it, so that more can follow.
    Object { beginning: String, embedded: bool },
    /// A row of a table.
    Row(Arc<Rows>, usize),
}

impl Record {
    /// As an object of JSON, without the brace that ends it.
    pub fn object(&self) -> Result<&str> {
        match &self.carried {
            Carried::Object { beginning, .. } => Ok(beginning),
            Carried::Row(rows, row) => rows.object(*row),
        }
    }
}

/// A record that has no text.
#[derive(Debug)]
pub struct Bad {
    /// `in.jsonl, line 7`
    at: String,
    what: String,
    /// Nothing can be read after it.
    pub last: bool,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

impl std::error::Error for Bad {}

/// How far an input has been read.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Position {
    /// Records, bad ones among them.
    pub read: u64,
    /// What they were.
    hash: u64,
}

impl Position {
    /// With one record more.
    pub fn after(self, record: &Read1) -> Self {
        // XXH64 of the bytes, which no version of Rust or of a library changes.
        let mut hasher = XxHash64::with_seed(self.hash);
        let mut part = |bytes: &[u8]| {
            hasher.write(&(bytes.len() as u64).to_le_bytes());
            hasher.write(bytes);
        };
        match record {
            Ok(record) => match &record.carried {
                Carried::Object { beginning, .. } => {
                    part(record.text.as_bytes());
                    part(beginning.as_bytes());
                }
                Carried::Row(rows, row) => {
                    part(&rows.hash().to_le_bytes());
                    part(&(*row as u64).to_le_bytes());
                }
            },
            Err(bad) => part(bad.to_string().as_bytes()),
        }
        Self { read: self.read + 1, hash: hasher.finish() }
    }
}

impl Records {
    pub fn new(
        schema: Option<SchemaRef>,
        records: impl Iterator<Item = Read1> + Send + 'static,
    ) -> Self {
        Self { schema, count: None, blank_lines: Arc::default(), records: Box::new(records) }
    }

    /// One record for each text.
    pub fn of_texts(texts: Vec<String>) -> Self {
        let count = texts.len() as u64;
        let records = texts.into_iter().zip(1..).map(|(text, number)| {
            let carried = carried_line(&text);
            Ok(Record { text, number, carried })
        });
        Self { count: Some(count), ..Self::new(Some(texts_of(["text"])), records) }
    }

    /// Reads past the records that an earlier run has read, if they are the same.
    pub fn skip_to(&mut self, position: Position) -> Result<()> {
        let mut here = Position::default();
        for number in 0..position.read {
            let Some(record) = self.next() else {
                bail!(
                    "the input has {number} records: expected the {} that the interrupted run read; \
                     start anew without --resume",
                    position.read
                );
            };
            here = here.after(&record);
        }
        match here == position {
            true => Ok(()),
            false => bail!(
                "the input is not what the interrupted run read: expected the same first {} records; \
                 start anew without --resume",
                position.read
            ),
        }
    }

    /// The columns of a table of these records, and the fields whose numbers become text. For JSON they
    /// are inferred from all records of a file, or from the first `window` records of a stream.
    pub fn columns(&mut self, input: &Input, window: usize) -> Result<(SchemaRef, Vec<String>)> {
        match &self.schema {
            Some(schema) => Ok((schema.clone(), vec![])),
            None if input.is_stream() => {
                let first: Vec<Read1> = self.by_ref().take(window).collect();
                let columns = columns::of_objects(&input.name(), first.iter().flatten())?;
                let rest = std::mem::replace(&mut self.records, Box::new(std::iter::empty()));
                self.records = Box::new(first.into_iter().chain(rest));
                Ok(columns)
            }
            None => columns::of_objects(&input.name(), input.open()?.flatten()),
        }
    }
}

impl Iterator for Records {
    type Item = Read1;

    fn next(&mut self) -> Option<Read1> {
        self.records.next()
    }
}

impl Input {
    pub fn new(path: String, field: Option<String>) -> Self {
        Self { path: Some(path), input_format: None, field }
    }

    fn path(&self) -> &str {
        self.path.as_deref().unwrap_or("-")
    }

    /// It can be read but once.
    fn is_stream(&self) -> bool {
        self.path() == "-" || !Path::new(self.path()).is_file()
    }

    /// What errors call it.
    pub fn name(&self) -> String {
        match self.path() {
            "-" => "standard input".to_string(),
            path => path.to_string(),
        }
    }

    /// The format by `--input-format` or the name's ending, and the compression by the ending.
    fn format(&self) -> Result<(Format, Option<Compression>)> {
        let (ending, compression) = compressed(Path::new(self.path()));
        let format = match (self.input_format, ending.as_str()) {
            (Some(format), _) => format,
            (None, "jsonl" | "ndjson") => Format::Jsonl,
            (None, "csv") => Format::Csv,
            (None, "tsv") => Format::Tsv,
            (None, "parquet") => Format::Parquet,
            (None, "arrow" | "feather" | "ipc") => Format::Arrow,
            (None, other) if is_unreadable(other) => bail!(
                "{}: .{other} files cannot be read: expected .jsonl, .ndjson, .csv, .tsv, \
                 .parquet, .arrow or lines of text; if the content is one of these, name it \
                 with --input-format",
                self.name()
            ),
            (None, _) => Format::Lines,
        };
        if compression.is_some() && matches!(format, Format::Parquet | Format::Arrow) {
            bail!(
                "{} is compressed, and Parquet and Arrow files are read in parts: decompress it first",
                self.name()
            );
        }
        Ok((format, compression))
    }

    /// The records of the file, from the first.
    pub fn open(&self) -> Result<Records> {
        let (name, (format, compression)) = (self.name(), self.format()?);
        let field = self.field.as_deref().unwrap_or("text").to_string();
        if format == Format::Lines && self.field.is_some() {
            bail!(
                "{name} has no fields: expected a name that ends in .jsonl, .ndjson, .csv, .tsv, \
                 .parquet or .arrow, or --input-format"
            );
        }
        let file = match self.path() {
            "-" => None,
            path => {
                let opened = File::open(path);
                Some(opened.map_err(|error| anyhow!("{name} cannot be read: {error}"))?)
            }
        };
        let input = |file: Option<File>| -> Result<Box<dyn Read + Send>> {
            Ok(match (file, compression) {
                (None, _) => Box::new(io::stdin()),
                (Some(file), None) => Box::new(file),
                (Some(file), Some(Compression::Gzip)) => {
                    Box::new(MultiGzDecoder::new(BufReader::new(file)))
                }
                (Some(file), Some(Compression::Zstd)) => {
                    let decoder = zstd::Decoder::new(file);
                    Box::new(decoder.map_err(|error| anyhow!("{name} cannot be read: {error}"))?)
                }
            })
        };
        match format {
            Format::Lines => {
                let records = lines(input(file)?, name.clone(), |line| {
                    Ok(Some((line.to_string(), carried_line(line))))
                });
                Ok(Records::new(Some(texts_of(["text"])), records))
            }
            Format::Jsonl => {
                let blank_lines = Arc::<AtomicU64>::default();
                let skipped = blank_lines.clone();
                let records = lines(input(file)?, name.clone(), move |line| {
                    if line.trim_ascii().is_empty() {
                        skipped.fetch_add(1, Ordering::Relaxed);
                        return Ok(None);
                    }
                    object(line, &field).map(Some)
                });
                Ok(Records { blank_lines, ..Records::new(None, records) })
            }
            Format::Csv => rows(input(file)?, b',', name.clone(), field),
            Format::Tsv => rows(input(file)?, b'\t', name.clone(), field),
            Format::Parquet => columns::parquet(file, &name, &field),
            Format::Arrow => columns::arrow(file, &name, &field),
        }
    }

    /// Counts the records of a file by its lines: too many where a CSV value has several lines or
    /// JSONL has blank ones.
    pub fn count_lines(&self) -> Option<u64> {
        let header = match self.format().ok()? {
            (_, Some(_)) | (Format::Parquet | Format::Arrow, _) => return None,
            (Format::Lines | Format::Jsonl, None) => 0,
            (Format::Csv | Format::Tsv, None) => 1,
        };
        if self.is_stream() {
            return None;
        }
        let mut file = BufReader::with_capacity(1 << 20, File::open(self.path()).ok()?);
        let mut lines = 0;
        loop {
            let read = file.fill_buf().ok()?;
            if read.is_empty() {
                return Some(u64::saturating_sub(lines, header));
            }
            lines += read.iter().filter(|&&byte| byte == b'\n').count() as u64;
            let length = read.len();
            file.consume(length);
        }
    }
}

/// Columns that hold nothing but texts.
fn texts_of<'a>(names: impl IntoIterator<Item = &'a str>) -> SchemaRef {
    let fields = names.into_iter().map(|name| Field::new(name, DataType::Utf8, false));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// A line as a JSON object with the field `text`.
fn carried_line(line: &str) -> Carried {
    let beginning = format!("{{\"text\":{}", Value::from(line));
    Carried::Object { beginning, embedded: false }
}

/// The text of a line and its record; nothing for a line that is skipped.
type OfLine = std::result::Result<Option<(String, Carried)>, String>;

/// A record for each line, without its line ending.
fn lines(
    input: impl Read + Send,
    name: String,
    record: impl Fn(&str) -> OfLine + Send,
) -> impl Iterator<Item = Read1> + Send {
    let mut failed = false;
    let lines = BufReader::new(input).split(b'\n').zip(1u64..);
    let lines = lines.take_while(move |(line, _)| !std::mem::replace(&mut failed, line.is_err()));
    lines.filter_map(move |(line, number)| {
        let last = line.is_err();
        let of_line = |mut line: Vec<u8>| {
            if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            let line = String::from_utf8(line).map_err(|error| {
                let byte = error.utf8_error().valid_up_to() + 1;
                format!("expected UTF-8, got another byte at {byte}")
            });
            record(&line?)
        };
        let read = line.map_err(|error| format!("it cannot be read: {error}")).and_then(of_line);
        let read = read.transpose()?;
        let read = read.map(|(text, carried)| Record { text, number, carried });
        Some(read.map_err(|what| Bad::new(&name, "line", number, what, last)))
    })
}

impl Bad {
    pub fn new(name: &str, unit: &str, number: u64, what: String, last: bool) -> Self {
        Self { at: format!("{name}, {unit} {number}"), what, last }
    }
}

/// An object of JSON as it stands, and one of its fields.
fn object(line: &str, field: &str) -> std::result::Result<(String, Carried), String> {
    let read = serde_json::from_str::<Map<String, Value>>(line);
    let map = read.map_err(|error| format!("expected an object of JSON: {error}"))?;
    let text = match map.get(field) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => return Err(format!("expected a text in {field:?}, got {other}")),
        None => return Err(format!("expected a field {field:?}, got {}", keys(&map))),
    };
    let embedded = map.contains_key(EMBEDDING);
    let beginning = line.trim().strip_suffix('}').unwrap_or_default().trim_end().to_string();
    Ok((text, Carried::Object { beginning, embedded }))
}

fn keys(map: &Map<String, Value>) -> String {
    let keys: Vec<&str> = map.keys().map(String::as_str).collect();
    if keys.is_empty() { "none".to_string() } else { keys.join(", ") }
}

/// Refuses columns of one name, which no record could tell from each other.
pub fn differ<'a>(name: &str, columns: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut seen = HashSet::new();
    for column in columns {
        if !seen.insert(column) {
            bail!("{name} has two columns {column:?}: expected different names");
        }
    }
    Ok(())
}

/// A record of each row, under the names of the first.
fn rows(
    input: impl Read + Send + 'static,
    delimiter: u8,
    name: String,
    column: String,
) -> Result<Records> {
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(input);
    let header = reader.headers().map_err(|error| anyhow!("{name}: {error}"))?.clone();
    let Some(at) = header.iter().position(|name| name == column) else {
        let names: Vec<&str> = header.iter().collect();
        bail!("{name}: expected a column {column:?}, got {}", names.join(", "));
    };
    differ(&name, header.iter())?;
    let embedded = header.iter().any(|name| name == EMBEDDING);
    let schema = texts_of(header.iter());
    let rows = reader.into_records().map(move |row| {
        let line = |position: Option<&csv::Position>| position.map_or(0, csv::Position::line);
        let row = row.map_err(|error| {
            let (at, last) = (line(error.position()), error.is_io_error());
            Bad::new(&name, "line", at, error.to_string(), last)
        })?;
        let fields = header.iter().zip(row.iter());
        let fields =
            fields.map(|(name, field)| format!("{}:{}", Value::from(name), Value::from(field)));
        let beginning = format!("{{{}", fields.collect::<Vec<_>>().join(","));
        let carried = Carried::Object { beginning, embedded };
        let text = row.get(at).unwrap_or_default().to_string();
        Ok(Record { text, number: line(row.position()), carried })
    });
    Ok(Records::new(Some(schema), rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A note on disk has such a hash: it must be the same in every version.
    #[test]
    fn the_hash_of_a_position_never_changes() {
        let positions = Records::of_texts(vec!["a".to_string(), "b".to_string()]).scan(
            Position::default(),
            |position, record| {
                *position = position.after(&record);
                Some(*position)
            },
        );
        let hashes: Vec<u64> = positions.map(|position| position.hash).collect();
        assert_eq!(hashes, [423_814_442_041_782_016, 7_125_784_579_109_028_841]);
    }

    fn read(file: &str, content: &[u8], field: Option<&str>) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(file);
        std::fs::write(&path, content).unwrap();
        let shown = |text: String| text.replace(&format!("{}/", dir.path().display()), "");
        let path = path.to_str().unwrap().to_string();
        match Input::new(path, field.map(String::from)).open() {
            Err(error) => vec![shown(error.to_string())],
            Ok(records) => records
                .map(|record| match record {
                    Ok(Record { text, carried: Carried::Object { beginning, .. }, .. }) => {
                        format!("{text} | {beginning}")
                    }
                    Ok(Record { carried: Carried::Row(..), .. }) => panic!("these are no tables"),
                    Err(bad) => shown(bad.to_string()),
                })
                .collect(),
        }
    }

    #[test]
    fn lines_objects_and_rows_are_records() {
        assert_eq!(
            read("a.txt", b"one\r\n\ntw\"o", None),
            ["one | {\"text\":\"one\"", " | {\"text\":\"\"", "tw\"o | {\"text\":\"tw\\\"o\""]
        );
        assert_eq!(
            read(
                "a.jsonl",
                b"{\"id\": 1, \"text\": \"x\"}\n[]\n{\"id\": 2}\n{\"text\": 3}\n",
                None
            ),
            [
                "x | {\"id\": 1, \"text\": \"x\"",
                "a.jsonl, line 2: expected an object of JSON: invalid type: sequence, expected a map \
                 at line 1 column 0",
                "a.jsonl, line 3: expected a field \"text\", got id",
                "a.jsonl, line 4: expected a text in \"text\", got 3",
            ]
        );
        assert_eq!(
            read("a.csv", b"id,body\n1,\"two\nlines\"\n2\n", Some("body")),
            [
                "two\nlines | {\"id\":\"1\",\"body\":\"two\\nlines\"",
                "a.csv, line 4: CSV error: record 2 (line: 4, byte: 22): found record with 1 fields, \
                 but the previous record has 2 fields",
            ]
        );
        assert_eq!(read("a.txt", b"\xef\xbb\xbfone\n", None), ["one | {\"text\":\"one\""]);
        assert_eq!(
            read("a.csv", b"text,id,id\na,1,2\n", None),
            ["a.csv has two columns \"id\": expected different names"]
        );
        assert_eq!(read("a.csv", b"id\n", None), ["a.csv: expected a column \"text\", got id"]);
        assert_eq!(
            read("a.txt", b"na\xefve\n", None),
            ["a.txt, line 1: expected UTF-8, got another byte at 3"]
        );
        assert_eq!(
            read("a.txt", b"", Some("x")),
            [
                "a.txt has no fields: expected a name that ends in .jsonl, .ndjson, .csv, .tsv, .parquet \
              or .arrow, or --input-format"
            ]
        );
    }
}
