//! Tables: Parquet and Arrow IPC, read as records and written with the records' vectors.

use std::{
    borrow::Borrow,
    fs::File,
    hash::Hasher,
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write},
    sync::{Arc, OnceLock},
};

use anyhow::{Result, anyhow, bail};
use arrow_array::{
    ArrayRef, FixedSizeListArray, Float16Array, Float32Array, RecordBatch, StringArray,
    cast::AsArray, new_null_array,
};
use arrow_cast::cast;
use arrow_ipc::{
    reader::{FileReader, StreamReader},
    writer::{FileWriter, StreamWriter},
};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use arrow_select::interleave::interleave_record_batch;
use half::f16;
use parquet::{
    arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder},
    basic::Compression,
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties},
    },
    schema::types::ColumnPath,
};
use twox_hash::XxHash64;

use crate::{
    data_types::{children, map_children},
    json_columns::{self, Json, ObjectSchema},
    json_rows, parquet_types,
    records::{Bad, Carried, EMBEDDING, Record, Records, differ},
};

/// Rows of a table that are read together.
const BATCH: usize = 1024;
/// Rows of a Parquet file that are found together.
const ROW_GROUP: usize = 16_384;
/// What Arrow files begin with, and its streams do not.
const ARROW_FILE: &[u8] = b"ARROW1";

/// Metadata keys under which Spark and Avro store the input's schema. Programs that take the schema from
/// there would not see the vectors.
const OLD_SCHEMAS: [&str; 2] = ["org.apache.spark.sql.parquet.row.metadata", "parquet.avro.schema"];

/// Rows of a table that were read together.
pub struct Rows {
    batch: RecordBatch,
    hash: u64,
    lines: OnceLock<std::result::Result<Vec<String>, String>>,
}

impl Rows {
    fn new(batch: RecordBatch) -> std::result::Result<Self, ArrowError> {
        let mut writer = StreamWriter::try_new(Hashing::default(), &batch.schema())?;
        writer.write(&batch)?;
        let hash = writer.get_ref().0.finish();
        Ok(Self { batch, hash, lines: OnceLock::new() })
    }

    /// Of all that the rows hold.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// A row as an object of JSON, without the brace that ends it.
    pub fn object(&self, row: usize) -> Result<&str> {
        let lines =
            self.lines.get_or_init(|| json_rows::lines(&self.batch).map_err(|e| e.to_string()));
        match lines {
            Ok(lines) => Ok(lines[row].strip_suffix('}').unwrap_or_default()),
            Err(error) => bail!("a row cannot be written as JSON: {error}"),
        }
    }
}

#[derive(Default)]
struct Hashing(XxHash64);

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The rows of a Parquet file.
pub fn parquet(file: Option<File>, name: &str, column: &str) -> Result<Records> {
    let Some(file) = file else {
        bail!("Parquet is read from its end: expected a file's name, got {name}");
    };
    let cannot = |error| anyhow!("{name} cannot be read as Parquet: {error}");
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(cannot)?;
    let count = builder.metadata().file_metadata().num_rows();
    // The reader's own schema has no metadata.
    let schema = parquet_types::with_zones(builder.schema(), builder.metadata().file_metadata());
    let reader = builder.with_batch_size(BATCH).build().map_err(cannot)?;
    let mut records = records(schema, reader, name, column)?;
    records.count = u64::try_from(count).ok();
    Ok(records)
}

/// The rows of a file of Arrow IPC, or of a stream of it.
pub fn arrow(file: Option<File>, name: &str, column: &str) -> Result<Records> {
    let cannot = |error| anyhow!("{name} cannot be read as Arrow IPC: {error}");
    let Some(mut file) = file else {
        let reader = StreamReader::try_new(BufReader::new(io::stdin()), None).map_err(|error| {
            anyhow!(
                "{name} cannot be read as a stream of Arrow IPC: {error}; a file is read by name"
            )
        })?;
        return records(reader.schema(), reader, name, column);
    };
    let mut start = vec![];
    let read = (&file).take(ARROW_FILE.len() as u64).read_to_end(&mut start);
    read.and_then(|_| file.rewind()).map_err(|error| cannot(error.into()))?;
    let file = BufReader::with_capacity(1 << 16, file);
    if start == ARROW_FILE {
        let reader = FileReader::try_new(file, None).map_err(cannot)?;
        return records(reader.schema(), reader, name, column);
    }
    let reader = StreamReader::try_new(file, None).map_err(cannot)?;
    records(reader.schema(), reader, name, column)
}

/// A column whose categories have become their values: those of other batches may be other ones.
fn plain(field: &Field) -> Arc<Field> {
    let kind = match field.data_type() {
        DataType::Dictionary(_, value) => value.as_ref().clone(),
        nested => map_children(nested, |_, child| plain(child)),
    };
    Arc::new(field.clone().with_data_type(kind))
}

fn records(
    schema: SchemaRef,
    batches: impl Iterator<Item = std::result::Result<RecordBatch, ArrowError>> + Send + 'static,
    name: &str,
    column: &str,
) -> Result<Records> {
    let fields = || schema.fields().iter();
    let Some(text) = fields().position(|field| field.name() == column) else {
        let names: Vec<&str> = fields().map(|field| field.name().as_str()).collect();
        bail!("{name}: expected a column {column:?}, got {}", names.join(", "));
    };
    differ(name, fields().map(|field| field.name().as_str()))?;
    let plain = Schema::new_with_metadata(
        fields().map(|field| plain(field)).collect::<Vec<_>>(),
        schema.metadata().clone(),
    );
    let (plain, name) = (Arc::new(plain), name.to_string());
    match plain.field(text).data_type() {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {}
        other => bail!("{name}: expected texts in column {column:?}, got {other}"),
    }
    let (of_batch, column) = (plain.clone(), column.to_string());
    let (mut number, mut failed) = (0, false);
    let pieces = batches.flat_map(|batch| -> Vec<_> {
        match batch {
            Ok(batch) => (0..batch.num_rows())
                .step_by(BATCH)
                .map(|start| Ok(batch.slice(start, BATCH.min(batch.num_rows() - start))))
                .collect(),
            Err(error) => vec![Err(error)],
        }
    });
    let windows = pieces.map_while(move |batch| {
        if failed {
            return None;
        }
        let read = batch.and_then(|batch| {
            let values = batch.columns().iter().zip(of_batch.fields());
            let values = values.map(|(values, field)| cast(values, field.data_type()));
            let batch = RecordBatch::try_new(of_batch.clone(), values.collect::<Result<_, _>>()?)?;
            let texts = cast(batch.column(text), &DataType::Utf8)?;
            Ok((texts, Arc::new(Rows::new(batch)?)))
        });
        Some(match read {
            Ok((texts, rows)) => {
                let texts: &StringArray = texts.as_string();
                let read = texts.iter().enumerate().map(|(row, text)| {
                    number += 1;
                    match text {
                        Some(text) => {
                            let carried = Carried::Row(rows.clone(), row);
                            Ok(Record { text: text.to_string(), number, carried })
                        }
                        None => {
                            let what = format!("expected a text in {column:?}, got null");
                            Err(Bad::new(&name, "row", number, what, false))
                        }
                    }
                });
                read.collect::<Vec<_>>()
            }
            Err(error) => {
                failed = true;
                let what = format!("it cannot be read: {error}");
                vec![Err(Bad::new(&name, "row", number + 1, what, true))]
            }
        })
    });
    Ok(Records::new(Some(plain), windows.flatten()))
}

/// The columns of a table of JSON objects, and those whose numbers become text, since no numeric
/// column holds their integers exactly.
///
/// # Errors
/// Values that cannot share a column.
pub fn of_objects(
    name: &str,
    records: impl Iterator<Item = impl Borrow<Record>>,
) -> Result<(SchemaRef, Vec<String>)> {
    let mut schema = ObjectSchema::new();
    for record in records {
        let record = record.borrow();
        let added = schema.add(&parsed(record)?);
        added.map_err(|misfit| anyhow!("{name}, line {}: {misfit}", record.number))?;
    }
    Ok((Arc::new(Schema::new(schema.fields())), schema.numbers_as_text()))
}

/// The JSON object that a record was read from.
fn parsed(record: &Record) -> Result<Json> {
    Ok(Json::parse(&format!("{}}}", record.object()?))?)
}

/// The columns of a table of records with their vectors, and what made these.
pub fn with_vectors(
    carried: &Schema,
    dimension: usize,
    numbers: DataType,
    made_by: String,
) -> Schema {
    let numbers = Arc::new(Field::new("element", numbers, false));
    let vectors = DataType::FixedSizeList(numbers, dimension as i32);
    let mut fields = carried.fields().to_vec();
    fields.push(Arc::new(Field::new(EMBEDDING, vectors, false)));
    let mut metadata = carried.metadata().clone();
    metadata.retain(|key, _| !OLD_SCHEMAS.contains(&key.as_str()));
    metadata.insert("bert".to_string(), made_by);
    Schema::new_with_metadata(fields, metadata)
}

/// The records, and a column of their vectors `(N, E)`: a stream of Arrow IPC of one batch.
pub fn stream(
    schema: &SchemaRef,
    input: &str,
    records: &[Record],
    vectors: &[f32],
) -> Result<Vec<u8>> {
    let (embedding, carried) = schema.fields().split_last().expect("a column of vectors");
    let carried = Arc::new(Schema::new(carried.to_vec()));
    let columns = carried_columns(&carried, input, records)?.into_iter().zip(carried.fields());
    let columns = columns.map(|(column, field)| {
        parquet_types::convert(&column, field.data_type()).map_err(|(row, error)| {
            let (number, name) = (records[row].number, field.name());
            anyhow!("{input}, row {number}: column {name:?}: {error}; .arrow output keeps its type")
        })
    });
    let mut columns = columns.collect::<Result<Vec<_>>>()?;
    let DataType::FixedSizeList(element, dimension) = embedding.data_type() else {
        bail!("column {EMBEDDING:?} is {}: expected vectors", embedding.data_type());
    };
    let values: ArrayRef = match element.data_type() {
        DataType::Float16 => {
            Arc::new(Float16Array::from_iter_values(vectors.iter().map(|&x| f16::from_f32(x))))
        }
        _ => Arc::new(Float32Array::from(vectors.to_vec())),
    };
    let vectors = FixedSizeListArray::try_new(element.clone(), *dimension, values, None)?;
    columns.push(Arc::new(vectors));
    let mut writer = StreamWriter::try_new(vec![], schema)?;
    writer.write(&RecordBatch::try_new(schema.clone(), columns)?)?;
    Ok(writer.into_inner()?)
}

/// What the records came with.
fn carried_columns(schema: &SchemaRef, input: &str, records: &[Record]) -> Result<Vec<ArrayRef>> {
    let (mut batches, mut rows): (Vec<&RecordBatch>, _) = (vec![], vec![]);
    for record in records {
        if let Carried::Row(from, row) = &record.carried {
            if !batches.last().is_some_and(|last| std::ptr::eq(*last, &from.batch)) {
                batches.push(&from.batch);
            }
            rows.push((batches.len() - 1, *row));
        }
    }
    if rows.len() == records.len() {
        return Ok(interleave_record_batch(&batches, &rows)?.columns().to_vec());
    }
    let objects = records.iter().map(parsed).collect::<Result<Vec<_>>>()?;
    json_columns::columns(&objects, schema.fields()).map_err(|(i, misfit)| {
        anyhow!(
            "{input}, line {}: {misfit}; columns of standard input are inferred from its first \
             records: give a file as --input to infer them from all",
            records[i].number
        )
    })
}

/// How a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    Parquet,
    Arrow,
}

/// The schema's metadata for readers of Parquet that do not know Arrow's schema.
fn key_values(schema: &Schema) -> Vec<KeyValue> {
    let mut pairs: Vec<_> = schema.metadata().iter().collect();
    pairs.sort(); // a map's order changes from run to run
    pairs.into_iter().map(|(key, value)| KeyValue::new(key.clone(), value.clone())).collect()
}

/// Refuses columns that a table cannot have, before anything is computed for them.
pub fn check(table: Table, schema: &Schema) -> Result<()> {
    let fields = schema.fields().iter();
    let fields = fields.map(|field| field.as_ref().clone().with_nullable(true));
    for field in fields {
        let cannot = |error: &dyn std::fmt::Display| {
            anyhow!("column {:?} of {} cannot be written: {error}", field.name(), field.data_type())
        };
        if has_union(field.data_type()) {
            return Err(cannot(&"expected one type"));
        }
        let schema = Arc::new(Schema::new(vec![field.clone()]));
        let nothing = new_null_array(field.data_type(), 1);
        let batch = RecordBatch::try_new(schema.clone(), vec![nothing]);
        let stream = || -> Result<Vec<RecordBatch>> {
            let mut writer = StreamWriter::try_new(vec![], &schema)?;
            writer.write(&batch?)?;
            let stream = writer.into_inner()?;
            Ok(StreamReader::try_new(&stream[..], None)?.collect::<Result<_, _>>()?)
        };
        write_batches(table, &schema, std::iter::once(stream()), io::sink())
            .map_err(|error| cannot(&error))?;
    }
    Ok(())
}

fn has_union(kind: &DataType) -> bool {
    matches!(kind, DataType::Union(..))
        || children(kind).iter().any(|child| has_union(child.data_type()))
}

/// Writes what [`stream`] made, one after another, as one file.
pub fn write(table: Table, schema: &SchemaRef, streams: File, out: &File) -> Result<()> {
    let mut streams = BufReader::with_capacity(1 << 20, streams);
    let batches = std::iter::from_fn(|| match streams.fill_buf() {
        Ok([]) => None,
        Ok(_) => Some(
            StreamReader::try_new(&mut streams, None)
                .and_then(|stream| stream.collect::<Result<Vec<_>, _>>())
                .map_err(Into::into),
        ),
        Err(error) => Some(Err(error.into())),
    });
    write_batches(table, schema, batches, BufWriter::with_capacity(1 << 20, out))
}

fn write_batches(
    table: Table,
    schema: &SchemaRef,
    batches: impl Iterator<Item = Result<Vec<RecordBatch>>>,
    out: impl Write + Send,
) -> Result<()> {
    match table {
        Table::Arrow => {
            let mut writer = FileWriter::try_new(out, schema)?;
            for read in batches {
                read?.iter().try_for_each(|batch| writer.write(batch))?;
            }
            writer.into_inner()?.flush()?;
        }
        Table::Parquet => {
            let vectors = [EMBEDDING, "list", "element"].map(String::from).to_vec();
            let vectors = ColumnPath::new(vectors);
            let properties = WriterProperties::builder()
                .set_max_row_group_row_count(Some(ROW_GROUP))
                .set_compression(Compression::SNAPPY)
                // Random bits, as good as: neither shorter when compressed nor in any order.
                .set_column_compression(vectors.clone(), Compression::UNCOMPRESSED)
                .set_column_dictionary_enabled(vectors.clone(), false)
                .set_column_statistics_enabled(vectors, EnabledStatistics::None)
                .set_key_value_metadata(Some(key_values(schema)));
            let mut writer = ArrowWriter::try_new(out, schema.clone(), Some(properties.build()))?;
            for read in batches {
                read?.iter().try_for_each(|batch| writer.write(batch))?;
            }
            writer.into_inner()?.flush()?;
        }
    }
    Ok(())
}
