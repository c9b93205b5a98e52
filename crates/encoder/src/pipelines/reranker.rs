//! Ranking of documents by their relevance to a query.

use crate::{
    EmbedOptions, EmbeddingKind, LoadOptions, ModelFiles, MultiVectorEmbedder, Pipeline, Prompt,
    Result, TextClassifier, TextRole, Truncated, pipelines::embed::Embed,
};

/// A model that scores documents for a query.
#[derive(Clone, Debug)]
pub enum Reranker {
    /// A cross-encoder, which computes each pair of query and document.
    CrossEncoder(Box<TextClassifier>),
    /// A model with a vector per token, which computes the query and each document.
    MultiVector(Box<MultiVectorEmbedder>),
}

/// The scores of documents.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranking {
    /// The score of each document.
    pub scores: Vec<f32>,
    /// The truncated documents, or pairs of the query and a document.
    pub truncated: Vec<Truncated>,
    /// The maximum length in tokens of a document, or of a pair.
    pub max_seq_length: usize,
}

impl Reranker {
    /// Loads a multi-vector model if the files are those of one, otherwise a cross-encoder.
    ///
    /// # Errors
    /// The errors of [`MultiVectorEmbedder::from_files`], or those of [`TextClassifier::from_files`]
    /// and [`TextClassifier::rank_tokens`]; [`crate::ConfigError::ChatTemplate`] for a chat template
    /// that cannot render a query and a document.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        if EmbeddingKind::from_files(files)? == EmbeddingKind::Multi {
            let model = MultiVectorEmbedder::from_files(files, options)?;
            return Ok(Self::MultiVector(model.into()));
        }
        let model = TextClassifier::from_files(files, options)?;
        model.check_ranks()?;
        Ok(Self::CrossEncoder(model.into()))
    }

    /// Scores documents. `prompt` is put before the query, or is the system message of a chat
    /// template; without it, a cross-encoder has its default prompt, and a multi-vector model that of queries. The documents of a multi-vector
    /// model have the prompt of documents.
    ///
    /// # Errors
    /// The errors of [`TextClassifier::tokenize_pairs`] and [`TextClassifier::rank_tokens`], or
    /// those of [`MultiVectorEmbedder::embed`].
    /// # Examples
    /// ```
    /// use encoder::{LoadOptions, ModelFiles, Reranker};
    ///
    /// let files = ModelFiles::dir("../../tests/golden/multi_vector/expansion")?;
    /// let model = Reranker::from_files(&files, &LoadOptions::default())?;
    /// let ranking = model.rank("the cat", &["a dog!", "the cat"], None)?;
    /// assert!(ranking.scores[1] > ranking.scores[0]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn rank<S: AsRef<str>>(
        &self,
        query: &str,
        documents: &[S],
        prompt: Option<Prompt>,
    ) -> Result<Ranking> {
        match self {
            Self::CrossEncoder(model) => {
                let pairs = model.tokenize_pairs(query, documents, prompt.unwrap_or_default())?;
                Ok(Ranking {
                    scores: model.rank_tokens(&pairs)?,
                    truncated: Truncated::of(&pairs),
                    max_seq_length: model.tokenizer().max_seq_length(),
                })
            }
            Self::MultiVector(model) => {
                let options = EmbedOptions::new().with_prompt(prompt.unwrap_or(Prompt::Query));
                let query = model.embed(&[query], options.with_role(TextRole::Query))?;
                let options = EmbedOptions::new().with_prompt(Prompt::Document);
                let texts = model.tokenize(documents, options)?;
                let documents = model.embed_rows(&texts, |batch| batch())?;
                Ok(Ranking {
                    scores: model.similarity().scores(&query[0], &documents)?,
                    truncated: texts.truncated().to_vec(),
                    max_seq_length: model.max_seq_length(TextRole::Document),
                })
            }
        }
    }
}
