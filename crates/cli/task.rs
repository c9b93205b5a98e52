//! The arguments of the commands that run a model with a task head on texts.

use anyhow::Result;
use candle_core::Device;
use clap::Args;
use corpus::RecordSource;
use encoder::{ModelFiles, Precision};

use crate::{compute::Compute, model_files, texts};

#[derive(Args)]
pub struct Task {
    /// Model: folder, weights file, or org/name@revision on the Hugging Face hub (@revision is
    /// optional)
    #[arg(long)]
    model: String,

    #[command(flatten)]
    compute: Compute,

    /// Texts to run the model on [default: the lines of standard input]
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
}

/// The constructor of a model.
type FromFiles<M> = fn(&ModelFiles, Precision, &Device) -> encoder::Result<M>;

impl Task {
    /// Loads the model, and returns it with the source of the texts.
    pub fn start<M>(self, from_files: FromFiles<M>) -> Result<(M, RecordSource)> {
        let files = self.compute.with_cache(model_files::open(&self.model)?);
        let (precision, device) = self.compute.start()?;
        Ok((from_files(&files, precision, &device)?, texts::source(self.texts)))
    }
}
