//! The records of a file: a line each, or an object of JSON, or a row of CSV, one field of which is the
//! text.

use std::{
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use anyhow::{Result, anyhow};
use serde_json::{Map, Value};

/// A text, and the record that it is from as the beginning of an object of JSON.
#[derive(Debug)]
pub struct Record {
    pub text: String,
    /// `{"id": 7, "text": "…"`: without the brace that ends it, so that more can follow.
    pub object: String,
    /// It has a field `embedding` already.
    pub embedded: bool,
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

/// What is read of each line, or of each row.
pub type Read1 = std::result::Result<Record, Bad>;

/// The records of a file, or of standard input where its name is `-`: `.jsonl` and `.ndjson` by their
/// field `field`, `.csv` by that column, `text` where none is named; anything else by its lines.
pub fn records(path: &str, field: Option<&str>) -> Result<Box<dyn Iterator<Item = Read1> + Send>> {
    let input: Box<dyn Read + Send> = match path {
        "-" => Box::new(io::stdin()),
        path => {
            let opened = File::open(path);
            Box::new(opened.map_err(|error| anyhow!("{path} cannot be read: {error}"))?)
        }
    };
    let name = if path == "-" { "standard input".to_string() } else { path.to_string() };
    let ending = Path::new(path).extension().and_then(|e| e.to_str()).unwrap_or_default();
    let wanted = field.unwrap_or("text").to_string();
    match (ending, field) {
        ("jsonl" | "ndjson", _) => {
            Ok(Box::new(lines(input, name, move |line| object(line, &wanted))))
        }
        ("csv", _) => rows(input, name, wanted),
        (_, None) => Ok(Box::new(lines(input, name, |line| {
            let object = format!("{{\"text\":{}", Value::from(line));
            Ok(Record { text: line.to_string(), object, embedded: false })
        }))),
        (_, Some(_)) => Err(anyhow!(
            "{name} has no fields: expected a name that ends in .jsonl, .ndjson or .csv"
        )),
    }
}

/// A record of each line, without what ends the line.
fn lines(
    input: impl Read + Send,
    name: String,
    record: impl Fn(&str) -> std::result::Result<Record, String> + Send,
) -> impl Iterator<Item = Read1> + Send {
    let mut failed = false;
    let lines = BufReader::new(input).split(b'\n').zip(1u64..);
    let lines = lines.take_while(move |(line, _)| !std::mem::replace(&mut failed, line.is_err()));
    lines.map(move |(line, number)| {
        let last = line.is_err();
        let of_line = |mut line: Vec<u8>| {
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
        read.map_err(|what| Bad { at: format!("{name}, line {number}"), what, last })
    })
}

/// An object of JSON as it stands, and one of its fields.
fn object(line: &str, field: &str) -> std::result::Result<Record, String> {
    let read = serde_json::from_str::<Map<String, Value>>(line);
    let map = read.map_err(|error| format!("expected an object of JSON: {error}"))?;
    let text = match map.get(field) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => return Err(format!("expected a text in {field:?}, got {other}")),
        None => return Err(format!("expected a field {field:?}, got {}", keys(&map))),
    };
    let embedded = map.contains_key("embedding");
    let object = line.trim().strip_suffix('}').unwrap_or_default().trim_end().to_string();
    Ok(Record { text, object, embedded })
}

fn keys(map: &Map<String, Value>) -> String {
    let keys: Vec<&str> = map.keys().map(String::as_str).collect();
    if keys.is_empty() { "none".to_string() } else { keys.join(", ") }
}

/// A record of each row, under the names of the first.
fn rows(
    input: Box<dyn Read + Send>,
    name: String,
    column: String,
) -> Result<Box<dyn Iterator<Item = Read1> + Send>> {
    let mut reader = csv::Reader::from_reader(input);
    let header = reader.headers().map_err(|error| anyhow!("{name}: {error}"))?.clone();
    let Some(at) = header.iter().position(|name| name == column) else {
        let names: Vec<&str> = header.iter().collect();
        return Err(anyhow!("{name}: expected a column {column:?}, got {}", names.join(", ")));
    };
    let embedded = header.iter().any(|name| name == "embedding");
    Ok(Box::new(reader.into_records().map(move |row| {
        let row = row.map_err(|error| {
            let line = error.position().map_or(0, csv::Position::line);
            Bad { at: format!("{name}, line {line}"), what: error.to_string(), last: false }
        })?;
        let fields = header.iter().zip(row.iter());
        let fields =
            fields.map(|(name, field)| format!("{}:{}", Value::from(name), Value::from(field)));
        let object = format!("{{{}", fields.collect::<Vec<_>>().join(","));
        Ok(Record { text: row.get(at).unwrap_or_default().to_string(), object, embedded })
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &str, content: &[u8], field: Option<&str>) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(file);
        std::fs::write(&path, content).unwrap();
        let shown = |text: String| text.replace(&format!("{}/", dir.path().display()), "");
        match records(path.to_str().unwrap(), field) {
            Err(error) => vec![shown(error.to_string())],
            Ok(records) => records
                .map(|record| match record {
                    Ok(Record { text, object, .. }) => format!("{text} | {object}"),
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
        assert_eq!(read("a.csv", b"id\n", None), ["a.csv: expected a column \"text\", got id"]);
        assert_eq!(
            read("a.txt", b"na\xefve\n", None),
            ["a.txt, line 1: expected UTF-8, got another byte at 3"]
        );
        assert_eq!(
            read("a.txt", b"", Some("x")),
            ["a.txt has no fields: expected a name that ends in .jsonl, .ndjson or .csv"]
        );
    }
}
