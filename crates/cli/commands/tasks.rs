//! The commands of tasks, such as `encodle tag`: one JSON line per text.

use std::io::{self, Write};

use anyhow::Result;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, Subcommand, builder::PossibleValue};
use corpus::Record;
use encoder::{
    Error, InputError, Parameter, ParameterKind, Params, Pipeline, TaskVisitor, TextResult,
    Truncated, for_each_task,
};
use serde_json::{Map, Value};

use crate::{
    arguments::{named_values, positive},
    json_line::write_line,
    task::Task,
    texts::{records, refused},
    truncation::Truncation,
};

/// The number of texts that are computed together.
const CHUNK_SIZE: usize = 256;

/// A command with its arguments.
pub struct TaskCommand(Box<dyn FnOnce() -> Result<()>>);

impl TaskCommand {
    pub fn run(self) -> Result<()> {
        (self.0)()
    }
}

/// Adds the command of each task.
struct Commands(Option<Command>);

impl TaskVisitor for Commands {
    fn visit<P: Pipeline>(&mut self) {
        self.0 = self.0.take().map(|all| all.subcommand(command::<P>()));
    }
}

/// Parses the arguments of the command of this name.
struct Parse<'a> {
    name: &'a str,
    matches: &'a ArgMatches,
    parsed: Option<Result<TaskCommand, clap::Error>>,
}

impl TaskVisitor for Parse<'_> {
    fn visit<P: Pipeline>(&mut self) {
        if P::COMMAND == self.name {
            self.parsed = Some(parse::<P>(self.matches));
        }
    }
}

/// Searches for the command of this name.
struct Has<'a>(&'a str, bool);

impl TaskVisitor for Has<'_> {
    fn visit<P: Pipeline>(&mut self) {
        self.1 |= P::COMMAND == self.0;
    }
}

impl Subcommand for TaskCommand {
    fn augment_subcommands(command: Command) -> Command {
        let mut commands = Commands(Some(command));
        for_each_task(&mut commands);
        commands.0.expect("the visitor puts the command back")
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        let mut search = Has(name, false);
        for_each_task(&mut search);
        search.1
    }
}

impl FromArgMatches for TaskCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let (name, matches) = matches.subcommand().unwrap_or(("", matches));
        let mut parse = Parse { name, matches, parsed: None };
        for_each_task(&mut parse);
        let unknown = || Err(clap::Error::new(clap::error::ErrorKind::InvalidSubcommand));
        parse.parsed.unwrap_or_else(unknown)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The command of a task, with its parameters and the arguments of all tasks.
fn command<P: Pipeline>() -> Command {
    let example = P::EXAMPLE;
    let values = example.parameters.iter().map(|(name, value)| {
        let quote = if value.contains(' ') { "\"" } else { "" };
        format!(" --{name} {quote}{value}{quote}")
    });
    let values: String = values.collect();
    let (name, text) = (P::COMMAND, example.text);
    let example = format!("Examples:\n  encodle {name} --model folder{values} \"{text}\"");
    let command = Command::new(name).args(P::Params::PARAMETERS.iter().map(argument));
    Task::augment_args(command).about(P::ABOUT).long_about(None).after_help(example)
}

/// The argument of a parameter.
fn argument(parameter: &Parameter) -> Arg {
    let argument = Arg::new(parameter.name).long(parameter.name).help(parameter.help());
    match parameter.kind {
        ParameterKind::Text => argument.value_name("TEXT").required(true),
        ParameterKind::Count { default } => argument
            .value_name("N")
            .default_value(default.to_string())
            .value_parser(positive::<usize>),
        ParameterKind::Choice { values, default } => {
            let value = |(name, help)| PossibleValue::new(name).help(help);
            argument
                .value_name(parameter.name.to_uppercase())
                .default_value(default())
                .value_parser(named_values(values().into_iter().map(value)))
        }
    }
}

fn parse<P: Pipeline>(matches: &ArgMatches) -> Result<TaskCommand, clap::Error> {
    let task = Task::from_arg_matches(matches)?;
    let value = |parameter: &Parameter| {
        let name = parameter.name;
        let value = match parameter.kind {
            ParameterKind::Count { .. } => matches.get_one::<usize>(name).copied().map(Value::from),
            _ => matches.get_one::<String>(name).cloned().map(Value::from),
        };
        Some((name.to_string(), value?))
    };
    let values: Map<_, _> = P::Params::PARAMETERS.iter().filter_map(value).collect();
    Ok(TaskCommand(Box::new(|| run::<P>(task, values))))
}

/// Writes one JSON line per text, in order. The texts before an invalid or refused one are computed
/// first.
fn run<P: Pipeline>(task: Task, values: Map<String, Value>) -> Result<()> {
    let params = P::Params::from_values(values)?;
    let (model, source) = task.start(P::load)?;
    let mut records = records(&source)?;
    let mut truncation = Truncation::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    loop {
        let mut outcome = Ok(());
        let valid = records.by_ref().take(CHUNK_SIZE);
        let valid = valid.map_while(|record| record.map_err(|error| outcome = Err(error)).ok());
        let chunk: Vec<Record> = valid.collect();
        let is_last = chunk.len() < CHUNK_SIZE;
        let texts: Vec<&str> = chunk.iter().map(Record::text).collect();
        let mut tokenized = vec![];
        for (record, text) in chunk.iter().zip(model.tokenize_all(&texts, &params)) {
            match text {
                Ok(text) => tokenized.push(text),
                Err(error) => {
                    outcome = Err(match error {
                        Error::Input(InputError::LongQuestion { .. }) => error.into(),
                        error => refused(record, &source, error).into(),
                    });
                    break;
                }
            }
        }
        let sequences = tokenized.iter().flat_map(|text| &text.sequences);
        truncation.add(Truncated::of(sequences).len() as u64);
        let texts = &texts[..tokenized.len()];
        let results = model
            .run_tokenized(texts, tokenized, &params, |batch| model.compute(batch, &params))?;
        for (text, result) in texts.iter().zip(results) {
            write_line(&mut out, &TextResult { text: text.to_string(), result })?;
        }
        out.flush()?;
        if is_last || outcome.is_err() {
            truncation.warn(model.tokenizer().max_seq_length(), "");
            return outcome;
        }
    }
}
