//! `bert tag`: what texts name. `bert answer`: where in texts the answer to a question stands.

use std::{
    io::{self, Write},
    ops::Range,
};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use encoder::{Aggregation, QuestionAnswerer, TokenClassifier};
use serde::Serialize;

use crate::task::{Task, write_line};

#[derive(Parser)]
#[command(after_help = "Examples:
  bert tag --model folder \"Ada Lovelace lived in London.\"
  bert tag --model folder --join none < lines.txt")]
pub struct TagArgs {
    /// How tokens are joined
    #[arg(long, value_enum, default_value_t)]
    join: Join,

    #[command(flatten)]
    task: Task,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Join {
    /// They are not
    None,
    /// Those of one label that follow one another
    #[default]
    Simple,
    /// Words by their first token, and those of one label
    First,
    /// Words by the mean of their tokens, and those of one label
    Average,
    /// Words by their surest token, and those of one label
    Max,
}

impl From<Join> for Aggregation {
    fn from(join: Join) -> Self {
        match join {
            Join::None => Self::None,
            Join::Simple => Self::Simple,
            Join::First => Self::First,
            Join::Average => Self::Average,
            Join::Max => Self::Max,
        }
    }
}

#[derive(Parser)]
#[command(after_help = "Examples:
  bert answer --model folder --question \"Where did she live?\" \"Ada Lovelace lived in London.\"")]
pub struct AnswerArgs {
    /// What is asked of each text
    #[arg(long, value_name = "TEXT")]
    question: String,

    /// Print the likeliest N answers
    #[arg(long, value_name = "N", default_value_t = 1)]
    top: usize,

    #[command(flatten)]
    task: Task,
}

/// A line of `bert tag`.
#[derive(Serialize)]
struct Tagged<'a> {
    text: &'a str,
    entities: Vec<Entity<'a>>,
}

#[derive(Serialize)]
struct Entity<'a> {
    label: &'a str,
    #[serde(flatten)]
    part: Part<'a>,
}

/// A line of `bert answer`.
#[derive(Serialize)]
struct Answered<'a> {
    text: &'a str,
    answers: Vec<Part<'a>>,
    no_answer: f32,
}

/// A part of a text.
#[derive(Serialize)]
struct Part<'a> {
    score: f32,
    text: &'a str,
    /// In characters, as most languages count them, and not in bytes.
    start: usize,
    end: usize,
}

impl<'a> Part<'a> {
    fn of(text: &'a str, score: f32, range: Range<usize>) -> Self {
        let start = text[..range.start].chars().count();
        let text = &text[range];
        Self { score, text, start, end: start + text.chars().count() }
    }
}

/// A JSON line a text, in their order.
pub fn tag(args: TagArgs) -> Result<()> {
    let (model, texts) = args.task.start(TokenClassifier::from_files)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    for text in texts {
        let text = text?;
        let found = model.classify(&text, args.join.into())?;
        let entities = found.iter().map(|entity| {
            let part = Part::of(&text, entity.score, entity.range.clone());
            Entity { label: &entity.label, part }
        });
        write_line(&mut out, &Tagged { text: &text, entities: entities.collect() })?;
    }
    Ok(out.flush()?)
}

/// A JSON line a text, in their order.
pub fn answer(args: AnswerArgs) -> Result<()> {
    let (model, texts) = args.task.start(QuestionAnswerer::from_files)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    for text in texts {
        let text = text?;
        let found = model.answer(&args.question, &text, args.top)?;
        let answers = found.answers.into_iter();
        let answers = answers.map(|answer| Part::of(&text, answer.score, answer.range)).collect();
        let no_answer = found.no_answer;
        write_line(&mut out, &Answered { text: &text, answers, no_answer })?;
    }
    Ok(out.flush()?)
}
