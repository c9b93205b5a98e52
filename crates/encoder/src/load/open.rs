//! Where a model's files come from.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, ErrorKind, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// The files of a model: in a folder, or compiled into the program.
///
/// # Examples
/// ```
/// use encoder::ModelFiles;
///
/// let files = ModelFiles::bundle("a model", &[("config.json", b"{}")]);
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
}

#[derive(Clone, Debug)]
enum Source {
    Dir(PathBuf),
    Bundle(&'static str, &'static [(&'static str, &'static [u8])]),
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
        Ok(Self { source: Source::Dir(dir.to_path_buf()), below: String::new() })
    }

    /// Files that the program carries, each with its path in the folder it is from; errors call
    /// the whole `name`.
    pub const fn bundle(
        name: &'static str,
        files: &'static [(&'static str, &'static [u8])],
    ) -> Self {
        Self { source: Source::Bundle(name, files), below: String::new() }
    }

    /// The files of a folder among these, or these themselves if it has no name.
    pub(crate) fn folder(&self, name: &str) -> Self {
        let below = match name {
            "" => self.below.clone(),
            name => format!("{}{name}/", self.below),
        };
        Self { source: self.source.clone(), below }
    }

    /// What errors call a file.
    pub fn path(&self, file: &str) -> String {
        let below = &self.below;
        match &self.source {
            Source::Dir(dir) => dir.join(format!("{below}{file}")).display().to_string(),
            Source::Bundle(name, _) => format!("{name}/{below}{file}"),
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

    /// Whether there is such a file to open.
    pub(crate) fn has(&self, file: &str) -> bool {
        matches!(self.open(file), Ok(Some(_)))
    }

    /// A file to read parts of, if there is one.
    pub(crate) fn open(&self, file: &str) -> Result<Option<Opened>> {
        let path = match &self.source {
            Source::Dir(dir) => dir.join(format!("{}{file}", self.below)),
            Source::Bundle(..) => return Ok(self.read(file)?.map(Opened::Bytes)),
        };
        let opened = File::open(path).and_then(|file| {
            let len = file.metadata()?.len();
            Ok(Opened::File { file: Mutex::new(file), len })
        });
        match opened {
            Ok(file) => Ok(Some(file)),
            Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.io(file, source)),
        }
    }

    /// A file's bytes, if there is one.
    pub(crate) fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>> {
        let below = format!("{}{file}", self.below);
        match &self.source {
            Source::Dir(dir) => match std::fs::read(dir.join(below)) {
                Ok(bytes) => Ok(Some(bytes.into())),
                Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
                Err(source) => Err(self.io(file, source)),
            },
            Source::Bundle(_, files) => {
                let found = files.iter().find(|(path, _)| *path == below);
                Ok(found.map(|&(_, bytes)| bytes.into()))
            }
        }
    }

    pub(crate) fn no_file(&self, file: &str, expected: &'static str) -> Error {
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
    serde_json::from_slice(json).map_err(|source| Error::Json { path: path.to_string(), source })
}

/// A file that is read from as needed: a map of it would end the program if it were shortened.
pub(crate) enum Opened {
    File { file: Mutex<File>, len: u64 },
    Bytes(Cow<'static, [u8]>),
}

impl Opened {
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
