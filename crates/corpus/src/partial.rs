//! The temporary output of a run.
//!
//! `OUTPUT.partial` contains the output so far. For JSONL and `.npy`, this file is renamed to the
//! output when it is complete. For Parquet and Arrow, this file contains Arrow IPC streams
//! ([`Layout::Table`]), from which the output is written.
//!
//! `OUTPUT.partial.json` is the [`RunState`] from which the run can be resumed. The state is
//! written after the vectors that it counts have reached the disk.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Seek, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::{
    Error, OutputError, Result, ResumeError, StoredRow,
    columns::NonFinite,
    records::{InputPosition, Record},
    resume::{RunState, with_suffix},
    vectors::{HEADER_LENGTH, Layout, encode_batches, header, json_lines, write_file},
};

/// The minimum time between two periodic writes of the state. A run that is killed loses the
/// vectors computed since the last write; a run that fails or is ended by its stop flag writes the
/// state before it returns.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// The temporary output of a run.
pub(crate) struct PartialOutput {
    /// The path of the output.
    path: PathBuf,
    /// The path of the temporary file.
    partial: PathBuf,
    layout: Layout,
    /// The input's name, for errors.
    input: String,
    file: BufWriter<File>,
    state: RunState,
    /// The time of the last write of the state.
    saved: Option<Instant>,
    non_finite: NonFinite,
}

impl PartialOutput {
    /// Creates a temporary file or, if `resume` is set, continues the file of an interrupted run.
    ///
    /// # Errors
    /// [`OutputError::Locked`] if another process writes the file; [`OutputError::Write`];
    /// [`ResumeError::PartialTooShort`]; those of [`RunState::read`].
    pub(crate) fn open(
        path: &Path,
        layout: Layout,
        input: String,
        settings: String,
        resume: bool,
    ) -> Result<Self> {
        let partial = with_suffix(path, ".partial");
        let state_path = with_suffix(&partial, ".json");
        let mut file = lock(&partial)?;
        let error = |source| Error::Output(OutputError::Write { path: partial.clone(), source });
        let length = file.metadata().map_err(error)?.len();
        // The file is empty if `lock` has just created it, or if the interrupted run had only
        // skipped records. There is then nothing to resume, and a new run starts. A state beside an
        // empty file may be left over from a run that was killed after it had renamed its temporary
        // file to the output, before it removed the state.
        let interrupted = if resume && length > 0 {
            RunState::read(&state_path, &partial, &settings)?
        } else {
            None
        };
        if interrupted.is_none() {
            remove_if_present(&state_path)
                .map_err(|source| Error::Output(OutputError::Write { path: state_path, source }))?;
        }
        let state = interrupted.unwrap_or_else(|| RunState::new(settings));
        if length < state.bytes {
            return Err(ResumeError::PartialTooShort {
                path: partial,
                expected: state.bytes,
                got: length,
            }
            .into());
        }
        file.set_len(state.bytes).map_err(error)?;
        file.seek(io::SeekFrom::End(0)).map_err(error)?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let path = path.to_path_buf();
        let (saved, non_finite) = (None, NonFinite::new());
        let mut output = Self { path, partial, layout, input, file, state, saved, non_finite };
        if output.state.bytes == 0 && matches!(output.layout, Layout::Npy { .. }) {
            output.append(&[0; HEADER_LENGTH])?; // `finish` writes the header, with the number of rows
        }
        Ok(output)
    }

    /// The position in the input after the records that were appended.
    pub(crate) fn position(&self) -> InputPosition {
        self.state.position
    }

    /// The number of vectors in the temporary file.
    pub(crate) fn written(&self) -> u64 {
        self.state.written
    }

    /// The number of NaN and infinite values per column that this run wrote as null.
    pub(crate) fn non_finite(&self) -> &NonFinite {
        &self.non_finite
    }

    /// Appends records and their rows. `position` is the position in the input after the records.
    /// After an error, the run state does not count these records.
    ///
    /// # Errors
    /// - [`OutputError::VectorOverflow`] for a vector with a value that is not finite in the dtype
    /// - [`OutputError::EmbeddingField`], [`OutputError::RowAsJson`],
    ///   [`OutputError::StreamColumn`], [`OutputError::InexactConversion`] for a record that the
    ///   format does not represent
    /// - [`OutputError::Write`]
    pub(crate) fn push(
        &mut self,
        records: &[Record],
        rows: &[impl StoredRow],
        position: InputPosition,
    ) -> Result<()> {
        let dtype = self.layout.dtype();
        for (record, row) in records.iter().zip(rows) {
            if !row.values().all(|&value| dtype.is_finite(value)) {
                let (name, unit) = (self.input.clone(), record.unit());
                return Err(OutputError::VectorOverflow {
                    name,
                    unit,
                    number: record.number,
                    dtype,
                }
                .into());
            }
        }
        let bytes = match &self.layout {
            Layout::Jsonl => json_lines(&self.input, records, rows, &mut self.non_finite)?,
            Layout::Npy { dtype, .. } => dtype.to_bytes(rows.iter().flat_map(|row| row.values())),
            Layout::Table { schema, .. } => encode_batches(schema, &self.input, records, rows)?,
        };
        self.append(&bytes)?;
        self.state.written += records.len() as u64;
        self.state.position = position;
        Ok(())
    }

    /// Calls [`Self::save`] if [`SAVE_INTERVAL`] has passed since the state was last written.
    ///
    /// # Errors
    /// [`OutputError::Write`].
    pub(crate) fn save_periodically(&mut self) -> Result<()> {
        match self.saved {
            Some(saved) if saved.elapsed() < SAVE_INTERVAL => Ok(()),
            _ => self.save(),
        }
    }

    /// Syncs the temporary file to the disk, then writes the state.
    ///
    /// # Errors
    /// [`OutputError::Write`].
    pub(crate) fn save(&mut self) -> Result<()> {
        let synced = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        synced.map_err(|source| {
            Error::Output(OutputError::Write { path: self.partial.clone(), source })
        })?;
        let state_path = with_suffix(&self.partial, ".json");
        let written = self.state.write(&state_path);
        written.map_err(|source| Error::Output(OutputError::Write { path: state_path, source }))?;
        self.saved = Some(Instant::now());
        Ok(())
    }

    /// Completes the output and renames it to its final name. The run state is removed after the
    /// rename, so that a run whose rename fails can be resumed.
    ///
    /// # Errors
    /// [`OutputError::Write`], [`OutputError::WriteTable`] or [`ResumeError::DamagedPartial`];
    /// [`OutputError::Remove`] if the output is complete but a temporary file cannot be removed.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.save()?;
        if let Layout::Table { .. } = self.layout {
            return self.finish_table();
        }
        if let Layout::Npy { dtype, dimension } = self.layout {
            let header = header(dtype, self.state.written, dimension);
            let start = self.file.seek(io::SeekFrom::Start(0));
            let written = start.and_then(|_| self.file.write_all(&header));
            written.map_err(|source| {
                Error::Output(OutputError::Write { path: self.partial.clone(), source })
            })?;
        }
        let synced = self.file.flush().and_then(|()| self.sync(self.file.get_ref()));
        synced.map_err(|source| {
            Error::Output(OutputError::Write { path: self.partial.clone(), source })
        })?;
        let renamed = fs::rename(&self.partial, &self.path);
        renamed.map_err(|source| {
            Error::Output(OutputError::Write { path: self.path.clone(), source })
        })?;
        remove(&with_suffix(&self.partial, ".json"))
    }

    /// Writes the table from the Arrow IPC streams in the temporary file.
    fn finish_table(&self) -> Result<()> {
        let Layout::Table { format, schema, .. } = &self.layout else { return Ok(()) };
        let table = with_suffix(&self.partial, ".whole");
        let write_error = |path: &Path, source| {
            Error::Output(OutputError::Write { path: path.to_path_buf(), source })
        };
        let streams =
            File::open(&self.partial).map_err(|error| write_error(&self.partial, error))?;
        let file = File::create(&table).map_err(|error| write_error(&table, error))?;
        if let Err(error) = write_file(*format, schema, (&self.partial, streams), (&table, &file)) {
            let _ = fs::remove_file(&table); // frees space: the disk may be full
            return Err(error);
        }
        if let Err(error) = self.sync(&file).and_then(|()| fs::rename(&table, &self.path)) {
            let _ = fs::remove_file(&table);
            return Err(write_error(&self.path, error));
        }
        remove(&with_suffix(&self.partial, ".json"))?;
        remove(&self.partial)
    }

    /// Writes the file to the disk, and gives it the permissions of the file that it replaces.
    fn sync(&self, file: &File) -> io::Result<()> {
        if let Ok(replaced) = fs::metadata(&self.path) {
            file.set_permissions(replaced.permissions())?;
        }
        file.sync_all()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        written.map_err(|source| {
            Error::Output(OutputError::Write { path: self.partial.clone(), source })
        })?;
        self.state.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// The paths of the files that a run creates beside its output.
pub(crate) fn temporary_files(output: &Path) -> [PathBuf; 4] {
    [".partial", ".partial.whole", ".partial.json", ".partial.json.new"]
        .map(|suffix| with_suffix(output, suffix))
}

/// Opens or creates a file and locks it.
///
/// # Errors
/// [`OutputError::Locked`] if another process has locked the file; [`OutputError::Write`].
fn lock(path: &Path) -> Result<File> {
    let error = |source| Error::Output(OutputError::Write { path: path.to_path_buf(), source });
    loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(error)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(OutputError::Locked { path: path.to_path_buf() }.into());
            }
            Err(TryLockError::Error(source)) => return Err(error(source)),
        }
        if is_at(&file, path) {
            return Ok(file);
        } // else another process has renamed or removed the file since `open`: try again
    }
}

/// Whether `path` still names the open file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let id =
        |metadata: io::Result<fs::Metadata>| metadata.map(|file| (file.dev(), file.ino())).ok();
    id(file.metadata()) == id(fs::metadata(path))
}

#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

/// Removes a temporary file of a complete output.
///
/// # Errors
/// [`OutputError::Remove`].
fn remove(path: &Path) -> Result<()> {
    remove_if_present(path)
        .map_err(|source| Error::Output(OutputError::Remove { path: path.to_path_buf(), source }))
}

fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
