//! `encodle answer`: the answer to a question in texts.

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;
use encoder::{CharacterPositions, QuestionAnswerer};
use serde::Serialize;

use crate::{arguments::positive, json_line::write_line, span::Span, task::Task, texts::texts};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle answer --model folder --question \"Where did she live?\" \"Ada Lovelace lived in London.\"")]
pub struct Args {
    /// Question to answer from each text
    #[arg(long, value_name = "TEXT")]
    question: String,

    /// Number of answers per text, the most probable first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive::<usize>)]
    top: usize,

    #[command(flatten)]
    task: Task,
}

/// One line of output.
#[derive(Serialize)]
struct Answered<'a> {
    text: &'a str,
    answers: Vec<Span<'a>>,
    no_answer: f32,
}

/// Writes one JSON line per text, in order.
pub fn run(args: Args) -> Result<()> {
    let (model, source) = args.task.start(QuestionAnswerer::from_files)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    for text in texts(&source)? {
        let text = text?;
        let found = model.answer(&args.question, &text, args.top)?;
        let answers = found.answers.into_iter();
        let mut positions = CharacterPositions::new(&text);
        let answers = answers.map(|answer| Span::new(&mut positions, answer.score, answer.range));
        let answers = answers.collect();
        let no_answer = found.no_answer;
        write_line(&mut out, &Answered { text: &text, answers, no_answer })?;
    }
    Ok(out.flush()?)
}
