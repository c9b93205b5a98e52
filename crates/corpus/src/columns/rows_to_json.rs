//! Converts rows of a table to JSON objects.

use std::{collections::BTreeMap, sync::Arc};

use arrow_array::{
    Array, BooleanArray, RecordBatch, UInt64Array,
    cast::AsArray,
    timezone::Tz,
    types::{Float64Type, Int64Type},
};
use arrow_cast::{
    CastOptions, cast, cast_with_options,
    display::{ArrayFormatter, FormatOptions, array_value_to_string},
    parse::string_to_datetime,
};
use arrow_json::{
    Encoder, EncoderFactory, EncoderOptions, WriterBuilder,
    writer::{LineDelimited, NullableEncoder},
};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema, TimeUnit};
use arrow_select::{filter::filter, take::take};

use crate::columns::nested::{map_children, without_views};

/// The number of NaN and infinite values per column that were written as null, because JSON cannot
/// represent them.
pub type NonFinite = BTreeMap<String, u64>;

/// One JSON object per row. Adds the number of NaN and infinite values per column to `non_finite`.
///
/// # Errors
/// [`ArrowError`] for a date, time or duration that cannot be formatted, such as a date after the
/// year 262142, and for a map whose keys cannot be converted to strings.
pub(crate) fn rows_to_json(
    rows: &RecordBatch,
    non_finite: &mut NonFinite,
) -> Result<Vec<String>, ArrowError> {
    let rows = prepare(rows)?;
    let builder = WriterBuilder::new().with_explicit_nulls(true);
    let builder = builder.with_encoder_factory(Arc::new(ExactTimes));
    let mut writer = builder.build::<_, LineDelimited>(vec![]);
    writer.write(&rows)?;
    writer.finish()?;
    let json = String::from_utf8(writer.into_inner());
    let json = json.map_err(|error| ArrowError::ExternalError(Box::new(error)))?;
    for (column, field) in rows.columns().iter().zip(rows.schema().fields()) {
        let count = count_non_finite(column)?;
        if count > 0 {
            *non_finite.entry(field.name().clone()).or_default() += count;
        }
    }
    Ok(json.lines().map(String::from).collect())
}

/// A copy of the rows in which lists and maps contain only the elements of these rows, and the keys
/// of maps are strings. A slice of an array of lists keeps the elements of the whole array,
/// and the encoders of `arrow-json` would convert all of them. The encoders refuse keys of maps
/// that are not strings.
fn prepare(rows: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    if !rows.columns().iter().any(|column| column.data_type().is_nested()) {
        return Ok(rows.clone());
    }
    let schema = rows.schema();
    let fields = schema.fields().iter().map(|field| with_text_keys(&without_views(field)));
    let fields: Vec<FieldRef> = fields.collect();
    let all = UInt64Array::from_iter_values(0..rows.num_rows() as u64);
    let options = CastOptions { safe: false, ..Default::default() };
    let columns = rows.columns().iter().zip(&fields).map(|(column, field)| {
        let column = cast_with_options(column, field.data_type(), &options);
        let column = column.and_then(|column| take(&column, &all, None));
        column.map_err(|error| in_field(field, &error))
    });
    let columns = columns.collect::<Result<_, _>>()?;
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
}

/// The field with the keys of all maps converted to strings.
fn with_text_keys(field: &Field) -> FieldRef {
    let data_type = match field.data_type() {
        DataType::Map(entries, sorted) => {
            let entry = map_children(entries.data_type(), |i, child| match child.data_type() {
                DataType::Utf8 | DataType::LargeUtf8 if i == 0 => child.clone(),
                _ if i == 0 => Arc::new(child.as_ref().clone().with_data_type(DataType::Utf8)),
                _ => with_text_keys(child),
            });
            DataType::Map(Arc::new(entries.as_ref().clone().with_data_type(entry)), *sorted)
        }
        other => map_children(other, |_, child| with_text_keys(child)),
    };
    Arc::new(field.clone().with_data_type(data_type))
}

/// An error that names the column, or the member of a struct, in which `error` occurred.
fn in_field(field: &Field, error: &ArrowError) -> ArrowError {
    ArrowError::JsonError(format!("field {:?}: {error}", field.name()))
}

/// The number of NaN and infinite values of a column, those in lists, maps and structs included.
fn count_non_finite(array: &dyn Array) -> Result<u64, ArrowError> {
    use DataType as T;

    let list = match array.data_type() {
        T::Float16 | T::Float32 | T::Float64 => {
            let values = cast(array, &T::Float64)?;
            let values = values.as_primitive::<Float64Type>().iter().flatten();
            return Ok(values.filter(|value| !value.is_finite()).count() as u64);
        }
        // A null row of these types still has child values, which are not counted.
        T::Struct(_) | T::FixedSizeList(..) if array.null_count() > 0 => {
            let is_valid = (0..array.len()).map(|row| Some(array.is_valid(row)));
            return count_non_finite(&filter(array, &BooleanArray::from_iter(is_valid))?);
        }
        T::Struct(_) => {
            return array.as_struct().columns().iter().map(|c| count_non_finite(c)).sum();
        }
        T::Dictionary(_, value) => return count_non_finite(&cast(array, value)?),
        T::RunEndEncoded(_, value) => return count_non_finite(&cast(array, value.data_type())?),
        T::List(_) => array.as_list::<i32>().values(),
        T::LargeList(_) => array.as_list::<i64>().values(),
        T::FixedSizeList(..) => array.as_fixed_size_list().values(),
        T::Map(..) => return count_non_finite(array.as_map().entries()),
        _ => return Ok(0),
    };
    count_non_finite(list)
}

/// Encodes times exactly. The encoders of `arrow-json` 60.1 write an error message in place of a
/// time that they cannot format, and drop the seconds of an offset from UTC.
#[derive(Debug)]
struct ExactTimes;

impl EncoderFactory for ExactTimes {
    fn make_default_encoder<'a>(
        &self,
        field: &'a FieldRef,
        array: &'a dyn Array,
        _options: &'a EncoderOptions,
    ) -> Result<Option<NullableEncoder<'a>>, ArrowError> {
        use DataType as T;

        match array.data_type() {
            T::Date32
            | T::Date64
            | T::Time32(_)
            | T::Time64(_)
            | T::Timestamp(..)
            | T::Duration(_)
            | T::Interval(_) => {
                let texts = format_times(array).map_err(|error| in_field(field, &error))?;
                Ok(Some(NullableEncoder::new(Box::new(Texts(texts)), array.nulls().cloned())))
            }
            _ => Ok(None),
        }
    }
}

/// The text of each date, time or duration; empty for null.
fn format_times(array: &dyn Array) -> Result<Vec<String>, ArrowError> {
    let formatter = ArrayFormatter::try_new(array, &FormatOptions::new())?;
    let text = |row: usize| match array.is_null(row) {
        true => Ok(String::new()),
        false => formatter.value(row).try_to_string(),
    };
    let mut texts = (0..array.len()).map(text).collect::<Result<Vec<_>, _>>()?;
    if let DataType::Timestamp(unit, Some(_)) = array.data_type() {
        replace_inexact_offsets(array, *unit, &mut texts)?;
    }
    Ok(texts)
}

/// Replaces the text of a timestamp by its text in UTC if the text denotes another instant, or if
/// its year does not have four digits. RFC 3339 has offsets in minutes, but before 1972 some time
/// zones had offsets with seconds, such as Paris with +00:09:21.
fn replace_inexact_offsets(
    array: &dyn Array,
    unit: TimeUnit,
    texts: &mut [String],
) -> Result<(), ArrowError> {
    let per_second = match unit {
        TimeUnit::Second => 1,
        TimeUnit::Millisecond => 1_000,
        TimeUnit::Microsecond => 1_000_000,
        TimeUnit::Nanosecond => 1_000_000_000,
    };
    let zone: Tz = "UTC".parse()?;
    let utc = DataType::Timestamp(unit, Some("UTC".into()));
    let ticks = cast(array, &DataType::Int64)?;
    let ticks = ticks.as_primitive::<Int64Type>();
    for (row, text) in texts.iter_mut().enumerate().filter(|(row, _)| array.is_valid(*row)) {
        let parsed = string_to_datetime(&zone, text).map(|time| time.timestamp());
        if !parsed.is_ok_and(|seconds| seconds == ticks.value(row).div_euclid(per_second)) {
            *text = array_value_to_string(&cast(&array.slice(row, 1), &utc)?, 0)?;
        }
    }
    Ok(())
}

/// Encodes texts as JSON strings.
struct Texts(Vec<String>);

impl Encoder for Texts {
    fn encode(&mut self, row: usize, out: &mut Vec<u8>) {
        out.extend(serde_json::Value::from(self.0[row].as_str()).to_string().bytes());
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{
        ArrayRef, Date32Array, FixedSizeListArray, Float32Array, ListArray, StructArray,
        TimestampMillisecondArray,
        builder::{Float32Builder, Int32Builder, MapBuilder},
        types::{Date32Type, Float32Type},
    };
    use arrow_buffer::NullBuffer;

    use super::*;

    fn to_json(name: &str, column: impl Array + 'static) -> Result<Vec<String>, ArrowError> {
        let rows = RecordBatch::try_from_iter([(name, Arc::new(column) as ArrayRef)])?;
        rows_to_json(&rows, &mut NonFinite::new())
    }

    #[test]
    fn times_with_a_zone_keep_their_instants() -> Result<(), ArrowError> {
        // 1900-01-01T00:00:00Z, when Paris was 9 minutes and 21 seconds ahead, and 2026.
        let times = [Some(-2_208_988_800_000), None, Some(1_767_225_600_000)];
        let times = TimestampMillisecondArray::from(times.to_vec()).with_timezone("Europe/Paris");
        assert_eq!(
            to_json("at", times)?,
            [
                r#"{"at":"1900-01-01T00:00:00Z"}"#,
                r#"{"at":null}"#,
                r#"{"at":"2026-01-01T01:00:00+01:00"}"#
            ]
        );
        // In Paris, this instant is in the year 10000.
        let end = TimestampMillisecondArray::from(vec![253_402_300_799_000]);
        assert_eq!(
            to_json("at", end.with_timezone("Europe/Paris"))?,
            [r#"{"at":"9999-12-31T23:59:59Z"}"#]
        );
        Ok(())
    }

    #[test]
    fn a_date_that_cannot_be_formatted_is_an_error() {
        let error = to_json("at", Date32Array::from(vec![0, i32::MAX])).unwrap_err().to_string();
        assert!(error.contains("field \"at\": "), "{error}");
    }

    #[test]
    fn keys_of_maps_are_written_as_strings() -> Result<(), ArrowError> {
        let mut map = MapBuilder::new(None, Int32Builder::new(), Float32Builder::new());
        map.keys().append_slice(&[7, -1]);
        map.values().append_slice(&[0.5, 1.5]);
        map.append(true)?;
        map.append(false)?;
        assert_eq!(to_json("m", map.finish())?, [r#"{"m":{"7":0.5,"-1":1.5}}"#, r#"{"m":null}"#]);
        Ok(())
    }

    #[test]
    fn nan_and_infinity_become_null_and_are_counted() -> Result<(), ArrowError> {
        let column = Float32Array::from(vec![Some(1.5), Some(f32::NAN), None, Some(f32::INFINITY)]);
        let rows = RecordBatch::try_from_iter([("numbers", Arc::new(column) as ArrayRef)])?;
        let mut non_finite = NonFinite::from([("numbers".to_string(), 5)]);
        let lines = rows_to_json(&rows, &mut non_finite)?;
        assert_eq!(lines[..2], [r#"{"numbers":1.5}"#, r#"{"numbers":null}"#]);
        assert_eq!(non_finite["numbers"], 5 + 2);
        Ok(())
    }

    #[test]
    fn elements_of_lists_outside_the_rows_are_neither_converted_nor_counted()
    -> Result<(), ArrowError> {
        let floats = [Some(vec![Some(f32::NAN)]), None, Some(vec![Some(1.0), Some(f32::NAN)])];
        let floats = ListArray::from_iter_primitive::<Float32Type, _, _>(floats);
        let views = DataType::ListView(Arc::new(Field::new_list_field(DataType::Float32, true)));
        let dates = [Some(vec![Some(i32::MAX)]), Some(vec![Some(0)]), None];
        let dates = ListArray::from_iter_primitive::<Date32Type, _, _>(dates);
        let rows = RecordBatch::try_from_iter([
            ("views", cast(&floats, &views)?),
            ("floats", Arc::new(floats) as ArrayRef),
            ("dates", Arc::new(dates) as ArrayRef),
        ])?;
        let mut non_finite = NonFinite::new();
        let lines = rows_to_json(&rows.slice(1, 2), &mut non_finite)?;
        assert_eq!(
            lines,
            [
                r#"{"views":null,"floats":null,"dates":["1970-01-01"]}"#,
                r#"{"views":[1.0,null],"floats":[1.0,null],"dates":null}"#
            ]
        );
        let counts = [("floats".to_string(), 1), ("views".to_string(), 1)];
        assert_eq!(non_finite, NonFinite::from(counts));
        Ok(())
    }

    #[test]
    fn values_in_structs_and_fixed_size_lists_are_counted_except_those_of_null_rows()
    -> Result<(), ArrowError> {
        let x: ArrayRef = Arc::new(Float32Array::from(vec![f32::NAN, f32::NAN]));
        let fields = vec![Field::new("x", DataType::Float32, true)];
        let nulls = NullBuffer::from(vec![true, false]);
        let a = StructArray::new(fields.into(), vec![x.clone()], Some(nulls.clone()));
        let element = Arc::new(Field::new_list_field(DataType::Float32, true));
        let b = FixedSizeListArray::new(element, 1, x, Some(nulls));
        let rows = RecordBatch::try_from_iter([
            ("a", Arc::new(a) as ArrayRef),
            ("b", Arc::new(b) as ArrayRef),
        ])?;
        let mut non_finite = NonFinite::new();
        assert_eq!(
            rows_to_json(&rows, &mut non_finite)?,
            [r#"{"a":{"x":null},"b":[null]}"#, r#"{"a":null,"b":null}"#]
        );
        let counts = [("a".to_string(), 1), ("b".to_string(), 1)];
        assert_eq!(non_finite, NonFinite::from(counts));
        Ok(())
    }
}
