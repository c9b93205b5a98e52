//! Where in a text the answer to a question stands: tokenize, encode, score spans.

use std::{collections::HashMap, ops::Range, path::Path};

use candle_core::{DType, Device};

use crate::{
    BertForQuestionAnswering, Error, LoadReport, ModelFiles, PackedBatch, Precision, Result,
    TextTokenizer,
    pipelines::modules::transformer,
    pipelines::with_tokenizer::with_tokenizer,
    text::sentence_config::Loader,
    text::tokenizer::{Spans, Window},
};

/// The longest sequence of question and text, in tokens: what BERT was trained on for SQuAD.
const LONGEST: usize = 384;

/// The longest answer, in tokens.
const LONGEST_ANSWER: usize = 15;

/// A model that finds answers, and its tokenizer.
///
/// # Source
/// Devlin et al. 2019, sections 4.2 and 4.3, <https://arxiv.org/abs/1810.04805>; the numbers are
/// those of `QuestionAnsweringPipeline` of Hugging Face transformers 4.
#[derive(Clone)]
pub struct QuestionAnswerer {
    model: BertForQuestionAnswering,
    tokenizer: TextTokenizer,
    report: LoadReport,
}

/// A part of a text that may be an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The probability that the answer begins with its first token times that it ends with its
    /// last.
    pub score: f32,
    /// Where in the text it is, in bytes; whole words.
    pub range: Range<usize>,
}

/// What [`QuestionAnswerer::answer`] finds.
#[derive(Clone, Debug, PartialEq)]
pub struct Answers {
    /// The likeliest first.
    pub answers: Vec<Answer>,
    /// As much for there being no answer; it means something for models that were trained on
    /// questions without one.
    pub no_answer: f32,
}

impl QuestionAnswerer {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// Those of [`BertForQuestionAnswering::from_dir`] and [`TextTokenizer::from_files`].
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        let files = &transformer(files)?;
        let load = || BertForQuestionAnswering::from_files(files, precision, device);
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        Ok(Self { model, tokenizer, report })
    }

    /// What was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The `top` likeliest answers to a question that stand in a text, of at most 15 tokens. A text
    /// too long for one sequence is read in windows that overlap.
    ///
    /// # Errors
    /// as [`TextTokenizer::encode`]; [`Error::LongText`] for a question that leaves no room for the
    /// text; [`Error::NoScore`].
    pub fn answer(&self, question: &str, text: &str, top: usize) -> Result<Answers> {
        let spans = self.tokenizer.encode_spans(Some(question), text, LONGEST)?;
        let batch = PackedBatch::of(spans.windows.iter().map(|window| &window.tokens))?;
        let scores = self.model.forward_packed(&batch)?;
        let start = scores.start.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let end = scores.end.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let (mut found, mut no_answer) = (HashMap::new(), 1.0);
        for (window, at) in spans.windows.iter().zip(batch.offsets().windows(2)) {
            let (none_start, start) = probabilities(&start[at[0]..at[1]], window)?;
            let (none_end, end) = probabilities(&end[at[0]..at[1]], window)?;
            no_answer = f32::min(no_answer, none_start * none_end);
            for (first, start) in start.iter().enumerate() {
                for (last, end) in end.iter().enumerate().skip(first).take(LONGEST_ANSWER) {
                    let range = whole_words(&spans, window.first + first, window.first + last);
                    let best = found.entry(range).or_insert(0.0);
                    *best = f32::max(*best, start * end);
                }
            }
        }
        let mut answers: Vec<Answer> =
            found.into_iter().map(|(range, score)| Answer { score, range }).collect();
        answers.sort_by(|a, b| {
            let position = |answer: &Answer| (answer.range.start, answer.range.end);
            b.score.total_cmp(&a.score).then_with(|| position(a).cmp(&position(b)))
        });
        answers.truncate(top);
        Ok(Answers { answers, no_answer })
    }
}

/// Softmax over the window's first token, which stands for no answer, and those of the text.
fn probabilities(logits: &[f32], window: &Window) -> Result<(f32, Vec<f32>)> {
    let of_text = || window.places.iter().map(|&place| logits[place]);
    let most = of_text().fold(logits[0], f32::max);
    let sum = of_text().fold((logits[0] - most).exp(), |sum, x| sum + (x - most).exp());
    if !sum.is_finite() {
        return Err(Error::NoScore);
    }
    let of_text = of_text().map(|x| (x - most).exp() / sum).collect();
    Ok(((logits[0] - most).exp() / sum, of_text))
}

/// Where the words are that tokens begin and end in.
fn whole_words(spans: &Spans, first: usize, last: usize) -> Range<usize> {
    let (first, last) = (spans.word(first).start, spans.word(last).end - 1);
    spans.spans[first].start..spans.spans[last].end
}
