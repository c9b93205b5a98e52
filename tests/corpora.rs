//! `encodle embed --input FILE --output FILE` and `encodle search`: formats, invalid records,
//! interrupted runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    path::Path,
    process::Command,
    sync::Arc,
    time::Duration,
};

use anyhow::Result;
use arrow_array::{
    ArrayRef, BooleanArray, Date32Array, DictionaryArray, Float32Array, Int32Array, Int64Array,
    ListArray, RecordBatch, StringArray,
    cast::AsArray,
    types::{Float16Type, Float32Type, Int32Type},
};
use arrow_ipc::{
    reader::FileReader,
    writer::{FileWriter, StreamWriter},
};
use arrow_schema::{ArrowError, DataType, Schema};
use arrow_select::concat::concat_batches;
use candle_core::Tensor;
use corpus::{EmbedRun, Event, RecordSource, StoredColumn, VectorDtype};
use encoder::{
    Batch, Embed, EmbedOptions, Embedder, LoadOptions, MultiVectorEmbedder, Row, TextTokenizer,
    TokenizedTexts,
};
use parquet::arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder};
use serde::Serialize;

use crate::{
    cli::{ENVIRONMENT, encodle, stderr, stdout},
    support::{golden, golden_copy},
};

/// A sentence-transformers folder of a tiny model with 24 dimensions, which embeds many texts
/// quickly.
pub fn tiny_model() -> Result<tempfile::TempDir> {
    let dir = golden_copy("heads/score", &["config.json", "model.safetensors", "vocab.txt"])?;
    fs::write(
        dir.path().join("modules.json"),
        r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#,
    )?;
    fs::create_dir(dir.path().join("1_Pooling"))?;
    fs::write(dir.path().join("1_Pooling/config.json"), r#"{"pooling_mode": "mean"}"#)?;
    Ok(dir)
}

fn gzip(text: &str) -> Result<Vec<u8>> {
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    encoder.write_all(text.as_bytes())?;
    Ok(encoder.finish()?)
}

/// A temporary folder of files, and a model.
struct Corpora {
    model: tempfile::TempDir,
    dir: tempfile::TempDir,
}

impl Corpora {
    fn new() -> Result<Self> {
        Ok(Self { model: tiny_model()?, dir: tempfile::tempdir()? })
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_string()
    }

    /// The arguments of `encodle embed`. An argument `@name` becomes the path of the file `name` in
    /// the folder.
    fn arguments(&self, arguments: &[&str]) -> Vec<String> {
        let model = self.model.path().to_str().unwrap();
        let arguments = arguments.iter().map(|argument| match argument.strip_prefix('@') {
            Some(name) => self.path(name),
            None => argument.to_string(),
        });
        ["embed", "--model", model].map(String::from).into_iter().chain(arguments).collect()
    }

    fn embed(&self, arguments: &[&str]) -> assert_cmd::assert::Assert {
        self.embed_stdin(arguments, b"")
    }

    /// [`Self::embed`] with standard input.
    fn embed_stdin(&self, arguments: &[&str], stdin: &[u8]) -> assert_cmd::assert::Assert {
        let arguments = self.arguments(arguments);
        encodle(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), stdin)
    }

    fn error(&self, arguments: &[&str]) -> String {
        stderr(self.embed(arguments).code(1))
    }

    fn usage_error(&self, arguments: &[&str]) -> String {
        stderr(self.embed(arguments).code(2))
    }

    fn write_parquet(&self, name: &str, rows: &RecordBatch) -> Result<()> {
        let mut writer = ArrowWriter::try_new(File::create(self.path(name))?, rows.schema(), None)?;
        writer.write(rows)?;
        writer.close()?;
        Ok(())
    }

    fn write_arrow(&self, name: &str, rows: &RecordBatch) -> Result<()> {
        let mut writer = FileWriter::try_new(File::create(self.path(name))?, &rows.schema())?;
        writer.write(rows)?;
        Ok(writer.finish()?)
    }

    /// All rows of a table.
    fn table(&self, name: &str) -> Result<RecordBatch> {
        let file = File::open(self.path(name))?;
        let (schema, batches) = if name.ends_with(".parquet") {
            let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
            (builder.schema().clone(), builder.build()?.collect::<Result<Vec<_>, _>>()?)
        } else {
            let reader = FileReader::try_new(file, None)?;
            (reader.schema(), reader.collect::<Result<Vec<_>, _>>()?)
        };
        Ok(concat_batches(&schema, &batches)?)
    }

    /// The temporary files in the folder.
    fn unfinished(&self) -> Result<Vec<String>> {
        let names = fs::read_dir(self.dir.path())?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Vec<String> = names.collect::<Result<_>>()?;
        Ok(names.into_iter().filter(|name| name.contains("partial")).collect())
    }
}

/// The values of the column of vectors.
fn vectors(table: &RecordBatch) -> Vec<f32> {
    let column = table.column_by_name("embedding").expect("a column of vectors");
    let values = column.as_fixed_size_list().values().clone();
    match values.as_primitive_opt::<Float32Type>() {
        Some(values) => values.values().to_vec(),
        None => values.as_primitive::<Float16Type>().values().iter().map(|x| x.to_f32()).collect(),
    }
}

/// The header and the values of a .npy file whose values have `width` bytes.
fn npy(path: &str, width: usize) -> Result<(String, Vec<f32>)> {
    let npy = fs::read(path)?;
    assert_eq!(npy[..10], *b"\x93NUMPY\x01\0\x76\0");
    let numbers = npy[128..].chunks(width).map(|x| match width {
        2 => half::f16::from_le_bytes(x.try_into().unwrap()).to_f32(),
        _ => f32::from_le_bytes(x.try_into().unwrap()),
    });
    Ok((String::from_utf8(npy[10..128].to_vec())?, numbers.collect()))
}

/// Files contain the vectors printed to standard output, bit for bit or rounded to f16, and, except
/// for .npy, the records' fields.
#[test]
fn every_format_has_the_vectors_of_standard_output() -> Result<()> {
    let corpora = Corpora::new()?;
    let texts: Vec<String> = (0..2500).map(|i| format!("a{} cab", "bad ".repeat(i % 7))).collect();
    fs::write(corpora.path("in.txt"), texts.join("\n") + "\n")?;
    let printed = stdout(corpora.embed(&["--input", "@in.txt"]).success());
    let expected: Vec<f32> = printed
        .lines()
        .flat_map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            serde_json::from_value::<Vec<f32>>(line["embedding"].clone()).expect("numbers")
        })
        .collect();
    assert_eq!(expected.len(), 2500 * 24);
    let halves: Vec<f32> = expected.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect();
    for name in ["jsonl", "npy", "parquet", "arrow", "f16.npy", "f16.parquet", "f16.arrow"] {
        let (output, half) = (format!("@out.{name}"), name.starts_with("f16"));
        let dtype = if half { "f16" } else { "f32" };
        corpora
            .embed(&["--input", "@in.txt", "--output", &output, "--output-dtype", dtype])
            .success();
        let (output, expected) = (&output[1..], if half { &halves } else { &expected });
        match name.rsplit('.').next() {
            Some("jsonl") => assert_eq!(fs::read_to_string(corpora.path(output))?, printed),
            Some("npy") => {
                let (header, numbers) = npy(&corpora.path(output), if half { 2 } else { 4 })?;
                let descr = if half { "'<f2'" } else { "'<f4'" };
                assert!(header.contains(descr) && header.contains("(2500, 24)"), "{header}");
                assert!(&numbers == expected, "{name}");
            }
            _ => {
                let table = corpora.table(output)?;
                let text: &StringArray = table.column_by_name("text").expect("texts").as_string();
                assert!(text.iter().flatten().eq(texts.iter()), "{name}");
                assert!(&vectors(&table) == expected, "{name}");
                assert_eq!(
                    table.schema().metadata()["encodle"],
                    format!(
                        r#"{{"model":"{}","pooling":[],"normalize":false}}"#,
                        corpora.model.path().display()
                    )
                );
            }
        }
    }
    assert_eq!(corpora.unfinished()?, [""; 0]);
    let line = corpora.usage_error(&["--input", "@in.txt", "--output", "@out.xml"]);
    assert!(
        line.ends_with(
            "has an unknown extension: expected .jsonl, .ndjson, .npy, .parquet or .arrow, or \
             --format"
        ),
        "{line}"
    );
    let named = ["--input", "@in.txt", "--output", "@out.xml", "--format", "npy"];
    corpora.embed(&named).success();
    assert_eq!(fs::read(corpora.path("out.xml"))?, fs::read(corpora.path("out.npy"))?);
    let half = ["--input", "@in.txt", "--output", "@out.jsonl", "--output-dtype", "f16"];
    assert!(corpora.usage_error(&half).ends_with("JSONL does not support dtype f16: expected f32"));
    assert_eq!(
        corpora.usage_error(&["--format", "parquet", "a"]),
        "encodle: --format parquet cannot be printed: expected --output FILE; see encodle embed --help"
    );
    let table = ["--input", "@in.txt", "--output", "@out.npy", "--format", "table"];
    let line = corpora.usage_error(&table);
    assert!(line.starts_with("encodle: --format table cannot be written to a file"), "{line}");
    Ok(())
}

/// The number of tokens of a text.
#[derive(Clone, Serialize)]
#[serde(transparent)]
struct TokenCount([f32; 1]);

impl Row for TokenCount {
    fn values(&self) -> impl Iterator<Item = &f32> {
        self.0.iter()
    }
}

impl StoredColumn for TokenCount {
    const HAS_FIXED_LENGTH: bool = false;

    fn data_type(_dimension: usize, _dtype: VectorDtype) -> DataType {
        DataType::Float32
    }

    fn column<'a>(
        rows: impl IntoIterator<Item = &'a Self> + Clone,
        _data_type: &DataType,
    ) -> Result<ArrayRef, ArrowError> {
        Ok(Arc::new(Float32Array::from_iter_values(rows.into_iter().map(|row| row.0[0]))))
    }
}

#[derive(Clone)]
struct TokenCounter(Embedder);

impl Embed for TokenCounter {
    type Row = TokenCount;

    fn tokenizer(&self) -> &TextTokenizer {
        self.0.tokenizer()
    }

    fn dimension(&self) -> usize {
        1
    }

    fn tokenize<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: EmbedOptions,
    ) -> encoder::Result<TokenizedTexts> {
        self.0.tokenize(texts, options)
    }

    fn embed_rows(
        &self,
        texts: &TokenizedTexts,
        mut run: impl FnMut(&mut Batch) -> encoder::Result<()>,
    ) -> encoder::Result<Vec<TokenCount>> {
        let mut rows = vec![];
        run(&mut || {
            let counts = texts.sequences().map(|(tokens, _)| tokens.input_ids.len());
            rows.extend(counts.map(|count| TokenCount([count as f32])));
            Ok(())
        })?;
        Ok(rows)
    }
}

/// Models whose rows are not vectors need an implementation of two traits.
#[test]
fn rows_of_any_kind_are_written() -> Result<()> {
    let corpora = Corpora::new()?;
    let embedder = Embedder::from_dir(corpora.model.path(), &LoadOptions::default())?;
    let counter = TokenCounter(embedder);
    let source = RecordSource::texts(["a cab".to_string(), "a bad cab".to_string()]);
    let run = |name: &str| -> Result<_, corpus::Error> {
        let run = EmbedRun::new(source.clone(), corpora.path(name))?;
        run.run(&counter, EmbedOptions::default(), |_event| {})
    };
    assert_eq!(run("out.jsonl")?.written, 2);
    assert_eq!(
        fs::read_to_string(corpora.path("out.jsonl"))?,
        "{\"text\":\"a cab\",\"embedding\":[6.0]}\n{\"text\":\"a bad cab\",\"embedding\":[9.0]}\n"
    );
    run("out.parquet")?;
    let table = corpora.table("out.parquet")?;
    assert_eq!(table.column(1).as_primitive::<Float32Type>().values(), &[6., 9.]);
    assert!(matches!(
        run("out.npy"),
        Err(corpus::Error::Output(corpus::OutputError::RowsWithoutArray))
    ));
    Ok(())
}

/// Texts that occur again, in the same chunk and in later ones, have the vectors of the first.
#[test]
fn a_text_that_occurs_again_is_not_computed_again() -> Result<()> {
    let corpora = Corpora::new()?;
    let embedder = Embedder::from_dir(corpora.model.path(), &LoadOptions::default())?;
    let words = ["a", "cab", "bad", "face", "dead", "beef", "add", "fed"];
    let text = |i: usize| [words[i % 8], words[i / 8 % 8], words[i / 64]].join(" ");
    let texts: Vec<String> = (0..5000).map(|i| text(i * i % 509)).collect();
    let distinct: BTreeSet<&String> = texts.iter().collect();
    let run = EmbedRun::new(RecordSource::texts(texts.clone()), corpora.path("out.npy"))?;
    let mut counts = vec![];
    let summary = run.run(&embedder, EmbedOptions::default(), |event| {
        if let Event::Progress { read, repeated, .. } = event {
            counts.push((read, repeated));
        }
    })?;
    assert_eq!(summary.repeated_texts, (texts.len() - distinct.len()) as u64);
    let [(2048, first), (4096, second), (5000, all)] = counts[..] else { panic!("{counts:?}") };
    assert!(first > 1000 && second == first + 2048 && all == summary.repeated_texts, "{counts:?}");
    let mut expected = BTreeMap::new();
    for text in distinct {
        expected.insert(text, embedder.embed(&[text])?.to_vec2::<f32>()?.remove(0));
    }
    let vectors = Tensor::read_npy(corpora.path("out.npy"))?.to_vec2::<f32>()?;
    assert!(texts.iter().zip(&vectors).all(|(text, vector)| expected[text] == *vector));
    Ok(())
}

#[test]
fn a_vector_per_token_is_stored_in_f16_unless_f32_is_chosen() -> Result<()> {
    let corpora = Corpora::new()?;
    let model = golden("multi_vector/plain");
    let embedder = MultiVectorEmbedder::from_dir(model, &LoadOptions::default())?;
    let texts = ["the cat".to_string(), "a cat, a dog".to_string()];
    let expected = embedder.embed(&texts, EmbedOptions::default())?;
    for (name, dtype) in [("a.parquet", None), ("a.arrow", Some(VectorDtype::F32))] {
        let run = EmbedRun::new(RecordSource::texts(texts.clone()), corpora.path(name))?;
        let run = dtype.into_iter().fold(run, EmbedRun::with_dtype);
        run.run(&embedder, EmbedOptions::default(), |_event| {})?;
        let table = corpora.table(name)?;
        let type_of = |data_type: &DataType| match data_type {
            DataType::List(vectors) => match vectors.data_type() {
                DataType::FixedSizeList(value, length) => {
                    Some((value.data_type().clone(), *length))
                }
                _ => None,
            },
            _ => None,
        };
        let value = if dtype.is_some() { DataType::Float32 } else { DataType::Float16 };
        assert_eq!(type_of(table.column(1).data_type()), Some((value, 8)));
        for (i, expected) in expected.iter().enumerate() {
            let vectors = table.column(1).as_list::<i32>().value(i);
            let values = vectors.as_fixed_size_list().values();
            let values = arrow_cast::cast(values, &DataType::Float32)?;
            let values = &values.as_primitive::<Float32Type>().values()[..];
            let expected = expected.values();
            assert_eq!(values.len(), expected.len());
            let close = if dtype.is_some() { 0.0 } else { 5e-4 };
            assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() <= close), "{name}");
        }
    }
    Ok(())
}

const BGE_M3: &str = "tests/golden/bge_m3";
const COLUMNS: [(&str, &str); 3] =
    [("dense", "embedding"), ("sparse", "sparse_embedding"), ("multi", "multi_vector_embedding")];

/// Files of all kinds have a column for each kind: those of the files of single kinds.
#[test]
fn rows_of_all_kinds_have_the_columns_of_each_kind() -> Result<()> {
    let corpora = Corpora::new()?;
    let texts: Vec<String> =
        (0..300).map(|i| format!("the{} cat", " red dog".repeat(i % 9))).collect();
    let line = |(i, text)| serde_json::json!({"id": i, "text": text}).to_string() + "\n";
    fs::write(corpora.path("in.jsonl"), texts.iter().enumerate().map(line).collect::<String>())?;
    let embed = |kind: &str, output: &str, more: &[&str]| {
        let (input, output) = (corpora.path("in.jsonl"), corpora.path(output));
        let files = ["--input", &input, "--output", &output];
        encodle(&[&["embed", "--model", BGE_M3, "--kind", kind], &files[..], more].concat(), b"")
    };
    for (extension, more) in [
        ("jsonl", &[][..]),
        ("jsonl", &["--tokens", "--max-active-dims", "2", "--long-texts", "windows"]),
        ("parquet", &[]),
        ("arrow", &["--output-dtype", "f16"]),
    ] {
        let name = |kind: &str| format!("{kind}.{extension}");
        embed("all", &name("all"), more).success();
        for (kind, column) in COLUMNS {
            let is_tokens = |option: &&&str| {
                kind == "sparse" || !["--tokens", "--max-active-dims", "2"].contains(option)
            };
            let own: Vec<&str> = more.iter().filter(is_tokens).copied().collect();
            embed(kind, &name(kind), &own).success();
            if extension == "jsonl" {
                let rows = |name: &str| -> Result<Vec<serde_json::Value>> {
                    let lines = fs::read_to_string(corpora.path(name))?;
                    lines.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
                };
                for (all, one) in rows(&name("all"))?.into_iter().zip(rows(&name(kind))?) {
                    assert_eq!(all[column], one["embedding"], "{kind}");
                    assert_eq!((&all["id"], &all["text"]), (&one["id"], &one["text"]));
                }
            } else {
                let (all, one) = (corpora.table(&name("all"))?, corpora.table(&name(kind))?);
                assert_eq!(all.num_rows(), 300);
                assert_eq!(all.column_by_name(column), one.column_by_name("embedding"), "{kind}");
                assert_eq!(all.column_by_name("id"), one.column_by_name("id"));
                assert_eq!(all.schema().metadata(), one.schema().metadata());
            }
        }
    }
    let names: Vec<String> = corpora
        .table("all.parquet")?
        .schema()
        .fields()
        .iter()
        .map(|field| field.name().clone())
        .collect();
    assert_eq!(names[2..], COLUMNS.map(|(_, column)| column));
    let error = stderr(embed("all", "all.npy", &[]).code(1));
    assert!(error.contains("a .npy file contains vectors of one length"), "{error}");
    assert_eq!(corpora.unfinished()?, [""; 0]);
    Ok(())
}

/// The columns of the other kinds are fields of records for a single kind, and a conflict for all.
#[test]
fn a_field_with_the_name_of_a_column_of_all_kinds_is_an_error() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(corpora.path("in.jsonl"), "{\"text\":\"a\",\"sparse_embedding\":1}\n")?;
    fs::write(corpora.path("in.csv"), "text,multi_vector_embedding\na,b\n")?;
    for (input, column, outputs) in [
        ("in.jsonl", "sparse_embedding", &["out.jsonl", "out.parquet"][..]),
        ("in.csv", "multi_vector_embedding", &["out.jsonl", "out.arrow"]),
    ] {
        for output in outputs {
            let (input, output) = (corpora.path(input), corpora.path(output));
            let arguments =
                ["embed", "--input", &input, "--output", &output, "--model", BGE_M3, "--kind"];
            let error = stderr(encodle(&[&arguments[..], &["all"]].concat(), b"").code(1));
            assert!(error.contains(&format!("already has a field \"{column}\"")), "{error}");
            encodle(&[&arguments[..], &["dense"]].concat(), b"").success();
        }
    }
    Ok(())
}

#[test]
fn a_run_of_all_kinds_is_resumed() -> Result<()> {
    let corpora = Corpora::new()?;
    let lines: Vec<String> = (0..600).map(|i| format!("{{\"text\":\"cat {i}\"}}")).collect();
    let with_invalid = [&lines[..590], &["{}".to_string()], &lines[590..]].concat();
    let (input, output) = (corpora.path("in.jsonl"), corpora.path("out.jsonl"));
    let embed = |more: &[&str]| {
        let arguments =
            ["embed", "--model", BGE_M3, "--kind", "all", "--input", &input, "--output", &output];
        encodle(&[&arguments[..], more].concat(), b"")
    };
    fs::write(&input, lines.join("\n"))?;
    embed(&[]).success();
    let whole = fs::read(&output)?;
    fs::write(&input, with_invalid.join("\n"))?;
    embed(&["--resume"]).code(1);
    fs::write(&input, lines.join("\n"))?;
    let error = stderr(embed(&["--resume", "--max-active-dims", "1"]).code(1));
    assert!(error.contains("at most 1 values"), "{error}");
    embed(&["--resume"]).success();
    assert!(fs::read(&output)? == whole);
    Ok(())
}

#[test]
fn texts_and_standard_input_are_embedded_to_files() -> Result<()> {
    let corpora = Corpora::new()?;
    corpora.embed(&["--output", "@out.parquet", "a cab", "a bad cab"]).success();
    let table = corpora.table("out.parquet")?;
    let texts: Vec<_> = table.column(0).as_string::<i32>().iter().flatten().collect();
    assert_eq!(texts, ["a cab", "a bad cab"]);

    corpora.embed_stdin(&["--output", "@out.npy"], b"a cab\na bad cab\n").success();
    assert_eq!(npy(&corpora.path("out.npy"), 4)?.1, vectors(&table));
    Ok(())
}

#[test]
fn options_of_an_input_file_conflict_with_texts() -> Result<()> {
    let corpora = Corpora::new()?;
    for option in [["--field", "body"], ["--on-error", "skip"], ["--input-format", "jsonl"]] {
        for output in [&["--output", "@no.npy"][..], &[]] {
            let error =
                stderr(corpora.embed(&[&option[..], output, &["a cab", "b"]].concat()).code(2));
            let expected = format!("'{} <", option[0]);
            assert!(error.contains(&expected) && error.contains("cannot be used with"), "{error}");
        }
    }
    assert!(!Path::new(&corpora.path("no.npy")).exists());
    Ok(())
}

#[test]
fn outputs_that_cannot_be_replaced_are_refused_before_the_run() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(corpora.path("in.txt"), "a cab\n")?;
    fs::create_dir(corpora.path("folder"))?;
    let to_folder = ["--input", "@in.txt", "--format", "npy", "--output", "@folder"];
    let error = corpora.error(&to_folder);
    assert!(
        error.ends_with("folder is a directory: expected the name of a file to write"),
        "{error}"
    );
    let error = corpora.error(&["--input", "@in.txt", "--output", "@none/out.npy"]);
    assert!(error.ends_with("cannot be written: expected its directory to exist"), "{error}");
    let error = corpora.error(&["--input", "@in.txt", "--format", "npy", "--output", "@in.txt"]);
    assert!(error.ends_with("in.txt is the input: expected another file as output"), "{error}");
    for suffix in ["partial", "partial.json", "partial.json.new", "partial.whole"] {
        let input = format!("out.npy.{suffix}");
        fs::write(corpora.path(&input), "a cab\n")?;
        let from = format!("@{input}");
        let error =
            corpora.error(&["--input", &from, "--input-format", "lines", "--output", "@out.npy"]);
        assert!(error.contains(&format!("{input} is also a temporary file of")), "{error}");
        assert_eq!(fs::read_to_string(corpora.path(&input))?, "a cab\n");
        fs::remove_file(corpora.path(&input))?;
    }
    let error = stderr(encodle(&["embed", "--format", "npy", "--output", "-", "a"], b"").code(1));
    assert!(error.contains("- is standard output: expected the name of a file"), "{error}");
    #[cfg(unix)]
    {
        let error = stderr(
            encodle(&["embed", "--format", "npy", "--output", "/dev/null", "a"], b"").code(1),
        );
        assert!(error.contains("/dev/null is not a regular file"), "{error}");
    }
    assert_eq!(corpora.unfinished()?, [""; 0]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;

        fs::write(corpora.path("target.jsonl"), "old")?;
        symlink(corpora.path("target.jsonl"), corpora.path("link.jsonl"))?;
        corpora.embed(&["--output", "@link.jsonl", "a cab"]).success();
        assert!(Path::new(&corpora.path("link.jsonl")).is_symlink(), "the link stays");
        assert!(fs::read_to_string(corpora.path("target.jsonl"))?.contains("a cab"));
        symlink(corpora.path("none.jsonl"), corpora.path("dangling.jsonl"))?;
        let error = corpora.error(&["--output", "@dangling.jsonl", "a cab"]);
        assert!(error.contains("dangling.jsonl is a link to a missing file"), "{error}");
    }
    Ok(())
}

/// If a directory takes the output's name during the run, the vectors are kept and `--resume`
/// completes the run.
#[test]
fn a_failed_rename_keeps_all_vectors() -> Result<()> {
    let corpora = Corpora::new()?;
    // Ten chunks, so that the run has not ended when the test reads the state.
    let records = 20_480;
    fs::write(corpora.path("in.txt"), "a cab\na bad cab\n".repeat(records / 2))?;
    for ending in ["jsonl", "npy", "parquet"] {
        let (name, output) = (format!("out.{ending}"), format!("@out.{ending}"));
        let arguments = corpora.arguments(&["--input", "@in.txt", "--output", &output, "--resume"]);
        let mut child = Command::new(env!("CARGO_BIN_EXE_encodle"))
            .envs(ENVIRONMENT)
            .stderr(std::process::Stdio::null())
            .args(&arguments)
            .spawn()?;
        let state = corpora.path(&format!("{name}.partial.json"));
        while !Path::new(&state).exists() && child.try_wait()?.is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The state exists, so the program has already checked that the output is not a directory.
        fs::create_dir(corpora.path(&name))?;
        assert_eq!(child.wait()?.code(), Some(1), "{ending}");
        let left: serde_json::Value = serde_json::from_slice(&fs::read(&state)?)?;
        assert_eq!(left["position"]["read"], records, "{ending}: all vectors are kept");
        fs::remove_dir(corpora.path(&name))?;
        let partial = corpora.path(&format!("{name}.partial"));
        let vectors = fs::read(&partial)?;
        fs::write(&partial, "x")?;
        let error = corpora.error(&["--input", "@in.txt", "--output", &output, "--resume"]);
        let expected = format!(
            "{name}.partial is too short: expected at least {} bytes (the length in its run \
             state), got 1; remove it to start a new run",
            left["bytes"]
        );
        assert!(error.ends_with(&expected), "{error}");
        fs::write(&partial, vectors)?;
        corpora.embed(&["--input", "@in.txt", "--output", &output, "--resume"]).success();
        corpora.embed(&["--input", "@in.txt", "--output", &format!("@whole.{ending}")]).success();
        let same =
            fs::read(corpora.path(&name))? == fs::read(corpora.path(&format!("whole.{ending}")))?;
        assert!(same, "{ending}");
        assert_eq!(corpora.unfinished()?, [""; 0]);
    }
    Ok(())
}

#[test]
fn a_run_state_of_another_version_is_refused() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(corpora.path("in.txt"), "a cab\n")?;
    for (version, got) in [("", "none"), ("\"version\": 3, ", "3")] {
        let state = format!(
            "{{{version}\"settings\": \"x\", \"position\": {{\"read\": 1, \"hash\": 2}}, \
             \"written\": 1, \"bytes\": 3}}"
        );
        fs::write(corpora.path("out.jsonl.partial.json"), state)?;
        fs::write(corpora.path("out.jsonl.partial"), "abc")?;
        let error = corpora.error(&["--input", "@in.txt", "--output", "@out.jsonl", "--resume"]);
        let expected =
            format!("expected format version 8, got {got}; start again without --resume");
        assert!(error.ends_with(&expected), "{error}");
        assert_eq!(
            fs::read(corpora.path("out.jsonl.partial"))?,
            b"abc",
            "the temporary file is kept"
        );
    }
    Ok(())
}

/// A process that is killed between the rename and the removal of the run state leaves only the run
/// state.
#[test]
fn a_run_state_without_its_partial_file_is_ignored() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(corpora.path("in.txt"), "a cab\n")?;
    let run = ["--input", "@in.txt", "--output", "@out.jsonl", "--resume"];
    corpora.embed(&run).success();
    let whole = fs::read(corpora.path("out.jsonl"))?;
    fs::remove_file(corpora.path("out.jsonl"))?;
    let state = corpora.path("out.jsonl.partial.json");
    fs::write(
        &state,
        r#"{"version": 8, "settings": "x", "position": {"read": 1, "hash": 2}, "written": 1,
            "bytes": 9}"#,
    )?;
    corpora.embed(&run).success();
    assert_eq!(fs::read(corpora.path("out.jsonl"))?, whole);
    assert_eq!(corpora.unfinished()?, [""; 0]);
    Ok(())
}

#[test]
fn escaped_surrogate_pairs_are_decoded_in_tables() -> Result<()> {
    let corpora = Corpora::new()?;
    let line = r#"{"text": "\ud842\udfb7", "\ud83d\ude00": ["\ud880\udc00"]}"#;
    fs::write(corpora.path("in.jsonl"), line)?;
    for output in ["out.parquet", "out.arrow"] {
        let to = format!("@{output}");
        corpora.embed(&["--input", "@in.jsonl", "--output", &to]).success();
        let table = corpora.table(output)?;
        assert_eq!(table.column(0).as_string::<i32>().value(0), "\u{20bb7}");
        assert_eq!(table.schema().field(1).name(), "\u{1f600}");
        let list = table.column(1).as_list::<i32>().value(0);
        assert_eq!(list.as_string::<i32>().value(0), "\u{30000}");
    }
    Ok(())
}

#[test]
fn integers_are_never_rounded() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(
        corpora.path("in.jsonl"),
        "{\"text\": \"a\", \"n\": 9007199254740993, \"wide\": 7, \"l\": [0.5], \"f\": 1.5}\n\
         {\"text\": \"a\", \"n\": 0.50, \"wide\": 123456789012345678901, \
         \"l\": [9007199254740993], \"f\": 9007199254740992}\n",
    )?;
    let run = corpora.embed(&["--input", "@in.jsonl", "--output", "@out.parquet"]).success();
    let warnings = String::from_utf8(run.get_output().stderr.clone())?;
    assert_eq!(warnings.lines().count(), 3, "{warnings}");
    for field in ["\"n\"", "\"wide\"", "\"l.[]\""] {
        let expected = format!(
            "field {field} has integers that a column of numbers (i64, or f64 if the field also has \
             fractions) does not represent exactly: its numbers are written as text"
        );
        assert!(warnings.contains(&expected), "{warnings}");
    }
    let table = corpora.table("out.parquet")?;
    let column = |name: &str| table.column_by_name(name).expect("a column").clone();
    let texts = |column: ArrayRef| -> Vec<String> {
        column.as_string::<i32>().iter().flatten().map(String::from).collect()
    };
    assert_eq!(texts(column("n")), ["9007199254740993", "0.50"]);
    assert_eq!(texts(column("wide")), ["7", "123456789012345678901"]);
    assert_eq!(texts(column("l").as_list::<i32>().values().clone()), ["0.5", "9007199254740993"]);
    let floats = column("f");
    let floats = floats.as_primitive::<arrow_array::types::Float64Type>();
    assert_eq!(floats.values(), &[1.5, 9_007_199_254_740_992.0]);

    // Values of several types become text too.
    let mixed = "{\"text\": \"a\", \"id\": 1}\n{\"text\": \"a\", \"id\": \"x\"}\n";
    fs::write(corpora.path("mixed.jsonl"), mixed)?;
    let run = corpora.embed(&["--input", "@mixed.jsonl", "--output", "@mixed.arrow"]).success();
    let warning = stderr(run);
    assert!(warning.ends_with("its numbers and booleans are written as text"), "{warning}");
    let ids = corpora.table("mixed.arrow")?.column_by_name("id").expect("a column").clone();
    assert_eq!(texts(ids), ["1", "x"]);

    // The columns of a pipe are inferred from its first records; a later value that does not fit is
    // an error.
    let pipe = ["--input", "-", "--input-format", "jsonl", "--output", "@pipe.parquet"];
    let lines = "{\"text\": \"a\", \"n\": 0.5}\n".repeat(2500);
    let lines = lines + "{\"text\": \"a\", \"n\": 9007199254740993}\n";
    let error = stderr(corpora.embed_stdin(&pipe, lines.as_bytes()).code(1));
    assert!(
        error.starts_with(
            "encodle: standard input, line 2501: field \"n\": expected Float64, got 9007199254740993;"
        ),
        "{error}"
    );
    Ok(())
}

#[test]
fn tables_keep_their_metadata_and_times() -> Result<()> {
    use arrow_array::{Date64Array, Time32SecondArray, TimestampSecondArray};
    use arrow_schema::{DataType, Field, Schema};
    use parquet::basic::LogicalType;

    let corpora = Corpora::new()?;
    let day = 86_400_000;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from(vec!["a", "a cab"])),
        Arc::new(TimestampSecondArray::from(vec![Some(-1), None]).with_timezone("UTC")),
        Arc::new(Date64Array::from(vec![day, -day])),
        Arc::new(Time32SecondArray::from(vec![1, 86_399])),
    ];
    let names = ["text", "at", "day", "time"];
    let fields = names.iter().zip(&columns);
    let fields = fields.map(|(name, column)| Field::new(*name, column.data_type().clone(), true));
    let metadata = [("pandas", "{\"index_columns\": []}"), ("huggingface", "{}"), ("own", "é")];
    let metadata = metadata.map(|(key, value)| (key.to_string(), value.to_string()));
    let schema = Schema::new_with_metadata(
        fields.collect::<Vec<_>>(),
        std::collections::HashMap::from(metadata.clone()),
    );
    let rows = RecordBatch::try_new(Arc::new(schema), columns)?;
    corpora.write_parquet("in.parquet", &rows)?;
    corpora.write_arrow("in.arrow", &rows)?;
    for input in ["@in.parquet", "@in.arrow"] {
        corpora.embed(&["--input", input, "--output", "@out.arrow"]).success();
        let carried = corpora.table("out.arrow")?;
        assert_eq!(carried.columns()[..4], rows.columns()[..], "{input}");
        corpora.embed(&["--input", input, "--output", "@out.parquet"]).success();
        let carried = corpora.table("out.parquet")?;
        for table in [&carried, &corpora.table("out.arrow")?] {
            for (key, value) in &metadata {
                assert_eq!(table.schema().metadata()[key], *value, "{input}");
            }
        }
        let cast = |column: usize, kind: &DataType| arrow_cast::cast(carried.column(column), kind);
        assert_eq!(&cast(1, rows.column(1).data_type())?, rows.column(1));
        assert_eq!(&cast(2, rows.column(2).data_type())?, rows.column(2));
        assert_eq!(&cast(3, rows.column(3).data_type())?, rows.column(3));

        // Readers that do not know the Arrow schema see the logical types.
        let file = File::open(corpora.path("out.parquet"))?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
        let logical: Vec<_> = builder
            .parquet_schema()
            .columns()
            .iter()
            .take(4)
            .map(|column| column.logical_type_ref().cloned())
            .collect();
        assert!(matches!(&logical[1], Some(LogicalType::Timestamp(_))), "{logical:?}");
        assert!(matches!(&logical[2], Some(LogicalType::Date)), "{logical:?}");
        assert!(matches!(&logical[3], Some(LogicalType::Time(_))), "{logical:?}");
        let pairs = builder.metadata().file_metadata().key_value_metadata().expect("some");
        let own = pairs.iter().find(|pair| pair.key == "own").expect("a key of the input");
        assert_eq!(own.value.as_deref(), Some("é"));
    }
    let odd: ArrayRef = Arc::new(Date64Array::from(vec![day, 1]));
    let texts = rows.column(0).clone();
    let odd = RecordBatch::try_from_iter([("text", texts), ("day", odd)])?;
    corpora.write_arrow("odd.arrow", &odd)?;
    let error = corpora.error(&["--input", "@odd.arrow", "--output", "@odd.parquet"]);
    assert!(
        error.contains("row 2: column \"day\": Date32 does not represent this Date64 exactly; "),
        "{error}"
    );
    Ok(())
}

#[test]
fn compressed_files_are_read_by_their_extensions() -> Result<()> {
    let corpora = Corpora::new()?;
    let csv = "id,text\n1,a cab\n2,a bad cab\n";
    let jsonl = "{\"text\": \"a cab\", \"id\": \"1\"}\n{\"text\": \"a bad cab\", \"id\": \"2\"}\n";
    fs::write(corpora.path("in.csv.gz"), gzip(csv)?)?;
    let (first, second) = jsonl.split_at(jsonl.find('\n').expect("a line") + 1);
    fs::write(corpora.path("in.JSONL.GZ"), [gzip(first)?, gzip(second)?].concat())?; // two members
    fs::write(corpora.path("in.jsonl.zst"), zstd::encode_all(jsonl.as_bytes(), 3)?)?;
    fs::write(corpora.path("in.log.gz"), gzip("a cab\na bad cab\n")?)?;
    let expected = stdout(corpora.embed(&["a cab", "a bad cab"]).success());
    let vectors = |printed: String| -> Vec<serde_json::Value> {
        let lines = printed.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        lines.map(|line: serde_json::Value| line["embedding"].clone()).collect()
    };
    let expected = vectors(expected);
    for input in ["@in.csv.gz", "@in.JSONL.GZ", "@in.jsonl.zst", "@in.log.gz"] {
        assert_eq!(vectors(stdout(corpora.embed(&["--input", input]).success())), expected);
        corpora.embed(&["--input", input, "--output", "@out.parquet"]).success();
        assert_eq!(corpora.table("out.parquet")?.num_rows(), 2, "{input}");
    }
    let whole = fs::read(corpora.path("in.jsonl.zst"))?;
    fs::write(corpora.path("cut.jsonl.zst"), &whole[..whole.len() - 5])?;
    assert!(corpora.error(&["--input", "@cut.jsonl.zst"]).contains("cannot be read: "));
    fs::write(corpora.path("in.parquet.gz"), "")?;
    let error = corpora.error(&["--input", "@in.parquet.gz"]);
    assert!(
        error.contains(
            "in.parquet.gz is compressed: expected an uncompressed Parquet or Arrow file"
        ),
        "{error}"
    );

    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a cab"; 3000]));
    let rows = RecordBatch::try_from_iter([("text", texts)])?;
    let brotli = parquet::file::properties::WriterProperties::builder()
        .set_compression(parquet::basic::Compression::BROTLI(Default::default()));
    let file = File::create(corpora.path("in.parquet"))?;
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(brotli.build()))?;
    writer.write(&rows)?;
    writer.close()?;
    let printed = stdout(corpora.embed(&["--input", "@in.parquet"]).success());
    assert_eq!(printed.lines().count(), 3000);
    Ok(())
}

#[test]
fn extensions_are_case_insensitive_and_unsupported_formats_are_refused() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(corpora.path("U.CSV"), "id,text\n1,a cab\n")?;
    corpora.embed(&["--input", "@U.CSV", "--output", "@U.NPY"]).success();
    let (header, numbers) = npy(&corpora.path("U.NPY"), 4)?;
    assert!(header.contains("(1, 24)") && numbers.len() == 24, "{header}");
    let (model, path) = (corpora.model.path().to_str().unwrap(), corpora.path("U.NPY"));
    encodle(&["search", "--model", model, "--corpus", &path, "a"], b"").success();
    for name in ["in.json", "in.JSON", "in.xlsx", "in.json.gz", "vectors.npy", "in.txt.gz.gz"] {
        fs::write(corpora.path(name), "[]")?;
        let error = corpora.error(&["--input", &format!("@{name}")]);
        assert!(error.contains(" files are not supported: expected .jsonl, "), "{error}");
        assert!(error.ends_with("name the format with --input-format"), "{error}");
    }
    fs::write(corpora.path("in.json"), "{\"text\": \"a cab\"}\n")?;
    let named = corpora.embed(&["--input", "@in.json", "--input-format", "jsonl"]).success();
    assert_eq!(stdout(named).lines().count(), 1);
    Ok(())
}

/// A date that JSON cannot represent is an error, and NaN becomes null with a warning. Tables keep
/// both.
/// As a file of records, on standard input, and as a file of vectors.
#[test]
fn a_feather_v1_file_is_refused_by_name() -> Result<()> {
    let corpora = Corpora::new()?;
    let bytes = b"FEA1\0\0\0\0\x10\0\0\0FEA1";
    fs::write(corpora.path("old.feather"), bytes)?;
    let (model, old) = (corpora.model.path().to_str().unwrap(), corpora.path("old.feather"));
    let stdin = ["--input", "-", "--input-format", "arrow"];
    for (name, run) in [
        (&old[..], corpora.embed(&["--input", &old])),
        ("standard input", corpora.embed_stdin(&stdin, bytes)),
        (&old, encodle(&["search", "--model", model, "--corpus", &old, "a"], b"")),
    ] {
        assert_eq!(
            stderr(run.code(1)),
            format!(
                "encodle: {name} is a Feather V1 file: expected Arrow IPC, which is Feather V2; convert \
                 it with pyarrow: feather.write_feather(feather.read_table(FILE), OUTPUT)"
            )
        );
    }
    Ok(())
}

#[test]
fn values_without_a_json_form_are_refused_or_null() -> Result<()> {
    use arrow_array::Float64Array;

    let corpora = Corpora::new()?;
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "a cab"]));
    let days: ArrayRef = Arc::new(Date32Array::from(vec![0, i32::MAX]));
    let numbers: ArrayRef = Arc::new(Float64Array::from(vec![f64::NAN, 1.5]));
    for (name, column) in [("days", days), ("numbers", numbers)] {
        let rows = RecordBatch::try_from_iter([("text", texts.clone()), (name, column)])?;
        corpora.write_arrow(&format!("{name}.arrow"), &rows)?;
    }
    let error = corpora.error(&["--input", "@days.arrow", "--output", "@days.jsonl"]);
    assert!(
        error.contains("days.arrow, row 2: the row cannot be written as JSON: ")
            && error.contains("\"days\""),
        "{error}"
    );
    corpora.embed(&["--input", "@days.arrow", "--output", "@days.parquet"]).success();
    let run = corpora.embed(&["--input", "@numbers.arrow", "--output", "@numbers.jsonl"]).success();
    assert_eq!(
        stderr(run),
        "encodle: column \"numbers\": 1 NaN or infinite value was written as null"
    );
    let lines = fs::read_to_string(corpora.path("numbers.jsonl"))?;
    assert!(lines.starts_with("{\"text\":\"a\",\"numbers\":null,"), "{lines}");

    // A value without a JSON form causes no error and no warning if its record is skipped.
    let rows = RecordBatch::try_from_iter([
        ("text", Arc::new(StringArray::from(vec![Some("a"), None, Some("a cab")])) as ArrayRef),
        ("day", Arc::new(Date32Array::from(vec![0, i32::MAX, 1]))),
        ("number", Arc::new(Float64Array::from(vec![0.5, f64::NAN, 1.5]))),
    ])?;
    corpora.write_arrow("skipped.arrow", &rows)?;
    let arguments =
        ["--input", "@skipped.arrow", "--output", "@skipped.jsonl", "--on-error", "skip"];
    let run = corpora.embed(&arguments).success();
    assert_eq!(stderr(run).lines().count(), 1, "only the skipped record is reported");
    let lines = fs::read_to_string(corpora.path("skipped.jsonl"))?;
    assert_eq!(lines.lines().count(), 2);
    assert!(
        lines.contains("{\"text\":\"a cab\",\"day\":\"1970-01-02\",\"number\":1.5,"),
        "{lines}"
    );
    Ok(())
}

#[test]
fn blank_lines_of_jsonl_are_skipped_and_counted() -> Result<()> {
    let corpora = Corpora::new()?;
    let lines = "{\"text\": \"a\"}\n\n \t\r\n{\"text\": \"b\"}\n\n";
    fs::write(corpora.path("in.jsonl"), lines)?;
    for output in [&["--output", "@out.jsonl"][..], &[]] {
        let run = corpora.embed(&[&["--input", "@in.jsonl"], output].concat()).success();
        let printed = match output {
            [] => stdout(run),
            _ => {
                assert!(stderr(run).ends_with("in.jsonl: 3 blank lines were skipped"));
                fs::read_to_string(corpora.path("out.jsonl"))?
            }
        };
        assert_eq!(printed.lines().count(), 2);
    }
    fs::write(corpora.path("in.jsonl"), "\n{\"text\": 1}\n")?;
    let error = corpora.error(&["--input", "@in.jsonl"]);
    assert!(error.contains("in.jsonl, line 2: expected a string in \"text\", got 1"), "{error}");
    Ok(())
}

/// Python's `json` module writes NaN, infinities and lone surrogates.
#[test]
fn lines_of_invalid_json_stop_the_run_or_are_skipped() -> Result<()> {
    let corpora = Corpora::new()?;
    let bad = [
        (r#"{"text": "\ud800"}"#, "hex escape"),
        (r#"{"text": "a", "n": NaN}"#, "expected value"),
        (r#"{"text": "a", "n": 1e400}"#, "number out of range"),
        (r#"{"text": "a", "n": -Infinity}"#, "invalid number"),
    ];
    for (line, error) in bad {
        fs::write(corpora.path("in.jsonl"), format!("{{\"text\": \"a\"}}\n{line}\n"))?;
        for output in ["@out.parquet", "@out.jsonl"] {
            let run = ["--input", "@in.jsonl", "--output", output];
            let line = corpora.error(&run);
            assert!(line.contains("in.jsonl, line 2: ") && line.contains(error), "{line}");
            let line =
                stderr(corpora.embed(&[&run[..], &["--on-error", "skip"]].concat()).success());
            assert!(line.contains(error) && line.ends_with("; skipped"), "{line}");
        }
        assert_eq!(corpora.table("out.parquet")?.num_rows(), 1);
    }
    Ok(())
}

#[test]
fn fields_that_cannot_share_a_column_are_errors_with_their_line() -> Result<()> {
    let corpora = Corpora::new()?;
    for (first, second, expected) in [
        (
            "[1]",
            "{\"b\": 1}",
            "field \"a\": expected a list, as in an earlier value of this field, got an object",
        ),
        (
            "{\"b\": [1]}",
            "{\"b\": 1}",
            "field \"a.b\": expected a list, as in an earlier value of this field, got a number",
        ),
    ] {
        let line = |value: &str| format!("{{\"text\": \"a\", \"a\": {value}}}\n");
        fs::write(corpora.path("in.jsonl"), line(first) + &line(second))?;
        let error = corpora.error(&["--input", "@in.jsonl", "--output", "@out.arrow"]);
        assert!(error.ends_with(&format!("in.jsonl, line 2: {expected}")), "{error}");
        assert_eq!(corpora.unfinished()?, [""; 0], "the error comes before the run");
        corpora.embed(&["--input", "@in.jsonl", "--output", "@out.jsonl"]).success();
    }
    Ok(())
}

#[test]
fn tables_have_at_most_32_levels_of_lists() -> Result<()> {
    let corpora = Corpora::new()?;
    let write = |levels: usize| {
        let value = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        fs::write(corpora.path("in.jsonl"), format!("{{\"text\": \"a\", \"a\": {value}}}\n"))
    };
    write(32)?;
    for output in ["@out.arrow", "@out.parquet"] {
        corpora.embed(&["--input", "@in.jsonl", "--output", output]).success();
        assert_eq!(corpora.table(&output[1..])?.num_rows(), 1);
    }
    write(33)?;
    let error = corpora.error(&["--input", "@in.jsonl", "--output", "@deep.arrow"]);
    let expected = "in.jsonl, line 1: field \"a\": expected at most 32 levels of lists and objects in a \
                    table, got more";
    assert!(error.ends_with(expected), "{error}");
    assert_eq!(corpora.unfinished()?, [""; 0], "the error comes before the run");
    corpora.embed(&["--input", "@in.jsonl", "--output", "@out.jsonl"]).success();
    Ok(())
}

/// JSONL, CSV, TSV, Parquet and Arrow inputs.
#[test]
fn all_fields_of_records_are_kept() -> Result<()> {
    let corpora = Corpora::new()?;
    fs::write(
        corpora.path("in.jsonl"),
        "{\"id\": 7,  \"body\": \"a cab\" }\n\
         {\"id\": 18446744073709551615, \"body\": \"a\", \"late\": [1.5, null]}\n",
    )?;
    fs::write(corpora.path("in.csv"), "id,body\n7,a cab\n")?;
    fs::write(corpora.path("in.tsv"), "id\tbody\n7\ta cab\n")?;
    for (name, starts) in [
        ("in.jsonl", "{\"id\": 7,  \"body\": \"a cab\",\"embedding\":["),
        ("in.csv", "{\"id\":\"7\",\"body\":\"a cab\",\"embedding\":["),
        ("in.tsv", "{\"id\":\"7\",\"body\":\"a cab\",\"embedding\":["),
    ] {
        let (from, to) = (format!("@{name}"), format!("{name}.jsonl"));
        let arguments = ["--input", &from, "--field", "body", "--output", &format!("@{to}")];
        corpora.embed(&arguments).success();
        let lines = fs::read_to_string(corpora.path(&to))?;
        assert!(lines.starts_with(starts) && lines.ends_with("]}\n"), "{lines}");
        lines
            .lines()
            .try_for_each(|line| serde_json::from_str(line).map(|_: serde_json::Value| ()))?;
    }

    // A table of JSON objects has all fields in order, and no number is rounded.
    let from =
        |input, output| corpora.embed(&["--input", input, "--field", "body", "--output", output]);
    from("@in.jsonl", "@objects.parquet").success();
    let table = corpora.table("objects.parquet")?;
    let names: Vec<String> = table.schema().fields().iter().map(|f| f.name().clone()).collect();
    assert_eq!(names, ["id", "body", "late", "embedding"]);
    let ids: Vec<_> = table.column(0).as_string::<i32>().iter().flatten().collect();
    assert_eq!(ids, ["7", "18446744073709551615"]);
    let late: &ListArray = table.column(2).as_list();
    assert_eq!(late.value(1).as_primitive::<arrow_array::types::Float64Type>().value(0), 1.5);

    // The column types of an input table are kept, except that dictionary columns, whose
    // dictionaries may differ from batch to batch, are decoded.
    let mut kinds = arrow_array::builder::StringDictionaryBuilder::<Int32Type>::new();
    kinds.extend(["x", "y", "x"].map(Some));
    let kinds: DictionaryArray<Int32Type> = kinds.finish();
    let flags = BooleanArray::from(vec![true, false]);
    let flags = DictionaryArray::try_new(Int32Array::from(vec![0, 1, 0]), Arc::new(flags))?;
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("day", Arc::new(Date32Array::from(vec![Some(0), None, Some(20_000)]))),
        ("kind", Arc::new(kinds)),
        ("id", Arc::new(Int64Array::from(vec![i64::MAX, 2, 3]))),
        ("body", Arc::new(StringArray::from(vec!["a cab", "a bad cab", ""]))),
        ("flag", Arc::new(flags)),
    ];
    let rows = RecordBatch::try_from_iter(columns)?;
    corpora.write_parquet("rows.parquet", &rows)?;
    corpora.write_arrow("rows.arrow", &rows)?;
    let mut writer =
        StreamWriter::try_new(File::create(corpora.path("stream.ipc"))?, &rows.schema())?;
    writer.write(&rows)?;
    writer.finish()?;
    for input in ["@rows.parquet", "@rows.arrow", "@stream.ipc"] {
        for output in ["@carried.parquet", "@carried.arrow"] {
            from(input, output).success();
            let carried = corpora.table(&output[1..])?;
            assert_eq!(carried.column(0), rows.column(0));
            assert_eq!(
                carried.column(1).as_ref(),
                &StringArray::from(vec!["x", "y", "x"]) as &dyn arrow_array::Array
            );
            assert_eq!(carried.column(2), rows.column(2));
            assert_eq!(carried.column(3), rows.column(3));
            let flags = carried.column(4).as_boolean().iter().flatten().collect::<Vec<_>>();
            assert_eq!(flags, [true, false, true]);
            assert_eq!(vectors(&carried).len(), 3 * 24);
        }
        from(input, "@carried.jsonl").success();
        let lines = fs::read_to_string(corpora.path("carried.jsonl"))?;
        let start = "{\"day\":\"1970-01-01\",\"kind\":\"x\",\"id\":9223372036854775807,\"body\":\"a cab\",\"flag\":true,\"embedding\":[";
        assert!(lines.starts_with(start), "{lines}");
        assert!(lines.contains("\n{\"day\":null,"), "{lines}");
    }
    // An Arrow stream can be read from a pipe; an Arrow file cannot, because its footer is at its
    // end.
    for input in ["-", "/dev/stdin"] {
        let arguments = ["--input", input, "--input-format", "arrow", "--field", "body"];
        let stream = fs::read(corpora.path("stream.ipc"))?;
        let printed = stdout(corpora.embed_stdin(&arguments, &stream).success());
        assert_eq!(printed.lines().count(), 3);
        let file = fs::read(corpora.path("rows.arrow"))?;
        let error = stderr(corpora.embed_stdin(&arguments, &file).code(1));
        let expected = "to read the Arrow IPC file format, give the file's path as input";
        assert!(error.ends_with(expected), "{error}");
    }

    assert!(from("@rows.parquet", "@carried.parquet").success().get_output().stderr.is_empty());
    let error = corpora.error(&["--input", "@rows.parquet", "--output", "@no.npy"]);
    assert!(
        error.ends_with(
            "has no column \"text\": its columns are [\"day\", \"kind\", \"id\", \"body\", \"flag\"]; name the text column \
             with --field"
        ),
        "{error}"
    );
    let error =
        corpora.error(&["--input", "@rows.parquet", "--field", "id", "--output", "@no.npy"]);
    assert!(
        error.ends_with(
            "expected strings in column \"id\", got Int64; name the text column with --field"
        ),
        "{error}"
    );
    let error =
        corpora.error(&["--input", "-", "--input-format", "parquet", "--output", "@no.npy"]);
    assert!(error.contains("standard input is a stream: expected a regular file"), "{error}");
    for (input, what) in [("@in.csv", "Parquet"), ("@in.csv", "Arrow IPC")] {
        let format = if what == "Parquet" { "parquet" } else { "arrow" };
        let error =
            corpora.error(&["--input", input, "--input-format", format, "--output", "@no.npy"]);
        assert!(error.contains(&format!("cannot be read as {what}: ")), "{error}");
    }
    // The output would have two columns of vectors.
    for input in ["@carried.parquet", "@carried.arrow", "@in.jsonl.jsonl"] {
        let error =
            corpora.error(&["--input", input, "--field", "body", "--output", "@twice.parquet"]);
        assert!(
            error.ends_with(
                "already has a field \"embedding\", the name under which vectors are written: \
                 rename the field"
            ),
            "{error}"
        );
    }
    let error = corpora.error(&[
        "--input",
        "@in.jsonl.jsonl",
        "--field",
        "body",
        "--output",
        "@twice.jsonl",
    ]);
    assert!(error.contains(", line 1: the object already has a field \"embedding\""), "{error}");
    Ok(())
}

#[test]
fn columns_of_a_pipe_are_inferred_from_its_first_records() -> Result<()> {
    let corpora = Corpora::new()?;
    let arguments = ["--input", "-", "--input-format", "jsonl", "--output", "@out.parquet"];
    let mut lines = "{\"text\": \"a\", \"n\": 1}\n".repeat(2500);
    corpora.embed_stdin(&arguments, lines.as_bytes()).success();
    assert_eq!(corpora.table("out.parquet")?.num_rows(), 2500);
    lines += "{\"text\": \"a\", \"m\": 1}\n";
    let error = stderr(corpora.embed_stdin(&arguments, lines.as_bytes()).code(1));
    assert!(
        error.contains(
            "line 2501: field \"m\": expected no value (the first records do not have this field), got a \
             number; the columns of"
        ),
        "{error}"
    );
    fs::write(corpora.path("in.jsonl"), lines)?;
    corpora.embed(&["--input", "@in.jsonl", "--output", "@out.parquet"]).success();
    assert_eq!(corpora.table("out.parquet")?.num_columns(), 4);
    Ok(())
}

#[test]
fn invalid_records_stop_the_run_or_are_skipped() -> Result<()> {
    let corpora = Corpora::new()?;
    let write = |lines: &str| fs::write(corpora.path("in.jsonl"), lines);
    let arguments = ["--input", "@in.jsonl", "--output", "@out.jsonl"];
    let with = |more: &[&'static str]| [&arguments[..], more].concat();
    write("{\"text\": \"a\"}\n{\"txt\": 1}\n{\"text\": \"b\"}\n")?;
    let line = corpora.error(&arguments);
    let invalid = "line 2: object has no field \"text\": its fields are [\"txt\"]";
    let advice = "; name the text field with --field";
    assert!(line.ends_with(&format!("in.jsonl, {invalid}{advice}")), "{line}");
    let output = corpora.path("out.jsonl");
    assert!(!Path::new(&output).exists(), "no incomplete file has the output's name");
    assert_eq!(corpora.error(&arguments[..2]), line, "the same error without --output");

    let line = stderr(corpora.embed(&with(&["--on-error", "skip"])).success());
    assert!(line.ends_with(&format!("{invalid}; skipped")), "{line}");
    assert_eq!(fs::read_to_string(&output)?.lines().count(), 2);

    // Rows without a text are skipped; the others keep their fields.
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("cab")]));
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let rows = RecordBatch::try_from_iter([("text", texts), ("id", ids)])?;
    corpora.write_parquet("rows.parquet", &rows)?;
    let of_rows = ["--input", "@rows.parquet", "--output", "@left.parquet"];
    let line = corpora.error(&of_rows);
    assert!(
        line.ends_with("rows.parquet, row 2: expected a string in \"text\", got null"),
        "{line}"
    );
    corpora.embed(&[&of_rows[..], &["--on-error", "skip"]].concat()).success();
    let left = corpora.table("left.parquet")?;
    let ids =
        left.column_by_name("id").expect("ids").as_primitive::<arrow_array::types::Int64Type>();
    assert_eq!(ids.values(), &[1, 3]);

    // A read error ends the run even with `--on-error skip`.
    let lines: String = (0..99).map(|i| format!("line {i}\n")).collect();
    let gzip = gzip(&lines)?;
    fs::write(corpora.path("cut.gz"), &gzip[..gzip.len() - 20])?;
    for format in ["lines", "csv"] {
        let skip = [
            "--input",
            "@cut.gz",
            "--field",
            "line 0",
            "--input-format",
            format,
            "--output",
            "@out.jsonl",
            "--on-error",
            "skip",
        ];
        // Text lines have no fields.
        let skip =
            if format == "lines" { [&skip[..2], &skip[4..]].concat() } else { skip.to_vec() };
        let line = corpora.error(&skip);
        assert!(line.contains("cannot be read: "), "{line}");
    }
    let folder =
        corpora.error(&["--input", "@", "--input-format", "csv", "--output", "@out.jsonl"]);
    assert!(folder.ends_with("cannot be read: is a directory"), "{folder}");
    Ok(())
}

/// The run is not resumed if earlier records or settings differ.
#[test]
fn a_run_resumes_after_its_invalid_record_is_corrected() -> Result<()> {
    let corpora = Corpora::new()?;
    let write = |lines: &str| fs::write(corpora.path("in.jsonl"), lines);
    let arguments = ["--input", "@in.jsonl", "--output", "@out.jsonl"];
    let with = |more: &[&'static str]| [&arguments[..], more].concat();
    let output = corpora.path("out.jsonl");
    let lines = "{\"text\": \"a\"}\n".repeat(2400);
    write(&format!("{lines}{{\"txt\": 1}}\n"))?;
    corpora.error(&arguments);
    let corrected = format!("{lines}{{\"text\": \"c\"}}\n");
    write(&corrected)?;
    let error = corpora.error(&with(&["--resume", "--dimensions", "3"]));
    assert!(
        error.contains("belongs to a run with other settings: that run has weights, pooling and ")
            && error.contains("; 24 values of f32; this run has ")
            && error.ends_with(
                "; 3 values of f32; continue with the settings of that run, or start again \
                 without --resume"
            ),
        "{error}"
    );
    assert!(!error.contains("tokens"), "settings that do not differ are not listed: {error}");
    write(&corrected.replacen("\"a\"", "\"b\"", 1))?;
    let error = corpora.error(&with(&["--resume"]));
    assert!(error.contains("the input has changed since the interrupted run"), "{error}");
    write("")?;
    let error = corpora.error(&with(&["--resume"]));
    assert!(error.contains("the input has 0 records: expected the 2048 "), "{error}");
    write(&corrected)?;
    corpora.embed(&with(&["--resume"])).success();
    let resumed = fs::read(&output)?;
    corpora.embed(&arguments).success();
    assert!(resumed == fs::read(&output)?);

    // If the input cannot be read up to the position of the interrupted run, the read error is
    // reported, and not that the input is too short.
    let of_gzip = ["--input", "@in.jsonl.gz", "--output", "@gzip.jsonl"];
    fs::write(corpora.path("in.jsonl.gz"), gzip(&format!("{lines}{{\"txt\": 1}}\n"))?)?;
    corpora.error(&of_gzip);
    let damaged = gzip("{\"text\": \"a\"}\n")?;
    fs::write(corpora.path("in.jsonl.gz"), &damaged[..damaged.len() - 12])?;
    let error = corpora.error(&[&of_gzip[..], &["--resume"]].concat());
    assert!(error.contains("cannot be read: "), "{error}");
    Ok(())
}

/// The process is killed twice. The resumed output is byte-identical to that of an uninterrupted
/// run.
#[test]
fn an_interrupted_run_is_resumed() -> Result<()> {
    let corpora = Corpora::new()?;
    let texts: Vec<String> = (0..20_000)
        .map(|i| format!("{}cab {}", "bad ".repeat(i % 7), "abcdefgh".split_at(i % 8).0))
        .collect();
    fs::write(corpora.path("in.txt"), texts.join("\n"))?;
    for ending in ["jsonl", "npy", "parquet", "arrow"] {
        let (whole, output) = (format!("@whole.{ending}"), format!("@out.{ending}"));
        let run = |output: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_encodle"));
            command
                .envs(ENVIRONMENT)
                .args(corpora.arguments(&["--input", "@in.txt", "--output", output, "--resume"]));
            command
        };
        assert!(run(&whole).status()?.success());
        let state = corpora.path(&format!("out.{ending}.partial.json"));
        for _ in 0..2 {
            let mut child = run(&output).spawn()?;
            let before = fs::read(&state).unwrap_or_default();
            while fs::read(&state).unwrap_or_default() == before && child.try_wait()?.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            child.kill()?;
            child.wait()?;
        }
        let saved: serde_json::Value = serde_json::from_slice(&fs::read(&state)?)?;
        let read = saved["position"]["read"].as_u64().expect("a number");
        assert!(read >= 2 * 2048, "the second run resumed the first: {read} records");
        assert!(run(&output).status()?.success());
        let [output, whole] = [output, whole].map(|name| fs::read(corpora.path(&name[1..])));
        assert!(output? == whole?, "{ending} differs");
        assert_eq!(corpora.unfinished()?, [""; 0]);
    }
    Ok(())
}

#[cfg(unix)]
#[test]
fn a_terminated_run_leaves_no_incomplete_output() -> Result<()> {
    let corpora = Corpora::new()?;
    let lines = |n| fs::write(corpora.path("in.txt"), "a bad cab\n".repeat(n));
    lines(2_000_000)?; // more than the run embeds before it is terminated
    let mut child = Command::new(env!("CARGO_BIN_EXE_encodle"))
        .envs(ENVIRONMENT)
        .args(corpora.arguments(&["--input", "@in.txt", "--output", "@out.parquet"]))
        .spawn()?;
    let state = corpora.path("out.parquet.partial.json");
    while !Path::new(&state).exists() && child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
    assert!(sent.success());
    assert!(!child.wait()?.success());
    assert!(!Path::new(&corpora.path("out.parquet")).exists());
    let state: serde_json::Value = serde_json::from_slice(&fs::read(state)?)?;
    let read = state["position"]["read"].as_u64().expect("a number") as usize;
    lines(read + 5_000)?;
    corpora.embed(&["--input", "@in.txt", "--output", "@out.parquet", "--resume"]).success();
    assert_eq!(corpora.table("out.parquet")?.num_rows(), read + 5_000);
    assert_eq!(corpora.unfinished()?, [""; 0]);
    Ok(())
}

/// Runs that fail late, or whose input or settings have changed.
#[test]
fn no_record_is_lost_or_written_twice() -> Result<()> {
    let corpora = Corpora::new()?;
    let write = |name: &str, content: &str| fs::write(corpora.path(name), content);
    let (good, to) = ("{\"text\": \"a\"}\n".repeat(3000), ["--output", "@out.jsonl"]);
    let from =
        |name: &'static str, more: &[&'static str]| [&["--input", name][..], &to, more].concat();

    // Record 3001 cannot be written. After the record is corrected, its chunk is written once.
    write("in.jsonl", &format!("{good}{{\"text\": \"b\", \"embedding\": 1}}\n"))?;
    let error = corpora.error(&from("@in.jsonl", &[]));
    assert!(
        error.contains("in.jsonl, line 3001: the object already has a field \"embedding\""),
        "{error}"
    );
    write("in.jsonl", &format!("{good}{{\"text\": \"b\"}}\n"))?;
    corpora.embed(&from("@in.jsonl", &["--resume"])).success();
    assert_eq!(fs::read_to_string(corpora.path("out.jsonl"))?.lines().count(), 3001);

    // A run with another field or other options is not resumed.
    write("in.jsonl", &format!("{}[]\n", "{\"text\": \"a\", \"body\": \"b\"}\n".repeat(3000)))?;
    corpora.error(&from("@in.jsonl", &[]));
    let error = corpora.error(&from("@in.jsonl", &["--resume", "--field", "body"]));
    assert!(error.contains("belongs to a run with other settings"), "{error}");
    let error = corpora.error(&from("@in.jsonl", &["--resume", "--normalize"]));
    assert!(error.contains("belongs to a run with other settings"), "{error}");

    Ok(())
}

#[test]
fn columns_that_a_table_does_not_support_are_refused_before_the_run() -> Result<()> {
    let corpora = Corpora::new()?;
    let write = |name: &str, content: &str| fs::write(corpora.path(name), content);
    write("in.jsonl", "{\"text\": \"a\", \"meta\": {}}\n")?;
    let error = corpora.error(&["--input", "@in.jsonl", "--output", "@out.parquet"]);
    assert!(error.contains("column \"meta\" of Struct() cannot be written: "), "{error}");
    assert_eq!(corpora.unfinished()?, [""; 0]);
    Ok(())
}

/// The columns of a file are inferred from all of its records, those of standard input from its
/// first records.
#[test]
fn a_late_value_of_another_type_is_an_error_for_standard_input_only() -> Result<()> {
    let corpora = Corpora::new()?;
    let write = |name: &str, content: &str| fs::write(corpora.path(name), content);
    for (last, what) in [
        ("1.5", "field \"n\": expected Int64, got 1.5"),
        ("\"007\"", "field \"n\": expected Int64, got a string"),
    ] {
        let lines = "{\"text\": \"a\", \"n\": 1}\n".repeat(2500);
        let lines = format!("{lines}{{\"text\": \"a\", \"n\": {last}}}\n");
        let pipe = ["--input", "-", "--input-format", "jsonl", "--output", "@out.arrow"];
        let error = stderr(corpora.embed_stdin(&pipe, lines.as_bytes()).code(1));
        assert!(error.contains("line 2501: ") && error.contains(what), "{error}");
        write("in.jsonl", &lines)?;
        corpora.embed(&["--input", "@in.jsonl", "--output", "@out.arrow"]).success();
        assert_eq!(corpora.table("out.arrow")?.num_rows(), 2501);
    }

    Ok(())
}

/// A named pipe can be read only once, like standard input.
#[cfg(unix)]
#[test]
fn a_named_pipe_is_read_once() -> Result<()> {
    let corpora = Corpora::new()?;
    let pipe = corpora.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status()?.success());
    let writer = std::thread::spawn(move || fs::write(pipe, "{\"text\": \"a\"}\n".repeat(3000)));
    corpora
        .embed(&["--input", "@pipe", "--input-format", "jsonl", "--output", "@out.parquet"])
        .success();
    writer.join().expect("no panic")?;
    assert_eq!(corpora.table("out.parquet")?.num_rows(), 3000);
    Ok(())
}

/// The hub's cache stores the weights of a model as a link to a file in another folder.
#[cfg(unix)]
#[test]
fn search_loads_a_model_whose_weights_are_a_link() -> Result<()> {
    let corpora = Corpora::new()?;
    let weights = corpora.model.path().join("model.safetensors");
    fs::rename(&weights, corpora.path("blob"))?;
    std::os::unix::fs::symlink(corpora.path("blob"), &weights)?;
    fs::write(corpora.path("in.txt"), "a bad cab\nh")?;
    let (input, output) = (corpora.path("in.txt"), corpora.path("out.parquet"));
    let model = weights.to_str().unwrap();
    encodle(&["embed", "--model", model, "--input", &input, "--output", &output], b"").success();
    encodle(&["search", "--corpus", &output, "a bad cab"], b"").success();
    Ok(())
}

/// A resumed run and a search recognise every spelling of the model's path as the same model.
#[test]
fn spellings_of_a_model_path_are_one_model() -> Result<()> {
    let corpora = Corpora::new()?;
    let model = corpora.model.path().to_str().unwrap();
    let name = corpora.model.path().file_name().unwrap().to_str().unwrap();
    let spellings = [model.to_string(), format!("{model}/"), format!("{model}/../{name}")];
    // The first chunk of 2,048 records is saved before the run fails.
    let good = "{\"text\": \"a\"}\n".repeat(2500);
    fs::write(corpora.path("in.jsonl"), good + "{\"text\": 1}\n")?;
    let (input, output) = (corpora.path("in.jsonl"), corpora.path("out.parquet"));
    let args = ["--input", &input, "--output", &output, "--resume"];
    for model in &spellings {
        let error =
            stderr(encodle(&[&["embed", "--model", model][..], &args].concat(), b"").failure());
        assert!(error.contains("line 2501"), "{error}"); // not an error about settings
    }
    // Another spelling of the input's path, and the format named by an option instead of inferred
    // from the extension.
    let input = format!("{}/./in.jsonl", corpora.dir.path().display());
    let args = ["--input", &input, "--input-format", "jsonl", "--output", &output, "--resume"];
    let error = stderr(encodle(&[&["embed", "--model", model][..], &args].concat(), b"").failure());
    assert!(error.contains("line 2501"), "{error}");
    fs::write(corpora.path("in.txt"), "a")?;
    let (input, output) = (corpora.path("in.txt"), corpora.path("out.arrow"));
    encodle(&["embed", "--model", model, "--input", &input, "--output", &output], b"").success();
    for model in &spellings {
        // Without a warning that the corpus was embedded with another model.
        encodle(&["search", "--model", model, "--corpus", &output, "a"], b"").success().stderr("");
    }
    // A table without metadata does not name its model.
    let rows = corpora.table("out.arrow")?;
    let schema = Schema::new(rows.schema().fields().clone());
    let rows = RecordBatch::try_new(Arc::new(schema), rows.columns().to_vec())?;
    corpora.write_arrow("no_model.arrow", &rows)?;
    let corpus = corpora.path("no_model.arrow");
    let warning = stderr(encodle(&["search", "--corpus", &corpus, "a"], b"").success());
    assert!(
        warning.ends_with(
            "no_model.arrow does not name its model: the vectors of the queries, from \
             all-MiniLM-L6-v2, are truncated from 384 values to 24; set --model to the model that \
             embedded the corpus"
        ),
        "{warning}"
    );
    Ok(())
}

/// In every format and dtype, the hits are the rows with the largest cosines, with their records.
#[test]
fn search_finds_the_nearest_rows() -> Result<()> {
    let corpora = Corpora::new()?;
    let text = |i: usize| format!("{}cab {}", "bad ".repeat(i % 7), "abcdefgh".split_at(i % 8).0);
    let texts: Vec<String> = (0..3000).map(text).collect();
    fs::write(corpora.path("in.txt"), texts.join("\n"))?;
    let queries = ["a bad cab", "h"];
    let search = |corpus: &str, more: &[&str]| {
        let corpus = corpora.path(corpus);
        encodle(&[&["search", "--corpus", &corpus, "-k", "5"], more, &queries].concat(), b"")
    };
    let model = corpora.model.path().to_str().unwrap();
    let records = corpora.path("in.txt");
    let lines = |assert: assert_cmd::assert::Assert| -> Result<Vec<serde_json::Value>> {
        Ok(stdout(assert.success()).lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
    };
    let queried =
        stdout(encodle(&[&["embed", "--model", model], &queries[..]].concat(), b"").success());
    let queried: Vec<Vec<f32>> = queried
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            serde_json::from_value(line["embedding"].clone()).expect("numbers")
        })
        .collect();
    for name in ["npy", "parquet", "arrow", "f16.npy", "f16.parquet", "f16.arrow"] {
        let (output, half) = (format!("out.{name}"), name.starts_with("f16"));
        let to = format!("@{output}");
        let dtype = if half { "f16" } else { "f32" };
        corpora.embed(&["--input", "@in.txt", "--output", &to, "--output-dtype", dtype]).success();
        let numbers = if name.ends_with("npy") {
            npy(&corpora.path(&output), if half { 2 } else { 4 })?.1
        } else {
            vectors(&corpora.table(&output)?)
        };
        let with_records = ["--model", model, "--records", &records];
        let more = if name.ends_with("npy") { &with_records[..] } else { &[] };
        let found = lines(search(&output, more))?;
        assert_eq!((queried.len(), found.len()), (2, 2), "{name}");
        for ((query, vector), line) in queries.iter().zip(&queried).zip(found) {
            assert_eq!(line["query"], *query);
            let length = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let cosine = |row: &[f32]| {
                let dot = row.iter().zip(vector).map(|(x, y)| f64::from(*x) * f64::from(*y));
                dot.sum::<f64>() / length(row) / length(vector)
            };
            let mut all: Vec<f64> = numbers.chunks(24).map(cosine).collect();
            let hits = line["hits"].as_array().expect("hits");
            assert_eq!(hits.len(), 5);
            for hit in hits {
                let row = hit["row"].as_u64().expect("a row") as usize;
                assert!((hit["score"].as_f64().expect("a score") - all[row]).abs() < 1e-6);
                assert_eq!(hit["record"]["text"], texts[row], "{name}");
                assert!(hit["record"].get("embedding").is_none());
            }
            all.sort_by(|x, y| y.total_cmp(x));
            let scores = hits.iter().map(|hit| hit["score"].as_f64().expect("a score"));
            assert!(scores.zip(all).all(|(score, best)| (score - best).abs() < 1e-6), "{name}");
        }
    }

    // A threshold, and the table format.
    let all = lines(search("out.parquet", &[]))?;
    let score = |hit: &serde_json::Value| hit["score"].as_f64().expect("a score");
    let second = score(&all[0]["hits"][1]);
    let some = lines(search("out.parquet", &["--threshold", &second.to_string()]))?;
    for (all, some) in all.iter().zip(&some) {
        let all = all["hits"].as_array().expect("hits").iter().filter(|hit| score(hit) >= second);
        assert_eq!(
            all.collect::<Vec<_>>(),
            some["hits"].as_array().expect("hits").iter().collect::<Vec<_>>()
        );
    }
    let count = |lines: &[serde_json::Value]| -> usize {
        lines.iter().map(|line| line["hits"].as_array().expect("hits").len()).sum()
    };
    assert!((2..count(&all)).contains(&count(&some)), "{} of {}", count(&some), count(&all));
    let table = stdout(search("out.parquet", &["--format", "table"]).success());
    assert!(table.starts_with("a bad cab\n   ") && table.contains("cab"), "{table}");
    for corpus in ["out.parquet", "out.arrow"] {
        let unknown = stderr(search(corpus, &["--field", "body"]).code(1));
        let expected =
            "has no column \"body\": its columns are [\"text\"]; name the text column with --field";
        assert!(unknown.ends_with(expected), "{unknown}");
    }
    let unused = stderr(search("out.npy", &["--model", model, "--field", "text"]).code(1));
    assert!(unused.starts_with("encodle: --field needs --records, because "), "{unused}");
    let nan = stderr(search("out.parquet", &["--threshold", "nan"]).code(2));
    assert_eq!(
        nan,
        "encodle: invalid value 'nan' for '--threshold <SCORE>': expected a finite number; see \
         encodle search --help"
    );
    let bare = lines(search("out.npy", &["--model", model]))?;
    assert!(bare[0]["hits"][0].get("record").is_none());

    // Files that cannot be searched, or whose vectors do not fit the model.
    let error = |corpus: &str, more: &[&str]| stderr(search(corpus, more).code(1));
    assert!(
        error("in.txt", &[])
            .ends_with("in.txt cannot be searched: expected a .npy, .parquet or .arrow file")
    );
    assert!(error("none.npy", &[]).contains("none.npy cannot be read: No such file"));
    fs::write(corpora.path("no.parquet"), "PAR1")?;
    assert!(error("no.parquet", &[]).contains("cannot be read as Parquet"));
    fs::write(corpora.path("no.arrow"), "ARROW1")?;
    assert!(error("no.arrow", &[]).contains("cannot be read as Arrow IPC"));
    let whole = fs::read(corpora.path("out.npy"))?;
    fs::write(corpora.path("cut.npy"), &whole[..whole.len() - 1])?;
    assert!(
        error("cut.npy", &[]).contains("expected 3000 vectors of 24 f32 values, got 287999 bytes")
    );
    let mut odd = whole;
    odd[128..132].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(corpora.path("odd.npy"), odd)?;
    let odd = error("odd.npy", &["--model", model]);
    assert!(
        odd.ends_with("row 0 of the corpus contains NaN or infinity: expected finite numbers"),
        "{odd}"
    );
    let short = ["--model", model, "--records", &corpora.path("short.txt")];
    fs::write(corpora.path("short.txt"), "a\n")?;
    assert!(
        error("out.npy", &short)
            .contains("short.txt is 1: expected 3000, the number of vectors in ")
    );
    let unknown = corpora.path("notes.json");
    fs::write(&unknown, "[]")?;
    for (args, expected) in [
        (&["--records", &unknown][..], " files are not supported: expected .jsonl, "),
        (&["--records", &corpora.path("short.txt"), "--field", "body"], "which have no fields"),
    ] {
        let message = error("out.npy", &[&["--model", model], args].concat());
        assert!(message.contains(expected), "{message}");
        assert!(!message.contains("--input-format"), "{message}"); // search has no such option
    }
    fs::write(corpora.path("words.txt"), "I love AI\n")?;
    let wide = corpora.path("wide.parquet");
    encodle(&["embed", "--input", &corpora.path("words.txt"), "--output", &wide], b"").success();
    let wrong = search("wide.parquet", &["--model", model]).code(1);
    assert_eq!(
        String::from_utf8(wrong.get_output().stderr.clone())?,
        format!(
            "encodle: the corpus was embedded with the default model all-MiniLM-L6-v2, the queries are embedded with {model}\n\
             encodle: {wide} has vectors of dimension 384: expected at most 24 (the dimension of {model}); set --model to the model that embedded the corpus\n"
        )
    );
    let other = search("wide.parquet", &[]).success();
    assert_eq!(lines(other)?[0]["hits"][0]["record"]["text"], "I love AI");
    Ok(())
}
