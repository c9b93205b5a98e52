//! Builds a model from its checkpoint, and returns it if the report is complete.

use std::sync::Arc;

use candle_core::{DType, Device};
use ops::{ComputeType, Weights};

use super::{
    checkpoint::Checkpoint,
    folder::{ADAPTER, ModelFolder},
    names::Naming,
    packed_cache::{OpenCache, PackedCache},
    report::LoadReport,
    weights::WeightFiles,
};
use crate::{CheckpointError, Error, Result};

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
    module_of(WeightFiles::open(files)?, read, device, build)
}

fn module_of<M>(
    weights: WeightFiles,
    read: Read,
    device: &Device,
    build: impl FnOnce(Weights) -> Result<M>,
) -> Result<M> {
    let weights = Arc::new(weights);
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

/// Loads a vector of any length from the folder of a sentence-transformers module.
///
/// # Errors
/// [`crate::CheckpointError::Tensors`] if there is no such vector; [`crate::FileError`] for a
/// missing or damaged file.
pub(crate) fn vector(files: &ModelFolder, name: &str) -> Result<Vec<f32>> {
    let weights = WeightFiles::open(files)?;
    let length = weights.info(name).map_or(0, |info| info.shape.iter().product());
    module_of(weights, Read::All, &Device::Cpu, |weights| {
        Ok(weights.get(length, name)?.map_err(ops::Error::from)?.to_vec1()?)
    })
}

/// The number of rows of a matrix, from the header of the weights file; 1 if there is no such
/// matrix, which loading then reports.
///
/// # Errors
/// [`crate::FileError`] for a missing or damaged file; [`crate::ConfigError::Unsupported`] for a
/// matrix without rows.
pub(crate) fn rows(files: &ModelFolder, name: &'static str) -> Result<usize> {
    let weights = WeightFiles::open(files)?;
    match weights.info(name).and_then(|info| info.shape.first().copied()) {
        None => Ok(1),
        Some(0) => Err(Error::unsupported(weights.path(), name, "at least one row", "0 rows")),
        Some(rows) => Ok(rows),
    }
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
/// [`crate::ConfigError::Unsupported`] if they do; [`crate::FileError::Io`] or
/// [`crate::FileError::Json`] if the config cannot be read or parsed.
pub(crate) fn check_no_adapter(files: &ModelFolder) -> Result<()> {
    match files.json::<serde_json::Value>(ADAPTER)? {
        None => Ok(()),
        Some(adapter) => {
            let expected = "weights with the adapter merged into them";
            let got = &adapter["peft_type"];
            Err(Error::unsupported(files.path(ADAPTER), "peft_type", expected, got))
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
    check_no_adapter(files)?;
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
    ops::check_device(device)?;
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
