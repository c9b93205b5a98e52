//! An encoder and a decoder that attends to its output: what Hugging Face calls an
//! `EncoderDecoderModel`, and papers bert2bert.
//! Rothe et al. 2020, <https://arxiv.org/abs/1907.12461>.

use std::{collections::HashMap, path::Path};

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use mha::{AttentionMask, HeadWeights, Linear};
use serde::{Deserialize, Serialize};

use crate::{
    BertConfig, BertDecoder, BertModel, DecoderAttentions, DecoderMemory, Error, GenerateConfig,
    LoadReport, ModelFiles, Precision, Result,
    config::check_top_level,
    load::{self, parse_json},
    model::has_pooler,
};

/// `config.json` of an encoder-decoder checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EncoderDecoderConfig {
    /// `encoder-decoder`
    #[serde(default = "model_type")]
    pub model_type: String,
    /// The encoder's sizes.
    pub encoder: BertConfig,
    /// The decoder's sizes.
    pub decoder: BertConfig,
    /// What the decoder's text begins with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_start_token_id: Option<u32>,
    /// What ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token_id: Option<u32>,
    /// What fills up shorter sequences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<u32>,
    /// The decoder's weights are the encoder's where it has both.
    #[serde(default)]
    pub tie_encoder_decoder: bool,
}

fn model_type() -> String {
    "encoder-decoder".to_string()
}

impl EncoderDecoderConfig {
    /// An encoder, and a decoder that begins with `decoder_start_token_id` and ends with
    /// `eos_token_id`.
    pub fn new(
        encoder: BertConfig,
        decoder: BertConfig,
        decoder_start_token_id: u32,
        eos_token_id: u32,
    ) -> Self {
        let decoder = BertConfig { is_decoder: true, add_cross_attention: Some(true), ..decoder };
        Self {
            model_type: model_type(),
            pad_token_id: decoder.pad_token_id,
            encoder,
            decoder,
            decoder_start_token_id: Some(decoder_start_token_id),
            eos_token_id: Some(eos_token_id),
            tie_encoder_decoder: false,
        }
    }

    /// Reads a `config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// as [`BertConfig::from_json`], for either part.
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        let value: serde_json::Value = parse_json(json, path)?;
        let got = value["model_type"].as_str().unwrap_or("encoder-decoder").to_string();
        if got != "encoder-decoder" {
            let (path, expected) = (path.to_string(), "\"encoder-decoder\"");
            return Err(Error::Unsupported { path, key: "model_type", expected, got });
        }
        check_top_level(json, path)?;
        let mut config: Self = parse_json(json, path)?;
        for part in ["encoder", "decoder"] {
            let json = value[part].to_string();
            BertConfig::from_json(json.as_bytes(), &format!("{path}, {part}"))?;
        }
        for (part, key, is_decoder) in [
            (&config.encoder, "encoder.is_decoder", false),
            (&config.decoder, "decoder.is_decoder", true),
        ] {
            if part.is_decoder != is_decoder {
                let expected = if is_decoder { "true" } else { "false" };
                let (path, got) = (path.to_string(), part.is_decoder.to_string());
                return Err(Error::Unsupported { path, key, expected, got });
            }
        }
        // It would also mask cross-attention.
        if !value["decoder"]["is_causal"].is_null() {
            let (path, key, expected) = (path.to_string(), "decoder.is_causal", "none");
            let got = value["decoder"]["is_causal"].to_string();
            return Err(Error::Unsupported { path, key, expected, got });
        }
        let own = |key: &str| value["decoder"][key].as_u64().map(|id| id as u32);
        config.decoder_start_token_id = config
            .decoder_start_token_id
            .or_else(|| own("decoder_start_token_id"))
            .or_else(|| value["bos_token_id"].as_u64().map(|id| id as u32))
            .or_else(|| own("bos_token_id"));
        config.eos_token_id = config.eos_token_id.or_else(|| own("eos_token_id"));
        config.pad_token_id = config.pad_token_id.or(config.decoder.pad_token_id);
        Ok(config)
    }
}

/// The token ids of `generation_config.json`, which take the place of all that `config.json` names.
#[derive(Deserialize)]
pub(crate) struct GenerationIds {
    decoder_start_token_id: Option<u32>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<OneOrMany>,
    pad_token_id: Option<u32>,
}

/// An id, or a list of ids, any of which ends a sequence.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl GenerationIds {
    /// # Errors
    /// [`Error::Unsupported`] for several ids that end a sequence; `path` is what it calls the file.
    pub(crate) fn replace(self, config: &mut EncoderDecoderConfig, path: &str) -> Result<()> {
        config.decoder_start_token_id = self.decoder_start_token_id.or(self.bos_token_id);
        config.eos_token_id = match self.eos_token_id {
            None => None,
            Some(OneOrMany::One(id)) => Some(id),
            Some(OneOrMany::Many(ids)) => match ids[..] {
                [id] => Some(id),
                _ => {
                    let (key, expected, got) = ("eos_token_id", "one id", format!("{ids:?}"));
                    let path = path.to_string();
                    return Err(Error::Unsupported { path, key, expected, got });
                }
            },
        };
        config.pad_token_id = self.pad_token_id;
        Ok(())
    }
}

/// A BERT encoder and a BERT decoder that attends to its output.
#[derive(Clone, Debug)]
pub struct EncoderDecoder {
    config: EncoderDecoderConfig,
    encoder: BertModel,
    decoder: BertDecoder,
    /// From the encoder's width to the decoder's, where they differ.
    memory_projection: Option<Linear>,
}

impl EncoderDecoder {
    /// The model whose encoder and decoder are in `encoder` and `decoder`, each in its own
    /// names; where their widths differ, `memory_projection` is in `decoder`.
    ///
    /// # Errors
    /// as [`BertModel::new`], [`BertDecoder::new`].
    pub fn new(
        config: &EncoderDecoderConfig,
        encoder: VarBuilder,
        decoder: VarBuilder,
    ) -> Result<Self> {
        let (from, to) = (config.encoder.hidden_size, config.decoder.hidden_size);
        let memory_projection = match from == to {
            true => None,
            false => {
                let vb = decoder.pp("memory_projection");
                Some(Linear::load(config.decoder.format, from, to, true, vb)?)
            }
        };
        Ok(Self {
            config: config.clone(),
            encoder: BertModel::new(&config.encoder, has_pooler(&encoder), encoder)?,
            decoder: BertDecoder::new(&config.decoder, decoder)?,
            memory_projection,
        })
    }

    /// Loads `config.json` and `model.safetensors` of a folder that holds an
    /// `EncoderDecoderModel` of two BERTs.
    ///
    /// # Errors
    /// as [`BertModel::from_dir`].
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
        load::encoder_decoder(files, precision, device)
    }

    /// Writes a folder that [`Self::from_dir`] reads, and so does Hugging Face; `tensors` are
    /// what the model was built from, below `encoder.` and `decoder.`.
    ///
    /// # Errors
    /// [`Error::Io`]; files are written under another name first, so none is left half-written.
    pub fn save(
        dir: impl AsRef<Path>,
        config: &EncoderDecoderConfig,
        tensors: &HashMap<String, Tensor>,
    ) -> Result<()> {
        load::save_encoder_decoder(dir.as_ref(), config, tensors)
    }

    /// The sizes it was built from.
    pub fn config(&self) -> &EncoderDecoderConfig {
        &self.config
    }

    /// The encoder.
    pub fn encoder(&self) -> &BertModel {
        &self.encoder
    }

    /// The decoder.
    pub fn decoder(&self) -> &BertDecoder {
        &self.decoder
    }

    /// What the decoder attends to: the encoder's output for `input_ids` `(B, S)`, of which
    /// `padding` `(B, S)` of 0 and 1 hides a part.
    ///
    /// # Errors
    /// as [`BertModel::forward`].
    pub fn memory(&self, input_ids: &Tensor, padding: Option<&Tensor>) -> Result<DecoderMemory> {
        let mask = AttentionMask::none().with_optional_padding(padding)?;
        let encoded = self.encoder.forward(input_ids, None, &mask)?.last_hidden_state;
        self.memory_of(encoded, padding)
    }

    /// [`Self::memory`] of the encoder's output.
    fn memory_of(&self, mut encoded: Tensor, padding: Option<&Tensor>) -> Result<DecoderMemory> {
        if let Some(projection) = &self.memory_projection {
            encoded = projection.forward(&encoded)?; // (B, S, E) of the decoder
        }
        self.decoder.memory(&encoded, padding)
    }

    /// [`Self::forward`], and what all heads of all layers attend to: those of the encoder
    /// `(B, H, S, S)` each, and the decoder's.
    ///
    /// # Errors
    /// as there.
    pub fn forward_with_attentions(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        decoder_input_ids: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>, DecoderAttentions)> {
        let mask = AttentionMask::none().with_optional_padding(padding)?;
        let all = |_| HeadWeights::All;
        let (out, of_encoder) =
            self.encoder.forward_with_attentions(input_ids, None, &mask, all)?;
        let memory = self.memory_of(out.last_hidden_state, padding)?;
        let (logits, of_decoder) =
            self.decoder.forward_with_attentions(decoder_input_ids, None, Some(&memory))?;
        Ok((logits, of_encoder.into_iter().flatten().collect(), of_decoder))
    }

    /// Scores of the token that follows each of `decoder_input_ids`.
    ///
    /// # Shapes
    /// - `input_ids`, `padding`: `(B, S)`; `decoder_input_ids`: `(B, T)`
    /// - returns `(B, T, vocab_size)`, logits
    /// # Errors
    /// as [`BertModel::forward`], [`BertDecoder::forward`].
    pub fn forward(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        decoder_input_ids: &Tensor,
    ) -> Result<Tensor> {
        let memory = self.memory(input_ids, padding)?;
        self.decoder.forward(decoder_input_ids, None, Some(&memory))
    }

    /// What the decoder writes for each sequence, from `decoder_start_token_id` to
    /// `eos_token_id` or the longest length.
    ///
    /// # Errors
    /// as [`Self::forward`]; [`Error::NoStart`] if the config names no `decoder_start_token_id`.
    pub fn generate(
        &self,
        input_ids: &Tensor,
        padding: Option<&Tensor>,
        config: &GenerateConfig,
    ) -> Result<Vec<Vec<u32>>> {
        let start = self.config.decoder_start_token_id.ok_or(Error::NoStart)?;
        let memory = self.memory(input_ids, padding)?;
        let prompts = vec![vec![start]; input_ids.dim(0)?];
        let config = GenerateConfig {
            eos_token_id: config.eos_token_id.or(self.config.eos_token_id),
            ..config.clone()
        };
        self.decoder.generate(&prompts, Some(&memory), &config)
    }
}
