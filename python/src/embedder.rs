//! Texts to vectors.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use candle_core::{DType, Tensor};
use encoder::{
    Batch, EmbedOptions, Error, ModelFiles, Pooling, PoolingMode, Prompt, RaggedBatch,
    TEXTS_PER_CHUNK, Tokens, unless_stopped,
};
use numpy::{IntoPyArray, PyArray2, ndarray::Array2};
use ops::l2_normalize;
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    errors::error,
    model,
    pool::{Pool, Watch},
    texts::Texts,
};

/// The number of texts whose token embeddings are computed together.
const TOKEN_GROUP: usize = 64;
/// The maximum number of bytes of a group that has more than one text.
const GROUP_BYTES: usize = 1 << 20;

/// The rows that have no vector, each with the reason.
type Invalid = Vec<(usize, String)>;
/// One row per text and one column per token, `(B, T)`.
type TokenArray<'py> = Bound<'py, PyArray2<i64>>;

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
            embedder,
            texts: Texts::from_python(texts)?,
            prompt,
            width,
            normalize,
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
        let (embedder, texts) = (self.embedder.clone(), Texts::from_python(texts)?);
        let padded = self.pool.run(py, None, move |watch| {
            let (tokenizer, rows) = (embedder.tokenizer(), texts.rows());
            let mut tokens = Vec::with_capacity(rows.len());
            for group in groups(&rows, TEXTS_PER_CHUNK) {
                let prompted = prompted(&rows[group.clone()], group.start, &prompt)?;
                let part = watch.compute(|| tokenizer.encode(&prompted)).map_err(error)?;
                tokens.extend(part.map_err(error)?);
            }
            let longest = tokens.iter().map(|tokens| tokens.input_ids.len()).max().unwrap_or(0);
            let pad = |value: &dyn Fn(&Tokens, usize) -> Option<u32>, padding: u32| {
                Array2::from_shape_fn((tokens.len(), longest), |(text, position)| {
                    i64::from(value(&tokens[text], position).unwrap_or(padding))
                })
            };
            Ok([
                pad(&|text, i| text.input_ids.get(i).copied(), tokenizer.pad_token_id()),
                pad(&|text, i| text.input_ids.get(i).map(|_| 1), 0),
                pad(&|text, i| text.token_type_ids.get(i).copied(), 0),
            ])
        })?;
        Ok(padded.map(|array| array.into_pyarray(py)).into())
    }
}

/// Consecutive ranges of at most `max_texts` rows, each of at most [`GROUP_BYTES`] unless it has
/// one row.
fn groups(rows: &[crate::texts::Row], max_texts: usize) -> Vec<Range<usize>> {
    let (mut groups, mut group, mut bytes) = (vec![], 0..0, 0);
    for row in rows {
        let len = row.as_ref().map_or(0, |text| text.len());
        if !group.is_empty() && (group.len() == max_texts || bytes + len > GROUP_BYTES) {
            groups.push(group.clone());
            (group, bytes) = (group.end..group.end, 0);
        }
        group.end += 1;
        bytes += len;
    }
    if !group.is_empty() {
        groups.push(group);
    }
    groups
}

/// The texts with a prompt before each. `first` is the index of the first row.
fn prompted(rows: &[crate::texts::Row], first: usize, prompt: &str) -> PyResult<Vec<String>> {
    let text = |(i, row): (usize, &crate::texts::Row)| {
        let text = row.map_err(|reason| error(format!("text {}: {reason}", first + i)))?;
        Ok(format!("{prompt}{text}"))
    };
    rows.iter().enumerate().map(text).collect()
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

/// An embedding computation.
struct Job {
    embedder: Arc<encoder::Embedder>,
    texts: Texts,
    prompt: String,
    /// The length of the vectors after truncation.
    width: usize,
    normalize: bool,
    long_texts: encoder::LongTexts,
    skip: bool,
}

impl Job {
    fn run(&self, watch: &Watch) -> PyResult<(Vec<f32>, Invalid)> {
        let rows = self.texts.rows();
        let (mut values, mut invalid) = (Vec::with_capacity(rows.len() * self.width), vec![]);
        for group in groups(&rows, TEXTS_PER_CHUNK) {
            let (first, rows) = (group.start, &rows[group]);
            let (mut texts, mut indices) = (Vec::with_capacity(rows.len()), vec![]);
            for (i, row) in (first..).zip(rows) {
                match row {
                    Ok(text) => {
                        texts.push(*text);
                        indices.push(i);
                    }
                    Err(reason) => {
                        invalid.push((i, reason.to_string()));
                        if !self.skip {
                            break;
                        }
                    }
                }
            }
            // Without `skip`, the texts before an unreadable row are embedded although their
            // vectors are not returned, because one of these texts can be the first invalid row.
            let mut vectors = self.embed(&texts, watch);
            if vectors.as_ref().is_err_and(|error| !matches!(error, Error::Stopped)) {
                let failures: Vec<Option<String>> =
                    texts.iter().map(|text| self.failure(text, watch)).collect();
                if failures.iter().any(Option::is_some) {
                    let failed = indices.iter().zip(&failures);
                    invalid.extend(failed.filter_map(|(&i, f)| Some((i, f.clone()?))));
                    let mut fine = failures.iter().map(Option::is_none);
                    texts.retain(|_| fine.next() == Some(true));
                    if self.skip {
                        vectors = self.embed(&texts, watch);
                    }
                }
            }
            if !self.skip && !invalid.is_empty() {
                break;
            }
            values.extend(vectors.map_err(error)?);
            watch.done.store(first + rows.len(), Ordering::Relaxed);
        }
        invalid.sort();
        Ok((values, invalid))
    }

    fn options(&self) -> EmbedOptions<'_> {
        let options = EmbedOptions::new().with_prompt(Prompt::Text(&self.prompt));
        options.with_long_texts(self.long_texts)
    }

    fn embed(&self, texts: &[&str], watch: &Watch) -> Result<Vec<f32>, Error> {
        if texts.is_empty() {
            return Ok(vec![]);
        }
        let tokenized = watch.compute(|| self.embedder.tokenize(texts, self.options()))??;
        let run = |batch: &mut Batch| watch.compute(batch)?;
        self.finish(self.embedder.embed_tokenized(&tokenized, run)?)
    }

    /// Truncates and normalises vectors `(B, E)`, and returns their values.
    fn finish(&self, mut x: Tensor) -> Result<Vec<f32>, Error> {
        let is_truncated = self.width < self.embedder.dimension();
        if is_truncated {
            x = x.narrow(1, 0, self.width)?.contiguous()?;
        }
        if self.normalize && (is_truncated || !self.embedder.is_normalized()) {
            x = l2_normalize(&x)?;
        }
        Ok(x.flatten_all()?.to_vec1()?)
    }

    /// The error of embedding this text alone.
    fn failure(&self, text: &str, watch: &Watch) -> Option<String> {
        let part = || match self.embedder.tokenize(&[text], self.options()) {
            // After tokenization, a single text can fail only if all its tokens belong to the
            // prompt.
            Ok(_) if self.prompt.is_empty() => None,
            Ok(tokenized) => {
                self.embedder.embed_tokenized(&tokenized, unless_stopped(&watch.stop)).err()
            }
            Err(error) => Some(error),
        };
        watch.compute(part).unwrap_or_else(Some).map(|error| error.to_string())
    }
}
