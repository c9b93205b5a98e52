//! A table of token vectors. The vector of a text is the mean over its tokens, without special
//! tokens; there is no transformer.
//!
//! The files are those of sentence-transformers' `StaticEmbedding` (tensor `embedding.weight`) or
//! of model2vec (`embeddings`, with optional `mapping` and `weights`): the vector of the token `i`
//! is `embedding.weight[i]`, or `embeddings[mapping[i]] · weights[i]`.
//!
//! Source: `StaticEmbedding` of sentence-transformers 6.2, `StaticModel` of model2vec 0.10.

use std::{collections::BTreeSet, fmt, sync::Arc};

use candle_core::{Device, Tensor};
use rayon::prelude::*;
use safetensors::Dtype;
use serde::Deserialize;

use crate::{
    Error, InputError, LoadReport, Result, TextTokenizer, Tokens,
    load::{CONFIG, ModelFolder, Read, TensorInfo, WeightFiles, check_no_adapter},
    pipelines::with_tokenizer::load_both,
    text::tokenizer::StaticRules,
};

/// The tensors of sentence-transformers and of model2vec.
const TABLE: &str = "embedding.weight";
const EMBEDDINGS: &str = "embeddings";
const MAPPING: &str = "mapping";
const WEIGHTS: &str = "weights";

/// The keys of the `config.json` of model2vec.
#[derive(Deserialize)]
pub(crate) struct Model2VecConfig {
    #[serde(default)]
    pub(crate) normalize: bool,
    /// Maximum number of tokens of a text.
    #[serde(default = "default_max_length")]
    pub(crate) max_length: Option<usize>,
}

/// The maximum length of model2vec if the config lacks the key.
fn default_max_length() -> Option<usize> {
    Some(512)
}

impl Default for Model2VecConfig {
    fn default() -> Self {
        Self { normalize: false, max_length: default_max_length() }
    }
}

impl Model2VecConfig {
    /// Reads `config.json`; `None` if there is no such file or it is not model2vec's.
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if the file cannot be read or parsed.
    pub(crate) fn from_files(files: &ModelFolder) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Keys {
            model_type: Option<String>,
        }
        let Some(json) = files.json_file(CONFIG)? else { return Ok(None) };
        let Keys { model_type } = json.to()?;
        if model_type.as_deref() == Some("model2vec") { Ok(Some(json.to()?)) } else { Ok(None) }
    }
}

/// A table of token vectors. A clone shares the table.
#[derive(Clone)]
pub(crate) struct StaticEmbedding {
    table: Arc<Table>,
    /// The token that is not pooled.
    ignored_id: Option<u32>,
    device: Device,
}

struct Table {
    /// `(rows, E)`
    values: Vec<f32>,
    dimension: usize,
    /// The row of each token, if it is not the token's id.
    mapping: Option<Vec<u32>>,
    /// The factor of each token's row.
    weights: Option<Vec<f32>>,
    /// Number of tokens.
    tokens: usize,
}

/// Prints the sizes, not the values.
impl fmt::Debug for StaticEmbedding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Table { dimension, tokens, .. } = &*self.table;
        f.debug_struct("StaticEmbedding")
            .field("tokens", tokens)
            .field("dimension", dimension)
            .finish_non_exhaustive()
    }
}

impl StaticEmbedding {
    /// Loads the table and the tokenizer of a folder. The vectors are computed on the CPU in f32,
    /// and then moved to `device`.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::for_static`] and [`Table::new`]; [`crate::FileError`] for
    /// missing or damaged weights.
    pub(crate) fn from_files(
        files: &ModelFolder,
        rules: StaticRules,
        device: &Device,
    ) -> Result<(Self, TextTokenizer, LoadReport)> {
        let tokenizer = || TextTokenizer::for_static(files, rules);
        let load = || {
            check_no_adapter(files)?;
            Table::new(&WeightFiles::open(files)?, Read::All)
        };
        let ((table, report), tokenizer) = load_both(files, load, tokenizer)?;
        let ignored_id = match rules {
            StaticRules::SentenceTransformers => None,
            StaticRules::Model2Vec { .. } => tokenizer.unknown_token_id(),
        };
        Ok((Self { table: table.into(), ignored_id, device: device.clone() }, tokenizer, report))
    }

    /// The dimension of the vectors, and the report on the tensors, whose values are not read.
    ///
    /// # Errors
    /// The errors of [`Table::new`].
    pub(crate) fn inspect(weights: &WeightFiles) -> Result<(usize, LoadReport)> {
        let (table, report) = Table::new(weights, Read::Header)?;
        Ok((table.dimension, report))
    }

    /// E, the length of the vectors.
    pub(crate) fn dimension(&self) -> usize {
        self.table.dimension
    }

    /// The number of tokens that have a vector.
    pub(crate) fn tokens(&self) -> usize {
        self.table.tokens
    }

    /// The device of the vectors.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The tokens that are pooled.
    pub(crate) fn pooled<'a>(&self, tokens: &'a Tokens) -> impl Iterator<Item = u32> + use<'a> {
        let ignored_id = self.ignored_id;
        tokens.input_ids.iter().copied().filter(move |&id| Some(id) != ignored_id)
    }

    /// The mean over the tokens of each sequence; zeros for a sequence without tokens.
    ///
    /// # Shapes
    /// returns `(B, E)`, f32
    /// # Numerics
    /// Each sequence is summed in the order of its tokens, in f32, so that its vector does not
    /// depend on the other sequences or on the number of threads.
    /// # Errors
    /// [`InputError::Id`] for a token outside the table.
    pub(crate) fn forward(&self, sequences: &[(&Tokens, usize)]) -> Result<Tensor> {
        let (size, e) = (self.tokens(), self.dimension());
        let mut ids = sequences.iter().flat_map(|(tokens, _)| &tokens.input_ids);
        if let Some(&id) = ids.find(|&&id| id as usize >= size) {
            let (name, field, got) = ("input_ids", "number of token vectors", i64::from(id));
            return Err(InputError::Id { name, got, size, field }.into());
        }
        let mut means = vec![0.0; sequences.len() * e];
        let rows = means.par_chunks_mut(e).zip(sequences);
        rows.for_each(|(mean, (tokens, _))| self.table.mean(self.pooled(tokens), mean));
        Ok(Tensor::from_vec(means, (sequences.len(), e), &Device::Cpu)?.to_device(&self.device)?)
    }
}

impl Table {
    /// Reads the tensors. With [`Read::Header`], the table has no values.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for other tensors, dtypes or shapes than those of
    /// sentence-transformers and model2vec, for a mapping to a row that does not exist, and for
    /// values that are not finite; [`crate::FileError::Io`] if the file cannot be read.
    fn new(weights: &WeightFiles, read: Read) -> Result<(Self, LoadReport)> {
        let names = weights.names();
        let unsupported = |name: &str, got, expected| {
            Error::unsupported(weights.path(), "tensor", expected, format!("{name} {got}"))
        };
        let name = if names == [TABLE] { TABLE } else { EMBEDDINGS };
        let of_model2vec = |name: &&str| [EMBEDDINGS, MAPPING, WEIGHTS].contains(name);
        if name == EMBEDDINGS && !(names.contains(&name) && names.iter().all(of_model2vec)) {
            let expected = "embedding.weight of sentence-transformers; or embeddings of model2vec, \
                            and optionally mapping and weights";
            let got = names.join(", ");
            return Err(Error::unsupported(weights.path(), "tensors", expected, got));
        }
        let shape = |name| weights.info(name).map(|info| &info.shape[..]);
        let shape_of_name = shape(name).unwrap_or_default();
        let (rows, dimension) = match *shape_of_name {
            [rows, dimension] if dimension > 0 => (rows, dimension),
            _ => {
                let got = format!("of shape {shape_of_name:?}");
                return Err(unsupported(name, got, "two dimensions, of tokens and of values"));
            }
        };
        let tokens = shape(MAPPING).map_or(rows, |shape| shape.iter().product());
        for name in [MAPPING, WEIGHTS] {
            if let Some(got) = shape(name).filter(|got| *got != [tokens]) {
                let got = format!("of shape {got:?}");
                return Err(unsupported(name, got, "one dimension, with a value for each token"));
            }
        }
        let infos = names.iter().filter_map(|name| weights.info(name));
        let dtypes = infos.clone().map(|info| format!("{:?}", info.dtype).to_lowercase());
        let report = LoadReport {
            path: weights.path().to_string(),
            dtypes: dtypes.collect::<BTreeSet<_>>().into_iter().collect(),
            parameters: infos.map(|info| info.shape.iter().product::<usize>()).sum(),
            loaded: names.iter().map(|name| name.to_string()).collect(),
            ..LoadReport::default()
        };
        let mut table = Self { values: vec![], dimension, mapping: None, weights: None, tokens };
        if read == Read::Header {
            return Ok((table, report));
        }
        let wrong_dtype = |name, info: &TensorInfo, expected| {
            let got = format!("of dtype {:?}", info.dtype).to_lowercase();
            unsupported(name, got, expected)
        };
        let floats = |name| -> Result<Option<Vec<f32>>> {
            let Some(info) = weights.info(name) else { return Ok(None) };
            let Some(values) = weights.to_f32(name, info)? else {
                return Err(wrong_dtype(name, info, "f32, f16, bf16, f64 or i8"));
            };
            match values.par_iter().find_first(|value| !value.is_finite()) {
                Some(got) => {
                    Err(unsupported(name, format!("with the value {got}"), "finite values"))
                }
                None => Ok(Some(values)),
            }
        };
        table.values = floats(name)?.unwrap_or_default();
        table.weights = floats(WEIGHTS)?;
        if let Some(info) = weights.info(MAPPING) {
            let data = weights.data(MAPPING, info)?;
            let indices: Vec<i64> = match info.dtype {
                Dtype::I32 => {
                    data.as_chunks().0.iter().map(|&x| i32::from_le_bytes(x).into()).collect()
                }
                Dtype::I64 => data.as_chunks().0.iter().map(|&x| i64::from_le_bytes(x)).collect(),
                _ => return Err(wrong_dtype(MAPPING, info, "i32 or i64")),
            };
            let row = |&index: &i64| match u32::try_from(index) {
                Ok(row) if (row as usize) < rows => Ok(row),
                _ => {
                    let expected = "rows of embeddings";
                    Err(unsupported(MAPPING, format!("with the value {index}"), expected))
                }
            };
            table.mapping = Some(indices.iter().map(row).collect::<Result<_>>()?);
        }
        Ok((table, report))
    }

    /// Writes the mean of the tokens' vectors to `mean`, which is zeros before.
    fn mean(&self, ids: impl Iterator<Item = u32>, mean: &mut [f32]) {
        let mut count = 0;
        for id in ids {
            let id = id as usize;
            let row = self.mapping.as_ref().map_or(id, |mapping| mapping[id] as usize);
            let row = &self.values[row * self.dimension..][..self.dimension];
            let sums = mean.iter_mut().zip(row);
            match &self.weights {
                None => sums.for_each(|(sum, value)| *sum += value),
                Some(weights) => sums.for_each(|(sum, value)| *sum += value * weights[id]),
            }
            count += 1;
        }
        if count > 0 {
            mean.iter_mut().for_each(|sum| *sum /= count as f32);
        }
    }
}
