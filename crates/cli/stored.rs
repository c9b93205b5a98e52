//! A file of vectors in the making: under another name until it is whole, and continued where an
//! interrupted run left it.

use std::{
    fs::{self, File, OpenOptions},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, BufWriter, Seek, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::records::{Read1, Record};

/// What comes before the numbers of a .npy file, in bytes.
const NPY_HEADER: usize = 128;

/// How a file of vectors is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// The records with their vectors, an object of JSON a line.
    JsonLines,
    /// An array `(N, E)` of little-endian f32, as NumPy writes it.
    Npy,
}

/// What a run has done, beside its file.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Done {
    /// What makes the numbers what they are: another model or prompt could not continue them.
    settings: String,
    /// Records read, bad ones among them, and what they were.
    read: u64,
    hash: u64,
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
    dimension: usize,
    file: BufWriter<File>,
    done: Done,
    kept: Option<Instant>,
}

/// What a run that is interrupted loses at most: waiting for the disk costs time.
const KEEP_EVERY: Duration = Duration::from_secs(2);

impl Stored {
    /// A new file, or with `resume` the one that an interrupted run with the same settings left.
    pub fn open(path: &Path, dimension: usize, settings: String, resume: bool) -> Result<Self> {
        let layout = match path.extension().and_then(|ending| ending.to_str()) {
            Some("jsonl" | "ndjson") => Layout::JsonLines,
            Some("npy") => Layout::Npy,
            _ => bail!(
                "{} has no ending that tells what to write: expected .jsonl, .ndjson or .npy",
                path.display()
            ),
        };
        let beside = |ending: &str| PathBuf::from(format!("{}{ending}", path.display()));
        let (partial, note) = (beside(".partial"), beside(".partial.json"));
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&partial).map_err(|error| cannot(&partial, &error))?;
        if file.try_lock().is_err() {
            bail!("{} is being written by another run", partial.display());
        }
        let mut done = Done { settings, read: 0, hash: 0, written: 0, bytes: 0 };
        let left = match resume {
            true => fs::read(&note),
            false => fs::remove_file(&note).map(|()| vec![]), // what it is beside is written anew
        };
        let left = match left {
            Ok(json) => Some(json).filter(|json| !json.is_empty()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => bail!("{} cannot be read: {error}", note.display()),
        };
        if let Some(json) = left {
            let left: Done = serde_json::from_slice(&json)
                .map_err(|error| anyhow!("{} is damaged: {error}; remove it", note.display()))?;
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
            if file.metadata()?.len() < done.bytes {
                return Err(io::Error::other("it is shorter than the run that left it says"));
            }
            file.set_len(done.bytes)?;
            file.seek(io::SeekFrom::End(0))
        };
        cut().map_err(|error| cannot(&partial, &error))?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let mut stored =
            Self { path: path.to_path_buf(), partial, layout, dimension, file, done, kept: None };
        if stored.done.bytes == 0 && layout == Layout::Npy {
            stored.put(&[0; NPY_HEADER])?;
        }
        Ok(stored)
    }

    /// Reads past the records that an earlier run has read, if they are the same.
    pub fn skip(&mut self, records: &mut dyn Iterator<Item = Read1>) -> Result<()> {
        let mut hash = 0;
        for number in 0..self.done.read {
            let Some(record) = records.next() else {
                bail!(
                    "the input has {number} records: expected the {} that the interrupted run read; \
                     start anew without --resume",
                    self.done.read
                );
            };
            hash = hashed(hash, &record);
        }
        match hash == self.done.hash {
            true => Ok(()),
            false => bail!(
                "the input is not what the interrupted run read: expected the same first {} records; \
                 start anew without --resume",
                self.done.read
            ),
        }
    }

    /// Notes a record as read.
    pub fn see(&mut self, record: &Read1) {
        self.done.hash = hashed(self.done.hash, record);
        self.done.read += 1;
    }

    /// Vectors that are in the file.
    pub fn written(&self) -> u64 {
        self.done.written
    }

    /// Adds a record and its vector.
    pub fn push(&mut self, record: &Record, vector: &[f32]) -> Result<()> {
        match self.layout {
            Layout::JsonLines if record.embedded => bail!(
                "a record has a field \"embedding\": expected none, as it is added; rename it"
            ),
            Layout::JsonLines => {
                let vector = serde_json::to_string(vector)?;
                self.put(format!("{},\"embedding\":{vector}}}\n", record.object).as_bytes())?;
            }
            Layout::Npy => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                self.put(&bytes)?;
            }
        }
        self.done.written += 1;
        Ok(())
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
        let note = PathBuf::from(format!("{}.json", self.partial.display()));
        let new = PathBuf::from(format!("{}.new", note.display()));
        let kept = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        let noted = || {
            fs::write(&new, serde_json::to_vec(&self.done)?)?;
            fs::rename(&new, &note)
        };
        kept.and_then(|()| noted()).map_err(|error| cannot(&self.partial, &error))?;
        self.kept = Some(Instant::now());
        Ok(())
    }

    /// Gives the file its name.
    pub fn finish(mut self) -> Result<()> {
        if self.layout == Layout::Npy {
            let header = npy_header(self.done.written, self.dimension);
            let start = self.file.seek(io::SeekFrom::Start(0));
            start
                .and_then(|_| self.file.write_all(&header))
                .map_err(|error| cannot(&self.partial, &error))?;
        }
        let mut finish = || {
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            match fs::remove_file(format!("{}.json", self.partial.display())) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            fs::rename(&self.partial, &self.path)
        };
        finish().map_err(|error| cannot(&self.path, &error))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.done.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|error| cannot(&self.partial, &error))
    }
}

/// What a run has read, with one record more.
fn hashed(before: u64, record: &Read1) -> u64 {
    let mut hasher = DefaultHasher::new();
    before.hash(&mut hasher);
    match record {
        Ok(record) => (&record.text, &record.object).hash(&mut hasher),
        Err(bad) => bad.to_string().hash(&mut hasher),
    }
    hasher.finish()
}

fn cannot(path: &Path, error: &io::Error) -> anyhow::Error {
    anyhow!("{} cannot be written: {error}", path.display())
}

/// NumPy's format 1.0, filled up so that it does not change its length with the number of rows.
fn npy_header(rows: u64, columns: usize) -> Vec<u8> {
    let dict =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(((NPY_HEADER - 10) as u16).to_le_bytes());
    header.extend(dict.as_bytes());
    header.resize(NPY_HEADER - 1, b' ');
    header.push(b'\n');
    header
}
