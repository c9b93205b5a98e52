//! Checks docs/settings.md: sets each listed key to its example in small models, and compares the
//! models' output with the output without the key.

use std::collections::BTreeMap;

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{
    CausalLm, EmbedOptions, Embedder, EncoderDecoder, GenerateConfig, Inspection, LoadOptions,
    MaskFiller, ModelFiles, Pooling, PoolingMode, Prompt, TextClassifier,
};
use serde_json::{Value, json};

use crate::support::golden;

/// Texts that cover all tokenizer settings: each setting changes the tokens of at least one text.
const TEXTS: [&str; 6] =
    ["a bad cab", "A CAFÉ b東a", "ab ba cb", "a [SEP] b [PAD] c [MASK]", "ÿ", ""];

type Files = BTreeMap<String, Vec<u8>>;

/// A small model.
struct Probe {
    files: Files,
    /// Loads the model and formats its output.
    run: fn(&ModelFiles) -> Result<String, encoder::Error>,
}

impl Probe {
    /// The formatted output, or the message of the error.
    fn outcome(&self, files: &Files) -> Result<String, String> {
        (self.run)(&ModelFiles::memory("m", files.clone())).map_err(|error| error.to_string())
    }

    /// The files, with `key` of `file` set to `value`.
    fn with(&self, file: &str, key: &str, value: &Value) -> Files {
        let mut files = self.files.clone();
        let mut json: Value =
            files.get(file).map_or(json!({}), |json| serde_json::from_slice(json).unwrap());
        let mut target = match &mut json {
            Value::Array(entries) => entries.last_mut().expect("at least one entry"),
            object => object,
        };
        for part in key.split('.') {
            target = &mut target[part];
        }
        *target = value.clone();
        files.insert(file.to_string(), json.to_string().into_bytes());
        files
    }
}

/// The files of a folder in `tests/golden`.
fn folder(name: &str) -> Files {
    let files = ["config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"];
    let read = |file: &str| Some((file.to_string(), std::fs::read(golden(name).join(file)).ok()?));
    files.iter().filter_map(|file| read(file)).collect()
}

fn entry(class: &str, path: &str) -> Value {
    json!({"type": format!("sentence_transformers.models.{class}"), "path": path})
}

/// A sentence-transformers folder with every kind of module.
fn embedder() -> Probe {
    let mut files = folder("heads/score");
    // Both settings differ from their defaults, unlike in the other models.
    let cased = br#"{"do_lower_case": false, "strip_accents": true}"#;
    files.insert("tokenizer_config.json".to_string(), cased.to_vec());
    let modules = json!([
        entry("Transformer", ""),
        entry("Pooling", "1_Pooling"),
        entry("Dense", "2_Dense"),
        entry("Normalize", "3_Normalize")
    ]);
    let weights =
        [("linear.weight", vec![24, 24]), ("linear.bias", vec![24])].map(|(name, shape)| {
            let n = shape.iter().product::<usize>() as f32;
            let values = Tensor::arange(0f32, n, &Cpu).and_then(|x| x.reshape(shape)).unwrap();
            (name, (values * 1.7).unwrap().sin().unwrap().to_dtype(DType::F32).unwrap())
        });
    let mut file = |name: &str, bytes: Vec<u8>| files.insert(name.to_string(), bytes);
    file("modules.json", modules.to_string().into_bytes());
    file("1_Pooling/config.json", br#"{"embedding_dimension": 24}"#.to_vec());
    file("2_Dense/config.json", br#"{"in_features": 24, "out_features": 24}"#.to_vec());
    file("2_Dense/model.safetensors", safetensors::serialize(weights, None).unwrap());
    Probe { files, run: embed }
}

/// Embeds [`TEXTS`], and a text longer than the maximum length, with four kinds of prompt.
fn embed(files: &ModelFiles) -> Result<String, encoder::Error> {
    let embedder = Embedder::from_files(files, &LoadOptions::default())?;
    let long = "ab cd ef gh ".repeat(12);
    let texts = [&TEXTS[..], &[&long]].concat();
    let mut outcome = format!("{:?}", embedder.prompt_names().collect::<Vec<_>>());
    for prompt in [Prompt::Default, Prompt::Query, Prompt::Document, Prompt::Text("bad ")] {
        let options = EmbedOptions::new().with_prompt(prompt);
        for text in &texts {
            let embeddings = embedder.embed_with(&[text], options)?;
            let vectors = embeddings.vectors.to_vec2::<f32>()?;
            outcome += &format!("{vectors:?} {:?}", embeddings.truncated);
        }
    }
    Ok(outcome)
}

/// A cross-encoder as sentence-transformers 6 saves it.
fn cross_encoder() -> Probe {
    let mut files = folder("heads/score");
    files.remove("tokenizer_config.json"); // it sets tokenizer_class
    let modules = json!([entry("Transformer", "")]);
    files.insert("modules.json".to_string(), modules.to_string().into_bytes());
    let settings = br#"{"model_type": "CrossEncoder", "prompts": {"document": "b "}}"#;
    files.insert("config_sentence_transformers.json".to_string(), settings.to_vec());
    Probe { files, run: rank }
}

/// Ranks [`TEXTS`], and a text longer than the maximum length, for one query.
fn rank(files: &ModelFiles) -> Result<String, encoder::Error> {
    let model = TextClassifier::from_files(files, &LoadOptions::default())?;
    let long = "ab cd ef gh ".repeat(12);
    let documents = [&TEXTS[..], &[&long]].concat();
    let scores = model.rerank("bad [SEP] ab", &documents)?;
    Ok(format!("{scores:?} {:?}", model.prompt_names().collect::<Vec<_>>()))
}

/// A model without files of sentence-transformers, as a cross-encoder and with mean pooling.
fn plain() -> Probe {
    Probe {
        files: folder("heads/score"),
        run: |files| {
            let pooling = Pooling::from(PoolingMode::Mean);
            let embedder = Embedder::from_transformer(files, pooling, &LoadOptions::default())?;
            Ok(format!("{} {:?}", rank(files)?, embedder.embed(&TEXTS)?.to_vec2::<f32>()?))
        },
    }
}

fn classifier() -> Probe {
    Probe {
        files: folder("heads/sequence"),
        run: |files| {
            let model = TextClassifier::from_files(files, &LoadOptions::default())?;
            let scores = model.classify(&TEXTS)?;
            Ok(format!("{scores:?} {:?} {:?}", model.labels(), Inspection::new(files).runs_as))
        },
    }
}

fn masked_lm() -> Probe {
    Probe {
        files: folder("heads/masked_lm"),
        run: |files| {
            let model = MaskFiller::from_files(files, &LoadOptions::default())?;
            Ok(format!("{:?}", model.fill("a bad [MASK] cab", 3)?))
        },
    }
}

fn decoder() -> Probe {
    Probe {
        files: folder("bert_lm"),
        run: |files| {
            let (model, _) = CausalLm::from_files(files, &LoadOptions::default())?;
            let ids = Tensor::new(&[[7u32, 5, 9, 3]], &Cpu)?;
            let (logits, _) = model.forward_with_attentions(&ids, None, None)?;
            Ok(format!("{:?}", logits.flatten_all()?.to_vec1::<f32>()?))
        },
    }
}

fn encoder_decoder() -> Probe {
    Probe {
        files: folder("bert2bert"),
        run: |files| {
            let (model, _) = EncoderDecoder::from_files(files, &LoadOptions::default())?;
            let ids = Tensor::new(&[[7u32, 5, 9, 3]], &Cpu)?;
            let written = model.generate(&ids, None, &GenerateConfig::greedy(12));
            // Without a start token, `generate` fails; the output then contains the message.
            let written = written.map_err(|error| error.to_string());
            let states = model.encoder().forward(&ids, None, &mha::AttentionMask::none())?;
            let states = states.last_hidden_state.flatten_all()?.to_vec1::<f32>()?;
            Ok(format!("{written:?} {:?} {states:?}", model.config().eos_token_id))
        },
    }
}

/// The file that a section of the page describes, and the models to test its keys with.
fn probes(section: &str) -> (&str, Vec<Probe>) {
    let all = || vec![embedder(), cross_encoder(), plain(), classifier(), masked_lm()];
    match section.split_once(" of ") {
        Some((file, "a decoder")) => (file, vec![decoder()]),
        Some((file, "an encoder-decoder")) => {
            let mut probe = encoder_decoder();
            let ids = br#"{"bos_token_id": 1, "eos_token_id": 2}"#.to_vec();
            if file != "config.json" {
                probe.files.insert(file.to_string(), ids);
            }
            (file, vec![probe])
        }
        Some(_) => panic!("no model for section {section}"),
        None => match section {
            "modules.json"
            | "1_Pooling/config.json"
            | "2_Dense/config.json"
            | "3_Normalize/config.json" => (section, vec![embedder()]),
            "sentence_bert_config.json" | "config_sentence_transformers.json" => {
                (section, vec![embedder(), cross_encoder()])
            }
            _ => (section, all()),
        },
    }
}

/// A row of a table: the key, its example, and the effect of the key (column `here`).
struct Row<'a> {
    key: &'a str,
    example: Value,
    here: &'a str,
}

fn rows(table: &str) -> impl Iterator<Item = Row<'_>> {
    table.lines().filter(|line| line.starts_with("| `")).map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [key, example, here, _reason] = cells[..] else { panic!("four cells: {line}") };
        let example = serde_json::from_str(example.trim_matches('`'));
        let example = example.unwrap_or_else(|error| panic!("{line}: {error}"));
        Row { key: key.trim_matches('`'), example, here }
    })
}

/// Keys whose errors contain another name: the current name for a former name, and `modules` for
/// the key `type` of modules.json.
const NAMES_IN_ERRORS: [(&str, &str); 4] = [
    ("config_args", "config_kwargs"),
    ("model_args", "model_kwargs"),
    ("tokenizer_args", "processor_kwargs"),
    ("type", ": modules "),
];

/// Whether a message is that of [`encoder::ConfigError::Unsupported`] for a file and a key.
fn is_refusal(error: &str, file: &str, key: &str) -> bool {
    let part = key.rsplit('.').next().unwrap_or(key);
    let name =
        NAMES_IN_ERRORS.iter().find(|(name, _)| *name == part).map_or(part, |(_, name)| name);
    error.contains(&format!("/{file}"))
        && error.contains("is not supported")
        && error.contains(name)
}

#[test]
fn every_setting_of_the_page_has_the_listed_effect() {
    let page = std::fs::read_to_string("docs/settings.md").unwrap();
    let mut wrong = vec![];
    let mut count = 0;
    for section in page.split("\n## ").skip(1) {
        let (title, table) = section.split_once('\n').expect("a title");
        if rows(table).next().is_none() {
            continue;
        }
        let (file, probes) = probes(title);
        let before: Vec<_> = probes.iter().map(|probe| probe.outcome(&probe.files)).collect();
        assert!(before.iter().all(Result::is_ok), "{title}: {before:?}");
        for row in rows(table) {
            count += 1;
            let with = |probe: &Probe| probe.outcome(&probe.with(file, row.key, &row.example));
            let after: Vec<_> = probes.iter().map(with).collect();
            let refusals = after.iter().filter(|after| {
                after.as_ref().is_err_and(|error| is_refusal(error, file, row.key))
            });
            let refusals = refusals.count();
            let differs =
                after.iter().zip(&before).any(|(after, before)| after.is_ok() && after != before);
            let here = match (refusals, differs, before == after) {
                // All models read config.json, so all of them must refuse the value.
                (n, _, _) if n == after.len() || n > 0 && title != "config.json" => "refused",
                (_, true, _) => "supported",
                (_, false, true) => "without effect",
                (_, false, false) => "checked",
            };
            if here != row.here {
                let errors: Vec<_> =
                    after.iter().filter_map(|after| after.as_ref().err()).collect();
                let Row { key, example, here: listed } = row;
                wrong.push(format!(
                    "{title}: {key} = {example}: expected {listed}, got {here}: {errors:?}"
                ));
            }
        }
    }
    assert!(count > 150, "expected more than 150 rows, got {count}");
    assert!(wrong.is_empty(), "{} of {count} rows are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
