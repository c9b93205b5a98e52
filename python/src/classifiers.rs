//! Pipelines with a head: labels of texts and pairs, entities, answers, tokens for masks.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use encoder::{CharacterPositions, Tokens};
use numpy::{IntoPyArray, PyArray2, ndarray::Array2};
use pyo3::prelude::*;

use crate::{
    errors::error,
    model::{self, Source, load},
    pool::Pool,
    texts::Texts,
};

/// The number of texts or pairs that are tokenized and scored together.
const GROUP: usize = 64;

/// A span of a text: its score, its text, and its start and end in characters.
type Span = (f32, String, usize, usize);
/// A candidate for a mask token: its id, its text and its score.
type Candidate = (u32, String, f32);

/// Applies a function to each text.
fn for_each<R>(texts: &Texts, function: impl Fn(&str) -> encoder::Result<R>) -> PyResult<Vec<R>> {
    let results = texts.rows().into_iter().enumerate().map(|(i, row)| {
        let text = row.map_err(|reason| error(format!("text {i}: {reason}")))?;
        function(text).map_err(error)
    });
    results.collect()
}

fn span(text: &mut CharacterPositions, score: f32, range: Range<usize>) -> Span {
    let Range { start, end } = text.range(&range);
    (score, text.text()[range].to_string(), start, end)
}

#[pyclass(frozen, module = "encodle._encodle")]
pub struct TextClassifier {
    model: Arc<encoder::TextClassifier>,
    pool: Pool,
}

/// A function from the tokens of each item to the scores of the labels.
type Score = fn(&encoder::TextClassifier, &[Tokens]) -> encoder::Result<Vec<Vec<f32>>>;

impl TextClassifier {
    /// Tokenizes and scores the items `0..len` in groups. Returns `(len, labels)`.
    fn score<'py>(
        &self,
        py: Python<'py>,
        progress: Option<&Bound<'py, PyAny>>,
        len: usize,
        tokenize: impl Fn(&encoder::TextClassifier, Range<usize>) -> PyResult<Vec<Tokens>>
        + Send
        + Sync
        + 'static,
        score: Score,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (model, labels) = (self.model.clone(), self.model.labels().names().len());
        let values = self.pool.run(py, progress, move |watch| {
            let mut values = Vec::with_capacity(len * labels);
            for first in (0..len).step_by(GROUP) {
                let group = first..len.min(first + GROUP);
                watch.done.store(first, Ordering::Relaxed);
                let part = || score(&model, &tokenize(&model, group)?).map_err(error);
                let scores = watch.compute(part).map_err(error)??;
                values.extend(scores.into_iter().flatten());
            }
            Ok(values)
        })?;
        Ok(Array2::from_shape_vec((len, labels), values).map_err(error)?.into_pyarray(py))
    }
}

#[pymethods]
impl TextClassifier {
    #[new]
    fn new(
        py: Python<'_>,
        model: Source,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let from_files = encoder::TextClassifier::from_files;
        let (model, pool) = load(py, model, precision, threads, from_files)?;
        Ok(Self { model, pool })
    }

    #[getter]
    fn labels(&self) -> Vec<String> {
        self.model.labels().names().to_vec()
    }

    /// The labels. A name that several labels share is followed by the label's id.
    #[getter]
    fn distinct_labels(&self) -> Vec<String> {
        self.model.labels().distinct_names()
    }

    #[getter]
    fn max_seq_length(&self) -> usize {
        self.model.tokenizer().max_seq_length()
    }

    /// This model with another maximum length of a text or a pair in tokens. The weights are shared.
    fn with_max_seq_length(&self, max_seq_length: usize) -> PyResult<Self> {
        let model = encoder::TextClassifier::clone(&self.model);
        let model = model.with_max_seq_length(max_seq_length).map_err(error)?;
        Ok(Self { model: Arc::new(model), pool: self.pool.clone() })
    }

    #[getter]
    fn prompts(&self) -> Vec<(&str, &str)> {
        self.model.prompts().collect()
    }

    #[getter]
    fn default_prompt_name(&self) -> Option<&str> {
        self.model.default_prompt_name()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The score of each label for each text, `(B, labels)`.
    fn classify<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let texts = Texts::from_python(texts)?;
        let len = texts.len();
        let tokenize = move |model: &encoder::TextClassifier, group| {
            model.tokenize(&rows(&texts, group)?).map_err(error)
        };
        self.score(py, None, len, tokenize, encoder::TextClassifier::classify_tokens)
    }

    /// The score of each label for each pair, `(B, labels)`. If `activation` is false, the scores
    /// are logits.
    fn score_pairs<'py>(
        &self,
        py: Python<'py>,
        first: &Bound<'py, PyAny>,
        second: &Bound<'py, PyAny>,
        prompt: String,
        activation: bool,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (first, second) = (Texts::from_python(first)?, Texts::from_python(second)?);
        let len = first.len();
        let tokenize = move |model: &encoder::TextClassifier, group: Range<usize>| {
            let first = rows(&first, group.clone())?;
            let first: Vec<String> = first.iter().map(|text| format!("{prompt}{text}")).collect();
            let pairs = first.iter().map(String::as_str).zip(rows(&second, group)?);
            model.tokenize_text_pairs(&pairs.collect::<Vec<_>>()).map_err(error)
        };
        let score: Score = match activation {
            true => encoder::TextClassifier::score_tokens,
            false => encoder::TextClassifier::logits,
        };
        self.score(py, progress, len, tokenize, score)
    }
}

/// The texts of the rows in `group`; an error for a row that has none.
fn rows(texts: &Texts, group: Range<usize>) -> PyResult<Vec<&str>> {
    let rows = group.clone().zip(texts.range(group));
    rows.map(|(i, row)| row.map_err(|reason| error(format!("text {i}: {reason}")))).collect()
}

#[pyclass(frozen, module = "encodle._encodle")]
pub struct TokenClassifier {
    model: Arc<encoder::TokenClassifier>,
    pool: Pool,
}

#[pymethods]
impl TokenClassifier {
    #[new]
    fn new(
        py: Python<'_>,
        model: String,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let from_files = encoder::TokenClassifier::from_files;
        let (model, pool) = load(py, model, precision, threads, from_files)?;
        Ok(Self { model, pool })
    }

    #[getter]
    fn labels(&self) -> Vec<String> {
        self.model.labels().names().to_vec()
    }

    /// The label and the span of each entity, for each text.
    fn tag(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        aggregation: &str,
    ) -> PyResult<Vec<Vec<(String, Span)>>> {
        let (model, texts) = (self.model.clone(), Texts::from_python(texts)?);
        let aggregation = model::named("aggregation", aggregation)?;
        self.pool.run(py, None, move |watch| {
            for_each(&texts, |text| {
                let windows = watch.compute(|| model.tokenize(text))??;
                let scores = windows.in_parts(|part| watch.compute(|| model.scores(part))?)?;
                watch.compute(|| {
                    let entities = model.entities(&windows, &scores, aggregation)?.into_iter();
                    let mut positions = CharacterPositions::new(text);
                    let entities =
                        entities.map(|e| (e.label, span(&mut positions, e.score, e.range)));
                    Ok(entities.collect())
                })?
            })
        })
    }
}

#[pyclass(frozen, module = "encodle._encodle")]
pub struct QuestionAnswerer {
    model: Arc<encoder::QuestionAnswerer>,
    pool: Pool,
}

#[pymethods]
impl QuestionAnswerer {
    #[new]
    fn new(
        py: Python<'_>,
        model: String,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let from_files = encoder::QuestionAnswerer::from_files;
        let (model, pool) = load(py, model, precision, threads, from_files)?;
        Ok(Self { model, pool })
    }

    /// The best answers and the score of "no answer", for each text.
    fn answer(
        &self,
        py: Python<'_>,
        question: String,
        texts: &Bound<'_, PyAny>,
        top_k: usize,
    ) -> PyResult<Vec<(Vec<Span>, f32)>> {
        let (model, texts) = (self.model.clone(), Texts::from_python(texts)?);
        self.pool.run(py, None, move |watch| {
            for_each(&texts, |text| {
                let windows = watch.compute(|| model.tokenize(&question, text))??;
                let logits = windows.in_parts(|part| watch.compute(|| model.logits(part))?)?;
                watch.compute(|| {
                    let found = model.answers(&windows, &logits, top_k)?;
                    let mut positions = CharacterPositions::new(text);
                    let answers = found.answers.into_iter();
                    let spans = answers.map(|a| span(&mut positions, a.score, a.range));
                    Ok((spans.collect(), found.no_answer))
                })?
            })
        })
    }
}

#[pyclass(frozen, module = "encodle._encodle")]
pub struct MaskFiller {
    model: Arc<encoder::MaskFiller>,
    pool: Pool,
}

#[pymethods]
impl MaskFiller {
    #[new]
    fn new(
        py: Python<'_>,
        model: String,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let from_files = encoder::MaskFiller::from_files;
        let (model, pool) = load(py, model, precision, threads, from_files)?;
        Ok(Self { model, pool })
    }

    /// The id, the text and the score of each candidate, for each mask token of each text.
    fn fill_mask(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        top_k: usize,
    ) -> PyResult<Vec<Vec<Vec<Candidate>>>> {
        let (model, texts) = (self.model.clone(), Texts::from_python(texts)?);
        self.pool.run(py, None, move |watch| {
            for_each(&texts, |text| {
                let masks = watch.compute(|| model.fill(text, top_k))??.into_iter();
                let candidates = masks.map(|candidates| {
                    candidates.into_iter().map(|c| (c.token_id, c.token, c.score)).collect()
                });
                Ok(candidates.collect())
            })
        })
    }
}
