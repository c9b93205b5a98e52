//! Compares sparse vectors with sentence-transformers' `SparseEncoder`.

use std::{collections::BTreeMap, fs};

use encoder::{
    EmbedOptions, EmbeddingKind, LoadOptions, ModelFiles, Precision, Prompt, SparseEmbedder,
    SparseVector,
};
use serde::Deserialize;

use crate::support::{Golden, copy_folder, golden, temp_dir};

type Result<T = ()> = anyhow::Result<T>;

#[derive(Deserialize)]
struct Texts {
    texts: Vec<String>,
    decoded: BTreeMap<String, Vec<String>>,
}

/// The expected vectors of a case, such as `splade_max.query`.
fn expected(file: &Golden, case: &str) -> Result<Vec<SparseVector>> {
    let integers = |name: &str| -> Result<Vec<u32>> {
        let tensor = file.get(&format!("{case}.{name}"));
        Ok(tensor.to_dtype(candle_core::DType::U32)?.to_vec1()?)
    };
    let (indices, offsets) = (integers("indices")?, integers("offsets")?);
    let values = file.get(&format!("{case}.values")).to_vec1::<f32>()?;
    let vector = |at: &[u32]| {
        let range = at[0] as usize..at[1] as usize;
        SparseVector::new(indices[range.clone()].to_vec(), values[range].to_vec())
    };
    Ok(offsets.windows(2).map(vector).collect())
}

/// Checks that the indices are equal and the values are close.
fn assert_vectors(case: &str, got: &[SparseVector], expected: &[SparseVector]) {
    assert_eq!(got.len(), expected.len(), "{case}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.indices, expected.indices, "{case}, text {i}");
        for (got, expected) in got.values.iter().zip(&expected.values) {
            assert!((got - expected).abs() <= 1e-5, "{case}, text {i}: {got}, {expected}");
        }
    }
}

#[test]
fn sparse_vectors_equal_sentence_transformers() -> Result {
    let file = Golden::open("sparse/expected.safetensors")?;
    let texts: Texts = serde_json::from_slice(&fs::read(golden("sparse/expected.json"))?)?;
    for (name, decoded) in &texts.decoded {
        let files = ModelFiles::dir(golden(&format!("sparse/{name}")))?;
        let is_plain = name == "masked_lm"; // no file says that it is a sparse model
        assert_eq!(
            EmbeddingKind::from_files(&files)? == EmbeddingKind::Sparse,
            !is_plain,
            "{name}"
        );
        let model = SparseEmbedder::from_files(&files, &LoadOptions::default())?;
        let limited = model.clone().with_max_active_dims(5)?;
        let of = |model: &SparseEmbedder, prompt| {
            model.embed(&texts.texts, EmbedOptions::new().with_prompt(prompt))
        };
        for (case, model, prompt) in [
            ("encode", &model, Prompt::Default),
            ("query", &model, Prompt::Query),
            ("document", &model, Prompt::Document),
            ("query_5", &limited, Prompt::Query),
            ("document_5", &limited, Prompt::Document),
        ] {
            let case = format!("{name}.{case}");
            assert_vectors(&case, &of(model, prompt)?, &expected(&file, &case)?);
        }
        if name.starts_with("auto_encoder") {
            continue; // sentence-transformers prints tokens for dimensions that are not tokens
        }
        let queries = of(&model, Prompt::Query)?;
        for (vector, decoded) in queries.iter().zip(decoded) {
            let words = model.decode(vector).into_iter().take(4).map(|(word, _)| word);
            assert_eq!(words.collect::<Vec<_>>().join(" "), *decoded, "{name}");
        }
    }
    let model = SparseEmbedder::from_dir(golden("sparse/prompts"), &LoadOptions::default())?;
    for (case, prompt) in
        [("prompts.named", Prompt::Named("query")), ("prompts.text", Prompt::Text("love "))]
    {
        let got = model.embed(&texts.texts, EmbedOptions::new().with_prompt(prompt))?;
        assert_vectors(case, &got, &expected(&file, case)?);
    }
    Ok(())
}

#[test]
fn sparse_vectors_of_a_published_model_equal_sentence_transformers() -> Result {
    let file = Golden::open("splade_tiny/expected.safetensors")?;
    let texts = fs::read_to_string(golden("splade_tiny/sentences.txt"))?;
    let texts: Vec<&str> = texts.lines().collect();
    let files = ModelFiles::dir("weights/splade-tiny-msmarco")?;
    assert_eq!(EmbeddingKind::from_files(&files)?, EmbeddingKind::Sparse);
    let model = SparseEmbedder::from_files(&files, &LoadOptions::default())?;
    for (case, prompt) in [("query", Prompt::Query), ("document", Prompt::Document)] {
        let vectors = model.embed(&texts, EmbedOptions::new().with_prompt(prompt))?;
        assert_vectors(case, &vectors, &expected(&file, case)?);
    }
    Ok(())
}

/// The bits of a vector do not depend on the other texts, in any precision.
#[test]
fn a_sparse_vector_does_not_depend_on_its_batch() -> Result {
    let texts: Vec<String> = (0..90).map(|i| "a cab face ".repeat(i % 7 + 1)).collect();
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
        let options = LoadOptions::default().with_precision(precision);
        for name in ["splade_max", "splade_sum"] {
            let model = SparseEmbedder::from_dir(golden(&format!("sparse/{name}")), &options)?;
            let together = model.embed(&texts, EmbedOptions::new())?;
            for i in [0, 3, 6, 89] {
                let alone = model.embed(&texts[i..=i], EmbedOptions::new())?;
                assert_eq!(alone[0], together[i], "{name} {precision} {i}");
            }
        }
    }
    Ok(())
}

/// Edits of the inference-free model, each with the error.
#[test]
fn routes_that_are_not_implemented_or_leave_the_folder_are_errors() -> Result {
    for (from, to, expected) in [
        ("\"default_route\": \"document\"", "\"default_route\": \"query\"", "default_route query"),
        ("\"route_mappings\": {}", "\"route_mappings\": {\"x\": 1}", "route_mappings {\"x\":1}"),
        ("\"query_0_SparseStaticEmbedding\"", "\"../x\"", "a module's path ../x"),
        ("\"query_0_SparseStaticEmbedding\"", "\"/etc\"", "a module's path /etc"),
        ("\"query\": [", "\"other\": [", "structure.query (no modules)"),
    ] {
        let dir = temp_dir()?;
        copy_folder(&golden("sparse/inference_free"), dir.path())?;
        let path = dir.path().join("router_config.json");
        let text = fs::read_to_string(&path)?;
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replace(from, to))?;
        let error = SparseEmbedder::from_dir(dir.path(), &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    Ok(())
}

#[test]
fn a_folder_of_another_kind_and_a_limit_of_0_are_errors() -> Result {
    let options = LoadOptions::default();
    let load = |dir: &str| SparseEmbedder::from_dir(golden(dir), &options);
    let error = load("../../weights/all-MiniLM-L6-v2").unwrap_err().to_string();
    assert!(error.contains("modules Transformer, Pooling, Normalize"), "{error}");
    let error = load("sparse/splade_max")?.with_max_active_dims(0).unwrap_err().to_string();
    assert_eq!(error, "max_active_dims 0 is invalid: expected at least 1");
    Ok(())
}
