//! Text to the dense, the sparse and the multi-vector embedding of BGE-M3, in one pass.

use std::path::Path;

use serde::Serialize;

use super::{
    bge_m3,
    embed::{Embed, Row},
    embedder::Embedder,
    modules::{SparseDocuments, sparse_modules},
    multi_vector::MultiVector,
    multi_vector_embedder::{MultiVectorEmbedder, join_windows},
    sparse_embedder::SparseEmbedder,
    tokenized_texts::{Batch, TokenizedTexts, rows_in_batches},
};
use crate::{
    EmbedOptions, EmbeddingKind, Error, LoadOptions, ModelFiles, RaggedBatch, Result, SparseVector,
    TextRole, TextTokenizer, Tokens, load::ModelFolder, models::ragged_batch::TOKEN_BUDGET,
};

/// BGE-M3 with its dense, sparse and multi-vector embeddings of a text, which are computed from the
/// same hidden states. They are those of [`Embedder`], [`SparseEmbedder`] and
/// [`MultiVectorEmbedder`] for the same folder, to the bit. The three share the weights of one
/// encoder.
///
/// # Source
/// Chen et al. 2024, <https://arxiv.org/abs/2402.03216>; `BGEM3FlagModel` of FlagEmbedding.
///
/// # Examples
/// A small model with random weights:
/// ```
/// use encoder::{BgeM3Embedder, EmbedOptions, Embedder, LoadOptions};
///
/// let (dir, options) = ("../../tests/golden/bge_m3", LoadOptions::default());
/// let rows = BgeM3Embedder::from_dir(dir, &options)?.embed(&["a cab"], EmbedOptions::default())?;
/// let dense = Embedder::from_dir(dir, &options)?.embed(&["a cab"])?;
/// assert_eq!(rows[0].embedding, dense.to_vec2::<f32>()?[0]);
/// assert!(rows[0].sparse_embedding.values.iter().all(|&weight| weight > 0.0));
/// let vectors = &rows[0].multi_vector_embedding;
/// assert_eq!((vectors.dimension(), vectors.is_empty()), (16, false));
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BgeM3Embedder {
    dense: Embedder,
    sparse: SparseEmbedder,
    multi_vector: MultiVectorEmbedder,
}

/// The embeddings of a text by [`BgeM3Embedder`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BgeM3Embedding {
    /// The vector of [`Embedder`].
    pub embedding: Vec<f32>,
    /// The weights of the tokens, of [`SparseEmbedder`].
    pub sparse_embedding: SparseVector,
    /// The vectors of the tokens, of [`MultiVectorEmbedder`].
    pub multi_vector_embedding: MultiVector,
}

impl Row for BgeM3Embedding {
    fn values(&self) -> impl Iterator<Item = &f32> {
        let Self { embedding, sparse_embedding, multi_vector_embedding } = self;
        embedding.iter().chain(sparse_embedding.values()).chain(multi_vector_embedding.values())
    }

    fn bytes(&self) -> usize {
        let Self { embedding, sparse_embedding, multi_vector_embedding } = self;
        embedding.bytes() + sparse_embedding.bytes() + multi_vector_embedding.bytes()
    }
}

impl BgeM3Embedder {
    /// Loads a folder of BGE-M3: that of a dense model, with `sparse_linear.pt` and
    /// `colbert_linear.pt`.
    ///
    /// # Errors
    /// [`crate::FileError::NoFile`] for a folder without these two files;
    /// [`crate::ConfigError::Unsupported`] for a sparse or a multi-vector model; the errors of
    /// [`Embedder::from_dir`], [`SparseEmbedder::from_dir`] and [`MultiVectorEmbedder::from_dir`].
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let folder = &ModelFolder::new(files);
        bge_m3::check_files(folder)?;
        let kind = EmbeddingKind::from_folder(folder)?;
        let SparseDocuments::BgeM3 { head, .. } = sparse_modules(folder)?.documents else {
            let path = folder.path("modules.json");
            return Err(Error::unsupported(path, "the kind of the modules", "dense", kind));
        };
        let dense = Embedder::from_files(files, options)?;
        let sparse = SparseEmbedder::of_bge_m3(&head, &dense)?;
        let multi_vector = MultiVectorEmbedder::of_bge_m3(folder, &dense)?;
        Ok(Self { dense, sparse, multi_vector })
    }

    /// Truncates the dense vectors: see [`Embedder::with_dimension`].
    ///
    /// # Errors
    /// The errors of [`Embedder::with_dimension`].
    pub fn with_dimension(self, dimension: usize) -> Result<Self> {
        Ok(Self { dense: self.dense.with_dimension(dimension)?, ..self })
    }

    /// Truncates the sparse vectors: see [`SparseEmbedder::with_max_active_dims`].
    ///
    /// # Errors
    /// The errors of [`SparseEmbedder::with_max_active_dims`].
    pub fn with_max_active_dims(self, max: usize) -> Result<Self> {
        Ok(Self { sparse: self.sparse.with_max_active_dims(max)?, ..self })
    }

    /// Sets [`SparseVector::tokens`] of each sparse vector.
    pub fn with_tokens(self) -> Self {
        Self { sparse: self.sparse.with_tokens(), ..self }
    }

    /// Sets the maximum length of a text in tokens, special tokens included.
    ///
    /// # Errors
    /// The errors of [`Embedder::with_max_seq_length`].
    pub fn with_max_seq_length(self, max_seq_length: usize) -> Result<Self> {
        Ok(Self {
            dense: self.dense.with_max_seq_length(max_seq_length)?,
            sparse: self.sparse.with_max_seq_length(max_seq_length)?,
            multi_vector: self.multi_vector.with_max_seq_length(max_seq_length)?,
        })
    }

    /// The model of the dense vectors. A clone shares the weights, as do those of
    /// [`Self::sparse`] and [`Self::multi_vector`].
    pub fn dense(&self) -> &Embedder {
        &self.dense
    }

    /// The model of the sparse vectors.
    pub fn sparse(&self) -> &SparseEmbedder {
        &self.sparse
    }

    /// The model with a vector per token.
    pub fn multi_vector(&self) -> &MultiVectorEmbedder {
        &self.multi_vector
    }

    /// The three embeddings of each text.
    ///
    /// # Errors
    /// The errors of [`Embed::tokenize`] and [`Embed::embed_rows`].
    pub fn embed<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Vec<BgeM3Embedding>> {
        self.embed_rows(&self.tokenize(texts, options)?, |batch| batch())
    }

    /// The embeddings of a batch of sequences.
    fn compute(
        &self,
        sequences: &[(&Tokens, usize)],
        role: TextRole,
    ) -> Result<Vec<BgeM3Embedding>> {
        let batch = RaggedBatch::from_tokens(sequences.iter().map(|(tokens, _)| *tokens))?;
        let hidden = self.dense.encoder()?.forward_ragged(&batch)?; // (N, E)
        let dense = self.dense.embed_hidden(&hidden, batch.offsets(), sequences)?.to_vec2()?;
        let sparse = self.sparse.embed_hidden(&hidden, sequences)?;
        let multi_vector = self.multi_vector.embed_hidden(&hidden, sequences, role)?;
        Ok(rows(dense, sparse, multi_vector))
    }
}

/// The embeddings of each text, from those of each kind.
fn rows(
    dense: Vec<Vec<f32>>,
    sparse: Vec<SparseVector>,
    multi_vector: Vec<MultiVector>,
) -> Vec<BgeM3Embedding> {
    let row = |((embedding, sparse_embedding), multi_vector_embedding)| BgeM3Embedding {
        embedding,
        sparse_embedding,
        multi_vector_embedding,
    };
    dense.into_iter().zip(sparse).zip(multi_vector).map(row).collect()
}

impl Embed for BgeM3Embedder {
    type Row = BgeM3Embedding;

    fn tokenizer(&self) -> &TextTokenizer {
        self.dense.tokenizer()
    }

    /// The length of the dense vectors.
    fn dimension(&self) -> usize {
        self.dense.dimension()
    }

    /// The dimensions of the dense vectors, of the sparse vectors, and of the vectors of tokens.
    fn dimensions(&self) -> Vec<usize> {
        vec![self.dense.dimension(), self.sparse.dimension(), self.multi_vector.dimension()]
    }

    fn texts_per_chunk(&self) -> usize {
        self.multi_vector.texts_per_chunk()
    }

    fn settings(&self) -> String {
        format!("{}, {}", self.sparse.settings(), self.multi_vector.settings())
    }

    fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<TokenizedTexts> {
        self.dense.tokenize(texts, options)
    }

    /// The windows of a text are joined as by the model of each kind.
    fn embed_rows(
        &self,
        texts: &TokenizedTexts,
        mut run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<BgeM3Embedding>> {
        let sequences: Vec<_> = texts.sequences().collect();
        let length = |tokens: &Tokens| tokens.input_ids.len();
        let compute = |batch: &[(&Tokens, usize)]| self.compute(batch, texts.role);
        let windows = rows_in_batches(&sequences, length, TOKEN_BUDGET, &mut run, compute)?;
        let (mut dense, mut sparse, mut multi_vector) = (vec![], vec![], vec![]);
        for window in windows {
            dense.push(window.embedding);
            sparse.push(window.sparse_embedding);
            multi_vector.push(window.multi_vector_embedding);
        }
        if texts.have_windows() {
            dense = self.dense.join_windows(texts, dense.into_iter().map(Ok))?.to_vec2()?;
        }
        let sparse = self.sparse.join_windows(texts, sparse);
        Ok(rows(dense, sparse, join_windows(texts, multi_vector)))
    }
}
