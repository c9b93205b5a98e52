//! `bert search`: the texts of a corpus that are nearest to some queries.

use std::{
    collections::BTreeSet,
    io::{self, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::{Result, anyhow, ensure};
use clap::{Parser, ValueEnum};
use encoder::{EmbedOptions, Hit, Prompt, Search};
use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::{
    compare,
    corpus::Corpus,
    json_rows,
    model::Model,
    records::Input,
    table::fit,
    task::write_line,
    texts::{prompt, texts},
};

#[derive(Parser)]
#[command(after_help = "Examples:
  bert embed --input lines.txt --output lines.parquet
  bert search --corpus lines.parquet \"how do I undo a commit\"
  bert search --corpus vectors.npy --records lines.txt --top 3 --threshold 0.5 \"undo\" \"redo\"
  bert search --corpus lines.parquet --format jsonl < queries.txt | jq .hits[0].row")]
pub struct Args {
    /// File of vectors that bert embed has written: .npy, .parquet or .arrow
    #[arg(long, value_name = "FILE")]
    corpus: PathBuf,

    /// What a .npy file was made of, to show the texts of its rows
    #[arg(long, value_name = "FILE")]
    records: Option<String>,

    /// The field of those records that is the text; text, where not given
    #[arg(long, value_name = "NAME")]
    field: Option<String>,

    /// Tell the N nearest to each query
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10)]
    top: usize,

    /// Leave out those whose cosine is below
    #[arg(long, value_name = "COSINE", allow_negative_numbers = true)]
    threshold: Option<f32>,

    /// The model's prompt to put before each query; query, where the model has it and none is given
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// What to put before each query
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// How to print: a table on a terminal and JSON lines elsewhere, where not given
    #[arg(long, value_enum)]
    format: Option<Format>,

    #[command(flatten)]
    model: Model,

    /// Texts to look for; the lines of standard input where there are none
    #[arg(value_name = "QUERY")]
    queries: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The cosine, the row from 0, and the text
    Table,
    /// One {"query": .., "hits": [{"row": .., "score": .., "record": {..}}]} a line
    Jsonl,
}

/// A line of `--format jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    query: &'a str,
    hits: Vec<Found<'a>>,
}

#[derive(Serialize)]
struct Found<'a> {
    row: u64,
    score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<&'a RawValue>,
}

pub fn run(mut args: Args) -> Result<()> {
    let corpus = Corpus::open(&args.corpus)?;
    let name = args.corpus.display();
    if let Some(made_by) = corpus.made_by() {
        let made_by = serde_json::from_str(made_by)
            .map_err(|error| anyhow!("{name}: what made it cannot be read: {error}"))?;
        args.model.take(made_by)?;
    }
    ensure!(
        !args.threshold.is_some_and(f32::is_nan),
        "--threshold is no number: expected a cosine"
    );
    let (embedder, _) = args.model.embedder()?;
    ensure!(
        corpus.dimension() <= embedder.dimension(),
        "{name} has vectors of {} numbers: expected {}, as {} makes; see --model",
        corpus.dimension(),
        embedder.dimension(),
        args.model.name()
    );
    let embedder = embedder.with_dimension(corpus.dimension())?;
    let queries = texts(args.queries).collect::<Result<Vec<_>>>()?;
    let prompt = prompt(&args.prompt_name, &args.prompt).unwrap_or(Prompt::Query);
    let options = EmbedOptions { prompt, ..EmbedOptions::default() };
    let vectors = compare::vectors_for_cosines(&embedder, &queries, options)?;
    let search = Search::new(&vectors, args.top)?;
    let search = search.with_threshold(args.threshold.unwrap_or(f32::NEG_INFINITY));
    let hits = corpus.scan(&search)?.into_hits();

    let records = args.records.map(|path| Input::new(path, args.field.clone()));
    let rows: BTreeSet<u64> = hits.iter().flatten().map(|hit| hit.row).collect();
    let objects = corpus.objects(&rows, records.as_ref())?;
    let format = args.format.unwrap_or(match io::stdout().is_terminal() {
        true => Format::Table,
        false => Format::Jsonl,
    });
    let mut out = io::BufWriter::new(io::stdout().lock());
    let field = args.field.as_deref().unwrap_or("text");
    for (query, hits) in queries.iter().zip(&hits) {
        let found = hits.iter().map(|Hit { row, score }| {
            let record = objects.get(row).map(|object| serde_json::from_str(object)).transpose()?;
            Ok(Found { row: *row, score: *score, record })
        });
        let hits = found.collect::<Result<Vec<_>>>()?;
        match format {
            Format::Jsonl => write_line(&mut out, &Line { query, hits })?,
            Format::Table => table(&mut out, query, field, &hits)?,
        }
    }
    out.flush()?;
    json_rows::tell_not_finite();
    Ok(())
}

/// The hits of a query for a person to read.
fn table(out: &mut impl Write, query: &str, field: &str, hits: &[Found]) -> Result<()> {
    let columns = terminal_size::terminal_size().map_or(100, |(width, _)| usize::from(width.0));
    writeln!(out, "{}", fit(query, columns).trim_end())?;
    for Found { row, score, record } in hits {
        let text = record.map(|record| -> Result<String> {
            let record: Value = serde_json::from_str(record.get())?;
            Ok(match &record[field] {
                Value::String(text) => text.clone(),
                _ => record.to_string(),
            })
        });
        let text = text.transpose()?.unwrap_or_default();
        let text = fit(&text, columns.saturating_sub(22).max(20));
        writeln!(out, "{score:>9.4} {row:>10}  {}", text.trim_end())?;
    }
    Ok(writeln!(out)?)
}
