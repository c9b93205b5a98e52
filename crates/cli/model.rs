//! The model that makes vectors, as the commands name it that embed texts.

use anyhow::{Result, anyhow};
use clap::Args;
use encoder::{Embedder, Pooling, PoolingMode, Precision};
use serde::{Deserialize, Serialize};

use crate::{compute::Compute, source};

/// What the program carries.
const EMBEDDED: &str = "all-MiniLM-L6-v2";

#[derive(Args)]
pub struct Model {
    /// Folder or file of a sentence-transformers model, or org/name or org/name@revision on the
    /// Hugging Face hub; all-MiniLM-L6-v2, which the program carries, where none is given
    #[arg(long)]
    pub model: Option<String>,

    #[command(flatten)]
    compute: Compute,

    /// How to pool, where the folder does not say or shall be overruled: cls, max, mean,
    /// mean_sqrt_len_tokens, weightedmean or lasttoken; several are joined
    #[arg(long, value_name = "MODE", value_delimiter = ',', requires = "model")]
    pub pooling: Vec<PoolingMode>,

    /// Make vectors of length 1, whatever the model's files say
    #[arg(long)]
    pub normalize: bool,
}

/// What a file tells of the model that made its vectors.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct MadeBy {
    /// None: what the program carries.
    model: Option<String>,
    pooling: Vec<String>,
    normalize: bool,
}

impl Model {
    pub fn made_by(&self) -> MadeBy {
        let pooling = self.pooling.iter().map(ToString::to_string).collect();
        // A path that is found from elsewhere too.
        let whole = |model: &String| match std::fs::canonicalize(model) {
            Ok(path) => path.display().to_string(),
            Err(_) => model.clone(),
        };
        let model = self.model.as_ref().map(whole);
        MadeBy { model, pooling, normalize: self.normalize }
    }

    /// Where none was given, takes that which made a file; tells if another was given.
    pub fn take(&mut self, made_by: MadeBy) -> Result<()> {
        match self.model {
            None => {
                let MadeBy { model, pooling, normalize } = made_by;
                self.model = model;
                self.pooling = pooling
                    .iter()
                    .map(|mode| mode.parse())
                    .collect::<Result<_, _>>()
                    .map_err(|error: String| anyhow!(error))?;
                self.normalize |= normalize;
            }
            Some(_) if self.made_by() == made_by => {}
            Some(_) => eprintln!(
                "bert: the corpus was made by {}; the queries are by {}",
                made_by.model.as_deref().unwrap_or(EMBEDDED),
                self.name()
            ),
        }
        Ok(())
    }

    /// Its name, also where none was given.
    pub fn name(&self) -> &str {
        self.model.as_deref().unwrap_or(EMBEDDED)
    }

    pub fn embedder(&self) -> Result<(Embedder, Precision)> {
        let files = source::files_or_embedded(self.model.as_deref())?;
        let (precision, device) = self.compute.start()?;
        let embedder = match &self.pooling[..] {
            [] => Embedder::from_files(&files, precision, &device)?,
            modes => Embedder::from_transformer(&files, Pooling::new(modes)?, precision, &device)?,
        };
        Ok((if self.normalize { embedder.normalized() } else { embedder }, precision))
    }
}
