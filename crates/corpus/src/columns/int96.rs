//! Units of Parquet's timestamps of type INT96, which Spark, Hive and Impala write: nanoseconds of
//! the day and a day number, so their range exceeds that of 64-bit nanoseconds (the years 1677 to
//! 2262).

use std::{cell::Cell, fs::File, sync::Arc};

use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use parquet::{
    basic::Type,
    column::reader::ColumnReader,
    data_type::Int96,
    errors::{ParquetError, Result},
    file::{
        metadata::FileMetaData,
        reader::{FileReader, SerializedFileReader},
    },
};

use crate::columns::nested::{children, map_children};

/// The Julian day of 1970-01-01.
const EPOCH: i64 = 2_440_588;

/// The number of values that are read at once.
const VALUES: usize = 8192;

/// The schema of a Parquet file, in which each column of INT96 timestamps has the unit microsecond
/// if a value exceeds the range of nanoseconds. `parquet` 60.1 returns a wrong time for such a
/// value. Reads the values of these columns.
///
/// # Errors
/// [`ParquetError`] if the file cannot be read, or if neither unit represents all values of a
/// column.
pub(crate) fn with_int96_units(
    schema: &SchemaRef,
    metadata: &FileMetaData,
    file: &File,
) -> Result<SchemaRef> {
    let columns = metadata.schema_descr().columns();
    if columns.iter().all(|column| column.physical_type() != Type::INT96) {
        return Ok(schema.clone());
    }
    let reader = SerializedFileReader::new(file.try_clone()?)?;
    let mut in_microseconds = vec![false; columns.len()];
    for (i, column) in columns.iter().enumerate() {
        if column.physical_type() == Type::INT96 {
            in_microseconds[i] = needs_microseconds(&reader, i)?;
        }
    }
    let leaf = Cell::new(0);
    let fields = schema.fields().iter().map(|field| with_units(field, &in_microseconds, &leaf));
    let fields: Vec<_> = fields.collect();
    Ok(Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone())))
}

/// Whether a value of the column exceeds the range of nanoseconds.
///
/// # Errors
/// [`ParquetError`] if the column cannot be read, or if microseconds do not represent all values
/// exactly either.
fn needs_microseconds(file: &SerializedFileReader<File>, column: usize) -> Result<bool> {
    let (mut fits_nanoseconds, mut fits_microseconds) = (true, true);
    for group in 0..file.num_row_groups() {
        let reader = file.get_row_group(group)?.get_column_reader(column)?;
        let ColumnReader::Int96ColumnReader(mut reader) = reader else { continue };
        let (mut definitions, mut repetitions, mut values) = (vec![], vec![], vec![]);
        loop {
            definitions.clear();
            repetitions.clear();
            values.clear();
            let (records, ..) = reader.read_records(
                VALUES,
                Some(&mut definitions),
                Some(&mut repetitions),
                &mut values,
            )?;
            if records == 0 {
                break;
            }
            fits_nanoseconds &= values.iter().all(|value| is_exact(value, 1));
            fits_microseconds &= values.iter().all(|value| is_exact(value, 1000));
        }
    }
    if !fits_nanoseconds && !fits_microseconds {
        let name = file.metadata().file_metadata().schema_descr().column(column).path().string();
        return Err(ParquetError::General(format!(
            "column {name:?} has INT96 timestamps outside of the years 1677 to 2262 and timestamps \
             with nanoseconds: neither unit represents all of them"
        )));
    }
    Ok(!fits_nanoseconds)
}

/// Whether an i64 represents the time exactly, in units of `unit` nanoseconds.
fn is_exact(value: &Int96, unit: i64) -> bool {
    let [low, high, day] = *value.data() else { return false };
    let nanoseconds = i64::from(high) << 32 | i64::from(low);
    let days = i64::from(day.cast_signed()) - EPOCH;
    let units = days.checked_mul(86_400 * (1_000_000_000 / unit));
    nanoseconds % unit == 0 && units.is_some_and(|n| n.checked_add(nanoseconds / unit).is_some())
}

/// The field with microseconds for the leaves whose element of `in_microseconds` is true. `leaf` is
/// the index of the next leaf, in the order of the file's columns.
fn with_units(field: &Arc<Field>, in_microseconds: &[bool], leaf: &Cell<usize>) -> Arc<Field> {
    let data_type = field.data_type();
    let data_type = if !children(data_type).is_empty() {
        map_children(data_type, |_, child| with_units(child, in_microseconds, leaf))
    } else {
        match (data_type, in_microseconds.get(leaf.replace(leaf.get() + 1))) {
            (DataType::Timestamp(TimeUnit::Nanosecond, zone), Some(true)) => {
                DataType::Timestamp(TimeUnit::Microsecond, zone.clone())
            }
            _ => data_type.clone(),
        }
    };
    Arc::new(field.as_ref().clone().with_data_type(data_type))
}

#[cfg(test)]
mod tests {
    use parquet::{
        arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
        data_type::{ByteArrayType, Int96Type},
        file::writer::SerializedFileWriter,
        schema::parser::parse_message_type,
    };

    use super::*;

    fn int96(day: i64, nanoseconds: u64) -> Int96 {
        let day = i32::try_from(EPOCH + day).unwrap().cast_unsigned();
        Int96::from(vec![nanoseconds as u32, (nanoseconds >> 32) as u32, day])
    }

    /// A file of two row groups, each with one list of timestamps.
    fn file(lists: [[Int96; 2]; 2]) -> Result<File> {
        let message = "message m { required binary text (UTF8); required group at (LIST) {
            repeated group list { optional int96 element; } } }";
        let schema = Arc::new(parse_message_type(message)?);
        let file = tempfile::tempfile()?;
        let mut writer = SerializedFileWriter::new(file.try_clone()?, schema, Arc::default())?;
        for list in lists {
            let mut group = writer.next_row_group()?;
            let mut column = group.next_column()?.expect("the texts");
            column.typed::<ByteArrayType>().write_batch(&["a".into()], None, None)?;
            column.close()?;
            let mut column = group.next_column()?.expect("the timestamps");
            column.typed::<Int96Type>().write_batch(&list, Some(&[2, 2]), Some(&[0, 1]))?;
            column.close()?;
            group.close()?;
        }
        writer.close()?;
        Ok(file)
    }

    fn unit(lists: [[Int96; 2]; 2]) -> Result<DataType> {
        let file = file(lists)?;
        let options = ArrowReaderOptions::new();
        let metadata = ArrowReaderMetadata::load(&file, options)?;
        let file_metadata = metadata.metadata().file_metadata();
        let schema = with_int96_units(metadata.schema(), file_metadata, &file)?;
        Ok(children(schema.field(1).data_type())[0].data_type().clone())
    }

    #[test]
    fn columns_with_distant_years_have_microseconds() -> Result<()> {
        let [near, far] = [int96(0, 1_000), int96(2_932_896, 0)];
        let timestamps = |unit| DataType::Timestamp(unit, None);
        let nanoseconds = unit([[near, near], [near, int96(0, 1)]])?;
        assert_eq!(nanoseconds, timestamps(TimeUnit::Nanosecond));
        assert_eq!(unit([[near, near], [near, far]])?, timestamps(TimeUnit::Microsecond));
        let error = unit([[near, int96(0, 1)], [near, far]]).unwrap_err().to_string();
        assert!(error.contains("column \"at.list.element\" has INT96 timestamps"), "{error}");
        Ok(())
    }

    #[test]
    fn nanoseconds_and_microseconds_have_the_range_of_i64() {
        // i64::MAX ns is 2262-04-11T23:47:16.854775807, in the day 106751 after 1970-01-01.
        assert!(is_exact(&int96(106_751, 85_636_854_775_807), 1));
        assert!(!is_exact(&int96(106_751, 85_636_854_775_808), 1));
        assert!(is_exact(&int96(-106_751, 0), 1));
        assert!(!is_exact(&int96(-106_753, 0), 1));
        assert!(is_exact(&int96(2_932_896, 86_399_999_999_000), 1000)); // 9999-12-31
        assert!(!is_exact(&int96(0, 1_500), 1000));
        assert!(!is_exact(&int96(2_000_000_000, 0), 1000));
    }
}
