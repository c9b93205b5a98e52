//! Converts rows of a table to JSON objects.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType, BooleanArray, LargeStringArray, RecordBatch, StringArray,
    StructArray, UInt64Array,
    cast::AsArray,
    downcast_run_array, make_array,
    types::{Float16Type, Float32Type, Float64Type},
};
use arrow_buffer::ArrowNativeType;
use arrow_cast::display::{ArrayFormatter, FormatOptions};
use arrow_json::{
    Encoder, EncoderFactory, EncoderOptions, WriterBuilder,
    writer::{LineDelimited, NullableEncoder},
};
use arrow_schema::{ArrowError, DataType, Field, FieldRef, Schema};
use arrow_select::{filter::filter, take::take};
use half::f16;

use crate::columns::nested::{compact, map_child_arrays};

/// The number of NaN and infinite values per column that were written as null, because JSON cannot
/// represent them.
pub type NonFinite = BTreeMap<String, u64>;

/// One JSON object per row. Adds the number of NaN and infinite values per column to `non_finite`.
///
/// # Errors
/// [`ArrowError`] for a date, time or duration that cannot be formatted, such as a date after the
/// year 262142, for a map whose keys cannot be converted to strings, and for a struct or a map with
/// two equal keys.
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

/// A copy of the rows without dictionaries, in which lists and maps contain only the elements of
/// these rows, and the keys of maps are strings. A slice of an array of lists keeps the elements of
/// the whole array, and the encoders of `arrow-json` would convert all of them. The encoders refuse
/// keys of maps that are not strings.
fn prepare(rows: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let is_plain = |array: &ArrayRef| {
        !array.data_type().is_nested() && !matches!(array.data_type(), DataType::Dictionary(..))
    };
    if rows.columns().iter().all(is_plain) {
        return Ok(rows.clone());
    }
    let all = UInt64Array::from_iter_values(0..rows.num_rows() as u64);
    let schema = rows.schema();
    let columns = rows.columns().iter().zip(schema.fields()).map(|(column, field)| {
        let column = compact(column).and_then(|column| take(&column, &all, None));
        let column = column.and_then(|column| with_text_keys(&column));
        let column = column.map_err(|error| in_field(field, &error))?;
        let field = field.as_ref().clone().with_data_type(column.data_type().clone());
        Ok((Arc::new(field), column))
    });
    let columns = columns.collect::<Result<Vec<_>, ArrowError>>()?;
    let (fields, columns): (Vec<FieldRef>, _) = columns.into_iter().unzip();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)
}

/// The array with the keys of all maps converted to strings. A JSON object with equal keys would
/// lose values when it is read, so equal keys are an error.
fn with_text_keys(array: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    let map = match array.data_type() {
        DataType::Map(..) => array.as_map(),
        DataType::Struct(fields) => {
            check_distinct(fields.iter().map(|field| field.name().as_str()))?;
            return map_child_arrays(array, with_text_keys);
        }
        _ => return map_child_arrays(array, with_text_keys),
    };
    map_child_arrays(array, |entries| {
        let entries = entries.as_struct();
        let (fields, mut columns, nulls) = entries.clone().into_parts();
        columns[0] = key_texts(&columns[0])?;
        let texts = format_values(&columns[0])?;
        for row in (0..map.len()).filter(|row| map.is_valid(*row)) {
            let [first, start, end] = [0, row, row + 1].map(|i| map.offsets()[i].as_usize());
            check_distinct(texts[start - first..end - first].iter())?;
        }
        columns[1] = with_text_keys(&columns[1])?;
        let fields = fields.iter().zip(&columns).map(|(field, column)| {
            field.as_ref().clone().with_data_type(column.data_type().clone())
        });
        Ok(Arc::new(StructArray::try_new(fields.collect(), columns, nulls)?))
    })
}

/// # Errors
/// [`ArrowError::JsonError`] if two keys of an object are equal.
fn check_distinct(keys: impl Iterator<Item = impl AsRef<str>>) -> Result<(), ArrowError> {
    let mut seen = HashSet::new();
    for key in keys {
        let key = key.as_ref();
        if !seen.insert(key.to_string()) {
            return Err(ArrowError::JsonError(format!("two values have the key {key:?}")));
        }
    }
    Ok(())
}

/// Keys of a map as strings. Bytes must be UTF-8; those of a fixed size become hexadecimal digits.
fn key_texts(keys: &ArrayRef) -> Result<ArrayRef, ArrowError> {
    use DataType as T;

    Ok(match keys.data_type() {
        T::Utf8 | T::LargeUtf8 | T::Utf8View => keys.clone(),
        T::Binary => Arc::new(StringArray::try_from_binary(keys.as_binary().clone())?),
        T::LargeBinary => Arc::new(LargeStringArray::try_from_binary(keys.as_binary().clone())?),
        T::BinaryView => Arc::new(keys.as_binary_view().clone().to_string_view()?),
        T::RunEndEncoded(..) => return key_texts(&expand_runs(keys)?),
        nested if nested.is_nested() => {
            let message = format!("a map has keys of type {nested}, which cannot be strings");
            return Err(ArrowError::JsonError(message));
        }
        _ => Arc::new(StringArray::from_iter_values(format_values(keys)?)),
    })
}

/// An error that names the column, or the member of a struct, in which `error` occurred.
fn in_field(field: &Field, error: &ArrowError) -> ArrowError {
    ArrowError::JsonError(format!("field {:?}: {error}", field.name()))
}

/// The number of NaN and infinite values of a column of [`prepare`], those in lists, maps and
/// structs included.
fn count_non_finite(array: &dyn Array) -> Result<u64, ArrowError> {
    use DataType as T;

    let list = match array.data_type() {
        T::Float16 => return Ok(count_values::<Float16Type>(array, f16::is_finite)),
        T::Float32 => return Ok(count_values::<Float32Type>(array, f32::is_finite)),
        T::Float64 => return Ok(count_values::<Float64Type>(array, f64::is_finite)),
        // A null row of these types still has child values, which are not counted.
        T::Struct(_) | T::FixedSizeList(..) if array.null_count() > 0 => {
            let is_valid = (0..array.len()).map(|row| Some(array.is_valid(row)));
            return count_non_finite(&filter(array, &BooleanArray::from_iter(is_valid))?);
        }
        T::Struct(_) => {
            return array.as_struct().columns().iter().map(|c| count_non_finite(c)).sum();
        }
        T::RunEndEncoded(..) => return count_non_finite(&expand_runs(array)?),
        T::List(_) => array.as_list::<i32>().values(),
        T::LargeList(_) => array.as_list::<i64>().values(),
        T::ListView(_) => array.as_list_view::<i32>().values(),
        T::LargeListView(_) => array.as_list_view::<i64>().values(),
        T::FixedSizeList(..) => array.as_fixed_size_list().values(),
        T::Map(..) => return count_non_finite(array.as_map().entries()),
        _ => return Ok(0),
    };
    count_non_finite(list)
}

/// The value of each row of a run-end encoded array.
fn expand_runs(array: &dyn Array) -> Result<ArrayRef, ArrowError> {
    let rows: Vec<u64> = (0..array.len() as u64).collect();
    downcast_run_array!(
        array => {
            let runs = array.get_physical_indices(&rows)?.into_iter().map(|run| run as u64);
            take(array.values(), &UInt64Array::from_iter_values(runs), None)
        },
        other => unreachable!("{other} is not run-end encoded")
    )
}

/// The number of values that are not finite.
fn count_values<T: ArrowPrimitiveType>(array: &dyn Array, is_finite: fn(T::Native) -> bool) -> u64 {
    let values = array.as_primitive::<T>().iter().flatten();
    values.filter(|value| !is_finite(*value)).count() as u64
}

/// Encodes times exactly. The encoders of `arrow-json` 60.1 write an error message in place of a
/// time that they cannot format, and need a database of time zones.
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
                let texts = format_values(array).map_err(|error| in_field(field, &error))?;
                Ok(Some(NullableEncoder::new(Box::new(Texts(texts)), array.nulls().cloned())))
            }
            _ => Ok(None),
        }
    }
}

/// The text of each value; empty for null. Timestamps with a time zone have the zone UTC: RFC 3339
/// cannot represent the offsets with seconds that some zones had before 1972, such as +00:09:21 in
/// Paris.
fn format_values(array: &dyn Array) -> Result<Vec<String>, ArrowError> {
    let mut data = array.to_data();
    if let DataType::Timestamp(unit, Some(_)) = *array.data_type() {
        // The values of all zones are times in UTC.
        let utc = DataType::Timestamp(unit, Some("+00:00".into()));
        data = data.into_builder().data_type(utc).build()?;
    }
    let array = make_array(data);
    let formatter = ArrayFormatter::try_new(&array, &FormatOptions::new())?;
    let text = |row: usize| {
        if array.is_null(row) { Ok(String::new()) } else { formatter.value(row).try_to_string() }
    };
    let texts: Vec<String> = (0..array.len()).map(text).collect::<Result<_, _>>()?;
    // `arrow-cast` 60.1 writes this text for a duration of more than i64::MAX milliseconds.
    let is_duration = matches!(array.data_type(), DataType::Duration(_));
    if is_duration && texts.iter().any(|text| text == "<invalid>") {
        Err(ArrowError::CastError("a duration is too long to be formatted".to_string()))
    } else {
        Ok(texts)
    }
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
        Date32Array, DictionaryArray, DurationSecondArray, FixedSizeListArray, Float32Array,
        Int32Array, ListArray, ListViewArray, MapArray, RunArray, StructArray,
        TimestampMillisecondArray, TimestampSecondArray,
        builder::{BinaryBuilder, Float32Builder, Int32Builder, ListBuilder, MapBuilder},
        types::{Date32Type, Float32Type, Int8Type},
    };
    use arrow_buffer::NullBuffer;

    use super::*;

    fn to_json(name: &str, column: impl Array + 'static) -> Result<Vec<String>, ArrowError> {
        let rows = RecordBatch::try_from_iter([(name, Arc::new(column) as ArrayRef)])?;
        rows_to_json(&rows, &mut NonFinite::new())
    }

    #[test]
    fn times_with_a_zone_are_written_in_utc() -> Result<(), ArrowError> {
        // 1900-01-01T00:00:00Z, when Paris was 9 minutes and 21 seconds ahead, and 2026.
        let times = [Some(-2_208_988_800_000), None, Some(1_767_225_600_000)];
        let times = TimestampMillisecondArray::from(times.to_vec()).with_timezone("Europe/Paris");
        assert_eq!(
            to_json("at", times)?,
            [
                r#"{"at":"1900-01-01T00:00:00Z"}"#,
                r#"{"at":null}"#,
                r#"{"at":"2026-01-01T00:00:00Z"}"#
            ]
        );
        Ok(())
    }

    #[test]
    fn a_date_that_cannot_be_formatted_is_an_error() {
        let error = to_json("at", Date32Array::from(vec![0, i32::MAX])).unwrap_err().to_string();
        assert!(error.contains("field \"at\": "), "{error}");
    }

    #[test]
    fn a_duration_that_cannot_be_formatted_is_an_error() -> Result<(), ArrowError> {
        let durations = |seconds| DurationSecondArray::from(vec![None, Some(seconds)]);
        let max = i64::MAX / 1000;
        let expected = format!(r#"{{"d":"PT{max}S"}}"#);
        assert_eq!(to_json("d", durations(max))?, [r#"{"d":null}"#, &expected]);
        let error = to_json("d", durations(max + 1)).unwrap_err().to_string();
        assert!(error.ends_with("a duration is too long to be formatted"), "{error}");
        Ok(())
    }

    #[test]
    fn equal_keys_of_an_object_are_an_error() -> Result<(), ArrowError> {
        let mut map = MapBuilder::new(None, Int32Builder::new(), Int32Builder::new());
        for keys in [&[7, 8][..], &[8], &[7, 7]] {
            map.keys().append_slice(keys);
            map.values().append_slice(keys);
            map.append(true)?;
        }
        let map = map.finish();
        assert_eq!(to_json("m", map.slice(0, 2))?, [r#"{"m":{"7":7,"8":8}}"#, r#"{"m":{"8":8}}"#]);
        let error = to_json("m", map.slice(1, 2)).unwrap_err().to_string();
        assert!(
            error.ends_with("field \"m\": Json error: two values have the key \"7\""),
            "{error}"
        );

        let member = Arc::new(Field::new("k", DataType::Int32, false));
        let value: ArrayRef = Arc::new(Int32Array::from(vec![1]));
        let twice = StructArray::from(vec![(member.clone(), value.clone()), (member, value)]);
        let error = to_json("s", twice).unwrap_err().to_string();
        assert!(error.ends_with("two values have the key \"k\""), "{error}");
        Ok(())
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
    fn bytes_and_times_as_keys_of_maps_are_written_as_strings() -> Result<(), ArrowError> {
        let mut map = MapBuilder::new(None, BinaryBuilder::new(), Int32Builder::new());
        map.keys().append_value("é");
        map.values().append_value(1);
        map.append(true)?;
        let bytes = map.finish();
        assert_eq!(to_json("m", bytes.clone())?, [r#"{"m":{"é":1}}"#]);

        let zone = |seconds| TimestampSecondArray::from(vec![seconds]).with_timezone("Asia/Tokyo");
        let (field, offsets, entries, ..) = bytes.into_parts();
        let times: ArrayRef = Arc::new(zone(0));
        let entries = StructArray::from(vec![
            (Arc::new(Field::new("keys", times.data_type().clone(), false)), times),
            (entries.fields()[1].clone(), entries.column(1).clone()),
        ]);
        let field = field.as_ref().clone().with_data_type(entries.data_type().clone());
        let times = MapArray::try_new(Arc::new(field), offsets, entries, None, false)?;
        assert_eq!(to_json("m", times)?, [r#"{"m":{"1970-01-01T00:00:00Z":1}}"#]);

        let mut map = MapBuilder::new(None, BinaryBuilder::new(), Int32Builder::new());
        map.keys().append_value([0xff]);
        map.values().append_value(1);
        map.append(true)?;
        assert!(to_json("m", map.finish()).is_err(), "the key is not valid UTF-8");
        Ok(())
    }

    #[test]
    fn nan_in_a_dictionary_is_counted_once_per_row() -> Result<(), ArrowError> {
        let values: ArrayRef = Arc::new(Float32Array::from(vec![f32::NAN, 1.0]));
        let keys = vec![Some(0), None, Some(1), Some(0)].into_iter().collect();
        let column = DictionaryArray::<Int8Type>::try_new(keys, values)?;
        let rows = RecordBatch::try_from_iter([("x", Arc::new(column) as ArrayRef)])?;
        let mut non_finite = NonFinite::new();
        rows_to_json(&rows, &mut non_finite)?;
        assert_eq!(non_finite["x"], 2);
        Ok(())
    }

    #[test]
    fn lists_as_keys_of_a_map_are_an_error() -> Result<(), ArrowError> {
        let lists = ListBuilder::new(Int32Builder::new());
        let mut map = MapBuilder::new(None, lists, Int32Builder::new());
        map.keys().append(true);
        map.values().append_value(1);
        map.append(true)?;
        let error = to_json("m", map.finish()).unwrap_err().to_string();
        assert!(error.ends_with("a map has keys of type List(Int32), which cannot be strings"));
        Ok(())
    }

    #[test]
    fn values_of_runs_are_counted_once_per_row() -> Result<(), ArrowError> {
        let values = Float32Array::from(vec![Some(f32::NAN), None, Some(1.0)]);
        let runs = RunArray::try_new(&Int32Array::from(vec![3, 4, 6]), &values)?;
        let rows = RecordBatch::try_from_iter([("x", Arc::new(runs) as ArrayRef)])?;
        let mut non_finite = NonFinite::new();
        let lines = rows_to_json(&rows.slice(1, 4), &mut non_finite)?;
        assert_eq!(lines.join(""), r#"{"x":null}{"x":null}{"x":null}{"x":1.0}"#);
        assert_eq!(non_finite["x"], 2);
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
        let dates = [Some(vec![Some(i32::MAX)]), Some(vec![Some(0)]), None];
        let dates = ListArray::from_iter_primitive::<Date32Type, _, _>(dates);
        let rows = RecordBatch::try_from_iter([
            ("views", Arc::new(ListViewArray::from(floats.clone())) as ArrayRef),
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
