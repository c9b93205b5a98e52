//! A file of vectors with the model for its queries, and its search.

use anyhow::{Result, anyhow, bail, ensure};
use corpus::VectorFile;
use encoder::{
    BgeM3Embedder, Embed, EmbedOptions, Embedder, EmbeddingKind, Hit, LoadOptions, ModelFiles,
    MultiVectorEmbedder, MultiVectorSearch, Prompt, Search, SparseEmbedder, TextRole,
};

use crate::{
    arguments::usage_error, commands::compare::vectors_for_cosines, messages, model::Model,
    truncation::Truncation,
};

pub struct SearchedFile {
    pub vectors: VectorFile,
    /// The model for the queries, and its files.
    model: Model,
    files: ModelFiles,
    /// Whether neither `--model` nor the file names the model.
    is_default_model: bool,
}

/// The queries, and what to find for each of them.
pub struct Queries<'a> {
    pub texts: &'a [String],
    pub prompt: Prompt<'a>,
    /// The maximum number of hits per query.
    pub top: usize,
}

impl Queries<'_> {
    fn options(&self) -> EmbedOptions<'_> {
        EmbedOptions::new().with_prompt(self.prompt).with_role(TextRole::Query)
    }
}

impl SearchedFile {
    /// Opens the files of the model for the queries, without loading it: `model`, otherwise the
    /// model that the file names, otherwise the default model.
    ///
    /// # Errors
    /// If the file's description of its model is invalid, or if the model is not found.
    pub fn new(vectors: VectorFile, mut model: Model) -> Result<Self> {
        let is_default_model = !model.is_given() && vectors.model().is_none();
        if let Some(spec) = vectors.model() {
            let spec = serde_json::from_str(spec).map_err(|error| {
                anyhow!("{}: the model in its metadata cannot be read: {error}", vectors.name())
            })?;
            model.resolve_for_corpus(spec)?;
        }
        let files = model.files()?;
        Ok(Self { vectors, model, files, is_default_model })
    }

    /// The hits of each query, the best first.
    ///
    /// # Errors
    /// If the model cannot be loaded or does not fit the file, and if the file is invalid.
    pub fn search(&self, queries: &Queries, options: &LoadOptions) -> Result<Vec<Vec<Hit>>> {
        match self.vectors.kind() {
            EmbeddingKind::Dense => self.search_dense(queries, options),
            EmbeddingKind::Sparse => self.search_sparse(queries, options),
            EmbeddingKind::Multi => self.search_multi(queries, options),
            kind => bail!("{} contains {kind} vectors, which cannot be searched", self.name()),
        }
    }

    /// The hits of each query by each kind of vectors in the file, by one model.
    ///
    /// # Errors
    /// If the file does not have vectors of all kinds; those of [`Self::search`].
    pub fn search_all_kinds(
        &self,
        queries: &Queries,
        options: &LoadOptions,
    ) -> Result<Vec<Vec<Vec<Hit>>>> {
        let of_kind = |kind| -> Result<Self> {
            let vectors = self.vectors.of_kind(kind).map_err(|_| {
                let name = self.name();
                anyhow!(
                    "{name} contains {} vectors: expected vectors of all kinds, as encodle embed \
                     --kind all writes them",
                    self.vectors.kind()
                )
            })?;
            let (model, files) = (self.model.clone(), self.files.clone());
            Ok(Self { vectors, model, files, is_default_model: self.is_default_model })
        };
        let [dense, sparse, multi] =
            [EmbeddingKind::Dense, EmbeddingKind::Sparse, EmbeddingKind::Multi].map(of_kind);
        let (dense, sparse, multi) = (dense?, sparse?, multi?);
        sparse.check_options()?;
        let embedder = BgeM3Embedder::from_files(&self.files, options)?;
        Ok(vec![
            dense.dense_hits(embedder.dense().clone(), queries)?,
            sparse.sparse_hits(embedder.sparse(), queries)?,
            multi.multi_hits(embedder.multi_vector(), queries)?,
        ])
    }

    /// The nearest rows by cosine.
    fn search_dense(&self, queries: &Queries, options: &LoadOptions) -> Result<Vec<Vec<Hit>>> {
        let kind = EmbeddingKind::from_files(&self.files)?;
        if kind != EmbeddingKind::Dense && !self.model.chooses_pooling() {
            return Err(self.other_kind(kind));
        }
        self.dense_hits(self.model.embedder_with(&self.files, options)?, queries)
    }

    fn dense_hits(&self, embedder: Embedder, queries: &Queries) -> Result<Vec<Vec<Hit>>> {
        let (max, name, model) = (embedder.dimension(), self.name(), self.model.name());
        let got = self.vectors.dimension().expect("the length of dense vectors");
        ensure!(
            got <= max,
            "{name} has vectors of dimension {got}: expected at most {max} (the dimension of \
             {model}); set --model to the model that embedded the corpus"
        );
        if got < max && self.is_default_model {
            messages::print(&format!(
                "{name} does not name its model: the vectors of the queries, from {model}, are \
                 truncated from {max} values to {got}; set --model to the model that embedded the \
                 corpus"
            ));
        }
        let embedder = embedder.with_dimension(got)?;
        let vectors = vectors_for_cosines(&embedder, queries.texts, queries.options())?;
        Ok(self.vectors.scan(&Search::new(&vectors, queries.top)?)?.into_hits())
    }

    /// Loads a model that is not dense.
    ///
    /// # Errors
    /// A usage error for an option of dense models; an error if the model is of another kind than
    /// the file.
    fn load<E>(
        &self,
        from_files: fn(&ModelFiles, &LoadOptions) -> encoder::Result<E>,
        options: &LoadOptions,
    ) -> Result<E> {
        self.check_options()?;
        let expected = self.vectors.kind();
        let kind = EmbeddingKind::from_files(&self.files)?;
        from_files(&self.files, options).map_err(|error| {
            // A masked language model, whose files name no kind, is dense by default, and so is
            // BGE-M3: other errors are those of loading such a model.
            let has_other_modules = matches!(
                error,
                encoder::Error::Config(encoder::ConfigError::Unsupported { .. })
                    | encoder::Error::File(encoder::FileError::NoFile { .. })
                    | encoder::Error::Checkpoint(_)
            );
            if kind != expected && has_other_modules { self.other_kind(kind) } else { error.into() }
        })
    }

    /// # Errors
    /// A usage error for an option of dense models.
    fn check_options(&self) -> Result<()> {
        let (name, kind) = (self.name(), self.vectors.kind());
        let unused = self.model.options_of_dense_models();
        match unused.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(usage_error(format!(
                "{option} has no effect on the {kind} vectors of {name}: leave the option out"
            ))),
            None => Ok(()),
        }
    }

    /// The rows with the highest MaxSim.
    fn search_multi(&self, queries: &Queries, options: &LoadOptions) -> Result<Vec<Vec<Hit>>> {
        self.multi_hits(&self.load(MultiVectorEmbedder::from_files, options)?, queries)
    }

    fn multi_hits(
        &self,
        embedder: &MultiVectorEmbedder,
        queries: &Queries,
    ) -> Result<Vec<Vec<Hit>>> {
        let (got, expected, name) = (self.vectors.dimension(), embedder.dimension(), self.name());
        ensure!(
            got == Some(expected),
            "{name} has vectors of dimension {}: expected {expected} (the dimension of {}); set \
             --model to the model that embedded the corpus",
            got.unwrap_or_default(),
            self.model.name()
        );
        let vectors = self.embed(embedder, queries, embedder.max_seq_length(TextRole::Query))?;
        let search = MultiVectorSearch::new(&vectors, embedder.similarity(), queries.top)?;
        Ok(self.vectors.scan_multi(&search)?.into_hits())
    }

    /// The rows of the queries, with a warning if queries are truncated to `max_seq_length` tokens.
    fn embed<E: Embed>(
        &self,
        embedder: &E,
        queries: &Queries,
        max_seq_length: usize,
    ) -> Result<Vec<E::Row>> {
        let tokenized = embedder.tokenize(queries.texts, queries.options())?;
        let mut truncation = Truncation::default();
        truncation.add(tokenized.truncated().len() as u64);
        truncation.warn(max_seq_length, "");
        Ok(embedder.embed_rows(&tokenized, |batch| batch())?)
    }

    /// The rows with the highest dot products.
    fn search_sparse(&self, queries: &Queries, options: &LoadOptions) -> Result<Vec<Vec<Hit>>> {
        self.sparse_hits(&self.load(SparseEmbedder::from_files, options)?, queries)
    }

    fn sparse_hits(&self, embedder: &SparseEmbedder, queries: &Queries) -> Result<Vec<Vec<Hit>>> {
        let similarity = embedder.similarity_fn_name();
        if similarity != "dot" {
            messages::print(&format!(
                "the model's similarity_fn_name is {similarity:?}; dot products are printed"
            ));
        }
        let vectors = self.embed(embedder, queries, embedder.max_seq_length(TextRole::Query))?;
        let index = self.vectors.sparse_index(embedder.dimension())?;
        Ok(index.search(&vectors, queries.top)?)
    }

    fn name(&self) -> &str {
        self.vectors.name()
    }

    /// The error for a model of another kind than the file's.
    fn other_kind(&self, kind: EmbeddingKind) -> anyhow::Error {
        let (name, model, expected) = (self.name(), self.model.name(), self.vectors.kind());
        anyhow!(
            "{name} contains {expected} vectors: expected a {expected} model, got the {kind} model \
             {model}; set --model to the model that embedded the corpus"
        )
    }
}
