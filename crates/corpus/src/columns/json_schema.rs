//! The columns of a table of JSON objects, inferred from the objects.
//!
//! A column of integers becomes `Int64`. A column in which a number has a fraction or an exponent
//! becomes `Float64`. If the type of a column does not represent all its integers exactly, the
//! numbers of the column become text.

use std::sync::Arc;

use arrow_schema::{DataType, Field, Fields};
use indexmap::IndexMap;

use crate::columns::json_value::{Json, ValueMismatch, float_is_exact, is_integer};

/// The maximum depth of lists and objects in a column. A reader of Arrow IPC accepts schemas of at
/// most 64 nested FlatBuffers tables. Each level of lists and objects adds one table, and a few
/// tables enclose the columns, so 32 levels are well below the limit.
const MAX_DEPTH: usize = 32;

/// The schema of a table of JSON objects, which is widened with each object.
#[derive(Debug)]
pub(crate) struct JsonSchema(ColumnType);

/// The type of a column, inferred from the values added so far.
#[derive(Clone, Debug, PartialEq)]
enum ColumnType {
    Null,
    Bool,
    Number(NumberKind),
    /// Strings, or values of several types.
    Text {
        is_mixed: bool,
    },
    List(Box<ColumnType>),
    Object(IndexMap<String, ColumnType>),
}

/// The reason why values other than strings are written as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsText {
    /// The type of a column of numbers does not represent all integers of the field exactly.
    InexactIntegers,
    /// The field has values of several of the types string, number and boolean.
    SeveralTypes,
}

/// The properties of a column's numbers that determine its type.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct NumberKind {
    /// At least one number is written with a fraction or an exponent.
    has_fraction: bool,
    /// At least one integer is not exact in `Float64`.
    exceeds_float: bool,
    /// At least one integer is out of the range of `Int64`.
    exceeds_int: bool,
}

impl JsonSchema {
    pub(crate) fn new() -> Self {
        Self(ColumnType::Object(IndexMap::new()))
    }

    /// Widens the schema so that it fits `object` too.
    ///
    /// # Errors
    /// [`ValueMismatch`] for a value that cannot be in the same column as an earlier value.
    pub(crate) fn add(&mut self, object: &Json) -> Result<(), ValueMismatch> {
        self.0.add(object, &mut vec![])
    }

    /// The columns, in the order in which they first appear in the objects.
    pub(crate) fn fields(&self) -> Fields {
        match &self.0 {
            ColumnType::Object(members) => fields_of(members),
            _ => Fields::empty(),
        }
    }

    /// The fields with values that are written as text although they are not strings.
    pub(crate) fn written_as_text(&self) -> Vec<(String, AsText)> {
        let mut found = vec![];
        self.0.written_as_text(&mut vec![], &mut found);
        found
    }
}

impl ColumnType {
    fn of(json: &Json) -> Self {
        match json {
            Json::Null => Self::Null,
            Json::Bool(_) => Self::Bool,
            Json::Number(digits) => Self::Number(NumberKind::of(digits)),
            Json::Text(_) => Self::Text { is_mixed: false },
            // `add` then widens the type by the elements or the members.
            Json::List(_) => Self::List(Box::new(Self::Null)),
            Json::Object(_) => Self::Object(IndexMap::new()),
        }
    }

    /// Widens the type so that it fits `json` too. A column that mixes booleans, numbers and
    /// strings becomes text.
    fn add<'a>(&mut self, json: &'a Json, path: &mut Vec<&'a str>) -> Result<(), ValueMismatch> {
        if path.len() > MAX_DEPTH && matches!(json, Json::List(_) | Json::Object(_)) {
            let expected = format!("at most {MAX_DEPTH} levels of lists and objects in a table");
            return Err(ValueMismatch::new(&path[..1], expected, "more"));
        }
        if let Self::Null = self {
            *self = Self::of(json);
        }
        match (&mut *self, json) {
            (_, Json::Null) | (Self::Bool, Json::Bool(_)) | (Self::Text { .. }, Json::Text(_)) => {}
            (Self::Number(kind), Json::Number(digits)) => {
                *kind = kind.or(NumberKind::of(digits));
            }
            (
                Self::Bool | Self::Number(_) | Self::Text { .. },
                Json::Bool(_) | Json::Number(_) | Json::Text(_),
            ) => *self = Self::Text { is_mixed: true },
            (Self::List(element), Json::List(values)) => {
                path.push("[]");
                for value in values {
                    element.add(value, path)?;
                }
                path.pop();
            }
            (Self::Object(columns), Json::Object(members)) => {
                for (name, value) in members {
                    path.push(name);
                    columns.entry(name.clone()).or_insert(Self::Null).add(value, path)?;
                    path.pop();
                }
            }
            (column, json) => {
                let expected =
                    format!("{}, as in an earlier value of this field", column.type_name());
                return Err(ValueMismatch::new(path, expected, json.type_name()));
            }
        }
        Ok(())
    }

    /// The JSON types that fit into the column.
    fn type_name(&self) -> &'static str {
        match self {
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
            _ => "a string, a number or a boolean",
        }
    }

    fn data_type(&self) -> DataType {
        match self {
            Self::Null => DataType::Null,
            Self::Bool => DataType::Boolean,
            Self::Number(kind) => kind.data_type(),
            Self::Text { .. } => DataType::Utf8,
            Self::List(element) => {
                DataType::List(Arc::new(Field::new_list_field(element.data_type(), true)))
            }
            Self::Object(members) => DataType::Struct(fields_of(members)),
        }
    }

    /// Appends the paths of the columns whose numbers or booleans become text.
    fn written_as_text<'a>(&'a self, path: &mut Vec<&'a str>, found: &mut Vec<(String, AsText)>) {
        match self {
            Self::Number(kind) if kind.data_type() == DataType::Utf8 => {
                found.push((path.join("."), AsText::InexactIntegers));
            }
            Self::Text { is_mixed: true } => found.push((path.join("."), AsText::SeveralTypes)),
            Self::List(element) => {
                path.push("[]");
                element.written_as_text(path, found);
                path.pop();
            }
            Self::Object(members) => {
                for (name, column) in members {
                    path.push(name);
                    column.written_as_text(path, found);
                    path.pop();
                }
            }
            _ => {}
        }
    }
}

impl NumberKind {
    fn of(digits: &str) -> Self {
        let integer = is_integer(digits);
        Self {
            has_fraction: !integer,
            exceeds_float: integer && !float_is_exact(digits),
            exceeds_int: integer && digits.parse::<i64>().is_err(),
        }
    }

    fn or(self, other: Self) -> Self {
        Self {
            has_fraction: self.has_fraction || other.has_fraction,
            exceeds_float: self.exceeds_float || other.exceeds_float,
            exceeds_int: self.exceeds_int || other.exceeds_int,
        }
    }

    fn data_type(self) -> DataType {
        match self {
            Self { has_fraction: false, exceeds_int: false, .. } => DataType::Int64,
            Self { has_fraction: true, exceeds_float: false, .. } => DataType::Float64,
            _ => DataType::Utf8,
        }
    }
}

fn fields_of(members: &IndexMap<String, ColumnType>) -> Fields {
    members.iter().map(|(name, column)| Field::new(name, column.data_type(), true)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(objects: &[&str]) -> Result<JsonSchema, ValueMismatch> {
        let mut schema = JsonSchema::new();
        for object in objects {
            schema.add(&Json::parse(object).unwrap())?;
        }
        Ok(schema)
    }

    #[test]
    fn fields_whose_values_become_text_are_listed() {
        let as_text = |objects: &[&str]| schema(objects).unwrap().written_as_text();
        let of = |field: &str, reason| vec![(field.to_string(), reason)];
        let objects = [r#"{"n": 0.5}"#, r#"{"n": 9007199254740993}"#];
        assert_eq!(as_text(&objects), of("n", AsText::InexactIntegers));
        let nested = [r#"{"a": [{"b": 1.5}, {"b": 9007199254740993}]}"#];
        assert_eq!(as_text(&nested), of("a.[].b", AsText::InexactIntegers));
        let number = r#"{"n": 2, "s": "a"}"#;
        for other in [r#"{"n": true}"#, r#"{"n": "1"}"#] {
            assert_eq!(as_text(&[number, other]), of("n", AsText::SeveralTypes));
        }
        assert_eq!(as_text(&[number, r#"{"n": 1, "s": "b"}"#]), []);
    }

    #[test]
    fn errors_name_the_field_whose_values_cannot_share_a_column() {
        let error = |objects: &[&str]| schema(objects).unwrap_err().to_string();
        assert_eq!(
            error(&[r#"{"a": {"b": [1]}}"#, r#"{"a": {"b": {"c": 1}}}"#]),
            "field \"a.b\": expected a list, as in an earlier value of this field, got an object"
        );
        assert_eq!(
            error(&[r#"{"a": 1}"#, r#"{"a": [1]}"#]),
            "field \"a\": expected a string, a number or a boolean, as in an earlier value of this \
             field, got a list"
        );
        let nested = |n: usize| format!("{{\"a\": {}1{}}}", "[".repeat(n), "]".repeat(n));
        assert!(schema(&[&nested(32)]).is_ok());
        assert_eq!(
            error(&[&nested(33)]),
            "field \"a\": expected at most 32 levels of lists and objects in a table, got more"
        );
    }
}
