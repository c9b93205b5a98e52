//! `encodle rerank`: ranks documents by relevance to a query.

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;
use encoder::{Ranking, Reranker};
use serde::Serialize;

use crate::{
    arguments::positive,
    json_line::write_line,
    task::Task,
    texts::{prompt, texts},
    truncation::Truncation,
};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle rerank --model folder --query \"how do I undo a commit\" \"git revert\" \"git push\"")]
pub struct Args {
    /// Query by which to rank the documents; each TEXT is a document
    #[arg(long, value_name = "QUERY")]
    query: String,

    /// Print only the best N documents
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    top: Option<usize>,

    /// Name of a prompt of the model to put before the query [default: the model's default prompt,
    /// if any; query for a multi-vector model]
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,

    /// Text to put before the query
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    #[command(flatten)]
    task: Task,
}

/// One line of output.
#[derive(Serialize)]
struct Ranked<'a> {
    /// The number of the document, from 1.
    document: usize,
    score: f32,
    text: &'a str,
}

/// Writes one JSON line per document, the best first; equal scores keep the documents' order.
pub fn run(args: Args) -> Result<()> {
    let (model, source) = args.task.start(Reranker::from_files)?;
    let documents = texts(&source)?.collect::<Result<Vec<String>>>()?;
    let prompt = prompt(&args.prompt_name, &args.prompt);
    let Ranking { scores, truncated, max_seq_length } =
        model.rank(&args.query, &documents, prompt)?;
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
    let mut truncation = Truncation::of(match model {
        Reranker::CrossEncoder(_) => ["pair of query and document", "pairs of query and document"],
        Reranker::MultiVector(_) => ["document", "documents"],
    });
    truncation.add(truncated.len() as u64);
    truncation.warn(max_seq_length, "");
    Ok(())
}
