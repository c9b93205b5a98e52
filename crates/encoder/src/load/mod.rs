//! Loads checkpoints: file access, tensor names, and one report of every missing, mismatched or
//! unexpected tensor.

mod checkpoint;
mod files;
mod folder;
#[cfg(feature = "hub")]
mod hub;
mod json;
mod names;
mod options;
mod packed_cache;
mod pickle;
mod report;
mod save;
mod tensor_info;
mod weights;

use std::{env, path::PathBuf, sync::Arc};

use candle_core::{DType, Device};
pub(crate) use checkpoint::Checkpoint;
pub(crate) use names::{
    DOWN, LABELS, NARROW_NORM, NARROW_POSITIONS, NARROW_TYPES, NARROW_VOCAB, NARROWING, NORM,
    Names, Naming, POSITIONS, PROJECTION, Row, SQUARE, TWO_OUTPUTS, TYPES, UP, VOCAB,
};
use ops::{ComputeType, Weights};

pub use files::ModelFiles;
pub(crate) use folder::ModelFolder;
#[cfg(feature = "hub")]
pub use hub::{DownloadProgress, Hub};
pub(crate) use json::{Json, parse_value};
pub use options::LoadOptions;
use packed_cache::OpenCache;
pub use packed_cache::{PackedCache, PackedCacheFile};
pub use report::{LoadReport, Mismatched, Missing};
pub(crate) use save::write;
pub(crate) use weights::WeightFiles;

use crate::{CheckpointError, ConfigError, Result};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The config of an adapter (LoRA and others), as PEFT saves it beside the weights.
const ADAPTER: &str = "adapter_config.json";

/// The part of a weights file to read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    All,
    /// Names, shapes and dtypes. Modules are built without their values.
    Header,
}

/// Loads a sentence-transformers module from the module's folder. With [`Read::All`], the weights
/// are converted to f32.
pub(crate) fn module<M>(
    files: &ModelFolder,
    read: Read,
    device: &Device,
    build: impl FnOnce(Weights) -> Result<M>,
) -> Result<M> {
    let weights = Arc::new(WeightFiles::open(files)?);
    let checkpoint = match read {
        Read::All => Checkpoint::new(weights.clone(), None),
        Read::Header => Checkpoint::without_data(weights.clone()),
    };
    let (module, _report) = checked(&weights, &checkpoint, device, |_, checkpoint| {
        let naming = Naming::identity();
        let module = build(checkpoint.model(naming.clone(), DType::F32, device));
        Ok((module, checkpoint.report(&[naming])))
    })?;
    Ok(module)
}

/// The value of an environment variable that is set and not empty, as a path; `~` is the home
/// folder.
fn path_variable(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(name).filter(|value| !value.is_empty())?);
    Some(match (path.strip_prefix("~"), env::home_dir()) {
        (Ok(below), Some(home)) => home.join(below),
        _ => path,
    })
}

/// Hugging Face's folder: `HF_HOME`, `$XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`.
fn huggingface_home() -> Option<PathBuf> {
    path_variable("HF_HOME")
        .or_else(|| Some(path_variable("XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(env::home_dir()?.join(".cache/huggingface")))
}

/// [`model`] for an encoder with f32 hidden states on a CPU. Modules that are loaded by
/// `ops::Linear::load` or `Table::load`, those of the head included, use the packed weights in
/// `cache`; weights that the cache lacks are packed and saved.
pub(crate) fn model_with_cache<M>(
    files: &ModelFolder,
    cache: &PackedCache,
    config_json: &[u8],
    compute_type: ComputeType,
    build: impl FnOnce(&WeightFiles, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    let open = |weights: &WeightFiles| cache.open(weights, config_json, compute_type).map(Some);
    load(files, &Device::Cpu, open, build)
}

/// Checks that `files` do not contain the config of an adapter ([`ADAPTER`]).
///
/// # Errors
/// [`ConfigError::Unsupported`] if they do; [`crate::FileError::Io`] or [`crate::FileError::Json`]
/// if the config cannot be read or parsed.
pub(crate) fn refuse_adapter(files: &ModelFolder) -> Result<()> {
    match files.json::<serde_json::Value>(ADAPTER)? {
        None => Ok(()),
        Some(adapter) => {
            let path = files.path(ADAPTER);
            let expected = "weights with the adapter merged into them";
            let got = adapter["peft_type"].to_string();
            Err(ConfigError::Unsupported { path, key: "peft_type", expected, got }.into())
        }
    }
}

/// Builds a model from the weights in `files`.
pub(crate) fn model<M>(
    files: &ModelFolder,
    device: &Device,
    build: impl FnOnce(&WeightFiles, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    load(files, device, |_| Ok(None), build)
}

fn load<M>(
    files: &ModelFolder,
    device: &Device,
    open_cache: impl FnOnce(&WeightFiles) -> Result<Option<OpenCache>>,
    build: impl FnOnce(&WeightFiles, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    refuse_adapter(files)?;
    let weights = Arc::new(WeightFiles::open(files)?);
    let cache = open_cache(&weights)?.map(Arc::new);
    let checkpoint = Checkpoint::new(weights.clone(), cache.clone());
    let loaded = checked(&weights, &checkpoint, device, build)?;
    if let Some(cache) = cache {
        cache.save();
    }
    Ok(loaded)
}

/// Builds a model, and returns it if the report is complete. The model can then be used from any
/// thread.
fn checked<M>(
    weights: &WeightFiles,
    checkpoint: &Checkpoint,
    device: &Device,
    build: impl FnOnce(&WeightFiles, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    let (model, report) = build(weights, checkpoint)?;
    checkpoint.check()?;
    match model {
        // If tensors are missing or mismatched, the error may stem from them: return the report
        // instead.
        Err(error) if report.has_all() => Err(error),
        _ if !report.is_complete() => Err(CheckpointError::Tensors(Box::new(report)).into()),
        model => {
            let model = model?;
            // Each thread has its own CUDA stream, which does not wait for the copies on this
            // thread's stream. Wait for the copies here.
            device.synchronize()?;
            ops::keep_freed_memory(device)?;
            ops::release_freed_memory(); // the weights before packing
            Ok((model, report))
        }
    }
}
