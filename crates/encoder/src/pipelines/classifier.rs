//! Texts and pairs of texts to labels and scores: tokenize, encode, classify.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    BertForSequenceClassification, Error, Labels, LoadReport, ModelFiles, PackedBatch, Precision,
    Prompt, Result, TextTokenizer, Tokens,
    error::beginning,
    load::parse_json,
    pipelines::dense::TorchActivation,
    pipelines::modules,
    pipelines::with_tokenizer::with_tokenizer,
    text::prompts::{Prompts, loader},
    text::sentence_config::Loader,
    text::tokenizer_config,
};

/// Texts computed at a time.
const TEXTS_AT_ONCE: usize = 64;

/// A sequence classifier and its tokenizer: labels of texts, or how well documents fit a query.
///
/// # Source
/// `TextClassificationPipeline` of Hugging Face transformers, `CrossEncoder` of
/// sentence-transformers.
#[derive(Clone)]
pub struct TextClassifier {
    model: BertForSequenceClassification,
    tokenizer: TextTokenizer,
    report: LoadReport,
    classify: Apply,
    rerank: TorchActivation,
    prompts: Prompts,
    /// A file with a chat template that a cross-encoder would put pairs into.
    chat_template: Option<String>,
}

/// What makes scores of a classifier's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Apply {
    Nothing,
    Sigmoid,
    Softmax,
}

/// The keys of `config.json` that tell it.
#[derive(Deserialize)]
struct ScoreConfig {
    problem_type: Option<String>,
    /// Settings that sentence-transformers 4 and 5 store here; [`ACTIVATION`] is read.
    sentence_transformers: Option<Map<String, Value>>,
    sbert_ce_default_activation_function: Option<String>,
}

const ACTIVATION: &str = "activation_fn";

impl TextClassifier {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// Those of [`BertForSequenceClassification::from_dir`] and [`TextTokenizer::from_files`];
    /// scores that are made in a way that is not computed here.
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        const CONFIG: &str = "config.json";
        // Settings of a cross-encoder count only where the folder says that it is one.
        let loader = match loader(files)? {
            Loader::CrossEncoder => Loader::CrossEncoder,
            _ => Loader::Transformers,
        };
        let prompts = match loader {
            Loader::CrossEncoder => {
                modules::check_cross_encoder(files)?;
                Prompts::of_cross_encoder(files)?
            }
            _ => Prompts::default(),
        };
        let chat_template = tokenizer_config::chat_template(files)?;
        let files = &modules::transformer(files)?;
        let load = || BertForSequenceClassification::from_files(files, precision, device);
        let ((model, report), tokenizer) = with_tokenizer(files, loader, load)?;
        let path = files.path(CONFIG);
        let config: ScoreConfig = parse_json(&files.need(CONFIG, "the model's sizes")?, &path)?;
        let one = model.labels().names().len() == 1;
        let classify = match config.problem_type.as_deref() {
            Some("regression") => Apply::Nothing,
            Some("multi_label_classification") => Apply::Sigmoid,
            None | Some("single_label_classification") if one => Apply::Sigmoid,
            None | Some("single_label_classification") => Apply::Softmax,
            Some(got) => {
                let expected = "regression, single_label_classification or \
                                multi_label_classification";
                let (key, got) = ("problem_type", got.to_string());
                return Err(Error::Unsupported { path, key, expected, got });
            }
        };
        // An activation_fn of null in config.json means the default, whatever the older key says.
        let own = match config.sentence_transformers.as_ref().and_then(|own| own.get(ACTIVATION)) {
            Some(class) => class.as_str().map(String::from),
            None => config.sbert_ce_default_activation_function,
        };
        let own = prompts.activation_fn.clone().or(own);
        let rerank = match own {
            Some(class) => TorchActivation::of_class(&class, &path, "activation_fn")?,
            None => TorchActivation::Sigmoid,
        };
        Ok(Self { model, tokenizer, report, classify, rerank, prompts, chat_template })
    }

    /// The tokenizer of its texts.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// Names of the prompts that [`Prompt::Named`] may ask for when documents are ranked.
    pub fn prompt_names(&self) -> impl Iterator<Item = &str> {
        self.prompts.names()
    }

    /// What [`Self::classify`]'s scores are of.
    pub fn labels(&self) -> &Labels {
        self.model.labels()
    }

    /// What was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The score of each label for each text, in the order of the labels: probabilities that add up
    /// to 1, or one for each label where several may hold or there is only one, or the bare
    /// outputs of a regression. A text that is too long is truncated.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`] and [`Self::classify_tokens`].
    pub fn classify<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<f32>>> {
        self.classify_tokens(&self.tokenize(texts)?)
    }

    /// The tokens of each text, truncated to the model's longest sequence.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::encode`]; [`Error::NoTokens`] for a text without tokens.
    pub fn tokenize<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Tokens>> {
        with_tokens(self.tokenizer.encode(texts)?, texts)
    }

    /// [`Self::classify`] of the tokens of texts, each of one token at least.
    ///
    /// # Errors
    /// [`Error::EmptySequence`] for a text without tokens; [`Error::NoScore`] for scores that are NaN
    /// or infinite.
    pub fn classify_tokens(&self, texts: &[Tokens]) -> Result<Vec<Vec<f32>>> {
        let scores = self.logits(texts)?.into_iter().map(|logits| self.classify.to(logits));
        Ok(scores.collect())
    }

    /// How well each document fits the query: the score of a model with one label, through the
    /// activation that its config names, or else the sigmoid. The model's default prompt precedes
    /// the query. If a pair is too long, the longer text is truncated.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize_pairs`] and [`Self::rank_tokens`].
    pub fn rerank<S: AsRef<str>>(&self, query: &str, documents: &[S]) -> Result<Vec<f32>> {
        self.rank_tokens(&self.tokenize_pairs(query, documents, Prompt::Default)?)
    }

    /// The tokens of the query, after a prompt, and each document.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::encode_pairs`]; [`Error::NoPrompt`] for a prompt that the model
    /// does not have; [`Error::NoTokens`] for a pair without tokens; [`Error::Unsupported`] for a model
    /// with a chat template.
    pub fn tokenize_pairs<S: AsRef<str>>(
        &self,
        query: &str,
        documents: &[S],
        prompt: Prompt,
    ) -> Result<Vec<Tokens>> {
        if let Some(path) = &self.chat_template {
            return Err(tokenizer_config::chat_template_unsupported(path));
        }
        let query = format!("{}{query}", self.prompts.text(prompt)?);
        let pairs = documents.iter().map(|document| (query.as_str(), document.as_ref()));
        with_tokens(self.tokenizer.encode_pairs(&pairs.collect::<Vec<_>>())?, documents)
    }

    /// [`Self::rerank`] of the tokens of pairs, each of one token at least.
    ///
    /// # Errors
    /// [`Error::Value`] for a model of several labels; [`Error::EmptySequence`] for a pair without
    /// tokens; [`Error::NoScore`] for scores that are NaN or infinite.
    pub fn rank_tokens(&self, pairs: &[Tokens]) -> Result<Vec<f32>> {
        let labels = self.labels().names().len();
        if labels != 1 {
            let (field, expected) = ("number of labels", "1, for a model that ranks");
            return Err(Error::Value { field, expected, got: labels as f64 });
        }
        let logits = Tensor::from_vec(self.logits(pairs)?.concat(), pairs.len(), &Device::Cpu)?;
        Ok(self.rerank.forward(&logits)?.to_vec1()?)
    }

    /// The logits of each sequence.
    fn logits(&self, sequences: &[Tokens]) -> Result<Vec<Vec<f32>>> {
        let mut logits = Vec::with_capacity(sequences.len());
        for sequences in sequences.chunks(TEXTS_AT_ONCE) {
            let scores =
                self.model.forward_packed(&PackedBatch::of(sequences)?)?.to_dtype(DType::F32)?;
            logits.extend(scores.to_vec2::<f32>()?);
        }
        match logits.iter().flatten().all(|score| score.is_finite()) {
            true => Ok(logits),
            false => Err(Error::NoScore),
        }
    }
}

/// The tokens of texts, each of which has some.
fn with_tokens<S: AsRef<str>>(tokens: Vec<Tokens>, texts: &[S]) -> Result<Vec<Tokens>> {
    match tokens.iter().position(|tokens| tokens.input_ids.is_empty()) {
        Some(empty) => Err(Error::NoTokens { text: beginning(texts[empty].as_ref()) }),
        None => Ok(tokens),
    }
}

impl Apply {
    fn to(self, mut logits: Vec<f32>) -> Vec<f32> {
        match self {
            Self::Nothing => {}
            Self::Sigmoid => logits.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
            Self::Softmax => {
                let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                logits.iter_mut().for_each(|x| *x = (*x - most).exp());
                let sum: f32 = logits.iter().sum();
                logits.iter_mut().for_each(|x| *x /= sum);
            }
        }
        logits
    }
}
