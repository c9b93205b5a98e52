//! The tensors of `model.safetensors`, or of the shards that an index names: read one at a time,
//! and never beyond what the files hold.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use safetensors::{
    SafeTensorError,
    tensor::{Metadata, TensorInfo},
};
use serde::Deserialize;

use super::{
    WEIGHTS,
    open::{ModelFiles, Opened, parse_json},
};
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";

const PICKLE: &str = "pytorch_model.bin";

/// A header of more bytes is none.
const MAX_HEADER: u64 = 100_000_000;

/// What a file that git-lfs has not fetched begins with.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The tensors of a checkpoint, in one file or several.
pub(crate) struct Weights {
    path: String,
    shards: Vec<Shard>,
    /// Each tensor's shard.
    shard_of: BTreeMap<String, usize>,
}

struct Shard {
    path: String,
    file: Opened,
    /// Where its data begin.
    start: u64,
    header: Metadata,
}

/// `model.safetensors.index.json`
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// # Errors
    /// Files that are missing, or not whole; an index that names no file beside it, or a tensor
    /// that its file does not have.
    pub(crate) fn open(files: &ModelFiles) -> Result<Self> {
        if let Some(file) = files.open(WEIGHTS)? {
            let shards = vec![Shard::open(files.path(WEIGHTS), file)?];
            return Self::of(files.path(WEIGHTS), shards);
        }
        let Some(json) = files.read(INDEX)? else {
            let expected = match files.open(PICKLE)?.is_some() {
                true => {
                    "the model's weights; pytorch_model.bin is not read: save it as safetensors"
                }
                false => "the model's weights",
            };
            return Err(files.no_file(WEIGHTS, expected));
        };
        let path = files.path(INDEX);
        let Index { weight_map } = parse_json(&json, &path)?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let shards = names.into_iter().map(|name| {
            if name.contains(['/', '\\']) || [".", "..", ""].contains(&name.as_str()) {
                return Err(Error::ShardName { path: path.clone(), got: name.clone() });
            }
            let file = files.open(name)?;
            let file = file.ok_or_else(|| files.no_file(name, "a shard that the index names"))?;
            Shard::open(files.path(name), file)
        });
        let weights = Self::of(path.clone(), shards.collect::<Result<_>>()?)?;
        for (tensor, name) in weight_map {
            let shard = weights.shard_of.get(&tensor).map(|&i| &weights.shards[i].path);
            let expected = files.path(&name);
            if shard != Some(&expected) {
                return Err(Error::NotInShard { path, tensor, expected });
            }
        }
        Ok(weights)
    }

    fn of(path: String, shards: Vec<Shard>) -> Result<Self> {
        let mut shard_of = BTreeMap::new();
        for (i, shard) in shards.iter().enumerate() {
            for tensor in shard.header.offset_keys() {
                if let Some(other) = shard_of.insert(tensor.clone(), i) {
                    let paths = [&shards[other], shard].map(|shard| shard.path.clone());
                    return Err(Error::TwoShards { tensor, paths });
                }
            }
        }
        Ok(Self { path, shards, shard_of })
    }

    /// What errors call it: the file, or the index.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.shard_of.keys().map(String::as_str).collect()
    }

    /// A tensor's shape and dtype.
    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.shards[*self.shard_of.get(name)?].header.info(name)
    }

    /// Its bytes.
    ///
    /// # Errors
    /// [`Error::Io`], also if the file has been shortened since it was opened.
    pub(crate) fn data(&self, name: &str, info: &TensorInfo) -> Result<Cow<'_, [u8]>> {
        let shard = &self.shards[self.shard_of[name]];
        let (start, end) = info.data_offsets;
        let data = shard.file.at(shard.start + start as u64, end - start);
        data.map_err(|source| Error::Io { path: shard.path.clone(), source })
    }
}

impl Shard {
    fn open(path: String, file: Opened) -> Result<Self> {
        let damaged = |source| Error::Safetensors { path: path.clone(), source };
        let read = |from, len| {
            file.at(from, len).map_err(|source| Error::Io { path: path.clone(), source })
        };
        if file.len() >= LFS_POINTER.len() as u64 && *read(0, LFS_POINTER.len())? == *LFS_POINTER {
            return Err(Error::LfsPointer { path: path.clone() });
        }
        if file.len() < 8 {
            return Err(damaged(SafeTensorError::HeaderTooSmall));
        }
        let mut size = [0; 8];
        size.copy_from_slice(&read(0, 8)?);
        let size = u64::from_le_bytes(size);
        if size > MAX_HEADER {
            return Err(damaged(SafeTensorError::HeaderTooLarge));
        }
        let start = 8 + size;
        if start > file.len() {
            return Err(damaged(SafeTensorError::InvalidHeaderLength));
        }
        let header: Metadata = serde_json::from_slice(&read(8, size as usize)?)
            .map_err(|source| damaged(SafeTensorError::InvalidHeaderDeserialization(source)))?;
        if start.checked_add(header.data_len() as u64) != Some(file.len()) {
            return Err(damaged(SafeTensorError::MetadataIncompleteBuffer));
        }
        Ok(Self { path, file, start, header })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_core::{DType, Device};

    use super::*;
    use crate::load::{checkpoint::Checkpoint, names::Naming};

    /// A file of one tensor, `x`, four numbers of f32.
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const X: &str = r#"{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}"#;

    fn open(files: &[(&str, &[u8])]) -> std::result::Result<Weights, String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let weights = Weights::open(&ModelFiles::dir(dir.path()).unwrap());
        weights.map_err(|e| e.to_string().replace(&format!("{}/", dir.path().display()), ""))
    }

    /// Not the end of the program, and not a report of tensors that nobody asked for.
    #[test]
    fn a_file_shortened_after_it_was_opened_is_an_error() -> Result<()> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(WEIGHTS);
        fs::write(&path, file(&X.replace('x', "a.x"), 16)).unwrap();
        let checkpoint = Checkpoint::new(Weights::open(&ModelFiles::dir(dir.path())?)?.into());
        let vb = checkpoint.model(Naming::AS_ASKED, DType::F32, &Device::Cpu);
        assert_eq!(vb.get(4, "a.x")?.to_vec1::<f32>()?, [0.0; 4]);
        checkpoint.check()?;
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(80).unwrap();
        vb.get(4, "a.x")?; // goes on, so that all that is wrong is found
        let error = checkpoint.check().unwrap_err().to_string();
        let expected = "model.safetensors cannot be read: failed to fill whole buffer";
        assert!(error.ends_with(expected), "{error}");
        Ok(())
    }

    /// None of them takes memory beyond the file's size.
    #[test]
    fn hostile_headers_are_refused() {
        let x = |shape: &str, from: u64, to: u64| {
            format!(r#"{{"dtype": "F32", "shape": {shape}, "data_offsets": [{from}, {to}]}}"#)
        };
        for (what, bytes) in [
            ("a header longer than the file", [&u64::to_le_bytes(1000)[..], b"{}"].concat()),
            ("a header of 2^64 bytes", [&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
            ("no JSON", file("{", 0)),
            ("no UTF-8", [&u64::to_le_bytes(2)[..], b"\xff\xff"].concat()),
            ("overlap", file(&format!(r#"{{"x": {0}, "y": {0}}}"#, x("[4]", 0, 16)), 16)),
            ("a gap", file(&format!(r#"{{"x": {}}}"#, x("[4]", 4, 20)), 20)),
            (
                "a huge shape",
                file(&format!(r#"{{"x": {}}}"#, x("[4294967296, 4294967296]", 0, 16)), 16),
            ),
            ("a shape that does not fit", file(&format!(r#"{{"x": {}}}"#, x("[5]", 0, 16)), 16)),
            ("data beyond the file", file(&format!(r#"{{"x": {}}}"#, x("[4]", 0, 16)), 12)),
            ("data behind the last tensor", file(X, 20)),
            (
                "a key twice",
                file(&format!(r#"{{"x": {}, "x": {}}}"#, x("[4]", 0, 16), x("[4]", 16, 32)), 32),
            ),
            ("an unknown dtype", file(&X.replace("F32", "F33"), 16)),
        ] {
            let error = open(&[(WEIGHTS, &bytes)]).err().expect(what);
            assert!(
                error.starts_with("model.safetensors is not a whole safetensors file: "),
                "{error}"
            );
        }
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n";
        assert_eq!(
            open(&[(WEIGHTS, pointer)]).err(),
            Some("model.safetensors is a pointer of Git LFS: expected the weights themselves; run git lfs pull".into())
        );
    }

    #[test]
    fn an_index_is_believed_only_as_far_as_its_shards_go() {
        let (x, y) = (file(X, 16), file(&X.replace('x', "y"), 16));
        let index =
            |map: &str| format!(r#"{{"metadata": {{"total_size": 32}}, "weight_map": {{{map}}}}}"#);
        let both = index(r#""x": "a.safetensors", "y": "b.safetensors""#);
        let weights =
            open(&[(INDEX, both.as_bytes()), ("a.safetensors", &x), ("b.safetensors", &y)]);
        assert_eq!(weights.map(|w| w.names().join(" ")), Ok("x y".into()));

        let error = |json: &str, b: &[u8]| {
            let files = [(INDEX, json.as_bytes()), ("a.safetensors", &x[..]), ("b.safetensors", b)];
            open(&files).err().expect("an error")
        };
        for name in ["../a.safetensors", "/etc/passwd", "..", "", "x/y", "x\\\\y"] {
            let got = name.replace("\\\\", "\\");
            assert_eq!(
                error(&index(&format!(r#""x": "{name}""#)), &y),
                format!("{INDEX} names the shard {got:?}: expected the name of a file beside it")
            );
        }
        assert_eq!(
            error(&index(r#""x": "a.safetensors", "z": "c.safetensors""#), &y),
            "c.safetensors not found: expected a shard that the index names"
        );
        assert_eq!(
            error(&index(r#""x": "a.safetensors", "z": "b.safetensors""#), &y),
            format!("{INDEX}: expected tensor \"z\" in b.safetensors, which does not have it")
        );
        assert_eq!(
            error(&both, &x),
            "tensor \"x\" is in a.safetensors and in b.safetensors: expected it once"
        );
    }
}
