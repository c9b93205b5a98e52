//! Loads a model and its tokenizer in parallel.

use crate::{ModelConfig, Result, TextTokenizer, load::ModelFolder, text::sentence_config::Loader};

/// Calls `load`, and reads the tokenizer with the settings of `loader` on another thread. For a
/// model on the hub, the tokenizer is read after `load` has returned.
///
/// # Errors
/// The errors of `load`, [`ModelConfig::from_json`] and [`TextTokenizer::from_files`].
pub(crate) fn with_tokenizer<M>(
    files: &ModelFolder,
    loader: Loader,
    load: impl FnOnce() -> Result<M>,
) -> Result<(M, TextTokenizer)> {
    let config = ModelConfig::read(&*files.config()?)?;
    let tokenizer = || TextTokenizer::for_loader(files, &config, loader);
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
