//! The modules of a model with a vector per token, from a folder of sentence-transformers, PyLate,
//! Stanford's ColBERT or BGE-M3.

use candle_core::Device;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    Error, LateInteraction, Result,
    load::{self, ModelFolder, Read},
    pipelines::{
        bge_m3,
        dense::Dense,
        modules::{Entry, Module, check_input_output, entries, transformer_files, unsupported},
        token_mask::TokenMaskConfig,
        token_pooling::TokenPooling,
    },
    text::{
        prompts::{self, Prompts, loader},
        sentence_config::{ExpansionStrategy, Loader, QueryExpansion, SentenceConfig, TaskLengths},
    },
};

/// The input and the output of every module after the transformer.
const TOKENS: &str = "token_embeddings";

/// The settings of Stanford's ColBERT.
const METADATA: &str = "artifact.metadata";
/// The class in `config.json` of Stanford's ColBERT.
const STANFORD: &str = "HF_ColBERT";
/// The projection of Stanford's ColBERT, beside the tensors of the encoder.
const STANFORD_PROJECTION: &str = "linear.weight";

/// The number of tokens of a query of ColBERT.
const QUERY_LENGTH: usize = 32;

/// The modules of a multi-vector model.
pub(crate) struct MultiVectorModules {
    pub(crate) transformer: ModelFolder,
    pub(crate) loader: Loader,
    /// The length of the vectors of a projection in the checkpoint of the encoder.
    pub(crate) projection: Option<usize>,
    rows: Vec<RowModule>,
    /// `None`: all tokens have a vector, except those of an expansion that are not attended to.
    pub(crate) mask: Option<TokenMaskConfig>,
    pub(crate) pooling: Option<TokenPooling>,
    pub(crate) lengths: TaskLengths,
    pub(crate) prompts: Prompts,
    /// Prompts that begin with a token of the vocabulary, such as `[Q] `.
    pub(crate) prefixes: Vec<String>,
    /// The score, unless the prompts' file names one.
    pub(crate) similarity: LateInteraction,
}

/// A module that maps each vector.
enum RowModule {
    /// The folder of a Dense.
    Dense(ModelFolder),
    /// The file of a linear map.
    StateDict(ModelFolder),
    Normalize,
}

impl RowModule {
    fn name(&self) -> &'static str {
        match self {
            Self::Dense(_) | Self::StateDict(_) => "Dense",
            Self::Normalize => "Normalize",
        }
    }
}

/// Keys of `config_sentence_transformers.json` that PyLate alone writes.
const PYLATE_KEYS: [&str; 9] = [
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
];

/// The settings of PyLate in `config_sentence_transformers.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct PyLate {
    model_type: Option<String>,
    query_prefix: Option<String>,
    document_prefix: Option<String>,
    query_length: Option<usize>,
    document_length: Option<usize>,
    do_query_expansion: Option<bool>,
    attend_to_expansion_tokens: Option<bool>,
    attend_to_mask_tokens: Option<bool>,
    skiplist_words: Option<Vec<String>>,
    /// The expansion in the form of sentence-transformers; null for none.
    #[serde(deserialize_with = "some")]
    query_expansion: Option<Option<QueryExpansion>>,
}

/// Tells a key that is null from a key that is absent.
fn some<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> std::result::Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// The keys of [`METADATA`].
#[derive(Deserialize)]
#[serde(default)]
struct Metadata {
    query_token_id: Option<String>,
    doc_token_id: Option<String>,
    query_maxlen: Option<usize>,
    doc_maxlen: Option<usize>,
    attend_to_mask_tokens: Option<bool>,
    /// Null is false.
    mask_punctuation: Option<bool>,
}

impl Default for Metadata {
    fn default() -> Self {
        Self {
            query_token_id: None,
            doc_token_id: None,
            query_maxlen: None,
            doc_maxlen: None,
            attend_to_mask_tokens: None,
            mask_punctuation: Some(true),
        }
    }
}

impl PyLate {
    /// The lengths for keys that `sentence_bert_config.json` lacks. `keys` are all keys of the file.
    fn complete(&self, lengths: TaskLengths, keys: &Map<String, Value>) -> TaskLengths {
        let document_length = lengths.document_length.or(self.document_length);
        let query_length = lengths.query_length.or(self.query_length);
        let is_of_pylate = PYLATE_KEYS.iter().any(|key| keys.contains_key(*key));
        if lengths.query_expansion.is_some() || !is_of_pylate {
            return TaskLengths { query_length, document_length, ..lengths };
        }
        let attend = self.attend_to_expansion_tokens.or(self.attend_to_mask_tokens);
        let (query_length, query_expansion) = match &self.query_expansion {
            Some(query_expansion) => (query_length, query_expansion.clone()),
            None if self.do_query_expansion == Some(false) => (query_length, None),
            None => (lengths.query_length, fixed(self.query_length, attend)),
        };
        TaskLengths { query_length, document_length, query_expansion }
    }
}

/// ColBERT's expansion of queries by the mask token.
fn fixed(length: Option<usize>, attend: Option<bool>) -> Option<QueryExpansion> {
    let length = length.filter(|length| *length > 0).unwrap_or(QUERY_LENGTH);
    Some(QueryExpansion {
        strategy: ExpansionStrategy::Fixed,
        attend: attend.unwrap_or(false),
        token: None,
        length: length.try_into().expect("above 0"),
    })
}

/// The score that the prompts' file names; the default if it names none or one of another kind of
/// model, as in sentence-transformers.
fn similarity(prompts: &Prompts) -> LateInteraction {
    let name = prompts.similarity_fn_name.as_deref();
    name.and_then(|name| name.parse().ok()).unwrap_or_default()
}

/// Whether the files are those of a multi-vector model.
///
/// # Errors
/// The errors of [`entries`] and [`loader`].
pub(crate) fn are_multi_vector(files: &ModelFolder) -> Result<bool> {
    match entries(files)? {
        Some(entries) => {
            let is_own = |entry: &Entry| entry.is_of_pylate() || entry.class() == "MultiVectorMask";
            Ok(loader(files)? == Loader::MultiVectorEncoder || entries.iter().any(is_own))
        }
        None => is_stanford(files),
    }
}

/// Whether `config.json` names the class of Stanford's ColBERT.
fn is_stanford(files: &ModelFolder) -> Result<bool> {
    let config: Value = files.json("config.json")?.unwrap_or_default();
    let classes = config["architectures"].as_array();
    Ok(classes.is_some_and(|classes| classes.iter().any(|class| class == STANFORD)))
}

impl MultiVectorModules {
    /// Reads the modules of a folder and their settings.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for other modules, and for settings that are not
    /// implemented; [`crate::FileError::NoFile`] for a missing file; the errors of [`entries`].
    pub(crate) fn from_files(files: &ModelFolder) -> Result<Self> {
        match entries(files)? {
            Some(entries) if !are_multi_vector(files)? && files.has(bge_m3::COLBERT)? => {
                Self::bge_m3(files, &entries)
            }
            Some(entries) => Self::from_entries(files, entries),
            None if is_stanford(files)? => Self::stanford(files),
            None => Err(files.no_file("modules.json", "the modules of a multi-vector model")),
        }
    }

    fn from_entries(files: &ModelFolder, entries: Vec<Entry>) -> Result<Self> {
        let pylate: PyLate = files.json(prompts::FILE)?.unwrap_or_default();
        // PyLate has no modules for the mask and the normalisation.
        let is_of_pylate = pylate.model_type.as_deref() == Some("ColBERT")
            || entries.iter().any(Entry::is_of_pylate);
        let expected = "Transformer, and then any of Dense, Normalize and MultiVectorMask, and a \
                        HierarchicalTokenPooling";
        let classes: Vec<&str> = entries.iter().map(Entry::class).collect();
        let count = |class| classes.iter().filter(|own| **own == class).count();
        let last = classes.iter().position(|class| *class == "HierarchicalTokenPooling");
        let known = ["Dense", "Normalize", "MultiVectorMask", "HierarchicalTokenPooling"];
        if classes.first() != Some(&"Transformer")
            || !classes[1..].iter().all(|class| known.contains(class))
            || last.is_some_and(|last| last + 1 < classes.len())
            || count("MultiVectorMask") > usize::from(!is_of_pylate)
        {
            return Err(unsupported(files, &entries, expected));
        }
        let (mut mask, mut pooling, mut rows) = (None, None, vec![]);
        let transformer = transformer_files(files, &entries[0])?;
        for entry in entries.into_iter().skip(1) {
            let folder = files.folder(&entry.path);
            match entry.class() {
                "MultiVectorMask" => mask = Some(TokenMaskConfig::from_files(&folder)?),
                "HierarchicalTokenPooling" => pooling = Some(TokenPooling::from_files(&folder)?),
                "Dense" => rows.push(RowModule::Dense(folder)),
                _ => rows.push(RowModule::Normalize),
            }
        }
        if is_of_pylate {
            let has_prefixes = pylate.query_prefix.is_some() || pylate.document_prefix.is_some();
            mask = Some(match pylate.skiplist_words.clone() {
                Some(words) => TokenMaskConfig::of_words(words),
                None if pylate.model_type.is_some() || has_prefixes => {
                    TokenMaskConfig::punctuation()
                }
                None => TokenMaskConfig::default(),
            });
            rows.push(RowModule::Normalize);
        }
        let loader = Loader::MultiVectorEncoder;
        let sentence = SentenceConfig::from_files(&transformer, loader)?;
        let keys = files.json(prompts::FILE)?.unwrap_or_default();
        let mut lengths = pylate.complete(sentence.lengths, &keys);
        if sentence.max_length.is_some() {
            (lengths.query_length, lengths.document_length) = (None, None);
        }
        let (mut prompts, mut prefixes) = (Prompts::of_multi_vector_embedder(files)?, vec![]);
        for (name, prefix) in [("query", pylate.query_prefix), ("document", pylate.document_prefix)]
        {
            if let Some(prefix) = prefix {
                prompts = prompts.with_prefix(name, &prefix);
                prefixes.push(prefix);
            }
        }
        Ok(Self {
            transformer,
            loader,
            projection: None,
            rows,
            mask,
            pooling,
            lengths,
            similarity: similarity(&prompts),
            prompts,
            prefixes,
        })
    }

    /// The ColBERT vectors of BGE-M3, beside its dense vectors.
    fn bge_m3(files: &ModelFolder, entries: &[Entry]) -> Result<Self> {
        let transformer = match entries {
            [first, ..] if first.class() == "Transformer" => transformer_files(files, first)?,
            _ => return Err(unsupported(files, entries, "a Transformer first")),
        };
        Ok(Self {
            transformer,
            loader: Loader::SentenceTransformer,
            projection: None,
            rows: vec![
                RowModule::StateDict(files.with_weights(bge_m3::COLBERT)),
                RowModule::Normalize,
            ],
            mask: Some(TokenMaskConfig::without_first_token()),
            pooling: None,
            lengths: TaskLengths::default(),
            prompts: Prompts::of_embedder(files)?,
            prefixes: vec![],
            similarity: LateInteraction::MeanMaxSim,
        })
    }

    fn stanford(files: &ModelFolder) -> Result<Self> {
        let metadata: Metadata = files.json(METADATA)?.unwrap_or_default();
        let token = |token: Option<String>, default: &str| {
            format!("{} ", token.filter(|token| !token.is_empty()).unwrap_or(default.to_string()))
        };
        let query = token(metadata.query_token_id, "[unused0]");
        let document = token(metadata.doc_token_id, "[unused1]");
        let prompts = Prompts::without_file();
        let prompts = prompts.with_prefix("query", &query).with_prefix("document", &document);
        Ok(Self {
            transformer: files.clone(),
            loader: Loader::Transformers,
            projection: Some(load::rows(files, STANFORD_PROJECTION)?),
            rows: vec![RowModule::Normalize],
            mask: Some(if metadata.mask_punctuation == Some(true) {
                TokenMaskConfig::punctuation()
            } else {
                TokenMaskConfig::default()
            }),
            pooling: None,
            lengths: TaskLengths {
                query_length: None,
                document_length: metadata.doc_maxlen,
                query_expansion: fixed(metadata.query_maxlen, metadata.attend_to_mask_tokens),
            },
            prompts,
            prefixes: vec![query, document],
            similarity: LateInteraction::default(),
        })
    }

    /// Descriptions of the modules after the transformer.
    pub(crate) fn describe(&self) -> Vec<String> {
        let projection = self.projection.map(|_| "Dense");
        let rows = self.rows.iter().map(RowModule::name);
        let mask = self.mask.as_ref().map(|_| "MultiVectorMask");
        let pooling = self.pooling.as_ref().map(|_| "HierarchicalTokenPooling");
        projection.into_iter().chain(rows).chain(mask).chain(pooling).map(String::from).collect()
    }

    /// Loads the modules that map each vector. `width` is the length of the hidden states, or of
    /// the projection. Also returns the length of the last module's vectors.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a module with another input or output than
    /// `token_embeddings`; the errors of [`Dense::from_files`].
    pub(crate) fn modules(
        &self,
        mut width: usize,
        read: Read,
        device: &Device,
    ) -> Result<(Vec<Module>, usize)> {
        let mut modules = vec![];
        for module in &self.rows {
            let dense = match module {
                RowModule::Dense(files) => {
                    check_input_output(files, TOKENS)?;
                    Dense::from_files(files, width, read, device)?
                }
                RowModule::StateDict(files) => Dense::from_state_dict(files, width, read, device)?,
                RowModule::Normalize => {
                    modules.push(Module::Normalize);
                    continue;
                }
            };
            width = dense.out_features();
            modules.push(Module::Dense(dense));
        }
        Ok((modules, width))
    }

    /// Checks that the lengths do not contradict each other.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a maximum length of queries below the length that
    /// they are filled up to.
    pub(crate) fn check_lengths(&self) -> Result<()> {
        let TaskLengths { query_length, query_expansion, .. } = &self.lengths;
        match (query_length, query_expansion) {
            (Some(query_length), Some(expansion)) if *query_length < expansion.length.get() => {
                Err(Error::unsupported(
                    self.transformer.path("sentence_bert_config.json"),
                    "query_length",
                    "at least the length of query_expansion",
                    query_length,
                ))
            }
            _ => Ok(()),
        }
    }
}
