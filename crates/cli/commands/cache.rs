//! `encodle cache`: the files of packed weights.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::PathBuf,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Parser, ValueEnum};
use encoder::{PackedCache, PackedCacheFile};

#[derive(Parser)]
#[command(after_help = "When a model is first loaded, its weights are packed for this CPU and \
--dtype, and written to a file. Later runs map this file into memory instead of reading and \
packing the weights; processes share the memory. The results are bit-identical.

The environment variable ENCODLE_PACKED_CACHE is the path of the folder. Its value `off` disables the \
cache; --no-cache disables it for one run. By default the folder is packed-weights in HF_HOME, in \
$XDG_CACHE_HOME/huggingface or in ~/.cache/huggingface.

Examples:
  encodle cache
  encodle cache --remove ~/.cache/huggingface/packed-weights/*-avx2-*
  encodle cache --clear")]
pub struct Args {
    /// Remove these files of the cache. A path is relative to the working directory or to the
    /// folder of the cache
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "clear")]
    remove: Vec<PathBuf>,

    /// Remove all files of the cache
    #[arg(long)]
    clear: bool,

    /// Output format of the list
    #[arg(long, value_enum, default_value_t, conflicts_with_all = ["clear", "remove"])]
    format: Format,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// A line with the folder and the totals, then one line per file: size, instruction set and
    /// number format of matrix products, file name, weights file
    #[default]
    Text,
    /// One JSON array
    Json,
}

/// Lists or removes files.
pub fn run(args: &Args) -> Result<()> {
    let Some(cache) = PackedCache::from_env() else {
        bail!(
            "there is no cache: ENCODLE_PACKED_CACHE is off, or is not set and the home folder is \
             unknown; set ENCODLE_PACKED_CACHE to a folder"
        );
    };
    let mut out = io::stdout().lock();
    if args.clear {
        let (files, bytes) = cache.clear()?;
        writeln!(out, "{} removed, {}", count(files), megabytes(bytes))?;
        return Ok(());
    }
    let files = cache.files()?;
    if !args.remove.is_empty() {
        return remove(&mut out, &cache, &files, &args.remove);
    }
    match args.format {
        Format::Text => list(&mut out, &cache, &files)?,
        Format::Json => {
            serde_json::to_writer_pretty(&mut out, &files).map_err(io::Error::from)?;
            writeln!(out)?;
        }
    }
    Ok(())
}

/// Removes files, each once. A path is relative to the working directory or to the cache's folder.
fn remove(
    out: &mut impl Write,
    cache: &PackedCache,
    files: &[PackedCacheFile],
    paths: &[PathBuf],
) -> Result<()> {
    let dir = cache.dir();
    let selected = paths.iter().map(|path| {
        let real = path.canonicalize().ok();
        let is_path = |file: &&PackedCacheFile| {
            file.path == dir.join(path) || real.is_some() && file.path.canonicalize().ok() == real
        };
        let file = files.iter().find(is_path).with_context(|| {
            format!(
                "{} is not a file of the cache: expected a file in {}",
                path.display(),
                dir.display()
            )
        })?;
        Ok((&file.path, file.bytes))
    });
    let selected: BTreeMap<&PathBuf, u64> = selected.collect::<Result<_>>()?;
    for (path, bytes) in selected {
        match fs::remove_file(path) {
            // Another process has removed the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            removed => {
                removed
                    .map_err(|error| anyhow!("{} cannot be removed: {error}", path.display()))?;
            }
        }
        writeln!(out, "removed {}, {}", path.display(), megabytes(bytes))?;
    }
    Ok(())
}

fn list(out: &mut impl Write, cache: &PackedCache, files: &[PackedCacheFile]) -> io::Result<()> {
    let total = files.iter().map(|file| file.bytes).sum();
    writeln!(out, "{}: {}, {}", cache.dir().display(), count(files.len()), megabytes(total))?;
    for PackedCacheFile { path, bytes, checkpoint, layout, .. } in files {
        let name = path.file_name().unwrap_or_default().display();
        let layout = layout.as_deref().unwrap_or("damaged");
        let checkpoint = checkpoint.as_deref().unwrap_or("-");
        writeln!(out, "{:>12}  {layout:<24}  {name}  {checkpoint}", megabytes(*bytes))?;
    }
    Ok(())
}

fn count(files: usize) -> String {
    format!("{files} {}", if files == 1 { "file" } else { "files" })
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
