//! Compares multi-vector embeddings with sentence-transformers' `MultiVectorEncoder`.

use std::fs;

use encoder::{
    Embed, EmbedOptions, EmbeddingKind, Inspection, LateInteraction, LoadOptions, LongTexts,
    ModelFiles, MultiVector, MultiVectorEmbedder, Precision, Prompt,
};
use serde::Deserialize;

use crate::support::{Golden, copy_folder, golden, temp_dir};

type Result<T = ()> = anyhow::Result<T>;

/// The models of the folder `multi_vector`.
const MODELS: [&str; 17] = [
    "plain",
    "prompts",
    "lengths",
    "expansion",
    "expansion_attended",
    "expansion_min",
    "expansion_roberta",
    "expansion_modernbert",
    "two_dense",
    "no_dense",
    "pooled",
    "pylate",
    "pylate_older",
    "pylate_unexpanded",
    "stanford",
    "stanford_attended",
    "stanford_defaults",
];

#[derive(Deserialize)]
struct Texts {
    texts: Vec<String>,
}

fn texts() -> Result<Vec<String>> {
    let Texts { texts } = serde_json::from_slice(&fs::read(golden("multi_vector/expected.json"))?)?;
    Ok(texts)
}

fn load(name: &str) -> Result<MultiVectorEmbedder> {
    let dir = golden(&format!("multi_vector/{name}"));
    Ok(MultiVectorEmbedder::from_dir(dir, &LoadOptions::default())?)
}

/// Checks that the texts have as many vectors as in the case, such as `plain.query`, with values
/// that are close.
fn assert_vectors(file: &Golden, case: &str, got: &[MultiVector]) -> Result {
    let expected = file.get(&format!("{case}.vectors")).to_vec2::<f32>()?;
    let offsets = file.get(&format!("{case}.offsets"));
    let offsets = offsets.to_dtype(candle_core::DType::U32)?.to_vec1::<u32>()?;
    let counts: Vec<usize> = offsets.windows(2).map(|at| (at[1] - at[0]) as usize).collect();
    assert_eq!(got.iter().map(MultiVector::len).collect::<Vec<_>>(), counts, "{case}");
    let rows = got.iter().flat_map(MultiVector::rows);
    for (i, (got, expected)) in rows.zip(&expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{case}");
        for (got, expected) in got.iter().zip(expected) {
            // The results of PyTorch for the small ModernBERT differ by 6e-7 from those in f64.
            let close = if case.contains("modernbert") { 2e-6 } else { 1e-6 };
            assert!((got - expected).abs() <= close, "{case}, vector {i}: {got}, {expected}");
        }
    }
    Ok(())
}

#[test]
fn multi_vectors_and_scores_equal_sentence_transformers() -> Result {
    let file = Golden::open("multi_vector/expected.safetensors")?;
    let texts = texts()?;
    for name in MODELS {
        let files = ModelFiles::dir(golden(&format!("multi_vector/{name}")))?;
        assert_eq!(EmbeddingKind::from_files(&files)?, EmbeddingKind::Multi, "{name}");
        let found = Inspection::new(&files);
        assert!(found.runs_as.contains(&"MultiVectorEmbedder") && found.runs(), "{name}: {found}");
        let model = MultiVectorEmbedder::from_files(&files, &LoadOptions::default())?;
        let embed = |prompt| model.embed(&texts, EmbedOptions::new().with_prompt(prompt));
        let (queries, documents) = (embed(Prompt::Query)?, embed(Prompt::Document)?);
        assert_vectors(&file, &format!("{name}.query"), &queries)?;
        assert_vectors(&file, &format!("{name}.document"), &documents)?;
        assert_vectors(&file, &format!("{name}.encode"), &embed(Prompt::Default)?)?;
        for (score, case) in [
            (LateInteraction::MaxSim, "maxsim"),
            (LateInteraction::MeanMaxSim, "mean_maxsim"),
            (model.similarity(), "similarity"),
        ] {
            let expected = file.get(&format!("{name}.{case}")).to_vec2::<f32>()?;
            for (query, expected) in queries.iter().zip(expected) {
                for (got, expected) in score.scores(query, &documents)?.into_iter().zip(expected) {
                    // Up to 14 maxima, each of which may differ as the vectors do.
                    let close = if name.contains("modernbert") { 2e-5 } else { 1e-5 };
                    let close = f32::max(close, 1e-6 * expected.abs());
                    assert!((got - expected).abs() <= close, "{name}.{case}: {got}, {expected}");
                }
            }
        }
    }
    let named = load("prompts")?;
    let options = EmbedOptions::new().with_prompt(Prompt::Text("query: "));
    assert_vectors(&file, "prompts.named", &named.embed(&texts, options)?)
}

/// The bits of the vectors of a text do not depend on the other texts, in any precision.
#[test]
fn multi_vectors_do_not_depend_on_their_batch() -> Result {
    let texts: Vec<String> = (0..90).map(|i| "the cat runs ".repeat(i % 5)).collect();
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
        let options = LoadOptions::default().with_precision(precision);
        for name in ["plain", "expansion", "expansion_min", "pooled", "stanford"] {
            let dir = golden(&format!("multi_vector/{name}"));
            let model = MultiVectorEmbedder::from_dir(dir, &options)?;
            for prompt in [Prompt::Query, Prompt::Document] {
                let prompted = EmbedOptions::new().with_prompt(prompt);
                let together = model.embed(&texts, prompted)?;
                for i in [0, 3, 4, 89] {
                    let alone = model.embed(&texts[i..=i], prompted)?;
                    assert_eq!(alone[0], together[i], "{name} {precision} {i}");
                }
            }
        }
    }
    Ok(())
}

/// Windows contain all tokens of a text, and a short text has the vectors that it has alone.
#[test]
fn windows_have_the_vectors_of_all_tokens() -> Result {
    let model = load("lengths")?; // documents of at most 10 tokens
    let texts = ["the cat", "the dog is running on the new river and finds the red bank"];
    let document = EmbedOptions::new().with_prompt(Prompt::Document);
    let truncated = model.embed(&texts, document)?;
    let windows = model.embed(&texts, document.with_long_texts(LongTexts::Windows))?;
    assert_eq!((windows[0].clone(), truncated[1].len()), (truncated[0].clone(), 10));
    let tokens = model.tokenizer().pieces(texts[1], false)?.len();
    assert_eq!(windows[1].len(), tokens + 2 * 2); // two windows, each with [CLS] and [SEP]
    Ok(())
}

/// Edits of a folder, each with the error.
#[test]
fn settings_that_are_not_implemented_are_errors_that_name_them() -> Result {
    let modules = "modules.json";
    let mask = "2_MultiVectorMask/config.json";
    let settings = "sentence_bert_config.json";
    for (file, from, to, expected) in [
        (modules, "normalize.Normalize", "router.Router", "modules Transformer, Dense, MultiVec"),
        (settings, "\"fixed\"", "\"other\"", "unknown variant `other`"),
        (settings, "\"length\": 12", "\"length\": 0", "a nonzero"),
        (settings, "\"length\": 12", "\"length\": 9000", "9000"),
        (settings, "\"token\": null", "\"token\": \"zzz\"", "does not contain \"zzz\""),
        (
            settings,
            "\"document_length\": 14",
            "\"document_length\": 14, \"query_length\": 3",
            "query_length 3 is not supported: expected at least the length of query_expansion",
        ),
        (settings, "\"document_length\": 14", "\"document_length\": 2", "2"),
        (mask, "\"document\"", "7", "did not match"),
        ("1_Dense/config.json", "token_embeddings", "sentence_embedding", "module_input_name"),
    ] {
        let dir = temp_dir()?;
        copy_folder(&golden("multi_vector/expansion"), dir.path())?;
        let path = dir.path().join(file);
        let text = fs::read_to_string(&path)?;
        assert!(text.contains(from), "{from}: {text}");
        fs::write(&path, text.replacen(from, to, 1))?;
        let error = MultiVectorEmbedder::from_dir(dir.path(), &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains(expected), "{to}: {error}");
    }
    let dense = golden("../../weights/all-MiniLM-L6-v2");
    let error = MultiVectorEmbedder::from_dir(dense, &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("modules Transformer, Pooling, Normalize"), "{error}");
    Ok(())
}
