//! The keys of `config.json` that are checked for all architectures, and functions that check or
//! copy other keys.

use serde::Deserialize;
use serde_json::Value;

use crate::{Error, Result, load::Json, models::architecture::Accepted};

/// Keys that the `config.json` of any architecture may have, and whose values are restricted.
#[derive(Deserialize)]
pub(super) struct CommonKeys {
    position_embedding_type: Option<String>,
    pruned_heads: Option<serde_json::Map<String, Value>>,
    /// A key of Jina v2.
    feed_forward_type: Option<String>,
    /// A key of MosaicML's BERT.
    alibi_starting_size: Option<Value>,
    /// The model's custom Python classes. Each key is the Auto class of transformers, such as
    /// `AutoModel`, that loads the custom class.
    auto_map: Option<serde_json::Map<String, Value>>,
    is_decoder: Option<bool>,
    /// In transformers, this key and not `is_decoder` decides whether a batch without padding gets
    /// a causal mask. Here, both must agree.
    is_causal: Option<bool>,
    /// Limits a decoder's cache to the most recent tokens, as `attention_chunk_size` also does.
    sliding_window: Option<Value>,
    attention_chunk_size: Option<Value>,
    /// The name of a weights file other than `model.safetensors`.
    transformers_weights: Option<String>,
    /// Config files for specific versions of transformers, instead of `config.json`.
    configuration_files: Option<Vec<String>>,
    /// Quantisation of the weights during loading.
    quantization_config: Option<Value>,
    /// Scaled frequencies of rotary positions.
    rope_scaling: Option<Value>,
    /// Settings for individual layers.
    per_layer_config: Option<Value>,
}

/// Checks the top level of an encoder-decoder's `config.json` for keys that are not implemented.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for a key that is not implemented;
/// [`crate::FileError::Json`] for a key of the wrong type.
pub(crate) fn check_top_level(json: &Json) -> Result<()> {
    let keys: CommonKeys = json.to()?;
    keys.check(json.path(), &Accepted::NOTHING)
}

impl CommonKeys {
    pub(super) fn is_decoder(&self) -> bool {
        self.is_decoder == Some(true)
    }

    /// Checks that the values are implemented, except those of keys that the architecture accepts;
    /// `path` names the file in errors.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a value that is not implemented.
    pub(super) fn check(&self, path: &str, accepted: &Accepted) -> Result<()> {
        const ABSENT: &str = "the key to be absent";
        let is_restricted = |key: &str| !accepted.keys.contains(&key);
        let unsupported = |key, expected, got: &str| Error::unsupported(path, key, expected, got);
        let other_than =
            |default: &str, value: &Option<String>| value.clone().filter(|v| v != default);
        if let Some(got) = other_than("absolute", &self.position_embedding_type)
            && is_restricted("position_embedding_type")
        {
            return Err(unsupported("position_embedding_type", "\"absolute\"", &got));
        }
        if let Some(got) = other_than("original", &self.feed_forward_type)
            && is_restricted("feed_forward_type")
        {
            return Err(unsupported("feed_forward_type", "\"original\"", &got));
        }
        if let Some(got) = &self.alibi_starting_size {
            return Err(unsupported("alibi_starting_size", ABSENT, &got.to_string()));
        }
        let pruned = self.pruned_heads.iter().flatten();
        let pruned = pruned.filter(|(_, heads)| !heads.as_array().is_some_and(Vec::is_empty));
        let layers: Vec<&str> = pruned.map(|(layer, _)| layer.as_str()).collect();
        if !layers.is_empty() {
            let got = format!("in layers {}", layers.join(", "));
            return Err(unsupported("pruned_heads", "no pruned heads", &got));
        }
        let is_decoder = self.is_decoder();
        if let Some(is_causal) = self.is_causal.filter(|&is_causal| is_causal != is_decoder)
            && is_restricted("is_causal")
        {
            let expected = if is_decoder { "true in a decoder" } else { "false in an encoder" };
            return Err(unsupported("is_causal", expected, &is_causal.to_string()));
        }
        let windows = [
            ("sliding_window", &self.sliding_window),
            ("attention_chunk_size", &self.attention_chunk_size),
        ];
        for (key, window) in windows {
            if let Some(window) = window.as_ref().filter(|_| is_decoder && is_restricted(key)) {
                return Err(unsupported(key, ABSENT, &window.to_string()));
            }
        }
        for (key, value) in [
            ("quantization_config", &self.quantization_config),
            ("rope_scaling", &self.rope_scaling),
            ("per_layer_config", &self.per_layer_config),
        ] {
            if let Some(value) = value
                && is_restricted(key)
            {
                return Err(unsupported(key, ABSENT, &value.to_string()));
            }
        }
        if let Some(file) = &self.transformers_weights {
            return Err(unsupported("transformers_weights", ABSENT, file));
        }
        let files = self.configuration_files.iter().flatten();
        if let Some(file) = files.into_iter().find(|file| *file != "config.json") {
            return Err(unsupported("configuration_files", "config.json", file));
        }
        let is_known = |code: &Value| {
            let class = code.as_str().and_then(|code| code.rsplit('.').next()).unwrap_or_default();
            let kinds = accepted.classes.iter().filter_map(|start| class.strip_prefix(start));
            kinds.into_iter().any(|kind| kind.starts_with("Model") || kind.starts_with("For"))
        };
        let mut code = self.auto_map.iter().flatten();
        match code.find(|(class, code)| class.starts_with("AutoModel") && !is_known(code)) {
            Some((_, code)) => {
                Err(unsupported("auto_map", "a model without custom code", &code.to_string()))
            }
            None => Ok(()),
        }
    }
}

/// Checks that each key of `expected` is absent or `null`, or has the expected value, which is JSON
/// text.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for another value; [`crate::FileError::Json`] for invalid
/// JSON.
pub(super) fn expect_values(json: &Json, expected: &[(&'static str, &'static str)]) -> Result<()> {
    let keys: serde_json::Map<String, Value> = json.to()?;
    for &(key, expected) in expected {
        let Some(got) = keys.get(key).filter(|got| !got.is_null()) else { continue };
        let is_equal = match (got.as_f64(), expected.parse::<f64>()) {
            (Some(got), Ok(expected)) => got == expected, // 1 and 1.0 are equal
            _ => serde_json::from_str(expected).is_ok_and(|value: Value| *got == value),
        };
        if !is_equal {
            return Err(Error::unsupported(json.path(), key, expected, got));
        }
    }
    Ok(())
}

/// Checks that no key of `expected` is absent or `null`. Each key is paired with the expected value
/// for the error message.
///
/// # Errors
/// [`crate::ConfigError::Unsupported`] for a missing key; [`crate::FileError::Json`] for invalid
/// JSON.
pub(super) fn require_keys(json: &Json, expected: &[(&'static str, &'static str)]) -> Result<()> {
    let keys: Value = json.to()?;
    match expected.iter().find(|(key, _)| keys[key].is_null()) {
        Some((key, expected)) => Err(Error::unsupported(json.path(), key, expected, "null")),
        None => Ok(()),
    }
}

/// Copies values from alternative keys to the keys that the parser reads. Each pair in `names` is
/// an alternative key and the parser's key. A value is copied only if the parser's key is absent or
/// `null`. Returns the new JSON.
///
/// # Errors
/// [`crate::FileError::Json`] for invalid JSON.
pub(super) fn with_renamed_keys(json: &Json, names: &[(&str, &str)]) -> Result<Json> {
    let mut keys: serde_json::Map<String, Value> = json.to()?;
    for (alternative, name) in names {
        if keys.get(*name).is_none_or(Value::is_null)
            && let Some(value) = keys.get(*alternative).cloned()
        {
            keys.insert(name.to_string(), value);
        }
    }
    Ok(Json::from_value(Value::Object(keys), json.path()))
}
