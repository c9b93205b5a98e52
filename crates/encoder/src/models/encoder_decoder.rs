//! An encoder, and a decoder that attends to the encoder's output (bert2bert): Hugging Face's
//! `EncoderDecoderModel`.
//! Rothe et al. 2020, <https://arxiv.org/abs/1907.12461>.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, HeadWeights};
use ops::{Linear, Weights};

use crate::{
    CausalLm, CheckpointError, ConfigError, DecoderAttentions, DecoderMemory, EncoderDecoderConfig,
    EncoderModel, Error, FileError, GenerateConfig, LoadOptions, LoadReport, ModelFiles, Result,
    load::{self, CONFIG, ModelFolder, Naming, WEIGHTS},
    models::{bert, encoder_decoder_config::GenerationIds, encoder_model::has_pooler},
};

/// The file with the token ids for generation. They replace the ids of `config.json`.
const GENERATION: &str = "generation_config.json";

/// A BERT encoder, and a BERT decoder that attends to the encoder's output.
///
/// # Examples
/// A small model with random weights. The expected tokens are those of transformers:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderDecoder, GenerateConfig, LoadOptions};
///
/// let dir = "../../tests/golden/bert2bert";
/// let (model, _) = EncoderDecoder::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[36u32, 52, 9, 39, 22, 42, 34]], &Cpu)?; // (B, S)
/// let sequences = model.generate(&input_ids, None, &GenerateConfig::greedy(8))?;
/// assert_eq!(sequences, [[1, 28, 28, 28, 43, 43, 43, 43]]);
///
/// let decoder_input_ids = Tensor::new(sequences.clone(), &Cpu)?; // (B, T)
/// let logits = model.forward(&input_ids, None, &decoder_input_ids)?; // (B, T, vocab_size)
/// let next = logits.get(0)?.get(0)?.argmax(0)?.to_scalar::<u32>()?;
/// assert_eq!(next, sequences[0][1]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EncoderDecoder {
    config: EncoderDecoderConfig,
    encoder: EncoderModel,
    decoder: CausalLm,
    /// Projects the encoder's output to the decoder's width, if the widths differ.
    memory_projection: Option<Linear>,
}

impl EncoderDecoder {
    /// Builds the model from the tensors in `encoder` and `decoder`, with this crate's names, and
    /// from `memory_projection` in `decoder` if the two configs differ in `hidden_size`.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::new`] and [`CausalLm::new`].
    pub fn new<'a>(
        config: &EncoderDecoderConfig,
        encoder: impl Into<Weights<'a>>,
        decoder: impl Into<Weights<'a>>,
    ) -> Result<Self> {
        let (encoder, decoder) = (encoder.into(), decoder.into());
        let (from, to) = (config.encoder.hidden_size, config.decoder.hidden_size);
        let memory_projection = if from == to {
            None
        } else {
            let weights = decoder.pp("memory_projection");
            Some(Linear::load(config.decoder.compute_type, from, to, true, weights)?)
        };
        let encoder_config = config.encoder.encoder_config();
        Ok(Self {
            config: config.clone(),
            encoder: EncoderModel::new(&encoder_config, has_pooler(&encoder), encoder)?,
            decoder: CausalLm::new(&(&config.decoder).into(), decoder)?,
            memory_projection,
        })
    }

    /// Loads `config.json`, `generation_config.json` if there is one, and the weights of a folder
    /// that holds an `EncoderDecoderModel` of two BERTs.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::from_dir`].
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
        let mut config = EncoderDecoderConfig::read(&*files.config()?)?;
        (config.encoder.compute_type, config.decoder.compute_type) = (compute_type, compute_type);
        if let Some(ids) = files.json::<GenerationIds>(GENERATION)? {
            ids.replace(&mut config, &files.path(GENERATION))?;
        }
        load::model(files, device, |weights, checkpoint| {
            let models =
                Naming::encoder_decoder(&bert::NAMES, &weights.names(), config.tie_encoder_decoder);
            let weights = |naming| checkpoint.model(naming, dtype, device);
            let [encoder, decoder] = models.clone().map(weights);
            let model = Self::new(&config, encoder, decoder);
            Ok((model, checkpoint.report(&models)))
        })
    }

    /// Writes a folder that [`Self::from_dir`] and Hugging Face can load. `tensors` are the tensors
    /// that the model was built from, by this crate's tensor names with the prefixes `encoder.` and
    /// `decoder.`.
    ///
    /// Each file is written to a temporary file first, so that an error leaves no partial file.
    /// `generation_config.json` contains the token ids of the config.
    ///
    /// # Errors
    /// The errors of [`Self::new`] if a tensor is missing or does not fit the config (not checked
    /// if `tie_encoder_decoder` is true); [`CheckpointError::TensorPrefix`] for a tensor without
    /// such a prefix; [`FileError::Write`] if the folder or a file cannot be written;
    /// [`Error::Candle`] if a tensor cannot be made contiguous.
    pub fn save(
        dir: impl AsRef<Path>,
        config: &EncoderDecoderConfig,
        tensors: &HashMap<String, Tensor>,
    ) -> Result<()> {
        let dir = dir.as_ref();
        // In the order of the names, so that the same tensors give the same error.
        let sorted: BTreeMap<&String, &Tensor> = tensors.iter().collect();
        if !config.tie_encoder_decoder {
            let (dtype, device) = match sorted.values().find(|tensor| tensor.dtype().is_float()) {
                Some(tensor) => (tensor.dtype(), tensor.device().clone()),
                None => (DType::F32, Device::Cpu),
            };
            let vb = VarBuilder::from_tensors(tensors.clone(), dtype, &device);
            Self::new(config, vb.pp("encoder"), vb.pp("decoder"))?;
        }
        let [encoder, decoder] = Naming::encoder_decoder(&bert::NAMES, &[], false);
        let mut renamed = HashMap::new();
        for (name, tensor) in sorted {
            let checkpoint_name = match name.split_once('.') {
                Some(("encoder", name)) => encoder.checkpoint_name(name).0,
                Some(("decoder", name)) => decoder.checkpoint_name(name).0,
                _ => return Err(CheckpointError::TensorPrefix { got: name.clone() }.into()),
            };
            renamed.insert(checkpoint_name, tensor.contiguous()?);
        }
        let error =
            |source| Error::File(FileError::Write { path: dir.display().to_string(), source });
        std::fs::create_dir_all(dir).map_err(error)?;
        load::write(&dir.join(CONFIG), |path| {
            let mut json = serde_json::to_value(config)?;
            for part in ["encoder", "decoder"] {
                json[part]["model_type"] = "bert".into(); // required by Hugging Face
            }
            std::fs::write(path, serde_json::to_vec_pretty(&json)?)
        })?;
        // An earlier model may have left this file, and `from_dir` prefers its ids to those of
        // `config.json`.
        load::write(&dir.join(GENERATION), |path| {
            std::fs::write(path, serde_json::to_vec_pretty(&GenerationIds::from(config))?)
        })?;
        load::write(&dir.join(WEIGHTS), |path| {
            candle_core::safetensors::save(&renamed, path).map_err(std::io::Error::other)
        })
    }

    /// The config that the model was built from.
    pub fn config(&self) -> &EncoderDecoderConfig {
        &self.config
    }

    /// The encoder.
    pub fn encoder(&self) -> &EncoderModel {
        &self.encoder
    }

    /// The decoder.
    pub fn decoder(&self) -> &CausalLm {
        &self.decoder
    }

    /// The memory that the decoder attends to: keys and values of the encoder's output.
    ///
    /// # Shapes
    /// `input_ids`: `(B, S)`, integers; `padding`: `(B, S)`, 0 hides a token
    /// # Errors
    /// The errors of [`EncoderModel::forward`] and [`CausalLm::memory`].
    pub fn memory(&self, input_ids: &Tensor, padding: Option<&Tensor>) -> Result<DecoderMemory> {
        let mask = AttentionMask::none().with_optional_padding(padding)?;
        let encoded = self.encoder.forward(input_ids, None, &mask)?.last_hidden_state;
        self.memory_of(encoded, padding)
    }

    /// The memory of an encoder's output.
    fn memory_of(&self, mut encoded: Tensor, padding: Option<&Tensor>) -> Result<DecoderMemory> {
        if let Some(projection) = &self.memory_projection {
            encoded = projection.forward(&encoded)?; // (B, S, E of the decoder)
        }
        self.decoder.memory(&encoded, padding)
    }

    /// [`Self::forward`] that also returns the attention weights of the encoder, one tensor
    /// `(B, H, S, S)` per layer, and the attention weights of the decoder.
    ///
    /// # Errors
    /// The errors of [`Self::forward`].
    pub fn forward_with_attentions(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        decoder_input_ids: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>, DecoderAttentions)> {
        let mask = AttentionMask::none().with_optional_padding(padding)?;
        let all = |_| HeadWeights::All;
        let (out, encoder_weights) =
            self.encoder.forward_with_attentions(input_ids, None, &mask, all)?;
        let memory = self.memory_of(out.last_hidden_state, padding)?;
        let (logits, decoder_weights) =
            self.decoder.forward_with_attentions(decoder_input_ids, None, Some(&memory))?;
        Ok((logits, encoder_weights.into_iter().flatten().collect(), decoder_weights))
    }

    /// The logits of the token that follows each of `decoder_input_ids`.
    ///
    /// # Shapes
    /// - `input_ids`: `(B, S)`, integers; `padding`: `(B, S)`, 0 hides a token;
    ///   `decoder_input_ids`: `(B, T)`, integers
    /// - returns `(B, T, vocab_size)`
    /// # Errors
    /// The errors of [`Self::memory`] and [`CausalLm::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        decoder_input_ids: &Tensor,
    ) -> Result<Tensor> {
        let memory = self.memory(input_ids, padding)?;
        self.decoder.forward(decoder_input_ids, None, Some(&memory))
    }

    /// Generates one sequence of token ids for each input sequence. A generated sequence starts
    /// with the `decoder_start_token_id` of the model's config, and ends with the end token or at
    /// `max_length` tokens. The end token is the `eos_token_id` of `config` or, if that is `None`,
    /// of the model's config.
    ///
    /// # Shapes
    /// `input_ids`: `(B, S)`, integers; `padding`: `(B, S)`, 0 hides a token; returns B sequences
    /// # Errors
    /// The errors of [`Self::memory`] and [`CausalLm::generate`]; [`ConfigError::NoStart`] if
    /// [`Self::config`] has no `decoder_start_token_id`.
    pub fn generate(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        config: &GenerateConfig,
    ) -> Result<Vec<Vec<u32>>> {
        let start =
            self.config.decoder_start_token_id.ok_or(Error::Config(ConfigError::NoStart))?;
        let memory = self.memory(input_ids, padding)?;
        let prompts = vec![vec![start]; input_ids.dim(0)?];
        let config = GenerateConfig {
            eos_token_id: config.eos_token_id.or(self.config.eos_token_id),
            ..config.clone()
        };
        self.decoder.generate(&prompts, Some(&memory), &config)
    }
}
