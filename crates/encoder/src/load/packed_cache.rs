//! Files of packed weights, which processes map instead of reading and packing a checkpoint.
//!
//! A file is a safetensors file with one array of bytes per tensor, in the layout of the CPU
//! kernels for one instruction set and compute type. Its last array is a checksum of all bytes
//! before it. The file's name contains a hash of the checkpoint's path, weights and config, so that
//! a changed checkpoint has another file.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use memmap2::Mmap;
use ops::{ComputeType, Isa, PackedArray, SharedBytes};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{
    files::Opened,
    hash::{hash, hash_of_file},
    home::{huggingface_home, path_variable},
    save::temporary_with_prefix,
    weights::WeightFiles,
};
use crate::{Error, FileError, Result};

/// The version of the file format, and of the kernels' layouts and rounding.
const VERSION: u32 = 7;
/// The environment variable with the folder, or `off`.
const VARIABLE: &str = "ENCODLE_PACKED_CACHE";
/// The default minimum size of a file. Smaller models are packed about as fast as a file is mapped.
const MIN_BYTES: usize = 4 << 20;
/// Alignment of each array in bytes: one cache line.
const ALIGNMENT: usize = 64;
/// Digits of the hash that starts the name of a file.
const HASH_DIGITS: usize = 32;
/// The subfolder with the cached hashes of weights files, and of the content of the files of the
/// cache: one file per hash, with the identity of the hashed file in its name.
const HASHES: &str = "hashes";
/// The name of the last array: the checksum of all bytes before it.
const CHECKSUM: &str = "checksum";

/// A folder of packed weights.
///
/// The weights of an encoder, packed for the CPU kernels, are written to a file in the folder when
/// the model is first loaded. Later processes map this file into memory: they neither read nor pack
/// the weights, and processes of one machine share the memory. The word embeddings are mapped from
/// the checkpoint. The results are bit-identical.
///
/// Applies to encoders on a CPU, in f32, bf16 and int8; see
/// [`LoadOptions::with_cache`](crate::LoadOptions::with_cache).
///
/// A file must not be changed while a process maps it; it may be deleted or replaced by renaming
/// another file over it, as this type does. Concurrent processes of one machine can use one folder.
/// The folder must be on a local file system: on a network file system, if another machine deletes
/// or replaces a file, the processes that map the file crash.
///
/// # Examples
/// ```
/// use encoder::{Embedder, LoadOptions, PackedCache};
///
/// let folder = tempfile::tempdir().unwrap();
/// let cache = PackedCache::new(folder.path());
/// let options = LoadOptions::default().with_cache(cache.clone());
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let packed = Embedder::from_dir(dir, &options)?.embed(&["I love AI"])?; // writes a file
/// let mapped = Embedder::from_dir(dir, &options)?.embed(&["I love AI"])?; // maps the file
/// assert_eq!(packed.to_vec2::<f32>()?, mapped.to_vec2::<f32>()?);
/// assert_eq!(cache.files()?.len(), 1);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PackedCache {
    dir: PathBuf,
    min_bytes: usize,
    warnings: Warnings,
}

type WarningFn = dyn Fn(&str) + Send + Sync;

#[derive(Clone, Default)]
struct Warnings(Option<Arc<WarningFn>>);

impl fmt::Debug for Warnings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Warnings" } else { "None" })
    }
}

impl Warnings {
    fn call(&self, warning: &str) {
        if let Some(warn) = &self.0 {
            warn(warning);
        }
    }
}

/// A file of a [`PackedCache`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PackedCacheFile {
    /// The path of the file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// The path of the checkpoint's weights file; `None` if this cache file is damaged.
    pub checkpoint: Option<String>,
    /// The instruction set and the compute type, such as `avx2 f32`; `None` if this cache file is
    /// damaged.
    pub layout: Option<String>,
}

/// The `__metadata__` of a file.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Metadata {
    version: String,
    source: String,
    isa: String,
    compute_type: String,
    checkpoint: String,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
enum Invalid {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("not a safetensors file: {0}")]
    Format(#[from] safetensors::SafeTensorError),
    #[error("the file's checksum does not match its content")]
    Checksum,
    #[error("the file has no metadata of packed weights")]
    NoMetadata,
    #[error("the file was written for other weights or another layout")]
    Foreign,
}

impl Invalid {
    fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

impl PackedCache {
    /// The cache in a folder, which is created when the first model is loaded.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), min_bytes: MIN_BYTES, warnings: Warnings::default() }
    }

    /// Writes packed weights only if they have at least this size in bytes, 4 MiB by default.
    pub fn with_min_bytes(self, min_bytes: usize) -> Self {
        Self { min_bytes, ..self }
    }

    /// Calls `warn` with a message if a file cannot be used or cannot be written. In both cases the
    /// model is loaded as without the cache.
    pub fn with_warnings(self, warn: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { warnings: Warnings(Some(Arc::new(warn))), ..self }
    }

    /// The cache that the environment variable `ENCODLE_PACKED_CACHE` names; `None` if its value is
    /// `off`. If the variable is not set, the cache is the folder `packed-weights` beside the
    /// hub's cache: in `HF_HOME`, in `$XDG_CACHE_HOME/huggingface` or in `~/.cache/huggingface`;
    /// `None` if these are all unknown.
    pub fn from_env() -> Option<Self> {
        match path_variable(VARIABLE) {
            Some(value) if value == Path::new("off") => None,
            Some(folder) => Some(Self::new(folder)),
            None => Some(Self::new(huggingface_home()?.join("packed-weights"))),
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Deletes the files of the cache, and the folder if nothing else is in it. Other files stay.
    /// Processes that have mapped a file keep its content. Returns the number of files and their
    /// size in bytes.
    ///
    /// # Errors
    /// [`FileError::Io`] if the folder cannot be read; [`FileError::Write`] if a file cannot be
    /// deleted.
    pub fn clear(&self) -> Result<(usize, u64)> {
        let files = self.files()?;
        let (mut count, mut bytes) = (0, 0);
        for file in &files {
            match fs::remove_file(&file.path) {
                Ok(()) => (count, bytes) = (count + 1, bytes + file.bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {} // another process did
                Err(source) => {
                    return Err(
                        FileError::Write { path: file.path.display().to_string(), source }.into()
                    );
                }
            }
        }
        // The hashes are computed again when they are needed. A folder with other files stays.
        let folder = self.dir.join(HASHES);
        for hash in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let name = hash.file_name();
            let is_identity = |c: u8| c.is_ascii_digit() || c == b'-';
            let is_unfinished = name.as_encoded_bytes().starts_with(b".tmp");
            if is_unfinished || name.as_encoded_bytes().iter().copied().all(is_identity) {
                let _ = fs::remove_file(hash.path());
            }
        }
        let _ = fs::remove_dir(folder);
        let _ = fs::remove_dir(&self.dir);
        Ok((count, bytes))
    }

    /// The files of the cache, sorted by path: those whose names start with a hash. Unfinished
    /// files of interrupted processes are included.
    ///
    /// # Errors
    /// [`FileError::Io`] if the folder exists but cannot be read.
    pub fn files(&self) -> Result<Vec<PackedCacheFile>> {
        let io =
            |source| Error::File(FileError::Io { path: self.dir.display().to_string(), source });
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            entries => entries.map_err(io)?,
        };
        let mut files = vec![];
        for entry in entries {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            let starts_with_hash = name.len() > HASH_DIGITS
                && name[..HASH_DIGITS].iter().all(u8::is_ascii_hexdigit)
                && name[HASH_DIGITS] == b'-';
            let Ok(about) = fs::metadata(&path) else { continue }; // removed since
            if !starts_with_hash || !about.is_file() {
                continue;
            }
            let metadata = read_metadata(&path).ok();
            let layout = metadata.as_ref().map(|m| format!("{} {}", m.isa, m.compute_type));
            let checkpoint = metadata.map(|m| m.checkpoint);
            files.push(PackedCacheFile { path, bytes: about.len(), checkpoint, layout });
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// Opens the packed weights of a checkpoint. If there are none, or they are damaged, an empty
    /// collection is returned, and [`OpenCache::save`] writes the weights that are packed.
    ///
    /// # Errors
    /// [`FileError::Io`] if the checkpoint cannot be read; [`Error::Attention`] if `MHA_ISA` names
    /// instructions that this machine lacks.
    pub(super) fn open(
        &self,
        weights: &WeightFiles,
        config_json: &[u8],
        compute_type: ComputeType,
    ) -> Result<OpenCache> {
        let isa = Isa::get().map_err(ops::Error::from)?;
        // The path is hashed too, so that a checkpoint whose weights were crafted to have the hash
        // of another checkpoint's weights gets another file.
        let path = fs::canonicalize(weights.path());
        let path = path.map_or_else(|_| weights.path().into(), PathBuf::into_os_string);
        let path = hash(path.as_encoded_bytes());
        let hashes = self.dir.join(HASHES);
        let files = [weights.hash(&hashes)?, hash(config_json), path];
        let source =
            format!("{:0HASH_DIGITS$x}", hash(files.map(u128::to_le_bytes).as_flattened()));
        let metadata = Metadata {
            version: VERSION.to_string(),
            source,
            isa: isa.name().to_string(),
            compute_type: format!("{compute_type:?}").to_lowercase(),
            checkpoint: weights.path().to_string(),
        };
        let Metadata { source, isa, compute_type, .. } = &metadata;
        let path = self.dir.join(format!("{source}-{isa}-{compute_type}-v{VERSION}.safetensors"));
        let stored = Mapped::read(&path, &metadata, &hashes).unwrap_or_else(|invalid| {
            if !invalid.is_not_found() {
                let path = path.display();
                self.warnings.call(&format!(
                    "packed weights in {path} cannot be used: {invalid}; the weights are packed again"
                ));
            }
            BTreeMap::new()
        });
        let (min_bytes, warnings) = (self.min_bytes, self.warnings.clone());
        Ok(OpenCache { path, metadata, stored, packed: Mutex::default(), min_bytes, warnings })
    }
}

/// The packed weights of a checkpoint while a model is being loaded.
pub(crate) struct OpenCache {
    path: PathBuf,
    metadata: Metadata,
    /// The arrays of the file.
    stored: BTreeMap<String, SharedBytes>,
    /// The arrays of modules that the file lacks.
    packed: Mutex<BTreeMap<String, Arc<dyn PackedArray>>>,
    min_bytes: usize,
    warnings: Warnings,
}

impl OpenCache {
    /// An array of the file.
    pub(super) fn stored(&self, name: &str) -> Option<SharedBytes> {
        self.stored.get(name).cloned()
    }

    /// Adds an array to the file that [`Self::save`] writes.
    pub(super) fn keep(&self, name: String, array: Arc<dyn PackedArray>) {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner).insert(name, array);
    }

    /// Writes the weights that were packed, if any, with those of the previous file. A file that
    /// cannot be written causes a warning.
    pub(super) fn save(&self) {
        if let Err(error) = self.write() {
            let path = self.path.display();
            self.warnings.call(&format!(
                "packed weights cannot be written to {path}: {error}; set {VARIABLE} to another \
                 folder, or to off"
            ));
        }
    }

    fn write(&self) -> io::Result<()> {
        let new = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut arrays: BTreeMap<&str, &dyn PackedArray> =
            self.stored.iter().map(|(name, array)| (name.as_str(), array as _)).collect();
        arrays.extend(new.iter().map(|(name, array)| (name.as_str(), &**array)));
        let mut sizes: Vec<(&str, usize)> =
            arrays.iter().map(|(name, array)| (*name, array.size())).collect();
        if new.is_empty() || sizes.iter().map(|(_, len)| len).sum::<usize>() < self.min_bytes {
            return Ok(());
        }
        // The array of word embeddings that are not mapped from the checkpoint may end within a
        // cache line. This array comes last, so that all arrays of weights start at a cache line.
        // Only the checksum follows it.
        sizes.sort_by_key(|(_, len)| !len.is_multiple_of(ALIGNMENT));
        let dir = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(dir)?;
        let mut file = temporary_with_prefix(dir, &self.unfinished())?;
        let mut out = BufWriter::with_capacity(1 << 20, file.as_file_mut());
        out.write_all(&self.header(&sizes)?)?;
        for (name, _) in &sizes {
            arrays[name].write_to(&mut out)?;
        }
        out.flush()?;
        drop(out);
        let checksum = hash(&Mapped::of(file.as_file())?.0);
        file.as_file_mut().seek(io::SeekFrom::End(0))?;
        file.write_all(&checksum.to_le_bytes())?;
        file.persist(&self.path)?;
        Ok(())
    }

    /// The prefix of the names of unfinished files, which [`PackedCache::files`] recognises.
    fn unfinished(&self) -> String {
        format!("{}-unfinished-", self.metadata.source)
    }

    /// The length of the safetensors header, and the header, padded so that the data starts at a
    /// multiple of [`ALIGNMENT`].
    fn header(&self, sizes: &[(&str, usize)]) -> io::Result<Vec<u8>> {
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".to_string(), serde_json::to_value(&self.metadata)?);
        let mut start = 0;
        for &(name, len) in sizes.iter().chain([&(CHECKSUM, size_of::<u128>())]) {
            let offsets = [start, start + len];
            let array = json!({ "dtype": "U8", "shape": [len], "data_offsets": offsets });
            header.insert(name.to_string(), array);
            start += len;
        }
        let mut text = serde_json::to_vec(&header)?;
        text.resize((8 + text.len()).next_multiple_of(ALIGNMENT) - 8, b' ');
        Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
    }
}

/// A mapped file.
struct Mapped(Mmap);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Mapped {
    fn of(file: &File) -> io::Result<Self> {
        // SAFETY: the files of a cache are written under temporary names and then renamed. `write`
        // unmaps a temporary file before it appends the checksum; this module never changes a file
        // after the renaming, and the documentation of `PackedCache` forbids others to do so.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(file)? };
        Ok(Self(map))
    }

    /// The arrays of a file, after checking its metadata and its checksum. `hashes` is the folder of
    /// [`hash_of_file`], so that the content is read once and not by every process.
    fn read(
        path: &Path,
        expected: &Metadata,
        hashes: &Path,
    ) -> std::result::Result<BTreeMap<String, SharedBytes>, Invalid> {
        let file = File::open(path)?;
        let mapped = Self::of(&file)?;
        let (header_len, header) = SafeTensors::read_metadata(&mapped.0)?;
        let own = serde_json::to_value(header.metadata()).and_then(serde_json::from_value);
        let own: Metadata = own.map_err(|_| Invalid::NoMetadata)?;
        let Metadata { version, source, isa, compute_type, .. } = expected;
        if [&own.version, &own.source, &own.isa, &own.compute_type]
            != [version, source, isa, compute_type]
        {
            return Err(Invalid::Foreign);
        }
        let end = mapped.0.len().checked_sub(size_of::<u128>()).ok_or(Invalid::Checksum)?;
        let file = Opened::File { len: mapped.0.len() as u64, file };
        let content = hash_of_file(&file, end as u64, hashes)?;
        if content.to_le_bytes() != mapped.0[end..] {
            return Err(Invalid::Checksum);
        }
        // The first text needs all pages. Mapped here, they are ready before the tokenizer is, which
        // another thread reads. Linux before 5.14 refuses.
        #[cfg(target_os = "linux")]
        let _ = mapped.0.advise(memmap2::Advice::PopulateRead);
        let start = 8 + header_len;
        let ranges: Vec<_> = header
            .tensors()
            .into_iter()
            .filter(|(name, _)| name != CHECKSUM)
            .map(|(name, info)| (name, start + info.data_offsets.0..start + info.data_offsets.1))
            .collect();
        let owner = Arc::new(mapped);
        let array =
            |(name, range)| Some((name, SharedBytes::new(owner.clone(), range, ALIGNMENT)?));
        Ok(ranges.into_iter().filter_map(array).collect())
    }
}

/// Reads the metadata of a file without mapping it, because another process may be writing it.
fn read_metadata(path: &Path) -> std::result::Result<Metadata, Invalid> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(rename = "__metadata__")]
        metadata: Metadata,
    }
    let (mut file, mut len) = (File::open(path)?, [0; 8]);
    file.read_exact(&mut len)?;
    let header = BufReader::new(file.take(u64::from_le_bytes(len)));
    let header: Header = serde_json::from_reader(header).map_err(|_| Invalid::NoMetadata)?;
    Ok(header.metadata)
}
