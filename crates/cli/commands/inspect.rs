//! `encodle inspect`: a description of a model's files, and whether the model can be run. Reads the
//! headers of the weight files, not the weights.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use encoder::Inspection;

use crate::{default_model, fit::harmless};

#[derive(Parser)]
#[command(after_help = "The exit code is 1 if the model cannot be run or a problem is listed.

Examples:
  encodle inspect folder
  encodle inspect --format json org/name | jq .runs_as")]
pub struct Args {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,

    /// Model: folder, weights file, or org/name@revision on the Hugging Face hub (@revision is
    /// optional) [default: all-MiniLM-L6-v2]
    model: Option<String>,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// One property per line
    #[default]
    Text,
    /// One JSON object
    Json,
}

/// The exit code is 1 if the model cannot be run or has a problem.
pub fn run(args: Args) -> Result<ExitCode> {
    let files = default_model::open_or_default(args.model.as_deref())?;
    let inspection = Inspection::new(&files);
    let mut out = io::stdout().lock();
    match args.format {
        Format::Text => {
            for line in inspection.to_string().lines() {
                writeln!(out, "{}", harmless(line))?;
            }
        }
        Format::Json => {
            serde_json::to_writer_pretty(&mut out, &inspection).map_err(io::Error::from)?;
            writeln!(out)?;
        }
    }
    Ok(if inspection.runs() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
