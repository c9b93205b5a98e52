//! From a checkpoint's files to a model: strictly, with one report of all that does not fit.

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
pub(crate) use names::Naming;

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
/// Low-rank weights beside the model's, as PEFT saves them.
const ADAPTER: &str = "adapter_config.json";

/// What of a file is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    All,
    /// Names and shapes alone: what is made of it is right in shape, and takes no memory.
    Header,
}

/// A module that has a folder of its own, in f32 whatever its file has.
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
        let module = build(checkpoint.model(Naming::AS_ASKED, dtype, device));
        Ok((module, checkpoint.report(&[Naming::AS_ASKED])))
    })?;
    Ok(module)
}

pub(crate) fn config_json(files: &ModelFiles) -> Result<std::borrow::Cow<'static, [u8]>> {
    files.need(CONFIG, "the model's sizes, in Hugging Face's names")
}

/// A model built on the weights of files.
pub(crate) fn model<M>(
    files: &ModelFiles,
    device: &Device,
    build: impl FnOnce(&Weights, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    if let Some(adapter) = files.json::<serde_json::Value>(ADAPTER)? {
        let (path, expected) = (files.path(ADAPTER), "weights with the adapter merged into them");
        let got = adapter["peft_type"].to_string();
        return Err(Error::Unsupported { path, key: "an adapter of peft_type", expected, got });
    }
    let weights = Arc::new(Weights::open(files)?);
    checked(&weights, &Checkpoint::new(weights.clone()), device, build)
}

/// A model built on weights, if the report has nothing against it: ready for any thread.
fn checked<M>(
    weights: &Weights,
    checkpoint: &Checkpoint,
    device: &Device,
    build: impl FnOnce(&Weights, &Checkpoint) -> Result<(Result<M>, LoadReport)>,
) -> Result<(M, LoadReport)> {
    let (model, report) = build(weights, checkpoint)?;
    checkpoint.check()?;
    match model {
        // What is not there or misshapen has a stand-in, and so cannot be the cause.
        Err(error) if report.missing.is_empty() && report.mismatched.is_empty() => Err(error),
        _ if !report.is_complete() => Err(Error::Checkpoint(Box::new(report))),
        model => {
            let model = model?;
            // A GPU's threads have a stream each, which does not wait for what this one has sent.
            device.synchronize()?;
            mha::ops::keep_freed_memory(device)?;
            Ok((model, report))
        }
    }
}
