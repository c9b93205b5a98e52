//! The weights of tokens in BGE-M3, beside its dense and its ColBERT vectors.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};

use crate::{
    Error, Result, SparseVector, TextTokenizer, Tokens,
    load::{ModelFolder, Read},
    pipelines::dense::Dense,
};

/// The file of the map from hidden states to weights.
const SPARSE: &str = "sparse_linear.pt";
/// The file of the map from hidden states to ColBERT vectors.
pub(crate) const COLBERT: &str = "colbert_linear.pt";

/// Whether a folder has the weights of tokens.
///
/// # Errors
/// A download error, or [`crate::FileError::Io`], if the folder cannot be searched.
pub(crate) fn has_token_weights(files: &ModelFolder) -> Result<bool> {
    files.has(SPARSE)
}

/// Checks that a folder has both maps.
///
/// # Errors
/// [`crate::FileError::NoFile`] for the first that is missing; those of [`has_token_weights`].
pub(crate) fn check_files(files: &ModelFolder) -> Result<()> {
    for file in [SPARSE, COLBERT] {
        if !files.has(file)? {
            let expected = "a folder of BGE-M3, with sparse_linear.pt and colbert_linear.pt beside \
                            a dense model; other models have embeddings of one kind";
            return Err(files.no_file(file, expected));
        }
    }
    Ok(())
}

/// `max(W·x + b, 0)` for the hidden state x of each token. A token that occurs several times has
/// the largest of its weights.
///
/// # Source
/// Chen et al. 2024, <https://arxiv.org/abs/2402.03216>; `BGEM3FlagModel` of FlagEmbedding.
#[derive(Clone, Debug)]
pub(crate) struct TokenWeightHead {
    linear: Dense,
    /// The special tokens, which have no weight.
    special_ids: BTreeSet<u32>,
}

impl TokenWeightHead {
    /// # Errors
    /// [`crate::FileError`] for a missing or damaged file; [`crate::CheckpointError::Tensors`] if
    /// the map is not one from `width` values to one; [`crate::FileError::Tokenizer`] if the
    /// vocabulary lacks a special token.
    pub(crate) fn from_files(
        files: &ModelFolder,
        width: usize,
        tokenizer: &TextTokenizer,
        device: &Device,
    ) -> Result<Self> {
        let path = files.path(SPARSE);
        let files = files.with_weights(SPARSE);
        let linear = Dense::from_state_dict(&files, width, Read::All, device)?;
        if linear.out_features() != 1 {
            return Err(Error::unsupported(path, "rows of weight", "1", linear.out_features()));
        }
        let [before, after] = tokenizer.special_tokens_around_text()?;
        let others = [Some(tokenizer.pad_token_id()), tokenizer.unknown_token_id()];
        let special_ids = before.into_iter().chain(after).chain(others.into_iter().flatten());
        Ok(Self { linear, special_ids: special_ids.collect() })
    }

    /// The vector of each sequence from the hidden states of all tokens.
    ///
    /// # Shapes
    /// `hidden`: `(N, E)`, the tokens of all sequences
    /// # Errors
    /// [`Error::NonFiniteOutput`] if a weight is NaN or infinite.
    pub(crate) fn forward<'a>(
        &self,
        hidden: &Tensor,
        sequences: impl IntoIterator<Item = &'a Tokens>,
    ) -> Result<Vec<SparseVector>> {
        let weights = self.linear.forward(&ops::widen(hidden)?)?; // (N, 1)
        let weights = weights.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        if !weights.iter().all(|weight| weight.is_finite()) {
            return Err(Error::NonFiniteOutput);
        }
        let mut weights = weights.into_iter();
        let vector = |tokens: &Tokens| {
            let mut largest = BTreeMap::<u32, f32>::new();
            for (&id, weight) in tokens.input_ids.iter().zip(weights.by_ref()) {
                if weight > 0.0 && !self.special_ids.contains(&id) {
                    let own = largest.entry(id).or_default();
                    *own = own.max(weight);
                }
            }
            let (indices, values) = largest.into_iter().unzip();
            SparseVector::new(indices, values)
        };
        Ok(sequences.into_iter().map(vector).collect())
    }
}
