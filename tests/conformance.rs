//! The quirks of checkpoints as they are found, a tiny one for each, and what comes of it: the same
//! numbers, or an error to the word, as in conformance.txt beside this file.
//! `cargo test -- --nocapture conformance` prints the table.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
    sync::LazyLock,
};

use candle_core::{
    DType,
    Device::{self, Cpu},
    IndexOp, Tensor,
};
use encoder::{
    Aggregation, BertConfig, BertDecoder, BertForMaskedLm, BertForNextSentencePrediction,
    BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification, BertModel,
    EmbedOptions, Embedder, EncoderDecoder, Inspection, Labels, LoadReport, LongTexts, MaskFiller,
    ModelFiles, PackedBatch, Pooling, PoolingMode, Precision, Prompt, QuestionAnswerer,
    TextClassifier, TextTokenizer, TokenClassifier, Tokens,
};
use mha::AttentionMask;
use serde_json::{Value, json};

use crate::support::{Golden, golden, max_difference};

/// The table as it should be.
const EXPECTED: &str = include_str!("conformance.txt");

/// What comes of a case, or the error.
type Outcome = anyhow::Result<String>;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const QUERY: &str = "encoder.layer.2.attention.self.query.weight";
const WORDS: &str =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n##a\n##b\n##c\nA\ncafe\ncafé\n東\n京\n";

/// Files of a model in the making.
#[derive(Clone)]
struct Checkpoint {
    config: Value,
    tensors: BTreeMap<String, Tensor>,
    /// All others, and these two where they are no longer made of the above.
    files: BTreeMap<String, Vec<u8>>,
    without: Vec<&'static str>,
}

/// The golden encoder, three layers of width 24.
static PLAIN: LazyLock<Checkpoint> = LazyLock::new(|| Checkpoint::golden("bert_gelu"));

impl Checkpoint {
    fn golden(folder: &str) -> Self {
        let folder = golden(folder);
        let config = serde_json::from_slice(&fs::read(folder.join(CONFIG)).unwrap()).unwrap();
        let tensors = candle_core::safetensors::load(folder.join(WEIGHTS), &Cpu).unwrap();
        let mut files = BTreeMap::new();
        for name in ["vocab.txt", "tokenizer_config.json"] {
            files.extend(fs::read(folder.join(name)).ok().map(|bytes| (name.to_string(), bytes)));
        }
        Self { config, tensors: tensors.into_iter().collect(), files, without: vec![] }
    }

    fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.config[key] = value;
        self
    }

    fn file(&mut self, name: &str, bytes: impl Into<Vec<u8>>) -> &mut Self {
        self.files.insert(name.to_string(), bytes.into());
        self
    }

    fn without(&mut self, name: &'static str) -> &mut Self {
        self.without.push(name);
        self.files.remove(name);
        self
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> &mut Self {
        self.tensors.insert(name.into(), Tensor::zeros(shape, DType::F32, &Cpu).unwrap());
        self
    }

    fn rename(&mut self, rename: impl Fn(&str) -> String) -> &mut Self {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(name, x)| (rename(&name), x)).collect();
        self
    }

    /// A sentence-transformers folder.
    fn sentence(&mut self) -> &mut Self {
        let modules = json!([
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
        ]);
        self.file("vocab.txt", WORDS).file("modules.json", modules.to_string());
        self.file("1_Pooling/config.json", r#"{"pooling_mode": "mean"}"#)
    }

    fn also_module(&mut self, class: &str, path: &str) -> &mut Self {
        let mut modules: Value = serde_json::from_slice(&self.files["modules.json"]).unwrap();
        let class = format!("sentence_transformers.models.{class}");
        modules.as_array_mut().unwrap().push(json!({"type": class, "path": path}));
        self.file("modules.json", modules.to_string())
    }

    fn all(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = self.files.clone();
        let mut make = |name: &str, bytes: &dyn Fn() -> Vec<u8>| {
            if !files.contains_key(name) && !self.without.contains(&name) {
                files.insert(name.to_string(), bytes());
            }
        };
        make(CONFIG, &|| self.config.to_string().into_bytes());
        make(WEIGHTS, &|| safetensors::serialize(&self.tensors, None).unwrap());
        files
    }

    fn files(&self) -> ModelFiles {
        ModelFiles::memory("m", self.all())
    }

    fn folder(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in self.all() {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        dir
    }

    /// The header, before as many bytes of data.
    fn header(&mut self, header: &str, data: usize) -> Outcome {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        self.file(WEIGHTS, bytes).encode()
    }

    /// What the encoder of these files makes of three ids, beside what the plain one does.
    fn encode(&self) -> Outcome {
        encode(&self.files())
    }

    fn embedder(&self) -> anyhow::Result<Embedder> {
        Ok(Embedder::from_files(&self.files(), Precision::F32, &Cpu)?)
    }

    fn hidden(&self, ids: &[u32]) -> anyhow::Result<Tensor> {
        let (model, _) = BertModel::from_files(&self.files(), Precision::F32, &Cpu)?;
        let ids = Tensor::new(ids, &Cpu)?.unsqueeze(0)?;
        let out = model.forward(&ids, None, &AttentionMask::none())?;
        Ok(out.last_hidden_state.squeeze(0)?) // (T, E)
    }

    /// Whether "a b" is embedded as `expected` makes of the hidden states `(T, E)`.
    fn pooled(&self, expected: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Outcome {
        let expected = expected(&self.hidden(&[2, 5, 6, 3])?)?; // [CLS] a b [SEP]
        let got = self.embedder()?.embed(&["a b"])?.squeeze(0)?;
        Ok(same("as by hand", max_difference(&got, &expected)?))
    }

    /// The tokens as sentence-transformers makes them.
    fn sentence_tokens(&mut self, text: &str) -> Outcome {
        let embedder = self.sentence().embedder()?;
        Ok(format!("{:?}", embedder.tokenizer().encode(&[text])?[0].input_ids))
    }

    fn tokens(&self, text: &str) -> Outcome {
        let config = BertConfig::from_json(&self.all()[CONFIG], "m/config.json")?;
        let tokenizer = TextTokenizer::from_files(&self.files(), &config)?;
        Ok(format!("{:?}", tokenizer.encode(&[text])?[0].input_ids))
    }

    /// The logits of a model with a head, beside those of transformers.
    fn logits(&self, folder: &str, of: Logits) -> Outcome {
        let golden = Golden::open(&format!("{folder}/expected.safetensors"))?;
        let mask = AttentionMask::none().with_padding(golden.get("mask"))?;
        let (ids, types) = (golden.get("input_ids"), golden.get("token_type_ids"));
        let got = of(&self.files(), ids, types, &mask)?.i(0)?; // the first is not padded
        let key = ["logits", "start_logits"].into_iter().find_map(|key| golden.find(key));
        let expected = key.expect("logits").i(0)?;
        Ok(same("as transformers", max_difference(&got, &expected)?))
    }
}

type Logits = fn(&ModelFiles, &Tensor, &Tensor, &AttentionMask) -> anyhow::Result<Tensor>;

/// `same numbers`, or how they differ.
fn same(what: &str, difference: f64) -> String {
    match difference <= 1e-5 {
        true => format!("numbers {what}"),
        false => format!("differs by {difference:.1e}"),
    }
}

fn encode(files: &ModelFiles) -> Outcome {
    let run = |files: &ModelFiles| -> anyhow::Result<(Tensor, LoadReport)> {
        let (model, report) = BertModel::from_files(files, Precision::F32, &Cpu)?;
        let ids = Tensor::new(&[[7u32, 50, 100]], &Cpu)?;
        Ok((model.forward(&ids, None, &AttentionMask::none())?.last_hidden_state, report))
    };
    static EXPECTED: LazyLock<Tensor> = LazyLock::new(|| {
        let (model, _) = BertModel::from_files(&PLAIN.files(), Precision::F32, &Cpu).unwrap();
        let ids = Tensor::new(&[[7u32, 50, 100]], &Cpu).unwrap();
        model.forward(&ids, None, &AttentionMask::none()).unwrap().last_hidden_state
    });
    let (got, report) = run(files)?;
    let mut outcome = same("of the plain one", max_difference(&got, &EXPECTED)?);
    for (what, names) in [("tied", &report.tied), ("ignored", &report.ignored)] {
        if !names.is_empty() {
            outcome += &format!("; {what} {}", names.join(" "));
        }
    }
    if !report.prefix.is_empty() {
        outcome += &format!("; prefix {}", report.prefix);
    }
    if report.dtypes != ["f32"] {
        outcome += &format!("; {}", report.dtypes.join(" and "));
    }
    Ok(outcome)
}

fn value(tensor: &Tensor) -> candle_core::Result<f32> {
    tensor.flatten_all()?.get(0)?.to_scalar()
}

fn inspected(checkpoint: &Checkpoint) -> Outcome {
    let found = Inspection::new(&checkpoint.files());
    let mut outcome = format!("{} as {:?}", found.family.unwrap_or("unknown"), found.runs_as);
    if !found.heads.is_empty() {
        outcome += &format!(", heads {:?}", found.heads);
    }
    for problem in &found.problems {
        outcome += &format!("; {problem}");
    }
    Ok(outcome)
}

/// The table as it is printed.
#[derive(Default)]
struct Table {
    text: String,
    cases: usize,
}

impl Table {
    fn group(&mut self, group: &str) {
        self.text += &format!("# {group}\n");
    }

    fn case(&mut self, quirk: &str, run: impl FnOnce(&mut Checkpoint) -> Outcome) {
        self.from(PLAIN.clone(), quirk, run);
    }

    fn head(&mut self, folder: &str, quirk: &str, run: impl FnOnce(&mut Checkpoint) -> Outcome) {
        self.from(Checkpoint::golden(&format!("heads/{folder}")), quirk, run);
    }

    fn from(
        &mut self,
        mut checkpoint: Checkpoint,
        quirk: &str,
        run: impl FnOnce(&mut Checkpoint) -> Outcome,
    ) {
        let outcome = match run(&mut checkpoint) {
            Ok(outcome) => outcome,
            Err(error) => {
                format!("error: {}", error.to_string().lines().next().unwrap_or_default())
            }
        };
        self.cases += 1;
        self.text += &format!("{quirk:<48} {outcome}\n");
    }
}

#[test]
fn conformance() {
    let mut table = Table::default();
    sources(&mut table);
    names(&mut table);
    configs(&mut table);
    reports(&mut table);
    heads(&mut table);
    sentence_transformers(&mut table);
    tokenizers(&mut table);
    inspections(&mut table);
    hostile(&mut table);
    println!("{}", table.text);
    assert!(table.cases >= 80, "{} cases", table.cases);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conformance.txt");
    fs::write(&path, &table.text).unwrap();
    let only = |of: &str, not_of: &str, sign: &str| {
        let known: Vec<&str> = not_of.lines().collect();
        let other = of.lines().filter(|line| !known.contains(line));
        other.map(|line| format!("{sign}{line}\n")).collect::<String>()
    };
    assert!(
        table.text == EXPECTED,
        "not as in tests/conformance.txt, for which {} is meant if this is right:\n{}{}",
        path.display(),
        only(EXPECTED, &table.text, "- "),
        only(&table.text, EXPECTED, "+ ")
    );
}

fn sources(t: &mut Table) {
    t.group("sources");
    t.case("a folder", |c| encode(&ModelFiles::dir(c.folder().path())?));
    t.case("a file of any name, the rest beside it", |c| {
        let dir = c.folder();
        let file = dir.path().join("weights.v2.safetensors");
        fs::rename(dir.path().join(WEIGHTS), &file)?;
        encode(&ModelFiles::file(file)?)
    });
    let shards = |c: &mut Checkpoint| {
        let mut map = serde_json::Map::new();
        let (mut a, mut b) = (HashMap::new(), HashMap::new());
        for (i, (name, tensor)) in c.tensors.iter().enumerate() {
            let (shard, file) = if i % 2 == 0 { (&mut a, "a.st") } else { (&mut b, "b.st") };
            shard.insert(name.clone(), tensor.clone());
            map.insert(name.clone(), file.into());
        }
        for (name, shard) in [("a.st", a), ("b.st", b)] {
            c.file(name, safetensors::serialize(&shard, None).unwrap());
        }
        c.without(WEIGHTS);
        json!({"weight_map": map}).to_string()
    };
    t.case("two shards and their index", |c| {
        let index = shards(c);
        c.file("model.safetensors.index.json", index).encode()
    });
    t.case("an index of any name", |c| {
        let index = shards(c);
        let dir = c.file("fp32.index.json", index).folder();
        encode(&ModelFiles::file(dir.path().join("fp32.index.json"))?)
    });
    let pickled = |name| fs::read(golden(&format!("pickled/{name}"))).unwrap();
    let logits: Logits = |files, ids, types, mask| {
        let (model, _) = BertForSequenceClassification::from_files(files, Precision::F32, &Cpu)?;
        Ok(model.forward(ids, Some(types), mask)?)
    };
    for (quirk, file) in [
        ("pytorch_model.bin", "archive.bin"),
        ("pytorch_model.bin of before PyTorch 1.6", "early.bin"),
    ] {
        t.head("sequence", quirk, |c| {
            c.without(WEIGHTS).file("pytorch_model.bin", pickled(file));
            c.logits("heads/sequence", logits)
        });
    }
    t.head("sequence", "shards of pytorch_model.bin.index.json", |c| {
        let names = c.tensors.keys().map(|name| (name.clone(), json!("part.bin")));
        let index = json!({"weight_map": names.collect::<serde_json::Map<_, _>>()});
        c.without(WEIGHTS).file("part.bin", pickled("archive.bin"));
        c.file("pytorch_model.bin.index.json", index.to_string());
        c.logits("heads/sequence", logits)
    });
    t.case("safetensors before a pickle", |c| c.file("pytorch_model.bin", "x").encode());
    t.case("pytorch_model.bin that PyTorch did not save", |c| {
        let bytes = c.all()[WEIGHTS].clone();
        c.without(WEIGHTS).file("pytorch_model.bin", bytes).encode()
    });
    t.case("no weights", |c| c.without(WEIGHTS).encode());
    t.case("no config.json", |c| c.without(CONFIG).encode());
    t.case("no such folder", |_| encode(&ModelFiles::dir("no/folder")?));
    t.case("no such file", |_| encode(&ModelFiles::file("no/file.safetensors")?));
    #[cfg(feature = "hub")]
    hub_sources(t);
}

#[cfg(feature = "hub")]
fn hub_sources(t: &mut Table) {
    use encoder::Hub;

    let commit = "0123456789abcdef0123456789abcdef01234567";
    let cached = |c: &Checkpoint, revision: &str| {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join("models--org--name");
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::create_dir_all(model.join("snapshots")).unwrap();
        fs::write(model.join("refs").join(revision), commit).unwrap();
        fs::rename(c.folder().keep(), model.join("snapshots").join(commit)).unwrap();
        cache
    };
    for (quirk, revision, id) in [
        ("org/name in the cache", "main", "org/name".to_string()),
        ("org/name@branch in the cache", "dev", "org/name@dev".to_string()),
        ("org/name@commit in the cache", "main", format!("org/name@{commit}")),
    ] {
        t.case(quirk, |c| {
            let cache = cached(c, revision);
            encode(&Hub::new(cache.path()).offline(true).model(&id)?)
        });
    }
    t.case("not in the cache, offline", |_| encode(&Hub::new("c").offline(true).model("a/b")?));
    for (quirk, name) in [
        ("a hub as it should be", "none"),
        ("a hub that cuts the connection: resumed", "cut"),
        ("a hub that sends another file", "changed"),
        ("a hub that sends too much", "longer"),
        ("a hub that knows no such model: 401", "401"),
        ("a hub whose model is not for everybody: 403", "403"),
        ("a hub without the revision: 404", "no revision"),
        ("a hub that is busy for long: 503", "503"),
    ] {
        t.case(quirk, |_| Ok(crate::hub::outcome(name)));
    }
    t.case("no name of a model", |_| encode(&Hub::new("c").model("a/../b")?));
}

fn names(t: &mut Table) {
    t.group("names");
    for prefix in ["", "bert.", "model.", "encoder.", "0.auto_model.", "module.bert."] {
        t.case(&format!("prefix {prefix:?}"), |c| {
            c.rename(|name| format!("{prefix}{name}")).encode()
        });
    }
    t.case("two prefixes in one file", |c| {
        c.tensor("bert.embeddings.LayerNorm.bias", &[24]).encode()
    });
    let early = |name: &str| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        name.replace("LayerNorm.bias", "LayerNorm.beta")
    };
    t.case("gamma and beta under LayerNorm", |c| c.rename(early).encode());
    t.case("gamma elsewhere", |c| {
        c.rename(|n| n.replace("2.output.dense.weight", "2.output.dense.gamma")).encode()
    });
    t.case("gamma in one LayerNorm, weight in the others", |c| {
        c.rename(|n| n.replace("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"))
            .encode()
    });
    t.case("the buffer position_ids", |c| c.tensor("embeddings.position_ids", &[1, 19]).encode());
    t.case("the buffer token_type_ids", |c| {
        c.tensor("embeddings.token_type_ids", &[1, 19]).encode()
    });
    t.case("no pooler", |c| {
        c.tensors.retain(|name, _| !name.starts_with("pooler"));
        c.encode()
    });
    t.case("heads that the encoder does without", |c| {
        c.tensor("cls.predictions.bias", &[101]).tensor("classifier.weight", &[2, 24]);
        c.tensor("qa_outputs.bias", &[2]).encode()
    });
    t.case("dtypes: f64, which is rounded", |c| {
        c.tensors.values_mut().for_each(|x| *x = x.to_dtype(DType::F64).unwrap());
        c.encode()
    });
    for dtype in [DType::F16, DType::BF16] {
        t.case(&format!("dtypes: {} and f32", dtype.as_str()), |c| {
            // A number that both have.
            let ones = Tensor::ones(24, DType::F32, &Cpu)?;
            c.tensors.insert("pooler.dense.bias".into(), ones.to_dtype(dtype)?);
            c.encode()
        });
    }
}

fn configs(t: &mut Table) {
    t.group("configs");
    t.case("eleven keys", |c| {
        let known = [
            "attention_probs_dropout_prob",
            "hidden_act",
            "hidden_dropout_prob",
            "hidden_size",
            "initializer_range",
            "intermediate_size",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "type_vocab_size",
            "vocab_size",
        ];
        c.config.as_object_mut().unwrap().retain(|key, _| known.contains(&&key[..]));
        c.encode()
    });
    for (quirk, key, value) in [
        ("torch_dtype", "torch_dtype", json!("float16")),
        ("dtype", "dtype", json!("bfloat16")),
        ("layer_norm_eps null", "layer_norm_eps", Value::Null),
        ("hidden_act null", "hidden_act", Value::Null),
        ("type_vocab_size null", "type_vocab_size", Value::Null),
        ("an int for a float", "layer_norm_eps", json!(0)),
        ("an unknown key", "gradient_checkpointing", json!(true)),
        ("_num_labels", "_num_labels", json!(7)),
        ("label2id with strings", "label2id", json!({"A": "0"})),
        ("no pruned heads", "pruned_heads", json!({})),
        ("pruned heads", "pruned_heads", json!({"2": [0, 3]})),
        ("hidden_act unknown", "hidden_act", json!("swiglu")),
        ("relative_key", "position_embedding_type", json!("relative_key")),
        ("relative_key_query", "position_embedding_type", json!("relative_key_query")),
        ("alibi", "position_embedding_type", json!("alibi")),
        ("rope", "position_embedding_type", json!("rope")),
        ("alibi of MosaicML", "alibi_starting_size", json!(512)),
        ("geglu of Jina", "feed_forward_type", json!("geglu")),
        ("code of its own", "auto_map", json!({"AutoModel": "jina--x.JinaBertModel"})),
        ("another architecture", "model_type", json!("roberta")),
        ("a decoder as an encoder", "is_decoder", json!(true)),
        ("heads that do not divide the width", "num_attention_heads", json!(5)),
        ("no layers", "num_hidden_layers", json!(0)),
        ("a negative size", "vocab_size", json!(-1)),
        ("a fraction for a size", "hidden_size", json!(24.5)),
        ("huge vocab_size", "vocab_size", json!(1_000_000_000_000u64)),
        ("huge intermediate_size", "intermediate_size", json!(1_000_000_000_000u64)),
        ("huge max_position_embeddings", "max_position_embeddings", json!(1_000_000_000_000u64)),
        ("eps below 0", "layer_norm_eps", json!(-1.0)),
    ] {
        t.case(quirk, |c| c.set(key, value).encode());
    }
    t.case("a size is missing", |c| {
        c.config.as_object_mut().unwrap().remove("hidden_size");
        c.encode()
    });
    for (quirk, key, value) in [
        ("is_causal", "is_causal", json!(true)),
        ("another file of weights", "transformers_weights", json!("other.safetensors")),
        ("a config for a version", "configuration_files", json!(["config.4.0.0.json"])),
    ] {
        t.case(quirk, |c| c.set(key, value).encode());
    }
    t.case("an adapter beside the weights", |c| {
        c.file("adapter_config.json", r#"{"peft_type": "LORA"}"#).encode()
    });
    for (quirk, key, value) in [
        ("a decoder that is not causal", "is_causal", json!(false)),
        ("a decoder with a window", "sliding_window", json!(2)),
    ] {
        t.from(Checkpoint::golden("bert_lm"), quirk, |c| {
            BertDecoder::from_files(&c.set(key, value).files(), Precision::F32, &Cpu)?;
            Ok("loaded".to_string())
        });
    }
    for (quirk, part, key, value) in [
        ("an encoder that is a decoder", "encoder", "is_decoder", json!(true)),
        ("a decoder that is an encoder", "decoder", "is_decoder", json!(false)),
        ("cross-attention that is causal", "decoder", "is_causal", json!(true)),
    ] {
        t.from(Checkpoint::golden("bert2bert"), quirk, |c| {
            c.config[part][key] = value;
            EncoderDecoder::from_files(&c.files(), Precision::F32, &Cpu)?;
            Ok("loaded".to_string())
        });
    }
    t.from(Checkpoint::golden("bert2bert"), "another file of an encoder-decoder", |c| {
        c.set("transformers_weights", json!("x.safetensors"));
        EncoderDecoder::from_files(&c.files(), Precision::F32, &Cpu)?;
        Ok("loaded".to_string())
    });
    for (quirk, ids) in [
        ("several ids that end a sequence", r#"{"eos_token_id": [7, 9]}"#),
        ("ids of generation_config.json", r#"{"bos_token_id": 7, "eos_token_id": [9]}"#),
        ("generation_config.json without ids", "{}"),
    ] {
        t.from(Checkpoint::golden("bert2bert"), quirk, |c| {
            let files = c.file("generation_config.json", ids).files();
            let (model, _) = EncoderDecoder::from_files(&files, Precision::F32, &Cpu)?;
            let config = model.config();
            Ok(format!("{:?} {:?}", config.decoder_start_token_id, config.eos_token_id))
        });
    }
    t.case("no JSON", |c| c.file(CONFIG, "{").encode());
    for act in [
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_python",
        "gelu_pytorch_tanh",
        "relu",
        "silu",
        "swish",
        "tanh",
        "quick_gelu",
        "mish",
    ] {
        t.case(&format!("hidden_act {act}"), |c| {
            let json = c.set("hidden_act", json!(act)).config.to_string();
            Ok(format!("{:?}", BertConfig::from_json(json.as_bytes(), CONFIG)?.hidden_act))
        });
    }
    for (width, heads) in [(52, 2), (64, 2), (128, 2)] {
        t.case(&format!("heads of {}", width / heads), |c| {
            *c = random(width, heads);
            beside_candle(c)
        });
    }
    let labels = |json: Value| -> Outcome {
        let labels = Labels::from_json(json.to_string().as_bytes(), "m/config.json")?;
        Ok(labels.names().join(" "))
    };
    t.case("id2label in any order", |_| labels(json!({"id2label": {"1": "b", "0": "a"}})));
    t.case("id2label with a gap", |_| labels(json!({"id2label": {"2": "b", "0": "a"}})));
    t.case("num_labels", |_| labels(json!({"num_labels": 3})));
    t.case("_num_labels, of labels", |_| labels(json!({"_num_labels": 1})));
    t.case("no labels", |_| labels(json!({})));
    t.case("huge num_labels", |_| labels(json!({"num_labels": u64::MAX})));
}

/// Of any width, from a simple sequence of numbers.
fn random(width: usize, heads: usize) -> Checkpoint {
    let mut c = PLAIN.clone();
    c.set("hidden_size", json!(width)).set("num_attention_heads", json!(heads));
    let mut state = 1u32;
    for (name, tensor) in &mut c.tensors {
        let dims: Vec<usize> =
            tensor.dims().iter().map(|&n| if n == 24 { width } else { n }).collect();
        let number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let n = dims.iter().product();
        let values: Vec<f32> = std::iter::repeat_with(number).take(n).collect();
        let x = Tensor::from_vec(values, dims, &Cpu).unwrap();
        *tensor = if name.ends_with("LayerNorm.weight") { (x + 1.0).unwrap() } else { x };
    }
    c
}

/// candle-transformers' BERT on the same weights.
fn beside_candle(c: &Checkpoint) -> Outcome {
    use candle_transformers::models::bert;

    let ids = [7u32, 50, 100, 1];
    let config: bert::Config = serde_json::from_value(c.config.clone())?;
    let tensors = c.tensors.clone().into_iter().collect();
    let vb = candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
    let ids_tensor = Tensor::new(&ids, &Cpu)?.unsqueeze(0)?;
    let theirs = bert::BertModel::load(vb, &config)?;
    let expected = theirs.forward(&ids_tensor, &ids_tensor.zeros_like()?, None)?.squeeze(0)?;
    Ok(same("of candle-transformers", max_difference(&c.hidden(&ids)?, &expected)?))
}

fn reports(t: &mut Table) {
    t.group("report");
    t.case("a tensor is missing, another is like it", |c| {
        c.rename(|name| name.replace("2.attention.self.query.w", "2.attention.self.qury.w"))
            .encode()
    });
    t.case("a tensor is missing", |c| {
        c.tensors.remove("encoder.layer.1.intermediate.dense.weight");
        c.encode()
    });
    t.case("a tensor of another shape", |c| c.tensor(QUERY, &[24, 23]).encode());
    t.case("a tensor of integers", |c| {
        let ids = Tensor::zeros((19, 24), DType::I64, &Cpu)?;
        c.tensors.insert("embeddings.position_embeddings.weight".into(), ids);
        c.encode()
    });
    t.case("a tensor too many", |c| c.tensor("encoder.layer.0.extra.weight", &[1]).encode());
    t.case("a layer too many", |c| {
        c.set("num_hidden_layers", json!(2)).encode().map_err(shortened)
    });
    t.case("a layer too few", |c| c.set("num_hidden_layers", json!(4)).encode().map_err(shortened));
    t.head("masked_lm", "tied, and as JSON", |c| {
        let (_, report) = BertForMaskedLm::from_files(&c.files(), Precision::F32, &Cpu)?;
        let json = serde_json::to_value(report)?;
        let keys: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
        Ok(format!("{} of {}", json["tied"], keys.join(" ")))
    });
}

/// How many problems there are, instead of each.
fn shortened(error: anyhow::Error) -> anyhow::Error {
    let text = error.to_string();
    anyhow::Error::msg(text.split(": ").next().unwrap_or_default().to_string())
}

fn heads(t: &mut Table) {
    t.group("heads");
    const F32: Precision = Precision::F32;
    const ON: &Device = &Cpu;
    let classes: [(&str, &str, Logits); 6] = [
        ("masked_lm", "masked LM, its scores from the words", |files, ids, types, mask| {
            Ok(BertForMaskedLm::from_files(files, F32, ON)?.0.forward(ids, Some(types), mask)?)
        }),
        ("next_sentence", "next sentence", |files, ids, types, mask| {
            let (model, _) = BertForNextSentencePrediction::from_files(files, F32, ON)?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("sequence", "sequence classification", |files, ids, types, mask| {
            let (model, _) = BertForSequenceClassification::from_files(files, F32, ON)?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("score", "sequence classification, one label", |files, ids, types, mask| {
            let (model, _) = BertForSequenceClassification::from_files(files, F32, ON)?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("token", "token classification", |files, ids, types, mask| {
            let (model, _) = BertForTokenClassification::from_files(files, F32, ON)?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("answer", "question answering", |files, ids, types, mask| {
            let (model, _) = BertForQuestionAnswering::from_files(files, F32, ON)?;
            Ok(model.forward(ids, Some(types), mask)?.start)
        }),
    ];
    for (folder, quirk, logits) in classes {
        t.head(folder, quirk, |c| c.logits(&format!("heads/{folder}"), logits));
    }
    let fill = |c: &Checkpoint| -> Outcome {
        let (model, report) = BertForMaskedLm::from_files(&c.files(), F32, &Cpu)?;
        let ids = Tensor::new(&[[2u32, 5, 3]], &Cpu)?;
        let logits = model.forward(&ids, None, &AttentionMask::none())?;
        let zero = logits.abs()?.max_all()?.to_scalar::<f32>()? == 0.0;
        let scores = if zero { "scores of 0" } else { "scores" };
        Ok(format!("{scores}, {} tied", report.tied.len()))
    };
    let words = "bert.embeddings.word_embeddings.weight";
    t.head("masked_lm", "masked LM without a decoder", |c| {
        c.tensors.remove("cls.predictions.decoder.weight");
        fill(c)
    });
    t.head("masked_lm", "masked LM with a decoder of its own", |c| {
        let shape = c.tensors[words].dims().to_vec();
        c.set("tie_word_embeddings", json!(false));
        c.tensor("cls.predictions.decoder.weight", &shape);
        c.tensor("cls.predictions.bias", &shape[..1]);
        c.tensors.remove("cls.predictions.decoder.bias");
        fill(c)
    });
    t.head("masked_lm", "masked LM with the words a second time", |c| {
        let twice = c.tensors[words].clone();
        c.tensors.insert("cls.predictions.decoder.weight".into(), twice);
        fill(c)
    });
    t.head("masked_lm", "masked LM, bias under decoder alone", |c| {
        let bias = c.tensors.remove("cls.predictions.bias").unwrap();
        c.tensors.insert("cls.predictions.decoder.bias".into(), bias);
        fill(c)
    });
    t.head("answer", "a head that is not there", |c| {
        Ok(BertForTokenClassification::from_files(&c.files(), F32, &Cpu)?
            .0
            .labels()
            .names()
            .join(" "))
    });
    t.head("score", "one label is a score between 0 and 1", |c| {
        let model = TextClassifier::from_files(&c.files(), F32, &Cpu)?;
        let scores = model.rerank("bad cab", &["a cab", "yz"])?;
        Ok(format!("{}", scores.iter().all(|score| (0.0..1.0).contains(score))))
    });
    t.head("sequence", "reranking with several labels", |c| {
        let model = TextClassifier::from_files(&c.files(), F32, &Cpu)?;
        Ok(format!("{:?}", model.rerank("a", &["b"])?))
    });
    let total = |c: &Checkpoint| -> Outcome {
        let model = TextClassifier::from_files(&c.files(), F32, &Cpu)?;
        let scores = &model.classify(&["a cab"])?[0];
        let all = |low: f32| scores.iter().all(|score| (low..1.0).contains(score));
        let sum = (scores.iter().sum::<f32>() * 1e4).round() / 1e4;
        Ok(match (sum == 1.0, all(0.0)) {
            (true, _) => "probabilities of one label",
            (false, true) => "a probability a label",
            (false, false) => "bare scores",
        }
        .to_string())
    };
    let problems =
        ["single_label_classification", "multi_label_classification", "regression", "ranking"];
    for problem in problems {
        t.head("sequence", &format!("problem_type {problem}"), |c| {
            total(c.set("problem_type", json!(problem)))
        });
    }
    let cross_encoder = |c: &mut Checkpoint, settings: Value| -> Outcome {
        let modules = json!([{
            "type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""
        }]);
        c.file("modules.json", modules.to_string())
            .file("config_sentence_transformers.json", settings.to_string());
        let model = TextClassifier::from_files(&c.files(), F32, &Cpu)?;
        let plain = model.tokenize_pairs("bad cab", &["a"], Prompt::None)?;
        let with = model.tokenize_pairs("bad cab", &["a"], Prompt::Default)?;
        let named = model.tokenize_pairs("bad cab", &["a"], Prompt::Named("topic"));
        let more = |tokens: &[Tokens]| tokens[0].input_ids.len() - plain[0].input_ids.len();
        let same = model.rerank("bad cab", &["a"])? == model.rank_tokens(&plain)?;
        let named = named.map_or_else(|e| e.to_string(), |x| format!("{} by its name", more(&x)));
        Ok(format!("{} more tokens, {named}; same score: {same}", more(&with)))
    };
    t.head("score", "default prompt of a cross-encoder", |c| {
        let settings = json!({
            "model_type": "CrossEncoder", "prompts": {"topic": "a b c ", "web": "a "},
            "default_prompt_name": "web"
        });
        cross_encoder(c, settings)
    });
    t.head("score", "prompts of a model that is no cross-encoder", |c| {
        cross_encoder(c, json!({"prompts": {"web": "a "}, "default_prompt_name": "web"}))
    });
    t.head("score", "a cross-encoder with modules after it", |c| {
        let modules = json!([{"type": "sentence_transformers.base.modules.transformer.Transformer",
            "path": ""}, {"type": "sentence_transformers.base.modules.Dense", "path": "1_Dense"}]);
        c.file("modules.json", modules.to_string());
        c.file("config_sentence_transformers.json", r#"{"model_type": "CrossEncoder"}"#);
        TextClassifier::from_files(&c.files(), F32, &Cpu)?;
        Ok("loaded".to_string())
    });
    t.head("sequence", "an empty sequence in a packed batch", |c| {
        let (model, _) = BertForSequenceClassification::from_files(&c.files(), F32, &Cpu)?;
        let mut batch = PackedBatch::default();
        for ids in [&[1u32][..], &[], &[2]] {
            batch.push(ids, &vec![0; ids.len()])?;
        }
        Ok(format!("{:?}", model.forward_packed(&batch)?.dims()))
    });
    for (quirk, text) in [
        ("a mask that truncation removes", "a [MASK] ".to_string() + &"b ".repeat(40) + "[MASK]"),
        ("all masks truncated", "b ".repeat(40) + "[MASK]"),
    ] {
        t.head("masked_lm", quirk, |c| {
            let filled = MaskFiller::from_files(&c.files(), F32, &Cpu)?.fill(&text, 1)?;
            Ok(format!("{} filled", filled.len()))
        });
    }
    t.head("score", "a number in sentence_transformers", |c| {
        c.set("sentence_transformers", json!({"activation_fn": null, "version": 4}));
        TextClassifier::from_files(&c.files(), F32, &Cpu)?;
        Ok("loaded".to_string())
    });
    t.head("sequence", "num_labels beside id2label", |c| {
        c.set("id2label", json!({"0": "x", "1": "y"})).set("num_labels", json!(3));
        let labels = Labels::from_json(c.config.to_string().as_bytes(), CONFIG)?;
        Ok(labels.names().join(" "))
    });
    t.head("masked_lm", "both biases of the scores", |c| {
        let ids = Tensor::new(&[[7u32, 5]], &Cpu)?;
        let score = |c: &Checkpoint| -> anyhow::Result<f32> {
            let (model, _) = BertForMaskedLm::from_files(&c.files(), F32, &Cpu)?;
            Ok(value(&model.forward(&ids, None, &AttentionMask::none())?)?)
        };
        let before = score(c)?;
        let bias = c.tensors["cls.predictions.bias"].clone();
        c.tensors.insert("cls.predictions.decoder.bias".to_string(), (bias + 1.0)?);
        Ok(format!("{:.3} more, as decoder.bias has", score(c)? - before))
    });
    t.head("masked_lm", "a text without a gap", |c| {
        Ok(format!("{:?}", MaskFiller::from_files(&c.files(), F32, &Cpu)?.fill("a", 1)?))
    });
    for aggregation in [
        Aggregation::None,
        Aggregation::Simple,
        Aggregation::First,
        Aggregation::Average,
        Aggregation::Max,
    ] {
        t.head("tagger", &format!("tags joined: {aggregation:?}"), |c| {
            let model = TokenClassifier::from_files(&c.files(), F32, &Cpu)?;
            let found = model.classify("Café bead, Abba (cab) ébb faced", aggregation)?;
            let found =
                found.iter().map(|e| format!("{}:{}-{}", e.label, e.range.start, e.range.end));
            Ok(found.collect::<Vec<_>>().join(" "))
        });
    }
    t.head("answer", "a question too long for its text", |c| {
        let model = QuestionAnswerer::from_files(&c.files(), F32, &Cpu)?;
        Ok(format!("{:?}", model.answer(&"a ".repeat(500), "b", 1)?))
    });
    t.head("answer", "an answer", |c| {
        let model = QuestionAnswerer::from_files(&c.files(), F32, &Cpu)?;
        let text = "A café fed, a cab: bead";
        let found = model.answer("bad?", text, 2)?;
        let parts: Vec<&str> = found.answers.iter().map(|a| &text[a.range.clone()]).collect();
        Ok(format!("{parts:?}"))
    });
}

fn sentence_transformers(t: &mut Table) {
    t.group("sentence-transformers");
    let weights = |h: &Tensor| Tensor::arange(1f32, h.dim(0)? as f32 + 1.0, &Cpu)?.unsqueeze(1);
    type ByHand<'a> = dyn Fn(&Tensor) -> candle_core::Result<Tensor> + 'a;
    let by_hand: [(&str, &ByHand); 6] = [
        ("cls", &|h| h.i(0)),
        ("max", &|h| h.max(0)),
        ("mean", &|h| h.mean(0)),
        ("mean_sqrt_len_tokens", &|h| h.sum(0)? / (h.dim(0)? as f64).sqrt()),
        ("weightedmean", &|h| h.broadcast_mul(&weights(h)?)?.sum(0)? / 10.0),
        ("lasttoken", &|h| h.i(3)),
    ];
    let json_of = |name: &str| {
        let early = match name {
            "cls" | "lasttoken" => format!("pooling_mode_{}", name.replace("cls", "cls_token")),
            "max" | "mean" | "weightedmean" => format!("pooling_mode_{name}_tokens"),
            _ => format!("pooling_mode_{name}"),
        };
        json!({"word_embedding_dimension": 24, "pooling_mode_mean_tokens": name == "mean", early: true})
    };
    for (name, expected) in by_hand {
        t.case(&format!("pooling {name}"), |c| {
            let json = json_of(name).to_string();
            c.sentence().file("1_Pooling/config.json", json).pooled(expected)
        });
    }
    t.case("poolings cls and max, joined", |c| {
        let json = r#"{"pooling_mode": ["cls", "max"]}"#;
        let both = |h: &Tensor| Tensor::cat(&[h.i(0)?, h.max(0)?], 0);
        c.sentence().file("1_Pooling/config.json", json).pooled(both)
    });
    t.case("a mode that is unknown", |c| {
        c.sentence().file("1_Pooling/config.json", r#"{"pooling_mode": "median"}"#);
        c.pooled(|h| h.i(0))
    });
    t.case("include_prompt false", |c| {
        let json = r#"{"pooling_mode": "mean", "include_prompt": false}"#;
        let prompts = r#"{"prompts": {"p": "a "}, "default_prompt_name": "p"}"#;
        c.sentence().file("1_Pooling/config.json", json);
        c.file("config_sentence_transformers.json", prompts);
        let expected = c.hidden(&[2, 5, 6, 3])?.i(2..)?.mean(0)?; // without [CLS] a
        let got = c.embedder()?.embed(&["b"])?.squeeze(0)?;
        Ok(same("as by hand", max_difference(&got, &expected)?))
    });
    t.case("Normalize", |c| {
        c.sentence().also_module("Normalize", "2_Normalize").pooled(|h| {
            let mean = h.mean(0)?;
            mean.broadcast_div(&mean.sqr()?.sum_all()?.sqrt()?)
        })
    });
    let dense = |c: &mut Checkpoint, config: &str| {
        let weight = Tensor::ones((2, 24), DType::F32, &Cpu).unwrap();
        let bias = Tensor::new(&[0.5f32, -0.5], &Cpu).unwrap();
        let tensors = HashMap::from([("linear.weight", weight), ("linear.bias", bias)]);
        c.sentence().also_module("Dense", "2_Dense").file("2_Dense/config.json", config);
        c.file("2_Dense/model.safetensors", safetensors::serialize(&tensors, None).unwrap());
    };
    let sum =
        |h: &Tensor| h.mean(0)?.sum_keepdim(0)?.broadcast_add(&Tensor::new(&[0.5f32, -0.5], &Cpu)?);
    t.case("Dense, with tanh unless it says otherwise", |c| {
        dense(c, r#"{"in_features": 24, "out_features": 2, "bias": true}"#);
        c.pooled(|h| sum(h)?.tanh())
    });
    for (quirk, config) in [
        (
            "Dense with an activation's class",
            r#"{"in_features": 24, "out_features": 2, "activation_function": "torch.nn.modules.linear.Identity"}"#,
        ),
        (
            "Dense with an unknown class",
            r#"{"in_features": 24, "out_features": 2, "activation_function": "mine.F"}"#,
        ),
        ("Dense of another width", r#"{"in_features": 25, "out_features": 2}"#),
        (
            "Dense without its tensors",
            r#"{"in_features": 24, "out_features": 2, "use_residual": true}"#,
        ),
        (
            "Dense on the tokens",
            r#"{"in_features": 24, "out_features": 2, "module_input_name": "token_embeddings"}"#,
        ),
    ] {
        t.case(quirk, |c| {
            dense(c, config);
            c.pooled(sum)
        });
    }
    let prompts = r#"{"prompts": {"query": "a ", "document": ""}, "default_prompt_name": null}"#;
    let prompted = |c: &mut Checkpoint, prompt: Prompt| -> Outcome {
        c.sentence().file("config_sentence_transformers.json", prompts);
        let options = EmbedOptions { prompt, ..EmbedOptions::default() };
        let got = c.embedder()?.embed_with(&["b"], options)?.vectors.squeeze(0)?;
        let with = max_difference(&got, &c.hidden(&[2, 5, 6, 3])?.mean(0)?)? < 1e-5;
        Ok(if with { "with the prompt" } else { "without" }.to_string())
    };
    t.case("encode_query", |c| prompted(c, Prompt::Query));
    t.case("encode_document", |c| prompted(c, Prompt::Document));
    t.case("--prompt-name query", |c| prompted(c, Prompt::Named("query")));
    t.case("--prompt-name that is unknown", |c| prompted(c, Prompt::Named("topic")));
    t.case("cut to 3 dimensions, then of length 1 again", |c| {
        c.sentence().also_module("Normalize", "");
        let embedder = c.embedder()?.with_dimension(3)?;
        let got = embedder.embed(&["a b"])?;
        Ok(format!("{:?} of length {:.4}", got.dims(), value(&got.sqr()?.sum_all()?.sqrt()?)?))
    });
    for (quirk, file, json) in [
        (
            "a default prompt that is unknown",
            "config_sentence_transformers.json",
            r#"{"prompts": {"query": "q "}, "default_prompt_name": "topic"}"#,
        ),
        ("max_seq_length below 0", "sentence_bert_config.json", r#"{"max_seq_length": -1}"#),
        ("max_seq_length 2", "sentence_bert_config.json", r#"{"max_seq_length": 2}"#),
        (
            "a module's code of its own",
            "modules.json",
            r#"[{"type": "custom_st.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]"#,
        ),
        ("modules.json of no JSON", "modules.json", "["),
    ] {
        t.case(quirk, |c| c.sentence().file(file, json).pooled(|h| h.i(0)));
    }
    t.case("truncate_dim beyond the width", |c| {
        c.sentence().file("config_sentence_transformers.json", r#"{"truncate_dim": 25}"#);
        c.pooled(|h| h.mean(0))
    });
    for early in
        ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json"]
    {
        t.case(&format!("max_seq_length of {early}"), |c| {
            c.file(early, r#"{"max_seq_length": 4, "do_lower_case": false}"#);
            c.sentence_tokens("a b c")
        });
    }
    t.case("no modules.json", |c| c.file("vocab.txt", WORDS).pooled(|h| h.mean(0)));
    t.case("no modules.json, pooling named by the caller", |c| {
        c.file("vocab.txt", WORDS);
        let pooling = Pooling::new(&[PoolingMode::Cls])?;
        let embedder = Embedder::from_transformer(&c.files(), pooling, Precision::F32, &Cpu)?;
        let got = embedder.embed(&["a b"])?.squeeze(0)?;
        let expected = c.hidden(&[2, 5, 6, 3])?.i(0)?;
        Ok(same("as by hand", max_difference(&got, &expected)?))
    });
    t.case("the transformer in a folder of its own", |c| {
        let all = c.sentence().all();
        let below = |name: &str| ["vocab.txt", CONFIG, WEIGHTS].contains(&name);
        let name = |name: String| if below(&name) { format!("0_BERT/{name}") } else { name };
        let mut files: BTreeMap<_, _> =
            all.into_iter().map(|(file, bytes)| (name(file), bytes)).collect();
        let modules = String::from_utf8(files["modules.json"].clone())?;
        let modules = modules.replacen("\"path\":\"\"", "\"path\":\"0_BERT\"", 1);
        files.insert("modules.json".into(), modules.into_bytes());
        let files = ModelFiles::memory("m", files);
        let got = Embedder::from_files(&files, Precision::F32, &Cpu)?.embed(&["a b"])?;
        Ok(same(
            "as by hand",
            max_difference(&got.squeeze(0)?, &c.hidden(&[2, 5, 6, 3])?.mean(0)?)?,
        ))
    });
    t.case("a Pooling config without an active mode", |c| {
        c.sentence().file("1_Pooling/config.json", r#"{"pooling_mode_cls_token": false}"#);
        c.pooled(|h| h.mean(0))
    });
    t.case("an unknown pooling switch", |c| {
        c.sentence().file("1_Pooling/config.json", r#"{"pooling_mode_median": true}"#);
        c.pooled(|h| h.mean(0))
    });
    t.case("a model of another type", |c| {
        c.sentence()
            .file("config_sentence_transformers.json", r#"{"model_type": "SparseEncoder"}"#);
        c.pooled(|h| h.mean(0))
    });
    t.case("a model of another type, pooled by the caller", |c| {
        c.sentence().file(
            "config_sentence_transformers.json",
            r#"{"model_type": "CrossEncoder", "prompts": {"q": "c "}, "default_prompt_name": "q"}"#,
        );
        let embedder =
            Embedder::from_transformer(&c.files(), PoolingMode::Mean.into(), Precision::F32, &Cpu)?;
        let got = embedder.embed(&["a b"])?.squeeze(0)?;
        Ok(same("as by hand", max_difference(&got, &c.hidden(&[2, 5, 6, 3])?.mean(0)?)?))
    });
    t.head("masked_lm", "fill-mask of a folder with other modules", |c| {
        let modules = json!([{"type": "pylate.models.Splade", "path": ""}]);
        c.file("modules.json", modules.to_string());
        let filled = MaskFiller::from_files(&c.files(), Precision::F32, &Cpu)?.fill("[MASK]", 1)?;
        Ok(format!("{} filled", filled.len()))
    });
    t.case("a Transformer alone", |c| {
        let modules = json!([{"type": "sentence_transformers.models.Transformer", "path": ""}]);
        c.sentence().file("modules.json", modules.to_string()).pooled(|h| h.mean(0))
    });
    t.case("a module that is not computed", |c| {
        c.sentence().also_module("LSTM", "2").pooled(|h| h.i(0))
    });
    for path in ["../x", "/etc", "1_Pooling/../.."] {
        t.case(&format!("a module in {path}"), |c| {
            c.sentence().also_module("Dense", path).pooled(|h| h.i(0))
        });
    }
}

fn tokenizers(t: &mut Table) {
    t.group("tokenizers");
    let vocabulary: serde_json::Map<_, _> =
        WORDS.lines().zip(0..).map(|(word, id)| (word.to_string(), json!(id))).collect();
    let baked = json!({
        "version": "1.0",
        "truncation": {
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
        },
        "padding": {
            "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"
        },
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": false, "lowercase": false
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": null,
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocabulary
        }
    });
    let baked = baked.to_string();
    t.case("tokenizer.json with padding and truncation", |c| {
        c.file("tokenizer.json", &baked[..]).tokens("a b c abc")
    });
    // The class's switches count, as in transformers 5.23, and their defaults, if it is BERT's.
    for (quirk, settings) in [
        ("tokenizer.json with case, no class", "{}"),
        ("tokenizer.json with case, BERT's class", r#"{"tokenizer_class": "BertTokenizer"}"#),
        ("tokenizer.json, do_lower_case false", r#"{"do_lower_case": false}"#),
        (
            "tokenizer.json with case, a general class",
            r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#,
        ),
    ] {
        t.case(quirk, |c| {
            c.file("tokenizer.json", &baked[..]).file("tokenizer_config.json", settings);
            c.tokens("A CAFÉ café")
        });
    }
    let text = "A CAFÉ 東京";
    for (quirk, settings) in [
        ("vocab.txt", "{}"),
        ("do_lower_case false", r#"{"do_lower_case": false}"#),
        (
            "strip_accents null follows the case",
            r#"{"strip_accents": null, "do_lower_case": true}"#,
        ),
        ("strip_accents false", r#"{"strip_accents": false}"#),
        ("strip_accents alone", r#"{"strip_accents": true, "do_lower_case": false}"#),
        ("tokenize_chinese_chars false", r#"{"tokenize_chinese_chars": false}"#),
        ("model_max_length 4", r#"{"model_max_length": 4}"#),
        ("model_max_length 1e30", r#"{"model_max_length": 1e30}"#),
        ("model_max_length 2", r#"{"model_max_length": 2}"#),
    ] {
        t.case(quirk, |c| {
            c.file("vocab.txt", WORDS).file("tokenizer_config.json", settings).tokens(text)
        });
    }
    // What the file of settings says of added tokens, beside the vocabulary of 16 pieces.
    let settings = "tokenizer_config.json";
    for (quirk, file, json) in [
        ("added_tokens.json", "added_tokens.json", r#"{"caf": 17, "東京": 16}"#),
        ("added_tokens.json, another id", "added_tokens.json", r#"{"東京": 20}"#),
        ("additional_special_tokens", settings, r#"{"additional_special_tokens": ["東京"]}"#),
        (
            "extra_special_tokens, a list",
            settings,
            r#"{"extra_special_tokens": [{"content": "CAF", "lstrip": true}]}"#,
        ),
        ("extra_special_tokens by names", settings, r#"{"extra_special_tokens": {"x": "東京"}}"#),
        ("extra_special_tokens of no kind", settings, r#"{"extra_special_tokens": 7}"#),
        ("a special token of the model's own", settings, r#"{"city_token": "東京"}"#),
        (
            "added_tokens_decoder",
            settings,
            r#"{"added_tokens_decoder": {"16": {"content": "東京", "normalized": false}}}"#,
        ),
        (
            "added_tokens_decoder, another id",
            settings,
            r#"{"added_tokens_decoder": {"9": {"content": "東京"}}}"#,
        ),
        ("truncation_side left", settings, r#"{"truncation_side": "left", "model_max_length": 4}"#),
        ("truncation_side of no kind", settings, r#"{"truncation_side": "middle"}"#),
        ("max_len", settings, r#"{"max_len": 4}"#),
        ("init_inputs", settings, r#"{"init_inputs": ["x"]}"#),
        (
            "fast_tokenizer_files",
            settings,
            r#"{"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]}"#,
        ),
    ] {
        t.case(quirk, |c| c.file("vocab.txt", WORDS).file(file, json).tokens(text));
    }
    let sentence = "sentence_bert_config.json";
    for (quirk, json) in [
        (
            "processor_kwargs over tokenizer_config.json",
            r#"{"processor_kwargs": {"do_lower_case": false, "model_max_length": 5}}"#,
        ),
        (
            "processing_kwargs",
            r#"{"max_seq_length": 9,
                "processing_kwargs": {"text": {"max_length": 4, "truncation": true}}}"#,
        ),
    ] {
        t.case(quirk, |c| c.file(sentence, json).sentence_tokens(text));
    }
    t.case("max_seq_length, of a model alone", |c| {
        c.file("vocab.txt", WORDS).file(sentence, r#"{"max_seq_length": 4}"#).tokens(text)
    });
    for (quirk, map) in [
        ("extra_special_tokens in both files", r#"{"extra_special_tokens": ["東京"]}"#),
        ("additional_special_tokens in both files", r#"{"additional_special_tokens": ["東京"]}"#),
    ] {
        t.case(quirk, |c| {
            c.file(settings, r#"{"extra_special_tokens": ["CAF"]}"#);
            c.file("vocab.txt", WORDS).file("special_tokens_map.json", map).tokens(text)
        });
    }
    t.case("an empty list beside special_tokens_map.json", |c| {
        c.file(settings, r#"{"additional_special_tokens": []}"#);
        c.file("special_tokens_map.json", r#"{"additional_special_tokens": ["東京"]}"#);
        c.file("vocab.txt", WORDS).tokens(text)
    });
    t.case("names beside special_tokens_map.json", |c| {
        c.file(settings, r#"{"extra_special_tokens": {"a": "CAF"}}"#);
        c.file("special_tokens_map.json", r#"{"additional_special_tokens": ["東京"]}"#);
        c.file("vocab.txt", WORDS).tokens(text)
    });
    t.case("special tokens in special_tokens_map.json", |c| {
        let map = r#"{"cls_token": "<s>", "sep_token": {"content": "</s>", "lstrip": false},
            "unk_token": "<unk>", "mask_token": "<mask>"}"#;
        let words = WORDS.replace("[CLS]", "<s>").replace("[SEP]", "</s>");
        let words = words.replace("[UNK]", "<unk>").replace("[MASK]", "<mask>");
        c.file("vocab.txt", words).file("special_tokens_map.json", map).tokens("x a <mask>")
    });
    t.case("special tokens in text", |c| c.file("vocab.txt", WORDS).tokens("a [SEP] b"));
    t.case("split_special_tokens", |c| {
        c.file(settings, r#"{"split_special_tokens": true}"#);
        c.file("vocab.txt", WORDS).tokens("a [SEP] b")
    });
    t.case("truncation direction of tokenizer.json", |c| {
        let left = baked.replace("\"direction\":\"Right\"", "\"direction\":\"Left\"");
        assert_ne!(left, baked);
        c.file("tokenizer.json", left).file(settings, r#"{"model_max_length": 4}"#).tokens(text)
    });
    t.case("word pieces of a class with other rules", |c| {
        c.file("tokenizer.json", &baked[..])
            .file(settings, r#"{"tokenizer_class": "MPNetTokenizer"}"#);
        c.tokens("A CAFÉ café")
    });
    t.case("tokenizer_class in config.json", |c| {
        c.set("tokenizer_class", json!("PreTrainedTokenizerFast"));
        c.file("tokenizer.json", &baked[..]).tokens("A CAFÉ café")
    });
    for (quirk, names) in [
        ("token types of a pair", r#"{}"#),
        (
            "model_input_names without token types",
            r#"{"model_input_names": ["input_ids", "attention_mask"]}"#,
        ),
        ("token types of DistilBertTokenizer", r#"{"tokenizer_class": "DistilBertTokenizer"}"#),
    ] {
        t.case(quirk, |c| {
            c.file(settings, names);
            let config = BertConfig::from_json(&c.all()[CONFIG], "m/config.json")?;
            let files = c.file("vocab.txt", WORDS).files();
            let pairs = TextTokenizer::from_files(&files, &config)?.encode_pairs(&[("a", "b")])?;
            Ok(format!("{:?}", pairs[0].token_type_ids))
        });
    }
    t.case("lines that end as on Windows", |c| {
        c.file("vocab.txt", WORDS.replace('\n', "\r\n")).tokens(text)
    });
    t.case("tokenizer_class of Japanese word pieces", |c| {
        let settings = r#"{"tokenizer_class": "BertJapaneseTokenizer"}"#;
        c.file("vocab.txt", WORDS).file("tokenizer_config.json", settings).tokens(text)
    });
    t.case("a vocabulary without [SEP]", |c| c.file("vocab.txt", "[UNK]\n[CLS]\na").tokens("a"));
    t.case("a vocabulary of no UTF-8", |c| c.file("vocab.txt", *b"[UNK]\n\xff").tokens("a"));
    t.case("no tokenizer", |c| c.tokens("a"));
    t.case("a broken tokenizer.json", |c| c.file("tokenizer.json", "{}").tokens("a"));
    let long = "a ".repeat(30);
    for (quirk, long_texts) in [
        ("a text too long: cut, and told", LongTexts::Truncate),
        ("a text too long: refused", LongTexts::Refuse),
        ("a text too long: windows", LongTexts::Windows),
    ] {
        t.case(quirk, |c| {
            let options = EmbedOptions { long_texts, ..EmbedOptions::default() };
            let got = c.sentence().embedder()?.embed_with(&["b", &long], options)?;
            let cut = got
                .truncated
                .iter()
                .map(|cut| format!("text {}: {} of {} tokens", cut.text, cut.kept, cut.tokens));
            Ok(format!("{:?} {}", got.vectors.dims(), cut.collect::<Vec<_>>().join(", ")))
        });
    }
}

fn inspections(t: &mut Table) {
    t.group("inspect");
    t.case("an encoder", |c| inspected(c));
    t.case("a sentence-transformers folder", |c| inspected(c.sentence()));
    t.head("token", "a token classifier", |c| inspected(c));
    t.head("score", "a cross-encoder with modules.json", |c| {
        let modules = json!([{"type": "sentence_transformers.models.Transformer", "path": ""}]);
        inspected(c.file("modules.json", modules.to_string()))
    });
    for (quirk, folder) in [("a decoder", "bert_lm"), ("an encoder-decoder", "bert2bert")] {
        t.from(Checkpoint::golden(folder), quirk, |c| inspected(c));
    }
    t.case("a look-alike", |c| inspected(c.set("position_embedding_type", json!("rope"))));
    t.case("no config", |c| inspected(c.without(CONFIG)));
    t.case("a tensor is missing", |c| {
        c.tensors.remove(QUERY);
        inspected(c)
    });
    t.from(Checkpoint::golden("bert_lm"), "a decoder, run", |c| {
        let (model, report) = BertDecoder::from_files(&c.files(), Precision::F32, &Cpu)?;
        Ok(format!("{} tensors, {} layers", report.loaded.len(), model.config().num_hidden_layers))
    });
    t.from(Checkpoint::golden("bert2bert"), "an encoder-decoder, run", |c| {
        let (_, report) = EncoderDecoder::from_files(&c.files(), Precision::F32, &Cpu)?;
        Ok(format!("{} tensors", report.loaded.len()))
    });
}

fn hostile(t: &mut Table) {
    t.group("hostile");
    let x = |shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype": "F32", "shape": {shape}, "data_offsets": [{from}, {to}]}}"#)
    };
    t.case("a header longer than the file", |c| {
        c.file(WEIGHTS, [&1000u64.to_le_bytes()[..], b"{}"].concat()).encode()
    });
    t.case("a header of 2^64 bytes", |c| {
        c.file(WEIGHTS, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).encode()
    });
    t.case("an empty file", |c| c.file(WEIGHTS, "").encode());
    t.case("a header of no UTF-8", |c| {
        c.file(WEIGHTS, [&2u64.to_le_bytes()[..], b"\xff\xff"].concat()).encode()
    });
    t.case("a header that is no JSON", |c| c.header("{", 0));
    t.case("tensors that overlap", |c| {
        c.header(&format!(r#"{{"x": {}, "y": {}}}"#, x("[4]", 0, 16), x("[4]", 8, 24)), 24)
    });
    t.case("a gap between tensors", |c| c.header(&format!(r#"{{"x": {}}}"#, x("[4]", 4, 20)), 20));
    t.case("a huge shape", |c| {
        c.header(&format!(r#"{{"x": {}}}"#, x("[4294967296, 4294967296]", 0, 16)), 16)
    });
    t.case("a shape that does not fit its bytes", |c| {
        c.header(&format!(r#"{{"x": {}}}"#, x("[5]", 0, 16)), 16)
    });
    t.case("data beyond the file", |c| c.header(&format!(r#"{{"x": {}}}"#, x("[4]", 0, 16)), 12));
    t.case("data behind the last tensor", |c| {
        c.header(&format!(r#"{{"x": {}}}"#, x("[4]", 0, 16)), 20)
    });
    t.case("a key twice", |c| {
        c.header(&format!(r#"{{"x": {}, "x": {}}}"#, x("[4]", 0, 16), x("[4]", 16, 32)), 32)
    });
    t.case("a dtype that is unknown", |c| {
        c.header(&format!(r#"{{"x": {}}}"#, x("[4]", 0, 16).replace("F32", "F33")), 16)
    });
    t.case("a pointer of Git LFS", |c| {
        c.file(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n")
            .encode()
    });
    let index = |c: &mut Checkpoint, map: Value| {
        let shard = c.all()[WEIGHTS].clone();
        c.without(WEIGHTS).file("a.st", shard.clone()).file("b.st", shard);
        c.file("model.safetensors.index.json", json!({"weight_map": map}).to_string()).encode()
    };
    for name in ["../a.st", "/etc/passwd", "..", "", "x/y", "x\\y", "C:x"] {
        t.case(&format!("an index that leads to {name:?}"), |c| index(c, json!({"x": name})));
    }
    t.case("an index of a shard that is missing", |c| index(c, json!({"x": "c.st"})));
    t.case("an index of a tensor that its shard lacks", |c| index(c, json!({"x": "a.st"})));
    t.case("an index of two shards that share tensors", |c| {
        index(c, json!({QUERY: "a.st", "x": "b.st"}))
    });
    t.case("an index that is no JSON", |c| {
        c.without(WEIGHTS).file("model.safetensors.index.json", "[]").encode()
    });

    // Three pickles as torch.save wrote before 1.6, and what follows.
    let pickle = |c: &mut Checkpoint, program: &[u8]| {
        let before = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";
        c.without(WEIGHTS).file("pytorch_model.bin", [before, program].concat()).encode()
    };
    t.case("a pickle that would run a program", |c| {
        pickle(c, b"\x80\x02}X\x01\0\0\0xcos\nsystem\nX\x04\0\0\0true\x85Rs.")
    });
    t.case("a pickle that is cut short", |c| pickle(c, b"\x80\x02}X\xff\xff\xff\xffx"));
    t.case("a pickle that is deep", |c| {
        pickle(c, &[&b"\x80\x02N"[..], &[0x85; 1_000_000], b"."].concat())
    });
    t.case("a pickle of a tensor of many dimensions, many times", |c| {
        let key = |i: u32| [&b"X\x05\0\0\0"[..], format!("{i:05}").as_bytes()].concat();
        let storage =
            b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ";
        let sizes = [&b"]q\x01("[..], &b"K\x01".repeat(100_000), b"eh\x01"].concat();
        let first = b"ctorch._utils\n_rebuild_tensor_v2\n(";
        let first = [&key(0)[..], first, storage, b"K\0", &sizes, b"\x89NtRq\0"].concat();
        let others = (1..20_000).flat_map(|i| [&key(i)[..], b"h\0"].concat()).collect::<Vec<_>>();
        pickle(c, &[b"\x80\x02}(", &first[..], &others, b"u."].concat())
    });
    t.case("a pickle of keys that are long lists", |c| {
        let list = [&b"\x80\x02}(X\x01\0\0\0a]q\0("[..], &b"N".repeat(1_000_000), b"e"].concat();
        pickle(c, &[&list[..], &b"h\0N".repeat(300_000), b"u."].concat())
    });
    t.case("a pickle that doubles itself", |c| {
        let twice = b"q\x00h\x00\x86"; // (x, x) of x
        pickle(c, &[&b"\x80\x02N"[..], &twice.repeat(100), b"."].concat())
    });
    t.case("an archive that is cut short", |c| {
        let bytes = fs::read(golden("pickled/archive.bin"))?;
        c.without(WEIGHTS).file("pytorch_model.bin", &bytes[..bytes.len() / 2]).encode()
    });
    t.case("an archive of nothing", |c| {
        c.without(WEIGHTS)
            .file(
                "pytorch_model.bin",
                b"PK\x05\x06".iter().chain(&[0; 18]).copied().collect::<Vec<_>>(),
            )
            .encode()
    });
}
