//! The texts and the prompt from a command's arguments.

use std::io::{self, IsTerminal};

use anyhow::Result;
use corpus::{Error, Record, RecordSource};
use encoder::Prompt;

use crate::messages;

/// The texts from the command line or, if there are none, the lines of standard input.
pub fn source(given: Vec<String>) -> RecordSource {
    if !given.is_empty() {
        return RecordSource::texts(given);
    }
    announce_stdin();
    RecordSource::stdin()
}

/// The texts of a source.
pub fn texts(source: &RecordSource) -> Result<impl Iterator<Item = Result<String>>> {
    Ok(records(source)?.map(|record| record.map(Record::into_text)))
}

/// The records of a source, for commands whose errors name the record.
pub fn records(source: &RecordSource) -> Result<impl Iterator<Item = Result<Record>>> {
    Ok(source.open()?.map(|record| Ok(record.map_err(Error::from)?)))
}

/// The error of a model that refuses the text of a record of `source`.
pub fn refused(record: &Record, source: &RecordSource, error: encoder::Error) -> Error {
    record.refused(&source.name(), error).into()
}

/// The prompt of `--prompt-name` or `--prompt`, if one is given.
pub fn prompt<'a>(name: &'a Option<String>, text: &'a Option<String>) -> Option<Prompt<'a>> {
    let named = name.as_deref().map(Prompt::Named);
    named.or_else(|| text.as_deref().map(Prompt::Text))
}

/// If standard input is a terminal, prints that the command reads texts from standard input.
pub fn announce_stdin() {
    if io::stdin().is_terminal() {
        messages::print("reading texts from standard input, one per line (end with Ctrl-D)");
    }
}
