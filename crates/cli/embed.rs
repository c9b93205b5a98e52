//! `bert embed`: texts to vectors, as a table to read or as JSON lines.

use std::{
    io::{self, BufRead, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::{Result, anyhow};
use candle_core::Device;
use clap::{Parser, ValueEnum};
use encoder::{Embedder, ModelFiles, Precision};
use serde::Serialize;

use crate::{embedded, table};

/// Lines read before they are embedded together.
const WINDOW: usize = 1024;

#[derive(Parser)]
pub struct Args {
    /// Folder of a sentence-transformers model; all-MiniLM-L6-v2, which the program carries, where
    /// none is given
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// What to multiply in; less is faster, and less exact
    #[arg(long, value_enum, default_value_t)]
    dtype: Dtype,

    /// Threads to compute on; as many as there are cores, or as RAYON_NUM_THREADS says, where not
    /// given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// How to print; a table on a terminal and JSON lines elsewhere, where not given
    #[arg(long, value_enum)]
    format: Option<Format>,

    /// Texts to embed; the lines of standard input where there are none
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Dtype {
    /// Exact
    #[default]
    F32,
    /// Cosine to f32 at least 0.9999
    Bf16,
    /// 8-bit integers; cosine to f32 at least 0.998
    Int8,
}

impl From<Dtype> for Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
            Dtype::Int8 => Self::Int8,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Dimensions, first values, and the cosine between the texts
    Table,
    /// One {"text": .., "embedding": [..]} a line
    Jsonl,
}

pub fn run(args: Args) -> Result<()> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global()?;
    }
    let files = match args.model {
        Some(dir) => ModelFiles::dir(dir)?,
        None => embedded::MODEL,
    };
    let embedder = Embedder::from_files(&files, args.dtype.into(), &Device::Cpu)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let format = args.format.unwrap_or(match io::stdout().is_terminal() {
        true => Format::Table,
        false => Format::Jsonl,
    });
    let texts = texts(args.texts);
    match format {
        Format::Table => {
            let texts = texts.collect::<Result<Vec<_>>>()?;
            let embeddings = embedder.embed(&texts)?.to_vec2()?;
            table::write(&mut out, embedder.dimension(), &texts, &embeddings)?;
        }
        Format::Jsonl => write_lines(&mut out, &embedder, texts)?,
    }
    out.flush()?;
    Ok(())
}

/// One line of `--format jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    embedding: &'a [f32],
}

/// A window of texts at a time; those before a bad one are written before it is an error.
fn write_lines(
    out: &mut impl Write,
    embedder: &Embedder,
    mut texts: impl Iterator<Item = Result<String>>,
) -> Result<()> {
    loop {
        let mut bad = Ok(());
        let good =
            texts.by_ref().take(WINDOW).map_while(|text| text.map_err(|e| bad = Err(e)).ok());
        let window: Vec<String> = good.collect();
        let embeddings: Vec<Vec<f32>> = embedder.embed(&window)?.to_vec2()?;
        for (text, embedding) in window.iter().zip(&embeddings) {
            serde_json::to_writer(&mut *out, &Line { text, embedding }).map_err(io::Error::from)?;
            writeln!(out)?;
        }
        out.flush()?;
        bad?;
        if window.is_empty() {
            return Ok(());
        }
    }
}

/// The texts given, or else the lines of standard input.
fn texts(given: Vec<String>) -> Box<dyn Iterator<Item = Result<String>>> {
    if !given.is_empty() {
        return Box::new(given.into_iter().map(Ok));
    }
    if io::stdin().is_terminal() {
        eprintln!("bert: reading texts, one a line, until the end of standard input (Ctrl-D)");
    }
    let lines = io::stdin().lock().split(b'\n').zip(1..);
    Box::new(lines.map(|(line, number)| {
        let mut line = line.map_err(|error| anyhow!("standard input cannot be read: {error}"))?;
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map_err(|error| {
            let byte = error.utf8_error().valid_up_to() + 1;
            anyhow!("standard input, line {number}: expected UTF-8, got another byte at {byte}")
        })
    }))
}
