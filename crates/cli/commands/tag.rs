//! `encodle tag`: the named entities in texts.

use std::io::{self, Write};

use anyhow::Result;
use clap::{Parser, ValueEnum};
use encoder::{Aggregation, CharacterPositions, TokenClassifier};
use serde::Serialize;

use crate::{
    json_line::write_line,
    span::Span,
    task::Task,
    texts::{records, refused},
};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle tag --model folder \"Ada Lovelace lived in London.\"
  encodle tag --model folder --join none < lines.txt")]
pub struct Args {
    /// How to join tokens into entities
    #[arg(long, value_enum, default_value_t)]
    join: Join,

    #[command(flatten)]
    task: Task,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Join {
    /// Each token with a label other than O is an entity
    None,
    /// Join adjacent tokens whose labels are equal without the prefix B- or I-; a label with B-
    /// starts a new entity
    #[default]
    Simple,
    /// Label each word by its first token; join words as in simple
    First,
    /// Give each word the label with the highest mean score over its tokens; join words as in
    /// simple
    Average,
    /// Label each word by its token with the highest score; join words as in simple
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

/// One line of output.
#[derive(Serialize)]
struct Tagged<'a> {
    text: &'a str,
    entities: Vec<Entity<'a>>,
}

#[derive(Serialize)]
struct Entity<'a> {
    label: &'a str,
    #[serde(flatten)]
    span: Span<'a>,
}

/// Writes one JSON line per text, in order.
pub fn run(args: Args) -> Result<()> {
    let (model, source) = args.task.start(TokenClassifier::from_files)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    for record in records(&source)? {
        let record = record?;
        let text = record.text();
        let entities = model.classify(text, args.join.into());
        let entities = entities.map_err(|error| refused(&record, &source, error))?;
        let mut positions = CharacterPositions::new(text);
        let entities = entities.iter().map(|entity| {
            let span = Span::new(&mut positions, entity.score, entity.range.clone());
            Entity { label: &entity.label, span }
        });
        write_line(&mut out, &Tagged { text, entities: entities.collect() })?;
    }
    Ok(out.flush()?)
}
