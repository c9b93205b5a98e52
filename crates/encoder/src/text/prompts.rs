//! Prompts prepended to texts, from `config_sentence_transformers.json`.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{Error, InputError, Result, load::ModelFolder, text::sentence_config::Loader};

pub(crate) const FILE: &str = "config_sentence_transformers.json";

/// The prompt that is prepended to each text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// The model's default prompt, if it has one.
    #[default]
    Default,
    /// No prompt.
    None,
    /// The model's prompt named `query`. Without this prompt, a sentence embedding model uses no
    /// prompt; for a cross-encoder, the result is [`InputError::NoPrompt`].
    Query,
    /// The model's prompt named `document`. If the model lacks it, the same applies as for
    /// [`Self::Query`].
    Document,
    /// The model's prompt with this name.
    Named(&'a str),
    /// The prompt's text.
    Text(&'a str),
}

/// The prompts that every sentence embedding model has. They are empty if the file lacks them.
const PREDEFINED_PROMPTS: [&str; 2] = ["query", "document"];

/// The keys of `config_sentence_transformers.json`: prompts by name, and settings of the vectors
/// and scores.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Prompts {
    model_type: Option<String>,
    #[serde(default)]
    prompts: BTreeMap<String, Option<String>>,
    default_prompt_name: Option<String>,
    /// The dimension that the model's vectors are truncated to.
    pub(crate) truncate_dim: Option<usize>,
    /// The maximum number of values of a sparse vector.
    pub(crate) max_active_dims: Option<usize>,
    /// The similarity that the model was trained for.
    pub(crate) similarity_fn_name: Option<String>,
    /// The PyTorch class of a cross-encoder's activation.
    pub(crate) activation_fn: Option<String>,
    /// Whether the model has the prompts [`PREDEFINED_PROMPTS`] even if the file lacks them.
    #[serde(skip)]
    is_embedder: bool,
}

/// The Python class that loads the folder.
///
/// # Errors
/// [`crate::FileError::Io`] or [`crate::FileError::Json`] if `config_sentence_transformers.json`
/// cannot be read or parsed.
pub(crate) fn loader(files: &ModelFolder) -> Result<Loader> {
    if !files.has("modules.json")? {
        return Ok(Loader::Transformers);
    }
    let file: Prompts = files.json(FILE)?.unwrap_or_default();
    Ok(match file.model_type.as_deref() {
        None | Some("SentenceTransformer") => Loader::SentenceTransformer,
        Some("CrossEncoder") => Loader::CrossEncoder,
        Some("SparseEncoder") => Loader::SparseEncoder,
        Some("MultiVectorEncoder" | "ColBERT") => Loader::MultiVectorEncoder,
        Some(_) => Loader::Transformers,
    })
}

impl Prompts {
    /// The prompts of a sentence embedding model that lacks the file.
    pub(crate) fn without_file() -> Self {
        Self { is_embedder: true, ..Self::default() }
    }

    /// Reads the file of a sentence embedding model.
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if a file cannot be read or parsed;
    /// [`crate::ConfigError::Unsupported`] for another `model_type`, if `truncate_dim` is 0, or if
    /// the model does not have its default prompt.
    pub(crate) fn of_embedder(files: &ModelFolder) -> Result<Self> {
        Self::of_class(files, "SentenceTransformer")
    }

    /// [`Self::of_embedder`] for a sparse embedding model, with a `max_active_dims` above 0.
    pub(crate) fn of_sparse_embedder(files: &ModelFolder) -> Result<Self> {
        Self::of_class(files, "SparseEncoder")
    }

    /// [`Self::of_embedder`] for a multi-vector model, of PyLate too, whose class is `ColBERT`.
    pub(crate) fn of_multi_vector_embedder(files: &ModelFolder) -> Result<Self> {
        let class = "MultiVectorEncoder";
        Self::of_class_or(files, class, &[class, "ColBERT"])
    }

    fn of_class(files: &ModelFolder, class: &'static str) -> Result<Self> {
        Self::of_class_or(files, class, &[class])
    }

    /// `known` are the names of a class, `class` is its current name.
    fn of_class_or(files: &ModelFolder, class: &'static str, known: &[&str]) -> Result<Self> {
        let Some(mut found) = files.json::<Self>(FILE)? else { return Ok(Self::without_file()) };
        if let Some(got) = found.model_type.take().filter(|got| !known.contains(&got.as_str())) {
            return Err(Error::unsupported(files.path(FILE), "model_type", class, got));
        }
        for (key, value) in
            [("truncate_dim", found.truncate_dim), ("max_active_dims", found.max_active_dims)]
        {
            if value == Some(0) {
                return Err(Error::unsupported(files.path(FILE), key, "at least 1", 0));
            }
        }
        found.is_embedder = true;
        found.checked(files)
    }

    /// Puts `prefix` before the prompt `name`, unless the prompt begins with it.
    pub(crate) fn with_prefix(mut self, name: &str, prefix: &str) -> Self {
        let prompt = self.prompts.remove(name).flatten().unwrap_or_default();
        let prompt = if prompt.starts_with(prefix) { prompt } else { format!("{prefix}{prompt}") };
        self.prompts.insert(name.to_string(), Some(prompt));
        self
    }

    /// Reads the file of a cross-encoder.
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if a file cannot be read or parsed;
    /// [`crate::ConfigError::Unsupported`] if the model does not have its default prompt.
    pub(crate) fn of_cross_encoder(files: &ModelFolder) -> Result<Self> {
        files.json::<Self>(FILE)?.unwrap_or_default().checked(files)
    }

    /// Checks that the model has its default prompt.
    fn checked(self, files: &ModelFolder) -> Result<Self> {
        match self.default_prompt_name.as_deref().filter(|name| self.named(name).is_err()) {
            Some(name) => Err(Error::unsupported(
                files.path(FILE),
                "default_prompt_name",
                "a name in the key prompts",
                format!("{name:?} (prompts: {:?})", self.names().collect::<Vec<_>>()),
            )),
            None => Ok(self),
        }
    }

    /// The names of the prompts in the file.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.prompts.keys().map(String::as_str)
    }

    /// The names and texts of the prompts in the file.
    pub(crate) fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.prompts.iter().map(|(name, text)| (name.as_str(), text.as_deref().unwrap_or_default()))
    }

    /// The name of the prompt that is used if the caller chooses none.
    pub(crate) fn default_prompt_name(&self) -> Option<&str> {
        self.default_prompt_name.as_deref()
    }

    /// The text of a prompt.
    ///
    /// # Errors
    /// [`InputError::NoPrompt`] for a name that the model does not have.
    pub(crate) fn text<'a>(&'a self, prompt: Prompt<'a>) -> Result<&'a str> {
        match (prompt, &self.default_prompt_name) {
            (Prompt::Text(text), _) => Ok(text),
            (Prompt::Named(name), _) => self.named(name),
            (Prompt::Query, _) => self.named("query"),
            (Prompt::Document, _) => self.named("document"),
            (Prompt::Default, Some(name)) => self.named(name),
            (Prompt::Default, None) | (Prompt::None, _) => Ok(""),
        }
    }

    fn named(&self, name: &str) -> Result<&str> {
        match self.prompts.get(name) {
            Some(text) => Ok(text.as_deref().unwrap_or_default()),
            None if self.is_embedder && PREDEFINED_PROMPTS.contains(&name) => Ok(""),
            None => Err(InputError::NoPrompt {
                got: name.to_string(),
                known: self.names().map(String::from).collect(),
            }
            .into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelFiles;

    #[test]
    fn errors_of_the_file_name_the_file_and_the_key() {
        for (json, expected) in [
            (
                r#"{"prompts": {"web": "a "}, "default_prompt_name": "zz"}"#,
                "default_prompt_name \"zz\" (prompts: [\"web\"]) is not supported: \
                 expected a name in the key prompts",
            ),
            (r#"{"truncate_dim": 0}"#, "truncate_dim 0 is not supported: expected at least 1"),
        ] {
            let files = ModelFiles::memory("m", [(FILE, json.as_bytes())]);
            let error = Prompts::of_embedder(&ModelFolder::new(&files)).unwrap_err().to_string();
            assert_eq!(error, format!("m/{FILE}: {expected}"));
        }
    }
}
