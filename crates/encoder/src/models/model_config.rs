//! The config of an encoder with its heads, read from the `config.json` of any architecture.

use serde::Deserialize;

use crate::{
    Activation, BertConfig, EncoderConfig, Result,
    load::{Json, Names},
    models::{
        architecture::Architecture,
        bert::BERT,
        common_keys::{CommonKeys, refuse},
        deberta::{DEBERTA, NAMES_WITHOUT_RELATIVE_POSITIONS},
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
    /// Whether `is_decoder` is set. Encoders refuse such a checkpoint; [`crate::BertDecoder`] loads
    /// it if the architecture is BERT.
    pub(crate) is_decoder: bool,
    /// The tokenizer class to use if no file of the folder names one.
    pub(crate) tokenizer_class: &'static str,
    architecture: &'static Architecture,
}

/// The settings of an architecture's heads, such as activations, biases and tied weights.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct HeadConfig {
    /// Whether the language model head uses the word embeddings as its output matrix. A different
    /// matrix in the checkpoint takes precedence.
    pub tie_word_embeddings: bool,
    /// The activation of the language model head.
    pub lm_activation: Activation,
    /// Whether the output matrix of the language model head has a bias.
    pub lm_decoder_bias: bool,
    /// Whether a checkpoint may lack the biases of the language model head. A missing bias is then
    /// zero.
    pub lm_biases_are_optional: bool,
    /// The activation after the first linear map of the heads other than the language model head.
    pub sequence_activation: Activation,
    /// The hidden states that the sequence classification head reads.
    pub sequence_pooling: SequencePooling,
    /// Whether the first linear map of a head has a bias.
    pub dense_bias: bool,
    /// Whether the heads normalise after the activation. A language model head always does.
    pub norm: bool,
    /// Whether the heads of token classification and question answering have the first linear map,
    /// the activation and the normalisation of the sequence classification head.
    pub token_dense: bool,
}

/// The hidden states that the sequence classification head reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SequencePooling {
    /// The hidden state of the first token that is not padding.
    #[default]
    Cls,
    /// The mean of the hidden states of all tokens that are not padding.
    Mean,
}

impl HeadConfig {
    /// BERT's heads. `lm` is the activation of the language model head, `sequence` that of the
    /// other heads.
    pub fn new(lm: Activation, sequence: Activation) -> Self {
        Self {
            tie_word_embeddings: true,
            lm_activation: lm,
            lm_decoder_bias: true,
            lm_biases_are_optional: false,
            sequence_activation: sequence,
            sequence_pooling: SequencePooling::Cls,
            dense_bias: true,
            norm: false,
            token_dense: false,
        }
    }
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
        let (architecture, tokenizer_class) = Architecture::find(&json.to()?, json.path())?;
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

/// The keys of `config.json` that determine the architecture.
#[derive(Deserialize)]
pub(crate) struct ModelType {
    pub(crate) model_type: Option<String>,
    pub(crate) position_embedding_type: Option<String>,
    architectures: Option<Vec<String>>,
}

impl ModelType {
    /// The `model_type`. An absent key means `bert`, since the first BERT checkpoints lack it.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] if `model_type` is absent and
    /// `architectures` names a class that is not BERT's; `path` names the file.
    pub(crate) fn name(&self, path: &str) -> Result<&str> {
        if let Some(model_type) = &self.model_type {
            return Ok(model_type);
        }
        let mut classes = self.architectures.iter().flatten();
        match classes.find(|class| !class.starts_with("Bert")) {
            Some(class) => {
                let expected = "the model_type of this class; an absent key means bert";
                refuse(path, "model_type", expected, &format!("(absent, architectures {class})"))
            }
            None => Ok("bert"),
        }
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

    #[test]
    fn a_config_without_model_type_is_berts_unless_it_names_another_class() -> Result<()> {
        let name = |json: &str| {
            let keys: ModelType = Json::new(json.as_bytes().to_vec(), "config.json").to()?;
            keys.name("config.json").map(String::from)
        };
        for json in [
            "{}",
            r#"{"architectures": null}"#,
            r#"{"architectures": []}"#,
            r#"{"architectures": ["BertModel", "BertForMaskedLM"]}"#,
        ] {
            assert_eq!(name(json)?, "bert");
        }
        assert_eq!(name(r#"{"model_type": "x", "architectures": ["RobertaModel"]}"#)?, "x");
        for class in ["RobertaModel", "XLMRobertaModel", "CamembertModel"] {
            let json = format!(r#"{{"architectures": ["BertModel", "{class}"]}}"#);
            assert_eq!(
                name(&json).unwrap_err().to_string(),
                format!(
                    "config.json: model_type (absent, architectures {class}) is not supported: \
                     expected the model_type of this class; an absent key means bert"
                )
            );
        }
        Ok(())
    }
}
