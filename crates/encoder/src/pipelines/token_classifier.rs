//! Token classification, such as named entity recognition: tokenize, encode, classify each token,
//! join tokens to entities.

use std::{ops::Range, path::Path};

use candle_core::{D, DType};
use candle_nn::ops::softmax;

use crate::{
    EncoderForTokenClassification, EncoderModel, Error, Labels, LoadOptions, LoadReport,
    ModelFiles, PackedBatch, Result, TextTokenizer, TextWindows, Tokens,
    pipelines::inspect::check_classifier, pipelines::modules::transformer,
    pipelines::with_tokenizer::with_tokenizer, text::sentence_config::Loader,
};

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
/// let found: Vec<_> = entities.iter().map(|e| (&e.label[..], &text[e.range.clone()])).collect();
/// assert_eq!(found, [("LOC", "a c"), ("PER", "a"), ("LOC", "b"), ("LOC", "x")]);
/// assert!((entities[0].score - 0.47287).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenClassifier {
    model: EncoderForTokenClassification,
    tokenizer: TextTokenizer,
    report: LoadReport,
}

/// A span of a text with its label.
#[derive(Clone, Debug, PartialEq)]
pub struct Entity {
    /// The model's label. With every aggregation except [`Aggregation::None`], the part up to the
    /// first `-`, such as `B-` or `I-`, is removed, as in transformers.
    pub label: String,
    /// The probability of the label: the mean over the joined tokens or words.
    pub score: f32,
    /// The byte range of the entity in the text.
    pub range: Range<usize>,
}

/// How to join tokens to entities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Aggregation {
    /// Do not join tokens.
    None,
    /// Join adjacent tokens whose labels are equal apart from the prefix `B-` or `I-`. A label with
    /// `B-` starts a new entity.
    #[default]
    Simple,
    /// Give each word the label of its first token, then join words as [`Self::Simple`] joins
    /// tokens.
    First,
    /// Like [`Self::First`], with the label that has the highest mean probability over the word's
    /// tokens.
    Average,
    /// Like [`Self::First`], with the label of the token whose label has the highest probability.
    Max,
}

/// A token or a word with its label and the label's probability.
struct Labelled {
    label: usize,
    score: f32,
    range: Range<usize>,
}

impl TokenClassifier {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForTokenClassification::from_dir`] and [`TextTokenizer::from_files`];
    /// [`Error::Unsupported`] if `architectures` in the config names another classifier.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &transformer(files)?;
        let load = || {
            check_classifier(files, "*ForTokenClassification")?;
            EncoderForTokenClassification::from_files(files, options)
        };
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        Ok(Self { model, tokenizer, report })
    }

    /// The labels of the model.
    pub fn labels(&self) -> &Labels {
        self.model.labels()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// The encoder below the head.
    pub fn encoder(&self) -> &EncoderModel {
        self.model.encoder()
    }

    /// The report on the loaded checkpoint.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The entities of a text, in their order: all tokens or joined spans with a label other than
    /// `O`. A text longer than the model's maximum length is split into overlapping windows; each
    /// token is classified in the window where it has the most context on both sides.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`], [`Self::scores`] and [`Self::entities`].
    pub fn classify(&self, text: &str, aggregation: Aggregation) -> Result<Vec<Entity>> {
        let windows = self.tokenize(text)?;
        let scores = windows.in_parts(|part| self.scores(part))?;
        self.entities(&windows, &scores, aggregation)
    }

    /// The first step of [`Self::classify`]: splits a text into windows.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of the text.
    pub fn tokenize(&self, text: &str) -> Result<TextWindows> {
        self.tokenizer.encode_text_windows(None, text, usize::MAX)
    }

    /// The number of tokens of all sequences of [`Self::tokenize`], for an estimate of their memory.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`].
    pub fn count_tokens(&self, text: &str) -> Result<usize> {
        self.tokenizer.count_window_tokens(None, text, usize::MAX)
    }

    /// The second step of [`Self::classify`]: for each sequence, the probability of each label for
    /// each of its tokens, `(T, labels)` row after row. The sequences may be those of several texts;
    /// [`TextWindows::in_parts`] computes those of a long text in parts.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_packed`].
    pub fn scores(&self, sequences: &[&Tokens]) -> Result<Vec<Vec<f32>>> {
        let batch = PackedBatch::of(sequences.iter().copied())?;
        if batch.tokens() == 0 {
            return Ok(vec![vec![]; sequences.len()]);
        }
        let logits = self.model.forward_packed(&batch)?.to_dtype(DType::F32)?; // (N, labels)
        let labels = logits.dim(1)?;
        let all = softmax(&logits, D::Minus1)?.flatten_all()?.to_vec1::<f32>()?;
        let of = |at: &[usize]| all[at[0] * labels..at[1] * labels].to_vec();
        Ok(batch.offsets().windows(2).map(of).collect())
    }

    /// The third step of [`Self::classify`]: joins tokens to entities. `scores` are those of the
    /// windows' sequences.
    ///
    /// # Errors
    /// [`Error::NonFiniteOutput`] for scores that are NaN or infinite.
    /// # Panics
    /// If the scores are not those of the windows.
    pub fn entities(
        &self,
        windows: &TextWindows,
        scores: &[Vec<f32>],
        aggregation: Aggregation,
    ) -> Result<Vec<Entity>> {
        let names = self.labels().names();
        let row = |(window, position): (usize, usize)| {
            &scores[window][position * names.len()..(position + 1) * names.len()]
        };
        let rows: Vec<&[f32]> = windows.most_context().map(row).collect(); // one per token
        if !rows.iter().copied().flatten().all(|score| score.is_finite()) {
            return Err(Error::NonFiniteOutput);
        }
        let labelled = aggregation.label(windows, &rows);
        let entities = match aggregation {
            Aggregation::None => labelled.into_iter().map(|one| one.entity(names)).collect(),
            _ => joined(&labelled, names),
        };
        Ok(entities.into_iter().filter(|entity| entity.label != OUTSIDE).collect())
    }
}

impl Aggregation {
    /// The label of each token, or of each word.
    fn label(self, windows: &TextWindows, scores: &[&[f32]]) -> Vec<Labelled> {
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

impl Labelled {
    fn entity(&self, names: &[String]) -> Entity {
        let label = names[self.label].clone();
        Entity { label, score: self.score, range: self.range.clone() }
    }
}

/// Joins adjacent tokens or words with the same kind of label.
fn joined(labelled: &[Labelled], names: &[String]) -> Vec<Entity> {
    let continued = labelled.chunk_by(|one, next| {
        let (_, kind) = split_label(&names[one.label]);
        let (starts, next_kind) = split_label(&names[next.label]);
        kind == next_kind && !starts
    });
    let entities = continued.map(|parts| {
        let name = &names[parts[0].label];
        let label = name.split_once('-').map_or(&name[..], |(_, kind)| kind).to_string();
        let score = parts.iter().map(|part| part.score).sum::<f32>() / parts.len() as f32;
        Entity { label, score, range: parts[0].range.start..parts[parts.len() - 1].range.end }
    });
    entities.collect()
}

/// Splits a label into whether it starts an entity (`B-`), and the kind of entity.
fn split_label(label: &str) -> (bool, &str) {
    match label.split_at_checked(2) {
        Some(("B-", kind)) => (true, kind),
        Some(("I-", kind)) => (false, kind),
        _ => (false, label),
    }
}
