//! Access to a model's files, in a folder, in memory or on the Hugging Face Hub.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use memmap2::{Mmap, MmapOptions};
use ops::SharedBytes;

use crate::{Error, FileError, Result};

/// The files of a model: in a folder, in memory, or on the hub.
///
/// While a model on a CPU is in use, its word embeddings are read from its weights file, which is
/// mapped into memory. This file may be deleted, or replaced by renaming another file over it: the
/// model keeps the old content. It must not be changed in place: the model then computes with the
/// new content, and the process crashes (SIGBUS) if the file is truncated. On a network file
/// system, the process also crashes if another machine deletes or replaces the file.
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
    /// The path of the folder within the source, with a trailing `/`; empty for the source's root.
    prefix: String,
    /// The name of the weights file, if the caller chose it.
    weights: Option<String>,
}

#[derive(Clone, Debug)]
enum Source {
    Dir(PathBuf),
    Memory(Arc<Memory>),
    #[cfg_attr(not(feature = "hub"), allow(dead_code))] // only the hub constructs it
    Remote(Arc<dyn RemoteFiles>),
}

/// The files of a model on another machine, which are stored on this machine when they are first
/// read.
pub(super) trait RemoteFiles: fmt::Debug + Send + Sync {
    /// The model's name in error messages.
    fn id(&self) -> &str;

    /// The path of a file on this machine, after downloading it if necessary; `None` if the model
    /// lacks the file.
    ///
    /// # Errors
    /// The errors of a download.
    fn get(&self, file: &str) -> Result<Option<PathBuf>>;

    /// The error for a file that [`Self::get`] did not find; `None` if the model is known to lack
    /// the file.
    fn not_found_error(&self, file: &str) -> Option<Error>;
}

#[derive(Debug)]
struct Memory {
    name: String,
    files: BTreeMap<String, Arc<Cow<'static, [u8]>>>,
}

/// The path of each file that was opened.
#[cfg(test)]
pub(super) static OPENED: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(vec![]);

impl ModelFiles {
    /// The files of a folder.
    ///
    /// # Errors
    /// [`FileError::NoFolder`] if the folder does not exist.
    pub fn dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            let path = dir.display().to_string();
            return Err(FileError::NoFolder { path }.into());
        }
        Ok(Self::from_source(Source::Dir(dir.to_path_buf())))
    }

    /// A model whose weights file, or index of shards, is at `path`. Its other files are in the
    /// same folder.
    ///
    /// # Errors
    /// [`FileError::NoFile`] if the file does not exist; [`FileError::Io`] if it is not a regular
    /// file, or if its name is not UTF-8.
    pub fn file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (dir, name) = (path.parent(), path.file_name().and_then(|name| name.to_str()));
        match (dir, name) {
            (Some(dir), Some(name)) if path.is_file() => {
                let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
                let weights = Some(name.to_string());
                Ok(Self { weights, ..Self::from_source(Source::Dir(dir.to_path_buf())) })
            }
            _ if path.exists() => {
                let expected = if path.is_dir() {
                    "expected a weights file, got a folder"
                } else {
                    "expected a regular file whose name is UTF-8"
                };
                let source = io::Error::other(expected);
                Err(FileError::Io { path: path.display().to_string(), source }.into())
            }
            _ => {
                let (path, expected) = (path.display().to_string(), "the model's weights");
                Err(FileError::NoFile { path, expected }.into())
            }
        }
    }

    /// Files in memory, each with its path relative to the model's folder. Error messages use
    /// `name` as the folder's name.
    pub fn memory<P: Into<String>, B: Into<Cow<'static, [u8]>>>(
        name: impl Into<String>,
        files: impl IntoIterator<Item = (P, B)>,
    ) -> Self {
        let file = |(path, bytes): (P, B)| (path.into(), Arc::new(bytes.into()));
        let files = files.into_iter().map(file).collect();
        Self::from_source(Source::Memory(Arc::new(Memory { name: name.into(), files })))
    }

    #[cfg(feature = "hub")]
    pub(super) fn remote(model: impl RemoteFiles + 'static) -> Self {
        Self::from_source(Source::Remote(Arc::new(model)))
    }

    fn from_source(source: Source) -> Self {
        Self { source, prefix: String::new(), weights: None }
    }

    /// The files of a subfolder; an empty name gives this folder.
    pub(super) fn folder(&self, name: &str) -> Self {
        match name {
            "" => self.clone(),
            name => {
                let prefix = format!("{}{name}/", self.prefix);
                Self { prefix, weights: None, ..self.clone() }
            }
        }
    }

    /// The same files with another weights file.
    pub(super) fn with_weights(&self, file: &str) -> Self {
        Self { weights: Some(file.to_string()), ..self.clone() }
    }

    /// Whether reading a file may download it.
    pub(super) fn are_remote(&self) -> bool {
        matches!(self.source, Source::Remote(_))
    }

    /// The name of the weights file, if it was given to [`Self::file`].
    pub(super) fn weights(&self) -> Option<&str> {
        self.weights.as_deref()
    }

    /// The name of a file in error messages.
    pub fn path(&self, file: &str) -> String {
        let prefix = &self.prefix;
        match &self.source {
            Source::Dir(dir) => dir.join(format!("{prefix}{file}")).display().to_string(),
            Source::Memory(memory) => format!("{}/{prefix}{file}", memory.name),
            Source::Remote(model) => format!("{}/{prefix}{file}", model.id()),
        }
    }

    /// The bytes of a required file. `expected` describes its content in the error message.
    ///
    /// # Errors
    /// [`FileError::NoFile`] if the file does not exist; [`FileError::Io`] if it cannot be read;
    /// [`FileError::LfsPointer`] or [`FileError::WebPage`] if something else was saved in its
    /// place; for a model on the hub also [`crate::HubError::Offline`],
    /// [`crate::HubError::NoModel`], [`crate::HubError::NoRevision`], [`crate::HubError::Gated`],
    /// [`crate::HubError::Fetch`], [`crate::HubError::WrongFile`] and [`crate::HubError::Cache`].
    pub fn need(&self, file: &str, expected: &'static str) -> Result<Cow<'static, [u8]>> {
        match self.open(file)? {
            Some(opened) => self.bytes(file, opened),
            None => Err(self.no_file(file, expected)),
        }
    }

    /// The path of a file within the source.
    pub(super) fn relative(&self, file: &str) -> String {
        format!("{}{file}", self.prefix)
    }

    /// Opens a file for reading parts of it; `None` if it does not exist.
    ///
    /// # Errors
    /// [`FileError::LfsPointer`] or [`FileError::WebPage`] if something else was saved in its
    /// place; the errors of [`Self::need`].
    pub(super) fn open(&self, file: &str) -> Result<Option<Opened>> {
        #[cfg(test)]
        OPENED.lock().unwrap().push(self.path(file));
        let relative = self.relative(file);
        let opened = match &self.source {
            Source::Memory(memory) => {
                memory.files.get(&relative).map(|bytes| Ok(Opened::Bytes(bytes.clone())))
            }
            Source::Dir(dir) => Some(Opened::file(&dir.join(relative))),
            Source::Remote(model) => model.get(&relative)?.map(|path| Opened::file(&path)),
        };
        let opened = match opened {
            None => return Ok(None),
            Some(Err(source)) if source.kind() == ErrorKind::NotFound => return Ok(None),
            Some(opened) => opened.map_err(|source| self.io(file, source))?,
        };
        let beginning = opened.at(0, opened.len().min(BEGINNING) as usize);
        match saved_instead(&beginning.map_err(|source| self.io(file, source))?) {
            None => Ok(Some(opened)),
            Some(SavedInstead::LfsPointer) => {
                Err(FileError::LfsPointer { path: self.path(file) }.into())
            }
            Some(SavedInstead::WebPage) => Err(FileError::WebPage { path: self.path(file) }.into()),
        }
    }

    /// The bytes of a file that was opened.
    pub(super) fn bytes(&self, file: &str, opened: Opened) -> Result<Cow<'static, [u8]>> {
        opened.into_bytes().map_err(|source| self.io(file, source))
    }

    pub(super) fn no_file(&self, file: &str, expected: &'static str) -> Error {
        if let Source::Remote(model) = &self.source
            && let Some(error) = model.not_found_error(&self.relative(file))
        {
            return error;
        }
        let path = self.path(file);
        Error::File(FileError::NoFile { path, expected })
    }

    fn io(&self, file: &str, source: io::Error) -> Error {
        let path = self.path(file);
        Error::File(FileError::Io { path, source })
    }
}

/// The kind of content that was saved in place of a file.
enum SavedInstead {
    /// The text that Git LFS stores in a repository instead of the file.
    LfsPointer,
    /// The page of a hub that shows the file, or the error page of a server.
    WebPage,
}

/// Number of bytes from which [`saved_instead`] recognises its cases.
const BEGINNING: u64 = 64;

/// Recognises, by its first bytes, what was saved in place of a file.
fn saved_instead(beginning: &[u8]) -> Option<SavedInstead> {
    let text = beginning.strip_prefix(b"\xef\xbb\xbf").unwrap_or(beginning).trim_ascii_start();
    let starts_with = |start: &str| {
        text.get(..start.len()).is_some_and(|text| text.eq_ignore_ascii_case(start.as_bytes()))
    };
    if starts_with("version https://git-lfs.github.com/spec/") {
        return Some(SavedInstead::LfsPointer);
    }
    let is_page = ["<!doctype ", "<html", "<?xml "].into_iter().any(starts_with);
    is_page.then_some(SavedInstead::WebPage)
}

/// A file that changed less than this long ago is recent. The time stamps of all common file
/// systems are finer than this.
const RECENT: Duration = Duration::from_secs(3);

/// A file that is read in parts. Only the parts that [`Opened::shared`] returns are memory-mapped:
/// if a mapped file is truncated, the program crashes.
pub(crate) enum Opened {
    File { file: File, len: u64 },
    Bytes(Arc<Cow<'static, [u8]>>),
}

/// The time of the last change of the status, such as a renaming, in whole seconds.
#[cfg(unix)]
fn status_change(about: &fs::Metadata) -> Option<SystemTime> {
    let seconds = std::os::unix::fs::MetadataExt::ctime(about).try_into().ok()?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// The time of the last change of the content: this system has none for the status.
#[cfg(not(unix))]
fn status_change(about: &fs::Metadata) -> Option<SystemTime> {
    about.modified().ok()
}

impl Opened {
    /// # Errors
    /// The error of the operating system; an error if the path is not a regular file, since reading
    /// a named pipe blocks, and a device may have no end.
    fn file(path: &Path) -> io::Result<Self> {
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("expected a regular file"));
        }
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok(Self::File { file, len })
    }

    /// The whole content.
    fn into_bytes(self) -> io::Result<Cow<'static, [u8]>> {
        match self {
            Self::File { mut file, .. } => {
                let mut bytes = vec![];
                file.rewind()?;
                file.read_to_end(&mut bytes)?;
                Ok(bytes.into())
            }
            Self::Bytes(bytes) => Ok(Arc::unwrap_or_clone(bytes)),
        }
    }

    /// A name that changes when the file changes: its device and inode numbers, its length, and its
    /// modification and status change times. `None` for a file in memory, or if the system lacks
    /// these data.
    pub(crate) fn identity(&self) -> Option<String> {
        #[cfg(unix)]
        if let Self::File { file, .. } = self {
            use std::os::unix::fs::MetadataExt;
            let about = file.metadata().ok()?;
            let times = [about.mtime(), about.mtime_nsec(), about.ctime(), about.ctime_nsec()];
            let times = times.map(|time| time.to_string()).join("-");
            return Some(format!("{}-{}-{}-{times}", about.dev(), about.ino(), about.size()));
        }
        None
    }

    /// Whether the file was changed so recently ([`RECENT`]) that another change could leave its
    /// times unchanged. True if the times are unknown.
    pub(crate) fn is_recent(&self) -> bool {
        let Self::File { file, .. } = self else { return true };
        let Ok(about) = file.metadata() else { return true };
        let age = |time: Option<SystemTime>| time.and_then(|time| time.elapsed().ok());
        let changes = [about.modified().ok(), status_change(&about)];
        changes.into_iter().map(age).any(|age| age.is_none_or(|age| age < RECENT))
    }

    /// The length in bytes when the file was opened.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::File { len, .. } => *len,
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// The bytes `start..start + len`. For a file in memory, the range must be within the file.
    pub(crate) fn at(&self, start: u64, len: usize) -> io::Result<Cow<'_, [u8]>> {
        match self {
            Self::File { file, .. } => {
                let mut bytes = vec![0; len];
                read_exact_at(file, start, &mut bytes)?;
                Ok(bytes.into())
            }
            Self::Bytes(bytes) => Ok(bytes[start as usize..][..len].into()),
        }
    }

    /// `len` f32 values from the byte `start` on, in a buffer of huge pages if the system has them.
    /// For a file in memory, the range must be within the file.
    pub(crate) fn f32_at(&self, start: u64, len: usize) -> io::Result<Vec<f32>> {
        let mut values = ops::zeros::<f32>(len);
        self.read_at(start, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Fills `bytes` with the content from the byte `start` on. For a file in memory, the range
    /// must be within the file.
    pub(crate) fn read_at(&self, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File { file, .. } => read_exact_at(file, start, bytes)?,
            Self::Bytes(all) => bytes.copy_from_slice(&all[start as usize..][..bytes.len()]),
        }
        Ok(())
    }

    /// The bytes `start..start + len` at a multiple of `alignment` in memory, which is at most 4.
    /// Aligned bytes are not copied: the bytes of a file on disk are mapped. For a file in memory,
    /// the range must be within the file.
    pub(crate) fn shared(
        &self,
        start: u64,
        len: usize,
        alignment: usize,
    ) -> io::Result<SharedBytes> {
        let in_place = match self {
            Self::File { .. } if len == 0 => None, // no system maps 0 bytes
            Self::File { file, .. } => {
                if file.metadata()?.len() < start + len as u64 {
                    let truncated = "failed to fill whole buffer"; // as `read_exact`
                    return Err(io::Error::new(ErrorKind::UnexpectedEof, truncated));
                }
                // SAFETY: the map is read-only. The documentation of `ModelFiles` says that a file
                // must not be changed while a model is in use.
                #[allow(unsafe_code)]
                let map = unsafe { MmapOptions::new().offset(start).len(len).map(file) };
                // A file system without maps: the bytes are read below.
                map.ok().and_then(|map| SharedBytes::new(Arc::new(Mapped(map)), 0..len, alignment))
            }
            Self::Bytes(bytes) => {
                let range = start as usize..start as usize + len;
                SharedBytes::new(Arc::new(InMemory(bytes.clone())), range, alignment)
            }
        };
        if let Some(bytes) = in_place {
            return Ok(bytes);
        }
        let mut values = ops::zeros::<f32>(len.div_ceil(size_of::<f32>()));
        self.read_at(start, &mut bytemuck::cast_slice_mut(&mut values)[..len])?;
        let bytes = SharedBytes::new(Arc::new(Values(values)), 0..len, alignment);
        bytes.ok_or_else(|| io::Error::other("expected an alignment of at most 4"))
    }
}

/// A part of a file, mapped into memory.
struct Mapped(Mmap);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A file in memory.
struct InMemory(Arc<Cow<'static, [u8]>>);

impl AsRef<[u8]> for InMemory {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes in an aligned buffer.
struct Values(Vec<f32>);

impl AsRef<[u8]> for Values {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Fills `bytes` with the content of a file from the byte `start` on.
#[cfg(unix)]
fn read_exact_at(file: &File, start: u64, bytes: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, start)
}

/// Fills `bytes` with the content of a file from the byte `start` on.
#[cfg(not(unix))]
fn read_exact_at(mut file: &File, start: u64, bytes: &mut [u8]) -> io::Result<()> {
    use std::sync::Mutex;
    static POSITIONS: Mutex<()> = Mutex::new(()); // a file has one position
    let _guard = POSITIONS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    file.seek(io::SeekFrom::Start(start))?;
    file.read_exact(bytes)
}
