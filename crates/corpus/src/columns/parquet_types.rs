//! Conversion of three column types that Parquet lacks: `timestamp[s]` and `time32[s]` are written
//! in milliseconds, `date64` as `date32`. `duration`, which Parquet lacks too, is not converted.
//!
//! Without the conversion, `parquet` 60.1 writes plain integers, and only readers of the Arrow
//! schema in the file's metadata read them as times.
//!
//! Some other programs write `timestamp[s, zone]` in milliseconds too, but the Arrow schema in the
//! file has the type in seconds. `parquet` then ignores this type and its zone;
//! [`with_time_zones`] restores the zone.

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType,
    cast::AsArray,
    types::{
        Date32Type, Date64Type, Time32MillisecondType, Time32SecondType, TimestampMillisecondType,
        TimestampSecondType,
    },
};
use arrow_ipc::convert::try_schema_from_ipc_buffer;
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef, TimeUnit};
use base64::{Engine, prelude::BASE64_STANDARD};
use parquet::{arrow::ARROW_SCHEMA_META_KEY, file::metadata::FileMetaData};

use crate::columns::nested::{children, map_child_arrays, map_children};

/// The schema as it is written to Parquet.
pub(crate) fn parquet_schema(schema: &Schema) -> Schema {
    let fields: Vec<_> = schema.fields().iter().map(parquet_field).collect();
    Schema::new_with_metadata(fields, schema.metadata().clone())
}

/// The schema of a Parquet file with the time zones of the Arrow schema in its metadata. If a
/// program has written `timestamp[s, zone]` in milliseconds, `parquet` 60.1 returns the zone `UTC`,
/// because the units of the two schemas differ.
pub(crate) fn with_time_zones(schema: &SchemaRef, file: &FileMetaData) -> SchemaRef {
    let stored = || {
        let mut pairs = file.key_value_metadata()?.iter().rev();
        let encoded = pairs.find(|pair| pair.key == ARROW_SCHEMA_META_KEY)?.value.as_ref()?;
        try_schema_from_ipc_buffer(&BASE64_STANDARD.decode(encoded).ok()?).ok()
    };
    let Some(stored) = stored() else { return schema.clone() };
    let fields = fields_with_zones(schema.fields(), stored.fields());
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

fn fields_with_zones(fields: &Fields, stored: &Fields) -> Fields {
    let with_zone = |field: &Arc<Field>| match stored.find(field.name()) {
        Some((_, stored)) => field_with_zone(field, stored),
        None => field.clone(),
    };
    fields.iter().map(with_zone).collect()
}

fn field_with_zone(field: &Arc<Field>, stored: &Arc<Field>) -> Arc<Field> {
    let data_type = match (field.data_type(), stored.data_type()) {
        (DataType::Timestamp(unit, Some(_)), DataType::Timestamp(_, Some(zone))) => {
            DataType::Timestamp(*unit, Some(zone.clone()))
        }
        (DataType::Struct(fields), DataType::Struct(stored)) => {
            DataType::Struct(fields_with_zones(fields, stored))
        }
        (data_type, stored) => {
            let stored = children(stored);
            map_children(data_type, |i, child| match stored.get(i) {
                Some(stored) => field_with_zone(child, stored),
                None => child.clone(),
            })
        }
    };
    Arc::new(field.as_ref().clone().with_data_type(data_type))
}

fn parquet_field(field: &Arc<Field>) -> Arc<Field> {
    Arc::new(field.as_ref().clone().with_data_type(parquet_type(field.data_type())))
}

fn parquet_type(arrow: &DataType) -> DataType {
    match arrow {
        DataType::Timestamp(TimeUnit::Second, zone) => {
            DataType::Timestamp(TimeUnit::Millisecond, zone.clone())
        }
        DataType::Time32(TimeUnit::Second) => DataType::Time32(TimeUnit::Millisecond),
        DataType::Date64 => DataType::Date32,
        nested => map_children(nested, |_, child| parquet_field(child)),
    }
}

type Reason = Box<dyn std::error::Error + Send + Sync>;

/// Converts a column to `to`, which is either the column's own type or its [`parquet_type`].
///
/// # Errors
/// The index of the first value that `to` does not represent exactly, and the reason.
pub(crate) fn convert(column: &ArrayRef, to: &DataType) -> Result<ArrayRef, (usize, Reason)> {
    if column.data_type() == to {
        return Ok(column.clone());
    }
    let exact = |column: &ArrayRef| -> Result<ArrayRef, Reason> {
        // The comparison ignores values in a null struct or list.
        if times(column, false).is_ok_and(|exact| exact.to_data() == column.to_data()) {
            Ok(times(column, true)?)
        } else {
            Err(format!("{to} does not represent this {} exactly", column.data_type()).into())
        }
    };
    exact(column).map_err(|error| {
        let one = |row: usize| exact(&column.slice(row, 1)).err().map(|error| (row, error));
        (0..column.len()).find_map(one).unwrap_or((0, error))
    })
}

/// The array in its type in Parquet ([`parquet_type`]) or, if `convert` is false, in its own type.
/// In both cases, a value that the type in Parquet does not represent exactly is null.
fn times(array: &ArrayRef, convert: bool) -> Result<ArrayRef, ArrowError> {
    Ok(match array.data_type() {
        DataType::Timestamp(TimeUnit::Second, _) => {
            values::<TimestampSecondType, TimestampMillisecondType>(array, convert, |seconds| {
                seconds.checked_mul(1000)
            })
        }
        DataType::Time32(TimeUnit::Second) => {
            values::<Time32SecondType, Time32MillisecondType>(array, convert, |seconds| {
                seconds.checked_mul(1000)
            })
        }
        DataType::Date64 => values::<Date64Type, Date32Type>(array, convert, |milliseconds| {
            const DAY: i64 = 86_400_000;
            let days = i32::try_from(milliseconds / DAY).ok();
            days.filter(|_| milliseconds % DAY == 0)
        }),
        _ => map_child_arrays(array, |child| times(child, convert))?,
    })
}

/// [`times`] for an array of `S`, whose type in Parquet is `T`. `f` returns the exact value.
fn values<S: ArrowPrimitiveType, T: ArrowPrimitiveType>(
    array: &ArrayRef,
    convert: bool,
    f: fn(S::Native) -> Option<T::Native>,
) -> ArrayRef {
    let (array, data_type) = (array.as_primitive::<S>(), array.data_type());
    if convert {
        Arc::new(array.unary_opt::<_, T>(f).with_data_type(parquet_type(data_type)))
    } else {
        let exact = array.unary_opt::<_, S>(|value| f(value).map(|_| value));
        Arc::new(exact.with_data_type(data_type.clone()))
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::{
        Date32Array, Date64Array, ListArray, StructArray, Time32MillisecondArray,
        Time32SecondArray, TimestampMillisecondArray, TimestampSecondArray, types::Date64Type,
    };
    use arrow_buffer::NullBuffer;

    use super::*;

    const DAY: i64 = 86_400_000;

    #[test]
    fn seconds_become_milliseconds_and_date64_becomes_date32() {
        let seconds: ArrayRef =
            Arc::new(TimestampSecondArray::from(vec![Some(-1), None]).with_timezone("UTC"));
        let to = parquet_type(seconds.data_type());
        let expected =
            TimestampMillisecondArray::from(vec![Some(-1000), None]).with_timezone("UTC");
        assert_eq!(convert(&seconds, &to).unwrap().as_ref(), &expected as &dyn Array);

        let days: ArrayRef = Arc::new(Date64Array::from(vec![Some(-DAY), None, Some(2 * DAY)]));
        let expected = Date32Array::from(vec![Some(-1), None, Some(2)]);
        assert_eq!(convert(&days, &DataType::Date32).unwrap().as_ref(), &expected as &dyn Array);

        let times: ArrayRef = Arc::new(Time32SecondArray::from(vec![Some(5), None]));
        let expected = Time32MillisecondArray::from(vec![Some(5000), None]);
        let to = parquet_type(times.data_type());
        assert_eq!(convert(&times, &to).unwrap().as_ref(), &expected as &dyn Array);

        let lists =
            Arc::new(ListArray::from_iter_primitive::<Date64Type, _, _>([Some(vec![Some(DAY)])]));
        let to = parquet_type(lists.data_type());
        assert!(matches!(&to, DataType::List(e) if e.data_type() == &DataType::Date32));
        assert_eq!(convert(&(lists as ArrayRef), &to).unwrap().data_type(), &to);
    }

    #[test]
    fn the_first_inexact_value_is_reported() {
        let days: ArrayRef = Arc::new(Date64Array::from(vec![DAY, DAY + 1]));
        let (row, error) = convert(&days, &DataType::Date32).unwrap_err();
        assert_eq!(
            (row, error.to_string().as_str()),
            (1, "Date32 does not represent this Date64 exactly")
        );
        let seconds: ArrayRef = Arc::new(TimestampSecondArray::from(vec![0, 0, i64::MAX]));
        let to = parquet_type(seconds.data_type());
        assert_eq!(convert(&seconds, &to).unwrap_err().0, 2);
    }

    #[test]
    fn an_inexact_value_in_a_null_struct_is_not_an_error() {
        let seconds: ArrayRef = Arc::new(TimestampSecondArray::from(vec![1, i64::MAX]));
        let fields = Fields::from(vec![Field::new("at", seconds.data_type().clone(), true)]);
        let nulls = NullBuffer::from(vec![true, false]);
        let rows: ArrayRef =
            Arc::new(StructArray::new(fields.clone(), vec![seconds.clone()], Some(nulls)));
        let to = parquet_type(rows.data_type());
        let converted = convert(&rows, &to).unwrap();
        assert_eq!((converted.data_type(), converted.null_count()), (&to, 1));
        let visible: ArrayRef = Arc::new(StructArray::new(fields, vec![seconds.clone()], None));
        assert_eq!(convert(&visible, &to).unwrap_err().0, 1);

        // An inexact value is null while it is examined, although its field is not nullable.
        let fields = Fields::from(vec![Field::new("at", seconds.data_type().clone(), false)]);
        let visible: ArrayRef = Arc::new(StructArray::new(fields, vec![seconds], None));
        let (row, error) = convert(&visible, &parquet_type(visible.data_type())).unwrap_err();
        assert!(row == 1 && error.to_string().ends_with("exactly"), "{row}: {error}");
        let DataType::Struct(fields) = visible.data_type() else { unreachable!() };
        let times = visible.as_struct().column(0).clone();
        let offsets = arrow_buffer::OffsetBuffer::from_lengths([1, 1]);
        let lists: ArrayRef =
            Arc::new(ListArray::try_new(fields[0].clone(), offsets, times, None).unwrap());
        assert_eq!(convert(&lists, &parquet_type(lists.data_type())).unwrap_err().0, 1);
    }
}
