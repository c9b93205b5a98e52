//! The kinds of embedding models.

use crate::{
    ModelFiles, Result,
    load::ModelFolder,
    pipelines::{modules::are_sparse, multi_vector_modules::are_multi_vector},
    text::{prompts::loader, sentence_config::Loader},
};

crate::choices! {
    /// The kind of an embedding model: what it computes for a text.
    pub enum EmbeddingKind: "kind of embedding", default Dense {
        /// A vector of fixed length.
        Dense = "dense",
        /// Values of a few dimensions, which are tokens of the vocabulary in most models.
        Sparse = "sparse",
        /// A vector of fixed length for each token.
        Multi = "multi",
        /// All three, by a folder of BGE-M3, in one pass.
        All = "all",
    }
}

impl EmbeddingKind {
    /// The kind that the files of a sentence-transformers folder name; [`Self::Dense`] for a folder
    /// without `modules.json`, except of Stanford's ColBERT, and for a folder of BGE-M3.
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if a file cannot be read or parsed;
    /// [`crate::ConfigError::Unsupported`] for modules outside the folder.
    ///
    /// # Examples
    /// ```
    /// use encoder::{EmbeddingKind, ModelFiles};
    ///
    /// let files = ModelFiles::dir("../../weights/all-MiniLM-L6-v2")?;
    /// assert_eq!(EmbeddingKind::from_files(&files)?, EmbeddingKind::Dense);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn from_files(files: &ModelFiles) -> Result<Self> {
        Self::from_folder(&ModelFolder::new(files))
    }

    /// [`Self::from_files`] for files that are read together with others.
    pub(crate) fn from_folder(files: &ModelFolder) -> Result<Self> {
        Ok(if are_multi_vector(files)? {
            Self::Multi
        } else if loader(files)? == Loader::SparseEncoder || are_sparse(files)? {
            Self::Sparse
        } else {
            Self::Dense
        })
    }
}
