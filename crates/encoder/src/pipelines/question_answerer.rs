//! Extractive question answering: tokenize, encode, score the spans of a text.

use std::{collections::HashMap, ops::Range, path::Path};

use candle_core::DType;
use libm::expf;
use serde::Serialize;

use super::{
    inspect::check_classifier,
    modules::transformer,
    span::Span,
    task::{Example, ParameterKind, Pipeline, TaskSize, TokenizedText, parameters},
    with_tokenizer::with_tokenizer,
};
use crate::{
    CharacterPositions, EncoderForQuestionAnswering, EncoderModel, Error, LoadOptions, LoadReport,
    ModelFiles, RaggedBatch, Result, TextTokenizer, TextWindows, Tokens,
    load::ModelFolder,
    text::{
        sentence_config::Loader,
        windows::{WINDOW_TOKEN_BYTES, Window},
    },
};

/// An upper bound of the size of an answer.
const ANSWER_BYTES: usize = 256;

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
/// assert_eq!(best.text, "a cab face");
/// assert!((best.score - 0.05262).abs() < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct QuestionAnswerer {
    model: EncoderForQuestionAnswering,
    tokenizer: TextTokenizer,
    report: LoadReport,
}

/// The answers in a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Answers {
    /// The answers in descending order of score, each extended to whole words. The score is the
    /// probability that the answer starts at its first token, times the probability that it ends at
    /// its last token.
    pub answers: Vec<Span>,
    /// The score of "no answer". It is meaningful only for models trained on unanswerable
    /// questions.
    pub no_answer: f32,
}

parameters! {
    /// The parameters of [`QuestionAnswerer`].
    pub struct QuestionAnswererParams {
        /// Question to answer from each text.
        question: String = ParameterKind::Text,
        /// Number of answers per text, the most probable first.
        top: usize = ParameterKind::Count { default: 1 },
    }
}

impl QuestionAnswerer {
    /// Loads `config.json`, the weights and the tokenizer of a folder.
    ///
    /// # Errors
    /// The errors of [`EncoderForQuestionAnswering::from_dir`] and [`TextTokenizer::from_files`];
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
            check_classifier(files, "*ForQuestionAnswering")?;
            EncoderForQuestionAnswering::load(files, options)
        };
        let ((model, report), tokenizer) = with_tokenizer(files, Loader::Transformers, load)?;
        Ok(Self { model, tokenizer, report })
    }

    /// The `top` most likely answers to a question in a text. An answer has at most 15 tokens, and
    /// is then extended to whole words. A long text is split into overlapping windows of at most
    /// 384 tokens, each with the question: the longer the question, the more windows the text has.
    ///
    /// # Errors
    /// [`crate::FileError::Tokenizer`] if the vocabulary has no token for a part of the question or
    /// the text; [`crate::ConfigError::NoRoom`] if the special tokens leave no room for the text;
    /// [`crate::InputError::LongQuestion`] for a question that leaves no room for the text; the
    /// errors of [`EncoderModel::forward_ragged`]; [`Error::NonFiniteOutput`] for scores that are
    /// NaN or infinite.
    pub fn answer(&self, question: &str, text: &str, top: usize) -> Result<Answers> {
        let params = QuestionAnswererParams { question: question.to_string(), top };
        Ok(self.run(&[text], &params)?.swap_remove(0))
    }
}

impl Pipeline for QuestionAnswerer {
    const TASK: &'static str = "question_answering";
    const COMMAND: &'static str = "answer";
    const ABOUT: &'static str = "Find the answer to a question in texts (question answering)";
    const EXAMPLE: Example = Example {
        parameters: &[("question", "Where did she live?")],
        text: "Ada Lovelace lived in London.",
    };
    const MODELS: &'static [&'static str] = &["EncoderForQuestionAnswering"];
    const SPLITS_TEXTS: bool = true;

    type Params = QuestionAnswererParams;
    type Context = TextWindows;
    /// The logits of the tokens as the start of the answer, and then those as its end, `(2, T)`.
    type Values = Vec<f32>;
    type Output = Answers;

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

    fn size(&self, text: &str, params: &QuestionAnswererParams) -> Result<TaskSize> {
        let QuestionAnswererParams { question, top } = params;
        let tokens = self.tokenizer.count_window_tokens(Some(question), text, MAX_LENGTH)?;
        let bytes = (WINDOW_TOKEN_BYTES + 2 * 4) * tokens + ANSWER_BYTES * top;
        Ok(TaskSize { bytes, values: 0 })
    }

    fn tokenize(
        &self,
        text: &str,
        params: &QuestionAnswererParams,
    ) -> Result<TokenizedText<TextWindows>> {
        let (sequences, context) =
            self.tokenizer.encode_text_windows(Some(&params.question), text, MAX_LENGTH)?;
        Ok(TokenizedText { sequences, context })
    }

    fn compute(&self, sequences: &[&Tokens], _: &QuestionAnswererParams) -> Result<Vec<Vec<f32>>> {
        let batch = RaggedBatch::from_tokens(sequences.iter().copied())?;
        let scores = self.model.forward_ragged(&batch)?;
        let start = scores.start.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let end = scores.end.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let of = |at: &[usize]| [&start[at[0]..at[1]], &end[at[0]..at[1]]].concat();
        Ok(batch.offsets().windows(2).map(of).collect())
    }

    fn finish(
        &self,
        text: &str,
        windows: TextWindows,
        logits: Vec<Vec<f32>>,
        params: &QuestionAnswererParams,
    ) -> Result<Answers> {
        let words = windows.word_ranges();
        let (mut scores_of_spans, mut no_answer) = (HashMap::new(), 1.0);
        for (window, logits) in windows.windows.iter().zip(&logits) {
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
        let mut spans: Vec<(Range<usize>, f32)> = scores_of_spans.into_iter().collect();
        spans.sort_by(|(a, score_a), (b, score_b)| {
            score_b.total_cmp(score_a).then_with(|| (a.start, a.end).cmp(&(b.start, b.end)))
        });
        spans.truncate(params.top);
        let mut positions = CharacterPositions::new(text);
        let answer = |(range, score)| Span::new(&mut positions, score, range);
        Ok(Answers { answers: spans.into_iter().map(answer).collect(), no_answer })
    }
}

/// Softmax over the window's first token, which stands for "no answer", and the text's tokens.
/// Returns the probability of the first token and the probabilities of the text's tokens.
fn probabilities(logits: &[f32], window: &Window) -> Result<(f32, Vec<f32>)> {
    let text_logits = || window.positions.iter().map(|&position| logits[position]);
    let max = text_logits().fold(logits[0], f32::max);
    let sum = text_logits().fold(expf(logits[0] - max), |sum, x| sum + expf(x - max));
    if !sum.is_finite() {
        return Err(Error::NonFiniteOutput);
    }
    let text = text_logits().map(|x| expf(x - max) / sum).collect();
    Ok((expf(logits[0] - max) / sum, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_advance_by_half_the_room_that_a_long_question_leaves() -> Result<()> {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/heads/answer");
        let model = QuestionAnswerer::from_dir(dir, &LoadOptions::default())?;
        // A window has 32 tokens: 3 special tokens, 20 of the question and 9 of the text.
        let (question, text) = ("a ".repeat(20), "b ".repeat(100));
        let params = QuestionAnswererParams { question: question.clone(), top: 1 };
        let lengths = model.tokenize(&text, &params)?.sequences;
        let lengths: Vec<usize> = lengths.iter().map(|tokens| tokens.input_ids.len()).collect();
        assert_eq!(lengths.len(), 20); // (100 - 9) / 5, rounded up, and the first
        assert!(lengths.iter().all(|&length| length <= 32));
        let counted = model.tokenizer.count_window_tokens(Some(&question), &text, MAX_LENGTH)?;
        assert_eq!(counted, lengths.iter().sum::<usize>());
        Ok(())
    }
}
