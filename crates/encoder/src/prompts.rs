//! What is put before a text, as `config_sentence_transformers.json` says.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{Error, ModelFiles, Result};

const FILE: &str = "config_sentence_transformers.json";

/// What is put before each text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// The model's default prompt, if it has one.
    #[default]
    Default,
    /// Nothing.
    None,
    /// The model's prompt named `query`; nothing if it has none.
    Query,
    /// The model's prompt named `document`; nothing if it has none.
    Document,
    /// The model's prompt of that name.
    Named(&'a str),
    /// This.
    Text(&'a str),
}

/// The prompts of a model, by their names.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Prompts {
    #[serde(default)]
    prompts: BTreeMap<String, Option<String>>,
    default_prompt_name: Option<String>,
    /// What the model's vectors are cut to.
    pub(crate) truncate_dim: Option<usize>,
}

impl Prompts {
    /// # Errors
    /// A file that is damaged; a default that is none of its prompts.
    pub(crate) fn from_files(files: &ModelFiles) -> Result<Self> {
        let found: Self = files.json(FILE)?.unwrap_or_default();
        if let Some(name) = &found.default_prompt_name {
            found.named(name)?;
        }
        Ok(found)
    }

    /// Their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.prompts.keys().map(String::as_str)
    }

    /// # Errors
    /// [`Error::NoPrompt`] for a name that the model does not have.
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
            // Every model has these two.
            None if ["query", "document"].contains(&name) => Ok(""),
            None => Err(Error::NoPrompt {
                got: name.to_string(),
                known: self.names().map(String::from).collect(),
            }),
        }
    }
}
