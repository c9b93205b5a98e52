//! What a folder holds and whether it can be run, from its headers alone.

use std::{collections::BTreeMap, fmt, sync::Arc};

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

use crate::{
    BertConfig, BertDecoder, BertForMaskedLm, BertForNextSentencePrediction,
    BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification, BertModel,
    EncoderDecoder, EncoderDecoderConfig, Labels, ModelFiles, Result,
    load::{CONFIG, Checkpoint, LoadReport, Naming, Read, Weights, config_json, parse_json},
    models::bert::has_pooler,
    models::labels::ReadLabels,
    pipelines::modules::{self, Chain},
};

/// What [`inspect`](Self::new) finds in a folder.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Inspection {
    /// The weights' file, or the index of its shards.
    pub weights: Option<String>,
    /// `encoder`, `decoder` or `encoder-decoder`.
    pub family: Option<&'static str>,
    /// What stands before the model's names.
    pub prefix: Option<String>,
    /// What the parameters of layer normalisation are called.
    pub layer_norm_names: Option<&'static str>,
    /// Number of tensors of each dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// Values in all tensors.
    pub parameters: usize,
    /// The heads whose tensors are there.
    pub heads: Vec<&'static str>,
    /// Where the tokenizer is from.
    pub tokenizer: Option<&'static str>,
    /// What a sentence-transformers folder does after the transformer.
    pub modules: Vec<String>,
    /// What of the checkpoint the model takes, and what does not fit.
    pub report: Option<LoadReport>,
    /// The types of this crate that run it.
    pub runs_as: Vec<&'static str>,
    /// Why it cannot be run, or not as all that it says it is.
    pub problems: Vec<String>,
}

/// The keys that tell a model's family.
#[derive(Deserialize)]
pub(crate) struct Family {
    model_type: Option<String>,
    is_decoder: Option<bool>,
    architectures: Option<Vec<String>>,
}

impl Family {
    pub(crate) fn is_encoder_decoder(&self) -> bool {
        self.model_type.as_deref() == Some("encoder-decoder")
    }

    pub(crate) fn is_decoder(&self) -> bool {
        self.is_decoder == Some(true)
    }

    /// Whether the config says that a class like this was saved, or does not say.
    fn may_be(&self, class: &str) -> bool {
        let saved = self.architectures.as_deref().unwrap_or_default();
        let classifiers = ["BertForSequenceClassification", "BertForTokenClassification"];
        !saved.iter().any(|saved| classifiers.contains(&saved.as_str()) && saved != class)
    }
}

/// What of this crate's names tells of a head, and what it is.
const HEADS_FOUND: [(&str, &str); 6] = [
    ("pooler.weight", "pooler"),
    ("lm_head.transform.weight", "masked language model"),
    ("next_sentence.weight", "next sentence"),
    ("classifier.weight", "classification"),
    ("qa_outputs.weight", "question answering"),
    ("memory_projection.weight", "projection of the memory"),
];

type WithHead = fn(&BertConfig, &ReadLabels, VarBuilder) -> Result<()>;

/// The models with a head, the head's tensors in this crate's names, and how they are built.
const WITH_HEAD: [(&str, &str, WithHead); 5] = [
    ("BertForMaskedLm", "lm_head.transform.weight", |config, _, vb| {
        BertForMaskedLm::new(config, vb).map(|_| ())
    }),
    ("BertForNextSentencePrediction", "next_sentence.weight", |config, _, vb| {
        BertForNextSentencePrediction::new(config, vb).map(|_| ())
    }),
    ("BertForSequenceClassification", "classifier.weight", |config, labels, vb| {
        BertForSequenceClassification::new(config, &labels()?, vb).map(|_| ())
    }),
    ("BertForTokenClassification", "classifier.weight", |config, labels, vb| {
        BertForTokenClassification::new(config, &labels()?, vb).map(|_| ())
    }),
    ("BertForQuestionAnswering", "qa_outputs.weight", |config, _, vb| {
        BertForQuestionAnswering::new(config, vb).map(|_| ())
    }),
];

impl Inspection {
    /// Reads the headers of a model's files, which are fetched whole if they are the hub's; what is
    /// wrong with them is told in `problems`.
    ///
    /// # Examples
    /// ```
    /// use encoder::{Inspection, ModelFiles};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let found = Inspection::new(&ModelFiles::dir("weights/all-MiniLM-L6-v2")?);
    /// assert_eq!((found.family, found.parameters), (Some("encoder"), 22_713_216));
    /// assert_eq!(found.runs_as, ["BertModel", "Embedder"]);
    /// assert!(found.problems.is_empty());
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn new(files: &ModelFiles) -> Self {
        let mut found = Self::default();
        let chain = Chain::from_files(files);
        let transformer = modules::transformer(files).unwrap_or_else(|_| files.clone());
        let is_alone = modules::is_transformer_alone(files).unwrap_or(false);
        let mut has = |files: &ModelFiles, file: &str| {
            files.has(file).unwrap_or_else(|error| {
                found.problems.push(error.to_string());
                false
            })
        };
        let tokenizers = ["tokenizer.json", "vocab.txt"];
        let tokenizer = tokenizers.into_iter().find(|file| has(&transformer, file));
        let is_chain = chain.is_ok() || has(files, "modules.json");
        found.tokenizer = tokenizer;
        let hidden_size = match found.model(&transformer) {
            Ok(hidden_size) => hidden_size,
            Err(error) => {
                found.problems.push(error.to_string());
                None
            }
        };
        match chain {
            Ok(chain) => found.chain(&chain, hidden_size),
            Err(_) if is_alone => {} // a cross-encoder, which pools nothing
            Err(error) if is_chain => found.problems.push(error.to_string()),
            Err(_) => {}
        }
        found
    }

    /// Whether something in this crate runs it.
    pub fn runs(&self) -> bool {
        !self.runs_as.is_empty() && self.problems.is_empty()
    }

    /// Of an encoder its width.
    fn model(&mut self, files: &ModelFiles) -> Result<Option<usize>> {
        let weights = Arc::new(Weights::open(files)?);
        self.weights = Some(weights.path().to_string());
        let names = weights.names();
        for name in &names {
            let info = weights.info(name).expect("a tensor's own name");
            *self.dtypes.entry(format!("{:?}", info.dtype).to_lowercase()).or_default() += 1;
            self.parameters += info.shape.iter().product::<usize>();
        }
        let json = config_json(files)?;
        let path = files.path(CONFIG);
        let keys: Family = parse_json(&json, &path)?;
        let (mut encoder, mut with_heads) = (None, vec![]);
        let checkpoint = Checkpoint::without_data(weights.clone());
        // Weights of f16 are not packed for the CPU, so that nothing takes memory.
        let vb = |naming| checkpoint.model(naming, DType::F16, &Device::Cpu);
        let (namings, built, family, runs_as) = if keys.is_encoder_decoder() {
            let config = EncoderDecoderConfig::from_json(&json, &path)?;
            let namings = Naming::encoder_decoder(&names, config.tie_encoder_decoder);
            let [encoder, decoder] = namings.map(vb);
            let built = EncoderDecoder::new(&config, encoder, decoder).err();
            (namings.to_vec(), built, "encoder-decoder", "EncoderDecoder")
        } else {
            let config = BertConfig::from_json(&json, &path)?;
            let naming = Naming::detect(&names, weights.path())?;
            match keys.is_decoder() {
                true => {
                    let naming = naming.of_decoder();
                    let built = BertDecoder::new(&config, vb(naming)).err();
                    (vec![naming], built, "decoder", "BertDecoder")
                }
                false => {
                    let vb = vb(naming);
                    let built = BertModel::new(&config, has_pooler(&vb), vb).err();
                    encoder = Some(config);
                    (vec![naming], built, "encoder", "BertModel")
                }
            }
        };
        let naming = namings[0];
        self.family = Some(family);
        self.prefix = Some(naming.prefix.to_string());
        self.layer_norm_names = Some(naming.layer_norm_names());
        let has = |name: &str| {
            namings.iter().any(|naming| names.contains(&naming.spell(name).0.as_str()))
        };
        let heads = HEADS_FOUND.iter().filter(|(name, _)| has(name));
        self.heads.extend(heads.map(|(_, head)| head));
        if let Some(config) = &encoder {
            let labels = || Labels::from_json(&json, &path);
            for (class, head, build) in WITH_HEAD {
                let checkpoint = Checkpoint::without_data(weights.clone());
                let vb = checkpoint.model(naming, DType::F16, &Device::Cpu);
                if keys.may_be(class) && vb.contains_tensor(head) {
                    match (build(config, &labels, vb), checkpoint.report(&[naming])) {
                        (Err(error), _) => self.problems.push(format!("{class}: {error}")),
                        (Ok(()), report) if report.is_complete() => with_heads.push(class),
                        (Ok(()), report) => self.problems.push(format!("{class}: {report}")),
                    }
                }
            }
        }
        let report = checkpoint.report(&namings);
        match (report.is_complete(), built) {
            (true, None) => self.runs_as.extend(std::iter::once(runs_as).chain(with_heads)),
            (true, Some(error)) => self.problems.push(error.to_string()),
            (false, _) => self.problems.extend(report.problems()),
        }
        self.report = Some(report);
        Ok(encoder.map(|config| config.hidden_size))
    }

    fn chain(&mut self, chain: &Chain, hidden_size: Option<usize>) {
        self.modules = chain.describe();
        if self.tokenizer.is_none() {
            self.problems.push("no tokenizer.json or vocab.txt: expected one of them".to_string());
        }
        let width = hidden_size.map(|width| chain.pooling.dimension(width));
        let modules = width.map(|width| chain.modules(width, Read::Header, &Device::Cpu));
        match modules {
            Some(Err(error)) => self.problems.push(error.to_string()),
            _ if self.tokenizer.is_some() && self.runs_as.contains(&"BertModel") => {
                self.runs_as.push("Embedder");
            }
            _ => {}
        }
    }
}

/// For a person to read.
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
            ("family", self.family.map_or_else(|| "unknown".to_string(), str::to_string)),
            ("prefix", prefix),
            ("layer norm", self.layer_norm_names.unwrap_or("unknown").to_string()),
            ("heads", listed(&self.heads)),
            ("ignored", format!("{ignored} tensors")),
            ("tokenizer", self.tokenizer.map_or_else(none, str::to_string)),
            ("modules", listed(&modules)),
            ("runs as", listed(&self.runs_as)),
        ];
        for (name, value) in rows {
            writeln!(f, "{name:<11} {value}")?;
        }
        for problem in &self.problems {
            writeln!(f, "{:<11} {problem}", "problem")?;
        }
        Ok(())
    }
}
