//! Where a model's files come from.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs::File,
    io::{self, ErrorKind, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use serde::de::DeserializeOwned;
use serde_json::Value;

#[cfg(feature = "hub")]
use super::hub::HubModel;
use crate::{Error, Result};

/// The files of a model: in a folder, in memory, or on the hub.
///
/// # Examples
/// ```
/// use encoder::ModelFiles;
///
/// let files = ModelFiles::memory("a model", [("config.json", b"{}".as_slice())]);
/// assert_eq!(files.need("config.json", "sizes")?.len(), 2);
/// assert_eq!(
///     files.need("vocab.txt", "word pieces").unwrap_err().to_string(),
///     "a model/vocab.txt not found: expected word pieces"
/// );
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelFiles {
    source: Source,
    /// What stands before each file's path: nothing, or a folder and `/`.
    below: String,
    /// The file of weights, where the caller named it.
    weights: Option<String>,
}

#[derive(Clone, Debug)]
enum Source {
    Dir(PathBuf),
    Memory(Arc<Memory>),
    #[cfg(feature = "hub")]
    Hub(Arc<HubModel>),
}

#[derive(Debug)]
struct Memory {
    name: String,
    files: BTreeMap<String, Arc<Cow<'static, [u8]>>>,
}

impl ModelFiles {
    /// The files of a folder.
    ///
    /// # Errors
    /// [`Error::NoFolder`] if there is none.
    pub fn dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            let path = dir.display().to_string();
            return Err(Error::NoFolder { path });
        }
        Ok(Self::of(Source::Dir(dir.to_path_buf())))
    }

    /// Weights in a file of any name, or an index of shards; the model's other files are beside it.
    ///
    /// # Errors
    /// [`Error::NoFile`] if there is none.
    pub fn file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (dir, name) = (path.parent(), path.file_name().and_then(|name| name.to_str()));
        match (dir, name) {
            (Some(dir), Some(name)) if path.is_file() => {
                let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
                let weights = Some(name.to_string());
                Ok(Self { weights, ..Self::of(Source::Dir(dir.to_path_buf())) })
            }
            _ => {
                let (path, expected) = (path.display().to_string(), "the model's weights");
                Err(Error::NoFile { path, expected })
            }
        }
    }

    /// Files that are in memory, each with its path in the folder it is from; errors call the whole
    /// `name`.
    pub fn memory<P: Into<String>, B: Into<Cow<'static, [u8]>>>(
        name: impl Into<String>,
        files: impl IntoIterator<Item = (P, B)>,
    ) -> Self {
        let file = |(path, bytes): (P, B)| (path.into(), Arc::new(bytes.into()));
        let files = files.into_iter().map(file).collect();
        Self::of(Source::Memory(Arc::new(Memory { name: name.into(), files })))
    }

    #[cfg(feature = "hub")]
    pub(super) fn hub(model: HubModel) -> Self {
        Self::of(Source::Hub(Arc::new(model)))
    }

    fn of(source: Source) -> Self {
        Self { source, below: String::new(), weights: None }
    }

    /// The files of a folder among these, or these themselves if it has no name.
    pub(crate) fn folder(&self, name: &str) -> Self {
        match name {
            "" => self.clone(),
            name => {
                let below = format!("{}{name}/", self.below);
                Self { source: self.source.clone(), below, weights: None }
            }
        }
    }

    /// Whether a file that is asked for may have to come from a hub first.
    pub(crate) fn are_on_hub(&self) -> bool {
        match &self.source {
            Source::Dir(_) | Source::Memory(_) => false,
            #[cfg(feature = "hub")]
            Source::Hub(_) => true,
        }
    }

    /// The file of weights, where the caller named it.
    pub(crate) fn weights(&self) -> Option<&str> {
        self.weights.as_deref()
    }

    /// What errors call a file.
    pub fn path(&self, file: &str) -> String {
        let below = &self.below;
        match &self.source {
            Source::Dir(dir) => dir.join(format!("{below}{file}")).display().to_string(),
            Source::Memory(memory) => format!("{}/{below}{file}", memory.name),
            #[cfg(feature = "hub")]
            Source::Hub(model) => format!("{}/{below}{file}", model.id()),
        }
    }

    /// A file's bytes; `expected` tells the one who lacks it what it would have said.
    ///
    /// # Errors
    /// [`Error::NoFile`] if there is none, [`Error::Io`] if it cannot be read.
    pub fn need(&self, file: &str, expected: &'static str) -> Result<Cow<'static, [u8]>> {
        self.read(file)?.ok_or_else(|| self.no_file(file, expected))
    }

    /// A JSON file, if there is one.
    pub(crate) fn json<T: DeserializeOwned>(&self, file: &str) -> Result<Option<T>> {
        let bytes = self.read(file)?;
        bytes.map(|bytes| parse_json(&bytes, &self.path(file))).transpose()
    }

    /// Whether there is such a file.
    pub(crate) fn has(&self, file: &str) -> Result<bool> {
        Ok(self.open(file)?.is_some())
    }

    /// A file to read parts of, if there is one.
    pub(crate) fn open(&self, file: &str) -> Result<Option<Opened>> {
        let below = format!("{}{file}", self.below);
        let opened = match &self.source {
            Source::Memory(memory) => {
                return Ok(memory.files.get(&below).cloned().map(Opened::Bytes));
            }
            Source::Dir(dir) => File::open(dir.join(below)).and_then(Opened::file),
            #[cfg(feature = "hub")]
            Source::Hub(model) => match model.get(&below)? {
                Some(path) => File::open(path).and_then(Opened::file),
                None => return Ok(None),
            },
        };
        match opened {
            Ok(file) => Ok(Some(file)),
            Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.io(file, source)),
        }
    }

    /// A file's bytes, if there is one.
    pub(crate) fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>> {
        let Some(opened) = self.open(file)? else { return Ok(None) };
        opened.into_bytes().map(Some).map_err(|source| self.io(file, source))
    }

    pub(crate) fn no_file(&self, file: &str, expected: &'static str) -> Error {
        #[cfg(feature = "hub")]
        if let Source::Hub(model) = &self.source
            && let Some(error) = model.unknown(&format!("{}{file}", self.below))
        {
            return error;
        }
        let path = self.path(file);
        Error::NoFile { path, expected }
    }

    fn io(&self, file: &str, source: io::Error) -> Error {
        let path = self.path(file);
        Error::Io { path, source }
    }
}

/// What a JSON file says; `path` is what errors call it.
pub(crate) fn parse_json<T: DeserializeOwned>(json: &[u8], path: &str) -> Result<T> {
    let mut json = serde_json::Deserializer::from_slice(json);
    let read = serde_path_to_error::deserialize(&mut json);
    let read = read.map_err(|error| (error.path().to_string(), error.into_inner()));
    let ends = |value| json.end().map(|()| value).map_err(|error| (".".to_string(), error));
    read.and_then(ends).map_err(|(key, source)| {
        let of_value = source.is_data() && key != ".";
        let at = if of_value { format!("{key}: ") } else { String::new() };
        Error::Json { path: path.to_string(), at, source }
    })
}

/// Converts a parsed JSON value, with the errors of [`parse_json`].
pub(crate) fn parse_value<T: DeserializeOwned>(value: Value, path: &str) -> Result<T> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let key = error.path().to_string();
        let at = if key == "." { String::new() } else { format!("{key}: ") };
        Error::Json { path: path.to_string(), at, source: error.into_inner() }
    })
}

/// A file that is read from as needed: a map of it would end the program if it were shortened.
pub(crate) enum Opened {
    File { file: Mutex<File>, len: u64 },
    Bytes(Arc<Cow<'static, [u8]>>),
}

impl Opened {
    fn file(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self::File { file: Mutex::new(file), len })
    }

    /// The whole of it.
    fn into_bytes(self) -> io::Result<Cow<'static, [u8]>> {
        match self {
            Self::File { file, .. } => {
                let mut bytes = vec![];
                file.into_inner()
                    .unwrap_or_else(PoisonError::into_inner)
                    .read_to_end(&mut bytes)?;
                Ok(bytes.into())
            }
            Self::Bytes(bytes) => Ok(Arc::unwrap_or_clone(bytes)),
        }
    }

    /// Its length when it was opened.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::File { len, .. } => *len,
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// `len` bytes from `start` on, which are within its length.
    pub(crate) fn at(&self, start: u64, len: usize) -> io::Result<Cow<'_, [u8]>> {
        match self {
            Self::File { file, .. } => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let mut bytes = vec![0; len];
                file.seek(SeekFrom::Start(start))?;
                file.read_exact(&mut bytes)?;
                Ok(bytes.into())
            }
            Self::Bytes(bytes) => Ok(bytes[start as usize..][..len].into()),
        }
    }
}
