//! Rows of a table as JSON objects, one object a line.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Result;
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

/// Numbers written as null, by column: JSON has neither NaN nor infinity.
static NOT_FINITE: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// One JSON object for each row.
///
/// # Errors
/// A date, time or duration that has no text, such as one after the year 262,142.
pub fn lines(batch: &RecordBatch) -> Result<Vec<String>> {
    let builder = WriterBuilder::new().with_explicit_nulls(true);
    let builder = builder.with_encoder_factory(Arc::new(Exact));
    let mut writer = builder.build::<_, LineDelimited>(vec![]);
    writer.write(batch)?;
    writer.finish()?;
    Ok(String::from_utf8(writer.into_inner())?.lines().map(String::from).collect())
}

/// Tells which columns have numbers that were written as null.
pub fn tell_not_finite() {
    for (column, n) in NOT_FINITE.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let numbers = if *n == 1 { "number is" } else { "numbers are" };
        eprintln!(
            "bert: column {column:?}: {n} {numbers} NaN or infinite, which JSON writes as null"
        );
    }
}

/// Encodes times exactly and counts the numbers that become null. `arrow-json` 60.1 alone writes the
/// text of an error for a time that it cannot format, and offsets from UTC without their seconds.
#[derive(Debug)]
struct Exact;

impl EncoderFactory for Exact {
    fn make_default_encoder<'a>(
        &self,
        field: &'a FieldRef,
        array: &'a dyn Array,
        _options: &'a EncoderOptions,
    ) -> Result<Option<NullableEncoder<'a>>, ArrowError> {
        use DataType as T;

        match array.data_type() {
            T::Float16 | T::Float32 | T::Float64 => {
                let numbers = cast(array, &T::Float64)?;
                let numbers = numbers.as_primitive::<Float64Type>().iter().flatten();
                let n = numbers.filter(|number| !number.is_finite()).count();
                if n > 0 {
                    let mut columns = NOT_FINITE.lock().unwrap_or_else(PoisonError::into_inner);
                    *columns.entry(field.name().clone()).or_default() += n;
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
                let texts = times(array).map_err(|error| {
                    let column = field.name();
                    ArrowError::JsonError(format!("column {column:?}: {error}"))
                })?;
                Ok(Some(NullableEncoder::new(Box::new(Texts(texts)), array.nulls().cloned())))
            }
            _ => Ok(None),
        }
    }
}

/// The text of each date, time or duration; empty for a null.
fn times(array: &dyn Array) -> Result<Vec<String>, ArrowError> {
    let formatter = ArrayFormatter::try_new(array, &FormatOptions::new())?;
    let text = |row: usize| match array.is_null(row) {
        true => Ok(String::new()),
        false => formatter.value(row).try_to_string(),
    };
    let mut texts = (0..array.len()).map(text).collect::<Result<Vec<_>, _>>()?;
    if let DataType::Timestamp(unit, Some(_)) = array.data_type() {
        in_utc(array, *unit, &mut texts)?;
    }
    Ok(texts)
}

/// Replaces each text that denotes another instant than its value by the value's text in UTC. RFC 3339
/// has offsets in minutes; before 1972 some zones had offsets with seconds, such as Paris with
/// +00:09:21.
fn in_utc(array: &dyn Array, unit: TimeUnit, texts: &mut [String]) -> Result<(), ArrowError> {
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
        let read = string_to_datetime(&zone, text)?.timestamp();
        if read != ticks.value(row).div_euclid(per_second) {
            *text = array_value_to_string(&cast(&array.slice(row, 1), &utc)?, 0)?;
        }
    }
    Ok(())
}

/// Writes texts as JSON strings.
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

    fn table(column: impl Array + 'static) -> RecordBatch {
        RecordBatch::try_from_iter([("at", Arc::new(column) as ArrayRef)]).unwrap()
    }

    #[test]
    fn times_of_a_zone_are_the_same_instants() -> Result<()> {
        // 1900-01-01T00:00:00Z, when Paris was 9 minutes and 21 seconds ahead, and 2026.
        let times = [Some(-2_208_988_800_000), None, Some(1_767_225_600_000)];
        let times = TimestampMillisecondArray::from(times.to_vec()).with_timezone("Europe/Paris");
        assert_eq!(
            lines(&table(times))?,
            [
                r#"{"at":"1900-01-01T00:00:00Z"}"#,
                r#"{"at":null}"#,
                r#"{"at":"2026-01-01T01:00:00+01:00"}"#
            ]
        );
        Ok(())
    }

    #[test]
    fn a_time_without_a_text_is_an_error() {
        let error = lines(&table(Date32Array::from(vec![0, i32::MAX]))).unwrap_err().to_string();
        assert!(error.contains("column \"at\": "), "{error}");
    }

    #[test]
    fn numbers_that_json_lacks_are_counted() -> Result<()> {
        let column = Float32Array::from(vec![Some(1.5), Some(f32::NAN), None, Some(f32::INFINITY)]);
        let batch = RecordBatch::try_from_iter([("numbers", Arc::new(column) as ArrayRef)])?;
        assert_eq!(lines(&batch)?[..2], [r#"{"numbers":1.5}"#, r#"{"numbers":null}"#]);
        assert_eq!(NOT_FINITE.lock().unwrap()["numbers"], 2);
        Ok(())
    }
}
