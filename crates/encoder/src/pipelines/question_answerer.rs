//! Extractive question answering: tokenize, encode, score the spans of a text.

use std::{collections::HashMap, ops::Range, path::Path};

use candle_core::DType;

use crate::{
    EncoderForQuestionAnswering, EncoderModel, Error, LoadOptions, LoadReport, ModelFiles,
    PackedBatch, Result, TextTokenizer, TextWindows, Tokens, pipelines::inspect::check_classifier,
    pipelines::modules::transformer, pipelines::with_tokenizer::with_tokenizer,
    text::sentence_config::Loader, text::windows::Window,
};

/// Maximum number of tokens of a window: the question, a part of the text and the special tokens.
/// The value is that of BERT's training on SQuAD.
const MAX_LENGTH: usize = 384;

/// Maximum number of tokens of an answer, before it is extended to whole words. The value is the
/// default `max_answer_len` of transformers.
const MAX_ANSWER_LENGTH: usize = 15;

/// An extractive question answering model and its tokenizer.
///
/// # Source
/// Devlin et al. 2019, sections 4.2 and 4.3, <https://arxiv.org/abs/1810.04805>; scores as in
/// `QuestionAnsweringPipeline` of Hugging Face transformers 4.52. If several spans extend to the
/// same whole words, later versions add their scores; here, the answer has the largest of them.
///
/// # Examples
/// A small model with random weights. The expected values are those of
/// transformers:
/// ```
/// use encoder::{LoadOptions, QuestionAnswerer};
///
/// let dir = "../../tests/golden/heads/answer";
/// let model = QuestionAnswerer::from_dir(dir, &LoadOptions::default())?;
/// let text = "a cab face x";
/// let best = &model.answer("bad", text, 1)?.answers[0];
/// assert_eq!(&text[best.range.clone()], "a cab face");
/// assert!((best.score - 0.05262).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct QuestionAnswerer {
    model: EncoderForQuestionAnswering,
    tokenizer: TextTokenizer,
    report: LoadReport,
}

/// A span of a text, as the answer to a question.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The probability that the answer starts at the span's first token, times the probability that
    /// it ends at the span's last token.
    pub score: f32,
    /// The byte range of the span in the text, extended to whole words.
    pub range: Range<usize>,
}

/// The result of [`QuestionAnswerer::answer`].
#[derive(Clone, Debug, PartialEq)]
pub struct Answers {
    /// The answers in descending order of score.
    pub answers: Vec<Answer>,
    /// The score of "no answer". It is meaningful only for models trained on unanswerable
    /// questions.
    pub no_answer: f32,
}

impl QuestionAnswerer {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForQuestionAnswering::from_dir`] and [`TextTokenizer::from_files`];
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
            check_classifier(files, "*ForQuestionAnswering")?;
            EncoderForQuestionAnswering::from_files(files, options)
        };
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        Ok(Self { model, tokenizer, report })
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

    /// The `top` most likely answers to a question in a text. An answer has at most 15 tokens, and
    /// is then extended to whole words. A long text is split into overlapping windows.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`], [`Self::logits`] and [`Self::answers`].
    pub fn answer(&self, question: &str, text: &str, top: usize) -> Result<Answers> {
        let windows = self.tokenize(question, text)?;
        let logits = windows.in_parts(|part| self.logits(part))?;
        self.answers(&windows, &logits, top)
    }

    /// The first step of [`Self::answer`]: splits a text into windows, each with the question. A
    /// window has at most 384 tokens. The longer the question, the more windows the text has.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no token for a part of the question or the text;
    /// [`Error::NoRoom`] if the special tokens leave no room for the text; [`Error::LongQuestion`]
    /// for a question that leaves no room for the text.
    pub fn tokenize(&self, question: &str, text: &str) -> Result<TextWindows> {
        self.tokenizer.encode_text_windows(Some(question), text, MAX_LENGTH)
    }

    /// The number of tokens of all sequences of [`Self::tokenize`], for an estimate of their memory.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`].
    pub fn count_tokens(&self, question: &str, text: &str) -> Result<usize> {
        self.tokenizer.count_window_tokens(Some(question), text, MAX_LENGTH)
    }

    /// The second step of [`Self::answer`]: for each sequence, the logits of its tokens as the start
    /// of the answer, and then those as its end, `(2, T)`. The sequences may be those of several
    /// texts; [`TextWindows::in_parts`] computes those of a long text in parts.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_packed`].
    pub fn logits(&self, sequences: &[&Tokens]) -> Result<Vec<Vec<f32>>> {
        let batch = PackedBatch::of(sequences.iter().copied())?;
        let scores = self.model.forward_packed(&batch)?;
        let start = scores.start.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let end = scores.end.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let of = |at: &[usize]| [&start[at[0]..at[1]], &end[at[0]..at[1]]].concat();
        Ok(batch.offsets().windows(2).map(of).collect())
    }

    /// The third step of [`Self::answer`]: the `top` most likely answers. `logits` are those of the
    /// windows' sequences.
    ///
    /// # Errors
    /// [`Error::NonFiniteOutput`] for scores that are NaN or infinite.
    /// # Panics
    /// If the logits are not those of the windows.
    pub fn answers(
        &self,
        windows: &TextWindows,
        logits: &[Vec<f32>],
        top: usize,
    ) -> Result<Answers> {
        let words = windows.word_ranges();
        let (mut scores_of_spans, mut no_answer) = (HashMap::new(), 1.0);
        for (window, logits) in windows.windows.iter().zip(logits) {
            let (start, end) = logits.split_at(logits.len() / 2);
            let (none_start, start) = probabilities(start, window)?;
            let (none_end, end) = probabilities(end, window)?;
            no_answer = f32::min(no_answer, none_start * none_end);
            for (first, start) in start.iter().enumerate() {
                for (last, end) in end.iter().enumerate().skip(first).take(MAX_ANSWER_LENGTH) {
                    let start_word = &words[window.first + first];
                    let end_word = &words[window.first + last];
                    let range = windows.byte_ranges[start_word.start].start
                        ..windows.byte_ranges[end_word.end - 1].end;
                    let best = scores_of_spans.entry(range).or_insert(0.0);
                    *best = f32::max(*best, start * end);
                }
            }
        }
        let mut answers: Vec<Answer> =
            scores_of_spans.into_iter().map(|(range, score)| Answer { score, range }).collect();
        answers.sort_by(|a, b| {
            let position = |answer: &Answer| (answer.range.start, answer.range.end);
            b.score.total_cmp(&a.score).then_with(|| position(a).cmp(&position(b)))
        });
        answers.truncate(top);
        Ok(Answers { answers, no_answer })
    }
}

/// Softmax over the window's first token, which stands for "no answer", and the text's tokens.
/// Returns the probability of the first token and the probabilities of the text's tokens.
fn probabilities(logits: &[f32], window: &Window) -> Result<(f32, Vec<f32>)> {
    let text_logits = || window.positions.iter().map(|&position| logits[position]);
    let max = text_logits().fold(logits[0], f32::max);
    let sum = text_logits().fold((logits[0] - max).exp(), |sum, x| sum + (x - max).exp());
    if !sum.is_finite() {
        return Err(Error::NonFiniteOutput);
    }
    let text = text_logits().map(|x| (x - max).exp() / sum).collect();
    Ok(((logits[0] - max).exp() / sum, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_advance_by_half_the_room_that_a_long_question_leaves() -> Result<()> {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/heads/answer");
        let model = QuestionAnswerer::from_dir(dir, &LoadOptions::default())?;
        // A window has 32 tokens: 3 special tokens, 20 of the question and 9 of the text.
        let windows = model.tokenize(&"a ".repeat(20), &"b ".repeat(100))?;
        assert_eq!(windows.sequences().len(), 20); // (100 - 9) / 5, rounded up, and the first
        assert!(windows.sequences().all(|tokens| tokens.input_ids.len() <= 32));
        let tokens: usize = windows.sequences().map(|tokens| tokens.input_ids.len()).sum();
        assert_eq!(model.count_tokens(&"a ".repeat(20), &"b ".repeat(100))?, tokens);
        Ok(())
    }
}
