//! The tensors of a checkpoint, in one file or in the shards that an index names. Tensors are read
//! one at a time, and every byte range is checked against the file's length.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use ops::{SharedBytes, f32_from_bf16, f32_from_f16};
use safetensors::{Dtype, SafeTensorError, tensor::Metadata};
use serde::Deserialize;

use super::{
    files::Opened,
    folder::{ModelFolder, WEIGHTS},
    hash::{hash, hash_of_file},
    json::Json,
    pickle,
    tensor_info::{TensorInfo, TensorInfos},
};
use crate::{CheckpointError, Error, FileError, Result};

/// Possible names of the weights, in order of preference.
const FILES: [&str; 4] =
    [WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Maximum length of a safetensors header in bytes, as in the `safetensors` crate.
const MAX_HEADER: u64 = 100_000_000;

/// The tensors of a checkpoint, in one file or several.
pub(crate) struct WeightFiles {
    path: String,
    shards: Vec<Shard>,
    /// For each tensor, the position of its shard in `shards`.
    shard_of: BTreeMap<String, usize>,
}

struct Shard {
    path: String,
    file: Opened,
    tensors: TensorInfos,
}

/// The keys of an index of shards, such as `model.safetensors.index.json`.
#[derive(Deserialize)]
#[serde(expecting = "an object with weight_map")]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Opens the weights among `files` and reads their headers.
    ///
    /// # Errors
    /// - [`FileError::NoFile`] if the weights or a shard are missing; [`FileError::Io`] if a file
    ///   cannot be read
    /// - [`FileError::Safetensors`], [`FileError::Pickle`], [`FileError::LfsPointer`] or
    ///   [`FileError::WebPage`] for an invalid file
    /// - [`FileError::Json`], [`CheckpointError::ShardName`], [`CheckpointError::NotInShard`] or
    ///   [`CheckpointError::TwoShards`] for an invalid index
    /// - the errors of a download, listed at [`ModelFiles::need`](crate::ModelFiles::need)
    pub(crate) fn open(files: &ModelFolder) -> Result<Self> {
        let mut names: Vec<&str> = FILES.to_vec();
        if let Some(named) = files.weights() {
            names = vec![named];
        }
        for name in names {
            if name.ends_with(".json") {
                if let Some(json) = files.json_file(name)? {
                    return Self::from_index(files, &json);
                }
            } else if let Some(file) = files.open(name)? {
                let path = files.path(name);
                return Self::from_shards(path.clone(), vec![Shard::open(path, file)?]);
            }
        }
        Err(files.no_file(files.weights().unwrap_or(WEIGHTS), "the model's weights"))
    }

    fn from_index(files: &ModelFolder, json: &Json) -> Result<Self> {
        let path = json.path().to_string();
        let Index { weight_map } = json.to()?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let shards = names.into_iter().map(|name| {
            if name.contains(['/', '\\', ':']) || [".", "..", ""].contains(&name.as_str()) {
                return Err(
                    CheckpointError::ShardName { path: path.clone(), got: name.clone() }.into()
                );
            }
            let file = files.open(name)?;
            let file = file.ok_or_else(|| files.no_file(name, "a shard that the index names"))?;
            Shard::open(files.path(name), file)
        });
        let weights = Self::from_shards(path.clone(), shards.collect::<Result<_>>()?)?;
        for (tensor, name) in weight_map {
            let shard = weights.shard_of.get(&tensor).map(|&i| &weights.shards[i].path);
            let expected = files.path(&name);
            if shard != Some(&expected) {
                return Err(CheckpointError::NotInShard { path, tensor, expected }.into());
            }
        }
        Ok(weights)
    }

    fn from_shards(path: String, shards: Vec<Shard>) -> Result<Self> {
        let mut shard_of = BTreeMap::new();
        for (i, shard) in shards.iter().enumerate() {
            for tensor in shard.tensors.keys() {
                if let Some(other) = shard_of.insert(tensor.clone(), i) {
                    let paths = [&shards[other], shard].map(|shard| shard.path.clone());
                    return Err(CheckpointError::TwoShards { tensor: tensor.clone(), paths }.into());
                }
            }
        }
        Ok(Self { path, shards, shard_of })
    }

    /// The path of the file or the index, for errors.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The hash of the files. `folder` holds the hashes of files that were hashed before.
    ///
    /// # Errors
    /// [`FileError::Io`] if a file cannot be read.
    pub(crate) fn hash(&self, folder: &Path) -> Result<u128> {
        let hashes = self.shards.iter().map(|shard| {
            let hash = match &shard.file {
                Opened::Bytes(bytes) => Ok(hash(bytes)),
                file => hash_of_file(file, file.len(), folder),
            };
            hash.map_err(|source| Error::File(FileError::Io { path: shard.path.clone(), source }))
        });
        let hashes = hashes.map(|hash| Ok(hash?.to_le_bytes())).collect::<Result<Vec<_>>>()?;
        Ok(hash(hashes.as_flattened()))
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.shard_of.keys().map(String::as_str).collect()
    }

    /// A tensor's shape and dtype.
    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.shards[*self.shard_of.get(name)?].tensors.get(name)
    }

    /// The values of a contiguous f32 tensor in row-major order, or of one of its equal parts:
    /// `part` is the index of the part and the number of parts. Each value is copied once.
    ///
    /// # Errors
    /// The errors of [`Self::data`].
    pub(crate) fn f32_values(
        &self,
        name: &str,
        tensor: &TensorInfo,
        part: Option<(usize, usize)>,
    ) -> Result<Vec<f32>> {
        let shard = &self.shards[self.shard_of[name]];
        let (start, len) = tensor.range_of(part);
        let values = shard.file.f32_at(start, len / size_of::<f32>());
        values.map_err(|source| Error::File(FileError::Io { path: shard.path.clone(), source }))
    }

    /// The bytes of a tensor in memory, at a multiple of the size of its values, or of one of its
    /// equal parts, as in [`Self::f32_values`]. Those of a file are mapped.
    ///
    /// # Errors
    /// The errors of [`Self::data`].
    pub(crate) fn shared(
        &self,
        name: &str,
        tensor: &TensorInfo,
        part: Option<(usize, usize)>,
    ) -> Result<SharedBytes> {
        let shard = &self.shards[self.shard_of[name]];
        let (start, len) = tensor.range_of(part);
        let bytes = shard.file.shared(start, len, tensor.dtype.bitsize() / 8);
        bytes.map_err(|source| Error::File(FileError::Io { path: shard.path.clone(), source }))
    }

    /// Fills `out` with the bytes of a tensor from the byte `start` of the file on.
    ///
    /// # Errors
    /// The errors of [`Self::data`].
    pub(crate) fn read_at(&self, name: &str, start: u64, out: &mut [u8]) -> Result<()> {
        let shard = &self.shards[self.shard_of[name]];
        let read = shard.file.read_at(start, out);
        read.map_err(|source| Error::File(FileError::Io { path: shard.path.clone(), source }))
    }

    /// The values of a tensor of floats or signed bytes, as f32 in row-major order; `None` for
    /// another dtype.
    ///
    /// # Errors
    /// The errors of [`Self::data`].
    pub(crate) fn to_f32(&self, name: &str, tensor: &TensorInfo) -> Result<Option<Vec<f32>>> {
        if tensor.dtype == Dtype::F32 && tensor.strides.is_none() {
            return self.f32_values(name, tensor, None).map(Some);
        }
        let data = self.data(name, tensor)?;
        Ok(Some(match tensor.dtype {
            Dtype::F32 => data.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect(),
            Dtype::F64 => {
                data.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x) as f32).collect()
            }
            Dtype::F16 => f32_from_f16(data.as_chunks().0),
            Dtype::BF16 => f32_from_bf16(data.as_chunks().0),
            Dtype::I8 => data.iter().map(|&x| f32::from(x as i8)).collect(),
            _ => return Ok(None),
        }))
    }

    /// The tensor's bytes in row-major order.
    ///
    /// # Errors
    /// [`FileError::Io`] if the file cannot be read, or was truncated after it was opened.
    pub(crate) fn data(&self, name: &str, tensor: &TensorInfo) -> Result<Cow<'_, [u8]>> {
        let shard = &self.shards[self.shard_of[name]];
        let data = shard.file.at(tensor.start, (tensor.end - tensor.start) as usize);
        let data =
            data.map_err(|source| Error::File(FileError::Io { path: shard.path.clone(), source }))?;
        Ok(match &tensor.strides {
            None => data,
            Some(strides) => to_row_major(&data, tensor, strides).into(),
        })
    }
}

/// Copies a strided tensor into row-major order.
fn to_row_major(data: &[u8], tensor: &TensorInfo, strides: &[usize]) -> Vec<u8> {
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
        let is_pickled = pickle::is_pickled(&file);
        let is_pickled = is_pickled
            .map_err(|source| Error::File(FileError::Io { path: path.clone(), source }))?;
        let tensors = if path.ends_with(".bin") || is_pickled {
            let tensors = pickle::tensors(&file);
            tensors.map_err(|what| Error::File(FileError::Pickle { path: path.clone(), what }))?
        } else {
            safetensors(&file, &path)?
        };
        Ok(Self { path, file, tensors })
    }
}

/// Reads the tensors' dtypes, shapes and byte ranges from the header of a safetensors file.
fn safetensors(file: &Opened, path: &str) -> Result<TensorInfos> {
    let path = || path.to_string();
    let invalid = |source| Error::File(FileError::Safetensors { path: path(), source });
    let read = |from, len| {
        file.at(from, len).map_err(|source| Error::File(FileError::Io { path: path(), source }))
    };
    if file.len() < 8 {
        return Err(invalid(SafeTensorError::HeaderTooSmall));
    }
    let mut size = [0; 8];
    size.copy_from_slice(&read(0, 8)?);
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER {
        return Err(invalid(SafeTensorError::HeaderTooLarge));
    }
    let start = 8 + size;
    if start > file.len() {
        return Err(invalid(SafeTensorError::InvalidHeaderLength));
    }
    let header = read(8, size as usize)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|source| {
        invalid(match tensor_at_same_place(&header) {
            Some(name) => SafeTensorError::InvalidOffset(name),
            None => SafeTensorError::InvalidHeaderDeserialization(source),
        })
    })?;
    if start.checked_add(header.data_len() as u64) != Some(file.len()) {
        return Err(invalid(SafeTensorError::MetadataIncompleteBuffer));
    }
    let tensors = header.tensors().into_iter().map(|(name, info)| {
        let (from, to) = info.data_offsets;
        let (start, end) = (start + from as u64, start + to as u64);
        let (dtype, shape) = (info.dtype, info.shape.clone());
        (name, TensorInfo { dtype, shape, start, end, strides: None })
    });
    Ok(tensors.collect())
}

/// The first tensor in the order of the names that has the byte range of an earlier one. Of two
/// such tensors, the crate `safetensors` names any: it keeps them in a hash map.
fn tensor_at_same_place(header: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Place {
        data_offsets: Option<(u64, u64)>,
    }
    let header: BTreeMap<String, Place> = serde_json::from_slice(header).ok()?;
    let mut seen = BTreeSet::new();
    let mut is_second = |(from, to)| from < to && !seen.insert((from, to));
    let second =
        header.into_iter().find(|(_, place)| place.data_offsets.is_some_and(&mut is_second));
    second.map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_core::{DType, Device};
    use ops::{ComputeType, Linear, Table, loaded};

    use super::*;
    use crate::{
        ModelFiles,
        load::{checkpoint::Checkpoint, names::Naming},
    };

    /// A safetensors file with this header and `data` zero bytes of data.
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    /// The header of a file with one tensor, `x`, of four f32 values.
    const X: &str = r#"{"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}"#;

    #[test]
    fn of_two_tensors_at_the_same_place_the_second_is_named() {
        let x = r#"{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}"#;
        let header = format!(r#"{{"c": {x}, "a": {x}, "b": {x}}}"#);
        let opened = Opened::Bytes(std::sync::Arc::new(file(&header, 16).into()));
        let error = safetensors(&opened, "m").map(|_| ()).unwrap_err().to_string();
        let expected = "m is not a valid safetensors file: invalid offset for tensor `b`; download \
                        it again if it was truncated";
        assert_eq!(error, expected);
    }

    #[test]
    fn a_file_truncated_after_opening_gives_an_io_error() -> Result<()> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(WEIGHTS);
        let header = X.replace("\"x", "\"a.weight").replace("[4]", "[2, 2]");
        fs::write(&path, file(&header, 16)).unwrap();
        let files = ModelFolder::new(&ModelFiles::dir(dir.path())?);
        let checkpoint = Checkpoint::new(WeightFiles::open(&files)?.into(), None);
        let weights = checkpoint.model(Naming::identity(), DType::F32, &Device::Cpu);
        assert_eq!(weights.get((2, 2), "a.weight")?.unwrap().to_vec2::<f32>()?, [[0.0; 2]; 2]);
        checkpoint.check()?;
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(80).unwrap();
        let tensor = || weights.get((2, 2), "a.weight").map(drop);
        let map = || Linear::load(ComputeType::Int8, 2, 2, false, weights.pp("a")).map(drop);
        let table = || loaded(Table::load(2, 2, weights.pp("a"))).map(drop);
        let loads: [&dyn Fn() -> ops::Result<()>; 3] = [&tensor, &map, &table];
        for load in loads {
            load()?; // `check` returns the error
            let error = checkpoint.check().unwrap_err().to_string();
            let expected = "model.safetensors cannot be read: failed to fill whole buffer";
            assert!(error.ends_with(expected), "{error}");
        }
        Ok(())
    }
}
