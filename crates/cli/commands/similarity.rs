//! `encodle similarity`: the cosine similarity of two texts.

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;
use encoder::EmbedOptions;

use crate::{commands::compare::vectors_for_cosines, model::Model, vector_table::cosine};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle similarity \"A man is eating food.\" \"A man eats.\"")]
pub struct Args {
    #[command(flatten)]
    model: Model,

    /// First text
    #[arg(value_name = "A")]
    a: String,

    /// Second text
    #[arg(value_name = "B")]
    b: String,
}

pub fn run(args: Args) -> Result<()> {
    let embedder = args.model.embedder(&args.model.files()?)?;
    let vectors = vectors_for_cosines(&embedder, &[args.a, args.b], EmbedOptions::default())?;
    Ok(writeln!(io::stdout(), "{:.6}", cosine(&vectors[0], &vectors[1]))?)
}
