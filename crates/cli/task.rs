//! What the commands share that run a model with a head on texts.

use std::io::{self, Write};

use anyhow::Result;
use candle_core::Device;
use clap::Args;
use encoder::{ModelFiles, Precision};
use serde::Serialize;

use crate::{compute::Compute, source, texts::texts};

#[derive(Args)]
pub struct Task {
    /// Folder, file of weights, or org/name or org/name@revision on the Hugging Face hub
    #[arg(long)]
    model: String,

    #[command(flatten)]
    compute: Compute,

    /// Texts; the lines of standard input where there are none
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
}

/// How a model is made of its files.
type FromFiles<M> = fn(&ModelFiles, Precision, &Device) -> encoder::Result<M>;

impl Task {
    /// The model, and the texts.
    pub fn start<M>(
        self,
        from_files: FromFiles<M>,
    ) -> Result<(M, impl Iterator<Item = Result<String>>)> {
        let files = source::files(&self.model)?;
        let (precision, device) = self.compute.start()?;
        Ok((from_files(&files, precision, &device)?, texts(self.texts)))
    }
}

/// A line of output.
pub fn write_line(out: &mut impl Write, line: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *out, line).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}
