//! `bert classify`: the labels of texts. `bert rerank`: documents by how well they fit a query.
//! `bert fill-mask`: the likeliest tokens for the gaps of texts.

use std::{
    collections::{HashMap, HashSet},
    io::{self, Write},
};

use anyhow::Result;
use clap::Parser;
use encoder::{Candidate, MaskFiller, Prompt, TextClassifier, Truncated};
use serde::{Serialize, Serializer};

use crate::{
    task::{Task, write_line},
    texts::prompt,
    truncation::Truncation,
};

/// Lines read before they are classified together.
const WINDOW: usize = 256;

#[derive(Parser)]
#[command(after_help = "Examples:
  bert classify --model folder \"what a film\" \"how dull\"
  bert classify --model org/name < reviews.txt")]
pub struct ClassifyArgs {
    #[command(flatten)]
    task: Task,
}

#[derive(Parser)]
#[command(after_help = "Examples:
  bert fill-mask --model folder --top 3 \"Paris is the [MASK] of France.\"")]
pub struct FillMaskArgs {
    /// Print the likeliest N tokens for each gap
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,

    #[command(flatten)]
    task: Task,
}

#[derive(Parser)]
#[command(after_help = "Examples:
  bert rerank --model folder --query \"how do I undo a commit\" \"git revert\" \"git push\"")]
pub struct RerankArgs {
    /// What is asked of the documents, which are the texts
    #[arg(long, value_name = "TEXT")]
    query: String,

    /// Print only the best N
    #[arg(long, value_name = "N")]
    top: Option<usize>,

    /// Prompt of the model to put before the query [default: the model's default prompt, if any]
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// Text to put before the query
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    #[command(flatten)]
    task: Task,
}

/// A line of `bert classify`.
#[derive(Serialize)]
struct Classified<'a> {
    text: &'a str,
    label: &'a str,
    score: f32,
    #[serde(serialize_with = "in_order")]
    scores: Vec<(&'a str, f32)>,
}

fn in_order<S: Serializer>(scores: &[(&str, f32)], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_map(scores.iter().copied())
}

/// A line of `bert rerank`.
#[derive(Serialize)]
struct Ranked<'a> {
    /// Which of the documents, from 1.
    document: usize,
    score: f32,
    text: &'a str,
}

/// A JSON line a text, in their order.
pub fn classify(args: ClassifyArgs) -> Result<()> {
    let (model, mut texts) = args.task.start(TextClassifier::from_files)?;
    let names = distinct(model.labels().names());
    let mut truncation = Truncation::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    loop {
        let window = texts.by_ref().take(WINDOW).collect::<Result<Vec<String>>>()?;
        let tokens = model.tokenize(&window)?;
        truncation.add(&Truncated::of(&tokens));
        for (text, scores) in window.iter().zip(model.classify_tokens(&tokens)?) {
            let scores: Vec<(&str, f32)> =
                names.iter().map(String::as_str).zip(scores.iter().copied()).collect();
            let best = scores.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1)); // the first of two
            let &(label, score) = best.unwrap_or(&("", f32::NAN));
            let line = Classified { text, label, score, scores };
            write_line(&mut out, &line)?;
        }
        out.flush()?;
        if window.len() < WINDOW {
            truncation.warn(model.tokenizer().max_seq_length(), "");
            return Ok(());
        }
    }
}

/// The names of labels as distinct keys of a JSON object: a name that several labels share is followed
/// by the label's index.
fn distinct(names: &[String]) -> Vec<String> {
    let mut count: HashMap<&str, usize> = HashMap::new();
    for name in names {
        *count.entry(name).or_default() += 1;
    }
    let mut taken: HashSet<String> = names.iter().cloned().collect();
    let distinct = names.iter().enumerate().map(|(i, name)| {
        if count[name.as_str()] == 1 {
            return name.clone();
        }
        let mut numbered = format!("{name} ({i})");
        while !taken.insert(numbered.clone()) {
            numbered.push('\'');
        }
        numbered
    });
    distinct.collect()
}

/// A line of `bert fill-mask`: for each gap, its tokens.
#[derive(Serialize)]
struct Filled<'a> {
    text: &'a str,
    gaps: Vec<Vec<Token>>,
}

#[derive(Serialize)]
struct Token {
    token: String,
    score: f32,
}

/// A JSON line a text, in their order.
pub fn fill_mask(args: FillMaskArgs) -> Result<()> {
    let (model, texts) = args.task.start(MaskFiller::from_files)?;
    let mut truncation = Truncation::default();
    let mut out = io::BufWriter::new(io::stdout().lock());
    for text in texts {
        let text = text?;
        let token = |Candidate { token, score, .. }| Token { token, score };
        let tokens = model.tokenize(&text)?;
        truncation.add(&Truncated::of([&tokens]));
        let gaps = model.fill_tokens(&tokens, args.top)?.into_iter();
        let gaps = gaps.map(|gap| gap.into_iter().map(token).collect()).collect();
        write_line(&mut out, &Filled { text: &text, gaps })?;
    }
    out.flush()?;
    truncation.warn(model.tokenizer().max_seq_length(), "");
    Ok(())
}

/// A JSON line a document, the best first; equal ones in their order.
pub fn rerank(args: RerankArgs) -> Result<()> {
    let (model, texts) = args.task.start(TextClassifier::from_files)?;
    let documents = texts.collect::<Result<Vec<String>>>()?;
    let prompt = prompt(&args.prompt_name, &args.prompt).unwrap_or(Prompt::Default);
    let pairs = model.tokenize_pairs(&args.query, &documents, prompt)?;
    let scores = model.rank_tokens(&pairs)?;
    let mut ranked: Vec<Ranked> = (1..)
        .zip(documents.iter().zip(scores))
        .map(|(document, (text, score))| Ranked { document, score, text })
        .collect();
    ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mut out = io::BufWriter::new(io::stdout().lock());
    for line in ranked.iter().take(args.top.unwrap_or(usize::MAX)) {
        write_line(&mut out, line)?;
    }
    out.flush()?;
    let mut truncation =
        Truncation::of("pair of query and document", "pairs of query and document");
    truncation.add(&Truncated::of(&pairs));
    truncation.warn(model.tokenizer().max_seq_length(), "");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_one_name_are_numbered() {
        let names = ["a", "b", "a"].map(String::from);
        assert_eq!(distinct(&names), ["a (0)", "b", "a (2)"]);
        assert_eq!(distinct(&names[..2]), ["a", "b"]);
        let names = ["a", "a", "a (0)"].map(String::from);
        assert_eq!(distinct(&names), ["a (0)'", "a (1)", "a (0)"]);
    }
}
