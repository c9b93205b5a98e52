//! Where a model is: in a folder, a file, or on the hub.

use std::path::Path;

use anyhow::Result;
use encoder::ModelFiles;

use crate::embedded;

/// The files of what `--model` names, or of the model that the program carries.
pub fn files_or_embedded(model: Option<&str>) -> Result<ModelFiles> {
    model.map_or_else(|| Ok(embedded::model()), files)
}

/// The files of what `--model` names: a folder, a file of weights, or a model of the hub.
pub fn files(model: &str) -> Result<ModelFiles> {
    let path = Path::new(model);
    if path.is_dir() {
        return Ok(ModelFiles::dir(path)?);
    }
    if path.is_file() {
        return Ok(ModelFiles::file(path)?);
    }
    on_the_hub(model)
}

/// With a bar on a terminal for each file that is fetched.
#[cfg(feature = "hub")]
fn on_the_hub(model: &str) -> Result<ModelFiles> {
    use encoder::{Fetched, Hub};
    use indicatif::{ProgressBar, ProgressStyle};

    let bar = ProgressBar::no_length().with_style(ProgressStyle::with_template(
        "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    )?);
    let show = move |Fetched { file, bytes, of }: Fetched| {
        if bar.message() != file {
            bar.reset();
            bar.set_message(file.to_string());
        }
        bar.set_length(of.unwrap_or(bytes));
        bar.set_position(bytes);
        if of == Some(bytes) {
            bar.finish_and_clear();
        }
    };
    Ok(Hub::from_env()?.with_progress(show).model(model)?)
}

#[cfg(not(feature = "hub"))]
fn on_the_hub(model: &str) -> Result<ModelFiles> {
    Err(encoder::Error::ModelId { got: model.to_string() }.into())
}
