//! Compares the dense, sparse and multi-vector results of a small checkpoint with the files of
//! BGE-M3 with those of sentence-transformers and of FlagEmbedding's rules.

use std::fs;

use anyhow::Result;
use candle_core::DType;
use encoder::{
    EmbedOptions, Embedder, EmbeddingKind, LateInteraction, LoadOptions, ModelFiles, MultiVector,
    MultiVectorEmbedder, SparseEmbedder,
};

use crate::support::{Golden, copy_folder, golden};

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

#[test]
fn a_missing_or_wrong_map_of_bge_m3_is_an_error() -> Result<()> {
    let dir = tempfile::tempdir()?;
    copy_folder(&golden("bge_m3"), dir.path())?;
    fs::copy(golden("bge_m3/colbert_linear.pt"), dir.path().join("sparse_linear.pt"))?;
    let error = SparseEmbedder::from_dir(dir.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("rows of weight 16 is not supported"), "{error}");
    fs::remove_file(dir.path().join("colbert_linear.pt"))?;
    let error = MultiVectorEmbedder::from_dir(dir.path(), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("Transformer, Pooling, Normalize"), "{error}");
    Ok(())
}
