//! `encodle fill-mask`: the most probable tokens for the mask tokens of texts.

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;
use corpus::{Error, InvalidRecord, Record};
use encoder::{Candidate, MaskFiller, Truncated};
use serde::Serialize;

use crate::{
    arguments::positive, json_line::write_line, task::Task, texts::refused, truncation::Truncation,
};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle fill-mask --model folder --top 3 \"Paris is the [MASK] of France.\"")]
pub struct Args {
    /// Number of candidate tokens to print per mask token, the most probable first
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = positive::<usize>)]
    top: usize,

    #[command(flatten)]
    task: Task,
}

/// One line of output.
#[derive(Serialize)]
struct Filled<'a> {
    text: &'a str,
    /// The candidate tokens of each mask token, in the order of the text.
    gaps: Vec<Vec<Token>>,
}

#[derive(Serialize)]
struct Token {
    token: String,
    score: f32,
}

/// Writes one JSON line per text, in order.
pub fn run(args: Args) -> Result<()> {
    let (model, source) = args.task.start(MaskFiller::from_files)?;
    let mut truncation = Truncation::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut fill = |record: Result<Record, InvalidRecord>| -> Result<()> {
        let record = record.map_err(Error::from)?;
        let text = record.text();
        let token = |Candidate { token, score, .. }| Token { token, score };
        let tokens = model.tokenize(text);
        let tokens = tokens.map_err(|error| refused(&record, &source, error))?;
        truncation.add(&Truncated::of([&tokens]));
        let masks = model.fill_tokens(&tokens, args.top)?.into_iter();
        let gaps = masks.map(|candidates| candidates.into_iter().map(token).collect()).collect();
        write_line(&mut out, &Filled { text, gaps })
    };
    let outcome = source.open()?.try_for_each(&mut fill);
    out.flush()?;
    truncation.warn(model.tokenizer().max_seq_length(), "");
    outcome
}
