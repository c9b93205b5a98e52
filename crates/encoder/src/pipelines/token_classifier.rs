//! What in a text is named: tokenize, encode, classify each token, join tokens.

use std::{ops::Range, path::Path};

use candle_core::{D, DType, Device};
use candle_nn::ops::softmax;

use crate::{
    BertForTokenClassification, Error, Labels, LoadReport, ModelFiles, PackedBatch, Precision,
    Result, TextTokenizer, pipelines::modules::transformer,
    pipelines::with_tokenizer::with_tokenizer, text::sentence_config::Loader,
    text::tokenizer::Spans,
};

/// The label of tokens that are none of what is looked for.
const OUTSIDE: &str = "O";

/// A token classifier and its tokenizer: names, places and whatever else its labels tell.
///
/// # Source
/// `TokenClassificationPipeline` of Hugging Face transformers.
#[derive(Clone)]
pub struct TokenClassifier {
    model: BertForTokenClassification,
    tokenizer: TextTokenizer,
    report: LoadReport,
}

/// A part of a text, and its label.
#[derive(Clone, Debug, PartialEq)]
pub struct Entity {
    /// As the model has it for a token; without `B-` or `I-` for what was joined.
    pub label: String,
    /// The label's probability, in the mean over what was joined.
    pub score: f32,
    /// Where in the text it is, in bytes.
    pub range: Range<usize>,
}

/// How tokens are joined to entities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aggregation {
    /// They are not.
    None,
    /// Those of one label that follow one another, as far as no `B-` begins another.
    #[default]
    Simple,
    /// A word has the label of its first token; words are joined as tokens are by
    /// [`Self::Simple`].
    First,
    /// A word has the label that is likeliest in the mean of its tokens.
    Average,
    /// A word has the label of the token that is surest of its own.
    Max,
}

/// A token or a word: the label and its probability.
struct Labelled {
    label: usize,
    score: f32,
    range: Range<usize>,
}

impl TokenClassifier {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// Those of [`BertForTokenClassification::from_dir`] and [`TextTokenizer::from_files`].
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        let files = &transformer(files)?;
        let load = || BertForTokenClassification::from_files(files, precision, device);
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        Ok(Self { model, tokenizer, report })
    }

    /// What tokens are classified as.
    pub fn labels(&self) -> &Labels {
        self.model.labels()
    }

    /// What was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// What a text has that is not labelled `O`, in its order. A text longer than the model takes
    /// is read in windows that overlap, each token in the one that has most around it.
    ///
    /// # Errors
    /// as [`TextTokenizer::encode`]; [`Error::NoScore`].
    pub fn classify(&self, text: &str, aggregation: Aggregation) -> Result<Vec<Entity>> {
        let spans = self.tokenizer.encode_spans(None, text, usize::MAX)?;
        let scores = self.scores(&spans)?;
        let names = self.labels().names();
        let labelled = aggregation.label(&spans, &scores);
        let entities = match aggregation {
            Aggregation::None => labelled.into_iter().map(|one| one.entity(names)).collect(),
            _ => joined(&labelled, names),
        };
        Ok(entities.into_iter().filter(|entity| entity.label != OUTSIDE).collect())
    }

    /// The probability of each label for each of a text's tokens.
    fn scores(&self, spans: &Spans) -> Result<Vec<Vec<f32>>> {
        if spans.spans.is_empty() {
            return Ok(vec![]);
        }
        let batch = PackedBatch::of(spans.windows.iter().map(|window| &window.tokens))?;
        let logits = self.model.forward_packed(&batch)?.to_dtype(DType::F32)?; // (N, labels)
        let all = softmax(&logits, D::Minus1)?.to_vec2::<f32>()?;
        let offsets = batch.offsets();
        let places = spans.most_context().map(|(window, place)| offsets[window] + place);
        let scores: Vec<Vec<f32>> = places.map(|place| all[place].clone()).collect();
        match scores.iter().flatten().all(|score| score.is_finite()) {
            true => Ok(scores),
            false => Err(Error::NoScore),
        }
    }
}

impl Aggregation {
    /// Tokens, or the words that they are parts of, each with a label.
    fn label(self, spans: &Spans, scores: &[Vec<f32>]) -> Vec<Labelled> {
        let labels = scores.first().map_or(0, Vec::len);
        let mut labelled = vec![];
        let mut start = 0;
        while start < scores.len() {
            let end = match self {
                Self::None | Self::Simple => start + 1,
                _ => spans.word(start).end,
            };
            let own = &scores[start..end];
            let of_word = match self {
                Self::Average => {
                    let mean = |label: usize| own.iter().map(|token| token[label]).sum::<f32>();
                    (0..labels).map(|label| mean(label) / own.len() as f32).collect()
                }
                Self::Max => {
                    let sure = |token: &[f32]| token.iter().copied().fold(0.0, f32::max);
                    let tokens = own.iter().rev(); // of equal ones the first
                    tokens.max_by(|a, b| sure(a).total_cmp(&sure(b))).expect("a token").clone()
                }
                Self::None | Self::Simple | Self::First => own[0].clone(),
            };
            let best = of_word.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
            let (label, &score) = best.expect("a model has a label");
            let range = spans.spans[start].start..spans.spans[end - 1].end;
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

/// Those of one label that follow one another as one.
fn joined(labelled: &[Labelled], names: &[String]) -> Vec<Entity> {
    let continued = labelled.chunk_by(|one, next| {
        let (_, kind) = begins(&names[one.label]);
        let (begins, next_kind) = begins(&names[next.label]);
        kind == next_kind && !begins
    });
    let entities = continued.map(|parts| {
        let name = &names[parts[0].label];
        let label = name.split_once('-').map_or(&name[..], |(_, kind)| kind).to_string();
        let score = parts.iter().map(|part| part.score).sum::<f32>() / parts.len() as f32;
        Entity { label, score, range: parts[0].range.start..parts[parts.len() - 1].range.end }
    });
    entities.collect()
}

/// Whether a label begins an entity, and what it is of.
fn begins(label: &str) -> (bool, &str) {
    match label.split_at_checked(2) {
        Some(("B-", kind)) => (true, kind),
        Some(("I-", kind)) => (false, kind),
        _ => (false, label),
    }
}
