//! Chat templates: the text of a query and a document for a reranker that is a language model.
//!
//! A template is a Jinja program in the tokenizer's files. It is rendered with the settings of
//! `apply_chat_template` of transformers 5.23, and the result is tokenized and truncated as by
//! `CrossEncoder` of sentence-transformers 6.2.

use std::{collections::BTreeMap, fmt, fmt::Write as _, io, sync::Arc};

use minijinja::{
    Environment, ErrorKind, UndefinedBehavior,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde, ValueKind},
};
use rayon::prelude::*;
use serde_json::{Map, Value};

use crate::{
    ConfigError, Result, TextTokenizer, Tokens,
    load::ModelFolder,
    text::{
        sentence_config::{Loader, MessageFormat, MessageSettings, SentenceConfig},
        tokenizer::Count,
        tokenizer_config::CONFIG,
    },
};

const FILE: &str = "chat_template.jinja";
/// The key of `tokenizer_config.json` and of `processor_kwargs`.
const KEY: &str = "chat_template";

/// The source of a chat template.
#[derive(Debug)]
pub(crate) struct TemplateSource {
    /// The path of the file.
    pub(crate) path: String,
    /// The template, or why there is none.
    source: std::result::Result<String, String>,
}

impl TemplateSource {
    /// The template of a tokenizer's files: the first of `processor_kwargs` in
    /// `sentence_bert_config.json`, `chat_template.jinja` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`crate::FileError::Io`] or [`crate::FileError::Json`] if a file cannot be read or parsed;
    /// [`ConfigError::ChatTemplate`] for a template that is not UTF-8.
    pub(crate) fn find(files: &ModelFolder, sentence: &SentenceConfig) -> Result<Option<Self>> {
        if let Some(template) = sentence.tokenizer.get(KEY) {
            return Ok(Some(Self::of_value(template, &sentence.path)));
        }
        let path = files.path(FILE);
        if let Some(bytes) = files.read(FILE)? {
            return match String::from_utf8(bytes.into_owned()) {
                Ok(source) => Ok(Some(Self { path, source: Ok(source) })),
                Err(error) => {
                    Err(ConfigError::ChatTemplate { path, what: error.to_string() }.into())
                }
            };
        }
        let config: Map<String, Value> = files.json(CONFIG)?.unwrap_or_default();
        let template = config.get(KEY).filter(|template| !template.is_null());
        Ok(template.map(|template| Self::of_value(template, &files.path(CONFIG))))
    }

    /// A template, or the one of several that is called `default`: `{name: template}` or a list of
    /// `{"name", "template"}`.
    fn of_value(value: &Value, path: &str) -> Self {
        let default = match value {
            Value::Object(templates) => templates.get("default"),
            Value::Array(templates) => {
                let named = templates.iter().rev().find(|entry| entry["name"] == "default");
                named.map(|entry| &entry["template"])
            }
            template => Some(template),
        };
        let source = default.and_then(Value::as_str).map(String::from);
        let source = source.ok_or_else(|| {
            "it is neither a template nor a set of templates with one called default".to_string()
        });
        Self { path: path.to_string(), source }
    }

    /// The absent template of a model whose settings in the file at `path` need one.
    fn missing(path: &str) -> Self {
        Self { path: path.to_string(), source: Err("the model has no chat template".to_string()) }
    }
}

/// A chat template, compiled, with the variables of a model.
#[derive(Clone)]
pub(crate) struct ChatTemplate {
    path: String,
    /// The error is the reason why the template cannot render pairs.
    program: std::result::Result<Arc<Program>, String>,
}

/// Prints the path, not the program.
impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The program of a template.
struct Program {
    environment: Environment<'static>,
    format: MessageFormat,
    /// All variables except `messages`.
    variables: BTreeMap<String, minijinja::Value>,
    /// The names that the template uses and that are not defined.
    undefined: Vec<String>,
    restore_suffix: bool,
}

/// The number of steps of a template, so that rendering ends.
const MAX_STEPS: u64 = 1_000_000;

/// The maximum number of bytes of a rendered text beside eight times those of the prompt and the
/// pair.
const MAX_RENDERED: usize = 1 << 20;

/// A writer that takes at most `max` bytes.
struct Bounded {
    bytes: Vec<u8>,
    max: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max {
            let message = format!("the text has more than {} bytes", self.max);
            return Err(io::Error::other(message));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The name of the compiled template, which errors mention with a line.
const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The template that renders the pairs of a cross-encoder: that of a model whose settings have
    /// messages, or of any model without `modules.json`. `files` are those of the transformer.
    ///
    /// # Errors
    /// The errors of [`SentenceConfig::from_files`] and [`TemplateSource::find`].
    pub(crate) fn of_pairs(
        files: &ModelFolder,
        loader: Loader,
        has_modules: bool,
        tokenizer: &TextTokenizer,
    ) -> Result<Option<Self>> {
        let sentence = SentenceConfig::from_files(files, loader)?;
        let settings = match &sentence.messages {
            None if has_modules => return Ok(None),
            settings => settings.clone().unwrap_or_default(),
        };
        let missing = || has_modules.then(|| TemplateSource::missing(&sentence.path));
        let source = TemplateSource::find(files, &sentence)?.or_else(missing);
        Ok(source.map(|source| Self::new(source, &settings, tokenizer)))
    }

    /// Compiles a template, and renders pairs to check that both texts of a pair are in the result.
    fn new(source: TemplateSource, settings: &MessageSettings, tokenizer: &TextTokenizer) -> Self {
        let program = source.source.and_then(|source| Program::new(source, settings, tokenizer));
        Self { path: source.path, program: program.map(Arc::new) }
    }

    /// # Errors
    /// [`ConfigError::ChatTemplate`] for a template that cannot render pairs.
    fn program(&self) -> Result<&Program> {
        self.program.as_deref().map_err(|what| self.error(what.clone()))
    }

    /// Checks that the template can render pairs.
    ///
    /// # Errors
    /// [`ConfigError::ChatTemplate`] if it cannot.
    pub(crate) fn check(&self) -> Result<()> {
        self.program().map(|_| ())
    }

    fn error(&self, what: String) -> crate::Error {
        ConfigError::ChatTemplate { path: self.path.clone(), what }.into()
    }

    /// The tokens of pairs of a query and a document. The prompt is a system message, unless it is
    /// empty. If a text is too long, the end of the template replaces the last of its tokens.
    ///
    /// # Errors
    /// [`ConfigError::ChatTemplate`] for a template that cannot render a pair; the errors of
    /// [`TextTokenizer::encode`].
    pub(crate) fn encode(
        &self,
        tokenizer: &TextTokenizer,
        prompt: &str,
        pairs: &[(&str, &str)],
    ) -> Result<Vec<Tokens>> {
        let program = self.program()?;
        let max = tokenizer.max_seq_length();
        let encode = |&(query, document): &(&str, &str)| {
            let text = program.render(prompt, query, document).map_err(|e| self.error(e))?;
            tokenizer.encode_bare_within(&text, max, Count::Kept)
        };
        let mut all = pairs.par_iter().map(encode).collect::<Result<Vec<_>>>()?;
        // A sequence of the maximum length may have been truncated.
        if program.restore_suffix && all.iter().any(|tokens| tokens.input_ids.len() >= max) {
            let suffix = program.suffix(tokenizer, prompt);
            for tokens in all.iter_mut().filter(|tokens| tokens.input_ids.len() >= max) {
                let ids = &mut tokens.input_ids;
                let kept = suffix.len().min(ids.len());
                let start = ids.len() - kept;
                ids[start..].copy_from_slice(&suffix[suffix.len() - kept..]);
            }
        }
        Ok(all)
    }
}

impl Program {
    fn new(
        source: String,
        settings: &MessageSettings,
        tokenizer: &TextTokenizer,
    ) -> std::result::Result<Self, String> {
        let mut variables: BTreeMap<String, minijinja::Value> = BTreeMap::new();
        for (key, token) in tokenizer.special_tokens_map() {
            variables.insert(key.to_string(), token.as_str().into());
        }
        for key in ["tools", "documents"] {
            variables.insert(key.to_string(), ().into());
        }
        variables.insert("add_generation_prompt".to_string(), false.into());
        for (key, value) in &settings.variables {
            variables.insert(key.clone(), Serde(value).into());
        }
        let format = settings.format.unwrap_or_else(|| format_of(&source));
        let mut environment = environment().map_err(|error| describe(&error))?;
        environment.add_template_owned(NAME, source).map_err(|error| describe(&error))?;
        let template = environment.get_template(NAME).map_err(|error| describe(&error))?;
        let is_defined = |name: &str| {
            name == "messages"
                || variables.contains_key(name)
                || environment.globals().any(|(global, _)| global == name)
        };
        let mut undefined: Vec<String> = template.undeclared_variables(false).into_iter().collect();
        undefined.retain(|name| !is_defined(name));
        undefined.sort();
        // A template may ask for a special token that the tokenizer lacks: Jinja renders nothing.
        // Another variable that is absent is an argument of the caller's.
        let are_tokens = undefined.iter().all(|name| name.ends_with("_token"));
        environment.set_undefined_behavior(match are_tokens {
            true => UndefinedBehavior::Lenient,
            false => UndefinedBehavior::SemiStrict,
        });
        let restore_suffix = settings.restore_suffix;
        let program = Self { environment, format, variables, undefined, restore_suffix };
        program.check_roles()?;
        Ok(program)
    }

    /// Checks that a change of the query, and one of the document, change the result.
    fn check_roles(&self) -> std::result::Result<(), String> {
        let base = self.render("", "alpha", "bravo")?;
        for (role, query, document) in
            [("query", "charlie", "bravo"), ("document", "alpha", "foxtrot")]
        {
            if self.render("", query, document)? == base {
                return Err(format!(
                    "it does not render the message with the role {role}: expected a template for \
                     the roles query and document"
                ));
            }
        }
        Ok(())
    }

    /// The text of a pair.
    fn render(
        &self,
        prompt: &str,
        query: &str,
        document: &str,
    ) -> std::result::Result<String, String> {
        let message = |role: &str, text: &str| {
            let content = match self.format {
                MessageFormat::Flat => text.into(),
                MessageFormat::Structured => {
                    let part = [("type", "text"), ("text", text)];
                    minijinja::Value::from_iter([minijinja::Value::from_pairs(part)])
                }
            };
            minijinja::Value::from_pairs([("role", role.into()), ("content", content)])
        };
        let system = (!prompt.is_empty()).then(|| message("system", prompt));
        let pair = [message("query", query), message("document", document)];
        let mut variables = self.variables.clone();
        variables.insert("messages".to_string(), system.into_iter().chain(pair).collect());
        let max = MAX_RENDERED + 8 * (prompt.len() + query.len() + document.len());
        let mut out = Bounded { bytes: vec![], max };
        let template = self.environment.get_template(NAME);
        let rendered =
            template.and_then(|template| template.render_captured_to(variables, &mut out));
        let text = rendered.map(|_| String::from_utf8_lossy(&out.bytes).into_owned());
        text.map_err(|error| {
            let mut what = describe(&error);
            if error.kind() == ErrorKind::UndefinedError && !self.undefined.is_empty() {
                let _ = write!(what, "; not defined: {}", self.undefined.join(", "));
            }
            what
        })
    }

    /// The tokens at the end of the text of every pair: those that two pairs have in common. None
    /// if a pair cannot be rendered.
    fn suffix(&self, tokenizer: &TextTokenizer, prompt: &str) -> Vec<u32> {
        let tokens = |text: &str| {
            let rendered = self.render(prompt, text, text).ok()?;
            tokenizer.encode_bare(&rendered).ok()
        };
        let (Some(mut first), Some(second)) = (tokens("0"), tokens("1 2 3 4")) else {
            return vec![];
        };
        let pairs = first.iter().rev().zip(second.iter().rev());
        let count = pairs.take_while(|(a, b)| a == b).count();
        if count == first.len().min(second.len()) {
            return vec![]; // the texts are not in the result
        }
        first.split_off(first.len() - count)
    }
}

/// The form of the content that a template expects.
fn format_of(template: &str) -> MessageFormat {
    let structured = ["content[0]", ".type", "'type'", "\"type\"", "item.type", "message.content["];
    if structured.iter().any(|pattern| template.contains(pattern)) {
        MessageFormat::Structured
    } else {
        MessageFormat::Flat
    }
}

/// The message of an error, and those of the errors that caused it.
fn describe(error: &minijinja::Error) -> String {
    let mut what = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        let _ = write!(what, ": {error}");
        source = error.source();
    }
    what
}

/// Jinja with the settings, functions and filters of transformers.
fn environment() -> std::result::Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| {
        Err::<(), _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        let mut now = String::new();
        match write!(now, "{}", chrono::Local::now().format(&format)) {
            Ok(()) => Ok(now),
            Err(_) => {
                let message = format!("strftime_now: the format {format:?} is not supported");
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            }
        }
    });
    environment.add_filter("tojson", to_json);
    // In Python, texts and dictionaries are sequences too.
    environment.add_test("sequence", |value: &minijinja::Value| {
        let kinds = [ValueKind::String, ValueKind::Bytes, ValueKind::Seq, ValueKind::Map];
        value.is_undefined() || kinds.contains(&value.kind())
    });
    Ok(environment)
}

/// `tojson` of transformers: `json.dumps` of Python. `indent` is a number of spaces.
fn to_json(
    value: minijinja::Value,
    options: Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let value = serde_json::to_value(&value).map_err(|error| {
        minijinja::Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"))
    })?;
    let (item, key) = match separators.as_deref() {
        None => ((if indent.is_some() { "," } else { ", " }).to_string(), ": ".to_string()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            let message = "tojson: separators: expected two texts";
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    let json = ToJson { indent, ascii: ascii == Some(true), sort: sort == Some(true), item, key };
    let mut out = String::new();
    json.write(&value, 0, &mut out);
    Ok(out)
}

/// The options of [`to_json`].
struct ToJson {
    indent: Option<usize>,
    ascii: bool,
    sort: bool,
    /// Between the items of a list.
    item: String,
    /// Between a key and its value.
    key: String,
}

impl ToJson {
    /// Appends a value. `depth` is the number of lists and objects around it.
    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::String(text) => self.text(text, out),
            Value::Array(values) => {
                self.list(values.iter(), ['[', ']'], depth, out, |value, out| {
                    self.write(value, depth + 1, out);
                });
            }
            Value::Object(map) => {
                let mut entries: Vec<(&String, &Value)> = map.iter().collect();
                if self.sort {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.list(entries.into_iter(), ['{', '}'], depth, out, |(key, value), out| {
                    self.text(key, out);
                    out.push_str(&self.key);
                    self.write(value, depth + 1, out);
                });
            }
            value => out.push_str(&value.to_string()),
        }
    }

    fn list<T>(
        &self,
        items: impl ExactSizeIterator<Item = T>,
        [open, close]: [char; 2],
        depth: usize,
        out: &mut String,
        write: impl Fn(T, &mut String),
    ) {
        let is_empty = items.len() == 0;
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent.filter(|_| !is_empty) {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(open);
        for (i, item) in items.enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            new_line(depth + 1, out);
            write(item, out);
        }
        new_line(depth, out);
        out.push(close);
    }

    fn text(&self, text: &str, out: &mut String) {
        let quoted = Value::from(text).to_string();
        if !self.ascii {
            out.push_str(&quoted);
            return;
        }
        for c in quoted.chars() {
            if c.is_ascii() && c != '\u{7f}' {
                out.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ModelConfig, ModelFiles};

    fn tokenizer() -> Result<TextTokenizer> {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let files = ModelFiles::dir(format!("{root}/tests/golden/decoders/rerank/qwen3"))?;
        let config = ModelConfig::from_json(&files.need("config.json", "sizes")?, "config.json")?;
        TextTokenizer::from_files(&files, &config)
    }

    fn program(template: &str, settings: &MessageSettings) -> std::result::Result<Program, String> {
        Program::new(template.to_string(), settings, &tokenizer().unwrap())
    }

    /// The expected texts are those of `render_jinja_template` of transformers 5.23.
    #[test]
    fn templates_render_as_in_transformers() {
        let variables = serde_json::from_str(r#"{"yes": true, "list": [1.5, "a"]}"#).unwrap();
        let settings = MessageSettings { variables, ..Default::default() };
        for (template, expected) in [
            (
                "{% for m in messages %}\n    {% if loop.first %}<{% endif %}\n  {{ m.role }}: \
                 {{ m.content }}\n{% endfor %}\nend\n",
                "<  query:  é a\nq 𝄞\n  document: doc two \"x\" \nend",
            ),
            (
                "{{ messages[0] | tojson }}\n{{ messages[1:] | tojson(indent=2) }}\n\n",
                "{\"role\": \"query\", \"content\": \" é a\\nq 𝄞\"}\n[\n  {\n    \"role\": \
                 \"document\",\n    \"content\": \"doc two \\\"x\\\" \"\n  }\n]\n",
            ),
            (
                "{{ messages[0].content | tojson(ensure_ascii=true) }}\
                 {{ messages[1] | tojson(separators=(',', ':'), sort_keys=true) }}",
                "\" \\u00e9 a\\nq \\ud834\\udd1e\"{\"content\":\"doc two \\\"x\\\" \",\
                 \"role\":\"document\"}",
            ),
            (
                "{{ none }} {{ 1.0 }} {{ tools }} {{ yes }} {{ list }}{{ bos_token }}|\
                 {{ messages[0].name }}|{{ messages[0].content ~ messages[1].content }}",
                "None 1.0 None True [1.5, 'a']|| é a\nq 𝄞doc two \"x\" ",
            ),
            (
                "{% for m in messages[::-1] %}{% if m.content is string %}\
                 {{ m.content | upper | trim }}{% endif %}{% if m.content is sequence %}s\
                 {% endif %}{% if m is mapping %}m{% endif %}{% endfor %}",
                "DOC TWO \"X\"smÉ A\nQ 𝄞sm",
            ),
            (
                "{%- macro show(m) -%}\n[{{ m.role ~ '=' ~ m.content }}]\n{%- endmacro -%}\n\
                 {{ show(messages[0]) }}\n{{- show(messages[1]) -}}\n",
                "[query= é a\nq 𝄞][document=doc two \"x\" ]",
            ),
            (
                "{% for k, v in messages[0].items() %}{{ k }}:{{ v }};{% endfor %}\
                 {{ messages[1].get('x', 'none') }}{{ messages[1].get('content') }}",
                "role:query;content: é a\nq 𝄞;nonedoc two \"x\" ",
            ),
            (
                "{{ messages[0]['content'].strip() }}|{{ messages[-1].content.split(' ')[1] }}|\
                 {{ messages[1].content.replace('o', '0').rstrip() }}{{ eos_token }}",
                "é a\nq 𝄞|two|d0c tw0 \"x\"<|im_end|>",
            ),
        ] {
            let program = program(template, &settings).unwrap();
            assert_eq!(program.render("", " é a\nq 𝄞", "doc two \"x\" ").unwrap(), expected);
        }
    }

    #[test]
    fn a_prompt_is_the_system_message() {
        let template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}";
        let flat = program(template, &MessageSettings::default()).unwrap();
        assert_eq!(flat.render("p", "q", "d").unwrap(), "system p\nquery q\ndocument d\n");
        // The template decides the form of the content.
        let template = "{% for m in messages %}{{ m.content[0].text }}\n{% endfor %}";
        let structured = program(template, &MessageSettings::default()).unwrap();
        assert_eq!(structured.render("p", "q", "d").unwrap(), "p\nq\nd\n");
    }

    #[test]
    fn what_a_template_lacks_is_named() {
        let pair = "{{ messages[0].content }}{{ messages[1].content }}";
        for (template, expected) in [
            ("{{ messages[1].content }}", "it does not render the message with the role query: "),
            ("{{ messages[0].content }}", "it does not render the message with the role document"),
            ("{{ now() }}", "unknown function: now is unknown (in chat_template:1)"),
            ("\n{{ messages | wordcount }}", "filter wordcount is unknown (in chat_template:2)"),
            ("{{ messages is audio }}", "test audio is unknown"),
            ("{{ messages[0].content.encode() }}", "encode"),
            ("{% generation %}{% endgeneration %}", "generation"),
            ("{{ instruction }}", "; not defined: instruction"),
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{% include 'x' %}", "unknown statement include"),
            ("{{ messages[0].content", "unexpected end"),
            (
                "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
                "fuel",
            ),
            (
                "{% for a in range(9999) %}{{ messages[0].content }}{{ 'a' * 9999 }}{% endfor %}",
                "the text has more than",
            ),
        ] {
            let template = match template.starts_with("{{ messages[") {
                true => template.to_string(),
                false => format!("{template}{pair}"),
            };
            let error = program(&template, &MessageSettings::default()).err().unwrap();
            assert!(error.contains(expected), "{template}: {error}");
        }
        let optional = format!("{{% if thinking is defined %}}x{{% endif %}}{pair}");
        assert!(program(&optional, &MessageSettings::default()).is_ok());
    }
}
