//! Text to vectors: tokenize, batch, encode, pool, normalise.

use std::{cmp::Reverse, path::Path};

use candle_core::{DType, Device, Tensor};
use mha::ops::l2_normalize;

use crate::{
    BertModel, Error, LoadReport, ModelFiles, PackedBatch, Pooling, Precision, Prompt, Result,
    TextTokenizer, Tokens,
    error::beginning,
    load::Read,
    pipelines::modules::{Chain, Module, transformer},
    pipelines::with_tokenizer::with_tokenizer,
    text::prompts::{Prompts, loader},
    text::sentence_config::Loader,
    text::tokenizer_config,
};

/// Tokens computed at a time, unless told otherwise: it bounds memory, not the number of texts.
const TOKEN_BUDGET: usize = 2048;

/// A sentence-transformers folder, ready to embed texts.
///
/// # Examples
/// ```
/// use candle_core::Device;
/// use encoder::{Embedder, Precision};
///
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
/// let dir = "weights/all-MiniLM-L6-v2";
/// let embedder = Embedder::from_dir(dir, Precision::F32, &Device::Cpu)?;
/// let e = embedder.embed(&["A man is eating food.", "A man eats.", "It snows."])?;
/// assert_eq!(e.dims(), [3, 384]);
///
/// let cosines = e.matmul(&e.t()?)?.to_vec2::<f32>()?; // the vectors have length 1
/// assert!((cosines[0][0] - 1.0).abs() < 1e-6);
/// assert!(cosines[0][1] > 0.8 && cosines[0][2] < 0.2);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone)]
pub struct Embedder {
    tokenizer: TextTokenizer,
    model: BertModel,
    report: LoadReport,
    pooling: Pooling,
    modules: Vec<Module>,
    prompts: Prompts,
    /// Of what the modules make.
    width: usize,
    /// What the vectors are cut to.
    dimension: usize,
    /// Whether truncated vectors are normalised again, if the model normalises.
    renormalizes: bool,
    token_budget: usize,
}

/// Texts that [`Embedder::embed_iter`] reads at a time.
const TEXTS_AT_ONCE: usize = 1024;

/// What [`Embedder::embed_with`] does with texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbedOptions<'a> {
    /// What is put before each text.
    pub prompt: Prompt<'a>,
    /// How texts are handled that are longer than the model's maximum length.
    pub long_texts: LongTexts,
}

/// How texts are handled that are longer than the model's maximum length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LongTexts {
    /// They are truncated, and listed in [`Embeddings::truncated`].
    #[default]
    Truncate,
    /// They are an error.
    Refuse,
    /// They are split into windows, whose vectors are averaged by their number of tokens, those of
    /// a prompt where it is pooled, and normalised again if the model normalises.
    Windows,
}

/// The tokens of texts, as [`Embedder::tokenize`] makes them.
#[derive(Clone, Debug)]
pub struct TokenizedTexts {
    /// One sequence for each text, or several with [`LongTexts::Windows`].
    windows: Vec<Vec<Tokens>>,
    /// Tokens of the prompt that is before each text.
    prompt: usize,
    truncated: Vec<Truncated>,
}

impl TokenizedTexts {
    /// Tokens to be computed.
    pub fn tokens(&self) -> usize {
        self.windows.iter().flatten().map(|window| window.input_ids.len()).sum()
    }
}

/// What [`Embedder::embed_with`] gives.
#[derive(Clone, Debug)]
pub struct Embeddings {
    /// `(B, E)`, f32
    pub vectors: Tensor,
    /// The texts that were truncated, in their order.
    pub truncated: Vec<Truncated>,
}

/// A text that was truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Truncated {
    /// The index of the text.
    pub text: usize,
    /// Its tokens, special ones included.
    pub tokens: usize,
    /// Those that were kept.
    pub kept: usize,
}

impl Truncated {
    /// The texts that were truncated, of the tokens of each text.
    ///
    /// # Examples
    /// ```
    /// use encoder::{Tokens, Truncated};
    ///
    /// let whole = Tokens { input_ids: vec![2, 3], token_type_ids: vec![0, 0], truncated: 0 };
    /// let cut = Tokens { truncated: 5, ..whole.clone() };
    /// let truncated = Truncated::of(&[whole, cut]);
    /// assert_eq!((truncated[0].text, truncated[0].tokens, truncated[0].kept), (1, 7, 2));
    /// ```
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a Tokens>) -> Vec<Self> {
        let all = texts.into_iter().enumerate().filter(|(_, tokens)| tokens.truncated > 0);
        let truncated = all.map(|(text, tokens)| {
            let kept = tokens.input_ids.len();
            Self { text, tokens: kept + tokens.truncated, kept }
        });
        truncated.collect()
    }
}

impl Embedder {
    /// Loads a sentence-transformers folder: `modules.json`, `1_Pooling/config.json`,
    /// `config.json`, `model.safetensors`, `tokenizer.json` and, where they are there, `2_Dense`,
    /// `sentence_bert_config.json` and `config_sentence_transformers.json`. The vectors are f32
    /// whatever the precision, and so is what follows the pooling.
    ///
    /// # Errors
    /// Those of [`BertModel::from_dir`]; a `modules.json` that is missing or asks for more than
    /// a transformer, a [`Pooling`], linear maps and normalisations.
    pub fn from_dir(dir: impl AsRef<Path>, precision: Precision, device: &Device) -> Result<Self> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(files: &ModelFiles, precision: Precision, device: &Device) -> Result<Self> {
        let chain = Chain::from_files(files)?;
        let pooling = chain.pooling.clone();
        let loader = Loader::SentenceTransformer;
        let mut bare = Self::pooled(&chain.transformer, loader, pooling, precision, device)?;
        (bare.modules, bare.width) = chain.modules(bare.width, Read::All, device)?;
        bare.with_settings(files)
    }

    /// With the prompts and the dimension that `config_sentence_transformers.json` names.
    fn with_settings(self, files: &ModelFiles) -> Result<Self> {
        let prompts = Prompts::of_embedder(files)?;
        let dimension = prompts.truncate_dim.unwrap_or(self.width).min(self.width);
        let truncated = Self { prompts, ..self }.with_dimension(dimension)?;
        Ok(Self { renormalizes: false, ..truncated }) // as sentence-transformers truncates
    }

    /// A folder that does not say how to pool, or shall be pooled otherwise; nothing follows the
    /// pooling, unless [`Self::normalized`]. Prompts, lengths and the dimension of a
    /// sentence-transformers folder count.
    ///
    /// # Errors
    /// Those of [`BertModel::from_dir`] and [`TextTokenizer::from_files`]; [`Error::Unsupported`] for
    /// a chat template without a `modules.json`, into which sentence-transformers would put the texts.
    pub fn from_transformer(
        files: &ModelFiles,
        pooling: Pooling,
        precision: Precision,
        device: &Device,
    ) -> Result<Self> {
        let of_transformer = transformer(files)?;
        if loader(files)? == Loader::SentenceTransformer {
            let loader = Loader::SentenceTransformer;
            let bare = Self::pooled(&of_transformer, loader, pooling, precision, device)?;
            return bare.with_settings(files);
        }
        if let Some(path) = tokenizer_config::chat_template(files)? {
            return Err(tokenizer_config::chat_template_unsupported(&path));
        }
        Self::pooled(&of_transformer, Loader::Transformers, pooling, precision, device)
    }

    /// The model of a transformer's own files, without prompts.
    fn pooled(
        files: &ModelFiles,
        loader: Loader,
        pooling: Pooling,
        precision: Precision,
        device: &Device,
    ) -> Result<Self> {
        let load = || BertModel::from_files(files, precision, device);
        let ((model, report), tokenizer) = with_tokenizer(files, loader, load)?;
        let width = pooling.dimension(model.config().hidden_size);
        let (modules, prompts, token_budget) = (vec![], Prompts::none(), TOKEN_BUDGET);
        let dimension = width;
        Ok(Self {
            tokenizer,
            model,
            report,
            pooling,
            modules,
            prompts,
            width,
            dimension,
            renormalizes: false,
            token_budget,
        })
    }

    /// Computes at most so many tokens at a time, or one text where that alone has more.
    pub fn with_token_budget(mut self, tokens: usize) -> Self {
        self.token_budget = tokens;
        self
    }

    /// Makes vectors of length 1, whatever the model's files say.
    pub fn normalized(mut self) -> Self {
        if !self.normalizes() {
            self.modules.push(Module::Normalize);
        }
        self.renormalizes = true;
        self
    }

    /// Cuts the vectors to their first values, and normalises what is left if the model normalises:
    /// for models that were trained to be cut (Kusupati et al. 2022,
    /// <https://arxiv.org/abs/2205.13147>).
    ///
    /// # Errors
    /// [`Error::Dimension`] unless the model makes so many.
    pub fn with_dimension(self, dimension: usize) -> Result<Self> {
        match (1..=self.width).contains(&dimension) {
            true => Ok(Self { dimension, renormalizes: true, ..self }),
            false => Err(Error::Dimension { got: dimension, max: self.width }),
        }
    }

    /// E, the length of each vector.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Names of the prompts that [`Prompt::Named`] may ask for.
    pub fn prompt_names(&self) -> impl Iterator<Item = &str> {
        self.prompts.names()
    }

    /// The similarity that the model's files name, `cosine` unless they say otherwise. The vectors do
    /// not depend on it.
    pub fn similarity_fn_name(&self) -> &str {
        self.prompts.similarity_fn_name.as_deref().unwrap_or("cosine")
    }

    /// What turns its texts into tokens.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// What computes its hidden states.
    pub fn model(&self) -> &BertModel {
        &self.model
    }

    /// What was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    fn normalizes(&self) -> bool {
        matches!(self.modules.last(), Some(Module::Normalize))
    }

    /// One vector a text, in the order of the texts.
    ///
    /// An empty text is a text (`[CLS] [SEP]`); a long one is cut at the model's length.
    ///
    /// # Shapes
    /// returns `(B, E)`, f32; `(0, E)` for no texts
    /// # Units
    /// of length 1 where `modules.json` says to normalise
    /// # Numerics
    /// Largest difference to sentence-transformers 6.2 in f32 over the golden sentences: 3e-7.
    /// On a CPU with AVX2 or AVX-512 a text's vector is the same to the bit in whatever batch, order
    /// and number of threads it is computed; elsewhere candle's products may sum in another order.
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary has no way to write a text; [`Error::NoTokens`] if
    /// a text has no tokens, not even special ones.
    #[doc(alias = "encode")]
    pub fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Tensor> {
        Ok(self.embed_with(texts, EmbedOptions::default())?.vectors)
    }

    /// [`Self::embed`] of questions: with the model's prompt `query`, if it has one.
    ///
    /// # Errors
    /// as there.
    #[doc(alias = "encode_query")]
    pub fn embed_query<S: AsRef<str>>(&self, texts: &[S]) -> Result<Tensor> {
        let options = EmbedOptions { prompt: Prompt::Query, ..EmbedOptions::default() };
        Ok(self.embed_with(texts, options)?.vectors)
    }

    /// [`Self::embed`] of what is searched: with the model's prompt `document`, if it has one.
    ///
    /// # Errors
    /// as there.
    #[doc(alias = "encode_document")]
    pub fn embed_document<S: AsRef<str>>(&self, texts: &[S]) -> Result<Tensor> {
        let options = EmbedOptions { prompt: Prompt::Document, ..EmbedOptions::default() };
        Ok(self.embed_with(texts, options)?.vectors)
    }

    /// [`Self::embed`] as the options say, with a word of each text that was cut.
    ///
    /// # Errors
    /// as there; [`Error::NoPrompt`] for a prompt that the model does not have;
    /// [`Error::LongText`] for a text that is too long, where none may be.
    /// # Examples
    /// ```
    /// use candle_core::Device;
    /// use encoder::{EmbedOptions, Embedder, LongTexts, Precision};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let dir = "weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, Precision::F32, &Device::Cpu)?;
    /// let texts = ["short".to_string(), "and ".repeat(300)];
    /// let cut = embedder.embed_with(&texts, EmbedOptions::default())?.truncated;
    /// assert_eq!((cut.len(), cut[0].text, cut[0].tokens, cut[0].kept), (1, 1, 302, 256));
    ///
    /// let options = EmbedOptions { long_texts: LongTexts::Refuse, ..EmbedOptions::default() };
    /// embedder.embed_with(&texts, options).unwrap_err();
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn embed_with<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<Embeddings> {
        self.embed_tokenized(&self.tokenize(texts, options)?)
    }

    /// The first half of [`Self::embed_with`]: on a thread of its own it can go on while
    /// [`Self::embed_tokenized`] computes the texts before.
    ///
    /// # Errors
    /// as [`Self::embed_with`].
    /// # Examples
    /// ```
    /// use candle_core::Device;
    /// use encoder::{EmbedOptions, Embedder, Precision};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let dir = "weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, Precision::F32, &Device::Cpu)?;
    /// let tokenized = embedder.tokenize(&["I love AI"], EmbedOptions::default())?;
    /// assert_eq!(tokenized.tokens(), 5); // [CLS] i love ai [SEP]
    /// assert_eq!(embedder.embed_tokenized(&tokenized)?.vectors.dims(), [1, 384]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> Result<TokenizedTexts> {
        let prompt = self.prompts.text(options.prompt)?;
        let windows = match prompt {
            "" => self.windows(texts, options.long_texts)?,
            _ => {
                let prompted = texts.iter().map(|text| format!("{prompt}{}", text.as_ref()));
                self.windows(&prompted.collect::<Vec<_>>(), options.long_texts)?
            }
        };
        let prompt = match prompt {
            "" => 0,
            _ => self.tokenizer.prompt_length(prompt)?,
        };
        let begins = |i: usize| beginning(texts[i].as_ref());
        if let Some(empty) = windows.iter().position(|windows| windows[0].input_ids.is_empty()) {
            return Err(Error::NoTokens { text: begins(empty) });
        }
        let truncated = Truncated::of(windows.iter().map(|windows| &windows[0]));
        if let (LongTexts::Refuse, Some(long)) = (options.long_texts, truncated.first()) {
            let max = self.tokenizer.max_seq_length();
            return Err(Error::LongText { text: begins(long.text), got: long.tokens, max });
        }
        Ok(TokenizedTexts { windows, prompt, truncated })
    }

    /// The sequences of each text: one, or several with [`LongTexts::Windows`].
    fn windows<S: AsRef<str>>(&self, texts: &[S], long: LongTexts) -> Result<Vec<Vec<Tokens>>> {
        match long {
            LongTexts::Windows => self.tokenizer.encode_windows(texts),
            LongTexts::Truncate | LongTexts::Refuse => {
                let truncated = self.tokenizer.encode(texts)?;
                Ok(truncated.into_iter().map(|tokens| vec![tokens]).collect())
            }
        }
    }

    /// The second half of [`Self::embed_with`].
    ///
    /// # Errors
    /// those of candle.
    pub fn embed_tokenized(&self, texts: &TokenizedTexts) -> Result<Embeddings> {
        let TokenizedTexts { windows, prompt, truncated } = texts;
        if windows.iter().any(|windows| windows.len() > 1) {
            let vectors = self.embed_windows(windows, *prompt)?;
            return Ok(Embeddings { vectors, truncated: vec![] });
        }
        let all: Vec<_> = windows.iter().map(|windows| (&windows[0], *prompt)).collect();
        Ok(Embeddings { vectors: self.embed_tokens(&all)?, truncated: truncated.clone() })
    }

    /// Vectors of texts as they come, in their order: memory does not grow with their number. Some
    /// texts are read at a time, and computed sorted by length; to end early, drop the iterator.
    ///
    /// # Errors
    /// as [`Self::embed_with`], in place of all that are computed with the text at fault; after an
    /// error there are no more.
    /// # Examples
    /// ```
    /// use candle_core::Device;
    /// use encoder::{EmbedOptions, Embedder, Precision};
    ///
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap();
    /// let dir = "weights/all-MiniLM-L6-v2";
    /// let embedder = Embedder::from_dir(dir, Precision::F32, &Device::Cpu)?;
    /// let texts = (0..).map(|i| format!("text {i}")); // without an end
    /// let mut seen = 0;
    /// let vectors = embedder.embed_iter(texts, EmbedOptions::default(), |n| seen = n);
    /// let first: Vec<Vec<f32>> = vectors.take(3).collect::<Result<_, _>>()?;
    /// assert_eq!((first.len(), first[0].len()), (3, 384));
    /// assert_eq!(seen, 1024); // computed so far
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn embed_iter<'a, S: AsRef<str>>(
        &'a self,
        texts: impl IntoIterator<Item = S> + 'a,
        options: EmbedOptions<'a>,
        mut progress: impl FnMut(usize) + 'a,
    ) -> impl Iterator<Item = Result<Vec<f32>>> + 'a {
        let mut texts = texts.into_iter();
        let (mut done, mut failed) = (0, false);
        let windows = std::iter::from_fn(move || {
            if failed {
                return None;
            }
            let window: Vec<S> = texts.by_ref().take(TEXTS_AT_ONCE).collect();
            if window.is_empty() {
                return None;
            }
            done += window.len();
            let embedded = self.embed_with(&window, options);
            let vectors = embedded.and_then(|embedded| Ok(embedded.vectors.to_vec2::<f32>()?));
            Some(match vectors {
                Ok(vectors) => {
                    progress(done);
                    vectors.into_iter().map(Ok).collect()
                }
                Err(error) => {
                    failed = true;
                    vec![Err(error)]
                }
            })
        });
        windows.flatten()
    }

    /// `(B, E)`: for each text the mean over its windows, each counted by its tokens.
    fn embed_windows(&self, windows: &[Vec<Tokens>], prompt: usize) -> Result<Tensor> {
        let special = self.tokenizer.special_tokens();
        let prompts = || std::iter::once(prompt).chain(std::iter::repeat(0)); // in the first only
        let all: Vec<(&Tokens, usize)> =
            windows.iter().flat_map(|windows| windows.iter().zip(prompts())).collect();
        let vectors = self.embed_tokens(&all)?; // (all windows, E)
        let mut start = 0;
        let means = windows.iter().map(|windows| {
            let n = windows.len();
            let own = vectors.narrow(0, start, n)?; // (windows, E)
            start += n;
            if n == 1 {
                return Ok(own);
            }
            let counted = windows.iter().zip(prompts()).map(|(window, prompt)| {
                let pooled = if self.pooling.includes_prompt() { 0 } else { prompt };
                let left_out = pooled.saturating_sub(1); // a prompt's tokens count [CLS]
                window.input_ids.len().saturating_sub(special + left_out)
            });
            let tokens = counted.map(|n| n as f32);
            let tokens = Tensor::from_iter(tokens, own.device())?.unsqueeze(1)?; // (windows, 1)
            let sum = own.broadcast_mul(&tokens)?.sum_keepdim(0)?;
            let mean = sum.broadcast_div(&tokens.sum_keepdim(0)?)?;
            let is_whole = self.dimension == self.width;
            match self.normalizes() && (is_whole || self.renormalizes) {
                true => Ok(l2_normalize(&mean)?),
                false => Ok(mean),
            }
        });
        let means = means.collect::<Result<Vec<_>>>()?;
        Ok(Tensor::cat(&means, 0)?)
    }

    /// `(B, E)`: one vector for the tokens of each sequence, some of which are a prompt's.
    fn embed_tokens(&self, sequences: &[(&Tokens, usize)]) -> Result<Tensor> {
        let lengths: Vec<usize> =
            sequences.iter().map(|(tokens, _)| tokens.input_ids.len()).collect();
        let order = by_length(&lengths);
        let mut embeddings = vec![];
        for batch in within_budget(&order, &lengths, self.token_budget) {
            embeddings.push(self.embed_batch(batch.iter().map(|&i| sequences[i]))?);
        }
        if embeddings.is_empty() {
            let shape = (0, self.dimension());
            return Ok(Tensor::zeros(shape, DType::F32, self.model.device())?);
        }
        let embeddings = Tensor::cat(&embeddings, 0)?; // (B, E), longest text first
        let mut place = vec![0u32; order.len()];
        for (place_of, i) in (0u32..).zip(order) {
            place[i] = place_of;
        }
        let place = Tensor::from_slice(&place, place.len(), self.model.device())?;
        Ok(embeddings.index_select(&place, 0)?)
    }

    fn embed_batch<'a>(
        &self,
        sequences: impl Iterator<Item = (&'a Tokens, usize)>,
    ) -> Result<Tensor> {
        let (tokens, prompts): (Vec<&Tokens>, Vec<usize>) = sequences.unzip();
        let batch = PackedBatch::of(tokens)?;
        let hidden = self.model.forward_packed(&batch)?; // (N, E)
        let mut x = self.pooling.forward(&hidden, batch.offsets(), Some(&prompts))?; // (B, E)
        for module in &self.modules {
            x = module.forward(&x)?;
        }
        if self.dimension == self.width {
            return Ok(x);
        }
        let cut = x.narrow(1, 0, self.dimension)?.contiguous()?;
        if self.renormalizes && self.normalizes() { Ok(l2_normalize(&cut)?) } else { Ok(cut) }
    }
}

/// Indices of the texts, the longest first.
fn by_length(lengths: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&i| Reverse(lengths[i]));
    order
}

/// `order` in runs of at most `budget` tokens, or of one text.
fn within_budget<'a>(order: &'a [usize], lengths: &[usize], budget: usize) -> Vec<&'a [usize]> {
    let (mut batches, mut start, mut tokens) = (vec![], 0, 0);
    for (end, &i) in order.iter().enumerate() {
        if end > start && tokens + lengths[i] > budget {
            batches.push(&order[start..end]);
            (start, tokens) = (end, 0);
        }
        tokens += lengths[i];
    }
    if start < order.len() {
        batches.push(&order[start..]);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_to_the_budget_and_leave_nothing_out() {
        let lengths = [3, 9, 1, 4, 20, 4];
        let order = by_length(&lengths);
        assert_eq!(order, [4, 1, 3, 5, 0, 2]); // equal lengths in their own order
        let batches = within_budget(&order, &lengths, 10);
        assert_eq!(batches, [&[4][..], &[1], &[3, 5], &[0, 2]]);
        assert!(within_budget(&[], &[], 10).is_empty());
    }
}
