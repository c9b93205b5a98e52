//! Converts rows of a table to JSON objects.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use arrow_array::{
    Array, RecordBatch, cast::AsArray, timezone::Tz, types::Float64Type, types::Int64Type,
};
use arrow_cast::{
    cast,
    display::{ArrayFormatter, FormatOptions, array_value_to_string},
    parse::string_to_datetime,
};
use arrow_json::{
    Encoder, EncoderFactory, EncoderOptions, WriterBuilder,
    writer::{LineDelimited, NullableEncoder},
};
use arrow_schema::{ArrowError, DataType, FieldRef, TimeUnit};

/// The number of NaN and infinite values per column that were written as null, because JSON cannot
/// represent them.
pub type NonFinite = BTreeMap<String, u64>;

/// One JSON object per row. Adds the number of NaN and infinite values per column to `non_finite`.
///
/// # Errors
/// [`ArrowError`] for a date, time or duration that cannot be formatted, such as a date after the
/// year 262142.
pub(crate) fn rows_to_json(
    rows: &RecordBatch,
    non_finite: &mut NonFinite,
) -> Result<Vec<String>, ArrowError> {
    let encoders = Arc::new(ExactEncoders { non_finite: Mutex::new(mem::take(non_finite)) });
    let builder = WriterBuilder::new().with_explicit_nulls(true);
    let builder = builder.with_encoder_factory(encoders.clone());
    let mut writer = builder.build::<_, LineDelimited>(vec![]);
    let written = writer.write(rows).and_then(|()| writer.finish());
    *non_finite =
        mem::take(&mut encoders.non_finite.lock().unwrap_or_else(PoisonError::into_inner));
    written?;
    let json = String::from_utf8(writer.into_inner());
    let json = json.map_err(|error| ArrowError::ExternalError(Box::new(error)))?;
    Ok(json.lines().map(String::from).collect())
}

/// Encodes times exactly, and counts the NaN and infinite values, which become null.
///
/// The encoders of `arrow-json` 60.1 write an error message for a time that they cannot format, and
/// drop the seconds of an offset from UTC.
#[derive(Debug)]
struct ExactEncoders {
    non_finite: Mutex<NonFinite>,
}

impl EncoderFactory for ExactEncoders {
    fn make_default_encoder<'a>(
        &self,
        field: &'a FieldRef,
        array: &'a dyn Array,
        _options: &'a EncoderOptions,
    ) -> Result<Option<NullableEncoder<'a>>, ArrowError> {
        use DataType as T;

        match array.data_type() {
            T::Float16 | T::Float32 | T::Float64 => {
                let values = cast(array, &T::Float64)?;
                let values = values.as_primitive::<Float64Type>().iter().flatten();
                let count = values.filter(|value| !value.is_finite()).count() as u64;
                if count > 0 {
                    let mut columns =
                        self.non_finite.lock().unwrap_or_else(PoisonError::into_inner);
                    *columns.entry(field.name().clone()).or_default() += count;
                }
                Ok(None)
            }
            T::Date32
            | T::Date64
            | T::Time32(_)
            | T::Time64(_)
            | T::Timestamp(..)
            | T::Duration(_)
            | T::Interval(_) => {
                let texts = format_times(array).map_err(|error| {
                    let column = field.name();
                    ArrowError::JsonError(format!("column {column:?}: {error}"))
                })?;
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

/// Replaces the text of a timestamp by its text in UTC if the text denotes another instant. RFC
/// 3339 has offsets in minutes, but before 1972 some time zones had offsets with seconds, such as
/// Paris with +00:09:21.
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
        let parsed = string_to_datetime(&zone, text)?.timestamp();
        if parsed != ticks.value(row).div_euclid(per_second) {
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
    use arrow_array::{ArrayRef, Date32Array, Float32Array, TimestampMillisecondArray};

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
        Ok(())
    }

    #[test]
    fn a_date_that_cannot_be_formatted_is_an_error() {
        let error = to_json("at", Date32Array::from(vec![0, i32::MAX])).unwrap_err().to_string();
        assert!(error.contains("column \"at\": "), "{error}");
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
}
