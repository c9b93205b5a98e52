//! The `encodle` command: arguments, printing, exit codes and progress bars. Models are in the
//! crate `encoder`, file formats in `corpus`, pictures in `picture`, HTTP in `server`.
#![forbid(unsafe_code)]

mod arguments;
mod atomic_write;
mod attention;
mod commands;
mod compute;
mod default_model;
mod embedding;
mod fit;
mod json_line;
mod messages;
mod model;
mod model_files;
mod searched_file;
mod task;
mod texts;
mod truncation;
mod vector_table;

use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser, Subcommand, error::ErrorKind};

#[cfg(all(feature = "serve", unix))]
use crate::commands::serve;
use crate::{
    arguments::usage_error,
    commands::{
        attention as attention_command, cache, compare, embed, inspect, rerank, search, similarity,
        tasks::TaskCommand,
    },
};

/// jemalloc instead of glibc's allocator: under load, the peak memory of `encodle serve` grows by
/// at most 3 MB after the first five minutes. With glibc's allocator, the peak grew during the
/// whole measurement of 10 minutes (benches/results/xeon-avx512-2c-2026-11.md).
#[cfg(all(feature = "serve", target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Run BERT and other encoders without Python: embeddings, search, classification, attention.
#[derive(Parser)]
#[command(
    name = "encodle",
    version,
    after_help = "Examples:
  encodle embed \"A man is eating food.\" \"A man eats.\"
  encodle embed --input lines.txt --output lines.parquet
  encodle search --corpus lines.parquet \"something to eat\"
  encodle attention \"I love AI\"

encodle COMMAND --help prints the options of a command."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compute the embeddings of texts
    Embed(embed::Args),
    #[command(flatten)]
    Task(TaskCommand),
    /// Rank documents by relevance to a query (sequence classification with one label)
    Rerank(rerank::Args),
    /// Print the cosine similarity of two texts
    Similarity(similarity::Args),
    /// Print the cosine similarities of all pairs of texts
    Compare(compare::Args),
    /// Find the texts of a corpus that are nearest to queries
    Search(search::Args),
    /// Show the attention weights of a text
    Attention(attention_command::Args),
    /// Describe a model's files, and check whether the model can be run
    Inspect(inspect::Args),
    /// Answer requests over HTTP: embeddings, reranking, classification
    #[cfg(all(feature = "serve", unix))]
    Serve(serve::Args),
    /// List or remove the packed weights on disk
    Cache(cache::Args),
    /// Print a completion script for a shell
    Completions {
        /// Shell for which to print the script
        shell: clap_complete::Shell,
    },
    /// Print a manual page in roff format
    Man {
        /// Command that the page describes [default: encodle itself]
        command: Option<String>,
    },
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse_from(arguments()) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        Command::Embed(args) => embed::run(args).map(|()| ExitCode::SUCCESS),
        Command::Task(command) => command.run().map(|()| ExitCode::SUCCESS),
        Command::Rerank(args) => rerank::run(args).map(|()| ExitCode::SUCCESS),
        Command::Similarity(args) => similarity::run(args).map(|()| ExitCode::SUCCESS),
        Command::Compare(args) => compare::run(args).map(|()| ExitCode::SUCCESS),
        Command::Search(args) => search::run(args).map(|()| ExitCode::SUCCESS),
        Command::Attention(args) => attention_command::run(args).map(|()| ExitCode::SUCCESS),
        Command::Inspect(args) => inspect::run(args),
        #[cfg(all(feature = "serve", unix))]
        Command::Serve(args) => serve::run(args).map(|()| ExitCode::SUCCESS),
        Command::Cache(args) => cache::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Completions { shell } => completions(shell).map(|()| ExitCode::SUCCESS),
        Command::Man { command } => man(command.as_deref()).map(|()| ExitCode::SUCCESS),
    };
    match result {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => match error.downcast() {
            Ok(error) => usage(&error),
            Err(error) => {
                messages::print(&messages::error_line(&error));
                ExitCode::from(if messages::is_usage_error(&error) { 2 } else { 1 })
            }
        },
    }
}

/// The program's arguments. If the first argument is `help`, a trailing `--help` or `-h` is
/// removed, because clap would look for a command of that name.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let is_help = |argument: &OsString| argument == "--help" || argument == "-h";
    if arguments.get(1).is_some_and(|command| command == "help") {
        arguments.pop_if(|last| is_help(last));
    }
    arguments
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = vec![];
    clap_complete::generate(shell, &mut Cli::command(), "encodle", &mut script);
    Ok(io::stdout().write_all(&script)?)
}

fn man(command: Option<&str>) -> anyhow::Result<()> {
    let mut cli = Cli::command();
    cli.build();
    let page = match command {
        None => cli,
        Some(name) => match cli.find_subcommand(name) {
            Some(found) => found.clone(),
            None => return Err(usage_error(format!("command {name:?} does not exist"))),
        },
    };
    let mut text = vec![];
    clap_mangen::Man::new(page).render(&mut text)?;
    Ok(io::stdout().write_all(&text)?)
}

/// Prints the help or the version if the user asked for it, and the help if the user gave no
/// command. Otherwise prints one line with the usage error and the command that shows the help, and
/// returns exit code 2.
fn usage(error: &clap::Error) -> ExitCode {
    let requested = [ErrorKind::DisplayHelp, ErrorKind::DisplayVersion];
    let no_command = ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if requested.contains(&error.kind()) || error.kind() == no_command {
        return match error.print() {
            Err(failed) if failed.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::from(if error.kind() == no_command { 2 } else { 0 }),
        };
    }
    let text = error.to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or_default();
    let message = message.split("\n\nFor more information").next().unwrap_or_default();
    let lines: Vec<&str> = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let line = lines.join("; ").replace(":; ", ": ");
    let command =
        std::env::args_os().nth(1).filter(|name| Cli::command().find_subcommand(name).is_some());
    let command = command.map_or(String::new(), |name| format!(" {}", name.display()));
    let line = line.trim_start_matches("error: ");
    messages::print(&format!("{line}; see encodle{command} --help"));
    ExitCode::from(2)
}

/// Whether the reader of the output has closed it, as `head` does.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io_error = error.downcast_ref::<io::Error>();
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
