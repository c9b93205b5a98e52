//! Rows of a table as JSON objects, one object a line.

use std::sync::Arc;

use anyhow::Result;
use arrow_array::{Array, RecordBatch, cast::AsArray, timezone::Tz, types::Int64Type};
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

/// One JSON object for each row.
pub fn lines(batch: &RecordBatch) -> Result<Vec<String>> {
    let builder = WriterBuilder::new().with_explicit_nulls(true);
    let builder = builder.with_encoder_factory(Arc::new(ExactTimes));
    let mut writer = builder.build::<_, LineDelimited>(vec![]);
    writer.write(batch)?;
    writer.finish()?;
    Ok(String::from_utf8(writer.into_inner())?.lines().map(String::from).collect())
}

/// Writes timestamps of a time zone so that they are the same instants when they are read.
///
/// `arrow-cast` 60.1 writes offsets from UTC in minutes, as RFC 3339 has them. Before 1972 some zones
/// had offsets with seconds, such as Paris with +00:09:21; such values are written in UTC.
#[derive(Debug)]
struct ExactTimes;

impl EncoderFactory for ExactTimes {
    fn make_default_encoder<'a>(
        &self,
        _field: &'a FieldRef,
        array: &'a dyn Array,
        _options: &'a EncoderOptions,
    ) -> Result<Option<NullableEncoder<'a>>, ArrowError> {
        let DataType::Timestamp(unit, Some(_)) = array.data_type() else { return Ok(None) };
        let encoder = ZonedTimes {
            array,
            unit: *unit,
            ticks: cast(array, &DataType::Int64)?.as_primitive::<Int64Type>().values().to_vec(),
            zoned: ArrayFormatter::try_new(array, &FormatOptions::new().with_display_error(true))?,
            utc: "UTC".parse()?,
        };
        Ok(Some(NullableEncoder::new(Box::new(encoder), array.nulls().cloned())))
    }
}

struct ZonedTimes<'a> {
    array: &'a dyn Array,
    unit: TimeUnit,
    /// The values in `unit` since 1970.
    ticks: Vec<i64>,
    zoned: ArrayFormatter<'a>,
    utc: Tz,
}

impl ZonedTimes<'_> {
    /// The value in UTC, if its text in the zone is another instant.
    fn in_utc(&self, row: usize, zoned: &str) -> Option<String> {
        let seconds = match self.unit {
            TimeUnit::Second => 1,
            TimeUnit::Millisecond => 1_000,
            TimeUnit::Microsecond => 1_000_000,
            TimeUnit::Nanosecond => 1_000_000_000,
        };
        let read = string_to_datetime(&self.utc, zoned).ok()?;
        if read.timestamp() == self.ticks[row].div_euclid(seconds) {
            return None;
        }
        let utc = DataType::Timestamp(self.unit, Some("UTC".into()));
        let value = cast(&self.array.slice(row, 1), &utc).ok()?;
        array_value_to_string(&value, 0).ok()
    }
}

impl Encoder for ZonedTimes<'_> {
    fn encode(&mut self, row: usize, out: &mut Vec<u8>) {
        let zoned = self.zoned.value(row).to_string();
        let text = self.in_utc(row, &zoned).unwrap_or(zoned);
        out.extend(serde_json::Value::from(text).to_string().bytes());
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{ArrayRef, TimestampMillisecondArray};

    use super::*;

    #[test]
    fn times_of_a_zone_are_the_same_instants() -> Result<()> {
        // 1900-01-01T00:00:00Z, when Paris was 9 minutes and 21 seconds ahead, and 2026.
        let times = [Some(-2_208_988_800_000), None, Some(1_767_225_600_000)];
        let times = TimestampMillisecondArray::from(times.to_vec()).with_timezone("Europe/Paris");
        let batch = RecordBatch::try_from_iter([("at", Arc::new(times) as ArrayRef)])?;
        assert_eq!(
            lines(&batch)?,
            [
                r#"{"at":"1900-01-01T00:00:00Z"}"#,
                r#"{"at":null}"#,
                r#"{"at":"2026-01-01T01:00:00+01:00"}"#
            ]
        );
        Ok(())
    }
}
