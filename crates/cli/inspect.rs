//! `bert inspect`: what a folder holds and whether it can be run, from its headers alone.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use encoder::Inspection;

use crate::source;

#[derive(Parser)]
#[command(after_help = "Examples:
  bert inspect folder
  bert inspect --format json org/name | jq .runs_as")]
pub struct Args {
    /// How to print
    #[arg(long, value_enum, default_value_t)]
    format: Format,

    /// Folder, file of weights, or org/name or org/name@revision on the Hugging Face hub; the model
    /// that the program carries, where none is given
    model: Option<String>,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// A line for each thing
    #[default]
    Text,
    /// One JSON object
    Json,
}

/// Exit code 1 if it cannot be run.
pub fn run(args: Args) -> Result<ExitCode> {
    let files = source::files_or_embedded(args.model.as_deref())?;
    let found = Inspection::new(&files);
    let mut out = io::stdout().lock();
    match args.format {
        Format::Text => write!(out, "{found}")?,
        Format::Json => {
            serde_json::to_writer_pretty(&mut out, &found).map_err(io::Error::from)?;
            writeln!(out)?;
        }
    }
    Ok(if found.runs() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
