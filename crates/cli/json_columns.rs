//! JSON objects as the columns of a table: one schema for many objects, and their values as Arrow
//! arrays.
//!
//! Numbers keep the digits they are written with until the type of their column is known, so that no
//! integer is rounded: a column whose integers neither `Int64` nor `Float64` holds exactly becomes
//! text. `arrow-json` 60.1 is not used to parse: its decoder joins UTF-16 surrogates with `|` where
//! `+` is needed (`char_from_surrogate_pair`), which stores `"\ud842\udfb7"`, U+20BB7, as U+10BB7.

use std::{fmt, sync::Arc};

use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, NullArray, StringArray,
    StructArray, new_null_array,
};
use arrow_schema::{DataType, Field, Fields};
use indexmap::IndexMap;
use serde_json::value::RawValue;

/// Levels of lists and objects in a column. Arrow IPC verifies at most 64 nested tables when it
/// reads a schema, of which each level takes one.
const MAX_DEPTH: usize = 32;

/// A JSON value whose numbers are as they were written.
#[derive(Debug)]
pub enum Json {
    Null,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Json>),
    Object(IndexMap<String, Json>),
}

/// A value that does not fit its column.
#[derive(Debug, PartialEq, Eq)]
pub struct Misfit {
    /// `"a.b"`: the field, and the fields it is nested in.
    pub field: String,
    pub expected: String,
    pub got: String,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "field {:?}: expected {}, got {}", self.field, self.expected, self.got)
    }
}

impl Misfit {
    fn new(path: &[&str], expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { field: path.join("."), expected: expected.into(), got: got.into() }
    }
}

impl Json {
    /// Parses one JSON text. Of several members of one name the last counts.
    ///
    /// # Errors
    /// Text that is not JSON.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
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
                serde_json::from_str::<f64>(text)?; // refuses what is no number, and 1e400
                Self::Number(text.trim().to_string())
            }
            Some(b't' | b'f') => Self::Bool(serde_json::from_str(text)?),
            _ => {
                serde_json::from_str::<()>(text)?;
                Self::Null
            }
        })
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// The value in an error: its kind, and its digits if it is a number.
    fn shown(&self) -> String {
        match self {
            Self::Number(digits) => digits.clone(),
            other => other.kind().to_string(),
        }
    }
}

/// Whether a JSON number is written as an integer.
fn is_integer(digits: &str) -> bool {
    !digits.contains(['.', 'e', 'E'])
}

/// Whether `Float64` holds an integer without rounding it.
fn float_is_exact(digits: &str) -> bool {
    let Ok(integer) = digits.parse::<i128>() else { return false };
    // Beyond 2^127, `as` saturates; such integers have more than 38 digits.
    digits.len() < 38 && (integer as f64) as i128 == integer
}

/// The kinds of values that a column has to hold.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Null,
    Bool,
    Number(Numbers),
    Text,
    List(Box<Shape>),
    Object(IndexMap<String, Shape>),
}

/// The properties of a column's numbers that determine its type.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Numbers {
    /// At least one is no integer.
    fraction: bool,
    /// At least one integer is not a `Float64` exactly.
    beyond_float: bool,
    /// At least one integer is not an `Int64`.
    beyond_int: bool,
}

impl Numbers {
    fn of(digits: &str) -> Self {
        let integer = is_integer(digits);
        Self {
            fraction: !integer,
            beyond_float: integer && !float_is_exact(digits),
            beyond_int: integer && digits.parse::<i64>().is_err(),
        }
    }

    fn or(self, other: Self) -> Self {
        Self {
            fraction: self.fraction || other.fraction,
            beyond_float: self.beyond_float || other.beyond_float,
            beyond_int: self.beyond_int || other.beyond_int,
        }
    }

    fn data_type(self) -> DataType {
        match self {
            Self { fraction: false, beyond_int: false, .. } => DataType::Int64,
            Self { fraction: true, beyond_float: false, .. } => DataType::Float64,
            _ => DataType::Utf8,
        }
    }
}

impl Shape {
    fn of(json: &Json) -> Self {
        match json {
            Json::Null => Self::Null,
            Json::Bool(_) => Self::Bool,
            Json::Number(digits) => Self::Number(Numbers::of(digits)),
            Json::Text(_) => Self::Text,
            // Filled by `add`.
            Json::List(_) => Self::List(Box::new(Self::Null)),
            Json::Object(_) => Self::Object(IndexMap::new()),
        }
    }

    /// Widens this shape so that it holds `json` too. Booleans, numbers and strings in one column
    /// make it text.
    fn add<'a>(&mut self, json: &'a Json, path: &mut Vec<&'a str>) -> Result<(), Misfit> {
        if path.len() > MAX_DEPTH {
            let expected = format!("at most {MAX_DEPTH} levels of lists and objects in a table");
            return Err(Misfit::new(&path[..1], expected, "more"));
        }
        if let Self::Null = self {
            *self = Self::of(json);
        }
        match (&mut *self, json) {
            (_, Json::Null) | (Self::Bool, Json::Bool(_)) | (Self::Text, Json::Text(_)) => {}
            (Self::Number(numbers), Json::Number(digits)) => {
                *numbers = numbers.or(Numbers::of(digits));
            }
            (
                Self::Bool | Self::Number(_) | Self::Text,
                Json::Bool(_) | Json::Number(_) | Json::Text(_),
            ) => *self = Self::Text,
            (Self::List(element), Json::List(values)) => {
                path.push("[]");
                for value in values {
                    element.add(value, path)?;
                }
                path.pop();
            }
            (Self::Object(fields), Json::Object(members)) => {
                for (name, value) in members {
                    path.push(name);
                    fields.entry(name.clone()).or_insert(Self::Null).add(value, path)?;
                    path.pop();
                }
            }
            (shape, json) => {
                let expected = format!("{}, as in an earlier record", shape.kind());
                return Err(Misfit::new(path, expected, json.kind()));
            }
        }
        Ok(())
    }

    fn kind(&self) -> &'static str {
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
            Self::Number(numbers) => numbers.data_type(),
            Self::Text => DataType::Utf8,
            Self::List(element) => {
                DataType::List(Arc::new(Field::new_list_field(element.data_type(), true)))
            }
            Self::Object(fields) => DataType::Struct(fields_of(fields)),
        }
    }

    /// Adds the paths of the columns whose numbers become text.
    fn numbers_as_text<'a>(&'a self, path: &mut Vec<&'a str>, found: &mut Vec<String>) {
        match self {
            Self::Number(numbers) if numbers.data_type() == DataType::Utf8 => {
                found.push(path.join("."));
            }
            Self::List(element) => {
                path.push("[]");
                element.numbers_as_text(path, found);
                path.pop();
            }
            Self::Object(fields) => {
                for (name, shape) in fields {
                    path.push(name);
                    shape.numbers_as_text(path, found);
                    path.pop();
                }
            }
            _ => {}
        }
    }
}

fn fields_of(fields: &IndexMap<String, Shape>) -> Fields {
    fields.iter().map(|(name, shape)| Field::new(name, shape.data_type(), true)).collect()
}

/// The schema of a table of JSON objects, which grows with each object.
#[derive(Debug)]
pub struct ObjectSchema(Shape);

impl ObjectSchema {
    pub fn new() -> Self {
        Self(Shape::Object(IndexMap::new()))
    }

    /// Widens the schema so that it holds `object` too.
    ///
    /// # Errors
    /// [`Misfit`] for a value that cannot share a column with those before.
    pub fn add(&mut self, object: &Json) -> Result<(), Misfit> {
        self.0.add(object, &mut vec![])
    }

    /// The columns, in the order in which the objects first have them.
    pub fn fields(&self) -> Fields {
        match &self.0 {
            Shape::Object(fields) => fields_of(fields),
            _ => Fields::empty(),
        }
    }

    /// The fields whose numbers are written as text, since no numeric type holds them exactly.
    pub fn numbers_as_text(&self) -> Vec<String> {
        let mut found = vec![];
        self.0.numbers_as_text(&mut vec![], &mut found);
        found
    }
}

/// Checks that a column of `data_type` holds `json` exactly.
///
/// # Errors
/// [`Misfit`] if it does not.
fn check<'a>(
    json: &'a Json,
    data_type: &'a DataType,
    path: &mut Vec<&'a str>,
) -> Result<(), Misfit> {
    let fits = match (json, data_type) {
        (Json::Null, _) | (Json::Bool(_), DataType::Boolean) => true,
        (Json::Bool(_) | Json::Number(_) | Json::Text(_), DataType::Utf8) => true,
        (Json::Number(digits), DataType::Int64) => digits.parse::<i64>().is_ok(),
        (Json::Number(digits), DataType::Float64) => !is_integer(digits) || float_is_exact(digits),
        (Json::List(values), DataType::List(element)) => {
            path.push("[]");
            for value in values {
                check(value, element.data_type(), path)?;
            }
            path.pop();
            true
        }
        (Json::Object(members), DataType::Struct(fields)) => {
            for (name, value) in members {
                path.push(name);
                let Some((_, field)) = fields.find(name) else {
                    return Err(Misfit::new(
                        path,
                        "only fields of the records before",
                        value.kind(),
                    ));
                };
                check(value, field.data_type(), path)?;
                path.pop();
            }
            true
        }
        _ => false,
    };
    match fits {
        true => Ok(()),
        false => Err(Misfit::new(path, data_type.to_string(), json.shown())),
    }
}

/// The columns of `objects` in the types of `fields`; a field that an object lacks is null.
///
/// # Errors
/// [`Misfit`] with the index of the first object that has a value its column cannot hold.
pub fn columns(objects: &[Json], fields: &Fields) -> Result<Vec<ArrayRef>, (usize, Misfit)> {
    let data_type = DataType::Struct(fields.clone());
    for (i, object) in objects.iter().enumerate() {
        check(object, &data_type, &mut vec![]).map_err(|misfit| (i, misfit))?;
    }
    Ok(children(&objects.iter().map(Some).collect::<Vec<_>>(), fields))
}

/// One array a field, of values that were checked.
fn children(objects: &[Option<&Json>], fields: &Fields) -> Vec<ArrayRef> {
    let child = |field: &Arc<Field>| {
        let values = objects.iter().map(|object| match object {
            Some(Json::Object(members)) => members.get(field.name()),
            _ => None,
        });
        array(&values.collect::<Vec<_>>(), field.data_type())
    };
    fields.iter().map(child).collect()
}

fn array(values: &[Option<&Json>], data_type: &DataType) -> ArrayRef {
    let present = |value: &Option<&Json>| !matches!(value, None | Some(Json::Null));
    let nulls = || values.iter().map(present).collect::<Vec<_>>().into();
    let digits = |value: &Option<&Json>| match value {
        Some(Json::Number(digits)) => Some(digits.clone()),
        _ => None,
    };
    match data_type {
        DataType::Null => Arc::new(NullArray::new(values.len())),
        DataType::Boolean => {
            let values = values.iter().map(|value| match value {
                Some(Json::Bool(value)) => Some(*value),
                _ => None,
            });
            Arc::new(values.collect::<BooleanArray>())
        }
        DataType::Int64 => {
            let values = values.iter().map(|value| digits(value)?.parse::<i64>().ok());
            Arc::new(values.collect::<Int64Array>())
        }
        DataType::Float64 => {
            let values = values.iter().map(|value| digits(value)?.parse::<f64>().ok());
            Arc::new(values.collect::<Float64Array>())
        }
        DataType::Utf8 => {
            let values = values.iter().map(|value| match value {
                Some(Json::Text(text)) => Some(text.clone()),
                Some(Json::Bool(value)) => Some(value.to_string()),
                value => digits(value),
            });
            Arc::new(values.collect::<StringArray>())
        }
        DataType::List(element) => {
            let lists = values.iter().map(|value| match value {
                Some(Json::List(values)) => &values[..],
                _ => &[],
            });
            let lists: Vec<&[Json]> = lists.collect();
            let elements: Vec<Option<&Json>> = lists.iter().copied().flatten().map(Some).collect();
            let offsets = arrow_buffer::OffsetBuffer::from_lengths(lists.iter().map(|l| l.len()));
            let elements = array(&elements, element.data_type());
            Arc::new(ListArray::new(element.clone(), offsets, elements, Some(nulls())))
        }
        DataType::Struct(fields) => {
            let length = values.len();
            let children = children(values, fields);
            let objects =
                StructArray::try_new_with_length(fields.clone(), children, Some(nulls()), length);
            Arc::new(objects.expect("one child a field, of its type and length"))
        }
        other => new_null_array(other, values.len()), // `check` lets nulls through, and no others
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{Array, cast::AsArray};

    use super::*;

    fn schema(objects: &[&str]) -> Result<ObjectSchema, Misfit> {
        let mut schema = ObjectSchema::new();
        for object in objects {
            schema.add(&Json::parse(object).unwrap())?;
        }
        Ok(schema)
    }

    /// The schema of the objects, and each column as text.
    fn table(objects: &[&str]) -> Vec<String> {
        let fields = schema(objects).unwrap().fields();
        let objects: Vec<Json> = objects.iter().map(|text| Json::parse(text).unwrap()).collect();
        let columns = columns(&objects, &fields).unwrap();
        let shown = fields.iter().zip(columns).map(|(field, column)| {
            let values: ArrayRef = arrow_cast::cast(&column, &DataType::Utf8).unwrap();
            let values: Vec<_> = values.as_string::<i32>().iter().collect();
            format!("{} {} {values:?}", field.name(), field.data_type())
        });
        shown.collect()
    }

    #[test]
    fn surrogate_pairs_of_every_plane_are_decoded() {
        for plane in 1..=16u32 {
            let c = char::from_u32(plane << 16 | 0x0bb7).unwrap();
            let mut units = [0; 2];
            let [high, low] = c.encode_utf16(&mut units) else { panic!("two units") };
            let json = format!("{{\"text\": \"\\u{high:04x}\\u{low:04x}\"}}");
            assert_eq!(table(&[&json]), [format!("text Utf8 [Some({:?})]", c.to_string())]);
        }
    }

    #[test]
    fn integers_keep_every_digit() {
        assert_eq!(
            table(&[r#"{"n": 9223372036854775807}"#]),
            ["n Int64 [Some(\"9223372036854775807\")]"]
        );
        let big = r#"{"n": 18446744073709551616}"#;
        assert_eq!(
            table(&[r#"{"n": 7}"#, big]),
            ["n Utf8 [Some(\"7\"), Some(\"18446744073709551616\")]"]
        );
        // 2^53 is a Float64 exactly, 2^53 + 1 is not.
        assert_eq!(
            table(&[r#"{"n": 0.5}"#, r#"{"n": 9007199254740992}"#]),
            ["n Float64 [Some(\"0.5\"), Some(\"9007199254740992.0\")]"]
        );
        let objects = [r#"{"n": 0.5}"#, r#"{"n": 9007199254740993}"#];
        assert_eq!(table(&objects), ["n Utf8 [Some(\"0.5\"), Some(\"9007199254740993\")]"]);
        assert_eq!(schema(&objects).unwrap().numbers_as_text(), ["n"]);
        let nested = [r#"{"a": [{"b": 1.5}, {"b": 9007199254740993}]}"#];
        assert_eq!(schema(&nested).unwrap().numbers_as_text(), ["a.[].b"]);
        assert!(float_is_exact("1152921504606846976") && !float_is_exact("1152921504606846977"));
        assert!(!float_is_exact(&"9".repeat(60)));
    }

    #[test]
    fn scalars_of_several_types_become_text_as_written() {
        assert_eq!(
            table(&[r#"{"v": 1.50}"#, r#"{"v": true}"#, r#"{"v": "x"}"#, "{}"]),
            ["v Utf8 [Some(\"1.50\"), Some(\"true\"), Some(\"x\"), None]"]
        );
    }

    #[test]
    fn lists_and_objects_nest() {
        let objects = [
            r#"{"a": [1, null], "b": {"c": "x"}, "n": null}"#,
            r#"{"a": null, "b": {"d": [[]]}}"#,
            r#"{"a": [], "b": null, "b": {"c": "y"}}"#,
        ];
        let parsed: Vec<Json> = objects.iter().map(|text| Json::parse(text).unwrap()).collect();
        let fields = schema(&objects).unwrap().fields();
        let columns = columns(&parsed, &fields).unwrap();
        let lists = columns[0].as_list::<i32>();
        assert_eq!((lists.is_null(1), lists.value_length(0), lists.value_length(2)), (true, 2, 0));
        let c = columns[1].as_struct().column_by_name("c").unwrap().as_string::<i32>();
        assert_eq!(c.iter().collect::<Vec<_>>(), [Some("x"), None, Some("y")]);
        assert_eq!(columns[2].data_type(), &DataType::Null);
    }

    #[test]
    fn values_that_cannot_share_a_column_are_named() {
        let error = |objects: &[&str]| schema(objects).unwrap_err().to_string();
        assert_eq!(
            error(&[r#"{"a": {"b": [1]}}"#, r#"{"a": {"b": {"c": 1}}}"#]),
            "field \"a.b\": expected a list, as in an earlier record, got an object"
        );
        assert_eq!(
            error(&[r#"{"a": 1}"#, r#"{"a": [1]}"#]),
            "field \"a\": expected a string, a number or a boolean, as in an earlier record, got a list"
        );
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(
            error(&[&deep]),
            "field \"a\": expected at most 32 levels of lists and objects in a table, got more"
        );
        let fields = schema(&[r#"{"n": 1}"#]).unwrap().fields();
        let misfit = |object: &str| columns(&[Json::parse(object).unwrap()], &fields).unwrap_err();
        assert_eq!(misfit(r#"{"n": 1.5}"#).1.to_string(), "field \"n\": expected Int64, got 1.5");
        assert_eq!(
            misfit(r#"{"m": 1}"#).1.to_string(),
            "field \"m\": expected only fields of the records before, got a number"
        );
    }
}
