//! `bert attention`: what the tokens of a text attend to, as a table on the terminal or as a picture.

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
};

use anyhow::{Result, anyhow, bail};
use clap::{Parser, ValueEnum};
use encoder::{AttentionKind, AttentionReader, TextAttention};
use serde::Serialize;

use crate::{compute::Compute, ending::ending, picture, source, stored::output_path, table::fit};

/// Columns of a token's name before its row.
const NAME: usize = 12;
/// Columns of a weight.
const CELL: usize = 7;
/// What is shown of a row where there is no room for all of it.
const STRONGEST: usize = 5;

#[derive(Parser)]
#[command(after_help = "Examples:
  bert attention \"I love AI\"
  bert attention \"I love AI\" --layer 2 --head mean
  bert attention \"The bank is closed.\" --pair \"We sat on the bank.\" --output bank.html")]
pub struct Args {
    /// Folder, file of weights, or org/name or org/name@revision on the Hugging Face hub; the model
    /// that the program carries, where not given
    #[arg(long)]
    model: Option<String>,

    /// Layer to show, from 0; the last, where not given
    #[arg(long, value_name = "L")]
    layer: Option<usize>,

    /// Head to show, from 0, or all of a layer, or their mean
    #[arg(long, default_value = "mean", value_name = "H|all|mean", value_parser = head)]
    head: Head,

    /// Second text of a pair; of an encoder-decoder what the decoder has written, which it writes
    /// itself where not given
    #[arg(long, value_name = "TEXT")]
    pair: Option<String>,

    /// Which attention to show of an encoder-decoder; cross, where not given
    #[arg(long, value_enum)]
    kind: Option<Kind>,

    /// Write to a file instead: .html, .svg or .png for a picture of all heads and those chosen in full,
    /// .csv or .json for the weights of all layers and heads
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    #[command(flatten)]
    compute: Compute,

    /// Text to read
    #[arg(value_name = "TEXT")]
    text: String,
}

/// What `--kind` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Of the text to itself
    Encoder,
    /// Of what is written to what is before
    Decoder,
    /// Of what is written to the text
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

/// What `--head` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Head {
    All,
    Mean,
    One(usize),
}

fn head(name: &str) -> std::result::Result<Head, String> {
    match name {
        "all" => Ok(Head::All),
        "mean" => Ok(Head::Mean),
        number => {
            number.parse().map(Head::One).map_err(|_| "expected a number, all or mean".to_string())
        }
    }
}

/// The weights of one head, or of a mean.
pub struct Matrix {
    /// `layer 5, head 3`
    pub title: String,
    /// What each token gives to each.
    pub rows: Vec<Vec<f32>>,
}

/// The format of the file with the weights.
#[derive(Clone, Copy)]
enum FileFormat {
    Html,
    Svg,
    Png,
    Csv,
    Json,
}

impl FileFormat {
    /// The format of a file's ending.
    fn of(path: &Path) -> Result<Self> {
        Ok(match ending(path).as_str() {
            "html" => Self::Html,
            "svg" => Self::Svg,
            "png" => Self::Png,
            "csv" => Self::Csv,
            "json" => Self::Json,
            _ => bail!(
                "{} has no ending that names a format: expected .html, .svg, .png, .csv or .json",
                path.display()
            ),
        })
    }
}

pub fn run(args: Args) -> Result<()> {
    let output =
        |path: &PathBuf| Ok::<_, anyhow::Error>((output_path(path)?, FileFormat::of(path)?));
    let output = args.output.as_ref().map(output).transpose()?;
    let files = source::files_or_embedded(args.model.as_deref())?;
    let (precision, device) = args.compute.start()?;
    let reader = AttentionReader::from_files(&files, precision, &device)?;
    let mut all = reader.read(&args.text, args.pair.as_deref())?;
    let at = match args.kind.map(AttentionKind::from) {
        None => all.len() - 1,
        Some(kind) => all.iter().position(|attention| attention.kind == kind).ok_or_else(|| {
            let there: Vec<String> = all.iter().map(|a| a.kind.to_string()).collect();
            anyhow!("{kind} attention is not there: expected --kind {}", there.join(" or "))
        })?,
    };
    let attention = all.swap_remove(at);
    if attention.truncated > 0 {
        let plural = if attention.truncated == 1 { " was" } else { "s were" };
        eprintln!("bert: {} token{plural} truncated", attention.truncated);
    }
    let chosen = chosen(&attention, args.layer, args.head)?;
    let Some((path, format)) = &output else {
        let mut out = io::BufWriter::new(io::stdout().lock());
        let shaded = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        for matrix in &chosen {
            print(&mut out, &attention, matrix, shaded)?;
        }
        return Ok(out.flush()?);
    };
    let text = [Some(args.text.as_str()), args.pair.as_deref()];
    let mut title = text.into_iter().flatten().collect::<Vec<_>>().join(" / ");
    if attention.kind != AttentionKind::Encoder {
        title += &format!(" ({} attention)", attention.kind);
    }
    let layers = || layers(&attention);
    match format {
        FileFormat::Html => {
            let page = picture::html(&title, &attention, &layers()?, &chosen)?;
            write(path, |out| Ok(out.write_all(page.as_bytes())?))
        }
        FileFormat::Svg => {
            let picture = picture::svg(&title, &attention, &layers()?, &chosen)?;
            write(path, |out| Ok(out.write_all(picture.as_bytes())?))
        }
        FileFormat::Png => {
            let picture = picture::svg(&title, &attention, &layers()?, &chosen)?;
            let picture = picture::png(&picture)?;
            write(path, |out| Ok(out.write_all(&picture)?))
        }
        FileFormat::Csv => write(path, |out| csv(out, &attention, &layers()?)),
        FileFormat::Json => {
            let TextAttention { kind, queries, keys, .. } = &attention;
            let keys = Some(keys).filter(|_| *kind == AttentionKind::Cross);
            let all = Weights { tokens: queries, keys, weights: layers()? };
            write(path, |out| {
                serde_json::to_writer(&mut *out, &all)?;
                Ok(writeln!(out)?)
            })
        }
    }
}

/// What `.json` has.
#[derive(Serialize)]
struct Weights<'a> {
    tokens: &'a [String],
    /// What they attend to, where that is not they themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<&'a Vec<String>>,
    /// `(L, H, T, S)`
    weights: Vec<Vec<Vec<Vec<f32>>>>,
}

/// The heads of all layers.
fn layers(attention: &TextAttention) -> Result<Vec<Vec<Vec<Vec<f32>>>>> {
    let layers = 0..attention.weights.dim(0)?;
    Ok(layers
        .map(|layer| attention.weights.get(layer)?.to_vec3())
        .collect::<std::result::Result<_, _>>()?)
}

fn chosen(attention: &TextAttention, layer: Option<usize>, head: Head) -> Result<Vec<Matrix>> {
    let (layers, heads, _, _) = attention.weights.dims4()?;
    let within = |what: &str, number: usize, count: usize| match number < count {
        true => Ok(number),
        false => Err(anyhow!("{what} {number} is not there: expected 0 to {}", count - 1)),
    };
    let layer = within("layer", layer.unwrap_or(layers - 1), layers)?;
    let weights = attention.weights.get(layer)?; // (H, T, S)
    let one = |head: usize| {
        let title = format!("layer {layer}, head {head}");
        Ok(Matrix { title, rows: weights.get(head)?.to_vec2()? })
    };
    match head {
        Head::All => (0..heads).map(one).collect(),
        Head::One(head) => Ok(vec![one(within("head", head, heads)?)?]),
        Head::Mean => {
            let title = format!("layer {layer}, mean of {heads} heads");
            Ok(vec![Matrix { title, rows: weights.mean(0)?.to_vec2()? }])
        }
    }
}

/// The keys that a query gives most, the first of them the most.
pub fn strongest(row: &[f32]) -> impl Iterator<Item = usize> {
    let mut keys: Vec<usize> = (0..row.len()).collect();
    keys.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    keys.into_iter().take(STRONGEST)
}

/// A table with the keys side by side, or for each token those that it gives most, where that is too
/// wide.
fn print(
    out: &mut impl Write,
    attention: &TextAttention,
    matrix: &Matrix,
    shaded: bool,
) -> Result<()> {
    let TextAttention { queries, keys, .. } = attention;
    let columns = terminal_size::terminal_size().map_or(100, |(width, _)| usize::from(width.0));
    writeln!(out, "{}", matrix.title)?;
    if NAME + CELL * keys.len() > columns {
        for (token, row) in queries.iter().zip(&matrix.rows) {
            write!(out, "{} ", fit(token, NAME - 1))?;
            for key in strongest(row) {
                write!(out, "  {} {:.2}", fit(&keys[key], NAME - 1).trim_end(), row[key])?;
            }
            writeln!(out)?;
        }
        return Ok(writeln!(out)?);
    }
    write!(out, "{:NAME$}", "")?;
    for token in keys {
        write!(out, " {:>1$}", fit(token, CELL - 2).trim_end(), CELL - 1)?;
    }
    writeln!(out)?;
    for (token, row) in queries.iter().zip(&matrix.rows) {
        write!(out, "{} ", fit(token, NAME - 1))?;
        for &weight in row {
            let cell = format!("{weight:>CELL$.2}");
            match shaded {
                true => write!(out, "{}{cell}\x1b[0m", shade(weight))?,
                false => write!(out, "{cell}")?,
            }
        }
        writeln!(out)?;
    }
    Ok(writeln!(out)?)
}

/// The terminal's background from white to blue, and a foreground that can be read on it.
fn shade(weight: f32) -> String {
    let [r, g, b] = picture::color(weight);
    let ink = if weight > 0.5 { 97 } else { 30 };
    format!("\x1b[{ink};48;2;{r};{g};{b}m")
}

fn csv(
    out: &mut impl Write,
    attention: &TextAttention,
    layers: &[Vec<Vec<Vec<f32>>>],
) -> Result<()> {
    let quoted = |token: &String| format!("\"{}\"", token.replace('"', "\"\""));
    let queries: Vec<String> = attention.queries.iter().map(quoted).collect();
    let keys: Vec<String> = attention.keys.iter().map(quoted).collect();
    writeln!(out, "layer,head,query,query_token,key,key_token,weight")?;
    for (layer, heads) in layers.iter().enumerate() {
        for (head, rows) in heads.iter().enumerate() {
            for (query, row) in rows.iter().enumerate() {
                for (key, weight) in row.iter().enumerate() {
                    let (of, to) = (&queries[query], &keys[key]);
                    writeln!(out, "{layer},{head},{query},{of},{key},{to},{weight}")?;
                }
            }
        }
    }
    Ok(())
}

/// To a temporary name first, so that nothing half-written ever has the file's.
fn write(
    path: &Path,
    content: impl FnOnce(&mut io::BufWriter<&mut tempfile::NamedTempFile>) -> Result<()>,
) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the umask
    let written = || {
        let mut file = builder.tempfile_in(folder)?;
        let mut out = io::BufWriter::new(&mut file);
        content(&mut out)?;
        out.flush()?;
        drop(out);
        file.persist(path)?;
        Ok(())
    };
    written()
        .map_err(|error: anyhow::Error| anyhow!("{} cannot be written: {error}", path.display()))
}
