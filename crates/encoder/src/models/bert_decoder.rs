//! BERT as a decoder with a language model head: `BertLMHeadModel` with `is_decoder`.
//! Rothe et al. 2020, <https://arxiv.org/abs/1907.12461>.

use std::path::Path;

use candle_core::{Device, Module, Tensor};
use mha::{KvCache, Memory};
use ops::Weights;

use crate::{
    BertConfig, DecoderLayer, Error, InputEmbeddings, InputError, LoadOptions, LoadReport,
    ModelFiles, Result,
    load::{self, CONFIG, ModelFolder, Naming},
    models::ragged_batch::{as_u32, tables},
    models::{bert, lm_head::LmHead},
};

/// A decoder that predicts the next token, with or without cross-attention.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarMap;
/// use encoder::{BertConfig, BertDecoder};
///
/// let mut config = BertConfig::new(11, 8, 2, 2, 16); // vocabulary, E, layers, heads, F
/// config.max_position_embeddings = 10;
/// config.is_decoder = true;
/// let init = mha::Init::Bert { initializer_range: 0.5 };
/// let decoder = BertDecoder::new(&config, init.var_builder(&VarMap::new(), 1, DType::F32, &Cpu))?;
///
/// let ids = Tensor::new(&[[3u32, 1, 4, 1, 5]], &Cpu)?;
/// let logits = decoder.forward(&ids, None, None)?;
/// assert_eq!(logits.dims(), [1, 5, 11]);
///
/// // The same logits, with the first three tokens in a cache.
/// let mut cache = decoder.cache(10);
/// decoder.step(&ids.narrow(1, 0, 3)?, None, None, &mut cache)?;
/// let rest = decoder.step(&ids.narrow(1, 3, 2)?, None, None, &mut cache)?;
/// let is_close = (rest - logits.narrow(1, 3, 2)?)?.abs()?.lt(1e-5)?; // 0 for NaN
/// assert_eq!(is_close.min_all()?.to_scalar::<u8>()?, 1);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BertDecoder {
    config: BertConfig,
    embeddings: InputEmbeddings,
    layers: Vec<DecoderLayer>,
    lm_head: LmHead,
    device: Device,
}

/// The keys and values of the preceding tokens, for every layer of a [`BertDecoder`].
///
/// Clones are independent of each other.
#[derive(Clone, Debug)]
pub struct DecoderCache {
    layers: Vec<KvCache>,
}

/// The keys and values of an encoder's output, for every layer of a [`BertDecoder`].
#[derive(Clone, Debug)]
pub struct DecoderMemory {
    layers: Vec<Memory>,
    padding: Option<Tensor>, // (B, S)
}

impl DecoderCache {
    /// Number of tokens in the cache per sequence.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvCache::len)
    }

    /// Whether the cache has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(KvCache::reset);
    }

    /// Removes the tokens from index `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
    }

    /// Selects sequences in a new order: sequence `i` becomes the former sequence `beams[i]`.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if an index is out of range.
    pub fn reorder(&mut self, beams: &[u32]) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.reorder(beams))?)
    }
}

/// The attention weights of a [`BertDecoder`], one tensor per layer.
#[derive(Clone, Debug, Default)]
pub struct DecoderAttentions {
    /// Self-attention: `(B, H, T, T)`, the weights of each token for itself and the preceding
    /// tokens.
    pub causal: Vec<Tensor>,
    /// Cross-attention: `(B, H, T, S)`, the weights of each token for the tokens of the memory.
    /// Empty for a decoder without cross-attention.
    pub cross: Vec<Tensor>,
}

impl DecoderMemory {
    fn layer(&self, i: usize) -> (&Memory, Option<&Tensor>) {
        (&self.layers[i], self.padding.as_ref())
    }

    /// A memory whose sequence `i` is this memory's sequence `batch[i]`.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if an index is out of range.
    pub fn reorder(&self, batch: &[u32]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.reorder(batch));
        let layers = layers.collect::<mha::Result<_>>()?;
        let padding = match &self.padding {
            None => None,
            Some(padding) => {
                let index = Tensor::new(batch, padding.device())?;
                Some(padding.contiguous()?.index_select(&index, 0)?)
            }
        };
        Ok(Self { layers, padding })
    }
}

impl BertDecoder {
    /// Builds the decoder from `embeddings`, `decoder.layer.{i}` and `lm_head` in `weights`, with
    /// this crate's tensor names. The decoder has cross-attention if the config's
    /// `add_cross_attention` is true, or if it is `None` and `weights` have the tensors of
    /// cross-attention.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `weights` lack a tensor or have
    /// it in another shape; [`crate::ConfigError::Value`], [`crate::ConfigError::Unsupported`] or
    /// [`crate::Error::Attention`] for an invalid config.
    pub fn new<'a>(config: &BertConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        let encoder_config = config.encoder_config();
        encoder_config.check()?;
        let stack = weights.pp("decoder").pp("layer");
        let has_tensors = || stack.pp(0).contains_tensor("cross_attention.query.weight");
        let cross = config.add_cross_attention.unwrap_or_else(has_tensors);
        let layers = (0..config.num_hidden_layers)
            .map(|i| DecoderLayer::new(&encoder_config, cross, stack.pp(i)));
        let embeddings = InputEmbeddings::new(&encoder_config, weights.pp("embeddings"))?;
        Ok(Self {
            config: config.clone(),
            layers: layers.collect::<Result<_>>()?,
            lm_head: LmHead::new(&config.into(), embeddings.words()?, weights.pp("lm_head"))?,
            device: weights.device().clone(),
            embeddings,
        })
    }

    /// Loads `config.json` and the weights of a folder that holds a `BertLMHeadModel`.
    ///
    /// # Errors
    /// The errors of [`crate::EncoderModel::from_dir`]; [`crate::ConfigError::Unsupported`] if
    /// `is_decoder` is not set.
    pub fn from_dir(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        Self::from_files(&ModelFiles::dir(dir)?, options)
    }

    /// [`Self::from_dir`] for files in a folder, in memory or on the hub.
    ///
    /// # Errors
    /// The errors of [`Self::from_dir`], and the download errors that [`ModelFiles::need`] lists.
    pub fn from_files(files: &ModelFiles, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        Self::load(&ModelFolder::new(files), options)
    }

    /// [`Self::from_files`] for files of which some are already read.
    pub(crate) fn load(files: &ModelFolder, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        let device = &options.device;
        let (dtype, compute_type) = options.precision.on(device)?;
        let config = BertConfig::read(&*files.config()?)?;
        let config = BertConfig { compute_type, ..config };
        if !config.is_decoder {
            let expected = "true (use EncoderModel for encoders)";
            return Err(Error::unsupported(files.path(CONFIG), "is_decoder", expected, "false"));
        }
        load::model(files, device, |weights, checkpoint| {
            let naming = Naming::detect(&[bert::NAMES], &weights.names(), weights.path())?;
            let naming = naming.of_decoder();
            let model = Self::new(&config, checkpoint.model(naming.clone(), dtype, device));
            Ok((model, checkpoint.report(&[naming])))
        })
    }

    /// The config that the decoder was built from.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// An empty cache for at most `min(capacity, max_position_embeddings)` tokens per sequence.
    pub fn cache(&self, capacity: usize) -> DecoderCache {
        let capacity = capacity.min(self.config.max_position_embeddings);
        DecoderCache { layers: vec![KvCache::new(capacity); self.layers.len()] }
    }

    /// Computes the keys and values of an encoder's output for cross-attention.
    ///
    /// # Shapes
    /// `encoder_output`: `(B, S, E)`; `padding`: `(B, S)`, 0 hides a token
    /// # Errors
    /// [`InputError::NoCrossAttention`] if the decoder has no cross-attention;
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] for a wrong shape.
    pub fn memory(
        &self,
        encoder_output: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<DecoderMemory> {
        if let Some(padding) = padding {
            let (b, s, _) = encoder_output.dims3()?;
            if padding.dims() != [b, s] {
                let expected = format!("(B, S) = [{b}, {s}]");
                let (argument, got) = ("padding", padding.dims().to_vec());
                return Err(mha::Error::Shape { argument, expected, got }.into());
            }
        }
        let layers = self.layers.iter().map(|layer| layer.memory(encoder_output));
        Ok(DecoderMemory { layers: layers.collect::<Result<_>>()?, padding: padding.cloned() })
    }

    /// The logits of the token that follows each token. Positions count all tokens, padding
    /// included.
    ///
    /// # Shapes
    /// - `input_ids`: `(B, T)`, integers; `padding`: `(B, T)`, 0 hides a token
    /// - returns `(B, T, vocab_size)`
    /// # Errors
    /// - [`InputError::NoMemory`] if the decoder has cross-attention and `memory` is `None`;
    ///   [`InputError::NoCrossAttention`] if `memory` is given to a decoder without cross-attention
    /// - [`InputError::OtherDecoder`] for a memory of a decoder with another number of layers
    /// - [`InputError::Id`] for an id that is negative or not below `vocab_size`
    /// - [`InputError::TooLong`] for more tokens than `max_position_embeddings`
    /// - [`crate::Error::Attention`] for a wrong shape or dtype
    pub fn forward(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
    ) -> Result<Tensor> {
        self.step(input_ids, padding, memory, &mut self.cache(usize::MAX))
    }

    /// [`Self::forward`] for tokens that follow the tokens in `cache`. The new tokens are added to
    /// the cache. After an error the cache is unchanged.
    ///
    /// # Shapes
    /// - `input_ids`: `(B, T)`, the T new tokens; `padding`: `(B, P + T)`, where P is the number of
    ///   tokens in the cache; 0 hides a token
    /// - returns `(B, T, vocab_size)`
    /// # Errors
    /// The errors of [`Self::forward`]; [`InputError::OtherDecoder`] for a cache with another
    /// number of layers; [`mha::Error::CacheFull`] if the capacity of the cache is exceeded.
    pub fn step(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        self.check_layers("cache", cache.layers.len())?;
        let len = cache.len();
        let logits = self.step_layers(input_ids, padding, memory, cache);
        if logits.is_err() {
            cache.truncate(len); // some layers may have added the tokens
        }
        logits
    }

    /// [`Self::step`], except that after an error the caches of some layers may contain the new
    /// tokens.
    fn step_layers(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        let mut x = self.embed(input_ids, cache.len(), memory)?;
        for (i, (layer, cache)) in self.layers.iter().zip(&mut cache.layers).enumerate() {
            let memory = memory.map(|memory| memory.layer(i));
            x = layer.step(&x, padding, memory, cache)?;
        }
        Ok(self.lm_head.forward(&x)?)
    }

    /// [`Self::forward`] that also returns the attention weights of all heads and layers.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_attentions(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
    ) -> Result<(Tensor, DecoderAttentions)> {
        let mut x = self.embed(input_ids, 0, memory)?;
        let mut attentions = DecoderAttentions::default();
        for (i, layer) in self.layers.iter().enumerate() {
            let memory = memory.map(|memory| memory.layer(i));
            let (out, causal, cross) = layer.forward_with_attentions(&x, padding, memory)?;
            attentions.causal.push(causal);
            attentions.cross.extend(cross);
            x = out;
        }
        Ok((self.lm_head.forward(&x)?, attentions))
    }

    /// The input `(B, T, E)` of the first layer. The first token has position `start`.
    fn embed(
        &self,
        input_ids: &Tensor,
        start: usize,
        memory: Option<&DecoderMemory>,
    ) -> Result<Tensor> {
        if let Some(memory) = memory {
            self.check_layers("memory", memory.layers.len())?;
        }
        let [words, _types] = tables(&self.config.encoder_config());
        let input_ids = as_u32(input_ids, words)?.to_device(&self.device)?;
        let (b, t) = input_ids.dims2()?;
        let max = self.config.max_position_embeddings;
        if start + t > max {
            return Err(InputError::TooLong { got: start + t, max }.into());
        }
        let positions = Tensor::arange(start as u32, (start + t) as u32, &self.device)?;
        let positions = positions.unsqueeze(0)?.broadcast_as((b, t))?.contiguous()?;
        let types = input_ids.zeros_like()?;
        self.embeddings.forward(&input_ids, &types, &positions)
    }

    /// Checks the number of layers of a cache or memory.
    fn check_layers(&self, what: &'static str, got: usize) -> Result<()> {
        match self.layers.len() {
            expected if expected == got => Ok(()),
            expected => Err(InputError::OtherDecoder { what, got, expected }.into()),
        }
    }
}
