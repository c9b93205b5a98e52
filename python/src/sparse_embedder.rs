//! Texts to sparse vectors.

use std::sync::Arc;

use encoder::{Embed, EmbedOptions, Error, SparseVector, TextRole, TokenizedTexts};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::{
    embedding::{Compute, Invalid, Job, Run, TokenArray, padded_tokens},
    errors::error,
    model::{self, load},
    pool::Pool,
    texts::Texts,
};

/// The rows of a matrix in compressed form: the row `i` has the indices and values from `offsets[i]`
/// to `offsets[i + 1]`.
type Rows<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<f32>>);

#[pyclass(frozen, module = "encodle._encodle")]
pub struct SparseEmbedder {
    embedder: Arc<encoder::SparseEmbedder>,
    pool: Pool,
}

#[pymethods]
impl SparseEmbedder {
    #[new]
    fn new(
        py: Python<'_>,
        model: model::Source,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let from_files = encoder::SparseEmbedder::from_files;
        let (embedder, pool) = load(py, model, precision, threads, from_files)?;
        Ok(Self { embedder, pool })
    }

    #[getter]
    fn dimension(&self) -> usize {
        self.embedder.dimension()
    }

    #[getter]
    fn max_active_dims(&self) -> Option<usize> {
        self.embedder.max_active_dims()
    }

    /// Whether the model computes queries in another way than documents.
    #[getter]
    fn has_queries(&self) -> bool {
        let options = EmbedOptions::new().with_role(TextRole::Query);
        self.embedder.role(options) == TextRole::Query
    }

    #[getter]
    fn max_seq_length(&self) -> usize {
        self.embedder.tokenizer().max_seq_length()
    }

    #[getter]
    fn prompts(&self) -> Vec<(&str, &str)> {
        self.embedder.prompts().collect()
    }

    #[getter]
    fn default_prompt_name(&self) -> Option<&str> {
        self.embedder.default_prompt_name()
    }

    #[getter]
    fn similarity_fn_name(&self) -> &str {
        self.embedder.similarity_fn_name()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// This model with another maximum length of a text in tokens. The weights are shared.
    fn with_max_seq_length(&self, max_seq_length: usize) -> PyResult<Self> {
        let embedder = encoder::SparseEmbedder::clone(&self.embedder);
        let embedder = embedder.with_max_seq_length(max_seq_length).map_err(error)?;
        Ok(Self { embedder: Arc::new(embedder), pool: self.pool.clone() })
    }

    /// The vectors of the valid rows, and the rows without vectors. If `skip` is false, the
    /// computation ends at the first invalid row.
    #[expect(clippy::too_many_arguments)]
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        prompt: String,
        queries: bool,
        max_active_dims: Option<usize>,
        long_texts: &str,
        skip: bool,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Rows<'py>, Invalid)> {
        let embedder = match max_active_dims {
            None => self.embedder.clone(),
            Some(max) => {
                let embedder = encoder::SparseEmbedder::clone(&self.embedder);
                Arc::new(embedder.with_max_active_dims(max).map_err(error)?)
            }
        };
        let role = if queries { TextRole::Query } else { TextRole::Document };
        let job = Job {
            model: SparseVectors { embedder, queries },
            texts: Texts::from_python(texts)?,
            prompt,
            role,
            long_texts: model::named("long_texts", long_texts)?,
            skip,
        };
        let (vectors, invalid) = self.pool.run(py, progress, move |watch| job.run(watch))?;
        let (mut offsets, mut indices, mut values) = (vec![0], vec![], vec![]);
        for vector in vectors {
            indices.extend(vector.indices);
            values.extend(vector.values);
            offsets.push(indices.len() as i64);
        }
        let rows = (offsets.into_pyarray(py), indices.into_pyarray(py), values.into_pyarray(py));
        Ok((rows, invalid))
    }

    /// The tokens of a vector's dimensions with their values, in descending order of value.
    fn decode(
        &self,
        indices: PyReadonlyArray1<'_, u32>,
        values: PyReadonlyArray1<'_, f32>,
    ) -> PyResult<Vec<(String, f32)>> {
        let vector = SparseVector::new(indices.as_array().to_vec(), values.as_array().to_vec());
        Ok(self.embedder.decode(&vector))
    }

    /// `input_ids`, `attention_mask` and `token_type_ids`, each `(B, T)`, padded to the longest
    /// text.
    fn tokenize<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        prompt: String,
    ) -> PyResult<(TokenArray<'py>, TokenArray<'py>, TokenArray<'py>)> {
        padded_tokens(py, &self.pool, self.embedder.tokenizer().clone(), texts, prompt)
    }
}

/// The vectors of a sparse model.
struct SparseVectors {
    embedder: Arc<encoder::SparseEmbedder>,
    queries: bool,
}

impl Compute for SparseVectors {
    type Value = SparseVector;

    type Model = encoder::SparseEmbedder;

    fn model(&self) -> &encoder::SparseEmbedder {
        &self.embedder
    }

    fn compute(&self, texts: &TokenizedTexts, run: &mut Run) -> Result<Vec<SparseVector>, Error> {
        self.embedder.embed_rows(texts, run)
    }

    /// A token of a query may lack a weight.
    fn can_fail(&self, prompt: &str) -> bool {
        self.queries || !prompt.is_empty()
    }

    fn width(&self) -> usize {
        1
    }
}
