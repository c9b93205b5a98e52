//! The tensors of a checkpoint, in one file or in the shards that an index names: read one at a
//! time, and never beyond what the files hold.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use safetensors::{SafeTensorError, tensor::Metadata};
use serde::Deserialize;

use super::{
    WEIGHTS,
    files::{ModelFiles, Opened, parse_json},
    pickle,
    tensor_info::{TensorInfo, TensorInfos},
};
use crate::{Error, Result};

/// The names that a checkpoint may have, the first that is there is taken.
const FILES: [&str; 4] =
    [WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"];

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
    tensors: TensorInfos,
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
        let mut names: Vec<&str> = FILES.to_vec();
        if let Some(named) = files.weights() {
            names = vec![named];
        }
        for name in names {
            if name.ends_with(".json") {
                if let Some(json) = files.read(name)? {
                    return Self::of_index(files, name, &json);
                }
            } else if let Some(file) = files.open(name)? {
                let path = files.path(name);
                return Self::of(path.clone(), vec![Shard::open(path, file)?]);
            }
        }
        Err(files.no_file(files.weights().unwrap_or(WEIGHTS), "the model's weights"))
    }

    fn of_index(files: &ModelFiles, name: &str, json: &[u8]) -> Result<Self> {
        let path = files.path(name);
        let Index { weight_map } = parse_json(json, &path)?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let shards = names.into_iter().map(|name| {
            if name.contains(['/', '\\', ':']) || [".", "..", ""].contains(&name.as_str()) {
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
            for tensor in shard.tensors.keys() {
                if let Some(other) = shard_of.insert(tensor.clone(), i) {
                    let paths = [&shards[other], shard].map(|shard| shard.path.clone());
                    return Err(Error::TwoShards { tensor: tensor.clone(), paths });
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
        self.shards[*self.shard_of.get(name)?].tensors.get(name)
    }

    /// Its bytes, the last dimension's values one after another.
    ///
    /// # Errors
    /// [`Error::Io`], also if the file has been shortened since it was opened.
    pub(crate) fn data(&self, name: &str, tensor: &TensorInfo) -> Result<Cow<'_, [u8]>> {
        let shard = &self.shards[self.shard_of[name]];
        let data = shard.file.at(tensor.start, (tensor.end - tensor.start) as usize);
        let data = data.map_err(|source| Error::Io { path: shard.path.clone(), source })?;
        Ok(match &tensor.strides {
            None => data,
            Some(strides) => gathered(&data, tensor, strides).into(),
        })
    }
}

/// The values of a tensor in order, from where its strides say they are.
fn gathered(data: &[u8], tensor: &TensorInfo, strides: &[usize]) -> Vec<u8> {
    let size = tensor.dtype.bitsize() / 8;
    let elements: usize = tensor.shape.iter().product();
    let mut values = Vec::with_capacity(elements * size);
    for i in 0..elements {
        let (mut rest, mut from) = (i, 0);
        for (&dim, &stride) in tensor.shape.iter().zip(strides).rev() {
            from += rest % dim * stride;
            rest /= dim;
        }
        values.extend_from_slice(&data[from * size..][..size]);
    }
    values
}

impl Shard {
    fn open(path: String, file: Opened) -> Result<Self> {
        let io = |source| Error::Io { path: path.clone(), source };
        let begins = file.at(0, file.len().min(LFS_POINTER.len() as u64) as usize).map_err(io)?;
        if *begins == *LFS_POINTER {
            return Err(Error::LfsPointer { path: path.clone() });
        }
        let tensors = if path.ends_with(".bin") || pickle::is_pickled(&begins) {
            let tensors = pickle::tensors(&file);
            tensors.map_err(|what| Error::Pickle { path: path.clone(), what })?
        } else {
            safetensors(&file, &path)?
        };
        drop(begins);
        Ok(Self { path, file, tensors })
    }
}

/// The tensors of a safetensors file, from its header.
fn safetensors(file: &Opened, path: &str) -> Result<TensorInfos> {
    let path = || path.to_string();
    let damaged = |source| Error::Safetensors { path: path(), source };
    let read = |from, len| file.at(from, len).map_err(|source| Error::Io { path: path(), source });
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
    let tensors = header.tensors().into_iter().map(|(name, info)| {
        let (from, to) = info.data_offsets;
        let (start, end) = (start + from as u64, start + to as u64);
        let (dtype, shape) = (info.dtype, info.shape.clone());
        (name, TensorInfo { dtype, shape, start, end, strides: None })
    });
    Ok(tensors.collect())
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
}
