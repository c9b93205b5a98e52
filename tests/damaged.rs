//! Damaged models and input: each is an error that names what is wrong and what was expected.

use std::{collections::HashMap, fs, path::Path};

use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use encoder::{BertModel, Embedder, PackedBatch, Precision};
use mha::AttentionMask;
use tempfile::TempDir;

use crate::support::{MINILM, golden};

type Tensors = HashMap<String, Tensor>;

/// A copy of a tiny checkpoint, damaged by `damage`, and the error that it gives; the folder's
/// path is left out of it.
fn error(damage: impl Fn(&Path, &mut Tensors)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = (dir.path().join("config.json"), dir.path().join("model.safetensors"));
    fs::copy(golden("bert_gelu/config.json"), config).unwrap();
    let source = golden("bert_gelu/model.safetensors");
    let mut tensors = safetensors::load(source, &Cpu).unwrap();
    safetensors::save(&tensors, &weights).unwrap();
    let before = format!("{tensors:?}");
    damage(dir.path(), &mut tensors);
    if format!("{tensors:?}") != before {
        safetensors::save(&tensors, &weights).unwrap();
    }
    let error = BertModel::from_dir(dir.path(), Precision::F32, &Cpu).unwrap_err().to_string();
    error.replace(&format!("{}/", dir.path().display()), "")
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Cpu).unwrap()
}

const QUERY: &str = "encoder.layer.2.attention.self.query.weight";

#[test]
fn everything_wrong_is_told_at_once() {
    let got = error(|_, tensors| {
        let query = tensors.remove(QUERY).unwrap();
        tensors.insert("encoder.layer.2.attention.self.qury.weight".into(), query);
        tensors.insert("encoder.layer.0.output.dense.bias".into(), zeros(&[25]));
        let ids = zeros(&[19, 24]).to_dtype(DType::I64).unwrap();
        tensors.insert("embeddings.position_embeddings.weight".into(), ids);
        tensors.insert("encoder.layer.3.output.dense.bias".into(), zeros(&[24]));
    });
    for part in [
        "model.safetensors does not fit its config, 5 problems: ",
        "tensor \"encoder.layer.2.attention.self.query.weight\" is missing from model.safetensors: \
         expected shape [24, 24] (hidden_size = 24), got none; \
         the nearest name there is \"encoder.layer.2.attention.self.qury.weight\"",
        "tensor \"encoder.layer.0.output.dense.bias\" in model.safetensors: \
         expected shape [24] (hidden_size = 24), got [25]",
        "tensor \"embeddings.position_embeddings.weight\" in model.safetensors: \
         expected f32, f16, bf16 or f64, got i64",
        "tensor \"encoder.layer.2.attention.self.qury.weight\" in model.safetensors is unexpected: \
         the config does not ask for it",
        "tensor \"encoder.layer.3.output.dense.bias\" in model.safetensors is unexpected",
    ] {
        assert!(got.contains(part), "{part}\nnot in\n{got}");
    }
}

#[test]
fn half_precision_files_are_computed_in_f32() -> anyhow::Result<()> {
    let ids = Tensor::new(&[[7u32, 50, 100]], &Cpu)?;
    let run = |dtype: DType| -> anyhow::Result<Vec<f32>> {
        let dir = tempfile::tempdir()?;
        fs::copy(golden("bert_gelu/config.json"), dir.path().join("config.json"))?;
        let mut tensors = safetensors::load(golden("bert_gelu/model.safetensors"), &Cpu)?;
        for tensor in tensors.values_mut() {
            // Rounded so that both dtypes hold the same numbers.
            *tensor = tensor.to_dtype(DType::BF16)?.to_dtype(DType::F32)?.to_dtype(dtype)?;
        }
        safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
        let (model, _) = BertModel::from_dir(dir.path(), Precision::F32, &Cpu)?;
        let out = model.forward(&ids, None, &AttentionMask::none())?;
        Ok(out.last_hidden_state.flatten_all()?.to_vec1()?)
    };
    let expected = run(DType::F32)?;
    assert_eq!(run(DType::BF16)?, expected);
    assert_eq!(run(DType::F64)?, expected);
    Ok(())
}

/// The embedded model with one of its small files changed.
fn changed(file: &str, content: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("1_Pooling")).unwrap();
    for name in [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
    ] {
        fs::copy(Path::new(MINILM).join(name), dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join(file), content).unwrap();
    dir
}

/// What transformers 5.23 makes of these: `[UNK]` where the vocabulary knows only lower case.
#[test]
fn the_class_of_a_tokenizer_has_the_last_word_on_case() -> anyhow::Result<()> {
    let config = r#"{"tokenizer_class": "BertTokenizer", "do_lower_case": false}"#;
    let dir = changed("tokenizer_config.json", config);
    let tokens = Embedder::from_dir(dir.path(), Precision::F32, &Cpu)?
        .tokenizer()
        .encode(&["Hello Café 東京"])?;
    assert_eq!(tokens[0].input_ids, [101, 100, 100, 1879, 1755, 102]);
    Ok(())
}

/// As transformers 4 writes it beside tokenizer.json; nulls are as if they were not there.
#[test]
fn tokens_by_their_ids_are_read() -> anyhow::Result<()> {
    let token = |content: &str| {
        format!(
            r#"{{"content": "{content}", "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": true}}"#
        )
    };
    let config = format!(
        r#"{{"added_tokens_decoder": {{"0": {}, "100": {}}}, "do_lower_case": null,
            "cls_token": {{"__type": "AddedToken", "content": "[CLS]"}},
            "tokenizer_class": "BertTokenizer"}}"#,
        token("[PAD]"),
        token("[UNK]")
    );
    let dir = changed("tokenizer_config.json", &config);
    fs::write(
        dir.path().join("sentence_bert_config.json"),
        r#"{"max_seq_length": 9, "do_lower_case": true}"#,
    )?;
    fs::write(
        dir.path().join("1_Pooling/config.json"),
        r#"{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": null}"#,
    )?;
    let embedder = Embedder::from_dir(dir.path(), Precision::F32, &Cpu)?;
    let tokens = embedder.tokenizer().encode(&["A [MASK] HELLO"])?;
    assert_eq!(tokens[0].input_ids, [101, 1037, 103, 7592, 102]);
    Ok(())
}

#[test]
fn ids_without_a_row_are_refused() -> anyhow::Result<()> {
    let (model, _) = BertModel::from_dir(golden("bert_gelu"), Precision::F32, &Cpu)?;
    let run = |ids: &Tensor, types: Option<&Tensor>, mask: &AttentionMask| {
        model.forward(ids, types, mask).unwrap_err().to_string()
    };
    let none = AttentionMask::none();
    let ids = Tensor::new(&[[100u32, 101]], &Cpu)?;
    let expected =
        |got: i64| format!("input_ids holds {got}: expected 0 or more, and below 101 (vocab_size)");
    assert_eq!(run(&ids, None, &none), expected(101));
    for beyond in [-1, (1 << 32) + 5] {
        assert_eq!(run(&Tensor::new(&[[beyond, 2i64]], &Cpu)?, None, &none), expected(beyond));
    }
    let ids = Tensor::new(&[[1i64, 2]], &Cpu)?;
    assert_eq!(
        run(&ids, Some(&Tensor::new(&[[0u32, 2]], &Cpu)?), &none),
        "token_type_ids holds 2: expected 0 or more, and below 2 (type_vocab_size)"
    );
    assert_eq!(
        run(&ids, Some(&Tensor::new(&[[0u32]], &Cpu)?), &none),
        "token_type_ids has the wrong shape: expected (B, T) = [1, 2], as input_ids, got [1, 1]"
    );
    assert_eq!(
        run(&Tensor::zeros((2, 20), DType::U32, &Cpu)?, None, &none),
        "a sequence has 20 tokens: expected at most 19 (max_position_embeddings); truncate it"
    );
    assert_eq!(
        run(&ids.to_dtype(DType::F32)?, None, &none),
        "input_ids has the wrong dtype: expected integers, got F32"
    );
    assert_eq!(
        run(&Tensor::zeros((2, 0), DType::U32, &Cpu)?, None, &none),
        "input_ids has the wrong shape: expected (B, T), at least one token, got [2, 0]"
    );
    let packed = AttentionMask::block_diagonal(&[0, 1, 2])?;
    assert_eq!(
        run(&ids, None, &packed),
        "mask is block-diagonal: expected one of padded sequences, whose positions all begin at 0; \
         give packed sequences to forward_packed"
    );
    Ok(())
}

#[test]
fn nothing_visible_gives_zeros() -> anyhow::Result<()> {
    let (model, _) = BertModel::from_dir(golden("bert_gelu"), Precision::F32, &Cpu)?;
    let ids = Tensor::new(&[[1u32, 2, 3]], &Cpu)?;
    let hidden = AttentionMask::none().with_padding(&Tensor::zeros((1, 3), DType::U8, &Cpu)?)?;
    let out = model.forward(&ids, None, &hidden)?.last_hidden_state;
    assert_eq!(out.dims(), [1, 3, 24]);
    assert_eq!(out.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    assert_eq!(model.forward_packed(&PackedBatch::default())?.dims(), [0, 24]);
    Ok(())
}
