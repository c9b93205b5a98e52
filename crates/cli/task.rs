//! The arguments of the commands that run a model with a task head on texts.

use anyhow::Result;
use clap::Args;
use corpus::RecordSource;
use encoder::{LoadOptions, ModelFiles};

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
type FromFiles<M> = fn(&ModelFiles, &LoadOptions) -> encoder::Result<M>;

impl Task {
    /// Loads the model, and returns it with the source of the texts.
    pub fn start<M>(self, from_files: FromFiles<M>) -> Result<(M, RecordSource)> {
        let files = model_files::open(&self.model)?;
        let options = self.compute.start()?;
        Ok((from_files(&files, &options)?, texts::source(self.texts)))
    }
}
