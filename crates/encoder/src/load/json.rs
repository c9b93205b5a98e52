//! A JSON file that is parsed once and converted to several types.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Error, FileError, Result};

/// A JSON file.
pub(crate) struct Json {
    path: String,
    text: Cow<'static, [u8]>,
    /// `None` if the text is not valid JSON.
    value: Option<Value>,
}

impl Json {
    /// Parses a file. `path` names the file in error messages.
    pub(crate) fn new(text: impl Into<Cow<'static, [u8]>>, path: impl Into<String>) -> Self {
        let text = text.into();
        Self { path: path.into(), value: serde_json::from_slice(&text).ok(), text }
    }

    /// A value that is not stored in this form in the file at `path`.
    pub(crate) fn from_value(value: Value, path: impl Into<String>) -> Self {
        let text = value.to_string().into_bytes().into();
        Self { path: path.into(), text, value: Some(value) }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Converts the content to `T`.
    ///
    /// # Errors
    /// [`FileError::Json`] for invalid JSON and for a value of another type.
    pub(crate) fn to<T: DeserializeOwned>(&self) -> Result<T> {
        match self.value.as_ref().map(T::deserialize) {
            Some(Ok(value)) => Ok(value),
            // Only errors that come from the text name a line and a column.
            _ => parse_json(&self.text, &self.path),
        }
    }
}

/// Parses JSON. `path` names the file in error messages.
pub(crate) fn parse_json<T: DeserializeOwned>(json: &[u8], path: &str) -> Result<T> {
    let mut json = serde_json::Deserializer::from_slice(json);
    let read = serde_path_to_error::deserialize(&mut json);
    let read = read.map_err(|error| (error.path().to_string(), error.into_inner()));
    let check_end = |value| json.end().map(|()| value).map_err(|error| (".".to_string(), error));
    read.and_then(check_end).map_err(|(key, source)| json_error(path, key, source))
}

/// Converts a parsed JSON value, with the errors of [`parse_json`].
pub(crate) fn parse_value<T: DeserializeOwned>(value: Value, path: &str) -> Result<T> {
    serde_path_to_error::deserialize(value)
        .map_err(|error| json_error(path, error.path().to_string(), error.into_inner()))
}

/// `key` is the path of the value within the JSON, `.` for the root.
fn json_error(path: &str, key: String, source: serde_json::Error) -> Error {
    let has_key = source.is_data() && key != ".";
    let at = if has_key { format!("{key}: ") } else { String::new() };
    Error::File(FileError::Json { path: path.to_string(), at, source })
}
