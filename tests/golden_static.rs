//! Compares the vectors of static embeddings with sentence-transformers and model2vec.

use std::{collections::HashMap, fs, path::Path};

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{
    EmbedOptions, Embedder, EmbeddingKind, Inspection, LoadOptions, LongTexts, ModelFiles,
    PoolingMode, Prompt,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::{Golden, copy_folder, golden, temp_dir};

type Result<T = ()> = anyhow::Result<T>;

const FILE: &str = "static/expected.safetensors";

/// Models whose folders sentence-transformers loads.
const SENTENCE_TRANSFORMERS: [&str; 7] = [
    "mean",
    "normalized",
    "published",
    "model2vec",
    "model2vec_short",
    "model2vec_weights",
    "model2vec_clusters",
];

fn texts() -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Texts {
        texts: Vec<String>,
    }
    let Texts { texts } = serde_json::from_slice(&fs::read(golden("static/expected.json"))?)?;
    Ok(texts)
}

fn load(dir: impl AsRef<Path>) -> Result<Embedder> {
    Ok(Embedder::from_dir(dir, &LoadOptions::default())?)
}

fn model(name: &str) -> Result<Embedder> {
    load(golden(&format!("static/{name}")))
}

/// A copy of a folder of model2vec without `modules.json`, so that the rules of model2vec apply.
fn of_model2vec(name: &str) -> Result<tempfile::TempDir> {
    let dir = temp_dir()?;
    copy_folder(&golden(&format!("static/{name}")), dir.path())?;
    fs::remove_file(dir.path().join("modules.json"))?;
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
    config["model_type"] = json!("model2vec"); // the generator does not name it in every folder
    fs::write(path, config.to_string())?;
    Ok(dir)
}

fn assert_vectors(case: &str, got: &Tensor, file: &Golden, bar: f32) -> Result {
    let expected = file.get(case).to_dtype(DType::F32)?;
    assert_eq!(got.dims(), expected.dims(), "{case}");
    let difference = (got - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(difference <= bar, "{case}: {difference}");
    Ok(())
}

#[test]
fn vectors_of_sentence_transformers_folders_equal_sentence_transformers() -> Result {
    let (file, texts) = (Golden::open(FILE)?, texts()?);
    for name in SENTENCE_TRANSFORMERS {
        let files = ModelFiles::dir(golden(&format!("static/{name}")))?;
        assert_eq!(EmbeddingKind::from_files(&files)?, EmbeddingKind::Dense, "{name}");
        let model = model(name)?;
        let case = format!("{name}.sentence_transformers");
        assert_vectors(&case, &model.embed(&texts)?, &file, 1e-6)?;
    }
    let queries = EmbedOptions::new().with_prompt(Prompt::Query);
    let vectors = model("normalized")?.embed_with(&texts, queries)?.vectors;
    assert_vectors("normalized.query", &vectors, &file, 1e-6)
}

#[test]
fn vectors_of_model2vec_folders_equal_model2vec() -> Result {
    let (file, texts) = (Golden::open(FILE)?, texts()?);
    for name in [
        "model2vec",
        "model2vec_short",
        "model2vec_weights",
        "model2vec_clusters",
        "model2vec_half",
        "model2vec_int8",
    ] {
        let vectors = load(of_model2vec(name)?.path())?.embed(&texts)?;
        // model2vec rounds the vectors of an f16 table to f16, whose spacing is 2⁻¹¹ below 1.
        let bar = if name == "model2vec_half" { 5e-4 } else { 1e-6 };
        assert_vectors(&format!("{name}.model2vec"), &vectors, &file, bar)?;
    }
    Ok(())
}

#[test]
fn a_vector_does_not_depend_on_its_batch_or_on_the_number_of_threads() -> Result {
    let texts: Vec<String> =
        (0..5000).map(|i| "a cat runs to the river ".repeat(i % 7) + "bank").collect();
    let model = model("normalized")?;
    let together = model.embed(&texts)?.to_vec2::<f32>()?;
    for i in [0, 2047, 2048, 4999] {
        assert_eq!(model.embed(&texts[i..=i])?.to_vec2::<f32>()?[0], together[i], "{i}");
    }
    if cfg!(not(target_family = "wasm")) {
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
        assert_eq!(one_thread.install(|| model.embed(&texts))?.to_vec2::<f32>()?, together);
    }
    Ok(())
}

#[test]
fn a_text_without_tokens_has_the_vector_zero() -> Result {
    for name in ["mean", "normalized"] {
        let vectors = model(name)?.embed(&["", "   ", "cat"])?.to_vec2::<f32>()?;
        assert_eq!(vectors[..2], [vec![0.0; 12], vec![0.0; 12]], "{name}");
        assert!(vectors[2].iter().any(|&x| x != 0.0), "{name}");
    }
    assert_eq!(model("mean")?.embed(&[] as &[&str])?.dims(), [0, 12]);
    Ok(())
}

#[test]
fn truncation_and_windows_follow_the_maximum_length() -> Result {
    let text = "cat dog river bank run red blue movie new love";
    let long = |model: &Embedder, long_texts| {
        model.embed_with(&[text], EmbedOptions::new().with_long_texts(long_texts))
    };
    // tokenizer.json truncates to 8 tokens; the other models have no maximum.
    let short = model("model2vec_short")?;
    assert_eq!(short.tokenizer().max_seq_length(), 8);
    let cut = long(&short, LongTexts::Truncate)?;
    assert_eq!((cut.truncated[0].tokens, cut.truncated[0].kept), (10, 8));
    assert!(long(&short, LongTexts::Refuse).is_err());
    let whole = model("mean")?;
    assert!(long(&whole, LongTexts::Refuse)?.truncated.is_empty());
    // The mean of the windows, weighted by their lengths, is the mean of all tokens.
    let whole = long(&whole, LongTexts::Truncate)?.vectors;
    let windows = long(&short, LongTexts::Windows)?.vectors;
    let windows_of_3 = model("mean")?.with_max_seq_length(3)?;
    let windows_of_3 = long(&windows_of_3, LongTexts::Windows)?.vectors;
    for vectors in [windows, windows_of_3] {
        let difference = (vectors - &whole)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < 1e-6, "{difference}");
    }
    // model2vec also limits the characters, to 8 times 3, the median length of a token.
    let cut = long(&load(of_model2vec("model2vec_short")?.path())?, LongTexts::Truncate)?;
    assert_eq!((cut.truncated[0].tokens, cut.truncated[0].kept), (12, 6)); // of "run": "r"
    Ok(())
}

#[test]
fn prompts_dimensions_and_token_ids_work_as_with_a_transformer() -> Result {
    let model = model("normalized")?;
    let prompted = EmbedOptions::new().with_prompt(Prompt::Text("find topic "));
    let prompted = model.embed_with(&["of food"], prompted)?.vectors.to_vec2::<f32>()?;
    assert_eq!(prompted, model.embed(&["find topic of food"])?.to_vec2::<f32>()?);

    let ids = model.tokenizer().encode(&["love!"])?.remove(0).input_ids;
    let tokens = model.tokens_from_ids(ids)?;
    let vectors = model.embed_sequences(&[(&tokens, 0)])?.to_vec2::<f32>()?;
    assert_eq!(vectors, model.embed(&["love!"])?.to_vec2::<f32>()?);
    let error = model.tokens_from_ids(vec![96]).unwrap_err().to_string();
    assert!(error.contains("96") && error.contains("below 96"), "{error}");

    let short = model.clone().with_dimension(5)?.embed(&["love!"])?;
    assert_eq!(short.dims(), [1, 5]);
    let length = short.sqr()?.sum_all()?.to_scalar::<f32>()?;
    assert!((length - 1.0).abs() < 1e-6, "{length}");
    assert!(model.encoder().is_err());
    Ok(())
}

#[test]
fn a_folder_is_inspected() -> Result {
    for (name, modules, parameters) in [
        ("normalized", &["Normalize"][..], 1152),
        ("published", &[], 1152),
        ("model2vec_clusters", &["Normalize"], 432),
    ] {
        let files = ModelFiles::dir(golden(&format!("static/{name}")))?;
        let found = Inspection::new(&files);
        let modules = &modules.iter().map(|name| name.to_string()).collect::<Vec<_>>()[..];
        assert_eq!(found.problems, [""; 0], "{name}");
        assert_eq!(found.architecture.as_deref(), Some("static embedding"));
        assert_eq!((&found.modules[..], found.parameters), (modules, parameters));
        assert_eq!(
            (&found.runs_as[..], found.tokenizer),
            (&["Embedder"][..], Some("tokenizer.json"))
        );
    }
    Ok(())
}

#[test]
fn a_pooling_cannot_be_chosen() -> Result {
    let plain = of_model2vec("model2vec")?;
    for dir in [golden("static/mean"), plain.path().to_path_buf()] {
        let files = ModelFiles::dir(dir)?;
        let pooling = PoolingMode::Cls.into();
        let error = Embedder::from_transformer(&files, pooling, &LoadOptions::default());
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("pooling Pooling(cls) is not supported: expected no pooling"),
            "{error}"
        );
    }
    Ok(())
}

/// Tensors that are saved in place of those of `model2vec_clusters`, each with the error.
#[test]
fn damaged_tables_are_errors() -> Result {
    let tensor = |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, &Cpu);
    let table = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Cpu);
    let cases = [
        (vec![("x", table(&[2, 3])?)], "tensors x is not supported: expected embedding.weight"),
        (
            vec![("embedding.weight", table(&[2, 3])?), ("weights", table(&[2])?)],
            "tensors embedding.weight, weights is not supported",
        ),
        (vec![("embeddings", table(&[6])?)], "tensor embeddings of shape [6]"),
        (vec![("embeddings", table(&[96, 0])?)], "tensor embeddings of shape [96, 0]"),
        (
            vec![("embeddings", table(&[96, 3])?), ("weights", table(&[95])?)],
            "tensor weights of shape [95] is not supported: expected one dimension",
        ),
        (
            vec![("embedding.weight", tensor(&[1.0, f32::NAN], &[1, 2])?)],
            "tensor embedding.weight with the value NaN",
        ),
        (
            vec![("embedding.weight", table(&[2, 3])?.to_dtype(DType::U8)?)],
            "tensor embedding.weight of dtype u8 is not supported: expected f32, f16, bf16, f64 or i8",
        ),
        (
            vec![("embeddings", table(&[2, 3])?), ("mapping", table(&[96])?)],
            "tensor mapping of dtype f32 is not supported: expected i32 or i64",
        ),
        (
            vec![("embeddings", table(&[2, 3])?), ("mapping", Tensor::full(2i64, 96, &Cpu)?)],
            "tensor mapping with the value 2 is not supported: expected rows of embeddings",
        ),
        (
            vec![("embeddings", table(&[2, 3])?), ("mapping", Tensor::full(-1i64, 96, &Cpu)?)],
            "tensor mapping with the value -1",
        ),
    ];
    for (tensors, expected) in cases {
        let dir = temp_dir()?;
        copy_folder(&golden("static/model2vec_clusters"), dir.path())?;
        let tensors: HashMap<&str, Tensor> = tensors.into_iter().collect();
        candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
        let error = load(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}

#[test]
fn a_token_without_a_vector_is_an_error() -> Result {
    let dir = temp_dir()?;
    copy_folder(&golden("static/mean"), dir.path())?;
    let table = HashMap::from([("embedding.weight", Tensor::ones((50, 3), DType::F32, &Cpu)?)]);
    candle_core::safetensors::save(&table, dir.path().join("model.safetensors"))?;
    let model = load(dir.path())?;
    let error = model.embed(&["a cat"]).unwrap_err().to_string();
    assert!(
        error.ends_with("expected 0 or more, and below 50 (number of token vectors)"),
        "{error}"
    );
    Ok(())
}
