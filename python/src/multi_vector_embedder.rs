//! Texts to a vector per token, and the scores of such embeddings.

use std::sync::Arc;

use encoder::{Choice, Embed, Error, LateInteraction, MultiVector, TextRole, TokenizedTexts};
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyReadonlyArray2, PyUntypedArrayMethods, ndarray::Array2,
};
use ops::{MaxSim, VectorSlice};
use pyo3::prelude::*;
use rayon::prelude::*;

use crate::{
    embedding::{Compute, Invalid, Job, Run, TokenArray, padded_tokens},
    errors::error,
    model::{self, load},
    pool::Pool,
    texts::Texts,
};

/// The number of pairs that are scored together.
const PAIRS: usize = 64;

#[pyclass(frozen, module = "encodle._encodle")]
pub struct MultiVectorEmbedder {
    embedder: Arc<encoder::MultiVectorEmbedder>,
    pool: Pool,
}

#[pymethods]
impl MultiVectorEmbedder {
    #[new]
    fn new(
        py: Python<'_>,
        model: model::Source,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let from_files = encoder::MultiVectorEmbedder::from_files;
        let (embedder, pool) = load(py, model, precision, threads, from_files)?;
        Ok(Self { embedder, pool })
    }

    #[getter]
    fn dimension(&self) -> usize {
        self.embedder.dimension()
    }

    /// The maximum length of a text that is neither a query nor a document.
    #[getter]
    fn max_seq_length(&self) -> usize {
        self.embedder.max_seq_length(TextRole::Unspecified)
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
        self.embedder.similarity().name()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// This model with another maximum length in tokens of the texts for whose role the model's
    /// files name no length. The weights are shared.
    fn with_max_seq_length(&self, max_seq_length: usize) -> PyResult<Self> {
        let embedder = encoder::MultiVectorEmbedder::clone(&self.embedder);
        let embedder = embedder.with_max_seq_length(max_seq_length).map_err(error)?;
        Ok(Self { embedder: Arc::new(embedder), pool: self.pool.clone() })
    }

    /// The vectors of each valid row, `(T, E)`, and the rows without vectors. If `skip` is false,
    /// the computation ends at the first invalid row. `task` is `"query"`, `"document"` or `None`.
    #[expect(clippy::too_many_arguments)]
    #[pyo3(signature = (texts, prompt, task, long_texts, skip, progress))]
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        prompt: String,
        task: Option<&str>,
        long_texts: &str,
        skip: bool,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Vec<Bound<'py, PyArray2<f32>>>, Invalid)> {
        let role = match task {
            Some("query") => TextRole::Query,
            Some("document") => TextRole::Document,
            _ => TextRole::Unspecified,
        };
        let job = Job {
            model: Vectors { embedder: self.embedder.clone() },
            texts: Texts::from_python(texts)?,
            prompt,
            role,
            long_texts: model::named("long_texts", long_texts)?,
            skip,
        };
        let (vectors, invalid) = self.pool.run(py, progress, move |watch| job.run(watch))?;
        let width = self.embedder.dimension();
        let array = |vectors: MultiVector| {
            let shape = (vectors.len(), width);
            let array = Array2::from_shape_vec(shape, vectors.into_values()).map_err(error)?;
            Ok(array.into_pyarray(py))
        };
        let arrays: PyResult<Vec<_>> = vectors.into_iter().map(array).collect();
        Ok((arrays?, invalid))
    }

    /// The score of each query and document, `(A, B)`. The vectors of a text are `(T, E)`; E is
    /// the same for all texts.
    fn similarity<'py>(
        &self,
        py: Python<'py>,
        queries: Vec<PyReadonlyArray2<'py, f32>>,
        documents: Vec<PyReadonlyArray2<'py, f32>>,
        function: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let function = model::named("similarity_fn_name", function)?;
        let (queries, documents) = (Joined::new(&queries), Joined::new(&documents));
        let scores = self.pool.run(py, None, move |watch| {
            let (a, b) = (queries.len(), documents.len());
            let mut scores = Vec::with_capacity(a * b);
            for i in 0..a {
                let part = || queries.scores(i, function, &documents.values, &documents.offsets);
                scores.extend(watch.compute(part).map_err(error)?.map_err(error)?);
            }
            Array2::from_shape_vec((a, b), scores).map_err(error)
        })?;
        Ok(scores.into_pyarray(py))
    }

    /// The score of each query and the document at the same place, `(A,)`, given as for
    /// `similarity`. There are as many documents as queries.
    fn similarity_pairwise<'py>(
        &self,
        py: Python<'py>,
        queries: Vec<PyReadonlyArray2<'py, f32>>,
        documents: Vec<PyReadonlyArray2<'py, f32>>,
        function: &str,
    ) -> PyResult<Bound<'py, PyArray1<f32>>> {
        let function = model::named("similarity_fn_name", function)?;
        let (queries, documents) = (Joined::new(&queries), Joined::new(&documents));
        let scores = self.pool.run(py, None, move |watch| {
            let mut scores = Vec::with_capacity(queries.len());
            for start in (0..queries.len()).step_by(PAIRS) {
                let pairs = start..queries.len().min(start + PAIRS);
                let score = |i: usize| {
                    let document = documents.text(i);
                    let offsets = [0, document.len() / documents.width];
                    Ok(queries.scores(i, function, document, &offsets)?[0])
                };
                let part = || pairs.into_par_iter().map(score).collect::<Result<Vec<_>, Error>>();
                scores.extend(watch.compute(part).map_err(error)?.map_err(error)?);
            }
            Ok(scores)
        })?;
        Ok(scores.into_pyarray(py))
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

/// The vectors of a multi-vector model.
struct Vectors {
    embedder: Arc<encoder::MultiVectorEmbedder>,
}

impl Compute for Vectors {
    type Value = MultiVector;

    type Model = encoder::MultiVectorEmbedder;

    fn model(&self) -> &encoder::MultiVectorEmbedder {
        &self.embedder
    }

    fn compute(&self, texts: &TokenizedTexts, run: &mut Run) -> Result<Vec<MultiVector>, Error> {
        self.embedder.embed_rows(texts, run)
    }

    fn can_fail(&self, _prompt: &str) -> bool {
        false
    }

    fn width(&self) -> usize {
        1
    }
}

/// The vectors of many texts, without padding. The text `i` has the vectors from `offsets[i]` to
/// `offsets[i + 1]`.
struct Joined {
    values: Vec<f32>,
    offsets: Vec<usize>,
    width: usize,
}

impl Joined {
    fn new(texts: &[PyReadonlyArray2<f32>]) -> Self {
        let (mut values, mut offsets) = (vec![], vec![0]);
        for text in texts {
            let own = text.as_array();
            match own.as_slice() {
                Some(own) => values.extend_from_slice(own),
                None => values.extend(own), // not in the order of rows
            }
            offsets.push(offsets[offsets.len() - 1] + text.shape()[0]);
        }
        let width = texts.first().map_or(1, |text| text.shape()[1]);
        Self { values, offsets, width: width.max(1) }
    }

    fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    fn text(&self, i: usize) -> &[f32] {
        &self.values[self.offsets[i] * self.width..self.offsets[i + 1] * self.width]
    }

    /// The score of text `i` as a query and of each document.
    fn scores(
        &self,
        i: usize,
        function: LateInteraction,
        documents: &[f32],
        offsets: &[usize],
    ) -> Result<Vec<f32>, Error> {
        let max_sim = MaxSim::new(self.text(i), self.width)?;
        let scores = max_sim.scores(VectorSlice::F32(documents), offsets).into_iter();
        let count = self.offsets[i + 1] - self.offsets[i];
        Ok(scores.map(|score| function.of_max_sim(score, count)).collect())
    }
}
