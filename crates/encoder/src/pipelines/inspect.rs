//! Reports the content of a model folder and whether the model can be run, without reading tensor
//! data.

use std::{collections::BTreeMap, fmt, sync::Arc};

use candle_core::{DType, Device};
use ops::Weights;
use serde::{Deserialize, Serialize};

use crate::{
    BertConfig, CausalLm, CheckpointError, EmbeddingKind, EncoderDecoder, EncoderDecoderConfig,
    EncoderForLogitScore, EncoderForMaskedLm, EncoderForNextSentencePrediction,
    EncoderForQuestionAnswering, EncoderForSequenceClassification, EncoderForTokenClassification,
    EncoderModel, Error, Labels, ModelConfig, ModelFiles, Result,
    load::{Checkpoint, LoadReport, ModelFolder, Naming, Read, WeightFiles, check_no_adapter},
    models::labels::ReadLabels,
    models::{bert, encoder_model::has_pooler},
    pipelines::modules::{self, Chain, LogitScore, sparse_modules},
    pipelines::multi_vector_modules::MultiVectorModules,
    pipelines::static_embedding::StaticEmbedding,
    text::{
        TextTokenizer, chat_template::ChatTemplate, sentence_config::Loader,
        tokenizer::VOCABULARIES,
    },
};

/// The content of a model folder and the types that can run it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Inspection {
    /// The path of the weights file, or of the index of the shards.
    pub weights: Option<String>,
    /// The architecture, such as `BERT encoder`, `RoBERTa encoder`, `BERT decoder`, `Qwen3 decoder`
    /// or `BERT encoder-decoder`.
    pub architecture: Option<String>,
    /// The prefix of the tensor names, such as `bert.`.
    pub prefix: Option<String>,
    /// The names of the layer normalisation parameters in the checkpoint.
    pub layer_norm_names: Option<&'static str>,
    /// Number of tensors of each dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// Number of values in all tensors.
    pub parameters: usize,
    /// The heads that the checkpoint has tensors for.
    pub heads: Vec<&'static str>,
    /// The file of the tokenizer's vocabulary; `None` if there is none, or if it cannot be used.
    pub tokenizer: Option<&'static str>,
    /// The modules of a sentence-transformers folder after the transformer.
    pub modules: Vec<String>,
    /// Which tensors are loaded, ignored, unexpected, missing or mismatched.
    pub report: Option<LoadReport>,
    /// The types of this crate that can run the model.
    pub runs_as: Vec<&'static str>,
    /// Why the model, or one of its heads, cannot be run.
    pub problems: Vec<String>,
}

/// The keys of `config.json` that determine the architecture.
#[derive(Deserialize)]
pub(crate) struct ArchitectureKeys {
    model_type: Option<String>,
    is_decoder: Option<bool>,
    architectures: Option<Vec<String>>,
}

impl ArchitectureKeys {
    pub(crate) fn is_encoder_decoder(&self) -> bool {
        self.model_type.as_deref() == Some("encoder-decoder")
    }

    pub(crate) fn is_decoder(&self) -> bool {
        self.is_decoder == Some(true)
    }

    /// Whether the key `architectures` names a causal language model.
    fn names_causal_lm(&self) -> bool {
        let saved = self.architectures.as_deref().unwrap_or_default();
        saved.iter().any(|class| class.ends_with("ForCausalLM"))
    }

    /// Whether the key `architectures` allows a class. If the key names a classifier, only this
    /// classifier is allowed, since the tensors of classifiers can have the same names.
    fn architectures_allow(&self, class: &str) -> bool {
        let saved = self.architectures.as_deref().unwrap_or_default();
        let classifiers =
            ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"];
        !saved.iter().any(|saved| {
            classifiers.iter().any(|kind| saved.ends_with(kind) && !class.ends_with(kind))
        })
    }
}

/// Checks that a pipeline computes the head that `config.json` names. `pattern` stands for the
/// classes of the pipeline, for example `*ForTokenClassification`.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] if the key `architectures` names another classifier;
/// [`crate::FileError::NoFile`], [`crate::FileError::Io`] or [`crate::FileError::Json`] if the
/// config cannot be read or parsed.
pub(crate) fn check_classifier(files: &ModelFolder, pattern: &'static str) -> Result<()> {
    let json = files.config()?;
    let keys: ArchitectureKeys = json.to()?;
    if keys.architectures_allow(pattern) {
        return Ok(());
    }
    let got = keys.architectures.unwrap_or_default().join(", ");
    Err(Error::unsupported(json.path(), "architectures", pattern, got))
}

/// For each head: the name of a tensor that checkpoints with this head contain, in the naming
/// scheme of this crate, and the description of the head. In some architectures, several heads have
/// tensors of the same name in the checkpoint.
///
/// [`LM_MATRIX`] only counts if the head is a single matrix.
const HEADS: [(&str, &str); 8] = [
    ("pooler.weight", "pooler"),
    ("lm_head.transform.weight", "masked language model"),
    (LM_MATRIX, "language model"),
    ("next_sentence.weight", "next sentence"),
    ("sequence_classifier.weight", "classification"),
    ("token_classifier.weight", "classification"),
    ("qa_outputs.weight", "question answering"),
    ("memory_projection.weight", "projection of the memory"),
];

/// The output matrix of a language model. Checkpoints with tied weights do not have it.
const LM_MATRIX: &str = "lm_head.decoder.weight";

type BuildModel = fn(&ModelConfig, &ReadLabels, Weights) -> Result<()>;

/// The models with a head: the class, the name of the tensor in [`HEADS`], and the constructor.
const MODELS_WITH_HEAD: [(&str, &str, BuildModel); 7] = [
    ("EncoderForMaskedLm", "lm_head.transform.weight", |config, _, weights| {
        EncoderForMaskedLm::new(config, weights).map(|_| ())
    }),
    // A head that is a single matrix.
    ("EncoderForMaskedLm", LM_MATRIX, |config, _, weights| {
        EncoderForMaskedLm::new(config, weights).map(|_| ())
    }),
    ("CausalLm", LM_MATRIX, |config, _, weights| CausalLm::new(config, weights).map(|_| ())),
    ("EncoderForNextSentencePrediction", "next_sentence.weight", |config, _, weights| {
        EncoderForNextSentencePrediction::new(config, weights).map(|_| ())
    }),
    (
        "EncoderForSequenceClassification",
        "sequence_classifier.weight",
        |config, labels, weights| {
            EncoderForSequenceClassification::new(config, &labels()?, weights).map(|_| ())
        },
    ),
    ("EncoderForTokenClassification", "token_classifier.weight", |config, labels, weights| {
        EncoderForTokenClassification::new(config, &labels()?, weights).map(|_| ())
    }),
    ("EncoderForQuestionAnswering", "qa_outputs.weight", |config, _, weights| {
        EncoderForQuestionAnswering::new(config, weights).map(|_| ())
    }),
];

impl Inspection {
    /// Reads the headers of a model's files. Files on the hub are downloaded completely. Errors are
    /// collected in `problems`.
    ///
    /// # Examples
    /// ```
    /// use encoder::{Inspection, ModelFiles};
    ///
    /// let found = Inspection::new(&ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?);
    /// assert_eq!((found.architecture.as_deref(), found.parameters), (Some("BERT encoder"), 22_713_216));
    /// assert_eq!(found.runs_as, ["EncoderModel", "Embedder"]);
    /// assert!(found.problems.is_empty());
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn new(files: &ModelFiles) -> Self {
        let (files, mut found) = (&ModelFolder::new(files), Self::default());
        let chain = Chain::from_files(files);
        let kind = EmbeddingKind::from_folder(files);
        // The transformer, and for a model that is not dense: the type that runs the transformer,
        // the other modules, and the type that runs all of them.
        let not_dense = match kind {
            Ok(EmbeddingKind::Sparse) => Some(sparse_modules(files).map(|sparse| {
                let (model, modules) = sparse.describe();
                (sparse.transformer().clone(), model, modules, "SparseEmbedder")
            })),
            Ok(EmbeddingKind::Multi) => {
                Some(MultiVectorModules::from_files(files).and_then(|multi| {
                    multi.check_lengths()?;
                    let width = match multi.projection {
                        Some(width) => width,
                        None => {
                            ModelConfig::read(&*multi.transformer.config()?)?.encoder.hidden_size
                        }
                    };
                    multi.modules(width, Read::Header, &Device::Cpu)?;
                    let modules = multi.describe();
                    Ok((multi.transformer, "EncoderModel", modules, "MultiVectorEmbedder"))
                }))
            }
            _ => None,
        };
        let transformer = match &not_dense {
            Some(Ok((transformer, ..))) => transformer.clone(),
            _ => modules::transformer(files).unwrap_or_else(|_| files.clone()),
        };
        let is_alone = modules::is_transformer_alone(files).unwrap_or(false);
        let mut has = |files: &ModelFolder, file: &str| {
            files.has(file).unwrap_or_else(|error| {
                found.problems.push(error.to_string());
                false
            })
        };
        let vocabulary = VOCABULARIES.into_iter().find(|file| has(&transformer, file));
        let is_chain = chain.is_ok() || has(files, "modules.json");
        if let Ok(chain) = &chain
            && chain.pooling.is_none()
        {
            let inspected = found.static_embedding(chain);
            found.problems.extend(inspected.err().map(|error| error.to_string()));
            return found;
        }
        found.tokenizer = vocabulary;
        let hidden_size = match found.model(&transformer) {
            Ok(hidden_size) => hidden_size,
            Err(error) => {
                found.problems.push(error.to_string());
                None
            }
        };
        match not_dense {
            Some(Ok((_, model, modules, embedder))) => {
                found.modules = modules;
                if found.tokenizer.is_some() && found.runs_as.contains(&model) {
                    found.runs_as.push(embedder);
                }
                return found;
            }
            Some(Err(error)) => {
                found.problems.push(error.to_string());
                return found;
            }
            None => {}
        }
        match chain {
            Ok(chain) => found.chain(&chain, hidden_size, vocabulary.is_some()),
            Err(_) if is_alone => {} // a cross-encoder, which has no pooling
            Err(_) if modules::has_logit_score(files) => {
                found.modules = vec!["LogitScore".to_string()];
                let score = modules::logit_score(files);
                let runs = score.and_then(|score| found.logit_score(&transformer, score));
                found.problems.extend(runs.err().map(|error| error.to_string()));
            }
            Err(error) if is_chain => found.problems.push(error.to_string()),
            Err(_) => {
                let _ = found.logit_score(&transformer, None); // not every model is a reranker
            }
        }
        found
    }

    /// Inspects a causal language model as a reranker; without `score`, one without `modules.json`.
    fn logit_score(&mut self, files: &ModelFolder, score: Option<LogitScore>) -> Result<()> {
        if !self.runs_as.contains(&"EncoderModel") {
            return Ok(()); // the problems are listed already
        }
        let (json, has_modules) = (files.config()?, score.is_some());
        let config = ModelConfig::read(&json)?;
        let loader = if has_modules { Loader::LogitScore } else { Loader::Transformers };
        let tokenizer = || TextTokenizer::for_loader(files, &config, loader);
        let (score, tokenizer) = match score {
            Some(score) => (score, tokenizer()?),
            None => match LogitScore::of_causal_model(files, tokenizer)? {
                Some(found) => found,
                None => return Ok(()),
            },
        };
        score.check(config.encoder.vocab_size)?;
        EncoderForLogitScore::check_causal(&config, &json)?;
        let template = ChatTemplate::of_pairs(files, loader, has_modules, &tokenizer)?;
        template.map_or(Ok(()), |template| template.check())?;
        let weights = Arc::new(WeightFiles::open(files)?);
        let naming = Naming::detect(config.names(), &weights.names(), weights.path())?;
        let checkpoint = Checkpoint::without_data(weights);
        let weights = checkpoint.model(naming.clone(), DType::F32, &Device::Cpu);
        let (yes, no) = (score.true_token_id, score.false_token_id);
        let model = EncoderForLogitScore::new(&config, yes, no, weights);
        let report = checkpoint.report(&[naming]);
        match model {
            Err(error) if report.has_all() => Err(error),
            _ if !report.is_complete() => Err(CheckpointError::Tensors(Box::new(report)).into()),
            _ => {
                self.runs_as.push("EncoderForLogitScore");
                Ok(())
            }
        }
    }

    /// Whether a type of this crate can run the model, and there are no problems.
    pub fn runs(&self) -> bool {
        !self.runs_as.is_empty() && self.problems.is_empty()
    }

    /// Inspects config and weights. Returns the hidden size if the model is an encoder.
    fn model(&mut self, files: &ModelFolder) -> Result<Option<usize>> {
        check_no_adapter(files)?;
        let weights = Arc::new(WeightFiles::open(files)?);
        self.tensors(&weights);
        let names = weights.names();
        let json = files.config()?;
        let keys: ArchitectureKeys = json.to()?;
        let (mut encoder, mut with_heads) = (None, vec![]);
        let checkpoint = Checkpoint::without_data(weights.clone());
        let model = |naming| checkpoint.model(naming, DType::F32, &Device::Cpu);
        let (namings, build_error, architecture, runs_as) = if keys.is_encoder_decoder() {
            let config = EncoderDecoderConfig::read(&json)?;
            let namings = Naming::encoder_decoder(&bert::NAMES, &names, config.tie_encoder_decoder);
            let [encoder, decoder] = namings.clone().map(model);
            let error = EncoderDecoder::new(&config, encoder, decoder).err();
            (namings.to_vec(), error, "BERT encoder-decoder".to_string(), "EncoderDecoder")
        } else {
            if keys.is_decoder() && matches!(keys.model_type.as_deref(), None | Some("bert")) {
                let config = ModelConfig::from(&BertConfig::read(&json)?);
                let naming = Naming::detect(&[bert::NAMES], &names, weights.path())?.of_decoder();
                let error = CausalLm::new(&config, model(naming.clone())).err();
                (vec![naming], error, "BERT decoder".to_string(), "CausalLm")
            } else {
                let config = ModelConfig::read(&json)?;
                let naming = Naming::detect(config.names(), &names, weights.path())?;
                let weights = model(naming.clone());
                let error = EncoderModel::new(&config.encoder, has_pooler(&weights), weights).err();
                let kind = if config.encoder.causal { "decoder" } else { "encoder" };
                let name = config.architecture();
                let architecture =
                    if name.ends_with(kind) { name.to_string() } else { format!("{name} {kind}") };
                encoder = Some(config);
                (vec![naming], error, architecture, "EncoderModel")
            }
        };
        let naming = &namings[0];
        self.architecture = Some(architecture);
        self.prefix = Some(naming.prefix.clone());
        self.layer_norm_names = Some(naming.layer_norm_names());
        let has = |name: &str| {
            namings.iter().any(|naming| names.contains(&naming.checkpoint_name(name).0.as_str()))
        };
        let report = checkpoint.report(&namings);
        let problems = report.problems();
        let has_only_encoder_problems =
            |report: &LoadReport| report.problems().iter().all(|p| problems.contains(p));
        let mut absent_heads = vec![];
        if let Some(config) = &encoder {
            let labels = || Labels::read(&json);
            let (mut results, mut other_heads) = (vec![], vec![]);
            for (class, head, build) in MODELS_WITH_HEAD {
                let checkpoint = Checkpoint::without_data(weights.clone());
                let weights = checkpoint.model(naming.clone(), DType::F32, &Device::Cpu);
                let is_causal_lm = class == "CausalLm";
                let is_lm = is_causal_lm || class == "EncoderForMaskedLm";
                let is_causal = config.encoder.causal;
                let is_other_lm = is_lm && is_causal_lm != is_causal;
                let is_other_form = head == LM_MATRIX && !is_causal && config.heads.lm_transform;
                if is_other_lm || is_other_form {
                    continue;
                }
                // The matrix of a language model may be the word embeddings.
                let is_tied_lm = is_causal_lm && keys.names_causal_lm();
                if !keys.architectures_allow(class) {
                    other_heads.push(head);
                } else if weights.contains_tensor(head) || is_tied_lm {
                    let result = build(config, &labels, weights);
                    let report = checkpoint.report(std::slice::from_ref(naming));
                    results.push((class, head, result, report));
                }
            }
            let fitting = results.iter().filter(|(_, _, result, report)| {
                result.is_ok() && has_only_encoder_problems(report)
            });
            let used: Vec<String> =
                fitting.flat_map(|(_, _, _, report)| report.loaded.clone()).collect();
            let is_used = |head: &str| used.contains(&naming.checkpoint_name(head).0);
            absent_heads.extend(other_heads.into_iter().filter(|head| is_used(head)));
            for (class, head, result, report) in results {
                match result {
                    Ok(()) if report.is_complete() => with_heads.push(class),
                    // The problems of the encoder are listed once, below.
                    Ok(()) if has_only_encoder_problems(&report) => {}
                    // The tensor belongs to another head of the checkpoint.
                    _ if is_used(head) => absent_heads.push(head),
                    Err(error) => self.problems.push(format!("{class}: {error}")),
                    Ok(()) => self.problems.push(format!("{class}: {report}")),
                }
            }
        }
        let is_matrix = encoder.as_ref().is_some_and(|config| !config.heads.lm_transform);
        let heads = HEADS.iter().filter(|(name, _)| {
            has(name) && !absent_heads.contains(name) && (*name != LM_MATRIX || is_matrix)
        });
        self.heads.extend(heads.map(|(_, head)| head));
        self.heads.dedup();
        match build_error {
            // A failed build does not request all of its tensors, so the report lists the others as
            // unexpected.
            Some(error) if report.has_all() => self.problems.push(error.to_string()),
            None if report.is_complete() => {
                self.runs_as.extend(std::iter::once(runs_as).chain(with_heads));
            }
            _ => self.problems.extend(problems),
        }
        self.report = Some(report);
        if let Some(config) = &encoder
            && self.tokenizer.is_some()
        {
            let tokenizer = TextTokenizer::for_loader(files, config, Loader::Transformers);
            let tokenizer = tokenizer.map_err(|error| self.problems.push(error.to_string()));
            self.tokenizer = tokenizer.ok().and_then(|tokenizer| tokenizer.vocabulary_file());
        }
        Ok(encoder.map(|config| config.encoder.hidden_size))
    }

    /// Counts the tensors of each dtype, and their values.
    fn tensors(&mut self, weights: &WeightFiles) {
        self.weights = Some(weights.path().to_string());
        for name in weights.names() {
            let info = weights.info(name).expect("a name from weights.names()");
            *self.dtypes.entry(format!("{:?}", info.dtype).to_lowercase()).or_default() += 1;
            self.parameters += info.shape.iter().product::<usize>();
        }
    }

    /// Inspects a StaticEmbedding and the modules after it.
    fn static_embedding(&mut self, chain: &Chain) -> Result<()> {
        let weights = WeightFiles::open(&chain.first)?;
        self.tensors(&weights);
        self.architecture = Some("static embedding".to_string());
        self.modules = chain.describe();
        let (width, report) = StaticEmbedding::inspect(&weights)?;
        self.prefix = Some(String::new());
        self.report = Some(report);
        let tokenizer = TextTokenizer::for_static(&chain.first, chain.static_rules()?)?;
        self.tokenizer = tokenizer.vocabulary_file();
        chain.modules(width, Read::Header, &Device::Cpu)?;
        self.runs_as.push("Embedder");
        Ok(())
    }

    /// Inspects the modules of a sentence-transformers folder.
    fn chain(&mut self, chain: &Chain, hidden_size: Option<usize>, has_vocabulary: bool) {
        self.modules = chain.describe();
        if !has_vocabulary {
            let expected = VOCABULARIES.join(", ");
            self.problems.push(format!("no tokenizer: expected one of {expected}"));
        }
        let width = hidden_size.zip(chain.pooling.as_ref());
        let width = width.map(|(width, pooling)| pooling.dimension(width));
        let modules = width.map(|width| chain.modules(width, Read::Header, &Device::Cpu));
        match modules {
            Some(Err(error)) => self.problems.push(error.to_string()),
            _ if self.tokenizer.is_some() && self.runs_as.contains(&"EncoderModel") => {
                self.runs_as.push("Embedder");
            }
            _ => {}
        }
    }
}

/// One line per field, then one per problem.
impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = || "none".to_string();
        let listed = |names: &[&str]| if names.is_empty() { none() } else { names.join(", ") };
        let dtypes: Vec<String> =
            self.dtypes.iter().map(|(dtype, n)| format!("{n} of {dtype}")).collect();
        let prefix = match self.prefix.as_deref() {
            Some("") => "none".to_string(),
            Some(prefix) => format!("{prefix:?}"),
            None => "unknown".to_string(),
        };
        let modules: Vec<&str> = self.modules.iter().map(String::as_str).collect();
        let ignored = self.report.as_ref().map_or(0, |report| report.ignored.len());
        let rows = [
            ("weights", self.weights.clone().unwrap_or_else(none)),
            ("tensors", format!("{}; {} values", dtypes.join(", "), self.parameters)),
            ("architecture", self.architecture.clone().unwrap_or_else(|| "unknown".to_string())),
            ("prefix", prefix),
            ("layer norm", self.layer_norm_names.unwrap_or("unknown").to_string()),
            ("heads", listed(&self.heads)),
            ("ignored", format!("{ignored} tensors")),
            ("tokenizer", self.tokenizer.map_or_else(none, str::to_string)),
            ("modules", listed(&modules)),
            ("runs as", listed(&self.runs_as)),
        ];
        for (name, value) in rows {
            writeln!(f, "{name:<12} {value}")?;
        }
        for problem in &self.problems {
            writeln!(f, "{:<12} {problem}", "problem")?;
        }
        Ok(())
    }
}
