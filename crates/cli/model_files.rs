//! The files of a model: in a folder or on the Hugging Face hub.

use std::path::Path;

use anyhow::Result;
use encoder::ModelFiles;

/// The files of `model`, which names a folder, a weights file or a model on the hub.
pub fn open(model: &str) -> Result<ModelFiles> {
    let path = Path::new(model);
    if path.is_dir() {
        return Ok(ModelFiles::dir(path)?);
    }
    if path.is_file() {
        return Ok(ModelFiles::file(path)?);
    }
    download(model)
}

/// Downloads a model from the hub, with a progress bar per file on a terminal.
#[cfg(feature = "hub")]
pub fn download(model: &str) -> Result<ModelFiles> {
    use encoder::{DownloadProgress, Hub};
    use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

    let bar = ProgressBar::no_length().with_style(ProgressStyle::with_template(
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    )?);
    let bar = bar.with_finish(ProgressFinish::AndClear);
    let show = move |DownloadProgress { file, bytes, total }: DownloadProgress| {
        if bar.message() != file {
            bar.reset();
            bar.set_message(file.to_string());
        }
        bar.set_length(total);
        bar.set_position(bytes);
        if total == bytes {
            bar.finish_and_clear();
        }
    };
    Ok(Hub::from_env()?.with_progress(show).model(model)?)
}

#[cfg(not(feature = "hub"))]
pub fn download(model: &str) -> Result<ModelFiles> {
    anyhow::bail!(
        "model {model:?} not found: expected a folder or a weights file; this program was built \
         without the feature hub, which downloads models"
    )
}
