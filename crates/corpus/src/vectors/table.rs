//! Parquet and Arrow IPC files of records with their vectors.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::Path,
    sync::Arc,
};

use arrow_array::{ArrayRef, RecordBatch, StringArray, new_null_array};
use arrow_ipc::{
    reader::StreamReader,
    writer::{FileWriter, StreamWriter},
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};
use arrow_select::interleave::interleave_record_batch;
use parquet::{
    arrow::{ArrowSchemaConverter, ArrowWriter},
    basic::Compression,
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties},
    },
};

use crate::{
    ALL_EMBEDDINGS, Error, OutputError, Result, ResumeError, StoredRow,
    columns::{self, Json, children, convert},
    records::{Fields, Record, text_object_size},
    vectors::jsonl::open_objects,
};

/// The maximum number of rows of a Parquet row group.
const ROW_GROUP: usize = 16_384;

/// The metadata key for the description of the model that computed the vectors.
pub(crate) const MODEL_KEY: &str = "encodle";

/// Metadata keys under which Spark and Avro store the schema of the input. They are not copied to
/// the output: programs that use this schema would not see the column of vectors.
const FOREIGN_SCHEMAS: [&str; 2] =
    ["org.apache.spark.sql.parquet.row.metadata", "parquet.avro.schema"];

/// The format of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableFormat {
    Parquet,
    Arrow,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The schema of records with their rows, whose columns have the names and types `rows`. The
/// metadata of the input is copied, without its description of a model. `model`, the description of
/// the model that computed the rows, is added if it is given.
pub(crate) fn schema_with_rows<'a>(
    fields: &Schema,
    rows: impl Iterator<Item = (&'a &'static str, DataType)>,
    model: Option<&str>,
) -> Schema {
    let mut metadata = fields.metadata().clone();
    metadata.retain(|key, _| !FOREIGN_SCHEMAS.contains(&key.as_str()) && key != MODEL_KEY);
    if let Some(model) = model {
        metadata.insert(MODEL_KEY.to_string(), model.to_string());
    }
    let mut fields = fields.fields().to_vec();
    fields.extend(rows.map(|(name, data_type)| Arc::new(Field::new(*name, data_type, false))));
    Schema::new_with_metadata(fields, metadata)
}

/// The names of the columns of rows in a schema of [`schema_with_rows`]: [`ALL_EMBEDDINGS`] if these
/// are the last columns, otherwise the first of them. Records cannot have a column of this name, so
/// that the others do not come from the records if it precedes them.
pub(crate) fn row_columns(schema: &Schema) -> &'static [&'static str] {
    let names = schema.fields().iter().rev().map(|field| field.name().as_str());
    if names.take(ALL_EMBEDDINGS.len()).eq(ALL_EMBEDDINGS.into_iter().rev()) {
        &ALL_EMBEDDINGS
    } else {
        &ALL_EMBEDDINGS[..1]
    }
}

/// Checks that `format` supports all columns, by writing one null to each.
///
/// # Errors
/// [`OutputError::UnwritableColumn`] for the first column that `format` does not support.
pub(crate) fn check_columns(format: TableFormat, schema: &Schema) -> Result<()> {
    for field in schema.fields() {
        let error = |source: BoxError| {
            let (column, data_type) = (field.name().clone(), field.data_type().clone());
            Error::Output(OutputError::UnwritableColumn { column, data_type, source })
        };
        if has(field.data_type(), |data_type| matches!(data_type, DataType::Union(..))) {
            return Err(error("expected one type, got a union".into()));
        }
        // `parquet` 60.1 panics when it writes values of zero bytes.
        if format == TableFormat::Parquet
            && has(field.data_type(), |data_type| *data_type == DataType::FixedSizeBinary(0))
        {
            return Err(error("expected values of at least one byte".into()));
        }
        let field = field.as_ref().clone().with_nullable(true);
        let schema = Arc::new(Schema::new(vec![field.clone()]));
        let null = new_null_array(field.data_type(), 1);
        let batch = RecordBatch::try_new(schema.clone(), vec![null]);
        let stream = || -> Result<Vec<RecordBatch>, BoxError> {
            let mut writer = StreamWriter::try_new(vec![], &schema)?;
            writer.write(&batch?)?;
            let stream = writer.into_inner()?;
            Ok(StreamReader::try_new(&stream[..], None)?.collect::<Result<_, _>>()?)
        };
        let written = stream()
            .and_then(|batches| write_batches(format, &schema, [batches].into_iter(), io::sink()));
        written.map_err(error)?;
    }
    Ok(())
}

/// Whether a type, or a type nested in it, fulfils a condition.
fn has(data_type: &DataType, condition: fn(&DataType) -> bool) -> bool {
    condition(data_type)
        || children(data_type).iter().any(|child| has(child.data_type(), condition))
}

/// The maximum size in bytes of the records of a batch, so that the offsets of strings and lists
/// fit into 31 bits.
const BATCH_BYTES: usize = 1 << 30;

/// The records and their rows as concatenated Arrow IPC streams of one batch each.
///
/// # Errors
/// The errors of [`encode_batch`].
pub(crate) fn encode_batches(
    schema: &SchemaRef,
    input: &str,
    records: &[Record],
    rows: &[impl StoredRow],
) -> Result<Vec<u8>> {
    let (mut streams, mut start) = (vec![], 0);
    for count in batch_sizes(records.iter().map(size), BATCH_BYTES) {
        let range = start..start + count;
        let stream = encode_batch(schema, input, &records[range.clone()], &rows[range])?;
        if streams.is_empty() {
            streams = stream; // without a copy
        } else {
            streams.extend(stream);
        }
        start += count;
    }
    Ok(streams)
}

/// The size in bytes of a record with all its fields; for a row of a table, the mean of its batch.
fn size(record: &Record) -> usize {
    match &record.fields {
        Fields::Text => record.text.len() + text_object_size(&record.text),
        Fields::Json { open_object, .. } => record.text.len() + open_object.len(),
        Fields::Row { batch, .. } => batch.row_bytes,
    }
}

/// The number of records of each batch. A batch consists of consecutive records whose sizes add up
/// to at most `max`, or of one larger record.
fn batch_sizes(sizes: impl Iterator<Item = usize>, max: usize) -> Vec<usize> {
    let (mut batches, mut bytes) = (vec![], 0);
    for size in sizes {
        match batches.last_mut() {
            Some(count) if bytes + size <= max => (*count, bytes) = (*count + 1, bytes + size),
            _ => {
                batches.push(1);
                bytes = size;
            }
        }
    }
    batches
}

/// The records and their rows as an Arrow IPC stream of one batch.
///
/// # Errors
/// [`OutputError::StreamColumn`] or [`OutputError::InexactConversion`] for a value that does not
/// fit into its column.
fn encode_batch<R: StoredRow>(
    schema: &SchemaRef,
    input: &str,
    records: &[Record],
    rows: &[R],
) -> Result<Vec<u8>> {
    let (fields, own) = schema.fields().split_at(schema.fields().len() - R::COLUMNS.len());
    let fields = Arc::new(Schema::new(fields.to_vec()));
    let columns = field_columns(&fields, input, records)?.into_iter().zip(fields.fields());
    let columns = columns.map(|(column, field)| {
        convert(&column, field.data_type()).map_err(|(row, source)| {
            let (name, row, column) = (input.to_string(), records[row].number, field.name());
            Error::Output(OutputError::InexactConversion {
                name,
                row,
                column: column.clone(),
                source,
            })
        })
    });
    let mut columns = columns.collect::<Result<Vec<_>>>()?;
    columns
        .extend(R::columns(rows, &own.iter().map(|field| field.data_type()).collect::<Vec<_>>())?);
    let mut writer = StreamWriter::try_new(vec![], schema)?;
    writer.write(&RecordBatch::try_new(schema.clone(), columns)?)?;
    Ok(writer.into_inner()?)
}

/// The columns of the records' fields.
fn field_columns(schema: &SchemaRef, input: &str, records: &[Record]) -> Result<Vec<ArrayRef>> {
    let (mut batches, mut rows): (Vec<&RecordBatch>, _) = (vec![], vec![]);
    for record in records {
        if let Fields::Row { batch, row } = &record.fields {
            if !batches.last().is_some_and(|last| std::ptr::eq(*last, &batch.rows)) {
                batches.push(&batch.rows);
            }
            rows.push((batches.len() - 1, *row));
        }
    }
    if rows.len() == records.len() {
        return Ok(interleave_record_batch(&batches, &rows)?.columns().to_vec());
    }
    if records.iter().all(|record| matches!(record.fields, Fields::Text)) {
        let texts = records.iter().map(Record::text);
        return Ok(vec![Arc::new(StringArray::from_iter_values(texts))]);
    }
    let objects =
        records.iter().map(|record| to_json(input, record)).collect::<Result<Vec<_>>>()?;
    columns::arrays(&objects, schema.fields()).map_err(|(i, mismatch)| {
        let (name, line) = (input.to_string(), records[i].number);
        Error::Output(OutputError::StreamColumn { name, line, mismatch: mismatch.into() })
    })
}

/// The JSON object of a record of the input `name`.
///
/// # Errors
/// [`OutputError::RowAsJson`] if a row of a table cannot be written as JSON.
pub(crate) fn to_json(name: &str, record: &Record) -> Result<Json> {
    let objects = open_objects(name, std::slice::from_ref(record), &mut Default::default())?;
    Ok(Json::parse(&format!("{}}}", objects[0]))?)
}

/// Writes one Parquet or Arrow file from `streams`, the streams of [`encode_batches`]. The files
/// are given with their paths.
///
/// # Errors
/// [`ResumeError::DamagedPartial`] if a stream cannot be read; [`OutputError::WriteTable`].
pub(crate) fn write_file(
    format: TableFormat,
    schema: &SchemaRef,
    (streams_path, streams): (&Path, File),
    (path, out): (&Path, &File),
) -> Result<()> {
    let mut streams = BufReader::with_capacity(1 << 20, streams);
    let mut damage = None;
    let batches = std::iter::from_fn(|| {
        let batches = match streams.fill_buf() {
            Ok([]) => return None,
            Ok(_) => StreamReader::try_new(&mut streams, None)
                .and_then(|stream| stream.collect::<Result<Vec<_>, _>>()),
            Err(error) => Err(error.into()),
        };
        batches.map_err(|error| damage = Some(error)).ok()
    });
    let written = write_batches(format, schema, batches, BufWriter::with_capacity(1 << 20, out));
    match damage {
        Some(source) => {
            Err(ResumeError::DamagedPartial { path: streams_path.to_path_buf(), source }.into())
        }
        None => written.map_err(|source| {
            Error::Output(OutputError::WriteTable { path: path.to_path_buf(), source })
        }),
    }
}

fn write_batches(
    format: TableFormat,
    schema: &SchemaRef,
    batches: impl Iterator<Item = Vec<RecordBatch>>,
    out: impl Write + Send,
) -> Result<(), BoxError> {
    match format {
        TableFormat::Arrow => {
            let mut writer = FileWriter::try_new(out, schema)?;
            for batch in batches.flatten() {
                writer.write(&batch)?;
            }
            writer.into_inner()?.flush()?;
        }
        TableFormat::Parquet => {
            let properties = Some(parquet_properties(schema)?);
            let mut writer = ArrowWriter::try_new(out, schema.clone(), properties)?;
            for batch in batches.flatten() {
                writer.write(&batch)?;
            }
            writer.into_inner()?.flush()?;
        }
    }
    Ok(())
}

fn parquet_properties(schema: &Schema) -> Result<WriterProperties, BoxError> {
    let mut properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(ROW_GROUP))
        .set_compression(Compression::SNAPPY)
        .set_key_value_metadata(Some(key_values(schema)));
    // The bits of rows are almost random, so compression does not shorten them. The minimum and
    // maximum of the values are of no use.
    let columns = ArrowSchemaConverter::new().convert(schema)?;
    let paths = columns.columns().iter().map(|column| column.path());
    for path in paths.filter(|path| row_columns(schema).contains(&&*path.parts()[0])) {
        properties = properties
            .set_column_compression(path.clone(), Compression::UNCOMPRESSED)
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_statistics_enabled(path.clone(), EnabledStatistics::None);
    }
    Ok(properties.build())
}

/// The schema's metadata, for Parquet readers that do not read the Arrow schema.
fn key_values(schema: &Schema) -> Vec<KeyValue> {
    let mut pairs: Vec<_> = schema.metadata().iter().collect();
    pairs.sort(); // the order of a hash map differs from run to run
    pairs.into_iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_as_large_as_permitted() {
        let sizes = [4, 6, 1, 20, 10, 0, 1];
        assert_eq!(batch_sizes(sizes.into_iter(), 10), [2, 1, 1, 2, 1]);
    }
}
