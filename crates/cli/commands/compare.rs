//! `encodle compare`: the cosine similarities of all pairs of texts.

use std::io::{self, Write};

use anyhow::{Result, ensure};
use clap::Parser;
use encoder::{EmbedOptions, Embedder, beginning};

use crate::{messages, model::Model, truncation::Truncation, vector_table};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle compare \"A man is eating food.\" \"A man eats.\" \"It snows.\"")]
pub struct Args {
    #[command(flatten)]
    model: Model,

    /// Texts to compare
    #[arg(value_name = "TEXT", required = true, num_args = 2..)]
    texts: Vec<String>,
}

pub fn run(args: Args) -> Result<()> {
    let embedder = args.model.embedder(&args.model.files()?)?;
    let texts: Vec<&str> = args.texts.iter().map(String::as_str).collect();
    let vectors = vectors_for_cosines(&embedder, &texts, EmbedOptions::default())?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    vector_table::cosines(&mut out, &texts, &vectors)?;
    Ok(out.flush()?)
}

/// Warns that cosines are printed, if the model was trained for another similarity function, or for
/// one that is unknown.
pub fn warn_other_similarity(embedder: &Embedder) {
    let similarity = embedder.similarity_fn_name();
    if let Some(unknown) = embedder.unknown_similarity_fn_name() {
        messages::print(&format!(
            "the model's similarity_fn_name {unknown:?} is unknown: expected cosine, dot, \
             euclidean or manhattan; cosines are printed"
        ));
    } else if similarity != "cosine" {
        messages::print(&format!(
            "the model's similarity_fn_name is {similarity:?}; cosines are printed"
        ));
    }
}

/// The vectors of texts whose cosines are printed. Warns if the model was trained for another
/// similarity function, and if texts were truncated.
pub fn vectors_for_cosines<S: AsRef<str>>(
    embedder: &Embedder,
    texts: &[S],
    options: EmbedOptions,
) -> Result<Vec<Vec<f32>>> {
    warn_other_similarity(embedder);
    let embeddings = embedder.embed_with(texts, options)?;
    let mut truncation = Truncation::default();
    truncation.add(embeddings.truncated.len() as u64);
    truncation.warn(embedder.tokenizer().max_seq_length(), "");
    let vectors = embeddings.vectors.to_vec2()?;
    check_finite(texts, &vectors)?;
    Ok(vectors)
}

/// Checks that all values of the vectors are finite.
///
/// # Errors
/// A message that names the first text whose vector has NaN or infinity.
pub fn check_finite<S: AsRef<str>>(texts: &[S], vectors: &[impl AsRef<[f32]>]) -> Result<()> {
    for (text, vector) in texts.iter().zip(vectors) {
        ensure!(
            vector.as_ref().iter().all(|value| value.is_finite()),
            "text {:?}: the vector has a NaN or infinite value; if --dtype is f16, use f32 or bf16",
            beginning(text.as_ref())
        );
    }
    Ok(())
}
