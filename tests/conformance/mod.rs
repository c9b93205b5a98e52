//! Loading of checkpoints with unusual, unsupported or damaged files.
//!
//! Each case changes one property of a small golden checkpoint, loads it and records the outcome:
//! the result of a comparison, a property of the model or its output, or the error message. The
//! outcomes of all cases must equal `tests/conformance.txt`, word for word. In that file, `#`
//! starts a section, and every other line is a case: its name, padded to 48 characters, and its
//! outcome.
//!
//! `cargo test --release conformance -- --nocapture` prints the outcomes.

use std::{collections::BTreeMap, fs, path::Path, sync::LazyLock};

use candle_core::{DType, Device::Cpu, IndexOp, Tensor};
use encoder::{
    Embedder, EncoderModel, LoadOptions, LoadReport, ModelConfig, ModelFiles, TextTokenizer,
};
use mha::AttentionMask;
use serde_json::{Value, json};

use crate::support::{Golden, golden, max_difference};

mod architectures;
mod configs;
mod heads;
mod sentence_transformers;
mod tensors;
mod tokenizers;
mod weight_files;

const EXPECTED: &str = include_str!("../conformance.txt");

/// The outcome of a case. `Table` writes the first line of an error's message.
type Outcome = anyhow::Result<String>;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const QUERY_WEIGHT: &str = "encoder.layer.2.attention.self.query.weight";
const VOCAB: &str =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n##a\n##b\n##c\nA\ncafe\ncafé\n東\n京\n";

/// The files of a model, before they are written.
#[derive(Clone)]
struct Checkpoint {
    /// `config.json`, unless `files` has one.
    config: Value,
    /// The tensors of `model.safetensors`, unless `files` has one.
    tensors: BTreeMap<String, Tensor>,
    /// Other files, by path.
    files: BTreeMap<String, Vec<u8>>,
    removed: Vec<&'static str>,
}

/// The golden encoder: three layers, hidden_size 24.
static UNMODIFIED: LazyLock<Checkpoint> = LazyLock::new(|| Checkpoint::golden("bert_gelu"));

impl Checkpoint {
    fn golden(folder: &str) -> Self {
        let folder = golden(folder);
        let config = serde_json::from_slice(&fs::read(folder.join(CONFIG)).unwrap()).unwrap();
        let tensors = candle_core::safetensors::load(folder.join(WEIGHTS), &Cpu).unwrap();
        let mut files = BTreeMap::new();
        for name in ["vocab.txt", "tokenizer_config.json"] {
            files.extend(fs::read(folder.join(name)).ok().map(|bytes| (name.to_string(), bytes)));
        }
        Self { config, tensors: tensors.into_iter().collect(), files, removed: vec![] }
    }

    /// A golden folder with all its files, those in its folders included.
    fn golden_folder(folder: &str) -> Self {
        let mut checkpoint = Self::golden(folder);
        let root = golden(folder);
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_string();
                if path.is_dir() {
                    folders.push(path);
                } else if ![CONFIG, WEIGHTS].contains(&&name[..]) {
                    checkpoint.files.insert(name, fs::read(path).unwrap());
                }
            }
        }
        checkpoint
    }

    fn set_config(&mut self, key: &str, value: Value) -> &mut Self {
        self.config[key] = value;
        self
    }

    fn set_file(&mut self, name: &str, bytes: impl Into<Vec<u8>>) -> &mut Self {
        self.files.insert(name.to_string(), bytes.into());
        self
    }

    fn remove_file(&mut self, name: &'static str) -> &mut Self {
        self.removed.push(name);
        self.files.remove(name);
        self
    }

    fn set_zeros(&mut self, tensor: &str, shape: &[usize]) -> &mut Self {
        self.tensors.insert(tensor.into(), Tensor::zeros(shape, DType::F32, &Cpu).unwrap());
        self
    }

    fn rename_tensors(&mut self, rename: impl Fn(&str) -> String) -> &mut Self {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(name, x)| (rename(&name), x)).collect();
        self
    }

    /// Adds a vocabulary and mean pooling: the files of a sentence-transformers model.
    fn add_pooling(&mut self) -> &mut Self {
        let modules = json!([
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
        ]);
        self.set_file("vocab.txt", VOCAB).set_file("modules.json", modules.to_string());
        self.set_file("1_Pooling/config.json", r#"{"pooling_mode": "mean"}"#)
    }

    fn add_module(&mut self, class: &str, path: &str) -> &mut Self {
        self.add_module_of(&format!("sentence_transformers.models.{class}"), path)
    }

    fn add_module_of(&mut self, class: &str, path: &str) -> &mut Self {
        let mut modules: Value = serde_json::from_slice(&self.files["modules.json"]).unwrap();
        modules.as_array_mut().unwrap().push(json!({"type": class, "path": path}));
        self.set_file("modules.json", modules.to_string())
    }

    /// All files by path, with `config.json` and `model.safetensors` serialised.
    fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = self.files.clone();
        let mut add_missing = |name: &str, serialize: &dyn Fn() -> Vec<u8>| {
            if !files.contains_key(name) && !self.removed.contains(&name) {
                files.insert(name.to_string(), serialize());
            }
        };
        add_missing(CONFIG, &|| self.config.to_string().into_bytes());
        add_missing(WEIGHTS, &|| safetensors::serialize(&self.tensors, None).unwrap());
        files
    }

    fn files(&self) -> ModelFiles {
        ModelFiles::memory("m", self.contents())
    }

    fn write_folder(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in self.contents() {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        dir
    }

    /// [`check_encoder`] of these files.
    fn check_encoder(&self) -> Outcome {
        check_encoder(&self.files())
    }

    /// Replaces `model.safetensors` by `header` and `data_len` zero bytes, then loads it.
    fn check_header(&mut self, header: &str, data_len: usize) -> Outcome {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data_len, 0);
        self.set_file(WEIGHTS, bytes).check_encoder()
    }

    fn embedder(&self) -> anyhow::Result<Embedder> {
        Ok(Embedder::from_files(&self.files(), &LoadOptions::default())?)
    }

    fn hidden_states(&self, ids: &[u32]) -> anyhow::Result<Tensor> {
        let (model, _) = EncoderModel::from_files(&self.files(), &LoadOptions::default())?;
        let ids = Tensor::new(ids, &Cpu)?.unsqueeze(0)?;
        let out = model.forward(&ids, None, &AttentionMask::none())?;
        Ok(out.last_hidden_state.squeeze(0)?) // (T, E)
    }

    /// Compares the embedding of "a b" with `expected` applied to the hidden states `(T, E)` of
    /// "a b".
    fn check_embedding(
        &self,
        expected: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Outcome {
        let expected = expected(&self.hidden_states(&[2, 5, 6, 3])?)?; // [CLS] a b [SEP]
        let got = self.embedder()?.embed(&["a b"])?.squeeze(0)?;
        Ok(compare("the formula", max_difference(&got, &expected)?))
    }

    /// The token ids of `text` from the tokenizer of an [`Embedder`].
    fn embedder_token_ids(&mut self, text: &str) -> Outcome {
        let embedder = self.add_pooling().embedder()?;
        Ok(format!("{:?}", embedder.tokenizer().encode(&[text])?[0].input_ids))
    }

    /// The token ids of `text` from a [`TextTokenizer`].
    fn token_ids(&self, text: &str) -> Outcome {
        let config = ModelConfig::from_json(&self.contents()[CONFIG], "m/config.json")?;
        let tokenizer = TextTokenizer::from_files(&self.files(), &config)?;
        Ok(format!("{:?}", tokenizer.encode(&[text])?[0].input_ids))
    }

    /// Compares the logits of the first sequence of the golden batch in `folder` with those of
    /// transformers; for question answering, the start logits.
    fn check_logits(&self, folder: &str, compute: LogitsFn) -> Outcome {
        let golden = Golden::open(&format!("{folder}/expected.safetensors"))?;
        let mask = AttentionMask::none().with_padding(golden.get("mask"))?;
        let (ids, types) = (golden.get("input_ids"), golden.get("token_type_ids"));
        let got = compute(&self.files(), ids, types, &mask)?.i(0)?; // sequence 0 has no padding
        let logits = ["logits", "start_logits"].into_iter().find_map(|key| golden.find(key));
        let expected = logits.expect("the golden file has no logits").i(0)?;
        Ok(compare("transformers", max_difference(&got, &expected)?))
    }
}

/// Loads a model and computes its logits from token ids, token type ids and a mask.
type LogitsFn = fn(&ModelFiles, &Tensor, &Tensor, &AttentionMask) -> anyhow::Result<Tensor>;

/// `same as {reference}` if the largest difference from the reference is at most 1e-5.
fn compare(reference: &str, difference: f64) -> String {
    if difference <= 1e-5 {
        format!("same as {reference}")
    } else {
        format!("differs by {difference:.1e}")
    }
}

/// Loads the encoder in `files`, compares its hidden states with those of [`UNMODIFIED`], and
/// describes the report.
fn check_encoder(files: &ModelFiles) -> Outcome {
    let run = |files: &ModelFiles| -> anyhow::Result<(Tensor, LoadReport)> {
        let (model, report) = EncoderModel::from_files(files, &LoadOptions::default())?;
        let ids = Tensor::new(&[[7u32, 50, 100]], &Cpu)?;
        Ok((model.forward(&ids, None, &AttentionMask::none())?.last_hidden_state, report))
    };
    static UNMODIFIED_STATES: LazyLock<Tensor> = LazyLock::new(|| {
        let (model, _) =
            EncoderModel::from_files(&UNMODIFIED.files(), &LoadOptions::default()).unwrap();
        let ids = Tensor::new(&[[7u32, 50, 100]], &Cpu).unwrap();
        model.forward(&ids, None, &AttentionMask::none()).unwrap().last_hidden_state
    });
    let (got, report) = run(files)?;
    let outcome = compare("the unmodified checkpoint", max_difference(&got, &UNMODIFIED_STATES)?);
    Ok(outcome + &describe(&report))
}

/// The tied and the ignored tensors, the prefix, and the dtypes unless all are f32.
fn describe(report: &LoadReport) -> String {
    let mut outcome = String::new();
    for (kind, names) in [("tied", &report.tied), ("ignored", &report.ignored)] {
        if !names.is_empty() {
            outcome += &format!("; {kind} {}", names.join(" "));
        }
    }
    if !report.prefix.is_empty() {
        outcome += &format!("; prefix {}", report.prefix);
    }
    if report.dtypes != ["f32"] {
        outcome += &format!("; {}", report.dtypes.join(" and "));
    }
    outcome
}

fn first_value(tensor: &Tensor) -> candle_core::Result<f32> {
    tensor.flatten_all()?.get(0)?.to_scalar()
}

/// The outcomes, in the format of `tests/conformance.txt`.
#[derive(Default)]
struct Table {
    text: String,
    cases: usize,
}

impl Table {
    fn section(&mut self, name: &str) {
        self.text += &format!("# {name}\n");
    }

    /// Runs a case on a copy of [`UNMODIFIED`].
    fn case(&mut self, name: &str, run: impl FnOnce(&mut Checkpoint) -> Outcome) {
        self.case_from(UNMODIFIED.clone(), name, run);
    }

    /// Runs a case on a golden model with a task head.
    fn head_case(
        &mut self,
        folder: &str,
        name: &str,
        run: impl FnOnce(&mut Checkpoint) -> Outcome,
    ) {
        self.case_from(Checkpoint::golden(&format!("heads/{folder}")), name, run);
    }

    fn case_from(
        &mut self,
        mut checkpoint: Checkpoint,
        name: &str,
        run: impl FnOnce(&mut Checkpoint) -> Outcome,
    ) {
        let outcome = match run(&mut checkpoint) {
            Ok(outcome) => outcome,
            Err(error) => {
                format!("error: {}", error.to_string().lines().next().unwrap_or_default())
            }
        };
        self.cases += 1;
        self.text += &format!("{name:<48} {outcome}\n");
    }
}

#[test]
fn every_case_has_the_outcome_in_conformance_txt() {
    let mut table = Table::default();
    weight_files::sources(&mut table);
    tensors::names_and_dtypes(&mut table);
    configs::cases(&mut table);
    tensors::reports(&mut table);
    heads::cases(&mut table);
    sentence_transformers::cases(&mut table);
    tokenizers::cases(&mut table);
    tensors::inspections(&mut table);
    weight_files::damaged(&mut table);
    architectures::cases(&mut table);
    println!("{}", table.text);
    assert!(table.cases >= 600, "expected at least 600 cases, got {}", table.cases);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conformance.txt");
    fs::write(&path, &table.text).unwrap();
    let (expected, got) = (with_sections(EXPECTED), with_sections(&table.text));
    let only_in = |lines: &[String], other: &[String], sign: &str| {
        let lines = lines.iter().filter(|line| !other.contains(line));
        lines.map(|line| format!("{sign}{line}\n")).collect::<String>()
    };
    assert!(
        table.text == EXPECTED,
        "outcomes, or their order, differ from tests/conformance.txt; if the new outcomes are \
         right, replace that file with {}:\n{}{}",
        path.display(),
        only_in(&expected, &got, "- "),
        only_in(&got, &expected, "+ ")
    );
}

/// The lines of a table, each after the name of its section.
fn with_sections(table: &str) -> Vec<String> {
    let mut section = "";
    let lines = table.lines().map(|line| {
        section = line.strip_prefix("# ").unwrap_or(section);
        format!("{section}: {line}")
    });
    lines.collect()
}
