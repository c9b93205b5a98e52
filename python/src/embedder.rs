//! Texts to vectors.

use std::sync::{Arc, atomic::Ordering};

use candle_core::DType;
use encoder::{
    Error, ModelFiles, Pooling, PoolingMode, RaggedBatch, TextRole, TokenizedTexts, Tokens,
};
use numpy::{IntoPyArray, PyArray2, ndarray::Array2};
use ops::l2_normalize;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    embedding::{Compute, Invalid, Job, Run, TokenArray, groups, padded_tokens, prompted},
    errors::error,
    model,
    pool::Pool,
    texts::Texts,
};

/// The number of texts whose token embeddings are computed together.
const TOKEN_GROUP: usize = 64;
#[pyclass(frozen, module = "encodle._encodle")]
pub struct Embedder {
    pub embedder: Arc<encoder::Embedder>,
    pub pool: Pool,
}

fn load(
    files: &ModelFiles,
    options: &encoder::LoadOptions,
    pooling: &[String],
    token_budget: Option<usize>,
) -> PyResult<encoder::Embedder> {
    let modes: encoder::Result<Vec<PoolingMode>> =
        pooling.iter().map(|mode| mode.parse()).collect();
    let modes = modes.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let embedder = match &modes[..] {
        [] => encoder::Embedder::from_files(files, options),
        modes => Pooling::new(modes)
            .and_then(|pooling| encoder::Embedder::from_transformer(files, pooling, options)),
    };
    let embedder = embedder.map_err(error)?;
    Ok(match token_budget {
        Some(tokens) => embedder.with_token_budget(tokens),
        None => embedder,
    })
}

#[pymethods]
impl Embedder {
    #[new]
    fn new(
        py: Python<'_>,
        model: model::Source,
        precision: &str,
        pooling: Vec<String>,
        token_budget: Option<usize>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let (options, pool) = (model::options(precision)?, Pool::new(py, threads)?);
        let embedder = pool.run(py, None, move |watch| {
            let part = || load(&model::open(&model)?, &options, &pooling, token_budget);
            watch.compute(part).map_err(error)?
        })?;
        Ok(Self { embedder: Arc::new(embedder), pool })
    }

    /// The `truncate_dim` of the model's files; `None` if it does not shorten the vectors.
    #[getter]
    fn truncate_dim(&self) -> Option<usize> {
        let dimension = self.embedder.dimension();
        (dimension < self.embedder.max_dimension()).then_some(dimension)
    }

    /// The length of vectors truncated to `truncate_dim`; if it is `None`, of whole vectors.
    #[pyo3(signature = (truncate_dim))]
    fn dimension(&self, truncate_dim: Option<usize>) -> usize {
        let max = self.embedder.max_dimension();
        truncate_dim.map_or(max, |dimension| dimension.min(max))
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
        let embedder = encoder::Embedder::clone(&self.embedder);
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
        normalize: bool,
        truncate_dim: Option<usize>,
        long_texts: &str,
        skip: bool,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, Invalid)> {
        let width = self.dimension(truncate_dim);
        let embedder = if width == self.embedder.dimension() {
            self.embedder.clone()
        } else {
            let embedder = encoder::Embedder::clone(&self.embedder);
            let dimension = embedder.max_dimension();
            Arc::new(embedder.with_dimension(dimension).map_err(error)?)
        };
        let job = Job {
            model: Vectors { embedder, width, normalize },
            texts: Texts::from_python(texts)?,
            prompt,
            role: TextRole::Unspecified,
            long_texts: model::named("long_texts", long_texts)?,
            skip,
        };
        let (values, invalid) = self.pool.run(py, progress, move |watch| job.run(watch))?;
        let shape = (values.len() / width, width);
        Ok((Array2::from_shape_vec(shape, values).map_err(error)?.into_pyarray(py), invalid))
    }

    /// The last hidden states of each text, `(T, E)`.
    fn token_embeddings<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        prompt: String,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyArray2<f32>>>> {
        let (embedder, texts) = (self.embedder.clone(), Texts::from_python(texts)?);
        let arrays = self.pool.run(py, progress, move |watch| {
            let rows = texts.rows();
            let mut arrays = Vec::with_capacity(rows.len());
            for group in groups(&rows, TOKEN_GROUP) {
                let prompted = prompted(&rows[group.clone()], group.start, &prompt)?;
                let part = || {
                    let tokens = embedder.tokenizer().encode(&prompted)?;
                    hidden_states(&embedder, &tokens)
                };
                arrays.extend(watch.compute(part).map_err(error)?.map_err(error)?);
                watch.done.store(arrays.len(), Ordering::Relaxed);
            }
            Ok(arrays)
        })?;
        Ok(arrays.into_iter().map(|array| array.into_pyarray(py)).collect())
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

/// The hidden states of each sequence.
fn hidden_states(
    embedder: &encoder::Embedder,
    tokens: &[Tokens],
) -> Result<Vec<Array2<f32>>, Error> {
    let mut batch = RaggedBatch::default();
    for text in tokens {
        batch.push(&text.input_ids, &text.token_type_ids)?;
    }
    let hidden = embedder.encoder()?.forward_ragged(&batch)?.to_dtype(DType::F32)?; // (N, E)
    let states = batch.offsets().windows(2).map(|at| {
        let (len, width) = (at[1] - at[0], hidden.dim(1)?);
        let values = hidden.narrow(0, at[0], len)?.flatten_all()?.to_vec1()?;
        Ok(Array2::from_shape_vec((len, width), values).expect("len · width values"))
    });
    states.collect()
}

/// The vectors of a dense model.
struct Vectors {
    embedder: Arc<encoder::Embedder>,
    /// The length of the vectors after truncation.
    width: usize,
    normalize: bool,
}

impl Compute for Vectors {
    type Value = f32;

    type Model = encoder::Embedder;

    fn model(&self) -> &encoder::Embedder {
        &self.embedder
    }

    /// The values of all vectors.
    fn compute(&self, texts: &TokenizedTexts, run: &mut Run) -> Result<Vec<f32>, Error> {
        let mut x = self.embedder.embed_tokenized(texts, run)?; // (B, E)
        let is_truncated = self.width < self.embedder.dimension();
        if is_truncated {
            x = x.narrow(1, 0, self.width)?.contiguous()?;
        }
        if self.normalize && (is_truncated || !self.embedder.is_normalized()) {
            x = l2_normalize(&x)?;
        }
        Ok(x.flatten_all()?.to_vec1()?)
    }

    /// A single text can fail only if all its tokens belong to the prompt.
    fn can_fail(&self, prompt: &str) -> bool {
        !prompt.is_empty()
    }

    fn width(&self) -> usize {
        self.width
    }
}
