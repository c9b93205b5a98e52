//! `bert embed`: texts to vectors, as a table to read or as JSON lines.

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    sync::mpsc::sync_channel,
    thread,
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use encoder::{
    EmbedOptions, Embedder, LongTexts, Pooling, PoolingMode, Precision, Prompt, Truncated,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{
    compute::Compute, records::records, source, stored::Stored, table, task::write_line,
    texts::texts,
};

/// Lines read before they are embedded together.
const WINDOW: usize = 1024;

#[derive(Parser)]
pub struct Args {
    /// Folder or file of a sentence-transformers model, or org/name or org/name@revision on the
    /// Hugging Face hub; all-MiniLM-L6-v2, which the program carries, where none is given
    #[arg(long)]
    model: Option<String>,

    #[command(flatten)]
    compute: Compute,

    /// How to pool, where the folder does not say or shall be overruled: cls, max, mean,
    /// mean_sqrt_len_tokens, weightedmean or lasttoken; several are joined
    #[arg(long, value_name = "MODE", value_delimiter = ',', requires = "model")]
    pooling: Vec<PoolingMode>,

    /// Make vectors of length 1, whatever the model's files say
    #[arg(long)]
    normalize: bool,

    /// Cut vectors to their first N values, for models trained to be cut
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,

    /// The model's prompt to put before each text, such as query or document
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// What to put before each text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// What becomes of texts longer than the model takes
    #[arg(long, value_enum, default_value_t)]
    long_texts: Long,

    /// How to print; a table on a terminal and JSON lines elsewhere, where not given
    #[arg(long, value_enum)]
    format: Option<Format>,

    /// Read texts from a file, or with - from standard input: .jsonl, .ndjson and .csv by a field,
    /// anything else by its lines
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    input: Option<String>,

    /// The field of .jsonl or the column of .csv that is the text; text, where not given
    #[arg(long, value_name = "NAME", requires = "input")]
    field: Option<String>,

    /// Write to a file: .jsonl with all fields of the records, or .npy for NumPy
    #[arg(long, value_name = "FILE", requires = "input", conflicts_with = "format")]
    output: Option<PathBuf>,

    /// Continue what an interrupted run with the same settings left of the output
    #[arg(long, requires = "output")]
    resume: bool,

    /// What becomes of records without a text
    #[arg(long, value_enum, default_value_t, requires = "input")]
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

#[derive(Clone, Copy, Default, ValueEnum)]
enum Long {
    /// Cut them, and say how much
    #[default]
    Truncate,
    /// Stop at the first
    Refuse,
    /// Average the vectors of their parts
    Windows,
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

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Dimensions, first values, and the cosine between the texts
    Table,
    /// One {"text": .., "embedding": [..]} a line
    Jsonl,
}

pub fn run(args: Args) -> Result<()> {
    let files = source::files_or_embedded(args.model.as_deref())?;
    let (precision, device) = args.compute.start()?;
    let mut embedder = match &args.pooling[..] {
        [] => Embedder::from_files(&files, precision, &device)?,
        modes => Embedder::from_transformer(&files, Pooling::new(modes)?, precision, &device)?,
    };
    if args.normalize {
        embedder = embedder.normalized();
    }
    if let Some(dimension) = args.dimensions {
        embedder = embedder.with_dimension(dimension)?;
    }
    let prompt = match (&args.prompt_name, &args.prompt) {
        (Some(name), _) => Prompt::Named(name),
        (None, Some(text)) => Prompt::Text(text),
        (None, None) => Prompt::Default,
    };
    let options = EmbedOptions { prompt, long_texts: args.long_texts.into() };
    if let (Some(input), Some(output)) = (&args.input, &args.output) {
        return store(&args, input, output, &embedder, options, precision);
    }
    let mut cut = Cut::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    let format = args.format.unwrap_or(match io::stdout().is_terminal() {
        true => Format::Table,
        false => Format::Jsonl,
    });
    let texts: Box<dyn Iterator<Item = Result<String>>> = match &args.input {
        None => texts(args.texts),
        Some(input) => {
            let records = records(input, args.field.as_deref())?;
            let good = records.filter_map(move |record| match record {
                Err(bad) if args.on_error == OnError::Skip && !bad.last => {
                    eprintln!("bert: {bad}; skipped");
                    None
                }
                record => Some(record.map(|record| record.text).map_err(Into::into)),
            });
            Box::new(good)
        }
    };
    match format {
        Format::Table => {
            let texts = texts.collect::<Result<Vec<_>>>()?;
            let embeddings = embedder.embed_with(&texts, options)?;
            cut.count(&embeddings.truncated);
            let embeddings = embeddings.vectors.to_vec2()?;
            table::write(&mut out, embedder.dimension(), &texts, &embeddings)?;
        }
        Format::Jsonl => write_lines(&mut out, &embedder, options, texts, &mut cut)?,
    }
    out.flush()?;
    cut.tell(embedder.tokenizer().max_seq_length());
    Ok(())
}

/// From a file to a file, a window of records at a time, read while those before are computed.
fn store(
    args: &Args,
    input: &str,
    output: &Path,
    embedder: &Embedder,
    options: EmbedOptions,
    precision: Precision,
) -> Result<()> {
    let model = args.model.as_deref().unwrap_or("all-MiniLM-L6-v2");
    let (pooling, normalize, fields) = (&args.pooling, args.normalize, &args.field);
    let dimension = embedder.dimension();
    let settings = format!(
        "{input} {fields:?} by {model} of {} parameters in {precision:?}, {dimension} dimensions, \
         {pooling:?}, normalize {normalize}, {options:?}",
        embedder.report().parameters
    );
    let mut records = records(input, args.field.as_deref())?;
    let mut stored = Stored::open(output, dimension, settings, args.resume)?;
    stored.skip(&mut records)?;
    let bar = match args.quiet {
        true => ProgressBar::hidden(),
        false => ProgressBar::no_length(), // hidden, where standard error is no terminal
    };
    let style = "{spinner} {human_pos} texts, {per_sec}, {elapsed}";
    bar.set_style(ProgressStyle::with_template(style)?);
    bar.set_position(stored.written());
    bar.reset_eta();

    let (send, receive) = sync_channel(1);
    // On its own, since it may wait for more input when all else has ended with an error.
    thread::spawn(move || {
        loop {
            let window: Vec<_> = records.by_ref().take(WINDOW).collect();
            if window.is_empty() || send.send(window).is_err() {
                return;
            }
        }
    });
    let mut cut = Cut::default();
    for window in receive {
        let mut good = Vec::with_capacity(window.len());
        let mut bad = None;
        for record in window {
            match &record {
                Err(error) if error.last || args.on_error == OnError::Stop => {
                    bad = record.err();
                    break; // once it is mended, --resume goes on from it
                }
                Err(error) => bar.suspend(|| eprintln!("bert: {error}; skipped")),
                Ok(_) => {}
            }
            stored.see(&record);
            good.extend(record.ok());
        }
        if !good.is_empty() {
            let texts: Vec<&str> = good.iter().map(|record| record.text.as_str()).collect();
            let embeddings = embedder.embed_with(&texts, options)?;
            cut.count(&embeddings.truncated);
            for (record, vector) in good.iter().zip(embeddings.vectors.to_vec2::<f32>()?) {
                stored.push(record, &vector)?;
            }
        }
        bar.set_position(stored.written());
        if let Some(bad) = bad {
            stored.keep()?;
            return Err(bad.into());
        }
        stored.keep_sometimes()?;
    }
    bar.finish_and_clear();
    stored.finish()?;
    cut.tell(embedder.tokenizer().max_seq_length());
    Ok(())
}

/// What was cut of texts that were too long.
#[derive(Default)]
struct Cut {
    texts: usize,
    tokens: usize,
}

impl Cut {
    fn count(&mut self, truncated: &[Truncated]) {
        self.texts += truncated.len();
        self.tokens += truncated.iter().map(|cut| cut.tokens - cut.kept).sum::<usize>();
    }

    fn tell(&self, max: usize) {
        let Self { texts, tokens } = self;
        if *texts > 0 {
            let plural = if *texts == 1 { "text was" } else { "texts were" };
            eprintln!(
                "bert: {texts} {plural} longer than {max} tokens and cut by {tokens} tokens in all; \
                 --long-texts windows reads all of them"
            );
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
    cut: &mut Cut,
) -> Result<()> {
    loop {
        let mut bad = Ok(());
        let good =
            texts.by_ref().take(WINDOW).map_while(|text| text.map_err(|e| bad = Err(e)).ok());
        let window: Vec<String> = good.collect();
        let embeddings = embedder.embed_with(&window, options)?;
        cut.count(&embeddings.truncated);
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
