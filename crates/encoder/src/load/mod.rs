//! Loads checkpoints: file access, tensor names, and one report of every missing, mismatched or
//! unexpected tensor.

mod checkpoint;
mod files;
#[cfg(feature = "hub")]
mod hub;
mod names;
mod pickle;
mod report;
mod save;
mod tensor_info;
mod weights;

use std::sync::Arc;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
pub(crate) use checkpoint::Checkpoint;
pub(crate) use names::{
    DOWN, LABELS, NARROW_NORM, NARROW_POSITIONS, NARROW_TYPES, NARROW_VOCAB, NARROWING, NORM,
    Names, Naming, POSITIONS, PROJECTION, Row, SQUARE, TWO_OUTPUTS, TYPES, UP, VOCAB,
};

pub use files::ModelFiles;
pub(crate) use files::{parse_json, parse_value};
#[cfg(feature = "hub")]
pub use hub::{Fetched, Hub};
pub use report::{LoadReport, Mismatched, Missing};
pub(crate) use save::write;
pub(crate) use weights::Weights;

use crate::{Error, Result};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The config of an adapter (LoRA and others), as PEFT saves it beside the weights.
const ADAPTER: &str = "adapter_config.json";

/// The part of a weights file to read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    All,
    /// Names, shapes and dtypes. Modules get placeholder tensors of the right shape, which take no
    /// memory.
    Header,
}

/// Loads a sentence-transformers module from its own folder. The weights are converted to f32.
pub(crate) fn module<M>(
    files: &ModelFiles,
    read: Read,
    device: &Device,
    build: impl FnOnce(VarBuilder) -> Result<M>,
) -> Result<M> {
    let weights = Arc::new(Weights::open(files)?);
    let (checkpoint, dtype) = match read {
        Read::All => (Checkpoint::new(weights.clone()), DType::F32),
        Read::Header => (Checkpoint::without_data(weights.clone()), DType::F16),
    };
    let (module, _report) = checked(&weights, &checkpoint, device, |_, checkpoint| {
        let naming = Naming::identity();
        let module = build(checkpoint.model(naming.clone(), dtype, device));
        Ok((module, checkpoint.report(&[naming])))
    })?;
    Ok(module)
}

pub(crate) fn config_json(files: &ModelFiles) -> Result<std::borrow::Cow<'static, [u8]>> {
    files.need(CONFIG, "the model's configuration, in Hugging Face's format")
}

/// Builds a model from the weights in `files`.
pub(crate) fn model<M>(
    files: &ModelFiles,
    device: &Device,
    build: impl FnOnce(&Weights, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    if let Some(adapter) = files.json::<serde_json::Value>(ADAPTER)? {
        let (path, expected) = (files.path(ADAPTER), "weights with the adapter merged into them");
        let got = adapter["peft_type"].to_string();
        return Err(Error::Unsupported { path, key: "peft_type", expected, got });
    }
    let weights = Arc::new(Weights::open(files)?);
    checked(&weights, &Checkpoint::new(weights.clone()), device, build)
}

/// Builds a model, and returns it if the report is complete. The model can then be used from any
/// thread.
fn checked<M>(
    weights: &Weights,
    checkpoint: &Checkpoint,
    device: &Device,
    build: impl FnOnce(&Weights, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    let (model, report) = build(weights, checkpoint)?;
    checkpoint.check()?;
    match model {
        // If tensors are missing or mismatched, the error may stem from their placeholders: return
        // the report instead.
        Err(error) if report.missing.is_empty() && report.mismatched.is_empty() => Err(error),
        _ if !report.is_complete() => Err(Error::Checkpoint(Box::new(report))),
        model => {
            let model = model?;
            // Each thread has its own CUDA stream, which does not wait for the copies on this
            // thread's stream. Wait for the copies here.
            device.synchronize()?;
            mha::ops::keep_freed_memory(device)?;
            Ok((model, report))
        }
    }
}
