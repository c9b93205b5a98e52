//! `encodle search` in files of dense, sparse and multi-vectors, compared with brute force; files
//! of sparse vectors that other programs wrote.

use std::{
    fs::{self, File},
    path::Path,
    sync::Arc,
};

use anyhow::Result;
use arrow_array::{
    ArrayRef, RecordBatch, StringArray,
    builder::{Float32Builder, Int64Builder, ListBuilder, StructBuilder},
};
use arrow_cast::cast;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{DataType, Field, Schema};
use corpus::{StoredColumn, VectorDtype, VectorFile};
use encoder::{MultiVector, SparseVector};
use parquet::arrow::ArrowWriter;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::{
    cli::{encodle, stderr, stdout},
    corpora::tiny_model,
    support::MINILM,
};

/// A sparse model of 96 dimensions.
const SPARSE: &str = "tests/golden/sparse/splade_max";
/// A multi-vector model of 8 dimensions, whose queries have 12 vectors.
const MULTI: &str = "tests/golden/multi_vector/expansion";
const ROWS: usize = 10_000;
const QUERIES: [&str; 3] = ["a bad cab", "h", "cab"];

/// Writes a file of rows that a model is said to have computed.
fn write(path: &Path, embedding: ArrayRef, model: &str) -> Result<()> {
    let texts = (0..embedding.len()).map(|row| format!("text {row}"));
    let fields = vec![
        Field::new("text", DataType::Utf8, false),
        Field::new("embedding", embedding.data_type().clone(), true),
    ];
    let model = json!({"model": model, "pooling": [], "normalize": false}).to_string();
    let schema = Schema::new_with_metadata(fields, [("encodle".to_string(), model)]);
    let texts = Arc::new(StringArray::from_iter_values(texts));
    let rows = RecordBatch::try_new(Arc::new(schema), vec![texts, embedding])?;
    let file = File::create(path)?;
    if path.extension().is_some_and(|extension| extension == "arrow") {
        let mut writer = FileWriter::try_new(file, &rows.schema())?;
        for start in (0..rows.num_rows()).step_by(700) {
            writer.write(&rows.slice(start, 700.min(rows.num_rows() - start)))?;
        }
        writer.finish()?;
    } else {
        let mut writer = ArrowWriter::try_new(file, rows.schema(), None)?;
        for start in (0..rows.num_rows()).step_by(3000) {
            writer.write(&rows.slice(start, 3000.min(rows.num_rows() - start)))?;
            writer.flush()?; // ends the row group
        }
        writer.close()?;
    }
    Ok(())
}

/// Copies of 300 rows, so that scores are equal.
fn copies<R: Clone>(mut row: impl FnMut() -> R) -> Vec<R> {
    let rows: Vec<R> = (0..300).map(|_| row()).collect();
    (0..ROWS).map(|i| rows[i * 7919 % 300].clone()).collect()
}

/// The rows that `encodle embed` prints for the queries.
fn query_rows(model: &str) -> Result<Vec<Value>> {
    let arguments = [&["embed", "--model", model, "--prompt-name", "query"], &QUERIES[..]].concat();
    let lines = stdout(encodle(&arguments, b"").success());
    let row = |line| Ok(serde_json::from_str::<Value>(line)?["embedding"].take());
    lines.lines().map(row).collect()
}

/// Row and score of each hit of each query. The records of the hits must be those of the rows.
fn search(arguments: &[&str]) -> Result<Vec<Vec<(usize, f32)>>> {
    let output = stdout(encodle(&[&["search"], arguments, &QUERIES].concat(), b"").success());
    let hit = |hit: &Value| {
        assert_eq!(hit["record"], json!({"text": format!("text {}", hit["row"])}));
        (hit["row"].as_u64().unwrap() as usize, hit["score"].as_f64().unwrap() as f32)
    };
    let hits = |line| -> Result<Vec<_>> {
        let line: Value = serde_json::from_str(line)?;
        Ok(line["hits"].as_array().expect("hits").iter().map(hit).collect())
    };
    output.lines().map(hits).collect()
}

/// The best `top` rows by a score per row, which must include equal scores.
fn best<S: PartialOrd>(scores: Vec<S>, top: usize) -> Vec<(usize, S)> {
    let mut rows: Vec<(usize, S)> = scores.into_iter().enumerate().collect();
    rows.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap()); // stable
    rows.truncate(top);
    assert!(rows.windows(2).any(|pair| pair[0].1 == pair[1].1), "no ties");
    rows
}

#[test]
fn search_equals_brute_force_in_10_000_rows() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let mut random = ChaCha8Rng::seed_from_u64(0);

    let (model, width) = (tiny_model()?, 24);
    let model = model.path().to_str().unwrap();
    let rows = copies(|| (0..width).map(|_| random.random_range(-1.0..1.0)).collect::<Vec<f32>>());
    let column = Vec::column(&rows, &Vec::data_type(width, VectorDtype::F32))?;
    let dense = path("dense.parquet");
    write(Path::new(&dense), column, model)?;
    let f64s = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let cosines = |query: Value| -> Result<Vec<f64>> {
        let query = f64s(&serde_json::from_value::<Vec<f32>>(query)?);
        let cosine = |row: &Vec<f32>| {
            let row = f64s(row);
            dot(&query, &row) / (dot(&query, &query) * dot(&row, &row)).sqrt()
        };
        Ok(rows.iter().map(cosine).collect())
    };
    let cosines = query_rows(model)?.into_iter().map(cosines).collect::<Result<Vec<_>>>()?;
    for (hits, cosines) in search(&["--corpus", &dense, "-k", "70"])?.iter().zip(&cosines) {
        for (hit, expected) in hits.iter().zip(best(cosines.clone(), 70)) {
            assert_eq!(hit.0, expected.0);
            assert!((f64::from(hit.1) - expected.1).abs() < 1e-6, "{hit:?}, {expected:?}");
        }
    }

    let rows = copies(|| {
        let indices: Vec<u32> = (0..96).filter(|_| random.random_bool(0.1)).collect();
        let values = indices.iter().map(|_| random.random_range(0.1..2.0)).collect();
        SparseVector::new(indices, values)
    });
    let column = SparseVector::column(&rows, &SparseVector::data_type(96, VectorDtype::F32))?;
    let sparse = path("sparse.arrow");
    write(Path::new(&sparse), column.clone(), SPARSE)?;
    write(Path::new(&path("sparse.parquet")), column, SPARSE)?;
    let full = |indices: &[u32], values: &[f32]| {
        let mut full = vec![0.0; 96];
        indices.iter().zip(values).for_each(|(&index, &value)| full[index as usize] = value);
        full
    };
    let products = |query: Value| -> Result<Vec<f32>> {
        let indices: Vec<u32> = serde_json::from_value(query["indices"].clone())?;
        let values: Vec<f32> = serde_json::from_value(query["values"].clone())?;
        let query = full(&indices, &values);
        let product = |row: &SparseVector| {
            let row = full(&row.indices, &row.values);
            row.iter().zip(&query).fold(0.0, |sum, (x, y)| sum + x * y)
        };
        Ok(rows.iter().map(product).collect())
    };
    let products = query_rows(SPARSE)?.into_iter().map(products).collect::<Result<Vec<_>>>()?;
    for threads in ["1", "2", "7"] {
        for corpus in [&sparse, &path("sparse.parquet")] {
            let hits = search(&["--corpus", corpus, "-k", "70", "--threads", threads])?;
            for (hits, products) in hits.into_iter().zip(&products) {
                assert_eq!(hits, best(products.clone(), 70));
            }
        }
    }
    let some = search(&["--corpus", &sparse, "-k", "70", "--threshold", "1.5"])?;
    for (hits, products) in some.into_iter().zip(&products) {
        let mut expected = best(products.clone(), 70);
        expected.retain(|(_, score)| *score >= 1.5);
        assert_eq!(hits, expected);
    }

    // Reciprocal rank fusion: rank the first rows of each file, sum, sort.
    for (options, k, candidates) in
        [(&[][..], 60.0, 100), (&["--rrf-k", "3", "--candidates", "150"], 3.0, 150)]
    {
        let arguments = [&["--corpus", &dense, "--hybrid", &sparse, "-k", "70"], options].concat();
        for (query, hits) in search(&arguments)?.into_iter().enumerate() {
            let mut sums = vec![0.0; ROWS];
            for (rank, (row, _)) in best(cosines[query].clone(), candidates).iter().enumerate() {
                sums[*row] += 1.0 / (k + rank as f64 + 1.0);
            }
            for (rank, (row, _)) in best(products[query].clone(), candidates).iter().enumerate() {
                sums[*row] += 1.0 / (k + rank as f64 + 1.0);
            }
            let expected = best(sums, 70).into_iter().map(|(row, sum)| (row, sum as f32));
            assert_eq!(hits, expected.collect::<Vec<_>>(), "{options:?}, query {query}");
        }
    }
    Ok(())
}

#[test]
fn search_by_max_sim_equals_brute_force_in_10_000_rows() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let rows = copies(|| {
        let count = 8 * random.random_range(0..7);
        // Multiples of 1/64, which f16 stores exactly.
        let value = || f32::from(random.random_range(-64i8..=64)) / 64.0;
        MultiVector::new(std::iter::repeat_with(value).take(count).collect(), 8)
    });
    let [half, parquet] = ["half.arrow", "rows.parquet"].map(path);
    for (file, dtype) in [(&half, VectorDtype::F16), (&parquet, VectorDtype::F32)] {
        let column = MultiVector::column(&rows, &MultiVector::data_type(8, dtype))?;
        write(Path::new(file), column, MULTI)?;
    }
    let dot = |x: &[f32], y: &[f32]| -> f64 {
        x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
    };
    for (query, row) in query_rows(MULTI)?.into_iter().enumerate() {
        let vectors: Vec<Vec<f32>> = serde_json::from_value(row)?;
        assert_eq!(vectors.len(), 12);
        let score = |row: &MultiVector| {
            let maximum = |q: &Vec<f32>| row.rows().map(|d| dot(q, d)).fold(f64::MIN, f64::max);
            if row.is_empty() { -1e9 } else { vectors.iter().map(maximum).sum() }
        };
        let expected = best(rows.iter().map(score).collect(), 70);
        for threads in ["1", "2", "7"] {
            for file in [&half, &parquet] {
                let hits = search(&["--corpus", file, "-k", "70", "--threads", threads])?;
                for (hit, expected) in hits[query].iter().zip(&expected) {
                    assert_eq!(hit.0, expected.0, "query {query}");
                    assert!((f64::from(hit.1) - expected.1).abs() < 1e-5, "{hit:?}, {expected:?}");
                }
            }
        }
    }
    Ok(())
}

/// A list of pairs, in which a list, an index or a value can be null.
type Pairs = Option<Vec<(Option<i64>, Option<f32>)>>;

/// Lists of indices of 64 bits with values.
fn lists(rows: &[Pairs]) -> ArrayRef {
    let fields = vec![
        Field::new("value", DataType::Float32, true),
        Field::new("index", DataType::Int64, true),
    ];
    let columns: Vec<Box<dyn arrow_array::builder::ArrayBuilder>> =
        vec![Box::new(Float32Builder::new()), Box::new(Int64Builder::new())];
    let mut lists = ListBuilder::new(StructBuilder::new(fields, columns));
    for row in rows {
        for (index, value) in row.iter().flatten() {
            let pair = lists.values();
            pair.field_builder::<Float32Builder>(0).unwrap().append_option(*value);
            pair.field_builder::<Int64Builder>(1).unwrap().append_option(*index);
            pair.append(true);
        }
        lists.append(row.is_some());
    }
    Arc::new(lists.finish())
}

#[test]
fn sparse_vectors_of_other_programs_are_read_or_refused() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("rows.parquet");
    let pair = |index, value| (Some(index), Some(value));
    let first = Some(vec![pair(3, 0.5), pair(95, 2.0)]);
    let good = lists(&[first.clone(), Some(vec![]), Some(vec![pair(3, 1.0)])]);
    let DataType::List(element) = good.data_type() else { unreachable!("a list") };
    let large = cast(&good, &DataType::LargeList(element.clone()))?;
    let half = [(vec![3, 95], vec![0.5, 2.0]), (vec![], vec![]), (vec![3], vec![1.0])];
    let half = half.map(|(indices, values)| SparseVector::new(indices, values));
    let half = SparseVector::column(&half, &SparseVector::data_type(96, VectorDtype::F16))?;
    for rows in [good, large, half] {
        write(&path, rows, SPARSE)?;
        let file = VectorFile::open(&path)?;
        assert_eq!((file.rows()?, file.dimension()), (3, None));
        let query = SparseVector::new(vec![3], vec![2.0]);
        let hits = file.sparse_index(96)?.search(&[query], 9)?;
        let hits: Vec<_> = hits[0].iter().map(|hit| (hit.row, hit.score)).collect();
        assert_eq!(hits, [(2, 2.0), (0, 1.0)]);
    }

    let element = "expected an index of 0 to 4294967295 with a value, got";
    let cases = [
        (
            "expected ascending indices, each once, got 2 after 5",
            Some(vec![pair(5, 1.), pair(2, 1.)]),
        ),
        (
            "expected ascending indices, each once, got 5 after 5",
            Some(vec![pair(5, 1.), pair(5, 1.)]),
        ),
        ("expected finite values, got NaN at index 5", Some(vec![pair(5, f32::NAN)])),
        ("expected finite values, got inf at index 5", Some(vec![pair(5, f32::INFINITY)])),
        (
            "expected indices below 96 (the dimension), got 96; set --model to the model that \
             embedded the corpus",
            Some(vec![pair(96, 1.)]),
        ),
        ("{value: 1.0, index: -3}", Some(vec![pair(2, 1.), pair(-3, 1.)])),
        ("{value: 1.0, index: 4294967296}", Some(vec![pair(1 << 32, 1.)])),
        ("{value: null, index: 2}", Some(vec![(Some(2), None)])),
        ("{value: 1.0, index: null}", Some(vec![(None, Some(1.0))])),
        ("null", None),
    ];
    for (expected, row) in cases {
        let expected = match expected {
            expected if expected.starts_with("expected") => expected.to_string(),
            got => format!("{element} {got}"),
        };
        for name in ["rows.parquet", "rows.arrow"] {
            let path = dir.path().join(name);
            write(&path, lists(&[first.clone(), row.clone()]), SPARSE)?;
            let error = stderr(encodle(&["search", "--corpus", path.to_str().unwrap(), "a"], b""));
            let expected = format!("encodle: {}: row 1 of the corpus: {expected}", path.display());
            assert_eq!(error, expected);
        }
    }
    let texts = Arc::new(StringArray::from(vec!["a"]));
    write(&path, texts, SPARSE)?;
    let error = VectorFile::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("or lists of structs of an integer \"index\" and a \"value\""),
        "{error}"
    );
    Ok(())
}

#[test]
fn search_refuses_models_and_options_of_another_kind() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (dense, sparse, short) = (path("dense.parquet"), path("sparse.arrow"), path("short.arrow"));
    let (npy, multi) = (path("dense.npy"), path("multi.parquet"));
    let other_width = "tests/golden/multi_vector/no_dense"; // vectors of 16 values
    for (texts, model, output) in [
        (&["a", "cab"][..], MINILM, &dense),
        (&["a", "cab"], MINILM, &npy),
        (&["a", "cab"], SPARSE, &sparse),
        (&["a", "cab"], MULTI, &multi),
        (&["a"], SPARSE, &short),
    ] {
        let arguments = [&["embed", "--model", model, "--output", output], texts].concat();
        encodle(&arguments, b"").success();
    }
    let kinds = |file: &str, expected: &str, kind: &str, model: &str| {
        format!(
            "{file} contains {expected} vectors: expected a {expected} model, got the {kind} model \
             {model}; set --model to the model that embedded the corpus"
        )
    };
    let no_effect =
        |option: &str| format!("{option} has no effect on the sparse vectors of {sparse}");
    let cases: [(&[&str], i32, String); 16] = [
        (&["--corpus", &sparse, "--model", MINILM], 1, kinds(&sparse, "sparse", "dense", MINILM)),
        (&["--corpus", &dense, "--model", SPARSE], 1, kinds(&dense, "dense", "sparse", SPARSE)),
        (&["--corpus", &multi, "--model", MINILM], 1, kinds(&multi, "multi", "dense", MINILM)),
        (&["--corpus", &dense, "--model", MULTI], 1, kinds(&dense, "dense", "multi", MULTI)),
        (
            &["--corpus", &multi, "--model", other_width],
            1,
            format!("{multi} has vectors of dimension 8: expected 16 (the dimension of "),
        ),
        (&["--corpus", &sparse, "--normalize"], 2, no_effect("--normalize")),
        (&["--corpus", &sparse, "--model", SPARSE, "--pooling", "max"], 2, no_effect("--pooling")),
        (
            &["--corpus", &dense, "--threshold", "1.5"],
            2,
            "--threshold is 1.5: expected a cosine from -1 to 1".to_string(),
        ),
        (
            &["--corpus", &dense, "--hybrid", &sparse, "--threshold", "0.5"],
            2,
            "cannot be used with".to_string(),
        ),
        (
            &["--corpus", &dense, "--rrf-k", "9"],
            2,
            "--rrf-k is for a hybrid search: expected --hybrid FILE, or --kind all".to_string(),
        ),
        (
            &["--corpus", &dense, "--kind", "all"],
            1,
            format!(
                "{dense} contains dense vectors: expected vectors of all kinds, as encodle embed"
            ),
        ),
        (
            &["--corpus", &dense, "--kind", "sparse"],
            1,
            format!("{dense} contains dense vectors: expected sparse ones"),
        ),
        (
            &["--corpus", &dense, "--kind", "all", "--threshold", "0.5"],
            2,
            "--threshold cannot be used with a hybrid search".to_string(),
        ),
        (
            &["--corpus", &dense, "--hybrid", &sparse, "--candidates", "9"],
            2,
            "--candidates is 9: expected at least 10, the value of --top".to_string(),
        ),
        (
            &["--corpus", &dense, "--hybrid", &short],
            1,
            format!("the number of vectors in {short} is 1: expected 2, as in {dense}; "),
        ),
        (
            &["--corpus", &sparse, "--hybrid", &npy],
            1,
            format!("{npy} does not name its model: expected a .parquet or .arrow file"),
        ),
    ];
    for (arguments, code, expected) in cases {
        let result = encodle(&[&["search"], arguments, &["a"]].concat(), b"").code(code);
        let error = String::from_utf8(result.get_output().stderr.clone())?;
        assert!(error.contains(&expected), "{arguments:?}: {error}");
    }
    // The records are those of the file that has some, and the model is that of --model.
    let found =
        stdout(encodle(&["search", "--corpus", &npy, "--hybrid", &sparse, "cab"], b"").success());
    let found: Value = serde_json::from_str(&found)?;
    assert_eq!(found["hits"][0]["record"]["text"], "cab");
    Ok(())
}

/// The search of all kinds in one file is the hybrid search of the files of single kinds.
#[test]
fn a_file_of_all_kinds_is_searched_by_each_kind_and_by_all() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let texts: Vec<String> = (0..40).map(|i| format!("the cat number {i}, a red dog")).collect();
    fs::write(path("in.txt"), texts.join("\n"))?;
    let queries = ["a red cat", "number 7", "the bank"];
    let search = |arguments: &[&str]| {
        stdout(encodle(&[&["search", "-k", "5"], arguments, &queries].concat(), b"").success())
    };
    for extension in ["parquet", "arrow"] {
        let file = |kind: &str| path(&format!("{kind}.{extension}"));
        for kind in ["dense", "sparse", "multi", "all"] {
            let (input, output) = (path("in.txt"), file(kind));
            let model = ["--model", "tests/golden/bge_m3", "--kind", kind];
            let files = ["--input", &input, "--output", &output];
            encodle(&[&["embed"], &model[..], &files].concat(), b"").success();
        }
        let [dense, sparse, multi, all] = ["dense", "sparse", "multi", "all"].map(file);
        assert_eq!(search(&["--corpus", &all]), search(&["--corpus", &dense]));
        for (kind, of_kind) in [("dense", &dense), ("sparse", &sparse), ("multi", &multi)] {
            let hits = search(&["--corpus", &all, "--kind", kind]);
            assert_eq!(hits, search(&["--corpus", of_kind]), "{kind}");
            assert!(hits.contains(r#""record":{"text":"the cat number"#), "{hits}");
        }
        for more in [&[][..], &["--rrf-k", "3", "--candidates", "9"]] {
            let one = [&["--corpus", &all, "--kind", "all"], more].concat();
            let three = ["--corpus", &dense, "--hybrid", &sparse, "--hybrid", &multi];
            assert_eq!(search(&one), search(&[&three[..], more].concat()), "{more:?}");
        }
        let error =
            encodle(&["search", "--corpus", &all, "--kind", "all", "--normalize", "a"], b"");
        assert!(stderr(error.code(2)).contains("--normalize has no effect"));
    }
    Ok(())
}

/// Queries are for the side of queries of an inference-free model, also with a prompt of the user.
#[test]
fn queries_of_an_asymmetric_model_are_queries() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let corpus = dir.path().join("rows.parquet");
    let corpus = corpus.to_str().unwrap();
    let model = "tests/golden/sparse/inference_free";
    encodle(&["embed", "--model", model, "--output", corpus, "a bad cab", "h"], b"").success();
    let search = |more: &[&str]| {
        let arguments = [&["search", "--corpus", corpus], more, &["a bad cab"]].concat();
        stdout(encodle(&arguments, b"").success())
    };
    let hits = search(&[]);
    assert!(hits.contains("\"row\":0"), "{hits}");
    assert_eq!(search(&["--prompt", ""]), hits);
    assert_eq!(search(&["--prompt-name", "document"]), hits); // its text is empty
    Ok(())
}
