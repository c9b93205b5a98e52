//! A file of vectors in the making: under another name until it is whole, and continued where an
//! interrupted run left it.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, BufWriter, Seek, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};
use arrow_schema::{DataType, SchemaRef};
use half::f16;
use serde::{Deserialize, Serialize};

use crate::{
    columns::{self, Table},
    records::{Carried, EMBEDDING, Position, Record},
};

/// What comes before the numbers of a .npy file, in bytes.
const NPY_HEADER: usize = 128;

/// How a file of vectors is laid out.
#[derive(Clone, Debug, PartialEq)]
pub enum Layout {
    /// The records with their vectors, an object of JSON a line.
    JsonLines,
    /// An array `(N, E)` of little-endian numbers, as NumPy writes it.
    Npy { half: bool },
    /// The records with their vectors, in these columns. While it is made, it is a stream of Arrow
    /// IPC a window: all that is written last in such files is known only then.
    Table(Table, SchemaRef),
}

impl Layout {
    fn is_half(&self) -> bool {
        match self {
            Self::JsonLines => false,
            Self::Npy { half } => *half,
            Self::Table(_, schema) => {
                let vectors = schema.fields().last().map(|field| field.data_type());
                let Some(DataType::FixedSizeList(number, _)) = vectors else { return false };
                *number.data_type() == DataType::Float16
            }
        }
    }

    /// As another run can be compared with.
    pub fn name(&self) -> String {
        match self {
            Self::JsonLines => "JSON lines".to_string(),
            Self::Npy { .. } => "npy".to_string(),
            Self::Table(table, schema) => {
                let fields = schema.fields().iter();
                let fields = fields.map(|field| format!("{} {}", field.name(), field.data_type()));
                format!("{table:?} of {}", fields.collect::<Vec<_>>().join(", "))
            }
        }
    }
}

/// The version of the notes: 2 since their hashes are XXH64.
const NOTE_VERSION: u32 = 2;

/// The version that a note names, if any.
#[derive(Deserialize)]
struct Version {
    version: Option<u32>,
}

/// What a run has done, beside its file.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Done {
    /// [`NOTE_VERSION`]
    version: u32,
    /// What makes the numbers what they are: another model or prompt could not continue them.
    settings: String,
    /// What was read.
    position: Position,
    /// Vectors written.
    written: u64,
    /// The file's length with them.
    bytes: u64,
}

/// A file that is written.
pub struct Stored {
    path: PathBuf,
    partial: PathBuf,
    layout: Layout,
    /// The input's name in errors.
    input: String,
    dimension: usize,
    file: BufWriter<File>,
    done: Done,
    kept: Option<Instant>,
}

/// What a run that is interrupted loses at most: waiting for the disk costs time.
const KEEP_EVERY: Duration = Duration::from_secs(2);

impl Stored {
    /// A new file, or with `resume` the one that an interrupted run with the same settings left.
    pub fn open(
        path: &Path,
        layout: Layout,
        input: String,
        dimension: usize,
        settings: String,
        resume: bool,
    ) -> Result<Self> {
        let beside = |ending: &str| PathBuf::from(format!("{}{ending}", path.display()));
        let (partial, note) = (beside(".partial"), beside(".partial.json"));
        let mut file = locked(&partial)?;
        let length = file.metadata().map_err(|error| cannot(&partial, &error))?.len();
        let position = Position::default();
        let version = NOTE_VERSION;
        let mut done = Done { version, settings, position, written: 0, bytes: 0 };
        let left = match resume {
            true => fs::read(&note),
            false => fs::remove_file(&note).map(|()| vec![]), // what it is beside is written anew
        };
        let left = match left {
            // A note without a partial file: the run was interrupted after the rename.
            Ok(json) => Some(json).filter(|json| !json.is_empty() && length > 0),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => bail!("{} cannot be read: {error}", note.display()),
        };
        if let Some(json) = left {
            let damaged = |error| anyhow!("{} is damaged: {error}; remove it", note.display());
            let Version { version } = serde_json::from_slice(&json).map_err(damaged)?;
            if version != Some(NOTE_VERSION) {
                bail!(
                    "{} is of another version of bert: expected version {NOTE_VERSION}, got {}; \
                     start anew without --resume",
                    note.display(),
                    version.map_or("none".to_string(), |version| version.to_string())
                );
            }
            let left: Done = serde_json::from_slice(&json).map_err(damaged)?;
            if left.settings != done.settings {
                bail!(
                    "{} is of another run: expected {}, got {}; start anew without --resume",
                    partial.display(),
                    done.settings,
                    left.settings
                );
            }
            done = left;
        }
        let mut cut = || {
            if length < done.bytes {
                return Err(io::Error::other("it is shorter than the run that left it says"));
            }
            file.set_len(done.bytes)?;
            file.seek(io::SeekFrom::End(0))
        };
        cut().map_err(|error| cannot(&partial, &error))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let path = path.to_path_buf();
        let mut stored = Self { path, partial, layout, input, dimension, file, done, kept: None };
        if stored.done.bytes == 0 && matches!(stored.layout, Layout::Npy { .. }) {
            stored.put(&[0; NPY_HEADER])?;
        }
        Ok(stored)
    }

    /// What of the input is in the file.
    pub fn position(&self) -> Position {
        self.done.position
    }

    /// Adds records and their vectors `(N, E)`: all that have a text up to a place in the input.
    /// All are added, or with an error none.
    pub fn push(&mut self, records: &[Record], vectors: &[f32], position: Position) -> Result<()> {
        let half = self.layout.is_half();
        for (record, vector) in records.iter().zip(vectors.chunks(self.dimension)) {
            let written =
                |&x: &f32| if half { f16::from_f32(x).is_finite() } else { x.is_finite() };
            if !vector.iter().all(written) {
                let numbers = if half { "f16" } else { "f32" };
                bail!("record {} has a vector that {numbers} cannot hold", record.number);
            }
        }
        let bytes = match &self.layout {
            Layout::JsonLines => self.json_lines(records, vectors)?,
            Layout::Npy { half: false } => vectors.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Layout::Npy { half: true } => {
                vectors.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()
            }
            Layout::Table(..) if records.is_empty() => vec![],
            Layout::Table(_, schema) => columns::stream(schema, &self.input, records, vectors)?,
        };
        self.put(&bytes)?;
        self.done.written += records.len() as u64;
        self.done.position = position;
        Ok(())
    }

    fn json_lines(&self, records: &[Record], vectors: &[f32]) -> Result<Vec<u8>> {
        let mut lines = vec![];
        for (record, vector) in records.iter().zip(vectors.chunks(self.dimension)) {
            if let Carried::Object { embedded: true, .. } = record.carried {
                bail!(
                    "record {} has a field {EMBEDDING:?}: expected none, as it is added; rename it",
                    record.number
                );
            }
            write!(lines, "{},\"{EMBEDDING}\":", record.object()?)?;
            serde_json::to_writer(&mut lines, vector)?;
            lines.extend(b"}\n");
        }
        Ok(lines)
    }

    /// From time to time notes that what is written can be continued.
    pub fn keep_sometimes(&mut self) -> Result<()> {
        match self.kept {
            Some(kept) if kept.elapsed() < KEEP_EVERY => Ok(()),
            _ => self.keep(),
        }
    }

    /// Notes that what is written can be continued.
    pub fn keep(&mut self) -> Result<()> {
        let note = self.beside(".json");
        let new = self.beside(".json.new");
        let kept = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        let noted = || {
            fs::write(&new, serde_json::to_vec(&self.done)?)?;
            fs::rename(&new, &note)
        };
        kept.and_then(|()| noted()).map_err(|error| cannot(&self.partial, &error))?;
        self.kept = Some(Instant::now());
        Ok(())
    }

    /// Renames the complete file to the output's name. Until then the note stays, so that a run
    /// that fails here can be resumed.
    pub fn finish(mut self) -> Result<()> {
        self.keep()?;
        match self.layout.clone() {
            Layout::JsonLines => {}
            Layout::Npy { half } => {
                let header = npy_header(half, self.done.written, self.dimension);
                let start = self.file.seek(io::SeekFrom::Start(0));
                let written = start.and_then(|_| self.file.write_all(&header));
                written.map_err(|error| cannot(&self.partial, &error))?;
            }
            Layout::Table(table, schema) => {
                let whole = self.beside(".whole");
                let streams = File::open(&self.partial);
                let streams = streams.map_err(|error| cannot(&self.partial, &error))?;
                let file = File::create(&whole).map_err(|error| cannot(&whole, &error))?;
                if let Err(error) = columns::write(table, &schema, streams, &file) {
                    let _ = fs::remove_file(&whole); // which the disk may have no room for
                    bail!("{} cannot be written: {error}", whole.display());
                }
                let renamed = file.sync_all().and_then(|()| fs::rename(&whole, &self.path));
                renamed.map_err(|error| cannot(&self.path, &error))?;
                remove(&self.beside(".json"))?;
                return remove(&self.partial);
            }
        }
        let mut finish = || {
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            fs::rename(&self.partial, &self.path)
        };
        finish().map_err(|error| cannot(&self.path, &error))?;
        remove(&self.beside(".json"))
    }

    fn beside(&self, ending: &str) -> PathBuf {
        PathBuf::from(format!("{}{ending}", self.partial.display()))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| cannot(&self.partial, &error))?;
        self.done.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// The file that a rename to `path` shall replace or make, found before anything is computed for it:
/// `path`, or what it links to.
///
/// # Errors
/// A path that is not a regular file, that links to nothing, or whose folder does not exist.
pub fn output_path(path: &Path) -> Result<PathBuf> {
    let name = path.display();
    if let Ok(found) = fs::metadata(path) {
        if !found.is_file() {
            let what = if found.is_dir() { "a directory" } else { "not a regular file" };
            bail!("{name} is {what}: expected the name of a file to write");
        }
        let resolved = if path.is_symlink() { fs::canonicalize(path) } else { Ok(path.into()) };
        return resolved.map_err(|error| cannot(path, &error));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if path.is_symlink() {
        bail!("{name} is a link to nothing: expected a file, or no file yet");
    }
    if path.file_name().is_none() {
        bail!("{name} names no file: expected the name of a file to write");
    }
    if folder.is_some_and(|folder| !folder.is_dir()) {
        bail!("{name} cannot be written: expected its folder to exist");
    }
    Ok(path.to_path_buf())
}

/// The file of that name, which no other run has then.
fn locked(path: &Path) -> Result<File> {
    loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| cannot(path, &error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("{} is being written by another run", path.display())
            }
            Err(TryLockError::Error(error)) => return Err(cannot(path, &error)),
        }
        if is_at(&file, path) {
            return Ok(file);
        } // else another run has just given it the output's name
    }
}

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

/// Removes a file that may be gone already.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(anyhow!("the output is complete; {} cannot be removed: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

fn cannot(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("{} cannot be written: {error}", path.display())
}

/// NumPy's format 1.0, filled up so that it does not change its length with the number of rows.
fn npy_header(half: bool, rows: u64, columns: usize) -> Vec<u8> {
    let bytes = if half { 2 } else { 4 };
    let dict =
        format!("{{'descr': '<f{bytes}', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(((NPY_HEADER - 10) as u16).to_le_bytes());
    header.extend(dict.as_bytes());
    header.resize(NPY_HEADER - 1, b' ');
    header.push(b'\n');
    header
}
