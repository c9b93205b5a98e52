//! From tensors to a checkpoint's files, in the names that loading knows.

use std::{collections::HashMap, path::Path};

use candle_core::Tensor;

use super::{CONFIG, WEIGHTS, names::Naming};
use crate::{EncoderDecoderConfig, Error, Result};

/// Writes an encoder-decoder folder; the tensors are below `encoder.` and `decoder.`, in the
/// modules' own names.
pub(crate) fn encoder_decoder(
    dir: &Path,
    config: &EncoderDecoderConfig,
    tensors: &HashMap<String, Tensor>,
) -> Result<()> {
    let [encoder, decoder] = Naming::encoder_decoder(&[], false);
    let mut spelled = HashMap::new();
    for (name, tensor) in tensors {
        let spelling = match name.split_once('.') {
            Some(("encoder", name)) => encoder.spell(name).0,
            Some(("decoder", name)) => decoder.spell(name).0,
            _ => name.clone(),
        };
        spelled.insert(spelling, tensor.contiguous()?);
    }
    let io = |source| Error::Io { path: dir.display().to_string(), source };
    std::fs::create_dir_all(dir).map_err(io)?;
    write(&dir.join(CONFIG), |path| {
        let mut json = serde_json::to_value(config)?;
        for part in ["encoder", "decoder"] {
            json[part]["model_type"] = "bert".into(); // Hugging Face asks for it
        }
        std::fs::write(path, serde_json::to_vec_pretty(&json)?)
    })?;
    write(&dir.join(WEIGHTS), |path| {
        candle_core::safetensors::save(&spelled, path).map_err(std::io::Error::other)
    })
}

/// Writes a file under another name, then gives it its own.
fn write(path: &Path, fill: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let written = temporary(folder).and_then(|file| {
        fill(file.path())?;
        file.persist(path)?;
        Ok(())
    });
    written.map_err(|source| Error::Io { path: path.display().to_string(), source })
}

/// A temporary file, to become one that others can read too.
pub(super) fn temporary(folder: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)] // as any file is made; the process's mask takes away from it
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}
