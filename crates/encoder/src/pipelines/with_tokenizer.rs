//! Loads a model and its tokenizer at the same time.

use crate::{
    BertConfig, ModelFiles, Result, TextTokenizer,
    load::{CONFIG, config_json},
    text::sentence_config::Loader,
};

/// What `load` makes of the weights, and the tokenizer with the settings that `loader` reads. Another
/// thread reads the tokenizer meanwhile; from a hub, one after the other.
pub(crate) fn with_tokenizer<M>(
    files: &ModelFiles,
    loader: Loader,
    load: impl FnOnce() -> Result<M>,
) -> Result<(M, TextTokenizer)> {
    let config = BertConfig::from_json(&config_json(files)?, &files.path(CONFIG))?;
    let tokenizer = || TextTokenizer::for_loader(files, &config, loader);
    if files.are_on_hub() {
        return Ok((load()?, tokenizer()?));
    }
    let mut read = None;
    let model = rayon::in_place_scope(|scope| {
        scope.spawn(|_| read = Some(tokenizer()));
        load()
    });
    Ok((model?, read.unwrap_or_else(tokenizer)?))
}
