//! Scores of pairs of texts.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use encoder::{Pipeline, Prompt, Tokens};
use numpy::{IntoPyArray, PyArray2, ndarray::Array2};
use pyo3::prelude::*;

use crate::{
    errors::error,
    model::{Source, load},
    pool::Pool,
    texts::Texts,
};

/// The number of pairs that are tokenized and scored together.
const GROUP: usize = 64;

#[pyclass(frozen, module = "encodle._encodle")]
pub struct CrossEncoder {
    model: Arc<encoder::TextClassifier>,
    pool: Pool,
}

/// A function from the tokens of each pair to the scores of the labels.
type Score = fn(&encoder::TextClassifier, &[Tokens]) -> encoder::Result<Vec<Vec<f32>>>;

#[pymethods]
impl CrossEncoder {
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
        self.model.label_names().to_vec()
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
        let score: Score = if activation {
            encoder::TextClassifier::score_tokens
        } else {
            encoder::TextClassifier::logits
        };
        let (model, labels) = (self.model.clone(), self.model.label_names().len());
        let len = first.len();
        let values = self.pool.run(py, progress, move |watch| {
            let mut values = Vec::with_capacity(len * labels);
            for start in (0..len).step_by(GROUP) {
                let group = start..len.min(start + GROUP);
                watch.done.store(start, Ordering::Relaxed);
                let part = || {
                    let first = rows(&first, group.clone())?.into_iter();
                    let pairs: Vec<(&str, &str)> = first.zip(rows(&second, group)?).collect();
                    let prompt = Prompt::Text(&prompt);
                    let tokens = model.tokenize_text_pairs(&pairs, prompt).map_err(error)?;
                    score(&model, &tokens).map_err(error)
                };
                let scores: Vec<Vec<f32>> = watch.compute(part).map_err(error)??;
                values.extend(scores.into_iter().flatten());
            }
            Ok(values)
        })?;
        Ok(Array2::from_shape_vec((len, labels), values).map_err(error)?.into_pyarray(py))
    }
}

/// The texts of the rows in `group`; an error for a row that has none.
fn rows(texts: &Texts, group: Range<usize>) -> PyResult<Vec<&str>> {
    let rows = group.clone().zip(texts.range(group));
    rows.map(|(i, row)| row.map_err(|reason| error(format!("text {i}: {reason}")))).collect()
}
