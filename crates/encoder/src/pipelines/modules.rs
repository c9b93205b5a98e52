//! The chain of a sentence-transformers folder, as its `modules.json` says.

use std::path::{Component, Path};

use candle_core::{Device, Tensor};
use mha::ops::l2_normalize;
use serde::Deserialize;

use crate::{Error, ModelFiles, Pooling, Result, load::Read, pipelines::dense::Dense};

const FILE: &str = "modules.json";

/// What follows the transformer and the pooling.
#[derive(Clone, Debug)]
pub(crate) enum Module {
    Dense(Dense),
    /// To length 1.
    Normalize,
}

impl Module {
    /// `(B, E)` to `(B, E)`, perhaps of another E.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(dense) => dense.forward(x),
            Self::Normalize => Ok(l2_normalize(x)?),
        }
    }
}

/// One entry of `modules.json`.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    class: String,
    #[serde(default)]
    path: String,
}

impl Entry {
    /// Without the module that it is in, if that is of sentence-transformers and not the model's.
    fn class(&self) -> &str {
        match self.class.starts_with("sentence_transformers.") {
            true => self.class.rsplit('.').next().unwrap_or_default(),
            false => &self.class,
        }
    }
}

/// A module's `config.json`, as far as it says what the module is applied to.
#[derive(Default, Deserialize)]
struct Applied {
    module_input_name: Option<String>,
    module_output_name: Option<String>,
}

/// The entries of `modules.json`; `None` if there is no such file.
///
/// # Errors
/// A damaged file; a module outside of the folder.
fn entries(files: &ModelFiles) -> Result<Option<Vec<Entry>>> {
    let Some(entries) = files.json::<Vec<Entry>>(FILE)? else { return Ok(None) };
    let plain = |part| matches!(part, Component::Normal(_));
    match entries.iter().find(|e| !Path::new(&e.path).components().all(plain)) {
        None => Ok(Some(entries)),
        Some(entry) => Err(Error::Unsupported {
            path: files.path(FILE),
            key: "a module's path",
            expected: "a folder below its own",
            got: entry.path.clone(),
        }),
    }
}

fn unsupported(files: &ModelFiles, entries: &[Entry], expected: &'static str) -> Error {
    let classes: Vec<&str> = entries.iter().map(Entry::class).collect();
    Error::Unsupported { path: files.path(FILE), key: "modules", expected, got: classes.join(", ") }
}

/// Whether the modules are a transformer and nothing after it.
fn is_alone(entries: &[Entry]) -> bool {
    matches!(entries, [one] if one.class() == "Transformer")
}

/// The files of the transformer: all of them if there is a `config.json`, or else those of the first
/// module's folder.
///
/// # Errors
/// A damaged `modules.json`.
pub(crate) fn transformer(files: &ModelFiles) -> Result<ModelFiles> {
    if files.has("config.json")? {
        return Ok(files.clone());
    }
    let first = entries(files)?.and_then(|entries| entries.into_iter().next());
    Ok(first.map_or_else(|| files.clone(), |entry| files.folder(&entry.path)))
}

/// Whether `modules.json` names a transformer and nothing after it, as of a cross-encoder.
///
/// # Errors
/// A damaged `modules.json`.
pub(crate) fn is_transformer_alone(files: &ModelFiles) -> Result<bool> {
    Ok(entries(files)?.is_some_and(|entries| is_alone(&entries)))
}

/// Refuses modules after the transformer of a cross-encoder.
///
/// # Errors
/// [`Error::Unsupported`] if there are some.
pub(crate) fn check_cross_encoder(files: &ModelFiles) -> Result<()> {
    match entries(files)? {
        Some(entries) if !is_alone(&entries) => {
            Err(unsupported(files, &entries, "a Transformer alone, for a cross-encoder"))
        }
        _ => Ok(()),
    }
}

/// The files of the transformer, and the entries of what follows.
pub(crate) struct Chain {
    pub(crate) transformer: ModelFiles,
    pub(crate) pooling: Pooling,
    files: ModelFiles,
    rest: Vec<Entry>,
}

impl Chain {
    /// # Errors
    /// A file that is missing or damaged; modules that are not computed here.
    pub(crate) fn from_files(files: &ModelFiles) -> Result<Self> {
        let expected = "the modules of a sentence-transformers model, which say how to pool; \
                        without it, name the pooling yourself";
        let missing = || Error::NoFile { path: files.path(FILE), expected };
        let mut entries = entries(files)?.ok_or_else(missing)?;
        let known = |entry: &Entry| ["Dense", "Normalize"].contains(&entry.class());
        let first: Vec<&str> = entries.iter().take(2).map(Entry::class).collect();
        if first != ["Transformer", "Pooling"] || !entries[2..].iter().all(known) {
            let expected = match first[..] {
                ["Transformer"] => "a Pooling after the Transformer; name the pooling yourself",
                _ => "Transformer, Pooling and then any of Dense and Normalize",
            };
            return Err(unsupported(files, &entries, expected));
        }
        let rest = entries.split_off(2);
        let pooling = files.folder(&entries[1].path);
        let json = pooling.need("config.json", "the way to pool")?;
        Ok(Self {
            transformer: files.folder(&entries[0].path),
            pooling: Pooling::from_json(&json, &pooling.path("config.json"))?,
            files: files.clone(),
            rest,
        })
    }

    /// Its modules after the transformer.
    pub(crate) fn describe(&self) -> Vec<String> {
        let rest = self.rest.iter().map(|entry| entry.class().to_string());
        std::iter::once(self.pooling.to_string()).chain(rest).collect()
    }

    /// What follows the pooling, given the `width` of its vectors; and the width of the last.
    ///
    /// # Errors
    /// as above; a module of another width.
    pub(crate) fn modules(
        &self,
        width: usize,
        read: Read,
        device: &Device,
    ) -> Result<(Vec<Module>, usize)> {
        let (mut modules, mut width) = (vec![], width);
        for entry in &self.rest {
            let files = self.files.folder(&entry.path);
            let applied: Applied = match entry.path.as_str() {
                "" => Applied::default(), // its config.json would be the transformer's
                _ => files.json("config.json")?.unwrap_or_default(),
            };
            for (key, name) in [
                ("module_input_name", applied.module_input_name),
                ("module_output_name", applied.module_output_name),
            ] {
                if let Some(got) = name.filter(|name| name != "sentence_embedding") {
                    let (path, expected) = (files.path("config.json"), "sentence_embedding");
                    return Err(Error::Unsupported { path, key, expected, got });
                }
            }
            modules.push(match entry.class() {
                "Dense" => {
                    let dense = Dense::from_files(&files, width, read, device)?;
                    width = dense.out_features();
                    Module::Dense(dense)
                }
                _ => Module::Normalize,
            });
        }
        Ok((modules, width))
    }
}
