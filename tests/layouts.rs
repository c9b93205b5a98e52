//! Checkpoints with the tensor names and shapes of public ones, and with zeros as values.
//! docs/checkpoints.md shows the output of `encodle inspect` for them, and lists published models.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{Inspection, ModelConfig, ModelFiles, PoolingMode};
use serde_json::{Value, json};

use crate::{golden_architectures, golden_decoders};

/// Tensor names and shapes.
type Tensors = Vec<(String, Vec<usize>)>;

struct Sizes {
    vocabulary: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    intermediate: usize,
}

impl Sizes {
    /// `config.json` with the eleven keys of the first BERT checkpoints.
    fn config(&self) -> Value {
        json!({
            "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
            "hidden_size": self.hidden, "initializer_range": 0.02,
            "intermediate_size": self.intermediate, "max_position_embeddings": 512,
            "num_attention_heads": self.heads, "num_hidden_layers": self.layers,
            "type_vocab_size": 2, "vocab_size": self.vocabulary
        })
    }

    /// The tensors of an encoder, or, with `cross`, of a decoder with cross-attention.
    fn stack(&self, prefix: &str, cross: bool) -> Tensors {
        let (e, f) = (self.hidden, self.intermediate);
        let mut tensors: Tensors = vec![];
        for (table, rows) in [("word", self.vocabulary), ("position", 512), ("token_type", 2)] {
            tensors.push((format!("{prefix}embeddings.{table}_embeddings.weight"), vec![rows, e]));
        }
        norm(&mut tensors, &format!("{prefix}embeddings"), e);
        for layer in 0..self.layers {
            let layer = format!("{prefix}encoder.layer.{layer}");
            for attention in ["attention", "crossattention"].iter().take(1 + usize::from(cross)) {
                for part in ["self.query", "self.key", "self.value", "output.dense"] {
                    linear(&mut tensors, &format!("{layer}.{attention}.{part}"), e, e);
                }
                norm(&mut tensors, &format!("{layer}.{attention}.output"), e);
            }
            linear(&mut tensors, &format!("{layer}.intermediate.dense"), f, e);
            linear(&mut tensors, &format!("{layer}.output.dense"), e, f);
            norm(&mut tensors, &format!("{layer}.output"), e);
        }
        tensors
    }

    /// The head of a language model, whose matrix is tied to the word embeddings.
    fn lm_head(&self, tensors: &mut Tensors, prefix: &str) {
        linear(
            tensors,
            &format!("{prefix}cls.predictions.transform.dense"),
            self.hidden,
            self.hidden,
        );
        norm(tensors, &format!("{prefix}cls.predictions.transform"), self.hidden);
        tensors.push((format!("{prefix}cls.predictions.bias"), vec![self.vocabulary]));
    }
}

fn linear(tensors: &mut Tensors, name: &str, output: usize, input: usize) {
    tensors.push((format!("{name}.weight"), vec![output, input]));
    tensors.push((format!("{name}.bias"), vec![output]));
}

fn norm(tensors: &mut Tensors, prefix: &str, e: usize) {
    tensors.push((format!("{prefix}.LayerNorm.weight"), vec![e]));
    tensors.push((format!("{prefix}.LayerNorm.bias"), vec![e]));
}

fn safetensors_file(tensors: &Tensors, dtype: DType) -> Vec<u8> {
    let zeros = tensors.iter().map(|(name, shape)| {
        let dtype = if name.ends_with("position_ids") { DType::I64 } else { dtype };
        (name.clone(), Tensor::zeros(&shape[..], dtype, &Cpu).unwrap())
    });
    safetensors::serialize(zeros.collect::<BTreeMap<_, _>>(), None).unwrap()
}

const TINY: Sizes =
    Sizes { vocabulary: 30_522, hidden: 128, layers: 2, heads: 2, intermediate: 512 };

/// Google's BERT-tiny as converted in 2019: a config of eleven keys, LayerNorm parameters named
/// gamma and beta, both pretraining heads.
fn pretrained() -> ModelFiles {
    let mut tensors = TINY.stack("bert.", false);
    linear(&mut tensors, "bert.pooler.dense", 128, 128);
    TINY.lm_head(&mut tensors, "");
    linear(&mut tensors, "cls.seq_relationship", 2, 128);
    for (name, _) in &mut tensors {
        *name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        *name = name.replace("LayerNorm.bias", "LayerNorm.beta");
    }
    let config = TINY.config().to_string().into_bytes();
    let files = [
        ("config.json", config),
        ("model.safetensors", safetensors_file(&tensors, DType::F32)),
        ("vocab.txt", b"[UNK]\n[CLS]\n[SEP]\n".to_vec()),
    ];
    ModelFiles::memory("pretrained", files)
}

/// A cross-encoder with one label and a `position_ids` buffer.
fn cross_encoder() -> ModelFiles {
    let mut tensors = TINY.stack("bert.", false);
    linear(&mut tensors, "bert.pooler.dense", 128, 128);
    linear(&mut tensors, "classifier", 1, 128);
    tensors.push(("bert.embeddings.position_ids".into(), vec![1, 512]));
    let mut config = TINY.config();
    config["architectures"] = json!(["BertForSequenceClassification"]);
    config["id2label"] = json!({"0": "LABEL_0"});
    let files = [
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors", safetensors_file(&tensors, DType::F32)),
        ("vocab.txt", b"[UNK]\n[CLS]\n[SEP]\n".to_vec()),
    ];
    ModelFiles::memory("cross-encoder", files)
}

/// A sentence-transformers folder: head dimension 26, f16 in two shards, no pooler, three modules
/// after the transformer.
fn sentences() -> ModelFiles {
    let sizes = Sizes { vocabulary: 21_128, hidden: 312, layers: 4, heads: 12, intermediate: 1200 };
    let tensors = sizes.stack("", false);
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let shard_map = |part: &[(String, Vec<usize>)], shard: &str| -> BTreeMap<String, String> {
        part.iter().map(|(name, _)| (name.clone(), shard.to_string())).collect()
    };
    let mut map = shard_map(first, "model-00001-of-00002.safetensors");
    map.extend(shard_map(second, "model-00002-of-00002.safetensors"));
    let class = |name: &str| format!("sentence_transformers.models.{name}");
    let modules = json!([
        {"type": class("Transformer"), "path": ""},
        {"type": class("Pooling"), "path": "1_Pooling"},
        {"type": class("Dense"), "path": "2_Dense"},
        {"type": class("Normalize"), "path": "3_Normalize"}
    ]);
    let mut dense: Tensors = vec![];
    linear(&mut dense, "linear", 312, 312);
    let files = [
        ("2_Dense/config.json", br#"{"in_features": 312, "out_features": 312}"#.to_vec()),
        ("2_Dense/model.safetensors", safetensors_file(&dense, DType::F32)),
        ("config.json", sizes.config().to_string().into_bytes()),
        ("model.safetensors.index.json", json!({"weight_map": map}).to_string().into_bytes()),
        ("model-00001-of-00002.safetensors", safetensors_file(&first.to_vec(), DType::F16)),
        ("model-00002-of-00002.safetensors", safetensors_file(&second.to_vec(), DType::F16)),
        ("modules.json", modules.to_string().into_bytes()),
        ("1_Pooling/config.json", br#"{"pooling_mode_cls_token": true}"#.to_vec()),
        ("vocab.txt", b"[UNK]\n[CLS]\n[SEP]\n".to_vec()),
    ];
    ModelFiles::memory("sentences", files)
}

/// An encoder-decoder, whose config contains the configs of both parts.
fn encoder_decoder() -> ModelFiles {
    let mut tensors = TINY.stack("encoder.", false);
    tensors.extend(TINY.stack("decoder.bert.", true));
    TINY.lm_head(&mut tensors, "decoder.");
    let mut decoder = TINY.config();
    decoder["is_decoder"] = json!(true);
    decoder["add_cross_attention"] = json!(true);
    let config = json!({
        "model_type": "encoder-decoder", "encoder": TINY.config(), "decoder": decoder,
        "decoder_start_token_id": 101, "eos_token_id": 102, "pad_token_id": 0
    });
    let files = [
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors", safetensors_file(&tensors, DType::F32)),
        ("tokenizer.json", vec![]),
    ];
    ModelFiles::memory("encoder-decoder", files)
}

#[test]
fn documented_output_of_bert_inspect_is_current() {
    let document = include_str!("../docs/checkpoints.md");
    for files in [pretrained(), cross_encoder(), sentences(), encoder_decoder()] {
        let found = Inspection::new(&files);
        assert!(found.runs(), "{found}");
        assert!(document.contains(&found.to_string()), "docs/checkpoints.md lacks\n{found}");
    }
}

/// The names of all architectures, from a config of every supported `model_type`.
fn architectures() -> BTreeSet<String> {
    let config = |model_type: &str, positions: &str| {
        let sizes = json!({
            "model_type": model_type, "position_embedding_type": positions, "vocab_size": 30,
            "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3,
            "intermediate_size": 20, "hidden_dim": 20, "max_position_embeddings": 15,
            "sliding_window": 4
        });
        ModelConfig::from_json(sizes.to_string().as_bytes(), "config.json")
    };
    // The error for an unknown type lists the supported types.
    let error = config("unknown", "absolute").unwrap_err().to_string();
    let (_, types) = error.split_once(": expected ").unwrap();
    let of_type = |model_type| {
        let positions = if ["new", "gte"].contains(&model_type) { "rope" } else { "absolute" };
        config(model_type, positions).unwrap()
    };
    let jina = config("bert", "alibi").unwrap(); // has BERT's type
    let all = types.split(", ").map(of_type).chain([jina]);
    all.map(|config| config.architecture().to_string()).collect()
}

#[test]
fn every_architecture_has_golden_and_published_models() -> anyhow::Result<()> {
    let runs_as = [
        "Embedder",
        "SparseEmbedder",
        "MultiVectorEmbedder",
        "EncoderForLogitScore",
        "EncoderForMaskedLm",
        "EncoderForSequenceClassification",
        "EncoderForTokenClassification",
        "EncoderForQuestionAnswering",
        "CausalLm",
    ];
    let document = include_str!("../docs/checkpoints.md");
    let (_, section) = document.split_once("\n## Published models\n").unwrap();
    let (table, _) = section.split_once("\n## ").unwrap();
    let (mut models, mut named) = (BTreeSet::new(), BTreeSet::new());
    for line in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cells: Vec<&str> =
            line.trim_matches(|c| c == '|' || c == ' ').split(" | ").map(str::trim).collect();
        let [model, architecture, pooling, prompts, runs] = cells[..] else {
            panic!("five cells: {line}")
        };
        assert!(model.contains('/') && models.insert(model), "{line}");
        named.insert(architecture.to_string());
        let class = runs.split('`').nth(1).unwrap();
        assert!(runs_as.contains(&class), "{line}");
        let mode = pooling.split(',').next().unwrap();
        assert_eq!(class == "Embedder", mode.parse::<PoolingMode>().is_ok(), "{line}");
        let has_prompts = prompts != "–";
        let is_embedder = class.ends_with("Embedder");
        assert!(mode.parse::<PoolingMode>().is_ok() || pooling == "–", "{line}");
        assert!(is_embedder || !has_prompts, "{line}");
    }
    assert_eq!(models.len(), 71);
    assert_eq!(named, architectures());

    let golden = golden_architectures::architectures()?.into_iter().map(|golden| golden.name);
    let golden = golden.chain(golden_decoders::decoders()?.into_iter().map(|d| d.architecture));
    assert_eq!(golden.chain(["BERT".to_string()]).collect::<BTreeSet<_>>(), architectures());
    Ok(())
}
