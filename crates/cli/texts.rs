//! The texts and the prompt that a command is given.

use std::io::{self, BufRead, IsTerminal};

use anyhow::{Result, anyhow};
use encoder::Prompt;

/// The texts given, or else the lines of standard input.
pub fn texts(given: Vec<String>) -> Box<dyn Iterator<Item = Result<String>>> {
    if !given.is_empty() {
        return Box::new(given.into_iter().map(Ok));
    }
    tell_terminal();
    let lines = io::stdin().lock().split(b'\n').zip(1..);
    Box::new(lines.map(|(line, number)| {
        let mut line = line.map_err(|error| anyhow!("standard input cannot be read: {error}"))?;
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map_err(|error| {
            let byte = error.utf8_error().valid_up_to() + 1;
            anyhow!("standard input, line {number}: expected UTF-8, got another byte at {byte}")
        })
    }))
}

/// The prompt that `--prompt-name` or `--prompt` asks for, if any.
pub fn prompt<'a>(name: &'a Option<String>, text: &'a Option<String>) -> Option<Prompt<'a>> {
    let named = name.as_deref().map(Prompt::Named);
    named.or_else(|| text.as_deref().map(Prompt::Text))
}

/// Tells a person at the terminal that texts are read from there.
pub fn tell_terminal() {
    if io::stdin().is_terminal() {
        eprintln!("bert: reading texts, one a line, until the end of standard input (Ctrl-D)");
    }
}
