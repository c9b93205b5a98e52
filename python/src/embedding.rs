//! The computation of texts to rows, for all kinds of embedding models.

use std::{ops::Range, sync::atomic::Ordering};

use encoder::{
    Batch, Embed, EmbedOptions, Error, LongTexts, Prompt, TEXTS_PER_CHUNK, TextRole, TextTokenizer,
    TokenizedTexts, Tokens, unless_stopped,
};
use numpy::{IntoPyArray, PyArray2, ndarray::Array2};
use pyo3::prelude::*;

use crate::{
    errors::error,
    pool::{Pool, Watch},
    texts::{Row, Texts},
};

/// The maximum number of bytes of a group that has more than one text.
const GROUP_BYTES: usize = 1 << 20;

/// The rows that have no vector, each with the reason.
pub type Invalid = Vec<(usize, String)>;
/// One row per text and one column per token, `(B, T)`.
pub type TokenArray<'py> = Bound<'py, PyArray2<i64>>;
/// The caller of each batch of a computation.
pub type Run<'a> = dyn FnMut(&mut Batch) -> Result<(), Error> + 'a;

/// A model with the settings of a call.
pub trait Compute: Send + Sync + 'static {
    /// A value of the result.
    type Value: Send + 'static;

    /// The type of the model.
    type Model: Embed;

    fn model(&self) -> &Self::Model;

    /// The values of all texts, each batch computed within `run`.
    fn compute(&self, texts: &TokenizedTexts, run: &mut Run) -> Result<Vec<Self::Value>, Error>;

    /// Whether [`Self::compute`] can fail for a single text that has been tokenized with this
    /// prompt.
    fn can_fail(&self, prompt: &str) -> bool;

    /// The number of values of a text.
    fn width(&self) -> usize;
}

/// An embedding computation.
pub struct Job<C> {
    pub model: C,
    pub texts: Texts,
    pub prompt: String,
    pub role: TextRole,
    pub long_texts: LongTexts,
    /// Whether invalid rows are left out. Otherwise the computation ends at the first invalid row.
    pub skip: bool,
}

impl<C: Compute> Job<C> {
    /// The values of the valid rows, and the rows without values.
    pub fn run(&self, watch: &Watch) -> PyResult<(Vec<C::Value>, Invalid)> {
        let rows = self.texts.rows();
        let (mut values, mut invalid) =
            (Vec::with_capacity(rows.len() * self.model.width()), vec![]);
        for group in groups(&rows, self.model.model().texts_per_chunk()) {
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
        options.with_role(self.role).with_long_texts(self.long_texts)
    }

    fn embed(&self, texts: &[&str], watch: &Watch) -> Result<Vec<C::Value>, Error> {
        if texts.is_empty() {
            return Ok(vec![]);
        }
        let tokenized = watch.compute(|| self.model.model().tokenize(texts, self.options()))??;
        self.model.compute(&tokenized, &mut |batch| watch.compute(batch)?)
    }

    /// The error of embedding this text alone.
    fn failure(&self, text: &str, watch: &Watch) -> Option<String> {
        let part = || match self.model.model().tokenize(&[text], self.options()) {
            Ok(_) if !self.model.can_fail(&self.prompt) => None,
            Ok(tokenized) => self.model.compute(&tokenized, &mut unless_stopped(&watch.stop)).err(),
            Err(error) => Some(error),
        };
        watch.compute(part).unwrap_or_else(Some).map(|error| error.to_string())
    }
}

/// Consecutive ranges of at most `max_texts` rows, each of at most [`GROUP_BYTES`] unless it has
/// one row.
pub fn groups(rows: &[Row], max_texts: usize) -> Vec<Range<usize>> {
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
pub fn prompted(rows: &[Row], first: usize, prompt: &str) -> PyResult<Vec<String>> {
    let text = |(i, row): (usize, &Row)| {
        let text = row.map_err(|reason| error(format!("text {}: {reason}", first + i)))?;
        Ok(format!("{prompt}{text}"))
    };
    rows.iter().enumerate().map(text).collect()
}

/// `input_ids`, `attention_mask` and `token_type_ids`, each `(B, T)`, padded to the longest text.
pub fn padded_tokens<'py>(
    py: Python<'py>,
    pool: &Pool,
    tokenizer: TextTokenizer,
    texts: &Bound<'py, PyAny>,
    prompt: String,
) -> PyResult<(TokenArray<'py>, TokenArray<'py>, TokenArray<'py>)> {
    let texts = Texts::from_python(texts)?;
    let padded = pool.run(py, None, move |watch| {
        let rows = texts.rows();
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
