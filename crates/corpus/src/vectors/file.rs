//! Memory-mapped files of vectors: .npy, Parquet and Arrow IPC.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    fs::File,
    io::Cursor,
    path::Path,
};

use arrow_array::RecordBatch;
use arrow_ipc::reader::FileReader;
use arrow_schema::{ArrowError, DataType, SchemaRef};
use bytes::Bytes;
use encoder::EmbeddingKind;
use parquet::arrow::{
    ProjectionMask,
    arrow_reader::{
        ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder, RowSelection,
    },
};

use crate::{
    EMBEDDING, Error, InputError, OutputError, RecordSource, Result, VectorFormat, VectorsError,
    catch_panic::{catch_panic, catch_panics},
    columns::{NonFinite, rows_to_json},
    format::refuse_feather_v1,
    records::Record,
    vectors::{
        jsonl::{first_row_that_fails, open_objects},
        npy::{self, NpyArray},
        table::{MODEL_KEY, row_columns},
    },
};

/// A file of vectors that can be searched: dense ones, `(N, E)`, sparse ones, or lists of vectors.
///
/// # Examples
/// ```
/// use corpus::VectorFile;
/// use encoder::Search;
///
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("vectors.npy");
/// let mut npy = b"\x93NUMPY\x01\0\x3e\0".to_vec();
/// npy.extend(format!("{:61}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2)}").bytes());
/// npy.extend([1f32, 0., 3., 4.].iter().flat_map(|x| x.to_le_bytes()));
/// std::fs::write(&path, npy)?;
///
/// let vectors = VectorFile::open(&path)?;
/// assert_eq!((vectors.rows()?, vectors.dimension()), (2, Some(2)));
/// let hits = vectors.scan(&Search::new(&[vec![0., 2.]], 1)?)?.into_hits();
/// assert_eq!(hits[0][0].row, 1);
/// assert!((hits[0][0].score - 0.8).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct VectorFile {
    pub(crate) name: String,
    pub(crate) bytes: Bytes,
    pub(crate) content: Content,
    /// The column of the vectors.
    pub(crate) column: &'static str,
    pub(crate) row_type: RowType,
    /// All columns of vectors.
    columns: Vec<(&'static str, RowType)>,
}

/// The content of a file of vectors.
#[derive(Clone)]
pub(crate) enum Content {
    Npy(NpyArray),
    Parquet(ArrowReaderMetadata),
    Arrow(SchemaRef),
}

/// The type of the rows of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RowType {
    /// Vectors of this length.
    Dense { dimension: usize },
    /// Lists of indices with values.
    Sparse,
    /// Lists of vectors of this length.
    Multi { dimension: usize },
}

impl RowType {
    fn kind(self) -> EmbeddingKind {
        match self {
            Self::Dense { .. } => EmbeddingKind::Dense,
            Self::Sparse => EmbeddingKind::Sparse,
            Self::Multi { .. } => EmbeddingKind::Multi,
        }
    }
}

/// The records of the requested rows of a [`VectorFile`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct RowRecords {
    /// The record of each requested row as a JSON object, by row number from 0. Empty for a .npy
    /// file if no source of records was given.
    pub json: BTreeMap<u64, String>,
    /// The number of NaN and infinite values per column that were written as null.
    pub non_finite: NonFinite,
}

/// Prints the name and the type of the rows, not the rows.
impl fmt::Debug for VectorFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, row_type, .. } = self;
        f.debug_struct("VectorFile")
            .field("name", name)
            .field("row_type", row_type)
            .finish_non_exhaustive()
    }
}

impl VectorFile {
    /// Memory-maps a `.npy`, `.parquet`, `.arrow`, `.feather` or `.ipc` file. Of a file with vectors
    /// of all kinds, the vectors are the dense ones; see [`Self::of_kind`].
    ///
    /// # Errors
    /// - [`InputError::Read`] if the file cannot be opened
    /// - [`VectorsError::NotVectors`] for another extension
    /// - [`VectorsError::Npy`], [`InputError::Parquet`], [`InputError::Arrow`],
    ///   [`InputError::FeatherV1`] if the content is not in the extension's format
    /// - [`InputError::NoColumn`], [`VectorsError::VectorType`] if the file has no column
    ///   `embedding`, or the column does not contain vectors
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let bytes = map(path)
            .map_err(|source| Error::Input(InputError::Read { name: name.clone(), source }))?;
        let (content, columns) = match VectorFormat::from_path(path) {
            Some(VectorFormat::Npy) => {
                let array = npy::parse(&name, &bytes)?;
                let dimension = array.dimension;
                (Content::Npy(array), vec![(EMBEDDING, RowType::Dense { dimension })])
            }
            Some(VectorFormat::Parquet) => {
                let load = || ArrowReaderMetadata::load(&bytes, ArrowReaderOptions::new());
                let metadata = catch_panic(load);
                let metadata = metadata.map_err(|source| {
                    Error::Input(InputError::Parquet { name: name.clone(), source })
                })?;
                let columns = row_types(&name, metadata.schema())?;
                (Content::Parquet(metadata), columns)
            }
            Some(VectorFormat::Arrow) => {
                refuse_feather_v1(&bytes, &name)?;
                let open = || FileReader::try_new(Cursor::new(bytes.clone()), None);
                let reader = catch_panic(open).map_err(|source| {
                    Error::Input(InputError::Arrow { name: name.clone(), source })
                })?;
                (Content::Arrow(reader.schema()), row_types(&name, &reader.schema())?)
            }
            Some(VectorFormat::Jsonl) | None => {
                return Err(VectorsError::NotVectors { name }.into());
            }
        };
        let (column, row_type) = columns[0];
        Ok(Self { name, bytes, content, column, row_type, columns })
    }

    /// The same file with its vectors of a kind, if it has vectors of all kinds.
    ///
    /// # Errors
    /// [`VectorsError::Kind`] if the file has no vectors of this kind.
    pub fn of_kind(&self, kind: EmbeddingKind) -> Result<Self> {
        let own = self.columns.iter().find(|(_, row_type)| row_type.kind() == kind);
        let &(column, row_type) = own.ok_or_else(|| self.other_kind(kind))?;
        Ok(Self { column, row_type, ..self.clone() })
    }

    /// The kinds of the vectors in the file.
    pub fn kinds(&self) -> impl Iterator<Item = EmbeddingKind> {
        self.columns.iter().map(|(_, row_type)| row_type.kind())
    }

    /// The path, as errors name the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kind of the vectors, which is that of the models that compute such vectors.
    pub fn kind(&self) -> EmbeddingKind {
        self.row_type.kind()
    }

    /// E, the length of each vector; `None` for sparse vectors, whose dimension files do not store.
    pub fn dimension(&self) -> Option<usize> {
        match self.row_type {
            RowType::Dense { dimension } | RowType::Multi { dimension } => Some(dimension),
            RowType::Sparse => None,
        }
    }

    /// The number of vectors.
    ///
    /// # Errors
    /// [`InputError::Arrow`] if an Arrow file is damaged.
    pub fn rows(&self) -> Result<u64> {
        match &self.content {
            Content::Npy(array) => Ok(array.rows),
            Content::Parquet(metadata) => Ok(metadata.metadata().file_metadata().num_rows() as u64),
            Content::Arrow(schema) => {
                let batches = self.arrow(schema, |_| false)?;
                batches.map(|batch| Ok(batch?.num_rows() as u64)).sum()
            }
        }
    }

    /// The description of the model that computed the vectors, as it was given to
    /// [`EmbedRun::with_model`](crate::EmbedRun::with_model). A .npy file does not store the
    /// description.
    pub fn model(&self) -> Option<&str> {
        self.schema()?.metadata().get(MODEL_KEY).map(String::as_str)
    }

    /// The names of the records' fields; `None` for a .npy file, which does not contain records.
    pub fn fields(&self) -> Option<Vec<&str>> {
        let names = self.schema()?.fields().iter().map(|field| field.name().as_str());
        Some(names.filter(|name| self.is_field(name)).collect())
    }

    /// Whether a column is a field of the records, and not a column of vectors.
    fn is_field(&self, name: &str) -> bool {
        self.columns.iter().all(|(column, _)| *column != name)
    }

    fn schema(&self) -> Option<&SchemaRef> {
        match &self.content {
            Content::Npy(_) => None,
            Content::Parquet(metadata) => Some(metadata.schema()),
            Content::Arrow(schema) => Some(schema),
        }
    }

    /// The records of `rows`, numbered from 0. Rows beyond the end have no records. Parquet and
    /// Arrow files contain the records; those of a .npy file are read from `source`, the input of
    /// the run that wrote the file.
    ///
    /// # Errors
    /// - those of [`RecordSource::open`]
    /// - [`VectorsError::UnusedRecords`] if there is a source and the file contains the records
    /// - [`Error::InvalidRecord`] if the source cannot be read to its end
    /// - [`VectorsError::RecordCount`] if the source does not have one valid record per vector
    /// - [`InputError::Parquet`] or [`InputError::Arrow`] if the file is damaged
    /// - [`OutputError::RowAsJson`] if a row cannot be written as JSON
    pub fn records(
        &self,
        rows: &BTreeSet<u64>,
        source: Option<&RecordSource>,
    ) -> Result<RowRecords> {
        match (&self.content, source) {
            (Content::Npy(array), Some(source)) => self.source_records(rows, source, array.rows),
            (Content::Npy(_), None) => Ok(RowRecords::default()),
            (_, Some(source)) => {
                let (name, records) = (self.name.clone(), source.name());
                Err(VectorsError::UnusedRecords { name, records }.into())
            }
            (Content::Parquet(metadata), None) => self.parquet_records(rows, metadata),
            (Content::Arrow(schema), None) => self.arrow_records(rows, schema),
        }
    }

    /// The records of `rows` from `source`, which must have `expected` valid records.
    fn source_records(
        &self,
        rows: &BTreeSet<u64>,
        source: &RecordSource,
        expected: u64,
    ) -> Result<RowRecords> {
        let (mut found, mut got, mut invalid) = (RowRecords::default(), 0, None);
        for record in source.open()? {
            let record = match record {
                Ok(record) => record,
                Err(error) if error.is_fatal() => return Err(error.into()),
                Err(error) => {
                    invalid.get_or_insert(Box::new(error)); // an invalid record has no vector
                    continue;
                }
            };
            if rows.contains(&got) {
                let object = json_object(&source.name(), &record, &mut found.non_finite)?;
                found.json.insert(got, object);
            }
            got += 1;
        }
        if got != expected {
            let (name, records) = (self.name.clone(), source.name());
            return Err(VectorsError::RecordCount { name, records, expected, got, invalid }.into());
        }
        Ok(found)
    }

    fn parquet_records(
        &self,
        rows: &BTreeSet<u64>,
        metadata: &ArrowReaderMetadata,
    ) -> Result<RowRecords> {
        let total = metadata.metadata().file_metadata().num_rows() as usize;
        let existing = rows.range(..total as u64);
        let ranges = existing.map(|&row| row as usize..row as usize + 1);
        let selection = RowSelection::from_consecutive_ranges(ranges, total);
        let reader = self.parquet(metadata, |name| self.is_field(name));
        let reader = catch_panic(|| reader.with_row_selection(selection).build());
        let reader = reader.map_err(|source| {
            Error::Input(InputError::Parquet { name: self.name.clone(), source })
        })?;
        let (mut found, mut rows) = (RowRecords::default(), rows.iter().copied());
        let error = |source| Error::Input(InputError::Parquet { name: self.name.clone(), source });
        for batch in catch_panics(reader) {
            let batch = batch.map_err(|source| error(source.into()))?;
            let numbers: Vec<u64> = rows.by_ref().take(batch.num_rows()).collect();
            let lines = rows_to_json(&batch, &mut found.non_finite);
            let lines = lines.map_err(|source| {
                let row = numbers[first_row_that_fails(&batch)] + 1;
                Error::Output(OutputError::RowAsJson { name: self.name.clone(), row, source })
            })?;
            found.json.extend(numbers.into_iter().zip(lines));
        }
        Ok(found)
    }

    fn arrow_records(&self, rows: &BTreeSet<u64>, schema: &SchemaRef) -> Result<RowRecords> {
        let (mut found, mut first) = (RowRecords::default(), 0);
        for batch in self.arrow(schema, |name| self.is_field(name))? {
            let batch = batch?;
            let end = first + batch.num_rows() as u64;
            for &row in rows.range(first..end) {
                let line =
                    rows_to_json(&batch.slice((row - first) as usize, 1), &mut found.non_finite);
                let name = self.name.clone();
                let line = line.map_err(|source| {
                    Error::Output(OutputError::RowAsJson { name, row: row + 1, source })
                })?;
                found.json.extend(line.into_iter().map(|line| (row, line)));
            }
            first = end;
            if rows.range(end..).next().is_none() {
                break;
            }
        }
        Ok(found)
    }

    /// A reader of the columns whose names `columns` accepts.
    pub(crate) fn parquet(
        &self,
        metadata: &ArrowReaderMetadata,
        columns: impl Fn(&str) -> bool,
    ) -> ParquetRecordBatchReaderBuilder<Bytes> {
        let (file, metadata) = (self.bytes.clone(), metadata.clone());
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata);
        let fields = builder.parquet_schema().root_schema().get_fields().iter().enumerate();
        let fields = fields.filter(|(_, field)| columns(field.name())).map(|(i, _)| i);
        let mask = ProjectionMask::roots(builder.parquet_schema(), fields.collect::<Vec<_>>());
        builder.with_projection(mask)
    }

    /// The batches of an Arrow file, with the columns whose names `columns` accepts.
    ///
    /// # Errors
    /// [`InputError::Arrow`] if the file is damaged.
    pub(crate) fn arrow(
        &self,
        schema: &SchemaRef,
        columns: impl Fn(&str) -> bool,
    ) -> Result<impl Iterator<Item = Result<RecordBatch>>> {
        let fields = schema.fields().iter().enumerate();
        let fields = fields.filter(|(_, field)| columns(field.name())).map(|(i, _)| i).collect();
        let bytes = Cursor::new(self.bytes.clone());
        let reader = catch_panic(|| FileReader::try_new(bytes, Some(fields)));
        let reader = catch_panics(reader.map_err(|error| self.damaged(error))?);
        Ok(reader.map(|batch| batch.map_err(|error| self.damaged(error))))
    }

    /// The error for an Arrow file whose footer could be read and whose content is damaged.
    pub(crate) fn damaged(&self, source: ArrowError) -> Error {
        Error::Input(InputError::Arrow { name: self.name.clone(), source })
    }
}

fn map(path: &Path) -> std::io::Result<Bytes> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(std::io::ErrorKind::IsADirectory.into());
    }
    // SAFETY: the map is only read. If another process truncates the file, an access past its end
    // raises SIGBUS, which ends this process. If another process overwrites values, every bit
    // pattern is a valid number, and lengths and offsets are checked where they are used.
    #[allow(unsafe_code)]
    let map = unsafe { memmap2::Mmap::map(&file)? };
    Ok(Bytes::from_owner(map))
}

/// The columns of vectors with the types of their rows.
///
/// # Errors
/// The errors of [`row_type`].
fn row_types(name: &str, schema: &SchemaRef) -> Result<Vec<(&'static str, RowType)>> {
    let columns = row_columns(schema).iter();
    columns.map(|column| Ok((*column, row_type(name, schema, column)?))).collect()
}

/// The type of the rows in a column of vectors.
///
/// # Errors
/// [`InputError::NoColumn`] if the column is missing; [`VectorsError::VectorType`] if its type is
/// not a fixed-size list of f32 or f16, a list of such lists, or a list of structs of an integer
/// `index` and a `value` in f32 or f16.
fn row_type(name: &str, schema: &SchemaRef, column: &'static str) -> Result<RowType> {
    let Some((_, field)) = schema.column_with_name(column) else {
        let got = schema.fields().iter().map(|field| field.name().clone()).collect();
        return Err(InputError::NoColumn {
            name: name.to_string(),
            expected: column.to_string(),
            got,
        }
        .into());
    };
    let list = match field.data_type() {
        DataType::List(element) | DataType::LargeList(element) => Some(element.data_type()),
        _ => None,
    };
    let row_type = match (vector_length(field.data_type()), list) {
        (Some(dimension), _) => Some(RowType::Dense { dimension }),
        (_, Some(element)) if is_sparse_element(element) => Some(RowType::Sparse),
        (_, Some(element)) => vector_length(element).map(|dimension| RowType::Multi { dimension }),
        _ => None,
    };
    row_type.ok_or_else(|| {
        let got = field.data_type().clone();
        VectorsError::VectorType { name: name.to_string(), column, got }.into()
    })
}

/// The length of the vectors of a column of this type; `None` for another type.
fn vector_length(data_type: &DataType) -> Option<usize> {
    match data_type {
        DataType::FixedSizeList(element, length)
            if *length > 0 && is_number(element.data_type()) =>
        {
            Some(*length as usize)
        }
        _ => None,
    }
}

/// Whether values of vectors can have this type.
fn is_number(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Float32 | DataType::Float16)
}

/// Whether sparse vectors can have elements of this type.
fn is_sparse_element(data_type: &DataType) -> bool {
    let DataType::Struct(fields) = data_type else { return false };
    let has = |name, condition: fn(&DataType) -> bool| {
        fields.find(name).is_some_and(|(_, field)| condition(field.data_type()))
    };
    has("index", DataType::is_integer) && has("value", is_number)
}

/// A record of the input `name` as a JSON object.
fn json_object(name: &str, record: &Record, non_finite: &mut NonFinite) -> Result<String> {
    let objects = open_objects(name, std::slice::from_ref(record), non_finite)?;
    Ok(format!("{}}}", objects[0]))
}
