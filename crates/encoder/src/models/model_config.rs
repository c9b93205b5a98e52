//! The config of an encoder with its heads, read from the `config.json` of any architecture.

use crate::{
    BertConfig, EncoderConfig, HeadConfig, Result,
    load::{Json, Names},
    models::{
        architecture::Architecture,
        bert::BERT,
        common_keys::CommonKeys,
        deberta::{DEBERTA, NAMES_WITHOUT_RELATIVE_POSITIONS},
        registry,
    },
};

/// The config of an encoder and of its heads.
///
/// # Examples
/// ```
/// let json = std::fs::read("../../weights/all-MiniLM-L6-v2/config.json").unwrap();
/// let config = encoder::ModelConfig::from_json(&json, "config.json")?;
/// assert_eq!((config.architecture(), config.encoder.hidden_size), ("BERT", 384));
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The encoder.
    pub encoder: EncoderConfig,
    /// The heads.
    pub heads: HeadConfig,
    /// Whether `is_decoder` is set. Encoders refuse such a checkpoint; [`crate::CausalLm`] loads
    /// it if the architecture is BERT.
    pub(crate) is_decoder: bool,
    /// The tokenizer class to use if no file of the folder names one.
    pub(crate) tokenizer_class: &'static str,
    architecture: &'static Architecture,
}

impl ModelConfig {
    /// Reads the `config.json` of any supported architecture; `path` names the file in errors.
    ///
    /// # Errors
    /// [`crate::FileError::Json`] for invalid JSON, a missing size or an unknown
    /// activation; [`crate::ConfigError::Unsupported`] for an architecture or a
    /// setting that is not implemented; the errors of [`EncoderConfig::check`].
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        Self::read(&Json::new(json.to_vec(), path))
    }

    /// [`Self::from_json`] for a parsed file.
    pub(crate) fn read(json: &Json) -> Result<Self> {
        let (architecture, tokenizer_class) = registry::find(&json.to()?, json.path())?;
        let keys: CommonKeys = json.to()?;
        keys.check(json.path(), &architecture.accepted)?;
        let (encoder, heads) = (architecture.config)(json)?;
        encoder.check()?;
        Ok(Self { encoder, heads, is_decoder: keys.is_decoder(), tokenizer_class, architecture })
    }

    /// The name of the architecture.
    pub fn architecture(&self) -> &'static str {
        self.architecture.name
    }

    /// Whether the architecture is that of decoders, for which `is_decoder` has no effect and
    /// `is_causal` may be false.
    pub(crate) fn is_of_decoders(&self) -> bool {
        self.architecture.accepted.keys.contains(&"is_causal")
    }

    /// The sets of names that the architecture's checkpoints give to tensors.
    pub(crate) fn names(&self) -> &'static [Names] {
        let is_deberta = self.architecture.name == DEBERTA.name;
        if is_deberta && self.encoder.disentangled.is_none() {
            &NAMES_WITHOUT_RELATIVE_POSITIONS
        } else {
            self.architecture.names
        }
    }
}

impl From<&BertConfig> for ModelConfig {
    fn from(config: &BertConfig) -> Self {
        let (encoder, heads) = (config.encoder_config(), config.head_config());
        let (is_decoder, tokenizer_class) = (config.is_decoder, BERT.model_types[0].1);
        Self { encoder, heads, is_decoder, tokenizer_class, architecture: &BERT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deberta_ignores_the_norm_of_relative_positions_if_it_has_none() -> Result<()> {
        let json = |is_relative: bool| {
            let size = r#""hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1"#;
            format!(
                r#"{{"model_type": "deberta-v2", "vocab_size": 9, "intermediate_size": 4, {size},
                    "max_position_embeddings": 16,
                    "norm_rel_ebd": "layer_norm", "relative_attention": {is_relative}}}"#
            )
        };
        for is_relative in [false, true] {
            let config = ModelConfig::from_json(json(is_relative).as_bytes(), "config.json")?;
            for names in config.names() {
                assert_eq!(names.ignored.contains(&"encoder.LayerNorm"), !is_relative);
            }
        }
        Ok(())
    }
}
