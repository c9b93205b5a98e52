//! The texts and the prompt from a command's arguments.

use std::io::{self, IsTerminal};

use anyhow::Result;
use corpus::{Record, RecordSource};
use encoder::{EmbedOptions, LongTexts, Prompt};

/// The texts from the command line or, if there are none, the lines of standard input.
pub fn texts(given: Vec<String>) -> Result<Box<dyn Iterator<Item = Result<String>>>> {
    if !given.is_empty() {
        return Ok(Box::new(given.into_iter().map(Ok)));
    }
    announce_stdin();
    let records = RecordSource::stdin().open()?;
    Ok(Box::new(records.map(|record| Ok(record.map(Record::into_text)?))))
}

/// The prompt of `--prompt-name` or `--prompt`, if one is given.
pub fn prompt<'a>(name: &'a Option<String>, text: &'a Option<String>) -> Option<Prompt<'a>> {
    let named = name.as_deref().map(Prompt::Named);
    named.or_else(|| text.as_deref().map(Prompt::Text))
}

/// The options for embedding texts with a prompt.
pub fn embed_options(prompt: Prompt<'_>, long_texts: LongTexts) -> EmbedOptions<'_> {
    EmbedOptions::new().with_prompt(prompt).with_long_texts(long_texts)
}

/// If standard input is a terminal, prints that the command reads texts from standard input.
pub fn announce_stdin() {
    if io::stdin().is_terminal() {
        eprintln!("bert: reading texts from standard input, one per line (end with Ctrl-D)");
    }
}
