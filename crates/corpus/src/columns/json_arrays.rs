//! Converts JSON objects to the columns of a table.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, NullArray, StringArray,
    StructArray, new_null_array,
};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Fields};

use crate::columns::json_value::{Json, ValueMismatch, float_is_exact, is_integer};

/// One array per field. A member that an object lacks is null.
///
/// # Errors
/// The index of the first object with a value that its column cannot hold, and the
/// [`ValueMismatch`].
pub(crate) fn arrays(
    objects: &[Json],
    fields: &Fields,
) -> Result<Vec<ArrayRef>, (usize, ValueMismatch)> {
    let data_type = DataType::Struct(fields.clone());
    for (i, object) in objects.iter().enumerate() {
        check(object, &data_type, &mut vec![]).map_err(|mismatch| (i, mismatch))?;
    }
    Ok(member_arrays(&objects.iter().map(Some).collect::<Vec<_>>(), fields))
}

/// Checks that a column of `data_type` can hold `json`: integers exactly, fractions rounded to f64.
///
/// # Errors
/// [`ValueMismatch`] if it cannot.
fn check<'a>(
    json: &'a Json,
    data_type: &'a DataType,
    path: &mut Vec<&'a str>,
) -> Result<(), ValueMismatch> {
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
            // Members are mostly in the order of the fields, so each search starts where the last
            // one ended.
            let mut next = 0;
            for (name, value) in members {
                path.push(name);
                let mut order = (next..fields.len()).chain(0..next);
                let Some(at) = order.find(|&i| fields[i].name() == name) else {
                    if let Json::Null = value {
                        path.pop();
                        continue;
                    }
                    return Err(ValueMismatch::new(
                        path,
                        "no value (the first records do not have this field)",
                        value.type_name(),
                    ));
                };
                check(value, fields[at].data_type(), path)?;
                next = at + 1;
                path.pop();
            }
            true
        }
        _ => false,
    };
    if fits { Ok(()) } else { Err(ValueMismatch::new(path, data_type.to_string(), json.summary())) }
}

/// The members of objects as one array per field. [`check`] must have accepted the objects.
fn member_arrays(objects: &[Option<&Json>], fields: &Fields) -> Vec<ArrayRef> {
    let member_array = |field: &Arc<Field>| {
        let values = objects.iter().map(|object| match object {
            Some(Json::Object(members)) => members.get(field.name()),
            _ => None,
        });
        array(&values.collect::<Vec<_>>(), field.data_type())
    };
    fields.iter().map(member_array).collect()
}

/// Values as an array of `data_type`. [`check`] must have accepted the values.
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
            let offsets = OffsetBuffer::from_lengths(lists.iter().map(|l| l.len()));
            let elements = array(&elements, element.data_type());
            Arc::new(ListArray::new(element.clone(), offsets, elements, Some(nulls())))
        }
        DataType::Struct(fields) => {
            let length = values.len();
            let members = member_arrays(values, fields);
            let objects =
                StructArray::try_new_with_length(fields.clone(), members, Some(nulls()), length);
            Arc::new(
                objects.expect("one array per field, with the field's type and the same length"),
            )
        }
        other => new_null_array(other, values.len()), // `check` accepts only null for other types
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{Array, cast::AsArray};

    use super::*;
    use crate::columns::json_schema::JsonSchema;

    fn fields(objects: &[&str]) -> Fields {
        let mut schema = JsonSchema::new();
        for object in objects {
            schema.add(&Json::parse(object).unwrap()).unwrap();
        }
        schema.fields()
    }

    /// The name, the type and the values as text of each column.
    fn table(objects: &[&str]) -> Vec<String> {
        let fields = fields(objects);
        let objects: Vec<Json> = objects.iter().map(|text| Json::parse(text).unwrap()).collect();
        let columns = arrays(&objects, &fields).unwrap();
        let table = fields.iter().zip(columns).map(|(field, column)| {
            let values: ArrayRef = arrow_cast::cast(&column, &DataType::Utf8).unwrap();
            let values: Vec<_> = values.as_string::<i32>().iter().collect();
            format!("{} {} {values:?}", field.name(), field.data_type())
        });
        table.collect()
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
        // Float64 represents 2^53 exactly, but not 2^53 + 1.
        assert_eq!(
            table(&[r#"{"n": 0.5}"#, r#"{"n": 9007199254740992}"#]),
            ["n Float64 [Some(\"0.5\"), Some(\"9007199254740992.0\")]"]
        );
        let objects = [r#"{"n": 0.5}"#, r#"{"n": 9007199254740993}"#];
        assert_eq!(table(&objects), ["n Utf8 [Some(\"0.5\"), Some(\"9007199254740993\")]"]);
    }

    #[test]
    fn scalars_of_several_types_become_text_as_written() {
        assert_eq!(
            table(&[r#"{"v": 1.50}"#, r#"{"v": true}"#, r#"{"v": "x"}"#, "{}"]),
            ["v Utf8 [Some(\"1.50\"), Some(\"true\"), Some(\"x\"), None]"]
        );
    }

    #[test]
    fn nested_lists_and_objects_are_kept() {
        let objects = [
            r#"{"a": [1, null], "b": {"c": "x"}, "n": null}"#,
            r#"{"a": null, "b": {"d": [[]]}}"#,
            r#"{"a": [], "b": null, "b": {"c": "y"}}"#,
        ];
        let parsed: Vec<Json> = objects.iter().map(|text| Json::parse(text).unwrap()).collect();
        let columns = arrays(&parsed, &fields(&objects)).unwrap();
        let lists = columns[0].as_list::<i32>();
        assert_eq!((lists.is_null(1), lists.value_length(0), lists.value_length(2)), (true, 2, 0));
        let c = columns[1].as_struct().column_by_name("c").unwrap().as_string::<i32>();
        assert_eq!(c.iter().collect::<Vec<_>>(), [Some("x"), None, Some("y")]);
        assert_eq!(columns[2].data_type(), &DataType::Null);
    }

    #[test]
    fn errors_name_the_field_whose_value_does_not_fit() {
        let fields = fields(&[r#"{"n": 1}"#]);
        let mismatch = |object: &str| arrays(&[Json::parse(object).unwrap()], &fields).unwrap_err();
        assert_eq!(mismatch(r#"{"n": 1.5}"#).1.to_string(), "field \"n\": expected Int64, got 1.5");
        assert_eq!(
            mismatch(r#"{"m": 1}"#).1.to_string(),
            "field \"m\": expected no value (the first records do not have this field), got a number"
        );
    }
}
