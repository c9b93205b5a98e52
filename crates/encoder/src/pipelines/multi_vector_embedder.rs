//! Text to a vector per token: tokenize, encode, project, select tokens.

use std::path::Path;

use candle_core::{Device, Tensor};
use ops::{ComputeType, Linear};
use rayon::prelude::*;

use super::{
    embed::Embed,
    embedder::Embedder,
    modules,
    multi_vector::{LateInteraction, MultiVector},
    multi_vector_modules::MultiVectorModules,
    token_mask::TokenMask,
    token_pooling::TokenPooling,
    tokenized_texts::{Batch, TokenizedTexts, rows_in_batches, tokens_from_ids},
    with_tokenizer::with_tokenizer,
};
use crate::{
    ConfigError, EmbedOptions, EncoderModel, Error, InputError, LoadOptions, LoadReport,
    ModelFiles, Prompt, RaggedBatch, Result, TextRole, TextTokenizer, Tokens, TruncationSide,
    load::{ModelFolder, Read},
    models::{encoder_model::has_pooler, load_encoder::load_encoder, ragged_batch::TOKEN_BUDGET},
    text::{
        prompts::Prompts,
        sentence_config::{ExpansionStrategy, QueryExpansion},
    },
};

/// A model with a vector per token (late interaction, ColBERT): of queries if the prompt is
/// [`Prompt::Query`] or named `query`, of documents if it is [`Prompt::Document`] or named
/// `document`. Of other texts, the tokens of documents have vectors, and the lengths of queries and
/// documents do not apply.
///
/// A query may be filled up with a token whose vectors are scored too. With
/// [`LongTexts::Windows`](crate::LongTexts::Windows), a text has the vectors of all its windows,
/// each of which is filled up.
///
/// # Source
/// Khattab and Zaharia 2020, <https://arxiv.org/abs/2004.12832>; `MultiVectorEncoder` of
/// sentence-transformers.
///
/// # Examples
/// A small model with random weights:
/// ```
/// use encoder::{EmbedOptions, LoadOptions, MultiVectorEmbedder, Prompt};
///
/// let dir = "../../tests/golden/multi_vector/expansion";
/// let model = MultiVectorEmbedder::from_dir(dir, &LoadOptions::default())?;
/// let queries = model.embed(&["the cat"], EmbedOptions::new().with_prompt(Prompt::Query))?;
/// assert_eq!((queries[0].len(), queries[0].dimension()), (12, 8)); // filled up to 12 tokens
/// let documents = EmbedOptions::new().with_prompt(Prompt::Document);
/// let documents = model.embed(&["the cat", "a dog!"], documents)?;
/// let scores = model.similarity().scores(&queries[0], &documents)?;
/// assert!(scores[0] > scores[1]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MultiVectorEmbedder {
    model: EncoderModel,
    report: LoadReport,
    /// A map of the hidden states whose weight is in the encoder's checkpoint.
    projection: Option<Linear>,
    modules: Vec<modules::Module>,
    dimension: usize,
    mask: Option<TokenMask>,
    pooling: Option<TokenPooling>,
    queries: Side,
    documents: Side,
    other_texts: Side,
    prompts: Prompts,
    similarity: LateInteraction,
}

/// The tokens of the texts of a [`TextRole`].
#[derive(Clone, Debug)]
struct Side {
    tokenizer: TextTokenizer,
    /// Whether the model's files name a length for the role.
    has_length: bool,
    expansion: Option<Expansion>,
}

/// See [`QueryExpansion`].
#[derive(Clone, Copy, Debug)]
struct Expansion {
    id: u32,
    length: usize,
    attend: bool,
}

impl Side {
    /// The side of queries.
    ///
    /// # Errors
    /// [`ConfigError::MaxSeqLength`] if the expansion is longer than `max` tokens;
    /// [`ConfigError::NoRoom`] for a length without room for text; [`crate::FileError::Tokenizer`]
    /// if the vocabulary lacks the token of the expansion.
    fn queries(
        tokenizer: TextTokenizer,
        query_length: Option<usize>,
        expansion: Option<&QueryExpansion>,
        max: usize,
    ) -> Result<Self> {
        let Some(expansion) = expansion else { return Self::limited(tokenizer, query_length, max) };
        let length = expansion.length.get();
        if length > max {
            return Err(ConfigError::MaxSeqLength { got: length, max }.into());
        }
        let id = match &expansion.token {
            None => tokenizer.mask_token_id()?,
            Some(token) => tokenizer.need_token_id(token, "the token of query_expansion")?,
        };
        let query_length = match expansion.strategy {
            ExpansionStrategy::Fixed => Some(length),
            ExpansionStrategy::Min => query_length,
        };
        let expansion = Some(Expansion { id, length, attend: expansion.attend });
        Ok(Self { expansion, ..Self::limited(tokenizer, query_length, max)? })
    }

    /// A side without an expansion, of texts of at most `length` and `max` tokens.
    fn limited(tokenizer: TextTokenizer, length: Option<usize>, max: usize) -> Result<Self> {
        let has_length = length.is_some();
        let tokenizer = match length {
            Some(length) => tokenizer.with_max_seq_length(length.min(max))?,
            None => tokenizer,
        };
        Ok(Self { tokenizer, has_length, expansion: None })
    }
}

/// The tokens of a batch of sequences, with those of expansions.
struct TokenBatch {
    tokens: RaggedBatch,
    /// The number of tokens of each sequence that are attended to.
    keys: Vec<usize>,
    /// The tokens of the batch that have a vector.
    rows: Vec<u32>,
    /// The number of vectors of each sequence.
    counts: Vec<usize>,
}

impl MultiVectorEmbedder {
    /// Loads a folder of sentence-transformers' `MultiVectorEncoder`, of PyLate, of Stanford's
    /// ColBERT or of BGE-M3.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`] and [`TextTokenizer::from_files`];
    /// [`ConfigError::Unsupported`] for other modules, and for settings that are not implemented.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let folder = MultiVectorModules::from_files(&ModelFolder::new(files))?;
        folder.check_lengths()?;
        let load = || {
            load_encoder(&folder.transformer, options, |config, _, weights| {
                let pooler = has_pooler(&weights);
                let model = EncoderModel::new(&config.encoder, pooler, weights.clone())?;
                let (e, weights) = (config.encoder.hidden_size, weights.pp("colbert_projection"));
                let projection = folder
                    .projection
                    .map(|width| Linear::load(ComputeType::F32, e, width, false, weights));
                Ok((model, projection.transpose()?))
            })
        };
        let (((model, projection), report), tokenizer) =
            with_tokenizer(&folder.transformer, folder.loader, load)?;
        Self::from_parts(folder, model, projection, report, tokenizer)
    }

    /// The ColBERT vectors of BGE-M3, by the encoder of its dense model.
    ///
    /// # Errors
    /// [`InputError::NoEncoder`] for a dense model without an encoder; the errors of
    /// [`Self::from_dir`].
    pub(super) fn of_bge_m3(files: &ModelFolder, dense: &Embedder) -> Result<Self> {
        let folder = MultiVectorModules::from_files(files)?;
        let (model, tokenizer) = (dense.encoder()?.clone(), dense.tokenizer().clone());
        Self::from_parts(folder, model, None, dense.report().clone(), tokenizer)
    }

    /// The model with the other modules of a folder.
    fn from_parts(
        folder: MultiVectorModules,
        model: EncoderModel,
        projection: Option<Linear>,
        report: LoadReport,
        tokenizer: TextTokenizer,
    ) -> Result<Self> {
        let prefixes: Vec<&str> = folder.prefixes.iter().map(String::as_str).collect();
        let tokenizer = tokenizer.with_prefix_tokens(&prefixes)?;
        let width = folder.projection.unwrap_or(model.config().hidden_size);
        let (modules, dimension) = folder.modules(width, Read::All, model.device())?;
        let (lengths, max) = (&folder.lengths, model.config().max_tokens());
        let expansion = lengths.query_expansion.as_ref();
        Ok(Self {
            projection,
            modules,
            dimension,
            mask: folder.mask.as_ref().map(|mask| TokenMask::new(mask, &tokenizer)),
            queries: Side::queries(tokenizer.clone(), lengths.query_length, expansion, max)?,
            documents: Side::limited(tokenizer.clone(), lengths.document_length, max)?,
            other_texts: Side::limited(tokenizer, None, max)?,
            similarity: folder.similarity,
            pooling: folder.pooling,
            prompts: folder.prompts,
            model,
            report,
        })
    }

    /// The encoder.
    pub fn encoder(&self) -> &EncoderModel {
        &self.model
    }

    /// The report on the loaded checkpoint.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// The score that the model's files name; [`LateInteraction::MaxSim`] if they name none or
    /// another, as in sentence-transformers; [`LateInteraction::MeanMaxSim`] for BGE-M3.
    pub fn similarity(&self) -> LateInteraction {
        self.similarity
    }

    /// The maximum length in tokens of texts of a role.
    pub fn max_seq_length(&self, role: TextRole) -> usize {
        self.side(role).tokenizer.max_seq_length()
    }

    /// The largest number of vectors that a sequence of `tokens` tokens may have.
    pub fn max_vectors(&self, tokens: usize, role: TextRole) -> usize {
        self.side(role).expansion.map_or(tokens, |expansion| expansion.length.max(tokens))
    }

    /// Sets the maximum length in tokens of the texts of the roles for which the model's files name
    /// no length.
    ///
    /// # Errors
    /// The errors of [`Embedder::with_max_seq_length`](crate::Embedder::with_max_seq_length).
    /// # Examples
    /// ```
    /// use encoder::{LoadOptions, MultiVectorEmbedder, TextRole};
    ///
    /// let dir = "../../tests/golden/multi_vector/expansion"; // documents of at most 14 tokens
    /// let model = MultiVectorEmbedder::from_dir(dir, &LoadOptions::default())?;
    /// let model = model.with_max_seq_length(5)?;
    /// assert_eq!(model.max_seq_length(TextRole::Unspecified), 5);
    /// assert_eq!(model.max_seq_length(TextRole::Document), 14);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn with_max_seq_length(mut self, max_seq_length: usize) -> Result<Self> {
        let max = self.model.config().max_tokens();
        for texts in [&mut self.queries, &mut self.documents, &mut self.other_texts] {
            if !texts.has_length {
                let tokenizer = texts.tokenizer.clone();
                texts.tokenizer = tokenizer.with_max_seq_length_within(max_seq_length, max)?;
            }
        }
        Ok(self)
    }

    /// The names that [`Prompt::Named`] accepts.
    pub fn prompt_names(&self) -> impl Iterator<Item = &str> {
        self.prompts.names()
    }

    /// The prompts of the model's files, by name.
    pub fn prompts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.prompts.texts()
    }

    /// The name of the prompt that [`Prompt::Default`] selects.
    pub fn default_prompt_name(&self) -> Option<&str> {
        self.prompts.default_prompt_name()
    }

    /// The text of a prompt; empty for no prompt.
    ///
    /// # Errors
    /// [`crate::InputError::NoPrompt`] for a name that the model does not have.
    pub fn prompt_text<'a>(&'a self, prompt: Prompt<'a>) -> Result<&'a str> {
        self.prompts.text(prompt)
    }

    /// Sets the side on which long texts are truncated, instead of that of the model's files.
    pub fn with_truncation_side(mut self, side: TruncationSide) -> Self {
        for texts in [&mut self.queries, &mut self.documents, &mut self.other_texts] {
            texts.tokenizer = texts.tokenizer.clone().with_truncation_side(side);
        }
        self
    }

    /// The tokens of a text that is given as ids, special tokens included, for
    /// [`Self::embed_sequences`].
    ///
    /// # Errors
    /// The errors of [`Embedder::tokens_from_ids`](crate::Embedder::tokens_from_ids).
    pub fn tokens_from_ids(&self, input_ids: Vec<u32>) -> Result<Tokens> {
        tokens_from_ids(input_ids, self.model.config().vocab_size, Embed::tokenizer(self))
    }

    /// The vectors of each sequence, given as for
    /// [`Embedder::embed_sequences`](crate::Embedder::embed_sequences). `role` is
    /// [`EmbedOptions::role()`] of the options of [`Embed::tokenize`].
    ///
    /// # Errors
    /// The errors of [`Embed::embed_rows`]; [`InputError::EmptySequence`] for a sequence without
    /// tokens.
    pub fn embed_sequences(
        &self,
        sequences: &[(&Tokens, usize)],
        role: TextRole,
    ) -> Result<Vec<MultiVector>> {
        if let Some(index) = sequences.iter().position(|(tokens, _)| tokens.input_ids.is_empty()) {
            return Err(InputError::EmptySequence { index }.into());
        }
        self.rows(sequences, role, &mut |batch| batch())
    }

    fn rows(
        &self,
        sequences: &[(&Tokens, usize)],
        role: TextRole,
        run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<MultiVector>> {
        let compute = |batch: &[(&Tokens, usize)]| self.compute(batch, role);
        let length = |tokens: &Tokens| self.max_vectors(tokens.input_ids.len(), role);
        rows_in_batches(sequences, length, TOKEN_BUDGET, run, compute)
    }

    /// The vectors of each text. A text may have none, if the model skips all of its tokens.
    ///
    /// # Errors
    /// The errors of [`Embed::tokenize`] and [`Embed::embed_rows`].
    pub fn embed<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Vec<MultiVector>> {
        self.embed_rows(&self.tokenize(texts, options)?, |batch| batch())
    }

    fn side(&self, role: TextRole) -> &Side {
        match role {
            TextRole::Query => &self.queries,
            TextRole::Document => &self.documents,
            TextRole::Unspecified => &self.other_texts,
        }
    }

    /// The vectors of a batch of sequences.
    fn compute(&self, sequences: &[(&Tokens, usize)], role: TextRole) -> Result<Vec<MultiVector>> {
        let TokenBatch { tokens, keys, rows, counts } = self.batch(sequences, role)?;
        let hidden = || self.model.forward_ragged_to_keys(&tokens, &keys); // (N, E)
        Ok(self.split(&self.vectors(&rows, hidden)?, &counts, role))
    }

    /// The vectors of sequences without an expansion from the hidden states of a batch.
    ///
    /// # Shapes
    /// `hidden`: `(N, E)`
    /// # Errors
    /// [`Error::NonFiniteOutput`] if a value is NaN or infinite.
    pub(super) fn embed_hidden(
        &self,
        hidden: &Tensor,
        sequences: &[(&Tokens, usize)],
        role: TextRole,
    ) -> Result<Vec<MultiVector>> {
        let TokenBatch { rows, counts, .. } = self.batch(sequences, role)?;
        Ok(self.split(&self.vectors(&rows, || Ok(hidden.clone()))?, &counts, role))
    }

    /// The tokens of a batch of sequences.
    fn batch(&self, sequences: &[(&Tokens, usize)], role: TextRole) -> Result<TokenBatch> {
        let (mut batch, mut keys) = (RaggedBatch::default(), vec![]);
        let (mut rows, mut counts) = (vec![], vec![]);
        for (Tokens { input_ids, token_type_ids, .. }, _) in sequences {
            let (mut ids, mut types, first) =
                (input_ids.clone(), token_type_ids.clone(), batch.tokens());
            let mut attended = ids.len();
            if let Some(Expansion { id, length, attend }) = self.side(role).expansion {
                ids.resize(ids.len().max(length), id);
                types.resize(ids.len(), 0);
                attended = if attend { ids.len() } else { attended };
            }
            let before = rows.len();
            let has_vector = |(i, id): &(usize, &u32)| match &self.mask {
                Some(mask) => mask.keeps(*i, **id, role),
                None => *i < attended,
            };
            let own = ids.iter().enumerate().filter(has_vector);
            rows.extend(own.map(|(i, _)| (first + i) as u32));
            counts.push(rows.len() - before);
            keys.push(attended);
            batch.push(&ids, &types)?;
        }
        Ok(TokenBatch { tokens: batch, keys, rows, counts })
    }

    /// The vectors of each sequence. `counts` are their numbers in `values`.
    fn split(&self, mut values: &[f32], counts: &[usize], role: TextRole) -> Vec<MultiVector> {
        let of_text = counts.iter().map(|count| {
            let own;
            (own, values) = values.split_at(count * self.dimension);
            MultiVector::new(own.to_vec(), self.dimension)
        });
        let vectors: Vec<MultiVector> = of_text.collect();
        let Some(pooling) = &self.pooling else { return vectors };
        vectors.into_par_iter().map(|vectors| pooling.forward(vectors, role)).collect()
    }

    /// The vectors of the tokens `rows` of a batch with the states `hidden`, one after another.
    /// `hidden` is not called if there are no such tokens.
    fn vectors(&self, rows: &[u32], hidden: impl FnOnce() -> Result<Tensor>) -> Result<Vec<f32>> {
        if rows.is_empty() {
            return Ok(vec![]);
        }
        let hidden = hidden()?; // (N, E)
        let mut x = if rows.len() == hidden.dim(0)? {
            hidden
        } else {
            hidden.index_select(&Tensor::from_slice(rows, rows.len(), hidden.device())?, 0)?
        };
        if let Some(projection) = &self.projection {
            x = projection.forward(&x)?;
        }
        x = ops::widen(&x)?;
        for module in &self.modules {
            x = module.forward(&x)?;
        }
        let values = x.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        if values.iter().all(|value| value.is_finite()) {
            Ok(values)
        } else {
            Err(Error::NonFiniteOutput)
        }
    }
}

/// The vectors of each text: those of all its windows.
pub(super) fn join_windows(texts: &TokenizedTexts, rows: Vec<MultiVector>) -> Vec<MultiVector> {
    let mut rows = rows.into_iter();
    let joined = texts.windows.iter().map(|windows| {
        let own = rows.by_ref().take(windows.len());
        own.reduce(MultiVector::concat).unwrap_or_default()
    });
    joined.collect()
}

impl Embed for MultiVectorEmbedder {
    type Row = MultiVector;

    /// The tokenizer of texts that are neither queries nor documents.
    fn tokenizer(&self) -> &TextTokenizer {
        &self.other_texts.tokenizer
    }

    fn dimension(&self) -> usize {
        self.dimension
    }

    /// At most 256, and fewer for a model of long texts: their vectors take as much memory as those
    /// of hundreds of texts of a dense model.
    fn texts_per_chunk(&self) -> usize {
        /// The most bytes of vectors, unless 32 texts take more.
        const BYTES: usize = 1 << 26;
        let max = self.max_seq_length(TextRole::Unspecified);
        let max = max.max(self.max_seq_length(TextRole::Document));
        (BYTES / (size_of::<f32>() * max * self.dimension).max(1)).clamp(32, 256)
    }

    fn settings(&self) -> String {
        let [queries, documents] =
            [TextRole::Query, TextRole::Document].map(|role| self.max_seq_length(role));
        format!("at most {queries} tokens of a query, {documents} of a document")
    }

    fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<TokenizedTexts> {
        let side = self.side(options.role());
        TokenizedTexts::new(&side.tokenizer, &self.prompts, texts, options)
    }

    fn embed_rows(
        &self,
        texts: &TokenizedTexts,
        mut run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<MultiVector>> {
        let sequences: Vec<_> = texts.sequences().collect();
        Ok(join_windows(texts, self.rows(&sequences, texts.role, &mut run)?))
    }
}
