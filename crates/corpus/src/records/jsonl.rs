//! JSONL, one record per object.

use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use serde_json::Value;

use crate::{
    ALL_EMBEDDINGS,
    columns::Json,
    records::{
        lines::parse_lines,
        record::{Fields, InvalidRecordKind},
        stream::Records,
    },
};

/// The objects of a JSONL file. The field `field` of an object is its text. Blank lines are skipped
/// and counted.
pub(crate) fn read(input: impl Read + Send + 'static, name: String, field: String) -> Records {
    let blank_lines = Arc::<AtomicU64>::default();
    let counter = blank_lines.clone();
    let records = parse_lines(input, name, move |line| {
        if line.trim_ascii().is_empty() {
            counter.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        parse_object(&line, &field).map(Some)
    });
    Records::new(None, records).with_blank_lines(blank_lines)
}

/// The string in the field `field` of a JSON object, and the JSON of the object without its closing
/// brace.
fn parse_object(line: &str, field: &str) -> Result<(String, Fields), InvalidRecordKind> {
    let map = match serde_json::from_str::<Value>(line).map_err(InvalidRecordKind::Json)? {
        Value::Object(map) => map,
        _ => return Err(InvalidRecordKind::NotAnObject { got: parse(line)?.type_name() }),
    };
    let text = match map.get(field) {
        Some(Value::String(text)) => text.clone(),
        Some(_) => {
            let got = match parse(line)? {
                Json::Object(members) => members.get(field).map(Json::summary),
                _ => None,
            };
            let (field, got) = (field.to_string(), got.unwrap_or_default());
            return Err(InvalidRecordKind::NotText { field, got });
        }
        None => {
            let (field, got) = (field.to_string(), map.keys().cloned().collect());
            return Err(InvalidRecordKind::NoField { field, got });
        }
    };
    let embeddings = ALL_EMBEDDINGS.into_iter().filter(|name| map.contains_key(*name)).collect();
    let open_object = line.trim().strip_suffix('}').unwrap_or_default().trim_end().to_string();
    Ok((text, Fields::Json { open_object, embeddings }))
}

/// Parses a line as [`Json`], which keeps the digits of numbers, for an error message.
fn parse(line: &str) -> Result<Json, InvalidRecordKind> {
    Json::parse(line).map_err(InvalidRecordKind::Json)
}
