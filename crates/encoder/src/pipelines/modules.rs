//! The modules of a sentence-transformers folder, from `modules.json`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path},
};

use candle_core::{Device, Module as _, Tensor};
use ops::l2_normalize;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Activation, Error, Pooling, Result, TextTokenizer,
    load::{ModelFolder, Read},
    pipelines::{bge_m3, dense::Dense, splade::SpladePooling, static_embedding::Model2VecConfig},
    text::tokenizer::StaticRules,
};

const FILE: &str = "modules.json";

/// The name of the pooled vectors, which is the input and the output of every module after them.
const SENTENCE: &str = "sentence_embedding";

/// A module after the pooling.
#[derive(Clone, Debug)]
pub(crate) enum Module {
    Dense(Dense),
    /// Normalises vectors to length 1.
    Normalize,
    /// The custom module of pplx-embed with its default, int8: `round(127 · tanh(x))`.
    FlexibleQuantizer,
}

/// The class of [`Module::FlexibleQuantizer`].
const FLEXIBLE_QUANTIZER: &str = "st_quantize.FlexibleQuantizer";

impl Module {
    /// # Shapes
    /// `x`: `(B, E)`; returns `(B, E')`, where only a [`Dense`] may change E
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(dense) => dense.forward(x),
            Self::Normalize => Ok(l2_normalize(x)?),
            Self::FlexibleQuantizer => Ok((Activation::Tanh.forward(x)? * 127.0)?.round()?),
        }
    }
}

/// One entry of `modules.json`.
#[derive(Deserialize)]
pub(super) struct Entry {
    #[serde(rename = "type")]
    class: String,
    pub(super) path: String,
    name: Option<String>,
}

/// The class of PyLate's Dense, which is that of sentence-transformers for the vectors of tokens.
pub(super) const PYLATE_DENSE: &str = "pylate.models.Dense.Dense";

impl Entry {
    /// Whether the class is [`PYLATE_DENSE`].
    pub(super) fn is_of_pylate(&self) -> bool {
        self.class == PYLATE_DENSE
    }

    /// The class without its Python module, if it is a class of sentence-transformers or PyLate.
    pub(super) fn class(&self) -> &str {
        if self.class.starts_with("sentence_transformers.") || self.is_of_pylate() {
            self.class.rsplit('.').next().unwrap_or_default()
        } else {
            &self.class
        }
    }

    /// Whether the module is a transformer. `MLMTransformer` is the class of masked language models
    /// in older folders.
    fn is_transformer(&self) -> bool {
        ["Transformer", "MLMTransformer"].contains(&self.class())
    }
}

/// The keys of a module's `config.json` that name its input and output.
#[derive(Default, Deserialize)]
struct InputOutput {
    module_input_name: Option<String>,
    /// If absent, that of the input.
    module_output_name: Option<String>,
}

/// Checks that the input and the output of a module are `name`, if its config names them.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] if they are not; the errors of reading `config.json`.
pub(super) fn check_input_output(files: &ModelFolder, name: &'static str) -> Result<()> {
    let InputOutput { module_input_name, module_output_name } =
        files.json("config.json")?.unwrap_or_default();
    for (key, got) in
        [("module_input_name", module_input_name), ("module_output_name", module_output_name)]
    {
        if let Some(got) = got.filter(|got| got != name) {
            return Err(Error::unsupported(files.path("config.json"), key, name, got));
        }
    }
    Ok(())
}

/// The entries of `modules.json`; `None` if there is no such file.
///
/// # Errors
/// [`crate::FileError::Io`] or [`crate::FileError::Json`] if the file cannot be read or parsed;
/// [`crate::ConfigError::Unsupported`] for a module outside the folder, or for two modules of the
/// same name, of which sentence-transformers runs one.
pub(super) fn entries(files: &ModelFolder) -> Result<Option<Vec<Entry>>> {
    let Some(mut entries) = files.json::<Vec<Entry>>(FILE)? else { return Ok(None) };
    let mut names = BTreeSet::new();
    for entry in &entries {
        if let Some(name) = entry.name.as_ref().filter(|name| !names.insert(name.to_string())) {
            let expected = "a name for each module";
            let path = files.path(FILE);
            return Err(Error::unsupported(path, "a second module's name", expected, name));
        }
    }
    normalize_paths(&mut entries, &files.path(FILE))?;
    Ok(Some(entries))
}

/// Removes `.` and slashes at the end from the paths of modules. `file` is the path of the file
/// with the entries.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for a path outside the folder.
fn normalize_paths(entries: &mut [Entry], file: &str) -> Result<()> {
    for entry in entries {
        let parts = Path::new(&entry.path).components().filter(|part| *part != Component::CurDir);
        let parts = parts.map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let Some(parts) = parts.collect::<Option<Vec<&str>>>() else {
            let expected = "a subfolder of the model's folder";
            return Err(Error::unsupported(file, "a module's path", expected, &entry.path));
        };
        entry.path = parts.join("/");
    }
    Ok(())
}

/// The files of the transformer `entry`.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] if the transformer is in a subfolder and a weights file was
/// chosen: the file would not be read.
pub(super) fn transformer_files(files: &ModelFolder, entry: &Entry) -> Result<ModelFolder> {
    if files.weights().is_some() && !entry.path.is_empty() {
        return Err(Error::unsupported(
            files.path(FILE),
            "the Transformer's path",
            "an empty path, because a weights file was chosen",
            &entry.path,
        ));
    }
    Ok(files.folder(&entry.path))
}

/// The error for a list of modules that is not implemented.
pub(super) fn unsupported(files: &ModelFolder, entries: &[Entry], expected: &'static str) -> Error {
    let classes: Vec<&str> = entries.iter().map(Entry::class).collect();
    Error::unsupported(files.path(FILE), "modules", expected, classes.join(", "))
}

/// Whether a transformer is the only module.
fn is_alone(entries: &[Entry]) -> bool {
    matches!(entries, [one] if one.class() == "Transformer")
}

/// The files of the transformer: the folder of the first module if it is a transformer or if
/// `files` have no `config.json`, otherwise `files`.
///
/// # Errors
/// The errors of [`entries`] and [`transformer_files`].
pub(crate) fn transformer(files: &ModelFolder) -> Result<ModelFolder> {
    match entries(files)?.and_then(|entries| entries.into_iter().next()) {
        Some(first) if first.is_transformer() || !files.has("config.json")? => {
            transformer_files(files, &first)
        }
        _ => Ok(files.clone()),
    }
}

/// The modules of a sparse embedding model.
pub(crate) struct SparseModules {
    pub(crate) documents: SparseDocuments,
    /// The folder of the SparseStaticEmbedding of queries, of a model with a Router.
    pub(crate) queries: Option<ModelFolder>,
}

/// The modules for documents, or for all texts.
pub(crate) enum SparseDocuments {
    /// A masked language model, and the pooling of its logits.
    Splade { transformer: ModelFolder, pooling: SpladePooling },
    /// A dense model, and the folder of a SparseAutoEncoder.
    AutoEncoder { chain: Box<Chain>, auto_encoder: ModelFolder },
    /// The transformer of BGE-M3, and the folder with the map to the weights of tokens.
    BgeM3 { transformer: ModelFolder, head: ModelFolder },
}

impl SparseModules {
    /// The files of the transformer of documents.
    pub(crate) fn transformer(&self) -> &ModelFolder {
        match &self.documents {
            SparseDocuments::Splade { transformer, .. }
            | SparseDocuments::BgeM3 { transformer, .. } => transformer,
            SparseDocuments::AutoEncoder { chain, .. } => &chain.first,
        }
    }

    /// The type that runs the transformer, and descriptions of the other modules.
    pub(crate) fn describe(&self) -> (&'static str, Vec<String>) {
        let (model, mut modules) = match &self.documents {
            SparseDocuments::Splade { .. } => {
                ("EncoderForMaskedLm", vec!["SpladePooling".to_string()])
            }
            SparseDocuments::AutoEncoder { chain, .. } => {
                let last = "SparseAutoEncoder".to_string();
                ("EncoderModel", chain.describe().into_iter().chain([last]).collect())
            }
            SparseDocuments::BgeM3 { .. } => ("EncoderModel", vec!["Dense".to_string()]),
        };
        if self.queries.is_some() {
            modules.push("SparseStaticEmbedding for queries".to_string());
        }
        (model, modules)
    }
}

/// The file with the modules of a Router.
const ROUTER: &str = "router_config.json";

/// The keys of [`ROUTER`].
#[derive(Deserialize)]
struct RouterConfig {
    /// The class of each module by its path.
    types: BTreeMap<String, String>,
    /// The paths of the modules of each route.
    structure: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    parameters: RouterParameters,
}

/// The parameters of a Router.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RouterParameters {
    /// The route of texts that are neither queries nor documents.
    default_route: Option<String>,
    /// Other routes for some tasks and kinds of inputs.
    route_mappings: serde_json::Map<String, Value>,
}

impl RouterConfig {
    /// Checks that texts without a task are documents. `file` is the path of this file.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if they have another route.
    fn check_default_route(&self, file: &str) -> Result<()> {
        let RouterParameters { default_route, route_mappings } = &self.parameters;
        if default_route.as_deref() != Some("document") {
            let got = default_route.as_deref().unwrap_or("null");
            return Err(Error::unsupported(file, "default_route", "document", got));
        }
        if !route_mappings.is_empty() {
            let got = Value::from(route_mappings.clone());
            return Err(Error::unsupported(file, "route_mappings", "no mappings", got));
        }
        Ok(())
    }

    /// The modules of a route. `file` is the path of this file.
    fn entries(&self, route: &str, file: &str) -> Result<Vec<Entry>> {
        let paths = self.structure.get(route).into_iter().flatten();
        let entry = |path: &String| {
            let class = self.types.get(path).cloned().unwrap_or_default();
            Entry { class, path: path.clone(), name: None }
        };
        let mut entries: Vec<Entry> = paths.map(entry).collect();
        normalize_paths(&mut entries, file)?;
        Ok(entries)
    }
}

/// Whether `modules.json` has the modules of a sparse model.
///
/// # Errors
/// The errors of [`entries`].
pub(crate) fn are_sparse(files: &ModelFolder) -> Result<bool> {
    let sparse = ["SpladePooling", "SparseAutoEncoder"];
    let entries = entries(files)?.unwrap_or_default();
    Ok(entries.iter().any(|entry| sparse.contains(&entry.class())))
}

/// The modules of a sparse embedding model; a masked language model with the default pooling if
/// there is no `modules.json`.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for other modules; [`crate::FileError::Json`] for a pooling
/// or an activation that is not known; the errors of [`entries`].
pub(crate) fn sparse_modules(files: &ModelFolder) -> Result<SparseModules> {
    let Some(mut entries) = entries(files)? else {
        let (transformer, pooling) = (files.clone(), SpladePooling::default());
        let documents = SparseDocuments::Splade { transformer, pooling };
        return Ok(SparseModules { documents, queries: None });
    };
    let expected = "Transformer and SpladePooling; Transformer, Pooling and SparseAutoEncoder; or \
                    a Router";
    if let [router] = &entries[..]
        && router.class() == "Router"
    {
        return router_modules(&transformer_files(files, router)?);
    }
    let documents = match splade(files, &entries)? {
        Some(documents) => documents,
        None if !are_sparse(files)? && bge_m3::has_token_weights(files)? => {
            let transformer = transformer(files)?;
            SparseDocuments::BgeM3 { transformer, head: files.clone() }
        }
        None => match entries.pop() {
            Some(last) if last.class() == "SparseAutoEncoder" && !is_static(&entries) => {
                SparseDocuments::AutoEncoder {
                    chain: Chain::from_entries(files, entries)?.into(),
                    auto_encoder: files.folder(&last.path),
                }
            }
            last => {
                entries.extend(last);
                return Err(unsupported(files, &entries, expected));
            }
        },
    };
    Ok(SparseModules { documents, queries: None })
}

/// The modules of a Router with a route for queries and one for documents.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for other modules, and for another default route.
fn router_modules(files: &ModelFolder) -> Result<SparseModules> {
    let json = files.need_json(ROUTER, "the routes of the Router")?;
    let config: RouterConfig = json.to()?;
    config.check_default_route(json.path())?;
    let unsupported = |route, expected, entries: &[Entry]| {
        let classes: Vec<&str> = entries.iter().map(Entry::class).collect();
        let got = if classes.is_empty() { "(no modules)".to_string() } else { classes.join(", ") };
        Error::unsupported(json.path(), route, expected, got)
    };
    let entries = config.entries("query", json.path())?;
    let queries = match &entries[..] {
        [query] if query.class() == "SparseStaticEmbedding" => files.folder(&query.path),
        _ => return Err(unsupported("structure.query", "SparseStaticEmbedding", &entries)),
    };
    let entries = config.entries("document", json.path())?;
    let expected = "Transformer and SpladePooling";
    let documents = splade(files, &entries)?
        .ok_or_else(|| unsupported("structure.document", expected, &entries))?;
    Ok(SparseModules { documents, queries: Some(queries) })
}

/// The modules of a masked language model and the pooling of its logits; `None` for other modules.
fn splade(files: &ModelFolder, entries: &[Entry]) -> Result<Option<SparseDocuments>> {
    match entries {
        [first, pooling] if first.is_transformer() && pooling.class() == "SpladePooling" => {
            let transformer = transformer_files(files, first)?;
            let pooling = files.folder(&pooling.path).json("config.json")?.unwrap_or_default();
            Ok(Some(SparseDocuments::Splade { transformer, pooling }))
        }
        _ => Ok(None),
    }
}

/// Whether a transformer is the only module of `modules.json`, as in a cross-encoder.
///
/// # Errors
/// The errors of [`entries`].
pub(crate) fn is_transformer_alone(files: &ModelFolder) -> Result<bool> {
    Ok(entries(files)?.is_some_and(|entries| is_alone(&entries)))
}

/// Whether `modules.json` has a LogitScore.
pub(crate) fn has_logit_score(files: &ModelFolder) -> bool {
    let entries = entries(files).ok().flatten().unwrap_or_default();
    entries.iter().any(|entry| entry.class() == "LogitScore")
}

/// The LogitScore of a cross-encoder; `None` if a transformer is its only module.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] if it has other modules; the errors of [`entries`] and
/// [`LogitScore::from_files`].
pub(crate) fn logit_score(files: &ModelFolder) -> Result<Option<LogitScore>> {
    let Some(entries) = entries(files)? else { return Ok(None) };
    match &entries[..] {
        [_] if is_alone(&entries) => Ok(None),
        [first, score] if first.class() == "Transformer" && score.class() == "LogitScore" => {
            LogitScore::from_files(&files.folder(&score.path)).map(Some)
        }
        _ => {
            let expected = "a Transformer alone, or a Transformer and a LogitScore, for a \
                            cross-encoder";
            Err(unsupported(files, &entries, expected))
        }
    }
}

/// The tokens whose logits are the score of a causal language model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogitScore {
    pub(crate) true_token_id: u32,
    pub(crate) false_token_id: Option<u32>,
    /// The file that names the tokens.
    path: String,
}

/// The `config.json` of a LogitScore.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LogitScoreConfig {
    true_token_id: u32,
    #[serde(default)]
    false_token_id: Option<u32>,
    #[serde(default)]
    module_input_name: Option<String>,
}

impl LogitScore {
    /// Reads the module's config.
    ///
    /// # Errors
    /// [`crate::FileError::NoFile`], [`crate::FileError::Io`] or [`crate::FileError::Json`] if the
    /// file is missing, cannot be read or parsed, or has another key;
    /// [`crate::ConfigError::Unsupported`] for another input than the logits.
    fn from_files(files: &ModelFolder) -> Result<Self> {
        const INPUT: &str = "causal_logits";
        let json = files.need_json("config.json", "the tokens of a LogitScore")?;
        let LogitScoreConfig { true_token_id, false_token_id, module_input_name } = json.to()?;
        let path = json.path().to_string();
        match module_input_name.filter(|name| name != INPUT) {
            Some(got) => Err(Error::unsupported(path, "module_input_name", INPUT, got)),
            None => Ok(Self { true_token_id, false_token_id, path }),
        }
    }

    /// The tokens of a causal language model without `modules.json`, as in sentence-transformers;
    /// `None` for another model. `files` are those of a model without `modules.json`.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if the vocabulary lacks the tokens; the errors of reading
    /// `config.json` and of `tokenizer`.
    pub(crate) fn of_causal_model(
        files: &ModelFolder,
        tokenizer: impl FnOnce() -> Result<TextTokenizer>,
    ) -> Result<Option<(Self, TextTokenizer)>> {
        #[derive(Deserialize)]
        struct Keys {
            architectures: Option<Vec<String>>,
        }
        let json = files.config()?;
        let Keys { architectures } = json.to()?;
        let architectures = architectures.unwrap_or_default();
        let Some(class) = architectures.first().filter(|class| class.ends_with("ForCausalLM"))
        else {
            return Ok(None);
        };
        let tokenizer = tokenizer()?;
        let path = json.path().to_string();
        match (tokenizer.token_id("yes"), tokenizer.token_id("no")) {
            (Some(true_token_id), no @ Some(_)) => {
                Ok(Some((Self { true_token_id, false_token_id: no, path }, tokenizer)))
            }
            _ => {
                let expected = "a sequence classifier, or the tokens yes and no in the vocabulary \
                                of a causal language model";
                Err(Error::unsupported(path, "architectures", expected, class))
            }
        }
    }

    /// Checks that the vocabulary has the tokens.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if it does not.
    pub(crate) fn check(&self, vocab_size: usize) -> Result<()> {
        let ids =
            [("true_token_id", Some(self.true_token_id)), ("false_token_id", self.false_token_id)];
        for (key, id) in ids {
            if let Some(id) = id.filter(|&id| id as usize >= vocab_size) {
                let expected = "an id below the vocab_size of the model's config.json";
                return Err(Error::unsupported(&self.path, key, expected, id));
            }
        }
        Ok(())
    }
}

/// Checks that a pooling can be chosen: the texts of a StaticEmbedding have no hidden states.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for a StaticEmbedding; the errors of [`entries`].
pub(crate) fn check_pooling(files: &ModelFolder, pooling: &Pooling) -> Result<()> {
    let is_static = match entries(files)? {
        Some(entries) => is_static(&entries),
        None => Model2VecConfig::from_files(files)?.is_some(),
    };
    if is_static {
        let expected = "no pooling, because the model is a StaticEmbedding, which averages the \
                        vectors of a text's tokens";
        return Err(Error::unsupported(files.path(FILE), "pooling", expected, pooling));
    }
    Ok(())
}

/// Whether the first module is a table of token vectors.
fn is_static(entries: &[Entry]) -> bool {
    entries.first().is_some_and(|entry| entry.class() == "StaticEmbedding")
}

/// The modules of a dense embedding model.
pub(crate) struct Chain {
    /// The folder of the first module: a transformer or a StaticEmbedding.
    pub(crate) first: ModelFolder,
    /// The pooling of a transformer. A StaticEmbedding has none: it computes a vector per text.
    pub(crate) pooling: Option<Pooling>,
    files: ModelFolder,
    /// The modules after the pooling or the StaticEmbedding.
    rest: Vec<Entry>,
}

impl Chain {
    /// Reads `modules.json` and the pooling's config.
    ///
    /// # Errors
    /// [`crate::FileError::NoFile`] for a missing file; [`crate::ConfigError::Unsupported`] for
    /// modules that are not implemented; the errors of [`entries`] and [`Pooling::from_json`].
    pub(crate) fn from_files(files: &ModelFolder) -> Result<Self> {
        let expected = "the modules of a sentence-transformers model, which say how to pool; to \
                        use a model without this file, specify a pooling (--pooling of the \
                        command, pooling= in Python, Embedder::from_transformer in Rust)";
        match entries(files)? {
            Some(entries) => Self::from_entries(files, entries),
            None => Self::of_model2vec(files)?.ok_or_else(|| files.no_file(FILE, expected)),
        }
    }

    /// The modules of a model2vec folder without `modules.json`; `None` for another folder.
    fn of_model2vec(files: &ModelFolder) -> Result<Option<Self>> {
        let Some(config) = Model2VecConfig::from_files(files)? else { return Ok(None) };
        let normalize =
            Entry { class: "Normalize".to_string(), path: "1_Normalize".to_string(), name: None };
        let rest = if config.normalize { vec![normalize] } else { vec![] };
        Ok(Some(Self { first: files.clone(), pooling: None, files: files.clone(), rest }))
    }

    /// The rules by which the texts of a StaticEmbedding are tokenized: those of the library that
    /// the folder's files name.
    ///
    /// # Errors
    /// [`crate::FileError::Json`] for a damaged config of model2vec.
    pub(crate) fn static_rules(&self) -> Result<StaticRules> {
        if self.files.has(FILE)? {
            return Ok(StaticRules::SentenceTransformers);
        }
        let config = Model2VecConfig::from_files(&self.files)?.unwrap_or_default();
        Ok(StaticRules::Model2Vec { max_length: config.max_length })
    }

    /// [`Self::from_files`] with these entries of `modules.json`.
    fn from_entries(files: &ModelFolder, mut entries: Vec<Entry>) -> Result<Self> {
        let known =
            |entry: &Entry| ["Dense", "Normalize", FLEXIBLE_QUANTIZER].contains(&entry.class());
        let first: Vec<&str> = entries.iter().take(2).map(Entry::class).collect();
        let is_static = is_static(&entries);
        let own = if is_static { 1 } else { 2 };
        if !(is_static || first == ["Transformer", "Pooling"])
            || !entries.iter().skip(own).all(known)
        {
            let expected = match first[..] {
                ["StaticEmbedding", ..] => "StaticEmbedding and then any of Dense and Normalize",
                ["Transformer"] => {
                    "a Pooling after the Transformer; specify a pooling (--pooling of the command, \
                     pooling= in Python, Embedder::from_transformer in Rust)"
                }
                _ => "Transformer, Pooling and then any of Dense and Normalize",
            };
            return Err(unsupported(files, &entries, expected));
        }
        let rest = entries.split_off(own);
        let pooling = entries.get(1).map(|pooling| {
            let files = files.folder(&pooling.path);
            Pooling::read(&*files.need_json("config.json", "the pooling modes")?)
        });
        Ok(Self {
            pooling: pooling.transpose()?,
            first: transformer_files(files, &entries[0])?,
            files: files.clone(),
            rest,
        })
    }

    /// Descriptions of the modules after the first.
    pub(crate) fn describe(&self) -> Vec<String> {
        let rest = self.rest.iter().map(|entry| entry.class().to_string());
        self.pooling.iter().map(Pooling::to_string).chain(rest).collect()
    }

    /// Loads the modules after the pooling or the StaticEmbedding. `width` is the length of their
    /// input vectors. Also returns the length of the last module's vectors.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a module with another input or output than
    /// `sentence_embedding`; the errors of [`Dense::from_files`].
    pub(crate) fn modules(
        &self,
        width: usize,
        read: Read,
        device: &Device,
    ) -> Result<(Vec<Module>, usize)> {
        let (mut modules, mut width) = (vec![], width);
        for entry in &self.rest {
            let files = self.files.folder(&entry.path);
            if !entry.path.is_empty() {
                // Otherwise config.json is the transformer's.
                check_input_output(&files, SENTENCE)?;
            }
            modules.push(match entry.class() {
                "Dense" => {
                    let dense = Dense::from_files(&files, width, read, device)?;
                    width = dense.out_features();
                    Module::Dense(dense)
                }
                FLEXIBLE_QUANTIZER => Module::FlexibleQuantizer,
                _ => Module::Normalize,
            });
        }
        Ok((modules, width))
    }
}
