//! A decoder with a language model head, of any causal architecture.

use std::path::Path;

use candle_core::{Device, Module, Tensor};
use ops::Weights;

use crate::{
    DecoderAttentions, DecoderCache, DecoderMemory, EncoderModel, LoadOptions, LoadReport,
    ModelConfig, ModelFiles, Positions, Result,
    block::unsupported,
    load::ModelFolder,
    models::{lm_head::LmHead, load_encoder::load_decoder},
};

/// A decoder that predicts the next token: BERT's (`BertLMHeadModel` with `is_decoder`), with or
/// without cross-attention, and the causal architectures, such as Qwen3 and Llama.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarMap;
/// use encoder::{BertConfig, CausalLm, ModelConfig};
///
/// let mut config = BertConfig::new(11, 8, 2, 2, 16); // vocabulary, E, layers, heads, F
/// config.max_position_embeddings = 10;
/// config.is_decoder = true;
/// let init = mha::Init::Bert { initializer_range: 0.5 };
/// let weights = init.var_builder(&VarMap::new(), 1, DType::F32, &Cpu);
/// let decoder = CausalLm::new(&ModelConfig::from(&config), weights)?;
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
/// # Source
/// BERT as a decoder: Rothe et al. 2020, <https://arxiv.org/abs/1907.12461>.
#[derive(Clone, Debug)]
pub struct CausalLm {
    config: ModelConfig,
    model: EncoderModel,
    lm_head: LmHead,
}

impl CausalLm {
    /// Builds the decoder from `embeddings`, `encoder` and `lm_head` in `weights`, with this crate's
    /// tensor names. A BERT has cross-attention if the config's `add_cross_attention` is true, or if
    /// it is `None` and `weights` have the tensors of cross-attention.
    ///
    /// # Errors
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] if `weights` lack a tensor or have
    /// it in another shape; [`crate::ConfigError::Unsupported`] for a config whose attention is not
    /// causal; the errors of [`EncoderModel::new`].
    pub fn new<'a>(config: &ModelConfig, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let weights = weights.into();
        if !config.encoder.causal {
            unsupported("causal", "true, for a decoder", "false")?;
        }
        if let Positions::Learned { padding_idx: Some(_) } = config.encoder.positions {
            let expected = "positions that do not depend on padding, for a decoder";
            unsupported("positions", expected, "Learned with padding_idx")?;
        }
        let model = EncoderModel::new(&config.encoder, false, weights.clone())?;
        let lm_head = LmHead::new(config, model.words(), weights.pp("lm_head"))?;
        Ok(Self { config: config.clone(), model, lm_head })
    }

    /// Loads `config.json` and the weights of a folder that holds a `…ForCausalLM` or a
    /// `BertLMHeadModel`.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`]; [`crate::ConfigError::Unsupported`] for an
    /// architecture that is not causal, and for a BERT if `is_decoder` is not set.
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
        load_decoder(files, options, |config, _, weights| Self::new(config, weights))
    }

    /// The config that the decoder was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The model below the head.
    pub fn model(&self) -> &EncoderModel {
        &self.model
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        self.model.device()
    }

    /// An empty cache for at most `min(capacity, max_tokens)` tokens per sequence, where
    /// `max_tokens` is that of the [config](crate::EncoderConfig::max_tokens).
    pub fn cache(&self, capacity: usize) -> DecoderCache {
        self.model.cache(capacity)
    }

    /// Computes the keys and values of an encoder's output for cross-attention.
    ///
    /// # Shapes
    /// `encoder_output`: `(B, S, E)`; `padding`: `(B, S)`, 0 hides a token
    /// # Errors
    /// [`crate::InputError::NoCrossAttention`] if the decoder has no cross-attention;
    /// [`crate::Error::Attention`] or [`crate::Error::Candle`] for a wrong shape.
    pub fn memory(
        &self,
        encoder_output: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<DecoderMemory> {
        self.model.memory(encoder_output, padding)
    }

    /// The logits of the token that follows each token. Positions count all tokens, padding
    /// included.
    ///
    /// # Shapes
    /// - `input_ids`: `(B, T)`, integers; `padding`: `(B, T)`, 0 hides a token
    /// - `memory`: B sequences, or a divisor of B: the same number of rows then attend to each, in
    ///   order, as in [`mha::CrossAttention::forward`]
    /// - returns `(B, T, vocab_size)`
    /// # Errors
    /// - [`crate::InputError::NoMemory`] if the decoder has cross-attention and `memory` is `None`;
    ///   [`crate::InputError::NoCrossAttention`] if `memory` is given to a decoder without
    ///   cross-attention
    /// - [`crate::InputError::OtherDecoder`] for a memory of a decoder with another number of layers
    /// - [`crate::InputError::Id`] for an id that is negative or not below `vocab_size`
    /// - [`crate::InputError::TooLong`] for more tokens than `max_tokens`
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
    /// The errors of [`Self::forward`]; [`crate::InputError::OtherDecoder`] for a cache with another
    /// number of layers; [`mha::Error::CacheFull`] if the capacity of the cache is exceeded;
    /// [`crate::InputError::TooLong`] if the cache has tokens and the rotary frequencies of the
    /// sequence depend on its length ([`mha::RotaryScaling::DynamicNtk`]).
    pub fn step(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        let hidden = self.model.step(input_ids, padding, memory, cache)?;
        Ok(self.lm_head.forward(&hidden)?)
    }

    /// [`Self::step`] that computes the logits of the last token only, `(B, vocab_size)`.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    pub(crate) fn step_to_last(
        &self,
        input_ids: &Tensor,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        let hidden = self.model.step(input_ids, None, memory, cache)?; // (B, T, E)
        let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?.contiguous()?;
        Ok(self.lm_head.forward(&last)?)
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
        let (hidden, attentions) =
            self.model.forward_causal_with_attentions(input_ids, padding, memory)?;
        Ok((self.lm_head.forward(&hidden)?, attentions))
    }
}
