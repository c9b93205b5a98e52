//! Damaged, unusual and invalid models and inputs. Errors state the problem and the expected value.

use std::{collections::HashMap, fs, path::Path, sync::Arc};

use arrow_array::{ArrayRef, FixedSizeListArray, RecordBatch, StringArray, types::Float32Type};
use arrow_ipc::writer::FileWriter;
use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use corpus::{RecordSource, StoredColumn, VectorDtype, VectorFile};
use encoder::{
    Embedder, EmbeddingKind, EncoderForMaskedLm, EncoderModel, LoadOptions, ModelConfig,
    ModelFiles, RaggedBatch, Search, SparseVector, TextTokenizer,
};
use mha::AttentionMask;
use parquet::arrow::ArrowWriter;
use tempfile::TempDir;

use crate::support::{MINILM, golden};

type Tensors = HashMap<String, Tensor>;

/// The error from loading a copy of a tiny checkpoint whose tensors are changed by `damage`,
/// without the folder's path.
fn error(damage: impl Fn(&mut Tensors)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = (dir.path().join("config.json"), dir.path().join("model.safetensors"));
    fs::copy(golden("bert_gelu/config.json"), config).unwrap();
    let source = golden("bert_gelu/model.safetensors");
    let mut tensors = safetensors::load(source, &Cpu).unwrap();
    damage(&mut tensors);
    safetensors::save(&tensors, &weights).unwrap();
    let error =
        EncoderModel::from_dir(dir.path(), &LoadOptions::default()).unwrap_err().to_string();
    error.replace(&format!("{}/", dir.path().display()), "")
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Cpu).unwrap()
}

const QUERY: &str = "encoder.layer.2.attention.self.query.weight";

#[test]
fn one_error_reports_all_mismatched_tensors() {
    let got = error(|tensors| {
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
         the most similar name is \"encoder.layer.2.attention.self.qury.weight\"",
        "tensor \"encoder.layer.0.output.dense.bias\" in model.safetensors: \
         expected shape [24] (hidden_size = 24), got [25]",
        "tensor \"embeddings.position_embeddings.weight\" in model.safetensors: \
         expected f32, f16, bf16 or f64, got i64",
        "tensor \"encoder.layer.2.attention.self.qury.weight\" in model.safetensors is unexpected: \
         the model does not use it",
        "tensor \"encoder.layer.3.output.dense.bias\" in model.safetensors is unexpected",
    ] {
        assert!(got.contains(part), "{part}\nnot in\n{got}");
    }
}

#[test]
fn files_in_f16_bf16_and_f64_are_computed_in_f32() -> anyhow::Result<()> {
    let ids = Tensor::new(&[[7u32, 50, 100]], &Cpu)?;
    let run = |dtype: DType| -> anyhow::Result<Vec<f32>> {
        let dir = tempfile::tempdir()?;
        fs::copy(golden("bert_gelu/config.json"), dir.path().join("config.json"))?;
        let mut tensors = safetensors::load(golden("bert_gelu/model.safetensors"), &Cpu)?;
        for tensor in tensors.values_mut() {
            // Round to bf16 and then to f16, so that all dtypes hold the same values.
            *tensor = tensor.to_dtype(DType::BF16)?.to_dtype(DType::F16)?.to_dtype(dtype)?;
        }
        safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
        let (model, _) = EncoderModel::from_dir(dir.path(), &LoadOptions::default())?;
        let out = model.forward(&ids, None, &AttentionMask::none())?;
        Ok(out.last_hidden_state.flatten_all()?.to_vec1()?)
    };
    let expected = run(DType::F32)?;
    assert_eq!(run(DType::F16)?, expected);
    assert_eq!(run(DType::BF16)?, expected);
    assert_eq!(run(DType::F64)?, expected);
    Ok(())
}

/// A copy of the built-in model in which `file` has the given content.
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

#[test]
fn a_setting_of_the_wrong_type_is_an_error_that_names_its_file() {
    let config = fs::read_to_string(Path::new(MINILM).join("config.json")).unwrap();
    let config = config.replacen('{', r#"{"tokenizer_class": 5, "#, 1);
    for (file, settings) in [
        ("special_tokens_map.json", r#"{"model_max_length": "many"}"#),
        ("special_tokens_map.json", r#"{"max_len": "many"}"#),
        ("sentence_bert_config.json", r#"{"tokenizer_args": {"model_max_length": "many"}}"#),
        ("tokenizer_config.json", r#"{"model_max_length": "many"}"#),
        ("config.json", &config),
    ] {
        let dir = changed(file, settings);
        let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default());
        let error = embedder.map(|_| ()).unwrap_err().to_string();
        let path = dir.path().join(file).display().to_string();
        assert!(error.contains(&path), "{error}");
    }
}

/// Each file that an embedder reads, with the files that must be there so that it is read.
#[test]
fn a_git_lfs_pointer_or_a_web_page_is_recognised_in_every_file() -> anyhow::Result<()> {
    const DENSE: (&str, &str) = (
        "modules.json",
        r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]"#,
    );
    const DENSE_CONFIG: (&str, &str) =
        ("2_Dense/config.json", r#"{"in_features": 384, "out_features": 2}"#);
    let class = |class: &'static str| ("tokenizer_config.json", class);
    let roberta = class(r#"{"tokenizer_class": "RobertaTokenizer"}"#);
    // Without content: the file is removed.
    let no_json = ("tokenizer.json", "");
    let cases = [
        ("config.json", vec![]),
        ("model.safetensors", vec![]),
        ("model.safetensors.index.json", vec![("model.safetensors", "")]),
        ("pytorch_model.bin", vec![("model.safetensors", "")]),
        ("pytorch_model.bin.index.json", vec![("model.safetensors", "")]),
        ("adapter_config.json", vec![]),
        ("modules.json", vec![]),
        ("config_sentence_transformers.json", vec![]),
        ("sentence_bert_config.json", vec![]),
        ("1_Pooling/config.json", vec![]),
        ("2_Dense/config.json", vec![DENSE]),
        ("2_Dense/model.safetensors", vec![DENSE, DENSE_CONFIG]),
        ("tokenizer.json", vec![]),
        ("tokenizer_config.json", vec![]),
        ("special_tokens_map.json", vec![]),
        ("added_tokens.json", vec![]),
        ("vocab.txt", vec![no_json]),
        ("vocab.json", vec![no_json, roberta]),
        ("merges.txt", vec![no_json, roberta, ("vocab.json", "{}")]),
        (
            "sentencepiece.bpe.model",
            vec![no_json, class(r#"{"tokenizer_class": "XLMRobertaTokenizer"}"#)],
        ),
        ("spiece.model", vec![no_json, class(r#"{"tokenizer_class": "AlbertTokenizer"}"#)]),
        ("spm.model", vec![no_json, class(r#"{"tokenizer_class": "DebertaV2Tokenizer"}"#)]),
    ];
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n";
    let page = "\u{feff}\n<!DOCTYPE html>\n<html lang=\"en\">";
    let denied = "<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>";
    let web_page = "is an HTML or XML page: expected the file's content; download the file itself \
                    (on the hub, its address has /resolve/, not /blob/)";
    for (file, others) in cases {
        for (content, expected) in [
            (pointer, "is a Git LFS pointer: expected the file's content; run git lfs pull"),
            (page, web_page),
            (denied, web_page),
        ] {
            let dir = changed("README.md", "");
            for &(name, content) in others.iter().chain([&(file, content)]) {
                let path = dir.path().join(name);
                fs::create_dir_all(path.parent().unwrap())?;
                match content {
                    "" => fs::remove_file(path)?,
                    content => fs::write(path, content)?,
                }
            }
            let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default());
            let error = embedder.map(|_| ()).expect_err(file).to_string();
            assert_eq!(error, format!("{} {expected}", dir.path().join(file).display()));
        }
    }
    Ok(())
}

/// The weights in the subfolder would be read instead of the chosen file.
#[test]
fn a_chosen_weights_file_is_refused_if_the_transformer_is_in_a_subfolder() {
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer/"},
                      {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    let dir = changed("modules.json", modules);
    let files = ModelFiles::file(dir.path().join("model.safetensors")).unwrap();
    let error = Embedder::from_files(&files, &LoadOptions::default()).map(|_| ()).unwrap_err();
    let expected = "the Transformer's path 0_Transformer is not supported: expected an empty path, \
                    because a weights file was chosen";
    assert!(error.to_string().ends_with(expected), "{error}");
}

#[test]
fn paths_of_modules_may_end_with_a_slash_in_memory() -> anyhow::Result<()> {
    let names = ["config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"];
    let read = |name: &str| Ok((name.to_string(), fs::read(Path::new(MINILM).join(name))?));
    let mut files = names.into_iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
                      {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling/"}]"#;
    files.push(("modules.json".to_string(), modules.as_bytes().to_vec()));
    Embedder::from_files(&ModelFiles::memory("m", files), &LoadOptions::default())?;
    Ok(())
}

#[test]
fn a_folder_is_not_a_weights_file() {
    let error = ModelFiles::file(MINILM).map(|_| ()).unwrap_err().to_string();
    assert!(error.ends_with("expected a weights file, got a folder"), "{error}");
    let error = ModelFiles::file("no/such/file").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("not found"), "{error}");
}

/// transformers 5.23 gives the same ids: `[UNK]` for words that the vocabulary has only in lower
/// case.
#[test]
fn do_lower_case_in_tokenizer_config_overrides_tokenizer_json() -> anyhow::Result<()> {
    let config = r#"{"tokenizer_class": "BertTokenizer", "do_lower_case": false}"#;
    let dir = changed("tokenizer_config.json", config);
    let tokens = Embedder::from_dir(dir.path(), &LoadOptions::default())?
        .tokenizer()
        .encode(&["Hello Café 東京"])?;
    assert_eq!(tokens[0].input_ids, [101, 100, 100, 1879, 1755, 102]);
    Ok(())
}

#[test]
fn a_damaged_sentence_piece_model_does_not_panic() -> anyhow::Result<()> {
    let folder = golden("architectures/tokenizers/xlm_roberta_model");
    let model = fs::read(folder.join("sentencepiece.bpe.model"))?;
    let config = fs::read(golden("architectures/xlm_roberta/encoder/config.json"))?;
    let config = ModelConfig::from_json(&config, "config.json")?;
    let mut refused = 0;
    for i in 0..model.len() {
        let mut damaged = model.clone();
        damaged[i] ^= 0xff;
        let files = ModelFiles::memory("m", [("sentencepiece.bpe.model", damaged)]);
        let tokens = TextTokenizer::from_files(&files, &config)
            .and_then(|tokenizer| tokenizer.encode(&["Let's go… ﬁne, Ａ cafe\u{301}"]));
        refused += usize::from(tokens.is_err());
    }
    assert!(refused > 1000, "{refused} of {} changed files are refused", model.len());
    Ok(())
}

/// The four zero bytes of the character map are a trie without nodes, on which the `tokenizers`
/// crate panics.
#[test]
fn a_tokenizer_with_a_damaged_character_map_is_an_error() -> anyhow::Result<()> {
    let json = fs::read(Path::new(MINILM).join("tokenizer.json"))?;
    let mut json: serde_json::Value = serde_json::from_slice(&json)?;
    json["normalizer"] =
        serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="});
    let dir = changed("tokenizer.json", &json.to_string());
    let config = r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#;
    fs::write(dir.path().join("tokenizer_config.json"), config)?;
    let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default())?;
    let error = embedder.embed(&["Hello"]).unwrap_err().to_string();
    let expected = "the tokenizer panicked; the file is probably damaged";
    assert!(error.contains("tokenizer.json is not a usable tokenizer"), "{error}");
    assert!(error.contains(expected), "{error}");
    Ok(())
}

/// The template names a special token that it does not list, and the `tokenizers` crate panics.
#[test]
fn a_tokenizer_with_a_damaged_template_is_an_error() -> anyhow::Result<()> {
    let json = fs::read(Path::new(MINILM).join("tokenizer.json"))?;
    let mut json: serde_json::Value = serde_json::from_slice(&json)?;
    json["post_processor"]["single"][0]["SpecialToken"]["id"] = "[NONE]".into();
    let dir = changed("tokenizer.json", &json.to_string());
    let config = r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#;
    fs::write(dir.path().join("tokenizer_config.json"), config)?;
    let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default());
    let error = embedder.and_then(|embedder| embedder.embed(&["Hello"])).unwrap_err().to_string();
    assert!(error.contains("the tokenizer panicked; the file is probably damaged"), "{error}");
    Ok(())
}

#[cfg(unix)]
#[test]
fn a_config_that_is_not_a_regular_file_is_refused() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("config.json"))?;
    let error =
        EncoderModel::from_dir(dir.path(), &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.ends_with("config.json cannot be read: expected a regular file"), "{error}");
    Ok(())
}

/// A wrong size is reported before memory of this size is allocated.
#[test]
fn huge_sizes_are_errors() -> anyhow::Result<()> {
    let from = golden("architectures/mpnet/masked_lm");
    let config: serde_json::Value = serde_json::from_slice(&fs::read(from.join("config.json"))?)?;
    let weights = fs::read(from.join("model.safetensors"))?;
    for (key, size, expected) in [
        ("max_position_embeddings", 1u64 << 40, "expected at most 2^20 positions"),
        ("vocab_size", u64::from(u32::MAX), "word_embeddings.weight"),
        ("hidden_size", 100_000_000, "expected at most 2^20"),
    ] {
        let mut config = config.clone();
        config[key] = size.into();
        let files = ModelFiles::memory(
            "m",
            [
                ("config.json", config.to_string().into_bytes()),
                ("model.safetensors", weights.clone()),
            ],
        );
        let loaded = EncoderForMaskedLm::from_files(&files, &LoadOptions::default());
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
    Ok(())
}

/// transformers 4 writes `added_tokens_decoder` beside tokenizer.json. Keys with a null value count
/// as missing.
#[test]
fn added_tokens_decoder_is_accepted_beside_tokenizer_json() -> anyhow::Result<()> {
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
    let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default())?;
    let tokens = embedder.tokenizer().encode(&["A [MASK] HELLO"])?;
    assert_eq!(tokens[0].input_ids, [101, 1037, 103, 7592, 102]);
    Ok(())
}

#[test]
fn invalid_input_tensors_are_rejected() -> anyhow::Result<()> {
    let (model, _) = EncoderModel::from_dir(golden("bert_gelu"), &LoadOptions::default())?;
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
        "token_type_ids has the wrong shape: expected (B, T) = [1, 2], the shape of \
         input_ids, got [1, 1]"
    );
    assert_eq!(
        run(&Tensor::zeros((2, 20), DType::U32, &Cpu)?, None, &none),
        "a sequence has 20 tokens: expected at most 19; truncate it"
    );
    assert_eq!(
        run(&ids.to_dtype(DType::F32)?, None, &none),
        "input_ids has the wrong dtype: expected integers, got F32"
    );
    assert_eq!(
        run(&Tensor::zeros((2, 0), DType::U32, &Cpu)?, None, &none),
        "input_ids has the wrong shape: expected (B, T), at least one token, got [2, 0]"
    );
    let ragged = AttentionMask::none().with_sequences(&[0, 1, 2])?;
    assert_eq!(
        run(&ids, None, &ragged),
        "mask is for ragged sequences: expected a mask for padded sequences; use forward_ragged for \
         ragged sequences"
    );
    Ok(())
}

#[test]
fn a_fully_masked_sequence_gives_zeros() -> anyhow::Result<()> {
    let (model, _) = EncoderModel::from_dir(golden("bert_gelu"), &LoadOptions::default())?;
    let ids = Tensor::new(&[[1u32, 2, 3]], &Cpu)?;
    let hidden = AttentionMask::none().with_padding(&Tensor::zeros((1, 3), DType::U8, &Cpu)?)?;
    let out = model.forward(&ids, None, &hidden)?.last_hidden_state;
    assert_eq!(out.dims(), [1, 3, 24]);
    assert_eq!(out.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    assert_eq!(model.forward_ragged(&RaggedBatch::default())?.dims(), [0, 24]);
    Ok(())
}

/// Readers of tables must not panic or abort, whatever byte of the file is wrong.
#[test]
fn a_table_with_a_wrong_byte_gives_an_error_or_other_rows() -> anyhow::Result<()> {
    let texts = StringArray::from(vec![Some("a"), None, Some("b c")]);
    let vectors = (0..3).map(|i| Some([Some(i as f32), Some(1.0)]));
    let vectors = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(vectors, 2);
    let sparse =
        [2, 0, 1].map(|count| SparseVector::new((0..count).collect(), vec![1.0; count as usize]));
    let sparse = SparseVector::column(&sparse, &SparseVector::data_type(2, VectorDtype::F32))?;

    let dir = tempfile::tempdir()?;
    let search = Search::new(&[vec![1.0, 0.0]], 1)?;
    let mut files = vec![];
    for (kind, rows, changes) in
        [("dense", Arc::new(vectors) as ArrayRef, &[0x80, 0xff][..]), ("sparse", sparse, &[0xff])]
    {
        let rows = RecordBatch::try_from_iter([
            ("text", Arc::new(texts.clone()) as ArrayRef),
            ("embedding", rows),
        ])?;
        let (mut parquet, mut arrow) = (vec![], vec![]);
        let mut writer = ArrowWriter::try_new(&mut parquet, rows.schema(), None)?;
        writer.write(&rows)?;
        writer.close()?;
        let mut writer = FileWriter::try_new(&mut arrow, &rows.schema())?;
        writer.write(&rows)?;
        writer.finish()?;
        drop(writer);
        files.extend(
            [("parquet", parquet), ("arrow", arrow)]
                .map(|(extension, bytes)| (format!("{kind}.{extension}"), bytes, changes)),
        );
    }
    for (name, bytes, changes) in files {
        let path = dir.path().join(&name);
        let mut failures = 0;
        for i in 0..bytes.len() {
            for change in changes {
                let mut damaged = bytes.clone();
                damaged[i] ^= change;
                fs::write(&path, damaged)?;
                let read = RecordSource::file(&path).open().map(|records| records.count());
                let scanned = VectorFile::open(&path).and_then(|file| match file.kind() {
                    EmbeddingKind::Sparse => file.sparse_index(2).map(drop),
                    _ => file.scan(&search).map(drop),
                });
                failures += usize::from(read.is_err() || scanned.is_err());
            }
        }
        assert!(failures > 100, "{name}: {failures} errors");
    }
    Ok(())
}
