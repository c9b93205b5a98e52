//! Loads a model and its tokenizer in parallel.

use crate::{ModelConfig, Result, TextTokenizer, load::ModelFolder, text::sentence_config::Loader};

/// Calls `load`, and reads the tokenizer with the settings of `loader` on another thread.
///
/// # Errors
/// The errors of `load`, [`ModelConfig::from_json`] and [`TextTokenizer::from_files`].
pub(crate) fn with_tokenizer<M>(
    files: &ModelFolder,
    loader: Loader,
    load: impl FnOnce() -> Result<M>,
) -> Result<(M, TextTokenizer)> {
    let config = ModelConfig::read(&*files.config()?)?;
    load_both(files, load, || TextTokenizer::for_loader(files, &config, loader))
}

/// Calls `load`, and `tokenizer` on another thread. For a model on the hub, `tokenizer` is called
/// after `load` has returned.
///
/// # Errors
/// The errors of `load` and `tokenizer`.
pub(crate) fn load_both<M>(
    files: &ModelFolder,
    load: impl FnOnce() -> Result<M>,
    tokenizer: impl FnOnce() -> Result<TextTokenizer> + Send,
) -> Result<(M, TextTokenizer)> {
    if files.are_remote() {
        return Ok((load()?, tokenizer()?));
    }
    let mut read = None;
    let model = rayon::in_place_scope(|scope| {
        scope.spawn(|_| read = Some(tokenizer()));
        load()
    });
    Ok((model?, read.expect("the scope waits for its task")?))
}
