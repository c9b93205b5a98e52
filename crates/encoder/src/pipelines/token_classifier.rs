//! Token classification, such as named entity recognition: tokenize, encode, classify each token,
//! join tokens to entities.

use std::{ops::Range, path::Path};

use candle_core::DType;
use serde::Serialize;

use super::{
    inspect::check_classifier,
    modules::transformer,
    span::Span,
    task::{Example, ParameterKind, Pipeline, TaskSize, TokenizedText, parameters},
    with_tokenizer::with_tokenizer,
};
use crate::{
    CharacterPositions, EncoderForTokenClassification, EncoderModel, Error, Labels, LoadOptions,
    LoadReport, ModelFiles, RaggedBatch, Result, TextTokenizer, TextWindows, Tokens,
    load::ModelFolder,
    text::{sentence_config::Loader, windows::WINDOW_TOKEN_BYTES},
};

/// An upper bound of the size of an entity of one token.
const ENTITY_BYTES: usize = 160;

/// The label of tokens outside entities.
const OUTSIDE: &str = "O";

/// A token classifier and its tokenizer, for example for named entities.
///
/// # Source
/// `TokenClassificationPipeline` of Hugging Face transformers.
///
/// # Examples
/// A small model with random weights. The expected values are those of
/// transformers:
/// ```
/// use encoder::{Aggregation, LoadOptions, TokenClassifier};
///
/// let dir = "../../tests/golden/heads/tagger";
/// let model = TokenClassifier::from_dir(dir, &LoadOptions::default())?;
/// let text = "a cab x";
/// let entities = model.classify(text, Aggregation::Simple)?;
/// let found: Vec<_> = entities.iter().map(|e| (&e.label[..], &e.span.text[..])).collect();
/// assert_eq!(found, [("LOC", "a c"), ("PER", "a"), ("LOC", "b"), ("LOC", "x")]);
/// assert!((entities[0].span.score - 0.47287).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenClassifier {
    model: EncoderForTokenClassification,
    tokenizer: TextTokenizer,
    report: LoadReport,
}

/// The entities of a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Tagged {
    /// The entities, in the order of the text.
    pub entities: Vec<Entity>,
}

/// A part of a text with its label.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Entity {
    /// The model's label. With every aggregation except `none`, the part up to the first `-`, such
    /// as `B-` or `I-`, is removed, as in transformers.
    pub label: String,
    /// The part of the text. Its score is the probability of the label: the mean over the joined
    /// tokens or words.
    #[serde(flatten)]
    pub span: Span,
}

parameters! {
    /// The parameters of [`TokenClassifier`].
    #[derive(Default)]
    pub struct TokenClassifierParams {
        /// How to join tokens into entities.
        aggregation: Aggregation = ParameterKind::choice::<Aggregation>(),
    }
}

crate::choices! {
    /// How to join tokens into entities.
    #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
    pub enum Aggregation: "aggregation", default Simple {
        /// Each token with a label other than O is an entity.
        None = "none",
        /// Join adjacent tokens whose labels are equal without the prefix B- or I-; a label with B-
        /// starts a new entity.
        Simple = "simple",
        /// Label each word by its first token; join words as in simple.
        First = "first",
        /// Give each word the label with the highest mean score over its tokens; join words as in
        /// simple.
        Average = "average",
        /// Label each word by its token with the highest score; join words as in simple.
        Max = "max",
    }
}

/// A token or a word with its label and the label's probability.
struct Labelled<L> {
    label: L,
    score: f32,
    range: Range<usize>,
}

impl TokenClassifier {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForTokenClassification::from_dir`] and [`TextTokenizer::from_files`];
    /// [`crate::ConfigError::Unsupported`] if `architectures` in the config names another
    /// classifier.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &transformer(&ModelFolder::new(files))?;
        let load = || {
            check_classifier(files, "*ForTokenClassification")?;
            EncoderForTokenClassification::load(files, options)
        };
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        Ok(Self { model, tokenizer, report })
    }

    /// The labels of the model.
    pub fn labels(&self) -> &Labels {
        self.model.labels()
    }

    /// The entities of a text, in their order: all tokens or joined spans with a label other than
    /// `O`. A text longer than the model's maximum length is split into overlapping windows; each
    /// token is classified in the window where it has the most context on both sides.
    ///
    /// # Errors
    /// [`crate::FileError::Tokenizer`] if the vocabulary has no token for a part of the text; the
    /// errors of [`EncoderModel::forward_ragged`]; [`Error::NonFiniteOutput`] for scores that are
    /// NaN or infinite.
    pub fn classify(&self, text: &str, aggregation: Aggregation) -> Result<Vec<Entity>> {
        let tagged = self.run(&[text], &TokenClassifierParams { aggregation })?.swap_remove(0);
        Ok(tagged.entities)
    }
}

impl Pipeline for TokenClassifier {
    const TASK: &'static str = "token_classification";
    const COMMAND: &'static str = "tag";
    const ABOUT: &'static str = "Extract named entities (token classification)";
    const EXAMPLE: Example = Example { parameters: &[], text: "Ada Lovelace lived in London." };
    const MODELS: &'static [&'static str] = &["EncoderForTokenClassification"];
    const SPLITS_TEXTS: bool = true;

    type Params = TokenClassifierParams;
    type Context = TextWindows;
    /// The probability of each label for each token, `(T, labels)` row after row.
    type Values = Vec<f32>;
    type Output = Tagged;

    fn load(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        Self::from_files(files, options)
    }

    fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    fn encoder(&self) -> &EncoderModel {
        self.model.encoder()
    }

    fn report(&self) -> &LoadReport {
        &self.report
    }

    fn label_names(&self) -> &[String] {
        self.labels().names()
    }

    fn size(&self, text: &str, _: &TokenClassifierParams) -> Result<TaskSize> {
        let tokens = self.tokenizer.count_window_tokens(None, text, usize::MAX)?;
        let bytes = WINDOW_TOKEN_BYTES + ENTITY_BYTES + 4 * self.labels().names().len();
        Ok(TaskSize { bytes: bytes * tokens, values: 0 })
    }

    fn tokenize(
        &self,
        text: &str,
        _: &TokenClassifierParams,
    ) -> Result<TokenizedText<TextWindows>> {
        let (sequences, context) = self.tokenizer.encode_text_windows(None, text, usize::MAX)?;
        Ok(TokenizedText { sequences, context })
    }

    fn compute(&self, sequences: &[&Tokens], _: &TokenClassifierParams) -> Result<Vec<Vec<f32>>> {
        let batch = RaggedBatch::from_tokens(sequences.iter().copied())?;
        if batch.tokens() == 0 {
            return Ok(vec![vec![]; sequences.len()]);
        }
        let logits = self.model.forward_ragged(&batch)?.to_dtype(DType::F32)?; // (N, labels)
        let labels = logits.dim(1)?;
        let mut all = logits.flatten_all()?.to_vec1::<f32>()?;
        ops::softmax(&mut all, labels)?;
        let of = |at: &[usize]| all[at[0] * labels..at[1] * labels].to_vec();
        Ok(batch.offsets().windows(2).map(of).collect())
    }

    fn finish(
        &self,
        text: &str,
        windows: TextWindows,
        values: Vec<Vec<f32>>,
        params: &TokenClassifierParams,
    ) -> Result<Tagged> {
        let names = self.labels().names();
        let row = |(window, position): (usize, usize)| {
            &values[window][position * names.len()..(position + 1) * names.len()]
        };
        let rows: Vec<&[f32]> = windows.most_context().map(row).collect(); // one per token
        if !rows.iter().copied().flatten().all(|score| score.is_finite()) {
            return Err(Error::NonFiniteOutput);
        }
        let labelled = params.aggregation.label(&windows, &rows);
        let labelled = match params.aggregation {
            Aggregation::None => {
                let name = |Labelled { label, score, range }: Labelled<usize>| Labelled {
                    label: names[label].clone(),
                    score,
                    range,
                };
                labelled.into_iter().map(name).collect()
            }
            _ => join(&labelled, names),
        };
        let mut positions = CharacterPositions::new(text);
        let entities = labelled.into_iter().filter(|one| one.label != OUTSIDE).map(|one| Entity {
            label: one.label,
            span: Span::new(&mut positions, one.score, one.range),
        });
        Ok(Tagged { entities: entities.collect() })
    }
}

impl Aggregation {
    /// The label of each token, or of each word.
    fn label(self, windows: &TextWindows, scores: &[&[f32]]) -> Vec<Labelled<usize>> {
        let labels = scores.first().map_or(0, |row| row.len());
        let mut labelled = vec![];
        let mut start = 0;
        while start < scores.len() {
            let end = match self {
                Self::None | Self::Simple => start + 1,
                _ => {
                    let rest = windows.continues_word[start + 1..].iter();
                    start + 1 + rest.take_while(|&&continues| continues).count()
                }
            };
            let tokens = &scores[start..end];
            let probabilities = match self {
                Self::Average => {
                    let sum = |label: usize| tokens.iter().map(|token| token[label]).sum::<f32>();
                    (0..labels).map(|label| sum(label) / tokens.len() as f32).collect()
                }
                Self::Max => {
                    let highest = |token: &[f32]| token.iter().copied().fold(0.0, f32::max);
                    let tokens = tokens.iter().rev(); // the first token wins ties
                    let best = tokens.max_by(|a, b| highest(a).total_cmp(&highest(b)));
                    best.expect("at least one token").to_vec()
                }
                Self::None | Self::Simple | Self::First => tokens[0].to_vec(),
            };
            let best = probabilities.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
            let (label, &score) = best.expect("at least one label");
            let range = windows.byte_ranges[start].start..windows.byte_ranges[end - 1].end;
            labelled.push(Labelled { label, score, range });
            start = end;
        }
        labelled
    }
}

/// Joins adjacent tokens or words with the same kind of label.
fn join(labelled: &[Labelled<usize>], names: &[String]) -> Vec<Labelled<String>> {
    let continued = labelled.chunk_by(|one, next| {
        let (_, kind) = split_label(&names[one.label]);
        let (starts, next_kind) = split_label(&names[next.label]);
        kind == next_kind && !starts
    });
    let joined = continued.map(|parts| {
        let name = &names[parts[0].label];
        let label = name.split_once('-').map_or(&name[..], |(_, kind)| kind).to_string();
        let score = parts.iter().map(|part| part.score).sum::<f32>() / parts.len() as f32;
        Labelled { label, score, range: parts[0].range.start..parts[parts.len() - 1].range.end }
    });
    joined.collect()
}

/// Splits a label into whether it starts an entity (`B-`), and the kind of entity.
fn split_label(label: &str) -> (bool, &str) {
    match label.split_at_checked(2) {
        Some(("B-", kind)) => (true, kind),
        Some(("I-", kind)) => (false, kind),
        _ => (false, label),
    }
}
