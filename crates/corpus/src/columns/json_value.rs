//! JSON values whose numbers keep their digits.
//!
//! Numbers stay text until the type of their column is known, so that integers are never rounded.
//!
//! `arrow-json` 60.1 is not used to parse: its decoder joins UTF-16 surrogates with `|` where `+`
//! is needed (`char_from_surrogate_pair`), which stores `"\ud842\udfb7"`, U+20BB7, as U+10BB7.

use std::fmt;

use indexmap::IndexMap;
use serde_json::value::RawValue;

/// A JSON value. `Number` holds the number's text.
#[derive(Debug)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Json>),
    Object(IndexMap<String, Json>),
}

impl Json {
    /// Parses a JSON text. If several members of an object have the same name, the last one is
    /// used.
    ///
    /// # Errors
    /// [`serde_json::Error`] if the text is not JSON.
    pub(crate) fn parse(text: &str) -> serde_json::Result<Self> {
        Ok(match text.trim_start().as_bytes().first() {
            Some(b'{') => {
                let members: IndexMap<String, &RawValue> = serde_json::from_str(text)?;
                let members = members.into_iter().map(|(k, v)| Ok((k, Self::parse(v.get())?)));
                Self::Object(members.collect::<serde_json::Result<_>>()?)
            }
            Some(b'[') => {
                let values: Vec<&RawValue> = serde_json::from_str(text)?;
                let values = values.into_iter().map(|value| Self::parse(value.get()));
                Self::List(values.collect::<serde_json::Result<_>>()?)
            }
            Some(b'"') => Self::Text(serde_json::from_str(text)?),
            Some(b'-' | b'0'..=b'9') => {
                serde_json::from_str::<f64>(text)?; // rejects invalid numbers, and 1e400
                Self::Number(text.trim().to_string())
            }
            Some(b't' | b'f') => Self::Bool(serde_json::from_str(text)?),
            _ => {
                serde_json::from_str::<()>(text)?;
                Self::Null
            }
        })
    }

    /// The JSON type, with its article.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// A description for error messages: the digits of a number, the type of other values.
    pub(crate) fn summary(&self) -> String {
        match self {
            Self::Number(digits) => digits.clone(),
            other => other.type_name().to_string(),
        }
    }
}

/// Whether a JSON number is written as an integer.
pub(crate) fn is_integer(digits: &str) -> bool {
    !digits.contains(['.', 'e', 'E'])
}

/// Whether `Float64` represents an integer exactly; false for all integers of 38 or more
/// characters.
pub(crate) fn float_is_exact(digits: &str) -> bool {
    let Ok(integer) = digits.parse::<i128>() else { return false };
    // The cast back to i128 saturates, so 2^127 - 1 (39 digits) would seem exact without the limit.
    digits.len() < 38 && (integer as f64) as i128 == integer
}

/// A value that does not fit into its column.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValueMismatch {
    /// The path of the field: `a.b` is the member `b` of the object `a`, `a.[]` an element of the
    /// list `a`.
    pub field: String,
    /// The values that the column accepts.
    pub expected: String,
    /// The type of the value, or the digits of a number.
    pub got: String,
}

impl fmt::Display for ValueMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "field {:?}: expected {}, got {}", self.field, self.expected, self.got)
    }
}

impl ValueMismatch {
    pub(crate) fn new(path: &[&str], expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { field: path.join("."), expected: expected.into(), got: got.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_integers_in_float64_are_detected_above_2_53() {
        assert!(float_is_exact("1152921504606846976") && !float_is_exact("1152921504606846977"));
        assert!(float_is_exact("9007199254740992") && !float_is_exact("9007199254740993"));
        assert!(!float_is_exact(&"9".repeat(60)));
    }

    #[test]
    fn numbers_keep_their_digits_and_invalid_ones_are_errors() {
        let digits = |text: &str| match Json::parse(text) {
            Ok(Json::Number(digits)) => Some(digits),
            _ => None,
        };
        assert_eq!(digits(" 1.50 ").as_deref(), Some("1.50"));
        assert_eq!(digits("18446744073709551616").as_deref(), Some("18446744073709551616"));
        for invalid in ["1e400", "01", "-", "NaN"] {
            assert!(Json::parse(invalid).is_err(), "{invalid}");
        }
    }
}
