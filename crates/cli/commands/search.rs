//! `encodle search`: the texts of a corpus that are nearest to queries.

use std::{
    collections::BTreeSet,
    io::{self, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::{Result, anyhow, bail, ensure};
use clap::{Parser, ValueEnum};
use corpus::{RecordSource, VectorFile};
use encoder::{EmbedOptions, Embedder, Hit, Prompt, Search};
use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::{
    arguments::{cosine, positive},
    commands::compare::vectors_for_cosines,
    default_model,
    fit::{fit, terminal_width},
    json_line::write_line,
    messages,
    model::{MODEL_HELP, Model},
    texts::{prompt, source, texts},
};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle embed --input lines.txt --output lines.parquet
  encodle search --corpus lines.parquet \"how do I undo a commit\"
  encodle search --corpus vectors.npy --records lines.txt --top 3 --threshold 0.5 \"undo\" \"redo\"
  encodle search --corpus lines.parquet --format jsonl < queries.txt | jq '.hits[0].row'")]
#[command(mut_arg("model", |argument| argument.help(model_help())))]
pub struct Args {
    /// File of vectors that encodle embed wrote: .npy, .parquet or .arrow
    #[arg(long, value_name = "FILE")]
    corpus: PathBuf,

    /// For a .npy corpus: the input file of encodle embed, to show the texts of the hits
    #[arg(long, value_name = "FILE")]
    records: Option<String>,

    /// Name of the field with the text, in the file of --records or in the corpus. A table shows
    /// this field of each hit, or the whole record if the field is not a string [default: text]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,

    /// Maximum number of hits per query
    #[arg(short = 'k', long, value_name = "N", default_value_t = 10, value_parser = positive::<usize>)]
    top: usize,

    /// Minimum cosine of a hit
    #[arg(long, value_name = "COSINE", allow_negative_numbers = true, value_parser = cosine)]
    threshold: Option<f32>,

    /// Name of a prompt of the model to put before each query [default: query, if the model has a
    /// prompt of this name]
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// Text to put before each query
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// Output format [default: table on a terminal, otherwise jsonl]
    #[arg(long, value_enum)]
    format: Option<Format>,

    #[command(flatten)]
    model: Model,

    /// Queries [default: the lines of standard input]
    #[arg(value_name = "QUERY")]
    queries: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Cosine, row number from 0 and text of each hit
    Table,
    /// One JSON object per line: {"query": .., "hits": [{"row": .., "score": .., "record": {..}}]}
    Jsonl,
}

/// One line of `--format jsonl`.
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

/// The help of `--model`, whose default differs from that of other commands.
fn model_help() -> String {
    format!(
        "{MODEL_HELP} [default: the model stored in the corpus; if there is none, {}]",
        default_model::NAME
    )
}

pub fn run(mut args: Args) -> Result<()> {
    let vectors = VectorFile::open(&args.corpus)?;
    if let Some(field) = &args.field {
        check_field(field, &vectors, &args)?;
    }
    let embedder = embedder(&mut args, &vectors)?;
    let queries = texts(&source(args.queries))?.collect::<Result<Vec<_>>>()?;
    let prompt = prompt(&args.prompt_name, &args.prompt).unwrap_or(Prompt::Query);
    let options = EmbedOptions::new().with_prompt(prompt);
    let query_vectors = vectors_for_cosines(&embedder, &queries, options)?;
    let search = Search::new(&query_vectors, args.top)?;
    let search = search.with_threshold(args.threshold.unwrap_or(f32::NEG_INFINITY));
    let hits = vectors.scan(&search)?.into_hits();

    let source = args.records.map(RecordSource::file).map(|source| match &args.field {
        Some(field) => source.with_field(field),
        None => source,
    });
    let rows: BTreeSet<u64> = hits.iter().flatten().map(|hit| hit.row).collect();
    let records = vectors.records(&rows, source.as_ref());
    let records = records.map_err(messages::without_input_format)?;
    let format = args.format.unwrap_or(if io::stdout().is_terminal() {
        Format::Table
    } else {
        Format::Jsonl
    });
    let mut out = io::BufWriter::new(io::stdout().lock());
    let field = args.field.as_deref().unwrap_or("text");
    for (query, hits) in queries.iter().zip(&hits) {
        let found = hits.iter().map(|Hit { row, score }| {
            let record = records.json.get(row);
            let record = record.map(|json| serde_json::from_str(json)).transpose()?;
            Ok(Found { row: *row, score: *score, record })
        });
        let hits = found.collect::<Result<Vec<_>>>()?;
        match format {
            Format::Jsonl => write_line(&mut out, &Line { query, hits })?,
            Format::Table => write_table(&mut out, query, field, &hits)?,
        }
    }
    out.flush()?;
    messages::warn_non_finite(&records.non_finite);
    Ok(())
}

/// Checks that the records have the field, or that --records gives a file of records.
///
/// # Errors
/// [`corpus::InputError::NoColumn`] if a corpus of records lacks the field; an error if there are
/// no records.
fn check_field(field: &str, vectors: &VectorFile, args: &Args) -> Result<()> {
    let name = args.corpus.display().to_string();
    match vectors.fields() {
        Some(fields) if !fields.contains(&field) => {
            let got = fields.into_iter().map(String::from).collect();
            Err(corpus::Error::Input(corpus::InputError::NoColumn {
                name,
                expected: field.to_string(),
                got,
            })
            .into())
        }
        None if args.records.is_none() => {
            bail!("--field needs --records, because {name} contains vectors only")
        }
        _ => Ok(()),
    }
}

/// The model for the queries: that of `--model`, otherwise the model that the corpus file names,
/// otherwise the default model.
fn embedder(args: &mut Args, vectors: &VectorFile) -> Result<Embedder> {
    let name = args.corpus.display();
    let is_default_model = !args.model.is_given() && vectors.model().is_none();
    if let Some(model) = vectors.model() {
        let spec = serde_json::from_str(model).map_err(|error| {
            anyhow!("{name}: the model in its metadata cannot be read: {error}")
        })?;
        args.model.resolve_for_corpus(spec)?;
    }
    let embedder = args.model.embedder(&args.model.files()?)?;
    let (got, max, model) = (vectors.dimension(), embedder.dimension(), args.model.name());
    ensure!(
        got <= max,
        "{name} has vectors of dimension {got}: expected at most {max} (the dimension of {model}); \
         set --model to the model that embedded the corpus"
    );
    if got < max && is_default_model {
        messages::print(&format!(
            "{name} does not name its model: the vectors of the queries, from {model}, are \
             truncated from {max} values to {got}; set --model to the model that embedded the \
             corpus"
        ));
    }
    Ok(embedder.with_dimension(got)?)
}

/// The hits of a query as a table.
fn write_table(out: &mut impl Write, query: &str, field: &str, hits: &[Found]) -> Result<()> {
    let columns = terminal_width();
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
