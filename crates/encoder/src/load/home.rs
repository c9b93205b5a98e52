//! Hugging Face's folder on this machine, from environment variables.

use std::{env, path::PathBuf};

/// The value of an environment variable that is set and not empty, as a path; `~` is the home
/// folder.
pub(super) fn path_variable(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(name).filter(|value| !value.is_empty())?);
    Some(match (path.strip_prefix("~"), env::home_dir()) {
        (Ok(below), Some(home)) => home.join(below),
        _ => path,
    })
}

/// Hugging Face's folder: `HF_HOME`, `$XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`.
pub(super) fn huggingface_home() -> Option<PathBuf> {
    path_variable("HF_HOME")
        .or_else(|| Some(path_variable("XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(env::home_dir()?.join(".cache/huggingface")))
}
