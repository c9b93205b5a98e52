//! The errors of this crate.

use std::{io, path::PathBuf};

use arrow_schema::{ArrowError, DataType};
use encoder::EmbeddingKind;
use parquet::errors::ParquetError;

use crate::{
    columns::ValueMismatch,
    records::{InvalidRecord, Unit, csv_message, list_names},
    vectors::VectorDtype,
};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why records cannot be read, or vectors cannot be written, read or searched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The input cannot be read: its format, its columns, or a record.
    #[error(transparent)]
    Input(#[from] InputError),

    /// The output cannot be written: its path, its format, or a column.
    #[error(transparent)]
    Output(#[from] OutputError),

    /// An interrupted run cannot be resumed: its files are damaged, or the input or the options
    /// have changed.
    #[error(transparent)]
    Resume(#[from] ResumeError),

    /// A file of vectors cannot be searched, or does not belong to the records.
    #[error(transparent)]
    Vectors(#[from] VectorsError),

    /// A record has no text, cannot be read, or has a text that the model refuses.
    #[error(transparent)]
    InvalidRecord(#[from] InvalidRecord),

    /// Embedding or searching failed.
    #[error(transparent)]
    Encoder(#[from] encoder::Error),

    /// Records cannot be converted to or from Arrow arrays.
    #[error(transparent)]
    Conversion(#[from] ArrowError),

    /// A record cannot be parsed or written as JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// The input cannot be read: its format, its columns, or a record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// The extension names a format that is not supported.
    #[error(
        "{name}: .{extension} files are not supported: expected .jsonl, .ndjson, .csv, .tsv, \
         .parquet, .arrow or lines of text"
    )]
    UnsupportedExtension {
        /// The input's name.
        name: String,
        /// The extension in lower case.
        extension: String,
    },

    /// The input is a Parquet or Arrow file that was compressed as a whole. Reading needs random
    /// access to the uncompressed file.
    #[error(
        "{name} is compressed: expected an uncompressed Parquet or Arrow file; decompress it first"
    )]
    CompressedTable {
        /// The input's name.
        name: String,
    },

    /// A text field was named, but the input contains text lines, which have no fields.
    #[error(
        "{name} contains text lines, which have no fields: expected a .jsonl, .ndjson, .csv, .tsv, \
         .parquet or .arrow file"
    )]
    NoFields {
        /// The input's name.
        name: String,
    },

    /// A file or standard input cannot be opened or read.
    #[error("{name} cannot be read: {source}")]
    Read {
        /// The name of the file or of standard input.
        name: String,
        /// The operating system's error.
        source: io::Error,
    },

    /// The header of a CSV file cannot be read.
    #[error("{name}, line 1: {}", csv_message(source))]
    Csv {
        /// The input's name.
        name: String,
        /// The reader's error.
        source: csv::Error,
    },

    /// A file cannot be read as Parquet.
    #[error("{name} cannot be read as Parquet: {source}")]
    Parquet {
        /// The file's name.
        name: String,
        /// The reader's error.
        source: ParquetError,
    },

    /// The input is Parquet from a stream. The metadata of Parquet is at the end of the file.
    #[error(
        "{name} is a stream: expected a regular file, because the metadata of Parquet is at the end \
         of the file"
    )]
    ParquetStream {
        /// The input's name.
        name: String,
    },

    /// A file cannot be read as Arrow IPC.
    #[error("{name} cannot be read as Arrow IPC: {source}")]
    Arrow {
        /// The file's name.
        name: String,
        /// The reader's error.
        source: ArrowError,
    },

    /// A file is Feather V1, the format before Arrow IPC.
    #[error(
        "{name} is a Feather V1 file: expected Arrow IPC, which is Feather V2; convert it with \
         pyarrow: feather.write_feather(feather.read_table(FILE), OUTPUT)"
    )]
    FeatherV1 {
        /// The input's name.
        name: String,
    },

    /// Standard input is not an Arrow IPC stream, or a pipe contains the Arrow IPC file format.
    #[error(
        "{name} cannot be read as an Arrow IPC stream: {source}; to read the Arrow IPC file format, \
         give the file's path as input"
    )]
    ArrowStream {
        /// The input's name.
        name: String,
        /// The reader's error.
        source: ArrowError,
    },

    /// The file does not have the expected column.
    #[error("{name} has no column {expected:?}: {}", list_names("columns", got))]
    NoColumn {
        /// The file's name.
        name: String,
        /// The expected column.
        expected: String,
        /// The names of the file's columns.
        got: Vec<String>,
    },

    /// Two columns have the same name.
    #[error("{name} has two columns {column:?}: expected distinct names")]
    DuplicateColumn {
        /// The input's name.
        name: String,
        /// The columns' name.
        column: String,
    },

    /// The text column contains something other than strings.
    #[error("{name}: expected strings in column {column:?}, got {got}")]
    NotText {
        /// The input's name.
        name: String,
        /// The column that was requested.
        column: String,
        /// The column's type.
        got: DataType,
    },
}

/// The output cannot be written: its path, its format, or a column.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// The input already has a column, such as `embedding`, to which vectors are written.
    #[error(
        "{name} already has a field {column:?}, the name under which vectors are written: rename \
         the field"
    )]
    EmbeddingColumn {
        /// The input's name.
        name: String,
        /// The column.
        column: &'static str,
    },

    /// A JSON object already has a field, such as `embedding`, to which vectors are written.
    #[error(
        "{name}, line {number}: the object already has a field {field:?}, the name under which \
         vectors are written: rename the field"
    )]
    EmbeddingField {
        /// The input's name.
        name: String,
        /// The record's line.
        number: u64,
        /// The field.
        field: &'static str,
    },

    /// A JSON object has a value that cannot be in the same column of a table as an earlier value,
    /// or that is nested too deeply for a table.
    #[error("{name}, line {line}: {mismatch}")]
    ColumnConflict {
        /// The input's name.
        name: String,
        /// The record's line.
        line: u64,
        /// The field, the expected values and the value found.
        mismatch: Box<ValueMismatch>,
    },

    /// A value does not fit into its column, which was inferred from the first records of a stream.
    #[error(
        "{name}, line {line}: {mismatch}; the columns of a stream are inferred from its first \
         records: give a file as input to infer them from all records"
    )]
    StreamColumn {
        /// The input's name.
        name: String,
        /// The record's line.
        line: u64,
        /// The field, the expected values and the value found.
        mismatch: Box<ValueMismatch>,
    },

    /// A table format does not support the type of a column.
    #[error(
        "column {column:?} of {data_type} cannot be written: {source}; remove the column, or write \
         another format"
    )]
    UnwritableColumn {
        /// The column.
        column: String,
        /// Its type.
        data_type: DataType,
        /// The writer's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// A value is not exact in the type in which its column is written to Parquet.
    #[error(
        "{name}, row {row}: column {column:?}: {source}; write Arrow, which keeps the column's type"
    )]
    InexactConversion {
        /// The input's name.
        name: String,
        /// The row, from 1.
        row: u64,
        /// The column.
        column: String,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// A row contains a value that cannot be written as JSON, such as a date after the year 262142.
    #[error("{name}, row {row}: the row cannot be written as JSON: {source}")]
    RowAsJson {
        /// The file's name.
        name: String,
        /// The row, from 1.
        row: u64,
        /// The writer's error.
        source: ArrowError,
    },

    /// A vector contains a value that is not finite in the output's dtype.
    #[error("{name}, {unit} {number}: the vector has a value that is not finite in {dtype}")]
    VectorOverflow {
        /// The input's name.
        name: String,
        /// Whether `number` counts lines, rows or items.
        unit: Unit,
        /// The number of the record's line, row or item, from 1.
        number: u64,
        /// The output's dtype.
        dtype: VectorDtype,
    },

    /// The extension of the output does not name a format.
    #[error(
        "{} has an unknown extension: expected .jsonl, .ndjson, .npy, .parquet or .arrow",
        path.display()
    )]
    OutputExtension {
        /// The output.
        path: PathBuf,
    },

    /// The output is JSONL and its dtype is not f32.
    #[error("JSONL does not support dtype {got}: expected f32")]
    JsonlDtype {
        /// The dtype.
        got: VectorDtype,
    },

    /// The output is the input file.
    #[error("{} is the input: expected another file as output", path.display())]
    OutputIsInput {
        /// The output.
        path: PathBuf,
    },

    /// The input is a temporary file of the output, which the run would overwrite and remove.
    #[error(
        "the input {} is also a temporary file of the output {}: expected another output",
        path.display(),
        output.display()
    )]
    InputIsTemporary {
        /// The input.
        path: PathBuf,
        /// The output.
        output: PathBuf,
    },

    /// The output is not a regular file, or its path has no file name.
    #[error("{} is {got}: expected the name of a file to write", path.display())]
    OutputNotAFile {
        /// The output.
        path: PathBuf,
        /// `a directory`, `not a regular file`, `not a file name` or `standard output`.
        got: &'static str,
    },

    /// The output is a symbolic link whose target does not exist.
    #[error("{} is a link to a missing file: remove the link, or create the file", path.display())]
    DanglingLink {
        /// The output.
        path: PathBuf,
    },

    /// The output's directory does not exist.
    #[error("{} cannot be written: expected its directory to exist", path.display())]
    NoDirectory {
        /// The output.
        path: PathBuf,
    },

    /// Another process writes the same output.
    #[error("{} is being written by another run", path.display())]
    Locked {
        /// The temporary file.
        path: PathBuf,
    },

    /// A file cannot be written.
    #[error("{} cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },

    /// A table cannot be written.
    #[error("{} cannot be written: {source}", path.display())]
    WriteTable {
        /// The file.
        path: PathBuf,
        /// The writer's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The output is complete, but a temporary file cannot be removed.
    #[error("the output is complete, but {} cannot be removed: {source}", path.display())]
    Remove {
        /// The temporary file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },

    /// A `.npy` file was requested for rows that differ in length.
    #[error(
        "a .npy file contains vectors of one length, and the rows of this model differ in length: \
         expected a .jsonl, .ndjson, .parquet or .arrow file"
    )]
    RowsWithoutArray,
}

/// An interrupted run cannot be resumed: its files are damaged, or the input or the options have
/// changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The state of an interrupted run, `OUTPUT.partial.json`, is not valid JSON or lacks a field.
    #[error("{} is damaged: {source}; remove it to start a new run", path.display())]
    DamagedRunState {
        /// The file of the run state.
        path: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },

    /// The temporary file of a table is damaged.
    #[error("{} is damaged: {source}; remove it to start a new run", path.display())]
    DamagedPartial {
        /// The temporary file.
        path: PathBuf,
        /// The reader's error.
        source: ArrowError,
    },

    /// The temporary file of an interrupted run is shorter than the length in its run state.
    #[error(
        "{} is too short: expected at least {expected} bytes (the length in its run state), got \
         {got}; remove it to start a new run",
        path.display()
    )]
    PartialTooShort {
        /// The temporary file.
        path: PathBuf,
        /// The length in bytes according to the run state.
        expected: u64,
        /// The file's length in bytes.
        got: u64,
    },

    /// Another version of this library wrote the state of an interrupted run.
    #[error(
        "{} was written by another version of this program: expected format version {expected}, got {}",
        path.display(),
        got.map_or("none".to_string(), |version| version.to_string())
    )]
    RunStateVersion {
        /// The file of the run state.
        path: PathBuf,
        /// The format version that this library reads.
        expected: u32,
        /// The file's format version, if it has one.
        got: Option<u32>,
    },

    /// The interrupted run had other settings. `expected` and `got` list the settings that differ.
    #[error(
        "{} belongs to a run with other settings: that run has {got}; this run has {expected}; \
         continue with the settings of that run",
        path.display()
    )]
    OtherRun {
        /// The temporary file.
        path: PathBuf,
        /// This run's settings.
        expected: String,
        /// The interrupted run's settings.
        got: String,
    },

    /// The input has fewer records than the interrupted run read.
    #[error(
        "the input has {got} records: expected the {expected} records that the interrupted run read"
    )]
    InputShorter {
        /// The number of records that the interrupted run read.
        expected: u64,
        /// The number of records of the input.
        got: u64,
    },

    /// The first records of the input are not the ones that the interrupted run read.
    #[error(
        "the input has changed since the interrupted run: expected the same first {records} records"
    )]
    InputChanged {
        /// The number of records that the interrupted run read.
        records: u64,
    },

    /// The interrupted run read the input to its end, its last chunk was incomplete, and the input
    /// has more records now.
    #[error(
        "the input has grown since the interrupted run: expected no records after the first {records}"
    )]
    InputGrew {
        /// The number of records that the interrupted run read.
        records: u64,
    },
}

/// A file of vectors cannot be searched, or does not belong to the records.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VectorsError {
    /// The file's extension is not that of a file of vectors that can be searched.
    #[error("{name} cannot be searched: expected a .npy, .parquet or .arrow file")]
    NotVectors {
        /// The file.
        name: String,
    },

    /// The .npy file is not valid or does not contain vectors.
    #[error("{name}: expected {expected}, got {got}")]
    Npy {
        /// The file.
        name: String,
        /// The expected content.
        expected: String,
        /// The content.
        got: String,
    },

    /// The type of the column of vectors is that of no kind of vectors.
    #[error(
        "{name}: expected fixed-size lists of f32 or f16 in column {column:?}, lists of such \
         lists, or lists of structs of an integer \"index\" and a \"value\" in f32 or f16, got {got}"
    )]
    VectorType {
        /// The file.
        name: String,
        /// The column.
        column: &'static str,
        /// The column's type.
        got: DataType,
    },

    /// The file contains vectors of another kind.
    #[error("{name} contains {got} vectors: expected {expected} ones")]
    Kind {
        /// The file.
        name: String,
        /// The kind that the caller expects.
        expected: EmbeddingKind,
        /// The kind of the file's vectors.
        got: EmbeddingKind,
    },

    /// The values of a row are invalid.
    #[error("{name}: {source}")]
    InvalidRow {
        /// The file.
        name: String,
        /// The encoder's error, which names the row.
        source: Box<encoder::Error>,
    },

    /// A sparse vector contains null, or an index that is negative or does not fit into 32 bits.
    #[error(
        "{name}: row {row} of the corpus: expected an index of 0 to {} with a value, got {got}",
        u32::MAX
    )]
    SparseElement {
        /// The file.
        name: String,
        /// The row, from 0.
        row: u64,
        /// The element, or the row if it is null.
        got: String,
    },

    /// The column of vectors contains null.
    #[error(
        "{name}: expected vectors in column {column:?}, got null in one or more of the rows \
         {start} to {}, counted from 0",
        end - 1
    )]
    NullVector {
        /// The file.
        name: String,
        /// The column.
        column: &'static str,
        /// The first row of the batch that contains null, from 0.
        start: u64,
        /// The row after the last row of the batch.
        end: u64,
    },

    /// The file of records does not have one valid record per vector.
    #[error(
        "the number of valid records of {records} is {got}: expected {expected}, the number of \
         vectors in {name}{}",
        first_invalid(invalid.as_deref())
    )]
    RecordCount {
        /// The file of vectors.
        name: String,
        /// The name of the file of records.
        records: String,
        /// The number of vectors.
        expected: u64,
        /// The number of valid records.
        got: u64,
        /// The first invalid record.
        invalid: Option<Box<InvalidRecord>>,
    },

    /// A file of records was given for a file of vectors that contains its records.
    #[error("{name} contains its records: expected no file of records, got {records}")]
    UnusedRecords {
        /// The file of vectors.
        name: String,
        /// The name of the file of records.
        records: String,
    },
}

fn first_invalid(invalid: Option<&InvalidRecord>) -> String {
    invalid.map_or_else(String::new, |invalid| format!("; the first invalid record: {invalid}"))
}
