//! BERT as a decoder with a language model's head: `BertLMHeadModel` with `is_decoder`.
//! Rothe et al. 2020, <https://arxiv.org/abs/1907.12461>.

use std::path::Path;

use candle_core::{Device, Module, Tensor};
use candle_nn::VarBuilder;
use mha::{KvCache, Memory};

use crate::{
    BertConfig, BertEmbeddings, DecoderLayer, Error, LoadReport, ModelFiles, Precision, Result,
    load::{self, CONFIG, Naming, config_json},
    models::lm_head::LmHead,
    text::packing::{as_u32, tables},
};

/// A decoder that scores the next token, with or without cross-attention.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use candle_nn::VarMap;
/// use encoder::{BertConfig, BertDecoder};
///
/// let config = BertConfig {
///     vocab_size: 11, hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 2,
///     intermediate_size: 16, max_position_embeddings: 10, is_decoder: true,
///     ..BertConfig::bert_base()
/// };
/// let init = mha::Init::Bert { initializer_range: 0.5 };
/// let decoder = BertDecoder::new(&config, init.var_builder(&VarMap::new(), 1, DType::F32, &Cpu))?;
///
/// let ids = Tensor::new(&[[3u32, 1, 4, 1, 5]], &Cpu)?;
/// let logits = decoder.forward(&ids, None, None)?;
/// assert_eq!(logits.dims(), [1, 5, 11]);
///
/// // The same with the first three tokens from a cache.
/// let mut cache = decoder.cache(10);
/// decoder.step(&ids.narrow(1, 0, 3)?, None, None, &mut cache)?;
/// let rest = decoder.step(&ids.narrow(1, 3, 2)?, None, None, &mut cache)?;
/// let difference = (rest - logits.narrow(1, 3, 2)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// assert!(difference < 1e-5);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BertDecoder {
    config: BertConfig,
    embeddings: BertEmbeddings,
    layers: Vec<DecoderLayer>,
    lm_head: LmHead,
    device: Device,
}

/// The keys and values of the tokens so far, in every layer of a [`BertDecoder`].
///
/// Copies are independent of each other.
#[derive(Clone, Debug)]
pub struct DecoderCache {
    layers: Vec<KvCache>,
}

/// The keys and values of an encoder's output, in every layer of a [`BertDecoder`].
#[derive(Clone, Debug)]
pub struct DecoderMemory {
    layers: Vec<Memory>,
    padding: Option<Tensor>, // (B, S)
}

impl DecoderCache {
    /// The number of tokens it holds.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvCache::len)
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(KvCache::reset);
    }

    /// Forgets the tokens from `len` on.
    ///
    /// # Errors
    /// candle's.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.truncate(len))?)
    }

    /// Makes sequence `i` continue what was sequence `beams[i]`.
    ///
    /// # Errors
    /// candle's, for a sequence that is not there.
    pub fn reorder(&mut self, beams: &[u32]) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.reorder(beams))?)
    }
}

/// The attention weights of a [`BertDecoder`], a tensor a layer.
#[derive(Clone, Debug, Default)]
pub struct DecoderAttentions {
    /// `(B, H, T, T)`: what each token gives to those up to itself.
    pub causal: Vec<Tensor>,
    /// `(B, H, T, S)`: what each token gives to those of the memory; none without one.
    pub cross: Vec<Tensor>,
}

impl DecoderMemory {
    fn layer(&self, i: usize) -> (&Memory, Option<&Tensor>) {
        (&self.layers[i], self.padding.as_ref())
    }

    /// The same for other sequences: sequence `i` gets the memory of sequence `batch[i]`.
    ///
    /// # Errors
    /// candle's, for a sequence that is not there.
    pub fn reorder(&self, batch: &[u32]) -> Result<Self> {
        let layers = self.layers.iter().map(|layer| layer.reorder(batch));
        let padding = match &self.padding {
            None => None,
            Some(padding) => Some(padding.index_select(&Tensor::new(batch, padding.device())?, 0)?),
        };
        Ok(Self { layers: layers.collect::<mha::Result<_>>()?, padding })
    }
}

impl BertDecoder {
    /// The decoder whose `embeddings`, `decoder.layer.0`, .. and `lm_head` are in `vb`, in this
    /// crate's names. Cross-attention is there if the config says so, or if it is silent and
    /// `vb` has it.
    ///
    /// # Errors
    /// A tensor that `vb` lacks or has in another shape; sizes that do not fit together.
    pub fn new(config: &BertConfig, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let stack = vb.pp("decoder").pp("layer");
        let in_file = || stack.pp(0).contains_tensor("cross_attention.query.weight");
        let cross = config.add_cross_attention.unwrap_or_else(in_file);
        let layers =
            (0..config.num_hidden_layers).map(|i| DecoderLayer::new(config, cross, stack.pp(i)));
        let embeddings = BertEmbeddings::new(config, vb.pp("embeddings"))?;
        Ok(Self {
            config: config.clone(),
            layers: layers.collect::<Result<_>>()?,
            lm_head: LmHead::new(config, &embeddings.words()?, vb.pp("lm_head"))?,
            device: vb.device().clone(),
            embeddings,
        })
    }

    /// Loads `config.json` and `model.safetensors` of a folder that holds a `BertLMHeadModel`.
    ///
    /// # Errors
    /// as [`crate::BertModel::from_dir`]; [`Error::Unsupported`] unless `is_decoder`.
    pub fn from_dir(
        dir: impl AsRef<Path>,
        precision: Precision,
        device: &Device,
    ) -> Result<(Self, LoadReport)> {
        Self::from_files(&ModelFiles::dir(dir)?, precision, device)
    }

    /// [`Self::from_dir`] from files that may be elsewhere than in a folder.
    ///
    /// # Errors
    /// as there.
    pub fn from_files(
        files: &ModelFiles,
        precision: Precision,
        device: &Device,
    ) -> Result<(Self, LoadReport)> {
        let (dtype, compute_type) = precision.on(device)?;
        let config = BertConfig::from_json(&config_json(files)?, &files.path(CONFIG))?;
        let config = BertConfig { compute_type, ..config };
        if !config.is_decoder {
            let (path, key) = (files.path(CONFIG), "is_decoder");
            let (expected, got) = ("true (BertModel takes encoders)", "false".to_string());
            return Err(Error::Unsupported { path, key, expected, got });
        }
        load::model(files, device, |weights, checkpoint| {
            let naming = Naming::detect(&weights.names(), weights.path())?;
            let naming = naming.of_decoder();
            let model = Self::new(&config, checkpoint.model(naming, dtype, device));
            Ok((model, checkpoint.report(&[naming])))
        })
    }

    /// The sizes it was built from.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// An empty cache for at most `capacity` tokens, or as many as there are positions.
    pub fn cache(&self, capacity: usize) -> DecoderCache {
        let capacity = capacity.min(self.config.max_position_embeddings);
        DecoderCache { layers: vec![KvCache::new(capacity); self.layers.len()] }
    }

    /// What cross-attention needs of an encoder's output `(B, S, E)`, computed once; `padding`
    /// `(B, S)` of 0 and 1 hides parts of it.
    ///
    /// # Errors
    /// [`Error::NoCrossAttention`] if the decoder has none.
    pub fn memory(
        &self,
        encoder_output: &Tensor,
        padding: Option<&Tensor>,
    ) -> Result<DecoderMemory> {
        let layers = self.layers.iter().map(|layer| layer.memory(encoder_output));
        Ok(DecoderMemory { layers: layers.collect::<Result<_>>()?, padding: padding.cloned() })
    }

    /// Scores of the token that follows each token.
    ///
    /// # Shapes
    /// - `input_ids`: `(B, T)`, integers; `padding`: `(B, T)` of 0 and 1
    /// - returns `(B, T, vocab_size)`, logits
    /// # Errors
    /// [`Error::NoMemory`] if the decoder attends to a memory and gets none; an id without a row
    /// in its table; more tokens than there are positions.
    pub fn forward(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
    ) -> Result<Tensor> {
        self.step(input_ids, padding, memory, &mut self.cache(usize::MAX))
    }

    /// [`Self::forward`] for the tokens that come after those in `cache`, which then holds them
    /// too.
    ///
    /// # Shapes
    /// as there, T being the new tokens; `padding`: `(B, S)`, those in the cache and the new ones
    /// # Errors
    /// as there; [`mha::Error::CacheFull`]. After an error the cache is as before.
    pub fn step(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        memory: Option<&DecoderMemory>,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        self.is_of_this("cache", cache.layers.len())?;
        let len = cache.len();
        let logits = self.step_layers(input_ids, padding, memory, cache);
        if logits.is_err() {
            cache.truncate(len)?; // some layers may have taken the step
        }
        logits
    }

    /// [`Self::step`], which leaves the cache with the new tokens in some layers after an error.
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

    /// [`Self::forward`], and what all heads of all layers attend to.
    ///
    /// # Errors
    /// as there.
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

    /// `(B, T, E)`: what the first layer is given, with `start` tokens before.
    fn embed(
        &self,
        input_ids: &Tensor,
        start: usize,
        memory: Option<&DecoderMemory>,
    ) -> Result<Tensor> {
        if let Some(memory) = memory {
            self.is_of_this("memory", memory.layers.len())?;
        }
        let [words, _types] = tables(&self.config);
        let input_ids = as_u32(input_ids, words)?.to_device(&self.device)?;
        let (b, t) = input_ids.dims2()?;
        let max = self.config.max_position_embeddings;
        if start + t > max {
            return Err(Error::TooLong { got: start + t, max });
        }
        let positions = Tensor::arange(start as u32, (start + t) as u32, &self.device)?;
        let positions = positions.unsqueeze(0)?.broadcast_as((b, t))?.contiguous()?;
        let types = input_ids.zeros_like()?;
        self.embeddings.forward(&input_ids, &types, &positions)
    }

    fn is_of_this(&self, what: &'static str, got: usize) -> Result<()> {
        match self.layers.len() {
            expected if expected == got => Ok(()),
            expected => Err(Error::OtherDecoder { what, got, expected }),
        }
    }
}
