//! Ragged batches: sequences of different lengths stored one after another, without padding.

use std::borrow::Cow;

use candle_core::{DType, Tensor};

use crate::{EncoderConfig, InputError, Result, Tokens};

/// Default maximum number of tokens per batch.
///
/// The budget bounds memory: a batch's hidden states are kept until they are pooled. On a CPU,
/// [`EncoderModel::forward_ragged`](crate::EncoderModel::forward_ragged) splits each batch again,
/// into parts of about 128 tokens per thread, so that the activations of a part stay in the caches.
/// On a GPU, a batch is computed as a whole.
pub(crate) const TOKEN_BUDGET: usize = 2048;

/// A batch of sequences stored one after another, with N tokens in total.
///
/// # Examples
/// ```
/// let mut batch = encoder::RaggedBatch::default();
/// batch.push(&[101, 7592, 102], &[0, 0, 0])?;
/// batch.push(&[101, 102], &[0, 0])?;
/// assert_eq!((batch.tokens(), batch.offsets()), (5, &[0, 3, 5][..]));
/// batch.push(&[101], &[]).unwrap_err();
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct RaggedBatch {
    input_ids: Vec<u32>,
    token_type_ids: Vec<u32>,
    /// `None`: the positions follow from the ids of each sequence.
    position_ids: Option<Vec<u32>>,
    offsets: Vec<usize>,
}

impl Default for RaggedBatch {
    fn default() -> Self {
        Self { input_ids: vec![], token_type_ids: vec![], position_ids: None, offsets: vec![0] }
    }
}

impl RaggedBatch {
    /// Appends a sequence. Both slices hold one id per token.
    ///
    /// # Errors
    /// [`mha::Error::Shape`] if the slices differ in length.
    pub fn push(&mut self, input_ids: &[u32], token_type_ids: &[u32]) -> Result<()> {
        if input_ids.len() != token_type_ids.len() {
            return Err(mha::Error::Shape {
                argument: "token_type_ids",
                expected: format!("(T,) = [{}], the shape of input_ids", input_ids.len()),
                got: vec![token_type_ids.len()],
            }
            .into());
        }
        self.input_ids.extend_from_slice(input_ids);
        self.token_type_ids.extend_from_slice(token_type_ids);
        self.offsets.push(self.input_ids.len());
        Ok(())
    }

    /// The batch of tokenized sequences.
    ///
    /// # Errors
    /// [`mha::Error::Shape`] if a sequence's token type ids and input ids differ in number.
    pub(crate) fn from_tokens<'a>(sequences: impl IntoIterator<Item = &'a Tokens>) -> Result<Self> {
        let mut batch = Self::default();
        for Tokens { input_ids, token_type_ids, .. } in sequences {
            batch.push(input_ids, token_type_ids)?;
        }
        Ok(batch)
    }

    /// N, the number of tokens.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// The index of each sequence's first token, then N.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// B, the number of sequences.
    pub(crate) fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The ids of the tokens of sequence `i`.
    pub(crate) fn sequence(&self, i: usize) -> &[u32] {
        &self.input_ids[self.offsets[i]..self.offsets[i + 1]]
    }

    /// These sequences, each without its first `start` tokens.
    ///
    /// # Errors
    /// The errors of [`Self::push`].
    pub(crate) fn tails(&self, sequences: &[usize], start: usize) -> Result<Self> {
        let mut tails = Self::default();
        for &i in sequences {
            let range = self.offsets[i] + start..self.offsets[i + 1];
            tails.push(&self.input_ids[range.clone()], &self.token_type_ids[range])?;
        }
        Ok(tails)
    }

    /// The visible tokens of padded sequences. Also returns the row of each of them in the padded
    /// hidden states `(B·T, E)`.
    ///
    /// Position ids are those of the padded sequences: in BERT, padding on the left shifts the
    /// positions, as in Hugging Face transformers.
    ///
    /// # Shapes
    /// `input_ids`, `token_type_ids`: `(B, T)`, u32; `visible`: `(B, T)`, u8
    /// # Errors
    /// [`crate::Error::Candle`] for a wrong rank or dtype.
    pub(crate) fn from_padded(
        config: &EncoderConfig,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        visible: &Tensor,
    ) -> Result<(Self, Vec<u32>)> {
        let input_ids = input_ids.to_vec2::<u32>()?;
        let token_type_ids = token_type_ids.flatten_all()?.to_vec1::<u32>()?;
        let visible = visible.flatten_all()?.to_vec1::<u8>()?;
        let (mut batch, mut rows, mut position_ids) = (Self::default(), vec![], vec![]);
        let mut row = 0;
        for sequence in input_ids {
            for (&id, position) in sequence.iter().zip(config.position_ids(&sequence)) {
                if visible[row] == 1 {
                    batch.input_ids.push(id);
                    batch.token_type_ids.push(token_type_ids[row]);
                    position_ids.push(position);
                    rows.push(row as u32);
                }
                row += 1;
            }
            batch.offsets.push(batch.input_ids.len());
        }
        batch.position_ids = Some(position_ids);
        Ok((batch, rows))
    }

    /// Splits the batch into parts of whole sequences, with about equal numbers of tokens.
    ///
    /// Sequences are added to a part until the part has at least N / ⌈N / `tokens`⌉ tokens. A part
    /// may therefore have more than `tokens` tokens.
    ///
    /// # Examples
    /// ```
    /// let mut batch = encoder::RaggedBatch::default();
    /// (0..5).try_for_each(|_| batch.push(&[101, 7592, 102], &[0; 3]))?;
    /// let parts: Vec<_> = batch.parts(8).map(|part| part.offsets().to_vec()).collect();
    /// assert_eq!(parts, [vec![0, 3, 6, 9], vec![0, 3, 6]]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn parts(&self, tokens: usize) -> impl Iterator<Item = Self> + '_ {
        let parts = self.tokens().div_ceil(tokens.max(1)).max(1);
        let share = self.tokens().div_ceil(parts).max(1); // with 0, no sequence would be taken
        let mut ends = self.offsets.iter().skip(1).copied().peekable();
        let mut start = 0;
        std::iter::from_fn(move || {
            ends.peek()?;
            let mut offsets = vec![0];
            while let Some(end) = ends.next_if(|_| offsets[offsets.len() - 1] < share) {
                offsets.push(end - start);
            }
            let range = start..start + offsets[offsets.len() - 1];
            start = range.end;
            Some(Self {
                input_ids: self.input_ids[range.clone()].to_vec(),
                token_type_ids: self.token_type_ids[range.clone()].to_vec(),
                position_ids: self.position_ids.as_ref().map(|ids| ids[range].to_vec()),
                offsets,
            })
        })
    }

    /// Input ids, token type ids and position ids, `(3, 1, N)`.
    ///
    /// # Errors
    /// [`InputError::Id`] if an input id or a token type id is not below the size of its table;
    /// [`InputError::TooLong`] if a sequence has more than [`EncoderConfig::max_tokens`] tokens.
    pub(crate) fn ids(
        &self,
        config: &EncoderConfig,
        device: &candle_core::Device,
    ) -> Result<Tensor> {
        for (ids, table) in [&self.input_ids, &self.token_type_ids].into_iter().zip(tables(config))
        {
            check_ids(ids.iter().map(|&id| id.into()), table)?;
        }
        let position_ids = match &self.position_ids {
            Some(ids) => Cow::Borrowed(ids),
            None => {
                let sequences = self.offsets.windows(2);
                let ids = sequences.map(|w| config.position_ids(&self.input_ids[w[0]..w[1]]));
                Cow::Owned(ids.flatten().collect())
            }
        };
        let (rows, max) = (config.max_position_embeddings, config.max_tokens());
        if let Some(&last) = position_ids.iter().max().filter(|&&last| last as usize >= rows) {
            return Err(InputError::TooLong { got: last as usize + 1 - (rows - max), max }.into());
        }
        let ids = [&self.input_ids[..], &self.token_type_ids, &position_ids].concat();
        Ok(Tensor::from_vec(ids, (3, 1, self.tokens()), device)?)
    }
}

/// Returns `(n, E)` with row `i` of `x` at index `rows[i]`, and zeros elsewhere. `rows` is strictly
/// increasing.
pub(crate) fn scatter(x: &Tensor, rows: &[u32], n: usize) -> Result<Tensor> {
    if rows.len() == n {
        return Ok(x.clone());
    }
    let zeros = Tensor::zeros((n, x.dim(1)?), x.dtype(), x.device())?;
    let rows = Tensor::from_slice(rows, rows.len(), x.device())?;
    Ok(zeros.index_add(&rows, x, 0)?)
}

/// Splits `order`, indices of sequences, into consecutive batches of at most `budget` tokens. A
/// sequence longer than the budget is a batch of its own.
pub(crate) fn within_budget<'a>(
    order: &'a [usize],
    lengths: &[usize],
    budget: usize,
) -> Vec<&'a [usize]> {
    let (mut batches, mut start, mut tokens) = (vec![], 0, 0);
    for (end, &i) in order.iter().enumerate() {
        if end > start && tokens + lengths[i] > budget {
            batches.push(&order[start..end]);
            (start, tokens) = (end, 0);
        }
        tokens += lengths[i];
    }
    if start < order.len() {
        batches.push(&order[start..]);
    }
    batches
}

/// An embedding table: the name of the argument with the ids, the number of rows, and the config
/// key that sets this number.
pub(crate) type EmbeddingTable = (&'static str, usize, &'static str);

/// The tables of the word and token type embeddings.
pub(crate) fn tables(config: &EncoderConfig) -> [EmbeddingTable; 2] {
    // A model without token type embeddings accepts any token type id, and ignores it.
    let types = config.embeddings.type_vocab_size.unwrap_or(usize::MAX);
    [("input_ids", config.vocab_size, "vocab_size"), ("token_type_ids", types, "type_vocab_size")]
}

/// Converts `ids` of any integer dtype, `(B, T)`, to u32.
///
/// # Errors
/// [`mha::Error::DType`] if `ids` are not integers; [`mha::Error::Shape`] if they are not `(B, T)`
/// or have no elements; [`InputError::Id`] if an id is not below the table's number of rows.
pub(crate) fn as_u32(ids: &Tensor, table: EmbeddingTable) -> Result<Tensor> {
    let (argument, dims) = (table.0, ids.dims());
    if !ids.dtype().is_int() {
        let (expected, got) = ("integers", ids.dtype());
        return Err(mha::Error::DType { argument, expected, got }.into());
    }
    if dims.len() != 2 || dims.contains(&0) {
        let (expected, got) = ("(B, T), at least one token".to_string(), dims.to_vec());
        return Err(mha::Error::Shape { argument, expected, got }.into());
    }
    check_ids(ids.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?, table)?;
    Ok(ids.to_dtype(DType::U32)?.contiguous()?)
}

/// Checks that `ids` are at least 0 and below the table's number of rows.
fn check_ids(
    ids: impl IntoIterator<Item = i64>,
    (name, size, field): EmbeddingTable,
) -> Result<()> {
    let size_limit = i64::try_from(size).unwrap_or(i64::MAX);
    match ids.into_iter().find(|id| !(0..size_limit).contains(id)) {
        None => Ok(()),
        Some(got) => Err(InputError::Id { name, got, size, field }.into()),
    }
}
