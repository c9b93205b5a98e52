//! Embeds the records of an input and writes the vectors to a file.

use std::{
    hash::Hasher,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use encoder::{Embed, EmbedOptions, LongTexts, Prompt, Row};
use twox_hash::XxHash64;

use crate::{
    Error, InvalidRecord, OutputError, Record, RecordSource, Records, Result, ResumeError,
    StoredRow, VectorDtype, VectorFormat,
    chunks::{Chunk, OwnedOptions, Reader, embed_chunks},
    columns::{AsText, NonFinite},
    output_path::output_path,
    partial::{PartialOutput, temporary_files},
    records::InputPosition,
    vectors::{Layout, LayoutSpec},
};

/// Embeds the records of a source and writes their vectors to a file.
///
/// The vectors are written to a temporary file. The output has its final name only when it is
/// complete. An interrupted run can be resumed ([`Self::with_resume`]).
///
/// # Examples
/// ```
/// use corpus::{EmbedRun, RecordSource, VectorFile};
/// use encoder::{EmbedOptions, Embedder, LoadOptions};
///
/// let model = "../../weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(model, &LoadOptions::default())?;
/// let dir = tempfile::tempdir()?;
/// let (input, output) = (dir.path().join("texts.txt"), dir.path().join("vectors.npy"));
/// std::fs::write(&input, "A man is eating food.\nIt snows.\n")?;
///
/// let run = EmbedRun::new(RecordSource::file(&input), &output)?.with_resume(true);
/// let summary = run.run(&embedder, EmbedOptions::default(), |_event| {})?;
/// assert_eq!((summary.read, summary.written, summary.repeated_texts), (2, 2, 0));
/// let vectors = VectorFile::open(&output)?;
/// assert_eq!(vectors.dimension(), Some(384));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct EmbedRun {
    source: RecordSource,
    output: PathBuf,
    format: Option<VectorFormat>,
    dtype: Option<VectorDtype>,
    on_invalid: OnInvalid,
    resume: bool,
    model: Option<String>,
    stop: Arc<AtomicBool>,
}

encoder::choices! {
    /// How to handle invalid records: an invalid record is [`Error::InvalidRecord`], or
    /// [`Event::Skipped`].
    pub enum OnInvalid: "treatment of invalid records", default Stop {
        /// Stop at the first invalid record.
        Stop = "stop",
        /// Skip invalid records, and print the error of each.
        Skip = "skip",
    }
}

/// An event of a run in progress.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Values of a field are written to the table as text although they are not strings.
    #[non_exhaustive]
    WrittenAsText {
        /// The field's path, such as `a.b`.
        field: &'a str,
        /// The reason.
        reason: AsText,
    },
    /// The run starts or resumes.
    #[non_exhaustive]
    Started {
        /// The number of records that the interrupted run has read; 0 for a new run.
        read: u64,
        /// The number of records of the input, if the input stores this number.
        total: Option<u64>,
    },
    /// An invalid record was skipped.
    Skipped(&'a InvalidRecord),
    /// The vectors of a chunk of records were computed.
    #[non_exhaustive]
    Progress {
        /// The number of records so far, invalid ones included.
        read: u64,
        /// The number of texts of this run so far whose vectors are those of an equal text before
        /// them.
        repeated: u64,
    },
}

/// The outcome of a complete run.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// The number of records read, including invalid ones and those of the interrupted run.
    pub read: u64,
    /// The number of vectors written, including those of the interrupted run.
    pub written: u64,
    /// The number of texts that this run truncated.
    pub truncated_texts: u64,
    /// The number of texts of this run whose vectors are those of an equal text before them, which
    /// was computed.
    pub repeated_texts: u64,
    /// The number of blank JSONL lines that were skipped.
    pub blank_lines: u64,
    /// The number of NaN and infinite values per column that this run wrote as null.
    pub non_finite: NonFinite,
}

impl EmbedRun {
    /// A run from a source to a file. If the file exists, it is replaced when the run is complete.
    ///
    /// # Errors
    /// The errors of [`output_path`]; [`OutputError::OutputIsInput`] if the source is the output
    /// file; [`OutputError::InputIsTemporary`] if the source is a temporary file of the output.
    pub fn new(source: RecordSource, output: impl Into<PathBuf>) -> Result<Self> {
        let output = output_path(&output.into())?;
        let is_input = |path: &Path| {
            source.path().is_some_and(|input| {
                let paths = [input, path].map(std::fs::canonicalize);
                matches!(paths, [Ok(input), Ok(path)] if input == path)
            })
        };
        if is_input(&output) {
            return Err(OutputError::OutputIsInput { path: output }.into());
        }
        if let Some(path) = temporary_files(&output).into_iter().find(|path| is_input(path)) {
            return Err(OutputError::InputIsTemporary { path, output }.into());
        }
        Ok(Self {
            source,
            output,
            format: None,
            dtype: None,
            on_invalid: OnInvalid::default(),
            resume: false,
            model: None,
            stop: Arc::default(),
        })
    }

    /// Writes this format, whatever the output's extension.
    pub fn with_format(self, format: VectorFormat) -> Self {
        Self { format: Some(format), ..self }
    }

    /// Writes vectors of this dtype. The default is [`StoredColumn::DTYPE`](crate::StoredColumn::DTYPE)
    /// in Parquet and Arrow files, otherwise f32.
    pub fn with_dtype(self, dtype: VectorDtype) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Handles invalid records in this way. The default is [`OnInvalid::Stop`].
    pub fn on_invalid(self, on_invalid: OnInvalid) -> Self {
        Self { on_invalid, ..self }
    }

    /// Whether to continue an interrupted run. The output is byte-identical to that of an
    /// uninterrupted run. If no run was interrupted, a new one starts.
    ///
    /// The interrupted run must have had the same settings and model, and the input must begin with
    /// the records that the interrupted run read. The handling of invalid records may differ: it
    /// applies to the records that are not yet read.
    pub fn with_resume(self, resume: bool) -> Self {
        Self { resume, ..self }
    }

    /// Stores a description of the model in the metadata of Parquet and Arrow files, where
    /// [`VectorFile::model`](crate::VectorFile::model) finds it.
    pub fn with_model(self, description: impl Into<String>) -> Self {
        Self { model: Some(description.into()), ..self }
    }

    /// Ends the run early when another thread sets `stop`: the run saves the vectors so far and
    /// fails with [`encoder::Error::Stopped`]. It can be resumed. The flag is read before each
    /// batch of texts.
    ///
    /// # Examples
    /// ```
    /// use std::sync::{Arc, atomic::AtomicBool};
    ///
    /// use corpus::{EmbedRun, Error, RecordSource};
    /// use encoder::{EmbedOptions, Embedder, LoadOptions};
    ///
    /// let model = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(model, &LoadOptions::default())?;
    /// let dir = tempfile::tempdir()?;
    /// let (input, output) = (dir.path().join("texts.txt"), dir.path().join("vectors.npy"));
    /// std::fs::write(&input, "It snows.\n")?;
    ///
    /// let run = EmbedRun::new(RecordSource::file(&input), &output)?.with_resume(true);
    /// let stopped = run.clone().with_stop(Arc::new(AtomicBool::new(true)));
    /// let error = stopped.run(&embedder, EmbedOptions::default(), |_event| {}).unwrap_err();
    /// assert!(matches!(error, Error::Encoder(encoder::Error::Stopped)));
    /// assert_eq!(run.run(&embedder, EmbedOptions::default(), |_event| {})?.written, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_stop(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop, ..self }
    }

    /// Embeds all records. `on_event` is called on the calling thread.
    ///
    /// If the run fails, the vectors so far are kept, and the run can be resumed.
    ///
    /// # Errors
    /// - those of [`RecordSource::open`]
    /// - [`OutputError::OutputExtension`] if neither the output's extension nor
    ///   [`Self::with_format`] names a format; [`OutputError::JsonlDtype`] for JSONL in f16;
    ///   [`OutputError::RowsWithoutArray`] for `.npy` if the rows of the model differ in length
    /// - [`OutputError::EmbeddingColumn`], [`OutputError::EmbeddingField`] if the records already
    ///   have a field with the name of a column of [`StoredRow::COLUMNS`]
    /// - [`OutputError::ColumnConflict`], [`OutputError::StreamColumn`],
    ///   [`OutputError::UnwritableColumn`], [`OutputError::InexactConversion`],
    ///   [`OutputError::RowAsJson`] if the format does not represent the records' fields
    /// - [`ResumeError::DamagedRunState`], [`ResumeError::RunStateVersion`],
    ///   [`ResumeError::OtherRun`], [`ResumeError::PartialTooShort`],
    ///   [`ResumeError::DamagedPartial`], [`ResumeError::InputShorter`],
    ///   [`ResumeError::InputChanged`], [`ResumeError::InputGrew`] if the interrupted run cannot be
    ///   resumed
    /// - [`Error::InvalidRecord`] for a record that is not skipped, or a long text that is refused
    /// - [`OutputError::VectorOverflow`] for a vector with a value that is not finite in the dtype
    /// - [`Error::Encoder`] if embedding fails
    /// - [`OutputError::Locked`], [`OutputError::Write`], [`OutputError::WriteTable`],
    ///   [`OutputError::Remove`] if the output cannot be written
    pub fn run<E: Embed<Row: StoredRow>>(
        &self,
        embedder: &E,
        options: EmbedOptions,
        mut on_event: impl FnMut(Event),
    ) -> Result<Summary> {
        let mut records = self.source.open()?;
        let layout = self.layout(embedder, &mut records, &mut on_event)?;
        let settings = self.settings(embedder, options, &layout)?;
        let name = self.source.name();
        let mut output =
            PartialOutput::open(&self.output, layout, name.clone(), settings, self.resume)?;
        let position = output.position();
        skip_to(&mut records, position, embedder.texts_per_chunk())?;
        let reader = Reader {
            name,
            records,
            position,
            skip: self.on_invalid == OnInvalid::Skip,
            is_stream: false,
            embedder: embedder.clone(),
            options: OwnedOptions::new(options),
        };
        let write = |chunk: Chunk, rows: Vec<E::Row>| {
            output.push(&chunk.records, &rows, chunk.position)?;
            output.save_periodically()
        };
        let mut summary = match embed_all(reader, &self.stop, write, on_event) {
            Ok(summary) => summary,
            Err(error) => {
                let _ = output.save(); // `error` matters more; an earlier state is still valid
                return Err(error);
            }
        };
        summary.written = output.written();
        summary.non_finite = output.non_finite().clone();
        output.finish()?;
        Ok(summary)
    }

    /// The format of the output: that of [`Self::with_format`], or that of the path's extension.
    pub fn format(&self) -> Option<VectorFormat> {
        self.format.or_else(|| VectorFormat::from_path(&self.output))
    }

    fn layout<E: Embed<Row: StoredRow>>(
        &self,
        embedder: &E,
        records: &mut Records,
        on_event: &mut impl FnMut(Event),
    ) -> Result<Layout> {
        let spec = LayoutSpec {
            format: self.format().ok_or_else(|| {
                Error::Output(OutputError::OutputExtension { path: self.output.clone() })
            })?,
            dtype: self.dtype,
            dimensions: embedder.dimensions(),
            model: self.model.as_deref(),
            skip_invalid: self.on_invalid == OnInvalid::Skip,
        };
        let (layout, as_text) = Layout::new::<E::Row>(&spec, &self.source, records)?;
        for (field, reason) in as_text {
            on_event(Event::WrittenAsText { field: &field, reason });
        }
        Ok(layout)
    }

    /// Everything that determines the output's bytes, apart from the records and the handling of
    /// invalid ones.
    fn settings(
        &self,
        embedder: &impl Embed,
        options: EmbedOptions,
        layout: &Layout,
    ) -> Result<String> {
        // The row of a fixed text changes with the weights, the pooling and the precision.
        let mut test_options = options;
        test_options.long_texts = LongTexts::Truncate;
        let test_text = embedder.tokenize(&["A man is eating food."], test_options)?;
        let test_rows = embedder.embed_rows(&test_text, |batch| batch())?;
        let mut hasher = XxHash64::default();
        let values = test_rows.iter().flat_map(|row| row.values());
        values.for_each(|value| hasher.write(&value.to_le_bytes()));
        let rows = match embedder.settings() {
            settings if settings.is_empty() => settings,
            settings => format!("; {settings}"),
        };
        Ok(format!(
            "input {}; model {}; weights, pooling and precision with the test hash {:016x}; {}; long texts \
             {}; at most {} tokens; {} values of {}{rows}; output {}",
            self.source.settings()?,
            self.model.as_deref().unwrap_or("without a name"),
            hasher.finish(),
            describe(options.prompt),
            options.long_texts,
            embedder.tokenizer().max_seq_length(),
            embedder.dimension(),
            layout.dtype(),
            layout.settings()
        ))
    }
}

/// Embeds all records of a source, and passes them with their rows to `write`, one chunk after
/// another. `write` runs on a thread of its own; `on_event` is called on the calling thread.
///
/// If a record is invalid or a long text is refused, the records before it are written first.
///
/// # Errors
/// - those of [`RecordSource::open`] and `write`
/// - [`Error::InvalidRecord`] for a record that is not skipped, or a long text that is refused
/// - [`Error::Encoder`] if embedding fails
///
/// # Examples
/// ```
/// use corpus::{OnInvalid, Record, RecordSource, embed_records};
/// use encoder::{EmbedOptions, Embedder, LoadOptions};
///
/// let model = "../../weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(model, &LoadOptions::default())?;
/// let source = RecordSource::texts(["It snows.".to_string(), "A man eats.".to_string()]);
/// let (stop, options) = (OnInvalid::Stop, EmbedOptions::default());
/// let mut lengths = vec![];
/// let write = |records: Vec<Record>, rows: Vec<Vec<f32>>| {
///     lengths.extend(records.iter().zip(rows).map(|(record, row)| (record.number(), row.len())));
///     Ok::<(), corpus::Error>(())
/// };
/// let summary = embed_records(&source, stop, &embedder, options, write, |_event| {})?;
/// assert_eq!((summary.written, lengths), (2, vec![(1, 384), (2, 384)]));
/// # Ok::<(), corpus::Error>(())
/// ```
pub fn embed_records<E: Embed, X: From<Error> + Send>(
    source: &RecordSource,
    on_invalid: OnInvalid,
    embedder: &E,
    options: EmbedOptions,
    mut write: impl FnMut(Vec<Record>, Vec<E::Row>) -> Result<(), X> + Send,
    on_event: impl FnMut(Event),
) -> Result<Summary, X> {
    let reader = Reader {
        name: source.name(),
        records: source.open()?,
        position: InputPosition::default(),
        skip: on_invalid == OnInvalid::Skip,
        is_stream: true,
        embedder: embedder.clone(),
        options: OwnedOptions::new(options),
    };
    let never = AtomicBool::new(false);
    embed_all(reader, &never, |chunk, rows| write(chunk.records, rows), on_event)
}

/// Reads, embeds and writes all chunks, with events and a summary.
fn embed_all<E: Embed, X: From<Error> + Send>(
    reader: Reader<E>,
    stop: &AtomicBool,
    write: impl FnMut(Chunk, Vec<E::Row>) -> Result<(), X> + Send,
    mut on_event: impl FnMut(Event),
) -> Result<Summary, X> {
    let mut summary = Summary { read: reader.position.read, ..Summary::default() };
    let blank_lines = reader.records.blank_line_counter();
    on_event(Event::Started { read: summary.read, total: reader.records.total() });
    embed_chunks(reader, stop, write, |skipped, chunk, repeated| {
        skipped.iter().for_each(|record| on_event(Event::Skipped(record)));
        if let Some(chunk) = chunk {
            let read = chunk.position.read;
            summary.truncated_texts += chunk.tokenized.truncated().len() as u64;
            summary.read = read;
            summary.written += chunk.records.len() as u64;
            summary.repeated_texts = repeated;
            on_event(Event::Progress { read, repeated });
        }
    })?;
    summary.blank_lines = blank_lines.load(Ordering::Relaxed);
    Ok(summary)
}

/// The prompt as the run state stores it.
fn describe(prompt: Prompt) -> String {
    match prompt {
        Prompt::Default => "the default prompt".to_string(),
        Prompt::None => "no prompt".to_string(),
        Prompt::Query => "the prompt of queries".to_string(),
        Prompt::Document => "the prompt of documents".to_string(),
        Prompt::Named(name) => format!("the prompt with the name {name:?}"),
        Prompt::Text(text) => format!("the prompt {text:?}"),
    }
}

/// Skips the records that the interrupted run read, in chunks of `chunk` records.
///
/// # Errors
/// - [`Error::InvalidRecord`] if the input cannot be read
/// - [`ResumeError::InputShorter`] or [`ResumeError::InputChanged`] if the input does not start
///   with the records
/// - [`ResumeError::InputGrew`] if the last chunk of the interrupted run was incomplete and the
///   input has more records now. The chunks, and so a table's bytes, would differ from those of a
///   new run.
fn skip_to(records: &mut Records, position: InputPosition, chunk: usize) -> Result<()> {
    records.skip_to(position)?;
    if position.read.is_multiple_of(chunk as u64) {
        return Ok(());
    }
    match records.next() {
        Some(Err(invalid)) if invalid.is_fatal() => Err(invalid.into()),
        Some(_) => Err(ResumeError::InputGrew { records: position.read }.into()),
        None => Ok(()),
    }
}
