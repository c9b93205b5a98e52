//! Text to vectors: tokenize, batch, encode, pool, normalise.

use std::{cmp::Reverse, path::Path};

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use crate::{
    BertModel, Error, LoadReport, ModelFiles, PackedBatch, Pooling, Precision, Result,
    TextTokenizer, Tokens,
};

/// Tokens computed at a time, unless told otherwise: it bounds memory, not the number of texts.
const TOKEN_BUDGET: usize = 2048;

/// A sentence-transformers folder, ready to embed texts.
///
/// # Examples
/// ```
/// use candle_core::Device;
/// use encoder::{Embedder, Precision};
///
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let dir = "weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(dir, Precision::F32, &Device::Cpu)?;
/// let e = embedder.embed(&["A man is eating food.", "A man eats.", "It snows."])?;
/// assert_eq!(e.dims(), [3, 384]);
///
/// let cosines = e.matmul(&e.t()?)?.to_vec2::<f32>()?; // the vectors have length 1
/// assert!((cosines[0][0] - 1.0).abs() < 1e-6);
/// assert!(cosines[0][1] > 0.8 && cosines[0][2] < 0.2);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone)]
pub struct Embedder {
    tokenizer: TextTokenizer,
    model: BertModel,
    report: LoadReport,
    pooling: Pooling,
    normalize: bool,
    token_budget: usize,
}

impl Embedder {
    /// Loads a sentence-transformers folder: `modules.json`, `1_Pooling/config.json`,
    /// `config.json`, `model.safetensors`, `tokenizer.json` and, where there is one,
    /// `sentence_bert_config.json`. The vectors are f32 whatever the precision.
    ///
    /// # Errors
    /// Those of [`BertModel::from_dir`]; a `modules.json` that is missing or asks for more than
    /// a transformer, a [`Pooling`] and a normalisation.
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        let Modules { transformer, pooling, normalize } = modules(files)?;
        let (model, report) = BertModel::from_files(&transformer, precision, device)?;
        let tokenizer = TextTokenizer::from_files(&transformer, model.config())?;
        Ok(Self { tokenizer, model, report, pooling, normalize, token_budget: TOKEN_BUDGET })
    }

    /// Computes at most so many tokens at a time, or one text where that alone has more.
    pub fn with_token_budget(mut self, tokens: usize) -> Self {
        self.token_budget = tokens;
        self
    }

    /// E, the length of each vector.
    pub fn dimension(&self) -> usize {
        self.model.config().hidden_size
    }

    /// What turns its texts into tokens.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// What computes its hidden states.
    pub fn model(&self) -> &BertModel {
        &self.model
    }

    /// What was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// One vector a text, in the order of the texts.
    ///
    /// An empty text is a text (`[CLS] [SEP]`); a long one is cut at the model's length.
    ///
    /// # Shapes
    /// returns `(B, E)`, f32; `(0, E)` for no texts
    /// # Units
    /// of length 1 where `modules.json` says to normalise
    /// # Numerics
    /// Largest difference to sentence-transformers 6.2 in f32 over the golden sentences: 3e-7.
    /// On a CPU with AVX2 or AVX-512 a text's vector is the same to the bit in whatever batch, order
    /// and number of threads it is computed; elsewhere candle's products may sum in another order.
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no way to write a text; [`Error::NoTokens`] if
    /// a text has no tokens, not even special ones.
    pub fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Tensor> {
        let tokens = self.tokenizer.encode(texts)?;
        let lengths: Vec<usize> = tokens.iter().map(|tokens| tokens.input_ids.len()).collect();
        if let Some(empty) = lengths.iter().position(|&length| length == 0) {
            return Err(Error::NoTokens { text: texts[empty].as_ref().chars().take(40).collect() });
        }
        let order = by_length(&lengths);

        let mut embeddings = vec![];
        for batch in within_budget(&order, &lengths, self.token_budget) {
            embeddings.push(self.embed_batch(batch.iter().map(|&i| &tokens[i]))?);
        }
        if embeddings.is_empty() {
            let shape = (0, self.dimension());
            return Ok(Tensor::zeros(shape, DType::F32, self.model.device())?);
        }
        let embeddings = Tensor::cat(&embeddings, 0)?; // (B, E), longest text first
        let mut place = vec![0u32; order.len()];
        for (place_of, i) in (0u32..).zip(order) {
            place[i] = place_of;
        }
        let place = Tensor::from_slice(&place, place.len(), self.model.device())?;
        Ok(embeddings.index_select(&place, 0)?)
    }

    fn embed_batch<'a>(&self, tokens: impl Iterator<Item = &'a Tokens>) -> Result<Tensor> {
        let mut batch = PackedBatch::default();
        for tokens in tokens {
            batch.push(&tokens.input_ids, &tokens.token_type_ids)?;
        }
        let hidden = self.model.forward_packed(&batch)?; // (N, E)
        let pooled = self.pooling.forward(&hidden, batch.offsets())?; // (B, E)
        if !self.normalize {
            return Ok(pooled);
        }
        let length = pooled.sqr()?.sum_keepdim(1)?.sqrt()?.maximum(1e-12)?;
        Ok(pooled.broadcast_div(&length)?)
    }
}

/// Indices of the texts, the longest first.
fn by_length(lengths: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&i| Reverse(lengths[i]));
    order
}

/// `order` in runs of at most `budget` tokens, or of one text.
fn within_budget<'a>(order: &'a [usize], lengths: &[usize], budget: usize) -> Vec<&'a [usize]> {
    let (mut batches, mut start, mut tokens) = (vec![], 0, 0);
    for (end, &i) in order.iter().enumerate() {
        if end > start && tokens + lengths[i] > budget {
            batches.push(&order[start..end]);
            (start, tokens) = (end, 0);
        }
        tokens += lengths[i];
    }
    if start < order.len() {
        batches.push(&order[start..]);
    }
    batches
}

/// One entry of `modules.json`.
#[derive(Deserialize)]
struct ModuleEntry {
    #[serde(rename = "type")]
    class: String,
    #[serde(default)]
    path: String,
}

/// What `modules.json` says.
struct Modules {
    transformer: ModelFiles,
    pooling: Pooling,
    normalize: bool,
}

/// `config_sentence_transformers.json`
#[derive(Default, Deserialize)]
struct SentenceTransformersConfig {
    default_prompt_name: Option<String>,
}

fn modules(files: &ModelFiles) -> Result<Modules> {
    const PROMPTS: &str = "config_sentence_transformers.json";
    let config: SentenceTransformersConfig = files.json(PROMPTS)?.unwrap_or_default();
    if let Some(got) = config.default_prompt_name {
        let (path, key) = (files.path(PROMPTS), "default_prompt_name");
        return Err(Error::Unsupported { path, key, expected: "none", got });
    }

    const FILE: &str = "modules.json";
    let path = files.path(FILE);
    let modules: Option<Vec<ModuleEntry>> = files.json(FILE)?;
    let expected = "the modules of a sentence-transformers model, which say how to pool";
    let modules = modules.ok_or(Error::NoFile { path, expected })?;
    let class = |module: &ModuleEntry| {
        let class = module.class.rsplit('.').next().unwrap_or_default();
        class.to_string()
    };
    let classes: Vec<String> = modules.iter().map(class).collect();
    let classes: Vec<&str> = classes.iter().map(String::as_str).collect();
    let normalize = match classes[..] {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        _ => {
            return Err(Error::Unsupported {
                path: files.path(FILE),
                key: "modules",
                expected: "Transformer, Pooling and perhaps Normalize",
                got: classes.join(", "),
            });
        }
    };
    let pooling = files.folder(&modules[1].path);
    let json = pooling.need("config.json", "the way to pool")?;
    Ok(Modules {
        transformer: files.folder(&modules[0].path),
        pooling: Pooling::from_json(&json, &pooling.path("config.json"))?,
        normalize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_to_the_budget_and_leave_nothing_out() {
        let lengths = [3, 9, 1, 4, 20, 4];
        let order = by_length(&lengths);
        assert_eq!(order, [4, 1, 3, 5, 0, 2]); // equal lengths in their own order
        let batches = within_budget(&order, &lengths, 10);
        assert_eq!(batches, [&[4][..], &[1], &[3, 5], &[0, 2]]);
        assert!(within_budget(&[], &[], 10).is_empty());
    }
}
