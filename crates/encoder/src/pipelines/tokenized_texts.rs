//! Tokenized texts, and their computation in batches.

use std::{
    cmp::Reverse,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    EmbedOptions, Error, InputError, LongTexts, Result, TextRole, TextTokenizer, Tokens,
    error::beginning, models::ragged_batch::within_budget, pipelines::distinct::Distinct,
    text::prompts::Prompts, text::tokenizer::Count,
};

/// Number of texts that are tokenized and computed together, where texts are a stream or a long
/// list. Within a chunk, the texts are sorted by length and split into batches by their number of
/// tokens. The chunk bounds the memory of tokens and results, and does not affect the results.
pub const TEXTS_PER_CHUNK: usize = 2048;

/// Tokenized texts, from [`Embedder::tokenize`](crate::Embedder::tokenize).
#[derive(Clone, Debug, Default)]
pub struct TokenizedTexts {
    /// The sequences of each text: one, or several with [`LongTexts::Windows`].
    pub(crate) windows: Vec<Vec<Tokens>>,
    /// Number of tokens at the beginning of the first sequence of a text that belong to the prompt,
    /// the special token before it included; 0 without a prompt.
    pub(crate) prompt: usize,
    truncated: Vec<Truncated>,
    /// The side of an asymmetric model that computes the texts.
    pub(crate) role: TextRole,
}

impl TokenizedTexts {
    /// Tokenizes each text, with a prompt before it.
    ///
    /// # Errors
    /// [`InputError::NoPrompt`] for a prompt that the model does not have;
    /// [`crate::FileError::Tokenizer`] if the vocabulary has no token for a part of a text;
    /// [`InputError::NoTokens`] if a text has no tokens, not even special ones;
    /// [`InputError::LongText`] for a text that is too long, with [`LongTexts::Refuse`].
    pub(crate) fn new<S: AsRef<str>>(
        tokenizer: &TextTokenizer,
        prompts: &Prompts,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Self> {
        let tokenized = Self::with_empty_texts(tokenizer, prompts, texts, options)?;
        let mut windows = tokenized.windows.iter();
        if let Some(empty) = windows.position(|windows| windows[0].input_ids.is_empty()) {
            return Err(InputError::NoTokens { text: beginning(texts[empty].as_ref()) }.into());
        }
        Ok(tokenized)
    }

    /// [`Self::new`] for a model in which a text may have no tokens.
    ///
    /// # Errors
    /// The errors of [`Self::new`] except [`InputError::NoTokens`].
    pub(crate) fn with_empty_texts<S: AsRef<str>>(
        tokenizer: &TextTokenizer,
        prompts: &Prompts,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Self> {
        let prompt = prompts.text(options.prompt)?;
        let (windows, prompt) = if prompt.is_empty() {
            (split(tokenizer, texts, options.long_texts)?, 0)
        } else {
            let prompted = texts.iter().map(|text| format!("{prompt}{}", text.as_ref()));
            let prompted: Vec<String> = prompted.collect();
            (split(tokenizer, &prompted, options.long_texts)?, tokenizer.prompt_length(prompt)?)
        };
        Ok(Self { prompt, ..Self::from_windows(tokenizer, windows, texts, options)? })
    }

    /// The tokens of texts without a prompt.
    ///
    /// # Errors
    /// [`InputError::LongText`] for a truncated text, with [`LongTexts::Refuse`].
    fn from_windows<S: AsRef<str>>(
        tokenizer: &TextTokenizer,
        windows: Vec<Vec<Tokens>>,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Self> {
        let truncated = Truncated::of(windows.iter().map(|windows| &windows[0]));
        if let (LongTexts::Refuse, Some(long)) = (options.long_texts, truncated.first()) {
            let text = beginning(texts[long.text].as_ref());
            let max = tokenizer.max_seq_length();
            return Err(
                InputError::LongText { index: long.text, text, got: long.tokens, max }.into()
            );
        }
        Ok(Self { windows, prompt: 0, truncated, role: options.role() })
    }

    /// The tokens of texts without special tokens. A text may have none.
    ///
    /// # Errors
    /// The errors of [`Self::new`] except [`InputError::NoTokens`].
    pub(crate) fn without_special_tokens<S: AsRef<str>>(
        tokenizer: &TextTokenizer,
        prompts: &Prompts,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Self> {
        let prompt = prompts.text(options.prompt)?;
        let max = match options.long_texts {
            LongTexts::Windows => usize::MAX,
            _ => tokenizer.max_seq_length(),
        };
        let window = |text: &S| {
            let prompted = format!("{prompt}{}", text.as_ref());
            Ok(vec![tokenizer.encode_bare_within(&prompted, max, count(options.long_texts))?])
        };
        let windows = texts.iter().map(window).collect::<Result<Vec<_>>>()?;
        Self::from_windows(tokenizer, windows, texts, options)
    }

    /// The number of texts.
    pub(crate) fn len(&self) -> usize {
        self.windows.len()
    }

    /// The tokens of text `i` and what else its row depends on, as numbers. They are equal for texts
    /// with equal rows.
    pub(crate) fn key(&self, i: usize) -> Box<[u32]> {
        let mut key = vec![self.prompt as u32, self.role as u32];
        for Tokens { input_ids, token_type_ids, .. } in &self.windows[i] {
            let has_types = token_type_ids.iter().any(|&id| id != 0);
            key.extend([input_ids.len() as u32, has_types.into()]);
            key.extend(input_ids);
            key.extend(if has_types { &token_type_ids[..] } else { &[] });
        }
        key.into()
    }

    /// Some of the texts. The truncated ones are not listed.
    pub(crate) fn select(&self, texts: &[usize]) -> Self {
        let windows = texts.iter().map(|&text| self.windows[text].clone()).collect();
        Self { windows, prompt: self.prompt, truncated: vec![], role: self.role }
    }

    /// Whether a text has several sequences.
    pub(crate) fn have_windows(&self) -> bool {
        self.windows.iter().any(|windows| windows.len() > 1)
    }

    /// The total number of tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.windows.iter().flatten().map(|window| window.input_ids.len()).sum()
    }

    /// The truncated texts, in the order of the input.
    pub fn truncated(&self) -> &[Truncated] {
        &self.truncated
    }

    /// The sequences of all texts in order, each with the number of tokens at its beginning that
    /// belong to the prompt, the special token before it included. A text has one sequence, or
    /// several with [`LongTexts::Windows`].
    pub fn sequences(&self) -> impl Iterator<Item = (&Tokens, usize)> {
        self.windows.iter().flat_map(|windows| windows.iter().zip(prompt_lengths(self.prompt)))
    }

    /// [`Self::sequences`] without copies of their tokens.
    pub fn into_sequences(self) -> Vec<(Tokens, usize)> {
        let text = |windows: Vec<Tokens>| windows.into_iter().zip(prompt_lengths(self.prompt));
        self.windows.into_iter().flat_map(text).collect()
    }
}

/// The tokens of a text that is given as ids below `size`, special tokens included.
///
/// # Errors
/// The errors of [`Embedder::tokens_from_ids`](crate::Embedder::tokens_from_ids).
pub(crate) fn tokens_from_ids(
    input_ids: Vec<u32>,
    size: usize,
    tokenizer: &TextTokenizer,
) -> Result<Tokens> {
    let max = tokenizer.max_seq_length();
    if input_ids.is_empty() {
        return Err(InputError::EmptySequence { index: 0 }.into());
    }
    if let Some(&id) = input_ids.iter().find(|&&id| id as usize >= size) {
        let (name, field, got) = ("input_ids", "vocab_size", i64::from(id));
        return Err(InputError::Id { name, got, size, field }.into());
    }
    if input_ids.len() > max {
        return Err(InputError::TooLong { got: input_ids.len(), max }.into());
    }
    Ok(Tokens { token_type_ids: vec![0; input_ids.len()], input_ids, truncated: 0 })
}

/// The number of prompt tokens of each window of a text: only the first window contains the prompt.
fn prompt_lengths(prompt: usize) -> impl Iterator<Item = usize> {
    std::iter::once(prompt).chain(std::iter::repeat(0))
}

/// Tokenizes each text to one sequence, or to several with [`LongTexts::Windows`].
fn split<S: AsRef<str>>(
    tokenizer: &TextTokenizer,
    texts: &[S],
    long_texts: LongTexts,
) -> Result<Vec<Vec<Tokens>>> {
    if long_texts == LongTexts::Windows {
        return tokenizer.encode_windows(texts);
    }
    let all = tokenizer.encode_counting(texts, count(long_texts))?;
    Ok(all.into_iter().map(|tokens| vec![tokens]).collect())
}

/// The error of a refused text has the number of its tokens.
fn count(long_texts: LongTexts) -> Count {
    if long_texts == LongTexts::Refuse { Count::All } else { Count::Kept }
}

/// A truncated text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Truncated {
    /// The index of the text.
    pub text: usize,
    /// Number of tokens before truncation, special tokens included. It is too small, but more than
    /// `kept`, if the rest of the text was not tokenized.
    pub tokens: usize,
    /// Number of tokens after truncation.
    pub kept: usize,
}

impl Truncated {
    /// Lists the truncated texts among tokenized texts.
    ///
    /// # Examples
    /// ```
    /// use encoder::{Tokens, Truncated};
    ///
    /// let whole = Tokens { input_ids: vec![2, 3], token_type_ids: vec![0, 0], truncated: 0 };
    /// let cut = Tokens { truncated: 5, ..whole.clone() };
    /// let truncated = Truncated::of(&[whole, cut]);
    /// assert_eq!((truncated[0].text, truncated[0].tokens, truncated[0].kept), (1, 7, 2));
    /// ```
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a Tokens>) -> Vec<Self> {
        let all = texts.into_iter().enumerate().filter(|(_, tokens)| tokens.truncated > 0);
        let truncated = all.map(|(text, tokens)| {
            let kept = tokens.input_ids.len();
            Self { text, tokens: kept + tokens.truncated, kept }
        });
        truncated.collect()
    }
}

/// The computation of one batch, for the callers of
/// [`Embedder::embed_tokenized`](crate::Embedder::embed_tokenized).
pub type Batch<'a> = dyn FnMut() -> Result<()> + Send + 'a;

/// Runs each batch until another thread sets `stop`. The flag is read before each batch.
///
/// # Errors
/// The function returns [`Error::Stopped`] if `stop` is set.
/// # Examples
/// ```
/// use encoder::{Error, unless_stopped};
///
/// let stop = true.into();
/// let stopped = unless_stopped(&stop)(&mut || panic!("the batch is not computed"));
/// assert!(matches!(stopped, Err(Error::Stopped)));
/// ```
pub fn unless_stopped(stop: &AtomicBool) -> impl Fn(&mut Batch) -> Result<()> {
    |batch| if stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { batch() }
}

/// Computes sequences in batches of at most `budget` tokens, each within `run`; equal sequences once.
/// Returns the results of the batches, and the position of each sequence in the concatenated
/// results.
///
/// # Errors
/// The errors of `compute` and `run`; [`Error::Stopped`] if `run` does not call a batch.
pub(crate) fn in_batches<T: Send>(
    sequences: &[(&Tokens, usize)],
    budget: usize,
    run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    compute: impl Fn(&[(&Tokens, usize)]) -> Result<T> + Sync,
) -> Result<(Vec<T>, Vec<u32>)> {
    in_batches_of(sequences, |tokens| tokens.input_ids.len(), budget, run, compute)
}

/// [`in_batches`] for sequences of which `length` tokens are computed.
fn in_batches_of<T: Send>(
    sequences: &[(&Tokens, usize)],
    length: impl Fn(&Tokens) -> usize,
    budget: usize,
    run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    compute: impl Fn(&[(&Tokens, usize)]) -> Result<T> + Sync,
) -> Result<(Vec<T>, Vec<u32>)> {
    let Distinct { items: sequences, indices } = Distinct::prompted(sequences);
    let lengths: Vec<usize> = sequences.iter().map(|(tokens, _)| length(tokens)).collect();
    // Sequences are sorted by length although nothing is padded. Batches, and their parts in
    // `forward_ragged`, end between sequences: neighbours of equal length fill them evenly, and
    // give the threads attention tasks of equal size.
    let order = by_length(&lengths);
    let mut results = vec![];
    for batch in within_budget(&order, &lengths, budget) {
        let batch: Vec<(&Tokens, usize)> = batch.iter().map(|&i| sequences[i]).collect();
        results.push(within(run, || compute(&batch))?);
    }
    let mut positions = vec![0; order.len()];
    for (position, i) in (0..).zip(order) {
        positions[i] = position;
    }
    Ok((results, indices.into_iter().map(|i| positions[i]).collect()))
}

/// [`in_batches`] for results that are rows, one per sequence: returns the row of each sequence.
/// `length` is the number of tokens of a sequence that are computed.
///
/// # Errors
/// The errors of [`in_batches`].
pub(crate) fn rows_in_batches<R: Clone + Send>(
    sequences: &[(&Tokens, usize)],
    length: impl Fn(&Tokens) -> usize,
    budget: usize,
    run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    compute: impl Fn(&[(&Tokens, usize)]) -> Result<Vec<R>> + Sync,
) -> Result<Vec<R>> {
    let (rows, positions) = in_batches_of(sequences, length, budget, run, compute)?;
    let mut rows: Vec<Option<R>> = rows.into_iter().flatten().map(Some).collect();
    let mut uses = vec![0; rows.len()];
    positions.iter().for_each(|&position| uses[position as usize] += 1);
    let row = |position: u32| {
        let position = position as usize;
        uses[position] -= 1;
        let row = if uses[position] == 0 { rows[position].take() } else { rows[position].clone() };
        row.expect("only the last use takes the row")
    };
    Ok(positions.into_iter().map(row).collect())
}

/// Computes sequences in chunks of [`TEXTS_PER_CHUNK`], in their order, each within `run`.
///
/// # Errors
/// The errors of [`in_batches`].
pub(crate) fn in_chunks<T: Send>(
    sequences: &[(&Tokens, usize)],
    run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    compute: impl Fn(&[(&Tokens, usize)]) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    sequences.chunks(TEXTS_PER_CHUNK).map(|chunk| within(run, || compute(chunk))).collect()
}

/// The result of `compute`, which `run` calls.
fn within<T: Send>(
    run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    compute: impl Fn() -> Result<T> + Sync,
) -> Result<T> {
    let mut result = None;
    run(&mut || {
        result = Some(compute()?);
        Ok(())
    })?;
    result.ok_or(Error::Stopped)
}

/// The indices of `lengths` in descending order of length. The sort is stable.
fn by_length(lengths: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&i| Reverse(lengths[i]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_stay_within_the_budget_and_contain_every_text() {
        let lengths = [3, 9, 1, 4, 20, 4];
        let order = by_length(&lengths);
        assert_eq!(order, [4, 1, 3, 5, 0, 2]); // texts of equal length keep their order
        let batches = within_budget(&order, &lengths, 10);
        assert_eq!(batches, [&[4][..], &[1], &[3, 5], &[0, 2]]);
        assert!(within_budget(&[], &[], 10).is_empty());
    }
}
