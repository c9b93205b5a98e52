//! `config.json` and `generation_config.json` of an encoder-decoder checkpoint.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    BertConfig, Error, Result,
    load::{Json, parse_value},
    models::common_keys::check_top_level,
};

/// `config.json` of an encoder-decoder checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EncoderDecoderConfig {
    /// The value of `model_type`, always `encoder-decoder`.
    #[serde(default = "model_type")]
    pub model_type: String,
    /// The encoder's config.
    pub encoder: BertConfig,
    /// The decoder's config.
    pub decoder: BertConfig,
    /// The token that starts every decoded text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_start_token_id: Option<u32>,
    /// The token that ends a decoded text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token_id: Option<u32>,
    /// The padding token. It is saved for Hugging Face and has no effect here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<u32>,
    /// Whether the encoder and the decoder share their common weights.
    #[serde(default)]
    pub tie_encoder_decoder: bool,
}

fn model_type() -> String {
    "encoder-decoder".to_string()
}

impl EncoderDecoderConfig {
    /// The config of an encoder and a decoder. Decoded texts start with `decoder_start_token_id`
    /// and end with `eos_token_id`. The fields `is_decoder` and `add_cross_attention` of both
    /// configs are replaced.
    pub fn new(
        encoder: BertConfig,
        decoder: BertConfig,
        decoder_start_token_id: u32,
        eos_token_id: u32,
    ) -> Self {
        let encoder = BertConfig { is_decoder: false, add_cross_attention: None, ..encoder };
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

    /// Reads a `config.json`; `path` names the file in errors.
    ///
    /// # Errors
    /// The errors of [`BertConfig::from_json`] for `encoder` and `decoder`;
    /// [`crate::ConfigError::Unsupported`] for another `model_type`, for a key of the top level
    /// that is not implemented, for a start or end token that is neither an id nor a list of one
    /// id, for an encoder with `is_decoder`, for a decoder without `is_decoder`, and if
    /// `decoder.is_causal` is set.
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        Self::read(&Json::new(json.to_vec(), path))
    }

    /// [`Self::from_json`] for a parsed file.
    pub(crate) fn read(json: &Json) -> Result<Self> {
        let (mut value, path): (Value, _) = (json.to()?, json.path());
        if let Value::Object(members) = &mut value {
            members.retain(|_, value| !value.is_null()); // null means the default
        }
        let got = value["model_type"].as_str().unwrap_or("encoder-decoder").to_string();
        if got != "encoder-decoder" {
            return Err(Error::unsupported(path, "model_type", "\"encoder-decoder\"", got));
        }
        check_top_level(json)?;
        for key in ["eos_token_id", "decoder_start_token_id"] {
            if let Some(id) = token_id(key, &value[key], path)? {
                value[key] = id.into();
            }
        }
        let mut config: Self = parse_value(value.clone(), path)?;
        for part in ["encoder", "decoder"] {
            BertConfig::read(&Json::from_value(value[part].clone(), format!("{path}, {part}")))?;
        }
        for (part, key, is_decoder) in [
            (&config.encoder, "encoder.is_decoder", false),
            (&config.decoder, "decoder.is_decoder", true),
        ] {
            if part.is_decoder != is_decoder {
                let expected = if is_decoder { "true" } else { "false" };
                return Err(Error::unsupported(path, key, expected, part.is_decoder));
            }
        }
        let decoder = &value["decoder"];
        // In transformers, `is_causal` of the decoder also makes cross-attention causal.
        if !decoder["is_causal"].is_null() {
            let got = decoder["is_causal"].to_string();
            return Err(Error::unsupported(path, "decoder.is_causal", "the key to be absent", got));
        }
        for (key, value) in [
            ("decoder.decoder_start_token_id", &decoder["decoder_start_token_id"]),
            ("bos_token_id", &value["bos_token_id"]),
            ("decoder.bos_token_id", &decoder["bos_token_id"]),
        ] {
            if config.decoder_start_token_id.is_none() {
                config.decoder_start_token_id = token_id(key, value, path)?;
            }
        }
        if config.eos_token_id.is_none() {
            let key = "decoder.eos_token_id";
            config.eos_token_id = token_id(key, &decoder["eos_token_id"], path)?;
        }
        config.pad_token_id = config.pad_token_id.or(config.decoder.pad_token_id);
        Ok(config)
    }
}

/// The token id in `value`: a number, or a list of one number; `None` for null.
fn token_id(key: &'static str, value: &Value, path: &str) -> Result<Option<u32>> {
    if value.is_null() {
        return Ok(None);
    }
    let id = match value {
        Value::Array(ids) if ids.len() == 1 => &ids[0],
        id => id,
    };
    match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
        Some(id) => Ok(Some(id)),
        None => Err(Error::unsupported(path, key, "a token id, or a list of one token id", value)),
    }
}

/// The token ids of `generation_config.json`. They replace all token ids of `config.json`; a
/// missing key clears its id, except that `bos_token_id` replaces a missing
/// `decoder_start_token_id`.
#[derive(Deserialize, Serialize)]
pub(crate) struct GenerationIds {
    #[serde(skip_serializing_if = "Option::is_none")]
    decoder_start_token_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bos_token_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eos_token_id: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pad_token_id: Option<u32>,
}

impl From<&EncoderDecoderConfig> for GenerationIds {
    fn from(config: &EncoderDecoderConfig) -> Self {
        Self {
            decoder_start_token_id: config.decoder_start_token_id,
            bos_token_id: None,
            eos_token_id: config.eos_token_id.map(Value::from),
            pad_token_id: config.pad_token_id,
        }
    }
}

impl GenerationIds {
    /// Replaces the token ids of `config`; `path` names the file in errors.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if `eos_token_id` is neither an id nor a list of one id.
    pub(crate) fn replace(self, config: &mut EncoderDecoderConfig, path: &str) -> Result<()> {
        config.decoder_start_token_id = self.decoder_start_token_id.or(self.bos_token_id);
        config.eos_token_id =
            token_id("eos_token_id", &self.eos_token_id.unwrap_or_default(), path)?;
        config.pad_token_id = self.pad_token_id;
        Ok(())
    }
}
