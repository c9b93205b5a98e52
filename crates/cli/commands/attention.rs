//! `encodle attention`: the attention weights of a text, as a table, a picture or numbers.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Result, anyhow};
use clap::{Parser, ValueEnum};
use encoder::{AttentionKind, AttentionReader, TextAttention};
use picture::{HeadChoice, Matrix, all_heads, choose, document, html_page};

use crate::{
    arguments::usage_error,
    atomic_write::atomic_write,
    attention::{
        export::{write_csv, write_json},
        png,
        terminal::write_matrix,
    },
    compute::Compute,
    default_model, messages,
    truncation::Truncation,
};

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle attention \"I love AI\"
  encodle attention \"I love AI\" --layer 2 --head mean
  encodle attention \"The bank is closed.\" --pair \"We sat on the bank.\" --output bank.html")]
pub struct Args {
    /// Model: folder, weights file, or org/name@revision on the Hugging Face hub (@revision is
    /// optional) [default: all-MiniLM-L6-v2]
    #[arg(long)]
    model: Option<String>,

    /// Layer to show, from 0 [default: the last]
    #[arg(long, value_name = "L")]
    layer: Option<usize>,

    /// Head to show, from 0; all for every head of the layer; mean for the mean of the heads
    #[arg(
        long,
        default_value = "mean",
        value_name = "H|all|mean",
        value_parser = str::parse::<HeadChoice>,
    )]
    head: HeadChoice,

    /// Second text of a pair, or the decoder's text of an encoder-decoder [default: none; an
    /// encoder-decoder generates the decoder's text]
    #[arg(long, value_name = "TEXT")]
    pair: Option<String>,

    /// Attention of an encoder-decoder to show [default: cross]
    #[arg(long, value_enum)]
    kind: Option<Kind>,

    /// Output file: .html, .svg or .png for a picture of all heads, with those of --layer and
    /// --head enlarged; .csv or .json for the weights of all layers and heads
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    #[command(flatten)]
    compute: Compute,

    /// Text whose attention weights to show
    #[arg(value_name = "TEXT")]
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Self-attention of the encoder
    Encoder,
    /// Causal self-attention of the decoder
    Decoder,
    /// Cross-attention of the decoder to the encoder
    Cross,
}

impl From<Kind> for AttentionKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Encoder => Self::Encoder,
            Kind::Decoder => Self::Decoder,
            Kind::Cross => Self::Cross,
        }
    }
}

/// The format of the output file.
#[derive(Clone, Copy)]
enum FileFormat {
    Html,
    Svg,
    Png,
    Csv,
    Json,
}

impl FileFormat {
    fn from_path(path: &Path) -> Result<Self> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        Ok(match extension.unwrap_or_default().to_lowercase().as_str() {
            "html" => Self::Html,
            "svg" => Self::Svg,
            "png" => Self::Png,
            "csv" => Self::Csv,
            "json" => Self::Json,
            _ => {
                return Err(usage_error(format!(
                    "{} has an unknown extension: expected .html, .svg, .png, .csv or .json",
                    path.display()
                )));
            }
        })
    }
}

pub fn run(args: Args) -> Result<()> {
    let output = args.output.as_deref().map(|path| -> Result<_> {
        Ok((corpus::output_path(path)?, FileFormat::from_path(path)?))
    });
    let output = output.transpose()?;
    let (attention, title) = read(&args)?;
    let chosen = choose(&attention, args.layer, args.head)?;
    match output {
        Some((path, format)) => write_file(&path, format, &title, &attention, &chosen),
        None => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            let shaded = messages::is_colored(&io::stdout());
            for matrix in &chosen {
                write_matrix(&mut out, &attention, matrix, shaded)?;
            }
            Ok(out.flush()?)
        }
    }
}

/// Runs the model on the text, and returns the weights of the chosen kind, and a title for them.
fn read(args: &Args) -> Result<(TextAttention, String)> {
    let files = default_model::open_or_default(args.model.as_deref())?;
    let options = args.compute.start()?;
    let reader = AttentionReader::from_files(&files, &options)?;
    let mut all = reader.read(&args.text, args.pair.as_deref())?;
    let chosen = match args.kind.map(AttentionKind::from) {
        None => all.len() - 1,
        Some(kind) => all.iter().position(|attention| attention.kind == kind).ok_or_else(|| {
            let kinds: Vec<String> = all.iter().map(|a| a.kind.to_string()).collect();
            anyhow!("the model has no {kind} attention: expected --kind {}", kinds.join(" or "))
        })?,
    };
    let kind = all[chosen].kind;
    let pair = args.pair.as_deref();
    let is_encoder_decoder = all.len() > 1;
    let noun = if pair.is_some() && !is_encoder_decoder { "pair of texts" } else { "text" };
    warn(noun, &all[0].queries, all[0].queries_truncated);
    if kind != AttentionKind::Encoder
        && let [_, decoder, ..] = &all[..]
    {
        warn("text of the decoder", &decoder.queries, decoder.queries_truncated);
    }
    let texts = match (is_encoder_decoder, kind) {
        (false, _) => [Some(&args.text[..]), pair],
        (true, AttentionKind::Encoder) => [Some(&args.text[..]), None],
        (true, AttentionKind::Decoder) => [None, Some(pair.unwrap_or("generated text"))],
        (true, AttentionKind::Cross) => {
            [Some(&args.text[..]), Some(pair.unwrap_or("generated text"))]
        }
    };
    let mut title = texts.into_iter().flatten().collect::<Vec<_>>().join(" / ");
    if is_encoder_decoder || kind != AttentionKind::Encoder {
        title += &format!(" ({kind} attention)");
    }
    Ok((all.swap_remove(chosen), title))
}

/// Prints a warning if truncation removed tokens of a text. `tokens` are those that were kept,
/// `removed` is the number of removed tokens.
fn warn(noun: &'static str, tokens: &[String], removed: usize) {
    let mut truncation = Truncation::of([noun, noun]);
    truncation.add(removed.min(1) as u64);
    truncation.warn(tokens.len(), "");
}

fn write_file(
    path: &Path,
    format: FileFormat,
    title: &str,
    attention: &TextAttention,
    chosen: &[Matrix],
) -> Result<()> {
    let svg = || document(title, attention, chosen);
    let bytes = match format {
        FileFormat::Csv => {
            let weights = all_heads(attention)?; // (L, H, T, S)
            return atomic_write(path, |out| write_csv(out, attention, &weights));
        }
        FileFormat::Json => {
            let weights = all_heads(attention)?; // (L, H, T, S)
            return atomic_write(path, |out| write_json(out, attention, &weights));
        }
        FileFormat::Html => html_page(title, &svg()?).into_bytes(),
        FileFormat::Svg => svg()?.into_bytes(),
        FileFormat::Png => png::render(&svg()?)?,
    };
    atomic_write(path, |out| Ok(out.write_all(&bytes)?))
}
