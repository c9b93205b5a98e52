//! From texts or pairs of texts to scores of labels: tokenize, encode, classify.

use std::{borrow::Cow, path::Path};

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{
    dense::TorchActivation,
    inspect::check_classifier,
    modules::{self, LogitScore},
    task::{Example, Pipeline, TaskSize, TokenizedText, in_parts, parameters},
    with_tokenizer::with_tokenizer,
};
use crate::{
    Activation, ConfigError, EncoderForLogitScore, EncoderForSequenceClassification, EncoderModel,
    Error, InputError, Labels, LoadOptions, LoadReport, ModelConfig, ModelFiles, Prompt,
    RaggedBatch, Result, TextTokenizer, Tokens, TruncationSide,
    error::beginning,
    load::ModelFolder,
    text::chat_template::ChatTemplate,
    text::prompts::{self, Prompts, loader},
    text::sentence_config::Loader,
    text::tokenizer::Count,
};

/// A sequence classifier and its tokenizer, for labels of texts or the relevance of documents to a
/// query. A causal language model can take the place of the classifier, for the relevance of
/// documents ([`EncoderForLogitScore`]).
///
/// # Source
/// `TextClassificationPipeline` of Hugging Face transformers, `CrossEncoder` of
/// sentence-transformers.
///
/// # Examples
/// A small model with random weights. The expected values are those of
/// transformers:
/// ```
/// use encoder::{LoadOptions, TextClassifier};
///
/// let dir = "../../tests/golden/heads/sequence";
/// let model = TextClassifier::from_dir(dir, &LoadOptions::default())?;
/// let scores = model.classify(&["a cab", "Café x"])?;
/// assert_eq!(model.labels().names(), ["LABEL_0", "LABEL_1", "LABEL_2"]);
/// assert!((scores[0].iter().sum::<f32>() - 1.).abs() < 1e-6); // softmax
/// assert!((scores[1][2] - 0.63366).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextClassifier {
    model: Model,
    tokenizer: TextTokenizer,
    report: LoadReport,
    classify_activation: LogitActivation,
    /// The activation that the model's files name.
    rerank_activation: Option<TorchActivation>,
    prompts: Prompts,
    /// Renders each pair, if there is one.
    chat_template: Option<ChatTemplate>,
}

/// A model from tokens to logits.
#[derive(Clone, Debug)]
enum Model {
    Sequence(EncoderForSequenceClassification),
    /// A causal language model, whose score is the only logit.
    LogitScore(EncoderForLogitScore),
}

/// The labels of a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Classified {
    /// The label with the highest score. A name that several labels share is followed by the
    /// label's id.
    pub label: String,
    /// The score of the label.
    pub score: f32,
    /// The score of each label, in the order of the labels; serialised as a map.
    #[serde(serialize_with = "as_map")]
    #[cfg_attr(
        feature = "openapi",
        schema(value_type = std::collections::BTreeMap<String, f32>)
    )]
    pub scores: Vec<(String, f32)>,
}

/// Serialises pairs as a map in their order.
fn as_map<S: Serializer>(scores: &[(String, f32)], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_map(scores.iter().map(|(label, score)| (label, score)))
}

parameters! {
    /// The parameters of [`TextClassifier`]: none.
    #[derive(Default)]
    pub struct TextClassifierParams {}
}

/// The function from a classifier's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitActivation {
    /// The logits are the scores.
    Identity,
    /// `1 / (1 + exp(−x))` of each logit.
    Sigmoid,
    /// `exp(xᵢ) / Σⱼ exp(xⱼ)` over the labels.
    Softmax,
}

/// The keys of `config.json` that select the activations.
#[derive(Deserialize)]
struct ScoreConfig {
    problem_type: Option<String>,
    /// Settings of sentence-transformers 4 and 5. Only [`ACTIVATION`] is read.
    sentence_transformers: Option<Map<String, Value>>,
    sbert_ce_default_activation_function: Option<String>,
}

const ACTIVATION: &str = "activation_fn";

impl TextClassifier {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForSequenceClassification::from_dir`] or, for a cross-encoder that is
    /// a causal language model, [`EncoderForLogitScore::from_dir`]; those of
    /// [`TextTokenizer::from_files`]; [`ConfigError::Unsupported`] if `architectures` in the config
    /// names another classifier, for a `problem_type`, an activation or modules of a cross-encoder
    /// that are not implemented, or if a cross-encoder does not have its default prompt;
    /// [`ConfigError::ChatTemplate`] for a causal language model whose chat template cannot render
    /// a query and a document.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &ModelFolder::new(files);
        // A folder that is not marked as a cross-encoder is loaded as transformers would load it.
        let (loader, prompts, score) = match loader(files)? {
            Loader::CrossEncoder => {
                let score = modules::logit_score(files)?;
                let loader = score.as_ref().map_or(Loader::CrossEncoder, |_| Loader::LogitScore);
                (loader, Prompts::of_cross_encoder(files)?, score)
            }
            _ => (Loader::Transformers, Prompts::default(), None),
        };
        let has_modules = files.has("modules.json")?;
        let prompts_path = files.path(prompts::FILE);
        let files = &modules::transformer(files)?;
        let json = files.config()?;
        let config = ModelConfig::read(&json)?;
        let tokenizer = || TextTokenizer::for_loader(files, &config, loader);
        let of_model =
            if has_modules { None } else { LogitScore::of_causal_model(files, tokenizer)? };
        let (score, tokenizer) = match of_model {
            Some((score, tokenizer)) => (Some(score), Some(tokenizer)),
            None => (score, None),
        };
        let load = || match &score {
            None => {
                check_classifier(files, "*ForSequenceClassification")?;
                let (model, report) = EncoderForSequenceClassification::load(files, options)?;
                Ok((Model::Sequence(model), report))
            }
            Some(score) => {
                score.check(config.encoder.vocab_size)?;
                let (yes, no) = (score.true_token_id, score.false_token_id);
                let (model, report) = EncoderForLogitScore::load(files, yes, no, options)?;
                Ok((Model::LogitScore(model), report))
            }
        };
        let ((model, report), tokenizer) = match tokenizer {
            Some(tokenizer) => (load()?, tokenizer),
            None => with_tokenizer(files, loader, load)?,
        };
        let chat_template = ChatTemplate::of_pairs(files, loader, has_modules, &tokenizer)?;
        if let (Model::LogitScore(_), Some(template)) = (&model, &chat_template) {
            template.check()?;
        }
        let (config, path): (ScoreConfig, _) = (json.to()?, json.path().to_string());
        let has_one_label = match &model {
            Model::Sequence(model) => model.labels().names().len() == 1,
            Model::LogitScore(_) => true,
        };
        let classify_activation = match config.problem_type.as_deref() {
            Some("regression") => LogitActivation::Identity,
            Some("multi_label_classification") => LogitActivation::Sigmoid,
            None | Some("single_label_classification") if has_one_label => LogitActivation::Sigmoid,
            None | Some("single_label_classification") => LogitActivation::Softmax,
            Some(got) => {
                let expected = "regression, single_label_classification or \
                                multi_label_classification";
                return Err(Error::unsupported(path, "problem_type", expected, got));
            }
        };
        // If activation_fn is null in config.json, the older key is ignored and the default
        // applies.
        let settings = config.sentence_transformers.as_ref();
        let of_config = settings.and_then(|settings| settings.get(ACTIVATION));
        let older = &config.sbert_ce_default_activation_function;
        let class = match (&prompts.activation_fn, of_config, older) {
            (Some(class), _, _) => Some((class.clone(), &prompts_path, "activation_fn")),
            (None, Some(Value::Null), _) | (None, None, None) => None,
            (None, Some(class), _) => {
                let key = "sentence_transformers.activation_fn";
                Some((class.as_str().map_or_else(|| class.to_string(), String::from), &path, key))
            }
            (None, None, Some(class)) => {
                Some((class.clone(), &path, "sbert_ce_default_activation_function"))
            }
        };
        let activation = |(class, path, key): (String, &String, _)| {
            TorchActivation::from_class(&class, path, key)
        };
        let rerank_activation = class.map(activation).transpose()?;
        Ok(Self {
            model,
            tokenizer,
            report,
            classify_activation,
            rerank_activation,
            prompts,
            chat_template,
        })
    }

    /// Sets the side on which long texts are truncated, instead of that of the model's files.
    pub fn with_truncation_side(self, side: TruncationSide) -> Self {
        Self { tokenizer: self.tokenizer.with_truncation_side(side), ..self }
    }

    /// The names that [`Prompt::Named`] accepts in [`Self::tokenize_pairs`].
    pub fn prompt_names(&self) -> impl Iterator<Item = &str> {
        self.prompts.names()
    }

    /// The prompts of the model's files, by name.
    pub fn prompts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.prompts.texts()
    }

    /// The text of a prompt; empty for no prompt.
    ///
    /// # Errors
    /// [`InputError::NoPrompt`] for a name that the model does not have.
    pub fn prompt_text<'a>(&'a self, prompt: Prompt<'a>) -> Result<&'a str> {
        self.prompts.text(prompt)
    }

    /// The name of the prompt that [`Prompt::Default`] selects.
    pub fn default_prompt_name(&self) -> Option<&str> {
        self.prompts.default_prompt_name()
    }

    /// The labels, in the order of the scores of [`Self::classify`].
    pub fn labels(&self) -> &Labels {
        match &self.model {
            Model::Sequence(model) => model.labels(),
            Model::LogitScore(model) => model.labels(),
        }
    }

    /// Sets the maximum length of a text or a pair in tokens, special tokens included.
    ///
    /// # Errors
    /// [`ConfigError::MaxSeqLength`] if the length is larger than
    /// [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens); the error of
    /// [`TextTokenizer::with_max_seq_length`].
    ///
    /// # Examples
    /// ```
    /// use encoder::{LoadOptions, Prompt, TextClassifier};
    ///
    /// let dir = "../../tests/golden/heads/score";
    /// let ranker = TextClassifier::from_dir(dir, &LoadOptions::default())?;
    /// let ranker = ranker.with_max_seq_length(5)?; // [CLS] a [SEP] b [SEP]
    /// let pairs = ranker.tokenize_text_pairs(&[("a", "b c d")], Prompt::None)?;
    /// assert_eq!(pairs[0].input_ids.len(), 5);
    /// assert!(ranker.with_max_seq_length(5000).is_err()); // more than the model's positions
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn with_max_seq_length(self, max_seq_length: usize) -> Result<Self> {
        let max = self.encoder().config().max_tokens();
        Ok(Self {
            tokenizer: self.tokenizer.with_max_seq_length_within(max_seq_length, max)?,
            ..self
        })
    }

    /// The score of each label for each text, in the order of the labels. Texts are truncated to
    /// the model's maximum length.
    ///
    /// `problem_type` of `config.json` selects the scores:
    /// - `single_label_classification`, the default: softmax over the labels; sigmoid if there is
    ///   only one label
    /// - `multi_label_classification`: sigmoid of each logit
    /// - `regression`: the logits
    ///
    /// # Errors
    /// The errors of [`Self::tokenize_texts`] and [`Self::logits`].
    pub fn classify<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<f32>>> {
        Ok(self.label_scores(self.logits(&self.tokenize_texts(texts)?)?))
    }

    /// The tokens of each text, truncated to the model's maximum length.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::encode`]; [`InputError::NoTokens`] for a text without tokens;
    /// [`InputError::OnlyPairs`] for a causal language model, which scores pairs.
    pub fn tokenize_texts<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Tokens>> {
        if let (Model::LogitScore(_), Some(text)) = (&self.model, texts.first()) {
            return Err(InputError::OnlyPairs { text: beginning(text.as_ref()) }.into());
        }
        check_not_empty(self.tokenizer.encode_counting(texts, Count::Kept)?, texts)
    }

    /// The scores of [`Self::classify`], given the logits of each text.
    pub fn label_scores(&self, logits: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        logits.into_iter().map(|logits| self.classify_activation.apply(logits)).collect()
    }

    /// The relevance of each document to the query, for a model with one label: the label's logit
    /// after the activation that the model's files name, by default the sigmoid. The model's
    /// default prompt is prepended to the query, or is the system message of a chat template. If a
    /// pair is too long, its longer text is truncated; a text from a chat template is truncated as
    /// a whole.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize_pairs`] and [`Self::rank_tokens`].
    pub fn rerank<S: AsRef<str>>(&self, query: &str, documents: &[S]) -> Result<Vec<f32>> {
        self.rank_tokens(&self.tokenize_pairs(query, documents, Prompt::Default)?)
    }

    /// The tokens of each pair of query and document. The prompt is prepended to the query; a chat
    /// template renders it as the system message.
    ///
    /// # Errors
    /// The errors of [`TextTokenizer::encode_pairs`]; [`InputError::NoPrompt`] for a prompt that
    /// the model does not have; [`InputError::NoTokens`] for a pair without tokens;
    /// [`ConfigError::ChatTemplate`] for a chat template that cannot render a pair.
    pub fn tokenize_pairs<S: AsRef<str>>(
        &self,
        query: &str,
        documents: &[S],
        prompt: Prompt,
    ) -> Result<Vec<Tokens>> {
        let pairs: Vec<(&str, &str)> =
            documents.iter().map(|document| (query, document.as_ref())).collect();
        self.tokenize_text_pairs(&pairs, prompt)
    }

    /// [`Self::tokenize_pairs`] for pairs whose first texts differ.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize_pairs`].
    pub fn tokenize_text_pairs(
        &self,
        pairs: &[(&str, &str)],
        prompt: Prompt,
    ) -> Result<Vec<Tokens>> {
        let prompt = self.prompts.text(prompt)?;
        let tokens = match &self.chat_template {
            Some(template) => template.encode(&self.tokenizer, prompt, pairs)?,
            None if prompt.is_empty() => {
                self.tokenizer.encode_pairs_counting(pairs, Count::Kept)?
            }
            None => {
                let pairs = pairs.iter().map(|&(first, second)| {
                    (Cow::from(format!("{prompt}{first}")), Cow::from(second))
                });
                self.tokenizer.encode_pairs_counting(&pairs.collect::<Vec<_>>(), Count::Kept)?
            }
        };
        let seconds: Vec<&str> = pairs.iter().map(|(_, second)| *second).collect();
        check_not_empty(tokens, &seconds)
    }

    /// Checks that the model ranks documents.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize_pairs`] and [`Self::rank_tokens`] that do not depend on the
    /// texts.
    pub(crate) fn check_ranks(&self) -> Result<()> {
        self.rank_tokens(&[])?;
        self.chat_template.as_ref().map_or(Ok(()), ChatTemplate::check)
    }

    /// [`Self::rerank`] for tokenized pairs of at least one token each.
    ///
    /// # Errors
    /// [`ConfigError::Value`] if the model has more than one label; the errors of [`Self::logits`].
    pub fn rank_tokens(&self, pairs: &[Tokens]) -> Result<Vec<f32>> {
        let labels = self.labels().names().len();
        if labels != 1 {
            let (field, expected) = ("number of labels", "1, for reranking");
            return Err(ConfigError::Value { field, expected, got: labels as f64 }.into());
        }
        Ok(self.score_tokens(pairs)?.concat())
    }

    /// The scores of the labels for each sequence: the logits after the activation that the model's
    /// files name, by default the sigmoid for one label and the identity for several.
    ///
    /// # Errors
    /// The errors of [`Self::logits`].
    /// # Source
    /// `CrossEncoder.predict` of sentence-transformers.
    pub fn score_tokens(&self, sequences: &[Tokens]) -> Result<Vec<Vec<f32>>> {
        self.pair_scores(self.logits(sequences)?)
    }

    /// The scores of [`Self::score_tokens`], given the logits of each sequence.
    ///
    /// # Errors
    /// [`Error::Candle`] if the logits of the sequences differ in number.
    pub fn pair_scores(&self, logits: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>> {
        if logits.is_empty() {
            return Ok(logits);
        }
        let default = match self.labels().names().len() {
            1 => TorchActivation::Other(Activation::Sigmoid),
            _ => TorchActivation::Identity,
        };
        let scores = self
            .rerank_activation
            .unwrap_or(default)
            .forward(&Tensor::new(logits, &Device::Cpu)?)?;
        Ok(scores.to_vec2()?)
    }

    /// The logits of each sequence, in the order of the labels.
    ///
    /// # Errors
    /// [`InputError::EmptySequence`] for a sequence without tokens; [`InputError::Id`] for an id
    /// outside the vocabulary; [`InputError::TooLong`] for a sequence longer than
    /// [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens); [`mha::Error::Shape`] if
    /// the numbers of ids and types differ; [`Error::NonFiniteOutput`] for logits that are NaN or
    /// infinite.
    pub fn logits(&self, sequences: &[Tokens]) -> Result<Vec<Vec<f32>>> {
        let sequences: Vec<&Tokens> = sequences.iter().collect();
        in_parts(&sequences, &mut |batch| self.compute(batch, &TextClassifierParams {}))
    }
}

impl Pipeline for TextClassifier {
    const TASK: &'static str = "sequence_classification";
    const COMMAND: &'static str = "classify";
    const ABOUT: &'static str = "Classify texts (sequence classification)";
    const EXAMPLE: Example = Example { parameters: &[], text: "I like you." };
    const MODELS: &'static [&'static str] =
        &["EncoderForSequenceClassification", "EncoderForLogitScore"];
    const SPLITS_TEXTS: bool = false;

    type Params = TextClassifierParams;
    type Context = ();
    /// The logit of each label.
    type Values = Vec<f32>;
    type Output = Classified;

    fn load(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        Self::from_files(files, options)
    }

    fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    fn encoder(&self) -> &EncoderModel {
        match &self.model {
            Model::Sequence(model) => model.encoder(),
            Model::LogitScore(model) => model.encoder(),
        }
    }

    fn report(&self) -> &LoadReport {
        &self.report
    }

    fn label_names(&self) -> &[String] {
        self.labels().names()
    }

    fn size(&self, text: &str, _: &TextClassifierParams) -> Result<TaskSize> {
        let values = self.labels().names().len();
        Ok(TaskSize { bytes: self.tokenizer.sequence_size(text.len()) + 4 * values, values })
    }

    fn tokenize(&self, text: &str, _: &TextClassifierParams) -> Result<TokenizedText<()>> {
        Ok(TokenizedText { sequences: self.tokenize_texts(&[text])?, context: () })
    }

    fn compute(&self, sequences: &[&Tokens], _: &TextClassifierParams) -> Result<Vec<Vec<f32>>> {
        let batch = RaggedBatch::from_tokens(sequences.iter().copied())?;
        let logits = match &self.model {
            Model::Sequence(model) => model.forward_ragged(&batch)?,
            Model::LogitScore(model) => model.forward_ragged(&batch)?,
        };
        let logits = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        if !logits.iter().flatten().all(|logit| logit.is_finite()) {
            return Err(Error::NonFiniteOutput);
        }
        Ok(logits)
    }

    fn finish(
        &self,
        _: &str,
        (): (),
        values: Vec<Vec<f32>>,
        _: &TextClassifierParams,
    ) -> Result<Classified> {
        let names = self.labels().distinct_names();
        let scores = self.label_scores(values).swap_remove(0);
        // `max_by` returns the last of equal elements; the first label wins here.
        let best = (0..scores.len()).rev().max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        let best = best.expect("a classifier has labels");
        let (label, score) = (names[best].clone(), scores[best]);
        Ok(Classified { label, score, scores: names.into_iter().zip(scores).collect() })
    }
}

/// Returns `tokens`, or [`InputError::NoTokens`] if a text has none.
fn check_not_empty<S: AsRef<str>>(tokens: Vec<Tokens>, texts: &[S]) -> Result<Vec<Tokens>> {
    match tokens.iter().position(|tokens| tokens.input_ids.is_empty()) {
        Some(empty) => Err(InputError::NoTokens { text: beginning(texts[empty].as_ref()) }.into()),
        None => Ok(tokens),
    }
}

impl LogitActivation {
    /// The scores of the labels of a text.
    pub fn apply(self, mut logits: Vec<f32>) -> Vec<f32> {
        match self {
            Self::Identity => {}
            Self::Sigmoid => logits.iter_mut().for_each(|x| *x = 1.0 / (1.0 + libm::expf(-*x))),
            Self::Softmax => {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                logits.iter_mut().for_each(|x| *x = libm::expf(*x - max));
                let sum: f32 = logits.iter().sum();
                logits.iter_mut().for_each(|x| *x /= sum);
            }
        }
        logits
    }
}
