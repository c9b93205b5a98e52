//! The model of commands without `--model`, all-MiniLM-L6-v2. A program that was built in a clone of
//! the repository contains it; one that was built from the registry downloads it on first use.

use anyhow::{Context, Result};
use encoder::ModelFiles;

use crate::model_files;

/// The name of the default model.
pub const NAME: &str = "all-MiniLM-L6-v2";

/// Its name on the Hugging Face hub.
const HUB_NAME: &str = "sentence-transformers/all-MiniLM-L6-v2";

/// The files of `model`, or of the default model if `model` is `None`.
pub fn open_or_default(model: Option<&str>) -> Result<ModelFiles> {
    model.map_or_else(files, model_files::open)
}

/// The files of the default model.
fn files() -> Result<ModelFiles> {
    builtin_or(model_files::download)
}

/// The files in this program, or else those that `download` returns for [`HUB_NAME`].
fn builtin_or(download: impl Fn(&str) -> Result<ModelFiles>) -> Result<ModelFiles> {
    match builtin() {
        Some(files) => Ok(files),
        None => download(HUB_NAME).context(format!(
            "this program does not contain the default model, {NAME}: set --model to a folder or a \
             weights file, or build the program in a clone of its repository"
        )),
    }
}

/// The files that the program contains; see weights/README.md.
#[cfg(builtin_model)]
fn builtin() -> Option<ModelFiles> {
    macro_rules! files {
        ($($file:literal),* $(,)?) => {
            [$(($file, &include_bytes!(concat!("../../weights/all-MiniLM-L6-v2/", $file))[..])),*]
        };
    }
    let files = files![
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    Some(ModelFiles::memory(NAME, files))
}

#[cfg(not(builtin_model))]
fn builtin() -> Option<ModelFiles> {
    None
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Passes in both builds: with the weights nothing is downloaded, without them the hub is asked
    /// for the full name, and the error names the ways out.
    #[test]
    fn the_default_model_is_downloaded_if_it_is_not_built_in() {
        let files = builtin_or(|name| bail!("no network for {name}"));
        assert_eq!(files.is_ok(), builtin().is_some());
        if let Err(error) = files {
            let error = format!("{error:#}");
            let end = "no network for sentence-transformers/all-MiniLM-L6-v2";
            assert!(error.ends_with(end) && error.contains("--model"), "{error}");
        }
    }
}
