//! Compares the dense, sparse and multi-vector results of a small checkpoint with the files of
//! BGE-M3 with those of sentence-transformers and of FlagEmbedding's rules.

use std::{fs, path::Path};

use anyhow::Result;
use candle_core::DType;
use encoder::{
    BgeM3Embedder, Embed, EmbedOptions, Embedder, EmbeddingKind, Error, LateInteraction,
    LoadOptions, LongTexts, ModelFiles, MultiVector, MultiVectorEmbedder, Precision, Prompt, Row,
    SparseEmbedder,
};

use crate::support::{Golden, MINILM, copy_folder, golden, temp_dir};

fn texts() -> Result<Vec<String>> {
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(golden("bge_m3/expected.json"))?)?;
    Ok(serde_json::from_value(json["texts"].clone())?)
}

#[test]
fn all_three_results_of_bge_m3_equal_the_reference() -> Result<()> {
    let file = Golden::open("bge_m3/expected.safetensors")?;
    let (texts, options) = (texts()?, LoadOptions::default());
    let files = ModelFiles::dir(golden("bge_m3"))?;
    assert_eq!(EmbeddingKind::from_files(&files)?, EmbeddingKind::Dense);
    let close = |got: f32, expected: f32, what: &str| {
        assert!((got - expected).abs() <= 1e-5, "{what}: {got}, {expected}");
    };

    let dense = Embedder::from_files(&files, &options)?.embed(&texts)?.to_vec2::<f32>()?;
    let expected = file.get("dense").to_vec2::<f32>()?;
    for (got, expected) in dense.concat().into_iter().zip(expected.concat()) {
        close(got, expected, "dense");
    }

    let integers =
        |name: &str| -> Result<Vec<u32>> { Ok(file.get(name).to_dtype(DType::U32)?.to_vec1()?) };
    let sparse = SparseEmbedder::from_files(&files, &options)?;
    let sparse = sparse.embed(&texts, EmbedOptions::default())?;
    let indices: Vec<u32> = sparse.iter().flat_map(|vector| vector.indices.clone()).collect();
    assert_eq!(indices, integers("sparse.indices")?);
    let values = sparse.iter().flat_map(|vector| vector.values.clone());
    for (got, expected) in values.zip(file.get("sparse.values").to_vec1::<f32>()?) {
        close(got, expected, "sparse");
    }
    let lexical = file.get("lexical_scores").to_vec2::<f32>()?;
    let multi = MultiVectorEmbedder::from_files(&files, &options)?;
    assert_eq!(multi.similarity(), LateInteraction::MeanMaxSim);
    let vectors = multi.embed(&texts, EmbedOptions::default())?;
    let offsets = integers("colbert.offsets")?;
    let counts: Vec<usize> = offsets.windows(2).map(|at| (at[1] - at[0]) as usize).collect();
    assert_eq!(vectors.iter().map(MultiVector::len).collect::<Vec<_>>(), counts);
    let got = vectors.iter().flat_map(MultiVector::rows).flatten().copied();
    for (got, expected) in got.zip(file.get("colbert.vectors").flatten_all()?.to_vec1::<f32>()?) {
        close(got, expected, "colbert");
    }
    let colbert = file.get("colbert_scores").to_vec2::<f32>()?;
    for i in 0..texts.len() {
        let scores = multi.similarity().scores(&vectors[i], &vectors)?;
        for j in 0..texts.len() {
            close(sparse[i].dot(&sparse[j]), lexical[i][j], "lexical score");
            close(scores[j], colbert[i][j], "colbert score");
        }
    }
    Ok(())
}

/// The bits of the values of each row.
fn bits<R: Row>(rows: &[R]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.values().map(|value| value.to_bits()).collect()).collect()
}

/// Also for queries, for windows, and with settings of single kinds.
#[test]
fn one_pass_has_the_bits_of_the_models_of_each_kind() -> Result<()> {
    let mut texts = texts()?;
    texts.push("The man in the new bank loves the red dog, and the dog loves food. ".repeat(3));
    let windows = EmbedOptions::new().with_long_texts(LongTexts::Windows);
    let prompted = EmbedOptions::new().with_prompt(Prompt::Text("the cat: "));
    for precision in [Precision::F32, Precision::Int8] {
        let mut load = LoadOptions::default();
        load.precision = precision;
        let files = ModelFiles::dir(golden("bge_m3"))?;
        let all = BgeM3Embedder::from_files(&files, &load)?;
        let all = all.with_dimension(7)?.with_max_active_dims(5)?.with_tokens();
        let dense = Embedder::from_files(&files, &load)?.with_dimension(7)?;
        let sparse = SparseEmbedder::from_files(&files, &load)?;
        let sparse = sparse.with_max_active_dims(5)?.with_tokens();
        let multi = MultiVectorEmbedder::from_files(&files, &load)?;
        assert_eq!(all.dimensions(), [7, sparse.dimension(), 16]);
        for options in
            [EmbedOptions::new(), EmbedOptions::new().with_prompt(Prompt::Query), windows, prompted]
        {
            let rows = all.embed(&texts, options)?;
            assert_eq!(rows.len(), texts.len());
            let expected = dense.embed_rows(&dense.tokenize(&texts, options)?, |batch| batch())?;
            let got: Vec<_> = rows.iter().map(|row| row.embedding.clone()).collect();
            assert_eq!(bits(&got), bits(&expected), "{options:?}");
            let expected = sparse.embed(&texts, options)?;
            let got: Vec<_> = rows.iter().map(|row| row.sparse_embedding.clone()).collect();
            assert_eq!((bits(&got), got), (bits(&expected), expected), "{options:?}");
            let expected = multi.embed(&texts, options)?;
            let got: Vec<_> = rows.iter().map(|row| row.multi_vector_embedding.clone()).collect();
            assert_eq!((bits(&got), got), (bits(&expected), expected), "{options:?}");
        }
    }
    Ok(())
}

#[test]
fn all_kinds_are_computed_in_one_pass() -> Result<()> {
    let (texts, load) = (texts()?, LoadOptions::default());
    let all = BgeM3Embedder::from_dir(golden("bge_m3"), &load)?;
    let tokenized = all.tokenize(&texts, EmbedOptions::default())?;
    let mut batches = 0;
    let rows = all.embed_rows(&tokenized, |batch| {
        batches += 1;
        batch()
    })?;
    assert_eq!((batches, rows.len()), (1, texts.len()));
    let stopped = all.embed_rows(&tokenized, |_| Err(Error::Stopped));
    assert!(matches!(stopped, Err(Error::Stopped)));
    assert!(all.embed::<&str>(&[], EmbedOptions::default())?.is_empty());
    Ok(())
}

#[test]
fn only_folders_with_both_maps_have_all_kinds() -> Result<()> {
    let load = LoadOptions::default();
    let expected = "expected a folder of BGE-M3, with sparse_linear.pt and colbert_linear.pt";
    for folder in [Path::new(MINILM), &golden("sparse/splade_max"), &golden("multi_vector/plain")] {
        let error = BgeM3Embedder::from_dir(folder, &load).unwrap_err().to_string();
        assert!(
            error.contains("sparse_linear.pt not found: ") && error.contains(expected),
            "{error}"
        );
    }
    let dir = temp_dir()?;
    copy_folder(&golden("bge_m3"), dir.path())?;
    fs::remove_file(dir.path().join("colbert_linear.pt"))?;
    let error = BgeM3Embedder::from_dir(dir.path(), &load).unwrap_err().to_string();
    assert!(error.contains("colbert_linear.pt not found: ") && error.contains(expected), "{error}");
    copy_folder(&golden("sparse/splade_max"), dir.path())?;
    fs::copy(golden("bge_m3/colbert_linear.pt"), dir.path().join("colbert_linear.pt"))?;
    let error = BgeM3Embedder::from_dir(dir.path(), &load).unwrap_err().to_string();
    assert!(error.contains("the kind of the modules sparse is not supported"), "{error}");
    Ok(())
}

#[test]
fn a_missing_or_wrong_map_of_bge_m3_is_an_error() -> Result<()> {
    let dir = temp_dir()?;
    copy_folder(&golden("bge_m3"), dir.path())?;
    fs::copy(golden("bge_m3/colbert_linear.pt"), dir.path().join("sparse_linear.pt"))?;
    let error = SparseEmbedder::from_dir(dir.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("rows of weight 16 is not supported"), "{error}");
    fs::remove_file(dir.path().join("colbert_linear.pt"))?;
    let error = MultiVectorEmbedder::from_dir(dir.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("Transformer, Pooling, Normalize"), "{error}");
    Ok(())
}
