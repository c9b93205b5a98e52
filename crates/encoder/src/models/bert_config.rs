//! `config.json` of a BERT checkpoint.

use mha::{AttentionConfig, ComputeType};
use serde::{Deserialize, Serialize};

use crate::{
    Activation, EncoderConfig, Error, HeadConfig, Result,
    load::Json,
    models::{architecture::Accepted, common_keys::CommonKeys, model_type::ModelType},
};

/// The config of a BERT model. The fields have the names of Hugging Face's `config.json`.
///
/// # Examples
/// ```
/// let config = encoder::BertConfig::bert_base();
/// assert_eq!((config.hidden_size, config.num_hidden_layers), (768, 12));
/// assert_eq!(config.attention()?.head_dim(), 64);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BertConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// E, the width of the hidden states.
    pub hidden_size: usize,
    /// L, the number of layers.
    pub num_hidden_layers: usize,
    /// H, the number of attention heads of a layer.
    pub num_attention_heads: usize,
    /// F, the width inside the feed-forward network.
    pub intermediate_size: usize,
    /// The activation of the feed-forward network.
    #[serde(default, deserialize_with = "null_as_default::hidden_act")]
    pub hidden_act: Activation,
    /// Maximum number of tokens of a sequence.
    pub max_position_embeddings: usize,
    /// Number of token types. Type 0 marks the first text of a pair, type 1 the second.
    #[serde(default = "type_vocab_size", deserialize_with = "null_as_default::type_vocab_size")]
    pub type_vocab_size: usize,
    /// ε, which layer normalisation adds to the variance.
    #[serde(default = "layer_norm_eps", deserialize_with = "null_as_default::layer_norm_eps")]
    pub layer_norm_eps: f64,
    /// Whether the model is a decoder: each token attends only to itself and the preceding tokens.
    #[serde(default, deserialize_with = "null_as_default::is_decoder")]
    pub is_decoder: bool,
    /// Whether a decoder has cross-attention. `None`: it has cross-attention if the checkpoint has
    /// the tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_cross_attention: Option<bool>,
    /// Whether the language model head uses the word embeddings as its output matrix. A different
    /// matrix in the checkpoint takes precedence.
    #[serde(
        default = "tie_word_embeddings",
        deserialize_with = "null_as_default::tie_word_embeddings"
    )]
    pub tie_word_embeddings: bool,
    /// The id of the padding token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<u32>,
    /// The number format of the matrix products in linear layers. It is a choice of the program
    /// that runs the model, so it is not part of `config.json`.
    #[serde(skip)]
    pub compute_type: ComputeType,
}

fn tie_word_embeddings() -> bool {
    true
}

fn type_vocab_size() -> usize {
    2
}

fn layer_norm_eps() -> f64 {
    1e-12
}

/// Deserialises `null` to the key's default.
mod null_as_default {
    use serde::{Deserialize, Deserializer};

    use crate::Activation;

    macro_rules! null_as_default {
        ($($name:ident: $T:ty = $default:expr;)*) => {$(
            pub(super) fn $name<'de, D: Deserializer<'de>>(value: D) -> Result<$T, D::Error> {
                Ok(Option::deserialize(value)?.unwrap_or_else(|| $default))
            }
        )*};
    }

    null_as_default! {
        hidden_act: Activation = Activation::default();
        type_vocab_size: usize = super::type_vocab_size();
        layer_norm_eps: f64 = super::layer_norm_eps();
        is_decoder: bool = false;
        tie_word_embeddings: bool = super::tie_word_embeddings();
    }
}

impl BertConfig {
    /// A config of these sizes, with the other values of BERT-base.
    ///
    /// # Examples
    /// ```
    /// let config = encoder::BertConfig::new(100, 12, 4, 3, 24); // vocabulary, E, layers, heads, F
    /// assert_eq!((config.max_position_embeddings, config.attention()?.head_dim()), (512, 4));
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        intermediate_size: usize,
    ) -> Self {
        Self {
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            intermediate_size,
            ..Self::bert_base()
        }
    }

    /// The config of BERT-base, uncased: Devlin et al. 2019, <https://arxiv.org/abs/1810.04805>.
    pub fn bert_base() -> Self {
        Self {
            vocab_size: 30_522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: Activation::Gelu,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            layer_norm_eps: layer_norm_eps(),
            is_decoder: false,
            add_cross_attention: None,
            tie_word_embeddings: true,
            pad_token_id: Some(0),
            compute_type: ComputeType::F32,
        }
    }

    /// Reads a `config.json`; `path` names the file in errors.
    ///
    /// # Errors
    /// [`crate::FileError::Json`] for invalid JSON, a missing size or an unknown activation;
    /// [`crate::ConfigError::Unsupported`] for a setting that is not implemented; the errors of
    /// [`Self::check`].
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        Self::read(&Json::new(json.to_vec(), path))
    }

    /// [`Self::from_json`] for a parsed file.
    pub(crate) fn read(json: &Json) -> Result<Self> {
        let (keys, path): (ModelType, _) = (json.to()?, json.path());
        let model_type = keys.name(path)?;
        if model_type != "bert" {
            return Err(Error::unsupported(path, "model_type", "\"bert\"", model_type));
        }
        let keys: CommonKeys = json.to()?;
        keys.check(path, &Accepted::NOTHING)?;
        let config: Self = json.to()?;
        config.check()?;
        Ok(config)
    }

    /// Converts this config to an [`EncoderConfig`]. Properties that `config.json` does not set,
    /// such as norm placement and biases, are those of BERT.
    pub fn encoder_config(&self) -> EncoderConfig {
        let mut config = EncoderConfig::new(
            self.vocab_size,
            self.hidden_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.intermediate_size,
        );
        config.max_position_embeddings = self.max_position_embeddings;
        config.embeddings.type_vocab_size = Some(self.type_vocab_size);
        config.norm.eps = self.layer_norm_eps;
        config.feed_forward.activation = self.hidden_act;
        config.compute_type = self.compute_type;
        config.causal = self.is_decoder;
        config.cross_attention =
            if self.is_decoder { self.add_cross_attention } else { Some(false) };
        config
    }

    /// The settings of BERT's heads.
    pub(crate) fn head_config(&self) -> HeadConfig {
        let heads = HeadConfig::new(self.hidden_act, Activation::Tanh);
        HeadConfig { tie_word_embeddings: self.tie_word_embeddings, ..heads }
    }

    /// The config of each layer's attention.
    ///
    /// # Errors
    /// The errors of [`AttentionConfig::check`].
    pub fn attention(&self) -> Result<AttentionConfig> {
        self.encoder_config().attention()
    }

    /// Checks that the sizes are consistent.
    ///
    /// # Errors
    /// The errors of [`EncoderConfig::check`].
    pub fn check(&self) -> Result<()> {
        self.encoder_config().check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A config with the eleven keys of the first BERT checkpoints.
    const MINIMAL: &str = r#"{
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 512,
        "max_position_embeddings": 512, "num_attention_heads": 2, "num_hidden_layers": 2,
        "type_vocab_size": 2, "vocab_size": 30522
    }"#;

    /// The error for [`MINIMAL`] with `from` replaced by `to`.
    fn error_after_edit(from: &str, to: &str) -> String {
        assert!(MINIMAL.contains(from), "{from}");
        let json = MINIMAL.replace(from, to);
        match BertConfig::from_json(json.as_bytes(), "config.json") {
            Ok(config) => panic!("accepted: {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn missing_keys_have_defaults() -> Result<()> {
        let json = MINIMAL.replace("\"hidden_act\": \"gelu\",", "");
        let json = json.replace("\"type_vocab_size\": 2,", "");
        let config = BertConfig::from_json(json.as_bytes(), "config.json")?;
        assert_eq!((config.hidden_size, config.type_vocab_size), (128, 2));
        assert_eq!((config.hidden_act, config.layer_norm_eps), (Activation::Gelu, 1e-12));
        assert!(!config.is_decoder && config.tie_word_embeddings);
        Ok(())
    }

    #[test]
    fn unsupported_settings_are_errors_that_name_the_key() {
        let model_type = r#"{ "model_type": "roberta", "position_embedding_type": "absolute","#;
        let position = r#"{ "model_type": "bert", "position_embedding_type": "relative_key","#;
        assert_eq!(
            error_after_edit("{", model_type),
            "config.json: model_type roberta is not supported: expected \"bert\""
        );
        assert_eq!(
            error_after_edit("{", position),
            "config.json: position_embedding_type relative_key is not supported: \
             expected \"absolute\""
        );
        assert!(
            error_after_edit("{", r#"{ "pruned_heads": {"3": [1]},"#)
                .contains("pruned_heads in layers 3")
        );
        assert!(
            error_after_edit("\"gelu\"", "\"swiglu\"").contains("activation \"swiglu\" is unknown")
        );
    }

    #[test]
    fn unsupported_variants_of_bert_are_errors_that_name_the_key() {
        for (key, got) in [
            (r#""position_embedding_type": "alibi""#, "position_embedding_type alibi"),
            (r#""position_embedding_type": "rope""#, "position_embedding_type rope"),
            (
                r#""position_embedding_type": "relative_key_query""#,
                "position_embedding_type relative",
            ),
            (r#""feed_forward_type": "geglu""#, "feed_forward_type geglu"),
            (r#""alibi_starting_size": 512"#, "alibi_starting_size 512"),
            (
                r#""auto_map": {"AutoModel": "x--modeling_bert.JinaBertModel"}"#,
                "auto_map \"x--modeling",
            ),
        ] {
            let error = error_after_edit("{", &format!("{{ {key},"));
            assert!(error.starts_with(&format!("config.json: {got}")), "{error}");
        }
    }

    #[test]
    fn nulls_and_unknown_keys_do_not_affect_the_config() -> Result<()> {
        let plain = BertConfig::from_json(MINIMAL.as_bytes(), "config.json")?;
        let more = r#"{
            "layer_norm_eps": null, "is_decoder": null, "tie_word_embeddings": null,
            "pad_token_id": null, "pruned_heads": {"0": []}, "add_cross_attention": null,
            "torch_dtype": "float32", "dtype": "float16", "_num_labels": 2, "gradient_checkpointing":
            false, "id2label": {"0": "A"}, "label2id": {"A": "0"}, "position_embedding_type": null,
            "auto_map": null, "feed_forward_type": null, "alibi_starting_size": null,
            "architectures": ["BertModel"], "transformers_version": "4.6.0","#;
        let json = MINIMAL
            .replacen('{', more, 1)
            .replace("\"type_vocab_size\": 2", "\"type_vocab_size\": null");
        assert_eq!(BertConfig::from_json(json.as_bytes(), "config.json")?, plain);
        let json = MINIMAL.replacen('{', "{ \"layer_norm_eps\": 1,", 1);
        assert_eq!(BertConfig::from_json(json.as_bytes(), "config.json")?.layer_norm_eps, 1.0);
        Ok(())
    }

    #[test]
    fn invalid_sizes_are_errors_that_name_the_size() {
        assert_eq!(
            error_after_edit("\"hidden_size\": 128", "\"hidden_size\": 129"),
            "hidden_size 129 is not divisible by num_attention_heads 2: \
             expected a multiple of 2, got remainder 1"
        );
        assert!(
            error_after_edit("\"vocab_size\": 30522", "\"vocab_size\": 0")
                .starts_with("vocab_size is zero")
        );
        assert!(
            error_after_edit("\"hidden_size\": 128,", "").contains("missing field `hidden_size`")
        );
    }
}
