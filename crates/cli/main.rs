//! The `bert` command: arguments, files, printing. What it computes is in the `encoder` crate.
#![deny(unsafe_code)] // but for the map of a file into memory

mod attention;
mod classify;
mod columns;
mod compare;
mod compute;
mod corpus;
mod data_types;
mod embed;
mod embedded;
mod ending;
mod inspect;
mod json_columns;
mod json_rows;
mod model;
mod parquet_types;
mod picture;
mod records;
mod search;
mod source;
mod spans;
mod stored;
mod table;
mod task;
mod texts;
mod truncation;

use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser, Subcommand, error::ErrorKind};

/// BERT without Python: sentence embeddings computed in Rust.
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:
  bert embed \"A man is eating food.\" \"A man eats.\"
  bert embed --input lines.txt --output lines.parquet
  bert search --corpus lines.parquet \"something to eat\"
  bert attention \"I love AI\"

Each command has more: bert embed --help"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Turn texts into vectors
    Embed(embed::Args),
    /// Tell the labels of texts, with a BertForSequenceClassification
    Classify(classify::ClassifyArgs),
    /// Fill the gaps of texts, each a mask token, with a BertForMaskedLM
    FillMask(classify::FillMaskArgs),
    /// Order documents by how well they fit a query, with a BertForSequenceClassification of one
    /// label
    Rerank(classify::RerankArgs),
    /// Tell what in texts is a name, a place and the like, with a BertForTokenClassification
    Tag(spans::TagArgs),
    /// Find the answer to a question in texts, with a BertForQuestionAnswering
    Answer(spans::AnswerArgs),
    /// Tell how alike two texts are: the cosine of their vectors
    Similarity(compare::SimilarityArgs),
    /// Tell how alike each of some texts is to each
    Compare(compare::CompareArgs),
    /// Find the texts of a corpus that are nearest to queries
    Search(search::Args),
    /// Show what the tokens of a text attend to
    Attention(attention::Args),
    /// Tell what a model's files hold, and whether they can be run
    Inspect(inspect::Args),
    /// Write what makes a shell complete bert's arguments
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write bert's manual page, or that of a command, for man
    Man {
        /// The command
        command: Option<String>,
    },
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(arguments()) {
        Ok(cli) => cli,
        Err(error) => return usage(error),
    };
    let done = match cli.command {
        Command::Embed(args) => embed::run(args).map(|()| ExitCode::SUCCESS),
        Command::Classify(args) => classify::classify(args).map(|()| ExitCode::SUCCESS),
        Command::FillMask(args) => classify::fill_mask(args).map(|()| ExitCode::SUCCESS),
        Command::Rerank(args) => classify::rerank(args).map(|()| ExitCode::SUCCESS),
        Command::Tag(args) => spans::tag(args).map(|()| ExitCode::SUCCESS),
        Command::Answer(args) => spans::answer(args).map(|()| ExitCode::SUCCESS),
        Command::Similarity(args) => compare::similarity(args).map(|()| ExitCode::SUCCESS),
        Command::Compare(args) => compare::compare(args).map(|()| ExitCode::SUCCESS),
        Command::Search(args) => search::run(args).map(|()| ExitCode::SUCCESS),
        Command::Attention(args) => attention::run(args).map(|()| ExitCode::SUCCESS),
        Command::Inspect(args) => inspect::run(args),
        Command::Completions { shell } => completions(shell).map(|()| ExitCode::SUCCESS),
        Command::Man { command } => man(command.as_deref()).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Err(error) if !is_closed_pipe(&error) => {
            // One line, though an error from below may carry a backtrace.
            let text = error.to_string();
            eprintln!("bert: {}", text.lines().next().unwrap_or_default());
            ExitCode::FAILURE
        }
        Err(_) => ExitCode::SUCCESS,
        Ok(code) => code,
    }
}

/// The program's arguments. After `help`, a last `--help` is removed: clap would look for a command of
/// that name.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let asks = |argument: &OsString| argument == "--help" || argument == "-h";
    if arguments.get(1).is_some_and(|command| command == "help") {
        arguments.pop_if(|last| asks(last));
    }
    arguments
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = vec![];
    clap_complete::generate(shell, &mut Cli::command(), "bert", &mut script);
    Ok(io::stdout().write_all(&script)?)
}

fn man(command: Option<&str>) -> anyhow::Result<()> {
    let mut all = Cli::command();
    all.build();
    let page = match command {
        None => all,
        Some(name) => match all.find_subcommand(name) {
            Some(found) => found.clone(),
            None => anyhow::bail!("command {name:?} is not there: see bert --help"),
        },
    };
    let mut text = vec![];
    clap_mangen::Man::new(page).render(&mut text)?;
    Ok(io::stdout().write_all(&text)?)
}

/// Help where it was asked for; else what is wrong, in one line, and exit code 2.
fn usage(error: clap::Error) -> ExitCode {
    let asked_for = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
    let no_command = ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if asked_for.contains(&error.kind()) || error.kind() == no_command {
        error.exit();
    }
    let text = error.to_string();
    let what = text.split("\n\nUsage:").next().unwrap_or_default();
    let what = what.split("\n\nFor more information").next().unwrap_or_default();
    let lines: Vec<&str> = what.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let line = lines.join("; ");
    eprintln!("bert: {}; see bert --help", line.trim_start_matches("error: "));
    ExitCode::from(2)
}

/// Whether the reader of our output has gone, which is its good right.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
