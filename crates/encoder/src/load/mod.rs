//! From a checkpoint's files to a model: strictly, with one report of all that does not fit.

mod checkpoint;
mod names;
mod open;
mod report;

use candle_core::{DType, Device};
use checkpoint::Checkpoint;
use safetensors::SafeTensors;

pub use open::ModelFiles;
pub use report::{LoadReport, Mismatched, Missing};

use crate::{BertConfig, BertModel, Error, Result};

/// [`BertModel::from_files`].
pub(crate) fn bert(
    files: &ModelFiles,
    dtype: DType,
    device: &Device,
) -> Result<(BertModel, LoadReport)> {
    if !dtype.is_float() {
        return Err(mha::Error::DType {
            argument: "dtype",
            expected: "a floating-point dtype",
            got: dtype,
        }
        .into());
    }
    const CONFIG: &str = "config.json";
    let config = files.need(CONFIG, "the model's sizes, in Hugging Face's names")?;
    let config = BertConfig::from_json(&config, &files.path(CONFIG))?;

    const WEIGHTS: &str = "model.safetensors";
    let path = files.path(WEIGHTS);
    let bytes = files.map(WEIGHTS, "the model's weights")?;
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|source| Error::Safetensors { path: path.clone(), source })?;
    let checkpoint = Checkpoint::new(&tensors, path)?;
    let pooler = ["pooler.weight", "pooler.bias"].iter().any(|name| checkpoint.contains(name));
    let model = BertModel::new(&config, pooler, checkpoint.var_builder(dtype, device));
    let report = checkpoint.report();
    match report.is_complete() {
        true => Ok((model?, report)),
        false => Err(Error::Checkpoint(Box::new(report))),
    }
}
