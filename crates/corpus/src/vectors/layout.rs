//! The layout of an output: its format, its columns and its dtype.

use std::sync::Arc;

use arrow_schema::{Schema, SchemaRef};
use encoder::TEXTS_PER_CHUNK;

use crate::{
    Error, OutputError, RecordSource, Records, Result, StoredRow, VectorFormat,
    columns::{AsText, JsonSchema, parquet_schema},
    records::Record,
    vectors::{
        dtype::VectorDtype,
        table::{TableFormat, check_columns, schema_with_rows, to_json},
    },
};

/// The layout of a file of vectors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Layout {
    /// One JSON object per record, with its vector.
    Jsonl,
    /// An array `(N, E)`.
    Npy { dtype: VectorDtype, dimension: usize },
    /// A table of the records and their vectors, with the columns of `schema`.
    ///
    /// Until the run is complete, a temporary file holds Arrow IPC streams, at least one per chunk
    /// with valid records. Rows cannot be appended to an interrupted Parquet or Arrow file, because
    /// it has no footer.
    Table { format: TableFormat, schema: SchemaRef, dtype: VectorDtype },
}

/// The properties that determine a layout.
pub(crate) struct LayoutSpec<'a> {
    pub(crate) format: VectorFormat,
    /// `None`: the default of the rows.
    pub(crate) dtype: Option<VectorDtype>,
    /// See [`encoder::Embed::dimensions`].
    pub(crate) dimensions: Vec<usize>,
    /// A description of the model for the table's metadata.
    pub(crate) model: Option<&'a str>,
    /// Whether the run skips invalid records, or stops at the first one.
    pub(crate) skip_invalid: bool,
}

impl Layout {
    /// The layout for the records of a source with rows of the type `R`, and the fields with values
    /// that are written as text although they are not strings.
    ///
    /// # Errors
    /// - [`OutputError::JsonlDtype`] for JSONL in f16
    /// - [`OutputError::RowsWithoutArray`] for `.npy`, if the rows of the model differ in length
    /// - [`OutputError::EmbeddingColumn`] if the input has a column of [`StoredRow::COLUMNS`]
    /// - [`Error::InvalidRecord`] for an invalid record of a file of JSON objects, if the run stops
    ///   at invalid records
    /// - [`OutputError::ColumnConflict`] if the fields of JSON objects do not fit into columns
    /// - [`OutputError::UnwritableColumn`] for columns that the format does not support
    pub(crate) fn new<R: StoredRow>(
        spec: &LayoutSpec,
        source: &RecordSource,
        records: &mut Records,
    ) -> Result<(Self, Vec<(String, AsText)>)> {
        let table_dtype = spec.dtype.unwrap_or(R::DTYPE);
        let dtype = spec.dtype.unwrap_or_default();
        let format = match spec.format {
            VectorFormat::Npy if R::HAS_FIXED_LENGTH => {
                return Ok((Self::Npy { dtype, dimension: spec.dimensions[0] }, vec![]));
            }
            VectorFormat::Npy => return Err(OutputError::RowsWithoutArray.into()),
            VectorFormat::Jsonl if dtype != VectorDtype::F32 => {
                return Err(OutputError::JsonlDtype { got: dtype }.into());
            }
            VectorFormat::Jsonl => {
                if let Some(schema) = &records.schema {
                    check_no_embedding::<R>(source, schema)?;
                }
                return Ok((Self::Jsonl, vec![]));
            }
            VectorFormat::Parquet => TableFormat::Parquet,
            VectorFormat::Arrow => TableFormat::Arrow,
        };
        let (fields, as_text) = input_columns(source, records, spec)?;
        check_no_embedding::<R>(source, &fields)?;
        let fields = match format {
            TableFormat::Parquet => parquet_schema(&fields),
            TableFormat::Arrow => fields.as_ref().clone(),
        };
        let rows = R::COLUMNS.iter().zip(R::data_types(&spec.dimensions, spec.dtype));
        let schema = schema_with_rows(&fields, rows, spec.model);
        check_columns(format, &schema)?;
        Ok((Self::Table { format, schema: Arc::new(schema), dtype: table_dtype }, as_text))
    }

    pub(crate) fn dtype(&self) -> VectorDtype {
        match self {
            Self::Jsonl => VectorDtype::F32,
            Self::Npy { dtype, .. } | Self::Table { dtype, .. } => *dtype,
        }
    }

    /// The properties of the layout that the run state stores.
    pub(crate) fn settings(&self) -> String {
        match self {
            Self::Jsonl => "JSONL".to_string(),
            Self::Npy { .. } => "npy".to_string(),
            Self::Table { format, schema, .. } => {
                let fields = schema.fields().iter();
                let fields = fields.map(|field| format!("{} {}", field.name(), field.data_type()));
                format!("{format:?} with the columns {}", fields.collect::<Vec<_>>().join(", "))
            }
        }
    }
}

fn check_no_embedding<R: StoredRow>(source: &RecordSource, schema: &Schema) -> Result<()> {
    match R::COLUMNS.iter().find(|column| schema.column_with_name(column).is_some()) {
        Some(column) => Err(OutputError::EmbeddingColumn { name: source.name(), column }.into()),
        None => Ok(()),
    }
}

/// The columns of a table of the records, and the fields with values that are written as text
/// although they are not strings. The columns of JSON objects are inferred from all records of a
/// file, or from the first chunk of a stream.
fn input_columns(
    source: &RecordSource,
    records: &mut Records,
    spec: &LayoutSpec,
) -> Result<(SchemaRef, Vec<(String, AsText)>)> {
    match &records.schema {
        Some(schema) => Ok((schema.clone(), vec![])),
        None => {
            let mut inferred = Inferred::new(source.name());
            if source.is_stream() {
                records.peek(TEXTS_PER_CHUNK, |first| {
                    first.iter().flatten().try_for_each(|record| inferred.add(record))
                })?
            } else {
                source.open()?.try_for_each(|record| match record {
                    Ok(record) => inferred.add(&record),
                    Err(_) if spec.skip_invalid => Ok(()),
                    Err(invalid) => Err(invalid.into()),
                })?
            }
            Ok(inferred.columns())
        }
    }
}

/// The columns inferred from the JSON objects added so far.
struct Inferred {
    /// The input's name.
    name: String,
    schema: JsonSchema,
}

impl Inferred {
    fn new(name: String) -> Self {
        Self { name, schema: JsonSchema::new() }
    }

    fn add(&mut self, record: &Record) -> Result<()> {
        let added = self.schema.add(&to_json(&self.name, record)?);
        added.map_err(|mismatch| {
            let (name, line) = (self.name.clone(), record.number);
            Error::Output(OutputError::ColumnConflict { name, line, mismatch: mismatch.into() })
        })
    }

    fn columns(&self) -> (SchemaRef, Vec<(String, AsText)>) {
        (Arc::new(Schema::new(self.schema.fields())), self.schema.written_as_text())
    }
}
