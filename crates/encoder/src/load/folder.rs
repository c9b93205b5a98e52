//! The files of a model while it is loaded: each file is opened, read and parsed at most once.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use serde::de::DeserializeOwned;

use super::{
    files::{ModelFiles, Opened},
    json::Json,
};
use crate::{Error, Result};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The config of an adapter (LoRA and others), as PEFT saves it beside the weights.
pub(super) const ADAPTER: &str = "adapter_config.json";

/// A folder of a [`ModelFolder::new`], or a subfolder. Both share what was read.
#[derive(Clone)]
pub(crate) struct ModelFolder {
    files: ModelFiles,
    /// The state of each file that was opened or looked for, by its path in the source.
    known: Arc<Mutex<BTreeMap<String, Known>>>,
}

enum Known {
    Absent,
    /// The file was opened to see whether it exists. `None` after it was taken to be read.
    Present(Option<Opened>),
    Json(Arc<Json>),
}

impl ModelFolder {
    pub(crate) fn new(files: &ModelFiles) -> Self {
        Self { files: files.clone(), known: Arc::default() }
    }

    /// The files of a subfolder; an empty name gives this folder.
    pub(crate) fn folder(&self, name: &str) -> Self {
        Self { files: self.files.folder(name), known: self.known.clone() }
    }

    /// The same files with another weights file.
    pub(crate) fn with_weights(&self, file: &str) -> Self {
        Self { files: self.files.with_weights(file), known: self.known.clone() }
    }

    /// The name of a file in error messages.
    pub(crate) fn path(&self, file: &str) -> String {
        self.files.path(file)
    }

    /// The name of the weights file, if the caller chose it.
    pub(crate) fn weights(&self) -> Option<&str> {
        self.files.weights()
    }

    /// Whether reading a file may download it.
    pub(crate) fn are_remote(&self) -> bool {
        self.files.are_remote()
    }

    /// The error for a required file that does not exist.
    pub(crate) fn no_file(&self, file: &str, expected: &'static str) -> Error {
        self.files.no_file(file, expected)
    }

    /// Calls `f` with what is known of a file, after opening it if nothing is known.
    fn known<T>(&self, file: &str, f: impl FnOnce(&mut Known) -> Result<T>) -> Result<T> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.files.relative(file);
        if !known.contains_key(&path) {
            let opened = self.files.open(file)?;
            let opened = opened.map_or(Known::Absent, |opened| Known::Present(Some(opened)));
            known.insert(path.clone(), opened);
        }
        f(known.get_mut(&path).expect("inserted above"))
    }

    /// Whether a file exists.
    pub(crate) fn has(&self, file: &str) -> Result<bool> {
        self.known(file, |known| Ok(!matches!(known, Known::Absent)))
    }

    /// Opens a file for reading parts of it; `None` if it does not exist.
    ///
    /// # Errors
    /// The errors of [`ModelFiles::open`].
    pub(crate) fn open(&self, file: &str) -> Result<Option<Opened>> {
        self.known(file, |known| self.take(known, file))
    }

    fn take(&self, known: &mut Known, file: &str) -> Result<Option<Opened>> {
        match known {
            Known::Absent => Ok(None),
            Known::Present(opened @ Some(_)) => Ok(opened.take()),
            Known::Present(None) | Known::Json(_) => self.files.open(file),
        }
    }

    /// The bytes of a file; `None` if it does not exist.
    pub(crate) fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>> {
        self.open(file)?.map(|opened| self.files.bytes(file, opened)).transpose()
    }

    /// The bytes of a required file. `expected` describes its content in the error message.
    pub(crate) fn need(&self, file: &str, expected: &'static str) -> Result<Cow<'static, [u8]>> {
        self.read(file)?.ok_or_else(|| self.no_file(file, expected))
    }

    /// A JSON file; `None` if it does not exist.
    pub(crate) fn json_file(&self, file: &str) -> Result<Option<Arc<Json>>> {
        self.known(file, |known| {
            if let Known::Json(json) = known {
                return Ok(Some(json.clone()));
            }
            let Some(opened) = self.take(known, file)? else { return Ok(None) };
            let json = Arc::new(Json::new(self.files.bytes(file, opened)?, self.path(file)));
            *known = Known::Json(json.clone());
            Ok(Some(json))
        })
    }

    /// A JSON file as `T`; `None` if it does not exist.
    pub(crate) fn json<T: DeserializeOwned>(&self, file: &str) -> Result<Option<T>> {
        self.json_file(file)?.map(|json| json.to()).transpose()
    }

    /// A required JSON file. `expected` describes its content in the error message.
    pub(crate) fn need_json(&self, file: &str, expected: &'static str) -> Result<Arc<Json>> {
        self.json_file(file)?.ok_or_else(|| self.no_file(file, expected))
    }

    /// The `config.json` of the model.
    pub(crate) fn config(&self) -> Result<Arc<Json>> {
        self.need_json(CONFIG, "the model's configuration, in Hugging Face's format")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        AttentionReader, Embedder, Inspection, LoadOptions, MaskFiller, PoolingMode,
        QuestionAnswerer, TextClassifier, TokenClassifier, load::files::OPENED,
    };

    /// The files of a folder in memory. `name` is the folder's name in [`OPENED`].
    fn in_memory(name: &str, folder: &str) -> ModelFiles {
        let root = format!("{}/../../{folder}", env!("CARGO_MANIFEST_DIR"));
        let mut files = vec![];
        for folder in ["", "1_Pooling/"] {
            for entry in fs::read_dir(format!("{root}/{folder}")).into_iter().flatten() {
                let entry = entry.unwrap();
                if entry.path().is_file() {
                    let file = entry.file_name().into_string().unwrap();
                    files.push((format!("{folder}{file}"), fs::read(entry.path()).unwrap()));
                }
            }
        }
        ModelFiles::memory(name, files)
    }

    #[test]
    fn every_file_is_opened_at_most_once() -> Result<()> {
        type Load = fn(&ModelFiles, &LoadOptions) -> Result<()>;
        let cases: [(&str, &str, Load); 8] = [
            ("embedder", "weights/all-MiniLM-L6-v2", |f, o| Embedder::from_files(f, o).map(drop)),
            ("transformer", "weights/all-MiniLM-L6-v2", |files, options| {
                Embedder::from_transformer(files, PoolingMode::Cls.into(), options).map(drop)
            }),
            ("ranker", "tests/golden/heads/score", |f, o| {
                TextClassifier::from_files(f, o).map(drop)
            }),
            ("tagger", "tests/golden/heads/tagger", |files, options| {
                TokenClassifier::from_files(files, options).map(drop)
            }),
            ("answerer", "tests/golden/heads/answer", |files, options| {
                QuestionAnswerer::from_files(files, options).map(drop)
            }),
            ("filler", "tests/golden/heads/masked_lm", |f, o| {
                MaskFiller::from_files(f, o).map(drop)
            }),
            ("reader", "tests/golden/heads/sequence", |files, options| {
                AttentionReader::from_files(files, options).map(drop)
            }),
            ("inspection", "weights/all-MiniLM-L6-v2", |files, _| {
                assert!(Inspection::new(files).runs());
                Ok(())
            }),
        ];
        for (name, folder, load) in cases {
            load(&in_memory(name, folder), &LoadOptions::default())?;
            let mut opened = OPENED.lock().unwrap().clone();
            opened.retain(|path| path.starts_with(&format!("{name}/")));
            opened.sort();
            assert!(opened.contains(&format!("{name}/config.json")), "{opened:?}");
            assert!(opened.is_sorted_by(|a, b| a < b), "{opened:?}");
        }
        Ok(())
    }
}
