//! The arguments that choose an embedding model.

use std::{fmt, path::Path};

use anyhow::{Result, anyhow};
use clap::Args;
use encoder::{Embedder, LoadOptions, ModelFiles, Pooling, PoolingMode};
use serde::{Deserialize, Serialize};

use crate::{compute::Compute, default_model, messages};

/// The help of `--model`, without the default.
pub const MODEL_HELP: &str = "Model: folder or weights file of a sentence-transformers model, or \
                              org/name@revision on the Hugging Face hub (@revision is optional)";

#[derive(Args, Clone)]
pub struct Model {
    #[arg(long, help = format!("{MODEL_HELP} [default: {}]", default_model::NAME))]
    model: Option<String>,

    #[command(flatten)]
    compute: Compute,

    /// Pooling modes, separated by commas, that replace the pooling of the model's files and the
    /// modules after it (Dense, Normalize): cls, max, mean, mean_sqrt_len_tokens, weightedmean,
    /// lasttoken; the results of several modes are concatenated. Needs --model
    #[arg(long, value_name = "MODE", value_delimiter = ',', requires = "model")]
    pooling: Vec<PoolingMode>,

    /// Scale vectors to length 1, even if the model's files do not say so
    #[arg(long)]
    normalize: bool,
}

/// The arguments that chose the model of a corpus, as the corpus file's metadata stores them.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct ModelSpec {
    /// The model's path or its name on the hub; `None` for the default model.
    model: Option<String>,
    pooling: Vec<String>,
    normalize: bool,
}

/// The model's name and the options that are set: `NAME --pooling mean --normalize`.
impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.model {
            Some(model) => f.write_str(model)?,
            None => write!(f, "the default model {}", default_model::NAME)?,
        }
        if !self.pooling.is_empty() {
            write!(f, " --pooling {}", self.pooling.join(","))?;
        }
        f.write_str(if self.normalize { " --normalize" } else { "" })
    }
}

/// The absolute path of a folder or a file, so that different spellings of one path are equal and
/// the path is valid in every working directory. `None` if it does not exist or is not UTF-8.
///
/// A file that is a link is not resolved, because its target may have no config beside it.
pub fn canonical(model: &str) -> Option<String> {
    let path = Path::new(model);
    let path = if path.is_file() {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        folder.unwrap_or(Path::new(".")).canonicalize().ok()?.join(path.file_name()?)
    } else {
        path.canonicalize().ok()?
    };
    path.into_os_string().into_string().ok()
}

impl Model {
    pub fn spec(&self) -> ModelSpec {
        let pooling = self.pooling.iter().map(ToString::to_string).collect();
        let model = self.model.as_ref();
        let model = model.map(|model| canonical(model).unwrap_or_else(|| model.clone()));
        ModelSpec { model, pooling, normalize: self.normalize }
    }

    /// These arguments without a model, for another corpus.
    pub fn without_model(&self) -> Self {
        Self { model: None, pooling: vec![], normalize: false, compute: self.compute.clone() }
    }

    /// Uses the model of a corpus if `--model` is not given. If `--model` is given, warns if the
    /// model, the pooling or the normalisation differs from that of the corpus.
    ///
    /// # Errors
    /// If the corpus names an unknown pooling mode.
    pub fn resolve_for_corpus(&mut self, corpus: ModelSpec) -> Result<()> {
        match self.model {
            None => {
                let ModelSpec { model, pooling, normalize } = corpus;
                self.model = model;
                let modes = pooling.iter().map(|mode| mode.parse::<PoolingMode>());
                self.pooling = modes.collect::<Result<_, _>>().map_err(|error| {
                    anyhow!("the pooling that the corpus stores is invalid: {error}")
                })?;
                self.normalize |= normalize;
            }
            Some(_) if self.spec() == corpus => {}
            Some(_) => {
                messages::print(&format!(
                    "the corpus was embedded with {corpus}, the queries are embedded with {}",
                    self.spec()
                ));
            }
        }
        Ok(())
    }

    /// Whether `--model` is given, or a corpus names the model.
    pub fn is_given(&self) -> bool {
        self.model.is_some()
    }

    /// The model's path or name: that of `--model`, of the corpus, or of the default model.
    pub fn name(&self) -> &str {
        self.model.as_deref().unwrap_or(default_model::NAME)
    }

    /// Opens the files of the model.
    pub fn files(&self) -> Result<ModelFiles> {
        default_model::open_or_default(self.model.as_deref())
    }

    /// Chooses the threads and the device, and returns how to load a model for them.
    pub fn load_options(&self) -> Result<LoadOptions> {
        self.compute.start()
    }

    /// The options for dense models only, each with whether it is given.
    pub fn options_of_dense_models(&self) -> [(&'static str, bool); 2] {
        [("--pooling", self.chooses_pooling()), ("--normalize", self.normalize)]
    }

    /// Whether `--pooling` is given, which makes any model a dense one.
    pub fn chooses_pooling(&self) -> bool {
        !self.pooling.is_empty()
    }

    /// Loads a dense model.
    pub fn embedder(&self, files: &ModelFiles) -> Result<Embedder> {
        self.embedder_with(files, &self.load_options()?)
    }

    /// [`Self::embedder`] with the options of [`Self::load_options`], which can be called once.
    pub fn embedder_with(&self, files: &ModelFiles, options: &LoadOptions) -> Result<Embedder> {
        let embedder = match &self.pooling[..] {
            [] => Embedder::from_files(files, options)?,
            modes => Embedder::from_transformer(files, Pooling::new(modes)?, options)?,
        };
        Ok(if self.normalize { embedder.normalized() } else { embedder })
    }
}
