//! Texts and pairs of texts to labels and scores: tokenize, encode, classify.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use crate::{
    BertForSequenceClassification, Error, Labels, LoadReport, ModelFiles, PackedBatch, Precision,
    Result, TextTokenizer, Tokens,
    dense::TorchActivation,
    error::beginning,
    load::{parse_json, with_tokenizer},
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
    sentence_transformers: Option<CrossEncoderConfig>,
    sbert_ce_default_activation_function: Option<String>,
}

/// Also of `config_sentence_transformers.json`.
#[derive(Default, Deserialize)]
struct CrossEncoderConfig {
    activation_fn: Option<String>,
}

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
        let load = || BertForSequenceClassification::from_files(files, precision, device);
        let ((model, report), tokenizer) = with_tokenizer(files, load)?;
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
        let file: CrossEncoderConfig =
            files.json("config_sentence_transformers.json")?.unwrap_or_default();
        let own = config.sentence_transformers.and_then(|own| own.activation_fn);
        let own = file.activation_fn.or(own).or(config.sbert_ce_default_activation_function);
        let rerank = match own {
            Some(class) => TorchActivation::of_class(&class, &path, "activation_fn")?,
            None => TorchActivation::Sigmoid,
        };
        Ok(Self { model, tokenizer, report, classify, rerank })
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
    /// outputs of a regression. A text that is too long is cut.
    ///
    /// # Errors
    /// as [`TextTokenizer::encode`].
    pub fn classify<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<f32>>> {
        let logits = self.logits(&self.tokenizer.encode(texts)?, texts)?;
        let scores = logits.into_iter().map(|logits| self.classify.to(logits));
        Ok(scores.collect())
    }

    /// How well each document fits the query: the score of a model with one label, through the
    /// activation that its config names, or else the sigmoid. Pairs that are too long lose the end
    /// of the longer text.
    ///
    /// # Errors
    /// as [`TextTokenizer::encode_pairs`]; [`Error::Value`] for a model of several labels.
    pub fn rerank<S: AsRef<str>>(&self, query: &str, documents: &[S]) -> Result<Vec<f32>> {
        let labels = self.labels().names().len();
        if labels != 1 {
            let (field, expected) = ("number of labels", "1, for a model that ranks");
            return Err(Error::Value { field, expected, got: labels as f64 });
        }
        let pairs: Vec<_> = documents.iter().map(|document| (query, document.as_ref())).collect();
        let logits = self.logits(&self.tokenizer.encode_pairs(&pairs)?, documents)?;
        let logits = Tensor::from_vec(logits.concat(), documents.len(), &Device::Cpu)?;
        Ok(self.rerank.forward(&logits)?.to_vec1()?)
    }

    /// Of each sequence; the texts are for errors.
    fn logits<S: AsRef<str>>(&self, sequences: &[Tokens], texts: &[S]) -> Result<Vec<Vec<f32>>> {
        if let Some(empty) = sequences.iter().position(|tokens| tokens.input_ids.is_empty()) {
            return Err(Error::NoTokens { text: beginning(texts[empty].as_ref()) });
        }
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
