//! `bert similarity`: how alike two texts are. `bert compare`: how alike each of some texts is to each.

use std::io::{self, Write};

use anyhow::Result;
use clap::Parser;
use encoder::{EmbedOptions, Embedder};

use crate::{model::Model, table, truncation::Truncation};

#[derive(Parser)]
#[command(after_help = "Examples:
  bert similarity \"A man is eating food.\" \"A man eats.\"")]
pub struct SimilarityArgs {
    #[command(flatten)]
    model: Model,

    /// One text
    #[arg(value_name = "A")]
    one: String,

    /// The other
    #[arg(value_name = "B")]
    other: String,
}

#[derive(Parser)]
#[command(after_help = "Examples:
  bert compare \"A man is eating food.\" \"A man eats.\" \"It snows.\"")]
pub struct CompareArgs {
    #[command(flatten)]
    model: Model,

    /// Texts to compare
    #[arg(value_name = "TEXT", required = true, num_args = 2..)]
    texts: Vec<String>,
}

fn embed(model: &Model, texts: &[&str]) -> Result<Vec<Vec<f32>>> {
    let (embedder, _) = model.embedder()?;
    vectors_for_cosines(&embedder, texts, EmbedOptions::default())
}

/// The vectors of texts whose cosines are printed, with the warnings that concern them: the model was
/// trained for another similarity, or texts were truncated.
pub fn vectors_for_cosines<S: AsRef<str>>(
    embedder: &Embedder,
    texts: &[S],
    options: EmbedOptions,
) -> Result<Vec<Vec<f32>>> {
    let similarity = embedder.similarity_fn_name();
    if similarity != "cosine" {
        eprintln!("bert: the model's similarity_fn_name is {similarity:?}; cosines are printed");
    }
    let embeddings = embedder.embed_with(texts, options)?;
    let mut truncation = Truncation::default();
    truncation.add(&embeddings.truncated);
    truncation.warn(embedder.tokenizer().max_seq_length(), "");
    Ok(embeddings.vectors.to_vec2()?)
}

/// The cosine of the angle between the texts' vectors.
pub fn similarity(args: SimilarityArgs) -> Result<()> {
    let vectors = embed(&args.model, &[&args.one, &args.other])?;
    Ok(writeln!(io::stdout(), "{:.6}", table::cosine(&vectors[0], &vectors[1]))?)
}

/// The cosine of each with each, as a table.
pub fn compare(args: CompareArgs) -> Result<()> {
    let texts: Vec<&str> = args.texts.iter().map(String::as_str).collect();
    let vectors = embed(&args.model, &texts)?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    table::cosines(&mut out, &texts, &vectors)?;
    Ok(out.flush()?)
}
