//! `sentence_bert_config.json`: settings that sentence-transformers passes to the transformer and
//! its tokenizer. Source: `Transformer` of sentence-transformers 6.2.

use std::num::NonZeroUsize;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    Error, Result,
    load::{ModelFolder, parse_value},
};

/// The current name of the file, then its older names. All have the same keys.
const FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// Arguments of `from_pretrained` that select how and from where a model is loaded. These arguments
/// are ignored, since the caller of this crate makes these choices.
const IGNORED_ARGUMENTS: [&str; 12] = [
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "local_files_only",
    "low_cpu_mem_usage",
    "revision",
    "token",
    "torch_dtype",
    "trust_remote_code",
    "use_fast",
    "use_safetensors",
];

/// Arguments of a tokenizer call that do not change the token ids.
const IGNORED_CALL_ARGUMENTS: [&str; 4] =
    ["pad_to_multiple_of", "padding_side", "return_tensors", "verbose"];

/// The Python class that is imitated when the settings files are read. Only the classes of
/// sentence-transformers read `sentence_bert_config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loader {
    /// The model and tokenizer classes, or a pipeline, of transformers.
    Transformers,
    /// `SentenceTransformer` of sentence-transformers.
    SentenceTransformer,
    /// `CrossEncoder` of sentence-transformers with a sequence classifier.
    CrossEncoder,
    /// `CrossEncoder` of sentence-transformers with a causal language model and a LogitScore.
    LogitScore,
    /// `SparseEncoder` of sentence-transformers.
    SparseEncoder,
    /// `MultiVectorEncoder` of sentence-transformers.
    MultiVectorEncoder,
}

/// The settings of `sentence_bert_config.json`.
#[derive(Debug, Default)]
pub(crate) struct SentenceConfig {
    /// The path of the file; empty if there is none.
    pub(crate) path: String,
    pub(crate) max_seq_length: Option<usize>,
    pub(crate) do_lower_case: bool,
    /// `max_length` of `processing_kwargs`, in tokens. It overrides the maximum lengths under other
    /// keys of the settings files.
    pub(crate) max_length: Option<usize>,
    /// Keys that override those of `tokenizer_config.json`.
    pub(crate) tokenizer: Map<String, Value>,
    /// The lengths of the queries and documents of a multi-vector model.
    pub(crate) lengths: TaskLengths,
    /// If set, a cross-encoder's chat template renders each pair.
    pub(crate) messages: Option<MessageSettings>,
}

/// How a chat template renders messages.
#[derive(Clone, Debug)]
pub(crate) struct MessageSettings {
    /// The form of a message's content; `None`: that of the template.
    pub(crate) format: Option<MessageFormat>,
    /// Variables of the template.
    pub(crate) variables: Map<String, Value>,
    /// Whether the end of the template is kept if a text is truncated.
    pub(crate) restore_suffix: bool,
}

impl Default for MessageSettings {
    fn default() -> Self {
        Self { format: None, variables: Map::new(), restore_suffix: true }
    }
}

/// The form of a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageFormat {
    /// The text.
    Flat,
    /// A list with one element: `{"type": "text", "text": …}`.
    Structured,
}

/// Arguments of `apply_chat_template` that are not variables of the template.
const TEMPLATE_ARGUMENTS: [&str; 15] = [
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
];

/// The maximum lengths of queries and documents, and the expansion of queries.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct TaskLengths {
    /// In tokens, special tokens and prompt included.
    pub(crate) query_length: Option<usize>,
    /// In tokens, special tokens and prompt included.
    pub(crate) document_length: Option<usize>,
    pub(crate) query_expansion: Option<QueryExpansion>,
}

/// How short queries are filled up with a token, whose vectors are scored too.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueryExpansion {
    pub(crate) strategy: ExpansionStrategy,
    /// Whether other tokens attend to the expansion tokens.
    #[serde(default)]
    pub(crate) attend: bool,
    /// `None`: the mask token.
    pub(crate) token: Option<String>,
    /// The number of tokens that queries are filled up to.
    pub(crate) length: NonZeroUsize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ExpansionStrategy {
    /// Queries are truncated to the length too.
    Fixed,
    /// Queries may be longer.
    Min,
}

/// Older and current names of keys. A value under the older name replaces the value under the
/// current name.
const OLDER_KEYS: [(&str, &str); 3] = [
    ("tokenizer_args", "processor_kwargs"),
    ("model_args", "model_kwargs"),
    ("config_args", "config_kwargs"),
];

/// The keys of `sentence_bert_config.json`. Keys of type `Value` must be null.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Keys {
    max_seq_length: Option<usize>,
    do_lower_case: Option<bool>,
    transformer_task: Option<String>,
    module_output_name: Option<String>,
    modality_config: Option<Map<String, Value>>,
    processing_kwargs: Option<ProcessingKwargs>,
    processor_kwargs: Option<Map<String, Value>>,
    model_kwargs: Option<Map<String, Value>>,
    config_kwargs: Option<Map<String, Value>>,
    query_length: Value,
    document_length: Value,
    query_expansion: Value,
    tokenizer_name_or_path: Value,
}

/// Arguments of the tokenizer call: for texts (`text`), and for inputs of all kinds (`common`); and
/// those of the call that renders messages (`chat_template`).
#[derive(Default, Deserialize)]
#[serde(default)]
struct ProcessingKwargs {
    text: Option<Map<String, Value>>,
    common: Option<Map<String, Value>>,
    chat_template: Option<Map<String, Value>>,
}

impl SentenceConfig {
    /// Reads the first file of [`FILES`] that exists and has keys; no file for
    /// [`Loader::Transformers`].
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if a file cannot be read or parsed;
    /// [`crate::ConfigError::Unsupported`] for a setting that is not implemented.
    pub(crate) fn from_files(files: &ModelFolder, loader: Loader) -> Result<Self> {
        let candidates = if loader == Loader::Transformers { &FILES[..0] } else { &FILES[..] };
        for file in candidates {
            let mut json: Map<String, Value> = files.json(file)?.unwrap_or_default();
            if !json.is_empty() {
                for (older, current) in OLDER_KEYS {
                    if let Some(value) = json.remove(older) {
                        json.insert(current.to_string(), value);
                    }
                }
                let path = files.path(file);
                let keys: Keys = parse_value(Value::Object(json), &path)?;
                return Self::new(keys, loader, path);
            }
        }
        if loader == Loader::LogitScore {
            return Err(no_task(files.path(FILES[0])));
        }
        Ok(Self::default())
    }

    fn new(keys: Keys, loader: Loader, path: String) -> Result<Self> {
        let unsupported =
            |key, expected, got: String| Error::unsupported(path.clone(), key, expected, got);
        let (task, output, name, modality) = match loader {
            Loader::CrossEncoder => (
                "sequence-classification",
                "logits",
                "scores",
                "only text and messages, with the method forward and the output logits",
            ),
            Loader::LogitScore => (
                LOGIT_SCORE_TASK,
                "logits",
                "causal_logits",
                "only text and messages, with the method forward and the output logits",
            ),
            Loader::SparseEncoder => (
                "fill-mask",
                "logits",
                "token_embeddings",
                "only text, with the method forward and the output logits",
            ),
            _ => (
                "feature-extraction",
                "last_hidden_state",
                "token_embeddings",
                "only text, with the method forward and the output last_hidden_state",
            ),
        };
        match keys.transformer_task {
            None if loader == Loader::LogitScore => return Err(no_task(path)),
            Some(got) if got != task => return Err(unsupported("transformer_task", task, got)),
            _ => {}
        }
        if let Some(got) = keys.module_output_name.filter(|got| got != name) {
            return Err(unsupported("module_output_name", name, got));
        }
        let takes_messages = [Loader::CrossEncoder, Loader::LogitScore].contains(&loader);
        let mut modalities = keys.modality_config.unwrap_or_default();
        if !are_texts(&modalities, output, takes_messages) {
            let got = Value::from(modalities).to_string();
            return Err(unsupported("modality_config", modality, got));
        }
        let format = modalities.remove("message").map(|mut message| message["format"].take());
        let format = format.map(|format| match format.as_str() {
            _ if format.is_null() => Ok(None),
            Some("auto") => Ok(None),
            Some("flat") => Ok(Some(MessageFormat::Flat)),
            Some("structured") => Ok(Some(MessageFormat::Structured)),
            _ => Err(unsupported("format", "flat, structured or auto", format.to_string())),
        });
        let format = format.transpose()?;
        let lengths = [
            ("query_length", keys.query_length),
            ("document_length", keys.document_length),
            ("query_expansion", keys.query_expansion),
        ];
        let are_used = loader == Loader::MultiVectorEncoder;
        let unused = lengths.iter().filter(|_| !are_used).map(|(key, value)| (*key, value));
        for (key, value) in unused.chain([("tokenizer_name_or_path", &keys.tokenizer_name_or_path)])
        {
            if !value.is_null() {
                return Err(unsupported(key, "the key to be absent", value.to_string()));
            }
        }
        let lengths = lengths.map(|(key, value)| (key.to_string(), value));
        let lengths = parse_value(Value::Object(lengths.into_iter().collect()), &path)?;
        for (key, arguments) in [
            ("model_kwargs (or model_args)", &keys.model_kwargs),
            ("config_kwargs (or config_args)", &keys.config_kwargs),
        ] {
            let arguments = arguments.iter().flatten();
            if let Some((name, value)) =
                arguments.into_iter().find(|(name, _)| !IGNORED_ARGUMENTS.contains(&&name[..]))
            {
                return Err(unsupported(
                    key,
                    "no arguments that change the model",
                    format!("{name}: {value}"),
                ));
            }
        }
        let processing = keys.processing_kwargs.unwrap_or_default();
        let mut max_length = None;
        for (name, value) in processing.text.iter().chain(&processing.common).flatten() {
            let is_implemented = match name.as_str() {
                "max_length" => {
                    max_length = value.as_u64().map(|length| length as usize);
                    value.is_u64() || value.is_null()
                }
                "truncation" => *value == true || *value == "longest_first",
                "padding" => *value == true || *value == "longest",
                "add_special_tokens" | "return_attention_mask" | "return_token_type_ids" => {
                    *value == true
                }
                name => IGNORED_CALL_ARGUMENTS.contains(&name),
            };
            if !is_implemented {
                let expected =
                    "a max_length in tokens, and the default value of every other argument";
                return Err(unsupported("processing_kwargs", expected, format!("{name}: {value}")));
            }
        }
        let mut messages = format.map(|format| MessageSettings { format, ..Default::default() });
        if let Some(messages) = &mut messages {
            let mut variables = processing.chat_template.unwrap_or_default();
            let refused = |(name, value): &(&String, &Value)| {
                TEMPLATE_ARGUMENTS.contains(&&name[..]) && !value.is_null()
            };
            if let Some((name, value)) = variables.iter().find(refused) {
                let expected = "chat_template with restore_suffix, add_generation_prompt and other \
                                variables of the template";
                return Err(unsupported("processing_kwargs", expected, format!("{name}: {value}")));
            }
            variables.retain(|name, _| !TEMPLATE_ARGUMENTS.contains(&&name[..]));
            match variables.remove("restore_suffix") {
                None => {}
                Some(Value::Bool(restore)) => messages.restore_suffix = restore,
                Some(got) => {
                    let got = format!("restore_suffix: {got}");
                    return Err(unsupported("processing_kwargs", "true or false", got));
                }
            }
            messages.variables = variables;
        }
        let mut tokenizer = keys.processor_kwargs.unwrap_or_default();
        tokenizer.retain(|name, _| !IGNORED_ARGUMENTS.contains(&&name[..]));
        let refused =
            |(name, value): &(&String, &Value)| *name == "tokenizer_class" || value.is_null();
        if let Some((name, value)) = tokenizer.iter().find(refused) {
            let expected = "keys other than tokenizer_class, with values other than null";
            return Err(unsupported(
                "processor_kwargs (or tokenizer_args)",
                expected,
                format!("{name}: {value}"),
            ));
        }
        Ok(Self {
            max_seq_length: keys.max_seq_length,
            do_lower_case: keys.do_lower_case.unwrap_or(false),
            max_length,
            tokenizer,
            lengths,
            messages,
            path,
        })
    }
}

/// The task of a causal language model, whose logits a LogitScore reads.
const LOGIT_SCORE_TASK: &str = "text-generation";

/// The error for a file that does not name the task of a causal language model.
fn no_task(path: String) -> Error {
    Error::unsupported(path, "transformer_task", LOGIT_SCORE_TASK, "(absent)")
}

/// Whether text is the only modality, or messages are another if `takes_messages`, their method is
/// `forward`, and the method's output is `output`.
fn are_texts(modalities: &Map<String, Value>, output: &str, takes_messages: bool) -> bool {
    modalities.iter().all(|(name, params)| {
        (name == "text" || (takes_messages && name == "message"))
            && params["method"] == "forward"
            && params["method_output_name"] == output
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelFiles;

    fn read(json: &str) -> std::result::Result<SentenceConfig, String> {
        let json = json.as_bytes().to_vec();
        let files = ModelFiles::memory("m", [("sentence_bert_config.json", json)]);
        let loader = Loader::SentenceTransformer;
        SentenceConfig::from_files(&ModelFolder::new(&files), loader)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn maximum_lengths_and_tokenizer_settings_are_read() {
        let config = read(
            r#"{"max_seq_length": 7, "do_lower_case": true,
                "transformer_task": "feature-extraction",
                "processing_kwargs": {"text": {"max_length": 6, "truncation": true}},
                "tokenizer_args":
                    {"truncation_side": "left", "trust_remote_code": true, "cache_dir": null},
                "modality_config":
                    {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "module_output_name": "token_embeddings", "model_args": {"torch_dtype": "float16"},
                "query_length": null, "unpad_inputs": true}"#,
        )
        .unwrap();
        assert_eq!((config.max_seq_length, config.max_length), (Some(7), Some(6)));
        assert!(config.do_lower_case);
        assert_eq!(Value::from(config.tokenizer).to_string(), r#"{"truncation_side":"left"}"#);
    }

    #[test]
    fn unimplemented_settings_are_errors_that_name_the_key() {
        for (json, setting) in [
            (r#"{"processing_kwargs": {"text": {"truncation": false}}}"#, "truncation: false"),
            (r#"{"processing_kwargs": {"common": {"stride": 2}}}"#, "stride: 2"),
            (
                r#"{"config_args": {"num_hidden_layers": 1}}"#,
                "config_kwargs (or config_args) num_hidden_layers: 1",
            ),
            (r#"{"model_kwargs": {"output_attentions": true}}"#, "output_attentions: true"),
            (r#"{"processing_kwargs": {"text": {"padding": "max_length"}}}"#, "padding: "),
            (
                r#"{"processing_kwargs": {"text": {"return_token_type_ids": false}}}"#,
                "return_token_type_ids: false",
            ),
            (r#"{"query_length": 32}"#, "query_length 32"),
            (r#"{"tokenizer_name_or_path": "x"}"#, "tokenizer_name_or_path"),
            (r#"{"transformer_task": "fill-mask"}"#, "transformer_task fill-mask"),
            (r#"{"modality_config": {"image": {"method": "forward"}}}"#, "modality_config"),
            (r#"{"module_output_name": "sentence_embedding"}"#, "module_output_name"),
        ] {
            let error = read(json).unwrap_err();
            assert!(error.starts_with("m/sentence_bert_config.json: "), "{error}");
            assert!(error.contains(" is not supported: expected "), "{error}");
            assert!(error.contains(setting), "{error}");
        }
    }
}
