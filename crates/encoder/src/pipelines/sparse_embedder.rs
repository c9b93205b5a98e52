//! Text to sparse vectors: tokenize, encode, pool the logits of a masked language model.

use std::{collections::BTreeSet, path::Path};

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::{
    bge_m3::TokenWeightHead,
    embed::Embed,
    embedder::{Embedder, SIMILARITIES},
    modules::{SparseDocuments, SparseModules, sparse_modules},
    sparse_auto_encoder::SparseAutoEncoder,
    splade::SpladePooling,
    tokenized_texts::{Batch, TokenizedTexts, in_chunks, rows_in_batches, tokens_from_ids},
    with_tokenizer::with_tokenizer,
};
use crate::{
    ConfigError, EmbedOptions, EncoderForMaskedLm, EncoderModel, Error, InputError, LoadOptions,
    LoadReport, ModelConfig, ModelFiles, Prompt, RaggedBatch, Result, SparseVector, TextRole,
    TextTokenizer, Tokens, TruncationSide,
    load::{self, ModelFolder},
    models::ragged_batch::TOKEN_BUDGET,
    text::{prompts::Prompts, sentence_config::Loader},
};

/// Number of sequences whose pooled logits are in memory at a time. With a vocabulary of 250,000
/// tokens, those of a sequence take 1 MB.
const SEQUENCES_PER_PART: usize = 64;

/// A sparse embedding model, in one of four forms:
///
/// - SPLADE: a masked language model, whose logits are pooled. The dimensions of a vector are the
///   tokens of the vocabulary.
/// - SPLADE for documents, with a stored weight per token for queries ([`Prompt::Query`], or
///   [`Prompt::Named`] with `query`), which need no computation.
/// - A dense model and a sparse autoencoder.
/// - BGE-M3: a weight for each token of the text.
///
/// # Source
/// Formal et al. 2021, <https://arxiv.org/abs/2109.10086>; Geng et al. 2024,
/// <https://arxiv.org/abs/2411.04403>; Wen et al. 2025, <https://arxiv.org/abs/2503.01776>;
/// `SparseEncoder` of sentence-transformers.
///
/// # Examples
/// A small model with random weights:
/// ```
/// use encoder::{Embed, EmbedOptions, LoadOptions, SparseEmbedder};
///
/// let dir = "../../tests/golden/heads/masked_lm";
/// let model = SparseEmbedder::from_dir(dir, &LoadOptions::default())?;
/// let vectors = model.embed(&["a cab", "a cab"], EmbedOptions::default())?;
/// assert_eq!(vectors[0], vectors[1]);
/// assert!(vectors[0].indices.is_sorted() && vectors[0].values.iter().all(|&x| x > 0.0));
/// let limited = model.with_max_active_dims(3)?;
/// assert_eq!(limited.embed(&["a cab"], EmbedOptions::default())?[0].indices.len(), 3);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SparseEmbedder {
    documents: Documents,
    queries: Option<TokenWeights>,
    prompts: Prompts,
    max_active_dims: Option<usize>,
    with_tokens: bool,
}

/// The model of documents, or of all texts.
#[derive(Clone, Debug)]
enum Documents {
    Splade {
        model: EncoderForMaskedLm,
        tokenizer: TextTokenizer,
        report: LoadReport,
        pooling: SpladePooling,
    },
    AutoEncoder {
        model: Embedder,
        auto_encoder: SparseAutoEncoder,
    },
    BgeM3 {
        model: EncoderModel,
        tokenizer: TextTokenizer,
        report: LoadReport,
        head: TokenWeightHead,
    },
}

impl Documents {
    /// `files` have the map to the weights of tokens.
    ///
    /// # Errors
    /// The errors of [`TokenWeightHead::from_files`].
    fn bge_m3(
        model: EncoderModel,
        tokenizer: TextTokenizer,
        report: LoadReport,
        files: &ModelFolder,
    ) -> Result<Self> {
        let (width, device) = (model.config().hidden_size, model.device());
        let head = TokenWeightHead::from_files(files, width, &tokenizer, device)?;
        Ok(Self::BgeM3 { model, tokenizer, report, head })
    }
}

/// A weight per token: the SparseStaticEmbedding of sentence-transformers.
#[derive(Clone, Debug)]
struct TokenWeights {
    tokenizer: TextTokenizer,
    weights: Vec<f32>,
}

impl TokenWeights {
    /// `config` is that of the documents' model.
    fn from_files(files: &ModelFolder, config: &ModelConfig) -> Result<Self> {
        let mut config = config.clone();
        config.encoder.max_position_embeddings = usize::MAX; // texts are not encoded
        let tokenizer = TextTokenizer::for_loader(files, &config, Loader::Transformers)?;
        let weights = load::vector(files, "weight")?;
        if let Some(got) = weights.iter().find(|weight| !weight.is_finite()) {
            let path = files.path("model.safetensors");
            return Err(Error::unsupported(path, "weight", "finite values", got));
        }
        Ok(Self { tokenizer, weights })
    }

    /// The weights of the tokens that occur, except 0.
    ///
    /// # Errors
    /// [`InputError::Id`] for a token without a weight.
    fn vector(&self, tokens: &Tokens) -> Result<SparseVector> {
        let ids: BTreeSet<u32> = tokens.input_ids.iter().copied().collect();
        let mut vector = SparseVector::default();
        for id in ids {
            let Some(&weight) = self.weights.get(id as usize) else {
                let (name, size, field) = ("input_ids", self.weights.len(), "weight");
                return Err(InputError::Id { name, got: id.into(), size, field }.into());
            };
            if weight != 0.0 {
                vector.indices.push(id);
                vector.values.push(weight);
            }
        }
        Ok(vector)
    }
}

impl SparseEmbedder {
    /// Loads a folder of sentence-transformers' `SparseEncoder`: Transformer and SpladePooling;
    /// Transformer, Pooling and SparseAutoEncoder; or a Router to a SparseStaticEmbedding for
    /// queries and to Transformer and SpladePooling for documents. A folder without `modules.json`
    /// is a masked language model, whose logits are pooled by their maximum.
    ///
    /// # Errors
    /// The errors of [`EncoderForMaskedLm::from_dir`] and [`TextTokenizer::from_files`];
    /// [`ConfigError::Unsupported`] for other modules, and for settings that are not implemented.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let folder = &ModelFolder::new(files);
        let SparseModules { documents, queries } = sparse_modules(folder)?;
        let (loader, prompts) = if folder.has("modules.json")? {
            let prompts = match &documents {
                SparseDocuments::BgeM3 { .. } => Prompts::of_embedder(folder)?,
                _ => Prompts::of_sparse_embedder(folder)?,
            };
            (Loader::SparseEncoder, prompts)
        } else {
            (Loader::Transformers, Prompts::without_file())
        };
        let mut max_active_dims = prompts.max_active_dims;
        let (documents, config) = match documents {
            SparseDocuments::Splade { transformer, pooling } => {
                let load = || EncoderForMaskedLm::load(&transformer, options);
                let ((model, report), tokenizer) = with_tokenizer(&transformer, loader, load)?;
                let documents = Documents::Splade { model, tokenizer, report, pooling };
                (documents, transformer.config()?)
            }
            SparseDocuments::AutoEncoder { chain, auto_encoder } => {
                let model = Embedder::from_chain(&chain, prompts.clone(), options)?;
                let auto_encoder = SparseAutoEncoder::from_files(
                    &auto_encoder,
                    model.dimension(),
                    &options.device,
                )?;
                max_active_dims = max_active_dims.or(Some(auto_encoder.count()));
                (Documents::AutoEncoder { model, auto_encoder }, chain.first.config()?)
            }
            SparseDocuments::BgeM3 { transformer, head } => {
                let load = || EncoderModel::load(&transformer, options);
                let loader = Loader::SentenceTransformer;
                let ((model, report), tokenizer) = with_tokenizer(&transformer, loader, load)?;
                let documents = Documents::bge_m3(model, tokenizer, report, &head)?;
                (documents, transformer.config()?)
            }
        };
        let queries = match queries {
            Some(files) => Some(TokenWeights::from_files(&files, &ModelConfig::read(&config)?)?),
            None => None,
        };
        Ok(Self { documents, queries, prompts, max_active_dims, with_tokens: false })
    }

    /// The sparse vectors of BGE-M3, by the encoder of its dense model. `files` have the map to the
    /// weights of tokens.
    ///
    /// # Errors
    /// [`InputError::NoEncoder`] for a dense model without an encoder; the errors of
    /// [`TokenWeightHead::from_files`].
    pub(super) fn of_bge_m3(files: &ModelFolder, dense: &Embedder) -> Result<Self> {
        let (model, tokenizer) = (dense.encoder()?.clone(), dense.tokenizer().clone());
        let prompts = Prompts::of_embedder(files)?;
        Ok(Self {
            documents: Documents::bge_m3(model, tokenizer, dense.report().clone(), files)?,
            queries: None,
            max_active_dims: prompts.max_active_dims,
            prompts,
            with_tokens: false,
        })
    }

    /// Keeps only the values of each vector that are largest in magnitude; of equal values those of
    /// the lowest indices.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for 0.
    pub fn with_max_active_dims(self, max: usize) -> Result<Self> {
        if max == 0 {
            let (field, expected) = ("max_active_dims", "at least 1");
            return Err(ConfigError::Value { field, expected, got: 0.0 }.into());
        }
        Ok(Self { max_active_dims: Some(max), ..self })
    }

    /// The maximum number of values of a vector; `None` for no limit.
    pub fn max_active_dims(&self) -> Option<usize> {
        self.max_active_dims
    }

    /// Sets the maximum length of a text in tokens, special tokens included.
    ///
    /// # Errors
    /// The errors of [`Embedder::with_max_seq_length`].
    pub fn with_max_seq_length(mut self, max_seq_length: usize) -> Result<Self> {
        let within = |tokenizer: &TextTokenizer, max: usize| {
            tokenizer.clone().with_max_seq_length_within(max_seq_length, max)
        };
        match &mut self.documents {
            Documents::Splade { model, tokenizer, .. } => {
                *tokenizer = within(tokenizer, model.encoder().config().max_tokens())?;
            }
            Documents::BgeM3 { model, tokenizer, .. } => {
                *tokenizer = within(tokenizer, model.config().max_tokens())?;
            }
            Documents::AutoEncoder { model, .. } => {
                *model = model.clone().with_max_seq_length(max_seq_length)?;
            }
        }
        if let Some(queries) = &mut self.queries {
            queries.tokenizer = within(&queries.tokenizer, usize::MAX)?;
        }
        Ok(self)
    }

    /// Sets the side on which long texts are truncated, instead of that of the model's files.
    pub fn with_truncation_side(mut self, side: TruncationSide) -> Self {
        let set = |tokenizer: &mut TextTokenizer| {
            *tokenizer = tokenizer.clone().with_truncation_side(side);
        };
        match &mut self.documents {
            Documents::Splade { tokenizer, .. } | Documents::BgeM3 { tokenizer, .. } => {
                set(tokenizer);
            }
            Documents::AutoEncoder { model, .. } => {
                *model = model.clone().with_truncation_side(side);
            }
        }
        if let Some(queries) = &mut self.queries {
            set(&mut queries.tokenizer);
        }
        self
    }

    /// Sets [`SparseVector::tokens`] of each vector.
    pub fn with_tokens(self) -> Self {
        Self { with_tokens: true, ..self }
    }

    /// The encoder of documents, or of all texts.
    pub fn encoder(&self) -> &EncoderModel {
        match &self.documents {
            Documents::Splade { model, .. } => model.encoder(),
            Documents::AutoEncoder { model, .. } => {
                model.encoder().expect("`sparse_modules` refuses a StaticEmbedding")
            }
            Documents::BgeM3 { model, .. } => model,
        }
    }

    /// The report on the checkpoint of the encoder.
    pub fn report(&self) -> &LoadReport {
        match &self.documents {
            Documents::Splade { report, .. } | Documents::BgeM3 { report, .. } => report,
            Documents::AutoEncoder { model, .. } => model.report(),
        }
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

    /// The similarity function of the model's files: `cosine`, `dot`, `euclidean` or `manhattan`.
    /// The function is `dot` if the files name none or an unknown one, as in sentence-transformers.
    /// The function does not affect the vectors.
    pub fn similarity_fn_name(&self) -> &str {
        let name = self.prompts.similarity_fn_name.as_deref();
        name.filter(|name| SIMILARITIES.contains(name)).unwrap_or("dot")
    }

    /// The text of a prompt; empty for no prompt.
    ///
    /// # Errors
    /// [`crate::InputError::NoPrompt`] for a name that the model does not have.
    pub fn prompt_text<'a>(&'a self, prompt: Prompt<'a>) -> Result<&'a str> {
        self.prompts.text(prompt)
    }

    /// The maximum length in tokens of texts of a role.
    pub fn max_seq_length(&self, role: TextRole) -> usize {
        let queries = self.queries.as_ref().filter(|_| role == TextRole::Query);
        let tokenizer = queries.map_or(Embed::tokenizer(self), |queries| &queries.tokenizer);
        tokenizer.max_seq_length()
    }

    /// The vector of each text.
    ///
    /// # Errors
    /// The errors of [`Embed::tokenize`] and [`Embed::embed_rows`].
    pub fn embed<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Vec<SparseVector>> {
        self.embed_rows(&self.tokenize(texts, options)?, |batch| batch())
    }

    /// [`TextRole::Query`] for queries of a model with stored weights for queries; otherwise
    /// [`TextRole::Unspecified`].
    pub fn role(&self, options: EmbedOptions) -> TextRole {
        match (&self.queries, options.role()) {
            (Some(_), TextRole::Query) => TextRole::Query,
            _ => TextRole::Unspecified,
        }
    }

    /// The tokens of a text that is given as ids, special tokens included, for
    /// [`Self::embed_sequences`]. The text is not a query of [`Self::role`].
    ///
    /// # Errors
    /// The errors of [`Embedder::tokens_from_ids`].
    pub fn tokens_from_ids(&self, input_ids: Vec<u32>) -> Result<Tokens> {
        tokens_from_ids(input_ids, self.encoder().config().vocab_size, Embed::tokenizer(self))
    }

    /// The vector of each sequence, given as for [`Embedder::embed_sequences`]. `role` is
    /// [`Self::role`] of the options of [`Embed::tokenize`].
    ///
    /// # Errors
    /// The errors of [`Embed::embed_rows`]; [`InputError::EmptySequence`] for a sequence without
    /// tokens, except a query of [`Self::role`].
    /// # Examples
    /// ```
    /// use encoder::{Embed, EmbedOptions, LoadOptions, SparseEmbedder};
    ///
    /// let dir = "../../tests/golden/sparse/splade_max";
    /// let model = SparseEmbedder::from_dir(dir, &LoadOptions::default())?;
    /// let options = EmbedOptions::default();
    /// let tokenized = model.tokenize(&["a cat", "a dog"], options)?;
    /// let sequences: Vec<_> = tokenized.sequences().collect();
    /// let vectors = model.embed_sequences(&sequences, model.role(options))?;
    /// assert_eq!(vectors, model.embed(&["a cat", "a dog"], options)?);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn embed_sequences(
        &self,
        sequences: &[(&Tokens, usize)],
        role: TextRole,
    ) -> Result<Vec<SparseVector>> {
        let empty = sequences.iter().position(|(tokens, _)| tokens.input_ids.is_empty());
        if let Some(index) = empty.filter(|_| role != TextRole::Query) {
            return Err(InputError::EmptySequence { index }.into());
        }
        let mut vectors = self.vectors(sequences, role, &mut |batch| batch())?;
        vectors.iter_mut().for_each(|vector| self.set_tokens(vector));
        Ok(vectors)
    }

    /// The tokens of a vector's dimensions with their values, in descending order of value. An
    /// index without a token, as of a sparse autoencoder, is written as a number.
    pub fn decode(&self, vector: &SparseVector) -> Vec<(String, f32)> {
        let mut order: Vec<usize> = (0..vector.indices.len()).collect();
        order.sort_by(|&a, &b| vector.values[b].total_cmp(&vector.values[a]));
        let token = |i: usize| (self.token(vector.indices[i]), vector.values[i]);
        order.into_iter().map(token).collect()
    }

    /// The token of a dimension.
    fn token(&self, index: u32) -> String {
        match &self.documents {
            Documents::Splade { tokenizer, .. } | Documents::BgeM3 { tokenizer, .. } => {
                tokenizer.token(index)
            }
            Documents::AutoEncoder { .. } => index.to_string(),
        }
    }

    /// The vector with at most [`Self::with_max_active_dims`] values.
    fn limited(&self, vector: SparseVector) -> SparseVector {
        vector.truncated(self.max_active_dims.unwrap_or(usize::MAX))
    }

    /// The vector of each sequence, without tokens.
    fn vectors(
        &self,
        sequences: &[(&Tokens, usize)],
        role: TextRole,
        run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<SparseVector>> {
        let Some(queries) = self.queries.as_ref().filter(|_| role == TextRole::Query) else {
            let compute = |batch: &[(&Tokens, usize)]| self.compute(batch);
            let length = |tokens: &Tokens| tokens.input_ids.len();
            return rows_in_batches(sequences, length, TOKEN_BUDGET, run, compute);
        };
        let compute = |chunk: &[(&Tokens, usize)]| {
            let vectors = chunk.iter().map(|(tokens, _)| Ok(self.limited(queries.vector(tokens)?)));
            vectors.collect::<Result<Vec<_>>>()
        };
        Ok(in_chunks(sequences, run, compute)?.into_iter().flatten().collect())
    }

    /// Sets the tokens of a vector, if they were asked for.
    fn set_tokens(&self, vector: &mut SparseVector) {
        if self.with_tokens {
            vector.tokens = vector.indices.iter().map(|&index| self.token(index)).collect();
        }
    }

    /// The vectors of a batch of documents.
    fn compute(&self, sequences: &[(&Tokens, usize)]) -> Result<Vec<SparseVector>> {
        let (model, pooling) = match &self.documents {
            Documents::Splade { model, pooling, .. } => (model, pooling),
            Documents::AutoEncoder { model, auto_encoder } => {
                let vectors = auto_encoder.forward(&model.embed_sequences(sequences)?)?;
                return Ok(vectors.into_iter().map(|vector| self.limited(vector)).collect());
            }
            Documents::BgeM3 { model, head, .. } => {
                let tokens = sequences.iter().map(|(tokens, _)| *tokens);
                let hidden = model.forward_ragged(&RaggedBatch::from_tokens(tokens)?)?;
                return self.weigh_tokens(head, &hidden, sequences);
            }
        };
        let mut vectors = Vec::with_capacity(sequences.len());
        for part in sequences.chunks(SEQUENCES_PER_PART) {
            let batch = RaggedBatch::from_tokens(part.iter().map(|(tokens, _)| *tokens))?;
            let pooled = model.forward_pooled(&batch, pooling.rows())?; // (B, vocab_size)
            let pooled = pooled.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
            let vector = |pooled: Vec<f32>| Ok(self.limited(pooling.vector(&pooled)?));
            vectors.extend(pooled.into_par_iter().map(vector).collect::<Result<Vec<_>>>()?);
        }
        Ok(vectors)
    }

    /// The vectors of sequences from the hidden states of a batch of BGE-M3.
    ///
    /// # Shapes
    /// `hidden`: `(N, E)`
    /// # Errors
    /// The errors of [`TokenWeightHead::forward`].
    /// # Panics
    /// If the model is not BGE-M3.
    pub(super) fn embed_hidden(
        &self,
        hidden: &Tensor,
        sequences: &[(&Tokens, usize)],
    ) -> Result<Vec<SparseVector>> {
        let Documents::BgeM3 { head, .. } = &self.documents else {
            unreachable!("`of_bge_m3` makes the model");
        };
        self.weigh_tokens(head, hidden, sequences)
    }

    fn weigh_tokens(
        &self,
        head: &TokenWeightHead,
        hidden: &Tensor,
        sequences: &[(&Tokens, usize)],
    ) -> Result<Vec<SparseVector>> {
        let vectors = head.forward(hidden, sequences.iter().map(|(tokens, _)| *tokens))?;
        Ok(vectors.into_iter().map(|vector| self.limited(vector)).collect())
    }

    /// The vector of each text from those of its windows: the largest value of the windows at each
    /// index.
    pub(super) fn join_windows(
        &self,
        texts: &TokenizedTexts,
        vectors: Vec<SparseVector>,
    ) -> Vec<SparseVector> {
        let mut vectors = vectors.into_iter();
        let joined = texts.windows.iter().map(|windows| {
            let own = vectors.by_ref().take(windows.len());
            let joined = own.reduce(|a, b| a.max(&b)).unwrap_or_default();
            let mut vector = self.limited(joined);
            self.set_tokens(&mut vector);
            vector
        });
        joined.collect()
    }
}

impl Embed for SparseEmbedder {
    type Row = SparseVector;

    /// The tokenizer of documents, or of all texts.
    fn tokenizer(&self) -> &TextTokenizer {
        match &self.documents {
            Documents::Splade { tokenizer, .. } | Documents::BgeM3 { tokenizer, .. } => tokenizer,
            Documents::AutoEncoder { model, .. } => model.tokenizer(),
        }
    }

    fn dimension(&self) -> usize {
        match &self.documents {
            Documents::Splade { model, .. } => model.encoder().config().vocab_size,
            Documents::AutoEncoder { auto_encoder, .. } => auto_encoder.dimension(),
            Documents::BgeM3 { model, .. } => model.config().vocab_size,
        }
    }

    fn settings(&self) -> String {
        let max = self.max_active_dims.map_or("all".to_string(), |max| format!("at most {max}"));
        let tokens = if self.with_tokens { "with" } else { "without" };
        let queries = self.queries.as_ref().map(|queries| queries.tokenizer.max_seq_length());
        let queries = queries.map_or(String::new(), |max| format!(", at most {max} of a query"));
        format!("{max} values, {tokens} tokens{queries}")
    }

    fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<TokenizedTexts> {
        match &self.queries {
            Some(queries) if self.role(options) == TextRole::Query => {
                let (tokenizer, prompts) = (&queries.tokenizer, &self.prompts);
                TokenizedTexts::without_special_tokens(tokenizer, prompts, texts, options)
            }
            _ => TokenizedTexts::new(Embed::tokenizer(self), &self.prompts, texts, options),
        }
    }

    /// The vector of a text in several windows has the largest value of the windows at each index.
    fn embed_rows(
        &self,
        texts: &TokenizedTexts,
        mut run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<SparseVector>> {
        let sequences: Vec<_> = texts.sequences().collect();
        let vectors = self.vectors(&sequences, texts.role, &mut run)?;
        Ok(self.join_windows(texts, vectors))
    }
}
