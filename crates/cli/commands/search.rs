//! `encodle search`: the texts of a corpus that are nearest to queries.

use std::{
    collections::BTreeSet,
    io::{self, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};
use corpus::{RecordSource, VectorFile};
use encoder::{EmbeddingKind, Hit, LoadOptions, Prompt, reciprocal_rank_fusion};
use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::{
    arguments::{choice, finite, positive, usage_error},
    default_model,
    fit::{fit, terminal_width},
    json_line::write_line,
    messages,
    model::{MODEL_HELP, Model},
    searched_file::{Queries, SearchedFile},
    texts::{prompt, source, texts},
};

/// The default of `--rrf-k`.
const RRF_K: u32 = 60;

/// The default of `--candidates`, if `--top` is not larger.
const CANDIDATES: usize = 100;

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle embed --input lines.txt --output lines.parquet
  encodle search --corpus lines.parquet \"how do I undo a commit\"
  encodle search --corpus vectors.npy --records lines.txt --top 3 --threshold 0.5 \"undo\" \"redo\"
  encodle search --corpus dense.parquet --hybrid sparse.parquet \"how do I undo a commit\"
  encodle search --corpus all.parquet --kind all \"how do I undo a commit\"
  encodle search --corpus lines.parquet --format jsonl < queries.txt | jq '.hits[0].row'")]
#[command(mut_arg("model", |argument| argument.help(model_help())))]
pub struct Args {
    /// File of vectors that encodle embed wrote: .npy, .parquet or .arrow
    #[arg(long, value_name = "FILE")]
    corpus: PathBuf,

    /// Kind of the vectors to search, for a file of --corpus with vectors of all kinds; all for a
    /// hybrid search of all three kinds [default: dense]
    #[arg(long, value_name = "KIND", value_parser = choice::<EmbeddingKind>())]
    kind: Option<EmbeddingKind>,

    /// Another file of vectors of the same records, such as sparse vectors beside dense ones; can
    /// be repeated. Each file is searched by its own model, and the rows are ordered by their ranks
    /// in all files (reciprocal rank fusion). The file must name its model; --model, --pooling,
    /// --normalize, --prompt-name and --prompt are for the file of --corpus
    #[arg(long, value_name = "FILE")]
    hybrid: Vec<PathBuf>,

    /// Number k of reciprocal rank fusion: the score of a row is the sum of 1 / (k + rank) over the
    /// files or kinds. Needs --hybrid or --kind all [default: 60]
    #[arg(long, value_name = "K")]
    rrf_k: Option<u32>,

    /// Number of rows of each file or kind that are ranked, at least that of --top. Needs --hybrid or
    /// --kind all [default: 100, or --top if it is larger]
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    candidates: Option<usize>,

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

    /// Minimum score of a hit: its cosine, the dot product of sparse vectors, or the MaxSim
    #[arg(
        long,
        value_name = "SCORE",
        allow_negative_numbers = true,
        value_parser = finite
    )]
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
    /// Score, row number from 0 and text of each hit
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

pub fn run(args: Args) -> Result<()> {
    let top = args.check_hybrid()?.unwrap_or(args.top);
    let files = open(&args)?;
    // The records of the hits are those of the first file that contains records.
    let shown = files.iter().map(|file| &file.vectors).find(|vectors| vectors.fields().is_some());
    let shown = shown.unwrap_or(&files[0].vectors);
    if let Some(field) = &args.field {
        check_field(field, shown, args.records.is_some())?;
    }
    let options = args.model.load_options()?;
    let queries = texts(&source(args.queries.clone()))?.collect::<Result<Vec<_>>>()?;
    let hits = args.hits(&files, &queries, top, &options)?;

    let source = args.records.map(RecordSource::file).map(|source| match &args.field {
        Some(field) => source.with_field(field),
        None => source,
    });
    let rows: BTreeSet<u64> = hits.iter().flatten().map(|hit| hit.row).collect();
    let records = shown.records(&rows, source.as_ref());
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

impl Args {
    /// The hits of each query in the file, or in a hybrid search, where each file or kind of vectors
    /// ranks `top` rows.
    fn hits(
        &self,
        files: &[SearchedFile],
        queries: &[String],
        top: usize,
        options: &LoadOptions,
    ) -> Result<Vec<Vec<Hit>>> {
        let own = prompt(&self.prompt_name, &self.prompt).unwrap_or(Prompt::Query);
        let (corpus, others) = files.split_first().expect("the file of --corpus");
        let own = Queries { texts: queries, prompt: own, top };
        let mut rankings = match self.kind {
            Some(EmbeddingKind::All) => corpus.search_all_kinds(&own, options)?,
            _ => vec![corpus.search(&own, options)?],
        };
        if !self.is_hybrid() {
            let mut hits = rankings.remove(0);
            let threshold = self.threshold.unwrap_or(f32::NEG_INFINITY);
            hits.iter_mut().for_each(|hits| hits.retain(|hit| hit.score >= threshold));
            return Ok(hits);
        }
        for file in others {
            let queries = Queries { texts: queries, prompt: Prompt::Query, top };
            rankings.push(file.search(&queries, options)?);
        }
        let fused = (0..queries.len()).map(|query| {
            let rankings = rankings.iter().map(|hits| &hits[query][..]);
            let mut hits = reciprocal_rank_fusion(rankings, self.rrf_k.unwrap_or(RRF_K));
            hits.truncate(self.top);
            hits
        });
        Ok(fused.collect())
    }

    /// Whether several files or kinds of vectors are searched.
    fn is_hybrid(&self) -> bool {
        !self.hybrid.is_empty() || self.kind == Some(EmbeddingKind::All)
    }

    /// The number of rows of each file or kind that a hybrid search ranks; `None` for another search.
    ///
    /// # Errors
    /// A usage error if the number is less than that of the hits, and for options that have no
    /// effect on the search.
    fn check_hybrid(&self) -> Result<Option<usize>> {
        if !self.is_hybrid() {
            let options =
                [("--rrf-k", self.rrf_k.is_some()), ("--candidates", self.candidates.is_some())];
            return match options.iter().find(|(_, is_given)| *is_given) {
                Some((option, _)) => Err(usage_error(format!(
                    "{option} is for a hybrid search: expected --hybrid FILE, or --kind all"
                ))),
                None => Ok(None),
            };
        }
        if self.threshold.is_some() {
            return Err(usage_error(
                "--threshold cannot be used with a hybrid search, whose scores are sums of ranks",
            ));
        }
        match self.candidates {
            None => Ok(Some(self.top.max(CANDIDATES))),
            Some(candidates) if candidates >= self.top => Ok(Some(candidates)),
            Some(candidates) => Err(usage_error(format!(
                "--candidates is {candidates}: expected at least {}, the value of --top",
                self.top
            ))),
        }
    }
}

/// Opens the files, that of --corpus first, and checks that the options fit them.
///
/// # Errors
/// The errors of [`VectorFile::open`] and [`SearchedFile::new`]; a usage error for a threshold that
/// is no cosine; an error if the numbers of vectors differ, or if a file of --hybrid does not name
/// its model.
fn open(args: &Args) -> Result<Vec<SearchedFile>> {
    let corpus = VectorFile::open(&args.corpus)?;
    let corpus = match args.kind {
        None | Some(EmbeddingKind::All) => corpus,
        Some(kind) => corpus.of_kind(kind)?,
    };
    if let (Some(threshold), EmbeddingKind::Dense) = (args.threshold, corpus.kind())
        && !(-1.0..=1.0).contains(&threshold)
    {
        return Err(usage_error(format!(
            "--threshold is {threshold}: expected a cosine from -1 to 1, because {} contains dense \
             vectors",
            corpus.name()
        )));
    }
    let mut files = vec![SearchedFile::new(corpus, args.model.clone())?];
    for path in &args.hybrid {
        let (corpus, other) = (&files[0].vectors, VectorFile::open(path)?);
        ensure!(
            other.model().is_some(),
            "{} does not name its model: expected a .parquet or .arrow file that encodle embed \
             wrote; give another file as --corpus, with --model",
            other.name()
        );
        let (expected, got) = (corpus.rows()?, other.rows()?);
        ensure!(
            got == expected,
            "the number of vectors in {} is {got}: expected {expected}, as in {}; --hybrid takes files \
             of the same records",
            other.name(),
            corpus.name()
        );
        files.push(SearchedFile::new(other, args.model.without_model())?);
    }
    Ok(files)
}

/// Checks that the records have the field, or that --records gives a file of records.
///
/// # Errors
/// [`corpus::InputError::NoColumn`] if a corpus of records lacks the field; an error if there are
/// no records.
fn check_field(field: &str, vectors: &VectorFile, has_records: bool) -> Result<()> {
    let name = vectors.name();
    match vectors.fields() {
        Some(fields) if !fields.contains(&field) => {
            let got = fields.into_iter().map(String::from).collect();
            Err(corpus::Error::Input(corpus::InputError::NoColumn {
                name: name.to_string(),
                expected: field.to_string(),
                got,
            })
            .into())
        }
        None if !has_records => {
            bail!("--field needs --records, because {name} contains vectors only")
        }
        _ => Ok(()),
    }
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
