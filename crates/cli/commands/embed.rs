//! `encodle embed`: vectors of texts, as a table, as JSON lines or in a file.

use std::{
    io::{self, IsTerminal, Write},
    path::PathBuf,
    thread,
};

use anyhow::Result;
use clap::{
    Parser,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};
use corpus::{
    EmbedRun, Error, Event, OnInvalid, Record, RecordFormat, RecordSource, StoredRow, VectorDtype,
    VectorFormat, embed_records, warnings,
};
use encoder::{
    BgeM3Embedder, Choice, EmbedOptions, Embedder, EmbeddingKind, LongTexts, ModelFiles,
    MultiVectorEmbedder, SparseEmbedder,
};
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::{
    arguments::{choice, positive, usage_error},
    embedding::Printed,
    json_line::write_line,
    messages,
    model::Model,
    texts,
    truncation::Truncation,
};

/// The advice at the end of a truncation warning.
const ADVICE: &str = "; --long-texts windows embeds all tokens";

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle embed \"A man is eating food.\" \"A man eats.\"
  encodle embed --input lines.txt --output vectors.npy
  encodle embed --input articles.parquet --field body --output vectors.parquet --resume
  encodle embed --model BAAI/bge-m3 --kind all --input lines.txt --output all.parquet
  zcat log.jsonl.gz | encodle embed --input - --input-format jsonl --output vectors.arrow")]
pub struct Args {
    #[command(flatten)]
    model: Model,

    /// Kind of embedding [default: the kind that the model's files name; dense for BGE-M3]
    #[arg(long, value_name = "KIND", value_parser = choice::<EmbeddingKind>())]
    kind: Option<EmbeddingKind>,

    /// Keep at most N values of a sparse vector, the largest
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    max_active_dims: Option<usize>,

    /// Add the token of each index of a sparse vector, in JSON lines
    #[arg(long)]
    tokens: bool,

    /// Truncate vectors to their first N values, and scale the truncated vectors to length 1 if the
    /// model normalises; for models that were trained for truncation
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    dimensions: Option<usize>,

    /// Name of a prompt of the model to put before each text, such as query or document [default:
    /// the model's default prompt, if any]
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// Text to put before each text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// How to handle texts longer than the model's maximum length
    #[arg(long, value_parser = choice::<LongTexts>(), default_value_t)]
    long_texts: LongTexts,

    /// Output format [default: by the extension of --output; without --output, table on a terminal,
    /// otherwise jsonl]
    #[arg(long, value_parser = format())]
    format: Option<Format>,

    #[command(flatten)]
    input: Input,

    /// Output file (- is refused): .jsonl, .parquet and .arrow contain the vectors and all fields
    /// of the records; .npy contains the vectors only
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Number format of the vectors in .npy, .parquet and .arrow files. Needs --output [default: f16
    /// for the vectors of tokens of --kind multi or all, otherwise f32]
    #[arg(
        long,
        value_name = "OUTPUT_DTYPE",
        value_parser = choice::<VectorDtype>(),
        requires = "output"
    )]
    output_dtype: Option<VectorDtype>,

    /// Continue an interrupted run with the same output and settings; if there is none, start a new
    /// run. Needs --output
    #[arg(long, requires = "output")]
    resume: bool,

    /// How to handle invalid records. Needs --input
    #[arg(
        long,
        value_parser = choice::<OnInvalid>(),
        default_value_t,
        requires = "input",
        conflicts_with = "texts"
    )]
    on_error: OnInvalid,

    /// Do not show the progress of the run
    #[arg(long)]
    quiet: bool,

    /// Texts to embed [default: the lines of standard input]
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
}

/// The arguments that choose the input file.
#[derive(clap::Args)]
struct Input {
    /// Input file, or - for standard input. Formats: .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow,
    /// .feather, .ipc; files with other extensions are read as text lines, except unsupported
    /// formats such as .json, which are refused. Text formats may be compressed (.gz, .zst)
    #[arg(id = "input", long = "input", value_name = "FILE", conflicts_with = "texts")]
    path: Option<String>,

    /// Format of the input. Needs --input [default: by the extension; lines for standard input]
    #[arg(
        long,
        value_parser = choice::<RecordFormat>(),
        value_name = "FORMAT",
        requires = "input",
        conflicts_with = "texts"
    )]
    input_format: Option<RecordFormat>,

    /// Name of the field or column that contains the text. Needs --input [default: text]
    #[arg(long, value_name = "NAME", requires = "input", conflicts_with = "texts")]
    field: Option<String>,
}

/// The value of `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Table,
    File(VectorFormat),
}

/// The parser of `--format`.
fn format() -> impl TypedValueParser<Value = Format> {
    let table = "First values of each vector, and the cosines between the texts";
    let table = PossibleValue::new("table").help(table);
    let file = |format: &VectorFormat| PossibleValue::new(format.name()).help(format.help());
    let all = [table].into_iter().chain(VectorFormat::ALL.iter().map(file));
    PossibleValuesParser::new(all)
        .map(|name| VectorFormat::from_name(&name).map_or(Format::Table, Format::File))
}

impl Args {
    fn options(&self) -> EmbedOptions<'_> {
        let prompt = texts::prompt(&self.prompt_name, &self.prompt).unwrap_or_default();
        EmbedOptions::new().with_prompt(prompt).with_long_texts(self.long_texts)
    }

    /// # Errors
    /// A usage error for an option that has no meaning for a dense model; the errors of loading.
    fn dense(&self, files: &ModelFiles) -> Result<Embedder> {
        let max_active_dims = ("--max-active-dims", self.max_active_dims.is_some());
        check_absent(&[max_active_dims, ("--tokens", self.tokens)], "a dense model")?;
        let embedder = self.model.embedder(files)?;
        Ok(match self.dimensions {
            Some(dimension) => embedder.with_dimension(dimension)?,
            None => embedder,
        })
    }

    /// # Errors
    /// A usage error for an option that has no meaning for a sparse model, or for tokens in a table
    /// of columns; the errors of loading.
    fn sparse(&self, files: &ModelFiles, output: &Output) -> Result<SparseEmbedder> {
        let dimensions = ("--dimensions", self.dimensions.is_some());
        let [pooling, normalize] = self.model.options_of_dense_models();
        check_absent(&[dimensions, pooling, normalize], "a sparse model")?;
        self.check_tokens(output)?;
        let model = SparseEmbedder::from_files(files, &self.model.load_options()?)?;
        let model = match self.max_active_dims {
            Some(max) => model.with_max_active_dims(max)?,
            None => model,
        };
        Ok(if self.tokens { model.with_tokens() } else { model })
    }

    /// Checks that the tokens of sparse vectors are not asked for in a table of columns.
    ///
    /// # Errors
    /// A usage error if they are.
    fn check_tokens(&self, output: &Output) -> Result<()> {
        let has_lines = match output {
            Output::File(run) => run.format() == Some(VectorFormat::Jsonl),
            Output::Lines => true,
            Output::Table => false,
        };
        if self.tokens && !has_lines {
            return Err(usage_error("--tokens is for JSON lines: expected --format jsonl"));
        }
        Ok(())
    }

    /// # Errors
    /// A usage error for an option that has no meaning for a multi-vector model; the errors of
    /// loading.
    fn multi_vector(&self, files: &ModelFiles) -> Result<MultiVectorEmbedder> {
        let dimensions = ("--dimensions", self.dimensions.is_some());
        let max_active_dims = ("--max-active-dims", self.max_active_dims.is_some());
        let [pooling, normalize] = self.model.options_of_dense_models();
        let tokens = ("--tokens", self.tokens);
        let absent = [dimensions, max_active_dims, tokens, pooling, normalize];
        check_absent(&absent, "a multi model")?;
        Ok(MultiVectorEmbedder::from_files(files, &self.model.load_options()?)?)
    }

    /// # Errors
    /// A usage error for an option that has no meaning for a model of all kinds, or for tokens in a
    /// table of columns; the errors of loading.
    fn all_kinds(&self, files: &ModelFiles, output: &Output) -> Result<BgeM3Embedder> {
        check_absent(&self.model.options_of_dense_models(), "a model of all kinds")?;
        self.check_tokens(output)?;
        let mut model = BgeM3Embedder::from_files(files, &self.model.load_options()?)?;
        if let Some(dimension) = self.dimensions {
            model = model.with_dimension(dimension)?;
        }
        if let Some(max) = self.max_active_dims {
            model = model.with_max_active_dims(max)?;
        }
        Ok(if self.tokens { model.with_tokens() } else { model })
    }

    /// The texts from the command line, or the file of `--input`, or standard input.
    fn source(&self) -> RecordSource {
        if !self.texts.is_empty() {
            return RecordSource::texts(self.texts.clone());
        }
        let source = match self.input.path.as_deref() {
            None | Some("-") => RecordSource::stdin(),
            Some(path) => RecordSource::file(path),
        };
        let source = match self.input.input_format {
            Some(format) => source.with_format(format),
            None => source,
        };
        match &self.input.field {
            Some(field) => source.with_field(field),
            None => source,
        }
    }

    /// The destination of the vectors.
    ///
    /// # Errors
    /// The errors of [`EmbedRun::new`]; an error for a format that cannot be written there.
    fn output(&self, source: &RecordSource) -> Result<Output> {
        let Some(output) = &self.output else {
            return match self.format {
                Some(Format::Table) => Ok(Output::Table),
                None if io::stdout().is_terminal() => Ok(Output::Table),
                None | Some(Format::File(VectorFormat::Jsonl)) => Ok(Output::Lines),
                Some(Format::File(format)) => Err(usage_error(format!(
                    "--format {format} cannot be printed: expected --output FILE"
                ))),
            };
        };
        let run = EmbedRun::new(source.clone(), output)?;
        let run = run.with_resume(self.resume).on_invalid(self.on_error);
        let run = match self.output_dtype {
            Some(dtype) => run.with_dtype(dtype),
            None => run,
        };
        match self.format {
            None => Ok(Output::File(run)),
            Some(Format::File(format)) => Ok(Output::File(run.with_format(format))),
            Some(Format::Table) => Err(usage_error(
                "--format table cannot be written to a file: expected jsonl, npy, parquet or arrow",
            )),
        }
    }

    fn announce_stdin(&self) {
        if self.texts.is_empty() && self.input.path.is_none() {
            texts::announce_stdin();
        }
    }
}

/// The destination of the vectors.
enum Output {
    File(EmbedRun),
    /// JSON lines on standard output.
    Lines,
    /// A table on standard output.
    Table,
}

/// Checks that options without effect are absent. Each option has whether it is given.
///
/// # Errors
/// A usage error that names the first option that is given.
fn check_absent(options: &[(&str, bool)], model: &str) -> Result<()> {
    match options.iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => Err(usage_error(format!(
            "{option} has no effect on {model}: leave the option out, or use a model of \
             another kind"
        ))),
        None => Ok(()),
    }
}

pub fn run(args: Args) -> Result<()> {
    let source = args.source();
    let output = args.output(&source)?;
    let files = args.model.files()?;
    let kind = match args.kind {
        Some(kind) => kind,
        None if args.model.chooses_pooling() => EmbeddingKind::Dense,
        None => EmbeddingKind::from_files(&files)?,
    };
    match kind {
        EmbeddingKind::Dense => embed(&args, source, output, args.dense(&files)?),
        EmbeddingKind::Sparse => {
            let embedder = args.sparse(&files, &output)?;
            embed(&args, source, output, embedder)
        }
        EmbeddingKind::Multi => embed(&args, source, output, args.multi_vector(&files)?),
        EmbeddingKind::All => {
            let embedder = args.all_kinds(&files, &output)?;
            embed(&args, source, output, embedder)
        }
        kind => Err(usage_error(format!("--kind {kind} is not supported by this command"))),
    }
}

fn embed<E: Printed>(args: &Args, source: RecordSource, output: Output, embedder: E) -> Result<()> {
    args.announce_stdin();
    let options = args.options();
    let progress = Progress::new(source.clone(), args.quiet || args.output.is_none())?;
    let mut out = io::BufWriter::new(io::stdout());
    let summary = match output {
        Output::File(run) => {
            let run = run.with_model(serde_json::to_string(&args.model.spec())?);
            run.run(&embedder, options, |event| progress.show(event))?
        }
        Output::Lines => {
            let write = |records: Vec<Record>, vectors: Vec<E::Row>| {
                let texts: Vec<&str> = records.iter().map(Record::text).collect();
                E::check(&texts, &vectors)?;
                for (text, row) in texts.into_iter().zip(&vectors) {
                    write_line(&mut out, &Line { text, row: row.object() })?;
                }
                anyhow::Ok(out.flush()?)
            };
            let on_event = |event: Event| progress.show(event);
            embed_records(&source, args.on_error, &embedder, options, write, on_event)?
        }
        Output::Table => {
            let (mut texts, mut vectors) = (vec![], vec![]);
            let collect = |records: Vec<Record>, rows| {
                texts.extend(records.into_iter().map(Record::into_text));
                vectors.extend(rows);
                Ok::<(), Error>(())
            };
            let on_event = |event: Event| {
                if let Event::Started { .. } = event {
                    embedder.warn_before_table();
                }
                progress.show(event);
            };
            let summary =
                embed_records(&source, args.on_error, &embedder, options, collect, on_event)?;
            embedder.tokenize::<&str>(&[], options)?; // the error of a prompt, also without texts
            E::check(&texts, &vectors)?;
            embedder.write_table(&mut out, &texts, &vectors)?;
            summary
        }
    };
    out.flush()?;
    progress.bar.finish_and_clear();
    messages::warn_non_finite(&summary.non_finite);
    messages::warn_blank_lines(&source.name(), summary.blank_lines);
    let mut truncation = Truncation::default();
    truncation.add(summary.truncated_texts);
    truncation.warn(embedder.tokenizer().max_seq_length(), ADVICE);
    Ok(())
}

/// The progress bar of a run. On a terminal it shows the remaining time once the records are
/// counted.
struct Progress {
    source: RecordSource,
    bar: ProgressBar,
    /// The style when the number of records is known.
    counted: ProgressStyle,
}

impl Progress {
    fn new(source: RecordSource, quiet: bool) -> Result<Self> {
        let bar = if quiet {
            ProgressBar::hidden()
        } else {
            ProgressBar::no_length() // hidden if standard error is not a terminal
        };
        bar.set_style(ProgressStyle::with_template(
            "{spinner} {human_pos} texts{msg}, {per_sec}, {elapsed}",
        )?);
        let counted = ProgressStyle::with_template(
            "{wide_bar} {human_pos} of {human_len} texts{msg}, {per_sec}, {eta} left",
        )?;
        Ok(Self { source, bar, counted })
    }

    fn show(&self, event: Event) {
        match event {
            Event::Started { read, total, .. } => self.start(read, total),
            Event::Progress { read, repeated, .. } => {
                self.bar.set_position(read);
                if repeated > 0 {
                    self.bar.set_message(format!(" ({} repeated)", HumanCount(repeated)));
                }
            }
            Event::Skipped(record) => {
                self.bar.suspend(|| messages::print(&format!("{record}; skipped")));
            }
            Event::WrittenAsText { field, reason, .. } => {
                let warning = warnings::written_as_text(&self.source.name(), field, reason);
                self.bar.suspend(|| messages::print(&warning));
            }
            _ => {}
        }
    }

    fn start(&self, read: u64, total: Option<u64>) {
        self.bar.set_position(read);
        self.bar.reset_eta();
        if self.bar.is_hidden() {
            return;
        }
        let (source, bar, style) = (self.source.clone(), self.bar.clone(), self.counted.clone());
        thread::spawn(move || {
            if let Some(total) = total.or_else(|| source.count_lines()) {
                bar.set_length(total);
                bar.set_style(style);
            }
        });
    }
}

/// One line of `--format jsonl`.
#[derive(Serialize)]
struct Line<'a, R: Serialize> {
    text: &'a str,
    #[serde(flatten)]
    row: R,
}
