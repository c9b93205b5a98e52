//! Damaged models and input: each is an error that names what is wrong and what was expected.

use std::{collections::HashMap, fs, path::Path};

use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use encoder::{BertModel, Embedder, Error, PackedBatch, Precision};
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
fn one_wrong_shape_is_one_line() {
    let got = error(|_, tensors| {
        tensors.insert(QUERY.into(), zeros(&[24, 23]));
    });
    assert_eq!(
        got,
        "tensor \"encoder.layer.2.attention.self.query.weight\" in model.safetensors: \
         expected shape [24, 24] (hidden_size = 24), got [24, 23]"
    );
}

#[test]
fn a_missing_tensor_is_named_with_its_shape() {
    let got = error(|_, tensors| {
        tensors.remove("encoder.layer.1.intermediate.dense.weight");
    });
    assert_eq!(
        got,
        "tensor \"encoder.layer.1.intermediate.dense.weight\" is missing from model.safetensors: \
         expected shape [40, 24] (intermediate_size = 40, hidden_size = 24), got none"
    );
}

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
fn buffers_and_heads_are_known_and_ignored() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    fs::copy(golden("bert_gelu/config.json"), dir.path().join("config.json"))?;
    let mut tensors = safetensors::load(golden("bert_gelu/model.safetensors"), &Cpu)?;
    let ids = Tensor::arange(0i64, 19, &Cpu)?.unsqueeze(0)?;
    tensors.insert("embeddings.position_ids".into(), ids);
    tensors.insert("cls.predictions.bias".into(), zeros(&[101]));
    safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    let (_, report) = BertModel::from_dir(dir.path(), Precision::F32, &Cpu)?;
    assert_eq!(report.ignored, ["cls.predictions.bias", "embeddings.position_ids"]);
    assert!(report.to_string().ends_with("2 ignored"), "{report}");
    Ok(())
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

#[test]
fn a_truncated_file_is_not_a_model() {
    for keep in [0, 7, 100, 30_000] {
        let got = error(|dir, _| {
            let path = dir.join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..keep]).unwrap();
        });
        assert!(
            got.starts_with("model.safetensors is not a whole safetensors file: ")
                && got.ends_with("; fetch it again if a download was cut short"),
            "{keep} bytes: {got}"
        );
    }
}

#[test]
fn a_broken_config_says_where() {
    let with = |from: &str, to: &str| {
        error(|dir, _| {
            let path = dir.join("config.json");
            let json = fs::read_to_string(&path).unwrap();
            assert!(json.contains(from));
            fs::write(path, json.replace(from, to)).unwrap();
        })
    };
    let got = with("\"hidden_size\": 24,", "\"hidden_size\" 24,");
    assert!(got.starts_with("config.json is not as expected: expected `:` at line "), "{got}");
    assert_eq!(
        with("\"hidden_size\": 24,", "\"hidden_size\": 26,"),
        "hidden_size 26 is not divisible by num_attention_heads 4: \
         expected a multiple of 4, got remainder 2"
    );
    let got = with("\"hidden_act\": \"gelu\"", "\"hidden_act\": \"geglu\"");
    assert!(got.contains("hidden_act \"geglu\" is unknown: expected one of gelu, "), "{got}");
    let got = with("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    assert!(got.contains("16 problems") && got.contains("encoder.layer.2."), "{got}");
}

#[test]
fn missing_files_are_named() {
    let without =
        |name: &'static str| error(move |dir, _| fs::remove_file(dir.join(name)).unwrap());
    assert_eq!(
        without("config.json"),
        "config.json not found: expected the model's sizes, in Hugging Face's names"
    );
    assert_eq!(
        without("model.safetensors"),
        "model.safetensors not found: expected the model's weights"
    );
    let pickled = error(|dir, _| {
        fs::rename(dir.join("model.safetensors"), dir.join("pytorch_model.bin")).unwrap();
    });
    assert_eq!(
        pickled,
        "pytorch_model.bin is not a dictionary of tensors that PyTorch saved: \
         invalid Zip archive: Could not find EOCD; save it as safetensors"
    );
    let no_folder = Embedder::from_dir("no/such/folder", Precision::F32, &Cpu).err().unwrap();
    assert_eq!(
        no_folder.to_string(),
        "model folder no/such/folder not found: \
         expected a folder with config.json and model.safetensors"
    );
    let no_modules = Embedder::from_dir(golden("bert_gelu"), Precision::F32, &Cpu).err().unwrap();
    assert!(matches!(no_modules, Error::NoFile { .. }), "{no_modules}");
    assert!(no_modules.to_string().contains("modules.json not found"), "{no_modules}");
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

fn embedder_error(file: &str, content: &str) -> String {
    let dir = changed(file, content);
    let error = Embedder::from_dir(dir.path(), Precision::F32, &Cpu).err().unwrap().to_string();
    error.replace(&format!("{}/", dir.path().display()), "")
}

#[test]
fn modules_that_are_not_computed_are_refused() {
    let refused = r#"[{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}, {"type": "sentence_transformers.models.LSTM"}]"#;
    assert_eq!(
        embedder_error("modules.json", refused),
        "modules.json asks for modules Transformer, Pooling, LSTM: expected Transformer, Pooling \
         and then any of Dense and Normalize, which is all that is computed here"
    );
    let own =
        r#"[{"type": "custom_st.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]"#;
    assert_eq!(
        embedder_error("modules.json", own),
        "modules.json asks for modules custom_st.Transformer, Pooling: expected Transformer, Pooling \
         and then any of Dense and Normalize, which is all that is computed here"
    );
    for path in ["../other", "/etc", "1_Pooling/../.."] {
        let modules = format!(
            r#"[{{"type": "sentence_transformers.models.Transformer"}}, {{"type": "sentence_transformers.models.Pooling", "path": "{path}"}}]"#
        );
        assert_eq!(
            embedder_error("modules.json", &modules),
            format!(
                "modules.json asks for a module's path {path}: expected a folder below its own, \
                 which is all that is computed here"
            )
        );
    }
    assert_eq!(
        embedder_error("1_Pooling/config.json", r#"{"pooling_mode": "median"}"#),
        "1_Pooling/config.json asks for pooling mode median: expected some of cls, max, mean, \
         mean_sqrt_len_tokens, weightedmean and lasttoken, which is all that is computed here"
    );
    let got = embedder_error("tokenizer.json", "{}");
    assert!(got.starts_with("tokenizer.json is not a tokenizer that can be used: "), "{got}");
    assert_eq!(
        embedder_error("sentence_bert_config.json", "{\"max_seq_length\": 2}"),
        "max_seq_length 2 leaves no room for text: expected more than the 2 special tokens that \
         every text gets (sentence_bert_config.json)"
    );
    let prompt = r#"{"prompts": {"query": "query: "}, "default_prompt_name": "topic"}"#;
    assert_eq!(
        embedder_error("config_sentence_transformers.json", prompt),
        "prompt \"topic\" is unknown: expected one of the model's, query"
    );
    let got = embedder_error("sentence_bert_config.json", "{\"max_seq_length\": -1}");
    assert!(got.starts_with("sentence_bert_config.json is not as expected: "), "{got}");
}

/// A linear map after the pooling that is not as its config or the one before it says.
#[test]
fn a_dense_module_that_does_not_fit_is_refused() -> anyhow::Result<()> {
    let modules = r#"[
        {"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    ]"#;
    let dir = changed("modules.json", modules);
    let dense = dir.path().join("2_Dense");
    fs::create_dir(&dense)?;
    let error = |config: &str| -> anyhow::Result<String> {
        fs::write(dense.join("config.json"), config)?;
        let error = Embedder::from_dir(dir.path(), Precision::F32, &Cpu).err();
        let error = error.expect("an error").to_string();
        Ok(error.replace(&format!("{}/", dir.path().display()), ""))
    };
    assert_eq!(
        error(r#"{"in_features": 768, "out_features": 2}"#)?,
        "2_Dense/config.json: expected in_features 384 (of the module before it), got 768"
    );
    let sizes = r#""in_features": 384, "out_features": 2"#;
    assert_eq!(
        error(&format!(r#"{{{sizes}, "activation_function": "mine.Tanh"}}"#))?,
        "2_Dense/config.json asks for activation_function mine.Tanh: expected torch.nn's Identity, \
         Sigmoid, Tanh, ReLU, GELU, SiLU or Mish, which is all that is computed here"
    );
    assert_eq!(
        error(&format!(r#"{{{sizes}, "module_input_name": "token_embeddings"}}"#))?,
        "2_Dense/config.json asks for a module's input or output token_embeddings: expected \
         sentence_embedding, which is all that is computed here"
    );
    let none = error(&format!("{{{sizes}}}"))?;
    assert!(none.starts_with("2_Dense/model.safetensors not found"), "{none}");
    let tensors = [("linear.weight", Tensor::zeros((2, 384), DType::F32, &Cpu)?)];
    let tensors = tensors.map(|(name, tensor)| (name.to_string(), tensor)).into();
    safetensors::save(&tensors, dense.join("model.safetensors"))?;
    assert_eq!(
        error(&format!("{{{sizes}}}"))?,
        "tensor \"linear.bias\" is missing from 2_Dense/model.safetensors: expected shape [2], got \
         none"
    );
    Ok(())
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

/// A config's sizes are those of its author, and not of the file: nothing of such a size is made.
#[test]
fn huge_sizes_take_no_memory() {
    for (key, size) in [
        ("\"intermediate_size\": 40", "\"intermediate_size\": 1000000000000"),
        ("\"vocab_size\": 101", "\"vocab_size\": 1000000000000"),
        ("\"max_position_embeddings\": 19", "\"max_position_embeddings\": 1000000000000"),
    ] {
        let got = error(|dir, _| {
            let path = dir.join("config.json");
            let json = fs::read_to_string(&path).unwrap();
            assert!(json.contains(key));
            fs::write(path, json.replace(key, size)).unwrap();
        });
        assert!(got.contains("expected shape [1000000000000"), "{got}");
    }
    let labels = br#"{"num_labels": 18446744073709551615}"#;
    let error = encoder::Labels::from_json(labels, "config.json").unwrap_err().to_string();
    assert!(error.starts_with("num_labels 18446744073709552000 cannot be: "), "{error}");
}

/// The layout of early sentence-transformers.
#[test]
fn the_transformer_may_have_a_folder_of_its_own() -> anyhow::Result<()> {
    let modules = fs::read_to_string(Path::new(MINILM).join("modules.json"))?;
    let dir =
        changed("modules.json", &modules.replacen("\"path\": \"\"", "\"path\": \"0_BERT\"", 1));
    fs::create_dir(dir.path().join("0_BERT"))?;
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::rename(dir.path().join(name), dir.path().join("0_BERT").join(name))?;
    }
    assert_eq!(
        Embedder::from_dir(dir.path(), Precision::F32, &Cpu)?.embed(&["a"])?.dims(),
        [1, 384]
    );
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
