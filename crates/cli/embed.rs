//! `bert embed`: texts to vectors, as a table to read or as JSON lines.

use std::{
    hash::Hasher,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread,
};

use anyhow::{Result, anyhow, bail};
use arrow_schema::DataType;
use clap::{Parser, ValueEnum};
use encoder::{EmbedOptions, Embedder, LongTexts, Precision, TokenizedTexts};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use twox_hash::XxHash64;

use crate::{
    columns::{self, Table},
    ending::ending,
    json_rows,
    model::Model,
    parquet_types,
    records::{EMBEDDING, Input, Position, Record, Records},
    stored::{self, Layout, Stored},
    table,
    task::write_line,
    texts,
    truncation::Truncation,
};

/// Lines read before they are embedded together.
const WINDOW: usize = 2048;

#[derive(Parser)]
#[command(after_help = "Examples:
  bert embed \"A man is eating food.\" \"A man eats.\"
  bert embed --input lines.txt --output vectors.npy
  bert embed --input articles.parquet --field body --output vectors.parquet --resume
  zcat log.jsonl.gz | bert embed --input - --input-format jsonl --output vectors.arrow")]
pub struct Args {
    #[command(flatten)]
    model: Model,

    /// Cut vectors to their first N values, for models trained to be cut
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,

    /// The model's prompt to put before each text, such as query or document
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// What to put before each text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// How to handle texts longer than the model's maximum length
    #[arg(long, value_enum, default_value_t)]
    long_texts: Long,

    /// How to print: a table on a terminal and JSON lines elsewhere, where not given; or what to
    /// write, where the output's name does not tell
    #[arg(long, value_enum)]
    format: Option<Format>,

    #[command(flatten)]
    input: Input,

    /// Write to a file: .jsonl, .parquet or .arrow with all fields of the records, or .npy for NumPy
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// What the numbers of .npy, .parquet and .arrow are
    #[arg(long, value_enum, default_value_t, requires = "output")]
    output_dtype: Number,

    /// Continue what an interrupted run with the same settings left of the output
    #[arg(long, requires = "output")]
    resume: bool,

    /// How to handle records without a text
    #[arg(long, value_enum, default_value_t, requires = "input", conflicts_with = "texts")]
    on_error: OnError,

    /// Show no progress
    #[arg(long)]
    quiet: bool,

    /// Texts to embed; the lines of standard input where there are none
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum OnError {
    /// End with the first
    #[default]
    Stop,
    /// Leave them out, and list them
    Skip,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Number {
    #[default]
    F32,
    F16,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Long {
    /// Truncate them, with a warning
    #[default]
    Truncate,
    /// Stop at the first
    Refuse,
    /// Average the vectors of their parts
    Windows,
}

impl Long {
    /// The advice at the end of a warning that texts were truncated.
    const ADVICE: &str = "; --long-texts windows reads them whole";
}

impl From<Long> for LongTexts {
    fn from(long: Long) -> Self {
        match long {
            Long::Truncate => Self::Truncate,
            Long::Refuse => Self::Refuse,
            Long::Windows => Self::Windows,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Dimensions, first values, and the cosine between the texts
    Table,
    /// One {"text": .., "embedding": [..]} a line
    Jsonl,
    /// An array of numbers, as NumPy reads it
    Npy,
    Parquet,
    /// An Arrow IPC file
    Arrow,
}

impl Args {
    fn options(&self) -> EmbedOptions<'_> {
        let prompt = texts::prompt(&self.prompt_name, &self.prompt).unwrap_or_default();
        EmbedOptions { prompt, long_texts: self.long_texts.into() }
    }

    /// The texts given, or the records of `--input`, or the lines of standard input.
    fn records(&self) -> Result<Records> {
        if !self.texts.is_empty() {
            return Ok(Records::of_texts(self.texts.clone()));
        }
        if self.input.path.is_none() {
            texts::tell_terminal();
        }
        self.input.open()
    }

    /// Tells how many blank lines of JSONL were skipped.
    fn tell_blank_lines(&self, blank_lines: &AtomicU64) {
        match blank_lines.load(Ordering::Relaxed) {
            0 => {}
            1 => eprintln!("bert: {}: 1 blank line was skipped", self.input.name()),
            n => eprintln!("bert: {}: {n} blank lines were skipped", self.input.name()),
        }
    }
}

pub fn run(mut args: Args) -> Result<()> {
    args.output = args.output.as_deref().map(stored::output_path).transpose()?;
    if let Some(output) = &args.output {
        let is_input = |input: &String| {
            let paths = [Path::new(input), output].map(std::fs::canonicalize);
            matches!(paths, [Ok(input), Ok(output)] if input == output)
        };
        if args.input.path.as_ref().is_some_and(is_input) {
            bail!("{} is the input: expected another file as --output", output.display());
        }
    }
    let (mut embedder, precision) = args.model.embedder()?;
    if let Some(dimension) = args.dimensions {
        embedder = embedder.with_dimension(dimension)?;
    }
    if args.output.is_some() {
        return store(args, embedder, precision);
    }
    let mut truncation = Truncation::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let format = args.format.unwrap_or(match io::stdout().is_terminal() {
        true => Format::Table,
        false => Format::Jsonl,
    });
    let options = args.options();
    let records = args.records()?;
    let blank_lines = records.blank_lines.clone();
    let texts = records.filter_map(|record| match record {
        Err(bad) if args.on_error == OnError::Skip && !bad.last => {
            eprintln!("bert: {bad}; skipped");
            None
        }
        record => Some(record.map(|record| record.text).map_err(Into::into)),
    });
    match format {
        Format::Table => {
            let texts = texts.collect::<Result<Vec<_>>>()?;
            let embeddings = embedder.embed_with(&texts, options)?;
            truncation.add(&embeddings.truncated);
            let embeddings = embeddings.vectors.to_vec2()?;
            table::write(&mut out, embedder.dimension(), &texts, &embeddings)?;
        }
        Format::Jsonl => write_lines(&mut out, &embedder, options, texts, &mut truncation)?,
        Format::Npy | Format::Parquet | Format::Arrow => {
            bail!("{format:?} cannot be printed: expected --output FILE with it")
        }
    }
    out.flush()?;
    args.tell_blank_lines(&blank_lines);
    truncation.warn(embedder.tokenizer().max_seq_length(), Long::ADVICE);
    Ok(())
}

/// Records that are embedded together.
struct Window {
    records: Vec<Record>,
    tokenized: TokenizedTexts,
    /// Where the input is read to with them.
    position: Position,
}

/// From a file to a file, a window of records at a time: read and made tokens of on one thread,
/// computed on this and its pool, written on a third.
fn store(args: Args, embedder: Embedder, precision: Precision) -> Result<()> {
    let output = args.output.clone().unwrap_or_default();
    let mut records = args.records()?;
    let blank_lines = records.blank_lines.clone();
    let layout = layout(&args, &output, &mut records, embedder.dimension())?;
    // Whatever changes a vector changes this one: the weights, the pooling, the instructions.
    let options = EmbedOptions { long_texts: LongTexts::Truncate, ..args.options() };
    let probe = embedder.embed_with(&["A man is eating food."], options)?.vectors;
    let mut hasher = XxHash64::default();
    probe.flatten_all()?.to_vec1::<f32>()?.iter().for_each(|x| hasher.write(&x.to_le_bytes()));
    let settings = format!(
        "{:?} by {} in {precision:?} as {:016x}, {:?}, {} dimensions of {:?}, {}",
        args.input,
        args.model.name(),
        hasher.finish(),
        args.options(),
        embedder.dimension(),
        args.output_dtype,
        layout.name()
    );
    let mut stored = Stored::open(
        &output,
        layout,
        args.input.name(),
        embedder.dimension(),
        settings,
        args.resume,
    )?;
    records.skip_to(stored.position())?;
    if stored.position().read % WINDOW as u64 != 0 && records.next().is_some() {
        bail!(
            "the input has more than the {} records that the interrupted run read to its end; start \
             anew without --resume",
            stored.position().read
        );
    }
    let bar = progress(&args, records.count, stored.position().read)?;

    let args = Arc::new(args);
    let (send, windows) = sync_channel(1);
    let (position, its_own) = (stored.position(), (args.clone(), embedder.clone(), bar.clone()));
    // On its own, since it may wait for more input when all else has ended with an error.
    let reader = thread::spawn(move || {
        let (args, embedder, bar) = its_own;
        read(records, position, &args, &embedder, &bar, &send);
    });
    let mut truncation = Truncation::default();
    let (computed, stored) = thread::scope(|scope| {
        let (send, vectors) = sync_channel::<(Window, Vec<f32>)>(1);
        let writer = scope.spawn(move || {
            let written = vectors.iter().try_for_each(|(window, vectors)| {
                stored.push(&window.records, &vectors, window.position)?;
                stored.keep_sometimes()
            });
            (written, stored)
        });
        let computed = windows.iter().try_for_each(|window| {
            let window: Window = window?;
            let embeddings = embedder.embed_tokenized(&window.tokenized)?;
            truncation.add(&embeddings.truncated);
            let vectors = embeddings.vectors.flatten_all()?.to_vec1()?;
            bar.set_position(window.position.read);
            send.send((window, vectors)).map_err(|_| anyhow!("the output is gone"))
        });
        drop(send);
        let (written, stored) = writer.join().expect("the writer does not panic");
        (written.and(computed), stored)
    });
    let mut stored: Stored = stored;
    // Where all went well, it has ended.
    let computed = computed
        .and_then(|()| reader.join().map_err(|_| anyhow!("{} cannot be read", args.input.name())));
    if let Err(error) = computed {
        stored.keep()?; // once it is mended, --resume goes on from it
        return Err(error);
    }
    bar.finish_and_clear();
    stored.finish()?;
    json_rows::tell_not_finite();
    args.tell_blank_lines(&blank_lines);
    truncation.warn(embedder.tokenizer().max_seq_length(), Long::ADVICE);
    Ok(())
}

/// What the output is, by its name or `--format`.
fn layout(args: &Args, output: &Path, records: &mut Records, dimension: usize) -> Result<Layout> {
    let format = args.format.or(match ending(output).as_str() {
        "jsonl" | "ndjson" => Some(Format::Jsonl),
        "npy" => Some(Format::Npy),
        "parquet" => Some(Format::Parquet),
        "arrow" | "feather" | "ipc" => Some(Format::Arrow),
        _ => None,
    });
    let half = args.output_dtype == Number::F16;
    let table = match format {
        Some(Format::Jsonl) if half => {
            bail!("JSON has one kind of numbers: expected --output-dtype f32, got f16")
        }
        Some(Format::Jsonl) => None,
        Some(Format::Npy) => return Ok(Layout::Npy { half }),
        Some(Format::Parquet) => Some(Table::Parquet),
        Some(Format::Arrow) => Some(Table::Arrow),
        Some(Format::Table) => bail!(
            "a table is for people to read: expected --format jsonl, npy, parquet or arrow with --output"
        ),
        None => bail!(
            "{} has no ending that tells what to write: expected .jsonl, .ndjson, .npy, .parquet or \
             .arrow, or --format",
            output.display()
        ),
    };
    let (columns, numbers_as_text) = match table {
        Some(_) => {
            let (columns, numbers_as_text) = records.columns(&args.input, WINDOW)?;
            (Some(columns), numbers_as_text)
        }
        None => (records.schema.clone(), vec![]),
    };
    if columns.as_ref().is_some_and(|columns| columns.column_with_name(EMBEDDING).is_some()) {
        bail!(
            "{} has a field {EMBEDDING:?}: expected none, as it is added; rename it",
            args.input.name()
        );
    }
    for field in numbers_as_text {
        eprintln!(
            "bert: {}: field {field:?} has integers that no numeric column holds exactly: its \
             numbers are written as text",
            args.input.name()
        );
    }
    let (Some(table), Some(columns)) = (table, columns) else {
        return Ok(Layout::JsonLines);
    };
    let numbers = if half { DataType::Float16 } else { DataType::Float32 };
    let made_by = serde_json::to_string(&args.model.made_by())?;
    let columns = match table {
        Table::Parquet => parquet_types::schema(&columns)?,
        Table::Arrow => columns.as_ref().clone(),
    };
    let schema = columns::with_vectors(&columns, dimension, numbers, made_by);
    columns::check(table, &schema)?;
    Ok(Layout::Table(table, Arc::new(schema)))
}

/// Shown on a terminal, with the time left once the records are counted.
fn progress(args: &Args, count: Option<u64>, read: u64) -> Result<ProgressBar> {
    let bar = match args.quiet {
        true => ProgressBar::hidden(),
        false => ProgressBar::no_length(), // hidden, where standard error is no terminal
    };
    bar.set_style(ProgressStyle::with_template(
        "{spinner} {human_pos} texts, {per_sec}, {elapsed}",
    )?);
    bar.set_position(read);
    bar.reset_eta();
    if bar.is_hidden() {
        return Ok(bar);
    }
    let (input, counted) = (args.input.clone(), bar.clone());
    let style = ProgressStyle::with_template(
        "{wide_bar} {human_pos} of {human_len} texts, {per_sec}, {eta} left",
    )?;
    thread::spawn(move || {
        if let Some(count) = count.or_else(|| input.count_lines()) {
            counted.set_length(count);
            counted.set_style(style);
        }
    });
    Ok(bar)
}

/// Sends what is read, until there is no more, or somebody to take it.
fn read(
    mut records: Records,
    mut position: Position,
    args: &Args,
    embedder: &Embedder,
    bar: &ProgressBar,
    windows: &SyncSender<Result<Window>>,
) {
    let mut window = || -> Result<Option<Window>> {
        let before = position;
        let mut good = vec![];
        for record in records.by_ref().take(WINDOW) {
            let after = position.after(&record);
            match record {
                Ok(record) => good.push(record),
                Err(bad) if !bad.last && args.on_error == OnError::Skip => {
                    bar.suspend(|| eprintln!("bert: {bad}; skipped"));
                }
                Err(bad) => return Err(bad.into()),
            }
            position = after;
        }
        if position == before {
            return Ok(None);
        }
        let texts: Vec<&str> = good.iter().map(|record| record.text.as_str()).collect();
        let tokenized = embedder.tokenize(&texts, args.options())?;
        Ok(Some(Window { records: good, tokenized, position }))
    };
    while let Some(window) = window().transpose() {
        let last = window.is_err();
        if windows.send(window).is_err() || last {
            return;
        }
    }
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
    options: EmbedOptions,
    mut texts: impl Iterator<Item = Result<String>>,
    truncation: &mut Truncation,
) -> Result<()> {
    loop {
        let mut bad = Ok(());
        let good =
            texts.by_ref().take(WINDOW).map_while(|text| text.map_err(|e| bad = Err(e)).ok());
        let window: Vec<String> = good.collect();
        let embeddings = embedder.embed_with(&window, options)?;
        truncation.add(&embeddings.truncated);
        let embeddings: Vec<Vec<f32>> = embeddings.vectors.to_vec2()?;
        for (text, embedding) in window.iter().zip(&embeddings) {
            write_line(out, &Line { text, embedding })?;
        }
        out.flush()?;
        bad?;
        if window.is_empty() {
            return Ok(());
        }
    }
}
