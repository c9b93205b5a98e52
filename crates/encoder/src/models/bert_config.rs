//! `config.json` of a BERT checkpoint, in Hugging Face's names.

use mha::{AttentionConfig, ComputeType};
use serde::{Deserialize, Serialize};

use crate::{Activation, EncoderConfig, Error, Result, load::parse_json};

/// The sizes of a BERT model, in Hugging Face's names.
///
/// # Examples
/// ```
/// let config = encoder::BertConfig::bert_base();
/// assert_eq!((config.hidden_size, config.num_hidden_layers), (768, 12));
/// assert_eq!(config.attention()?.head_dim(), 64);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BertConfig {
    /// Number of word pieces.
    pub vocab_size: usize,
    /// E, the width of the hidden states.
    pub hidden_size: usize,
    /// L, the number of layers.
    pub num_hidden_layers: usize,
    /// H, the number of heads of a layer.
    pub num_attention_heads: usize,
    /// F, the width inside the feed-forward network.
    pub intermediate_size: usize,
    /// What the feed-forward network applies between its two products.
    #[serde(default, deserialize_with = "not_null::hidden_act")]
    pub hidden_act: Activation,
    /// The longest sequence there are positions for, in tokens.
    pub max_position_embeddings: usize,
    /// Number of token types (first or second text of a pair).
    #[serde(default = "two", deserialize_with = "not_null::two")]
    pub type_vocab_size: usize,
    /// What layer normalisation adds to the variance.
    #[serde(default = "layer_norm_eps", deserialize_with = "not_null::layer_norm_eps")]
    pub layer_norm_eps: f64,
    /// A decoder: no token sees a later one.
    #[serde(default, deserialize_with = "not_null::no")]
    pub is_decoder: bool,
    /// Whether a decoder attends to an encoder's output too; where `None`, its checkpoint tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_cross_attention: Option<bool>,
    /// A decoder's scores of the next token come from the word embeddings.
    #[serde(default = "yes", deserialize_with = "not_null::yes")]
    pub tie_word_embeddings: bool,
    /// What fills up shorter sequences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<u32>,
    /// What the linear maps multiply in; it belongs to a run and not to a model.
    #[serde(skip)]
    pub compute_type: ComputeType,
}

fn yes() -> bool {
    true
}

fn two() -> usize {
    2
}

fn layer_norm_eps() -> f64 {
    1e-12
}

/// Values that are their defaults where a config says `null`.
mod not_null {
    use serde::{Deserialize, Deserializer};

    use crate::Activation;

    macro_rules! not_null {
        ($($name:ident: $T:ty = $default:expr;)*) => {$(
            pub(super) fn $name<'de, D: Deserializer<'de>>(value: D) -> Result<$T, D::Error> {
                Ok(Option::deserialize(value)?.unwrap_or_else(|| $default))
            }
        )*};
    }

    not_null! {
        hidden_act: Activation = Activation::default();
        two: usize = super::two();
        layer_norm_eps: f64 = super::layer_norm_eps();
        no: bool = false;
        yes: bool = super::yes();
    }
}

impl BertConfig {
    /// BERT-base, uncased: Devlin et al. 2019, <https://arxiv.org/abs/1810.04805>.
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

    /// Reads a `config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// [`Error::Json`] if it is no JSON, lacks a size or has an unknown activation;
    /// [`Error::Unsupported`] if it asks for another model than is computed here; [`mha::Error`] if
    /// its sizes do not fit together.
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        let refused: Refused = parse_json(json, path)?;
        refused.check(path)?;
        let config: Self = parse_json(json, path)?;
        config.check()?;
        Ok(config)
    }

    /// The config of the encoder block.
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
        config
    }

    /// The config of each layer's attention.
    ///
    /// # Errors
    /// [`mha::Error::HeadsDoNotDivide`] if the heads do not divide `hidden_size`;
    /// [`mha::Error::Zero`] for a size of 0.
    pub fn attention(&self) -> Result<AttentionConfig> {
        self.encoder_config().attention()
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// The errors of [`EncoderConfig::check`].
    pub fn check(&self) -> Result<()> {
        self.encoder_config().check()
    }
}

/// Keys of `config.json` that, set otherwise than BERT's default, mean another computation.
#[derive(Deserialize)]
struct Refused {
    model_type: Option<String>,
    position_embedding_type: Option<String>,
    pruned_heads: Option<serde_json::Map<String, serde_json::Value>>,
    /// Jina's BERT.
    feed_forward_type: Option<String>,
    /// MosaicML's BERT.
    alibi_starting_size: Option<serde_json::Value>,
    /// Code of the model's own, by the class that it stands in for.
    auto_map: Option<serde_json::Map<String, serde_json::Value>>,
    is_decoder: Option<bool>,
    /// Overrides the mask of `is_decoder` in batches without padding.
    is_causal: Option<bool>,
    /// A decoder's cache keeps the last keys only.
    sliding_window: Option<serde_json::Value>,
    attention_chunk_size: Option<serde_json::Value>,
    /// Another file of weights, and files that take this one's place in some versions.
    transformers_weights: Option<String>,
    configuration_files: Option<Vec<String>>,
    /// Weights that are quantised when they are loaded.
    quantization_config: Option<serde_json::Value>,
    /// Settings of single layers.
    per_layer_config: Option<serde_json::Value>,
}

/// Checks the top level of an encoder-decoder's `config.json` for keys that are not implemented.
///
/// # Errors
/// [`Error::Unsupported`] for such a key.
pub(crate) fn check_top_level(json: &[u8], path: &str) -> Result<()> {
    let keys: Refused = parse_json(json, path)?;
    Refused { model_type: None, ..keys }.check(path)
}

impl Refused {
    fn check(&self, path: &str) -> Result<()> {
        let refuse = |key, expected, got: &str| {
            Err(Error::Unsupported { path: path.to_string(), key, expected, got: got.to_string() })
        };
        let named = |value: &Option<String>, default: &str| value.clone().filter(|v| v != default);
        if let Some(got) = named(&self.model_type, "bert") {
            return refuse("model_type", "\"bert\"", &got);
        }
        if let Some(got) = named(&self.position_embedding_type, "absolute") {
            return refuse("position_embedding_type", "\"absolute\"", &got);
        }
        if let Some(got) = named(&self.feed_forward_type, "original") {
            return refuse("feed_forward_type", "\"original\"", &got);
        }
        if let Some(got) = &self.alibi_starting_size {
            return refuse("alibi_starting_size", "none", &got.to_string());
        }
        if let Some(heads) = self.pruned_heads.as_ref().filter(|heads| !heads.is_empty()) {
            let layers: Vec<&str> = heads.keys().map(String::as_str).collect();
            return refuse("pruned_heads", "none", &format!("in layers {}", layers.join(", ")));
        }
        let is_decoder = self.is_decoder == Some(true);
        if let Some(is_causal) = self.is_causal.filter(|&is_causal| is_causal != is_decoder) {
            let expected = if is_decoder { "true in a decoder" } else { "false in an encoder" };
            return refuse("is_causal", expected, &is_causal.to_string());
        }
        let windows = [
            ("sliding_window", &self.sliding_window),
            ("attention_chunk_size", &self.attention_chunk_size),
        ];
        for (key, window) in windows {
            if let Some(window) = window.as_ref().filter(|_| is_decoder) {
                return refuse(key, "none", &window.to_string());
            }
        }
        for (key, value) in [
            ("quantization_config", &self.quantization_config),
            ("per_layer_config", &self.per_layer_config),
        ] {
            if let Some(value) = value {
                return refuse(key, "none", &value.to_string());
            }
        }
        if let Some(file) = &self.transformers_weights {
            return refuse("transformers_weights", "none", file);
        }
        let files = self.configuration_files.iter().flatten();
        if let Some(file) = files.into_iter().find(|file| *file != "config.json") {
            return refuse("configuration_files", "config.json", file);
        }
        let own = self.auto_map.iter().flatten().find(|(class, _)| class.starts_with("AutoModel"));
        match own {
            Some((_, code)) => {
                refuse("auto_map", "BERT without code of its own", &code.to_string())
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The eleven keys that the first BERT checkpoints came with.
    const SPARSE: &str = r#"{
        "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 512,
        "max_position_embeddings": 512, "num_attention_heads": 2, "num_hidden_layers": 2,
        "type_vocab_size": 2, "vocab_size": 30522
    }"#;

    fn edited(from: &str, to: &str) -> String {
        assert!(SPARSE.contains(from), "{from}");
        let json = SPARSE.replace(from, to);
        match BertConfig::from_json(json.as_bytes(), "config.json") {
            Ok(config) => panic!("accepted: {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn eleven_keys_are_enough() -> Result<()> {
        let config = BertConfig::from_json(SPARSE.as_bytes(), "config.json")?;
        assert_eq!((config.hidden_size, config.type_vocab_size), (128, 2));
        assert_eq!(config.layer_norm_eps, 1e-12);
        Ok(())
    }

    #[test]
    fn unsupported_settings_are_refused_by_name() {
        let model_type = r#"{ "model_type": "roberta", "position_embedding_type": "absolute","#;
        let position = r#"{ "model_type": "bert", "position_embedding_type": "relative_key","#;
        assert_eq!(
            edited("{", model_type),
            "config.json: model_type roberta is not supported: expected \"bert\""
        );
        assert_eq!(
            edited("{", position),
            "config.json: position_embedding_type relative_key is not supported: \
             expected \"absolute\""
        );
        assert!(
            edited("{", r#"{ "pruned_heads": {"3": [1]},"#).contains("pruned_heads in layers 3")
        );
        assert!(edited("\"gelu\"", "\"swiglu\"").contains("hidden_act \"swiglu\" is unknown"));
    }

    #[test]
    fn variants_of_bert_are_refused_by_name() {
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
            let error = edited("{", &format!("{{ {key},"));
            assert!(error.starts_with(&format!("config.json: {got}")), "{error}");
        }
    }

    /// Keys that tools leave in a config and that do not affect the result.
    #[test]
    fn nulls_and_unknown_keys_do_not_affect_the_config() -> Result<()> {
        let plain = BertConfig::from_json(SPARSE.as_bytes(), "config.json")?;
        let more = r#"{
            "layer_norm_eps": null, "is_decoder": null, "tie_word_embeddings": null,
            "pad_token_id": null, "pruned_heads": {}, "add_cross_attention": null,
            "torch_dtype": "float32", "dtype": "float16", "_num_labels": 2, "gradient_checkpointing":
            false, "id2label": {"0": "A"}, "label2id": {"A": "0"}, "position_embedding_type": null,
            "auto_map": null, "feed_forward_type": null, "alibi_starting_size": null,
            "architectures": ["BertModel"], "transformers_version": "4.6.0","#;
        let json = SPARSE
            .replacen('{', more, 1)
            .replace("\"type_vocab_size\": 2", "\"type_vocab_size\": null");
        assert_eq!(BertConfig::from_json(json.as_bytes(), "config.json")?, plain);
        let json = SPARSE.replacen('{', "{ \"layer_norm_eps\": 1,", 1);
        assert_eq!(BertConfig::from_json(json.as_bytes(), "config.json")?.layer_norm_eps, 1.0);
        Ok(())
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        assert_eq!(
            edited("\"hidden_size\": 128", "\"hidden_size\": 129"),
            "hidden_size 129 is not divisible by num_attention_heads 2: \
             expected a multiple of 2, got remainder 1"
        );
        assert!(
            edited("\"vocab_size\": 30522", "\"vocab_size\": 0").starts_with("vocab_size is zero")
        );
        assert!(edited("\"hidden_size\": 128,", "").contains("missing field `hidden_size`"));
    }
}
