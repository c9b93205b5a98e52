//! The traits of models that turn texts into rows, and of the rows.

use serde::Serialize;

use crate::{Batch, EmbedOptions, Result, TEXTS_PER_CHUNK, TextTokenizer, TokenizedTexts};

/// The result of a model for a text. The row of a dense model, such as
/// [`Embedder`](crate::Embedder), is a vector, `Vec<f32>`. JSON files contain the row as it
/// serialises.
pub trait Row: Clone + Serialize + Send + 'static {
    /// The numbers that the model computed for the text, without indices and shapes.
    fn values(&self) -> impl Iterator<Item = &f32>;

    /// The size in bytes, about.
    fn bytes(&self) -> usize {
        size_of::<f32>() * self.values().count()
    }
}

impl Row for Vec<f32> {
    fn values(&self) -> impl Iterator<Item = &f32> {
        self.iter()
    }
}

/// A model that turns each text into a row. A clone shares the weights.
///
/// A text is tokenized first, which can happen on another thread while the rows of the texts before
/// it are computed.
pub trait Embed: Clone + Send + Sync + 'static {
    /// The result for a text.
    type Row: Row;

    /// The tokenizer.
    fn tokenizer(&self) -> &TextTokenizer;

    /// E, the length of a vector.
    fn dimension(&self) -> usize;

    /// The length of the vectors of each part of a row: [`Self::dimension`], and the lengths of
    /// other parts if a row has several, such as a dense and a sparse vector.
    fn dimensions(&self) -> Vec<usize> {
        vec![self.dimension()]
    }

    /// Whether the rows are computed, and not only read from a table, so that it pays to keep those of
    /// texts that may occur again.
    fn computes_rows(&self) -> bool {
        true
    }

    /// Number of texts of a stream whose rows are in memory together.
    fn texts_per_chunk(&self) -> usize {
        TEXTS_PER_CHUNK
    }

    /// The settings that change the rows of some texts only, as text; equal settings have equal
    /// texts. A resumed run compares them.
    fn settings(&self) -> String {
        String::new()
    }

    /// Tokenizes texts for [`Self::embed_rows`].
    ///
    /// # Errors
    /// The errors that [`Embedder::tokenize`](crate::Embedder::tokenize) lists.
    fn tokenize<S: AsRef<str>>(&self, texts: &[S], options: EmbedOptions)
    -> Result<TokenizedTexts>;

    /// The row of each text, computed in batches, each within `run`.
    ///
    /// # Errors
    /// The errors that [`Embedder::embed_tokenized`](crate::Embedder::embed_tokenized) lists.
    fn embed_rows(
        &self,
        texts: &TokenizedTexts,
        run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<Self::Row>>;

    /// Embeds a stream of texts, in their order, in constant memory:
    /// [`Self::texts_per_chunk`] texts are read and embedded at a time.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`] and [`Self::embed_rows`]. If a chunk fails, the iterator
    /// returns the error instead of the chunk's rows, and ends.
    /// # Examples
    /// ```
    /// use encoder::{Embed, EmbedOptions, Embedder, LoadOptions};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    /// let texts = (0..).map(|i| format!("text {i}")); // without an end
    /// let rows = embedder.embed_iter(texts, EmbedOptions::default());
    /// let first: Vec<Vec<f32>> = rows.take(3).collect::<Result<_, _>>()?;
    /// assert_eq!((first.len(), first[0].len()), (3, 384));
    /// # Ok::<(), encoder::Error>(())
    /// ```
    fn embed_iter<'a, S: AsRef<str>>(
        &'a self,
        texts: impl IntoIterator<Item = S> + 'a,
        options: EmbedOptions<'a>,
    ) -> impl Iterator<Item = Result<Self::Row>> + 'a {
        let (mut texts, mut failed) = (texts.into_iter(), false);
        let chunks = std::iter::from_fn(move || {
            let count = if failed { 0 } else { self.texts_per_chunk() };
            let chunk: Vec<S> = texts.by_ref().take(count).collect();
            if chunk.is_empty() {
                return None;
            }
            let tokenized = self.tokenize(&chunk, options);
            let rows = tokenized.and_then(|texts| self.embed_rows(&texts, |batch| batch()));
            failed = rows.is_err();
            let all = |rows: Vec<_>| rows.into_iter().map(Ok).collect();
            Some(rows.map_or_else(|error| vec![Err(error)], all))
        });
        chunks.flatten()
    }
}
