//! The methods of an embedding model that the routes call, for each kind of embedding.

use std::sync::Arc;

use encoder::{
    Embed, EmbedOptions, Embedder, EncoderModel, Error, MultiVector, MultiVectorEmbedder, Prompt,
    Result, Row, SparseEmbedder, SparseVector, TextClassifier, TextRole, Tokens, TruncationSide,
};

use crate::engine::{Compute, Sequence};

/// A model with prompts.
pub trait HasPrompts: Send + Sync {
    /// The names of the prompts in the model's files.
    fn names(&self) -> Vec<String>;

    /// The text of the prompt called `name`.
    ///
    /// # Errors
    /// [`encoder::InputError::NoPrompt`] if the model does not have the prompt.
    fn text(&self, name: &str) -> Result<String>;
}

/// Implements [`HasPrompts`] by the methods of the type.
macro_rules! has_prompts {
    ($($type:ty),+) => {$(
        impl HasPrompts for $type {
            fn names(&self) -> Vec<String> {
                self.prompt_names().map(String::from).collect()
            }

            fn text(&self, name: &str) -> Result<String> {
                self.prompt_text(Prompt::Named(name)).map(String::from)
            }
        }
    )+};
}

has_prompts!(Embedder, SparseEmbedder, MultiVectorEmbedder, TextClassifier);

/// An embedding model that the server serves.
pub trait EmbeddingModel: Embed + HasPrompts {
    /// The name of the task in `/info`.
    const TASK: &'static str;
    /// The route that returns the rows as they are.
    const ROUTE: &'static str;
    /// The description of the rows in errors.
    const ROWS: &'static str;

    /// The encoder; `None` for a model without one.
    fn encoder(&self) -> Option<&EncoderModel>;

    /// The model that truncates long texts on this side.
    fn with_truncation_side(self, side: TruncationSide) -> Self;

    /// The tokens of a text that is given as ids.
    ///
    /// # Errors
    /// The errors of [`Embedder::tokens_from_ids`].
    fn tokens_from_ids(&self, ids: Vec<u32>) -> Result<Tokens>;

    /// The role of texts with these options. Texts of different roles are not computed in the same
    /// batch.
    fn role(&self, options: EmbedOptions) -> TextRole;

    /// The row of each sequence of a role.
    ///
    /// # Errors
    /// The errors of [`Embed::embed_rows`].
    fn rows(&self, sequences: &[(&Tokens, usize)], role: TextRole) -> Result<Vec<Self::Row>>;
}

impl EmbeddingModel for Embedder {
    const TASK: &'static str = "embedding";
    const ROUTE: &'static str = "/embed";
    const ROWS: &'static str = "dense vectors";

    fn encoder(&self) -> Option<&EncoderModel> {
        self.encoder().ok()
    }

    fn with_truncation_side(self, side: TruncationSide) -> Self {
        self.with_truncation_side(side)
    }

    fn tokens_from_ids(&self, ids: Vec<u32>) -> Result<Tokens> {
        self.tokens_from_ids(ids)
    }

    fn role(&self, _: EmbedOptions) -> TextRole {
        TextRole::Unspecified
    }

    fn rows(&self, sequences: &[(&Tokens, usize)], _: TextRole) -> Result<Vec<Vec<f32>>> {
        Ok(self.embed_sequences(sequences)?.to_vec2()?)
    }
}

impl EmbeddingModel for SparseEmbedder {
    const TASK: &'static str = "sparse_embedding";
    const ROUTE: &'static str = "/embed_sparse";
    const ROWS: &'static str = "sparse vectors";

    fn encoder(&self) -> Option<&EncoderModel> {
        Some(self.encoder())
    }

    fn with_truncation_side(self, side: TruncationSide) -> Self {
        self.with_truncation_side(side)
    }

    fn tokens_from_ids(&self, ids: Vec<u32>) -> Result<Tokens> {
        self.tokens_from_ids(ids)
    }

    fn role(&self, options: EmbedOptions) -> TextRole {
        self.role(options)
    }

    fn rows(&self, sequences: &[(&Tokens, usize)], role: TextRole) -> Result<Vec<SparseVector>> {
        self.embed_sequences(sequences, role)
    }
}

impl EmbeddingModel for MultiVectorEmbedder {
    const TASK: &'static str = "multi_vector_embedding";
    const ROUTE: &'static str = "/embed_all";
    const ROWS: &'static str = "a vector per token";

    fn encoder(&self) -> Option<&EncoderModel> {
        Some(self.encoder())
    }

    fn with_truncation_side(self, side: TruncationSide) -> Self {
        self.with_truncation_side(side)
    }

    fn tokens_from_ids(&self, ids: Vec<u32>) -> Result<Tokens> {
        self.tokens_from_ids(ids)
    }

    fn role(&self, options: EmbedOptions) -> TextRole {
        options.role()
    }

    fn rows(&self, sequences: &[(&Tokens, usize)], role: TextRole) -> Result<Vec<MultiVector>> {
        self.embed_sequences(sequences, role)
    }
}

/// Sequences to rows.
pub struct Rows<E> {
    pub model: Arc<E>,
    pub role: TextRole,
}

impl<E: EmbeddingModel> Compute for Rows<E> {
    type Values = E::Row;

    fn compute(&self, sequences: &[&Sequence]) -> Result<Vec<E::Row>> {
        let all: Vec<_> = sequences.iter().map(|one| (&one.tokens, one.prompt)).collect();
        let rows = self.model.rows(&all, self.role)?;
        check_finite(rows.iter().map(Row::values))?;
        Ok(rows)
    }
}

/// # Errors
/// [`Error::NonFiniteOutput`] if a value is NaN or infinite, which JSON cannot represent.
pub fn check_finite<'a>(
    rows: impl IntoIterator<Item = impl IntoIterator<Item = &'a f32>>,
) -> Result<()> {
    if rows.into_iter().flatten().all(|value| value.is_finite()) {
        Ok(())
    } else {
        Err(Error::NonFiniteOutput)
    }
}
