//! `encodle classify`: the labels of texts.

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;
use corpus::{Record, RecordSource};
use encoder::{TextClassifier, Tokens, Truncated};
use serde::{Serialize, Serializer};

use crate::{
    json_line::write_line,
    task::Task,
    texts::{records, refused},
    truncation::Truncation,
};

/// The number of texts that are classified together.
const CHUNK_SIZE: usize = 256;

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle classify --model folder \"what a film\" \"how dull\"
  encodle classify --model org/name < reviews.txt")]
pub struct Args {
    #[command(flatten)]
    task: Task,
}

/// One line of output.
#[derive(Serialize)]
struct Classified<'a> {
    text: &'a str,
    label: &'a str,
    score: f32,
    #[serde(serialize_with = "as_map")]
    scores: Vec<(&'a str, f32)>,
}

/// Serialises pairs as a map in their order.
fn as_map<S: Serializer>(scores: &[(&str, f32)], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_map(scores.iter().copied())
}

/// Writes one JSON line per text, in order.
pub fn run(args: Args) -> Result<()> {
    let (model, source) = args.task.start(TextClassifier::from_files)?;
    let mut records = records(&source)?;
    let names = model.labels().distinct_names();
    let mut truncation = Truncation::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    loop {
        // The texts before an invalid or refused one are classified first.
        let mut invalid = Ok(());
        let valid = records.by_ref().take(CHUNK_SIZE);
        let valid = valid.map_while(|record| record.map_err(|error| invalid = Err(error)).ok());
        let chunk: Vec<Record> = valid.collect();
        let (tokens, refused) = tokenize(&model, &chunk, &source);
        if refused.is_err() {
            invalid = refused;
        }
        truncation.add(&Truncated::of(&tokens));
        for (record, scores) in chunk.iter().zip(model.classify_tokens(&tokens)?) {
            let text = record.text();
            let scores: Vec<(&str, f32)> =
                names.iter().map(String::as_str).zip(scores.iter().copied()).collect();
            // `max_by` returns the last of equal elements; the first label wins here.
            let best = scores.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1));
            let &(label, score) = best.expect("a classifier has labels");
            write_line(&mut out, &Classified { text, label, score, scores })?;
        }
        out.flush()?;
        if invalid.is_err() || chunk.len() < CHUNK_SIZE {
            truncation.warn(model.tokenizer().max_seq_length(), "");
            return invalid;
        }
    }
}

/// The tokens of the records before the first one whose text the model refuses, and the error of
/// this record.
fn tokenize(
    model: &TextClassifier,
    records: &[Record],
    source: &RecordSource,
) -> (Vec<Tokens>, Result<()>) {
    let texts: Vec<&str> = records.iter().map(Record::text).collect();
    if let Ok(tokens) = model.tokenize(&texts) {
        return (tokens, Ok(()));
    }
    let mut all = vec![];
    for record in records {
        match model.tokenize(&[record.text()]) {
            Ok(tokens) => all.extend(tokens),
            Err(error) => return (all, Err(refused(record, source, error).into())),
        }
    }
    (all, Ok(()))
}
