//! Text to vectors: tokenize, batch, encode, pool, normalise.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use ops::l2_normalize;

use crate::{
    Embed, EmbedOptions, EncoderModel, Error, InputError, LoadOptions, LoadReport, LongTexts,
    ModelFiles, Pooling, Prompt, RaggedBatch, Result, TextTokenizer, Tokens, TruncationSide,
    load::{ModelFolder, Read},
    models::encoder_model::no_rows,
    models::ragged_batch::TOKEN_BUDGET,
    pipelines::modules::{Chain, Module, check_pooling, transformer},
    pipelines::static_embedding::StaticEmbedding,
    pipelines::tokenized_texts::{
        Batch, TEXTS_PER_CHUNK, TokenizedTexts, Truncated, in_batches, in_chunks, tokens_from_ids,
    },
    pipelines::with_tokenizer::with_tokenizer,
    text::chat_template::TemplateSource,
    text::prompts::{Prompts, loader},
    text::sentence_config::{Loader, SentenceConfig},
    text::tokenizer::UNLIMITED,
};

/// The similarity functions of sentence-transformers, the default first.
pub(super) const SIMILARITIES: [&str; 4] = ["cosine", "dot", "euclidean", "manhattan"];

/// A sentence embedding model: tokenizer, encoder, pooling, and the modules after the pooling. In
/// place of encoder and pooling, a model can have a table of token vectors, whose mean is the vector
/// of a text: the `StaticEmbedding` of sentence-transformers, and the models of model2vec.
///
/// # Examples
/// ```
/// use encoder::{Embedder, LoadOptions};
///
/// let dir = "../../weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
/// let e = embedder.embed(&["A man is eating food.", "A man eats.", "It snows."])?;
/// assert_eq!(e.dims(), [3, 384]);
///
/// let cosines = e.matmul(&e.t()?)?.to_vec2::<f32>()?; // the vectors have length 1
/// assert!((cosines[0][0] - 1.0).abs() < 1e-6);
/// assert!(cosines[0][1] > 0.8 && cosines[0][2] < 0.2);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Embedder {
    tokenizer: TextTokenizer,
    model: Model,
    report: LoadReport,
    modules: Vec<Module>,
    prompts: Prompts,
    /// The length of the vectors after the last module.
    width: usize,
    /// The length that the vectors are truncated to; `width` if they are not truncated.
    dimension: usize,
    /// Whether truncated vectors are normalised again if the last module normalises.
    renormalizes: bool,
    token_budget: usize,
}

/// The part of an embedder that computes a vector per text.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a process has few embedders")]
enum Model {
    Transformer { encoder: EncoderModel, pooling: Pooling },
    Static(StaticEmbedding),
}

impl Model {
    /// The number of token ids.
    fn vocab_size(&self) -> usize {
        match self {
            Self::Transformer { encoder, .. } => encoder.config().vocab_size,
            Self::Static(table) => table.tokens(),
        }
    }

    /// The maximum number of tokens of a text.
    fn max_tokens(&self) -> usize {
        match self {
            Self::Transformer { encoder, .. } => encoder.config().max_tokens(),
            Self::Static(_) => UNLIMITED,
        }
    }

    fn device(&self) -> &Device {
        match self {
            Self::Transformer { encoder, .. } => encoder.device(),
            Self::Static(table) => table.device(),
        }
    }

    /// Whether the tokens of a prompt are pooled.
    fn includes_prompt(&self) -> bool {
        match self {
            Self::Transformer { pooling, .. } => pooling.includes_prompt(),
            Self::Static(_) => true,
        }
    }

    /// The vectors of sequences, before the other modules.
    fn forward(&self, sequences: &[(&Tokens, usize)]) -> Result<Tensor> {
        match self {
            Self::Transformer { encoder, pooling } => {
                let batch = RaggedBatch::from_tokens(sequences.iter().map(|(tokens, _)| *tokens))?;
                let prompts: Vec<usize> = sequences.iter().map(|(_, prompt)| *prompt).collect();
                if let Some(at) = pooling.one_token(batch.offsets(), &prompts)? {
                    let hidden = encoder.forward_ragged_at(&batch, &at, Some(&prompts))?;
                    return Ok(hidden.to_dtype(DType::F32)?); // (B, E)
                }
                let hidden = encoder.forward_ragged(&batch)?; // (N, E)
                self.pool(&hidden, batch.offsets(), sequences) // (B, E)
            }
            Self::Static(table) => table.forward(sequences),
        }
    }

    /// The vectors of sequences from their hidden states, before the other modules.
    ///
    /// # Errors
    /// [`InputError::NoEncoder`] for a model without hidden states; the errors of
    /// [`Pooling::forward`].
    fn pool(
        &self,
        hidden: &Tensor,
        offsets: &[usize],
        sequences: &[(&Tokens, usize)],
    ) -> Result<Tensor> {
        let Self::Transformer { pooling, .. } = self else {
            return Err(InputError::NoEncoder.into());
        };
        let prompts: Vec<usize> = sequences.iter().map(|(_, prompt)| *prompt).collect();
        pooling.forward(hidden, offsets, Some(&prompts))
    }
}

/// The result of [`Embedder::embed_with`].
#[derive(Clone, Debug)]
pub struct Embeddings {
    /// One vector per text, `(B, E)`, f32.
    pub vectors: Tensor,
    /// The truncated texts, in the order of the input.
    pub truncated: Vec<Truncated>,
}

impl Embedder {
    /// Loads a sentence-transformers folder: `modules.json`, `1_Pooling/config.json`,
    /// `config.json`, `model.safetensors` and `tokenizer.json`, and the optional `2_Dense`,
    /// `sentence_bert_config.json` and `config_sentence_transformers.json`.
    ///
    /// A folder whose first module is a StaticEmbedding has `model.safetensors` with
    /// `embedding.weight`, or model2vec's `embeddings`, `mapping` and `weights`, and
    /// `tokenizer.json`, of which everything but the special tokens around a text is used. A folder
    /// of model2vec without `modules.json` has the rules of model2vec: unknown tokens are left out,
    /// and `max_length` of `config.json` limits the tokens and the characters of a text.
    ///
    /// Token vectors, pooling and the modules after it compute in f32 for every precision. Token
    /// vectors are averaged on the CPU for every device.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`] and [`TextTokenizer::from_files`];
    /// [`crate::FileError::NoFile`] if `modules.json` or the pooling's config is missing;
    /// [`crate::ConfigError::Unsupported`] unless the modules are a transformer and a [`Pooling`],
    /// or a StaticEmbedding, and then any of `Dense` and `Normalize`, or for token vectors of
    /// another layout, or if `config_sentence_transformers.json` names an
    /// unknown default prompt or a `truncate_dim` of 0; [`crate::ConfigError::Width`] if the size
    /// of a `Dense` module does not fit.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<Self> {
        let files = &ModelFolder::new(files);
        let prompts = Prompts::of_embedder(files)?;
        Self::from_chain(&Chain::from_files(files)?, prompts, options)
    }

    /// Loads the modules of a chain.
    pub(crate) fn from_chain(
        chain: &Chain,
        prompts: Prompts,
        options: &LoadOptions,
    ) -> Result<Self> {
        let mut embedder = match &chain.pooling {
            Some(pooling) => {
                let loader = Loader::SentenceTransformer;
                Self::without_modules(&chain.first, loader, pooling.clone(), options)?
            }
            None => {
                let (table, tokenizer, report) = StaticEmbedding::from_files(
                    &chain.first,
                    chain.static_rules()?,
                    &options.device,
                )?;
                let width = table.dimension();
                Self::from_parts(Model::Static(table), width, tokenizer, report)
            }
        };
        (embedder.modules, embedder.width) =
            chain.modules(embedder.width, Read::All, &options.device)?;
        embedder.with_settings(prompts)
    }

    /// Applies the prompts and the dimension of `config_sentence_transformers.json`.
    fn with_settings(self, prompts: Prompts) -> Result<Self> {
        let dimension = prompts.truncate_dim.unwrap_or(self.width).min(self.width);
        let truncated = Self { prompts, ..self }.with_dimension(dimension)?;
        // sentence-transformers does not normalise again after `truncate_dim`.
        Ok(Self { renormalizes: false, ..truncated })
    }

    /// Loads the transformer of a folder, with the pooling that the caller chooses. Modules after
    /// the pooling are not loaded; see [`Self::normalized`]. Prompts, maximum length and dimension
    /// of a sentence-transformers folder are applied.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`] and [`TextTokenizer::from_files`];
    /// [`crate::ConfigError::Unsupported`] for an unknown default prompt, for a `truncate_dim` of
    /// 0, for a StaticEmbedding in place of a transformer, and for a chat template in a folder without `modules.json`, since sentence-transformers
    /// would format the texts with it.
    pub fn from_transformer(
        files: &ModelFiles,
        pooling: Pooling,
        options: &LoadOptions,
    ) -> Result<Self> {
        let files = &ModelFolder::new(files);
        check_pooling(files, &pooling)?;
        let model_files = transformer(files)?;
        if loader(files)? == Loader::SentenceTransformer {
            let loader = Loader::SentenceTransformer;
            let embedder = Self::without_modules(&model_files, loader, pooling, options)?;
            return embedder.with_settings(Prompts::of_embedder(files)?);
        }
        if !files.has("modules.json")?
            && let Some(template) = TemplateSource::find(files, &SentenceConfig::default())?
        {
            let expected = "no chat template, for embeddings without modules.json";
            return Err(Error::unsupported(
                template.path,
                "chat_template",
                expected,
                "of this file",
            ));
        }
        Self::without_modules(&model_files, Loader::Transformers, pooling, options)
    }

    /// The transformer and its pooling, without further modules and prompts.
    fn without_modules(
        files: &ModelFolder,
        loader: Loader,
        pooling: Pooling,
        options: &LoadOptions,
    ) -> Result<Self> {
        let load = || EncoderModel::load(files, options);
        let ((encoder, report), tokenizer) = with_tokenizer(files, loader, load)?;
        let width = pooling.dimension(encoder.config().hidden_size);
        Ok(Self::from_parts(Model::Transformer { encoder, pooling }, width, tokenizer, report))
    }

    /// A model of vectors of length `width`, without further modules and prompts.
    fn from_parts(
        model: Model,
        width: usize,
        tokenizer: TextTokenizer,
        report: LoadReport,
    ) -> Self {
        Self {
            tokenizer,
            model,
            report,
            modules: vec![],
            prompts: Prompts::without_file(),
            width,
            dimension: width,
            renormalizes: false,
            token_budget: TOKEN_BUDGET,
        }
    }

    /// Sets the maximum number of tokens per batch. A longer text is a batch of its own.
    pub fn with_token_budget(mut self, tokens: usize) -> Self {
        self.token_budget = tokens;
        self
    }

    /// Sets the maximum length of a text in tokens, special tokens included.
    ///
    /// # Errors
    /// [`crate::ConfigError::MaxSeqLength`] if the model has fewer positions;
    /// [`crate::ConfigError::NoRoom`] if the length leaves no room for text beside the special
    /// tokens.
    /// # Examples
    /// ```
    /// use encoder::{EmbedOptions, Embedder, LoadOptions};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    /// let embedder = embedder.with_max_seq_length(4)?; // [CLS] i love [SEP]
    /// let embedded = embedder.embed_with(&["I love AI"], EmbedOptions::default())?;
    /// assert_eq!((embedded.truncated[0].tokens, embedded.truncated[0].kept), (5, 4));
    /// assert!(embedder.with_max_seq_length(513).is_err()); // the model has 512 positions
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn with_max_seq_length(self, max_seq_length: usize) -> Result<Self> {
        let max = self.model.max_tokens();
        Ok(Self {
            tokenizer: self.tokenizer.with_max_seq_length_within(max_seq_length, max)?,
            ..self
        })
    }

    /// Normalises the vectors to length 1. Has no effect if the last module is `Normalize`, except
    /// on truncated vectors, which are then normalised again.
    pub fn normalized(mut self) -> Self {
        if !self.normalizes() {
            self.modules.push(Module::Normalize);
        }
        self.renormalizes = true;
        self
    }

    /// Removes the module `Normalize` at the end, so that the vectors keep their length.
    pub fn unnormalized(mut self) -> Self {
        while self.normalizes() {
            self.modules.pop();
        }
        self
    }

    /// Sets the side on which long texts are truncated, instead of that of the model's files.
    pub fn with_truncation_side(self, side: TruncationSide) -> Self {
        Self { tokenizer: self.tokenizer.with_truncation_side(side), ..self }
    }

    /// Truncates the vectors to their first `dimension` values, and normalises them again if the
    /// model normalises. Meant for models with Matryoshka training (Kusupati et al. 2022,
    /// <https://arxiv.org/abs/2205.13147>).
    ///
    /// # Errors
    /// [`InputError::Dimension`] if `dimension` is 0 or exceeds the model's.
    pub fn with_dimension(self, dimension: usize) -> Result<Self> {
        if (1..=self.width).contains(&dimension) {
            Ok(Self { dimension, renormalizes: true, ..self })
        } else {
            Err(InputError::Dimension { got: dimension, max: self.width }.into())
        }
    }

    /// E, the length of each vector.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// The length of the vectors before truncation, the maximum of [`Self::with_dimension`].
    pub fn max_dimension(&self) -> usize {
        self.width
    }

    /// The names of the prompts in the model's files.
    pub fn prompt_names(&self) -> impl Iterator<Item = &str> {
        self.prompts.names()
    }

    /// The prompts of the model's files, by name.
    pub fn prompts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.prompts.texts()
    }

    /// The text of a prompt; empty for no prompt. A sentence embedding model has the prompts
    /// `query` and `document` even if its files do not name them: they are empty.
    ///
    /// # Errors
    /// [`InputError::NoPrompt`] for a name that the model does not have.
    pub fn prompt_text<'a>(&'a self, prompt: Prompt<'a>) -> Result<&'a str> {
        self.prompts.text(prompt)
    }

    /// The name of the prompt that [`Prompt::Default`] selects.
    pub fn default_prompt_name(&self) -> Option<&str> {
        self.prompts.default_prompt_name()
    }

    /// The similarity function of the model's files: `cosine`, `dot`, `euclidean` or `manhattan`.
    /// It is `cosine` if the files name none or an unknown one, as in sentence-transformers. It
    /// does not affect the vectors.
    pub fn similarity_fn_name(&self) -> &str {
        let name = self.prompts.similarity_fn_name.as_deref();
        name.filter(|name| SIMILARITIES.contains(name)).unwrap_or(SIMILARITIES[0])
    }

    /// The unknown similarity function that the model's files name, if any, in place of which
    /// [`Self::similarity_fn_name`] is `cosine`.
    pub fn unknown_similarity_fn_name(&self) -> Option<&str> {
        let name = self.prompts.similarity_fn_name.as_deref();
        name.filter(|name| !SIMILARITIES.contains(name))
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// The encoder.
    ///
    /// # Errors
    /// [`InputError::NoEncoder`] if the model has a table of token vectors instead.
    pub fn encoder(&self) -> Result<&EncoderModel> {
        match &self.model {
            Model::Transformer { encoder, .. } => Ok(encoder),
            Model::Static(_) => Err(InputError::NoEncoder.into()),
        }
    }

    /// The report on the loaded checkpoint.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Whether the vectors have length 1: the last module normalises, and vectors that are
    /// truncated are normalised again.
    pub fn is_normalized(&self) -> bool {
        self.normalizes() && (self.dimension == self.width || self.renormalizes)
    }

    /// Whether the last module normalises the vectors.
    fn normalizes(&self) -> bool {
        matches!(self.modules.last(), Some(Module::Normalize))
    }

    /// Embeds texts, in their order, with the default options.
    ///
    /// An empty text has a vector too (`[CLS] [SEP]`). A text longer than the model's maximum
    /// length is truncated.
    ///
    /// # Shapes
    /// returns `(B, E)`, f32; `(0, E)` for no texts
    /// # Units
    /// vectors have length 1 if [`Self::is_normalized`] is true
    /// # Numerics
    /// Largest difference from sentence-transformers 6.2 in f32 over the golden sentences: 3e-7.
    /// On a CPU with AVX2 or AVX-512, in f32, bf16 and int8, a text's vector is bit-identical for
    /// every batch, order and number of threads. Elsewhere candle's matrix products may sum in
    /// another order.
    /// # Errors
    /// [`crate::FileError::Tokenizer`] if the vocabulary has no token for a part of a text;
    /// [`InputError::NoTokens`] if a text has no tokens, not even special ones; the errors of
    /// [`Self::embed_tokenized`].
    #[doc(alias = "encode")]
    pub fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Tensor> {
        Ok(self.embed_with(texts, EmbedOptions::default())?.vectors)
    }

    /// [`Self::embed`] with options. Also lists the truncated texts.
    ///
    /// # Errors
    /// The errors of [`Self::embed`]; [`InputError::NoPrompt`] for a prompt that the model does not
    /// have; [`InputError::LongText`] for a text that is too long, with [`LongTexts::Refuse`];
    /// [`InputError::LongPrompt`] for a prompt that leaves no room for the text.
    /// # Examples
    /// ```
    /// use encoder::{EmbedOptions, Embedder, LoadOptions, LongTexts};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    /// let texts = ["short".to_string(), "and ".repeat(300)];
    /// let cut = embedder.embed_with(&texts, EmbedOptions::default())?.truncated;
    /// assert_eq!((cut.len(), cut[0].text, cut[0].tokens, cut[0].kept), (1, 1, 302, 256));
    ///
    /// let options = EmbedOptions::new().with_long_texts(LongTexts::Refuse);
    /// embedder.embed_with(&texts, options).unwrap_err();
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn embed_with<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Embeddings> {
        let tokenized = self.tokenize(texts, options)?;
        let vectors = self.embed_tokenized(&tokenized, |batch| batch())?;
        Ok(Embeddings { vectors, truncated: tokenized.truncated().to_vec() })
    }

    /// The first half of [`Self::embed_with`]. Another thread can tokenize the next texts while
    /// [`Self::embed_tokenized`] computes.
    ///
    /// # Errors
    /// The errors of [`Self::embed_with`].
    /// # Examples
    /// ```
    /// use encoder::{EmbedOptions, Embedder, LoadOptions};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    /// let tokenized = embedder.tokenize(&["I love AI"], EmbedOptions::default())?;
    /// assert_eq!(tokenized.tokens(), 5); // [CLS] i love ai [SEP]
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<TokenizedTexts> {
        let tokenized = match self.model {
            Model::Transformer { .. } => TokenizedTexts::new,
            Model::Static(_) => TokenizedTexts::with_empty_texts,
        }(&self.tokenizer, &self.prompts, texts, options)?;
        let (got, max) = (tokenized.prompt, self.tokenizer.max_seq_length());
        let is_first_window_without_text =
            options.long_texts == LongTexts::Windows && got > 0 && got + 1 >= max;
        if is_first_window_without_text && !self.model.includes_prompt() {
            return Err(InputError::LongPrompt { got, max }.into());
        }
        Ok(tokenized)
    }

    /// The tokens of a text that is given as ids, special tokens included, for
    /// [`Self::embed_sequences`].
    ///
    /// # Errors
    /// [`InputError::EmptySequence`] for no ids; [`InputError::Id`] for an id outside the
    /// vocabulary; [`InputError::TooLong`] for more ids than the model's maximum length.
    /// # Examples
    /// ```
    /// use encoder::{Embedder, LoadOptions};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    /// let love = embedder.tokens_from_ids(vec![101, 1045, 2293, 9932, 102])?; // "I love AI"
    /// let e = embedder.embed_sequences(&[(&love, 0)])?.to_vec2::<f32>()?; // without a prompt
    /// assert_eq!(e, embedder.embed(&["I love AI"])?.to_vec2::<f32>()?);
    /// assert!(embedder.tokens_from_ids(vec![30_522]).is_err()); // the ids end at 30,521
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn tokens_from_ids(&self, input_ids: Vec<u32>) -> Result<Tokens> {
        tokens_from_ids(input_ids, self.model.vocab_size(), &self.tokenizer)
    }

    /// The second half of [`Self::embed_with`]: computes the vectors, each batch within `run`.
    ///
    /// `run` calls each batch, here or on another thread, or ends the computation with an error, as
    /// [`unless_stopped`](crate::unless_stopped) does.
    ///
    /// # Shapes
    /// returns `(B, E)`, f32; `(0, E)` for no texts
    /// # Errors
    /// [`InputError::OnlyPrompt`] for a text without tokens beyond the prompt, if the prompt is not
    /// pooled; [`crate::Error::Candle`] if the computation fails, such as for lack of memory on a
    /// GPU; the errors of `run`; [`crate::Error::Stopped`] if `run` succeeds without a call of the
    /// batch.
    /// # Examples
    /// Two texts in two batches, because of the budget of tokens:
    /// ```
    /// use encoder::{EmbedOptions, Embedder, LoadOptions};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?.with_token_budget(5);
    /// let tokenized = embedder.tokenize(&["I love AI", "It snows."], EmbedOptions::default())?;
    /// let mut batches = 0;
    /// let vectors = embedder.embed_tokenized(&tokenized, |batch| {
    ///     batches += 1;
    ///     batch()
    /// })?;
    /// assert_eq!((batches, vectors.dims()), (2, &[2, 384][..]));
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn embed_tokenized(
        &self,
        texts: &TokenizedTexts,
        mut run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Tensor> {
        if texts.have_windows() {
            return self.embed_windows(texts, &mut run);
        }
        self.embed_within(&texts.sequences().collect::<Vec<_>>(), &mut run)
    }

    /// [`Self::embed_tokenized`] for texts of several windows.
    fn embed_windows(
        &self,
        texts: &TokenizedTexts,
        run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Tensor> {
        let all: Vec<(&Tokens, usize)> = texts.sequences().collect();
        let vectors = all.chunks(TEXTS_PER_CHUNK).flat_map(|chunk| {
            let vectors = self.embed_within(chunk, run).and_then(|x| Ok(x.to_vec2::<f32>()?));
            match vectors {
                Ok(vectors) => vectors.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            }
        });
        self.join_windows(texts, vectors)
    }

    /// `(B, E)`: for each text the mean of its windows' vectors. The weight of a window is the
    /// number of its pooled tokens without special tokens; a prompt that is not pooled is not
    /// counted.
    ///
    /// # Errors
    /// The first error in `vectors`.
    pub(super) fn join_windows(
        &self,
        texts: &TokenizedTexts,
        vectors: impl Iterator<Item = Result<Vec<f32>>>,
    ) -> Result<Tensor> {
        let (device, e) = (self.model.device(), self.dimension);
        let mut sequences = texts.sequences().zip(vectors);
        let means = texts.windows.iter().map(|windows| {
            let (mut sum, mut total) = (vec![0.0; e], 0.0);
            for ((window, prompt), vector) in sequences.by_ref().take(windows.len()) {
                let weight = match windows.len() {
                    1 => 1.0,
                    _ => self.window_weight(window, prompt),
                };
                total += weight;
                sum.iter_mut().zip(vector?).for_each(|(sum, x)| *sum += x * weight);
            }
            let mean = sum.into_iter().map(|x| x / total).collect();
            let mean = Tensor::from_vec(mean, (1, e), device)?;
            if windows.len() > 1 && self.is_normalized() {
                Ok(l2_normalize(&mean)?)
            } else {
                Ok(mean)
            }
        });
        let means = means.collect::<Result<Vec<_>>>()?;
        Ok(Tensor::cat(&means, 0)?)
    }

    /// The weight of a window in the mean over the windows of a text.
    fn window_weight(&self, window: &Tokens, prompt: usize) -> f32 {
        if let Model::Static(table) = &self.model {
            return table.pooled(window).count() as f32;
        }
        let excluded = if self.model.includes_prompt() { 0 } else { prompt };
        // A special token at the beginning is counted among the special tokens too.
        let counted = self.tokenizer.starts_with_special_token(&window.input_ids);
        let excluded = excluded.saturating_sub(usize::from(counted));
        let special = self.tokenizer.special_token_count();
        window.input_ids.len().saturating_sub(special + excluded) as f32
    }

    /// The vector of each sequence, given its tokens and the number of tokens at its beginning that
    /// belong to the prompt, the special token before it included. The sequences may come from
    /// several calls of [`Self::tokenize`], as in a server that computes several requests together.
    ///
    /// # Shapes
    /// returns `(B, E)`, f32
    /// # Errors
    /// The errors of [`Self::embed_tokenized`]; [`InputError::EmptySequence`] for a sequence
    /// without tokens; [`InputError::Id`] for an id outside the vocabulary; [`InputError::TooLong`]
    /// for a sequence longer than [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens),
    /// which can exceed the maximum length that texts are truncated to; [`crate::Error::Attention`]
    /// if the numbers of ids and types differ.
    /// # Examples
    /// ```
    /// use encoder::{EmbedOptions, Embedder, LoadOptions};
    ///
    /// let dir = "../../weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    /// let tokenized = embedder.tokenize(&["I love AI", "It snows."], EmbedOptions::default())?;
    /// let sequences: Vec<_> = tokenized.sequences().collect();
    /// let vectors = embedder.embed_sequences(&sequences)?.to_vec2::<f32>()?;
    /// assert_eq!(vectors, embedder.embed(&["I love AI", "It snows."])?.to_vec2::<f32>()?);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn embed_sequences(&self, sequences: &[(&Tokens, usize)]) -> Result<Tensor> {
        if let Some(index) = sequences.iter().position(|(tokens, _)| tokens.input_ids.is_empty())
            && self.encoder().is_ok()
        {
            return Err(InputError::EmptySequence { index }.into());
        }
        self.embed_within(sequences, &mut |batch| batch())
    }

    /// [`Self::embed_sequences`] that computes each batch within `run`.
    fn embed_within(
        &self,
        sequences: &[(&Tokens, usize)],
        run: &mut dyn FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Tensor> {
        let compute = |batch: &[(&Tokens, usize)]| self.embed_batch(batch);
        if sequences.is_empty() {
            return Ok(no_rows(self.dimension(), DType::F32, self.model.device())?);
        }
        if let Model::Static(_) = self.model {
            return Ok(Tensor::cat(&in_chunks(sequences, run, compute)?, 0)?); // (B, E)
        }
        let (embeddings, rows) = in_batches(sequences, self.token_budget, run, compute)?;
        let rows = Tensor::from_slice(&rows, rows.len(), self.model.device())?;
        Ok(Tensor::cat(&embeddings, 0)?.index_select(&rows, 0)?) // (B, E)
    }

    /// [`Self::embed_sequences`] for one batch.
    fn embed_batch(&self, sequences: &[(&Tokens, usize)]) -> Result<Tensor> {
        self.after_pooling(self.model.forward(sequences)?)
    }

    /// The vectors of sequences from the hidden states of a batch.
    ///
    /// # Shapes
    /// `hidden`: `(N, E)`; `offsets`: those of [`RaggedBatch::offsets`]; returns `(B, E)`
    /// # Errors
    /// [`InputError::NoEncoder`] for a model without hidden states; the errors of
    /// [`Self::embed_tokenized`].
    pub(super) fn embed_hidden(
        &self,
        hidden: &Tensor,
        offsets: &[usize],
        sequences: &[(&Tokens, usize)],
    ) -> Result<Tensor> {
        self.after_pooling(self.model.pool(hidden, offsets, sequences)?)
    }

    /// Applies the modules after the pooling, and truncates the vectors.
    fn after_pooling(&self, mut x: Tensor) -> Result<Tensor> {
        for module in &self.modules {
            x = module.forward(&x)?;
        }
        if self.dimension == self.width {
            return Ok(x);
        }
        let truncated = x.narrow(1, 0, self.dimension)?.contiguous()?;
        if self.renormalizes && self.normalizes() {
            Ok(l2_normalize(&truncated)?)
        } else {
            Ok(truncated)
        }
    }
}

impl Embed for Embedder {
    type Row = Vec<f32>;

    fn tokenizer(&self) -> &TextTokenizer {
        self.tokenizer()
    }

    fn dimension(&self) -> usize {
        self.dimension()
    }

    fn computes_rows(&self) -> bool {
        matches!(self.model, Model::Transformer { .. })
    }

    fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<TokenizedTexts> {
        self.tokenize(texts, options)
    }

    fn embed_rows(
        &self,
        texts: &TokenizedTexts,
        run: impl FnMut(&mut Batch) -> Result<()>,
    ) -> Result<Vec<Vec<f32>>> {
        Ok(self.embed_tokenized(texts, run)?.to_vec2()?)
    }
}
